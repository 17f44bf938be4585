"""Damaged and hostile recordings: a DataError that says which episode and what to do, and nothing else happens."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.data.formats import RecordingSpec, open_recordings
from lensemble_flwr.data.formats.pictures import MAX_PIXELS, decode_image, square
from lensemble_flwr.errors import DataError
from tests.data.formats.conftest import FIXTURES, Open, need, write_npz
from tests.data.formats.test_readers import WIDE, make_csv_folder

Copy = Callable[[str], Path]


def problem(make: Callable[[], Any], pattern: str, episode: str | None = None) -> DataError:
    """The DataError of reading everything; checks its text, its remedy and the episode it names."""
    with pytest.raises(DataError) as caught:
        _read(make())
    assert re.search(pattern, caught.value.message), caught.value.message
    assert caught.value.remediation
    if episode is not None:
        assert caught.value.message.startswith(f"{episode}: ")
        assert caught.value.episode == episode  # type: ignore[attr-defined]
    return caught.value


def _read(source: Any) -> None:
    for index in range(len(source)):
        source.episode(index)


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


def edit_parquet(path: Path, change: Callable[[Any], Any]) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(change(pq.read_table(path)), path)


def set_column(table: Any, name: str, values: Any) -> Any:
    import pyarrow as pa

    return table.set_column(table.column_names.index(name), name, pa.array(values))


V3_DATA, V3_EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
V3_VIDEO = "videos/observation.images.top/chunk-000/file-001.mp4"


def cut(path: Path, keep: float = 0.6) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])


# ------------------------------------------------------------------ LeRobot


@pytest.mark.parametrize("file", [V3_DATA, V3_EPISODES, "meta/info.json"])
@pytest.mark.parametrize("keep", [0.0, 0.6, 0.99])
def test_a_cut_file_is_refused(file: str, keep: float, copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    cut(path / file, keep)
    problem(lambda: opened(path), "parquet|JSON|damaged|cut")


def test_a_missing_video_names_its_episode(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    (path / V3_VIDEO).unlink()
    problem(lambda: opened(path), "file-001.mp4 cannot be read", "episode 2")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_a_cut_video_names_its_episode(keep: float, copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    cut(path / V3_VIDEO, keep)
    problem(lambda: opened(path), "file-001.mp4", "episode 2")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_action_that_is_not_finite(value: float, copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")

    def change(table: Any) -> Any:
        actions = table["action"].to_pylist()
        actions[14][1] = value
        return set_column(table, "action", actions)

    edit_parquet(path / V3_DATA, change)
    problem(lambda: opened(path), "step 2 is not finite", "episode 1")


def test_a_wrong_rate(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_json(path / "meta/info.json", fps=30)
    problem(lambda: opened(path), "timestamps say 10 fps, the metadata 30")


@pytest.mark.parametrize("fps", [0, -1, "10", None, True, float("nan")])
def test_an_impossible_rate(fps: Any, copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_json(path / "meta/info.json", fps=fps)
    problem(lambda: opened(path), "fps=")


def test_time_that_goes_back(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")

    def change(table: Any) -> Any:
        times = table["timestamp"].to_pylist()
        times[15], times[16] = times[16], times[15]
        return set_column(table, "timestamp", times)

    edit_parquet(path / V3_DATA, change)
    problem(lambda: opened(path), "time does not grow after step 3", "episode 1")


def test_ragged_and_mixed_actions(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")

    def ragged(table: Any) -> Any:
        actions = table["action"].to_pylist()
        actions[30] = actions[30][:2]
        return set_column(table, "action", actions)

    edit_parquet(path / V3_DATA, ragged)
    problem(lambda: opened(path), "rows differ in length", "episode 2")


def test_another_number_of_entries_in_one_episode(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v21")
    file = path / "data/chunk-000/episode_000001.parquet"
    edit_parquet(file, lambda t: set_column(t, "action", [a[:2] for a in t["action"].to_pylist()]))
    problem(lambda: opened(path), "2 entries, other episodes 3", "episode 1")


def test_a_duplicate_episode(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_parquet(path / V3_EPISODES, lambda t: set_column(t, "episode_index", [0, 1, 1]))
    problem(lambda: opened(path), "episode 1 is listed twice")


def test_no_episodes(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_parquet(path / V3_EPISODES, lambda t: t.slice(0, 0))
    edit_json(path / "meta/info.json", total_episodes=0)
    problem(lambda: opened(path), "has no episodes")


def test_metadata_that_points_at_other_rows(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_parquet(path / V3_EPISODES, lambda t: set_column(t, "dataset_from_index", [0, 11, 21]))
    problem(lambda: opened(path), "rows of another episode", "episode 1")


@pytest.mark.parametrize("start", [-5.0, 1e9, float("nan")])
def test_a_video_that_starts_nowhere(start: float, copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    column = "videos/observation.images.top/from_timestamp"
    edit_parquet(path / V3_EPISODES, lambda t: set_column(t, column, [0.0, start, 0.0]))
    problem(lambda: opened(path), "video starts|pictures", "episode 1")


@pytest.mark.parametrize(
    "template",
    [
        "../outside/{episode_index:06d}.parquet",
        "/etc/passwd",
        "data/{chunk_index.__class__}.parquet",
        "data/{0}.parquet",
        "{secret}",
        "data/{chunk_index:999d}.parquet",
        "",
        7,
    ],
)
def test_a_path_in_the_metadata_stays_inside(template: Any, copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_json(path / "meta/info.json", data_path=template)
    problem(lambda: opened(path), "outside|template|damaged|cannot be read|ordinary")


def test_a_link_out_of_the_folder_and_a_pipe(copy: Copy, opened: Open, tmp_path: Path) -> None:
    path = copy("lerobot-v3")
    shutil.move(path / V3_DATA, tmp_path / "secret")
    (path / V3_DATA).symlink_to(tmp_path / "secret")
    problem(lambda: opened(path), "link")
    (path / V3_DATA).unlink()
    os.mkfifo(path / V3_DATA)
    problem(lambda: opened(path), "ordinary file")


def test_a_list_of_files_is_no_video(copy: Copy, opened: Open) -> None:
    """FFmpeg would open what such a list names, were the demuxer not fixed."""
    path = copy("lerobot-v3")
    (path / V3_VIDEO).write_text("ffconcat version 1.0\nfile file-000.mp4\n")
    problem(lambda: opened(path), "no video that can be read", "episode 2")


def test_depth_and_missing_cameras(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    info = json.loads((path / "meta/info.json").read_text())
    feature = info["features"].pop("observation.images.top")
    feature["info"]["video.is_depth_map"] = True
    edit_json(path / "meta/info.json", features={**info["features"], "observation.images.top": feature})
    problem(lambda: opened(path), "no colour camera")
    problem(lambda: opened(path, camera="top"), "no camera|no colour")


def test_versions_that_are_not_read(copy: Copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    edit_json(path / "meta/info.json", codebase_version="v1.6")
    problem(lambda: opened(path), "v1.6")


# ------------------------------------------------------------------ HDF5


def robomimic(copy: Copy) -> tuple[Path, Any]:
    path = copy("robomimic")
    h5py = pytest.importorskip("h5py")
    return path, h5py.File(path / "demo.hdf5", "r+")


def replace(group: Any, name: str, values: Any) -> None:
    del group[name]
    group[name] = values


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_cut_hdf5_file(keep: float, copy: Copy, opened: Open) -> None:
    path = copy("robomimic")
    cut(path / "demo.hdf5", keep)
    problem(lambda: opened(path), "demo.hdf5")


def test_hdf5_numbers_that_cannot_be_used(copy: Copy, opened: Open) -> None:
    path, file = robomimic(copy)
    with file:
        file["data/demo_1/actions"][3, 0] = np.nan
    problem(lambda: opened(path, **WIDE), "step 3 is not finite", "demo_1")
    with _reopen(path) as file:
        replace(file["data/demo_1"], "actions", np.zeros((9, 4)))
    problem(lambda: opened(path, **WIDE), "4 entries, other episodes 3", "demo_1")
    with _reopen(path) as file:
        replace(file["data/demo_1"], "actions", np.zeros((5, 3)))
    problem(lambda: opened(path, **WIDE), "5 actions and 10 pictures", "demo_1")


def _reopen(path: Path) -> Any:
    """The file to change again: a new one of the same content, since a reader may still hold the old one open."""
    import h5py

    raw = (path / "demo.hdf5").read_bytes()
    (path / "demo.hdf5").unlink()
    (path / "demo.hdf5").write_bytes(raw)
    return h5py.File(path / "demo.hdf5", "r+")


def test_hdf5_depth_and_huge_pictures(copy: Copy, opened: Open) -> None:
    path, file = robomimic(copy)
    with file:
        for demo in file["data"].values():
            del demo["next_obs"]
            demo["obs/depth"] = np.zeros((demo["actions"].shape[0], 8, 8, 1), np.uint16)
        del file["data/demo_2/obs/agentview_image"]
        big = (file["data/demo_2/actions"].shape[0], 60_000, 60_000, 3)
        file["data/demo_2/obs"].create_dataset("agentview_image", big, np.uint8, chunks=(1, 100, 100, 3))
    problem(lambda: opened(path, camera="depth"), "no colour pictures")
    problem(lambda: opened(path), "60000x60000", "demo_2")


def test_hdf5_sizes_are_known_before_anything_is_read(copy: Copy, opened: Open) -> None:
    path, file = robomimic(copy)
    with file:
        name = next(n for n in file["data/demo_1/obs"] if file[f"data/demo_1/obs/{n}"].ndim == 2)
        rows, kept = file[f"data/demo_1/obs/{name}"].shape[0], file["data/demo_2/next_obs/agentview_image"][()]
        del file[f"data/demo_1/obs/{name}"], file["data/demo_2/next_obs/agentview_image"]
        file["data/demo_1/obs"].create_dataset(name, (rows, 1 << 34), np.float64, chunks=(1, 1 << 16))
        file["data/demo_2/next_obs/agentview_image"] = np.repeat(kept[:1], 2, axis=1)
    source = opened(path, state_keys=name)
    with pytest.raises(DataError, match="has shape"):
        source.episode(1)
    with pytest.raises(DataError, match="another shape"):
        source.episode(2)


@pytest.mark.parametrize("n", [10**12, [10**6, 10**6], 0, -3])
def test_a_minari_space_of_more_choices_than_fit(n: Any) -> None:
    from lensemble_flwr.data.formats.hdf5 import _space

    with pytest.raises(DataError, match="not understood"):
        _space(json.dumps({"type": "MultiBinary", "n": n}))


def test_a_long_run_of_one_value_is_as_large_as_what_it_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from lensemble_flwr.data.formats import lerobot

    monkeypatch.setattr(lerobot, "MAX_GROUP", 1 << 18)
    pq.write_table(pa.table({"action": np.zeros(1 << 16)}), tmp_path / "long.parquet")
    file = pq.ParquetFile(tmp_path / "long.parquet")
    assert file.metadata.row_group(0).total_byte_size < 1 << 12
    with pytest.raises(DataError, match="row group"):
        lerobot.LeRobot._check_groups(file, "long.parquet", [0], ["action"])


def test_one_long_text_that_many_rows_point_at(tmp_path: Path) -> None:
    """A dictionary holds it once; decoded it would be there for each row."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from lensemble_flwr.data.formats import lerobot

    long = pa.array(["x" * 100_000] * 1000).dictionary_encode()
    pictures = pa.array([{"bytes": b"y" * 100_000, "path": None}] * 1000)
    columns = {"observation.state": long, "observation.images.top": pictures, "other": pictures}
    columns["half"] = pa.array(np.zeros(1000, np.float16))
    pq.write_table(pa.table(columns), tmp_path / "long.parquet", compression="zstd")
    file = pq.ParquetFile(tmp_path / "long.parquet")
    assert file.metadata.row_group(0).total_byte_size < 1_000_000
    with pytest.raises(DataError, match="holds no numbers"):
        lerobot.LeRobot._check_groups(file, "long.parquet", [0], ["observation.state"], numbers=True)
    lerobot.LeRobot._check_groups(file, "long.parquet", [0], ["half"], numbers=True)
    largest = lerobot.LeRobot._check_groups(file, "long.parquet", [0], ["observation.images.top"])
    assert 100_000 <= largest < 1_000_000, "so a batch of MAX_GROUP / largest rows fits"


