"""The coordinator's side of a session. See :mod:`.session` for the protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import agreement, masking, projection, shamir, signing, transcript, wire
from lensemble_flwr.secagg.keystream import Key
from lensemble_flwr.secagg.params import SessionParams
from lensemble_flwr.secagg.recovery import recover
from lensemble_flwr.secagg.ring import Lanes, check_array, check_lanes
from lensemble_flwr.secagg.roots import vector_root
from lensemble_flwr.secagg.wire import Stage


class ServerSession:
    """One attempt at one round: adds members' messages as they come and closes each stage by asking for the next.

    ``add_keys* -> roster_keys`` fixes U1, ``add_shares* -> envelopes_for*`` fixes U2, ``add_masked* -> survivors``
    fixes U3, in rounds with the consistency stage ``add_consistency* -> confirmed`` collects who signed it, and
    ``add_reveal* -> unmask`` gives the sum over U3. Every message is signed by its member. A member whose message is
    refused is as if it had not sent one: the session goes on without it, and the error names it in `member`. No masked
    vector is kept.

    Raises (all methods): SecureAggregationError with `cause` wrong_state for a stage out of order, a second message
        of one member, or one that is not in the set of the stage before; inconsistent_roster for a stranger;
        malformed_message for bytes that are not what the stage expects; bad_signature.
    """

    def __init__(self, params: SessionParams) -> None:
        self._params = params
        self._keys: dict[int, tuple[bytes, bytes]] = {}
        self._seen: set[bytes] = set()  # every public key so far
        self._entries: dict[int, bytes] = {}  # the same keys as they were signed: cpk || spk || signature
        self._commitments: dict[int, bytes] = {}
        self._envelopes: dict[int, dict[int, bytes]] = {}  # sender -> reader -> envelope
        self._total: Lanes | None = None  # the one array as long as a vector that a session holds
        self._roots: dict[int, bytes] = {}  # of the vectors that are in the sum
        self._tag = 0  # sum of the tags of the same members, masked like the vectors
        self._confirmations: dict[int, bytes] = {}
        self._reveals: dict[int, dict[int, bytes]] = {}  # revealer -> owner -> share
        self._culprits: set[int] = set()
        self._t1 = b""
        self._u1: tuple[int, ...] | None = None
        self._u2: tuple[int, ...] | None = None
        self._u3: tuple[int, ...] | None = None
        self._signers: tuple[int, ...] | None = None
        self._opened = False

    @property
    def u1(self) -> tuple[bytes, ...]:
        """Members whose keys were relayed, or so far came."""
        return self._identities(self._keys if self._u1 is None else self._u1)

    @property
    def u2(self) -> tuple[bytes, ...]:
        """Members whose shares were relayed, or so far came."""
        return self._identities(self._commitments if self._u2 is None else self._u2)

    @property
    def u3(self) -> tuple[bytes, ...]:
        """Members whose vectors are in the sum, or so far came."""
        return self._identities(self._roots if self._u3 is None else self._u3)

    @property
    def signers(self) -> tuple[bytes, ...]:
        """Members that may be asked to reveal: those whose signatures of the survivors were, or so far are, collected.

        In a round without the consistency stage: U3.
        """
        if not self._params.consistency:
            return self.u3
        return self._identities(self._confirmations if self._signers is None else self._signers)

    @property
    def vouching(self) -> frozenset[bytes]:
        """Members of U1 that vouch for the model of the round; they hold it, and need not be sent it."""
        at = wire.KEY_PAIR_BYTES
        return frozenset(self._params.identity(j) for j, e in self._entries.items() if self._params.verify and e[at])

    @property
    def tag(self) -> int:
        """T, the sum of the tags of U3 modulo 2^61 - 1, once :meth:`unmask` has opened the sum. Members verify it."""
        if not (self._opened and self._params.verify):
            raise _out_of_order("There is no tag of the sum.")
        return self._tag

    @property
    def culprits(self) -> tuple[bytes, ...]:
        """Members that revealed a share which is not on the polynomial of a secret that was reconstructed all the same.

        With shares of several owners wrong, the member is to blame. With those of one owner, that owner may have dealt
        a wrong share; envelopes are not verifiable, so the two cannot be told apart.
        """
        return self._identities(self._culprits)

    def add_keys(self, identity: bytes, message: bytes) -> None:
        """Stage 1. Raises key_agreement_failed for keys that every member would refuse, so that one cannot stop all."""
        position = self._sender(identity, self._u1 is None, range(1, self._params.n + 1), self._keys)
        entry = self._unpack(message, Stage.KEYS, self._params.keys_signed_for, 0, identity)
        body, signature = wire.unsigned(entry)
        pair = (body[:32], body[32:64])
        if any(vouch > 1 for vouch in body[wire.KEY_PAIR_BYTES :]):
            raise SecureAggregationError(
                "A member vouches with something else than 0 or 1.", cause="malformed_message", member=identity.hex()
            )
        agreement.check_public_keys({identity.hex(): pair})
        for key in pair:
            agreement.refuse_small_order(key, identity.hex())
        if not self._seen.isdisjoint(pair):
            raise SecureAggregationError(
                "A public key is already another member's.", cause="key_agreement_failed", member=identity.hex()
            )
        signing.verify(signature, Stage.KEYS, self._params.keys_signed_for, identity, body)
        self._keys[position], self._entries[position] = pair, entry
        self._seen.update(pair)

    def roster_keys(self) -> bytes:
        """Fix U1; the message is the same for each of its members. Raises below_threshold, below_min_survivors."""
        if self._u1 is None:
            self._params.require_enough(len(self._keys), "sent keys")
            self._u1 = tuple(sorted(self._keys))
            entries = ((self._params.identity(j), self._entries[j]) for j in self._u1)
            self._t1 = transcript.keyed(self._params.hash, entries)
        members = wire.pack_members(self._u1, self._params.n)
        return wire.pack(Stage.ROSTER, self._params.hash, members, *(self._entries[j] for j in self._u1))

    def add_shares(self, identity: bytes, message: bytes) -> None:
        """Stage 2: a commitment and sealed envelopes, which the coordinator cannot read. Raises inconsistent_roster."""
        u1 = _fixed(self._u1, "roster_keys")
        position = self._sender(identity, self._u2 is None, u1, self._commitments)
        body = self._unpack_signed(message, Stage.SHARES, len(u1), identity)
        readers = [j for j in u1 if j != position]
        self._commitments[position] = body[: wire.HASH_BYTES]
        self._envelopes[position] = wire.split_evenly(
            body[wire.HASH_BYTES :], readers, wire.envelope_bytes(self._params.verify)
        )

    def envelopes_for(self, identity: bytes) -> bytes:
        """Fix U2; the message for this one of its members. Raises below_threshold, below_min_survivors."""
        _fixed(self._u1, "roster_keys")
        if self._u2 is None:
            self._params.require_enough(len(self._commitments), "sent shares")
            self._u2 = tuple(sorted(self._commitments))
        reader = self._params.position(identity)
        if reader not in self._u2 or self._u3 is not None:
            raise _out_of_order("Envelopes are for members that sent shares, before the survivors are fixed.", identity)
        members = wire.pack_members(self._u2, self._params.n)
        return wire.pack(
            Stage.ENVELOPES, self._t1, members, *(self._envelopes[j][reader] for j in self._u2 if j != reader)
        )

    def add_masked(
        self, identity: bytes, message: bytes, vector: Lanes, associated: bytes = b"", *, threads: int = 1
    ) -> None:
        """Stage 3: add a masked vector to the sum and forget it. A refused one leaves the sum as it was.

        Args:
            identity: a member of U2.
            message: its MASKED message.
            vector: lanes, shape (padded,), as :func:`.ring.from_wire` gives them. Not altered, not kept.
            associated: what the member must have bound to its vector.
            threads: the result does not depend on it.

        Raises:
            SecureAggregationError: malformed_update for a wrong length, dtype, byte order or ring, or another vector
                than was signed; bad_signature also for another U2 or `associated`.
        """
        u2, ring = _fixed(self._u2, "envelopes_for"), self._params.ring
        position = self._sender(identity, self._u3 is None, u2, self._roots)
        with _naming(identity):
            check_array(vector, ring.padded, (ring.lane,), "The masked vector")
            check_lanes(vector, ring)
        body = self._unpack(message, Stage.MASKED, self._t1, 0, identity)
        signed, signature = wire.unsigned(body)
        root, tag = signed[: wire.HASH_BYTES], int.from_bytes(signed[wire.HASH_BYTES :], "little")
        parts = (wire.pack_members(u2, self._params.n), signed, hashlib.sha256(associated).digest())
        signing.verify(signature, Stage.MASKED, self._t1, identity, *parts)
        if vector_root(vector, ring, threads) != root:
            raise SecureAggregationError(
                "The masked vector is not the one that was signed.", cause="malformed_update", member=identity.hex()
            )
        if tag >= projection.PRIME:
            raise SecureAggregationError(
                "The tag is not below 2^61 - 1.", cause="malformed_update", member=identity.hex()
            )
        if self._total is None:
            self._total = np.zeros(ring.padded, ring.lane)
        masking.accumulate(self._total, vector, ring, threads)
        self._tag = (self._tag + tag) % projection.PRIME
        self._roots[position] = root

    def survivors(self) -> bytes:
        """Fix U3, once: no vector is added after. The same message for each of its members.

        Raises:
            SecureAggregationError: below_threshold, below_min_survivors; nothing is fixed then.
        """
        if self._u2 is None:
            self._params.require_enough(len(self._commitments), "sent shares")
        u2 = _fixed(self._u2, "envelopes_for")
        if self._u3 is None:
            self._params.require_enough(len(self._roots), "sent masked vectors")
            self._u3 = tuple(j for j in u2 if j in self._roots)
            self._envelopes.clear()
        members = wire.pack_members(self._u3, self._params.n)
        return wire.pack(Stage.SURVIVORS, self._t1, members, *(self._roots[j] for j in self._u3))

    def add_consistency(self, identity: bytes, message: bytes) -> None:
        """Stage 4, in rounds with the consistency stage: a signature over U2, U3 and the roots as they are here."""
        u2, u3 = _fixed(self._u2, "envelopes_for"), _fixed(self._u3, "survivors")
        is_open = self._params.consistency and self._signers is None
        position = self._sender(identity, is_open, u3, self._confirmations)
        signature = self._unpack(message, Stage.CONSISTENCY, self._t1, 0, identity)
        u2_set, u3_set = wire.pack_members(u2, self._params.n), wire.pack_members(u3, self._params.n)
        view = transcript.view(self._t1, u2_set, u3_set, (self._roots[j] for j in u3))
        signing.verify(signature, Stage.CONSISTENCY, self._t1, identity, view)
        self._confirmations[position] = signature

    def confirmed(self) -> bytes:
        """Fix who signed; the same message for each of them. Raises below_threshold; nothing is fixed then."""
        if not self._params.consistency:
            raise _out_of_order("This round has no consistency stage.")
        if self._signers is None:
            if len(self._confirmations) < self._params.threshold:
                raise SecureAggregationError(
                    f"{len(self._confirmations)} members signed the survivors; {self._params.threshold} are needed.",
                    cause="below_threshold",
                )
            self._signers = tuple(sorted(self._confirmations))
        members = wire.pack_members(self._signers, self._params.n)
        return wire.pack(Stage.CONFIRMED, self._t1, members, *(self._confirmations[j] for j in self._signers))

    def add_reveal(self, identity: bytes, message: bytes) -> None:
        """Last stage: one share per member of U2, of the seed of a survivor or of the mask key of a dropout."""
        u3 = _fixed(self._u3, "survivors")
        asked = _fixed(self._signers, "confirmed") if self._params.consistency else u3
        position = self._sender(identity, not self._opened, asked, self._reveals)
        u2 = _fixed(self._u2, "envelopes_for")
        body = self._unpack_signed(message, Stage.REVEAL, len(u2), identity)
        shares = wire.split_evenly(body, u2, shamir.SHARE_BYTES)
        with _naming(identity):
            for share in shares.values():
                shamir.parse(share)
        self._reveals[position] = shares

    def unmask(self, *, threads: int = 1) -> npt.NDArray[np.signedinteger[Any]]:
        """Reconstruct one secret of each member of U2, take the masks off the sum, verify it.

        Returns:
            int32 (int16 in a ring of 16 bits), shape (d,): the exact sum of the payloads of U3, in the place of the
            masked sum. Widen it before arithmetic that may leave the ring.

        Raises:
            SecureAggregationError: below_threshold (too few revealed; more may still be added),
                mask_reconstruction_failed (its `member` is whose; more may still be added),
                sum_check_failed (the sum is destroyed: the round is lost).
        """
        u3 = _fixed(self._u3, "survivors")
        if self._opened or self._total is None:
            raise _out_of_order("The sum was already opened.")
        if len(self._reveals) < self._params.threshold:
            raise SecureAggregationError(
                f"{len(self._reveals)} members revealed; {self._params.threshold} are needed.", cause="below_threshold"
            )
        plus, minus = self._mask_keys(u3)
        total, self._total, self._opened = self._total, None, True
        self._reveals.clear()
        if self._params.verify:
            self._tag = (self._tag + projection.mask(plus, minus)) % projection.PRIME
        return masking.unmask(total, self._params.ring, self._t1, plus, minus, len(u3), threads)

    def _mask_keys(self, u3: tuple[int, ...]) -> tuple[list[Key], list[Key]]:
        """Keys of the keystreams to add to and to subtract from the sum, so that every mask in it is gone."""
        plus: list[Key] = []
        minus: list[Key] = []
        for owner in _fixed(self._u2, "envelopes_for"):
            if owner in u3:
                seed = self._secret(owner, partial(self._is_seed, owner))
                minus.append(agreement.self_mask_key(self._t1, seed))
                continue
            private = agreement.load(self._secret(owner, partial(self._is_mask_key, owner)))
            for survivor in u3:
                # the survivor added the mask of the pair if the dropout's position is the higher one
                (minus if owner > survivor else plus).append(self._pair_key(private, owner, survivor))
        return plus, minus

    def _is_seed(self, owner: int, seed: bytes) -> bool:
        return transcript.commitment(self._t1, seed) == self._commitments[owner]

    def _is_mask_key(self, owner: int, private: bytes) -> bool:
        return agreement.public_key(private) == self._keys[owner][1]

    def _pair_key(self, private: X25519PrivateKey, owner: int, survivor: int) -> bytes:
        one, other = self._params.identity(owner), self._params.identity(survivor)
        shared = agreement.shared_secret(private, self._keys[survivor][1], other.hex())
        return agreement.pair_mask_key(self._t1, shared, one, other)

    def _secret(self, owner: int, genuine: Callable[[bytes], bool]) -> bytes:
        shares = {revealer: held[owner] for revealer, held in self._reveals.items()}
        secret = recover(shares, self._params.threshold, genuine, self._culprits)
        if secret is None:
            raise SecureAggregationError(
                f"No {self._params.threshold} of the {len(shares)} revealed shares give this member's secret.",
                "Its dealer or a revealer lied; discard the round.",
                cause="mask_reconstruction_failed",
                member=self._params.identity(owner).hex(),
            )
        return secret

    def _sender(self, identity: bytes, is_open: bool, allowed: Collection[int], known: Collection[int]) -> int:
        """Position of a member that may send now."""
        position = self._params.position(identity)
        if not is_open:
            raise _out_of_order("The stage of this message is closed.", identity)
        if position not in allowed:
            raise _out_of_order("The member is not in the set of the stage before.", identity)
        if position in known:
            raise _out_of_order("The member has already sent this message.", identity)
        return position

    def _unpack(self, message: bytes, stage: Stage, binding: bytes, members: int, identity: bytes) -> bytes:
        with _naming(identity):
            return wire.unpack(message, stage, binding, self._params.n, members, self._params.verify)

    def _unpack_signed(self, message: bytes, stage: Stage, members: int, identity: bytes) -> bytes:
        """What was signed, of a message that ends in a signature over all of its body."""
        body, signature = wire.unsigned(self._unpack(message, stage, self._t1, members, identity))
        signing.verify(signature, stage, self._t1, identity, body)
        return body

    def _identities(self, positions: Iterable[int]) -> tuple[bytes, ...]:
        return tuple(self._params.identity(j) for j in sorted(positions))


@contextmanager
def _naming(identity: bytes) -> Iterator[None]:
    """Errors inside name this member."""
    try:
        yield
    except SecureAggregationError as error:
        raise SecureAggregationError(
            error.message, error.remediation, cause=str(error.fields["cause"]), member=identity.hex()
        ) from None


def _fixed(members: tuple[int, ...] | None, by: str) -> tuple[int, ...]:
    if members is None:
        raise _out_of_order(f"The stage before is not closed; call {by}() first.")
    return members


def _out_of_order(message: str, identity: bytes | None = None) -> SecureAggregationError:
    fields = {} if identity is None else {"member": identity.hex()}
    return SecureAggregationError(message, cause="wrong_state", **fields)
