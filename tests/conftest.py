"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Two busy cores make any single example slow: that is no failure of the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


@pytest.fixture
def flower_task() -> None:
    """Flower builds messages only inside a task; tests of the rim pretend to be one."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
