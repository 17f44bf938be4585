"""A coordinator that commits something else than the sum: no member trains on it, and each says why (verify_sum).

Whole federations. The coordinator's lies are planted in its protocol session, its outer step or its messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import FaultToleranceExceeded, LensembleError, RoundError, SecureAggregationError
from lensemble_flwr.federation import coordinator as coordinator_module
from lensemble_flwr.federation.coordinator import Reply
from lensemble_flwr.federation.model_chain import ModelChain
from lensemble_flwr.federation.outer import checked_step, outer_step
from lensemble_flwr.federation.policy import Policy, simulated_policy
from lensemble_flwr.federation.records import Outcome, PendingSum, RoundClose, RoundOpen, SumOpening
from lensemble_flwr.federation.run_folder import StoredSum
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.summed import advance, momentum_hash, pack_state, pack_sum, sum_reader, unpack_state
from lensemble_flwr.federation.task import sketch_seed, theta_hash
from lensemble_flwr.federation.wire import BODY, CLOSES, ENVELOPES, OPENING, VECTOR, Refusal, Stage
from lensemble_flwr.secagg import RingParams, ServerSession, signing
from lensemble_flwr.secagg import wire as secagg_wire
from lensemble_flwr.secagg.projection import PRIME
from tests.federation.harness import Federation, Killed, Node

ON = "secagg.verify_sum=true "
NODE = 101
Fields = Mapping[str, Any]


def federation(tmp: Path, overrides: str = "diloco.rounds=3") -> Federation:
    return Federation(tmp, ON + overrides)


def trained(federation: Federation) -> list[int]:
    """Updates that each site computed."""
    return federation.ledger_rounds()


def causes(federation: Federation, stage: str = Stage.OPEN) -> list[str]:
    return [
        str(error.fields["cause"])
        for at, _, error in federation.transport.errors
        if at == stage and isinstance(error, SecureAggregationError)
    ]


def sums(node: Node) -> list[str]:
    return sorted(path.suffix for path in (node.site.folder / "sums").iterdir())


def models(node: Node) -> list[Path]:
    return sorted((node.site.folder / "models").iterdir())


def events(node: Node) -> list[str]:
    lines = (node.site.folder / "site.log").read_text().splitlines()
    return [json.loads(line).get("event", "") for line in lines]


def silent_after(federation: Federation, run: Callable[[], Any]) -> None:
    """Run a federation that ends because its members refuse."""
    with pytest.raises(LensembleError):
        run()


def lying(monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray, int], tuple[np.ndarray, int]]) -> None:
    """The coordinator opens (S, T) and goes on with what ``change`` makes of them."""

    class Lying(ServerSession):
        def unmask(self, *, threads: int = 1) -> np.ndarray:
            total, self.lie = change(super().unmask(threads=threads), super().tag)
            return total

        @property
        def tag(self) -> int:
            return self.lie

    monkeypatch.setattr(coordinator_module, "ServerSession", Lying)


def edit(federation: Federation, stage: str, change: Callable[[int, dict[str, Any]], Any]) -> None:
    """``change`` sees every message of a stage with its node and may alter it in place (False: drop it)."""

    def before(at: str, node: int, fields: Fields) -> Any:
        if at != stage:
            return None
        altered = dict(fields)
        return False if change(node, altered) is False else altered

    federation.transport.before = before


# ---------------------------------------------------------------- honest rounds


@pytest.mark.parametrize("overrides", ["", "secagg.consistency=true", "secagg.ring_bits=24", "secagg.pinned=true"])
def test_every_member_ends_with_the_model_that_it_verified(tmp_path: Path, overrides: str) -> None:
    run = federation(tmp_path, "diloco.rounds=3 " + overrides)
    theta = run.start()
    assert [r["participants"] for r in run.rounds()] == [4, 4, 4]
    assert not run.transport.errors
    for node in run.transport.members.values():
        assert events(node).count("sum_verified") == 3
        assert sums(node) == [".state"]  # the secrets of all rounds are gone
        (model,) = models(node)
        assert np.array_equal(np.frombuffer(model.read_bytes(), "<f4"), theta)
        assert ".unverified" not in model.name


def test_it_changes_no_result(tmp_path: Path) -> None:
    overrides = "diloco.rounds=2 privacy.entropy=replay"
    plain, checked = Federation(tmp_path / "a", overrides), federation(tmp_path / "b", overrides)
    for run in (plain, checked):  # seeded noise goes by identity and configuration, so results differ in it alone
        run.start()
    assert [r["outcome"] for r in checked.rounds()] == [r["outcome"] for r in plain.rounds()]
    assert [m["participants"] for m in checked.rounds()] == [4, 4]


def test_the_sum_comes_in_place_of_the_model(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=3")
    run.start()
    vectors = [(s, f[VECTOR].dtype.str, f[VECTOR].nbytes) for s, _, f, _ in run.transport.log if VECTOR in f]
    d = run.task.dimension
    assert set(vectors) == {(Stage.OPEN, "|u1", 4 * d), (Stage.CLOSE, "|u1", 4 * d)}
    assert len(vectors) == 4 * 3  # each member gets each sum once, and no model


def test_secrets_are_readable_by_the_site_only_and_forgotten_in_the_end(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=1")
    modes, keys = set(), set()

    def look(node: int, fields: dict[str, Any]) -> None:
        path = next((run.transport.members[node].site.folder / "sums").glob("*.pending"))
        modes.add(stat.S_IMODE(path.stat().st_mode))
        keys.add(PendingSum.decode(path.read_bytes()).key)

    edit(run, Stage.UNMASK, look)
    run.start()
    assert modes == {0o600}
    assert len(keys) == 1
    (key,) = keys
    for node in run.transport.members.values():
        for path in node.site.folder.rglob("*"):
            assert not path.is_file() or key not in path.read_bytes(), path


def test_everything_needed_survives_a_restart_of_the_supernodes(tmp_path: Path) -> None:
    run = federation(tmp_path)
    edit(run, Stage.OPEN, lambda node, fields: run.transport.members[node].memory.clear())
    run.start()
    assert [events(n).count("sum_verified") for n in run.transport.members.values()] == [3] * 4


@pytest.mark.parametrize("when", ["round", "sum_stored", "asked"])
def test_a_coordinator_that_dies_owes_the_sum_after_its_resumption(tmp_path: Path, when: str) -> None:
    run, done = federation(tmp_path, "diloco.rounds=3"), []

    def die(name: str, fields: dict[str, Any]) -> None:
        if name == when and len(run.rounds()) == 1 and not done:
            done.append(1)
            raise Killed

    run.on_event = die
    with pytest.raises(Killed):
        run.start()
    theta = run.resume()
    expected = {"asked": ["committed", "burnt", "committed"]}.get(when, ["committed"] * 3)
    assert [r["outcome"] for r in run.rounds()] == expected
    assert not causes(run)
    for node in run.transport.members.values():
        assert np.array_equal(np.frombuffer(models(node)[0].read_bytes(), "<f4"), theta)
        assert events(node).count("sum_verified") == expected.count("committed")


def test_a_void_attempt_is_tried_again_with_a_fresh_key(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=2 secagg.consistency=true")
    refused, keys = [], []

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.AGREE and len(refused) < 2:
            refused.append(node)
            keys.append(next((run.transport.members[node].site.folder / "sums").glob("*.pending")).read_bytes())
            return False
        if stage == Stage.UNMASK and len(keys) < 3:
            keys.append(next((run.transport.members[node].site.folder / "sums").glob("*.pending")).read_bytes())
        return None

    run.transport.before = before
    run.start()
    assert [(r["outcome"], r["attempt"]) for r in run.rounds()] == [("committed", 2), ("committed", 1)]
    assert len({PendingSum.decode(body).key for body in keys}) == 2
    assert not causes(run)


# ---------------------------------------------------------------- forged sums


def plus_one(total: np.ndarray, tag: int) -> tuple[np.ndarray, int]:
    forged = total.copy()
    forged[5] += 1
    return forged, tag


LIES: dict[str, Callable[[np.ndarray, int], tuple[np.ndarray, int]]] = {
    "one coordinate by one": plus_one,
    "one coordinate by one, and the tag": lambda total, tag: (plus_one(total, tag)[0], (tag + 1) % PRIME),
    "two coordinates that cancel": lambda total, tag: (
        total + np.eye(1, total.size, 3, int)[0] - np.eye(1, total.size, 9, int)[0],
        tag,
    ),
    "the tag alone": lambda total, tag: (total, tag ^ 1),
    "a tag out of range": lambda total, tag: (total, tag + PRIME),
    "nothing at all": lambda total, tag: (0 * total, 0),
    "twice the sum": lambda total, tag: (2 * total, 2 * tag % PRIME),
    "the negative": lambda total, tag: (-total, -tag % PRIME),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_sum_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    run = federation(tmp_path)
    lying(monkeypatch, LIES[lie])
    silent_after(run, run.start)
    assert run.rounds()[0]["outcome"] == "committed"  # says the coordinator
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}
    assert {r.refusal for s, _, _, r in run.transport.log if s == Stage.OPEN and r is not None and r.refusal} == {
        Refusal.PROTOCOL
    }
    for node in run.transport.members.values():
        assert "sum_forged" in events(node)
        assert sums(node) == [".forged"]
        assert not models(node)


def test_a_forgery_ends_the_federation_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One guess: also where the coordinator then shows the right sum."""
    run = federation(tmp_path, "diloco.rounds=3")
    honest: list[bytes] = []
    edit(run, Stage.OPEN, lambda node, fields: _flip_once(honest, fields))
    silent_after(run, run.start)
    run.transport.before = lambda *_: None
    silent_after(run, run.resume)
    assert trained(run) == [1] * 4
    assert set(causes(run, Stage.JOIN)) == {"sum_forged"}
    for node in run.transport.members.values():  # the operator's word lets it back in: it then takes others' word
        next((node.site.folder / "sums").glob("*.forged")).unlink()
    silent_after(run, run.resume)
    assert "sum_unverified" in causes(run, Stage.SHARE)


