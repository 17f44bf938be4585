"""The world that a world model is trained on: whose episodes there are, what is public, what is held out.

``data=NAME`` chooses a file ``conf/data/NAME.yaml``, whose keys and their types are that world's options, and the class
that :data:`WORLDS` gives the name. Another world is one class and one such file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.config import Config
from lensemble_flwr.data.episodes import EpisodeSource
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.site_dataset import SiteDataset
from lensemble_flwr.federation.task import Progress

WORLDS: dict[str, str] = {
    "lander": "lensemble_flwr.federation.lander_world:LanderWorld",
    "recordings": "lensemble_flwr.federation.recordings_world:RecordingsWorld",
    "swipe_dot": "lensemble_flwr.federation.swipe_dot_world:SwipeDotWorld",
}
"""``data.name`` -> ``module:Class``, of this project only: a run cannot make anybody import anything else."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Public evaluation episodes of one body.

    Attributes:
        source: the episodes.
        unseen: bool [E]: episodes under a condition that no participant trains in; the state probe is not fitted on
            them and reads them for a figure of their own (``WorldData.unseen_metric``). None: there are none.
    """

    source: EpisodeSource
    unseen: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class StateTargets:
    """What of the state labels the linear probe is asked for.

    Attributes:
        position: columns of the labels that say where things are; ``state_probe_r2`` is the mean over them.
        names: what each of these columns is.
        error: (name of a metric, index into ``position``): the 5-step prediction's error in that column's own units;
            None: no such metric.
        in_picture: if ``position`` is x and y of something that pictures show: for each (intercept, slope) of its
            place, as a share of the picture's width from the left and of its height from the top.
    """

    position: tuple[int, ...]
    names: tuple[str, ...]
    error: tuple[str, int] | None = None
    in_picture: tuple[tuple[float, float], tuple[float, float]] | None = None


class WorldData(Protocol):
    """One world, built from ``(config, data_dir)`` with ``data_dir`` as in :func:`.tasks.build_task`.

    Building it reads no file. What is read must have been made by ``prepare`` or ``prepare_participant`` before.
    """

    embodiments: tuple[str, ...]
    """The bodies that have public episodes, in a fixed order; pseudo-participants take them in turn."""
    share: int
    """How many public episodes a pseudo-participant of a rehearsal holds: about what a participant has."""
    state_targets: StateTargets | None
    """What the state probe reads; None: the held-out episodes have no labels."""
    main_set: str
    """The held-out set that headlines are read on; metrics of the others have ``_NAME`` behind theirs."""
    rehearsal_set: str
    """The held-out set that is like the public episodes: rehearsals are judged on it."""
    unseen_metric: str
    """Name of the R^2 on :attr:`HeldOut.unseen` episodes."""

    def key(self) -> Any:
        """Plain value (JSON) of everything that the public episodes depend on. Names caches of the warm start."""
        ...

    def heldout_key(self) -> Any:
        """The same for the held-out episodes."""
        ...

    def public(self, body: str) -> EpisodeSource:
        """Public episodes of a body: warm start, landmarks, rehearsals."""
        ...

    def heldout(self) -> Mapping[str, Mapping[str, HeldOut]]:
        """Held-out sets: name -> body -> episodes."""
        ...

    def participant(self, index: int) -> EpisodeSource:
        """A participant's own episodes; opens no other participant's."""
        ...

    def body(self, index: int) -> str:
        """The body of a participant's episodes."""
        ...

    def prepare(self, progress: Progress) -> None:
        """Make or check what the coordinator, or a simulation, needs. Idempotent."""
        ...

    def prepare_participant(self, index: int, progress: Progress) -> None:
        """Make or check what one real site needs of its own.

        Raises:
            ConfigError: there is no such participant. DataError, ArtifactError: its episodes cannot be read.
        """
        ...


def build_world(config: Config, data_dir: Path | None, dataset: SiteDataset | None = None) -> WorldData:
    """The world that ``data.name`` names.

    Args:
        data_dir: a real site's folder of data. dataset: its own recordings; only ``data=recordings`` takes them.

    Raises:
        ConfigError: no such world, or options that it refuses.
    """
    path = WORLDS.get(config.data.name)
    if path is None:
        raise ConfigError(f"There is no data={config.data.name}.", f"Choose one of: {', '.join(sorted(WORLDS))}.")
    module, _, name = path.partition(":")
    own = (dataset,) if config.data.name == "recordings" else ()
    return cast(WorldData, getattr(importlib.import_module(module), name)(config, data_dir, *own))
