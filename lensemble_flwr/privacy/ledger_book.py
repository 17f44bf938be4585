"""What the ledger's records mean: the state of every round, the sums, the identity. Pure: no file, no clock.

Each record is applied in order, by the reader and by the writer alike, so both know the same rules:

    genesis      version, identity                      the first record and only that
    reserved     fid, round, charge                     spent from here on, whatever follows
    encoded      fid, round, q_hash, open_hash          the one draw of that reservation; only after `reserved`
    forfeited    fid, round, reason                     nothing may be sent for it any more
    closed       fid, round, outcome                    the round is over
    charged      rounds, charge, reason                 spending of rounds that nobody can name (a repair)
    event        event, data                            anything else worth keeping for ever
    checkpoint   book, prefix_sha256                    this whole state, so that opening need not start at genesis
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lensemble_flwr.errors import ConfigError, LedgerError
from lensemble_flwr.privacy.spending import Charge, Spending

VERSION = 1
OUTCOMES = ("committed", "burnt", "void")
STATES = RESERVED, ENCODED, FORFEITED, CLOSED = "reserved", "encoded", "forfeited", "closed"
IDENTITY_ROTATED = "identity_rotated"
CHECKPOINT = "checkpoint"

Key = tuple[str, int]
"""Federation id as 64 hex digits, round."""


class EntryState(NamedTuple):
    """Where one (federation, round) stands. ``state`` is None when it was never reserved."""

    state: str | None = None
    charge: Charge | None = None
    """Of a round that is reserved or encoded."""
    q_hash: bytes | None = None
    open_hash: bytes | None = None
    """Of a round that is encoded."""
    note: str | None = None
    """Why the round was forfeited, or how it was closed."""


@dataclass(frozen=True)
class Event:
    """A record that changes no sum."""

    seq: int
    kind: str
    data: dict[str, str]


@dataclass
class Book:
    """The state after the records applied so far."""

    records: int = 0
    identity: bytes = b""
    entries: dict[Key, EntryState] = field(default_factory=dict)
    named: dict[str, Spending] = field(default_factory=dict)
    """Spending of the rounds of each federation."""
    unnamed: Spending = field(default_factory=Spending)
    """Spending that a repair charged: it may have been any federation's, so it counts in each."""
    lifetime: Spending = field(default_factory=Spending)
    events: list[Event] = field(default_factory=list)

    def apply(self, body: dict[str, Any]) -> None:
        """Take in the next record; a record that may not come here changes nothing.

        Raises:
            LedgerError: it is not a record that may follow the ones before.
        """
        seq = self.records
        try:
            kind = body["kind"]
            if body["seq"] != seq:
                raise LedgerError(f"Record {seq} of the ledger calls itself {body['seq']!r}.")
            if (kind == "genesis") != (seq == 0):
                raise LedgerError(f"Record {seq} of the ledger is out of place: {kind!r}.")
            RULES[kind](self, body)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise LedgerError(
                f"Record {seq} of the ledger cannot be understood: {error!r}.",
                "It may have been written by a newer release: update this one.",
            ) from error
        self.records = seq + 1

    def spent(self, fid: str | None = None) -> Spending:
        """All that was ever charged, or what counts within one federation."""
        return self.lifetime if fid is None else self.named.get(fid, _NOTHING).joined(self.unnamed)

    def entry(self, key: Key) -> EntryState:
        """The state of one round of one federation."""
        return self.entries.get(key, _NONE)

    def _genesis(self, body: dict[str, Any]) -> None:
        if body["version"] != VERSION:
            raise LedgerError(
                f"The ledger has version {body['version']!r}; this release reads version {VERSION}.",
                "Use the release that wrote it, or a newer one.",
            )
        self.identity = _bytes32(body["identity"])

    def _reserved(self, body: dict[str, Any]) -> None:
        fid, index = key = entry_key(body)
        if key in self.entries:
            raise LedgerError(
                f"Round {index} of federation {fid} was reserved before; a round is reserved once, for ever.",
                "Join the next round.",
            )
        charge = Charge.from_record(body["charge"])
        self.named[fid] = self.named.get(fid, _NOTHING).plus(charge)
        self.lifetime = self.lifetime.plus(charge)
        self.entries[key] = EntryState(RESERVED, charge)

    def _encoded(self, body: dict[str, Any]) -> None:
        entry = self._from(body, RESERVED)
        hashes = _bytes32(body["q_hash"]), _bytes32(body["open_hash"])
        self.entries[entry_key(body)] = EntryState(ENCODED, entry.charge, *hashes)

    def _forfeited(self, body: dict[str, Any]) -> None:
        self._end(body, FORFEITED, str(body["reason"]))

    def _closed(self, body: dict[str, Any]) -> None:
        if body["outcome"] not in OUTCOMES:
            raise LedgerError(f"A round cannot be closed as {body['outcome']!r}.", f"One of {', '.join(OUTCOMES)}.")
        self._end(body, CLOSED, body["outcome"])

    def _end(self, body: dict[str, Any], state: str, note: str) -> None:
        self._from(body, RESERVED, ENCODED)
        self.entries[entry_key(body)] = EntryState(state, note=note)

    def _charged(self, body: dict[str, Any]) -> None:
        charge, rounds = Charge.from_record(body["charge"]), body["rounds"]
        if type(rounds) is not int or rounds < 1:
            raise LedgerError(f"A charge for {rounds!r} rounds is none.")
        self.unnamed = self.unnamed.plus(charge, rounds)
        self.lifetime = self.lifetime.plus(charge, rounds)

    def _event(self, body: dict[str, Any]) -> None:
        kind, data = str(body["event"]), {str(name): str(value) for name, value in body["data"].items()}
        if kind == IDENTITY_ROTATED:
            self.identity = _bytes32(data["identity"])
        self.events.append(Event(self.records, kind, data))

    def _checkpoint(self, body: dict[str, Any]) -> None:
        if body["book"] != self.record():
            raise LedgerError(f"The checkpoint at record {self.records} does not agree with the records before it.")

    def record(self) -> dict[str, Any]:
        """This state as plain JSON values: rounds that are over as runs of equal ends, sums in hexadecimal."""
        rounds: dict[str, dict[str, list[list[Any]]]] = {fid: {"over": [], "open": []} for fid in self.named}
        for (fid, index), entry in sorted(self.entries.items()):
            if entry.state in (FORFEITED, CLOSED):
                over = rounds[fid]["over"]
                if over and over[-1][1:] == [index - 1, entry.state, entry.note]:
                    over[-1][1] = index
                else:
                    over.append([index, index, entry.state, entry.note])
            elif entry.charge is not None:
                hashes = [value and value.hex() for value in (entry.q_hash, entry.open_hash)]
                rounds[fid]["open"].append([index, entry.state, entry.charge.record(), *hashes])
        return {
            "identity": self.identity.hex(),
            "federations": {fid: {"spent": spent.record(), **rounds[fid]} for fid, spent in self.named.items()},
            "unnamed": self.unnamed.record(),
            "lifetime": self.lifetime.record(),
            "events": [[event.seq, event.kind, event.data] for event in self.events],
        }

    @classmethod
    def from_checkpoint(cls, body: dict[str, Any]) -> Book:
        """The state after a checkpoint, taken at its word.

        Raises:
            LedgerError: it cannot be understood.
        """
        try:
            tree = body["book"]
            book = cls(body["seq"] + 1, _bytes32(tree["identity"]))
            book.unnamed, book.lifetime = (Spending.from_record(tree[name]) for name in ("unnamed", "lifetime"))
            book.events = [Event(seq, kind, data) for seq, kind, data in tree["events"]]
            for fid, federation in tree["federations"].items():
                book.named[fid] = Spending.from_record(federation["spent"])
                for first, last, state, note in federation["over"]:
                    ended = EntryState(state, note=note)
                    book.entries.update({(fid, index): ended for index in range(first, last + 1)})
                for index, state, charge, *hashes in federation["open"]:
                    q_hash, open_hash = (None if text is None else _bytes32(text) for text in hashes)
                    book.entries[fid, index] = EntryState(state, Charge.from_record(charge), q_hash, open_hash)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise LedgerError(f"The ledger's checkpoint cannot be understood: {error!r}.") from error
        return book

    def _from(self, body: dict[str, Any], *allowed: str) -> EntryState:
        fid, index = entry_key(body)
        entry = self.entries.get((fid, index), _NONE)
        if entry.state not in allowed:
            raise LedgerError(
                f"Round {index} of federation {fid} cannot be {body['kind']}: it is {entry.state or 'not reserved'}.",
                "Join the next round.",
            )
        return entry


def entry_key(body: dict[str, Any]) -> Key:
    """Which round of which federation a record is about. Raises KeyError or ValueError."""
    fid, index = body["fid"], body["round"]
    if type(index) is not int or index < 0 or type(fid) is not str:
        raise ValueError(f"round {index!r} of {fid!r}")
    return fid, index


def _bytes32(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != 32 or value.hex() != text:
        raise ValueError(f"{text!r} is not 32 bytes in hexadecimal")
    return value


_NONE, _NOTHING = EntryState(), Spending()
RULES: dict[str, Callable[[Book, dict[str, Any]], None]] = {
    "genesis": Book._genesis,
    RESERVED: Book._reserved,
    ENCODED: Book._encoded,
    FORFEITED: Book._forfeited,
    CLOSED: Book._closed,
    "charged": Book._charged,
    "event": Book._event,
    CHECKPOINT: Book._checkpoint,
}
