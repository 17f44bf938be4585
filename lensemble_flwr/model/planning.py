"""Choosing actions by the cross-entropy method (CEM): sample, keep the best, sample around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model.heads import ActionHead
from lensemble_flwr.model.world_model import WorldModel

Cost = Callable[[Tensor], Tensor]
"""Action sequences (S, H, a) -> cost of each, (S,); not finite counts as the worst."""


@dataclass(frozen=True)
class CEM:
    """Budget of a search: ``samples`` sequences, ``iterations`` times, of which ``elites`` are kept."""

    samples: int = 64
    iterations: int = 4
    elites: int = 8
    spread: float = 0.7

    def __post_init__(self) -> None:
        if not (2 <= self.elites <= self.samples and self.iterations >= 1 and self.spread > 0):
            raise ContractViolation(f"{self} is no search.", "Keep at least 2 of at least as many samples.")

    def plan(self, cost: Cost, start: Tensor, generator: torch.Generator) -> Tensor:
        """The best sequence that was seen.

        Args:
            cost: what to minimise.
            start: (H, a), the middle of the first samples; it is among them. Actions lie in -1..1.
            generator: of the samples.

        Returns:
            (H, a).
        """
        mean, spread = start.clone(), torch.full_like(start, self.spread)
        best, least = start, torch.tensor(float("inf"))
        for _ in range(self.iterations):
            noise = torch.randn(self.samples, *start.shape, generator=generator)
            tried = (mean + spread * noise).clamp(-1, 1)
            tried[0] = mean
            costs = torch.nan_to_num(cost(tried), nan=float("inf"))
            order = costs.argsort()
            if costs[order[0]] < least:
                best, least = tried[order[0]], costs[order[0]]
            kept = tried[order[: self.elites]]
            mean, spread = kept.mean(dim=0), kept.std(dim=0).clamp(min=0.05)
        return best


def model_cost(
    model: WorldModel, head: ActionHead, before: Tensor, now: Tensor, read: Callable[[Tensor], Tensor], goal: Tensor
) -> Cost:
    """Squared distance between what is read from the last predicted latent and a goal.

    Args:
        before, now: (z,) latents of the last two pictures.
        read: latents (S, z) -> (S, c), such as a state probe or the identity.
        goal: (c,).
    """

    @torch.no_grad()
    def cost(actions: Tensor) -> Tensor:
        count = len(actions)
        rolled = model.rollout(before.expand(count, -1), now.expand(count, -1), head(actions))
        return (read(rolled[:, -1]) - goal).square().sum(dim=1)

    return cost
