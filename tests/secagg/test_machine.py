"""The stateful test of machine.py, with few steps; scripts/attack_secagg runs many."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.secagg.machine import Coordinator

FEW = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))

TestCoordinator = Coordinator.TestCase
TestCoordinator.settings = FEW


class ForgetfulSite(Coordinator):
    """Sites that do not remember which states their sessions left."""

    def once(self, client: Any) -> None:
        pass


class ForgetfulLatch(Coordinator):
    """Sites that do not remember that they answered."""

    def open_attempt(self) -> None:
        self.answered = _Forgetful()
        super().open_attempt()


class _Forgetful(set[int]):
    def add(self, item: int) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [ForgetfulSite, ForgetfulLatch])
def test_the_machine_finds_what_it_looks_for(faulty: type[Coordinator]) -> None:
    run = settings(FEW, max_examples=2000, stateful_step_count=40, phases=(Phase.generate,), database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(faulty, settings=run)
