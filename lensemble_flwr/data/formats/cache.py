"""Decoded pictures on the local disk, so that a video is decoded once and not in every epoch.

    DIR/<key>/frames       uint8, all pictures end to end; read through a memory map, so memory stays bounded
    DIR/<key>/done         8 bytes an episode: a mark and the CRC-32 of its pictures, written after the pictures
    DIR/<key>/bad.json     what a check of all episodes found (on_bad_episode=skip)
    DIR/<key>/lock         held, shared, while in use; a cache that nobody uses may be removed

The key is a hash of the files' stamps and of everything that decides how a picture looks, so a changed file or option
is another cache. DIR may be deleted at any time. Pictures are private: folders are 0700, files 0600.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import mmap
import os
import shutil
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.durable import atomic_write, file_errors, same_file, write_all
from lensemble_flwr.errors import ContractViolation

_MARK = b"LFC1"
_CHANNELS = 3
_CHUNK = 64  # pictures written at once
_RESIDENT = 64 << 20
"""Bytes of mapped pictures that may stay in a process's memory; they are on the disk anyway."""
_KEEP_FREE = 1 << 30
"""Bytes of its disk that a cache never takes."""


def cache_key(parts: Mapping[str, Any]) -> str:
    """Name of the cache for these stamps and options: 32 hex digits."""
    return hashlib.sha256(b"lensemble.frames\x00v1\x00" + json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class FrameCache:
    """Pictures of one source of recordings.

    Args:
        folder: DIR above; made if missing. key: of :func:`cache_key`.
        lengths: pictures of each episode. side: pixels.
        limit: bytes that all caches in ``folder`` may take together. The ones used longest ago, by nobody now, are
            removed for it; if this one alone is larger, its first episodes are kept and the rest decoded each time.

    Raises:
        ArtifactError: the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str, lengths: Sequence[int], side: int, limit: int) -> None:
        self.path, self._side = folder / key, side
        self._offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)
        picture = side * side * _CHANNELS
        with file_errors(self.path, "make the frame cache"):
            self._lock = _use(self.path)
            weakref.finalize(self, os.close, self._lock)
            wanted = int(self._offsets[-1]) * picture
            room = _make_room(folder, self.path, wanted, limit)
            self.episodes = int(np.searchsorted(self._offsets, room // picture, side="right")) - 1
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._frames = os.open(self.path / "frames", flags, 0o600)
            weakref.finalize(self, os.close, self._frames)
            self._done = os.open(self.path / "done", flags, 0o600)
            weakref.finalize(self, os.close, self._done)
            kept = int(self._offsets[self.episodes]) * picture
            if os.fstat(self._frames).st_size < kept:
                os.ftruncate(self._frames, kept)
            if os.fstat(self._done).st_size < 8 * self.episodes:
                os.ftruncate(self._done, 8 * self.episodes)
        self._map: NDArray[np.uint8] | None = None
        if kept:
            shape = (int(self._offsets[self.episodes]), side, side, _CHANNELS)
            self._pages = mmap.mmap(self._frames, kept, prot=mmap.PROT_READ)  # keeps a handle of its own
            self._map = np.frombuffer(self._pages, np.uint8).reshape(shape)
        self._good = np.zeros(self.episodes, bool)
        self._seen = 0

    def get(self, index: int) -> NDArray[np.uint8] | None:
        """The pictures of an episode [n, S, S, 3], read-only and still on the disk; None if they are not kept.

        Their checksum is verified at the first use in this process.
        """
        if index >= self.episodes or self._map is None:
            return None
        frames = self._map[self._offsets[index] : self._offsets[index + 1]]
        self._seen += frames.nbytes
        if self._seen > _RESIDENT:  # whoever still reads an older part gets its pages again from the disk's cache
            self._pages.madvise(mmap.MADV_DONTNEED)
            self._seen = frames.nbytes
        if not self._good[index]:
            entry = os.pread(self._done, 8, 8 * index)
            if entry != _MARK + zlib.crc32(frames.data).to_bytes(4, "little"):
                return None
            self._good[index] = True
        return frames

    def put(self, index: int, pictures: Iterator[NDArray[np.uint8]]) -> NDArray[np.uint8] | None:
        """Keep the pictures of an episode as they come, a few in memory at a time, and return them as :meth:`get`.

        A crash leaves the episode unmarked, or with pictures that fail their checksum: nothing has to wait for the
        disk. A full disk ends the cache at this episode and returns None: decoding goes on without it.

        Raises:
            ContractViolation: another number of pictures than was said.
        """
        if index >= self.episodes:
            return None
        start, stop = (int(n) * self._side * self._side * _CHANNELS for n in self._offsets[index : index + 2])
        crc = 0
        try:
            while chunk := list(itertools.islice(pictures, _CHUNK)):
                raw = np.stack(chunk).tobytes()
                if start + len(raw) > stop:
                    raise ContractViolation("an episode has more pictures than its cache has room for.")
                write_all(self._frames, raw, start)
                crc, start = zlib.crc32(raw, crc), start + len(raw)
            if start != stop:
                raise ContractViolation("an episode has fewer pictures than its cache has room for.")
            write_all(self._done, _MARK + crc.to_bytes(4, "little"), 8 * index)
        except OSError:
            self.episodes = index
        return self.get(index)

    def whole(self) -> NDArray[np.uint8] | None:
        """All pictures end to end [N, S, S, 3], mapped, if every episode is kept."""
        complete = self.episodes == len(self._offsets) - 1 and all(
            self.get(i) is not None for i in range(self.episodes)
        )
        return self._map if complete else None

    @property
    def bytes_kept(self) -> int:
        """Bytes on the disk."""
        return os.fstat(self._frames).st_blocks * 512


def read_notes(folder: Path, key: str) -> Any:
    """What :func:`write_notes` left for a key, or None."""
    try:
        return json.loads((folder / key / "bad.json").read_bytes())
    except (OSError, ValueError):
        return None


def write_notes(folder: Path, key: str, notes: Any) -> None:
    """Keep a small result beside the pictures (ArtifactError if the disk refuses)."""
    with file_errors(folder / key, "make the frame cache"):
        handle = _use(folder / key)
    try:
        atomic_write(folder / key / "bad.json", json.dumps(notes).encode())
    finally:
        os.close(handle)


def _use(path: Path) -> int:
    """Make a cache's folder and hold its lock, shared; returns the lock's handle."""
    while True:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # another process removed the folder meanwhile
            continue
        fcntl.flock(handle, fcntl.LOCK_SH)
        if same_file(handle, path / "lock"):
            os.utime(path / "lock")
            return handle
        os.close(handle)


def _make_room(folder: Path, own: Path, wanted: int, limit: int) -> int:
    """Remove unused caches until ``wanted`` bytes fit; how many of them do."""
    others = {p: _used(p) for p in _caches(folder) if p != own}
    free = shutil.disk_usage(folder).free - _KEEP_FREE + _used(own)
    for path in sorted(others, key=_last_use):
        if sum(others.values()) + wanted <= limit and wanted <= free:
            break
        if remove(path):
            free += others.pop(path)
    return max(0, min(wanted, limit - sum(others.values()), free))


def _caches(folder: Path) -> Iterable[Path]:
    return [p for p in folder.iterdir() if len(p.name) == 32 and (p / "lock").is_file()]


def _used(path: Path) -> int:
    try:
        return sum(p.stat().st_blocks * 512 for p in path.iterdir())
    except OSError:
        return 0


def _last_use(path: Path) -> float:
    try:
        return (path / "lock").stat().st_mtime
    except OSError:
        return time.time()


def remove(path: Path) -> bool:
    """Remove a cache that nobody uses; False if somebody does."""
    try:
        handle = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