def _flip_once(honest: list[bytes], fields: dict[str, Any]) -> None:
    if OPENING in fields and len(honest) < 4:
        honest.append(fields[OPENING])
        fields[VECTOR] = fields[VECTOR] ^ np.eye(1, fields[VECTOR].size, 0, np.uint8)[0]


def test_another_model_with_the_true_sum_is_not_trained_on(tmp_path: Path) -> None:
    run = federation(tmp_path)

    def step(*args: Any, **kwargs: Any) -> Any:
        theta, momentum = outer_step(*args, **kwargs)
        theta[5] = np.nextafter(theta[5], np.float32(9))
        return theta, momentum

    silent_after(run, lambda: run.start(step=step))
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}
    assert not any(models(node) for node in run.transport.members.values())


def test_another_momentum_with_the_true_sum_is_not_trained_on(tmp_path: Path) -> None:
    run = federation(tmp_path)

    def step(*args: Any, **kwargs: Any) -> Any:
        theta, momentum = outer_step(*args, **kwargs)
        return theta, 2 * momentum

    silent_after(run, lambda: run.start(step=step))
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}


def test_the_sum_of_an_earlier_round_does_not_pass_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, first = federation(tmp_path), []

    def replay(total: np.ndarray, tag: int) -> tuple[np.ndarray, int]:
        first.append((total, tag))
        return first[0]

    lying(monkeypatch, replay)
    silent_after(run, run.start)
    assert trained(run) == [2] * 4  # round 0 was right
    assert set(causes(run)) == {"sum_forged"}


