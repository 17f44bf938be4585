"""Ready-made sweeps: every point of every one can run, and what a user adds comes last."""

from __future__ import annotations

import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.preflight import check_plan
from lensemble_flwr.ready_sweeps import READY_SWEEPS, ready_overrides
from lensemble_flwr.sweep import expand
from lensemble_flwr.sweep_cli import sweep_command


@pytest.mark.parametrize("name", READY_SWEEPS)
def test_every_point_of_a_ready_sweep_is_possible(name: str) -> None:
    sweep = expand(ready_overrides(name, []))
    assert "seed" in sweep.keys
    assert 3 * 3 <= len(sweep.points) <= 36
    plans = [check_plan(load_config(p.overrides)) for p in sweep.points if p.values["seed"] == 0]
    assert len(plans) == len(sweep.points) / 3


def test_an_own_value_takes_the_place_of_the_ready_one() -> None:
    assert ready_overrides("severity", ["seed=7", "data.steps=12"]) == [
        "experiment=swipe_dot",
        "data.confinement=0,0.5,1",
        "seed=7",
        "data.steps=12",
    ]
    assert len(expand(ready_overrides("severity", ["seed=7"])).points) == 3


def test_an_unknown_question_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no ready-made sweep 'utility'") as refused:
        sweep_command(["--ready", "utility"])
    assert all(name in refused.value.remediation for name in READY_SWEEPS)
    with pytest.raises(ConfigError, match="no --ready"):
        sweep_command(["--report", "somewhere", "--ready", "clip"])
    with pytest.raises(SystemExit):
        sweep_command(["--help"])
    assert "severity" in capsys.readouterr().out
