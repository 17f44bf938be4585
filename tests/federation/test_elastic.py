"""Who comes late, leaves, comes back or is replaced; and what a federation does that has too few."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import ArtifactError, FaultToleranceExceeded, RunStopped, SecureAggregationError
from lensemble_flwr.federation.coordinator import SILENT_CLOSE_S
from lensemble_flwr.federation.policy import save_policy, simulated_policy
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import theta_hash
from lensemble_flwr.federation.wire import Refusal, Stage
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.spending import Charge, Spending
from tests.federation.harness import Federation, Killed, Node

NODE = 103


class Elastic(Federation):
    """Four sites, three of which are enough; a script of who is connected when each round opens."""

    def __init__(self, tmp: Path, overrides: str = "") -> None:
        super().__init__(
            tmp, "federation.min_participants=3 secagg.min_survivors=3 federation.timeout_s=5 " + overrides
        )
        self.away: dict[int, Node] = {}
        self.at_end_of: dict[int, Any] = {}
        self.on_event = lambda name, fields: (
            self.at_end_of.get(fields["round"], lambda: None)() if name == "round" else None
        )

    def leave(self, *nodes: int) -> None:
        for node in nodes:
            self.away[node] = self.transport.members.pop(node)

    def come(self, *nodes: int, memory: bool = True) -> None:
        for node in nodes:
            member = self.away.pop(node)
            self.transport.members[node] = member if memory else dataclasses.replace(member, memory={})

    def in_sum(self) -> list[tuple[str, int, int]]:
        return [(r["outcome"], r["participants"], r["roster"]) for r in self.rounds()]

    def rounds_of(self, node: int) -> list[int]:
        assert self.folder is not None
        site = (self.transport.members.get(node) or self.away[node]).site
        with site.ledger() as ledger:
            return list(ledger.rounds(self.folder.federation_id))


def test_a_late_joiner_takes_part_from_the_next_round_on(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=3")
    federation.leave(NODE)
    federation.at_end_of = {0: lambda: federation.come(NODE)}
    final = federation.start()
    assert federation.in_sum() == [("committed", 3, 3), ("committed", 4, 4), ("committed", 4, 4)]
    assert federation.rounds_of(NODE) == [1, 2]
    (model,) = (federation.transport.members[NODE].site.folder / "models").iterdir()
    assert model.read_bytes() == final.astype("<f4").tobytes()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_site_behind_by_three_rounds_rejoins_at_the_current_model(tmp_path: Path, restarted: bool) -> None:
    """It is in round 0, away for 1 to 3, and trains in round 4 on the model that round 3 ended with, by hash."""
    federation = Elastic(tmp_path, "diloco.rounds=6")
    federation.at_end_of = {
        0: lambda: federation.leave(NODE),
        3: lambda: federation.come(NODE, memory=not restarted),
    }
    federation.start()
    assert federation.in_sum() == [("committed", 4, 4), *[("committed", 3, 3)] * 3, *[("committed", 4, 4)] * 2]
    assert federation.rounds_of(NODE) == [0, 4, 5]  # it paid for nothing that it was not in
    sent = [f for s, n, f, _ in federation.transport.log if s == Stage.TRAIN and n == NODE]
    layout = federation.task.layout
    hashes = [theta_hash(layout, f["vector"]).hex() for f in sent]
    ends = [r["theta_hash"] for r in federation.rounds()]
    assert hashes[1:] == [ends[3], ends[4]]
    with federation.transport.members[NODE].site.ledger() as ledger:
        fid = federation.folder.federation_id  # type: ignore[union-attr]
        assert {ledger.state(fid, index).state for index in (0, 4, 5)} == {"closed"}


@pytest.mark.parametrize("told", ["another model", "an older round", "nothing"])
def test_one_that_was_away_takes_no_model_that_does_not_follow(tmp_path: Path, told: str) -> None:
    """The model must be that of the RoundOpen, and the RoundOpen must follow from the round before it."""
    federation = Elastic(tmp_path, "diloco.rounds=5")
    closes: list[bytes] = []

    def before(stage: str, node: int, fields: Any) -> Any:
        if stage == Stage.OPEN and node == 100:
            closes.append(fields["closes"])
        if node != NODE or len(federation.rounds()) != 4:
            return None
        if stage == Stage.OPEN and told == "an older round":
            return {**fields, "closes": closes[-2]}
        if stage == Stage.OPEN and told == "nothing":
            return {**fields, "closes": b""}
        if stage == Stage.TRAIN and told == "another model":
            return {**fields, "vector": fields["vector"] + np.float32(1)}
        return None

    federation.transport.before = before
    federation.at_end_of = {0: lambda: federation.leave(NODE), 3: lambda: federation.come(NODE)}
    federation.start()
    answers = [r.refusal for s, n, _, r in federation.transport.log if n == NODE and r is not None and r.refusal]
    assert answers == [Refusal.HASH_MISMATCH]
    assert federation.rounds_of(NODE) == [0]
    assert federation.in_sum()[-1] == ("committed", 3, 4)


def test_who_left_is_not_waited_for_and_does_not_count(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=3")
    federation.at_end_of = {0: lambda: federation.leave(NODE)}
    federation.start()
    assert federation.in_sum() == [("committed", 4, 4), *[("committed", 3, 3)] * 2]
    asked = [n for s, n, f, _ in federation.transport.log if s == Stage.OPEN and RoundOpen.decode(f["body"]).round]
    assert NODE not in asked


def test_two_take_turns(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=4")
    federation.at_end_of = {
        0: lambda: federation.leave(NODE),
        1: lambda: (federation.come(NODE), federation.leave(100)),
        2: lambda: (federation.come(100, memory=False), federation.leave(101)),
    }
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [4, 3, 3, 3]
    assert [federation.rounds_of(n) for n in (100, 101, NODE)] == [[0, 1, 3], [0, 1, 2], [0, 2, 3]]


def newcomer(federation: Elastic, node: int = 200) -> None:
    site = Site.create(federation.sites / f"site-{node}", simulated_policy(federation.config))
    federation.transport.members[node] = Node(site, node)


def test_a_newcomer_takes_the_place_of_one_that_left_for_ever(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=12 privacy.target_epsilon=50")

    def replace() -> None:
        federation.leave(NODE)
        newcomer(federation)

    federation.at_end_of = {0: replace, 9: lambda: federation.come(NODE)}
    federation.start()
    rosters = [r["roster"] for r in federation.rounds()]
    assert rosters[:2] == [4, 3]  # its place is free once a round was opened without it
    assert rosters[8:] == [4] * 4
    assert federation.rounds_of(200)[-4:] == [8, 9, 10, 11]
    assert federation.rounds_of(NODE) == [0]  # back too late: all places are taken
    assert all(r["outcome"] == "committed" for r in federation.rounds())


def test_one_whose_budget_is_spent_is_not_asked_again_when_it_comes_back(tmp_path: Path) -> None:
    """Nor when a newcomer had its place meanwhile: the mark is its identity's, not its place's."""
    base = "privacy=local privacy.noise_multiplier=4 privacy.target_epsilon=50 privacy.on_exhausted=leave"
    federation = Elastic(tmp_path, f"{base} diloco.rounds=10")
    site = federation.transport.members[NODE].site
    once = gaussian.epsilon(math.sqrt(1.5) / 4, 1e-5)
    save_policy(site.folder / "policy.json", dataclasses.replace(site.policy, max_epsilon_local=once))

    def replace() -> None:
        federation.leave(NODE)
        newcomer(federation)

    federation.at_end_of = {
        2: replace,
        3: lambda: (federation.leave(200), federation.come(NODE, memory=False)),
    }
    federation.start()
    asked = [
        RoundOpen.decode(f["body"]).round for s, n, f, _ in federation.transport.log if (s, n) == (Stage.OPEN, NODE)
    ]
    assert asked == [0, 1]  # it took part once and refused once
    assert [r["roster"] for r in federation.rounds()] == [4, 4, 3, 4, *[3] * 6]
    joined = [r for s, n, _, r in federation.transport.log if (s, n) == (Stage.JOIN, NODE)]
    assert len(joined) > 2  # it asked for its place until it had it again: it is sent the final model
    assert list((site.folder / "models").iterdir())


def test_a_lost_quorum_waits_then_ends_and_resume_goes_on(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=3 federation.join_timeout_s=4")
    federation.at_end_of = {0: lambda: federation.leave(102, NODE)}
    with pytest.raises(FaultToleranceExceeded, match="2 participants are there for round 1"):
        federation.start()
    assert federation.in_sum() == [("committed", 4, 4)]
    waited = [f for n, f in federation.events if n == "progress" and f["what"] == "waiting for participants"]
    assert waited
    assert waited[-1] == {"what": "waiting for participants", "done": 2, "total": 3}
    assert all(federation.rounds_of(node) == [0] for node in (100, 101, 102, NODE))  # waiting cost nobody anything
    federation.come(102, NODE, memory=False)
    federation.resume()
    assert federation.in_sum() == [("committed", 4, 4)] * 3


def test_a_quorum_that_comes_back_in_time_loses_nothing(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=2 federation.join_timeout_s=50")
    federation.at_end_of = {0: lambda: federation.leave(102, NODE)}
    inner = federation.on_event

    def event(name: str, fields: dict[str, Any]) -> None:
        inner(name, fields)
        if name == "progress" and fields["what"] == "waiting for participants" and federation.away:
            federation.come(NODE, memory=False)

    federation.on_event = event
    federation.away.clear()
    federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 2


def test_a_quorum_lost_in_a_round_leaves_it_open_and_resume_sends_the_same_updates(tmp_path: Path) -> None:
    """Two go after they have trained: nobody was asked to reveal, so the round is void, not burnt."""
    federation = Elastic(tmp_path, "diloco.rounds=2 federation.join_timeout_s=4")
    trained: list[int] = []

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage != Stage.TRAIN or not federation.rounds():
            return reply
        trained.append(node)
        if len(trained) == 4:
            federation.leave(102, NODE)
        return reply if node < 102 else None

    federation.transport.after = after
    with pytest.raises(FaultToleranceExceeded, match="2 participants are there for round 1"):
        federation.start()
    assert federation.in_sum() == [("committed", 4, 4)]
    assert all(federation.rounds_of(node) == [0, 1] for node in (100, 101, 102, NODE))
    federation.come(102, NODE, memory=False)
    federation.transport.after = lambda stage, node, reply: reply
    federation.resume()
    assert federation.in_sum() == [("committed", 4, 4)] * 2
    assert all(federation.rounds_of(node) == [0, 1] for node in (100, 101, 102, NODE))  # paid once


def test_an_open_round_whose_roster_is_gone_for_ever_is_burnt_and_the_run_goes_on(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=3 federation.join_timeout_s=4")
    killed: list[int] = []

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage == Stage.TRAIN and federation.rounds() and not killed:
            killed.append(node)
            raise Killed
        return reply

    federation.transport.after = after
    with pytest.raises(Killed):
        federation.start()
    federation.leave(102, NODE)
    newcomer(federation, 201)
    federation.resume()
    assert [(o, r) for o, _, r in federation.in_sum()] == [("committed", 4), ("burnt", 4), ("committed", 3)]
    assert "left for good" in federation.rounds()[1]["cause"]


@pytest.mark.parametrize("stage", [Stage.OPEN, Stage.SHARE, Stage.TRAIN])
def test_a_stop_in_the_middle_of_a_round_loses_nothing(tmp_path: Path, stage: str) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=2")
    asked: list[bool] = []
    federation.transport.after = lambda s, n, r: (asked.append(s == stage and bool(federation.rounds())), r)[1]
    with pytest.raises(RunStopped, match="asked to stop"):
        federation.start(stop_asked=lambda: any(asked))
    assert federation.in_sum() == [("committed", 4, 4)]
    federation.transport.after = lambda s, n, r: r
    federation.resume()
    assert federation.in_sum() == [("committed", 4, 4)] * 2
    assert federation.ledger_rounds() == [2] * 4


def test_a_stop_after_the_question_waits_for_the_end_of_the_round(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=3")
    with pytest.raises(RunStopped):
        federation.start(stop_asked=lambda: any(name == "asked" for name, _ in federation.events))
    assert federation.in_sum() == [("committed", 4, 4)]


def closes(federation: Elastic, stage: str = Stage.CLOSE) -> list[tuple[set[int], float]]:
    """(nodes, time-out) of every exchange of this kind, from now on."""
    found: list[tuple[set[int], float]] = []
    inner = federation.transport.exchange

    def exchange(kind: str, requests: Any, timeout: float, max_bytes: int = 0) -> Any:
        if kind == stage:
            found.append((set(requests), timeout))
        return inner(kind, requests, timeout, max_bytes)

    federation.transport.exchange = exchange  # type: ignore[method-assign]
    return found


def test_an_end_does_not_wait_again_for_those_that_were_silent(tmp_path: Path) -> None:
    """One is silent until its rounds are void: the close waits the full time for the others only, and loses nothing."""
    four = "federation.min_participants=4 secagg.min_survivors=4"
    federation = Elastic(tmp_path, f"diloco.rounds=2 federation.timeout_s=600 {four}")
    asked = closes(federation)
    federation.transport.before = lambda stage, node, fields: not (node == NODE and federation.rounds()) and None
    with pytest.raises(SecureAggregationError, match="the last: 3 of 4 left after keys"):
        federation.start()
    assert asked == [({100, 101, 102}, 600.0), ({NODE}, SILENT_CLOSE_S)]
    assert federation.events[-1] == ("closed", {"sites": 3, "of": 4})
    assert states(federation) == {100: ["closed"], 101: ["closed"], 102: ["closed"], NODE: ["encoded"]}
    federation.transport.before = lambda stage, node, fields: None
    federation.resume()
    assert states(federation) == {node: ["closed"] for node in (100, 101, 102, NODE)}
    for node in federation.transport.members.values():
        (model,) = (node.site.folder / "models").iterdir()
        assert theta_hash(federation.task.layout, np.fromfile(model, "<f4")).hex() == last_hash(federation)


def test_an_end_asks_nobody_that_is_not_connected(tmp_path: Path) -> None:
    """Two go after they have trained; the round stays open at all four, and the resumed run closes it at all four."""
    federation = Elastic(tmp_path, "diloco.rounds=2 federation.join_timeout_s=4")
    asked, trained = closes(federation), []

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage == Stage.TRAIN and federation.rounds():
            trained.append(node)
            if len(trained) == 4:
                federation.leave(102, NODE)
        return reply if node < 102 or not trained else None

    federation.transport.after = after
    with pytest.raises(FaultToleranceExceeded):
        federation.start()
    assert asked == [({100, 101}, 5.0)]
    federation.come(102, NODE, memory=False)
    federation.transport.after = lambda stage, node, reply: reply
    federation.resume()
    assert asked[1:] == [({100, 101, 102, NODE}, 5.0)]
    assert states(federation) == {node: ["closed", "closed"] for node in (100, 101, 102, NODE)}


def test_one_that_missed_the_end_of_a_completed_run_is_told_later(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=2 federation.join_timeout_s=4")
    federation.transport.before = lambda stage, node, fields: not (node == NODE and stage == Stage.CLOSE) and None
    federation.start()
    assert states(federation)[NODE] == ["closed", "encoded"]
    federation.transport.before = lambda stage, node, fields: None
    federation.leave(100, 101)  # it takes no quorum
    federation.resume()
    assert federation.in_sum() == [("committed", 4, 4)] * 2
    assert states(federation)[NODE] == ["closed", "closed"]
    (model,) = (federation.transport.members[NODE].site.folder / "models").iterdir()
    assert theta_hash(federation.task.layout, np.fromfile(model, "<f4")).hex() == last_hash(federation)


def states(federation: Elastic) -> dict[int, list[str | None]]:
    """What each site's ledger says of its rounds."""
    assert federation.folder is not None
    fid, found = federation.folder.federation_id, {}
    for number, node in sorted(federation.transport.members.items()):
        with node.site.ledger() as ledger:
            found[number] = [ledger.state(fid, index).state for index in sorted(ledger.rounds(fid))]
    return found


