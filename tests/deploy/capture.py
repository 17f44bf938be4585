"""Reading what left a site, and looking for private values in it."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 16
"""Private arrays are looked for in blocks of this many bytes: whatever holds 31 bytes of them in a row holds one."""


@dataclass(frozen=True)
class Request:
    """One HTTP request of a SuperNode."""

    path: str
    head: bytes
    body: bytes


def requests(stream: bytes) -> Iterator[Request]:
    """The HTTP/1.1 requests of one connection; one that was cut off at the end is left out.

    Raises:
        ValueError: something else stands there, so that not all of it would be judged.
    """
    while stream:
        head, end, rest = stream.partition(b"\r\n\r\n")
        if not end:
            return
        words = head.split(b"\r\n")[0].split(b" ")
        if len(words) != 3 or words[2] != b"HTTP/1.1":
            raise ValueError(f"no request: {head[:80]!r}")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if b"transfer-encoding" in fields or b"content-encoding" in fields:
            raise ValueError("a body that is not plain")
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        yield Request(words[1].decode(), head, rest[:length])
        stream = rest[length:]


def sent(folder: Path) -> list[Request]:
    """All requests of a site, connection by connection."""
    return [request for path in sorted(folder.glob("up-*")) for request in requests(path.read_bytes())]


def flower_object(content: bytes) -> tuple[str, Any]:
    """(type, object) of one of Flower's stored objects; raw bytes for an array's data."""
    from flwr.app import ConfigRecord

    head, _, body = content.partition(b"\x00")
    kind = head.split(b" ")[0].decode()
    return kind, ConfigRecord.inflate(content) if kind == "ConfigRecord" else body


def blocks(array: np.ndarray, size: int = BLOCK, distinct: int = 7) -> set[bytes]:
    """An array's bytes in blocks, without those of fewer than ``distinct`` values: too plain to be anybody's."""
    raw = np.ascontiguousarray(array).tobytes()
    cut = (raw[i : i + size] for i in range(0, len(raw) - size + 1, size))
    return {block for block in cut if len(set(block)) >= distinct}


def found_blocks(wanted: set[bytes], captured: bytes) -> int:
    """How many positions of ``captured`` hold one of the blocks (all of one size)."""
    size = len(next(iter(wanted)))
    return sum(captured[i : i + size] in wanted for i in range(len(captured) - size + 1))


def writings(value: float) -> list[bytes]:
    """A number as it could stand in a message: both byte orders of double, and its first digits as text."""
    return [
        struct.pack("<d", value),
        struct.pack(">d", value),
        f"{value:.7g}".encode(),
        repr(float(value))[:9].encode(),
    ]


def short_writings(value: float) -> list[bytes]:
    """The same as single precision: four bytes, which chance finds in megabytes of noise, so not looked for there."""
    return [struct.pack("<f", value), struct.pack(">f", value)]


def key_writings(key: bytes) -> list[bytes]:
    """A secret raw, in hex and in base64."""
    return [key, key.hex().encode(), base64.b64encode(key).rstrip(b"=")[: 4 * len(key) // 3]]


def present(needles: Iterable[bytes], captured: bytes) -> list[bytes]:
    """Those that stand in ``captured``."""
    return [needle for needle in needles if needle in captured]
