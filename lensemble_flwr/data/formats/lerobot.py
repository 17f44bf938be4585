"""LeRobotDataset v3.0 (many episodes a file) and v2.x (a file an episode): parquet columns, mp4 or embedded pictures.

v3.0: ``meta/info.json``, ``meta/stats.json``, ``meta/episodes/*/*.parquet`` (which rows of which file, and from which
second of which video, an episode is), ``data/*/*.parquet``, ``videos/CAMERA/*/*.mp4``. v2.x: ``meta/episodes.jsonl``
and ``meta/episodes_stats.jsonl`` instead, and paths that hold the number of the episode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.formats.files import MAX_JSON, inside, parse_json, read_bounded, read_json, walk
from lensemble_flwr.data.formats.pictures import decode_image
from lensemble_flwr.data.formats.reader import (
    ActionColumn,
    Raw,
    check_clock,
    check_length,
    choose_camera,
    choose_column,
    need,
    numbers,
)
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.data.formats.video import Video, Videos
from lensemble_flwr.errors import DataError

MAX_GROUP = 1 << 30
"""Largest row group, uncompressed bytes of the columns that are read at once."""

MAX_EPISODES = 10_000_000
_BROKEN = "Download the data set again; a copy may have been cut short."
_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")


@dataclass(frozen=True, eq=False)
class Table:
    """Where each episode lies. Arrays of length E, by episode number; files by name below the folder.

    Attributes:
        number, length: int64. file: index into ``files`` of the parquet file. row: first row in that file.
        video: index into ``videos``, or -1 where pictures are in the parquet file. second: start in the video.
    """

    number: NDArray[np.int64]
    length: NDArray[np.int64]
    file: NDArray[np.int64]
    row: NDArray[np.int64]
    video: NDArray[np.int64]
    second: NDArray[np.float64]
    files: list[str]
    videos: list[str]


def open_lerobot(path: Path, spec: RecordingSpec) -> LeRobot:
    """The reader of a LeRobotDataset of version 3.x or 2.x.

    Raises:
        DataError: another version, damaged metadata, or no such camera or column.
    """
    info = read_json(inside(path, "meta/info.json", spec.follow_links))
    version = str(info.get("codebase_version", ""))
    if not re.match(r"v[23]\.", version):
        text = f"{path} is a LeRobotDataset {version or 'without a version'}; v3.x and v2.x are read."
        raise DataError(text, "Convert it with LeRobot's own script.")
    return LeRobot(path, spec, info, version)


class LeRobot:
    """See :class:`lensemble_flwr.data.formats.reader.Reader`."""

    format = "lerobot"

    def __init__(self, path: Path, spec: RecordingSpec, info: dict, version: str) -> None:
        self._pq = need("pyarrow.parquet", "lerobot", "LeRobot data sets")
        self._pa = need("pyarrow", "lerobot", "LeRobot data sets")
        self.path, self._links, self.version = path, spec.follow_links, version
        features = info.get("features")
        fps = info.get("fps")
        if not isinstance(features, dict) or not all(isinstance(f, dict) for f in features.values()):
            raise DataError("meta/info.json names no features.", _BROKEN)
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 10_000:
            raise DataError(f"meta/info.json says fps={fps!r}.", "Correct it: a positive number.")
        self.fps: float | None = float(fps)
        self._rate = float(fps)
        robot = info.get("robot_type")
        self.body = str(robot) if robot else "lerobot"
        pictures = {k: f for k, f in features.items() if f.get("dtype") in ("video", "image")}
        colour = [k for k, f in pictures.items() if _is_colour(k, f)]
        self.cameras = tuple(sorted(colour))
        self.camera = choose_camera(spec.camera, colour, sorted(set(pictures) - set(colour)))
        self._in_video = pictures[self.camera]["dtype"] == "video"
        self.columns = tuple(k for k in features if k not in pictures)
        self._action = choose_column(spec.action_key or "action", self.columns)
        self._states = tuple(choose_column(k, self.columns) for k in spec.state_keys or ())
        self._has_clock = "timestamp" in self.columns
        stated = info.get("total_episodes")
        rows = self._episodes_v3() if version.startswith("v3.") else self._episodes_v2(info)
        self._table = _table(rows, info, self.camera if self._in_video else None, version)
        found = len(self._table.number)
        if isinstance(stated, int) and stated != found:
            raise DataError(f"meta/info.json counts {stated} episodes, the table of episodes {found}.", _BROKEN)
        self.action = self._action_column(features[self._action])
        self._videos = Videos()
        self._parquet: tuple[str, Any, list[int]] | None = None

    # ------------------------------------------------------------------ metadata

    def _episodes_v3(self) -> list[dict[str, Any]]:
        """Rows of meta/episodes, statistics left out."""
        wanted = ["episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index"]
        if self._in_video:
            wanted += [f"videos/{self.camera}/{k}" for k in ("chunk_index", "file_index", "from_timestamp")]
        rows: list[dict[str, Any]] = []
        for path in walk(self.path / "meta" / "episodes", (".parquet",), depth=2):
            name = str(path.relative_to(self.path))
            file = self._open_parquet(name)
            missing = [c for c in wanted if c not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{name} has no column {missing[0]!r}.", _BROKEN)
            if file.metadata.num_rows + len(rows) > MAX_EPISODES:
                raise DataError(f"more than {MAX_EPISODES} episodes.", "Split the data set.")
            for group in range(file.num_row_groups):
                rows += self._read(file, name, [group], wanted).to_pylist()
        return rows

    def _episodes_v2(self, info: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._lines("meta/episodes.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        raw = read_bounded(inside(self.path, name, self._links), 4 * MAX_JSON)
        rows = [parse_json(line, name) for line in raw.splitlines() if line.strip()]
        if not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{name} holds a line that is no mapping.", _BROKEN)
        return rows

    def _action_column(self, feature: dict[str, Any]) -> ActionColumn:
        shape = feature.get("shape")
        width = int(np.prod(shape)) if isinstance(shape, list) and all(isinstance(s, int) for s in shape) else 0
        low, high = self._bounds(self._action, width)
        if str(feature.get("dtype", "")).startswith("int") and width == 1 and high is not None and low is not None:
            first = int(min(0, low[0]))
            return ActionColumn("discrete", (int(high[0]) - first + 1,), first=(first,))
        return ActionColumn(low=low, high=high, names=_names(feature.get("names"), width))

    def _bounds(self, column: str, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]] | tuple[None, None]:
        """Smallest and largest values that the data set's own statistics state, or (None, None)."""
        if (self.path / "meta" / "stats.json").exists():
            stats = [read_json(inside(self.path, "meta/stats.json", self._links)).get(column)]
        elif (self.path / "meta" / "episodes_stats.jsonl").exists():
            lines = self._lines("meta/episodes_stats.jsonl")
            stats = [s.get(column) if isinstance(s := line.get("stats"), dict) else None for line in lines]
        else:
            return None, None
        try:
            low = np.array([np.ravel(np.asarray(s["min"], np.float64)) for s in stats if s]).min(axis=0)
            high = np.array([np.ravel(np.asarray(s["max"], np.float64)) for s in stats if s]).max(axis=0)
        except (ValueError, TypeError, KeyError):
            return None, None
        ok = low.shape == high.shape == (width,) and np.isfinite(low).all() and np.isfinite(high).all()
        return (low, high) if ok and (low <= high).all() else (None, None)

    # ------------------------------------------------------------------ episodes

    def __len__(self) -> int:
        return len(self._table.number)

    def label(self, index: int) -> str:
        return f"episode {self._table.number[index]}"

    def size(self, index: int) -> tuple[int, int]:
        length = int(self._table.length[index])
        return length, length

    def load(self, index: int) -> Raw:
        length = int(self._table.length[index])
        check_length(length, length)
        there = ["timestamp"] if self._has_clock else []
        there += ["episode_index"] if "episode_index" in self.columns else []
        table = self._rows(index, list(dict.fromkeys([self._action, *self._states, *there])))
        if "episode_index" in there:
            numbered = self._array(table, "episode_index").ravel()
            if (numbered != self._table.number[index]).any():
                raise DataError("rows of another episode are where the metadata says this one is.", _BROKEN)
        actions = numbers(self._array(table, self._action), f"column {self._action!r}", length)
        clock = self._array(table, "timestamp").ravel().astype(np.float64) if self._has_clock else None
        if clock is not None:
            check_clock(clock, self.fps)
        states = None
        if self._states:
            parts = [numbers(self._array(table, k), f"column {k!r}", length) for k in self._states]
            states = np.concatenate(parts, axis=1).astype(np.float32)
        if self._in_video:
            self._check_video(index, length)
        return Raw(actions, length, states, clock)

    def _check_video(self, index: int, length: int) -> None:
        video = self._video(index)
        if abs(video.fps / self._rate - 1) > 0.01:
            raise DataError(
                f"{video.name} runs at {video.fps:.4g} fps, meta/info.json says {self._rate:.4g}.",
                "Correct fps in meta/info.json, or encode the video again.",
            )
        second = float(self._table.second[index])
        if not math.isfinite(second) or second < 0:
            raise DataError(f"the video starts at {second} s, says the metadata.", _BROKEN)
        if video.count and round(second * self._rate) + length > video.count:
            raise DataError(
                f"{video.name} has {video.count} pictures, {round(second * self._rate) + length} are needed.",
                _BROKEN,
            )

    def _video(self, index: int) -> Video:
        name = self._table.videos[self._table.video[index]]
        return self._videos.get(inside(self.path, name, self._links), name)

    def frames(self, index: int, rows: NDArray[np.int64]) -> Iterator[NDArray]:
        if self._in_video:
            video = self._video(index)
            times = float(self._table.second[index]) + np.asarray(rows, np.float64) / self._rate
            yield from video.at(times, 0.5 / self._rate)
            return
        wanted = set(int(r) for r in rows)
        last = max(wanted, default=-1)
        for row, value in enumerate(self._stream(index, self.camera)):
            if row > last:
                break
            if row in wanted:
                raw = value.get("bytes") if isinstance(value, dict) else value
                if not isinstance(raw, bytes):
                    raise DataError(f"picture {row} is not in the parquet file.", "Write the data set again.")
                yield decode_image(raw)

    def files(self) -> Iterator[Path]:
        names = ["meta/info.json", "meta/stats.json", "meta/episodes.jsonl", "meta/episodes_stats.jsonl"]
        yield from (self.path / n for n in names if (self.path / n).exists())
        if self.version.startswith("v3."):
            yield from walk(self.path / "meta" / "episodes", (".parquet",), depth=2)
        for name in [*self._table.files, *self._table.videos]:
            if (self.path / name).exists():  # a missing one is a bad episode, not a bad data set
                yield inside(self.path, name, self._links)

    @property
    def decoded(self) -> int:
        """Video pictures decoded so far."""
        return self._videos.decoded

    # ------------------------------------------------------------------ parquet

    def _open_parquet(self, name: str) -> Any:
        path = inside(self.path, name, self._links)
        try:
            return self._pq.ParquetFile(path, pre_buffer=False, thrift_string_size_limit=1 << 28)
        except (self._pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{name} is no whole parquet file: {_first_line(error)}.", _BROKEN) from error

    def _read(self, file: Any, name: str, groups: list[int], columns: list[str]) -> Any:
        self._check_groups(file, name, groups, columns, numbers=True)
        try:
            return file.read_row_groups(groups, columns=columns, use_threads=False)
        except (self._pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{name} is damaged: {_first_line(error)}.", _BROKEN) from error

    @staticmethod
    def _check_groups(file: Any, name: str, groups: list[int], columns: list[str], *, numbers: bool = False) -> int:
        """Refuse what would not fit into memory; bytes that one entry takes at most."""
        largest, schema = 1, file.metadata.schema
        half = {c.path for c in map(schema.column, range(len(schema))) if c.logical_type.type == "FLOAT16"}
        for group in groups:
            meta = file.metadata.row_group(group)
            parts = [meta.column(i) for i in range(meta.num_columns)]
            # Names of columns have dots of their own, as observation.state.
            read = [p for p in parts if any(f"{p.path_in_schema}.".startswith(f"{c}.") for c in columns)]
            # One long text, in the dictionary once, is decoded as often as it is pointed at.
            texts = [p for p in read if p.physical_type.endswith("BYTE_ARRAY") and p.path_in_schema not in half]
            if numbers and texts:
                raise DataError(f"{name}: column {texts[0].path_in_schema!r} holds no numbers.", _BROKEN)
            largest = max([largest, *(p.total_uncompressed_size for p in texts)])
            # A run of equal values takes a few bytes in the file, whatever its length.
            sizes = [max(p.total_uncompressed_size, 8 * p.num_values) for p in read]
            if sum(sizes) > MAX_GROUP:
                raise DataError(f"{name}: a row group is larger than 1 GiB.", "Write it with smaller row groups.")
        return largest

    def _place(self, index: int, columns: list[str]) -> tuple[Any, str, list[int], int]:
        """(open file, its name, row groups, first row within them) of an episode."""
        name = self._table.files[self._table.file[index]]
        if self._parquet is None or self._parquet[0] != name:
            file = self._open_parquet(name)
            sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
            self._parquet = (name, file, [0, *np.cumsum(sizes).tolist()])
        _, file, bounds = self._parquet
        missing = [c for c in columns if c not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{name} has no column {missing[0]!r}.", _BROKEN)
        start, length = int(self._table.row[index]), int(self._table.length[index])
        if start < 0 or start + length > bounds[-1]:
            raise DataError(f"{name} has {bounds[-1]} rows, {start + length} are needed.", _BROKEN)
        groups = [g for g in range(len(bounds) - 1) if bounds[g] < start + length and bounds[g + 1] > start]
        return file, name, groups, start - (bounds[groups[0]] if groups else 0)

    def _rows(self, index: int, columns: list[str]) -> Any:
        file, name, groups, offset = self._place(index, columns)
        return self._read(file, name, groups, columns).slice(offset, int(self._table.length[index]))

    def _stream(self, index: int, column: str) -> Iterator[Any]:
        """One column of an episode, row by row, a few rows in memory."""
        file, name, groups, offset = self._place(index, [column])
        rows = max(1, min(16, MAX_GROUP // self._check_groups(file, name, groups, [column])))
        length = int(self._table.length[index])
        try:
            seen = 0
            for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=[column], use_threads=False):
                for at in range(batch.num_rows):
                    if offset <= seen < offset + length:
                        yield batch.column(0)[at].as_py()
                    seen += 1
                if seen >= offset + length:
                    return
        except (self._pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{name} is damaged: {_first_line(error)}.", _BROKEN) from error

    def _array(self, table: Any, column: str) -> NDArray:
        """A column of numbers or of equally long lists of numbers: [N] or [N, a]."""
        values = table[column].combine_chunks()
        if values.null_count:
            raise DataError(f"column {column!r} has empty rows.", _BROKEN)
        types = self._pa.types
        if types.is_fixed_size_list(values.type) or types.is_list(values.type) or types.is_large_list(values.type):
            lengths = values.value_lengths().to_numpy(zero_copy_only=False)
            if len(lengths) and (lengths != lengths[0]).any():
                raise DataError(f"column {column!r}: rows differ in length.", "Each step needs the same entries.")
            flat = values.flatten()
            if flat.null_count:
                raise DataError(f"column {column!r} has empty entries.", _BROKEN)
            return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(values), -1)
        return np.asarray(values.to_numpy(zero_copy_only=False))


def _table(rows: list[dict[str, Any]], info: dict[str, Any], camera: str | None, version: str) -> Table:
    """Rows of the metadata as arrays, by number of the episode."""
    try:
        rows = sorted(rows, key=lambda row: row["episode_index"])
        number = np.array([row["episode_index"] for row in rows], np.int64)
        length = np.array([row["length"] for row in rows], np.int64)
        files: dict[str, int] = {}
        videos: dict[str, int] = {}
        file, video, first = [], [], np.zeros(len(rows), np.int64)
        second = np.zeros(len(rows))
        chunk = info.get("chunks_size", 1000) or 1000
        for i, row in enumerate(rows):
            values = {"episode_index": row["episode_index"], "episode_chunk": row["episode_index"] // chunk}
            v3 = version.startswith("v3.")
            if v3:
                values |= {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
                first[i] = row["dataset_from_index"]
            file.append(files.setdefault(_expand(info.get("data_path"), values), len(files)))
            if camera is None:
                video.append(-1)
                continue
            if v3:
                key = f"videos/{camera}/"
                values |= {"chunk_index": row[f"{key}chunk_index"], "file_index": row[f"{key}file_index"]}
                second[i] = row[f"{key}from_timestamp"]
            values |= {"video_key": camera}
            video.append(videos.setdefault(_expand(info.get("video_path"), values), len(videos)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        text = f"the table of episodes is damaged ({type(error).__name__}: {error})."
        raise DataError(text, _BROKEN) from error
    twice = number[:-1][number[1:] == number[:-1]]
    if len(twice):
        raise DataError(f"episode {twice[0]} is listed twice.", "Remove one of the two from the metadata.")
    if len(length) and (length.min() < 0 or length.max() > 1 << 40):
        raise DataError("an episode's length is out of range.", _BROKEN)
    where = np.array(file, np.int64)
    starts = np.full(len(files), np.iinfo(np.int64).max)
    np.minimum.at(starts, where, first)
    return Table(
        number, length, where, first - starts[where], np.array(video, np.int64), second, list(files), list(videos)
    )


def _expand(template: Any, values: Mapping[str, Any]) -> str:
    """A path template of info.json: only {name} and {name:03d} with known names, nothing of str.format's powers."""
    if not isinstance(template, str) or len(template) > 1000:
        raise DataError("meta/info.json has no path template.", _BROKEN)

    def fill(match: re.Match) -> str:
        value = values[match[1]]
        return f"{int(value):0{int(match[2])}d}" if match[2] else str(value)

    path = _FIELD.sub(fill, template)
    if "{" in path or "}" in path:
        raise DataError(f"meta/info.json has a path template that is not understood: {template!r}.", _BROKEN)
    return path


def _is_colour(key: str, feature: Mapping[str, Any]) -> bool:
    shape, names = feature.get("shape"), feature.get("names")
    info = feature.get("info") or feature.get("video_info") or {}
    if isinstance(info, dict) and (info.get("video.is_depth_map") or info.get("is_depth_map")):
        return False
    if not isinstance(shape, list) or len(shape) != 3:
        return False
    at = 2
    if isinstance(names, list) and len(names) == 3:
        at = next((i for i, n in enumerate(names) if str(n).startswith("channel")), 2)
    return shape[at] in (3, 4)


def _names(names: Any, width: int) -> tuple[str, ...] | None:
    """Names of the entries: a list, or a mapping of one list (older data sets)."""
    if isinstance(names, dict):
        names = [n for part in names.values() if isinstance(part, list) for n in part]
    if isinstance(names, list) and len(names) == width and all(isinstance(n, str) for n in names):
        return tuple(names)
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
