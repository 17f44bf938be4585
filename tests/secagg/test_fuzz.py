"""Whatever bytes come in: SecureAggregationError or a valid message, no other exception, no large allocation."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import ClientSession, ServerSession, Stage, from_wire, message_size, wire
from tests.secagg.driver import Round, make_params, payloads, refused, sign

N = 5
PARAMS = make_params(N, consistency=True)
MESSAGES = ("keys", "roster", "shares", "envelopes", "masked", "survivors", "agree", "confirmed", "reveal")
STATES = ("state fresh", "state shared", "state masked", "state agreed")
TARGETS = (*MESSAGES, *STATES, "vector")


@cache
def recorded() -> dict[str, bytes]:
    """One valid message of each kind, and the state of member 0 before each of its stages."""
    session = Round.begin(PARAMS, seed="fuzz")
    blobs = {"state fresh": session.clients[0].to_bytes()}
    session.keys()
    blobs["roster"] = session.server.roster_keys()
    session.shares()
    blobs["state shared"] = session.clients[0].to_bytes()
    session.masked(payloads(PARAMS))
    blobs["state masked"] = session.clients[0].to_bytes()
    blobs["survivors"] = session.server.survivors()
    session.agree()
    blobs["state agreed"] = session.clients[0].to_bytes()
    blobs["confirmed"] = session.server.confirmed()
    session.reveal()
    blobs |= {stage: session.messages[stage, 0] for stage in MESSAGES if (stage, 0) in session.messages}
    blobs["vector"] = session.vectors[0].tobytes()
    return blobs


@cache
def server_before(stage: str) -> ServerSession:
    """A coordinator that waits for member 0 alone."""
    session = Round.begin(PARAMS, seed="fuzz")
    steps: dict[str, Callable[[Iterable[int] | None], object]] = {
        "keys": session.keys,
        "shares": session.shares,
        "masked": lambda members: session.masked(payloads(PARAMS), members),
        "agree": session.agree,
        "reveal": session.reveal,
    }
    for name, step in steps.items():
        step(range(1, N) if name == stage else None)
        if name == stage:
            break
    return session.server


def target(kind: str) -> Callable[[object], object]:
    blobs = recorded()
    me = PARAMS.roster[0]

    def client(phase: str) -> ClientSession:
        return ClientSession.from_bytes(blobs[f"state {phase}"], PARAMS, sign)

    def server(stage: str = kind) -> ServerSession:
        return copy.deepcopy(server_before(stage))

    match kind:
        case "keys":
            return lambda data: server().add_keys(me, data)
        case "shares":
            return lambda data: server().add_shares(me, data)
        case "masked":
            vector = np.frombuffer(blobs["vector"], np.uint32)
            return lambda data: server().add_masked(me, data, vector, b"associated")
        case "agree":
            return lambda data: server().add_consistency(me, data)
        case "reveal":
            return lambda data: server().add_reveal(me, data)
        case "roster":
            return lambda data: client("fresh").shares(data)
        case "envelopes":
            return lambda data: client("shared").masked(data, np.zeros(20, np.int64))
        case "survivors":
            return lambda data: client("masked").agree(data)
        case "confirmed":
            return lambda data: client("agreed").reveal(data)
        case "vector":
            return lambda data: from_wire(data, PARAMS.ring)
        case _:
            return lambda data: ClientSession.from_bytes(data, PARAMS, sign)


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
    if kind not in ("survivors", "confirmed", "vector"):  # U3 and others' roots are the coordinator's to say, and one
        assert not accepted  # signature in excess may be wrong


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
    if kind in STATES:
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
        assert sizes[-1] < 13_000
