"""The secret linear hash of a sum: its definition, that nobody meets it without the key, that tags tell nothing."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr import compiled
from lensemble_flwr.secagg import ClientSession, message_size, projection, signing, state, wire
from lensemble_flwr.secagg.projection import COLUMNS, PRIME
from lensemble_flwr.secagg.wire import Stage
from tests.secagg.driver import Drbg, Round, make_params, payloads, refused, sign
from tests.secagg.test_golden import check

KEY = bytes(range(32))


def tag(values: np.ndarray, key: bytes = KEY, count: int = 1, threads: int = 1) -> int:
    return projection.tag(lambda part: values[part], values.size, key, count, threads)


def by_definition(values: np.ndarray, key: bytes, count: int) -> int:
    secret = projection.weights(key, values.size)
    weight = [int(secret.rows[j // COLUMNS]) * int(secret.columns[j % COLUMNS]) for j in range(values.size)]
    return (count * secret.shift + sum(r * int(v) for r, v in zip(weight, values, strict=True))) % PRIME


def opened(params, q=None, members=None, vouching=True, seed=None) -> tuple[np.ndarray, Round, dict[int, bytes]]:
    """The sum of a whole session, the session, and each member's key."""
    session = Round.begin(params, seed)
    q = payloads(params) if q is None else q
    members = list(range(params.n)) if members is None else members
    for i in session.clients:
        session.messages["keys", i] = message = session.clients[i].keys(vouches=vouching)
        session.server.add_keys(session.identity(i), message)
    session.shares()
    session.masked(q, members)
    keys = {i: session.clients[i].sum_key() for i in members}
    if params.consistency:
        session.agree(members)
    session.reveal(members)
    return session.server.unmask(), session, keys


# ---------------------------------------------------------------- the hash


@pytest.mark.parametrize("size", [1, 2, COLUMNS - 1, COLUMNS, COLUMNS + 1, 33 * COLUMNS + 5])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_it_is_its_definition(size: int, dtype: type) -> None:
    values = np.random.default_rng(size).integers(-(2**31), 2**31, size).astype(dtype)
    values[0], values[-1] = -(2**31), 2**31 - 1
    assert tag(values, count=3) == by_definition(values, KEY, 3)
    assert tag(values, count=3, threads=3) == by_definition(values, KEY, 3)


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1])
def test_the_largest_values_do_not_overflow(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.full(3 * COLUMNS, value, np.int64)
    largest = projection.Weights(np.full(COLUMNS, PRIME - 1, np.uint64), np.full(3, PRIME - 1, np.uint64), PRIME - 1)
    monkeypatch.setattr(projection, "weights", lambda key, dimension: largest)
    assert tag(values) == (-1 + 3 * COLUMNS * value) % PRIME


@pytest.mark.skipif(not compiled.available(), reason="numba is not installed")
@pytest.mark.parametrize("size", [1, COLUMNS, 40 * COLUMNS + 7])
def test_the_compiled_loop_gives_the_same_integers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).integers(-(2**31), 2**31, size)
    values[:COLUMNS] = -(2**31)
    found = []
    for loops in ("numpy", "numba"):
        monkeypatch.setenv("LENSEMBLE_KERNELS", loops)
        found += [tag(values), tag(values.astype(np.int32)), tag(np.frombuffer(values.tobytes(), np.int64))]
    assert len(set(found)) == 1
    assert os.environ["LENSEMBLE_KERNELS"] == "numba"


