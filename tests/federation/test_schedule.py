"""Step sizes over a run: torch's schedulers as the oracle, the same place for everybody, nothing changed by default."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.config import Config, load_config
from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.federation.linear_task import LinearTask
from lensemble_flwr.federation.plan import make_plan, round_open
from lensemble_flwr.federation.schedule import Schedule, place
from lensemble_flwr.federation.tasks import build_task
from tests.federation import test_torch_task
from tests.federation.harness import Federation, Killed
from tests.federation.test_resume import crash_and_resume, kill_at

COSINE = "inner.schedule=cosine inner.warmup_steps=7 inner.final_lr_fraction=0.1 diloco.rounds=6 diloco.inner_steps=5"
LINEAR = "experiment=linear federation.participants=3 federation.min_participants=3 secagg.min_survivors=3"
MASKED = f"{LINEAR} privacy.enabled=false secagg.range=8 inner.lr=0.05"


def by_torch(schedule: Schedule, lr: float) -> list[float]:
    """Step sizes that torch's schedulers give an optimizer."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    rise = schedule.warmup
    falling: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, schedule.total - rise, lr * schedule.final)
    if schedule.kind == "constant":
        falling = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    if rise:
        rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (rise + 1), 1.0, rise)
        falling = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [rise])
    found = []
    for _ in range(schedule.total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR calls its parts in a way that they warn of
            falling.step()
    return found


@settings(deadline=None)  # torch builds its first optimizer for seconds
@given(
    kind=st.sampled_from(["constant", "cosine"]),
    total=st.integers(1, 60),
    rise=st.integers(0, 59),
    final=st.floats(0, 1),
    cut=st.integers(1, 20),
)
def test_torchs_schedulers_give_the_same_step_sizes(kind: str, total: int, rise: int, final: float, cut: int) -> None:
    schedule = Schedule(kind, min(rise, total - 1), final, total)
    whole = tuple(map(schedule.factor, range(total)))
    np.testing.assert_allclose(0.3 * np.array(whole), by_torch(schedule, 0.3), rtol=1e-9, atol=1e-12)
    pieces = [schedule.since(first)(i) for first in range(0, total, cut) for i in range(min(cut, total - first))]
    assert tuple(pieces) == whole  # rounds of any length make one run
    assert 0 <= min(whole) <= max(whole) <= 1
    assert schedule.factor(total) == schedule.factor(10 * total)  # where it ended, it stays


def test_constant_is_exactly_one_and_the_default() -> None:
    config = load_config("experiment=linear")
    assert not config.inner.scheduled
    assert {Schedule.of(config).factor(step) for step in range(200)} == {1.0}


def test_the_schedule_is_as_long_as_the_run() -> None:
    schedule = Schedule.of(load_config(f"experiment=linear {COSINE}"))
    assert schedule == Schedule("cosine", 7, 0.1, 30)
    assert (schedule.factor(6), schedule.factor(7)) == (7 / 8, 1.0)
    assert schedule.factor(30) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.schedule=linear", "constant, cosine"),
        ("inner.warmup_steps=-1", "inner.warmup_steps must be >= 0"),
        ("inner.warmup_steps=100", "leaves nothing of the 100 local steps"),
        ("inner.final_lr_fraction=1.01", r"must lie in \[0, 1\]"),
        ("inner.final_lr_fraction=-0.1", r"must lie in \[0, 1\]"),
        ("inner.warmup_steps=2.5", "must be a whole number"),
    ],
)
def test_bad_values(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(f"experiment=linear diloco.rounds=10 diloco.inner_steps=10 {override}")


def test_a_round_goes_on_where_the_run_is_however_long_it_is() -> None:
    many = Schedule("cosine", 7, 0.1, 10**9)
    # As it goes to the processes of inner.parallel.
    factor = pickle.loads(pickle.dumps(many.since(5)))  # noqa: S301
    assert (factor(0), factor(2), factor(10**9 - 6)) == (6 / 8, 1.0, pytest.approx(0.1))
    assert [factor(i) for i in (1, 2, 3)] == [many.factor(i) for i in (6, 7, 8)]


def test_no_torch_is_needed_for_it() -> None:
    code = "import sys, lensemble_flwr.federation.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------ tasks


def test_rounds_of_the_linear_task_are_one_falling_run() -> None:
    config = load_config(f"{MASKED} {COSINE}")
    task, theta = LinearTask(config), LinearTask(config).initial()
    for step in range(6):
        theta = task.local_update(theta, 1, None, steps=5, sketch_seed=0, round_index=step).theta
    x, y = task._data("participant 1", 40)
    w = torch.zeros(17, dtype=torch.float64)
    for lr in by_torch(task.schedule, 0.05):
        w -= lr * torch.from_numpy(x).T @ (torch.from_numpy(x) @ w - torch.from_numpy(y)) / 40
    np.testing.assert_allclose(theta, w.numpy(), atol=1e-5)
    late = task.local_update(theta, 1, None, steps=5, sketch_seed=0, round_index=5).theta
    told = task.local_update(theta, 1, None, steps=5, sketch_seed=0, round_index=5, outer_step=0).theta
    assert np.abs(told - theta).sum() > np.abs(late - theta).sum()  # the place counts, not the round's number


class Headless(test_torch_task.Regression):
    """Its last layer stays at the site, with a step size of its own."""

    def federated(self, model: torch.nn.Module) -> list[str]:
        return ["hidden.weight", "hidden.bias"]


def test_rounds_of_an_own_model_are_one_falling_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is asked for exactly the step sizes of torch's scheduler, both groups of them."""
    sizes: list[list[float]] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        sizes.append([group["lr"] for group in self.param_groups])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    own = test_torch_task.task(f"{COSINE} inner.optimizer=adamw inner.head_lr=0.5", Headless)
    theta, state = own.initial(), None
    for index in range(6):
        result = test_torch_task.steps(own, theta, state, index=index)
        theta, state = result.theta, result.state
    wanted = np.array(by_torch(own.schedule, 1.0))
    np.testing.assert_allclose([s[0] for s in sizes], 0.05 * wanted, rtol=1e-9)
    np.testing.assert_allclose([s[1] for s in sizes], 0.5 * wanted, rtol=1e-9)


class Plain(LinearTask):
    """A task of one's own that knows no schedule."""

    def __init__(self, config: Config, data_dir: Path | None = None) -> None:
        super().__init__(config)

    def local_update(self, theta, partition, state, *, steps, sketch_seed, round_index):  # type: ignore[override]
        return super().local_update(theta, partition, state, steps=steps, sketch_seed=0, round_index=round_index)


@pytest.mark.parametrize("key", ["inner.schedule=cosine", "inner.warmup_steps=3"])
def test_a_task_that_knows_no_schedule_says_so(key: str) -> None:
    name = "task=tests.federation.test_schedule:Plain"
    build_task(load_config(f"experiment=linear {name}"), allowed=(name[5:],))
    with pytest.raises(ConfigError, match="knows no schedule"):
        build_task(load_config(f"experiment=linear {name} {key}"), allowed=(name[5:],))


# ------------------------------------------------------------------ federations


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """(round, outer step) of every local update."""
    seen: list[tuple[int, int | None]] = []
    update = LinearTask.local_update

    def spy(self: LinearTask, *args: Any, round_index: int, outer_step: int | None = None, **kwargs: Any) -> Any:
        seen.append((round_index, outer_step))
        return update(self, *args, round_index=round_index, outer_step=outer_step, **kwargs)

    monkeypatch.setattr(LinearTask, "local_update", spy)
    return seen


@pytest.mark.parametrize("verified", ["false", "true"])
def test_a_federation_descends_like_its_schedule(tmp_path: Path, places: list, verified: str) -> None:
    federation = Federation(tmp_path, f"{MASKED} {COSINE} secagg.verify_sum={verified}")
    found = federation.start()
    assert sorted(set(places)) == [(i, i) for i in range(6)]
    np.testing.assert_allclose(found, averaged(federation), atol=1e-5)


def averaged(federation: Federation) -> np.ndarray:
    """Plain averaging of rounds, each at its place."""
    task, theta = federation.task, federation.task.initial()
    for index in range(federation.config.diloco.rounds):
        local = [task.local_update(theta, i, None, steps=5, sketch_seed=0, round_index=index).theta for i in range(3)]
        theta = np.mean(local, axis=0, dtype=np.float64).astype(np.float32)
    return theta


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path, places: list) -> None:
    federation = Federation(tmp_path, f"{MASKED} {COSINE}")
    kill_at(federation, "round", 2)
    with pytest.raises(Killed):
        federation.start()
    assert sorted(set(places)) == [(i, i) for i in range(3)]
    federation.on_event = lambda name, fields: None
    found = federation.resume()
    assert sorted(set(places)) == [(i, i) for i in range(6)]
    np.testing.assert_allclose(found, averaged(federation), atol=1e-5)


