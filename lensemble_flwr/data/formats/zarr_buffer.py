"""The replay buffer of diffusion-policy: a zarr v2 folder with ``data/*`` joined end to end and ``meta/episode_ends``.

The chunks are read by this module and only unpacked by numcodecs. Reading them with the zarr package would take 3 MB
more and give the file the choice of any codec and of object arrays; here a chunk's size is bounded before it is
unpacked, and only codecs of plain bytes are known.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.formats.files import MAX_CHUNK, MAX_COLUMN, inside, read_bounded, read_json
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

CODECS = ("blosc", "zlib", "gzip", "zstd", "lz4")
_BROKEN = "Copy the zarr folder again, or write it with zarr_format=2."


class Array:
    """One zarr v2 array in a folder, read by rows of its first axis.

    Raises:
        DataError: no array, another version, an unknown codec, objects, or too large chunks.
    """

    def __init__(self, root: Path, name: str, follow_links: bool) -> None:
        self.name, self._root, self._links = name, root, follow_links
        meta = read_json(inside(root, f"{name}/.zarray", follow_links))
        try:
            self.shape = tuple(int(n) for n in meta["shape"])
            self.chunks = tuple(int(n) for n in meta["chunks"])
            self.dtype = np.dtype(meta["dtype"]) if isinstance(meta["dtype"], str) else None
            codec, order = meta.get("compressor"), meta.get("order", "C")
            self._separator = meta.get("dimension_separator", ".")
            fill = meta.get("fill_value")
            good = meta["zarr_format"] == 2 and len(self.shape) == len(self.chunks) >= 1
            good = good and min(self.shape) >= 0 and min(self.chunks) >= 1 and self._separator in (".", "/")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{name} is no zarr array: {error}.", _BROKEN) from error
        if not good or order != "C" or meta.get("filters"):
            raise DataError(
                f"{name} is stored in a way that is not read here.", "Store it as zarr v2, C order, no filters."
            )
        if self.dtype is None or self.dtype.hasobject or self.dtype.kind not in "fiub":
            raise DataError(f"{name} holds {meta['dtype']}, not numbers.", "Store plain numbers.")
        self._chunk_bytes = math.prod(self.chunks) * self.dtype.itemsize
        if self._chunk_bytes > MAX_CHUNK:
            raise DataError(f"{name} has chunks of more than 256 MiB.", "Store it with smaller chunks.")
        self._codec = self._decoder(codec)
        self._fill = fill if isinstance(fill, int | float) else None
        self._last: tuple[int, NDArray] | None = None

    def _decoder(self, codec: Any) -> Any:
        if codec is None:
            return None
        kind = codec.get("id") if isinstance(codec, dict) else codec
        if kind not in CODECS:
            text = f"{self.name} is packed with {kind!r}."
            raise DataError(text, f"Copy it with one of {', '.join(CODECS)} (docs/own-data.md).")
        return need("numcodecs", "zarr", "zarr folders").get_codec(dict(codec))

    def row(self, index: int) -> NDArray:
        """One row; the rows of the last chunk are kept, so reading in order unpacks each chunk once."""
        number, offset = divmod(index, self.chunks[0])
        if self._last is None or self._last[0] != number:
            self._last = (number, self._block(number))
        return self._last[1][offset]

    def rows(self, start: int, stop: int) -> NDArray:
        """Some rows as one array."""
        if (stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize > MAX_COLUMN:  # type: ignore[union-attr]
            raise DataError(f"{self.name} has more than 1 GiB in one episode.", "Choose another column.")
        parts = []
        while start < stop:
            number, offset = divmod(start, self.chunks[0])
            take = min(stop - start, self.chunks[0] - offset)
            if self._last is None or self._last[0] != number:
                self._last = (number, self._block(number))
            parts.append(self._last[1][offset : offset + take])
            start += take
        return np.concatenate(parts) if parts else np.empty((0, *self.shape[1:]), self.dtype)

    def _block(self, number: int) -> NDArray:
        """All of one step along the first axis: [chunks[0], *shape[1:]]."""
        grid = [range(-(-n // c)) for n, c in zip(self.shape[1:], self.chunks[1:], strict=True)]
        if math.prod(self.shape[1:]) * self.chunks[0] * np.dtype(self.dtype).itemsize > 4 * MAX_CHUNK:
            raise DataError(f"{self.name}: a row of chunks is larger than 1 GiB.", "Store it with smaller chunks.")
        block = np.empty((self.chunks[0], *self.shape[1:]), self.dtype)
        for place in np.ndindex(*(len(g) for g in grid)):
            chunk = self._chunk((number, *place))
            target = tuple(slice(p * c, (p + 1) * c) for p, c in zip(place, self.chunks[1:], strict=True))
            part = block[(slice(None), *target)]
            part[...] = chunk[tuple(slice(0, n) for n in part.shape)]
        return block

    def _chunk(self, place: Sequence[int]) -> NDArray:
        name = f"{self.name}/{self._separator.join(map(str, place))}"
        if not (self._root / name).exists():
            if self._fill is None:
                raise DataError(f"chunk {name} is missing.", _BROKEN)
            return np.full(self.chunks, self._fill, self.dtype)  # zarr leaves out chunks of nothing else
        raw = read_bounded(inside(self._root, name, self._links), self._chunk_bytes + (1 << 20))
        try:
            if self._codec is not None:
                raw = self._unpack(raw)
            if len(raw) != self._chunk_bytes:
                raise ValueError("another size than its description says")
        except Exception as error:  # numcodecs raises RuntimeError, ValueError, zlib.error ...
            raise DataError(f"chunk {name} is damaged: {error}.", _BROKEN) from error
        return np.frombuffer(raw, self.dtype).reshape(self.chunks)

    def _unpack(self, raw: bytes) -> bytes:
        """The chunk's bytes. Its unpacked size is known before it is unpacked, so it cannot be a bomb."""
        kind, size = self._codec.codec_id, self._chunk_bytes
        if kind in ("zlib", "gzip"):
            unpacked = zlib.decompressobj(wbits=47).decompress(raw, size + 1)
            return bytes(unpacked)
        if kind == "blosc":
            stated = int.from_bytes(raw[4:8], "little") if int.from_bytes(raw[12:16], "little") == len(raw) else -1
        elif kind == "lz4":
            stated = int.from_bytes(raw[:4], "little")
        else:
            stated = _zstd_size(raw)
        if stated != size:
            raise ValueError("cut, or of another size than its description says")
        return bytes(self._codec.decode(raw))

    def files(self) -> Iterator[Path]:
        """The description and the chunks that exist."""
        for path in sorted((self._root / self.name).rglob("*")):
            if path.is_file():
                yield path


