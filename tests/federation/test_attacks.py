"""What a hostile or faulty coordinator, member, stranger, disk or clock must not achieve.

Each test is an attack on a whole federation or on one participant; most act just before node 101 gets a message.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from clients.egress import site_log
from lensemble_flwr import server_app
from lensemble_flwr.config import config_hash, load_config
from lensemble_flwr.errors import ConfigError, DataError, LensembleError, SecureAggregationError
from lensemble_flwr.federation import site as site_module
from lensemble_flwr.federation.checkpoint import load_checkpoint, save_checkpoint
from lensemble_flwr.federation.claim_inputs import claims_of
from lensemble_flwr.federation.coordinator import LATE_JOIN_S, Reply
from lensemble_flwr.federation.plan import make_plan, round_open, session_params
from lensemble_flwr.federation.policy import Policy, load_policy, save_policy, simulated_policy
from lensemble_flwr.federation.records import JoinRequest, Outcome, RoundClose, RoundOpen
from lensemble_flwr.federation.run_folder import RunFolder, StoredSum
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import Task, theta_hash
from lensemble_flwr.federation.wire import ENVELOPES, Refusal, Stage
from lensemble_flwr.privacy.spending import Spending
from lensemble_flwr.secagg import RingParams, from_wire, signing
from lensemble_flwr.secagg import wire as secagg_wire
from tests.federation.harness import Federation, Killed, Node

NODE, STRANGER = 101, 999
Fields = Mapping[str, Any]


def just_before(federation: Federation, stage: str, act: Callable[[Fields], Any]) -> None:
    """Run ``act`` once, when node 101 is about to get its first message of this stage (its result: see InProcess)."""
    done: list[int] = []

    def before(at: str, node: int, fields: Fields) -> Any:
        if at == stage and node == NODE and not done:
            done.append(1)
            return act(fields)
        return None

    federation.transport.before = before


def run_folder(federation: Federation) -> RunFolder:
    assert federation.folder is not None
    return federation.folder


def first_open(federation: Federation) -> RoundOpen:
    opened = run_folder(federation).opened(0)
    assert opened is not None
    return opened


def site_of(federation: Federation) -> Site:
    return federation.transport.members[NODE].site


def releases(federation: Federation) -> list[Path]:
    return list((site_of(federation).folder / "releases").iterdir())


def state_of_round_0(federation: Federation) -> str | None:
    with site_of(federation).ledger() as ledger:
        return ledger.state(run_folder(federation).federation_id, 0).state


def answers(federation: Federation, stage: str, node: int = NODE) -> list[Refusal | None]:
    """The node's replies to a stage: None for an answer, else the refusal."""
    return [r.refusal for s, n, _, r in federation.transport.log if s == stage and n == node and r is not None]


def open_fields(opened: RoundOpen, closed: RoundClose | None = None) -> dict[str, Any]:
    return {"body": opened.encode(), "attempt": 1, "closes": closed.encode() if closed else b""}


def a_close(federation_id: bytes, **changes: Any) -> RoundClose:
    close = RoundClose(federation_id, 0, Outcome.COMMITTED, bytes(32), b"\1" * 32, b"\2" * 32, ())
    return dataclasses.replace(close, **changes)


# ---------------------------------------------------------------- one session, one vector


