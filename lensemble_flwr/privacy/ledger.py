"""The privacy ledger: what one participant has ever spent, durable, and refused when in doubt.

One ledger per participant identity, for ever. A round is charged before its noise is drawn
and never refunded. The order of every write is: append the record, fsync; replace the head, fsync. So a crash at any
byte leaves one of two states that are recognised when the ledger is opened again: a record that is whole (it counts)
or torn (it never took effect). Everything else is refused, and only the operator repairs it
(:mod:`lensemble_flwr.privacy.ledger_repair`, ``docs/ledger.md``).

A reservation can be encoded only by the opening of the ledger that made it: whoever finds a reservation of an earlier
opening cannot know whether its noise was drawn, so it can only be forfeited or closed. Hence no reservation has two
draws, however the process died.

A ledger is held by one thread of one process at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lensemble_flwr.durable import atomic_write, same_file, sync, sync_folder, write_all
from lensemble_flwr.errors import ContractViolation, LedgerError, PrivacyBudgetExceeded
from lensemble_flwr.privacy.ledger_book import (
    CHECKPOINT,
    CLOSED,
    ENCODED,
    FORFEITED,
    IDENTITY_ROTATED,
    OUTCOMES,
    RESERVED,
    STATES,
    VERSION,
    Book,
    EntryState,
    Event,
    Key,
)
from lensemble_flwr.privacy.ledger_file import (
    LONGEST,
    NO_HASH,
    Chain,
    Head,
    bodies,
    canonical,
    check_chain,
    default_head_path,
    frame,
    ledger_errors,
    read_bytes,
    read_head,
    record_hash,
    remedy,
)
from lensemble_flwr.privacy.spending import Budget, Charge, Spending

__all__ = ["MOST_ROUNDS", "Budget", "Charge", "EntryState", "Event", "PrivacyLedger", "Spending"]

MOST_ROUNDS = 10**9
"""What :meth:`PrivacyLedger.remaining` answers when no budget limits the rounds."""

CHECKPOINT_EVERY = 1024
"""Records between two checkpoints: opening a ledger reads one checkpoint and at most so many records."""

_SNAPSHOT_TRIES = 100
_POLL_S = 0.01


class PrivacyLedger:
    """An opened ledger. Make one with :meth:`init`, open it with :meth:`open`, as a context manager."""

    def __init__(self, path: Path, head_path: Path, book: Book, chain: Chain, handle: int | None) -> None:
        """Not for callers: use :meth:`open`."""
        self.path, self.head_path = path, head_path
        self.recovered: list[str] = []
        """What opening found of an earlier crash, for the operator's log."""
        self._book, self._head, self._size = book, chain.head, chain.size
        self._handle, self._pid = handle, os.getpid()
        self._sound = True
        self._reserved_here: set[Key] = set()

    # ------------------------------------------------------------------ files

    @staticmethod
    def init(path: Path | str, identity: bytes, head_path: Path | str | None = None) -> None:
        """Start the one ledger of a participant.

        Args:
            path: the log, ``ledger.jsonl``; its folder must exist.
            identity: 32 bytes, the participant's public key.
            head_path: the head, by default ``ledger.head`` beside the log; better on another disk.

        Raises:
            LedgerError: either file is there already, or cannot be written.
        """
        path, head_path = _paths(path, head_path)
        line = genesis_line(identity)
        for file in (path, head_path):
            if os.path.lexists(file):
                raise LedgerError(
                    f"{file} exists already; a participant has one ledger, for ever.",
                    "Keep using it. Only if it was never used, delete it together with its head and start again.",
                )
        with ledger_errors(path, "create"):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_all(handle, line + b"\n", 0)
                sync(handle)
            finally:
                os.close(handle)
            sync_folder(path.parent)
            atomic_write(head_path, Head(0, record_hash(line)).encode())

    @classmethod
    def open(
        cls,
        path: Path | str,
        identity: bytes | None = None,
        head_path: Path | str | None = None,
        read_only: bool = False,
        timeout_s: float = 2.0,
    ) -> PrivacyLedger:
        """Check the whole ledger and hold it, alone, until :meth:`unlock` or the end of the ``with`` block.

        What a crash left is put in order first: one whole record beyond the head counts, and the head is advanced; a
        torn one is moved to ``ledger.torn-N``. With ``read_only`` nothing is locked or written, and the ledger is a
        snapshot.

        Raises:
            LedgerError: missing, unreadable or unwritable, damaged, rolled back, held by another process for longer
                than ``timeout_s`` seconds, or another participant's.
        """
        path, head_path = _paths(path, head_path)
        if read_only:
            chain = snapshot(path, head_path)
            book = replay(chain, path)
            _check_identity(book, identity, path)
            return cls(path, head_path, book, chain, None)
        handle = lock(path, timeout_s)
        try:
            chain = check_chain(read_bytes(path, "log"), read_head(head_path, path), path)
            book = replay(chain, path)
            _check_identity(book, identity, path)
            ledger = cls(path, head_path, book, chain, handle)
            ledger._recover(chain)
        except BaseException:
            os.close(handle)
            raise
        return ledger

    def _recover(self, chain: Chain) -> None:
        """Bring the files to the state that ``chain`` found (idempotent: a crash in here changes nothing)."""
        assert self._handle is not None
        with ledger_errors(self.path, "recover"):
            if chain.torn:
                aside = free_name(self.path, "torn")
                atomic_write(aside, chain.torn)
                os.ftruncate(self._handle, self._size)
                sync(self._handle)
                self.recovered.append(f"a record that was never completed ({len(chain.torn)} bytes) is now in {aside}")
            if chain.beyond:
                # Written again, because a write that failed in fsync may be readable and yet not on the disk.
                last = chain.lines[-1] + b"\n"
                write_all(self._handle, last, self._size - len(last))
                sync(self._handle)
                atomic_write(self.head_path, self._head.encode())
                self.recovered.append(f"record {self._head.seq} was written just before a crash; it counts")

    def unlock(self) -> None:
        """Let go of the ledger. Nothing can be written through this object any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> PrivacyLedger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlock()

    # ------------------------------------------------------------------ questions

    def would_exceed(
        self, charge: Charge, budgets: Iterable[Budget], federation_id: bytes, count: int = 1
    ) -> Budget | None:
        """The first budget that ``count`` more releases at ``charge`` would pass, or None when all of them fit.

        A budget fits only if delta(epsilon) of the composed releases, plus their ``delta_extra``, was computed to be
        at most its delta; an infinite charge, NaN, overflow or any failure passes it. Constant time.
        """
        if type(count) is not int or count < 1:
            raise ContractViolation(f"count={count!r} must be a whole number of at least 1.")
        fid = _hex32("federation_id", federation_id)
        after = {
            "lifetime": self._book.spent().plus(charge, count),
            "federation": self._book.spent(fid).plus(charge, count),
        }
        return next((budget for budget in budgets if not after[budget.scope].within(budget)), None)

    def remaining(self, charge: Charge, budgets: Iterable[Budget], federation_id: bytes) -> int:
        """How many more releases at ``charge`` :meth:`would_exceed` lets pass, at most :data:`MOST_ROUNDS`."""
        budgets = tuple(budgets)

        def fits(count: int) -> bool:
            return count == 0 or self.would_exceed(charge, budgets, federation_id, count) is None

        if fits(MOST_ROUNDS):
            return MOST_ROUNDS
        low, high = 0, 1  # fits(low) and not fits(high), once high is found
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def state(self, federation_id: bytes, round_index: int) -> EntryState:
        """Where one round of one federation stands; ``.state`` is None when it was never reserved."""
        return self._book.entry(_key(federation_id, round_index))

    def rounds(self, federation_id: bytes) -> tuple[int, ...]:
        """The rounds of a federation that were ever reserved, in order."""
        fid = _hex32("federation_id", federation_id)
        return tuple(sorted(index for name, index in self._book.entries if name == fid))

    def open_rounds(self, federation_id: bytes) -> tuple[int, ...]:
        """The rounds of a federation that are reserved or encoded and neither forfeited nor closed, in order."""
        fid = _hex32("federation_id", federation_id)
        entries = self._book.entries.items()
        return tuple(sorted(i for (name, i), entry in entries if name == fid and entry.state in (RESERVED, ENCODED)))

    def mu2(self, view: str, federation_id: bytes | None = None) -> float:
        """Composed mu^2 of all releases, or of one federation's; rounded up, inf after one without noise."""
        return self._spent(federation_id).mu2(view)

    def spent(self, view: str, delta: float, federation_id: bytes | None = None) -> float:
        """The epsilon that is spent at ``delta``, for ever or within one federation; inf when there is none."""
        return self._spent(federation_id).epsilon(view, delta)

    def _spent(self, federation_id: bytes | None) -> Spending:
        return self._book.spent(None if federation_id is None else _hex32("federation_id", federation_id))

    @property
    def identity(self) -> bytes:
        """The participant's identity, as last rotated: 32 bytes."""
        return self._book.identity

    @property
    def head(self) -> Head:
        """The last record: note its number and hash elsewhere, for nothing here can tell when both files go back."""
        return self._head

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """The events of one kind (or all), oldest first."""
        return tuple(event for event in self._book.events if kind in (None, event.kind))

    def summary(self) -> dict[str, Any]:
        """Everything that a person asks of a ledger, as plain values."""
        federations: dict[str, dict[str, Any]] = {
            fid: {"rounds": 0, **dict.fromkeys(STATES, 0), **_sums(self._book.spent(fid))} for fid in self._book.named
        }
        for (fid, _), entry in self._book.entries.items():
            federations[fid]["rounds"] += 1
            federations[fid][str(entry.state)] += 1
        return {
            "path": str(self.path),
            "head_path": str(self.head_path),
            "version": VERSION,
            "identity": self._book.identity.hex(),
            "records": self._book.records,
            "head": {"seq": self._head.seq, "hash": self._head.hash},
            "lifetime": {"rounds": len(self._book.entries), **_sums(self._book.spent())},
            "repaired": _sums(self._book.unnamed),
            "federations": federations,
            "events": [{"seq": event.seq, "event": event.kind, **event.data} for event in self._book.events],
            "recovered": list(self.recovered),
        }

    # ------------------------------------------------------------------ records

    def reserve(self, federation_id: bytes, round_index: int, charge: Charge, budgets: Iterable[Budget]) -> None:
        """Spend ``charge`` for one round, before its noise is drawn. When this returns it is on the disk.

        Raises:
            PrivacyBudgetExceeded: a budget would be passed; nothing was charged.
            LedgerError: the round was reserved before, or the ledger cannot be written. If writing failed, the charge
                may count when the ledger is opened again; the round is then forfeited.
        """
        key = _key(federation_id, round_index)
        self._writable()
        if self._book.entry(key).state is None:  # otherwise the book says what is wrong
            passed = self.would_exceed(charge, budgets, federation_id)
            if passed is not None:
                raise self._exceeded(passed, charge, federation_id, round_index)
        self._write({"kind": RESERVED, "fid": key[0], "round": key[1], "charge": charge.record()})
        self._reserved_here.add(key)

    def _exceeded(self, budget: Budget, charge: Charge, fid: bytes, round_index: int) -> PrivacyBudgetExceeded:
        spent = self._spent(fid if budget.scope == "federation" else None)
        before, after = (sums.epsilon(budget.view, budget.delta) for sums in (spent, spent.plus(charge)))
        return PrivacyBudgetExceeded(
            f"Round {round_index} would pass the {budget.scope} budget of epsilon {budget.epsilon:g} at delta "
            f"{budget.delta:g} ({budget.view} view): {before:.4g} is spent, {after:.4g} would be.",
            "Stop here, raise that budget, or take part with more noise from now on; what is spent stays spent.",
            round=round_index,
            view=budget.view,
            scope=budget.scope,
            epsilon_budget=budget.epsilon,
            delta=budget.delta,
            epsilon_spent=before,
        )

    def encoded(self, federation_id: bytes, round_index: int, q_hash: bytes, open_hash: bytes) -> None:
        """Record the one encoded update of a reservation, after it was written to the site and before it is masked.

        Raises:
            LedgerError: not reserved, or reserved by an earlier opening of the ledger (forfeit it), or unwritable.
        """
        key = _key(federation_id, round_index)
        hashes = {"q_hash": _hex32("q_hash", q_hash), "open_hash": _hex32("open_hash", open_hash)}
        if self._book.entry(key).state == RESERVED and key not in self._reserved_here:
            raise LedgerError(
                f"Round {round_index} was reserved before the ledger was opened this time: its noise may have been "
                "drawn already.",
                "Forfeit it and join the next round.",
            )
        self._write({"kind": ENCODED, "fid": key[0], "round": key[1], **hashes})

    def forfeit(self, federation_id: bytes, round_index: int, reason: str) -> None:
        """Give a reserved or encoded round up: it stays spent, and nothing may be sent for it any more.

        Raises:
            LedgerError: no such reservation, or it is over, or the ledger cannot be written.
        """
        fid, index = _key(federation_id, round_index)
        self._write({"kind": FORFEITED, "fid": fid, "round": index, "reason": reason})

    def close(self, federation_id: bytes, round_index: int, outcome: str) -> None:
        """Record how a reserved or encoded round ended: ``committed``, ``burnt`` or ``void``. It stays spent.

        Raises:
            LedgerError: no such reservation, or it is over, or the ledger cannot be written.
        """
        if outcome not in OUTCOMES:
            raise ContractViolation(f"outcome={outcome!r} must be one of {', '.join(OUTCOMES)}.")
        fid, index = _key(federation_id, round_index)
        self._write({"kind": CLOSED, "fid": fid, "round": index, "outcome": outcome})

    def event(self, kind: str, data: dict[str, str]) -> None:
        """Record something that changes no sum: ``dataset_root``, ...

        ``identity_rotated`` with ``{"identity": <64 hex digits>}`` hands the ledger to a new key of the same
        participant; spending continues.

        Raises:
            ContractViolation: keys or values that are not text.
            LedgerError: the ledger cannot be written, or the new identity is no 32 bytes.
        """
        if not all(isinstance(text, str) for text in (kind, *data, *data.values())) or not kind:
            raise ContractViolation("An event's kind, keys and values are text.")
        if kind == IDENTITY_ROTATED:
            try:
                _hex32("identity", bytes.fromhex(data.get("identity", "")))
            except ValueError as error:
                raise ContractViolation("identity_rotated needs identity=<64 hex digits>.") from error
            data = {**data, "identity": data["identity"].lower()}
        self._write({"kind": "event", "event": kind, "data": data})

    def _writable(self) -> int:
        if self._handle is None:
            raise LedgerError(f"The ledger {self.path} is not open for writing.", "Open it without read_only.")
        if self._pid != os.getpid():
            raise LedgerError("The ledger is held by this process's parent.", "Open it in the process that uses it.")
        if not self._sound:
            raise LedgerError(
                f"An earlier write to the ledger {self.path} failed, so its last record is uncertain.",
                "Open it again: that settles what counts.",
            )
        return self._handle

    def _write(self, fields: dict[str, Any]) -> None:
        """Make one record durable. Unless this returns, nothing may be done that the record would allow."""
        self._append(fields)
        if self._book.records % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _append(self, fields: dict[str, Any]) -> None:
        handle = self._writable()
        body = {**fields, "seq": self._book.records}
        line = frame(canonical(body), self._head.hash)
        with ledger_errors(self.path, "append to"):
            if not same_file(handle, self.path) or os.fstat(handle).st_size != self._size:
                raise LedgerError(f"The ledger {self.path} was changed by something else.", remedy(self.path))
        self._book.apply(body)
        # From here to the end a failure leaves it open whether the record counts: only opening again can tell.
        self._sound = False
        with ledger_errors(self.path, "append to"):
            write_all(handle, line + b"\n", self._size)
            sync(handle)
            head = Head(body["seq"], record_hash(line))
            atomic_write(self.head_path, head.encode())
        self._head, self._size = head, self._size + len(line) + 1
        self._sound = True

    def _checkpoint(self) -> None:
        """Save later openings the way from genesis. A shortcut only, so one that would be too long is left out."""
        book = self._book.record()
        if len(canonical(book)) < LONGEST // 2:
            with ledger_errors(self.path, "read"):
                prefix = hashlib.sha256(self.path.read_bytes()).hexdigest()
            self._append({"kind": CHECKPOINT, "book": book, "prefix_sha256": prefix})


