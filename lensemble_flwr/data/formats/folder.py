"""A plain folder, the simplest way to bring data: one ``NAME.npz`` an episode, or ``NAME.mp4`` with ``NAME.csv``.

docs/own-data.md describes it. An optional ``recordings.json`` states what the files cannot: rate, bounds, names.
"""

from __future__ import annotations

import csv
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import MAX_ACTION_DIM
from lensemble_flwr.data.formats.files import MAX_COLUMN, inside, ordinary, read_json, walk
from lensemble_flwr.data.formats.pictures import check_picture
from lensemble_flwr.data.formats.reader import (
    ActionColumn,
    Raw,
    check_clock,
    check_length,
    choose_camera,
    choose_column,
    numbers,
)
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.data.formats.video import DEMUXERS, Videos
from lensemble_flwr.errors import DataError

MAX_ROWS = 10_000_000
MAX_LINE = 1 << 16
_KEYS = ("fps", "body", "actions", "choices", "action_low", "action_high", "action_names")
_NPZ = "Write it again with numpy.savez (docs/own-data.md)."


class PlainFolder:
    """See :class:`lensemble_flwr.data.formats.reader.Reader`."""

    format = "folder"

    def __init__(self, path: Path, spec: RecordingSpec) -> None:
        self.path, self._links = path, spec.follow_links
        self._meta = self._read_meta()
        self._entries = list(walk(path, (".npz", ".csv")))
        names = [e.stem for e in self._entries]
        twice = [n for n in names if names.count(n) > 1] if len(set(names)) < len(names) else []
        if twice:
            raise DataError(f"episode {twice[0]!r} exists twice, as .npz and as .csv.", "Remove one of the two.")
        if not self._entries:
            raise DataError(f"{path} has no episodes.", "Put NAME.npz, or NAME.mp4 with NAME.csv, into it.")
        fps = self._meta.get("fps")
        self.fps = float(fps) if fps is not None else None
        self.body = str(self._meta.get("body") or "folder")
        self._videos = Videos()
        self._action = spec.action_key or "actions"
        first = self._entries[0]
        if first.suffix == ".npz":
            colour, others, columns = self._npz_columns(first)
        else:
            colour, others, columns = self._videos_of(first), [], sorted(set(_prefixes(self._header(first))))
        self.cameras, self.columns = tuple(sorted(colour)), tuple(columns)
        self.camera = choose_camera(spec.camera, colour, others)
        known = [*columns, *self._header(first)] if first.suffix == ".csv" else columns
        self._states = tuple(choose_column(k, known) for k in spec.state_keys or ())
        self.action = self._action_column()

    def _read_meta(self) -> dict[str, Any]:
        if not (self.path / "recordings.json").exists():
            return {}
        meta = read_json(inside(self.path, "recordings.json", self._links))
        unknown = [k for k in meta if k not in _KEYS]
        if unknown:
            raise DataError(f"recordings.json: {unknown[0]!r} is unknown.", f"Known are {', '.join(_KEYS)}.")
        fps = meta.get("fps")
        if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 10_000):
            raise DataError(f"recordings.json: fps={fps!r}.", "Give pictures a second.")
        return meta

    def _action_column(self) -> ActionColumn:
        kind = self._meta.get("actions", "continuous")
        try:
            if kind in ("discrete", "multi_discrete"):
                sizes = tuple(int(n) for n in np.ravel(self._meta["choices"]))
                if not sizes or min(sizes) < 1 or (kind == "discrete" and len(sizes) != 1):
                    raise ValueError("'choices' is how many there are")
                return ActionColumn(kind, sizes, first=(0,) * len(sizes))
            if kind != "continuous":
                raise ValueError(f"actions={kind!r}")
            bounds = [self._meta.get(k) for k in ("action_low", "action_high")]
            low, high = (None if b is None else np.ravel(np.asarray(b, np.float64)) for b in bounds)
            names = self._meta.get("action_names")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"recordings.json: {error}.", "docs/own-data.md shows what it may hold.") from error
        if (low is None) != (high is None):
            raise DataError("recordings.json has one bound of the actions only.", "Give action_low and action_high.")
        return ActionColumn(low=low, high=high, names=tuple(map(str, names)) if isinstance(names, list) else None)

    # ------------------------------------------------------------------ the reader's own

    def __len__(self) -> int:
        return len(self._entries)

    def label(self, index: int) -> str:
        return self._entries[index].name

    def files(self) -> Iterator[Path]:
        if (self.path / "recordings.json").exists():
            yield self.path / "recordings.json"
        yield from self._entries
        for entry in self._entries:
            if entry.suffix == ".csv" and (video := self._find_video(entry)) is not None:
                yield video

    @property
    def decoded(self) -> int:
        """Video pictures decoded so far."""
        return self._videos.decoded

    def size(self, index: int) -> tuple[int, int]:
        entry = self._entries[index]
        if entry.suffix == ".npz":
            with self._archive(entry) as archive:
                shapes = [archive.header(k)[0] for k in (self._action, self.camera)]
                return shapes[0][0] if shapes[0] else 0, shapes[1][0] if shapes[1] else 0
        count = self._rows_of(entry)
        video = self._video(entry)
        return (count, video.count) if video.count == count + 1 else (count, count)

    def load(self, index: int) -> Raw:
        entry = self._entries[index]
        return self._load_npz(entry) if entry.suffix == ".npz" else self._load_csv(entry)

    def frames(self, index: int, rows: NDArray[np.int64]) -> Iterator[NDArray]:
        entry = self._entries[index]
        if entry.suffix == ".npz":
            with self._archive(entry) as archive:
                yield from archive.rows(self.camera, rows)
            return
        video = self._video(entry)
        yield from video.at(np.asarray(rows, np.float64) / video.fps, 0.5 / video.fps)

    # ------------------------------------------------------------------ npz

    def _archive(self, entry: Path) -> _Archive:
        return _Archive(ordinary(entry, self.path, self._links))

    def _npz_columns(self, entry: Path) -> tuple[list[str], list[str], list[str]]:
        colour: list[str] = []
        others: list[str] = []
        columns: list[str] = []
        with self._archive(entry) as archive:
            for name in archive.names:
                shape, dtype, _ = archive.header(name)
                if len(shape) in (3, 4):
                    rgb = len(shape) == 4 and shape[-1] in (3, 4) and dtype.kind in "uf"
                    (colour if rgb else others).append(name)
                else:
                    columns.append(name)
        if "frames" in colour:  # the documented name comes first
            colour = ["frames", *(c for c in colour if c != "frames")]
        return colour, others, columns

    def _load_npz(self, entry: Path) -> Raw:
        with self._archive(entry) as archive:
            shape, dtype, _ = archive.header(self.camera)
            if len(shape) != 4:
                raise DataError(f"{self.camera} has shape {shape}.", "Pictures are [T + 1, height, width, 3].")
            check_picture(shape[1:], dtype)
            actions = numbers(archive.whole(self._action), self._action)
            check_length(len(actions), shape[0])
            states = [numbers(archive.whole(k), k, shape[0]) for k in self._states]
            clock = archive.whole("timestamps").ravel().astype(np.float64) if "timestamps" in archive.names else None
        if clock is not None:
            if len(clock) != shape[0]:
                raise DataError(f"{len(clock)} timestamps for {shape[0]} pictures.", "Give one for each picture.")
            check_clock(clock, self.fps)
        joined = np.concatenate(states, axis=1).astype(np.float32) if states else None
        return Raw(actions, shape[0], joined, clock)

    # ------------------------------------------------------------------ mp4 + csv

    def _videos_of(self, entry: Path) -> list[str]:
        """Cameras of a csv: NAME.mp4 is called "video", NAME.top.mp4 is called "top"."""
        found = []
        for suffix in DEMUXERS:
            if entry.with_suffix(suffix).exists():
                found.append("video")
            found += [
                p.name[len(entry.stem) + 1 : -len(suffix)] for p in entry.parent.glob(f"{_plain(entry)}.*{suffix}")
            ]
        if not found:
            raise DataError(f"{entry.name} has no video beside it.", f"Put {entry.stem}.mp4 into the folder.")
        return sorted(set(found))

    def _find_video(self, entry: Path) -> Path | None:
        stem = entry.stem if self.camera == "video" else f"{entry.stem}.{self.camera}"
        return next((p for s in DEMUXERS if (p := entry.with_name(stem + s)).exists()), None)

    def _video(self, entry: Path) -> Any:
        path = self._find_video(entry)
        if path is None:
            raise DataError(f"the video of {entry.name} is missing.", "Put it beside the csv file, or remove the csv.")
        return self._videos.get(ordinary(path, self.path, self._links), path.name)

    def _lines(self, entry: Path) -> Iterator[list[str]]:
        path = ordinary(entry, self.path, self._links)
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                yield from csv.reader(_bounded(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{entry.name} is no csv file: {error}.", "Write it in UTF-8, with commas.") from error

    def _header(self, entry: Path) -> list[str]:
        names = [n.strip() for n in next(self._lines(entry), [])]
        if not names or len(set(names)) < len(names):
            raise DataError(f"{entry.name} has no header, or a name twice.", "The first line names the columns.")
        return names

    def _rows_of(self, entry: Path) -> int:
        count = sum(1 for line in self._lines(entry) if any(line)) - 1
        if not 0 < count <= MAX_ROWS:
            raise DataError(f"{entry.name} has {max(count, 0)} rows.", f"At least 1, at most {MAX_ROWS}.")
        return count

    def _load_csv(self, entry: Path) -> Raw:
        header = self._header(entry)
        count = self._rows_of(entry)
        chosen = {self._action: _columns(header, self._action)}
        chosen |= {k: _columns(header, k) for k in self._states}
        chosen |= {"timestamp": [header.index("timestamp")]} if "timestamp" in header else {}
        wanted = sorted({c for part in chosen.values() for c in part})
        values = np.empty((count, len(wanted)))
        row = -1
        for line in self._lines(entry):
            if not any(line):
                continue
            if row >= 0:
                if len(line) != len(header):
                    text = f"{entry.name}: row {row + 1} has {len(line)} entries, not {len(header)}."
                    raise DataError(text, "Each row needs the same columns.")
                try:
                    values[row] = [float(line[c]) for c in wanted]
                except ValueError as error:
                    raise DataError(f"{entry.name}: row {row + 1}: {error}.", "Write numbers.") from error
            row += 1
        part = {k: values[:, [wanted.index(c) for c in columns]] for k, columns in chosen.items()}
        video = self._video(entry)
        if self.fps and abs(video.fps / self.fps - 1) > 0.01:
            text = f"{video.name} runs at {video.fps:.4g} fps, recordings.json says {self.fps:.4g}."
            raise DataError(text, "Correct one of them.")
        actions, pictures = count, video.count if video.count == count + 1 else count
        if video.count and video.count not in (count, count + 1):
            check_length(count, video.count)
        check_length(actions, pictures)
        if "timestamp" in part:
            check_clock(part["timestamp"].ravel(), self.fps or video.fps)
        states = [numbers(part[k], k, count) for k in self._states]
        if states and pictures > count:
            pictures = count  # nothing is known of the last picture's state
        joined = np.concatenate(states, axis=1).astype(np.float32) if states else None
        return Raw(numbers(part[self._action], self._action, count), pictures, joined)


class _Archive:
    """An npz file, read piece by piece: headers first, pictures one at a time, pickles never."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise DataError(f"{path.name} is no npz file: {error}.", _NPZ) from error
        self.names = [n.removesuffix(".npy") for n in self._zip.namelist() if n.endswith(".npy")]

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype, bool]:
        """(shape, dtype, whether in Fortran order) of an array, checked against its stored size."""
        with self._open(name) as (_, shape, dtype, fortran):
            return shape, dtype, fortran

    def whole(self, name: str) -> NDArray:
        """A small array (at most 1 GiB)."""
        with self._open(name) as (file, shape, dtype, fortran):
            size = math.prod(shape) * dtype.itemsize
            if size > MAX_COLUMN or (len(shape) > 1 and math.prod(shape[1:]) > MAX_ACTION_DIM):
                raise DataError(f"{name} has shape {shape}.", "A column has one row a step.")
            array = np.frombuffer(self._exactly(file, size, name), dtype)
        return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)

    def rows(self, name: str, rows: NDArray[np.int64]) -> Iterator[NDArray]:
        """Some rows of a large array, ascending, one in memory at a time."""
        with self._open(name) as (file, shape, dtype, fortran):
            if fortran:
                raise DataError(f"{name} is stored in Fortran order.", "Save numpy.ascontiguousarray(frames).")
            size, at = math.prod(shape[1:]) * dtype.itemsize, 0
            for row in rows:
                if row >= shape[0]:
                    raise DataError(f"{name} has {shape[0]} pictures.", _NPZ)
                for _ in range(int(row) - at):
                    self._exactly(file, size, name)
                at = int(row) + 1
                yield np.frombuffer(self._exactly(file, size, name), dtype).reshape(shape[1:])

    def _open(self, name: str) -> _Member:
        return _Member(self._zip, name, self._path)

    def _exactly(self, file: Any, size: int, name: str) -> bytes:
        try:
            raw = file.read(size)
        except (OSError, zipfile.BadZipFile, EOFError, ValueError, _zlib_error()) as error:
            raise DataError(f"{self._path.name}: {name} is damaged: {error}.", _NPZ) from error
        if len(raw) != size:
            raise DataError(f"{self._path.name}: {name} is cut.", _NPZ)
        return raw


class _Member:
    """One array of an archive, open after its header."""

    def __init__(self, archive: zipfile.ZipFile, name: str, path: Path) -> None:
        self._what = f"{path.name}: {name}"
        try:
            info = archive.getinfo(f"{name}.npy")
        except KeyError:
            raise DataError(f"{path.name} has no array {name!r}.", _NPZ) from None
        try:
            self._file = archive.open(info)
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{self._what} cannot be read: {error}.", _NPZ) from error
        self._size = info.file_size

    def __enter__(self) -> tuple[Any, tuple[int, ...], np.dtype, bool]:
        try:
            version = np.lib.format.read_magic(cast(Any, self._file))
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = read(cast(Any, self._file))
        except (ValueError, KeyError, OSError, zipfile.BadZipFile, EOFError, _zlib_error()) as error:
            self._file.close()
            raise DataError(f"{self._what} is no array.", _NPZ) from error
        if dtype.hasobject:
            self._file.close()
            raise DataError(f"{self._what} holds Python objects, which are never loaded.", "Save plain numbers.")
        if self._file.tell() + math.prod(shape) * dtype.itemsize != self._size:
            self._file.close()
            raise DataError(f"{self._what} is not as large as it says.", _NPZ)
        return self._file, shape, dtype, fortran

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _zlib_error() -> type[Exception]:
    import zlib

    return zlib.error


def _bounded(file: Any) -> Iterator[str]:
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise csv.Error(f"a line is longer than {MAX_LINE} characters")
        yield line


def _prefixes(header: list[str]) -> list[str]:
    """Groups of columns: "actions" for action_0, action_1 ..., and each name by itself."""
    return [_group(n) for n in header if n != "timestamp"]


def _group(name: str) -> str:
    head, _, tail = name.rpartition("_")
    if head in ("action", "state"):
        return f"{head}s"
    return head if head and tail.isdigit() else name


def _columns(header: list[str], key: str) -> list[int]:
    """Numbers of the columns of a group, in the order of the header."""
    found = [i for i, n in enumerate(header) if n == key or (n != "timestamp" and _group(n) == key)]
    if not found:
        raise DataError(f"no column of {key!r}.", f"The csv file has {', '.join(header)}.")
    return found


def _plain(entry: Path) -> str:
    """The stem, with what glob would read as a pattern taken literally."""
    import glob

    return glob.escape(entry.stem)
