"""From episodes to batches: which windows there are, in which order they are used, and the arrays of one batch.

Everything is a pure function. The order of step k is a function of (number of windows, batch size, seed, k), so a
participant that is stopped and started again continues at its step without any saved state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.episodes import Episode, EpisodeSource, episode_hashes
from lensemble_flwr.errors import ContractViolation, DataError

Seed = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Packed:
    """Episodes of one body, end to end, so that a batch is one indexing operation.

    Attributes:
        frames: uint8 [sum(T + 1), H, W, 3].
        actions: float32 [sum(T + 1), a]; the last row of each episode is zero and belongs to no window.
        offsets: int64 [E], where each episode starts.
        lengths: int64 [E], pictures of each episode.
    """

    frames: NDArray[np.uint8]
    actions: NDArray[np.float32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows ready for training: frames uint8 [B, L, H, W, 3], actions float32 [B, L - 1, a]."""

    frames: NDArray[np.uint8]
    actions: NDArray[np.float32]


def without(source: EpisodeSource, excluded: Collection[bytes]) -> tuple[list[Episode], int]:
    """Episodes of ``source`` whose hash is not in ``excluded``, and how many were left out.

    Public probe and evaluation episodes must not be trained on, or the measures would flatter. The count stays at the
    site: telling it, or refusing, would let others ask whether a site holds a recording.

    Raises:
        DataError: nothing is left.
    """
    kept = [source.episode(i) for i in usable(source, excluded)]
    return kept, len(source) - len(kept)


def usable(source: EpisodeSource, excluded: Collection[bytes]) -> list[int]:
    """Numbers of the episodes that :func:`without` keeps.

    Raises:
        DataError: nothing is left.
    """
    unwanted = frozenset(excluded)
    hashes = episode_hashes(source) if unwanted else [b""] * len(source)
    kept = [i for i, digest in enumerate(hashes) if digest not in unwanted]
    if not kept:
        raise DataError(
            f"source {source.name!r} has no episodes for training ({len(source)} are probe or evaluation episodes).",
            "Give this participant data of its own.",
        )
    return kept


def pack(episodes: Sequence[Episode]) -> Packed:
    """Lay episodes end to end (one copy).

    Raises:
        DataError: no episodes, or they differ in body, frame size or action size.
    """
    if not episodes:
        raise DataError("there are no episodes to train on.", "Check the data source.")
    first = episodes[0]
    shape, body = (first.frames.shape[1:], first.actions.shape[1]), first.embodiment
    if any((e.frames.shape[1:], e.actions.shape[1]) != shape or e.embodiment != body for e in episodes):
        raise DataError("episodes differ in body, frame size or action size.", "Pack each body by itself.")
    lengths = np.array([len(e) + 1 for e in episodes], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    actions = np.zeros((int(lengths.sum()), first.actions.shape[1]), np.float32)
    for episode, offset in zip(episodes, offsets, strict=True):
        actions[offset : offset + len(episode)] = episode.actions
    return Packed(np.concatenate([e.frames for e in episodes]), actions, offsets, lengths)


def window(lengths: Sequence[int] | NDArray[np.int64], length: int, stride: int = 1) -> NDArray[np.int64]:
    """All windows, in order: int64 [N, 2] of (episode, first picture). A window never crosses episodes.

    Args:
        lengths: pictures of each episode (:attr:`Packed.lengths`).
        length: pictures of a window, at least 2.
        stride: pictures between the starts of neighbouring windows.

    Raises:
        DataError: no episode is long enough. ContractViolation: length < 2 or stride < 1.
    """
    if length < 2 or stride < 1:
        raise ContractViolation(f"window length {length} and stride {stride}: needs at least 2 and 1.")
    rows = [
        np.stack([np.full(len(starts), number), starts], axis=1)
        for number, pictures in enumerate(lengths)
        if len(starts := np.arange(0, int(pictures) - length + 1, stride))
    ]
    if not rows:
        longest = max((int(n) for n in lengths), default=0)
        raise DataError(
            f"no episode has {length} pictures (the longest has {longest}).", "Use shorter windows or longer episodes."
        )
    return np.concatenate(rows).astype(np.int64)


def gather(packed: Packed, windows: NDArray[np.int64], length: int) -> Batch:
    """The arrays of some windows.

    Args:
        windows: int64 [B, 2], rows of :func:`window`. length: as given to it.

    Raises:
        ContractViolation: a window lies outside its episode.
    """
    windows = np.asarray(windows, np.int64).reshape(-1, 2)
    number, start = windows[:, 0], windows[:, 1]
    ok = length >= 2 and ((number >= 0) & (number < len(packed.offsets))).all() and (start >= 0).all()
    if not ok or (start + length > packed.lengths[number]).any():
        raise ContractViolation("a window lies outside its episode.")
    index = (packed.offsets[number] + start)[:, None] + np.arange(length)
    return Batch(packed.frames[index], packed.actions[index[:, :-1]])


def order(n: int, batch_size: int, seed: Seed, step: int) -> NDArray[np.int64]:
    """Which of ``n`` windows step ``step`` (from 0) uses: int64 [min(batch_size, n)].

    The stream is one shuffled epoch after another, each window once per epoch, cut into batches; a batch may span two
    epochs, so nothing is dropped and every batch has the same size.
    """
    return next(batches(n, batch_size, seed, step))


def batches(n: int, batch_size: int, seed: Seed, start: int = 0) -> Iterator[NDArray[np.int64]]:
    """The endless stream of :func:`order` from step ``start`` on."""
    if n < 1 or batch_size < 1 or start < 0:
        raise ContractViolation(f"{n} windows, batch size {batch_size}, step {start}: out of range.")
    size = min(batch_size, n)
    words = [seed] if isinstance(seed, int) else list(seed)
    position, current, shuffled = start * size, -1, np.empty(0, np.int64)
    while True:
        parts = []
        missing = size
        while missing:
            epoch, inside = divmod(position, n)
            if epoch != current:
                shuffled, current = np.random.default_rng([*words, epoch]).permutation(n), epoch
            taken = shuffled[inside : inside + missing]
            parts.append(taken)
            position, missing = position + len(taken), missing - len(taken)
        yield np.concatenate(parts).astype(np.int64)