def test_hdf5_links_objects_and_values_in_other_files(copy: Copy, opened: Open, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "raw").write_bytes(b"\0" * 12 * 3 * 4)
    outside = tmp_path / "outside.hdf5"
    with h5py.File(outside, "w") as other:
        other["actions"] = np.zeros((12, 3))
        other.create_group("data")
    layout = h5py.VirtualLayout((12, 3), np.float64)
    layout[:] = h5py.VirtualSource(str(outside), "actions", (12, 3))
    changes: list[tuple[Callable[[Any], Any], str]] = [
        (lambda g: g.__setitem__("actions", h5py.ExternalLink(str(outside), "/actions")), "is a link"),
        (lambda g: g.__setitem__("actions", h5py.SoftLink("/data/demo_1/actions")), "is a link"),
        (lambda g: g.create_virtual_dataset("actions", layout), "other files"),
        (
            lambda g: g.create_dataset("actions", (12, 3), np.float32, external=[(str(tmp_path / "raw"), 0, 144)]),
            "other files",
        ),
        (lambda g: g.create_dataset("actions", (12,), h5py.string_dtype()), "objects"),
    ]
    path = copy("robomimic")
    for change, pattern in changes:
        with _reopen(path) as file:
            del file["data/demo_0/actions"]
            change(file["data/demo_0"])
        problem(lambda: opened(path, **WIDE), pattern)
    with _reopen(path) as file:
        del file["data"]
        file["data"] = h5py.ExternalLink(str(outside), "/data")
    problem(lambda: opened(path), "link")