def reopened(change: Callable[[SumOpening], SumOpening]) -> Callable[[int, dict[str, Any]], None]:
    """Alter the opening, and the close that goes with it."""

    def lie(node: int, fields: dict[str, Any]) -> None:
        if fields.get(OPENING):
            told = change(SumOpening.decode(fields[OPENING]))
            fields[OPENING], fields[CLOSES] = told.encode(), told.close.encode()

    return lie


def test_the_sum_of_another_attempt_does_not_pass(tmp_path: Path) -> None:
    run = federation(tmp_path)
    edit(run, Stage.OPEN, reopened(lambda told: dataclasses.replace(told, attempt=told.attempt + 1)))
    silent_after(run, run.start)
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}


@pytest.mark.parametrize("more", [False, True])
def test_other_survivors_than_were_shown_do_not_pass(tmp_path: Path, more: bool) -> None:
    run = federation(tmp_path)
    stranger = bytes(31) + b"\x01"

    def change(told: SumOpening) -> SumOpening:
        names = (*told.survivors, stranger) if more else told.survivors[:3]
        return dataclasses.replace(told, survivors=tuple(sorted(names)))

    edit(run, Stage.OPEN, reopened(change))
    silent_after(run, run.start)
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}


def test_a_survivor_that_is_named_twice_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the sum of twice as many has the same mean, and the tag of it fits."""
    run = federation(tmp_path)
    lying(monkeypatch, LIES["twice the sum"])

    def twice(told: SumOpening) -> SumOpening:
        return dataclasses.replace(told, survivors=tuple(sorted(2 * told.survivors)))

    monkeypatch.setattr(coordinator_module, "checked_step", _of_twice_as_many)
    edit(run, Stage.OPEN, reopened(twice))
    silent_after(run, run.start)
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}


def _of_twice_as_many(theta: Any, momentum: Any, total: Any, scale: int, count: int, *rest: Any, **more: Any) -> Any:
    return checked_step(theta, momentum, total, scale, 2 * count, *rest, **more)


def test_a_late_answer_does_not_bring_the_key_of_an_earlier_attempt_back(tmp_path: Path) -> None:
    run, refused = federation(tmp_path, "diloco.rounds=1"), []

    def late(node: int, fields: dict[str, Any]) -> None:
        opened = run.folder.opened(0)  # type: ignore[union-attr]
        assert opened is not None
        chain = ModelChain(run.transport.members[node].site, run.config, run.task, opened.federation_id)
        with pytest.raises(RoundError):
            chain.keep_key(opened, 0, bytes(32))
        refused.append(node)

    edit(run, Stage.UNMASK, late)
    run.start()
    assert len(refused) == 4
    assert not run.transport.errors


def test_a_burnt_round_that_changes_the_model_is_a_forgery(tmp_path: Path) -> None:
    run = federation(tmp_path)

    def lie(node: int, fields: dict[str, Any]) -> None:
        if fields.pop(OPENING, None):
            fields.pop(VECTOR)
            told = RoundClose.decode(fields[CLOSES])
            fields[CLOSES] = dataclasses.replace(told, outcome=Outcome.BURNT, survivors=()).encode()

    edit(run, Stage.OPEN, lie)
    silent_after(run, run.start)
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}


def test_without_anybody_who_can_check_a_model_is_not_trained_on(tmp_path: Path) -> None:
    """A round or attempt that never was, so that nobody holds its key, does not get a model past the members."""
    run = federation(tmp_path, "diloco.rounds=2")

    def lie(name: str, fields: dict[str, Any]) -> None:
        if name == "round":
            for node in run.transport.members.values():
                node.site.drop_pending(run.folder.federation_id)  # type: ignore[union-attr]

    run.on_event = lie
    silent_after(run, lambda: run.start(step=lambda *a, **k: tuple(1.5 * x for x in outer_step(*a, **k))))
    assert trained(run) == [1] * 4
    assert set(causes(run, Stage.SHARE)) == {"sum_unverified"}


def test_an_older_model_does_not_come_back(tmp_path: Path) -> None:
    """Not even on the word of members that missed the rounds since and honestly stand at the older one."""
    numbers = "federation.participants=6 federation.min_participants=6 secagg.threshold=4 diloco.rounds=6"
    run, laggards = federation(tmp_path, numbers), (104, 105)
    first: list[RoundOpen] = []

    def before(at: str, node: int, fields: Fields) -> Any:
        done = len(run.rounds())
        if node in laggards and (done, at) in ((1, Stage.SHARE), (2, Stage.OPEN)):
            return False
        if at != Stage.OPEN:
            return None
        opened = RoundOpen.decode(fields[BODY])
        if done == 1:
            first.append(opened)
        if done != 3:
            return None
        older = {name: getattr(first[0], name) for name in ("theta_hash", "momentum_hash", "steps")}
        forged = dataclasses.replace(opened, round=4, **seeds(run, opened, 4), **older)
        told = RoundClose.decode(fields[CLOSES])
        told = dataclasses.replace(told, round=3, outcome=Outcome.BURNT, theta_hash=older["theta_hash"], survivors=())
        kept = {k: v for k, v in fields.items() if k not in (OPENING, VECTOR)}
        return {**kept, BODY: forged.encode(), CLOSES: told.encode()}

    run.transport.before = before
    silent_after(run, run.start)
    assert trained(run) == [3, 3, 3, 3, 1, 1]
    assert causes(run) == ["sum_forged"] * len(causes(run))
    assert {node for at, node, _ in run.transport.errors if at == Stage.OPEN} == {100, 101, 102, 103}


def test_a_model_that_nobody_vouched_for_is_not_kept(tmp_path: Path) -> None:
    """The question for an update, asked before that for shares, must not make a forged model one's own: in the next
    attempt all members would vouch for it."""
    run, forged = federation(tmp_path), []

    def before(at: str, node: int, fields: Fields) -> Any:
        if at == Stage.OPEN:
            honest = RoundOpen.decode(fields[BODY])
            theta = run.task.initial() + np.float32(0.5)
            momentum = np.ones(theta.size)
            names = {"theta_hash": theta_hash(run.task.layout, theta), "momentum_hash": momentum_hash(momentum)}
            opened = dataclasses.replace(honest, round=1, steps=1, **seeds(run, honest, 1), **names)
            told = RoundClose(honest.federation_id, 0, Outcome.COMMITTED, bytes(32), names["theta_hash"], bytes(32), ())
            fields = {**fields, BODY: opened.encode(), CLOSES: told.encode()}
            if len(forged) < 4:
                forged.append(node)
                assert run.transport.deliver(Stage.OPEN, node, fields).refusal is None
                given = {VECTOR: pack_state(theta, momentum), ENVELOPES: bytes(200)}
                assert run.transport.deliver(Stage.TRAIN, node, given).refusal is not None
            reply = run.transport.deliver(Stage.OPEN, node, fields)
            assert reply.body[secagg_wire.HEADER_BYTES + secagg_wire.KEY_PAIR_BYTES] == 0  # it does not vouch
            return fields
        return None

    run.transport.before = before
    silent_after(run, run.start)
    assert trained(run) == [0] * 4


def seeds(run: Federation, opened: RoundOpen, index: int) -> dict[str, Any]:
    seed = sketch_seed(opened.federation_id, index)
    return {"sketch_seed": seed, "sketch_hash": run.task.sketch_hash(seed)}


# ---------------------------------------------------------------- withheld sums


def withhold(fields: dict[str, Any]) -> None:
    fields.pop(OPENING, None)
    fields.pop(VECTOR, None)


def test_a_withheld_sum_is_not_trained_on(tmp_path: Path) -> None:
    run = federation(tmp_path)
    edit(run, Stage.OPEN, lambda node, fields: withhold(fields))
    silent_after(run, run.start)
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_withheld"}


def test_a_sum_that_one_member_is_not_sent_keeps_only_that_one_out(tmp_path: Path) -> None:
    run = federation(tmp_path)
    edit(run, Stage.OPEN, lambda node, fields: withhold(fields) if node == NODE else None)
    run.start()
    assert set(causes(run)) == {"sum_withheld"}
    assert [r["participants"] for r in run.rounds()] == [4, 3, 4]  # in round 2 it goes on with what the others verified
    assert trained(run) == [3, 2, 3, 3]


def test_a_withheld_sum_can_be_handed_in_later(tmp_path: Path) -> None:
    run, first = federation(tmp_path), []

    def lie(node: int, fields: dict[str, Any]) -> None:
        if OPENING in fields and len(first) < 4:
            first.append(node)
            withhold(fields)

    edit(run, Stage.OPEN, lie)
    run.start()
    assert [(r["participants"], r["attempt"]) for r in run.rounds()] == [(4, 1), (4, 2), (4, 1)]


@pytest.mark.parametrize("size", [0, -1, 1])
def test_a_sum_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    run = federation(tmp_path, "diloco.rounds=2")

    def lie(node: int, fields: dict[str, Any]) -> None:
        if OPENING in fields:
            whole = fields[VECTOR]
            fields[VECTOR] = {0: whole[:0], -1: whole[:-1], 1: np.append(whole, whole[:1])}[size]

    edit(run, Stage.OPEN, lie)
    silent_after(run, run.start)
    assert trained(run) == [1] * 4
    refusals = {r.refusal for s, _, _, r in run.transport.log if s == Stage.OPEN and r is not None}
    assert refusals == {None, Refusal.HASH_MISMATCH}


# ---------------------------------------------------------------- the last round


def test_the_last_model_is_checked_before_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = federation(tmp_path, "diloco.rounds=1")
    lying(monkeypatch, plus_one)
    run.start()
    assert causes(run, Stage.CLOSE) == ["sum_forged"] * 4
    assert not any(models(node) for node in run.transport.members.values())


def test_a_last_model_that_is_sent_instead_of_its_sum_is_not_kept(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=1")

    def lie(node: int, fields: dict[str, Any]) -> None:
        index = run.folder.rounds()[-1]["round"] + 1  # type: ignore[union-attr]
        parameters = run.folder.load_checkpoint(index).parameters  # type: ignore[union-attr]
        fields[VECTOR] = np.concatenate([parameters[p.name].reshape(-1) for p in run.task.layout])

    edit(run, Stage.CLOSE, lie)
    run.start()
    assert causes(run, Stage.CLOSE) == ["sum_withheld"] * 4
    assert not any(models(node) for node in run.transport.members.values())


def test_one_that_cannot_check_the_last_model_says_so_in_its_name(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=2")
    edit(run, Stage.TRAIN, lambda node, fields: not (node == NODE and len(run.rounds()) == 1) and None)
    theta = run.start()
    assert [r["participants"] for r in run.rounds()] == [4, 3]
    for number, node in run.transport.members.items():
        (model,) = models(node)
        assert (".unverified" in model.name) == (number == NODE)
        assert np.array_equal(np.frombuffer(model.read_bytes(), "<f4"), theta)


# ---------------------------------------------------------------- members that were not there, members that lie


def test_one_that_missed_a_round_takes_the_others_word_and_checks_again(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=4")
    edit(run, Stage.OPEN, lambda node, fields: not (node == NODE and len(run.rounds()) == 1) and None)
    run.start()
    assert [r["participants"] for r in run.rounds()] == [4, 3, 4, 4]
    assert not causes(run)
    sent = [(f[VECTOR].nbytes, node) for s, node, f, _ in run.transport.log if s == Stage.TRAIN and VECTOR in f]
    assert sent == [(12 * run.task.dimension, NODE)]
    assert [events(n).count("sum_verified") for n in run.transport.members.values()] == [4, 2, 4, 4]
    assert not any(".unverified" in models(n)[0].name for n in run.transport.members.values())


def test_a_newcomer_joins_on_the_others_word(tmp_path: Path) -> None:
    run = federation(tmp_path, "federation.participants=5 federation.min_participants=4 diloco.rounds=3")
    late = run.transport.members.pop(104)
    run.on_event = lambda name, fields: (
        run.transport.members.update({104: late}) if name == "round" and fields["round"] == 0 else None
    )
    run.start()
    assert [r["participants"] for r in run.rounds()] == [4, 5, 5]
    assert events(late).count("sum_verified") == 2


@pytest.mark.parametrize("old", [1, 2])
def test_too_few_old_members_end_the_run_before_anybody_is_asked(tmp_path: Path, old: int) -> None:
    """k + 1 = 2 of those in the last sum vouch to the newcomers; with one alone the round could only fail."""
    numbers = "federation.participants=6 federation.min_participants=3 secagg.min_survivors=3 diloco.rounds=2"
    run = federation(tmp_path, f"{numbers} federation.join_timeout_s=4")
    for number in (104, 105):
        del run.transport.members[number]
    gone: dict[int, Node] = {}

    def replace(name: str, fields: dict[str, Any]) -> None:
        if name != "round" or gone:
            return
        for number in list(run.transport.members)[old:]:
            gone[number] = run.transport.members.pop(number)
        for number in (200, 201):
            site = Site.create(run.sites / f"site-{number}", simulated_policy(run.config))
            run.transport.members[number] = Node(site, number)

    run.on_event = replace
    if old == 2:
        run.start()
        assert [(r["participants"], r["roster"]) for r in run.rounds()] == [(4, 4), (4, 4)]
        return
    with pytest.raises(FaultToleranceExceeded, match=r"only 1 of them can check the model .* 2 must vouch"):
        run.start()
    assert [r["outcome"] for r in run.rounds()] == ["committed"]
    assert trained(run) == [1, 0, 0]
    assert not [f for s, n, f, _ in run.transport.log if s == Stage.OPEN and RoundOpen.decode(f[BODY]).round == 1]
    for number in list(gone)[:1]:
        run.transport.members[number] = gone[number]
    run.resume()
    assert [r["outcome"] for r in run.rounds()] == ["committed"] * 2
    assert trained(run) == [2, 1, 1, 2]


@pytest.mark.parametrize("dies", [True, False])
def test_those_who_took_the_model_in_a_burnt_round_vouch_for_it(tmp_path: Path, dies: bool) -> None:
    """Three of the four that were in the last sum leave; a newcomer of the burnt round holds its model, too.

    Only the folder tells that to a coordinator that died, or to one that did not get the newcomer's update.
    """
    numbers = "federation.participants=7 federation.min_participants=3 secagg.min_survivors=3 diloco.rounds=3"
    run = federation(tmp_path, f"{numbers} federation.join_timeout_s=4")
    first, second = ({number: run.transport.members.pop(number)} for number in (104, 105))
    del run.transport.members[106]  # its place lets a newcomer in while those who left still have theirs

    def happen(name: str, fields: dict[str, Any]) -> None:
        if name == "asked" and dies and len(run.rounds()) == 1:
            raise Killed
        if name == "round" and fields["round"] == 0:
            run.transport.members.update(first)
        if name == "round" and fields["round"] == 1:
            for number in (101, 102, 103):
                del run.transport.members[number]
            run.transport.members.update(second)

    def after(stage: str, node: int, reply: Reply) -> Reply | None:
        lost = stage == Stage.UNMASK or (stage == Stage.TRAIN and node in first)
        return None if lost and not dies and len(run.rounds()) == 1 else reply

    run.on_event, run.transport.after = happen, after
    if dies:
        with pytest.raises(Killed):
            run.start()
        run.resume()
    else:
        run.start()
    ends = [(r["outcome"], r["participants"]) for r in run.rounds()]
    assert ends == [("committed", 4), ("burnt", 0), ("committed", 3)]


def test_one_that_the_model_did_not_reach_costs_a_void_attempt_and_no_round(tmp_path: Path) -> None:
    numbers = "federation.participants=5 federation.min_participants=3 secagg.min_survivors=3 diloco.rounds=3"
    run = federation(tmp_path, f"{numbers} federation.join_timeout_s=4")
    late = {104: run.transport.members.pop(104)}

    def happen(name: str, fields: dict[str, Any]) -> None:
        if name == "round":
            run.transport.members.update(late)
        if name == "asked" and len(run.rounds()) == 1:
            raise Killed

    run.on_event = happen
    edit(run, Stage.TRAIN, lambda node, fields: node not in late and None)
    with pytest.raises(Killed):
        run.start()
    run.on_event = lambda name, fields: None
    for number in (101, 102, 103):
        del run.transport.members[number]
    site = Site.create(run.sites / "site-200", simulated_policy(run.config))
    run.transport.members[200] = Node(site, 200)
    for _ in range(2):
        with pytest.raises(FaultToleranceExceeded, match="only 1 of them can check"):
            run.resume()
        assert [r["outcome"] for r in run.rounds()] == ["committed", "burnt"]


@pytest.mark.parametrize("what", ["theta", "momentum", "size", "nothing"])
def test_a_newcomer_is_not_given_another_model(tmp_path: Path, what: str) -> None:
    run = federation(tmp_path, "diloco.rounds=3")
    given = []

    def lie(node: int, fields: dict[str, Any]) -> Any:
        if VECTOR in fields:
            given.append(node)
            whole = fields[VECTOR].copy()
            if what == "size":
                fields[VECTOR] = whole[:-1]
            elif what == "nothing":
                del fields[VECTOR]
            else:
                whole[0 if what == "theta" else -1] ^= 1
                fields[VECTOR] = whole

    def before(at: str, node: int, fields: Fields) -> Any:
        if at == Stage.OPEN and node == NODE and len(run.rounds()) == 1:
            return False
        altered = dict(fields)
        if at == Stage.TRAIN:
            lie(node, altered)
        return altered

    run.transport.before = before
    run.start()
    assert given == [NODE]
    assert trained(run) == [3, 1, 3, 3]


def test_a_site_that_lost_its_models_takes_the_others_word(tmp_path: Path) -> None:
    run, lost = federation(tmp_path, "diloco.rounds=4"), run_once()

    def lose(name: str, fields: dict[str, Any]) -> None:
        if name == "round" and fields["round"] == 1 and lost():
            path = next((run.transport.members[NODE].site.folder / "sums").glob("*.state"))
            path.write_bytes(path.read_bytes()[:-8] + b"damaged!")

    run.on_event = lose
    run.start()
    assert [r["participants"] for r in run.rounds()] == [4] * 4
    assert "chain_damaged" in events(run.transport.members[NODE])
    assert events(run.transport.members[NODE]).count("sum_verified") == 3


def test_one_that_signed_a_void_attempt_and_missed_the_next_accuses_nobody(tmp_path: Path) -> None:
    """It was shown survivors, itself among them, whose sum never was opened; another attempt gave the round's sum."""
    run = federation(tmp_path, "diloco.rounds=3 secagg.consistency=true")
    silenced: list[int] = []

    def after(stage: str, node: int, reply: Reply) -> Reply | None:
        if stage == Stage.AGREE and node > NODE and len(silenced) < 2:  # two of four signed: the attempt is void
            silenced.append(node)
            return None
        return reply

    def before(stage: str, node: int, fields: Fields) -> Any:
        return not (stage == Stage.TRAIN and node == NODE and len(silenced) == 2 and not run.rounds()) and None

    run.transport.before, run.transport.after = before, after
    run.start()
    assert [(r["outcome"], r["attempt"], r["participants"]) for r in run.rounds()] == [
        ("committed", 2, 3),
        ("committed", 1, 4),
        ("committed", 1, 4),
    ]
    assert not causes(run)
    assert events(run.transport.members[NODE]).count("sum_verified") == 2