def _zstd_size(raw: bytes) -> int:
    """The unpacked size that a zstd frame states (RFC 8878, 3.1.1.1), or -1."""
    if len(raw) < 18 or raw[:4] != b"\x28\xb5\x2f\xfd":
        return -1
    flag = raw[4]
    kind, single = flag >> 6, bool(flag & 0x20)
    width = (1 if single else 0, 2, 4, 8)[kind]
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[flag & 3]
    return int.from_bytes(raw[at : at + width], "little") + (256 if kind == 1 else 0) if width else -1


class ReplayBuffer:
    """See :class:`lensemble_flwr.data.formats.reader.Reader`."""

    format, body = "zarr", "zarr"
    fps: float | None = None

    def __init__(self, path: Path, spec: RecordingSpec) -> None:
        self.path, self._links = path, spec.follow_links
        if not (path / "meta" / "episode_ends" / ".zarray").is_file():
            newer = (path / "zarr.json").is_file()
            text = f"{path} is {'zarr v3' if newer else 'no replay buffer: meta/episode_ends is missing'}."
            raise DataError(text, "Write it with zarr_format=2 in the layout of diffusion-policy.")
        ends = self._array("meta/episode_ends")
        if len(ends.shape) != 1 or ends.shape[0] > 10_000_000 or np.dtype(ends.dtype).kind not in "iu":
            raise DataError("meta/episode_ends is no list of numbers.", _BROKEN)
        self._ends = ends.rows(0, ends.shape[0]).astype(np.int64)
        if (np.diff(self._ends, prepend=0) < 0).any():
            raise DataError("meta/episode_ends does not grow.", _BROKEN)
        names = sorted(p.parent.name for p in path.glob("data/*/.zarray"))
        arrays = {name: self._array(f"data/{name}") for name in names}
        colour = [n for n, a in arrays.items() if len(a.shape) == 4 and a.shape[-1] in (3, 4)]
        others = [n for n, a in arrays.items() if len(a.shape) in (3, 4) and n not in colour]
        self.cameras, self.camera = tuple(colour), choose_camera(spec.camera, colour, others)
        self.columns = tuple(n for n in names if n not in colour and n not in others)
        self._action = arrays[choose_column(spec.action_key or "action", self.columns)]
        self._pictures = arrays[self.camera]
        self._states = tuple(arrays[choose_column(k, self.columns)] for k in spec.state_keys or ())
        total = int(self._ends[-1]) if len(self._ends) else 0
        for array in (self._action, self._pictures, *self._states):
            if array.shape[0] < total:
                text = f"{array.name} has {array.shape[0]} rows, {total} are needed."
                raise DataError(text, "The buffer is cut: copy it again.")
        check_picture(self._pictures.shape[1:], np.dtype(self._pictures.dtype))
        self.action = ActionColumn()

    def _array(self, name: str) -> Array:
        return Array(self.path, name, self._links)

    def __len__(self) -> int:
        return len(self._ends)

    def label(self, index: int) -> str:
        return f"episode {index}"

    def _range(self, index: int) -> tuple[int, int]:
        return int(self._ends[index - 1]) if index else 0, int(self._ends[index])

    def size(self, index: int) -> tuple[int, int]:
        start, stop = self._range(index)
        return stop - start, stop - start

    def load(self, index: int) -> Raw:
        start, stop = self._range(index)
        check_length(stop - start, stop - start)
        actions = numbers(self._action.rows(start, stop), self._action.name)
        parts = [numbers(a.rows(start, stop), a.name) for a in self._states]
        states = np.concatenate(parts, axis=1).astype(np.float32) if parts else None
        return Raw(actions, stop - start, states)

    def frames(self, index: int, rows: NDArray[np.int64]) -> Iterator[NDArray]:
        start, stop = self._range(index)
        for row in rows:
            yield self._pictures.row(min(start + int(row), stop - 1))

    def files(self) -> Iterator[Path]:
        for array in (self._action, self._pictures, *self._states):
            yield from array.files()
        yield from self._array("meta/episode_ends").files()