def test_an_hdf5_file_without_episodes(opened: Open, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    for name, pattern in (("a", "is empty"), ("b", "no episodes"), ("c", "neither")):
        with h5py.File(tmp_path / f"{name}.hdf5", "w") as file:
            if name == "b":
                file.create_group("data")
            if name == "c":
                file["numbers"] = [1]
        problem(lambda name=name: opened(tmp_path / f"{name}.hdf5"), pattern)  # type: ignore[misc]


# ------------------------------------------------------------------ zarr


def zarr(copy: Copy) -> Path:
    return copy("zarr") / "replay.zarr"


@pytest.mark.parametrize(
    ("file", "changes", "pattern"),
    [
        ("data/action/.zarray", {"dtype": "|O"}, "not numbers"),
        ("data/action/.zarray", {"compressor": {"id": "pickle"}}, "packed with 'pickle'"),
        ("data/action/.zarray", {"filters": [{"id": "pickle"}]}, "not read here"),
        ("data/action/.zarray", {"chunks": [1 << 40, 3]}, "256 MiB"),
        ("data/action/.zarray", {"shape": [10, 3]}, "36 are needed"),
        ("data/action/.zarray", {"chunks": [16, 4]}, "another size|cut"),
        ("data/img/.zarray", {"shape": [36, 1 << 20, 1 << 20, 3]}, "megapixels"),
        ("data/img/.zarray", {"shape": "abc"}, "no zarr array"),
        ("data/img/.zarray", {"zarr_format": 3}, "not read here"),
    ],
)
def test_a_description_of_an_array_that_cannot_be_meant(
    file: str, changes: dict, pattern: str, copy: Copy, opened: Open
) -> None:
    path = zarr(copy)
    edit_json(path / file, **changes)
    problem(lambda: opened(path, **WIDE), pattern)


@pytest.mark.parametrize("where", [0, 8, 30])
def test_a_damaged_chunk_names_its_episode(where: int, copy: Copy, opened: Open) -> None:
    path = zarr(copy)
    chunk = path / "data/img/4.0.0.0"
    raw = bytearray(chunk.read_bytes())
    raw[where : where + 4] = b"\xff\xff\xff\x7f"
    chunk.write_bytes(raw)
    problem(lambda: opened(path, **WIDE), "chunk data/img/4.0.0.0", "episode 2")
    cut(chunk)
    problem(lambda: opened(path, **WIDE), "chunk data/img/4.0.0.0", "episode 2")


def test_a_zlib_bomb_stays_small(copy: Copy, opened: Open) -> None:
    path = zarr(copy)
    edit_json(path / "data/action/.zarray", compressor={"id": "zlib", "level": 1})
    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    (path / "data/action/0.0").write_bytes(bomb)
    problem(lambda: opened(path, **WIDE), "another size")


def test_ends_of_episodes_that_go_back(copy: Copy, opened: Open) -> None:
    path = zarr(copy)
    ends = path / "meta/episode_ends"
    edit_json(ends / ".zarray", compressor=None)
    (ends / "0").write_bytes(np.array([12, 5, 36], "<i8").tobytes())
    problem(lambda: opened(path, **WIDE), "does not grow")
    (ends / "0").write_bytes(np.array([12, 13, 36], "<i8").tobytes())
    problem(lambda: opened(path, **WIDE), "no trajectory", "episode 1")
    (ends / "0").write_bytes(np.array([12, 13, 99], "<i8").tobytes())
    problem(lambda: opened(path, **WIDE), "99 are needed")


# ------------------------------------------------------------------ plain folders


class _Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/lensemble-must-not-exist",))


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def test_pickles_in_npz_are_never_loaded(opened: Open, tmp_path: Path) -> None:
    evil = np.empty(6, object)
    evil[:] = [_Evil() for _ in range(6)]
    write_npz(tmp_path / "mine/a.npz", actions=evil)
    problem(lambda: opened(tmp_path / "mine"), "Python objects")
    with zipfile.ZipFile(tmp_path / "mine/a.npz", "w") as archive:
        archive.writestr("actions.npy", pickle.dumps(_Evil()))
        archive.writestr(
            "frames.npy", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (6, 8, 8, 3)}", b"\0" * 1152)
        )
    problem(lambda: opened(tmp_path / "mine"), "no array")
    assert not Path("/tmp/lensemble-must-not-exist").exists()  # noqa: S108


