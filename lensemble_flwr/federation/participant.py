"""A participant's side of a round, without Flower: requests in, replies out, everything durable at the site.

Each stage may run in another process, so nothing is kept in memory between stages: protocol secrets lie in
``memory`` (Flower's Context.state, at most one message old), everything that must survive in the :class:`Site`.

What leaves is an :class:`Outgoing`; what goes wrong is a typed error whose text stays at the site.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from lensemble_flwr.config import Config, config_hash
from lensemble_flwr.data import commitment
from lensemble_flwr.errors import STOPS, ContractViolation, LensembleError, PrivacyBudgetExceeded
from lensemble_flwr.federation.codec import HASH_BYTES
from lensemble_flwr.federation.model_chain import ModelChain
from lensemble_flwr.federation.plan import make_plan, next_keys_binding, opened_charge, session_params
from lensemble_flwr.federation.policy import run_budget
from lensemble_flwr.federation.recorded_root import DATASET_ROOT, own_root
from lensemble_flwr.federation.records import (
    PROTOCOL_VERSION,
    JoinReply,
    JoinRequest,
    Outcome,
    RoundClose,
    RoundOpen,
    SumOpening,
)
from lensemble_flwr.federation.release import release_update
from lensemble_flwr.federation.roster import Roster, simulated_roster
from lensemble_flwr.federation.schedule import place
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import Task, sketch_seed, theta_hash
from lensemble_flwr.federation.wire import ENVELOPES, Outgoing, Refusal, refused, set_header_bytes
from lensemble_flwr.privacy.ledger import PrivacyLedger
from lensemble_flwr.privacy.mechanism import Release
from lensemble_flwr.privacy.noise import OsEntropy
from lensemble_flwr.secagg import ClientSession, keys_ahead, to_wire
from lensemble_flwr.secagg.keystream import cores

ACK = b"\x01"
_PIN = "Pin the other participants' identities: lensemble site roster FOLDER --add NAME=IDENTITY"
_OPEN, _ATTEMPT, _KEYS, _SESSION, _NEXT = "open", "attempt", "keys", "session", "next"
_NAMED = 36


def _name(federation_id: bytes, round_index: int) -> bytes:
    return federation_id + round_index.to_bytes(4, "big")


@dataclass(frozen=True)
class Runtime:
    """Facts about where this code runs, detected by the app, never configured.

    Args:
        simulation: whether this is an actor of Flower's simulation runtime.
        authorities: tells the fingerprints of the certificate authorities that this process's own SuperNode trusts;
            None: those of the site's ``ca.crt``.
    """

    simulation: bool
    authorities: Callable[[], tuple[str, ...]] | None = None


class SiteParticipant:
    """One participant. Build a new one per message; it holds no state of its own."""

    def __init__(
        self,
        site: Site,
        config: Config,
        task: Task,
        partition: int,
        memory: MutableMapping[str, bytes],
        runtime: Runtime,
    ) -> None:
        self.site, self.config, self.task, self.partition = site, config, task, partition
        self.memory, self.runtime = memory, runtime

    # ------------------------------------------------------------------ join

    def join(self, body: bytes) -> Outgoing:
        """Identity, protocol version and salted dataset root, signed.

        Raises:
            RoundError: the coordinator runs another configuration or another warm start (HASH_MISMATCH), or needs a
                pinned roster where there is none (POLICY).
            PolicyViolation: a rule of the site forbids the run.
        """
        request = JoinRequest.decode(body)
        self.check_run()  # before the task is built: what a submitter asks for may be huge
        if self.config.secagg.verify_sum:
            self._chain(request.federation_id).require_trust()
        if self.config.secagg.pinned and self._roster() is None:
            raise refused("The run needs a pinned roster and there is none here.", Refusal.POLICY, _PIN)
        if request.config_hash != config_hash(self.config):
            raise refused("The coordinator runs another configuration.", Refusal.HASH_MISMATCH)
        if request.base_hash != self.task.base_hash:
            raise refused("The coordinator has another warm start.", Refusal.HASH_MISMATCH)
        identity, root = self.site.identity, self._commit(request.federation_id)
        signature = self.site.sign(JoinReply.statement(request.federation_id, identity, root))
        return Outgoing(JoinReply(PROTOCOL_VERSION, identity, root, signature).encode())

    def _chain(self, federation_id: bytes) -> ModelChain:
        return ModelChain(self.site, self.config, self.task, federation_id)

    def check_run(self) -> None:
        """Judge the run's configuration by the site's policy, at once: nothing is built, read or computed for it.

        Raises:
            PolicyViolation: a rule of the site forbids the run.
        """
        policy = self.site.policy
        known: tuple[str, ...] = ()
        if policy.allowed_coordinators is not None:
            known = (self.runtime.authorities or self.site.coordinators)()
        policy.check_run(self.config, known)

    def _roster(self) -> Roster | None:
        """Whom this site pinned. Simulated sites have no operators: in a pinned run they pin the sites beside them."""
        roster = self.site.roster
        if roster is None and self.config.secagg.pinned and self.runtime.simulation:
            return simulated_roster(self.site.folder.parent)
        return roster

    def _commit(self, federation_id: bytes) -> bytes:
        """The dataset root of a federation, computed at the first join and kept.

        Later messages repeat what is kept, so that whether the data can still be read shows in none of them.
        """
        kept = self.site.dataset_root(federation_id)
        if kept is not None:
            return kept
        try:
            hashes = self.task.episode_hashes(self.partition)
            root = commitment.root(hashes, self.site.dataset_salt(federation_id))
            own = own_root(self.site, hashes).hex()
        except STOPS:
            raise
        except BaseException as error:  # a panic of compiled code is no Exception
            if not self.config.privacy.enabled:
                raise
            # Whether data can be read is private too: a root that binds nothing, and later zero updates.
            event = {"event": "dataset_unreadable"}
            self.site.log.error("the dataset root cannot be computed, a random one is sent: %s", error, extra=event)
            root, own = secrets.token_bytes(32), "unreadable"
        with self.site.ledger() as ledger:
            # Roots of two federations cannot be compared; `recordings` says to the operator whether the data changed.
            event_data = {"federation": federation_id.hex(), "root": root.hex(), "recordings": own}
            ledger.event(DATASET_ROOT, event_data)
        self.site.keep_dataset_root(federation_id, root)
        return root

    def dataset_root(self, federation_id: bytes) -> bytes:
        """The root that this participant joined with.

        Raises:
            RoundError: it never joined this federation.
        """
        root = self.site.dataset_root(federation_id)
        if root is None:
            raise refused("This participant did not join the federation.", Refusal.PROTOCOL)
        return root

    # ------------------------------------------------------------------ stage 1: RoundOpen -> fresh keys

    def open_round(
        self,
        body: bytes,
        attempt: int,
        closes: bytes | None,
        opening: bytes = b"",
        packed_sum: np.ndarray | None = None,
    ) -> Outgoing:
        """Check everything public about the round and answer with fresh keys. A refusal here costs nobody anything.

        Args:
            body: the RoundOpen.
            attempt: at this round, from 1.
            closes: the RoundClose of the round before.
            opening, packed_sum: where sums are verified, the SumOpening of the last committed round and its sum.

        Raises:
            RoundError: another model, probe, sketch or configuration, or a round that is over.
            SecureAggregationError: the sum is forged or withheld; this site then never trains on what it gave.
            PolicyViolation, PrivacyBudgetExceeded, LedgerError: as their names say; nothing was charged.
        """
        opened, vouches = self._enter(body, closes, opening, packed_sum)
        session = ClientSession(session_params(opened, attempt), self.site.identity, self.site.sign)
        keys = session.keys(vouches=vouches)
        self.memory.pop(_NEXT, None)
        self.memory[_KEYS] = b""
        self._remember(opened, attempt, session)
        return Outgoing(keys)

    def _enter(
        self, body: bytes, closes: bytes | None, opening: bytes = b"", packed_sum: np.ndarray | None = None
    ) -> tuple[RoundOpen, bool]:
        """(the RoundOpen, whether this site vouches for its model). What the round before left open is settled."""
        opened = RoundOpen.decode(body)
        self._check(opened)
        self.dataset_root(opened.federation_id)
        closed = RoundClose.decode(closes) if closes else None
        vouches = False
        with self.site.ledger() as ledger:
            if opened.verify_sum:
                told = SumOpening.decode(opening) if opening else None
                vouches = self._chain(opened.federation_id).vouches(opened, closed, told, packed_sum)
            self._check_parent(opened, closed)
            self._settle(ledger, opened.federation_id, opened.round, closed)
            self._forget_session(opened.federation_id, opened.round)
            entry = ledger.state(opened.federation_id, opened.round)
            if entry.state == "reserved":
                # The process died between reserving and writing the update: spent, and never drawn again.
                self._forfeit(ledger, opened.federation_id, opened.round, "no update was written")
                raise refused(f"Round {opened.round} is forfeited.", Refusal.STALE)
            if entry.state in ("forfeited", "closed"):
                raise refused(f"Round {opened.round} is over for this participant.", Refusal.STALE)
            if entry.state == "encoded" and self._cached(ledger, opened) is None:
                raise refused(f"Round {opened.round} is forfeited.", Refusal.STALE)
            if entry.state is None:
                self._budget_left(ledger, opened)
        return opened, vouches

    def _check(self, opened: RoundOpen) -> None:
        self.check_run()
        self.site.policy.check(opened, self._roster())
        config, task = self.config, self.task
        if opened.config_hash != config_hash(config):
            raise refused("The round belongs to another configuration.", Refusal.HASH_MISMATCH)
        if self.site.identity not in opened.roster:
            raise refused("This participant is not in the roster.", Refusal.PROTOCOL)
        if opened.base_hash != task.base_hash:
            raise refused("The round builds on another warm start.", Refusal.HASH_MISMATCH)
        if opened.probe_hash != task.probe_hash:
            raise refused("The round's public probe is not the pinned one.", Refusal.HASH_MISMATCH)
        if opened.round == 0 and opened.theta_hash != theta_hash(task.layout, task.initial()):
            raise refused("Round 0 does not start from the pinned warm start.", Refusal.HASH_MISMATCH)
        seed = sketch_seed(opened.federation_id, opened.round)
        if opened.sketch_seed != seed or opened.sketch_hash != task.sketch_hash(seed):
            raise refused("The round's sketch is not the one that its seed gives.", Refusal.HASH_MISMATCH)
        if opened.dimension != task.dimension or opened.inner_steps != config.diloco.inner_steps:
            raise refused("The round has another size than the configuration.", Refusal.HASH_MISMATCH)
        if opened.replay and not self.runtime.simulation:
            raise refused("Seeded noise is refused outside a simulation.", Refusal.POLICY)
        self._check_numbers(opened)
        if self.site.answered(opened.federation_id, opened.round):
            raise refused(f"Round {opened.round} was already answered.", Refusal.STALE)
        self._refuse_if_ended(opened)  # before anybody trains for it

    def _refuse_if_ended(self, opened: RoundOpen) -> None:
        closed = self.site.last_closed(opened.federation_id)
        ended = closed is not None and closed[0] >= opened.round
        if ended or self.site.over(opened.federation_id, opened.round):
            raise refused(f"Round {opened.round} is over for this participant.", Refusal.STALE)

    def _check_numbers(self, opened: RoundOpen) -> None:
        """Noise, bound, ring and thresholds are those that this participant computes from the configuration itself."""
        config = self.config
        plan = make_plan(config, len(opened.roster), self.task.dimension)
        exact = (
            (opened.rounds, config.diloco.rounds),
            (opened.guarantee, plan.guarantee),
            (opened.mechanism, plan.mechanism),
            (opened.replay, config.privacy.entropy == "replay"),
            (opened.threshold, plan.threshold),
            (opened.min_survivors, plan.min_survivors),
            (opened.colluders, plan.colluders),
            (opened.two_party, plan.two_party),
            (opened.participation, plan.participation),
            (opened.pinned, config.secagg.pinned),
            (opened.consistency, config.secagg.compares_views),
            (opened.verify_sum, config.secagg.verify_sum),
            (opened.per_person, plan.per_person),
            (opened.ring_bits, plan.ring.bits),
            (opened.scale_log2, plan.ring.scale_log2),
            (opened.clip_norm, plan.clip_norm),
            (opened.target_epsilon, config.privacy.target_epsilon),
            (opened.target_delta, config.privacy.target_delta),
        )
        n, federation = len(opened.roster), config.federation
        inside = (
            opened.round < opened.rounds
            and federation.min_participants <= n <= federation.participants
            and (not opened.private or max(opened.target_delta, self.site.policy.delta) < 1 / n)
        )
        # Calibration may differ in the last bits between machines; the ledger charges what the RoundOpen says.
        close = ((opened.noise_std, plan.noise_std), (opened.noise_multiplier, plan.noise_multiplier))
        if not inside or any(a != b for a, b in exact) or any(not math.isclose(a, b, rel_tol=1e-9) for a, b in close):
            raise refused("The round's numbers are not those that its configuration gives.", Refusal.HASH_MISMATCH)

    def _budget_left(self, ledger: PrivacyLedger, opened: RoundOpen) -> None:
        budgets = (*self.site.policy.budgets, *run_budget(opened))
        passed = ledger.would_exceed(opened_charge(opened), budgets, opened.federation_id)
        if passed is not None:
            raise PrivacyBudgetExceeded(
                f"Round {opened.round} would pass the {passed.scope} {passed.view} budget of epsilon "
                f"{passed.epsilon:g} at delta {passed.delta:g}.",
                "Raise the budget, plan fewer rounds, or stop here.",
                round=opened.round,
            )

    # ------------------------------------------------------------------ stage 2: keys of all -> encrypted shares

    def share_keys(self, body: bytes) -> Outgoing:
        """Check the keys of all participants and secret-share both mask seeds among them."""
        opened, attempt, session = self._recall()
        before = self.memory[_SESSION]
        # Once per session, as masking is: a second dealing would give the session a second self mask. But not before
        # everything is checked: keys that are refused must not use the one dealing up.
        once = partial(self._leave, opened, before)
        shares = session.shares(body, before=once)
        self._remember(opened, attempt, session)
        return Outgoing(shares)

    def open_and_share(self, body: bytes, attempt: int, closes: bytes | None, roster_keys: bytes) -> Outgoing:
        """Stages 1 and 2 in one, with the keys that :meth:`unmask` sent in the round before.

        They promised nothing: every check of :meth:`open_round` is made here. They serve one session, whatever state
        Flower hands out, because that they were used is on the site's disk before shares are dealt.

        Raises:
            RoundError, PolicyViolation, PrivacyBudgetExceeded, LedgerError: as :meth:`open_round`; also if there are no
                keys for this round here, or they were used.
            SecureAggregationError: as :meth:`share_keys`.
        """
        kept = self.memory.get(_NEXT)
        if kept is None:
            raise refused("There are no keys for a next round here.", Refusal.PROTOCOL)
        opened, _ = self._enter(body, closes)
        fid, index = opened.federation_id, opened.round
        named, before, secret = kept[:_NAMED], kept[_NAMED : _NAMED + HASH_BYTES], kept[_NAMED + HASH_BYTES :]
        if named != _name(fid, index):
            raise refused("The keys here were made for another round.", Refusal.PROTOCOL)
        self._leave(opened, kept)
        del self.memory[_NEXT]
        binding = next_keys_binding(fid, index, before)
        params = session_params(opened, attempt, binding)
        session = ClientSession.from_keys(secret, params, self.site.identity, self.site.sign)
        shares = session.shares(roster_keys)
        self.memory[_KEYS] = binding
        self._remember(opened, attempt, session)
        return Outgoing(shares)

    # ------------------------------------------------------------------ stage 3: theta, envelopes -> masked update

    def masked_update(self, given: np.ndarray | None, envelopes: bytes) -> Outgoing:
        """Train, align, reserve, clip, noise, encode, mask. Returns the masked vector, and the dataset root with the
        message that signs both.

        Args:
            given: theta, float32, shape (d,). Where sums are verified: None if this site vouches for the model, which
                it then holds, else the model with its momentum (:func:`.summed.pack_state`).
            envelopes: the protocol's message.

        Raises:
            RoundError: theta is not the RoundOpen's (nothing is charged), or the round is forfeited.
            ConfigError: the operating system's random source fails; nothing was trained and nothing was charged.
            PrivacyBudgetExceeded, LedgerError: the reservation failed; nothing left and nothing was charged.
        """
        opened, attempt, session = self._recall()
        root = self.dataset_root(opened.federation_id)
        # Before anything is charged: one peer must not make all others pay. And before a model is taken: that enough
        # vouch for it was checked when shares were dealt, so a session that dealt none must not make it this site's.
        session.check_envelopes(envelopes)
        theta = self._theta(opened, given)
        params = session_params(opened, attempt)
        # One training at a time in a federation, while the ledger is free for the site's other federations.
        with self.site.training(opened.federation_id, self.config.federation.timeout_s):
            release = self._stored(opened)
            if release is None:
                release = self._fresh(opened, theta)
            lanes = session.masked(envelopes, release.q, threads=cores())
            if opened.verify_sum:
                self._chain(opened.federation_id).keep_key(opened, attempt, session.sum_key())
        self._remember(opened, attempt, session)
        # Kept to know how many shares an answer to the unmask question must hold; a header and a bitmap suffice.
        self.memory[ENVELOPES] = envelopes[: set_header_bytes(len(opened.roster))]
        return Outgoing(root + session.masked_message(root), to_wire(lanes, params.ring))

    def _theta(self, opened: RoundOpen, given: np.ndarray | None) -> np.ndarray:
        if opened.verify_sum:
            return self._chain(opened.federation_id).theta(opened, given)
        if given is None:
            raise refused("The message has no theta.", Refusal.PROTOCOL)
        if given.dtype != np.float32 or given.shape != (opened.dimension,):
            raise refused("theta has the wrong shape or dtype.", Refusal.HASH_MISMATCH)
        if theta_hash(self.task.layout, given) != opened.theta_hash:
            raise refused("theta is not the model that the round was opened with.", Refusal.HASH_MISMATCH)
        return given

    def _stored(self, opened: RoundOpen) -> Release | None:
        """The update that this round is answered with already, or None where the round was never reserved.

        Raises:
            RoundError: the round is forfeited or over, or this session has left this stage before.
        """
        with self.site.ledger() as ledger:
            entry = ledger.state(opened.federation_id, opened.round)
            release = self._cached(ledger, opened) if entry.state == "encoded" else None
            if entry.state == "reserved":
                self._forfeit(ledger, opened.federation_id, opened.round, "no update was written")
            if entry.state is not None and release is None:
                raise refused(f"Round {opened.round} is forfeited.", Refusal.STALE)
            # Flower can hand the same Context to two messages: two vectors under one session's masks, with different
            # peers in them, would give the masks away one by one.
            self._leave(opened, self.memory[_SESSION])
        return release

    def _fresh(self, opened: RoundOpen, theta: np.ndarray) -> Release:
        """Train without the ledger, then take it again: what is known of the round may have changed meanwhile."""
        if not opened.replay:
            OsEntropy().probe()  # without noise there is no release: find out before training, and before paying
        delta, state = self._delta(opened, theta)
        fid, index = opened.federation_id, opened.round
        with self.site.ledger() as ledger:
            closed = self.site.last_closed(fid)
            if ledger.state(fid, index).state is not None or (closed is not None and closed[0] >= index):
                raise refused(f"Round {index} ended while it was trained for.", Refusal.STALE)
            if state is not None and not self._staged(opened, state):
                delta = None
            # From here on the order is the guarantee: reserve (fsync), draw noise, write q (fsync), encoded (fsync).
            try:
                ledger.reserve(fid, index, opened_charge(opened), (*self.site.policy.budgets, *run_budget(opened)))
            except BaseException:
                self.site.discard_staged_state(fid, index)
                raise
            release = release_update(delta, opened, self.site.identity, self.runtime.simulation)
            del delta
            digest = self.site.save_release(fid, index, release)
            ledger.encoded(fid, index, digest, opened.digest())
            if self.site.policy.log_releases:
                self.site.log_release(fid, index, release)
            self.site.adopt_local_state(fid, index)
        return release

    def _staged(self, opened: RoundOpen, state: bytes) -> bool:
        """Write the state that training left; False where that fails and there must be noise in the place of an update.

        However a secret coin fell: a state that is kept only with the update would tell it. And before the round is
        paid: whether there is a state depends on private data, so whether it can be written may refuse no round.
        """
        try:
            self.site.stage_local_state(opened.federation_id, opened.round, state)
        except (LensembleError, OSError) as error:
            if not opened.private:
                raise
            text = "round %d: the state cannot be kept, a zero update is sent: %s"
            self.site.log.error(text, opened.round, error, extra={"event": "update_failed"})
            return False
        return True

    def _delta(self, opened: RoundOpen, theta: np.ndarray) -> tuple[np.ndarray | None, bytes | None]:
        """Delta = aligned local theta - theta, float32; None (a zero update) when privacy is on and training failed."""
        try:
            result = self.task.local_update(
                theta,
                self.partition,
                self.site.local_state(opened.federation_id),
                steps=opened.inner_steps,
                sketch_seed=opened.sketch_seed,
                round_index=opened.round,
                **place(self.config, opened),
            )
            if np.shape(result.theta) != theta.shape or not isinstance(result.state, bytes | None):
                raise ContractViolation(
                    "The task's local update is not of the model's shape, or its state is no bytes."
                )
            delta = result.theta - theta
            if delta.dtype != np.float32 or not np.isfinite(delta).all():
                raise ContractViolation("The local update is not finite.")
            if not opened.private and max(delta.max(), -delta.min()) > self.config.secagg.range:
                raise ContractViolation("The local update has a coordinate over the public range.")
        except STOPS:
            raise
        except BaseException as error:  # a panic of compiled code is no Exception
            if not opened.private:
                failure = refused(f"The local update failed: {error}", Refusal.UPDATE)
                raise failure from error
            # Whether training failed depends on private data, so nobody may learn it: send noise alone.
            text = "round %d: local update failed, a zero update is sent: %s"
            self.site.log.error(text, opened.round, error, extra={"event": "update_failed"})
            return None, None
        return delta, result.state

    def _forfeit(self, ledger: PrivacyLedger, federation_id: bytes, index: int, why: str) -> None:
        self.site.discard_staged_state(federation_id, index)
        self._retire(federation_id, index)
        ledger.forfeit(federation_id, index, why)

    def _retire(self, federation_id: bytes, index: int) -> None:
        """No session of this round goes on, and its update is deleted. The ledger is told after it: who dies in between
        finds the round open, and does it again.

        Over first: the marks of the session states that were left go with the update.
        """
        self.site.end_round(federation_id, index)
        self.site.delete_release(federation_id, index)

    def _cached(self, ledger: PrivacyLedger, opened: RoundOpen) -> Release | None:
        """The update that was encoded for this round, or None after forfeiting it. Never a second draw."""
        entry = ledger.state(opened.federation_id, opened.round)
        release = None
        if entry.open_hash == opened.digest() and entry.q_hash is not None:
            release = self.site.load_release(opened.federation_id, opened.round, entry.q_hash)
        if release is None:
            why = "the cached update is missing or of another round"
            self._forfeit(ledger, opened.federation_id, opened.round, why)
            return None
        # `encoded` was recorded, so the state that belongs to it counts even if the process died before adopting it.
        self.site.adopt_local_state(opened.federation_id, opened.round)
        return release

    # ------------------------------------------------------------------ stage 4: survivors -> a signature of the view

    def agree(self, body: bytes) -> Outgoing:
        """Sign what this participant was shown of the survivors; in rounds with the consistency stage only."""
        opened, attempt, session = self._recall()
        self._note_survivors(opened, attempt, session.check_survivors(body))
        # Once per session: one that signed two views could help two sets of survivors to a majority.
        self._leave(opened, self.memory[_SESSION])
        reply = session.agree(body)
        self._remember(opened, attempt, session)
        return Outgoing(reply)

    def _note_survivors(self, opened: RoundOpen, attempt: int, positions: tuple[int, ...]) -> None:
        if opened.verify_sum:
            survivors = tuple(opened.roster[position - 1] for position in positions)
            self._chain(opened.federation_id).note_survivors(opened, attempt, survivors)

    # ------------------------------------------------------------------ last stage: survivors -> one share per peer

    def unmask(self, body: bytes, with_keys: bool = False) -> Outgoing:
        """Answer once per round, for ever: the latch is on disk before the answer exists.

        With ``with_keys`` the reply ends in fresh keys for the next round; their secrets stay in memory until it opens.
        """
        opened, attempt, session = self._recall()
        # A question that would be refused must not use the one answer up.
        self._note_survivors(opened, attempt, session.check_question(body))
        kept, keys = self._keys_ahead(opened) if with_keys else (b"", b"")
        self.site.answer_once(opened.federation_id, opened.round)
        try:
            reply = session.reveal(body)
        finally:
            session.wipe()
            self.memory.clear()
        if kept:
            self.memory[_NEXT] = kept
        return Outgoing(reply + keys)

    def _keys_ahead(self, opened: RoundOpen) -> tuple[bytes, bytes]:
        """(what is kept, the KEYS message) for the round after this one."""
        fid, index = opened.federation_id, opened.round + 1
        if not self.config.secagg.early_keys or index >= opened.rounds:
            raise refused("There is no next round to make keys for.", Refusal.PROTOCOL)
        before = opened.digest()
        secret, message = keys_ahead(next_keys_binding(fid, index, before), self.site.identity, self.site.sign)
        return _name(fid, index) + before + secret, message

    # ------------------------------------------------------------------ close

    def close_round(self, body: bytes, theta: np.ndarray | None, opening: bytes = b"") -> Outgoing:
        """Settle a round; with theta, keep it as the federation's final model.

        Args:
            body: the last RoundClose.
            theta: float32, shape (d,); where sums are verified it may be the packed sum of the last committed round.
            opening: where sums are verified, that round's SumOpening.

        Raises:
            RoundError: theta is not the model that the record names.
            SecureAggregationError: the sum is forged or withheld; the model is not kept.
        """
        closed = RoundClose.decode(body)
        fid = closed.federation_id
        self._forget_session(fid, closed.round)
        if theta is not None:
            self.check_run()
            _ = self.task.dimension  # built before the ledger is held: that takes seconds
        with self.site.ledger() as ledger:
            self.dataset_root(fid)
            known = self.site.last_closed(fid)
            if closed.outcome == Outcome.VOID or (known is not None and known[0] > closed.round):
                raise refused("The round is not over, or a later one is.", Refusal.STALE)
            if known is not None and known[0] == closed.round and known[1] != closed.theta_hash:
                raise refused("The round was closed with another model before.", Refusal.HASH_MISMATCH)
            verified = True
            verify = self.config.secagg.verify_sum
            if theta is not None and not (verify and theta.dtype == np.uint8):
                self._check_model(closed, theta)
            if theta is not None and verify:
                told = SumOpening.decode(opening) if opening else None
                theta, verified = self._chain(fid).final(closed, told, theta) or (None, False)
                if not verified:
                    text = "the final model could not be verified here%s"
                    kept = ", and none was sent" if theta is None else ": kept as .unverified"
                    self.site.log.warning(text, kept, extra={"event": "final_unverified"})
            if closed.round in ledger.rounds(fid):  # one that dropped out has nothing to settle, but gets the model
                self._settle(ledger, fid, closed.round + 1, closed)
            else:
                self._settle_answered(ledger, fid, closed.round)
        opened = self.public_round()
        if opened is not None and opened.digest() == closed.open_hash:
            self.memory.clear()  # the secrets of a round that is over
        self.memory.pop(_NEXT, None)
        if theta is not None:
            self.site.save_model(fid, theta, verified)
        return Outgoing(ACK)

    def _check_model(self, closed: RoundClose, theta: np.ndarray) -> None:
        fits = theta.dtype == np.float32 and theta.shape == (self.task.dimension,) and bool(np.isfinite(theta).all())
        if not fits or theta_hash(self.task.layout, theta) != closed.theta_hash:
            raise refused("The final model is not the one that was committed.", Refusal.HASH_MISMATCH)

    def _check_parent(self, opened: RoundOpen, closed: RoundClose | None) -> None:
        """The round starts from the model that the round before it ended with, and that end must be told.

        One that took part checks that it is the end of the round that it answered (:meth:`_settle`); one that was away
        can only hold the coordinator to what it says: the same model in the record and in the round.
        """
        known = self.site.last_closed(opened.federation_id)
        told = (closed.round, closed.theta_hash) if closed is not None else None
        if closed is not None and closed.outcome == Outcome.VOID:
            raise refused("A void round is not over.", Refusal.HASH_MISMATCH)
        if closed is not None and (closed.federation_id != opened.federation_id or closed.round >= opened.round):
            raise refused("The closed round is not before the one that opens.", Refusal.HASH_MISMATCH)
        for index, digest in filter(None, (known, told)):
            if index == opened.round - 1 and digest != opened.theta_hash:
                raise refused("The round does not follow from the one that was closed.", Refusal.HASH_MISMATCH)
        # Whoever was away is told, too: it joins the round at the model that the round before ended with.
        if opened.round and opened.round - 1 not in {index for index, _ in filter(None, (known, told))}:
            raise refused("The end of the round before this one was not told.", Refusal.HASH_MISMATCH)
        if known and told and known[0] == told[0] and known[1] != told[1]:
            raise refused("The round was closed with another model before.", Refusal.HASH_MISMATCH)

    def _settle(self, ledger: PrivacyLedger, fid: bytes, before: int, closed: RoundClose | None) -> None:
        """Close what is open below round ``before`` and forget its cached updates. Spent stays spent.

        A record closes a round only if it names the RoundOpen that this participant answered; rounds whose record is
        missing are over all the same once a later one opens, and count as burnt.
        """
        for index in ledger.open_rounds(fid):
            if index >= before:
                continue
            entry = ledger.state(fid, index)
            if entry.state == "reserved":
                self._forfeit(ledger, fid, index, "no update was written")
                continue
            outcome = Outcome.BURNT
            if closed is not None and closed.round == index:
                if entry.open_hash != closed.open_hash:
                    raise refused("The record closes another round than the one answered here.", Refusal.HASH_MISMATCH)
                outcome = Outcome(closed.outcome)
            self._retire(fid, index)
            ledger.close(fid, index, outcome.name.lower())
        if closed is not None:
            self.site.note_closed(fid, closed.round, closed.theta_hash)

    def _settle_answered(self, ledger: PrivacyLedger, fid: bytes, before: int) -> None:
        """Close open rounds below ``before`` whose unmask question was answered: no attempt at them is taken any more.

        For a site that dropped out before it was told how its last round ended. A round that was not answered may
        still be tried again, whatever a record of another round says.
        """
        for index in ledger.open_rounds(fid):
            if index < before and self.site.answered(fid, index):
                self._retire(fid, index)
                ledger.close(fid, index, Outcome.BURNT.name.lower())

    # ------------------------------------------------------------------ memory between stages

    def _remember(self, opened: RoundOpen, attempt: int, session: ClientSession) -> None:
        self.memory[_OPEN] = opened.encode()
        self.memory[_ATTEMPT] = attempt.to_bytes(4, "big")
        self.memory[_SESSION] = session.to_bytes()

    def _forget_session(self, federation_id: bytes, before: int) -> None:
        """The secrets of a round below ``before`` are of no use any more, also to a site that goes no further."""
        held = self.public_round()
        if held is not None and held.federation_id == federation_id and held.round < before:
            for name in (_OPEN, _ATTEMPT, _KEYS, _SESSION, ENVELOPES):
                self.memory.pop(name, None)

    def public_round(self) -> RoundOpen | None:
        """The RoundOpen that this participant holds open, or None. Public."""
        body = self.memory.get(_OPEN)
        return RoundOpen.decode(body) if body is not None else None

    def _leave(self, opened: RoundOpen, state: bytes) -> None:
        """Mark that a session leaves this state, once for ever.

        The marks of a round go when it ends, in another process perhaps, after this one found it open: so look again
        once the mark is made. That it is over is written before its marks go.
        """
        self.site.session_once(opened.federation_id, opened.round, state)
        self._refuse_if_ended(opened)

    def _recall(self) -> tuple[RoundOpen, int, ClientSession]:
        try:
            opened = RoundOpen.decode(self.memory[_OPEN])
            attempt = int.from_bytes(self.memory[_ATTEMPT], "big")
            params = session_params(opened, attempt, self.memory[_KEYS] or None)
            session = ClientSession.from_bytes(self.memory[_SESSION], params, self.site.sign)
        except KeyError as error:
            raise refused("There is no open round here.", Refusal.PROTOCOL) from error
        if opened.verify_sum:
            self._chain(opened.federation_id).require_trust()
        self._refuse_if_ended(opened)  # Flower handed out an older state
        return opened, attempt, session
