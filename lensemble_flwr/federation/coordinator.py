"""The coordinator's side: rounds as a state machine, without Flower.

The only input of the outer step is the verified integer sum over the survivors. A round ends committed, void (nobody
was asked to reveal; tried again under the same RoundOpen) or burnt (somebody was asked but no sum was committed; the
index advances). There is never a partial sum.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from lensemble_flwr.config import Config, config_hash
from lensemble_flwr.errors import (
    ArtifactError,
    CommitmentMismatch,
    ConfigError,
    FaultToleranceExceeded,
    LensembleError,
    PrivacyBudgetExceeded,
    RoundError,
    RunStopped,
    SecureAggregationError,
)
from lensemble_flwr.federation.checkpoint import Checkpoint
from lensemble_flwr.federation.codec import HASH_BYTES
from lensemble_flwr.federation.outer import Step, checked_step, outer_step
from lensemble_flwr.federation.plan import (
    Plan,
    make_plan,
    next_keys_binding,
    opened_charge,
    round_open,
    session_params,
)
from lensemble_flwr.federation.records import (
    PROTOCOL_VERSION,
    Guarantee,
    JoinReply,
    JoinRequest,
    Outcome,
    RoundClose,
    RoundOpen,
    SumOpening,
)
from lensemble_flwr.federation.roster import Roster
from lensemble_flwr.federation.run_folder import RunFolder, StoredSum
from lensemble_flwr.federation.summed import momentum_hash, pack_state, pack_sum
from lensemble_flwr.federation.task import Shows, Task, theta_hash
from lensemble_flwr.federation.wire import (
    ATTEMPT,
    BODY,
    CLOSES,
    ENVELOPES,
    KEYS,
    NEXT,
    OPENING,
    VECTOR,
    Refusal,
    Stage,
    keys_bytes,
)
from lensemble_flwr.privacy.printed import printed
from lensemble_flwr.privacy.spending import Charge, Spending
from lensemble_flwr.secagg import RingParams, ServerSession, from_wire, least_vouchers, signature_holds
from lensemble_flwr.secagg.keystream import cores

MAX_ATTEMPTS = 3
MAX_BURNT_IN_A_ROW = 2
LEAST_WAIT_S, MOST_WAIT_S = 30.0, 600.0
"""A node that did not join is asked again after this long, doubled each time."""
LATE_JOIN_S = 30.0
"""How long newcomers may keep a running federation waiting."""
REMIND_S = 60.0
"""How long the coordinator waits for participants before it says again that it does."""
SILENT_CLOSE_S = 120.0
"""How long the end of a run waits at least for members that did not answer what they were last asked."""

_PART = 1 << 20  # coordinates that are widened at a time

Fields = dict[str, Any]
Event = Callable[[str, Fields], None]


@dataclass(frozen=True)
class Reply:
    """A participant's answer to one message: a body (and vector), or a refusal. No answer is no Reply."""

    body: bytes = b""
    vector: np.ndarray | None = None
    refusal: Refusal | None = None


class Transport(Protocol):
    """How messages reach participants; Flower's grid in real life."""

    @property
    def simulation(self) -> bool:
        """Whether all participants live on this machine (detected, never configured)."""
        ...

    def nodes(self) -> list[int]:
        """Connected nodes now."""
        ...

    def exchange(
        self, stage: str, requests: Mapping[int, Fields], timeout: float, max_bytes: int = 0
    ) -> Iterator[tuple[int, Reply]]:
        """Send one message per node and wait: replies as they come, by node; who does not answer in time is absent.

        ``max_bytes`` bounds the vector of a reply; a larger one is not read. Where vectors are large, one is held at
        a time: the caller lets go of a reply before it asks for the next.
        """
        ...


@dataclass
class Member:
    """A participant that joined: where it is reached and the dataset root it is bound to."""

    identity: bytes
    node: int
    dataset_root: bytes
    missed: bool = False
    """Whether a round was opened without it since it was last connected; a newcomer may then take its place."""
    silent: bool = False
    """Whether it left the last message to it unanswered."""


@dataclass(frozen=True)
class _Stranger:
    """A connected node that is no member: when to ask it again, and whose name it used, if any."""

    again_at: float
    wait: float
    identity: bytes | None

    def due(self, now: float, coordinator: Coordinator) -> bool:
        """Whether to ask now: its time has come, or the member whose name it uses has gone (it restarted)."""
        member = coordinator.members.get(self.identity) if self.identity else None
        return now >= self.again_at or (member is not None and member.node not in coordinator.transport.nodes())


class _Void(Exception):
    """This attempt ended before anybody was asked to reveal."""


