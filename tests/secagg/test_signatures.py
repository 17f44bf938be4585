"""Signatures of members, and the consistency stage: what a coordinator that lies can still do."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import ClientSession, Stage, agreement, masking, shamir, signing, transcript, wire
from lensemble_flwr.secagg.ring import SEGMENT, RingParams, to_wire
from lensemble_flwr.secagg.roots import vector_root
from lensemble_flwr.secagg.signing import weak
from tests.secagg.driver import Drbg, Round, make_params, payloads, refused, sign, signed
from tests.secagg.machine import opened_sums

HEADER = wire.HEADER_BYTES
EVERY_STAGE = ("keys", "shares", "masked", "agree", "reveal")


def begun(n: int = 5, until: str = "", **overrides) -> Round:
    """A round with the consistency stage that has gone through `until`."""
    session = Round.begin(make_params(n, consistency=True, **overrides))
    steps = (session.keys, session.shares, lambda: session.masked(payloads(session.params)), session.agree)
    for name, step in zip(EVERY_STAGE, steps, strict=False):
        step()
        if name == until:
            break
    return session


def survivors(session: Round, members, roots: dict[int, bytes] | None = None) -> bytes:
    """A SURVIVORS message for these members, with other roots of some."""
    known = session.server._roots | {i + 1: root for i, root in (roots or {}).items()}
    positions = [i + 1 for i in members]
    bitmap = wire.pack_members(positions, session.params.n)
    return wire.pack(Stage.SURVIVORS, session.server._t1, bitmap, *(known[j] for j in positions))


def confirmed(session: Round, signatures: dict[int, bytes]) -> bytes:
    """A CONFIRMED message with these members' CONSISTENCY messages."""
    bitmap = wire.pack_members([i + 1 for i in signatures], session.params.n)
    ordered = [signatures[i][HEADER:] for i in sorted(signatures)]
    return wire.pack(Stage.CONFIRMED, session.server._t1, bitmap, *ordered)


# --- signatures


def deliver(session: Round, stage: str, i: int, message: bytes) -> None:
    server, identity = session.server, session.identity(i)
    if stage == "masked":
        server.add_masked(identity, message, session.vectors[i], b"associated")
        return
    add = {"keys": server.add_keys, "shares": server.add_shares, "agree": server.add_consistency}
    add.get(stage, server.add_reveal)(identity, message)


def message_of(session: Round, stage: str, i: int) -> bytes:
    """Member i's message of a stage whose predecessors are done; not delivered."""
    client, identity = session.clients[i], session.identity(i)
    if stage == "keys":
        return client.keys()
    if stage == "shares":
        return client.shares(session.server.roster_keys())
    if stage == "masked":
        q = payloads(session.params)[i]
        session.vectors[i] = client.masked(session.server.envelopes_for(identity), q)
        return client.masked_message(b"associated")
    return client.agree(session.server.survivors()) if stage == "agree" else client.reveal(session.server.confirmed())


def before(stage: str) -> Round:
    index = EVERY_STAGE.index(stage)
    session = Round.begin(make_params(5, consistency=True))
    others = range(1, 5)
    for name in EVERY_STAGE[:index]:
        for i in range(5):
            deliver(session, name, i, message_of(session, name, i))
    for i in others:
        deliver(session, stage, i, message_of(session, stage, i))
    return session


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_a_message_must_be_signed_by_its_member_for_its_stage_and_round(stage):
    session = before(stage)
    good = message_of(session, stage, 0)
    tag, binding, body, signature = Stage(good[1]), good[2:HEADER], good[HEADER:-64], good[-64:]
    me = session.identity(0)
    view = session.clients[0]._state.view if stage == "agree" else body
    parts = [body]
    if stage == "masked":
        parts = [wire.pack_members(range(1, 6), 5), body, hashlib.sha256(b"associated").digest()]
    elif stage == "agree":
        parts = [view]
    assert sign(signing.statement(tag, binding, me, *parts)) == signature
    wrong = [
        bytes(64),
        signature[:-1] + bytes([signature[-1] ^ 1]),
        *(sign(signing.statement(other, binding, me, *parts)) for other in Stage if other is not tag),
        sign(signing.statement(tag, bytes(32), me, *parts)),  # another round
        sign(signing.statement(tag, binding, me, *parts, b"\0")),
        sign(signing.statement(tag, binding, session.identity(1), *parts)),  # another member's
    ]
    for forged in wrong:
        with refused("bad_signature") as error:
            deliver(session, stage, 0, wire.pack(tag, binding, body, forged))
        assert error.value.fields["member"] == me.hex()
    deliver(session, stage, 0, good)
    with refused("wrong_state"):  # twice
        deliver(session, stage, 0, good)


