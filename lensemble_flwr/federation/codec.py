"""Canonical binary records: one byte string per value, strict and bounded in both directions.

A record is ``magic | version | fields``, big-endian, fields in declared order without names or padding. Equal values
give equal bytes, so a hash of the bytes names the value; anything that is not exactly the encoding of some value is
refused, so nothing can ride along.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, get_type_hints

from lensemble_flwr.errors import ContractViolation, RoundError

IDENTITY_BYTES = 32
HASH_BYTES = 32
SIGNATURE_BYTES = 64
_FIXED = {"hash": HASH_BYTES, "signature": SIGNATURE_BYTES}
MAX_ROSTER = 4096


@dataclass(frozen=True)
class Kind:
    """How one field is written: a struct format, or a special kind with its own bounds."""

    name: str
    fmt: str = ""


U8, U16, U32, U64 = Kind("u8", ">B"), Kind("u16", ">H"), Kind("u32", ">I"), Kind("u64", ">Q")
I32, F64 = Kind("i32", ">i"), Kind("f64", ">d")
HASH, HASHES, SIGNATURE = Kind("hash"), Kind("hashes"), Kind("signature")


def wire(kind: Kind) -> Any:
    """Declares how a dataclass field is encoded."""
    return dataclasses.field(metadata={"wire": kind})


R = TypeVar("R", bound="Record")


@dataclass(frozen=True)
class Record:
    """Base of the canonical records. Subclasses set ``MAGIC`` (4 bytes) and ``VERSION``."""

    MAGIC: ClassVar[bytes] = b"????"
    VERSION: ClassVar[int] = 1

    def encode(self) -> bytes:
        """The canonical bytes of this record.

        Raises:
            ContractViolation: a field does not fit its declared kind.
        """
        parts = [self.MAGIC, struct.pack(">H", self.VERSION)]
        for field in dataclasses.fields(self):
            kind, value = field.metadata["wire"], getattr(self, field.name)
            try:
                parts.append(_encode_field(kind, value))
            except (struct.error, TypeError, ValueError) as error:
                raise ContractViolation(
                    f"{type(self).__name__}.{field.name}={value!r} is not a {kind.name}."
                ) from error
        return b"".join(parts)

    @classmethod
    def decode(cls: type[R], body: bytes) -> R:
        """The record whose canonical bytes are ``body``.

        Raises:
            RoundError: another kind or version of record, truncated, trailing bytes, non-canonical values.
        """
        head = cls.MAGIC + struct.pack(">H", cls.VERSION)
        if not isinstance(body, bytes) or body[: len(head)] != head:
            raise RoundError(
                f"The message is not a {cls.__name__} of version {cls.VERSION}.",
                "Both sides must run the same release.",
            )
        offset, values = len(head), {}
        hints = _hints(cls)  # type: ignore[arg-type]
        for field in dataclasses.fields(cls):
            value, offset = _decode_field(field.metadata["wire"], body, offset, cls.__name__)
            values[field.name] = bool(value) if hints[field.name] is bool else value
        if offset != len(body):
            raise RoundError(f"The {cls.__name__} has {len(body) - offset} bytes too many.")
        try:
            record = cls(**values)
        except ContractViolation as error:
            raise RoundError(f"The {cls.__name__} is inconsistent: {error.message}") from error
        if record.encode() != body:
            raise RoundError(f"The {cls.__name__} is not in canonical form.")
        return record


@lru_cache(maxsize=16)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _encode_field(kind: Kind, value: Any) -> bytes:
    if kind.name in _FIXED:
        if not isinstance(value, bytes) or len(value) != _FIXED[kind.name]:
            raise ValueError(f"need {_FIXED[kind.name]} bytes")
        return value
    if kind is HASHES:
        if len(value) > MAX_ROSTER or any(not isinstance(v, bytes) or len(v) != HASH_BYTES for v in value):
            raise ValueError("need a list of 32-byte strings")
        return struct.pack(">I", len(value)) + b"".join(value)
    if kind is F64 and not math.isfinite(value):
        raise ValueError("need a finite number")
    return struct.pack(kind.fmt, value)


def _decode_field(kind: Kind, body: bytes, offset: int, where: str) -> tuple[Any, int]:
    def take(count: int) -> bytes:
        if offset + count > len(body):
            raise RoundError(f"The {where} is truncated.")
        return body[offset : offset + count]

    if kind.name in _FIXED:
        count = _FIXED[kind.name]
        return take(count), offset + count
    if kind is HASHES:
        (count,) = struct.unpack(">I", take(4))
        if count > MAX_ROSTER:  # bounded before anything is read
            raise RoundError(f"The {where} names {count} participants; at most {MAX_ROSTER} are possible.")
        offset += 4
        block = take(count * HASH_BYTES)
        return tuple(block[i : i + HASH_BYTES] for i in range(0, len(block), HASH_BYTES)), offset + len(block)
    size = struct.calcsize(kind.fmt)
    (value,) = struct.unpack(kind.fmt, take(size))
    if kind is F64 and not math.isfinite(value):
        raise RoundError(f"The {where} holds a number that is not finite.")
    return value, offset + size
