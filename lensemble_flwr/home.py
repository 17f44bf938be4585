"""Where the project keeps what outlives a run: ``$LENSEMBLE_HOME``, by default ``~/.lensemble``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ArtifactError, ConfigError


def home() -> Path:
    """The project's own folder (created on first use, only for its owner).

    Raises:
        ArtifactError: it cannot be created.
    """
    path = Path(os.environ.get("LENSEMBLE_HOME") or Path.home() / ".lensemble").expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"The folder {path} cannot be created: {error.strerror}.", "Set LENSEMBLE_HOME to a folder you can write."
        ) from error
    return path


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """One process makes a cached file; others wait and then find it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def output_folder(config: Config, run_id: int) -> Path:
    """The run's own folder: ``output_dir``, a relative one below the home folder; by default ``outputs/run-<id>``.

    `lensemble run` makes a relative one absolute first, because the working folder here is the SuperLink's.
    """
    path = Path(config.output_dir or f"outputs/run-{run_id}").expanduser()
    return path if path.is_absolute() else home() / path


def sites_folder(config: Config, run_name: str) -> Path:
    """The folder of the simulated sites: the same folder again means the same ledgers.

    Raises:
        ConfigError: it lies below the output folder, which people share.
    """
    path = Path(config.federation.sites_dir or f"sites/{run_name}").expanduser()
    path = path if path.is_absolute() else home() / path
    if config.output_dir is not None and path.absolute().is_relative_to(output_folder(config, 0).absolute()):
        raise ConfigError(
            f"federation.sites_dir={path} lies below the output folder.",
            "Sites hold keys and ledgers, outputs are shared: choose another folder.",
        )
    return path
