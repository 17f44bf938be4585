"""The ledger's two files as bytes: framed, chained records, the head, and what a crash may have left of them.

A record is one line of ASCII JSON: the frame (``crc``, ``len``, ``prev``), then the body's keys in sorted order, no
blanks, floats in their shortest form that reads back to the same float64:

    {"crc":"<8 hex>","len":"<6 digits>","prev":"<64 hex>",...body...}

``prev`` is the SHA-256 of the line before (64 zeros in the first one), ``len`` the bytes of this line, ``crc`` the
CRC-32 of everything after the crc field; none counts the newline. The head names the last record and its hash, so the
chain, read from there, vouches for every byte before it; ``crc`` and ``len`` vouch for the one record that a crash can
leave beyond the head. Nothing here reads a clock.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lensemble_flwr.durable import file_errors
from lensemble_flwr.errors import ArtifactError, LedgerError

NO_HASH = "0" * 64
"""``prev`` of the first record."""

LONGEST = 999_999
"""Most bytes of one record."""

_CRC = len('{"crc":"00000000",')
_PREV = _CRC + len('"len":"000000","prev":"')
_BODY = _PREV + len(NO_HASH) + len('",')


def canonical(body: Mapping[str, Any]) -> bytes:
    """The one JSON form of a record's body. Raises ValueError for NaN and infinities."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def frame(body: bytes, prev: str) -> bytes:
    """The line, without its newline, of a canonical and non-empty body after the record whose hash is ``prev``.

    Raises:
        LedgerError: the record is too long.
    """
    length = _BODY + len(body) - 1  # the body's opening brace stands at the front
    if length > LONGEST:
        raise LedgerError(f"A ledger record of {length} bytes is too long.", f"Keep it below {LONGEST} bytes.")
    framed = b'"len":"%06d","prev":"%s",%s' % (length, prev.encode("ascii"), body[1:])
    return b'{"crc":"%08x",%s' % (zlib.crc32(framed), framed)


def previous(line: bytes) -> bytes:
    """The hash that a line names as that of the record before it."""
    return line[_PREV : _PREV + len(NO_HASH)]


def is_whole(line: bytes) -> bool:
    """Whether ``line`` is one complete record, wherever it belongs."""
    prev = previous(line).decode("ascii", errors="replace")
    try:
        return line == frame(b"{" + line[_BODY:], prev)
    except (LedgerError, UnicodeEncodeError):
        return False


def record_hash(line: bytes) -> str:
    """SHA-256 of a record's line."""
    return hashlib.sha256(line).hexdigest()


def bodies(lines: list[bytes]) -> list[dict[str, Any]]:
    """The bodies of whole records. Raises ValueError when one is no JSON object."""
    # One call of the C parser for the whole file: three times as fast as one call a line.
    return json.loads(b"[" + b",".join(b"{" + line[_BODY:] for line in lines) + b"]")


@dataclass(frozen=True)
class Head:
    """The record that the ledger is known to have reached: its number and its hash."""

    seq: int
    hash: str

    def __str__(self) -> str:
        """The line to note elsewhere."""
        return f"{self.seq}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Strict inverse of :meth:`__str__`. Raises ValueError."""
        seq, _, digest = text.partition(":")
        head = cls(int(seq), digest)
        if head.seq < 0 or len(bytes.fromhex(digest)) != 32 or str(head) != text:
            raise ValueError(text)
        return head

    def encode(self) -> bytes:
        return canonical({"hash": self.hash, "seq": self.seq}) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Strict inverse of :meth:`encode`. Raises ValueError."""
        values = json.loads(data)
        head = cls(values["seq"], values["hash"]) if isinstance(values, dict) and len(values) == 2 else None
        if head is None or type(head.seq) is not int or head.seq < 0 or head.encode() != data:
            raise ValueError("not a head")
        return head


def default_head_path(path: Path) -> Path:
    """``ledger.head`` beside ``ledger.jsonl``."""
    return path.with_suffix(".head")


def remedy(path: Path) -> str:
    """What to do about a damaged ledger."""
    return f"Stop this participant and run `lensemble ledger verify {path}`; only its operator may repair it."


@contextmanager
def ledger_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn every failure to read or write files in the block into a LedgerError with the same text and remedy."""
    try:
        with file_errors(path, doing):
            yield
    except ArtifactError as error:
        raise LedgerError(error.message, error.remediation, **error.fields) from error


