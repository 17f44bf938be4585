"""Frameskip, bounds and lengths of any recording, over a reader that is only arrays."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data.formats.reader import ActionColumn, Raw, check_clock, numbers
from lensemble_flwr.data.formats.recordings import Recordings
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.errors import DataError


class ArrayReader:
    """Picture t of an episode is grey t; action t is t in its first entry."""

    format, body, fps, camera, cameras, columns = "arrays", "arm", 30.0, "top", ("top",), ()

    def __init__(self, path: Path, actions: list[int], extra: int) -> None:
        self.path, self._actions, self._extra = path, actions, extra
        self.action = ActionColumn(low=np.array([0.0, -1.0]), high=np.array([200.0, -1.0]))

    def __len__(self) -> int:
        return len(self._actions)

    def label(self, index: int) -> str:
        return f"number {index}"

    def size(self, index: int) -> tuple[int, int]:
        return self._actions[index], self._actions[index] + self._extra

    def load(self, index: int) -> Raw:
        n = self._actions[index]
        return Raw(np.stack([np.arange(n), np.full(n, -1)], axis=1), n + self._extra)

    def frames(self, index: int, rows: np.ndarray) -> Iterator[np.ndarray]:
        assert (rows < self._actions[index] + self._extra).all()
        for row in rows:
            yield np.full((12, 9, 3), row, np.uint8)

    def files(self) -> Iterator[Path]:
        yield from ()


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(20, 120), min_size=1, max_size=4),
    extra=st.integers(0, 1),
    frameskip=st.integers(1, 15),
    max_steps=st.none() | st.integers(1, 30),
    cache=st.booleans(),
)
def test_the_actions_of_a_step_are_those_between_its_pictures(
    lengths: list[int], extra: int, frameskip: int, max_steps: int | None, cache: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = RecordingSpec(image_size=8, frameskip=frameskip, max_steps=max_steps, cache=cache)
        source = Recordings(ArrayReader(Path(folder), lengths, extra), spec, Path(folder) / "frames", print)  # type: ignore[arg-type]
        assert source.action_spec.rate_hz == pytest.approx(30 / frameskip)
        for index, length in enumerate(lengths):
            episode = source.episode(index)
            steps = (length + extra - 1) // frameskip
            assert len(episode) == min(steps, max_steps or steps)
            assert source.lengths[index] == len(episode) + 1
            assert (episode.frames[:, 4, 4, 0] == frameskip * np.arange(len(episode) + 1)).all()
            recorded = np.rint(100 * (episode.actions.reshape(-1, 2)[:, 0] + 1))
            assert (recorded == np.arange(frameskip * len(episode))).all()
            assert (episode.actions.reshape(-1, 2)[:, 1] == 0).all()  # a constant entry says nothing
            source.action_spec.check(episode.actions)


def test_an_episode_shorter_than_a_step_is_bad(tmp_path: Path) -> None:
    spec = RecordingSpec(image_size=8, frameskip=50)
    source = Recordings(ArrayReader(tmp_path, [60, 20], 1), spec, tmp_path, print)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="number 1: 20 steps are fewer than frameskip=50") as caught:
        source.episode(0)  # all lengths are needed first
    assert "frameskip" in caught.value.remediation


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 50), st.floats(1, 200), st.data())
def test_the_clock_must_tick(count: int, fps: float, data: st.DataObject) -> None:
    times = np.arange(count) / fps
    check_clock(times, fps)
    at = data.draw(st.integers(1, count - 1))
    for wrong in (times[at - 1], times[at - 1] - 1, np.nan):
        broken = times.copy()
        broken[at] = wrong
        with pytest.raises(DataError):
            check_clock(broken, fps)
    late = times.copy()
    late[at:] += 1.2 / fps
    with pytest.raises(DataError):
        check_clock(late, fps)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([[1, 2], [3]], "differ in length"),
        ([["a"]], "not numbers"),
        ([[1.0, np.inf]], "step 0 is not finite"),
        (np.zeros((3, 300)), "300 entries"),
        (np.zeros((3, 0)), "0 entries"),
        (np.array([object()]), "not numbers"),
        (np.array([1 + 2j]), "not numbers"),
    ],
)
def test_columns_hold_numbers(values: object, text: str) -> None:
    with pytest.raises(DataError, match=text):
        numbers(values, "actions")
