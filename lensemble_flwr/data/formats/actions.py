"""The ActionSpec of a recording, from its own metadata or from what its user says instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import ActionSpec
from lensemble_flwr.data.formats.reader import Reader
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.errors import DataError


@dataclass(frozen=True)
class ActionScale:
    """Attributes: ``recorded`` is the spec of one recorded action, ``spec`` that of a step after frameskip."""

    recorded: ActionSpec
    spec: ActionSpec
    first: tuple[int, ...]

    def encode(self, raw: NDArray) -> NDArray[np.float32]:
        """[T frameskip, raw width] recorded actions -> float32 [T, width], those of a step side by side, oldest first.

        Raises:
            DataError: another number of entries than the other episodes have, or a value out of bounds.
        """
        if raw.ndim != 2 or raw.shape[1] != self.recorded.raw_width:
            raise DataError(
                f"actions have {raw.shape[1]} entries, other episodes {self.recorded.raw_width}.",
                "Each body needs its own recordings: split the data set.",
            )
        try:
            rows = self.recorded.encode(raw - np.asarray(self.first) if self.first else raw)
        except DataError as error:
            remedy = "Give wider action_low and action_high, or action_bounds: data; or correct the recording."
            raise DataError(error.message, remedy) from error
        return np.ascontiguousarray(rows.reshape(-1, self.spec.width))


def action_scale(reader: Reader, spec: RecordingSpec) -> ActionScale:
    """From the metadata, or what the user said instead.

    Raises:
        DataError: bounds of another length, or too many entries after frameskip.
    """
    column, k = reader.action, spec.frameskip
    rates = [None, None] if reader.fps is None else [reader.fps, reader.fps / k]
    if column.kind == "continuous":
        low, high = _bounds(reader, spec)
        names = column.names if column.names and len(column.names) == len(low) else ()
        later = [n if i == 0 else f"{n}+{i}" for i in range(k) for n in names]
        recorded = ActionSpec.continuous(low, high, names, rates[0], spec.relative)
        skipped = ActionSpec.continuous(np.tile(low, k), np.tile(high, k), later, rates[1], spec.relative)
        return ActionScale(recorded, skipped, ())
    sizes = column.sizes
    if column.kind == "discrete":
        recorded = ActionSpec.discrete(sizes[0], rate_hz=rates[0])
    else:
        recorded = ActionSpec.multi_discrete(sizes, rate_hz=rates[0])
    skipped = recorded if k == 1 else ActionSpec.multi_discrete(sizes * k, rate_hz=rates[1])
    return ActionScale(recorded, skipped, column.first if any(column.first) else ())


def _bounds(reader: Reader, spec: RecordingSpec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    width = _width(reader)
    if spec.action_low is not None and spec.action_high is not None:
        low, high = (np.asarray(b, np.float64) for b in (spec.action_low, spec.action_high))
        low, high = (np.full(width, b[0]) if len(b) == 1 else b for b in (low, high))
    elif spec.action_bounds == "data":
        low, high = _found(reader)
    elif reader.action.low is not None and reader.action.high is not None:
        low, high = reader.action.low, reader.action.high
    else:
        low, high = np.full(width, -1.0), np.full(width, 1.0)
    if len(low) != width or len(high) != width:
        raise DataError(
            f"{len(low)} and {len(high)} action bounds for {width} entries.", "Give one for each entry, or one for all."
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise DataError("an action bound is not finite, or the lower above the upper.", "Correct the bounds.")
    return low, high


def _width(reader: Reader) -> int:
    """Entries of an action, from the first episode that can be read."""
    problem = None
    for index in range(len(reader)):
        try:
            return int(reader.load(index).actions.shape[1])
        except DataError as error:
            problem = problem or error
    raise problem or DataError("there are no episodes.", "Record at least one episode.")


def _found(reader: Reader) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Smallest and largest value of each entry over all episodes that can be read, one episode in memory."""
    low, high = None, None
    for index in range(len(reader)):
        try:
            actions = reader.load(index).actions.astype(np.float64)
        except DataError:
            continue  # reported where the episode is used
        if low is None or high is None:
            low, high = actions.min(axis=0), actions.max(axis=0)
        elif actions.shape[1] == len(low):
            low, high = np.minimum(low, actions.min(axis=0)), np.maximum(high, actions.max(axis=0))
    if low is None or high is None:
        raise DataError("no episode's actions can be read.", "Run: lensemble data inspect.")
    return low, high


def clean_name(name: str, otherwise: str) -> str:
    """A printable ASCII name of at most 64 characters."""
    kept = "".join(c if c.isascii() and c.isprintable() else "?" for c in name)[:64].strip()
    return kept or otherwise
