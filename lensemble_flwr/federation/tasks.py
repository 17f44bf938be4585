"""The tasks there are, by the name that ``task=`` gives them."""

from __future__ import annotations

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.task import Task


def build_task(config: Config) -> Task:
    """The task that a configuration names. Imports torch only for tasks that need it.

    Raises:
        ConfigError: unknown task.
    """
    if config.task == "linear":
        from lensemble_flwr.federation.linear_task import LinearTask

        return LinearTask(config)
    if config.task == "world_model":
        from lensemble_flwr.federation.world_task import WorldTask

        return WorldTask(config)
    raise ConfigError(f"Unknown task {config.task!r}.")
