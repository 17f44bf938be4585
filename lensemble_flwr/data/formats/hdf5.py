"""Two layouts in HDF5: robomimic (``data/demo_3/{actions,obs/...}``) and Minari (``episode_3/{actions,observations}``).

Only what is inside the file is read: external links, external storage, virtual data sets and objects are refused.
"""

from __future__ import annotations

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import MAX_ACTION_DIM
from lensemble_flwr.data.formats.files import MAX_CHUNK, MAX_COLUMN, ordinary, parse_json, read_json
from lensemble_flwr.data.formats.pictures import check_picture
from lensemble_flwr.data.formats.reader import (
    ActionColumn,
    Raw,
    check_length,
    choose_camera,
    choose_column,
    need,
    numbers,
)
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.errors import DataError

_BROKEN = "The file is damaged or was not closed: write or download it again."


def layout(path: Path) -> str:
    """ "robomimic" or "minari" (DataError if the file is neither)."""
    file = open_file(path)
    try:
        with _reading(path):
            names = list(file)  # names only: asking "in" would follow a link
            if "data" in names:
                return "robomimic"
            if any(name.startswith("episode_") for name in names):
                return "minari"
            if not names:
                raise DataError(f"{path.name} is empty.", "Record episodes first.")
    finally:
        file.close()
    raise DataError(f"{path.name} is neither robomimic's nor Minari's layout.", "docs/own-data.md shows both.")


def open_file(path: Path) -> Any:
    """The file, for reading (DataError if it is no HDF5 file)."""
    h5py = need("h5py", "hdf5", "HDF5 files")
    try:
        return h5py.File(path, "r", locking=False)
    except (OSError, ValueError, RuntimeError) as error:
        text = (str(error).splitlines() or [""])[0]
        raise DataError(f"{path.name} is no HDF5 file that can be read: {text}.", _BROKEN) from error


