"""Sessions that go well, and those in which members drop out."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lensemble_flwr.secagg import (
    ClientSession,
    ServerSession,
    Stage,
    decode,
    encode,
    from_wire,
    message_size,
    shamir,
    to_wire,
)
from lensemble_flwr.secagg.ring import SEGMENT, wrap
from tests.secagg.driver import Round, make_params, payloads, refused, run, sign

STAGES = ("keys", "shares", "masked", "reveal")


def stages(consistency: bool) -> tuple[str, ...]:
    return (*STAGES[:3], "agree", "reveal") if consistency else STAGES


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_sum_over_the_survivors_is_exact(data):
    """Random n, k, t, m, d, ring, seeds, and members lost at every stage."""
    n = data.draw(st.integers(2, 12))
    k = data.draw(st.integers(1, max(1, n - 2)))
    t = data.draw(st.integers((n + k) // 2 + 1, n))
    m = data.draw(st.integers(k + 2, n)) if n > 2 else 2
    bits = data.draw(st.sampled_from([16, 24, 32]))
    d = data.draw(st.sampled_from([1, 2, 15, 16, 17, 300, 5000]))
    least, agree = max(m, 2 if n == 2 else 3), data.draw(st.booleans())
    params = make_params(n, d, bits=bits, k=k, threshold=t, min_survivors=least, consistency=agree)
    q = payloads(params, data.draw(st.integers(0, 2**32 - 1)))
    order = data.draw(st.permutations(range(n)))
    spare = n - max(t, params.min_survivors)
    lost = {}
    for stage in STAGES[:3]:
        count = data.draw(st.integers(0, spare))
        lost[stage], order, spare = order[:count], order[count:], spare - count
    silent = order[: data.draw(st.integers(0, len(order) - t))]
    cut = data.draw(st.integers(0, len(silent))) if agree else 0
    lost["agree"], lost["reveal"] = silent[:cut], silent[cut:]
    total, u3, _ = run(params, q, lost=lost)
    assert total.dtype == np.dtype(f"<i{params.ring.lane.itemsize}")
    assert np.array_equal(total, sum(q[i] for i in u3))


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_several_segments_and_blocks(bits):
    params = make_params(4, SEGMENT + 70_000, bits=bits)
    q = payloads(params)
    total, u3, session = run(params, q, lost={"masked": [2]}, threads=2)
    assert u3 == {0, 1, 3}
    assert np.array_equal(total, q[0] + q[1] + q[3])
    assert session.vectors[0].dtype == params.ring.lane


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_everybody_at_the_limit(bits):
    params = make_params(7, 9, bits=bits)
    for side in (1, -1):
        q = [np.full(9, side * params.ring.qmax)] * 7
        total, _, _ = run(params, q)
        assert total.tolist() == [7 * side * params.ring.qmax] * 9


def test_from_floats_to_floats():
    params = make_params(5, 33, bits=24)
    xs = np.random.default_rng(0).uniform(-1, 1, (5, 33)).astype(np.float32)
    session = Round.begin(params)
    session.keys()
    session.shares()
    for i in range(5):
        envelopes = session.server.envelopes_for(session.identity(i))
        y = session.clients[i].masked(envelopes, encode(xs[i], params.ring))
        received = from_wire(to_wire(y, params.ring).tobytes(), params.ring)
        session.server.add_masked(session.identity(i), session.clients[i].masked_message(), received)
    session.reveal()
    mean = decode(session.server.unmask(), params.ring, 5) / 5
    assert np.array_equal(mean, np.rint(xs.astype(np.float64) * 256).sum(axis=0) / 256 / 5)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_signed_and_ring_payloads_give_the_same_vector(bits):
    params = make_params(3, 70_000, bits=bits)
    q = payloads(params)
    _, _, one = run(params, q, seed=1)
    _, _, two = run(params, [wrap(v, params.ring) for v in q], seed=1)
    assert all(np.array_equal(one.vectors[i], two.vectors[i]) for i in range(3))


@pytest.mark.parametrize("n", [5, 7])
@pytest.mark.parametrize(("consistency", "stage"), [(c, stage) for c in (False, True) for stage in stages(c)])
@pytest.mark.parametrize("how_many", ["one", "n-t", "n-t+1", "all"])
def test_members_lost_at_a_stage(n, consistency, stage, how_many):
    """The exact sum over U3, or a typed error: never anything else."""
    params = make_params(n, consistency=consistency)
    spare = n - params.threshold
    count = {"one": 1, "n-t": spare, "n-t+1": spare + 1, "all": n}[how_many]
    q = payloads(params)
    for gone in (range(count), range(n - count, n)):
        if count <= spare:
            total, u3, session = run(params, q, lost={stage: gone})
            assert u3 == set(range(n)) - (set() if stage in ("agree", "reveal") else set(gone))
            assert np.array_equal(total, sum(q[i] for i in u3))
            assert session.server.u3 == tuple(params.roster[i] for i in sorted(u3))
        else:
            with refused("below_threshold"):
                run(params, q, lost={stage: gone})


@pytest.mark.parametrize("stage", STAGES[:3])
def test_min_survivors_is_held_apart_from_the_threshold(stage):
    params = make_params(10, min_survivors=9)
    q = payloads(params)
    with refused("below_min_survivors"):
        run(params, q, lost={stage: [3, 4]})
    total, _, _ = run(params, q, lost={stage: [3]})
    assert np.array_equal(total, sum(q) - q[3])


def test_too_few_survivors_leave_the_sum_closed(monkeypatch):
    """No seed is reconstructed, and the stage stays open for a late vector."""
    params = make_params(5)
    monkeypatch.setattr(shamir, "combine", lambda shares: pytest.fail("a secret was reconstructed"))
    session = Round.begin(params)
    session.keys()
    session.shares()
    q = payloads(params)
    session.masked(q, range(3))
    with refused("below_threshold"):
        session.server.survivors()
    session.masked(q, [4])
    session.reveal([0, 1, 2])
    with refused("below_threshold"):
        session.server.unmask()
    monkeypatch.undo()
    session.server.add_reveal(session.identity(4), session.clients[4].reveal(session.server.survivors()))
    assert np.array_equal(session.server.unmask(), q[0] + q[1] + q[2] + q[4])


def test_sets_as_the_session_goes():
    params = make_params(6)
    session = Round.begin(params)
    ids = params.roster
    session.keys([0, 1, 3, 4, 5])
    assert session.server.u1 == (ids[0], ids[1], ids[3], ids[4], ids[5])
    session.shares([0, 1, 3, 4, 5])
    session.masked(payloads(params), [5, 0, 1, 4])
    assert session.server.u2 == session.server.u1
    assert session.server.u3 == (ids[0], ids[1], ids[4], ids[5])


def test_arrival_order_does_not_matter():
    params = make_params(4, 50)
    q = payloads(params)
    seen = set()
    for order in itertools.permutations(range(4)):
        session = Round.begin(params, seed=7)
        session.keys(order)
        session.shares(order[::-1])
        session.masked(q, order)
        session.reveal(order[::-1])
        seen.add((session.server.unmask().tobytes(), *(session.vectors[i].tobytes() for i in range(4))))
    assert len(seen) == 1


def test_threads_do_not_matter():
    params = make_params(3, 2 * SEGMENT + 5, bits=16)
    q = payloads(params)
    results = []
    for threads in (1, 3):
        total, _, session = run(params, q, seed=3, threads=threads)
        results.append((total, session.vectors[0]))
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_the_output_array_is_used_and_q_is_left_alone():
    params = make_params(3, 100)
    q = payloads(params)
    session = Round.begin(params)
    session.keys()
    session.shares()
    out = np.full(params.ring.padded, 7, np.uint32)
    before = q[0].copy()
    q[0].flags.writeable = False
    y = session.clients[0].masked(session.server.envelopes_for(session.identity(0)), q[0], out=out)
    assert y is out
    assert np.array_equal(q[0], before)


def test_message_sizes_are_public_numbers():
    n = 9
    params = make_params(n, consistency=True)
    session = Round.begin(params)
    session.keys(range(8))
    assert {len(session.messages["keys", i]) for i in range(8)} == {message_size(Stage.KEYS, n, 0)}
    assert len(session.server.roster_keys()) == message_size(Stage.ROSTER, n, 8)
    session.shares(range(8))
    assert {len(session.messages["shares", i]) for i in range(8)} == {message_size(Stage.SHARES, n, 8)}
    session.masked(payloads(params), range(7))
    assert {len(session.messages["envelopes", i]) for i in range(7)} == {message_size(Stage.ENVELOPES, n, 8)}
    assert {len(session.messages["masked", i]) for i in range(7)} == {message_size(Stage.MASKED, n, 0)}
    assert len(session.server.survivors()) == message_size(Stage.SURVIVORS, n, 7)
    session.agree(range(7))
    assert {len(session.messages["agree", i]) for i in range(7)} == {message_size(Stage.CONSISTENCY, n, 0)}
    assert len(session.question()) == message_size(Stage.CONFIRMED, n, 7)
    session.reveal(range(7))
    assert {len(session.messages["reveal", i]) for i in range(7)} == {message_size(Stage.REVEAL, n, 8)}


# --- the state between stages


def resumed(session: Round, i: int) -> None:
    blob = session.clients[i].to_bytes()
    session.clients[i] = ClientSession.from_bytes(blob, session.params, sign)
    assert session.clients[i].to_bytes() == blob


def steps(session: Round, q: list[np.ndarray]) -> list[Callable[[], None]]:
    agree = [session.agree] if session.params.consistency else []
    return [session.keys, session.shares, lambda: session.masked(q), *agree, session.reveal]


@pytest.mark.parametrize("consistency", [False, True])
def test_every_stage_may_run_in_another_process(consistency):
    params = make_params(5, consistency=consistency)
    q = payloads(params)
    session = Round.begin(params)
    for stage in steps(session, q):
        for i in range(5):
            resumed(session, i)
        stage()
    assert np.array_equal(session.server.unmask(), sum(q))
    for i in range(5):
        resumed(session, i)
        with refused("already_revealed"):
            session.clients[i].reveal(session.question())


def test_a_stage_in_a_process_of_its_own():
    params = make_params(3)
    q = payloads(params)
    session = Round.begin(params)
    session.keys()
    session.shares()
    envelopes = session.server.envelopes_for(session.identity(1))
    code = (
        "import sys; import numpy as np; from lensemble_flwr.secagg import *; from tests.secagg.driver import *\n"
        "params = make_params(3); session = ClientSession.from_bytes(bytes.fromhex(sys.argv[1]), params, sign)\n"
        "y = session.masked(bytes.fromhex(sys.argv[2]), payloads(params)[1])\n"
        "print(y.tobytes().hex(), session.to_bytes().hex())"
    )
    state = session.clients[1].to_bytes().hex()
    done = subprocess.run(
        [sys.executable, "-c", code, state, envelopes.hex()], capture_output=True, text=True, check=True
    )
    vector, after = (bytes.fromhex(word) for word in done.stdout.split())
    assert vector == session.clients[1].masked(envelopes, q[1]).tobytes()
    session.clients[1] = ClientSession.from_bytes(after, params, sign)
    message = session.clients[1].masked_message()
    session.server.add_masked(session.identity(1), message, np.frombuffer(vector, np.uint32))
    session.masked(q, [0, 2])
    session.reveal()
    assert np.array_equal(session.server.unmask(), sum(q))


def test_state_is_small_at_a_hundred():
    params = make_params(100, 5)
    session = Round.begin(params)
    session.keys()
    session.shares(range(70))
    session.masked(payloads(params), range(67))
    assert all(len(client.to_bytes()) < 8192 for client in session.clients.values())
    assert len(session.messages["shares", 0]) < 9500


def test_state_is_bound_to_its_parameters():
    params = make_params(5)
    blob = ClientSession(params, params.roster[0], sign).to_bytes()
    for other in (make_params(5, attempt=1), make_params(5, open_hash=bytes(32)), make_params(5, 21), make_params(6)):
        with refused("wrong_state"):
            ClientSession.from_bytes(blob, other, sign)


def test_each_stage_keeps_only_what_later_ones_need():
    params = make_params(4, consistency=True)
    session = Round.begin(params)
    client = session.clients[0]
    session.keys()
    fresh = client._state
    private = [bytes(secret) for secret in fresh.secrets()]
    session.shares()
    shared = client._state
    masks = [bytes(secret) for secret in (shared.self_key, *shared.mask_keys.values(), *shared.envelope_keys.values())]
    assert not any(secret in client.to_bytes() for secret in private)
    session.masked(payloads(params))
    held = client._state
    shares = [bytes(secret) for secret in held.secrets()]
    assert all(share in client.to_bytes() for share in shares)
    assert not any(secret in client.to_bytes() for secret in masks)
    session.agree()
    agreed = client._state
    session.reveal()
    assert not any(share[:33] in client.to_bytes() or share[33:] in client.to_bytes() for share in shares)
    for state in (fresh, shared, held, agreed):
        assert all(not any(secret) for secret in state.secrets())  # overwritten


@pytest.mark.parametrize("done", range(6))
def test_wipe(done):
    params = make_params(3, consistency=True)
    session = Round.begin(params)
    for stage in steps(session, payloads(params))[:done]:
        stage()
    client = session.clients[0]
    secrets = list(client._state.secrets())
    client.wipe()
    client.wipe()
    assert all(not any(secret) for secret in secrets)
    cause = "already_revealed" if done == 5 else "wrong_state"
    for again in (client, ClientSession.from_bytes(client.to_bytes(), params, sign)):
        with refused("wrong_state"):
            again.keys()
        with refused("wrong_state"):
            again.shares(b"")
        with refused("wrong_state"):
            again.masked(b"", np.zeros(20, np.int64))
        with refused("wrong_state"):
            again.masked_message()
        for call in (again.agree, again.reveal, again.check_survivors, again.check_question):
            with refused(cause):
                call(b"")
    assert len(client.to_bytes()) == 4 + 2 + 3 * 32


def test_stages_run_once_and_in_order():
    params = make_params(3)
    q = payloads(params)
    session = Round.begin(params)
    client, server = session.clients[0], session.server
    with refused("wrong_state"):
        client.masked(b"", q[0])
    with refused("wrong_state"):
        client.reveal(b"")
    for call in (
        lambda: server.add_shares(session.identity(0), b""),
        lambda: server.envelopes_for(session.identity(0)),
        lambda: server.add_masked(session.identity(0), b"", q[0]),
        server.survivors,
        lambda: server.add_reveal(session.identity(0), b""),
        server.unmask,
    ):
        with refused("wrong_state", "below_threshold"):
            call()
    assert client.keys() == client.keys()
    session.keys()
    session.shares()
    with refused("wrong_state"):
        client.shares(server.roster_keys())
    with refused("wrong_state"):
        server.add_keys(session.identity(0), session.messages["keys", 0])
    session.masked(q)
    with refused("wrong_state"):
        client.masked(server.envelopes_for(session.identity(0)), q[0])
    session.reveal()
    with refused("wrong_state"):
        server.add_masked(session.identity(0), session.messages["masked", 0], session.vectors[0])
    with refused("wrong_state"):
        server.envelopes_for(session.identity(0))
    server.unmask()
    with refused("wrong_state"):
        server.unmask()
    with refused("wrong_state"):
        server.add_reveal(session.identity(0), session.messages["reveal", 0])


def test_messages_twice_or_from_strangers():
    params = make_params(4)
    session = Round.begin(params)
    server = session.server
    session.keys([0, 1, 2])
    with refused("wrong_state") as error:
        server.add_keys(session.identity(1), session.messages["keys", 1])
    assert error.value.fields["member"] == session.identity(1).hex()
    session.shares([0, 1, 2])
    with refused("wrong_state"):
        server.add_shares(session.identity(1), session.messages["shares", 1])
    with refused("wrong_state"):  # never sent keys
        server.add_shares(session.identity(3), session.messages["shares", 1])
    with refused("wrong_state"):
        server.envelopes_for(session.identity(3))
    session.masked(payloads(params), [0, 1, 2])
    with refused("wrong_state"):  # never twice into the sum
        server.add_masked(session.identity(1), session.messages["masked", 1], session.vectors[1])
    for call in (server.add_keys, server.add_shares, server.add_consistency, server.add_reveal):
        with refused("inconsistent_roster", "wrong_state"):
            call(bytes(32), b"")
    with refused("inconsistent_roster"):
        server.add_masked(bytes(32), b"", session.vectors[0])
    with refused("inconsistent_roster"):
        ClientSession(params, bytes(32), sign)
    with refused("inconsistent_roster"):
        ServerSession(params).add_keys(bytes(32), session.messages["keys", 0])


@pytest.mark.parametrize("source", [lambda count: b"", lambda count: bytes(count + 1), lambda count: None])
def test_a_source_of_entropy_that_fails(source):
    params = make_params(3)
    with refused("key_agreement_failed"):
        ClientSession(params, params.roster[0], sign, entropy=source)

    def broken(count):
        raise OSError("no entropy")

    with refused("key_agreement_failed"):
        ClientSession(params, params.roster[0], sign, entropy=broken)