def genesis_line(identity: bytes) -> bytes:
    """The first record of a participant's ledger. Raises ContractViolation unless ``identity`` is 32 bytes."""
    body = {"kind": "genesis", "seq": 0, "version": VERSION, "identity": _hex32("identity", identity)}
    return frame(canonical(body), NO_HASH)


def replay(chain: Chain, path: Path) -> Book:
    """The meaning of a checked chain.

    Raises:
        LedgerError: a record cannot be read or may not stand where it stands.
    """
    try:
        records = bodies(chain.lines)
        book = Book.from_checkpoint(records.pop(0)) if chain.first else Book()
        for body in records:
            book.apply(body)
    except ValueError as error:
        raise LedgerError(f"The privacy ledger {path} holds a line that is no record.", remedy(path)) from error
    except LedgerError as error:
        raise LedgerError(error.message, error.remediation or remedy(path)) from error
    return book


def snapshot(path: Path, head_path: Path, shortcut: bool = True) -> Chain:
    """The ledger as it is now, without a lock: read again while a writer is at work between the two files.

    Raises:
        LedgerError: as :meth:`PrivacyLedger.open`.
    """
    head = read_head(head_path, path)
    for _ in range(_SNAPSHOT_TRIES):
        data, now = read_bytes(path, "log"), read_head(head_path, path)
        if now == head:
            return check_chain(data, head, path, shortcut)
        head = now
        time.sleep(_POLL_S)
    raise LedgerError(f"The privacy ledger {path} keeps changing while it is read.", "Try again when it is idle.")


