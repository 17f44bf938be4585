"""The step sizes of the local steps over a whole run: linear warm-up, then constant or a cosine.

DiLoCo (Douillard et al. 2023) trains its inner AdamW with a warm-up and a cosine that run through all rounds. A step's
place in the run is public: the round that is to become outer step t holds the local steps t H .. t H + H - 1 of
``diloco.rounds`` H. A round that is void or burnt does not move it on, and a site that joins late, or was away, steps
like the others. As burnt rounds count among ``diloco.rounds``, a run with some ends before its cosine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from lensemble_flwr.config import Config
from lensemble_flwr.federation.records import RoundOpen


class Place(TypedDict, total=False):
    """What a task is told beside the round, if step sizes change."""

    outer_step: int


@dataclass(frozen=True)
class Schedule:
    """Factors of ``inner.lr`` and ``inner.head_lr``; the same at every party.

    Attributes:
        kind: ``constant`` or ``cosine``, after the warm-up.
        warmup: local steps that rise linearly from 1 / (warmup + 1), so that step ``warmup`` is the first whole one.
        final: factor that the cosine falls to.
        total: local steps at which it is there; later ones stay there.
    """

    kind: str
    warmup: int
    final: float
    total: int

    @staticmethod
    def of(config: Config, total: int | None = None) -> Schedule:
        """``config``'s, stretched over ``total`` local steps (None: over those of its rounds)."""
        inner, diloco = config.inner, config.diloco
        steps = diloco.rounds * diloco.inner_steps if total is None else total
        return Schedule(inner.schedule, inner.warmup_steps, inner.final_lr_fraction, steps)

    def factor(self, step: int) -> float:
        """Factor of local step ``step`` (from 0) of the run.

        It is that of torch's LinearLR(1 / (warmup + 1), 1, warmup), followed by CosineAnnealingLR(total - warmup).
        """
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return 1.0
        share = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * share))

    def since(self, first: int) -> Callable[[int], float]:
        """The factor of each local step of a round, from 0, that begins with step ``first`` of the run."""
        return partial(self._after, first)

    def _after(self, first: int, step: int) -> float:
        return self.factor(first + step)


def place(config: Config, opened: RoundOpen) -> Place:
    """Keywords for ``local_update`` and ``public_update``: none where every step has the same size."""
    return {"outer_step": opened.steps} if config.inner.scheduled else {}