def test_one_that_lost_its_models_in_a_burnt_round_accuses_nobody(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=3")

    def lose(name: str, fields: dict[str, Any]) -> None:
        if name == "asked" and len(run.rounds()) == 1:
            next((run.transport.members[NODE].site.folder / "sums").glob("*.state")).unlink()

    def after(stage: str, node: int, reply: Reply) -> Reply | None:
        return None if stage == Stage.UNMASK and len(run.rounds()) == 1 else reply

    run.on_event, run.transport.after = lose, after
    run.start()
    assert [(r["outcome"], r["participants"]) for r in run.rounds()] == [
        ("committed", 4),
        ("burnt", 0),
        ("committed", 4),
    ]
    assert not causes(run)


def test_a_session_of_a_round_that_ended_brings_no_older_model_back(tmp_path: Path) -> None:
    """Node 101 dealt shares in round 1 and never trained for it. Its Flower state of then comes back in round 2."""
    run = federation(tmp_path, "diloco.rounds=3")
    kept: dict[str, Any] = {}
    seen: list[Any] = []

    def head() -> bytes | None:
        assert run.folder is not None
        return run.transport.members[NODE].site.chain_head(run.folder.federation_id)

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage != Stage.TRAIN or node != NODE:
            return None
        if len(run.rounds()) == 1:
            assert run.folder is not None
            old = run.folder.load_checkpoint(1)
            theta = np.concatenate([old.parameters[p.name].reshape(-1) for p in run.task.layout])
            kept.update(memory=dict(run.transport.members[NODE].memory))
            kept.update(fields={**fields, VECTOR: pack_state(theta, old.momentum)})
            return False
        if len(run.rounds()) == 2:
            run.transport.deliver(Stage.TRAIN, NODE, fields)
            memory, current = run.transport.members[NODE].memory, head()
            memory.clear()
            memory.update(kept["memory"])
            reply = run.transport.deliver(Stage.TRAIN, NODE, kept["fields"])
            seen.extend((reply.refusal, head() == current))
            return False
        return None

    run.transport.before = before
    run.start()
    assert [r["participants"] for r in run.rounds()] == [4, 3, 3]
    assert seen == [Refusal.STALE, True]


def test_the_key_of_a_sum_that_is_never_shown_is_forgotten_in_the_end(tmp_path: Path) -> None:
    """It is in the sum of round 0, and away until the federation has ended: what it is sent then is of round 2."""
    run = federation(tmp_path, "diloco.rounds=3")

    def before(stage: str, node: int, fields: Fields) -> Any:
        return False if node == NODE and run.rounds() and stage != Stage.CLOSE else None

    run.transport.before = before
    run.start()
    assert [r["participants"] for r in run.rounds()] == [4, 3, 3]
    assert ".pending" not in sums(run.transport.members[NODE])
    assert ".unverified" in models(run.transport.members[NODE])[0].name


def run_once() -> Callable[[], bool]:
    done: list[int] = []
    return lambda: not done and not done.append(1)  # type: ignore[func-returns-value]


def test_a_member_that_lies_about_its_tag_can_only_stop_the_federation(tmp_path: Path) -> None:
    run, once = federation(tmp_path), run_once()

    def after(stage: str, node: int, reply: Reply) -> Reply:
        if stage != Stage.TRAIN or node != NODE or not once():
            return reply
        site, body = run.transport.members[NODE].site, reply.body
        head = 32 + secagg_wire.HEADER_BYTES
        t1, root = body[34:head], body[head : head + 32]
        other = (int.from_bytes(body[head + 32 : head + 40], "little") + 1) % PRIME
        raw = other.to_bytes(8, "little")
        bound = hashlib.sha256(body[:32]).digest()
        statement = signing.statement(secagg_wire.Stage.MASKED, t1, site.identity, b"\x0f", root, raw, bound)
        return dataclasses.replace(reply, body=body[: head + 32] + raw + site.sign(statement))

    run.transport.after = after
    silent_after(run, run.start)
    assert not [e for e in run.events if e[0] == "excluded"]
    assert trained(run) == [1] * 4
    assert set(causes(run)) == {"sum_forged"}


# ---------------------------------------------------------------- policy, keys that are refused


def test_a_site_can_insist(tmp_path: Path) -> None:
    plain = Federation(tmp_path / "a", "diloco.rounds=1")
    plain.start()
    opened = next(f[BODY] for s, _, f, _ in plain.transport.log if s == Stage.OPEN)
    policy = Policy(max_epsilon_local=100.0, require_verify_sum=True, allow_replay=True)
    assert "require_verify_sum" in [v.fields["rule"] for v in policy.violations(RoundOpen.decode(opened))]


def test_a_garbage_roster_does_not_use_the_one_dealing_up(tmp_path: Path) -> None:
    """Keys that are refused must not count as a dealing of shares, or a single bad message would cost the round."""
    run, tried = Federation(tmp_path, "diloco.rounds=1"), []

    def before(stage: str, node: int, fields: Fields) -> Any:
        if stage == Stage.SHARE and node == NODE and not tried:
            good = fields[BODY]
            for bad in (b"garbage", good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
                tried.append(run.transport.deliver(Stage.SHARE, NODE, {BODY: bad}).refusal)
        return None

    run.transport.before = before
    run.start()
    assert tried == [Refusal.PROTOCOL] * 3
    assert [r["participants"] for r in run.rounds()] == [4]


# ---------------------------------------------------------------- the pure parts


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("size", [1, 77, 3 * (1 << 16) + 5])
def test_a_packed_sum_and_its_step_are_the_coordinators(bits: int, size: int) -> None:
    rng, ring = np.random.default_rng(bits + size), RingParams(bits, 4, 8, size)
    top = 2 ** (bits - 1)
    total = rng.integers(-top, top, size)
    total[0] = -top
    packed = pack_sum(total, ring)
    assert packed.nbytes == bits // 8 * size
    read = sum_reader(packed, ring)
    assert np.array_equal(read(slice(0, size)), total)
    assert np.array_equal(read(slice(size // 3, size)), total[size // 3 :])
    theta, momentum = rng.normal(size=size).astype(np.float32), rng.normal(size=size)
    numbers = (8, 4, 0.7, 0.9)
    expected = checked_step(theta, momentum, total, *numbers, round_index=0, sample_rate=0.3)
    found = advance(theta, momentum, read, *numbers, sample_rate=0.3)
    assert all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in zip(expected, found, strict=True))
    again = unpack_state(pack_state(theta, momentum), size)
    assert [x.tobytes() for x in again] == [theta.tobytes(), momentum.tobytes()]


def test_a_damaged_stored_sum_is_noticed(tmp_path: Path) -> None:
    run = federation(tmp_path, "diloco.rounds=1")
    run.start()
    stored = run.folder.last_sum()  # type: ignore[union-attr]
    assert stored is not None
    assert stored.attempt == 1
    others = [dataclasses.replace(stored, tag=stored.tag + 1), dataclasses.replace(stored, attempt=2)]
    others.append(StoredSum(stored.total + 1, stored.survivors, stored.attempt, stored.tag))
    assert len({s.mark() for s in [stored, *others]}) == 4
