"""What the linear state probe reads from a run's models along one public held-out episode: a picture for people.

The figures that count are means over all held-out episodes; this is one of them to look at. ``readings.json`` in the
run's folder holds it, bounded in size whatever the episode is.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.errors import ArtifactError

SCHEMA_VERSION = 1
MAX_STEPS, MAX_COLUMNS, MAX_PICTURES, MAX_SIDE = 64, 6, 6, 96
MAX_BYTES = 512 * 1024
"""Of a file; the largest that is written has about half of it."""

Floats = NDArray[np.float64]
Line = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Reading:
    """What is read from one model.

    Attributes:
        model: "start" or "final".
        seen: (T, c) from the latent of each frame.
        predicted: (T, c) from the open-loop prediction made ``Readings.steps`` frames before; NaN where there is none.
    """

    model: str
    seen: Floats
    predicted: Floats


@dataclass(frozen=True, eq=False)
class Readings:
    """One episode.

    Attributes:
        body: whose.
        names: of the c columns.
        steps: how many frames ahead predictions are.
        truth: (T, c) true state.
        models: what is read from each.
        in_picture: for columns x and y (intercept, slope) of their place in a picture, as a share of its width from
            the left and of its height from the top; None: the columns have no place there.
        shown: which frames :attr:`pictures` are.
        pictures: (n, H, W, 3) uint8; none without ``in_picture``.
    """

    body: str
    names: tuple[str, ...]
    steps: int
    truth: Floats
    models: tuple[Reading, ...]
    in_picture: tuple[Line, Line] | None = None
    shown: tuple[int, ...] = ()
    pictures: NDArray[np.uint8] | None = None

    def bounded(self) -> Readings:
        """The same, cut to what a file may hold: its first frames and columns, pictures thinned out."""
        rows, columns = slice(MAX_STEPS), slice(MAX_COLUMNS)
        models = tuple(Reading(m.model, m.seen[rows, columns], m.predicted[rows, columns]) for m in self.models)
        kept = [i for i, frame in enumerate(self.shown) if frame < MAX_STEPS][:MAX_PICTURES]
        pictures = self.pictures
        if pictures is not None:
            thin = -(-max(pictures.shape[1:3]) // MAX_SIDE)
            pictures = pictures[kept, ::thin, ::thin]
        return Readings(
            self.body[:64],
            tuple(name[:32] for name in self.names[columns]),
            self.steps,
            self.truth[rows, columns],
            models,
            self.in_picture,
            tuple(self.shown[i] for i in kept),
            pictures,
        )


def spaced(first: int, last: int, count: int = MAX_PICTURES) -> tuple[int, ...]:
    """At most ``count`` different frames from ``first`` to ``last``, evenly spaced; none if there are none."""
    if last < first:
        return ()
    return tuple(sorted({round(float(i)) for i in np.linspace(first, last, count)}))


# ------------------------------------------------------------------------------------------------ the file


def to_json(readings: Readings, rounds: int) -> bytes:
    """The file's content; ``rounds`` is how many rounds the final model has behind it."""
    kept = readings.bounded()
    pictures = kept.pictures
    tree = {
        "schema_version": SCHEMA_VERSION,
        "rounds": rounds,
        "body": kept.body,
        "names": list(kept.names),
        "steps": kept.steps,
        "truth": _rows(kept.truth),
        "models": [{"model": m.model, "seen": _rows(m.seen), "predicted": _rows(m.predicted)} for m in kept.models],
        "in_picture": kept.in_picture,
        "shown": list(kept.shown),
        "size": None if pictures is None else list(pictures.shape[1:3]),
        "pictures": [] if pictures is None else [base64.b64encode(p.tobytes()).decode() for p in pictures],
    }
    return (json.dumps(tree, allow_nan=False) + "\n").encode()


def from_json(data: bytes) -> tuple[Readings, int]:
    """Read :func:`to_json`, which may have come from anybody.

    Returns:
        The readings and the number of rounds.

    Raises:
        ArtifactError: too large, or anything else than what :func:`to_json` writes.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        tree = json.loads(data)
        if not isinstance(tree, dict) or tree.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"it does not have schema {SCHEMA_VERSION}")
        return _readings(tree), _whole(tree["rounds"], "rounds", 0, 2**31)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ArtifactError(f"readings.json cannot be used: {error}.", "Delete it: reports do without.") from error


def _readings(tree: dict[str, Any]) -> Readings:
    names = tuple(_text(name, "a name") for name in _list(tree["names"], "names", 1, MAX_COLUMNS))
    truth = _table(tree["truth"], "truth", len(names))
    models = tuple(
        Reading(
            _text(one["model"], "a model"),
            _table(one["seen"], "seen", len(names), len(truth)),
            _table(one["predicted"], "predicted", len(names), len(truth)),
        )
        for one in _list(tree["models"], "models", 1, 4)
    )
    if len({m.model for m in models}) < len(models):
        raise ValueError("a model is there twice")
    shown = [_whole(i, "shown", 0, len(truth) - 1) for i in _list(tree["shown"], "shown", 0, MAX_PICTURES)]
    place, pictures = _in_picture(tree["in_picture"]), None
    if (place is not None and len(names) != 2) or ((place is None) != (not shown)):
        raise ValueError("what it shows has no place in pictures")
    if place is not None:
        height, width = (_whole(side, "size", 1, MAX_SIDE) for side in _list(tree["size"], "size", 2, 2))
        found = _list(tree["pictures"], "pictures", len(shown), len(shown))
        pictures = np.stack([_picture(one, height, width) for one in found])
    return Readings(
        _text(tree["body"], "body"),
        names,
        _whole(tree["steps"], "steps", 1, MAX_STEPS),
        truth,
        models,
        place,
        tuple(shown),
        pictures,
    )


def _rows(table: Floats) -> list[list[float | None]]:
    """Five significant digits are more than a picture shows."""
    return [[float(f"{v:.5g}") if math.isfinite(v) else None for v in row] for row in table.tolist()]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError(f"{name} is no short text")
    return value


def _list(value: Any, name: str, least: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise ValueError(f"{name} is no list of {least} to {most}")
    return value


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is no whole number from {least} to {most}")
    return value


def _table(value: Any, name: str, columns: int, rows: int | None = None) -> Floats:
    least, most = (1, MAX_STEPS) if rows is None else (rows, rows)
    table = [_list(row, name, columns, columns) for row in _list(value, name, least, most)]
    return np.array([[math.nan if v is None else _number(v, name) for v in row] for row in table], np.float64)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} holds something that is no number")
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _in_picture(value: Any) -> tuple[Line, Line] | None:
    if value is None:
        return None
    lines: Sequence[list[Any]] = [_list(line, "in_picture", 2, 2) for line in _list(value, "in_picture", 2, 2)]
    (a, b), (c, d) = ([_number(v, "in_picture") for v in line] for line in lines)
    if not all(abs(v) < 1e6 for v in (a, b, c, d)):
        raise ValueError("in_picture is no line")
    return (a, b), (c, d)


def _picture(value: Any, height: int, width: int) -> NDArray[np.uint8]:
    if not isinstance(value, str):
        raise ValueError("a picture is no text")
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a picture is no base64: {error}") from error
    if len(raw) != height * width * 3:
        raise ValueError("a picture has another size")
    return np.frombuffer(raw, np.uint8).reshape(height, width, 3)