def test_an_altered_vector_or_what_is_bound_to_it_is_left_out():
    session = before("masked")
    good = message_of(session, "masked", 0)
    total = session.server._total.copy()
    vector = session.vectors[0]
    for lane in (0, vector.size // 2, vector.size - 1):
        other = vector.copy()
        other[lane] ^= 1
        with refused("malformed_update") as error:
            session.server.add_masked(session.identity(0), good, other, b"associated")
        assert error.value.fields["member"] == session.identity(0).hex()
    with refused("bad_signature"):
        session.server.add_masked(session.identity(0), good, vector, b"another dataset root")
    assert np.array_equal(session.server._total, total)
    session.server.add_masked(session.identity(0), good, vector, b"associated")


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_the_root_is_of_the_bytes_on_the_wire_whatever_the_threads(bits):
    ring = RingParams(bits, 3, 0, 2 * SEGMENT + 17)
    lanes = np.random.default_rng(bits).integers(0, 2**bits, ring.padded).astype(ring.lane)
    assert vector_root(lanes, ring, 3) == vector_root(lanes, ring)
    raw, step = to_wire(lanes, ring).tobytes(), SEGMENT * bits // 8
    digests = [hashlib.sha256(raw[at : at + step]).digest() for at in range(0, len(raw), step)]
    assert len(digests) == 3
    assert vector_root(lanes, ring) == hashlib.sha256(b"vector" + b"".join(digests)).digest()


def test_a_coordinator_that_swaps_keys_or_plays_a_member_is_refused_by_all():
    """It knows everything but the members' identity keys."""
    session = Round.begin(make_params(5))
    session.keys()
    entries = dict(session.server._entries)
    own = b"".join(agreement.public_key(Drbg(i)(32)) for i in (1, 2))
    unsigned = own + bytes(64)
    borrowed = own + entries[3][64:]  # the signature of the keys that were replaced
    by_another = own + sign(signing.statement(Stage.KEYS, session.params.hash, session.identity(0), own))
    earlier = Round.begin(make_params(5, attempt=7))
    replayed = earlier.clients[2].keys()[HEADER:]
    for entry in (unsigned, borrowed, by_another, replayed, entries[2]):
        changed = {**entries, 3: entry}
        message = wire.pack(Stage.ROSTER, session.params.hash, b"\x1f", *(changed[j] for j in sorted(changed)))
        for i in (0, 1, 3, 4):
            with refused("bad_signature", "key_agreement_failed") as error:
                session.clients[i].shares(message)
            assert error.value.fields["member"] == session.identity(2).hex()
    swapped = {**entries, 1: entries[2], 2: entries[1]}
    message = wire.pack(Stage.ROSTER, session.params.hash, b"\x1f", *(swapped[j] for j in sorted(swapped)))
    for i in range(5):  # a swap between two others is seen by everybody
        with refused("bad_signature", "key_agreement_failed"):
            session.clients[i].shares(message)
    session.shares()  # and nobody is the worse for having refused


def test_weak_identities_are_no_identities():
    """Anybody can sign for a key of small order."""
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p) % p

    def order_divides_eight(y: int) -> bool:
        """Doubles (x, y) three times by the y coordinate alone: y' from x^2 = (y^2 - 1) / (d y^2 + 1)."""
        for _ in range(3):
            y2 = y * y % p
            x2 = (y2 - 1) * pow(d * y2 + 1, -1, p) % p
            y = (y2 + x2) * pow(2 - (y2 - x2), -1, p) % p
        return y == 1

    assert len(signing._SMALL_ORDER) == 5
    for y in signing._SMALL_ORDER:
        assert order_divides_eight(y)
        for sign_bit in (0, 1):
            assert weak((y | sign_bit << 255).to_bytes(32, "little"))
    for bad in (p, p + 1, 2**255 - 1):
        assert weak(bad.to_bytes(32, "little"))
    assert weak(b"")
    assert weak(bytes(31))
    for i in range(20):
        assert not weak(Ed25519PrivateKey.from_private_bytes(Drbg(i)(32)).public_key().public_bytes_raw())
    identity_point = (1).to_bytes(32, "little")
    forged = identity_point + bytes(32)  # R = 0, S = 0
    Ed25519PublicKey.from_public_bytes(identity_point).verify(forged, b"whatever")  # what the check is for
    assert not signing.holds(forged, Stage.KEYS, bytes(32), identity_point)