def lock(path: Path, timeout_s: float) -> int:
    """Open the log and hold it alone. The lock goes with the process, so nothing stale can stay behind.

    Raises:
        LedgerError: missing, unreadable, or held by another process for longer than ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if not path.is_file():
            read_bytes(path, "log")  # says what is wrong
        with ledger_errors(path, "open"):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if same_file(handle, path):  # a repair may have replaced the file while this waited
                        return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
        if time.monotonic() >= deadline:
            raise LedgerError(
                f"The privacy ledger {path} is in use by another process.",
                "Wait for it to end; two processes must never be the same participant at once.",
                busy=True,
            )
        time.sleep(_POLL_S)


def free_name(path: Path, what: str) -> Path:
    """The first of ``ledger.<what>-0``, ``ledger.<what>-1``, ... that is not taken."""
    number = 0
    while os.path.lexists(path.with_suffix(f".{what}-{number}")):
        number += 1
    return path.with_suffix(f".{what}-{number}")


def _paths(path: Path | str, head_path: Path | str | None) -> tuple[Path, Path]:
    path = Path(path)
    return path, default_head_path(path) if head_path is None else Path(head_path)


def _check_identity(book: Book, identity: bytes | None, path: Path) -> None:
    if identity is not None and book.identity.hex() != _hex32("identity", identity):
        raise LedgerError(
            f"The ledger {path} belongs to identity {book.identity.hex()}, not to {identity.hex()}.",
            "Open the ledger of this participant; after a change of keys, record `identity_rotated` in it.",
        )


def _sums(spent: Spending) -> dict[str, Any]:
    sums = {"mu2_local": spent.mu2("local"), "mu2_central": spent.mu2("central"), "delta_extra": spent.delta_extra}
    return {**sums, "concentrated": True} if spent.concentrated else sums


def _key(federation_id: bytes, round_index: int) -> Key:
    if type(round_index) is not int or round_index < 0:
        raise ContractViolation(f"round={round_index!r} must be a whole number of at least 0.")
    return _hex32("federation_id", federation_id), round_index


def _hex32(name: str, value: bytes) -> str:
    if not isinstance(value, (bytes, bytearray)) or len(value) != 32:
        raise ContractViolation(f"{name} must be 32 bytes.")
    return value.hex()
