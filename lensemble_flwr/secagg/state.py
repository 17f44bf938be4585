"""What a member remembers between two messages, and its bytes.

Every stage keeps only what later stages need, so that a stolen state opens as little as possible:

    Fresh     both private keys
    Shared    the self-mask key, the key of each pair's mask and incoming envelope, its own two shares, its nonce in
              rounds whose members verify the sum; the private keys and the seed are gone
    Masked    a pair of shares for every member of U2; no key that opens a mask is left
    Agreed    the same shares, and the one view of the survivors that was signed
    Closed    nothing: revealed, or wiped

The bytes are: "LSAS" || version || phase || T0 || identity || body || SHA-256 of all this. The hash finds damage, not
forgery: whoever can write the state of a member owns that member. They hold secrets and must be kept where only the
participant reads. An older state is as good as a newer one to this code, so the caller must not run a stage twice: it
masks one payload per session and persists "answered" before it reveals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import wire
from lensemble_flwr.secagg.params import IDENTITY_BYTES, SessionParams
from lensemble_flwr.secagg.projection import NONCE_BYTES, TAG_BYTES
from lensemble_flwr.secagg.transcript import VERSION

_MAGIC = b"LSAS"
_HASH = wire.HASH_BYTES
_KEY = 32
_PAIR = wire.SHARE_PAIR_BYTES


class Phase(IntEnum):
    """What happened last."""

    FRESH = 0
    SHARED = 1
    MASKED = 2
    REVEALED = 3
    WIPED = 4
    AGREED = 5


@dataclass(frozen=True)
class Fresh:
    """Private keys of the envelopes (c) and of the masks (s)."""

    c_private: bytearray
    s_private: bytearray
    phase = Phase.FRESH

    def secrets(self) -> Iterator[bytearray]:
        yield from (self.c_private, self.s_private)

    def body(self, params: SessionParams) -> bytes:
        return bytes(self.c_private + self.s_private)

    @classmethod
    def parse(cls, body: bytes, params: SessionParams, position: int) -> Fresh:
        _expect(body, 2 * _KEY)
        return cls(bytearray(body[:_KEY]), bytearray(body[_KEY:]))


@dataclass(frozen=True)
class Shared:
    """Keys of the masks and of the envelopes to come. The dictionaries are keyed by position, without one's own."""

    t1: bytes
    u1: tuple[int, ...]
    self_key: bytearray
    own_shares: bytearray
    envelope_keys: dict[int, bytearray]
    mask_keys: dict[int, bytearray]
    nonce: bytearray
    phase = Phase.SHARED

    def secrets(self) -> Iterator[bytearray]:
        yield from (self.self_key, self.own_shares, *self.envelope_keys.values(), *self.mask_keys.values())
        if self.nonce:
            yield self.nonce

    def body(self, params: SessionParams) -> bytes:
        peers = b"".join(bytes(self.envelope_keys[j] + self.mask_keys[j]) for j in self.u1 if j in self.mask_keys)
        own = bytes(self.self_key + self.own_shares + self.nonce)
        return self.t1 + wire.pack_members(self.u1, params.n) + own + peers

    @classmethod
    def parse(cls, body: bytes, params: SessionParams, position: int) -> Shared:
        t1, u1, rest = _parse_members(body, params, position)
        peers = [j for j in u1 if j != position]
        fixed = _KEY + _PAIR + NONCE_BYTES * params.verify
        _expect(rest, fixed + 2 * _KEY * len(peers))
        own, nonce = rest[_KEY : _KEY + _PAIR], rest[_KEY + _PAIR : fixed]
        keys = wire.split_evenly(rest[fixed:], peers, 2 * _KEY)
        return cls(
            t1,
            u1,
            bytearray(rest[:_KEY]),
            bytearray(own),
            {j: bytearray(pair[:_KEY]) for j, pair in keys.items()},
            {j: bytearray(pair[_KEY:]) for j, pair in keys.items()},
            bytearray(nonce),
        )


@dataclass(frozen=True)
class Masked:
    """For every member of U2, its seed share and its key share, of which at most one ever leaves; own vector's root and
    masked tag (empty where sums are not verified)."""

    t1: bytes
    root: bytes
    tag: bytes
    shares: dict[int, bytearray]
    phase = Phase.MASKED

    def secrets(self) -> Iterator[bytearray]:
        yield from self.shares.values()

    def body(self, params: SessionParams) -> bytes:
        pairs = b"".join(map(bytes, self.shares.values()))
        return self.t1 + wire.pack_members(self.shares, params.n) + self.root + self.tag + pairs

    @classmethod
    def parse(cls, body: bytes, params: SessionParams, position: int) -> Masked:
        t1, u2, rest = _parse_members(body, params, position)
        head = _HASH + TAG_BYTES * params.verify
        _expect(rest, head + _PAIR * len(u2))
        return cls(t1, rest[:_HASH], rest[_HASH:head], _parse_pairs(rest[head:], u2))


