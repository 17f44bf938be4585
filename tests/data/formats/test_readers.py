"""Every reader against files that the projects' own writers wrote (fixtures/recordings/README.md)."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.data import EpisodeSource, gather, window
from lensemble_flwr.data.formats import RecordingSpec
from lensemble_flwr.errors import ConfigError, ContractViolation, DataError
from tests.data.formats.conftest import FIXTURES, LENGTHS, Open, colour, middle, need, raw_action, write_npz

WIDE = {"action_low": [-1, -1, 0], "action_high": [1, 1, 2]}
# name -> (options, pictures beyond the actions, half of a colour step that a codec may take)
ALL = {
    "lerobot-v3": (WIDE, 0),
    "lerobot-v21": (WIDE, 0),
    "robomimic": (WIDE, 1),
    "minari/lab/box-v0": ({}, 1),
    "zarr": (WIDE, 0),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("cached", [True, False])
def test_pictures_and_actions_are_those_that_were_written(name: str, cached: bool, opened: Open) -> None:
    need(name)
    options, extra = ALL[name]
    source = opened(FIXTURES / name, cache=cached, **options)
    assert isinstance(source, EpisodeSource)
    assert source.lengths.tolist() == [n + extra for n in LENGTHS]
    for e, length in enumerate(LENGTHS):
        episode = source.episode(e)
        assert episode.frames.shape == (length + extra, 16, 16, 3)
        wanted = np.array([colour(e, t) for t in range(length + extra)])
        assert np.abs(middle(episode.frames) - wanted).max() <= 3
        recorded = np.array([raw_action(e, t) for t in range(length + extra - 1)])
        if name == "robomimic":
            recorded = recorded.clip(-1, 1)
        np.testing.assert_allclose(episode.actions, recorded - [0, 0, 1], atol=1e-6)
        source.action_spec.check(episode.actions)


@pytest.mark.parametrize("name", ALL)
def test_a_second_reading_gives_the_same_hashes_with_and_without_the_cache(name: str, opened: Open) -> None:
    need(name)
    options, _ = ALL[name]
    first, again, bare = (opened(FIXTURES / name, cache=c, **options) for c in (True, True, False))
    assert first.fingerprint == again.fingerprint == bare.fingerprint
    assert first.fingerprint == first.fingerprint


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("frameskip", [1, 3])
def test_windows_are_pieces_of_episodes(name: str, frameskip: int, opened: Open) -> None:
    need(name)
    options, _ = ALL[name]
    cached, bare = (opened(FIXTURES / name, cache=c, frameskip=frameskip, **options) for c in (True, False))
    episode = bare.episode(2)
    for start, length in itertools.product(range(len(episode)), (2, 3)):
        if start + length > len(episode.frames):
            continue
        for source in (cached, bare):
            piece = source.window(2, start, length)
            assert (piece.frames[0] == episode.frames[start : start + length]).all()
            assert (piece.actions[0] == episode.actions[start : start + length - 1]).all()
    with pytest.raises(ContractViolation):
        bare.window(2, len(episode), 2)


@pytest.mark.parametrize("name", ALL)
def test_packed_is_a_map_of_all_episodes(name: str, opened: Open) -> None:
    need(name)
    options, _ = ALL[name]
    source = opened(FIXTURES / name, **options)
    packed = source.packed()
    rows = window(packed.lengths, 4)
    batch = gather(packed, rows, 4)
    for (number, start), frames, actions in zip(rows, batch.frames, batch.actions, strict=True):
        episode = source.episode(int(number))
        assert (frames == episode.frames[start : start + 4]).all()
        assert (actions == episode.actions[start : start + 3]).all()


def test_frameskip_joins_the_actions_of_a_step(opened: Open) -> None:
    need("lerobot")
    every, third = (opened(FIXTURES / "lerobot-v3", frameskip=k, **WIDE) for k in (1, 3))
    assert third.action_spec.width == 9
    assert third.action_spec.rate_hz == pytest.approx(10 / 3)
    for e in range(3):
        fine, coarse = every.episode(e), third.episode(e)
        assert (coarse.frames == fine.frames[::3][: len(coarse) + 1]).all()
        assert (coarse.actions.reshape(-1, 3) == fine.actions[: 3 * len(coarse)]).all()


def test_choices_become_one_hot_and_several_of_them_with_frameskip(opened: Open) -> None:
    need("minari")
    source = opened(FIXTURES / "minari/lab/choice-v0")
    assert (source.action_spec.kind, source.action_spec.width) == ("discrete", 3)
    assert source.episode(0).actions.argmax(axis=1).tolist() == [t % 3 for t in range(12)]
    twice = opened(FIXTURES / "minari/lab/choice-v0", frameskip=2)
    assert twice.action_spec.sizes == (3, 3)
    twice.action_spec.check(twice.episode(0).actions)


def test_metadata_gives_body_bounds_names_and_rate(opened: Open) -> None:
    need("lerobot")
    source = opened(FIXTURES / "lerobot-v3")
    spec = source.action_spec
    assert source.embodiment == "so100"
    assert spec.names == ("shoulder", "elbow", "gripper")
    assert spec.rate_hz == 10
    np.testing.assert_allclose((spec.low, spec.high), ([-0.5, -0.99999, 0], [0.9, 0.99061, 2]), atol=1e-5)
    old = opened(FIXTURES / "lerobot-v21").action_spec
    np.testing.assert_allclose((old.low, old.high), (spec.low, spec.high), atol=1e-6)
    assert opened(FIXTURES / "lerobot-v3", body="mine").embodiment == "mine"


def test_robomimic_tells_robot_and_rate(opened: Open) -> None:
    need("robomimic")
    source = opened(FIXTURES / "robomimic")
    assert (source.embodiment, source.action_spec.rate_hz) == ("Panda", 20)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lerobot-v3", "observation.state"),
        ("lerobot-v21", "observation.state"),
        ("robomimic", "robot0_eef_pos"),
        ("minari/lab/box-v0", "pose"),
        ("zarr", "state"),
    ],
)
def test_states_belong_to_their_pictures(name: str, key: str, opened: Open) -> None:
    need(name)
    options, _ = ALL[name]
    episode = opened(FIXTURES / name, state_keys=[key], frameskip=2, **options).episode(2)
    assert episode.states is not None
    assert episode.states.tolist() == [[t, 2, 2 * t] for t in range(0, 2 * len(episode.frames), 2)]


def test_pictures_inside_the_parquet_file(opened: Open) -> None:
    need("lerobot")
    source = opened(FIXTURES / "lerobot-v3-images")
    for e, length in enumerate((4, 3)):
        assert (middle(source.episode(e).frames) == [colour(e, t) for t in range(length)]).all()
        assert (middle(source.window(e, 1, 2).frames[0]) == [colour(e, 1), colour(e, 2)]).all()


def test_a_video_is_searched_not_decoded_from_its_start(opened: Open) -> None:
    need("lerobot")
    source = opened(FIXTURES / "lerobot-v3", cache=False)
    reader = source._reader
    source.window(1, 6, 2)  # pictures 18 and 19 of a file of 21, with a keyframe every second picture
    assert reader.decoded <= 4  # type: ignore[attr-defined]


def test_episodes_may_lie_in_several_parquet_files_and_row_groups(copy, opened: Open) -> None:
    path = copy("lerobot-v3")
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    wanted = [opened(path, cache=False).episode(e).actions for e in range(3)]
    data, episodes = path / "data/chunk-000", path / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(data / "file-000.parquet")
    pq.write_table(table.slice(0, 12), data / "file-000.parquet", row_group_size=5)
    pq.write_table(table.slice(12), data / "file-001.parquet", row_group_size=4)
    rows = pq.read_table(episodes)
    rows = rows.set_column(rows.column_names.index("data/file_index"), "data/file_index", pa.array([0, 1, 1]))
    pq.write_table(rows, episodes)
    source = opened(path, cache=False)
    for e in (2, 0, 1):
        assert (source.episode(e).actions == wanted[e]).all()


def test_data_bounds_are_the_smallest_and_largest_value(opened: Open) -> None:
    need("zarr")
    source = opened(FIXTURES / "zarr", action_bounds="data")
    actions = np.concatenate([source.episode(e).actions for e in range(3)])
    assert source.action_spec.low[2] == 0
    assert source.action_spec.high[2] == 2
    assert actions.max() == 1


def test_a_lerobot_folder_of_links_needs_consent(copy, opened: Open, tmp_path: Path) -> None:
    path = copy("lerobot-v3")
    (tmp_path / "blobs").mkdir()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        target = tmp_path / "blobs" / file.name.replace(".", str(len(str(file))))
        shutil.move(file, target)
        file.symlink_to(target)
    with pytest.raises(DataError, match="link") as caught:
        opened(path)
    assert "follow_links" in caught.value.remediation
    assert len(opened(path, follow_links=True).episode(0)) == 11


# ------------------------------------------------------------------ plain folders


def test_a_folder_of_npz(opened: Open, tmp_path: Path) -> None:
    for e in range(3):
        actions = np.full((5, 2), e - 1, np.float32)
        states = np.arange(12, dtype=np.float64).reshape(6, 2)
        write_npz(tmp_path / "mine" / f"{e}.npz", e, actions=actions, pose=states)
    source = opened(tmp_path / "mine", state_keys=["pose"], max_steps=4)
    for e in range(3):
        episode = source.episode(e)
        assert (middle(episode.frames) == [colour(e, t) for t in range(5)]).all()
        assert (episode.actions == e - 1).all()
        assert episode.states is not None
        assert episode.states[-1].tolist() == [8, 9]


def test_a_folder_of_npz_may_be_compressed_and_name_cameras_and_choices(opened: Open, tmp_path: Path) -> None:
    frames = np.full((4, 16, 16, 3), 9, np.uint8)
    (tmp_path / "mine").mkdir()
    both = {"wrist": frames, "top": frames + 1, "depth": frames[..., 0].astype(np.uint16)}
    np.savez_compressed(tmp_path / "mine" / "a.npz", actions=np.array([0, 2, 1]), **both)
    meta = {"fps": 5, "body": "arm", "actions": "discrete", "choices": 3}
    (tmp_path / "mine" / "recordings.json").write_text(json.dumps(meta))
    source = opened(tmp_path / "mine", camera="wrist")
    assert (source.embodiment, source.action_spec.kind, source.action_spec.rate_hz) == ("arm", "discrete", 5)
    assert source.episode(0).actions.argmax(axis=1).tolist() == [0, 2, 1]
    assert source.episode(0).frames.max() == 9
    assert opened(tmp_path / "mine").episode(0).frames.max() == 10  # "top" comes first
    with pytest.raises(DataError, match="depth"):
        opened(tmp_path / "mine", camera="depth")


def make_csv_folder(tmp_path: Path) -> Path:
    need("lerobot")
    folder = tmp_path / "mine"
    folder.mkdir()
    for e, length in enumerate(LENGTHS):
        video = f"videos/chunk-000/observation.images.top/episode_{e:06d}.mp4"
        shutil.copy(FIXTURES / "lerobot-v21" / video, folder / f"run{e}.mp4")
        lines = ["timestamp,action_0,action_1,action_2,state_x"]
        for t in range(length):
            lines.append(",".join(str(v) for v in (t / 10, *raw_action(e, t), t)))
        (folder / f"run{e}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_folder_of_mp4_and_csv(opened: Open, tmp_path: Path) -> None:
    source = opened(make_csv_folder(tmp_path), state_keys=["states"], **WIDE)
    for e, length in enumerate(LENGTHS):
        episode = source.episode(e)
        assert np.abs(middle(episode.frames) - [colour(e, t) for t in range(length)]).max() <= 3
        np.testing.assert_allclose(
            episode.actions, [raw_action(e, t) - [0, 0, 1] for t in range(length - 1)], atol=1e-6
        )
        assert episode.states is not None
        assert episode.states.ravel().tolist() == list(range(length))
    assert (source.window(2, 9, 2).frames[0] == source.episode(2).frames[9:11]).all()


# ------------------------------------------------------------------ the description


@pytest.mark.parametrize(
    "values",
    [
        {"frameskip": 0},
        {"frameskip": True},
        {"frameskip": 1.5},
        {"image_size": 4},
        {"format": "tfds"},
        {"fit": "none"},
        {"crop": [0, 0, 3]},
        {"crop": [0, 0, 0, 4]},
        {"action_low": -1},
        {"action_low": [0, float("nan")], "action_high": [1, 1]},
        {"camera": 3},
        {"state_keys": [1]},
        {"frameskips": 1},
        {"body": "é"},
        {"cache_gb": float("inf")},
    ],
)
def test_a_wrong_description_is_refused(values: dict) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        RecordingSpec.from_dict(values)
    assert caught.value.remediation


def test_a_description_survives_plain_values() -> None:
    spec = RecordingSpec.from_dict({"action_low": -1, "action_high": 2, "state_keys": "pose", "crop": [0, 1, 2, 3]})
    assert spec.action_high == (2.0,)
    assert RecordingSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, opened: Open) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError) as caught:
        opened(FIXTURES / "lerobot-v3")
    assert "lensemble-flwr[lerobot]" in caught.value.remediation
