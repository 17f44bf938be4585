"""The tasks there are, by the name that ``task=`` gives them."""

from __future__ import annotations

from pathlib import Path

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.task import Task


def build_task(config: Config, data_dir: Path | None = None) -> Task:
    """The task that a configuration names. Imports torch only for tasks that need it.

    Args:
        data_dir: a real site's own recordings; None where all participants' are generated below the home folder.

    Raises:
        ConfigError: unknown task.
    """
    if config.task == "linear":
        from lensemble_flwr.federation.linear_task import LinearTask

        return LinearTask(config)
    if config.task == "world_model":
        from lensemble_flwr.federation.world_task import WorldTask

        return WorldTask(config, data_dir)
    raise ConfigError(f"Unknown task {config.task!r}.")