@pytest.mark.parametrize("verified", ["false", "true"])
def test_a_burnt_round_does_not_move_it_on(tmp_path: Path, places: list, verified: str) -> None:
    overrides = f"{MASKED} {COSINE} diloco.rounds=4 secagg.verify_sum={verified}"
    federation, _ = crash_and_resume(tmp_path, "asked", overrides)
    assert [r["outcome"] for r in federation.rounds()] == ["committed", "burnt", "committed", "committed"]
    assert sorted(set(places)) == [(0, 0), (1, 1), (2, 1), (3, 2)]


def test_without_a_schedule_a_task_is_told_no_place(tmp_path: Path, places: list) -> None:
    Federation(tmp_path, f"{MASKED} diloco.rounds=2").start()
    assert sorted(set(places)) == [(0, None), (1, None)]


def test_a_round_cannot_follow_more_rounds_than_there_were() -> None:
    config = load_config(f"{MASKED} {COSINE}")
    task, roster = LinearTask(config), tuple(bytes([i]) * 32 for i in range(1, 4))
    plan = make_plan(config, 3, task.dimension)
    opened = round_open(config, task, plan, bytes(32), 3, bytes(32), roster, steps=2)
    assert place(config, opened) == {"outer_step": 2}
    with pytest.raises(ContractViolation, match="cannot follow 4 committed"):
        dataclasses.replace(opened, steps=4)