# --- what the stage is for


@pytest.mark.parametrize("consistency", [False, True])
def test_without_the_stage_split_sets_open_one_update_and_with_it_nobody_answers(consistency):
    """Nobody's two secrets are both known, and yet: one member's seed, and the mask keys of all that it masked with.

    Member 0 is shown a U2 of itself, members 1 and 2, and the colluders 5 and 6. Each other member is shown a U3 of t
    that leaves 1 or 2 out, but never 0. Of five honest members none gives more than one share of an owner.
    """
    params = make_params(7, k=2, consistency=consistency)
    assert (params.threshold, params.min_survivors) == (5, 4)
    q, session = payloads(params), Round.begin(params)
    private = {i: bytes(session.clients[i]._state.s_private) for i in (5, 6)}
    session.keys()
    session.shares()
    server, t1 = session.server, session.server._t1
    u2 = {i: {0, 1, 2, 5, 6} if i == 0 else set(range(7)) for i in range(7)}
    for i, client in session.clients.items():
        members = wire.pack_members([j + 1 for j in u2[i]], 7)
        sealed = (server._envelopes[j + 1][i + 1] for j in sorted(u2[i] - {i}))
        session.vectors[i] = client.masked(wire.pack(Stage.ENVELOPES, t1, members, *sealed), q[i])
        server._roots[i + 1] = client._state.root
    held = {i: {j - 1: bytes(pair) for j, pair in session.clients[i]._state.shares.items()} for i in range(7)}
    u3 = {0: u2[0], 1: u2[1] - {2}, 2: u2[2] - {1}, 3: u2[3] - {1, 2}, 4: u2[4] - {1, 2}}
    shown = {i: survivors(session, sorted(u3[i])) for i in u3}
    if consistency:
        signatures = {i: session.clients[i].agree(shown[i]) for i in u3}
        for i in u3:
            view = session.clients[i]._state.view
            colluding = {j: sign(signing.statement(Stage.CONSISTENCY, t1, params.roster[j], view)) for j in (5, 6)}
            offered = signatures | {j: bytes(HEADER) + signature for j, signature in colluding.items()}
            with refused("bad_signature"):
                session.clients[i].reveal(confirmed(session, {j: offered[j] for j in offered if j in u3[i]}))
        return
    revealed: dict[int, dict[str, set[int]]] = {i: {"seed": {5, 6}, "key": {5, 6}} for i in range(7)}
    for i in u3:
        session.clients[i].reveal(shown[i])
        for j in u2[i]:
            revealed[j]["seed" if j in u3[i] else "key"].add(i)
    known = {kind: {j for j in u3 if len(revealed[j][kind]) >= 5} for kind in ("seed", "key")}
    assert not known["seed"] & known["key"]
    honest = {i: u2[i] & set(u3) - {i} for i in u3}
    assert opened_sums(honest, known["seed"], known["key"]) == [{0}]

    def secret(owner: int, kind: str) -> bytes:
        at = slice(33) if kind == "seed" else slice(33, 66)
        return shamir.combine({i + 1: held[i][owner][at] for i in sorted(revealed[owner][kind])[:5]})

    private |= {j: secret(j, "key") for j in (1, 2)}
    pairs = [server._pair_key(agreement.load(key), j + 1, 1) for j, key in private.items()]
    minus = [agreement.self_mask_key(t1, secret(0, "seed")), *pairs]
    assert np.array_equal(masking.unmask(session.vectors[0], params.ring, t1, [], minus, 1), q[0])