def read_bytes(path: Path, what: str) -> bytes:
    """The content of one of the two files.

    Raises:
        LedgerError: missing or unreadable.
    """
    try:
        with ledger_errors(path, "read"):
            return path.read_bytes()
    except LedgerError as error:
        if path.exists():
            raise
        raise LedgerError(
            f"The privacy ledger's {what} {path} is missing.",
            "Correct the path or mount its disk. A new participant starts with `lensemble ledger init`; for an old one "
            "a lost file may hide spent budget, and only `lensemble ledger repair` by its operator goes on.",
        ) from error


def read_head(head_path: Path, path: Path) -> Head:
    """The head.

    Raises:
        LedgerError: missing, unreadable or damaged.
    """
    data = read_bytes(head_path, "head")
    try:
        return Head.decode(data)
    except (ValueError, KeyError) as error:
        raise LedgerError(f"The privacy ledger's head {head_path} is damaged.", remedy(path)) from error


@dataclass(frozen=True)
class Chain:
    """The records in effect, and what lies behind them."""

    lines: list[bytes]
    """From the last checkpoint on if a shortcut was taken, else from genesis on."""
    first: int
    """Number of the first of ``lines``."""
    size: int
    """Bytes of all records in effect."""
    head: Head
    """The last record in effect: the one that the head names, or the one whole record beyond it."""
    beyond: bool
    """A crash came between a record and its head: the last record is whole and counts, the head lags behind."""
    torn: bytes
    """What a crash left of a record that was never completed, and so never took effect."""


def check_chain(data: bytes, head: Head, path: Path, shortcut: bool = True) -> Chain:
    """Judge the log's bytes by the head.

    Every byte up to the head is vouched for, record by record, or with ``shortcut`` by one hash of all that stands
    before the last checkpoint.

    Raises:
        LedgerError: shorter than the head, edited, reordered, or more than one record beyond the head.
    """
    start, first, prev = _last_checkpoint(data, head) if shortcut else _GENESIS
    *lines, cut = data[start:].split(b"\n")
    covered = head.seq + 1 - first
    if len(lines) < covered:
        raise LedgerError(
            f"The privacy ledger {path} has {first + len(lines)} whole records, but its head names record {head.seq} "
            "(counted from 0): records were lost, or an old copy was put back.",
            remedy(path),
            seq=head.seq,
        )
    for seq, line in enumerate(lines[:covered], first):
        if previous(line) != prev.encode("ascii"):
            raise LedgerError(
                f"The chain of the privacy ledger {path} breaks at record {seq}: it or the one before was changed.",
                remedy(path),
                seq=seq,
            )
        prev = record_hash(line)
    if prev != head.hash:
        raise LedgerError(
            f"Record {head.seq} of the privacy ledger {path} is not the one that its head names.",
            remedy(path),
            seq=head.seq,
        )
    rest = lines[covered:] + ([cut] if cut else [])
    if len(rest) > 1:
        raise LedgerError(
            f"The privacy ledger {path} goes on for {len(rest)} lines after its head at record {head.seq}; a crash "
            "leaves at most one: the head is older than the log, or something else wrote to it.",
            remedy(path),
            seq=head.seq,
        )
    if rest and not cut and is_whole(rest[0]):
        if previous(rest[0]) != prev.encode("ascii"):
            raise LedgerError(
                f"The privacy ledger {path} goes on after its head with a record that does not belong there.",
                remedy(path),
                seq=head.seq + 1,
            )
        return Chain(lines, first, len(data), Head(head.seq + 1, record_hash(rest[0])), beyond=True, torn=b"")
    lines = lines[:covered]
    size = start + sum(map(len, lines)) + covered
    return Chain(lines, first, size, head, beyond=False, torn=data[size:])


_GENESIS = 0, 0, NO_HASH


def _last_checkpoint(data: bytes, head: Head) -> tuple[int, int, str]:
    """Where to start: offset and number of the last checkpoint that vouches for all before it, and the hash before."""
    mark = data.rfind(b'"kind":"checkpoint"')
    start, end = data.rfind(b"\n", 0, max(mark, 0)) + 1, data.find(b"\n", mark)
    if mark < 0 or end < 0 or not is_whole(data[start:end]):
        return _GENESIS
    (body,) = bodies([data[start:end]])
    if body["kind"] != "checkpoint" or body["seq"] > head.seq:  # an event may hold such text, too
        return _GENESIS
    if body["prefix_sha256"] != hashlib.sha256(data[:start]).hexdigest():
        return _GENESIS
    return start, body["seq"], previous(data[start:end]).decode("ascii")