@dataclass(frozen=True)
class Agreed:
    """As Masked, after the consistency stage: the survivors and the view that this member signed, for ever one."""

    t1: bytes
    view: bytes
    u3: tuple[int, ...]
    shares: dict[int, bytearray]
    phase = Phase.AGREED

    def secrets(self) -> Iterator[bytearray]:
        yield from self.shares.values()

    def body(self, params: SessionParams) -> bytes:
        sets = wire.pack_members(self.shares, params.n) + wire.pack_members(self.u3, params.n)
        return self.t1 + sets + self.view + b"".join(map(bytes, self.shares.values()))

    @classmethod
    def parse(cls, body: bytes, params: SessionParams, position: int) -> Agreed:
        t1, u2, rest = _parse_members(body, params, position)
        bitmap = -(-params.n // 8)
        _expect(rest, bitmap + _HASH + _PAIR * len(u2))
        u3 = wire.parse_members(rest[:bitmap], params.n)
        if not {position} <= set(u3) <= set(u2):
            raise wire.malformed("The saved session holds survivors that it cannot have.")
        return cls(t1, rest[bitmap : bitmap + _HASH], u3, _parse_pairs(rest[bitmap + _HASH :], u2))


@dataclass(frozen=True)
class Closed:
    """Nothing is left; `phase` says why."""

    phase: Phase

    def secrets(self) -> Iterator[bytearray]:
        return iter(())

    def body(self, params: SessionParams) -> bytes:
        return b""


State = Fresh | Shared | Masked | Agreed | Closed


def wipe(state: State) -> None:
    """Overwrite the secrets. Best effort: Python and the cipher library may have made copies that nobody can reach."""
    for secret in state.secrets():
        secret[:] = bytes(len(secret))


def pack(state: State, params: SessionParams, identity: bytes) -> bytes:
    head = _MAGIC + bytes([VERSION, state.phase]) + params.hash + identity
    blob = head + state.body(params)
    return blob + hashlib.sha256(blob).digest()


def parse(data: object, params: SessionParams) -> tuple[State, bytes]:
    """(state, identity) from :func:`pack`'s bytes.

    Raises:
        SecureAggregationError: malformed_message for damaged bytes, wrong_state if they belong to other parameters,
            inconsistent_roster if their identity is not in the roster.
    """
    head = len(_MAGIC) + 2
    body = head + _HASH + IDENTITY_BYTES
    raw = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else b""
    blob, mark = raw[:-_HASH], raw[-_HASH:]
    if len(blob) < body or not blob.startswith(_MAGIC + bytes([VERSION])) or hashlib.sha256(blob).digest() != mark:
        raise wire.malformed("The saved session is damaged or of another version.")
    if blob[head : head + _HASH] != params.hash:
        raise SecureAggregationError("The saved session is bound to other parameters.", cause="wrong_state")
    identity = blob[head + _HASH : body]
    position = params.position(identity)
    phase = blob[len(_MAGIC) + 1]
    for kind in (Fresh, Shared, Masked, Agreed):
        if kind.phase == phase:
            return kind.parse(blob[body:], params, position), identity
    if phase not in (Phase.REVEALED, Phase.WIPED):
        raise wire.malformed(f"The saved session is in an unknown phase {phase}.")
    _expect(blob[body:], 0)
    return Closed(Phase(phase)), identity


def _parse_members(body: bytes, params: SessionParams, position: int) -> tuple[bytes, tuple[int, ...], bytes]:
    bitmap = -(-params.n // 8)
    members = wire.parse_members(body[_HASH : _HASH + bitmap], params.n)
    if position not in members:
        raise wire.malformed("The saved session does not hold its own member.")
    return body[:_HASH], members, body[_HASH + bitmap :]


def _parse_pairs(body: bytes, members: tuple[int, ...]) -> dict[int, bytearray]:
    return {j: bytearray(pair) for j, pair in wire.split_evenly(body, members, _PAIR).items()}


def _expect(body: bytes, size: int) -> None:
    if len(body) != size:
        raise wire.malformed(f"The saved session has {len(body)} bytes where {size} are due.")
