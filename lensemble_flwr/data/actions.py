"""Actions: what one action of a body is, and how raw commands become what the model reads.

A model reads one float32 row for each action: continuous entries scaled to [-1, 1] by their bounds, choices as one-hot
blocks, mixed spaces part after part. So one kind of action head (a linear layer first) serves every body.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lensemble_flwr.errors import DataError

MAX_ACTION_DIM = 256
KINDS = ("continuous", "discrete", "multi_discrete", "mixed")

_TAG = b"lensemble.action-spec\x00v1\x00"
_SLACK = 1e-5  # of the range: what rounding to float32 may add to a recorded bound


@dataclass(frozen=True)
class ActionSpec:
    """What one action is. Use the constructors; ``ActionSpec("continuous", 2)`` has entries in [-1, 1] already.

    Attributes:
        kind: "continuous", "discrete" (one choice), "multi_discrete" (several choices), "mixed" (parts side by side).
        dim: entries of one encoded action: the width of its row.
        low, high: bounds of each continuous entry in the recording's own units; empty: already in [-1, 1].
        sizes: number of options of each choice ("multi_discrete").
        parts: "mixed": specs of the other three kinds, in order.
        names: of the raw entries, or empty.
        rate_hz: actions a second, after any frameskip; None if it is not known.
        relative: whether an action is a change (a delta) rather than a target.

    Raises:
        DataError: values that contradict each other.
    """

    kind: Literal["continuous", "discrete", "multi_discrete", "mixed"]
    dim: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    parts: tuple[ActionSpec, ...] = ()
    names: tuple[str, ...] = ()
    rate_hz: float | None = None
    relative: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"unknown action kind {self.kind!r}.", f"Use one of {', '.join(KINDS)}.")
        if not _whole(self.dim, 1, MAX_ACTION_DIM):
            raise DataError(f"action dimension {self.dim!r} is not in 1..{MAX_ACTION_DIM}.", "Check the data source.")
        self._check_bounds()
        if (self.kind == "multi_discrete") != bool(self.sizes) or (self.kind == "mixed") != bool(self.parts):
            raise DataError(f"sizes or parts do not belong to {self.kind} actions.", "Use ActionSpec's constructors.")
        if self.sizes and (not all(_whole(n, 1, MAX_ACTION_DIM) for n in self.sizes) or sum(self.sizes) != self.dim):
            raise DataError(
                f"choices of {list(self.sizes)} options do not fill {self.dim} entries.", "Check the sizes."
            )
        if self.parts and (any(p.kind == "mixed" for p in self.parts) or sum(p.dim for p in self.parts) != self.dim):
            raise DataError("parts of mixed actions are not mixed, and fill its width.", "Use ActionSpec.mixed.")
        if self.names and len(self.names) != self.raw_width:
            raise DataError(f"{len(self.names)} names for {self.raw_width} raw entries.", "Name each entry, or none.")
        if self.rate_hz is not None and not (math.isfinite(self.rate_hz) and self.rate_hz > 0):
            raise DataError(f"an action rate of {self.rate_hz!r} Hz is not above zero.", "Give actions a second.")

    def _check_bounds(self) -> None:
        low, high = self.low, self.high
        if not low and not high:
            return
        if self.kind != "continuous" or len(low) != self.dim or len(high) != self.dim:
            raise DataError(
                f"{len(low)} lower and {len(high)} upper bounds for {self.dim} entries of {self.kind} actions.",
                "Give one pair of bounds for each continuous entry.",
            )
        for index, (least, most) in enumerate(zip(low, high, strict=True)):
            if not (math.isfinite(least) and math.isfinite(most) and least <= most):
                raise DataError(
                    f"action entry {index} has the bounds {least!r}..{most!r}.", "Give finite, ordered bounds."
                )

    # ------------------------------------------------------------------ constructors

    @staticmethod
    def continuous(
        low: ArrayLike,
        high: ArrayLike,
        names: Sequence[str] | None = None,
        rate_hz: float | None = None,
        relative: bool = False,
    ) -> ActionSpec:
        """Real entries within bounds, each [a] in the recording's units; an entry with equal bounds encodes as 0."""
        least, most = _floats(low), _floats(high)
        return ActionSpec("continuous", len(least), least, most, (), (), tuple(names or ()), rate_hz, relative)

    @staticmethod
    def discrete(n: int, names: Sequence[str] | None = None, rate_hz: float | None = None) -> ActionSpec:
        """One choice of ``n`` options, recorded as 0..n-1."""
        return ActionSpec("discrete", n, names=tuple(names or ()), rate_hz=rate_hz)

    @staticmethod
    def multi_discrete(
        sizes: Sequence[int], names: Sequence[str] | None = None, rate_hz: float | None = None
    ) -> ActionSpec:
        """Several choices at once, of ``sizes[i]`` options each."""
        each = tuple(int(n) for n in sizes)
        return ActionSpec("multi_discrete", sum(each), sizes=each, names=tuple(names or ()), rate_hz=rate_hz)

    @staticmethod
    def mixed(
        parts: Sequence[ActionSpec], names: Sequence[str] | None = None, rate_hz: float | None = None
    ) -> ActionSpec:
        """Parts of the other kinds side by side (a discrete gripper beside continuous joints)."""
        each = tuple(parts)
        width = sum(part.dim for part in each)
        return ActionSpec("mixed", width, parts=each, names=tuple(names or ()), rate_hz=rate_hz)

    # ------------------------------------------------------------------ encoding

    @property
    def width(self) -> int:
        """Entries of an encoded row, the same as ``dim``."""
        return self.dim

    @property
    def raw_width(self) -> int:
        """Entries of one raw action."""
        if self.kind == "mixed":
            return sum(part.raw_width for part in self.parts)
        return {"continuous": self.dim, "discrete": 1, "multi_discrete": len(self.sizes)}[self.kind]

    def encode(self, raw: ArrayLike) -> NDArray[np.float32]:
        """Raw actions as the model reads them.

        Args:
            raw: [T, raw_width] numbers in the recording's units; [T] will do for one entry. Choices are whole numbers
                from 0.

        Returns:
            float32 [T, width].

        Raises:
            DataError: wrong shape, a number that is not finite, outside its bounds, or no such option.
        """
        values = np.asarray(raw, np.float64)
        if values.ndim == 1 and self.raw_width == 1:
            values = values[:, None]
        if values.ndim != 2 or values.shape[1] != self.raw_width:
            raise DataError(
                f"raw actions have shape {values.shape}, expected (T, {self.raw_width}).", "Check the action spec."
            )
        if not np.isfinite(values).all():
            raise DataError("an action is not finite.", "Drop the recording, or repair it in the source.")
        return self._encode(values)

    def _encode(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        if self.kind == "mixed":
            cuts = np.cumsum([part.raw_width for part in self.parts])[:-1]
            blocks = np.split(values, cuts, axis=1)
            return np.concatenate([p._encode(b) for p, b in zip(self.parts, blocks, strict=True)], axis=1)
        if self.kind == "continuous":
            return self._scaled(values)
        rows = []
        for size, column in zip(self.sizes or (self.dim,), values.T, strict=True):
            wrong = (column != np.rint(column)) | (column < 0) | (column >= size)
            if wrong.any():
                raise DataError(
                    f"{column[wrong][0]:g} is none of the {size} options 0..{size - 1} of an action.",
                    "Correct the action spec, or the recording.",
                )
            rows.append(np.eye(size, dtype=np.float32)[column.astype(np.int64)])
        return np.concatenate(rows, axis=1)

    def _scaled(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        low = np.asarray(self.low or [-1.0] * self.dim)
        high = np.asarray(self.high or [1.0] * self.dim)
        slack = _SLACK * np.maximum(high - low, np.maximum(np.abs(low), np.abs(high)))
        outside = (values < low - slack) | (values > high + slack)
        if outside.any():
            row, entry = np.argwhere(outside)[0]
            raise DataError(
                f"action entry {entry} is {values[row, entry]:g} at step {row}, outside "
                f"{low[entry]:g}..{high[entry]:g}.",
                "Widen the bounds of the action spec, or correct the recording.",
            )
        span = np.where(high > low, high - low, 1.0)
        scaled = np.where(high > low, 2 * (values - low) / span - 1, 0.0)
        return np.clip(scaled, -1.0, 1.0).astype(np.float32)

    def check(self, actions: NDArray[np.float32]) -> None:
        """Raise DataError unless ``actions`` [T, dim] are encoded actions of this kind."""
        if actions.ndim != 2 or actions.shape[1] != self.dim:
            raise DataError(
                f"actions have shape {actions.shape}, expected (T, {self.dim}).", "Check the source's action_spec."
            )
        for kind, block in self._blocks(actions):
            if kind == "continuous":
                if not (np.abs(block) <= 1.0).all():  # a NaN fails too
                    raise DataError(
                        "a continuous action lies outside [-1, 1].", "Scale actions to [-1, 1] in the source."
                    )
            elif not (np.isin(block, (0.0, 1.0)).all() and (block.sum(axis=1) == 1.0).all()):
                raise DataError("a discrete action is not one-hot.", "Encode choices as one-hot rows in the source.")

    def _blocks(self, actions: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        start = 0
        for part in self.parts:
            yield from part._blocks(actions[:, start : start + part.dim])
            start += part.dim
        for size in self.sizes or (() if self.parts else (self.dim,)):
            yield ("continuous" if self.kind == "continuous" else "discrete"), actions[:, start : start + size]
            start += size

    # ------------------------------------------------------------------ names for it

    def canonical(self) -> bytes:
        """The bytes that :attr:`hash` covers: version tag, then compact JSON with sorted keys."""
        return _TAG + json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def hash(self) -> bytes:
        """SHA-256 (32 bytes) of the whole spec. Bounds may come from private recordings: it stays at the site."""
        return hashlib.sha256(self.canonical()).digest()

    def public(self) -> dict[str, Any]:
        """Kind and sizes only: what an action head's shape shows. Neither bounds nor names."""
        shape: dict[str, Any] = {"kind": self.kind, "width": self.dim}
        if self.sizes:
            shape["sizes"] = list(self.sizes)
        if self.parts:
            shape["parts"] = [part.public() for part in self.parts]
        return shape

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; the inverse of :meth:`from_dict`."""
        plain: dict[str, Any] = {"kind": self.kind, "dim": self.dim, "rate_hz": self.rate_hz, "relative": self.relative}
        plain |= {name: list(getattr(self, name)) for name in ("low", "high", "sizes", "names")}
        return {**plain, "parts": [part.to_dict() for part in self.parts]}

    @staticmethod
    def from_dict(values: Any) -> ActionSpec:
        """A spec from :meth:`to_dict`. Raises DataError for anything else."""
        try:
            plain = dict(values)
            for name in ("low", "high"):
                plain[name] = tuple(float(v) for v in plain.get(name, ()))
            for name in ("sizes", "names"):
                plain[name] = tuple(plain.get(name, ()))
            plain["parts"] = tuple(ActionSpec.from_dict(part) for part in plain.get("parts", ()))
            return ActionSpec(**plain)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"this is no action spec: {error}.", "Give what ActionSpec.to_dict wrote.") from error

    def describe(self) -> str:
        """One line for the site's own operator."""
        if self.kind == "mixed":
            text = " + ".join(part.describe() for part in self.parts)
        elif self.kind == "continuous":
            text = f"{self.dim} continuous" + ("" if self.low else " in [-1, 1]")
        else:
            text = f"{len(self.sizes or (1,))} choice(s) of " + ", ".join(str(n) for n in self.sizes or (self.dim,))
        text += ", relative" if self.relative else ""
        return text + (f", {self.rate_hz:g} Hz" if self.rate_hz else "")


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _floats(values: ArrayLike) -> tuple[float, ...]:
    return tuple(float(v) for v in np.atleast_1d(np.asarray(values, np.float64)))