def test_a_zip_bomb_is_refused_from_its_header(opened: Open, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "mine/a.npz")
    for shape, body in (((6, 50_000, 50_000, 3), b""), ((6, 24, 32, 3), b"\0" * (1 << 20)), ((1 << 40, 8, 8, 3), b"")):
        good = np.load(path)["actions"] if zipfile.is_zipfile(path) else np.zeros((5, 2), np.float32)
        with zipfile.ZipFile(tmp_path / "mine/b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}"
            archive.writestr("frames.npy", npy(header, body))
            buffer = io.BytesIO()
            np.save(buffer, good)
            archive.writestr("actions.npy", buffer.getvalue())
        problem(lambda: opened(tmp_path / "mine"), "not as large as it says|megapixels", "b.npz")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"actions": np.full((5, 2), np.nan)}, "not finite"),
        ({"actions": np.full((5, 2), 2.0)}, "outside -1..1"),
        ({"actions": np.zeros((5, 3))}, "3 entries, other episodes 2"),
        ({"actions": np.zeros((3, 2))}, "3 actions and 6 pictures"),
        ({"actions": None}, "no array 'actions'"),
        ({"frames": None}, "no array 'frames'"),
        ({"frames": np.zeros((6, 8, 8), np.uint16)}, "shape"),
        ({"frames": np.zeros((6, 8, 8, 1), np.uint16)}, "depth"),
        ({"frames": np.zeros((6, 8, 8, 7), np.uint8)}, "shape"),
        ({"frames": np.full((6, 8, 8, 3), 900.0)}, "'white'|values reach"),
        ({"frames": np.full((6, 8, 8, 3), np.nan)}, "values reach"),
        ({"frames": np.zeros((0, 8, 8, 3), np.uint8), "actions": np.zeros((0, 2))}, "no trajectory"),
        ({"timestamps": np.arange(6)[::-1]}, "time does not grow"),
        ({"timestamps": np.arange(5)}, "5 timestamps"),
        ({"timestamps": np.full(6, np.nan)}, "timestamp is not finite"),
    ],
)
def test_an_npz_episode_that_cannot_be_used(changes: dict, pattern: str, opened: Open, tmp_path: Path) -> None:
    write_npz(tmp_path / "mine/a.npz")
    write_npz(tmp_path / "mine/b.npz", **changes)
    problem(lambda: opened(tmp_path / "mine"), pattern, "b.npz")


