"""What a coordinator, a member or the network can try, and how it is refused.

The numbers are those of one list of attacks; where the rest of it is tried:

 1 both secrets of a member      here, machine.py (all orders, several attempts), federation/test_pinned.py (the latch)
 2 replay                        here; of signatures test_signatures.py
 3 public keys                   here; keys that the coordinator swaps test_signatures.py
 4, 5 envelopes                  here
 6 too few survivors             here, test_session.py
 7, 8 malformed                  here, test_fuzz.py; altered vectors test_signatures.py
 9 payloads                      here, test_ring.py
10 drops at each stage           test_session.py (one, n-t, n-t+1, all, at each of 4 and of 5 stages)
11 different models, parameters  here, federation/test_round.py
12 downgrades                    here, test_params.py, federation/test_round.py, federation/test_pinned.py
13 split views                   test_signatures.py, federation/test_pinned.py
14 sybils, wrong signers         test_signatures.py, federation/test_pinned.py
15, 16 retries, past rounds      here, federation/test_resume.py, federation/test_pinned.py
17 keystream, uniformity         here, test_keystream.py
18 determinism                   test_session.py (order of arrival, threads), test_golden.py
19 wrong shares                  here
20 corrupted sums                here
21 secrets where they belong     here, federation/test_pinned.py (files, messages, memory, events of a whole run)
22 crashes                       federation/test_resume.py, federation/test_pinned.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import (
    ClientSession,
    RingParams,
    Stage,
    agreement,
    keystream,
    masking,
    shamir,
    signing,
    state,
    wire,
)
from lensemble_flwr.secagg.envelope import seal
from lensemble_flwr.secagg.ring import SEGMENT
from tests.secagg.driver import Drbg, Round, make_params, payloads, refused, run, sign, signed

HEADER = wire.HEADER_BYTES


def after_shares(n: int = 5, **overrides) -> Round:
    session = Round.begin(make_params(n, **overrides))
    session.keys()
    session.shares()
    return session


def after_masked(n: int = 5, **overrides) -> Round:
    session = after_shares(n, **overrides)
    session.masked(payloads(session.params))
    return session


def flip(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def survivors(session: Round, members) -> bytes:
    positions = [i + 1 for i in members]
    roots = (session.server._roots.get(position, bytes(32)) for position in positions)
    return wire.pack(Stage.SURVIVORS, session.server._t1, wire.pack_members(positions, session.params.n), *roots)


# --- 1: both secrets of one member


def test_a_second_reveal_is_refused():
    session = after_masked()
    client = session.clients[0]
    client.reveal(survivors(session, range(5)))
    for members in (range(5), range(4)):
        with refused("already_revealed"):
            client.reveal(survivors(session, members))


def answers(session: Round, i: int) -> Iterator[tuple[set[int], set[int], dict[int, str]]]:
    """Every (U2, U3, kind of secret revealed by owner) that member i can be brought to answer, from the same state."""
    n, identity = session.params.n, session.identity(i)
    others = [j for j in range(n) if j != i]
    everyone = session.server.envelopes_for(identity)[HEADER + 1 :]
    envelopes = wire.split_evenly(everyone, others, wire.ENVELOPE_BYTES)
    blob = session.clients[i].to_bytes()
    subsets = [set(c) for size in range(n + 1) for c in itertools.combinations(range(n), size)]
    for u2 in subsets:
        bitmap = wire.pack_members([j + 1 for j in u2], n)
        body = [envelopes[j] for j in sorted(u2 - {i})]
        client = ClientSession.from_bytes(blob, session.params, sign)
        try:
            client.masked(wire.pack(Stage.ENVELOPES, session.server._t1, bitmap, *body), np.zeros(20, np.int64))
        except SecureAggregationError:
            continue
        session.server._roots[i + 1] = client._state.root
        masked, held = client.to_bytes(), client._state.shares
        pairs = {j: bytes(held[j + 1]) for j in u2}
        for u3 in subsets:
            member = ClientSession.from_bytes(masked, session.params, sign)
            try:
                reply = member.reveal(survivors(session, u3))
            except SecureAggregationError:
                continue
            shares = wire.split_evenly(reply[HEADER:], sorted(u2), shamir.SHARE_BYTES)
            yield u2, u3, {j: "seed" if shares[j] == pairs[j][:33] else "key" for j in u2}


@pytest.mark.parametrize(("n", "k"), [(3, 1), (4, 1), (5, 1), (5, 2), (5, 3)])
def test_no_lie_about_sets_gives_both_secrets_of_anyone(n, k):
    """All U2 and U3 that the coordinator can show, another pair to each member, with k members handing over all."""
    session = after_shares(n, k=k)
    t = session.params.threshold
    kinds: list[list[set[str]]] = []  # honest member -> owner -> which kinds it could reveal
    for i in range(n):
        per_owner: list[set[str]] = [set() for _ in range(n)]
        for u2, u3, revealed in answers(session, i):
            assert i in u3 <= u2
            assert len(u3) >= max(t, session.params.min_survivors)
            for owner, kind in revealed.items():
                assert kind == ("seed" if owner in u3 else "key")
                per_owner[owner].add(kind)
        kinds.append(per_owner)
    for colluders in itertools.combinations(range(n), k):
        honest = [i for i in range(n) if i not in colluders]
        for owner in honest:
            # each honest member gives one of its kinds; the coordinator assigns them as suits it best
            seed_only = sum(kinds[i][owner] == {"seed"} for i in honest)
            key_only = sum(kinds[i][owner] == {"key"} for i in honest)
            either = len(honest) - seed_only - key_only
            for to_seed in range(either + 1):
                seeds, keys = k + seed_only + to_seed, k + key_only + either - to_seed
                assert seeds < t or keys < t


def test_the_bound_on_the_threshold_is_needed():
    """At 2t = n + k the count of the test above does not hold: t shares of each kind."""
    n, k, t = 5, 1, 3
    assert 2 * t == n + k
    assert k + (n - k) // 2 >= t


# --- 2, 4, 5: envelopes


def test_envelopes_of_another_round_or_attempt():
    one, other = after_shares(attempt=0), after_shares(attempt=1)
    i = one.identity(0)
    replayed = other.server.envelopes_for(i)
    with refused("share_decrypt_failed"):
        one.clients[0].masked(replayed, payloads(one.params)[0])
    dressed = wire.pack(Stage.ENVELOPES, one.server._t1, replayed[HEADER:])  # with a header that fits
    with refused("share_decrypt_failed"):
        one.clients[0].masked(dressed, payloads(one.params)[0])


def test_one_bit_flipped_in_any_envelope():
    session = after_shares()
    good = session.server.envelopes_for(session.identity(2))
    start = 8 * (HEADER + 1)
    for bit in range(start, 8 * len(good), 37):
        with refused("share_decrypt_failed") as error:
            session.clients[2].masked(flip(good, bit), payloads(session.params)[2])
        sender = (bit - start) // 8 // wire.ENVELOPE_BYTES
        assert error.value.fields["member"] == session.identity([0, 1, 3, 4][sender]).hex()
    session.clients[2].masked(good, payloads(session.params)[2])  # a refusal had changed nothing


def test_swapped_envelopes():
    session = after_shares()
    sealed = session.server._envelopes
    bitmap = wire.pack_members([1, 2, 3, 4, 5], 5)

    def deliver(first: bytes) -> None:
        rest = [sealed[j][1] for j in (3, 4, 5)]
        session.clients[0].masked(wire.pack(Stage.ENVELOPES, session.server._t1, bitmap, first, *rest), q)

    q = payloads(session.params)[0]
    for wrong in (sealed[3][1], sealed[2][3], sealed[1][2]):  # another sender, another reader, its own sent back
        with refused("share_decrypt_failed"):
            deliver(wrong)
    deliver(sealed[2][1])


def test_an_envelope_that_holds_no_shares_names_its_sender():
    session = after_shares()
    bad = shamir.PRIME.to_bytes(33, "big")

    def reseal(first: bytes, second: bytes) -> None:
        key = session.clients[0]._state.envelope_keys[2]
        context = session.server._t1 + b"share" + session.identity(1) + session.identity(0)
        session.server._envelopes[2][1] = seal(bytes(key), bytes(12), first, second, context)

    for pair in ((bad, bytes(33)), (bytes(33), bad)):
        reseal(*pair)
        with refused("share_decrypt_failed") as error:
            session.masked(payloads(session.params), [0])
        assert error.value.fields["member"] == session.identity(1).hex()
    for size in (32, 34):
        reseal(bytes(33), bytes(size))
        with refused("malformed_message"):
            session.masked(payloads(session.params), [0])


# --- 3: public keys


def roster_message(session: Round, change: dict[int, tuple[bytes, bytes]]) -> bytes:
    """U1 with other keys of some members, signed by them: they lie, or the coordinator holds their identities."""
    params = session.params
    entries = session.server._entries | {
        i + 1: signed(params, i, Stage.KEYS, params.hash, b"".join(pair))[HEADER:] for i, pair in change.items()
    }
    bitmap = wire.pack_members(entries, params.n)
    return wire.pack(Stage.ROSTER, params.hash, bitmap, *(entry for _, entry in sorted(entries.items())))


SMALL_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
]
NOT_CANONICAL = [(2**255 - 19).to_bytes(32, "little"), (2**255 - 10).to_bytes(32, "little"), b"\xff" * 32]


def test_keys_that_members_refuse():
    session = Round.begin(make_params(5))
    session.keys()
    keys = {i: session.server._keys[i + 1] for i in range(5)}
    fresh = agreement.public_key(Drbg(0)(32))
    high_bit = keys[2][0][:31] + bytes([keys[2][0][31] | 0x80])
    changes = [
        {0: (fresh, keys[0][1])},  # own keys altered
        {0: (keys[0][0], fresh)},
        {0: (keys[0][1], keys[0][0])},
        {1: keys[2]},  # a pair twice
        {1: (keys[1][0], keys[1][0])},
        {1: (keys[0][0], keys[1][1])},
        {0: keys[1], 1: keys[0]},  # swapped between two members
        {1: (high_bit, keys[1][1])},  # the same point in other bytes
        *({1: (bad, keys[1][1])} for bad in SMALL_ORDER + NOT_CANONICAL),
        *({1: (keys[1][0], bad)} for bad in SMALL_ORDER + NOT_CANONICAL),
    ]
    for change in changes:
        with refused("key_agreement_failed"):
            session.clients[0].shares(roster_message(session, change))
    # a swap between two others is not visible to a third, but to the two, and to the third by the envelopes
    session.clients[0].shares(roster_message(session, {}))


def test_keys_that_the_coordinator_refuses_so_that_one_member_cannot_stop_all():
    session = Round.begin(make_params(5))
    session.keys([0, 1, 2, 3])
    good = agreement.public_key(Drbg(0)(32))
    for pair in (
        *((bad, good) for bad in SMALL_ORDER + NOT_CANONICAL),
        *((good, bad) for bad in SMALL_ORDER + NOT_CANONICAL),
        (good, good),
        session.server._keys[1],
        session.server._keys[1][::-1],
    ):
        with refused("key_agreement_failed") as error:
            message = signed(session.params, 4, Stage.KEYS, session.params.hash, b"".join(pair))
            session.server.add_keys(session.identity(4), message)
        assert error.value.fields["member"] == session.identity(4).hex()
    session.shares([0, 1, 2, 3])
    q = payloads(session.params)
    session.masked(q, [0, 1, 2, 3])
    session.reveal([0, 1, 2, 3])
    assert np.array_equal(session.server.unmask(), sum(q[:4]))


# --- 6, 12: sets that are too small, too large or wrong


def test_members_refuse_too_few_at_every_stage():
    params = make_params(7, threshold=5, min_survivors=6)
    session = Round.begin(params)
    session.keys()
    keys = {j: entry for j, entry in session.server._entries.items() if j <= 5}
    for size, cause in ((4, "below_threshold"), (5, "below_min_survivors")):
        chosen = sorted(keys)[:size]
        message = wire.pack(Stage.ROSTER, params.hash, wire.pack_members(chosen, 7), *(keys[j] for j in chosen))
        with refused(cause):
            session.clients[0].shares(message)
    session.shares()
    envelopes = session.server.envelopes_for(session.identity(0))[HEADER + 1 :]
    for size, cause in ((4, "below_threshold"), (5, "below_min_survivors")):
        bitmap = wire.pack_members(range(1, size + 1), 7)
        body = envelopes[: (size - 1) * wire.ENVELOPE_BYTES]
        with refused(cause):
            session.clients[0].masked(wire.pack(Stage.ENVELOPES, session.server._t1, bitmap, body), payloads(params)[0])
    session.masked(payloads(params))
    for size, cause in ((1, "below_threshold"), (4, "below_threshold"), (5, "below_min_survivors")):
        with refused(cause):
            session.clients[0].reveal(survivors(session, range(size)))
    session.clients[0].reveal(survivors(session, range(6)))


def test_members_refuse_sets_that_grow_or_leave_them_out():
    params = make_params(6)
    session = Round.begin(params)
    session.keys(range(5))
    with refused("inconsistent_roster"):  # left out of U1
        session.clients[5].shares(session.server.roster_keys())
    session.shares(range(5))
    good = session.server.envelopes_for(session.identity(0))
    q = payloads(params)

    def envelopes(members, body: bytes) -> bytes:
        return wire.pack(Stage.ENVELOPES, session.server._t1, wire.pack_members(members, 6), body)

    with refused("inconsistent_roster"):  # left out of U2
        session.clients[0].masked(envelopes([2, 3, 4, 5], good[HEADER + 1 : -wire.ENVELOPE_BYTES]), q[0])
    with refused("inconsistent_roster"):  # U2 not within U1
        session.clients[0].masked(envelopes(range(1, 7), good[HEADER + 1 :] + bytes(wire.ENVELOPE_BYTES)), q[0])
    session.masked(q, range(5))
    with refused("inconsistent_roster"):  # left out of U3
        session.clients[0].reveal(survivors(session, [1, 2, 3, 4]))
    with refused("inconsistent_roster"):  # U3 not within U2
        session.clients[0].reveal(survivors(session, range(6)))


# --- 7, 8: malformed shares and vectors


def test_a_revealed_share_is_a_field_element_of_33_bytes():
    session = after_masked()
    message = session.clients[3].reveal(session.server.survivors())
    too_large = message[HEADER : -64 - 33] + shamir.PRIME.to_bytes(33, "big")
    lie = signed(session.params, 3, Stage.REVEAL, session.server._t1, too_large)
    for bad in (message[:-1], message + b"\0", message[:HEADER], lie):
        with refused("malformed_message") as error:
            session.server.add_reveal(session.identity(3), bad)
        assert error.value.fields["member"] == session.identity(3).hex()
    session.server.add_reveal(session.identity(3), message)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_malformed_vector_leaves_the_sum_as_it_was(bits):
    session = after_shares(bits=bits)
    q = payloads(session.params)
    session.masked(q, range(4))
    before = session.server._total.copy()
    size, lane = session.params.ring.padded, session.params.ring.lane
    bad = [
        np.zeros(size - 1, lane),
        np.zeros(size + 1, lane),
        np.zeros((size, 1), lane),
        np.zeros(size, np.int64),
        np.zeros(size, lane.newbyteorder(">")),
        np.zeros(size, np.float32),
        np.zeros(2 * size, lane)[::2],
        bytes(size * lane.itemsize),
        None,
    ]
    if bits == 24:
        bad.append(np.full(size, 1 << 24, lane))
    for vector in bad:
        with refused("malformed_update") as error:
            session.server.add_masked(session.identity(4), session.messages["masked", 3], vector)
        assert error.value.fields["member"] == session.identity(4).hex()
    assert np.array_equal(session.server._total, before)
    assert session.server.u3 == session.params.roster[:4]
    session.reveal(range(4))
    assert np.array_equal(session.server.unmask(), sum(q[:4]))


# --- 9: payloads that must not be masked


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_bad_payload_is_refused_and_nothing_of_it_stays(bits):
    session = after_shares(bits=bits, ring=RingParams(bits, 5, 8, 60_000))
    ring = session.params.ring
    envelopes = session.server.envelopes_for(session.identity(0))
    out = np.full(ring.padded, 9, ring.lane)
    good = np.full(ring.dimension, 3)

    def change(value: int) -> np.ndarray:
        q = good.copy()
        q[-1] = value
        return q

    bad = [change(v) for v in (ring.qmax + 1, -ring.qmax - 1, 2**bits, 2**63 - 1, -(2**63))]
    bad += [np.full(ring.dimension, ring.qmax + 1).astype(ring.lane)]
    bad += [good[:-1], good.astype(np.float64), good.astype(np.int16), good.reshape(-1, 1), list(good), None]
    if bits == 24:
        bad.append(np.full(ring.dimension, 1 << 24, ring.lane))
    for q in bad:
        out[:] = 9
        with refused("malformed_update") as error:
            session.clients[0].masked(envelopes, q, out=out)
        assert np.all(out == 0) or np.all(out == 9)
        assert str(ring.qmax + 1) not in str(error.value)
    read_only = out.copy()
    read_only.flags.writeable = False
    for target in (out[:-1], out.astype(np.int64), read_only, out[::-1]):
        with refused("malformed_update"):
            session.clients[0].masked(envelopes, good, out=target)
    shared = np.zeros(ring.padded, ring.lane)
    with refused("malformed_update"):
        session.clients[0].masked(envelopes, shared[: ring.dimension], out=shared)
    assert session.clients[0].masked(envelopes, good, out=out) is out


# --- 11: members that were shown different things


@pytest.mark.parametrize(
    "change",
    [
        {"open_hash": bytes(32)},
        {"attempt": 1},
        {"threshold": 5},
        {"min_survivors": 4},
        {"ring": RingParams(32, 5, 9, 20)},
        {"ring": RingParams(32, 5, 8, 21)},
        {"roster": tuple(sorted((*make_params(5).roster[1:], b"\xff" * 32)))},
    ],
)
def test_a_member_that_was_shown_another_round(change):
    params = make_params(5)
    other = dataclasses.replace(params, **change)
    deceived = other.roster.index(params.roster[4])
    odd = ClientSession(other, params.roster[4], sign)
    session = Round.begin(params)
    session.keys(range(4))
    with refused("inconsistent_roster"):  # an honest coordinator notices at the first message
        session.server.add_keys(params.roster[4], odd.keys())
    # a lying one rewrites the headers; then no signature fits
    with refused("bad_signature"):
        session.server.add_keys(params.roster[4], wire.pack(Stage.KEYS, params.hash, odd.keys()[HEADER:]))
    # if it holds this member's identity, no envelope opens, before anything masked has left
    resigned = signed(params, 4, Stage.KEYS, params.hash, odd.keys()[HEADER:-64])
    session.server.add_keys(params.roster[4], resigned)
    session.shares(range(4))
    roster = session.server.roster_keys()
    if "roster" in change:
        with refused("inconsistent_roster", "key_agreement_failed", "bad_signature"):
            odd.shares(wire.pack(Stage.ROSTER, other.hash, roster[HEADER:]))
        return
    assert deceived == 4
    with refused("bad_signature"):  # the others' signatures are for another round than this member's
        odd.shares(wire.pack(Stage.ROSTER, other.hash, roster[HEADER:]))
    entries = wire.split_evenly(roster[HEADER + 1 :], range(5), wire.KEY_ENTRY_BYTES)
    forged = [signed(other, i, Stage.KEYS, other.hash, entry[:64])[HEADER:] for i, entry in entries.items()]
    reply = odd.shares(wire.pack(Stage.ROSTER, other.hash, roster[HEADER : HEADER + 1], *forged))
    resigned = signed(params, 4, Stage.SHARES, session.server._t1, reply[HEADER:-64])
    session.server.add_shares(params.roster[4], resigned)
    for i in range(4):
        with refused("share_decrypt_failed") as error:
            session.masked(payloads(params), [i])
        assert error.value.fields["member"] == params.roster[4].hex()
    theirs = session.server.envelopes_for(params.roster[4])
    with refused("share_decrypt_failed"):
        odd.masked(wire.pack(Stage.ENVELOPES, odd._state.t1, theirs[HEADER:]), np.zeros(other.ring.dimension, np.int64))


def test_members_that_were_shown_different_keys():
    session = Round.begin(make_params(5))
    session.keys()
    forged = agreement.public_key(Drbg(0)(32))
    session.server.roster_keys()
    for i in range(5):
        mine = {} if i == 4 else {4: (forged, session.server._keys[5][1])}
        reply = session.clients[i].shares(roster_message(session, mine))
        if not mine:
            session.server.add_shares(session.identity(i), reply)
            continue
        with refused("inconsistent_roster"):  # an honest coordinator notices
            session.server.add_shares(session.identity(i), reply)
        resigned = signed(session.params, i, Stage.SHARES, session.server._t1, reply[HEADER:-64])
        session.server.add_shares(session.identity(i), resigned)
    for i in (0, 4):
        delivered = session.server.envelopes_for(session.identity(i))[HEADER:]
        with refused("share_decrypt_failed"):
            session.clients[i].masked(
                wire.pack(Stage.ENVELOPES, session.clients[i]._state.t1, delivered), payloads(session.params)[i]
            )


# --- 15, 16: retries


def test_a_retry_masks_the_same_payload_under_fresh_masks():
    q = payloads(make_params(5))
    vectors = []
    for attempt in (0, 1):
        session = Round.begin(make_params(5, attempt=attempt))
        session.keys()
        session.shares()
        session.masked(q)
        vectors.append(session.vectors)
    for i in range(5):
        assert np.mean(vectors[0][i] == vectors[1][i]) < 0.2
    session.reveal()
    assert np.array_equal(session.server.unmask(), sum(q))


def test_what_a_later_round_reveals_opens_no_earlier_one():
    past = after_masked(open_hash=bytes(32))
    past.reveal()
    now = after_shares()
    now.masked(payloads(now.params), range(4))
    now.reveal(range(4))
    victim = 5
    shares = {i: now.server._reveals[i][victim] for i in (1, 2, 3, 4)}
    key = shamir.combine(shares)
    assert agreement.public_key(key) == now.server._keys[victim][1]
    assert agreement.public_key(key) != past.server._keys[victim][1]
    seed = shamir.combine({i: past.server._reveals[i][victim] for i in (1, 2, 3, 4)})
    y, t1 = past.vectors[4].copy(), past.server._t1
    private = agreement.load(key)
    plus = [
        agreement.pair_mask_key(
            t1, agreement.shared_secret(private, past.server._keys[i][1], ""), past.identity(4), past.identity(i - 1)
        )
        for i in (1, 2, 3, 4)
    ]
    keystream.apply(y[: past.params.ring.body], plus, [agreement.self_mask_key(t1, seed)])
    assert not np.any(y[1:21].view(np.int32) == payloads(past.params)[4])


# --- 17: masked vectors look uniform


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_masked_vectors_are_uniform(bits):
    params = make_params(3, 200_000, bits=bits)
    _, _, session = run(params, [np.zeros(200_000, np.int64)] * 3, seed=bits)
    for vector in session.vectors.values():
        raw = np.ascontiguousarray(vector).view(np.uint8).reshape(vector.size, -1)[:, : bits // 8]
        counts = np.bincount(raw.ravel(), minlength=256)
        chi2 = ((counts - raw.size / 256) ** 2 / (raw.size / 256)).sum()
        assert 150 < chi2 < 380  # 255 degrees of freedom: beyond 1e-6 on either side
        ones = int(np.unpackbits(raw).sum())
        assert abs(ones - raw.size * 4) < 5 * np.sqrt(raw.size * 2)


# --- 19: wrong shares


def test_one_liar_is_named_and_the_sum_is_right():
    for lost, target in (((), "seed"), ((4,), "key")):
        session = after_shares(7)
        q = payloads(session.params)
        alive = [i for i in range(7) if i not in lost]
        session.masked(q, alive)
        message_from = session.server.survivors()
        for i in alive:
            message = session.clients[i].reveal(message_from)
            if i == 1:  # off by one in the share of member 4's secret, whichever kind it is
                at = HEADER + 4 * 33 + 32
                body = message[HEADER:at] + bytes([message[at] ^ 1]) + message[at + 1 : -64]
                message = signed(session.params, i, Stage.REVEAL, session.server._t1, body)
            session.server.add_reveal(session.identity(i), message)
        assert session.server.culprits == ()
        assert np.array_equal(session.server.unmask(), sum(q[i] for i in alive)), target
        assert session.server.culprits == (session.identity(1),)


def test_a_liar_without_a_share_to_spare_stops_the_sum_until_another_reveals():
    session = after_masked(5)
    message_from = session.server.survivors()
    replies = {i: session.clients[i].reveal(message_from) for i in range(5)}
    body = replies[0][HEADER:-65] + bytes([replies[0][-65] ^ 1])
    with refused("bad_signature") as error:  # altered on the way: its member is not to blame
        session.server.add_reveal(session.identity(0), wire.pack(Stage.REVEAL, session.server._t1, body, bytes(64)))
    session.server.add_reveal(session.identity(0), signed(session.params, 0, Stage.REVEAL, session.server._t1, body))
    for i in (1, 2, 3):
        session.server.add_reveal(session.identity(i), replies[i])
    with refused("mask_reconstruction_failed") as error:
        session.server.unmask()
    assert error.value.fields["member"] == session.identity(4).hex()  # whose secret it is, not who lied
    assert session.server.culprits == ()
    session.server.add_reveal(session.identity(4), replies[4])
    assert np.array_equal(session.server.unmask(), sum(payloads(session.params)))
    assert session.server.culprits == (session.identity(0),)


def test_a_dealer_that_commits_to_another_seed():
    session = Round.begin(make_params(5))
    session.keys()
    roster = session.server.roster_keys()
    for i in range(5):
        message = session.clients[i].shares(roster)
        if i == 2:
            lie = flip(message, 8 * HEADER)[HEADER:-64]
            message = signed(session.params, 2, Stage.SHARES, session.clients[2]._state.t1, lie)
        session.server.add_shares(session.identity(i), message)
    session.masked(payloads(session.params))
    session.reveal()
    with refused("mask_reconstruction_failed") as error:
        session.server.unmask()
    assert error.value.fields["member"] == session.identity(2).hex()


# --- 20: a sum that does not add up


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_any_corruption_of_the_sum_is_noticed(bits):
    params = make_params(4, 300, bits=bits)
    q = payloads(params)
    ring = params.ring
    tail = ring.body + 64 // bits - 1  # the last lane that lies within the checksum's 64 bits
    lanes = [0, ring.sentinels - 1, ring.sentinels, ring.sentinels + 150, ring.body - 1, ring.body, tail]
    for lane, delta in itertools.product(lanes, (1, 1 << (bits - 1), 1 << (bits - 9))):
        session = Round.begin(params)
        session.keys()
        session.shares()
        session.masked(q)
        session.reveal()
        total = session.server._total
        total[lane] = (int(total[lane]) + delta) % (1 << bits)
        with refused("sum_check_failed"):
            session.server.unmask()
        assert not np.any(total)  # the opened sum is destroyed
        with refused("wrong_state"):
            session.server.unmask()


def test_a_mask_that_is_left_out_in_one_segment():
    params = make_params(3, SEGMENT + 1000)
    session = Round.begin(params)
    session.keys()
    session.shares()
    key = bytes(session.clients[0]._state.mask_keys[2])
    session.masked(payloads(params))
    session.reveal()
    masks = keystream.Masks(1, [], [key], params.ring.lane)
    masks.apply(session.server._total[SEGMENT : params.ring.body])
    with refused("sum_check_failed"):
        session.server.unmask()


def test_members_that_saw_different_sets_do_not_add_up():
    session = after_shares(6)
    q = payloads(session.params)
    session.masked(q, range(5))
    short = session.server.envelopes_for(session.identity(5))[HEADER + 1 + wire.ENVELOPE_BYTES :]
    bitmap = wire.pack_members(range(2, 7), 6)
    odd = session.clients[5].masked(wire.pack(Stage.ENVELOPES, session.server._t1, bitmap, short), q[5])
    with refused("bad_signature"):  # it signed another U2, so an honest coordinator leaves it out
        session.server.add_masked(session.identity(5), session.clients[5].masked_message(), odd)
    parts = (wire.pack_members(range(1, 7), 6), session.clients[5]._state.root, hashlib.sha256(b"").digest())
    statement = signing.statement(Stage.MASKED, session.server._t1, session.identity(5), *parts)
    lie = wire.pack(Stage.MASKED, session.server._t1, parts[1], sign(statement))
    session.server.add_masked(session.identity(5), lie, odd)
    session.reveal(range(5))
    with refused("sum_check_failed"):
        session.server.unmask()


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_sum_that_wrapped_is_noticed_by_the_checksum(bits):
    """Members that ignore qmax can bring the ring sum back into range; the checksum is over the integers."""
    generous, ring = RingParams(bits, 2, 0, 50), RingParams(bits, 5, 0, 50)
    t1, keys = bytes(32), [Drbg(i)(32) for i in range(5)]
    total = np.zeros(ring.padded, ring.lane)
    q = np.zeros(50, np.int64)
    q[7] = generous.qmax  # 5 qmax(2) is beyond the ring and comes back as 2^(b-2) - 5
    wrapped = np.zeros(1, np.int64) + 5 * generous.qmax - 2**bits
    assert abs(int(wrapped[0])) <= 5 * ring.qmax
    for key in keys:
        y = np.empty(ring.padded, ring.lane)
        masking.mask(y, q, generous, t1, [key], [])
        masking.accumulate(total, y, ring)
    with refused("sum_check_failed") as error:
        masking.unmask(total, ring, t1, [], keys, 5)
    assert "checksum" in str(error.value)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_sum_out_of_reach_is_noticed_by_the_range(bits):
    """Members over qmax whose sum does not wrap and whose checksums are honest."""
    generous, ring = RingParams(bits, 2, 0, 50), RingParams(bits, 5, 0, 50)
    for side in (1, -1):
        total = np.zeros(ring.padded, ring.lane)
        keys = [Drbg(i)(32) for i in range(3)]
        for key, value in zip(keys, (generous.qmax, generous.qmax, 0), strict=True):
            y = np.empty(ring.padded, ring.lane)
            masking.mask(y, np.full(50, side * value), generous, bytes(32), [key], [])
            masking.accumulate(total, y, ring)
        assert 3 * ring.qmax < 2 * generous.qmax < 2 ** (bits - 1)
        with refused("sum_check_failed") as error:
            masking.unmask(total, ring, bytes(32), [], keys, 3)
        assert "over what its summands can reach" in str(error.value)


# --- 21: nothing secret where it does not belong


def test_no_secret_in_what_the_coordinator_stores_or_prints():
    session = after_shares()
    state_of_0 = session.clients[0]._state
    private = [bytes(secret) for secret in state_of_0.secrets()]
    kept = b"".join(
        bytes(value)
        for value in (*session.messages.values(), *(e for d in session.server._envelopes.values() for e in d.values()))
    )
    assert not any(secret in kept for secret in private)
    assert not any(secret.hex() in repr(vars(session.server)) for secret in private)
    q = payloads(session.params)
    session.masked(q)
    assert not any(isinstance(v, np.ndarray) and v is not session.server._total for v in vars(session.server).values())


def test_a_state_of_before_the_reveal_is_the_callers_to_guard():
    """Documented: the session cannot know that an older state of it has answered. The site's latch does."""
    session = after_masked()
    blob = session.clients[0].to_bytes()
    session.clients[0].reveal(survivors(session, range(5)))
    assert isinstance(state.parse(blob, session.params)[0], state.Masked)