# --- the consistency stage (13)


def test_a_split_view_reveals_nothing():
    """Half are shown U3, the others U3': neither finds t signatures, however they are dealt out."""
    assert make_params(6).threshold == 5
    for split in range(1, 5):
        round_ = begun(6, until="masked")
        messages = [survivors(round_, range(6)), survivors(round_, range(5))]
        signatures = {i: round_.clients[i].agree(messages[i >= split]) for i in range(5)}
        for size in range(6):
            for chosen in itertools.combinations(range(5), size):
                question = confirmed(round_, {i: signatures[i] for i in chosen})
                for i in range(5):
                    with refused("bad_signature"):
                        round_.clients[i].check_question(question)


@pytest.mark.parametrize(("n", "k"), [(3, 1), (4, 1), (5, 1), (5, 2), (7, 2)])
def test_of_two_views_at_most_one_finds_enough_signers(n, k):
    """k colluders sign everything, an honest member one view: the count that the threshold is made for."""
    t = make_params(n, k=k).threshold
    for first in range(n - k + 1):
        assert k + first < t or k + (n - k - first) < t


def test_colluders_that_sign_both_views_still_do_not_open_both():
    session = begun(5, until="masked")
    views = [survivors(session, range(5)), survivors(session, range(4))]
    blob = session.clients[0].to_bytes()
    colluder = [ClientSession.from_bytes(blob, session.params, sign).agree(view) for view in views]
    honest = {1: 0, 2: 0, 3: 1}  # which view an honest member is shown
    signatures: list[dict[int, bytes]] = [{0: colluder[0]}, {0: colluder[1]}]
    for i, which in honest.items():
        signatures[which][i] = session.clients[i].agree(views[which])
    for i, which in honest.items():
        everything = confirmed(session, signatures[which])
        with refused("bad_signature"):
            session.clients[i].reveal(everything)


def test_a_member_signs_one_view_and_answers_for_no_other():
    session = begun(5, until="masked")
    client = session.clients[0]
    client.agree(survivors(session, range(5)))
    with refused("wrong_state"):
        client.agree(survivors(session, range(4)))
    with refused("wrong_state"):
        client.masked_message()
    others = {i: session.clients[i].agree(survivors(session, range(4))) for i in range(1, 4)}
    with refused("bad_signature"):
        client.reveal(confirmed(session, others))


def test_signatures_that_do_not_count():
    session = begun(5, until="masked")
    asked = session.server.survivors()
    good = {i: session.clients[i].agree(asked) for i in range(5)}
    assert session.params.threshold == 4
    client, head = session.clients[0], good[0][:HEADER]
    view = client._state.view
    elsewhere = begun(5, until="masked", attempt=3)
    replayed = {i: head + elsewhere.clients[i].agree(elsewhere.server.survivors())[HEADER:] for i in range(5)}

    def by(i: int, stage: Stage = Stage.CONSISTENCY, what: bytes = view) -> bytes:
        return head + sign(signing.statement(stage, session.server._t1, session.identity(i), what))

    assert by(1) == good[1]
    three = {i: good[i] for i in range(3)}
    for fourth in (
        head + bytes(64),
        replayed[3],
        by(2),  # one member's twice
        by(3, Stage.REVEAL),
        by(3, what=transcript.view(session.server._t1, b"\x1f", b"\x0f", [])),
    ):
        with refused("bad_signature"):
            client.reveal(confirmed(session, {**three, 3: fourth}))
    with refused("bad_signature"):
        client.reveal(confirmed(session, three))
    with refused("bad_signature"):
        client.reveal(confirmed(session, {}))
    with refused("malformed_message"):
        client.reveal(asked)
    assert client.reveal(confirmed(session, {**three, 3: head + bytes(64), 4: good[4]}))  # four do fit


