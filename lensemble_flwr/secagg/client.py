"""The member's side of a session. See :mod:`.session` for the protocol."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import agreement, envelope, masking, projection, shamir, signing, state, transcript, wire
from lensemble_flwr.secagg.entropy import Entropy, draw
from lensemble_flwr.secagg.params import SessionParams
from lensemble_flwr.secagg.ring import Lanes, RingParams, center
from lensemble_flwr.secagg.roots import vector_root
from lensemble_flwr.secagg.signing import Sign
from lensemble_flwr.secagg.wire import Stage

_SHARE = shamir.SHARE_BYTES

S = TypeVar("S", state.Fresh, state.Shared, state.Masked, state.Agreed)


class ClientSession:
    """One member in one attempt at one round: keys() -> shares() -> masked() and masked_message() -> [agree()] ->
    reveal(), each once, in this order; agree() in rounds with the consistency stage only.

    A message that is refused changes nothing and sends nothing. Between two stages the session can move to another
    process through :meth:`to_bytes` and :meth:`from_bytes`.

    Args:
        params: the round's public parameters, already judged by the site's own policy.
        identity: this member's 32 bytes, an Ed25519 public key.
        sign: makes its signatures; the private key stays with the caller.
        entropy: source of keys, seeds, coefficients and nonces. Anything but the default is for tests.

    Raises:
        SecureAggregationError: inconsistent_roster if the identity is not in the roster.
    """

    def __init__(self, params: SessionParams, identity: bytes, sign: Sign, *, entropy: Entropy = os.urandom) -> None:
        self._bind(params, identity, sign, entropy)
        self._state: state.State = state.Fresh(bytearray(draw(entropy, 32)), bytearray(draw(entropy, 32)))

    def _bind(self, params: SessionParams, identity: bytes, sign: Sign, entropy: Entropy) -> None:
        self._params, self._identity, self._sign, self._entropy = params, identity, sign, entropy
        self._position = params.position(identity)
        self._sum_key: bytearray | None = None

    def keys(self, *, vouches: bool = False) -> bytes:
        """Stage 1: the fresh public keys, signed. Says nothing about the member.

        Args:
            vouches: in rounds whose members verify the sum, that this member knows the model of the round to be what
                the sums before give; a model that too few vouch for is not trained.

        Raises:
            SecureAggregationError: wrong_state.
        """
        pair = _public(self._expect(state.Fresh))
        vouch = bytes([vouches]) if self._params.verify else b""
        return self._signed(Stage.KEYS, self._params.keys_signed_for, b"".join(pair) + vouch)

    def shares(self, roster_keys: bytes, *, before: Callable[[], None] = lambda: None) -> bytes:
        """Stage 2: share the self-mask seed and the mask key among U1; the coordinator carries sealed envelopes.

        Args:
            roster_keys: the coordinator's ROSTER message: U1 and its public keys, with the signatures.
            before: called when everything is checked and nothing is dealt yet, so that the caller can record that the
                session leaves this state; if it raises, nothing changes.

        Raises:
            SecureAggregationError: inconsistent_roster (another round, or self not in it), key_agreement_failed (own
                keys altered, a key used twice, not canonical or of small order), bad_signature (keys that are not the
                member's own), sum_unverified (this member cannot check the model and too few vouch for it),
                below_threshold, below_min_survivors, malformed_message, wrong_state.
        """
        fresh, params = self._expect(state.Fresh), self._params
        u1, body = wire.unpack_with_members(roster_keys, Stage.ROSTER, params.hash, params.n, params.verify)
        entries = wire.split_evenly(body, u1, wire.key_entry_bytes(params.verify))
        keys = {j: (entry[:32], entry[32:64]) for j, entry in entries.items()}
        self._require_self(u1)
        if keys[self._position] != _public(fresh):
            raise SecureAggregationError("This member's own keys were altered.", cause="key_agreement_failed")
        agreement.check_public_keys({self._name(j): pair for j, pair in keys.items()})
        params.require_enough(len(u1), "sent keys")
        for j, entry in entries.items():
            signed, signature = wire.unsigned(entry)
            signing.verify(signature, Stage.KEYS, params.keys_signed_for, params.identity(j), signed)
        if params.verify:
            self._require_vouchers({j for j, entry in entries.items() if entry[wire.KEY_PAIR_BYTES]})
        t1 = transcript.keyed(params.hash, ((params.identity(j), entries[j]) for j in u1))
        peers = [j for j in u1 if j != self._position]
        c_private, s_private = agreement.load(fresh.c_private), agreement.load(fresh.s_private)
        agreed = {
            j: (
                agreement.shared_secret(c_private, keys[j][0], self._name(j)),
                agreement.shared_secret(s_private, keys[j][1], self._name(j)),
            )
            for j in peers
        }
        before()

        seed = draw(self._entropy, 32)
        seed_shares = shamir.split(seed, params.threshold, u1, self._random)
        key_shares = shamir.split(fresh.s_private, params.threshold, u1, self._random)
        group_nonce = self._random(projection.NONCE_BYTES) if params.verify else b""
        envelopes, envelope_keys, mask_keys = [], {}, {}
        for j in peers:
            peer, (shared_c, shared_s) = params.identity(j), agreed[j]
            outgoing = agreement.envelope_key(t1, shared_c, self._identity, peer)
            context = envelope.context(t1, self._identity, peer)
            nonce = self._random(envelope.NONCE_BYTES)
            envelopes.append(envelope.seal(outgoing, nonce, seed_shares[j], key_shares[j], context, group_nonce))
            envelope_keys[j] = bytearray(agreement.envelope_key(t1, shared_c, peer, self._identity))
            mask_keys[j] = bytearray(agreement.pair_mask_key(t1, shared_s, self._identity, peer))
        self._advance(
            state.Shared(
                t1=t1,
                u1=u1,
                self_key=bytearray(agreement.self_mask_key(t1, seed)),
                own_shares=bytearray(seed_shares[self._position] + key_shares[self._position]),
                envelope_keys=envelope_keys,
                mask_keys=mask_keys,
                nonce=bytearray(group_nonce),
            )
        )
        return self._signed(Stage.SHARES, t1, transcript.commitment(t1, seed) + b"".join(envelopes))

    def _require_vouchers(self, vouching: set[int]) -> None:
        """Of k + 1 that vouch at least one is honest. A member that vouches itself needs nobody else's word."""
        if self._position not in vouching and len(vouching) < self._params.vouchers:
            raise SecureAggregationError(
                f"This member cannot check the model of the round itself, and {len(vouching)} others vouch for it; "
                f"{self._params.vouchers} are needed.",
                "Nothing was sent. The coordinator may have committed a model that no sum gives.",
                cause="sum_unverified",
            )

    def check_envelopes(self, envelopes: bytes) -> None:
        """Everything that :meth:`masked` checks in its message, without masking: before anything costly is done.

        Raises:
            SecureAggregationError: as :meth:`masked`. Nothing changes either way.
        """
        self._unsealed(self._expect(state.Shared), envelopes)

    def _unsealed(self, shared: state.Shared, envelopes: bytes) -> tuple[tuple[int, ...], dict[int, bytes]]:
        """(U2, {position: the pair of shares that it dealt to this member, and its nonce})."""
        params = self._params
        u2, body = wire.unpack_with_members(envelopes, Stage.ENVELOPES, shared.t1, params.n, params.verify)
        self._require_self(u2)
        if not set(u2) <= set(shared.u1):
            raise _inconsistent("The coordinator names a sender of shares that never sent keys.")
        params.require_enough(len(u2), "sent shares")
        peers = [j for j in u2 if j != self._position]
        pairs = {self._position: bytes(shared.own_shares + shared.nonce)}
        for j, sealed in wire.split_evenly(body, peers, wire.envelope_bytes(params.verify)).items():
            context = envelope.context(shared.t1, params.identity(j), self._identity)
            pairs[j] = envelope.unseal(shared.envelope_keys[j], sealed, context, self._name(j))
        return u2, pairs

    def masked(self, envelopes: bytes, q: npt.NDArray[Any], *, out: Lanes | None = None, threads: int = 1) -> Lanes:
        """Stage 3: the payload under one mask per member of U2 and one of its own. :meth:`masked_message` goes with it.

        One session masks one payload. The vector must not leave before q is recorded at the site: another q under
        the same masks would give away the difference.

        Args:
            envelopes: the coordinator's ENVELOPES message: U2 and every other member's envelope. All must open.
            q: the encoded payload, shape (d,): int64 in -qmax..qmax, or ring lanes. Not altered.
            out: where to write, lanes of shape (padded,); allocated when None.
            threads: the result does not depend on it; more than one helps over SEGMENT = 2^20 coordinates.

        Returns:
            uint16 or uint32 lanes, shape (padded,): `out`.

        Raises:
            SecureAggregationError: share_decrypt_failed, inconsistent_roster (self not in U2, or U2 not in U1),
                below_threshold, below_min_survivors, malformed_update (q or out), malformed_message, wrong_state.
        """
        shared, params = self._expect(state.Shared), self._params
        u2, pairs = self._unsealed(shared, envelopes)
        peers = [j for j in u2 if j != self._position]

        if out is None:
            out = np.empty(params.ring.padded, params.ring.lane)
        plus = [shared.self_key, *(shared.mask_keys[j] for j in peers if j > self._position)]
        minus = [shared.mask_keys[j] for j in peers if j < self._position]
        masking.mask(out, q, params.ring, shared.t1, plus, minus, threads)
        root, tag = vector_root(out, params.ring, threads), b""
        if params.verify:
            nonces = (pairs[j][wire.SHARE_PAIR_BYTES :] for j in u2)
            self._sum_key = bytearray(projection.group_key(shared.t1, wire.pack_members(u2, params.n), nonces))
            own = projection.tag(_reader(q, params.ring), params.ring.dimension, self._sum_key, threads=threads)
            masked = (own + projection.mask(plus, minus)) % projection.PRIME
            tag = masked.to_bytes(projection.TAG_BYTES, "little")
        shares = {j: bytearray(pairs[j][: wire.SHARE_PAIR_BYTES]) for j in u2}
        self._advance(state.Masked(shared.t1, root, tag, shares))
        return out

    def sum_key(self) -> bytes:
        """K, the **secret** with which this member verifies the sum of the attempt; once, after :meth:`masked`, in the
        same process. The caller keeps it until the sum is published.

        Raises:
            SecureAggregationError: wrong_state.
        """
        if self._sum_key is None:
            raise SecureAggregationError("There is no key of a sum here.", cause="wrong_state")
        key = bytes(self._sum_key)
        self._forget_sum_key()
        return key

    def _forget_sum_key(self) -> None:
        if self._sum_key is not None:
            self._sum_key[:] = bytes(len(self._sum_key))
            self._sum_key = None

    def masked_message(self, associated: bytes = b"") -> bytes:
        """Stage 3, beside the vector: its root, signed with U2 and with what the caller binds to it.

        Raises:
            SecureAggregationError: wrong_state.
        """
        held = self._expect(state.Masked)
        u2 = wire.pack_members(held.shares, self._params.n)
        parts = (u2, held.root, held.tag, hashlib.sha256(associated).digest())
        signature = self._sign(signing.statement(Stage.MASKED, held.t1, self._identity, *parts))
        return wire.pack(Stage.MASKED, held.t1, held.root, held.tag, signature)

    def check_survivors(self, survivors: bytes) -> tuple[int, ...]:
        """Everything that the stage after masking checks, without answering: before the caller records that it does.

        Returns:
            U3, roster positions.

        Raises:
            SecureAggregationError: as :meth:`agree` or :meth:`reveal`. Nothing changes either way.
        """
        return self._survivors(self._masked_once(), survivors)[0]

    def _survivors(self, held: state.Masked, survivors: bytes) -> tuple[tuple[int, ...], bytes]:
        """(U3, the view)."""
        params = self._params
        u3, body = wire.unpack_with_members(survivors, Stage.SURVIVORS, held.t1, params.n)
        self._require_self(u3)
        if not set(u3) <= set(held.shares):
            raise _inconsistent("The coordinator names a survivor that never sent shares.")
        params.require_enough(len(u3), "survived")
        roots = wire.split_evenly(body, u3, wire.HASH_BYTES)
        if roots[self._position] != held.root:
            raise _inconsistent("The coordinator names another vector than this member sent.")
        u2_set, u3_set = wire.pack_members(held.shares, params.n), wire.pack_members(u3, params.n)
        return u3, transcript.view(held.t1, u2_set, u3_set, roots.values())

    def agree(self, survivors: bytes) -> bytes:
        """Stage 4, once, in rounds with the consistency stage: sign the one view that this member was shown.

        The signature reveals nothing. The caller makes sure that an older state of the session never signs again: of
        two views at most one can then find `threshold` signers.

        Args:
            survivors: the coordinator's SURVIVORS message: U3 and the roots of its vectors.

        Raises:
            SecureAggregationError: inconsistent_roster (self not in U3, U3 not in U2, or own vector altered),
                below_threshold, below_min_survivors, malformed_message, already_revealed, wrong_state (also in a
                round without this stage).
        """
        held = self._masked_once()
        if not self._params.consistency:
            raise SecureAggregationError("This round has no consistency stage.", cause="wrong_state")
        u3, view = self._survivors(held, survivors)
        signature = self._sign(signing.statement(Stage.CONSISTENCY, held.t1, self._identity, view))
        self._advance(state.Agreed(held.t1, view, u3, {j: bytearray(pair) for j, pair in held.shares.items()}))
        return wire.pack(Stage.CONSISTENCY, held.t1, signature)

    def check_question(self, question: bytes) -> tuple[int, ...]:
        """Everything that :meth:`reveal` checks, without revealing: before the caller records that it answers.

        Returns:
            U3, roster positions.

        Raises:
            SecureAggregationError: as :meth:`reveal`. Nothing changes either way.
        """
        return self._answerable(question)[2]

    def _answerable(self, question: bytes) -> tuple[bytes, dict[int, bytearray], tuple[int, ...]]:
        """(T1, shares held, U3) if the question may be answered."""
        if not self._params.consistency:
            held = self._masked_once()
            return held.t1, held.shares, self._survivors(held, question)[0]
        self._refuse_if_revealed()
        agreed, params = self._expect(state.Agreed), self._params
        signers, body = wire.unpack_with_members(question, Stage.CONFIRMED, agreed.t1, params.n)
        if not set(signers) <= set(agreed.u3):
            raise _inconsistent("Somebody signs the survivors who is none.")
        signatures = wire.split_evenly(body, signers, wire.SIGNATURE_BYTES)
        valid = sum(
            signing.holds(signature, Stage.CONSISTENCY, agreed.t1, params.identity(j), agreed.view)
            for j, signature in signatures.items()
        )
        if valid < params.threshold:
            raise SecureAggregationError(
                f"{valid} members signed the survivors that this member was shown; {params.threshold} are needed.",
                "Nothing was revealed. The coordinator shows members different survivors, or signatures were altered.",
                cause="bad_signature",
            )
        return agreed.t1, agreed.shares, agreed.u3

    def reveal(self, question: bytes) -> bytes:
        """The last stage, once: for each member of U2 one share, of its seed if it survived, of its mask key if not.

        Who dropped out is computed here, as U2 without U3: the coordinator never names it, so it cannot ask for both
        secrets of anybody. The caller persists "answered (federation, round)" before it calls, and never calls again
        for this round, whatever the attempt.

        Args:
            question: the coordinator's SURVIVORS message or, in rounds with the consistency stage, its CONFIRMED
                message: the signatures of at least `threshold` survivors over the view that this member signed.

        Raises:
            SecureAggregationError: already_revealed on any call after a successful one; bad_signature (too few fit),
                or what :meth:`agree` raises; wrong_state.
        """
        t1, shares, u3 = self._answerable(question)
        revealed = b"".join(bytes(pair[:_SHARE] if j in u3 else pair[_SHARE:]) for j, pair in shares.items())
        message = self._signed(Stage.REVEAL, t1, revealed)
        self._advance(state.Closed(state.Phase.REVEALED))
        return message

    def _masked_once(self) -> state.Masked:
        self._refuse_if_revealed()
        return self._expect(state.Masked)

    def _refuse_if_revealed(self) -> None:
        if self._state.phase is state.Phase.REVEALED:
            raise SecureAggregationError("This member has answered for this round.", cause="already_revealed")

    def _signed(self, stage: Stage, binding: bytes, body: bytes) -> bytes:
        return wire.pack(stage, binding, body, self._sign(signing.statement(stage, binding, self._identity, body)))

    def to_bytes(self) -> bytes:
        """The session as bytes, **secret**: 66 bytes a member (7 KB at n = 100). Says which stages are done."""
        return state.pack(self._state, self._params, self._identity)

    @classmethod
    def from_bytes(
        cls, data: bytes, params: SessionParams, sign: Sign, *, entropy: Entropy = os.urandom
    ) -> ClientSession:
        """Continue a session. `params` are the caller's own and must be those it began with.

        Raises:
            SecureAggregationError: wrong_state for other parameters, malformed_message for damaged bytes.
        """
        session = cls.__new__(cls)
        session._state, identity = state.parse(data, params)
        session._bind(params, identity, sign, entropy)
        return session

    @classmethod
    def from_keys(
        cls, secret: bytes, params: SessionParams, identity: bytes, sign: Sign, *, entropy: Entropy = os.urandom
    ) -> ClientSession:
        """A session whose keys :func:`keys_ahead` made. The caller lets each secret into one session only.

        Args:
            secret: as :func:`keys_ahead` gave it.
            params: with the `keys_binding` that the keys are signed for.

        Raises:
            SecureAggregationError: malformed_message for something else, inconsistent_roster for a stranger.
        """
        if len(secret) != _SECRET_BYTES:
            raise wire.malformed("The keys that were made ahead are damaged.")
        session = cls.__new__(cls)
        session._bind(params, identity, sign, entropy)
        session._state = state.Fresh(bytearray(secret[:32]), bytearray(secret[32:]))
        return session

    def wipe(self) -> None:
        """Overwrite all secrets; every later stage is refused. That the session had answered is not forgotten."""
        self._forget_sum_key()
        if self._state.phase is not state.Phase.REVEALED:
            self._advance(state.Closed(state.Phase.WIPED))

    def _advance(self, new: state.State) -> None:
        old, self._state = self._state, new
        state.wipe(old)

    def _expect(self, kind: type[S]) -> S:
        if not isinstance(self._state, kind):
            raise SecureAggregationError(
                f"The session is past or before this stage (it is {self._state.phase.name.lower()}).",
                "Stages run once, in order; an interrupted round needs a new attempt.",
                cause="wrong_state",
            )
        return self._state

    def _require_self(self, members: tuple[int, ...]) -> None:
        if self._position not in members:
            raise _inconsistent("The coordinator left this member out.")

    def _random(self, count: int) -> bytes:
        return draw(self._entropy, count)

    def _name(self, position: int) -> str:
        return self._params.identity(position).hex()


def _reader(q: npt.NDArray[Any], ring: RingParams) -> projection.Read:
    """The payload as integers, whatever form it was given in."""
    return lambda part: center(q[part], ring) if q.dtype == ring.lane else q[part]


_SECRET_BYTES = 64


def keys_ahead(binding: bytes, identity: bytes, sign: Sign, *, entropy: Entropy = os.urandom) -> tuple[bytes, bytes]:
    """Fresh keys for a round that is not open yet: (both private keys, **secret**; the KEYS message).

    Args:
        binding: 32 bytes that name the round as far as it is known, see :attr:`SessionParams.keys_binding`.
    """
    fresh = state.Fresh(bytearray(draw(entropy, 32)), bytearray(draw(entropy, 32)))
    body = b"".join(_public(fresh))
    message = wire.pack(Stage.KEYS, binding, body, sign(signing.statement(Stage.KEYS, binding, identity, body)))
    return bytes(fresh.c_private + fresh.s_private), message


def _public(fresh: state.Fresh) -> tuple[bytes, bytes]:
    return agreement.public_key(fresh.c_private), agreement.public_key(fresh.s_private)


def _inconsistent(message: str) -> SecureAggregationError:
    return SecureAggregationError(message, cause="inconsistent_roster")
