"""The models that a participant knows to be right, one after the other (``secagg.verify_sum``).

The chain begins at the pinned warm start with zero momentum. A committed round moves it on by the outer step of the sum
that the coordinator publishes, once the sum is verified with the key that the round's members share
(:mod:`lensemble_flwr.secagg.projection`); a void or burnt round leaves it. Who stands where a RoundOpen begins
*vouches* for its model. Who cannot check (a newcomer, one that missed the round) takes model and momentum as they come,
on the word of k + 1 that vouch, and goes on from there.

A sum or model that is proven wrong ends the federation for this site, for good: a coordinator has one guess.
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import numpy as np

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ContractViolation, RoundError, SecureAggregationError
from lensemble_flwr.federation.records import Outcome, PendingSum, RoundClose, RoundOpen, SumOpening
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.summed import (
    advance,
    check_sum,
    momentum_hash,
    pack_state,
    sum_reader,
    unpack_state,
)
from lensemble_flwr.federation.task import Task, theta_hash
from lensemble_flwr.federation.wire import Refusal, refused
from lensemble_flwr.secagg import RingParams
from lensemble_flwr.secagg.keystream import cores

State = tuple[np.ndarray, np.ndarray]
Hashes = tuple[bytes, bytes]
"""Of theta and of the momentum."""
Name = tuple[int, Hashes]
"""The outer steps that led to a model, and its hashes. Steps are only ever added: no older model comes back."""


class ModelChain:
    """One site's chain in one federation; everything durable is the site's."""

    def __init__(self, site: Site, config: Config, task: Task, federation_id: bytes) -> None:
        self.site, self.config, self.task, self.fid = site, config, task, federation_id
        self._base: Name | None = None

    def require_trust(self) -> None:
        """Raises SecureAggregationError: sum_forged, if this federation was found out before."""
        why = self.site.distrusted(self.fid)
        if why is not None:
            raise SecureAggregationError(
                f"This site left the federation: {why}",
                "If that was a mistake after all, delete the .forged file in the site's folder sums.",
                cause="sum_forged",
            )

    # ------------------------------------------------------------------ a round opens

    def vouches(
        self, opened: RoundOpen, closed: RoundClose | None, opening: SumOpening | None, packed: np.ndarray | None
    ) -> bool:
        """Verify what is told about the rounds before; whether this site then stands where this one begins.

        Raises:
            SecureAggregationError: sum_forged (for good), sum_withheld.
            RoundError: a message that does not fit.
        """
        self.require_trust()
        pending = self._pending()
        if pending is not None and pending.round < opened.round:
            told = self._follow(pending, closed, opening, packed)
            if told is not None and told.round == opened.round - 1 and self._name() != _begins(opened):
                self._forged(f"round {opened.round} does not begin with the model that round {told.round} gave")
        name, begins = self._name(), _begins(opened)
        if begins[0] < name[0] or (begins[0] == name[0] and begins != name):
            self._forged(f"round {opened.round} does not build on a model that was verified here")
        return name == begins

    def theta(self, opened: RoundOpen, given: np.ndarray | None) -> np.ndarray:
        """The model of a round: this site's own, or the one given with its momentum, which others vouched for.

        Raises:
            RoundError: none is here, or what is given is not what the RoundOpen names.
        """
        state = self._load(_begins(opened))
        if state is not None:
            return state[0]
        if given is None:
            raise refused("The message has no model and there is none here.", Refusal.PROTOCOL)
        try:
            state = unpack_state(given, opened.dimension)
        except ContractViolation as error:
            raise refused("The model has the wrong shape or dtype.", Refusal.HASH_MISMATCH) from error
        begins = _begins(opened)
        if _hashes(self.task, state) != begins[1]:
            raise refused("The model is not the one that the round was opened with.", Refusal.HASH_MISMATCH)
        if begins[0] <= self._name()[0]:  # a session of before: this site has gone on since
            raise refused("The round begins with an older model than this site's own.", Refusal.STALE)
        self._save(state, begins)
        return state[0]

    # ------------------------------------------------------------------ what is kept of a round under way

    def keep_key(self, opened: RoundOpen, attempt: int, key: bytes) -> None:
        """Before a masked vector leaves: the key with which its sum will be verified.

        Raises:
            RoundError: the key of a later attempt is here; that of a late answer would take its place.
        """
        known = self._pending()
        if known is not None and (known.round, known.attempt) > (opened.round, attempt):
            raise refused("A later attempt was answered.", Refusal.STALE)
        pending = PendingSum(
            federation_id=self.fid,
            round=opened.round,
            attempt=attempt,
            open_hash=opened.digest(),
            theta_hash=opened.theta_hash,
            momentum_hash=opened.momentum_hash,
            key=key,
            roster_size=len(opened.roster),
            ring_bits=opened.ring_bits,
            scale_log2=opened.scale_log2,
            sample_rate=opened.sample_rate,
            survivors=(),
        )
        self.site.save_pending(self.fid, pending.encode())

    def note_survivors(self, opened: RoundOpen, attempt: int, survivors: tuple[bytes, ...]) -> None:
        """Who is in the sum, as this member was shown it."""
        pending = self._pending()
        if pending is None or (pending.round, pending.attempt) != (opened.round, attempt):
            raise refused("The key of this round's sum is not here.", Refusal.PROTOCOL)
        self.site.save_pending(self.fid, dataclasses.replace(pending, survivors=survivors).encode())

    # ------------------------------------------------------------------ the federation ends

    def final(
        self, closed: RoundClose, opening: SumOpening | None, vector: np.ndarray | None
    ) -> tuple[np.ndarray, bool] | None:
        """(the final model, whether this site knows it to be right), or None if it was sent none that it can use.

        Raises:
            SecureAggregationError: sum_forged (for good), sum_withheld.
            RoundError: a model that is not the one that the record names.
        """
        self.require_trust()
        pending = self._pending()
        packed = vector if vector is not None and vector.dtype == np.uint8 else None
        if pending is not None:
            told = self._follow(pending, closed, opening, packed)
            if told is not None and told.round == closed.round and self._name()[1][0] != closed.theta_hash:
                self._forged(f"the federation does not end with the model that round {told.round} gave")
            if told is None and pending.round < closed.round:
                self.site.drop_pending(self.fid)  # its sum will not be shown any more
        name = self._name()
        state = self._load(name) if name[1][0] == closed.theta_hash else None
        if state is not None:
            return state[0], True
        return (vector, False) if vector is not None and packed is None else None

    # ------------------------------------------------------------------ one step

    def _follow(
        self, pending: PendingSum, closed: RoundClose | None, opening: SumOpening | None, packed: np.ndarray | None
    ) -> RoundClose | None:
        """Settle the round that this member masked in, by its own close or by the opening of the last committed one.

        Returns:
            Its close if this site now knows where it led, None if it was not told or cannot check.
        """
        about = [record for record in (closed, opening and opening.close) if record and record.round == pending.round]
        if not about:
            return None
        told = about[0]
        if any(record != told for record in about) or told.open_hash != pending.open_hash:
            raise refused("The record closes another round than the one masked here.", Refusal.HASH_MISMATCH)
        if told.outcome == Outcome.VOID:
            raise refused("A void round is not over.", Refusal.HASH_MISMATCH)
        if told.outcome != Outcome.COMMITTED:
            if told.theta_hash != pending.theta_hash:
                self._forged(f"round {told.round} was not committed and yet changed the model")
            self.site.drop_pending(self.fid)
            stays = self._name()[1] == (pending.theta_hash, pending.momentum_hash)
            return told if stays else None  # its model was lost since, as after a restore from a backup
        if not len(set(told.survivors)) == len(told.survivors) <= pending.roster_size:
            self._forged(f"the sum of round {told.round} names a survivor twice, or more than there are members")
        if self.site.identity not in told.survivors:
            # Its vector did not arrive, in the attempt that gave the sum: that is the others', and so is its check. The
            # survivors that it may have been shown are those of a void attempt.
            self.site.drop_pending(self.fid)
            return None
        if pending.survivors and set(pending.survivors) != set(told.survivors):
            self._forged(f"the sum of round {told.round} names other survivors than this member was shown")
        if opening is None or opening.round != pending.round or packed is None:
            raise SecureAggregationError(
                f"Round {told.round} was committed and its sum is withheld from this member.",
                "Nothing was sent. The coordinator owes the sum to everybody who is in it.",
                cause="sum_withheld",
            )
        return self._verify(pending, opening, packed)

    def _verify(self, pending: PendingSum, opening: SumOpening, packed: np.ndarray) -> RoundClose | None:
        if opening.attempt != pending.attempt:
            self._forged(f"the sum of round {opening.round} is that of another attempt")
        name = self._name()
        state = self._load(name) if name[1] == (pending.theta_hash, pending.momentum_hash) else None
        if state is None:  # lost, as after a restore from a backup: this site is like one that was not there
            self.site.drop_pending(self.fid)
            return None
        ring = RingParams(pending.ring_bits, pending.roster_size, pending.scale_log2, self.task.dimension)
        diloco, count = self.config.diloco, len(opening.survivors)
        try:
            read = sum_reader(packed, ring)
        except ContractViolation as error:
            raise refused("The sum has the wrong shape or dtype.", Refusal.HASH_MISMATCH) from error
        try:
            check_sum(read, ring, pending.key, opening.tag, count, cores())
            after = advance(
                *state, read, ring.scale_log2, count, diloco.outer_lr, diloco.outer_momentum, pending.sample_rate
            )
        except (SecureAggregationError, ContractViolation) as error:
            self._forged(f"the sum of round {opening.round} does not fit its tag, or gives no finite model", error)
        hashes = _hashes(self.task, after)
        if hashes[0] != opening.theta_hash:
            self._forged(f"round {opening.round} was committed with another model than its sum gives")
        self._save(after, (name[0] + 1, hashes))
        self.site.drop_pending(self.fid)
        self.site.log.info("the sum of round %d is verified", opening.round, extra={"event": "sum_verified"})
        return opening.close

    def _forged(self, what: str, error: Exception | None = None) -> NoReturn:
        self.site.distrust(self.fid, what)
        self.site.drop_pending(self.fid)  # one guess
        self.site.log.error("ALARM: %s", what, extra={"event": "sum_forged"})
        raise SecureAggregationError(
            f"The coordinator does not commit what the participants' updates add up to: {what}.",
            "This site takes no further part in the federation. Tell the other participants. If all of them see this, "
            "the coordinator is at fault, or a participant that lied about its tag.",
            cause="sum_forged",
        ) from error

    # ------------------------------------------------------------------ what the site keeps

    def _pending(self) -> PendingSum | None:
        body = self.site.pending(self.fid)
        try:
            return PendingSum.decode(body) if body is not None else None
        except RoundError:  # torn or of another release: nothing can be verified with it
            self.site.drop_pending(self.fid)
            return None

    def _name(self) -> Name:
        head = self.site.chain_head(self.fid)
        return (int.from_bytes(head[:4], "big"), (head[4:36], head[36:])) if head is not None else self._base_name()

    def _base_name(self) -> Name:
        if self._base is None:
            self._base = 0, _hashes(self.task, self._base_state())
        return self._base

    def _base_state(self) -> State:
        return self.task.initial(), np.zeros(self.task.dimension, np.float64)

    def _load(self, name: Name) -> State | None:
        """The state of this name, or None after forgetting one that is damaged."""
        if self._name() != name:
            return None
        if self.site.chain_head(self.fid) is None:
            return self._base_state()
        d = self.task.dimension
        theta = self.site.chain_values(self.fid, "<f4", 0, d)
        momentum = self.site.chain_values(self.fid, "<f8", 4 * d, d)
        if theta.size == momentum.size == d and _hashes(self.task, (theta, momentum)) == name[1]:
            return theta, momentum
        self.site.drop_chain(self.fid)
        self.site.log.error("the model in the folder sums is damaged", extra={"event": "chain_damaged"})
        return None

    def _save(self, state: State, name: Name) -> None:
        self.site.save_chain(self.fid, name[0].to_bytes(4, "big") + b"".join(name[1]), pack_state(*state))


def _hashes(task: Task, state: State) -> Hashes:
    return theta_hash(task.layout, state[0]), momentum_hash(state[1])


def _begins(opened: RoundOpen) -> Name:
    return opened.steps, (opened.theta_hash, opened.momentum_hash)
