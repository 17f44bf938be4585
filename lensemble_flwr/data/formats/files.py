"""Files of somebody's recordings, opened with care: below their folder, ordinary, and not larger than they may be."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lensemble_flwr.errors import DataError

MAX_JSON = 64 << 20
MAX_CHUNK = 1 << 28
"""Bytes of one unpacked chunk of an array."""
MAX_COLUMN = 1 << 30
"""Bytes of one whole column, of actions or states, that is read at once."""


def inside(root: Path, relative: str, follow_links: bool) -> Path:
    """The ordinary file ``relative`` below ``root``.

    Raises:
        DataError: it is missing, no ordinary file, or outside: by ``..``, an absolute path or a symbolic link.
    """
    parts = Path(relative).parts
    if not parts or Path(relative).is_absolute() or ".." in parts or "\0" in relative:
        raise DataError(f"the metadata names a file outside the recordings: {relative!r}.", "Do not use this data.")
    return ordinary(root / relative, root, follow_links)


def ordinary(path: Path, root: Path, follow_links: bool) -> Path:
    """``path`` itself, if it is an ordinary file below ``root`` (DataError else)."""
    try:
        real = Path(os.path.realpath(path, strict=True))
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:
        name = path.relative_to(root) if path.is_relative_to(root) else path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name} cannot be read: {reason}.", "Download or copy the recordings again.") from error
    if not follow_links and not real.is_relative_to(Path(os.path.realpath(root))):
        raise DataError(
            f"{path.name} is a link that leaves the folder of the recordings.",
            "If you made that link (a download cache does), set follow_links to true.",
        )
    if not stat.S_ISREG(mode):
        raise DataError(f"{path.name} is no ordinary file.", "Remove it from the recordings.")
    return real


def walk(root: Path, suffixes: tuple[str, ...], depth: int = 1) -> Iterator[Path]:
    """Files below ``root`` with one of ``suffixes``, by name; hidden ones and deeper levels are left out."""
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise DataError(f"{root} cannot be listed: {error.strerror}.", "Correct the path or its rights.") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            if depth > 1:
                yield from walk(entry, suffixes, depth - 1)
        elif entry.suffix.lower() in suffixes:
            yield entry


def read_bounded(path: Path, limit: int) -> bytes:
    """A whole file of at most ``limit`` bytes (DataError else)."""
    try:
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}.", "Check the file and its rights.") from error
    if len(raw) > limit:
        raise DataError(f"{path.name} is larger than {limit >> 20} MiB.", "It is no file of this format.")
    return raw


def parse_json(raw: bytes | str, name: str) -> Any:
    """JSON of a file called ``name`` (DataError if it is none)."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is no JSON: {error}.", "Download or write it again.") from error


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON file whose top is a ``kind``."""
    value = parse_json(read_bounded(path, MAX_JSON), path.name)
    if not isinstance(value, kind):
        raise DataError(f"{path.name} holds no {kind.__name__}.", "It is no file of this format.")
    return value


def stamps(files: Iterable[Path], root: Path) -> str:
    """Hex digest of the names, sizes and times of some files: cheap, and another one when a file was changed."""
    digest = hashlib.sha256(b"lensemble.stamps\x00v1\x00")
    for path in sorted(files):
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.", "Restore the file.") from error
        name = os.path.relpath(path, root)
        digest.update(
            f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\0".encode(errors="surrogateescape")
        )
    return digest.hexdigest()