def test_a_csv_episode_that_cannot_be_used(opened: Open, tmp_path: Path) -> None:
    folder = make_csv_folder(tmp_path)
    good = (folder / "run1.csv").read_text()
    lines = good.splitlines()
    for text, pattern in (
        ("\n".join([*lines[:4], "0.3,x,0,0,0", *lines[5:]]), "row 4: could not convert"),
        ("\n".join([*lines[:4], "0.3,0,0,0", *lines[5:]]), "row 4 has 4 entries"),
        ("\n".join([*lines[:4], "0.3,nan,0,0,0", *lines[5:]]), "step 3 is not finite"),
        ("\n".join(lines[:-3]), "6 actions and 9 pictures"),
        ("\n".join([lines[0], *lines[2:], lines[1]]), "time does not grow"),
        ("time,a\n" + "0,0\n" * 9, "no column of 'actions'"),
        (lines[0] + "\n", "0 rows"),
        ("a,a\n" + "1,2\n" * 9, "a name twice"),
        ("action_0\n" + "1" * 100_000, "longer than|limit"),
        ("action_0\n\udcff", "UTF-8|no csv"),
    ):
        (folder / "run1.csv").write_text(text, errors="surrogateescape")
        problem(lambda: opened(folder, **WIDE), pattern)
    (folder / "run1.csv").write_text(good)
    (folder / "run1.mp4").unlink()
    problem(lambda: opened(folder, **WIDE), "video of run1.csv is missing", "run1.csv")