def last_hash(federation: Elastic) -> str:
    return str(federation.rounds()[-1]["theta_hash"])


def test_the_record_adds_up_what_each_round_cost(tmp_path: Path) -> None:
    """Who was in all rounds has the same sum in its ledger, and a round that cost more counts as what it cost."""
    federation = Elastic(tmp_path, "diloco.rounds=3")
    federation.at_end_of = {0: lambda: federation.leave(NODE), 1: lambda: federation.come(NODE)}
    federation.start()
    assert [roster for _, _, roster in federation.in_sum()] == [4, 3, 4]
    records, delta = federation.rounds(), federation.config.privacy.target_delta
    with federation.transport.members[100].site.ledger() as ledger:
        for view in ("local", "central"):
            assert records[-1][f"epsilon_{view}"] == ledger.spent(view, delta)

    dearer = Elastic(tmp_path / "dearer", "diloco.rounds=2")

    def raise_price() -> None:
        assert dearer.folder is not None
        path = dearer.folder.path / "rounds.jsonl"
        record = json.loads(path.read_text())
        record["charge"]["own_multiplier"] /= 3
        path.write_text(json.dumps(record) + "\n")

    dearer.at_end_of = {0: raise_price}
    dearer.start()
    first, last = dearer.rounds()
    both = Spending().plus(Charge.from_record(first["charge"])).plus(Charge.from_record(last["charge"]))
    assert last["epsilon_central"] == both.epsilon("central", delta)
    assert last["epsilon_central"] > 2 * dearer.config.privacy.target_epsilon


def test_rounds_that_an_earlier_release_recorded_count_like_the_present_one(tmp_path: Path) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=2")

    def forget() -> None:
        assert federation.folder is not None
        path = federation.folder.path / "rounds.jsonl"
        record = json.loads(path.read_text())
        del record["charge"]
        path.write_text(json.dumps(record) + "\n")

    federation.at_end_of = {0: forget}
    federation.start()
    target = federation.config.privacy.target_epsilon
    assert target * (1 - 1e-5) < federation.rounds()[-1]["epsilon_central"] <= target


@pytest.mark.parametrize("charge", [None, 3, {}, {"own_multiplier": -1}, {"own_multiplier": 1, "participation": 1}])
def test_a_record_with_a_damaged_charge_ends_the_run(tmp_path: Path, charge: Any) -> None:
    federation = Elastic(tmp_path, "diloco.rounds=2")

    def damage() -> None:
        assert federation.folder is not None
        path = federation.folder.path / "rounds.jsonl"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"charge": charge}) + "\n")

    federation.at_end_of = {0: damage}
    with pytest.raises(ArtifactError, match="no proper charge"):
        federation.start()
