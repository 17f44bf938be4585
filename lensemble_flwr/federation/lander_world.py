"""``data=lander``: a fleet of LunarLanders. Public and nominal episodes have nominal gravity, the fleet another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from lensemble_flwr.config import Config
from lensemble_flwr.data.lander import BODIES, CAMERAS, LanderSpec, camera_of
from lensemble_flwr.data.store import LanderData, ShardSource, ensure_dataset, open_dataset
from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.federation.task import Progress
from lensemble_flwr.federation.world_data import HeldOut, StateTargets
from lensemble_flwr.home import home

# The simulator's viewport: x is -1 at its left edge and 1 at the right; y counts half heights from a lander that stands
# on the pad, whose surface is a quarter of the height above the bottom and 18 of 400 pixels below the hull's centre.
IN_PICTURE = ((0.5, 0.5), (0.75 - 18 / 400, -0.5))


class LanderWorld:
    """Everything public is generated and cached below the home folder; see :class:`.world_data.WorldData`."""

    embodiments = BODIES
    state_targets: StateTargets | None = StateTargets((0, 1), ("x", "y"), ("altitude_rmse", 1), IN_PICTURE)
    main_set, rehearsal_set = "shifted", "nominal"
    unseen_metric = "unseen_camera_r2"

    def __init__(self, config: Config, data_dir: Path | None = None) -> None:
        data = config.data
        self._data_dir = data_dir
        self.share = int(data.episodes_per_participant)
        self.spec = LanderSpec(
            flavour=data.flavour,
            participants=config.federation.participants,
            episodes_per_participant=data.episodes_per_participant,
            public_episodes=data.public_episodes,
            heldout_shifted=data.heldout_shifted,
            heldout_nominal=data.heldout_nominal,
            gravity_shift=(data.gravity_shift[0], data.gravity_shift[-1]),
            wind=data.wind,
            turbulence=data.turbulence,
            frames=data.frames,
            frameskip=data.frameskip,
            image_size=config.model.image_size,
            seed=config.seed,
            cameras=data.cameras,
        )

    def key(self) -> str:
        spec = self.spec
        return LanderSpec(  # only what public episodes depend on: experiments share a warm start
            public_episodes=spec.public_episodes,
            gravity_nominal=spec.gravity_nominal,
            frames=spec.frames,
            frameskip=spec.frameskip,
            image_size=spec.image_size,
            seed=spec.seed,
        ).key()

    def heldout_key(self) -> str:
        return self.spec.key()

    @cached_property
    def data(self) -> LanderData:
        """The generated data; never generated here (see :meth:`prepare`)."""
        return open_dataset(self.spec, home() / "data")

    def public(self, body: str) -> ShardSource:
        return self.data.public(body)

    def heldout(self) -> Mapping[str, Mapping[str, HeldOut]]:
        return {
            "shifted": {b: HeldOut(self.data.heldout_shifted(b), self._unseen(b)) for b in self.embodiments},
            "nominal": {b: HeldOut(self.data.heldout_nominal(b)) for b in self.embodiments},
        }

    def _unseen(self, body: str) -> np.ndarray:
        """Which held-out episodes are seen through the camera that no participant has."""
        shard = self.data.heldout_shifted(body).shard
        return np.array([camera_of(self.spec, shard, i) == len(CAMERAS) - 1 for i in range(shard.count)], np.bool_)

    @cached_property
    def _recordings(self) -> LanderData:
        return open_dataset(self.spec, self._data_dir) if self._data_dir is not None else self.data

    def participant(self, index: int) -> ShardSource:
        return self._recordings.participant(index)

    def body(self, index: int) -> str:
        return self.participant(index).embodiment

    def prepare(self, progress: Progress) -> None:
        ensure_dataset(self.spec, home() / "data", lambda done, total: progress("generating episodes", done, total))

    def prepare_participant(self, index: int, progress: Progress) -> None:
        if self._data_dir is None:
            raise ContractViolation("This task has no folder of a participant's own recordings.")
        if index >= self.spec.participants:
            raise ConfigError(
                f"There is no participant {index}: this run has {self.spec.participants}.",
                "Participants count from 0: correct the site's number, or federation.participants.",
            )
        shard = next(s for s in self.spec.shards() if s.split == "participant" and s.index == index)
        ensure_dataset(
            self.spec,
            self._data_dir,
            lambda done, total: progress("generating episodes", done, total),
            only=[shard.name],
        )
