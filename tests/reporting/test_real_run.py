"""What the coordinator really leaves is what reporting reads: one small federation in process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import LensembleError
from lensemble_flwr.federation.claim_inputs import claim_rows
from lensemble_flwr.federation.manifest import new_manifest
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.preflight import run_preflight
from lensemble_flwr.reporting.report import write_report
from lensemble_flwr.reporting.run_data import load_run
from lensemble_flwr.reporting.summary import closing_sentence
from lensemble_flwr.reporting.tensorboard import write_events
from tests.federation.harness import Federation


def finish(federation: Federation, status: str = "completed", detail: str = "") -> Path:
    """Write the manifest that the ServerApp would."""
    assert federation.folder is not None
    config, task = federation.config, federation.task
    plan = make_plan(config, config.federation.participants, task.dimension)
    rows, grade, why_not = claim_rows(config, plan, simulation=True)
    manifest = new_manifest(
        federation_id=federation.folder.federation_id,
        config=config,
        plan=plan,
        claims=rows,
        claim_grade=grade,
        why_not=why_not,
        base_hash=task.base_hash,
        probe_hash=task.probe_hash,
        simulation=True,
        sites_dir="",
    )
    dataclasses.replace(manifest, status=status, detail=detail).write(federation.folder.path)
    return federation.folder.path


def test_a_private_federation(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.start()
    folder = finish(federation)
    run = load_run(folder)
    assert run.committed == 3
    assert run.headline == "heldout_error"
    assert 7.9 < run.epsilon("central") <= 8.0
    assert "claimed is epsilon 8.00 at delta 1e-5" in closing_sentence(run)
    assert write_report(folder).is_file()
    assert write_events(folder).is_dir()


def test_a_federation_that_its_budget_stops(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "privacy.noise_multiplier=1.0 diloco.rounds=4")
    with pytest.raises(LensembleError) as caught:
        federation.start()
    folder = finish(federation, caught.value.code, str(caught.value))
    run = load_run(folder)
    assert closing_sentence(run).startswith("The privacy budget ended the run after 2 of 4 rounds")
    assert "Round 2 was refused" in write_report(folder).read_text()


def test_without_privacy(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "privacy=disabled secagg.range=20.0")
    federation.start()
    run = load_run(finish(federation))
    assert not run.private
    assert "NON-PRIVATE" in closing_sentence(run)


def test_a_run_with_discrete_noise_says_so(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "secagg.ring_bits=16 privacy.mechanism=discrete_gaussian")
    federation.start()
    run = finish(federation)
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["config"]["privacy"]["mechanism"] == "discrete_gaussian"
    assert set(manifest["plan"]["discrete"]) == {"own_multiplier", "gap", "delta_extra"}
    (reader,) = [row for row in manifest["claims"] if row["observer"] == "model_reader"]
    assert "Theorem 4" in reader["theorem"]
    assert "discrete Gaussian" in reader["theorem"]
    assert reader["epsilon"] == pytest.approx(load_run(run).epsilon("central"), rel=1e-6)


def test_preflight_says_on_which_grid_discrete_noise_lies() -> None:
    config = load_config("experiment=linear secagg.ring_bits=16 privacy.mechanism=discrete_gaussian diloco.rounds=2")
    found = run_preflight(config)
    text = found.text()
    assert "calibrated by zCDP" in text
    assert "discrete Gaussian on the ring, s/g = " in text
    assert found.rounds_allowed == 2