@dataclass
class Traffic:
    """What all exchanges of one round took: bytes of payload; seconds by message type, on the coordinator's clock."""

    down: int = 0
    up: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Coordinator:
    """Runs one federation to its end.

    Args:
        config, task: what is trained.
        folder: the durable state; locked by the caller.
        transport: how participants are reached.
        on_event: told of everything a person may want to see (public values only).
        step: the outer step; another one is injected only by tests of the self-check.
        stop_asked: whether somebody wants the run to end before its next round.
        roster: who may join; None: whoever signs for an identity of its own.
    """

    config: Config
    task: Task
    folder: RunFolder
    transport: Transport
    on_event: Event = lambda name, fields: None
    step: Callable[..., Step] = outer_step
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    members: dict[bytes, Member] = field(default_factory=dict)
    stop_asked: Callable[[], bool] = lambda: False
    roster: Roster | None = None
    _traffic: Traffic = field(default_factory=Traffic)
    _index: int | None = None
    _strangers: dict[int, _Stranger] = field(default_factory=dict)
    _join_refusals: dict[int, str] = field(default_factory=dict)
    _exhausted: set[bytes] = field(default_factory=set)
    """Identities whose budget was found spent, members or not: who leaves and comes back is not asked again."""
    _owed: tuple[SumOpening, np.ndarray] | None = None
    """Where participants verify sums: what those in the last committed one are sent of it, and the packed sum."""
    _vouching: set[bytes] = field(default_factory=set)
    """Members that are known to hold the model that the round under way begins with."""
    _sent: set[bytes] = field(default_factory=set)
    """Those to whom that model was sent, as the folder remembers: they hold it, if the message came through."""
    _early: tuple[bytes, dict[bytes, bytes]] | None = None
    """(what they are signed for, KEYS messages by identity) that came with the last replies of the round before."""

    # ------------------------------------------------------------------ the whole run

    def run(self) -> np.ndarray:
        """All rounds from where the folder stands. Returns the final theta, which every reachable site then holds.

        Raises:
            FaultToleranceExceeded: too few joined.
            PrivacyBudgetExceeded: a participant's budget ends the run; committed rounds stay committed.
            SecureAggregationError, NonDeterministicAggregation: see their docs; the checkpoint is the last commit.
        """
        last_close = self._replay(self._restore())
        checkpoint = self._restore()
        self._recall_owed()
        index = checkpoint.round
        if index:
            self.on_event("resumed", {"rounds": index})
        try:
            done = index >= self.config.diloco.rounds  # then only those who missed the end have to hear of it
            self._join(0 if done else self.config.federation.min_participants)
            roots = sorted(m.dataset_root.hex() for m in self.members.values())
            self.on_event("joined", {"participants": len(roots), "dataset_roots": roots})
            burnt = 0
            while index < self.config.diloco.rounds:
                self._refresh()
                outcome, last_close = self._round(checkpoint, last_close)
                burnt = burnt + 1 if outcome == Outcome.BURNT else 0
                del checkpoint  # two of them are more than the rest of a round takes
                checkpoint = self._restore()
                index = checkpoint.round
                if burnt >= MAX_BURNT_IN_A_ROW:
                    raise SecureAggregationError(
                        f"{burnt} rounds in a row could not be summed.",
                        "See the rounds' records for the cause, then resume the run.",
                        cause="mask_reconstruction_failed",
                    )
        except LensembleError as error:
            self.on_event("stopped", {"code": error.code, "round": index})
            checkpoint = self._restore()
            self._close_all(checkpoint, last_close)
            self._show(checkpoint)
            raise
        self._close_all(checkpoint, last_close)
        self._show(checkpoint)
        return self._theta(checkpoint)

    # ------------------------------------------------------------------ state on disk

    def _restore(self) -> Checkpoint:
        """The state after the last finished round; round 0 is written at the first start."""
        index = len(self.folder.rounds())
        if self.folder.checkpoint_path(index).is_file():
            stored = self.folder.load_checkpoint(index)
            return dataclasses.replace(stored, parameters=self._named(self._theta(stored)))
        if index:
            raise RoundError(f"The checkpoint of round {index} is missing.", "Restore the output folder from a backup.")
        theta = self.task.initial().copy()  # the task may keep its own
        start = Checkpoint(
            self.folder.federation_id, 0, bytes(32), self._named(theta), np.zeros(theta.size, np.float64)
        )
        self.folder.save_checkpoint(start)
        metrics = self._evaluate(theta)
        labels = {name: dataclasses.asdict(label) for name, label in self.task.metrics.items()}
        self.folder.write_start(metrics, self.task.headline, labels)
        self.on_event("start", {"metrics": metrics, "headline": self.task.headline, "labels": labels})
        return start

    def _evaluate(self, theta: np.ndarray) -> dict[str, float | None]:
        return {name: _finite(value) for name, value in self.task.evaluate(theta).items()}

    def _show(self, checkpoint: Checkpoint) -> None:
        """Leave something to look at. It is for people: no run fails for want of it."""
        if not checkpoint.round or not isinstance(self.task, Shows):
            return
        try:
            found = self.task.readings({"start": self.task.initial(), "final": self._theta(checkpoint)})
            if found is not None:
                self.folder.write_readings(found, checkpoint.round)
        except Exception as error:  # a task of one's own may raise anything, and the run is over
            self.on_event("not_shown", {"cause": f"{type(error).__name__}: {error}"})

    def _named(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """Views of theta, which nobody changes any more."""
        return {p.name: theta[p.start : p.start + p.size].reshape(p.shape) for p in self.task.layout}

    def _theta(self, checkpoint: Checkpoint) -> np.ndarray:
        """All parameters in one vector: the one that they are views of, or else a copy."""
        parts = [checkpoint.parameters[p.name] for p in self.task.layout]
        whole = parts[0].base
        if (
            isinstance(whole, np.ndarray)
            and whole.shape == (self.task.dimension,)
            and whole.flags.c_contiguous
            and all(
                v.base is whole and _offset(v, whole) == p.start for v, p in zip(parts, self.task.layout, strict=True)
            )
        ):
            return whole
        return np.concatenate([part.reshape(-1) for part in parts])

    def _replay(self, checkpoint: Checkpoint) -> RoundClose | None:
        """End a round that an earlier process left open: replay its stored sum, or burn it."""
        index = checkpoint.round
        opened = self.folder.opened(index)
        closes = _closes(self.folder.rounds())
        if opened is None:
            return closes[-1] if closes else None
        stored = self.folder.stored_sum(index)
        if stored is not None:
            self._check_stored(opened, stored)
            self.on_event("replayed", {"round": index})
            return self._commit(checkpoint, opened, stored, {"replayed": True, "seconds": None})
        if self.folder.asked(index):
            return self._burn(checkpoint, opened, "the coordinator died after asking for shares")
        return closes[-1] if closes else None

    @staticmethod
    def _check_stored(opened: RoundOpen, stored: StoredSum) -> None:
        """A sum from the disk must be one that the round could have given."""
        count, ring = len(stored.survivors), session_params(opened, 1).ring
        fits = (
            stored.total.shape == (opened.dimension,)
            and set(stored.survivors) <= set(opened.roster)
            and count == len(set(stored.survivors)) >= max(opened.threshold, opened.min_survivors)
            and max(int(stored.total.max(initial=0)), -int(stored.total.min(initial=0))) <= count * ring.qmax
        )
        if not fits:
            raise ArtifactError(
                f"The stored sum of round {opened.round} does not fit its RoundOpen.",
                "Delete it: the round is then burnt at --resume.",
            )

    def _recall_owed(self) -> None:
        """The sum of the last committed round, from the disk: those who are in it may not have seen it yet."""
        if not self.config.secagg.verify_sum or self._owed is not None:
            return
        committed = [close for close in _closes(self.folder.rounds()) if close.outcome == Outcome.COMMITTED]
        stored = self.folder.last_sum()
        if committed and stored is not None and stored.digest() == committed[-1].sum_hash:
            self._owe(committed[-1], stored)

    def _owe(self, close: RoundClose, stored: StoredSum) -> None:
        config, d = self.config.secagg, self.task.dimension
        packed = pack_sum(stored.total, RingParams(config.ring_bits, 2, 0, d))  # its form depends on the bits alone
        self._owed, self._vouching = (SumOpening.of(close, stored.attempt, stored.tag), packed), set()
        self._sent = self.folder.sent_to(close.theta_hash)

    # ------------------------------------------------------------------ who is there

    def _join(self, least: int) -> None:
        """Wait for the participants; at least ``least`` within ``join_timeout_s``."""
        federation = self.config.federation
        # A simulation has all its nodes from the start; waiting longer would only hide a wrong number of SuperNodes.
        patience = 5.0 if self.transport.simulation else federation.join_timeout_s
        began = self.clock()
        deadline = began + min(patience, federation.join_timeout_s)
        told = (-1, -math.inf)
        while True:
            self._refresh()
            have = len(self.members)
            self.on_event("progress", {"what": "joined", "done": have, "total": federation.participants})
            now = self.clock()  # once: between two readings the deadline could pass, and enough would be too few
            if have >= federation.participants or (now >= deadline and have >= least):
                return
            if now >= deadline:
                raise self._too_few(have, now - began)
            if have != told[0] or now - told[1] >= REMIND_S:
                told = (have, now)
                facts = {"joined": have, "participants": federation.participants, "least": least}
                self.on_event("waiting", {**facts, "seconds_left": round(deadline - now)})
            self.sleep(min(1.0, max(0.0, deadline - self.clock())))

    def _too_few(self, have: int, waited: float) -> LensembleError:
        federation = self.config.federation
        codes = sorted(set(self._join_refusals.values()))
        if codes:
            return RoundError(
                f"{len(self._join_refusals)} participants refused to join ({', '.join(codes)}) and {have} joined; "
                f"{federation.min_participants} are needed.",
                "Their own logs say why: another configuration or warm start, a site's policy, or a ledger or folder "
                "that cannot be used.",
            )
        two = len(self.transport.nodes()) == 2
        return FaultToleranceExceeded(
            f"{have} of {federation.participants} participants joined in {waited:.0f} s; "
            f"{federation.min_participants} are needed."
            + (" Two SuperNodes are Flower's default, and two participants cannot hide from each other." * two),
            "Start more SuperNodes (in a simulation: --federation-config 'num-supernodes="
            f"{federation.participants}'), lower federation.min_participants, or wait longer "
            "(federation.join_timeout_s).",
            present=have,
            minimum=federation.min_participants,
        )

    def _refresh(self) -> None:
        """Ask nodes that are new to this process to join; a known identity at a new node moves there.

        Whoever connects can be asked, so nothing that a newcomer does (refuse, stay silent, use another's name, come
        when all places are taken) may end or stall the run: it is asked again later, less and less often.
        """
        connected = set(self.transport.nodes())
        known = {m.node for m in self.members.values()}
        now = self.clock()
        fresh = sorted(n for n in connected - known if n not in self._strangers or self._strangers[n].due(now, self))
        if not fresh:
            return
        request = JoinRequest(self.folder.federation_id, config_hash(self.config), self.task.base_hash).encode()
        timeout = self.config.federation.join_timeout_s
        if not self.transport.simulation:  # where the first answer takes as long as all actors need to start
            timeout = min(timeout, self.config.federation.timeout_s)
        if len(self.members) >= self.config.federation.min_participants:
            timeout = min(timeout, LATE_JOIN_S)
        replies = dict(self._exchange(Stage.JOIN, {n: {BODY: request} for n in fresh}, timeout))
        for node in fresh:
            reply = replies.get(node)
            reply_refused = reply is not None and reply.refusal is not None
            identity, problem = self._admit(node, reply, connected)
            if problem is None:
                self._strangers.pop(node, None)
                continue
            if reply_refused:
                self._join_refusals[node] = problem
            self.on_event("refused", {"stage": Stage.JOIN, "code": problem, **self._which(node, identity)})
            earlier = self._strangers.get(node)
            wait = min(2 * earlier.wait, MOST_WAIT_S) if earlier else LEAST_WAIT_S
            self._strangers[node] = _Stranger(now + wait, wait, identity)

    def _admit(self, node: int, reply: Reply | None, connected: set[int]) -> tuple[bytes | None, str | None]:
        """(identity that it gave, why it does not join), or (identity, None) for a member."""
        if reply is None:
            return None, "SILENT"
        if reply.refusal is not None:
            return None, reply.refusal.name
        try:
            joined = JoinReply.decode(reply.body)
        except RoundError:
            return None, "MALFORMED"
        if joined.protocol != PROTOCOL_VERSION:
            return None, "PROTOCOL"
        statement = JoinReply.statement(self.folder.federation_id, joined.identity, joined.dataset_root)
        if not signature_holds(joined.identity, joined.signature, statement):
            return None, "BAD_SIGNATURE"
        if self.roster is not None and self.roster.strangers([joined.identity]):
            return joined.identity, "STRANGER"  # sites that pinned each other would refuse every round with it
        member = self.members.get(joined.identity)
        if member is None and len(self.members) >= self.config.federation.participants:
            left = [i for i, m in self.members.items() if m.missed and m.node not in connected]
            if not left:
                return None, "FULL"
            del self.members[left[0]]  # should it come back, it is a newcomer
        if member is not None and member.node in connected:  # it is there already: somebody uses its name
            return joined.identity, "IDENTITY_IN_USE"
        if member is not None and member.dataset_root != joined.dataset_root:
            return joined.identity, "DATASET_ROOT"
        self.members[joined.identity] = Member(joined.identity, node, joined.dataset_root)
        return joined.identity, None

    def _exchange(
        self, stage: str, requests: Mapping[int, Fields], timeout: float, max_bytes: int = 0
    ) -> Iterator[tuple[int, Reply]]:
        self._traffic.down += sum(_size(v) for fields in requests.values() for v in fields.values())
        began, answered = self.clock(), 0
        for node, reply in self.transport.exchange(stage, requests, timeout, max_bytes):
            answered += 1
            self._traffic.up += len(reply.body) + _size(reply.vector)
            yield node, reply
            del reply  # before the next one is read
        seconds = self.clock() - began
        self._traffic.seconds[stage] = self._traffic.seconds.get(stage, 0.0) + seconds
        facts = {"asked": len(requests), "answered": answered, "seconds": round(seconds, 3)}
        self.on_event("stage", {"stage": stage, "round": self._index, **facts})

    def _ask(
        self,
        stage: str,
        requests: Mapping[bytes, Fields],
        max_bytes: int = 0,
        take: Callable[[bytes, Reply], None] | None = None,
        timeout: float = math.inf,
    ) -> tuple[dict[bytes, Reply], dict[bytes, Refusal]]:
        """One exchange by identity: (answers, refusals). Who is in neither did not answer.

        With ``take`` every answer is handed over as it comes and not kept. ``timeout`` may be shorter than the run's.
        """
        by_node = {self.members[i].node: i for i in requests if i in self.members}
        sent = {node: requests[i] for node, i in by_node.items()}
        answers: dict[bytes, Reply] = {}
        refusals: dict[bytes, Refusal] = {}
        for identity in by_node.values():
            self.members[identity].silent = True
        for node, reply in self._exchange(stage, sent, min(timeout, self.config.federation.timeout_s), max_bytes):
            self.members[by_node[node]].silent = False
            if reply.refusal is None and take is not None:
                take(by_node[node], reply)
                del reply  # before the next one is read
            elif reply.refusal is None:
                answers[by_node[node]] = reply
            else:
                refusals[by_node[node]] = reply.refusal
                which = self._which(node, by_node[node])
                self.on_event("refused", {"stage": stage, "code": reply.refusal.name, **which})
        return answers, refusals

    def _which(self, node: int, identity: bytes | None) -> dict[str, str]:
        """How the log names a participant: by Flower's id, and by the roster's name where there is one."""
        named = self.roster.members.items() if self.roster is not None else ()
        site = next((name for name, key in named if key == identity), None)
        return {"node": str(node)} if site is None else {"node": str(node), "site": site}

    # ------------------------------------------------------------------ one round

    def _stop_if_asked(self) -> None:
        if self.stop_asked():
            raise RunStopped(
                "The run was asked to stop. What the sites have paid for is kept.",
                f"To go on: {self.folder.resume_command()}",
            )

    def _present(self) -> set[bytes]:
        """Members that are connected now."""
        connected = set(self.transport.nodes())
        return {i for i, m in self.members.items() if m.node in connected}

    def _able(self) -> set[bytes]:
        """Members that have budget left, as far as they said."""
        return set(self.members) - self._exhausted

    def _vouchers(self, there: set[bytes], n: int) -> tuple[int, int] | None:
        """(how many of them may vouch for the model, how many it takes), if that is too few for the others.

        Only where members verify sums. Those who were in the last committed sum can check it, those to whom the model
        was sent since hold it; a model that too few vouch for is not trained by anybody else, so a round of n with
        them could only fail. Who is taken to hold it and does not costs a void attempt, in which nothing is spent; not
        to ask one that holds it could end a run that works. Before the first sum everybody holds the pinned start.
        """
        if self._owed is None:
            return None
        holding = there & (set(self._owed[0].survivors) | self._vouching | self._sent)
        needed = least_vouchers(n, self.config.secagg.assumed_colluders)
        return None if holding == there or len(holding) >= needed else (len(holding), needed)

    def _quorum(self, index: int, opened: RoundOpen | None) -> bool:
        """Wait until enough are connected for a round, newcomers included; nobody is asked anything before.

        Args:
            index: the round.
            opened: its record, if it was opened before: then enough of its own roster are needed.

        Returns:
            False: the round cannot go on without those who left, but another one could.

        Raises:
            FaultToleranceExceeded: too few within ``join_timeout_s``, or too few that can vouch for the model to the
                others; the round stays as it is and can be resumed.
            PrivacyBudgetExceeded: too few members have budget left.
        """
        federation = self.config.federation
        least = federation.min_participants if opened is None else max(opened.threshold, opened.min_survivors)
        began = self.clock()
        patience = min(5.0 if self.transport.simulation else math.inf, federation.join_timeout_s)
        while True:
            self._stop_if_asked()
            present, able = self._present(), self._able()
            if opened is None and len(able) < min(len(self.members), federation.min_participants):
                raise self._budget_error(index)
            there = present & (able if opened is None else set(opened.roster))
            few = self._vouchers(there, len(there) if opened is None else len(opened.roster))
            if len(there) >= least and few is None:
                return True
            now = self.clock()
            if now - began >= patience:
                break
            self.on_event("progress", {"what": "waiting for participants", "done": len(there), "total": least})
            self.sleep(min(1.0, began + patience - now))
            self._refresh()
        others = present & able
        enough = opened is not None and len(others) >= federation.min_participants
        if enough and self._vouchers(others, len(others)) is None:
            return False
        if len(there) >= least and few is not None:
            raise FaultToleranceExceeded(
                f"{len(there)} participants are there for round {index} after {now - began:.0f} s, but only {few[0]} "
                f"of them can check the model that it begins with; {few[1]} must vouch for it to the others "
                "(secagg.verify_sum).",
                "Bring participants back that were in the last committed sum or in a round since, then resume the run. "
                "If too few of them ever come back, start a new one from its model.",
                present=few[0],
                minimum=few[1],
            )
        raise FaultToleranceExceeded(
            f"{len(there)} participants are there for round {index} after {now - began:.0f} s; {least} are needed.",
            "Bring participants back, then resume the run.",
            present=len(there),
            minimum=least,
        )

    def _open(self, checkpoint: Checkpoint) -> RoundOpen:
        """The round's record: the stored one if it was ever opened, else a new one, fsynced before it is sent.

        The roster of a new one are the members that are connected: who left costs the others neither time nor quorum,
        and who comes back is in the next one.
        """
        index = checkpoint.round
        opened = self.folder.opened(index)
        if opened is not None:
            return opened
        roster: tuple[bytes, ...] = ()
        least = self.config.federation.min_participants
        while len(roster) < least or self._vouchers(set(roster), len(roster)):  # who was there may have left again
            self._quorum(index, None)
            roster = tuple(sorted(self._present() & self._able()))
        for identity, member in self.members.items():
            member.missed = identity not in roster
        plan: Plan = make_plan(self.config, len(roster), self.task.dimension)
        theta = theta_hash(self.task.layout, self._theta(checkpoint))
        committed = sum(close.outcome == Outcome.COMMITTED for close in _closes(self.folder.rounds()))
        momentum = momentum_hash(checkpoint.momentum) if self.config.secagg.verify_sum else bytes(32)
        opened = round_open(
            self.config, self.task, plan, self.folder.federation_id, index, theta, roster, momentum, committed
        )
        self.folder.write_opened(opened)
        return opened

    def _round(self, checkpoint: Checkpoint, last: RoundClose | None) -> tuple[Outcome, RoundClose]:
        opened = self._open(checkpoint)
        started, self._traffic, self._index = self.clock(), Traffic(), opened.round
        roots = sorted(self.members[i].dataset_root.hex() for i in opened.roster if i in self.members)
        self.on_event("round_open", {"round": opened.round, "roster": len(opened.roster), "dataset_roots": roots})
        cause = ""
        for _ in range(MAX_ATTEMPTS):
            if not self._quorum(opened.round, opened):
                return Outcome.BURNT, self._burn(checkpoint, opened, "too many of its roster left for good")
            attempt = self.folder.next_attempt(opened.round)
            try:
                stored = self._attempt(checkpoint, opened, attempt, last)
            except _Void as void:
                cause = str(void)
                self.on_event("void", {"round": opened.round, "attempt": attempt, "cause": cause})
                self._refresh()
                continue
            except SecureAggregationError as error:
                return Outcome.BURNT, self._burn(checkpoint, opened, error.message)
            close = self._commit(checkpoint, opened, stored, {"seconds": self.clock() - started, "attempt": attempt})
            return Outcome.COMMITTED, close
        self._burn(checkpoint, opened, f"{MAX_ATTEMPTS} attempts were void")
        raise SecureAggregationError(
            f"Round {opened.round}: too few participants stayed through {MAX_ATTEMPTS} attempts "
            f"(at least {max(opened.threshold, opened.min_survivors)} of {len(opened.roster)} are needed; the last: "
            f"{cause}).",
            "Bring participants back, then resume the run.",
            cause="below_threshold",
            round=opened.round,
            threshold=max(opened.threshold, opened.min_survivors),
        )

    def _attempt(self, checkpoint: Checkpoint, opened: RoundOpen, attempt: int, last: RoundClose | None) -> StoredSum:
        """One pass through the stages.

        Raises:
            _Void: too few are left before anybody was asked to reveal.
            SecureAggregationError: after somebody was asked; the round is burnt.
        """
        early, self._early = self._early, None  # for the first attempt at the next round, and no other
        session, has_keys = self._with_early_keys(opened, attempt, early)
        need = max(opened.threshold, opened.min_survivors)

        def enough(present: tuple[bytes, ...], stage: str) -> None:
            if len(present) < need:
                raise _Void(f"{len(present)} of {len(opened.roster)} left after {stage}; {need} are needed")
            self._stop_if_asked()  # nobody was asked to reveal: the round can be taken up again

        def excluded(identity: bytes, cause: object) -> None:
            which = self._which(self.members[identity].node, identity)
            self.on_event("excluded", {"round": opened.round, "cause": cause, **which})

        def take(add: Callable[[bytes, Any], None], answers: dict[bytes, Any]) -> None:
            for identity in sorted(answers):
                try:
                    add(identity, answers[identity])
                except SecureAggregationError as error:
                    excluded(identity, error.fields["cause"])

        request = {BODY: opened.encode(), ATTEMPT: attempt, CLOSES: last.encode() if last else b""}
        if has_keys:
            request[KEYS] = session.roster_keys()
            answers, refusals = self._ask(Stage.OPEN_SHARE, {i: request for i in opened.roster})
            self._budget_refusals(opened, refusals)
        else:
            owed = {OPENING: self._owed[0].encode(), VECTOR: self._owed[1]} if self._owed else {}
            unseen = set(self._owed[0].survivors) - self._vouching if self._owed else set()
            answers, refusals = self._ask(
                Stage.OPEN, {i: {**request, **owed} if i in unseen else request for i in opened.roster}
            )
            self._budget_refusals(opened, refusals)
            take(session.add_keys, {i: r.body for i, r in answers.items()})
            self._vouching |= session.vouching
            self._sent -= set(session.u1) - session.vouching  # it did not come through to them
            enough(session.u1, "keys")

            roster_keys = session.roster_keys()
            answers, _ = self._ask(Stage.SHARE, {i: {BODY: roster_keys} for i in session.u1})
        take(session.add_shares, {i: r.body for i, r in answers.items()})
        vouched = f" ({len(session.vouching)} vouched for the model)" if opened.verify_sum else ""
        enough(session.u2, f"shares{vouched}")

        theta = self._theta(checkpoint)
        holds = session.vouching
        model = pack_state(theta, checkpoint.momentum) if opened.verify_sum and set(session.u2) - holds else theta
        requests = {
            i: {**({} if i in holds else {VECTOR: model}), ENVELOPES: session.envelopes_for(i)} for i in session.u2
        }
        ring = session_params(opened, attempt).ring

        def add_masked(identity: bytes, reply: Reply) -> None:
            root, message = reply.body[:HASH_BYTES], reply.body[HASH_BYTES:]
            if root != self.members[identity].dataset_root:
                mismatch = CommitmentMismatch(
                    "An update names another dataset root than its participant joined with; it is not summed.",
                    expected_root=self.members[identity].dataset_root.hex(),
                    got_root=root.hex(),
                    round=opened.round,
                )
                return excluded(identity, mismatch.code)
            try:
                vector = from_wire(cast(np.ndarray, reply.vector), ring)
                session.add_masked(identity, message, vector, root, threads=cores())
            except SecureAggregationError as error:
                excluded(identity, error.fields["cause"])

        if self._owed is not None and not self._sent >= set(session.u2):
            self._sent |= set(session.u2)  # before it goes out: an answer may be lost, or this process may die
            self.folder.write_sent_to(opened.theta_hash, self._sent)
        # A budget refusal now comes after others have reserved: its sender is a dropout, asked again next round.
        # Vectors are added as they come, in any order: the sum is the same, and only one of them is ever held.
        self._ask(Stage.TRAIN, requests, ring.wire_bytes, add_masked)
        self._vouching |= set(session.u3)  # who could not check has taken the model now, on the others' word
        enough(session.u3, "masked updates")

        question = session.survivors()
        if opened.consistency:
            answers, _ = self._ask(Stage.AGREE, {i: {BODY: question} for i in session.u3})
            take(session.add_consistency, {i: r.body for i, r in answers.items()})
            if len(session.signers) < opened.threshold:
                raise _Void(f"{len(session.signers)} signed the survivors; {opened.threshold} are needed")
            question = session.confirmed()
        self.folder.mark_asked(opened.round)
        self.on_event("asked", {"round": opened.round})
        ahead = self.config.secagg.early_keys and opened.round + 1 < opened.rounds
        asked = {BODY: question, NEXT: 1} if ahead else {BODY: question}
        answers, _ = self._ask(Stage.UNMASK, {i: asked for i in session.signers})
        if ahead:
            cut = -keys_bytes(len(opened.roster))
            keys = {i: r.body[cut:] for i, r in answers.items()}
            self._early = next_keys_binding(opened.federation_id, opened.round + 1, opened.digest()), keys
            answers = {i: Reply(r.body[:cut]) for i, r in answers.items()}
        take(session.add_reveal, {i: r.body for i, r in answers.items()})
        total = session.unmask(threads=cores())
        self._check_norm(opened, total, len(session.u3))
        tag = session.tag if opened.verify_sum else 0
        stored = StoredSum(total, tuple(sorted(session.u3)), attempt, tag)
        self.folder.store_sum(opened.round, stored)
        self.on_event("sum_stored", {"round": opened.round})
        return stored

    @staticmethod
    def _with_early_keys(
        opened: RoundOpen, attempt: int, early: tuple[bytes, dict[bytes, bytes]] | None
    ) -> tuple[ServerSession, bool]:
        """(a session, whether it has everybody's keys from the round before).

        Unless every member of the roster sent keys that fit, none are used: somebody joined or dropped out.
        """
        if early is not None and set(opened.roster) <= set(early[1]):
            session = ServerSession(session_params(opened, attempt, early[0]))
            try:
                for identity in opened.roster:
                    session.add_keys(identity, early[1][identity])
                return session, True
            except SecureAggregationError:  # that member is asked anew, as everybody is
                pass
        return ServerSession(session_params(opened, attempt)), False

    @staticmethod
    def _check_norm(opened: RoundOpen, total: np.ndarray, count: int) -> None:
        """Decision 14: no honest sum is longer than C_t C + s sqrt(C_t) (sqrt d + 8)."""
        if not opened.private:
            return
        squares = 0.0
        for start in range(0, total.size, _PART):
            part = total[start : start + _PART].astype(np.float64)
            squares += float(np.dot(part, part))  # in steps of the grid: far below the end of float64
        norm = math.ldexp(squares**0.5, -opened.scale_log2)
        bound = count * opened.clip_norm + opened.noise_std * count**0.5 * (opened.dimension**0.5 + 8)
        # Rounding to the ring adds at most half a grid step per coordinate and participant.
        bound += count * opened.dimension**0.5 * 2.0 ** (-opened.scale_log2 - 1)
        if not norm <= bound:
            raise SecureAggregationError(
                f"The sum of round {opened.round} is longer than any honest sum can be.",
                "A participant ignores the clipping bound; the round is not committed.",
                cause="sum_check_failed",
            )

    def _budget_refusals(self, opened: RoundOpen, refusals: Mapping[bytes, Refusal]) -> None:
        spent = [i for i, code in refusals.items() if code == Refusal.BUDGET]
        if not spent:
            return
        self._exhausted.update(spent)
        if self.config.privacy.on_exhausted == "stop":
            raise self._budget_error(opened.round)

    def _budget_error(self, index: int) -> PrivacyBudgetExceeded:
        privacy = self.config.privacy
        opened = self.folder.opened(index)
        text = ""
        if opened is not None and opened.private:
            charge, view = opened_charge(opened), Guarantee(opened.guarantee).name.lower()
            spent = self._spent(charge)
            now, then = (printed(s.epsilon(view, privacy.target_delta)) for s in (spent, spent.plus(charge)))
            text = (
                f" By the public record {index} rounds cost epsilon {now} at delta {privacy.target_delta:g}, "
                f"round {index} would make it {then}; the run's target is {privacy.target_epsilon:g}."
            )
        return PrivacyBudgetExceeded(
            f"Round {index} was refused: a participant's privacy budget does not allow it.{text}",
            "Committed rounds stay committed and the checkpoint is written. More rounds take a larger "
            "privacy.target_epsilon in a new run, or, where a site's own budget is spent (lensemble ledger show SITE), "
            "a larger one in its policy file.",
            round=index,
            epsilon_budget=privacy.target_epsilon,
            delta=privacy.target_delta,
        )

    # ------------------------------------------------------------------ ends of a round

    def _commit(self, checkpoint: Checkpoint, opened: RoundOpen, stored: StoredSum, facts: Fields) -> RoundClose:
        diloco = self.config.diloco
        theta, momentum = checked_step(
            self._theta(checkpoint),
            checkpoint.momentum,
            stored.total,
            opened.scale_log2,
            len(stored.survivors),
            diloco.outer_lr,
            diloco.outer_momentum,
            round_index=opened.round,
            sample_rate=opened.sample_rate,
            step=self.step,
        )
        return self._finish(checkpoint, opened, Outcome.COMMITTED, theta, momentum, stored, facts)

    def _burn(self, checkpoint: Checkpoint, opened: RoundOpen, cause: str) -> RoundClose:
        theta = self._theta(checkpoint)
        return self._finish(checkpoint, opened, Outcome.BURNT, theta, checkpoint.momentum, None, {"cause": cause})

    def _finish(
        self,
        checkpoint: Checkpoint,
        opened: RoundOpen,
        outcome: Outcome,
        theta: np.ndarray,
        momentum: np.ndarray,
        stored: StoredSum | None,
        facts: Fields,
    ) -> RoundClose:
        """Checkpoint first, record second: a crash between them redoes the same bytes."""
        after = Checkpoint(
            checkpoint.federation_id, opened.round + 1, checkpoint.content_hash(), self._named(theta), momentum
        )
        content = self.folder.save_checkpoint(after)
        close = RoundClose(
            opened.federation_id,
            opened.round,
            outcome,
            opened.digest(),
            theta_hash(self.task.layout, theta),
            stored.digest() if stored else bytes(32),
            stored.survivors if stored else (),
        )
        charge = opened_charge(opened)
        spent = self._spent(charge).plus(charge)
        private = opened.private and not opened.replay  # seeded noise protects nothing, whatever the ledgers count
        record = {
            "schema_version": 1,
            "round": opened.round,
            "outcome": outcome.name.lower(),
            "participants": len(stored.survivors) if stored else 0,
            "roster": len(opened.roster),
            "theta_hash": close.theta_hash.hex(),
            "sum_hash": close.sum_hash.hex(),
            "checkpoint": content.hex(),
            "bytes_down": self._traffic.down,
            "bytes_up": self._traffic.up,
            "stage_seconds": {stage: round(seconds, 3) for stage, seconds in self._traffic.seconds.items()},
            "private": private,
            "epsilon_central": _finite(spent.epsilon("central", opened.target_delta)) if private else None,
            "epsilon_local": _finite(spent.epsilon("local", opened.target_delta)) if private else None,
            "charge": charge.record(),
            "metrics": self._evaluate(theta),
            "close": close.encode().hex(),
            **facts,
        }
        if stored is not None and opened.verify_sum:
            self.folder.keep_sum(opened.round)
            self._owe(close, stored)
        self.folder.append_round(record)
        self.folder.finish_round(opened.round)
        self.on_event("round", {k: v for k, v in record.items() if k not in ("charge", "close")})
        return close

    def _spent(self, like: Charge) -> Spending:
        """What all finished rounds cost by the public record. Rosters, and so prices, may differ from round to round;
        ``like`` is the price of rounds that an earlier release recorded without."""
        spent = Spending()
        try:
            for record in self.folder.rounds():
                spent = spent.plus(Charge.from_record(record["charge"]) if "charge" in record else like)
        except (ConfigError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"A line of {self.folder.path / 'rounds.jsonl'} has no proper charge.", "Restore it from a backup."
            ) from error
        return spent

    def _close_all(self, checkpoint: Checkpoint, last: RoundClose | None) -> None:
        """Tell every reachable site how it ended and hand it the final model. Failing here loses nothing.

        A run that ends because sites are away does not wait for the same sites again: those that are not connected are
        not asked, and those that were silent are given :data:`SILENT_CLOSE_S`, or twice what the others took, after
        the others. Who misses the close settles its round when it is in the next one, or when the run is resumed, even
        after its last round.
        """
        if last is None:
            return
        fields: Fields = {BODY: last.encode(), VECTOR: self._theta(checkpoint)}
        owed: Fields = {OPENING: self._owed[0].encode(), VECTOR: self._owed[1]} if self._owed else {}
        unseen = self._owed[0].survivors if self._owed else ()
        answered_at: list[float] = []
        present, began = self._present(), self.clock()
        silent = {i for i in present if self.members[i].silent}
        for asked in (present - silent, silent):
            requests = {i: {**fields, **owed} if i in unseen else fields for i in asked}
            took = answered_at[-1] - began if answered_at else 0.0
            timeout = math.inf if asked is not silent else max(SILENT_CLOSE_S, 2 * took)
            if requests:
                self._ask(Stage.CLOSE, requests, take=lambda *_: answered_at.append(self.clock()), timeout=timeout)
        self.on_event("closed", {"sites": len(answered_at), "of": self.config.federation.participants})


def _closes(records: list[Fields]) -> list[RoundClose]:
    try:
        return [RoundClose.decode(bytes.fromhex(record["close"])) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError("A round's record is damaged.", "Restore the output folder from a backup.") from error


def _size(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return 0 if value is None else 8


def _offset(view: np.ndarray, whole: np.ndarray) -> int:
    """Where in ``whole`` a view of it begins, in elements."""
    return (view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // whole.itemsize


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN: null is "no guarantee", or a metric that could not be computed."""
    return value if math.isfinite(value) else None