def test_golden() -> None:
    secret = projection.weights(KEY, 5000)
    values = np.arange(5000) ** 2 - 10_000_000
    found = {
        "K": projection.group_key(bytes(32), b"\x07", (bytes([i]) * 32 for i in range(3))).hex(),
        "columns": [int(c) for c in secret.columns[:4]],
        "rows": [int(r) for r in secret.rows],
        "r0": secret.shift,
        "t": tag(values),
        "mask": projection.mask([KEY], [bytes(32)]),
    }
    check("projection", found)


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("consistency", [False, True])
def test_the_tag_that_is_opened_is_that_of_the_sum(bits: int, consistency: bool) -> None:
    params = make_params(5, 3000, bits=bits, consistency=consistency, verify=True)
    q = payloads(params)
    total, session, keys = opened(params, q, [0, 1, 2, 4])
    assert len(set(keys.values())) == 1
    assert np.array_equal(total, q[0] + q[1] + q[2] + q[4])
    assert session.server.tag == tag(total, keys[0], 4)
    for count in (3, 5):
        assert session.server.tag != tag(total, keys[0], count)


def test_payloads_in_any_form_have_the_same_tag() -> None:
    params = make_params(4, 50, bits=24, verify=True)
    q = payloads(params)
    forms = [q[0], q[1].astype(np.int32), (q[2] % 2**24).astype("<u4"), q[3]]
    total, session, keys = opened(params, forms)
    assert np.array_equal(total, sum(q))
    assert session.server.tag == tag(total, keys[0], 4)


def test_keys_differ_between_attempts_and_from_all_that_the_coordinator_carries() -> None:
    params = make_params(4, 5, verify=True)
    first, second = opened(params), opened(make_params(4, 5, verify=True, attempt=1))
    assert first[2][0] != second[2][0]
    carried = b"".join(first[1].messages.values())
    assert first[2][0] not in carried
    assert first[1].server.tag != tag(first[0], second[2][0], 4)


def test_the_key_is_given_once_and_never_saved() -> None:
    params = make_params(3, 5, verify=True)
    session = Round.begin(params)
    with refused("wrong_state"):
        session.clients[0].sum_key()
    session = opened(params)[1]
    with refused("wrong_state"):
        session.clients[0].sum_key()
    plain = Round.begin(make_params(3, 5))
    plain.keys()
    plain.shares()
    plain.masked(payloads(plain.params))
    with refused("wrong_state"):
        plain.clients[0].sum_key()
    with refused("wrong_state"):
        _ = plain.server.tag


def test_a_session_survives_a_move_at_every_stage() -> None:
    params = make_params(4, 9, verify=True, consistency=True)
    session, q = Round.begin(params), payloads(params)

    def move() -> None:
        for i, client in session.clients.items():
            session.clients[i] = ClientSession.from_bytes(client.to_bytes(), params, sign)

    for i in session.clients:
        session.server.add_keys(session.identity(i), session.clients[i].keys(vouches=True))
    move()
    session.shares()
    move()
    session.masked(q)
    key = session.clients[2].sum_key()
    move()
    session.agree()
    move()
    session.reveal()
    total = session.server.unmask()
    assert session.server.tag == tag(total, key, 4)


def test_message_sizes() -> None:
    params = make_params(9, 4, verify=True, consistency=True)
    session = opened(params)[1]
    sizes = {
        name: {len(m) for (kind, _), m in session.messages.items() if kind == name} for name, _ in session.messages
    }
    stages = {"keys": Stage.KEYS, "shares": Stage.SHARES, "envelopes": Stage.ENVELOPES, "masked": Stage.MASKED}
    for name, stage in (stages | {"agree": Stage.CONSISTENCY, "reveal": Stage.REVEAL}).items():
        assert sizes[name] == {message_size(stage, 9, 9, verify=True)}, name
    assert len(session.server.roster_keys()) == message_size(Stage.ROSTER, 9, 9, verify=True)