class _Hdf5(ABC):
    """What both layouts share. Subclasses say where things are."""

    format: str
    path: Path
    fps: float | None = None

    def __init__(self, path: Path, spec: RecordingSpec) -> None:
        self._h5py = need("h5py", "hdf5", "HDF5 files")
        self._real = ordinary(path, path.parent, True)
        self.path, self._file = path, open_file(self._real)
        with _reading(path):
            self._names = self._episodes()
        if not self._names:
            raise DataError(f"{path.name} has no episodes.", "Record at least one episode.")
        with _reading(path):
            there = self._observations(self._names[0])
            colour: list[str] = []
            others: list[str] = []
            for name in there:
                data = self._observation(self._names[0], name)
                if data.ndim in (3, 4):
                    kind = colour if data.ndim == 4 and 3 in (data.shape[1], data.shape[-1]) else others
                    kind.append(name)
        self.cameras = tuple(sorted(colour))
        self.camera = choose_camera(spec.camera, colour, others)
        self.columns = tuple(n for n in there if n not in colour and n not in others)
        self._states = tuple(choose_column(k, self.columns) for k in spec.state_keys or ())
        self._action = spec.action_key or "actions"

    # where things are -------------------------------------------------

    @abstractmethod
    def _episodes(self) -> list[str]: ...

    @abstractmethod
    def _observations(self, episode: str) -> list[str]: ...

    @abstractmethod
    def _observation(self, episode: str, name: str) -> Any: ...

    @abstractmethod
    def _prefix(self, episode: str) -> str: ...

    def _last(self, episode: str, name: str) -> Any | None:
        """The data set that holds the picture after the last action, where it is a set of its own."""
        return None

    # reading ----------------------------------------------------------

    def _at(self, path: str) -> Any:
        """What stands at a path, without following any link: it could lead to another file. None if nothing does."""
        place = self._file
        for part in path.split("/"):
            link = place.get(part, getlink=True) if isinstance(place, self._h5py.Group) else None
            if link is None:
                return None
            if not isinstance(link, self._h5py.HardLink):
                raise DataError(f"{path} is a link.", "Do not use this data, or copy it into one file without links.")
            place = place[part]
        return place

    def _group(self, path: str) -> Any:
        place = self._at(path)
        if not isinstance(place, self._h5py.Group):
            raise DataError(f"{path} is missing.", _BROKEN)
        return place

    def _dataset(self, path: str) -> Any:
        """A data set that is in this file and whose pieces are of bounded size."""
        place = self._at(path)
        if not isinstance(place, self._h5py.Dataset):
            raise DataError(f"{path} is {'missing' if place is None else 'no array'}.", _BROKEN)
        if place.external or place.is_virtual:
            raise DataError(f"{path} keeps its values in other files.", "Copy the data into one file.")
        if place.dtype.hasobject:
            raise DataError(f"{path} holds objects, not numbers.", "Store plain arrays.")
        if place.chunks and np.prod([float(c) for c in place.chunks]) * place.dtype.itemsize > MAX_CHUNK:
            raise DataError(f"{path} has chunks of more than 256 MiB.", "Write it with smaller chunks.")
        return place

    def _column(self, data: Any, path: str) -> NDArray:
        if data.ndim < 1 or np.prod([float(n) for n in data.shape]) * data.dtype.itemsize > MAX_COLUMN:
            raise DataError(f"{path} has shape {data.shape}.", "A column has one row a step, and at most 1 GiB.")
        return np.asarray(data[()])

    def __len__(self) -> int:
        return len(self._names)

    def label(self, index: int) -> str:
        return self._names[index]

    def size(self, index: int) -> tuple[int, int]:
        name = self._names[index]
        with _reading(self.path):
            actions = self._dataset(f"{self._prefix(name)}/{self._action}")
            pictures = self._observation(name, self.camera)
            extra = int(self._last(name, self.camera) is not None)
            shapes = (actions.shape or (0,), pictures.shape or (0,))
            return int(shapes[0][0]), int(shapes[1][0]) + extra

    def load(self, index: int) -> Raw:
        name = self._names[index]
        count, pictures = self.size(index)
        check_length(count, pictures)
        with _reading(self.path):
            path = f"{self._prefix(name)}/{self._action}"
            actions = numbers(self._column(self._dataset(path), path), self._action, count)
            data = self._observation(name, self.camera)
            if data.ndim not in (3, 4):
                raise DataError(f"{self.camera} has shape {data.shape}.", "Pictures are [T, height, width, 3].")
            check_picture(_hwc_shape(data.shape[1:]), data.dtype)
            last = self._last(name, self.camera)
            if last is not None and last.shape[1:] != data.shape[1:]:
                raise DataError(f"{self.camera}: its last picture has another shape.", _BROKEN)
            states = None
            if self._states:
                states = np.concatenate([self._state(name, k, pictures) for k in self._states], axis=1)
        return Raw(actions, pictures, states)

    def _state(self, name: str, key: str, pictures: int) -> NDArray[np.float32]:
        data, last = self._observation(name, key), self._last(name, key)
        rows = numbers(self._column(data, key), key)
        if last is not None and last.shape[1:] != data.shape[1:]:
            raise DataError(f"{key}: its last row has another shape.", _BROKEN)
        if last is not None and len(rows) == pictures - 1:
            rows = np.concatenate([rows, numbers(last[-1:], key)])
        if len(rows) != pictures:
            raise DataError(f"{key}: {len(rows)} rows for {pictures} pictures.", "Drop or repair the episode.")
        return rows.astype(np.float32)

    def frames(self, index: int, rows: NDArray[np.int64]) -> Iterator[NDArray]:
        name = self._names[index]
        with _reading(self.path):
            data = self._observation(name, self.camera)
            last = self._last(name, self.camera)
            for row in rows:
                if row < data.shape[0]:
                    yield _hwc(np.asarray(data[int(row)]))
                elif last is not None:
                    yield _hwc(np.asarray(last[-1]))
                else:
                    raise DataError(f"{self.camera} has {data.shape[0]} pictures.", _BROKEN)

    def files(self) -> Iterator[Path]:
        yield self._real


class Robomimic(_Hdf5):
    """robomimic's layout. Bounds of actions: [-1, 1], robosuite's convention, as the file states none."""

    format = "robomimic"

    def __init__(self, path: Path, spec: RecordingSpec) -> None:
        super().__init__(path, spec)
        self.body, self.fps = "robomimic", None
        with _reading(path):
            text = self._group("data").attrs.get("env_args")
        if isinstance(text, str | bytes):
            with contextlib.suppress(DataError):
                self._environment(parse_json(text, "env_args"))
        self.action = ActionColumn()

    def _environment(self, arguments: Any) -> None:
        kwargs = arguments.get("env_kwargs") if isinstance(arguments, dict) else None
        if not isinstance(kwargs, dict):
            return
        robots = kwargs.get("robots")
        robot = robots[0] if isinstance(robots, list) and robots else robots
        self.body = robot if isinstance(robot, str) and robot else self.body
        rate = kwargs.get("control_freq")
        self.fps = float(rate) if isinstance(rate, int | float) and 0 < rate < 10_000 else None

    def _episodes(self) -> list[str]:
        return sorted(self._group("data"), key=_natural)

    def _prefix(self, episode: str) -> str:
        return f"data/{episode}"

    def _observations(self, episode: str) -> list[str]:
        group = self._at(f"data/{episode}/obs")
        if not isinstance(group, self._h5py.Group):
            raise DataError(f"{episode} has no 'obs'.", "Extract observations with robomimic's dataset_states_to_obs.")
        return _leaves(group, self._h5py)

    def _observation(self, episode: str, name: str) -> Any:
        return self._dataset(f"data/{episode}/obs/{name}")

    def _last(self, episode: str, name: str) -> Any | None:
        if self._at(f"data/{episode}/next_obs/{name}") is None:
            return None
        data = self._dataset(f"data/{episode}/next_obs/{name}")
        return data if data.shape and data.shape[0] else None


