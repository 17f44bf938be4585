"""Raw actions of a recording -> what the model gets: numbers in [-1, 1], or one-hot choices; and their ActionSpec."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.episodes import MAX_ACTION_DIM, ActionSpec
from lensemble_flwr.data.formats.reader import ActionColumn, Reader
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.errors import DataError

_SLACK = 1e-4
"""How far outside its bounds, as a share of their distance, an action may lie by rounding."""


@dataclass(frozen=True, eq=False)
class ActionScale:
    """How raw actions are scaled.

    Attributes:
        spec: of the steps after frameskip. column: of the files; for vectors with bounds.
    """

    spec: ActionSpec
    column: ActionColumn

    def encode(self, raw: NDArray, frameskip: int) -> NDArray[np.float32]:
        """[T frameskip, a] raw actions -> float32 [T, width], those of a step side by side.

        Raises:
            DataError: another number of entries than the other episodes have, or a value out of bounds.
        """
        if self.column.kind == "continuous":
            values = self._scaled(raw)
        else:
            values = self._one_hot(raw)
        return np.ascontiguousarray(values.reshape(len(values) // frameskip, -1), np.float32)

    def _scaled(self, raw: NDArray) -> NDArray[np.float32]:
        low, high = self.column.low, self.column.high
        assert low is not None and high is not None
        if raw.shape[1] != len(low):
            raise DataError(
                f"actions have {raw.shape[1]} entries, other episodes {len(low)}.",
                "Each body needs its own recordings: split the data set.",
            )
        span = high - low
        slack = _SLACK * np.where(span > 0, span, 1)
        values = raw.astype(np.float64)
        outside = (values < low - slack) | (values > high + slack)
        if outside.any():
            step, entry = (int(n) for n in np.argwhere(outside)[0])
            raise DataError(
                f"action entry {entry} is {values[step, entry]:.6g} at step {step}, its bounds are "
                f"{low[entry]:.6g} and {high[entry]:.6g}.",
                "Give wider action_low and action_high, or action_bounds: data.",
            )
        centred = np.where(span > 0, 2 * (values - low) / np.where(span > 0, span, 1) - 1, 0)
        return np.clip(centred, -1, 1).astype(np.float32)

    def _one_hot(self, raw: NDArray) -> NDArray[np.float32]:
        sizes, first = self.column.sizes, self.column.first
        if raw.shape[1] != len(sizes):
            text = f"an action makes {raw.shape[1]} choices, the metadata says {len(sizes)}."
            raise DataError(text, "Correct the metadata, or split the data set.")
        parts = []
        for entry, (size, start) in enumerate(zip(sizes, first, strict=True)):
            chosen = raw[:, entry].astype(np.int64) - start
            if (chosen + start != raw[:, entry]).any() or chosen.min() < 0 or chosen.max() >= size:
                text = f"action entry {entry} is not one of the {size} choices from {start} on."
                raise DataError(text, "Correct the metadata or the recording.")
            parts.append(np.eye(size, dtype=np.float32)[chosen])
        return np.concatenate(parts, axis=1)


def action_scale(reader: Reader, spec: RecordingSpec) -> ActionScale:
    """From the metadata, or what the user said instead.

    Raises:
        DataError: no bounds anywhere, bounds of another length, or too many entries after frameskip.
    """
    column = reader.action
    if column.kind != "continuous":
        width = sum(column.sizes) * spec.frameskip
        _check_width(width, spec)
        return ActionScale(_choices(column, spec), column)
    low, high = _bounds(reader, spec)
    _check_width(len(low) * spec.frameskip, spec)
    bounded = ActionColumn(low=low, high=high, names=column.names)
    return ActionScale(ActionSpec("continuous", len(low) * spec.frameskip), bounded)


def _choices(column: ActionColumn, spec: RecordingSpec) -> ActionSpec:
    if column.kind == "discrete" and spec.frameskip == 1:
        return ActionSpec("discrete", column.sizes[0])
    raise DataError("several choices at once are not supported yet.", "Use frameskip 1 and one choice.")


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


def _check_width(width: int, spec: RecordingSpec) -> None:
    if not 1 <= width <= MAX_ACTION_DIM:
        raise DataError(
            f"an action has {width} entries at frameskip={spec.frameskip}, at most {MAX_ACTION_DIM} are used.",
            "Use a smaller frameskip.",
        )


def clean_name(name: str, otherwise: str) -> str:
    """A printable ASCII name of at most 64 characters."""
    kept = "".join(c if c.isascii() and c.isprintable() else "?" for c in name)[:64].strip()
    return kept or otherwise
