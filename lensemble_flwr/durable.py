"""Writes that survive a crash: a file is the old one or the new one, and it is on the disk before the call returns.

Each path has one writer at a time: callers that may meet another process hold a lock of their own.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from lensemble_flwr.errors import ArtifactError

Buffer = bytes | bytearray | memoryview

# macOS: fsync leaves the data in the drive's cache, F_FULLFSYNC does not.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)

_REMEDIES = {
    errno.ENOSPC: "Free space on its disk and try again.",
    errno.EDQUOT: "Raise this user's disk quota or free space, and try again.",
    errno.EFBIG: "Raise this process's limit on file sizes (ulimit -f).",
    errno.EACCES: "Make it and its folder readable and writable for the user that runs this.",
    errno.EPERM: "Make it and its folder readable and writable for the user that runs this.",
    errno.EROFS: "Its disk is mounted read-only: mount it writable or choose another folder.",
    errno.ENOENT: "Create its folder or correct the path.",
    errno.ENOTDIR: "A part of its path is a file, not a folder: correct the path.",
    errno.EISDIR: "It is a folder: give the path of a file.",
    errno.EAGAIN: "Another process is writing it: wait for that process to end.",
    errno.EIO: "Check the disk (for example with dmesg or smartctl); it may be failing.",
}


@contextmanager
def file_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn every OSError of the block into an ArtifactError ``"Cannot {doing} {path}: ..."`` with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Check the path and its disk.")
        text = f"Cannot {doing} {path}: {error.strerror or error}."
        raise ArtifactError(text, remedy, path=str(path), errno=error.errno) from error


def atomic_write(path: Path | str, data: Buffer | Iterable[Buffer], mode: int = 0o600) -> None:
    """Replace the whole content of ``path``; after a crash it holds the old bytes or the new ones, never a mixture.

    ``data`` may be several pieces, one after another, so that nobody has to join what is large.

    A temporary file in the same folder (``.NAME.tmp``, so that a crash leaves at most one), fsync, rename, fsync of
    the folder. A symbolic link is followed, so the file it points to is the one replaced.

    Raises:
        ArtifactError: disk full, no permission, no such folder, or another writer. ``path`` is then unchanged, unless
            only the last fsync failed.
    """
    pieces = (data,) if isinstance(data, (bytes, bytearray, memoryview)) else data
    with atomic_file(path, mode) as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def atomic_file(path: Path | str, mode: int = 0o600) -> Iterator[BinaryIO]:
    """:func:`atomic_write` for a writer that wants a file: what the block wrote replaces ``path`` when it ends.

    Raises:
        ArtifactError: as :func:`atomic_write`. An error of the block leaves ``path`` unchanged.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.tmp")
    with file_errors(path, "write"):
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            _claim(handle, temporary)
            try:
                os.ftruncate(handle, 0)
                os.fchmod(handle, mode)
                yield cast(BinaryIO, _Writer(handle))
                sync(handle)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)  # give the space back
                raise
        finally:
            os.close(handle)
        sync_folder(path.parent)


class _Writer(io.RawIOBase):
    """The least of a binary file over an open handle; every byte goes through :func:`write_all`."""

    def __init__(self, handle: int) -> None:
        self._handle, self._at = handle, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._handle).st_size}[whence]
        self._at = base + offset
        return self._at

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        write_all(self._handle, view, self._at)
        self._at += len(view)
        return len(view)


def append_fsync(path: Path | str, data: bytes, mode: int = 0o600) -> None:
    """Append ``data`` to ``path`` (created if missing). When this returns the bytes are on the disk.

    Raises:
        ArtifactError: as :func:`atomic_write`. The file is then cut back to its old length where the disk allows it;
            a crash, however, can leave any prefix of ``data``: the reader of a log must recognise a torn tail.
    """
    path = Path(path)
    with file_errors(path, "append to"):
        created = not path.exists()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            end = os.fstat(handle).st_size
            try:
                write_all(handle, data, end)
                sync(handle)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(handle, end)
                raise
        finally:
            os.close(handle)
        if created:
            sync_folder(path.parent)


def write_all(handle: int, data: Buffer, offset: int) -> None:
    """Write every byte of ``data`` at ``offset``. Raises OSError; a prefix may then have been written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def sync(handle: int) -> None:
    """Wait until the file's bytes are on the disk itself. Raises OSError."""
    if _FULL_SYNC is not None:
        fcntl.fcntl(handle, _FULL_SYNC)
    else:
        os.fsync(handle)


def sync_folder(folder: Path | str) -> None:
    """Make the names in a folder durable (a rename or a new file is not, until this returns).

    Raises:
        ArtifactError: no such folder, or the disk failed.
    """
    with file_errors(Path(folder), "sync the folder"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems order names by themselves
                raise
        finally:
            os.close(handle)


def _claim(handle: int, temporary: Path) -> None:
    """Refuse a second writer: two that share one temporary file would rename each other's half-written bytes."""
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not same_file(handle, temporary):  # the other writer renamed it between our open and our lock
        raise BlockingIOError(errno.EAGAIN, "another process is writing it")


def same_file(handle: int, path: Path) -> bool:
    """Whether ``path`` still names the open file (not a replaced, renamed or deleted one)."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
