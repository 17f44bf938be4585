"""The operator's tools: look at a ledger without holding it, and go on after damage without forgetting a charge.

A repair keeps every record up to the damage byte for byte, enters again the reservations that are still readable after
it, charges as many rounds as the operator says for what nobody can read any more, and keeps the damaged files.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError, LedgerError
from lensemble_flwr.privacy.ledger import free_name, genesis_line, lock, replay, snapshot
from lensemble_flwr.privacy.ledger_book import FORFEITED, RESERVED, RULES, Book, entry_key
from lensemble_flwr.privacy.ledger_file import (
    NO_HASH,
    Head,
    bodies,
    canonical,
    default_head_path,
    frame,
    is_whole,
    ledger_errors,
    previous,
    record_hash,
)
from lensemble_flwr.privacy.spending import Charge


@dataclass(frozen=True)
class Report:
    """What :func:`verify` found. With ``ok`` false the numbers are those of what a repair would keep."""

    ok: bool
    records: int
    head: Head | None
    """The last record that is kept; None when not even the first one can be read."""
    beyond: bool
    """A whole record lies beyond the head; it counts (also true while a writer is at work)."""
    torn_bytes: int
    problem: str = ""
    remedy: str = ""
    found: int = 0
    """Reservations that can be read after the damage: a repair enters them again."""
    lost: int = 0
    """Records known to be lost: a repair must charge at least as many rounds."""


def verify(path: Path | str, head_path: Path | str | None = None, noted: Head | None = None) -> Report:
    """Check a ledger without locking it or changing anything.

    Args:
        path: the log.
        head_path: the head, by default beside the log.
        noted: a head that was noted elsewhere earlier. The ledger must still hold that record: this is how going back
            to an old copy of both files is found out.
    """
    path = Path(path)
    head_path = default_head_path(path) if head_path is None else Path(head_path)
    try:
        chain = snapshot(path, head_path, shortcut=False)
        replay(chain, path)
        if noted is not None:
            _check_noted(chain.lines, noted, path)
    except LedgerError as error:
        salvage = _salvage(_read(path) or b"", _read_head(head_path))
        lost = salvage.lost if noted is None else max(salvage.lost, salvage.lost_after(noted))
        return Report(
            ok=False,
            records=len(salvage.lines),
            head=salvage.head,
            beyond=False,
            torn_bytes=0,
            problem=error.message,
            remedy=error.remediation,
            found=len(salvage.found),
            lost=lost,
        )
    return Report(True, len(chain.lines), chain.head, chain.beyond, len(chain.torn))


def _check_noted(lines: list[bytes], noted: Head, path: Path) -> None:
    if noted.seq >= len(lines) or record_hash(lines[noted.seq]) != noted.hash:
        raise LedgerError(
            f"The privacy ledger {path} does not hold the record {noted.seq} that was noted: both of its files are an "
            "old copy, or another ledger.",
            "Bring the newest files back; if they are lost, repair with a charge for every round since the copy.",
        )


def repair(
    path: Path | str,
    head_path: Path | str | None = None,
    charge_all: int = 0,
    charge: Charge | None = None,
    identity: bytes | None = None,
    timeout_s: float = 2.0,
) -> Report:
    """Go on with a damaged, lost or restored ledger. For its operator only; never called by a run.

    Args:
        path: the log. It may be missing.
        head_path: the head, by default beside the log. It may be missing.
        charge_all: rounds to charge for what may have been lost, at ``charge``. They count in every federation. At
            least the number of records that are known to be lost.
        charge: the price of each of them; take the highest that was ever used.
        identity: 32 bytes, needed only if the first record cannot be read.
        timeout_s: seconds to wait for a process that holds the ledger.

    Raises:
        ConfigError: nothing to repair, too few rounds, no charge, or no identity.
        LedgerError: in use, another identity, or the files cannot be written.
    """
    path = Path(path)
    head_path = default_head_path(path) if head_path is None else Path(head_path)
    if type(charge_all) is not int or charge_all < 0:
        raise ConfigError(f"charge_all={charge_all!r} must be a whole number of at least 0.")
    if charge_all and charge is None:
        raise ConfigError("The rounds that may be lost need a price.", "Give the charge of one of them.")
    handle = lock(path, timeout_s) if path.is_file() else None
    try:
        return _repair(path, head_path, charge_all, charge, identity)
    finally:
        if handle is not None:
            os.close(handle)


def _repair(path: Path, head_path: Path, charge_all: int, charge: Charge | None, identity: bytes | None) -> Report:
    log, head = _read(path), _read_head(head_path)
    if verify(path, head_path).ok and charge_all == 0:
        raise ConfigError(f"The ledger {path} is whole: there is nothing to repair.", "Charge rounds, or leave it.")
    salvage = _salvage(log or b"", head)
    if charge_all < salvage.lost:
        raise ConfigError(
            f"{salvage.lost} records of the ledger {path} are lost, and each may have been a round: {charge_all} is "
            "too few.",
            f"Charge at least {salvage.lost} rounds.",
        )
    if not salvage.lines:
        if identity is None:
            raise ConfigError(f"Not even the first record of {path} can be read.", "Give the participant's identity.")
        salvage.add(genesis_line(identity))
    elif identity is not None and identity != salvage.book.identity:
        raise LedgerError(f"The ledger {path} belongs to identity {salvage.book.identity.hex()}.", "Correct the path.")
    for body in salvage.found:
        salvage.enter_again(body)
    if charge is not None and charge_all:
        salvage.write({"kind": "charged", "rounds": charge_all, "charge": charge.record(), "reason": "repair"})
    with ledger_errors(path, "repair"):
        aside = _set_aside(path, head_path)
        salvage.write({"kind": "event", "event": "repaired", "data": aside})
        assert salvage.head is not None
        atomic_write(path, b"".join(line + b"\n" for line in salvage.lines))
        atomic_write(head_path, salvage.head.encode())
    return verify(path, head_path)


def _set_aside(path: Path, head_path: Path) -> dict[str, str]:
    """Copy both files beside the log; names and hashes of the copies, for the record of the repair."""
    data = {}
    for what, file in (("log", path), ("head", head_path)):
        content = _read(file)
        if content is not None:
            copy = free_name(path, f"damaged-{what}")
            atomic_write(copy, content)
            data[what], data[f"{what}_sha256"] = copy.name, hashlib.sha256(content).hexdigest()
    return data


@dataclass
class _Salvage:
    """The records up to the damage, and what can still be read after it."""

    lines: list[bytes] = field(default_factory=list)
    book: Book = field(default_factory=Book)
    found: list[dict[str, Any]] = field(default_factory=list)
    lost: int = 0
    readable: int = 0
    """Whole records, before and after the damage."""

    @property
    def head(self) -> Head | None:
        return Head(len(self.lines) - 1, record_hash(self.lines[-1])) if self.lines else None

    def add(self, line: bytes) -> None:
        """Take in the next line. Raises LedgerError or ValueError when it does not follow."""
        if not is_whole(line) or previous(line).decode("ascii") != (self.head.hash if self.head else NO_HASH):
            raise LedgerError("The chain breaks here.")
        self.book.apply(bodies([line])[0])
        self.lines.append(line)

    def write(self, fields: dict[str, Any]) -> None:
        """Add a new record."""
        assert self.head is not None
        self.add(frame(canonical({**fields, "seq": self.book.records}), self.head.hash))

    def enter_again(self, body: dict[str, Any]) -> None:
        """Charge a reservation that stood after the damage, and forbid to use it."""
        fid, index = key = entry_key(body)
        if self.book.entry(key).state is None:
            self.write({"kind": RESERVED, "fid": fid, "round": index, "charge": body["charge"]})
            self.write({"kind": FORFEITED, "fid": fid, "round": index, "reason": "found after damage"})
        else:  # another reservation of the same round: an old copy of the ledger was used in between
            self.write({"kind": "charged", "rounds": 1, "charge": body["charge"], "reason": "found after damage"})

    def lost_after(self, noted: Head) -> int:
        """Records up to ``noted`` that cannot be read."""
        return max(0, noted.seq + 1 - self.readable)


def _salvage(log: bytes, head: Head | None) -> _Salvage:
    salvage = _Salvage()
    *lines, cut = log.split(b"\n")
    for line in lines:
        try:
            salvage.add(line)
        except (LedgerError, ValueError):
            break
    rest = lines[len(salvage.lines) :]
    after = [_understood(line) for line in dict.fromkeys(rest) if line not in set(salvage.lines)]
    salvage.found = [body for body in after if body and body["kind"] == RESERVED]
    salvage.readable = len(salvage.lines) + sum(body is not None for body in after)
    if head is None:
        salvage.lost = after.count(None) + bool(cut)
    else:
        salvage.lost = max(after.count(None), salvage.lost_after(head))
    return salvage


def _understood(line: bytes) -> dict[str, Any] | None:
    """The body of a whole record wherever it stands, or None when the line cannot be read as one."""
    try:
        (body,) = bodies([line] if is_whole(line) else [])
        if body["kind"] == RESERVED:
            entry_key(body), Charge.from_record(body["charge"])
        return body if body["kind"] in RULES else None
    except (ConfigError, ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> bytes | None:
    with ledger_errors(path, "read"):
        return path.read_bytes() if path.exists() else None


def _read_head(path: Path) -> Head | None:
    try:
        return Head.decode(_read(path) or b"")
    except (ValueError, KeyError, LedgerError):
        return None
