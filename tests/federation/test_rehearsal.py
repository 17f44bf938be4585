"""The rehearsal's verdict does not hang on one draw of the noise where several cost little."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.federation import rehearsal
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.preflight import run_preflight


@pytest.mark.parametrize(("second", "draws"), [(0.0, 5), (10.0, 1)])
def test_quick_rehearsals_are_noised_several_times(monkeypatch: pytest.MonkeyPatch, second: float, draws: int) -> None:
    config = load_config("experiment=linear diloco.rounds=1")
    task = build_task(config)
    plan = make_plan(config, config.federation.participants, task.dimension)
    ticks = itertools.count(step=second)
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: next(ticks))
    found = rehearsal.rehearse(task, config, plan)
    assert len(found.draws) == draws
    assert len(set(found.draws)) == draws, "every draw has noise of its own"
    assert found.noisy == np.median(found.draws)
    assert found.noiseless not in found.draws


def test_nobody_guesses_how_long_other_machines_take() -> None:
    here, there = (run_preflight(load_config("experiment=linear"), simulation=where) for where in (True, False))
    assert "the whole run about" in here.text(short=True)
    assert "the whole run about" not in there.text(short=True)
    assert "lensemble status tells after the first" in there.text(short=True)
