"""One site in two federations at once, and two processes of one site in one round: the ledger is held only while it is
written, and still no reservation has two draws and no round two trainings that count."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lensemble_flwr.errors import LedgerError
from lensemble_flwr.federation import participant as participant_module
from lensemble_flwr.federation.participant import SiteParticipant
from lensemble_flwr.federation.plan import make_plan, round_open
from lensemble_flwr.federation.policy import save_policy
from lensemble_flwr.federation.records import Outcome, RoundClose
from lensemble_flwr.federation.task import Task, theta_hash
from lensemble_flwr.federation.wire import Refusal, Stage
from tests.federation.harness import Federation

NODE = 101


class Meanwhile:
    """A task during whose training something else happens, once."""

    def __init__(self, task: Task, act: Callable[[], Any]) -> None:
        self.task, self.act, self.calls = task, act, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def local_update(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            self.act()
        return self.task.local_update(*args, **kwargs)


def while_training(federation: Federation, act: Callable[[], Any], node: int = NODE) -> Meanwhile:
    task = Meanwhile(federation.task, act)
    federation.transport.members[node].task = cast(Task, task)
    return task


def allow(federation: Federation, epsilon: float) -> None:
    """A lifetime budget at every site."""
    for node in federation.transport.members.values():
        policy = dataclasses.replace(node.site.policy, max_epsilon_central=epsilon)
        save_policy(node.site.folder / "policy.json", policy)


def states(federation: Federation, node: int = NODE) -> dict[int, str | None]:
    assert federation.folder is not None
    fid = federation.folder.federation_id
    with federation.transport.members[node].site.ledger() as ledger:
        return {index: ledger.state(fid, index).state for index in ledger.rounds(fid)}


def test_another_federation_runs_while_a_site_trains(tmp_path: Path) -> None:
    """A whole second run goes through the same four sites while one of them trains for the first."""
    first = Federation(tmp_path / "a", "diloco.rounds=2", sites=tmp_path / "sites")
    second = Federation(tmp_path / "b", "diloco.rounds=3 seed=5", sites=tmp_path / "sites")
    allow(first, 100.0)
    while_training(first, second.start)
    first.start()
    assert [r["participants"] for r in second.rounds()] == [4, 4, 4]
    assert [r["participants"] for r in first.rounds()] == [4, 4]
    assert not [error for _, _, error in first.transport.errors + second.transport.errors]
    assert (first.ledger_rounds(), second.ledger_rounds()) == ([2] * 4, [3] * 4)
    assert set(states(first).values()) | set(states(second).values()) == {"closed"}


def test_what_another_federation_spent_meanwhile_counts(tmp_path: Path) -> None:
    """The lifetime budget is asked again under the lock: it fitted when the round opened, and fits no more."""
    probe = Federation(tmp_path / "p", "diloco.rounds=1")
    probe.start()
    with probe.transport.members[NODE].site.ledger() as ledger:
        one_round = ledger.spent("central", probe.config.privacy.target_delta)
    first = Federation(tmp_path / "a", "diloco.rounds=1", sites=tmp_path / "sites")
    second = Federation(tmp_path / "b", "diloco.rounds=1 seed=5", sites=tmp_path / "sites")
    allow(first, 100.0)
    site = first.transport.members[NODE].site
    policy = dataclasses.replace(site.policy, max_epsilon_central=1.2 * one_round)
    save_policy(site.folder / "policy.json", policy)
    while_training(first, second.start)
    first.start()
    assert second.rounds()[0]["participants"] == 4
    assert first.rounds()[0]["participants"] == 3
    refusals = [r.refusal for s, n, _, r in first.transport.log if s == Stage.TRAIN and n == NODE and r is not None]
    assert refusals == [Refusal.BUDGET]
    assert states(first) == {}
    assert not list((site.folder / "releases").iterdir())


def test_a_round_that_ended_while_a_site_trained_for_it_is_not_paid(tmp_path: Path) -> None:
    """The next one opened meanwhile: an update for the last one would cost budget and never be summed."""
    federation = Federation(tmp_path, "diloco.rounds=2")
    seen: list[Refusal | None] = []

    def go_on_without_it() -> None:
        assert federation.folder is not None
        config, task, fid = federation.config, federation.task, federation.folder.federation_id
        opened = federation.folder.opened(0)
        assert opened is not None
        theta = theta_hash(task.layout, task.initial())
        after = round_open(config, task, make_plan(config, 4, task.dimension), fid, 1, theta, opened.roster)
        close = RoundClose(fid, 0, Outcome.BURNT, opened.digest(), theta, bytes(32), ())
        request = {"body": after.encode(), "attempt": 1, "closes": close.encode()}
        memory = federation.transport.members[NODE].memory
        kept = dict(memory)
        seen.append(federation.transport.deliver(Stage.OPEN, NODE, request).refusal)
        memory.clear()
        memory.update(kept)  # Flower's other process has its own Context

    while_training(federation, go_on_without_it)
    federation.start()
    assert seen == [None]
    answers = [r.refusal for s, n, _, r in federation.transport.log if s == Stage.TRAIN and n == NODE and r is not None]
    assert answers[0] == Refusal.STALE
    assert 0 not in states(federation)


def test_two_attempts_at_once_train_once_and_draw_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt's message still trains when the second's comes: both send the one update, under other masks."""
    federation = Federation(tmp_path, "diloco.rounds=1")
    draws: list[int] = []
    real = participant_module.release_update
    monkeypatch.setattr(participant_module, "release_update", lambda *a: draws.append(1) or real(*a))
    begun, go_on = threading.Event(), threading.Event()
    task = while_training(federation, lambda: (begun.set(), go_on.wait(30)))
    held: list[tuple[dict[str, bytes], Any]] = []
    outcomes: dict[int, Any] = {}

    def train(number: int, memory: dict[str, bytes], fields: Any) -> None:
        member = federation.transport.members[NODE]
        inner = federation.transport.participant(NODE)
        own = SiteParticipant(member.site, inner.config, inner.task, member.partition, memory, inner.runtime)
        try:
            outcomes[number] = own.masked_update(fields["vector"], fields["envelopes"])
        except Exception as error:
            outcomes[number] = error

    def before(stage: str, node: int, fields: Any) -> Any:
        if stage != Stage.TRAIN or node not in (NODE, 102) or len(held) == 2:
            return None
        if node == NODE:
            held.append((dict(federation.transport.members[NODE].memory), fields))
        if len(held) < 2:
            return False  # two are missing: the attempt is void, and there will be another
        threads = [threading.Thread(target=train, args=(i, *held[i])) for i in range(2)]
        threads[0].start()
        assert begun.wait(30)
        threads[1].start()
        threads[1].join(0.3)
        assert 1 not in outcomes  # it waits
        go_on.set()
        for thread in threads:
            thread.join(30)
        return False

    federation.transport.before = before
    federation.start()
    assert task.calls == 1
    assert len(draws) == 4
    vectors = [outcomes[i].vector.tobytes() for i in range(2)]
    assert vectors[0] != vectors[1]
    assert states(federation) == {0: "closed"}
    # The same session a third time: its masks are used up.
    train(2, *held[0])
    assert isinstance(outcomes[2], Exception)


def test_whoever_trains_holds_its_federation_and_no_other(tmp_path: Path) -> None:
    site = Federation(tmp_path).transport.members[NODE].site
    with site.training(b"a" * 32, 1.0):
        with site.training(b"b" * 32, 0.0), site.ledger():
            pass
        with pytest.raises(LedgerError) as error, site.training(b"a" * 32, 0.1):
            pass
        assert error.value.fields["busy"]
    with site.training(b"a" * 32, 0.0):
        pass
