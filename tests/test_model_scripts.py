"""scripts/scorecard, plan and bench_inner on the smallest settings: they run, and tables hold what was measured."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lensemble_flwr.data.lander import CONTINUOUS, LanderSpec, Shard, _Craft, world_of
from lensemble_flwr.model.planning import CEM
from scripts.loading import load

SMALL = (
    "model=tiny",
    "federation.participants=3",
    "federation.min_participants=3",
    "secagg.min_survivors=3",
    "data.episodes_per_participant=2",
    "data.public_episodes=16",
    "data.heldout_shifted=4",
    "data.heldout_nominal=2",
    "data.frames=7",
    "warmstart.steps=30",
    "diloco.rounds=2",
    "diloco.inner_steps=2",
)


def script(name: str) -> ModuleType:
    return load(name)


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENSEMBLE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def test_scorecard_has_a_row_for_each_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = script("scorecard")
    file = tmp_path / "card.csv"
    assert card.main(["experiment=silos", *SMALL, "--controls", "--csv", str(file)]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = [row[1].strip() for row in rows[1:]]
    assert names[0] == "public start"
    assert {"untrained", "magnitude x 0.001", "rank 1", "3 random frames, averaged"} < set(names)
    seen = {row[1].strip(): row[-2].strip() for row in rows[1:]}
    assert seen["public start"] == "nothing"
    assert "latent_std_mean" in seen["magnitude x 0.001"]
    assert "effective_rank" in seen["rank 1"]
    assert "state_probe_r2" not in seen["magnitude x 0.001"]
    assert len(file.read_text().splitlines()) == len(names) + 1
    assert card.main(["experiment=quickstart"]) == 1
    assert "needs a world model whose encoder is federated" in capsys.readouterr().err


def test_a_flight_repeats_itself_and_the_oracle_reaches_the_goal() -> None:
    plan = script("plan")
    spec = LanderSpec(frames=9)
    world = world_of(spec, Shard("heldout_shifted", CONTINUOUS, 0, 2), 1)
    flight = plan.Flight(_Craft(CONTINUOUS), spec, world, 5)
    actions = np.random.default_rng(0).uniform(-1, 1, (plan.STEPS, 2)).astype(np.float32)
    assert np.array_equal(flight.fly(actions), flight.fly(actions))
    goal, picture = plan.goal_of(flight, np.random.default_rng(3))
    assert picture.shape == (64, 64, 3)
    found = flight.fly(plan.oracle(flight, goal, CEM(24, 3, 4), torch.Generator().manual_seed(0)))
    idle = flight.fly(np.zeros((plan.STEPS, 2), np.float32))
    assert np.linalg.norm(found - goal) < 0.5 * np.linalg.norm(idle - goal)


def test_plan_prints_every_planner(capsys: pytest.CaptureFixture[str]) -> None:
    plan = script("plan")
    assert plan.main([*SMALL, "--episodes", "1", "--samples", "8", "--iterations", "1"]) == 0
    out = capsys.readouterr().out
    for name in ("random", "nothing", "oracle", "public start", "one participant alone", "federated, eps 8"):
        assert f"| {name} |" in out


def test_bench_inner_gives_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    bench = script("bench_inner")
    found = bench.measured("tiny", 2, 4, 1, torch.device("cpu"))
    assert found["windows_per_s"] > 0
    assert found["ratio"] == pytest.approx(found["ratios"][0])
    with pytest.raises(SystemExit):
        bench.main(["--steps", "0"])