@pytest.mark.parametrize(
    "meta",
    ["[]", "{", '{"fps": 0}', '{"speed": 1}', '{"actions": "discrete"}', '{"action_low": [0]}', '{"actions": "x"}'],
)
def test_a_wrong_recordings_json(meta: str, opened: Open, tmp_path: Path) -> None:
    write_npz(tmp_path / "mine/a.npz")
    (tmp_path / "mine/recordings.json").write_text(meta)
    problem(lambda: opened(tmp_path / "mine"), "recordings.json")


def test_nothing_there_and_too_much_there(opened: Open, tmp_path: Path) -> None:
    problem(lambda: opened(tmp_path / "nowhere"), "there are no recordings")
    (tmp_path / "empty").mkdir()
    problem(lambda: opened(tmp_path / "empty"), "no recordings of a known format")
    write_npz(tmp_path / "mine/a.npz")
    problem(lambda: opened(tmp_path / "mine", format="lerobot"), "is folder, not lerobot")
    (tmp_path / "two").mkdir()
    for name in "ab":
        (tmp_path / "two" / f"{name}.hdf5").write_bytes(b"")
    problem(lambda: opened(tmp_path / "two"), "2 data sets")


# ------------------------------------------------------------------ bad episodes are skipped if asked for


def test_skip_leaves_bad_episodes_out_and_tells_the_log_only(copy: Copy, tmp_path: Path) -> None:
    path = copy("lerobot-v3")
    (path / V3_VIDEO).unlink()
    told: list[str] = []
    spec = RecordingSpec(image_size=16, on_bad_episode="skip")
    source = open_recordings(path, spec, cache_dir=tmp_path / "frames", log=told.append)
    assert len(source) == 2
    assert [source.label(i) for i in range(2)] == ["episode 0", "episode 1"]
    assert len(told) == 1
    assert told[0].startswith("skipped episode 2: ")
    assert len(source.packed().lengths) == 2
    # The check is remembered: a second opening decodes nothing.
    again = open_recordings(path, spec, cache_dir=tmp_path / "frames", log=told.append)
    assert again._reader.decoded == 0  # type: ignore[attr-defined]
    assert again.bad == source.bad
    with pytest.warns(UserWarning, match="skipped episode 2"):
        open_recordings(path, spec, cache_dir=tmp_path / "frames")