# ---------------------------------------------------------------- forging


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_other_sum_fits(data: st.DataObject) -> None:
    size, count = 3 * COLUMNS, data.draw(st.integers(2, 9))
    total = np.random.default_rng(0).integers(-(2**20), 2**20, size)
    true = tag(total, count=count)
    forged = total.copy()
    at = data.draw(st.integers(0, size - 1))
    change = data.draw(st.integers(1, 2**30))
    forged[at] += change
    if data.draw(st.booleans()):  # a change that cancels in a plain sum, also where a column's weight is the same
        forged[(at + data.draw(st.sampled_from([1, COLUMNS, 2 * COLUMNS]))) % size] -= change
    assert tag(forged, count=count) != true
    assert tag(total, count=count + data.draw(st.sampled_from([-1, 1]))) != true


@pytest.mark.parametrize("factor", [0, -1, 2])
def test_multiples_of_sum_and_tag_do_not_fit(factor: int) -> None:
    """Without r0 they would: the coordinator knows T, and the zero sum has the tag zero."""
    total, session, keys = opened(make_params(4, 30, verify=True))
    assert factor * session.server.tag % PRIME != tag(factor * total, keys[0], 4)


def test_a_member_that_lies_about_its_tag_makes_the_sum_unverifiable() -> None:
    params = make_params(4, 8, verify=True)
    session, q = Round.begin(params), payloads(params)
    for i in session.clients:
        session.server.add_keys(session.identity(i), session.clients[i].keys(vouches=True))
    session.shares()
    liar = session.clients[3]
    envelopes = {i: session.server.envelopes_for(session.identity(i)) for i in session.clients}
    for i, client in session.clients.items():
        vector = client.masked(envelopes[i], q[i])
        if client is liar:
            held = client._state
            assert isinstance(held, state.Masked)
            other = (int.from_bytes(held.tag, "little") + 1) % PRIME
            client._state = state.Masked(held.t1, held.root, other.to_bytes(8, "little"), held.shares)
        session.server.add_masked(session.identity(i), client.masked_message(), vector)
    key = session.clients[0].sum_key()
    session.reveal()
    total = session.server.unmask()
    assert np.array_equal(total, sum(q))  # the sum is right, and nobody can tell
    assert session.server.tag != tag(total, key, 4)


def test_a_tag_out_of_range_excludes_its_member() -> None:
    params = make_params(4, 8, verify=True)
    session, q = Round.begin(params), payloads(params)
    for i in session.clients:
        session.server.add_keys(session.identity(i), session.clients[i].keys(vouches=True))
    session.shares()
    vector = session.clients[0].masked(session.server.envelopes_for(session.identity(0)), q[0])
    message = session.clients[0].masked_message()
    root, u2 = message[34:66], wire.pack_members(range(1, 5), 4)
    for value in (PRIME, 2**64 - 1):
        raw = value.to_bytes(8, "little")
        parts = (u2, root, raw, hashlib.sha256(b"").digest())
        signature = sign(signing.statement(Stage.MASKED, session.server._t1, session.identity(0), *parts))
        with refused("malformed_update") as error:
            session.server.add_masked(session.identity(0), message[:66] + raw + signature, vector)
        assert error.value.fields["member"] == session.identity(0).hex()
    with refused("bad_signature"):  # the coordinator cannot change a tag either
        session.server.add_masked(session.identity(0), message[:66] + bytes(8) + message[74:], vector)
    session.server.add_masked(session.identity(0), message, vector)


def test_members_with_other_nonces_have_other_keys() -> None:
    """A member that seals different nonces for its peers can only make the check fail."""
    nonces = [bytes([i]) * 32 for i in range(3)]
    keys = {
        projection.group_key(bytes(32), b"\x07", nonces),
        projection.group_key(bytes(32), b"\x07", [*nonces[:2], bytes(32)]),
        projection.group_key(bytes(32), b"\x0f", nonces),
        projection.group_key(b"\x01" * 32, b"\x07", nonces),
        projection.group_key(bytes(32), b"\x07", reversed(nonces)),
    }
    assert len(keys) == 5


# ---------------------------------------------------------------- who vouches


