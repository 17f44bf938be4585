"""Whatever bytes come in: SecureAggregationError or a valid message, no other exception, no large allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import ClientSession, ServerSession, Stage, from_wire, message_size, wire
from tests.secagg.driver import Round, make_params, payloads, refused

N = 5
TARGETS = ("keys", "roster", "shares", "envelopes", "survivors", "reveal", "state", "vector")


@cache
def recorded() -> dict[str, bytes]:
    """One valid message of each kind, and the state of member 0 before each of its stages."""
    session = Round.begin(make_params(N), seed="fuzz")
    blobs = {"fresh": session.clients[0].to_bytes()}
    session.keys()
    blobs["roster"] = session.server.roster_keys()
    session.shares()
    blobs["shared"] = session.clients[0].to_bytes()
    session.masked(payloads(session.params))
    blobs["masked"] = session.clients[0].to_bytes()
    blobs["survivors"] = session.server.survivors()
    session.reveal()
    blobs |= {stage: session.messages[stage, 0] for stage in ("keys", "shares", "envelopes", "reveal")}
    blobs["state"] = blobs["shared"]
    blobs["vector"] = session.vectors[0].tobytes()
    return blobs


def server_before(stage: str) -> ServerSession:
    session = Round.begin(make_params(N), seed="fuzz")
    steps: list[Callable[[], object]] = [
        lambda: session.keys(range(1, N) if stage == "keys" else None),
        lambda: session.shares(range(1, N) if stage == "shares" else None),
        lambda: session.masked(payloads(session.params)),
        lambda: session.reveal(range(1, N)),
    ]
    for step in steps[: {"keys": 1, "shares": 2, "reveal": 4}[stage]]:
        step()
    return session.server


def target(kind: str) -> Callable[[object], object]:
    params, blobs = make_params(N), recorded()
    me = params.roster[0]

    def client(phase: str) -> ClientSession:
        return ClientSession.from_bytes(blobs[phase], params)

    match kind:
        case "keys":
            return lambda data: server_before("keys").add_keys(me, data)
        case "shares":
            return lambda data: server_before("shares").add_shares(me, data)
        case "reveal":
            return lambda data: server_before("reveal").add_reveal(me, data)
        case "roster":
            return lambda data: client("fresh").shares(data)
        case "envelopes":
            return lambda data: client("shared").masked(data, np.zeros(20, np.int64))
        case "survivors":
            return lambda data: client("masked").reveal(data)
        case "state":
            return lambda data: ClientSession.from_bytes(data, params)
        case _:
            return lambda data: from_wire(data, params.ring)


def only_typed(call: Callable[[object], object], data: object) -> bool:
    """True if the data was accepted."""
    try:
        call(data)
    except SecureAggregationError:
        return False
    return True


@pytest.mark.parametrize("kind", TARGETS)
def test_the_recorded_message_is_accepted(kind):
    assert only_typed(target(kind), recorded()[kind])


@pytest.mark.parametrize("kind", TARGETS)
def test_truncated_or_extended(kind):
    call, good = target(kind), recorded()[kind]
    for cut in sorted({*range(0, len(good), max(1, len(good) // 40)), len(good) - 1}):
        assert not only_typed(call, good[:cut])
    for extra in (b"\0", good):
        assert not only_typed(call, good + extra)
    for other in (None, 7, "text", [], object(), np.zeros(3)):
        assert not only_typed(call, other)


@pytest.mark.parametrize("kind", TARGETS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_bytes_and_flipped_bits(kind, data):
    call, good = target(kind), bytearray(recorded()[kind])
    noise = data.draw(st.one_of(st.binary(max_size=2 * len(good)), st.binary(min_size=len(good), max_size=len(good))))
    if kind != "vector" or len(noise) != len(good):
        assert not only_typed(call, noise)
    for position in data.draw(st.lists(st.integers(0, 8 * len(good) - 1), min_size=1, max_size=4, unique=True)):
        good[position // 8] ^= 1 << position % 8
    accepted = only_typed(call, bytes(good))
    if kind in ("envelopes", "state"):  # the others have fields that are free: a peer's key, a smaller U3, a share
        assert not accepted


@pytest.mark.parametrize("kind", TARGETS)
def test_every_bit_of_the_header_is_checked(kind):
    call, good = target(kind), recorded()[kind]
    if kind == "vector":
        return
    for bit in range(8 * wire.HEADER_BYTES):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert not only_typed(call, bytes(bad))


@pytest.mark.parametrize("kind", TARGETS)
def test_an_oversized_message_is_refused_before_it_is_copied(kind):
    call, huge = target(kind), bytes(64 << 20)
    only_typed(call, recorded()[kind])
    if kind == "state":
        return  # read from the site's own store, not from the network
    tracemalloc.start()
    try:
        assert not only_typed(call, huge)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [2, 7, 8, 9, 16, 17])
def test_sets_are_canonical(n):
    for members in ([], [1], [n], list(range(1, n + 1))):
        bitmap = wire.pack_members(members, n)
        assert list(wire.parse_members(bitmap, n)) == members
    for bit in range(n, 8 * -(-n // 8)):
        with refused("malformed_message"):
            wire.parse_members((1 << bit).to_bytes(-(-n // 8), "little"), n)


def test_sizes_grow_with_the_set():
    for stage in Stage:
        sizes = [message_size(stage, 100, members) for members in range(1, 101)]
        assert sizes == sorted(sizes)
        assert sizes[-1] < 10_000