def test_one_session_masks_one_vector_whoever_its_peers_are(tmp_path: Path) -> None:
    """Vectors of one update under one session's masks, with different peers in them, give the masks away."""
    federation = Federation(tmp_path, "diloco.rounds=1")
    replies: list[Reply] = []

    def mask_again_and_again(fields: Fields) -> None:
        memory, envelopes = federation.transport.members[NODE].memory, fields[ENVELOPES]
        params = session_params(first_open(federation), 1)
        me, t1 = params.position(site_of(federation).identity), envelopes[2:34]
        kind = secagg_wire.Stage.ENVELOPES
        members, body = secagg_wire.unpack_with_members(envelopes, kind, t1, params.n)
        peers = [j for j in members if j != me]
        sealed = secagg_wire.split_evenly(body, peers, secagg_wire.ENVELOPE_BYTES)
        stale = dict(memory)
        for left_out in (None, None, *peers):
            kept = [j for j in members if j != left_out]
            parts = [sealed[j] for j in kept if j != me]
            message = secagg_wire.pack(kind, t1, secagg_wire.pack_members(kept, params.n), *parts)
            memory.clear()
            memory.update(stale)  # as if the newer memory had been lost
            replies.append(federation.transport.deliver(Stage.TRAIN, NODE, {**fields, ENVELOPES: message}))

    just_before(federation, Stage.TRAIN, mask_again_and_again)
    federation.start()
    assert [r.vector is not None for r in replies] == [True, False, False, False, False]
    assert federation.ledger_rounds() == [1] * 4


def test_bad_envelopes_of_one_member_cost_the_others_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")

    def spoil(stage: str, node: int, reply: Reply) -> Reply:
        if stage != Stage.SHARE or node != NODE:
            return reply
        site, head = site_of(federation), secagg_wire.HEADER_BYTES
        body = reply.body[head : head + 32] + bytes(len(reply.body) - head - 32 - 64)
        statement = signing.statement(secagg_wire.Stage.SHARES, reply.body[2:head], site.identity, body)
        return dataclasses.replace(reply, body=reply.body[:head] + body + site.sign(statement))

    federation.transport.after = spoil
    with pytest.raises(SecureAggregationError, match="3 attempts"):
        federation.start()
    charged = federation.ledger_rounds()
    assert [charged[0], *charged[2:]] == [0, 0, 0]


