"""What a reader of a format offers: episodes as they were recorded, before scaling, frameskip and resizing.

One class per format implements :class:`Reader`; :class:`lensemble_flwr.data.formats.recordings.Recordings` does the
rest. Readers raise DataError with a remedy; they name no episode, their caller does.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import MAX_ACTION_DIM
from lensemble_flwr.data.episodes import MAX_STEPS
from lensemble_flwr.errors import ConfigError, DataError

ActionKind = Literal["continuous", "discrete", "multi_discrete"]


@dataclass(frozen=True)
class ActionColumn:
    """The action space of the files, as far as their metadata tells it.

    Attributes:
        kind: what one raw action is: a vector, a choice, or several choices.
        sizes: number of choices ("discrete": one entry, "multi_discrete": several); empty for vectors.
        low, high: float64 [a] bounds of vectors, or None where the metadata has none.
        first: number of the first choice, usually 0. names: of the entries, or None.
    """

    kind: ActionKind = "continuous"
    sizes: tuple[int, ...] = ()
    low: NDArray[np.float64] | None = None
    high: NDArray[np.float64] | None = None
    first: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class Raw:
    """The small columns of one episode.

    Attributes:
        actions: [N, a] numbers as recorded (for choices: integers [N, number of choices made at once]).
        pictures: how many pictures there are: N (the last action's outcome was not recorded) or N + 1.
        states: float32 [pictures, s] or None.
        timestamps: float64 [pictures] seconds, or None.
    """

    actions: NDArray
    pictures: int
    states: NDArray[np.float32] | None = None
    timestamps: NDArray[np.float64] | None = None


class Reader(Protocol):
    """Episodes of one format. ``path`` is what the user pointed at, ``fps`` the recording's rate or None."""

    format: str
    path: Path
    body: str
    fps: float | None
    camera: str
    cameras: tuple[str, ...]
    columns: tuple[str, ...]
    action: ActionColumn

    def __len__(self) -> int: ...
    def label(self, index: int) -> str:
        """The episode's name in the files."""
        ...

    def size(self, index: int) -> tuple[int, int]:
        """(actions, pictures) of an episode as the metadata says, without reading it."""
        ...

    def load(self, index: int) -> Raw:
        """The small columns, read and checked against each other."""
        ...

    def frames(self, index: int, rows: NDArray[np.int64]) -> Iterator[NDArray]:
        """The pictures at ``rows`` (ascending, no repeats), one at a time: [H, W, C] or [H, W], any number type."""
        ...

    def files(self) -> Iterator[Path]:
        """Every file that is read; their stamps say whether the recordings changed."""
        ...


def need(package: str, extra: str, what: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ConfigError: it is not installed; names the pip extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"reading {what} needs the package {package.split('.')[0]} ({error}).",
            f"Install it: pip install 'lensemble-flwr[{extra}]'.",
        ) from error


def choose_camera(wanted: str | None, colour: Sequence[str], others: Sequence[str] = ()) -> str:
    """The camera to read: the wanted one, else the first colour camera. ``others`` exist but hold no colour pictures.

    Raises:
        DataError: there is no such camera, or none at all.
    """
    names = ", ".join(colour) or "none"
    if wanted is None:
        if not colour:
            seen = f" (there is {', '.join(others)}, which is no colour picture)" if others else ""
            raise DataError(f"the recordings have no colour camera{seen}.", "World models here learn from pictures.")
        return sorted(colour)[0]
    matching = [c for c in colour if c == wanted] or [c for c in colour if c.rsplit(".", 1)[-1] == wanted]
    if len(matching) != 1:
        if wanted in others:
            raise DataError(f"camera {wanted!r} holds no colour pictures.", f"Colour cameras: {names}.")
        raise DataError(f"the recordings have no camera {wanted!r}.", f"Colour cameras: {names}.")
    return matching[0]


def choose_column(name: str, there: Sequence[str]) -> str:
    """``name`` if the files have it (DataError with what there is, else)."""
    if name not in there:
        raise DataError(f"the recordings have no column {name!r}.", f"They have {', '.join(sorted(there)) or 'none'}.")
    return name


def numbers(values: Any, what: str, rows: int | None = None) -> NDArray:
    """``values`` as a finite rank-2 array of real numbers [N, a], at most MAX_ACTION_DIM wide.

    Raises:
        DataError: ragged, not numbers, not finite, or another number of rows.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:  # ragged lists
        raise DataError(f"{what}: rows differ in length.", "Each step needs the same entries.") from error
    if array.dtype.kind not in "fiub":
        raise DataError(f"{what}: values are {array.dtype}, not numbers.", "Choose another column, or convert it.")
    array = array.reshape(len(array), -1) if array.ndim != 2 else array
    if array.shape[1] < 1 or array.shape[1] > MAX_ACTION_DIM:
        raise DataError(f"{what}: {array.shape[1]} entries, not 1..{MAX_ACTION_DIM}.", "Choose another column.")
    if rows is not None and len(array) != rows:
        raise DataError(f"{what}: {len(array)} rows, expected {rows}.", "The recording is cut: drop or repair it.")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(bad):
        raise DataError(f"{what}: step {bad[0]} is not finite ({len(bad)} such steps).", "Drop or repair the episode.")
    return array


def check_length(actions: int, pictures: int) -> None:
    """Raise DataError unless an episode has 2 or more pictures, and as many actions or one less."""
    if pictures not in (actions, actions + 1):
        raise DataError(
            f"{actions} actions and {pictures} pictures do not belong together.",
            "There must be as many pictures as actions, or one more; drop or repair the episode.",
        )
    if pictures < 2:
        raise DataError(f"{pictures} pictures are no trajectory.", "Drop the episode.")
    if actions > 100 * MAX_STEPS:
        raise DataError(f"{actions} actions are more than {100 * MAX_STEPS}.", "Split the recording.")


def check_clock(timestamps: NDArray[np.float64], fps: float | None) -> None:
    """Raise DataError unless time grows from picture to picture, at about the rate that the metadata states."""
    if not np.isfinite(timestamps).all():
        raise DataError("a timestamp is not finite.", "Drop or repair the episode.")
    gaps = np.diff(timestamps)
    if len(gaps) and gaps.min() <= 0:
        at = int(np.argmin(gaps > 0))
        raise DataError(f"time does not grow after step {at}.", "Sort the recording by time, or drop it.")
    if fps and len(gaps):
        rate = 1 / float(np.median(gaps))
        if abs(rate / fps - 1) > 0.1:
            raise DataError(f"timestamps say {rate:.4g} fps, the metadata {fps:.4g}.", "Correct the metadata's fps.")
        if gaps.max() > 1.5 / fps:
            raise DataError(f"pictures are missing after step {int(np.argmax(gaps))}.", "Drop or split the episode.")