class Minari(_Hdf5):
    """Minari's layout; the action space stands in metadata.json beside the file (or in its attributes)."""

    format = "minari"

    def __init__(self, path: Path, spec: RecordingSpec) -> None:
        super().__init__(path, spec)
        meta = self._metadata()
        self.body, self.fps = "minari", None
        environment = meta.get("env_spec")
        if isinstance(environment, str) and environment:
            with contextlib.suppress(DataError):
                environment = parse_json(environment, "env_spec")
        if isinstance(environment, dict) and isinstance(environment.get("id"), str):
            self.body = environment["id"]
        self.action = _space(meta.get("action_space"))

    def _metadata(self) -> dict[str, Any]:
        beside = self._real.parent / "metadata.json"
        if beside.is_file():
            return read_json(ordinary(beside, self._real.parent, False))
        with _reading(self.path):
            return {k: v for k, v in self._file.attrs.items() if isinstance(v, str)}

    def _episodes(self) -> list[str]:
        return sorted((n for n in self._file if n.startswith("episode_")), key=_natural)

    def _prefix(self, episode: str) -> str:
        return episode

    def _observations(self, episode: str) -> list[str]:
        place = self._at(f"{episode}/observations")
        if isinstance(place, self._h5py.Dataset):
            return ["observations"]
        return _leaves(self._group(f"{episode}/observations"), self._h5py)

    def _observation(self, episode: str, name: str) -> Any:
        whole = isinstance(self._at(f"{episode}/observations"), self._h5py.Dataset)
        return self._dataset(f"{episode}/observations" if whole else f"{episode}/observations/{name}")


def _leaves(group: Any, h5py: Any) -> list[str]:
    """Names of the arrays in a group; links are not followed, so they do not count."""
    real = [n for n in group if isinstance(group.get(n, getlink=True), h5py.HardLink)]
    return sorted(n for n in real if isinstance(group[n], h5py.Dataset))


def _space(text: Any) -> ActionColumn:
    """Minari's serialised action space as far as it is understood; its bounds only where they are finite."""
    if not isinstance(text, str):
        return ActionColumn()
    try:
        space = parse_json(text, "the action space")
        kind = space["type"]
        if kind == "Discrete":
            return ActionColumn("discrete", (int(space["n"]),), first=(int(space.get("start", 0)),))
        if kind == "MultiDiscrete":
            sizes = tuple(int(n) for n in np.ravel(space["nvec"]))
            first = np.broadcast_to(np.ravel(space.get("start", 0)), len(sizes))
            return ActionColumn("multi_discrete", sizes, first=tuple(int(n) for n in first))
        if kind == "MultiBinary":
            count = math.prod(int(n) for n in np.ravel(space["n"]))
            if not 0 < count <= MAX_ACTION_DIM:
                raise ValueError(f"{count} choices")
            return ActionColumn("multi_discrete", (2,) * count, first=(0,) * count)
        low, high = (np.ravel(np.asarray(space[k], np.float64)) for k in ("low", "high"))
    except (KeyError, TypeError, ValueError) as error:
        text = f"the action space in metadata.json is not understood ({type(error).__name__}: {error})."
        raise DataError(text, "Boxes, Discrete, MultiDiscrete and MultiBinary are read.") from error
    if low.shape != high.shape or not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        return ActionColumn()
    return ActionColumn(low=low, high=high)


def _hwc_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    chw = len(shape) == 3 and shape[-1] not in (1, 3, 4) and shape[0] in (1, 3, 4)
    return (*shape[1:], shape[0]) if chw else shape


def _hwc(picture: NDArray) -> NDArray:
    return picture.transpose(1, 2, 0) if _hwc_shape(picture.shape) != picture.shape else picture


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(p), "") if p.isdigit() else (0, p) for p in re.split(r"(\d+)", name) if p)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """HDF5's own errors as DataError."""
    try:
        yield
    except DataError:
        raise
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError, MemoryError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{path.name}: {text}", _BROKEN) from error