@pytest.mark.parametrize(("vouching", "goes_on"), [(0, False), (2, False), (3, True), (4, True)])
def test_one_that_cannot_check_needs_k_plus_one_that_vouch(vouching: int, goes_on: bool) -> None:
    params = make_params(5, 4, k=2, verify=True)
    session = Round.begin(params)
    for i in session.clients:
        session.server.add_keys(session.identity(i), session.clients[i].keys(vouches=i < vouching))
    assert session.server.vouching == {session.identity(i) for i in range(vouching)}
    roster_keys = session.server.roster_keys()
    if goes_on:
        session.clients[4].shares(roster_keys)
    else:
        with refused("sum_unverified"):
            session.clients[4].shares(roster_keys)
    if vouching:
        session.clients[0].shares(roster_keys)  # it knows by itself


def test_the_word_of_a_member_is_signed() -> None:
    params = make_params(4, 4, verify=True)
    session = Round.begin(params)
    for i in session.clients:
        session.server.add_keys(session.identity(i), session.clients[i].keys())
    roster_keys = bytearray(session.server.roster_keys())
    entry = wire.key_entry_bytes(True)
    for j in range(3):
        roster_keys[wire.HEADER_BYTES + 1 + j * entry + 64] = 1
    with refused("bad_signature"):
        session.clients[3].shares(bytes(roster_keys))
    other = signing.statement(Stage.KEYS, params.hash, session.identity(0), bytes(64) + b"\x02")
    with refused("malformed_message"):
        Round.begin(params).server.add_keys(
            session.identity(0), wire.pack(Stage.KEYS, params.hash, roster_keys[35:99] + b"\x02", sign(other))
        )


def test_keys_that_are_refused_do_not_count_as_a_dealing() -> None:
    """The caller's record that shares were dealt is made when all is checked, and not before."""
    params = make_params(4, 4)
    session, dealt = Round.begin(params), []
    session.keys()
    good = session.server.roster_keys()
    for bad in (b"garbage", good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        with refused("malformed_message", "bad_signature"):
            session.clients[0].shares(bad, before=lambda: dealt.append(1))
    assert not dealt
    session.clients[0].shares(good, before=lambda: dealt.append(1))
    assert dealt == [1]


# ---------------------------------------------------------------- what a tag tells


def test_the_tag_tells_nothing_about_the_weights_or_the_sum() -> None:
    """Over many keys, for two fixed sums: T is uniform, and independent of the weights that decide a forgery."""
    draws, cells = 1600, 8
    totals = [np.zeros(4, np.int64), np.array([2**31 - 1, -(2**31), 1, 0])]
    for total in totals:
        table, seen = Counter[tuple[int, int]](), []
        for i in range(draws):
            key = Drbg((i, total.tolist()))(32)
            secret = projection.weights(key, 4)
            first, columns = int(secret.rows[0]), secret.columns[: total.size].tolist()
            value = (
                3 * secret.shift + first * sum(c * v for c, v in zip(columns, total.tolist(), strict=True))
            ) % PRIME
            forging = first * columns[0] % PRIME  # what T' must differ by for S'[0] + 1
            table[value * cells // PRIME, forging * cells // PRIME] += 1
            seen.append(value)
        expected = draws / cells**2
        chi2 = sum((table[a, b] - expected) ** 2 / expected for a in range(cells) for b in range(cells))
        assert chi2 < 120  # 63 degrees of freedom: over it with probability 2e-5, and the keys are fixed
        assert len(set(seen)) == draws
        assert all(a != b for a, b in pairwise(sorted(seen)))


def test_a_masked_tag_is_uniform() -> None:
    draws = [(12345 + projection.mask([Drbg(("mask", i))(32)], [Drbg(("other", i))(32)])) % PRIME for i in range(4000)]
    counts = np.histogram(np.array(draws, float), bins=16, range=(0, float(PRIME)))[0]
    assert ((counts - 250) ** 2 / 250).sum() < 45  # 15 degrees of freedom: 8e-5
