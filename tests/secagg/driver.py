"""A whole session in one process, with members that drop out where a test wants them to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import (
    ClientSession,
    RingParams,
    ServerSession,
    SessionParams,
    Stage,
    default_threshold,
    signing,
    wire,
)

OPEN_HASH = hashlib.sha256(b"the canonical RoundOpen").digest()


class Drbg:
    """SHA-256 in counter mode: reproducible entropy. For tests and golden files only."""

    def __init__(self, seed: object) -> None:
        self._seed, self._calls = repr(seed).encode(), 0

    def __call__(self, count: int) -> bytes:
        self._calls += 1
        head = self._seed + self._calls.to_bytes(8, "big")
        blocks = (hashlib.sha256(head + i.to_bytes(8, "big")).digest() for i in range(-(-count // 32)))
        return b"".join(blocks)[:count]


@cache
def _keys(n: int) -> dict[bytes, Ed25519PrivateKey]:
    """{identity: its private key} of n members, the same in every process."""
    seeds = (hashlib.sha256(b"member %d" % i).digest() for i in range(n))
    private = (Ed25519PrivateKey.from_private_bytes(seed) for seed in seeds)
    return {key.public_key().public_bytes_raw(): key for key in private}


def roster(n: int) -> tuple[bytes, ...]:
    return tuple(sorted(_keys(n)))


def sign(statement: bytes) -> bytes:
    """Signs as the member that the statement names, one of the first 128."""
    return _keys(128)[statement[-64:-32]].sign(statement)


def signed(params: SessionParams, i: int, stage: Stage, binding: bytes, body: bytes) -> bytes:
    """A message of member i with a right signature, whatever its body says: for members that lie."""
    return wire.pack(stage, binding, body, sign(signing.statement(stage, binding, params.roster[i], body)))


def make_params(n: int = 5, d: int = 20, *, bits: int = 32, k: int = 1, **overrides: Any) -> SessionParams:
    settings: dict[str, Any] = {
        "open_hash": OPEN_HASH,
        "attempt": 0,
        "roster": roster(n),
        "threshold": default_threshold(n, k),
        "min_survivors": 2 if n == 2 else min(n, max(3, k + 2)),
        "ring": RingParams(bits, n, 8, d),
        "colluders": k,
        "allow_two_party": n == 2,
    }
    return SessionParams(**(settings | overrides))


def payloads(params: SessionParams, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-params.ring.qmax, params.ring.qmax + 1, params.ring.dimension) for _ in params.roster]


@dataclass
class Round:
    """A session that is advanced stage by stage. Members are indices into the roster."""

    params: SessionParams
    clients: dict[int, ClientSession]
    server: ServerSession
    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    messages: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @classmethod
    def begin(cls, params: SessionParams, seed: object = None) -> Round:
        def entropy(i: int) -> dict[str, Callable[[int], bytes]]:
            return {} if seed is None else {"entropy": Drbg((seed, i))}

        clients = {i: ClientSession(params, identity, sign, **entropy(i)) for i, identity in enumerate(params.roster)}
        return cls(params, clients, ServerSession(params))

    def identity(self, i: int) -> bytes:
        return self.params.roster[i]

    def keys(self, members: Iterable[int] | None = None) -> None:
        for i in self.clients if members is None else members:
            self.messages["keys", i] = message = self.clients[i].keys()
            self.server.add_keys(self.identity(i), message)

    def shares(self, members: Iterable[int] | None = None) -> None:
        roster_keys = self.server.roster_keys()
        for i in self.clients if members is None else members:
            self.messages["shares", i] = message = self.clients[i].shares(roster_keys)
            self.server.add_shares(self.identity(i), message)

    def masked(
        self, q: Mapping[int, np.ndarray] | list[np.ndarray], members: Iterable[int] | None = None, threads: int = 1
    ) -> None:
        envelopes_of = {identity: self.server.envelopes_for(identity) for identity in self.server.u2}
        for i in self.clients if members is None else members:
            self.messages["envelopes", i] = envelopes = envelopes_of[self.identity(i)]
            self.vectors[i] = self.clients[i].masked(envelopes, q[i], threads=threads)
            self.messages["masked", i] = message = self.clients[i].masked_message(b"associated")
            self.server.add_masked(self.identity(i), message, self.vectors[i], b"associated", threads=threads)

    def agree(self, members: Iterable[int] | None = None) -> None:
        survivors = self.server.survivors()
        for i in self.clients if members is None else members:
            self.messages["agree", i] = message = self.clients[i].agree(survivors)
            self.server.add_consistency(self.identity(i), message)

    def question(self) -> bytes:
        return self.server.confirmed() if self.params.consistency else self.server.survivors()

    def reveal(self, members: Iterable[int] | None = None) -> None:
        question = self.question()
        for i in self.clients if members is None else members:
            self.messages["reveal", i] = message = self.clients[i].reveal(question)
            self.server.add_reveal(self.identity(i), message)


def run(
    params: SessionParams,
    q: list[np.ndarray],
    *,
    lost: Mapping[str, Iterable[int]] | None = None,
    seed: object = None,
    threads: int = 1,
) -> tuple[np.ndarray, set[int], Round]:
    """(sum, indices of U3, the round). `lost` maps a stage to the members silent from that message on."""
    lost = lost or {}
    alive = set(range(params.n))
    session = Round.begin(params, seed)
    alive -= set(lost.get("keys", ()))
    session.keys(sorted(alive))
    alive -= set(lost.get("shares", ()))
    session.shares(sorted(alive))
    alive -= set(lost.get("masked", ()))
    session.masked(q, sorted(alive), threads)
    u3 = set(alive)
    if params.consistency:
        alive -= set(lost.get("agree", ()))
        session.agree(sorted(alive))
    alive -= set(lost.get("reveal", ()))
    session.reveal(sorted(alive))
    return session.server.unmask(threads=threads), u3, session


class Refused:
    """``with refused("cause") as error:`` the block must raise SecureAggregationError of this cause."""

    def __init__(self, *causes: str) -> None:
        self._causes = causes
        self._inner = pytest.raises(SecureAggregationError)

    def __enter__(self) -> Any:
        self._info = self._inner.__enter__()
        return self._info

    def __exit__(self, *exc: Any) -> bool:
        suppressed = self._inner.__exit__(*exc)
        assert self._info.value.fields["cause"] in self._causes, self._info.value
        return bool(suppressed)


def refused(*causes: str) -> Refused:
    return Refused(*causes)
