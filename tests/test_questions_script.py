"""scripts/questions on the smallest federation: rows, cache, the factorial's balance, and what turned frames break."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from scripts.loading import load

SMALL = (
    "model.width=16",
    "model.latent_dim=4",
    "data.public_episodes=16",
    "data.episodes_per_participant=4",
    "data.heldout_episodes=6",
    "inner.batch_size=4",
    "warmstart.steps=2",
    "diloco.rounds=2",
    "diloco.inner_steps=2",
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    module = load("questions")
    monkeypatch.setattr(module, "BASE", (*module.BASE, *SMALL))
    return module


def test_every_setting_composes(script: ModuleType) -> None:
    for question in script.QUESTIONS.values():
        points = [load_config([*script.BASE, *overrides]) for _, overrides in question.settings]
        assert len(set(points)) == len(points) > 1


def test_a_measured_point_is_not_measured_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["moments", "--seeds", "0,1", "--out", str(tmp_path)]
    assert script.main(command) == 0
    first = capsys.readouterr().out
    head, _, *rows = first.strip().splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| public start", "| kept", "| forgotten"]
    assert head.count("|") == rows[0].count("|") == len(script.COLUMNS) + 2
    assert (tmp_path / "moments.csv").read_text().count("\n") == 7
    monkeypatch.setattr(script, "federate", lambda *a: pytest.fail("measured again"))
    assert script.main(command) == 0
    assert capsys.readouterr().out == first


def test_no_factor_of_the_factorial_hides_behind_another(script: ModuleType) -> None:
    settings = script.QUESTIONS["factorial"].settings
    levels = np.array([[float(part.split()[1]) for part in label.split(", ")] for label, _ in settings])
    signs = np.where(levels == levels.max(axis=0), 1, -1)
    columns = [*signs.T, *(signs[:, i] * signs[:, j] for i, j in itertools.combinations(range(4), 2))]
    assert all(column.sum() == 0 for column in columns)
    assert all((signs[:, i] * column).sum() == 0 for i in range(4) for column in columns[4:])
    rows = [("public start", {"r5": 9.0})]
    rows += [(label, {"r5": 2.0 + 3.0 * row[1]}) for (label, _), row in zip(settings, signs, strict=True)]
    assert script.effects([rows], "r5").splitlines()[1] == "lambda_sig: +6.000 [+6.000, +6.000]"
    assert script.effects([rows], "r5").splitlines()[0] == "sigma: +0.000 [+0.000, +0.000]"
    powers = [rows[0], *((label, {"r5": 10.0 ** metrics["r5"]}) for label, metrics in rows[1:])]
    assert script.effects([powers], "r5", log=True).splitlines()[1] == "lambda_sig: +6.000 [+6.000, +6.000]"


def test_turning_alone_changes_nothing_and_alignment_undoes_it(script: ModuleType, tmp_path: Path) -> None:
    rows = dict(script.rows_of("rotated", tmp_path, (), 0))
    as_it_is, turned = rows["one of them, as it is"], rows["one of them, turned"]
    assert turned["r5"] == pytest.approx(as_it_is["r5"], rel=1e-3)
    assert turned["drift_max_deg"] > as_it_is["drift_max_deg"] + 10
    common, naive = rows["average in a common frame"], rows["average of turned models"]
    aligned = rows["average of turned models, aligned"]
    assert naive["latent_std_mean"] < 0.9 * common["latent_std_mean"]
    assert aligned["latent_std_mean"] == pytest.approx(common["latent_std_mean"], rel=0.05)


def test_silos_alone_are_trained_as_long_as_federated_ones(script: ModuleType, tmp_path: Path) -> None:
    rows = dict(script.rows_of("severity", tmp_path, (), 0))
    assert list(rows)[1:3] == ["confined 0, each alone", "confined 0, federated"]
    assert rows["confined 0, each alone"] != rows["confined 1, each alone"]
    script.federate = lambda *a: pytest.fail("measured again")
    assert dict(script.rows_of("severity", tmp_path, (), 0)) == rows
    with pytest.raises(SystemExit):
        script.main(["severity", "seed=1"])
