"""The minimal example: what it draws, that sites together read digits that none of them holds, and the real runtime."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble_flwr.config import Config, load_config
from lensemble_flwr.examples.classifier import Classifier, draw
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.federation.rehearsal import rehearse, rounds_in_process
from lensemble_flwr.federation.tasks import build_task, own_choice
from lensemble_flwr.federation.torch_task import TorchTask
from lensemble_flwr.launch import run_federation
from lensemble_flwr.preflight import Preflight, run_preflight
from lensemble_flwr.reporting.metrics import metrics_of, primary
from lensemble_flwr.reporting.run_data import load_run
from lensemble_flwr.reporting.summary import gained

ROOT = Path(__file__).resolve().parents[2]


def built(more: str = "") -> tuple[Config, TorchTask]:
    config = load_config(f"experiment=classifier inner.device=cpu {more}")
    task = build_task(config, allowed=own_choice(config))
    assert isinstance(task, TorchTask)
    return config, task


def test_pictures_are_what_their_labels_say() -> None:
    labels = np.repeat(np.arange(10), 200)
    pictures, same = draw(np.random.default_rng(0), labels)
    assert pictures.dtype == torch.float32
    assert pictures.shape == (2000, 5, 4)
    assert same.tolist() == labels.tolist()
    means = torch.stack([pictures[labels == digit].mean(0) for digit in range(10)])
    apart = (means[:, None] - means[None]).abs().amax((2, 3)) + torch.eye(10)
    assert apart.min() > 0.3


def test_each_site_holds_three_digits_and_a_real_one_its_own(tmp_path: Path) -> None:
    config, task = built()
    held = [set(task._local("local", site)[1].tolist()) for site in range(12)]
    assert all(len(digits) == 3 for digits in held)
    assert set.union(*held) == set(range(10))
    np.savez(tmp_path / "pictures.npz", pictures=np.ones((2, 5, 4), np.float32), labels=np.array([1, 2]))
    own = Classifier(config, tmp_path).local_data(0)
    assert own[0].sum() == 40
    assert own[1].tolist() == [1, 2]


def test_together_with_noise_they_read_more_than_each_alone() -> None:
    config, task = built("privacy.entropy=replay")
    plan = make_plan(config, config.federation.participants, task.dimension)
    theta, _ = rounds_in_process(
        task,
        config,
        plan,
        lambda theta, site, opened: (
            task.local_update(
                theta, site, None, steps=opened.inner_steps, sketch_seed=0, round_index=opened.round
            ).theta
        ),
        noisy=True,
    )
    together = task.evaluate(theta)["accuracy"]
    total = config.diloco.rounds * config.diloco.inner_steps
    alone = []
    for site in range(8):
        result = task.local_update(task.initial(), site, None, steps=total, sketch_seed=0, round_index=0)
        alone.append(task.evaluate(result.theta)["accuracy"])
    assert max(alone) < 0.35
    assert together > 0.55
    assert task.evaluate(task.initial())["accuracy"] < 0.25


def test_the_rehearsal_finds_the_noise_bearable_on_public_data() -> None:
    config, task = built()
    found = rehearse(task, config, make_plan(config, 64, task.dimension))
    assert found.metric == "error_rate"
    assert found.noiseless < 0.5 * found.start
    assert found.verdict in ("green", "amber")


OWN = '''
from lensemble_flwr.examples.classifier import Classifier
class Mine(Classifier):
    """A module of a user, outside the app."""
    metrics = {**Classifier.metrics, "accuracy": Classifier.metrics["loss"].__class__("own accuracy", "", False)}
'''


@pytest.mark.runtime
def test_a_users_own_module_in_flowers_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_digits.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    out = tmp_path / "run"
    overrides = (
        "experiment=classifier task=own_digits:Mine task_options.pictures=30 diloco.rounds=2 inner.device=cpu "
        "federation.participants=4 federation.min_participants=4 secagg.min_survivors=4 privacy.accept_noise=true "
        f"output_dir={out} federation.sites_dir={tmp_path / 'sites'}"
    )
    result = run_federation(ROOT, overrides, num_supernodes=4, resume="", on_line=lambda line: None)
    assert (result.status, result.exit_status) == ("finished:completed", 0)
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [(r["outcome"], r["participants"]) for r in rounds] == [("committed", 4)] * 2
    run = load_run(out)
    chief = primary(run)
    assert chief is not None
    assert (chief.name, chief.label, chief.lower_is_better) == ("accuracy", "own accuracy", False)
    assert [m.name for m in metrics_of(run)] == ["accuracy", "loss", "error_rate"]
    assert "own accuracy" in gained(run)
    assert run.setting("task_options.pictures") == 30


def test_preflight_rehearses_it() -> None:
    found: Preflight = run_preflight(dataclasses.replace(built("diloco.rounds=2")[0]))
    assert found.rehearsal is not None
    assert "error_rate" in found.text()