def test_skip_notices_that_a_file_came_back(copy: Copy, tmp_path: Path) -> None:
    path = copy("lerobot-v3")
    shutil.move(path / V3_VIDEO, tmp_path / "kept.mp4")
    spec = RecordingSpec(image_size=16, on_bad_episode="skip")
    with pytest.warns(UserWarning, match="skipped"):
        assert len(open_recordings(path, spec, cache_dir=tmp_path / "frames")) == 2
    shutil.move(tmp_path / "kept.mp4", path / V3_VIDEO)
    assert len(open_recordings(path, spec, cache_dir=tmp_path / "frames")) == 3


def test_skip_with_nothing_left_is_an_error(opened: Open, tmp_path: Path) -> None:
    write_npz(tmp_path / "mine/a.npz", actions=np.full((5, 2), 3.0))
    with pytest.raises(DataError, match=r"none of 1 episodes .* a.npz"), pytest.warns(UserWarning, match="skipped"):
        opened(tmp_path / "mine", on_bad_episode="skip")


# ------------------------------------------------------------------ pictures


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_pictures_become_square(fit: str) -> None:
    wide = np.zeros((20, 40, 3), np.uint8)
    wide[:, 10:30] = (10, 20, 30)
    out = square(wide, RecordingSpec(image_size=20, fit=fit))
    assert out.shape == (20, 20, 3)
    assert out[10, 10].tolist() == [10, 20, 30]
    assert out[10, 0].tolist() == ([10, 20, 30] if fit == "crop" else [0, 0, 0])
    assert square(wide, RecordingSpec(image_size=20, colour="bgr"))[10, 10].tolist() == [30, 20, 10]
    cropped = square(wide, RecordingSpec(image_size=20, crop=(0, 10, 20, 20)))
    assert (cropped == (10, 20, 30)).all()
    with pytest.raises(DataError, match="leaves a picture"):
        square(wide, RecordingSpec(image_size=20, crop=(0, 30, 20, 20)))


def test_numbers_up_to_white_become_bytes() -> None:
    grey = np.full((16, 16, 3), 0.5, np.float32)
    assert (square(grey, RecordingSpec(image_size=16, white=1.0)) == 128).all()
    assert (square(np.full((16, 16, 4), 65535, np.uint16), RecordingSpec(image_size=16, white=65535.0)) == 255).all()
    assert (square(np.full((16, 16), 9, np.uint8), RecordingSpec(image_size=16)) == 9).all()


def test_an_encoded_picture_is_measured_before_it_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", side, side) + b"\x08\x02\0\0\0"
    jpeg = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08" + struct.pack(">HH", 60_000, 60_000) + b"\x03"
    for raw in (png, jpeg):
        with pytest.raises(DataError, match="megapixels"):
            decode_image(raw)
    for raw in (b"", b"\xff\xd8", png[:20], b"GIF89a", png[:16] + struct.pack(">II", 4, 4) + b"\x08\x02\0\0\0junk"):
        with pytest.raises(DataError):
            decode_image(raw)


def test_the_fixtures_are_untouched() -> None:
    need("zarr")
    assert (FIXTURES / "zarr/replay.zarr/data/img/4.0.0.0").stat().st_size == 150