def test_signers_must_be_survivors():
    session = Round.begin(make_params(6, threshold=4, consistency=True))
    session.keys()
    session.shares()
    session.masked(payloads(session.params), range(5))
    asked = session.server.survivors()
    good = {i: session.clients[i].agree(asked) for i in range(5)}
    late = good[0][:HEADER] + sign(
        signing.statement(Stage.CONSISTENCY, session.server._t1, session.identity(5), session.clients[0]._state.view)
    )
    with refused("inconsistent_roster"):
        session.clients[0].reveal(confirmed(session, {1: good[1], 2: good[2], 3: good[3], 5: late}))


def test_a_vector_that_was_altered_or_replaced_is_seen_by_its_member():
    session = begun(5, until="masked")
    with refused("inconsistent_roster"):
        session.clients[0].agree(survivors(session, range(5), {0: bytes(32)}))
    # others cannot know, but sign it: the views differ, so nobody reveals
    signatures = {i: session.clients[i].agree(survivors(session, range(5), {0: bytes(32)})) for i in range(1, 5)}
    assert session.clients[0].agree(survivors(session, range(5)))
    with refused("bad_signature"):
        session.clients[0].reveal(confirmed(session, signatures))


def test_without_the_stage_a_member_signs_nothing_and_with_it_nothing_is_revealed_before():
    without = Round.begin(make_params(3))
    without.keys()
    without.shares()
    without.masked(payloads(without.params))
    with refused("wrong_state"):
        without.clients[0].agree(without.server.survivors())
    with refused("wrong_state"):
        without.server.confirmed()
    with refused("wrong_state"):
        without.server.add_consistency(without.identity(0), b"")
    within = begun(3, until="masked")
    for question in (within.server.survivors(), b""):
        with refused("wrong_state"):
            within.clients[0].reveal(question)
    with refused("below_threshold"):
        within.server.confirmed()
    assert make_params(3).hash != make_params(3, consistency=True).hash  # switching it off shows in every key


def test_too_few_that_agree_leave_the_sum_closed_and_more_may_still_sign():
    session = begun(5, until="masked")
    session.agree(range(3))
    with refused("below_threshold"):
        session.server.confirmed()
    with refused("wrong_state"):
        session.server.add_reveal(session.identity(0), b"")
    session.agree([4])
    assert session.server.signers == tuple(session.identity(i) for i in (0, 1, 2, 4))
    session.reveal([0, 1, 2, 4])
    with refused("wrong_state"):  # it did not sign, so it cannot have been asked
        session.server.add_reveal(session.identity(3), b"")
    assert np.array_equal(session.server.unmask(), sum(payloads(session.params)))


def test_an_invented_participant_needs_an_identity_key_and_a_place_in_the_roster():
    """A stranger has no position; a coordinator's own key in the roster is what pinning refuses (tests/federation)."""
    session = Round.begin(make_params(4))
    stranger = Ed25519PrivateKey.from_private_bytes(Drbg("stranger")(32))
    identity = stranger.public_key().public_bytes_raw()
    with pytest.raises(SecureAggregationError) as error:
        ClientSession(session.params, identity, stranger.sign)
    assert error.value.fields["cause"] == "inconsistent_roster"
    pair = bytes(64)
    statement = signing.statement(Stage.KEYS, session.params.hash, identity, pair)
    with refused("inconsistent_roster"):
        session.server.add_keys(identity, wire.pack(Stage.KEYS, session.params.hash, pair, stranger.sign(statement)))
    good = signed(session.params, 0, Stage.KEYS, session.params.hash, session.clients[1].keys()[HEADER:-64])
    session.server.add_keys(session.identity(0), good)
    with refused("key_agreement_failed"):  # another member's keys, even when signed
        session.server.add_keys(session.identity(1), session.clients[1].keys())
