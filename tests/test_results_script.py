"""scripts/results on a fleet of three: each kind of row comes out, and the tables and files hold them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from scripts.loading import load

SMALL = (
    "model=tiny",
    "federation.participants=3",
    "federation.min_participants=3",
    "secagg.min_survivors=3",
    "data.episodes_per_participant=2",
    "data.public_episodes=4",
    "data.heldout_shifted=2",
    "data.heldout_nominal=2",
    "data.frames=7",
    "warmstart.steps=2",
    "diloco.rounds=2",
    "diloco.inner_steps=2",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("results")


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENSEMBLE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def test_quickstart_rows(script: ModuleType, tmp_path: Path) -> None:
    result = script.quickstart(0, SMALL, tmp_path, 2, False)
    rows = {row["name"]: row for row in result["rows"]}
    wanted = {"warm start", "local only", "local only, best step", "pooled", "federated, no noise"}
    wanted |= {"control: public data only", "control: noise only"}
    wanted |= {f"eps {e}, in process" for e in (8, 4, 2)}
    assert set(rows) == wanted
    assert len(set(rows["eps 8, in process"]["draws"])) == 2  # noise is fresh each time
    assert result["facts"]["clip_norm"] > 0
    for row in result["rows"]:
        assert all(np.isfinite(row["metrics"][key]) for key in script.COLUMNS["quickstart"])


def test_silos_rows(script: ModuleType, tmp_path: Path) -> None:
    result = script.silos(0, (*SMALL, "data.cameras=one"), tmp_path, 1, False)
    assert [r["name"] for r in result["rows"]] == [
        "random init",
        "warm start",
        "local only",
        "pooled, equal steps",
        "federated",
    ]
    for row in result["rows"]:
        assert np.isfinite(row["metrics"]["effective_rank"])
        assert "unseen_camera_r2" not in row["metrics"]


def test_silos_with_cameras_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    cameras = ("data.cameras=own", "data.flavour=fleet", "data.heldout_shifted=10", "inner.landmark_norm=true")
    cameras += ("secagg.range=64",)  # folding multiplies weights, and two steps of warm start leave some units tiny
    result = script.silos(0, (*SMALL, *cameras), tmp_path, 1, False)
    for row in result["rows"]:
        figures = [row["metrics"][key] for key in ("state_probe_r2", "own_part_r2", "unseen_camera_r2")]
        assert np.isfinite(figures).all()
        assert len(set(figures)) == 3


def test_swipe_dot_rows(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("model.width=16", "model.depth=1", "model.latent_dim=4", "data.heldout_episodes=10", "inner.batch_size=4")
    small += ("data.public_episodes=16", "data.episodes_per_participant=4", "diloco.rounds=2", "diloco.inner_steps=2")
    result = script.swipe_dot(0, small, tmp_path, 1, False)
    rows = {row["name"]: row["metrics"] for row in result["rows"]}
    alone = [f"local only, silo {i}" for i in (1, 2, 3)]
    assert list(rows) == [
        *("start", *alone, "local only, mean", "pooled, equal steps", "pooled, equal samples"),
        *("pooled, equal steps and samples", "federated"),
    ]
    for metrics in rows.values():
        assert all(np.isfinite(metrics[key]) for key in script.COLUMNS["swipe_dot"])
    best = max(rows[name]["few_probe_r2"] for name in alone)
    assert result["facts"]["few_probe_r2_margin"] == pytest.approx(rows["federated"]["few_probe_r2"] - best)
    assert len({metrics["r1"] for metrics in rows.values()}) == len(rows)
    for name in ("rounds_alone", "rounds_pooled", "federated"):  # what is trained is kept
        monkeypatch.setattr(script, name, lambda *a, **k: pytest.fail("trained again"))
    assert script.swipe_dot(0, small, tmp_path, 1, False) == result


def test_pooling_goes_on_from_equal_steps_to_equal_samples(script: ModuleType) -> None:
    small = ("model.width=16", "model.depth=1", "model.latent_dim=4", "inner.batch_size=4", "diloco.inner_steps=2")
    small += ("data.public_episodes=16", "data.heldout_episodes=6", "inner.schedule=constant")
    config, task = script.prepared("swipe_dot", 0, small)
    half = script.rounds_pooled(config, task, 1)
    there, _ = script.rounds_pooled(config, task, 2, half, 1)
    at_once, _ = script.rounds_pooled(config, task, 2)
    np.testing.assert_array_equal(there, at_once)


def test_rows_of_any_length_end_with_the_same_step_size(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("model.width=16", "model.depth=1", "model.latent_dim=4", "inner.batch_size=4", "diloco.inner_steps=2")
    small += ("data.public_episodes=16", "data.heldout_episodes=6", "diloco.rounds=2", "inner.final_lr_fraction=0")
    config, task = script.prepared("swipe_dot", 0, small)
    asked: list[tuple[float, ...]] = []

    def steps(*args: object, steps: int, lr_factor: Callable[[int], float], **kwargs: object) -> object:
        asked.append(tuple(map(lr_factor, range(steps))))
        return train(*args, steps=steps, lr_factor=lr_factor, **kwargs)

    train = script.inner_steps
    monkeypatch.setattr(script, "inner_steps", steps)
    monkeypatch.setattr("lensemble_flwr.federation.world_task.inner_steps", steps)
    for rounds, row in (
        (2, lambda: script.rounds_alone(config, task, 0)),
        (2, lambda: script.rounds_pooled(config, task, 2)),
        (6, lambda: script.rounds_pooled(config, task, 6)),
        (3, lambda: script.local_only(config, task, [6])),
        (2, lambda: script.federated(config, task, noisy=True)),
        (5, lambda: script.pooled_full(config, task, 10)),
    ):
        asked.clear()
        row()
        wanted = tuple(map(script.Schedule("cosine", 0, 0.0, 2 * rounds).factor, range(2 * rounds)))
        found = [factor for factors in asked for factor in factors]
        silos = len(found) // len(wanted)
        if silos > 1 and len(asked) == silos:  # each silo in one go
            assert asked == [wanted] * silos
        elif silos > 1:
            assert asked == [wanted[2 * i : 2 * i + 2] for i in range(rounds) for _ in range(silos)]
        else:
            assert tuple(found) == wanted
    assert task.schedule.total == 4  # as it was


def test_silos_are_not_clipped(script: ModuleType) -> None:
    config, task = script.prepared("silos", 0, (*SMALL, "privacy.clip_norm=1e-6"))
    moved = script.federated(config, task, noisy=False) - task.initial()
    assert np.linalg.norm(moved) > 1e-4


def test_the_start_does_not_move(script: ModuleType) -> None:
    task = script.prepared("quickstart", 0, SMALL)[1]
    before = task.initial()
    moved = task.local_update(before, 0, None, steps=3, sketch_seed=0, round_index=0).theta
    assert not np.array_equal(moved, before)
    np.testing.assert_array_equal(task.initial(), before)


def test_tables_and_files(script: ModuleType, tmp_path: Path) -> None:
    results = [
        {"seed": s, "facts": {}, "rows": [{"name": "warm start", "metrics": {"r5": 0.5 + s}, "note": "", "draws": ()}]}
        for s in (0, 1)
    ]
    assert "| warm start | 1.000 [0.500, 1.500] |" in script.table(results, {"r5": "r5"})
    assert "| warm start | 0.500 | 1.500 |" in script.by_seed(results, "r5")
    script.save(results, tmp_path, "quickstart")
    assert json.loads((tmp_path / "quickstart.json").read_text())[1]["seed"] == 1
    with open(tmp_path / "quickstart.csv", newline="", encoding="utf-8") as stream:
        assert [line["r5"] for line in csv.DictReader(stream)] == ["0.5", "1.5"]


def test_bad_seeds_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main(["quickstart", "--seeds", "0,x"])
    assert stop.value.code == 2
    assert "whole numbers" in capsys.readouterr().err
