"""Pictures that are read when a batch needs them are those that would be in memory."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data.formats import RecordingSpec, open_recordings
from lensemble_flwr.data.formats import cache as frame_cache
from lensemble_flwr.data.formats.recordings import Recordings
from lensemble_flwr.data.windowed import StoredPictures, windowed
from lensemble_flwr.errors import ContractViolation, DataError

LENGTHS = (5, 9, 2, 7)


@pytest.fixture(scope="module")
def folder() -> Path:
    with tempfile.TemporaryDirectory() as name:
        rng = np.random.default_rng(0)
        for number, length in enumerate(LENGTHS):
            frames = rng.integers(0, 256, (length, 16, 16, 3), np.uint8)
            np.savez(Path(name) / f"{number}.npz", frames=frames, actions=rng.uniform(-1, 1, (length - 1, 2)))
        yield Path(name)


def opened(folder: Path, gigabytes: float) -> Recordings:
    """With a frame cache of that size, shared by the tests of a folder; 0: without one."""
    spec = RecordingSpec(image_size=16, cache=gigabytes > 0, cache_gb=gigabytes or 1.0)
    return open_recordings(folder, spec, cache_dir=folder / f"cache-{gigabytes}")


@settings(max_examples=30, deadline=None)
@given(data=st.data(), gigabytes=st.sampled_from([0.0, 1.2e-5, 1.0]))
def test_any_rows_of_any_episodes(folder: Path, gigabytes: float, data: st.DataObject) -> None:
    source = opened(folder, gigabytes)
    kept = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    pictures = StoredPictures(source, kept)
    whole = np.concatenate([source.episode(i).frames for i in kept])
    assert len(pictures) == len(whole)
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12)), np.int64)
    np.testing.assert_array_equal(pictures.read(rows), whole[rows])
    np.testing.assert_array_equal(pictures.read(np.arange(len(whole))), whole)


def test_labels_come_without_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(folder, 0.0)
    wanted = source.episode(1).actions
    monkeypatch.setattr(source, "_squares", lambda *_: pytest.fail("decoded"))
    actions, states = source.labels(1)
    np.testing.assert_array_equal(actions, wanted)
    assert states is None


def test_a_window_decodes_no_more_than_itself_without_the_cache(folder: Path) -> None:
    for gigabytes in (0.0, 1e-9):  # off, and too small for one episode
        source, decoded = opened(folder, gigabytes), []
        inner = source._squares
        source._squares = lambda n, rows, inner=inner, decoded=decoded: decoded.extend(rows) or inner(n, rows)  # type: ignore[method-assign]
        source.window(1, 3, 2)
        StoredPictures(source, [1]).read(np.array([6, 7]))
        assert [int(row) for row in decoded] == [3, 4, 6, 7]


def test_another_process_opens_the_files_itself_and_finds_out_when_they_changed(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.npz"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = open_recordings(tmp_path, RecordingSpec(image_size=16), cache_dir=tmp_path.parent / f"{tmp_path.name}-c")
    pictures = StoredPictures(source, [2, 0])
    sent = pickle.dumps(pictures)
    assert len(sent) < 5000
    np.testing.assert_array_equal(pickle.loads(sent).read(np.arange(7)), pictures.read(np.arange(7)))  # noqa: S301
    (tmp_path / "0.npz").write_bytes((tmp_path / "1.npz").read_bytes())
    with pytest.raises(DataError, match="changed"):
        pickle.loads(sent)  # noqa: S301


def test_what_was_read_does_not_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_cache, "_RESIDENT", 1)  # let go at every use
    source = opened(folder, 1.0)
    first = source.episode(0).frames
    before = first.copy()
    source.episode(1)
    np.testing.assert_array_equal(first, before)  # who still holds a part gets it again


def test_what_is_not_there(folder: Path) -> None:
    source = opened(folder, 0.0)
    pictures = StoredPictures(source, [0])
    for rows in ([5], [-1]):
        with pytest.raises(ContractViolation):
            pictures.read(np.array(rows))
    with pytest.raises(ContractViolation):
        source.read(0, 4, np.empty((2, 16, 16, 3), np.uint8))
    with pytest.raises(DataError):
        StoredPictures(source, [])
    assert windowed(source) is source
