"""Models that are broken in one known way, made from a healthy one: a scorecard must notice each of them.

They act on the weights that write and read latents (:class:`.align.FrameSurface`), so that everything else, and often
the very function, stays as it was. None of them is used in a federation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.gauge.align import FrameSurface, conjugate


def shrunk(state: Mapping[str, Tensor], surface: FrameSurface, factor: float) -> dict[str, Tensor]:
    """Magnitude collapse: latents times ``factor``, and a predictor that fits them.

    A linear probe, relative prediction errors and the effective rank do not change at all.
    """
    changed = dict(state)
    for name in (*surface.rows, *surface.right):
        if name in state:
            changed[name] = state[name] * factor
    for name, blocks in surface.columns:
        if name in state:
            weight = state[name].clone()
            for start, stop in blocks:
                weight[:, start:stop] /= factor
            changed[name] = weight
    return changed


def flattened(state: Mapping[str, Tensor], surface: FrameSurface, latents: Tensor) -> dict[str, Tensor]:
    """Rank collapse: everything that writes a latent writes its part along one direction, the leading one.

    Args:
        latents: (k, d) of the healthy model, whose leading principal direction is kept.
    """
    rows = latents.detach().double()
    direction = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)[2][0]
    keep = torch.outer(direction, direction)
    changed = dict(state)
    for name in surface.rows:
        if name in state:
            changed[name] = (keep @ state[name].double()).to(state[name].dtype)
    for name in surface.right:
        if name in state:
            changed[name] = (state[name].double() @ keep).to(state[name].dtype)
    return changed


def averaged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of weights; what a naive average makes of participants in different frames.

    Raises:
        ContractViolation: no state.
    """
    if not states:
        raise ContractViolation("There is nothing to average.")
    return {
        name: torch.stack([s[name].double() for s in states]).mean(0).to(states[0][name].dtype) for name in states[0]
    }


def in_random_frames(
    state: Mapping[str, Tensor], surface: FrameSurface, dim: int, count: int, seed: int = 0
) -> list[dict[str, Tensor]]:
    """The same model in ``count`` random frames of O(dim); each computes what it did, in its own frame."""
    generator = torch.Generator().manual_seed(seed)
    turned = []
    for _ in range(count):
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
        turned.append(conjugate(state, surface, q * torch.sign(torch.diagonal(r))))
    return turned