def test_a_budget_refusal_after_others_have_paid_is_a_dropout(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.transport.after = lambda stage, node, reply: (
        Reply(refusal=Refusal.BUDGET) if stage == Stage.TRAIN and node == NODE else reply
    )
    federation.start()
    assert [(r["outcome"], r["participants"]) for r in federation.rounds()] == [("committed", 3)]


def test_a_question_that_is_refused_does_not_use_the_one_answer_up(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    first: list[Reply] = []
    just_before(
        federation,
        Stage.UNMASK,
        lambda fields: first.append(federation.transport.deliver(Stage.UNMASK, NODE, {"body": b"garbage"})),
    )
    federation.start()
    assert first[0].refusal is not None
    assert answers(federation, Stage.UNMASK) == [None]


# ---------------------------------------------------------------- strangers


def add_stranger(federation: Federation, node: int = STRANGER) -> None:
    """One more connected node, a site like any other."""
    folder = federation.sites / f"site-{node}"
    site = Site(folder) if Site.exists(folder) else Site.create(folder, simulated_policy(federation.config))
    federation.transport.members[node] = Node(site, 4)


def strangers_come_after_round_0(federation: Federation) -> None:
    federation.on_event = lambda name, fields: (
        add_stranger(federation) if name == "round" and fields["round"] == 0 else None
    )


@pytest.mark.parametrize("code", [Refusal.HASH_MISMATCH, Refusal.POLICY])
def test_a_stranger_that_refuses_to_join_does_not_end_a_run_under_way(tmp_path: Path, code: Refusal) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    strangers_come_after_round_0(federation)
    federation.transport.after = lambda stage, node, reply: Reply(refusal=code) if node == STRANGER else reply
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [4, 4]
    assert (Stage.JOIN, code.name) in federation.refusals


def test_a_silent_stranger_is_waited_for_once_and_briefly(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3")
    strangers_come_after_round_0(federation)
    federation.transport.before = lambda stage, node, fields: node != STRANGER and None
    waits: list[float] = []
    exchange = federation.transport.exchange

    def timed(stage: str, requests: Mapping[int, Fields], timeout: float, max_bytes: int = 0) -> dict[int, Reply]:
        if STRANGER in requests:
            waits.append(timeout)
        return exchange(stage, requests, timeout, max_bytes)

    federation.transport.exchange = timed  # type: ignore[method-assign]
    federation.start()
    assert len(federation.rounds()) == 3
    assert waits == [LATE_JOIN_S]


def test_more_nodes_than_planned_neither_end_the_run_nor_enlarge_the_roster(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1 secagg.threshold=3")
    add_stranger(federation, 998)
    add_stranger(federation, 999)
    federation.start()
    assert [(r["outcome"], r["roster"]) for r in federation.rounds()] == [("committed", 4)]
    assert (Stage.JOIN, "FULL") in federation.refusals


def test_a_participant_whose_node_was_restarted_comes_back(tmp_path: Path) -> None:
    """The old node stays listed until its heartbeat runs out; the new one asks to join under the same identity."""
    federation = Federation(tmp_path, "diloco.rounds=3")
    members, dead = federation.transport.members, set[int]()
    federation.transport.before = lambda stage, node, fields: node not in dead and None

    def restart(name: str, fields: dict[str, Any]) -> None:
        if name == "round" and fields["round"] == 0:
            dead.add(NODE)
            members[201] = dataclasses.replace(members[NODE], memory={})
        if name == "round" and fields["round"] == 1:
            del members[NODE]

    federation.on_event = restart
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [4, 3, 4]


# ---------------------------------------------------------------- private data shows in nothing


class Panic(BaseException):
    """As a panic of compiled code comes: pyo3's PanicException is no Exception."""


class Unreadable:
    """A task whose local data cannot be read once ``broken``."""

    def __init__(self, task: Task, error: BaseException, broken: bool) -> None:
        self.task, self.error, self.broken = task, error, broken

    def __getattr__(self, name: str) -> Any:
        if self.broken and name in ("episode_hashes", "local_update"):
            raise self.error
        return getattr(self.task, name)


@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("error", [DataError("episode 7 is unreadable"), MemoryError("episode 7"), Panic("episode 7")])
def test_unreadable_data_is_not_told_apart(tmp_path: Path, error: BaseException, from_the_start: bool) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1 secagg.pinned=true")
    task = Unreadable(federation.task, error, from_the_start)
    federation.transport.members[NODE].task = cast(Task, task)

    def spoil(name: str, fields: dict[str, Any]) -> None:
        task.broken = task.broken or name == "joined"

    federation.on_event = spoil
    federation.start()
    for stage in Stage.ALL:
        assert answers(federation, stage) == ([] if stage == Stage.OPEN_SHARE else [None])  # that one is not used here
    assert federation.rounds()[0]["participants"] == 4
    assert federation.ledger_rounds() == [1] * 4


def test_a_log_that_came_from_another_process_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger is sent by its name alone: without its handlers, its lines would reach Flower's log or the console."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener()
    monkeypatch.setattr(logging, "lastResort", listener)
    monkeypatch.setattr(logging.getLogger(), "handlers", [listener])
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    context.__dict__["lensemble_site_log"] = logging.getLogger("lensemble.site.of-another-process")
    site_log(context).error("a private value: %s", 17)
    assert heard == []


# ---------------------------------------------------------------- what a RoundClose may do


@pytest.mark.parametrize("changes", [{"round": 4_000_000_000}, {"open_hash": bytes(32)}])
def test_a_close_of_another_round_leaves_the_live_one_open(tmp_path: Path, changes: dict[str, Any]) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    seen: list[Any] = []

    def close_early(fields: Fields) -> None:
        close = a_close(run_folder(federation).federation_id, **changes)
        federation.transport.deliver(Stage.CLOSE, NODE, {"body": close.encode()})
        seen.extend((state_of_round_0(federation), len(releases(federation))))

    just_before(federation, Stage.UNMASK, close_early)
    federation.start()
    assert seen == ["encoded", 1]


def test_the_last_close_settles_what_a_site_answered_before_it_dropped_out(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3")

    def before(stage: str, node: int, fields: Fields) -> Any:
        cut_off = node == NODE and bool(federation.rounds()) and stage != Stage.CLOSE
        return False if cut_off else None

    federation.transport.before = before
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [4, 3, 3]
    assert (state_of_round_0(federation), len(releases(federation))) == ("closed", 0)


def test_a_refused_round_open_settles_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    seen: list[Any] = []

    def open_another(fields: Fields) -> None:
        opened = dataclasses.replace(first_open(federation), round=9, config_hash=b"z" * 32)
        request = open_fields(opened, a_close(opened.federation_id, round=8))
        reply = federation.transport.deliver(Stage.OPEN, NODE, request)
        seen.extend((reply.refusal is not None, state_of_round_0(federation), len(releases(federation))))

    just_before(federation, Stage.UNMASK, open_another)
    federation.start()
    assert seen == [True, "encoded", 1]


@pytest.mark.parametrize("told", ["nothing", "another RoundOpen", "another model"])
def test_a_round_starts_from_the_model_that_the_last_one_ended_with(tmp_path: Path, told: str) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    evil = theta_hash(federation.task.layout, np.full(federation.task.dimension, 1e3, np.float32))

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage != Stage.OPEN or node != NODE or not federation.rounds():
            return None
        opened = dataclasses.replace(RoundOpen.decode(fields["body"]), theta_hash=evil)
        close = RoundClose.decode(fields["closes"])
        if told == "another RoundOpen":
            close = dataclasses.replace(close, theta_hash=evil, open_hash=bytes(32))
        return {**fields, **open_fields(opened, None if told == "nothing" else close)}

    federation.transport.before = before
    federation.start()
    assert answers(federation, Stage.OPEN) == [None, Refusal.HASH_MISMATCH]


def test_secrets_are_gone_once_a_round_is_closed(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    just_before(federation, Stage.UNMASK, lambda fields: False)  # it is never asked, only told that the round is over
    federation.start()
    assert federation.rounds()[0]["outcome"] == "committed"
    assert federation.transport.members[NODE].memory == {}
    assert releases(federation) == []


def test_killed_while_a_round_is_settled_its_update_is_deleted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    deaths: list[int] = []
    end_round = Site.end_round

    def die_once(self: Site, federation_id: bytes, index: int) -> None:
        if not deaths and self.folder == site_of(federation).folder:
            deaths.append(index)
            raise Killed
        end_round(self, federation_id, index)

    monkeypatch.setattr(Site, "end_round", die_once)
    with pytest.raises(Killed):
        federation.start()
    federation.resume()
    assert deaths == [0]
    assert releases(federation) == []
    assert federation.ledger_rounds() == [2] * 4


@pytest.mark.parametrize("how", ["missed", "refused"])
def test_secrets_of_a_round_do_not_outlive_it_at_a_site_that_goes_no_further(tmp_path: Path, how: str) -> None:
    """Masked in round 0, asked nothing more in it; it misses or refuses all rounds after, then hears of the last."""
    federation = Federation(tmp_path, "diloco.rounds=2")

    def before(stage: str, node: int, fields: Fields) -> Any:
        if node != NODE:
            return None
        if stage == Stage.OPEN and federation.rounds() and how == "refused":
            policy = dataclasses.replace(site_of(federation).policy, max_inner_steps=1)
            save_policy(site_of(federation).folder / "policy.json", policy)
        dropped = stage == Stage.UNMASK or (stage == Stage.OPEN and federation.rounds() and how == "missed")
        return False if dropped else None

    federation.transport.before = before
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [4, 3]
    assert federation.transport.members[NODE].memory == {}


def test_secrets_of_a_round_go_when_the_next_is_entered_and_refused(tmp_path: Path) -> None:
    """A spent budget is found after the round before is settled: nothing of that one is of use any more."""
    federation = Federation(tmp_path, "diloco.rounds=2 privacy.on_exhausted=leave")
    seen: list[Any] = []

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.UNMASK and node == NODE:
            return False
        if stage == Stage.OPEN and node == NODE and federation.rounds():
            policy = site_of(federation).policy
            poor = dataclasses.replace(policy, max_epsilon_local=1e-3, delta=1e-9)
            save_policy(site_of(federation).folder / "policy.json", poor)
        return None

    def after(stage: str, node: int, reply: Reply) -> Reply | None:
        if stage == Stage.OPEN and node == NODE and federation.rounds():
            seen.extend((reply.refusal, dict(federation.transport.members[NODE].memory)))
        return reply

    federation.transport.before, federation.transport.after = before, after
    federation.start()
    assert seen == [Refusal.BUDGET, {}]


def test_a_round_before_the_last_one_that_ended_is_not_opened(tmp_path: Path) -> None:
    """A site that trained for it would find out only then; nothing of a training is charged, so it could go on."""
    federation, federation_id = joined(tmp_path)
    site_of(federation).note_closed(federation_id, 1, bytes(32))
    assert asked_to_open(federation, federation_id, 4) == Refusal.STALE


def test_a_forfeited_update_is_deleted(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    seen: list[Any] = []

    def open_again_with_other_numbers(fields: Fields) -> bool:
        opened = first_open(federation)
        opened = dataclasses.replace(opened, noise_std=opened.noise_std * (1 + 1e-12))
        federation.transport.deliver(Stage.OPEN, NODE, open_fields(opened))
        seen.extend((state_of_round_0(federation), releases(federation)))
        return False

    just_before(federation, Stage.UNMASK, open_again_with_other_numbers)
    federation.start()
    assert seen == ["forfeited", []]


# ---------------------------------------------------------------- one participant, asked directly


def joined(tmp_path: Path, overrides: str = "") -> tuple[Federation, bytes]:
    """A federation in which only node 101 was asked to join, and its id."""
    federation, federation_id = Federation(tmp_path, overrides), b"f" * 32
    request = JoinRequest(federation_id, config_hash(federation.config), federation.task.base_hash)
    assert federation.transport.deliver(Stage.JOIN, NODE, {"body": request.encode()}).refusal is None
    return federation, federation_id


def asked_to_open(federation: Federation, federation_id: bytes, members: int, index: int = 0) -> Refusal | None:
    """Node 101's answer to a round whose numbers are all right for these many members."""
    config, task = federation.config, federation.task
    others = [bytes([i]) * 32 for i in range(1, members)]
    roster = tuple(sorted([site_of(federation).identity, *others]))
    plan = make_plan(config, members, task.dimension)
    theta = theta_hash(task.layout, task.initial())
    opened = round_open(config, task, plan, federation_id, index, theta, roster)
    return federation.transport.deliver(Stage.OPEN, NODE, open_fields(opened)).refusal


@pytest.mark.parametrize(
    ("overrides", "members", "index"),
    [
        ("federation.min_participants=4", 3, 0),  # fewer than the configuration asks for
        ("", 5, 0),  # more than it was planned for
        ("diloco.rounds=1", 4, 1),  # a round too many
        ("diloco.rounds=1", 4, 700),
    ],
)
def test_a_round_outside_the_configuration_is_refused(tmp_path: Path, overrides: str, members: int, index: int) -> None:
    federation, federation_id = joined(tmp_path, overrides)
    assert asked_to_open(federation, federation_id, members, index) == Refusal.HASH_MISMATCH
    assert asked_to_open(federation, federation_id, 4) is None


def test_a_roster_for_which_the_sites_delta_means_nothing_is_refused(tmp_path: Path) -> None:
    federation, federation_id = joined(tmp_path)
    site = site_of(federation)
    save_policy(site.folder / "policy.json", dataclasses.replace(site.policy, delta=0.25))
    assert asked_to_open(federation, federation_id, 4) == Refusal.HASH_MISMATCH
    assert asked_to_open(federation, federation_id, 3) is None


def test_a_close_stores_only_models_of_this_federation_and_of_the_right_shape(tmp_path: Path) -> None:
    federation, federation_id = joined(tmp_path)
    size = federation.task.dimension
    right = np.zeros(size, np.float32)
    wrong = (np.zeros(3, np.uint8), np.zeros(size, np.uint8), np.full(size, np.nan, np.float32), np.zeros(1, "f4"))
    tries: list[tuple[bytes, np.ndarray]] = [(federation_id, theta) for theta in wrong]
    tries += [(bytes([i]) * 32, right) for i in range(3)]
    for fid, theta in tries:
        close = a_close(fid, theta_hash=theta_hash(federation.task.layout, theta))
        reply = federation.transport.deliver(Stage.CLOSE, NODE, {"body": close.encode(), "vector": theta})
        assert reply.refusal is not None
    assert list((site_of(federation).folder / "models").iterdir()) == []


# ---------------------------------------------------------------- an output folder that somebody edited


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds (and its sites) that was killed when it had stored the sum of its second."""
    tmp = tmp_path_factory.mktemp("broken_off") / "federation"
    federation = Federation(tmp, "diloco.rounds=3")

    def kill(name: str, fields: dict[str, Any]) -> None:
        if name == "sum_stored" and fields["round"] == 1:
            raise Killed

    federation.on_event = kill
    with pytest.raises(Killed):
        federation.start()
    return tmp


def copy_of(broken_off: Path, tmp_path: Path) -> Federation:
    shutil.copytree(broken_off, tmp_path / "copy")
    return Federation(tmp_path / "copy", "diloco.rounds=3")


def edit_json(name: str, **changes: Any) -> Callable[[RunFolder], None]:
    def edit(folder: RunFolder) -> None:
        record = json.loads((folder.path / name).read_text())
        kept = {k: v for k, v in {**record, **changes}.items() if v is not None}
        (folder.path / name).write_text(json.dumps(kept) + "\n")

    return edit


def edit_sum(**changes: Callable[[np.ndarray], np.ndarray]) -> Callable[[RunFolder], None]:
    """Alter arrays of the stored sum and leave its digest as it was."""

    def edit(folder: RunFolder) -> None:
        path = folder.path / "state/round-00001/sum.npz"
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        arrays.update({name: change(arrays[name]) for name, change in changes.items()})
        np.savez(path, **cast(Any, arrays))

    return edit


def restore_sum(change: Callable[[StoredSum], StoredSum]) -> Callable[[RunFolder], None]:
    """Store another sum with the digest that belongs to it."""

    def edit(folder: RunFolder) -> None:
        stored = folder.stored_sum(1)
        assert stored is not None
        folder.store_sum(1, change(stored))

    return edit


def without_first_member(stored: StoredSum) -> StoredSum:
    return dataclasses.replace(stored, survivors=(b"\xff" * 32, *stored.survivors[1:]))


def rename_checkpoint(folder: RunFolder) -> None:
    shutil.copy(folder.checkpoint_path(0), folder.checkpoint_path(1))


def foreign_checkpoint(folder: RunFolder) -> None:
    path = folder.checkpoint_path(1)
    save_checkpoint(path, dataclasses.replace(load_checkpoint(path), federation_id=bytes(32)))


def altered_checkpoint(folder: RunFolder) -> None:
    path = folder.checkpoint_path(1)
    checkpoint = load_checkpoint(path)
    save_checkpoint(path, dataclasses.replace(checkpoint, momentum=checkpoint.momentum + 1))


def damaged_attempt(folder: RunFolder) -> None:
    state = folder.path / "state/round-00001"
    for name in ("sum.npz", "asked"):
        (state / name).unlink()
    (state / "attempt").write_text("x")


def no_record(folder: RunFolder) -> None:
    (folder.path / "rounds.jsonl").write_text("7\n")


def repeated_record(folder: RunFolder) -> None:
    path = folder.path / "rounds.jsonl"
    path.write_bytes(2 * path.read_bytes())


EDITS: dict[str, Callable[[RunFolder], None]] = {
    "another run's checkpoint": foreign_checkpoint,
    "an altered checkpoint": altered_checkpoint,
    "an older checkpoint under a newer name": rename_checkpoint,
    "other values": edit_sum(total=lambda a: a + 10**6),
    "not a number": edit_sum(total=lambda a: a.astype(np.float64) * np.nan),
    "one value too few": edit_sum(total=lambda a: a[:-1]),
    "no survivors": edit_sum(survivors=lambda a: a[:0]),
    "a single survivor": edit_sum(survivors=lambda a: a[:32]),
    "a sum of another size": restore_sum(lambda s: dataclasses.replace(s, total=s.total[:-1])),
    "a sum over too few": restore_sum(lambda s: dataclasses.replace(s, survivors=s.survivors[:2])),
    "a sum that counts one twice": restore_sum(lambda s: dataclasses.replace(s, survivors=2 * s.survivors[:2])),
    "a sum over a stranger": restore_sum(without_first_member),
    "a sum out of range": restore_sum(lambda s: dataclasses.replace(s, total=s.total + 2**40)),
    "another federation id": edit_json("federation.json", federation_id="ab"),
    "no federation id": edit_json("federation.json", federation_id=None),
    "another configuration's hash": edit_json("federation.json", config_hash=5),
    "a record without its close": edit_json("rounds.jsonl", close=None),
    "a record of another round": edit_json("rounds.jsonl", round=1),
    "a record twice": repeated_record,
    "a number for a record": no_record,
    "a damaged attempt": damaged_attempt,
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_output_folder_is_refused_and_nothing_is_committed(
    tmp_path: Path, broken_off: Path, edit: str
) -> None:
    federation = copy_of(broken_off, tmp_path)
    folder = RunFolder(federation.tmp / "run")
    EDITS[edit](folder)
    records = (folder.path / "rounds.jsonl").read_bytes()
    with pytest.raises(LensembleError):
        federation.resume()
    assert (folder.path / "rounds.jsonl").read_bytes() == records
    assert federation.transport.log == [] or edit == "a damaged attempt"


def test_the_same_folder_resumes_when_nobody_edited_it(tmp_path: Path, broken_off: Path) -> None:
    federation = copy_of(broken_off, tmp_path)
    federation.resume()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3


def test_a_second_coordinator_does_not_touch_the_folder_of_a_running_one(tmp_path: Path, broken_off: Path) -> None:
    class InMemoryGrid:
        """A simulation's, on which nobody is connected."""

    folder = RunFolder(copy_of(broken_off, tmp_path).tmp / "run")
    (folder.path / "manifest.json").write_text("of the first")
    run_config: Any = {"overrides": "", "resume": str(folder.path)}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=run_config)
    with folder.lock(), pytest.raises(ConfigError, match="Another run is working"):
        server_app._run(cast(Any, InMemoryGrid()), context)
    assert (folder.path / "manifest.json").read_text() == "of the first"


# ---------------------------------------------------------------- a site's own files


@pytest.mark.parametrize(
    "content",
    [
        b"{}",  # no budget at all is not an unlimited one
        b'{"unlimited": true, "max_epsilon_local": 1}',
        b'{"max_epsilon_local": 1, "max_epsilon_local": 100}',
        b'{"max_epsilon_local": 1' + b"0" * 400 + b"}",
        b'{"max_epsilon_local": -1}',
        b'{"max_epsilon_local": true}',
        b'{"max_epsilon_local": "1"}',
        b'{"max_epsilon_local": NaN}',
        b'{"max_epsilon_local": 1e999}',
        b'{"max_epsilon_local": 1, "min_own_noise": -1}',
        b'{"max_epsilon_local": 1, "min_survivors": -5}',
        b'{"max_epsilon_local": 1, "delta": 1}',
        b'{"max_epsilon_local": 1, "version": true}',
        b'{"max_epsilon_local": 1, "unknown": 1}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_an_odd_policy_is_refused_when_it_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "policy.json").write_bytes(content)
    with pytest.raises(ConfigError):
        load_policy(tmp_path / "policy.json")


def test_a_policy_with_a_budget_or_none_on_purpose_is_read(tmp_path: Path) -> None:
    for content in ('{"max_epsilon_local": 1}', '{"unlimited": true}'):
        (tmp_path / "policy.json").write_text(content)
        assert isinstance(load_policy(tmp_path / "policy.json"), Policy)


def test_a_site_whose_creation_was_broken_off_can_be_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, write = Policy(max_epsilon_local=1.0), site_module.atomic_write

    def die_before_the_key(path: Path, data: bytes, mode: int = 0o600) -> None:
        if path.name == "identity.key":
            raise Killed
        write(path, data, mode)

    with monkeypatch.context() as patch:
        patch.setattr(site_module, "atomic_write", die_before_the_key)
        with pytest.raises(Killed):
            Site.create(tmp_path / "site", policy)
    site = Site.create(tmp_path / "site", policy)
    with site.ledger() as ledger:
        assert not ledger.open_rounds(b"f" * 32)
    with pytest.raises(ConfigError, match="already"):  # and a whole one is never created over
        Site.create(tmp_path / "site", policy)
    assert Site(tmp_path / "site").identity == site.identity


# ---------------------------------------------------------------- whatever a member sends


def damaged(body: bytes, how: str) -> bytes:
    rng = np.random.default_rng(len(body))
    if how == "random":
        return rng.bytes(len(body))
    if how == "cut":
        return body[: int(rng.integers(len(body)))]
    at = int(rng.integers(len(body)))
    return body[:at] + bytes([body[at] ^ 1 << int(rng.integers(8))]) + body[at + 1 :]


@pytest.mark.parametrize("stage", [Stage.JOIN, Stage.OPEN, Stage.SHARE, Stage.TRAIN, Stage.UNMASK])
@pytest.mark.parametrize("how", ["random", "cut", "flip"])
def test_a_damaged_reply_ends_in_a_recorded_round_or_a_typed_error(tmp_path: Path, stage: str, how: str) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.transport.after = lambda at, node, reply: (
        dataclasses.replace(reply, body=damaged(reply.body, how)) if at == stage and node == NODE else reply
    )
    federation.start()
    (record,) = federation.rounds()
    assert record["outcome"] in ("committed", "burnt")
    assert max(federation.ledger_rounds()) <= 1


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(3, [("a", "<f4"), ("b", "<U3")]),
        np.zeros(4, "M8[s]"),
        np.array(["x", "y"]),
        np.array([None, 1]),
        np.zeros(0, "<U0"),
        np.zeros(200, np.uint8)[::2],
        np.zeros(200, ">u4"),
        np.zeros(10, np.complex128),
        np.zeros(76, np.uint8),
    ],
    ids=lambda vector: f"{vector.dtype}-{vector.size}",
)
def test_an_odd_vector_is_a_typed_refusal(vector: np.ndarray) -> None:
    with pytest.raises(SecureAggregationError):
        from_wire(vector, RingParams(32, 4, 8, 17))


@pytest.mark.parametrize("guarantee", ["local", "central"])
@pytest.mark.parametrize("multiplier", ["null", "3"])
@pytest.mark.parametrize("simulation", [True, False])
def test_no_claim_is_stronger_than_what_a_ledger_will_say(guarantee: str, multiplier: str, simulation: bool) -> None:
    config = load_config(
        f"experiment=linear privacy.guarantee={guarantee} privacy.noise_multiplier={multiplier} diloco.rounds=5"
    )
    plan = make_plan(config, 4, 17)
    spent = Spending().plus(plan.charge, config.diloco.rounds)
    rows = [row for row in claims_of(config, plan, simulation) if row.holds]
    assert rows
    for row in rows:
        assert row.delta <= config.privacy.target_delta * (1 + 1e-12)
        assert row.epsilon >= spent.epsilon(row.guarantee, row.delta) * (1 - 1e-9)
        assert row.guarantee == "local" or row.observer not in ("coordinator", "anyone")
