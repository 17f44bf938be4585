"""Pictures of a source that stay where they are: each batch reads its own, so memory does not grow with the source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.episodes import EpisodeSource
from lensemble_flwr.data.hashed import HashedSource
from lensemble_flwr.errors import ContractViolation, DataError


@runtime_checkable
class WindowedSource(Protocol):
    """Episodes whose pictures can be read a few at a time."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [E]: pictures of each episode."""
        ...

    def labels(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Actions [T, a] and states [T + 1, s] of an episode, without its pictures."""
        ...

    def read(self, index: int, start: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` [n, H, W, 3] with pictures ``start`` .. ``start + n`` of an episode."""
        ...

    def picture_shape(self) -> tuple[int, int, int]:
        """(H, W, 3)."""
        ...


def windowed(source: EpisodeSource) -> WindowedSource | None:
    """The source itself, or the one whose hashes it keeps, if its pictures can be read a few at a time."""
    inner = source.source if isinstance(source, HashedSource) else source
    return inner if isinstance(inner, WindowedSource) else None


class StoredPictures:
    """Pictures of some episodes of a source, end to end.

    Args:
        source: where they are. episodes: which, in this order.

    Raises:
        DataError: no episodes.
    """

    def __init__(self, source: WindowedSource, episodes: Sequence[int]) -> None:
        if not len(episodes):
            raise DataError("there are no episodes to train on.", "Check the data source.")
        self._source, self._episodes = source, np.asarray(episodes, np.int64)
        self.lengths = source.lengths[self._episodes]
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The pictures at ``rows`` (any order) as uint8 [n, H, W, 3]; neighbours are read together.

        Raises:
            ContractViolation: there is no such row. DataError: an episode cannot be read.
        """
        rows = np.asarray(rows, np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise ContractViolation("a picture lies outside all episodes.")
        out = np.empty((len(rows), *self._source.picture_shape()), np.uint8)
        number = np.searchsorted(self._ends, rows, side="right")
        begins = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(number, prepend=-1) != 0))
        for begin, end in pairwise([*begins, len(rows)]):
            which = int(number[begin])
            start = int(rows[begin] - self._ends[which] + self.lengths[which])
            self._source.read(int(self._episodes[which]), start, out[begin:end])
        return out
