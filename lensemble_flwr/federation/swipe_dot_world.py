"""``data=swipe_dot``: silos with recordings of their own of one world (:mod:`lensemble_flwr.data.swipe_dot`).

The recordings are those of the seeds in the configuration, whatever the run's ``seed``, which governs initial weights
and the order of the windows. They are drawn in memory whenever they are needed: nothing is cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lensemble_flwr.config import Config
from lensemble_flwr.data.episodes import MemorySource
from lensemble_flwr.data.swipe_dot import BODY, WHOLE, Box, source
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.task import Progress
from lensemble_flwr.federation.world_data import HeldOut, StateTargets


@dataclasses.dataclass(frozen=True)
class SwipeDotSpec:
    """The keys of ``conf/data/swipe_dot.yaml``.

    Attributes:
        episodes_per_participant, public_episodes, heldout_episodes: how many.
        steps: actions of an episode.
        reach, spread: k and s.
        silo_seeds: of the participants' episodes, in order.
        confinement: in 0..1; silo i stays in a square of side 1 - confinement/2 at corner i mod 4. Public and held-out
            episodes see the whole picture.
        public_seed, heldout_seed: of the public and the held-out episodes.
    """

    episodes_per_participant: int
    public_episodes: int
    heldout_episodes: int
    steps: int
    reach: float
    spread: float
    silo_seeds: tuple[int, ...]
    confinement: float
    public_seed: int
    heldout_seed: int

    def __post_init__(self) -> None:
        for name in ("episodes_per_participant", "public_episodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name} must be at least 1, not {getattr(self, name)}.")
        if self.heldout_episodes < 2:
            raise ConfigError(f"data.heldout_episodes must be at least 2, not {self.heldout_episodes}.")
        if not 6 <= self.steps <= 1000:
            raise ConfigError(f"data.steps must lie in 6..1000, not {self.steps}.", "Metrics look 5 steps ahead.")
        if self.reach <= 0 or self.spread <= 0:
            raise ConfigError("data.reach and data.spread must be positive.")
        if not 0 <= self.confinement <= 1:
            raise ConfigError(f"data.confinement must lie in 0..1, not {self.confinement}.")
        seeds = (*self.silo_seeds, self.public_seed, self.heldout_seed)
        if min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise ConfigError(
                "data.silo_seeds, data.public_seed and data.heldout_seed must be different numbers, zero or more: "
                "equal seeds are equal recordings.",
            )


class SwipeDotWorld:
    """See the module and :class:`.world_data.WorldData`."""

    embodiments: tuple[str, ...] = (BODY,)
    main_set = rehearsal_set = "heldout"
    unseen_metric = "unseen_r2"

    def __init__(self, config: Config, data_dir: Path | None = None) -> None:
        data = dict(config.data.options)
        self.spec = SwipeDotSpec(**{**data, "silo_seeds": tuple(data["silo_seeds"])})
        self.share = self.spec.episodes_per_participant
        self._size = config.model.image_size
        # The grid runs from the middle of the first pixel to that of the last.
        edge, inner = 0.5 / self._size, 1 - 1 / self._size
        self.state_targets: StateTargets | None = StateTargets(
            (0, 1), ("x", "y"), in_picture=((edge, inner), (edge, inner))
        )
        wanted = config.federation.participants
        if len(self.spec.silo_seeds) < wanted:
            raise ConfigError(
                f"There are {wanted} participants, but data.silo_seeds has {len(self.spec.silo_seeds)}.",
                "Give each participant a seed: data.silo_seeds=[11,22,33,44].",
            )
        self._participants = wanted
        self._source = cache(self._made)

    def _made(self, name: str, seed: int, episodes: int, box: Box = WHOLE) -> MemorySource:
        spec = self.spec
        return source(
            name, seed, episodes, steps=spec.steps, size=self._size, reach=spec.reach, spread=spec.spread, box=box
        )

    def key(self) -> list[object]:
        spec = self.spec
        return ["swipe_dot", 1, spec.public_seed, spec.public_episodes, spec.steps, spec.reach, spec.spread]

    def heldout_key(self) -> list[object]:
        spec = self.spec
        return ["swipe_dot", 1, spec.heldout_seed, spec.heldout_episodes, spec.steps, spec.reach, spec.spread]

    def public(self, body: str) -> MemorySource:
        return self._source("public", self.spec.public_seed, self.spec.public_episodes)

    def heldout(self) -> Mapping[str, Mapping[str, HeldOut]]:
        episodes = self._source("heldout", self.spec.heldout_seed, self.spec.heldout_episodes)
        return {self.main_set: {BODY: HeldOut(episodes)}}

    def participant(self, index: int) -> MemorySource:
        if index >= self._participants:
            raise ConfigError(
                f"There is no participant {index}: this run has {self._participants}.",
                "Participants count from 0: correct the site's number, or federation.participants.",
            )
        spec, left = self.spec, self.spec.confinement / 2
        box = (left * (index % 2), left * (index // 2 % 2), 1 - left)
        return self._source(f"silo-{index}", spec.silo_seeds[index], spec.episodes_per_participant, box)

    def body(self, index: int) -> str:
        return BODY

    def prepare(self, progress: Progress) -> None:
        """Nothing to make."""

    def prepare_participant(self, index: int, progress: Progress) -> None:
        self.participant(index)
