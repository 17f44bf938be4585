"""The dynamics: where the latent goes under an action.

The predictor is a residual MLP around constant velocity. Its first and last layers are plain ``Linear`` maps, so a
rotation of the latent frame can be absorbed in them exactly (:mod:`lensemble_flwr.gauge.align`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model.spec import ModelSpec


class Predictor(nn.Module):
    """``z_{t+1} = 2 z_t - z_{t-1} + g(z_t, gain (z_t - z_{t-1}), action embedding)``.

    ``in_proj`` reads the columns [z | velocity | action]; ``out_proj`` writes the z rows.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = nn.Linear(2 * spec.latent_dim + spec.action_embed_dim, spec.predictor_width)
        self.layers = nn.ModuleList(
            nn.Linear(spec.predictor_width, spec.predictor_width) for _ in range(spec.predictor_depth)
        )
        self.out_proj = nn.Linear(spec.predictor_width, spec.latent_dim)
        with torch.no_grad():
            # Start at constant velocity: a random correction of size one would swamp the small true step.
            self.out_proj.weight.mul_(0.1)
            self.out_proj.bias.zero_()

    def features(self, before: Tensor, now: Tensor, action: Tensor) -> Tensor:
        """Last hidden layer, (..., predictor_width), from z_{t-1}, z_t (..., z) and the action embedding (..., e)."""
        velocity = self.spec.velocity_gain * (now - before)
        hidden = self.in_proj(torch.cat([now, velocity, action], dim=-1))
        for layer in self.layers:
            hidden = hidden + layer(functional.gelu(hidden))
        return functional.gelu(hidden)

    def step(self, before: Tensor, now: Tensor, features: Tensor) -> Tensor:
        """z_{t+1} from the last hidden layer."""
        return 2 * now - before + self.out_proj(features).float()

    def forward(self, before: Tensor, now: Tensor, action: Tensor) -> Tensor:
        """Next latent (..., z) from z_{t-1}, z_t (..., z) and the action embedding (..., e)."""
        return self.step(before, now, self.features(before, now, action))


class Adapter(nn.Module):
    """A small linear correction of the prediction: ``z_{t+1} += phi B``, ``phi = [whitened PCA features ; 1]``.

    ``B`` (k + 1, z) is the only weight; the basis is a public constant of the warm start. The correction is linear in
    B, so with everything else frozen the local loss is quadratic. Because phi reads the last hidden layer, which does
    not change when the latent frame turns by Q, only ``B -> B Q`` is needed then.
    """

    mean: Tensor
    basis: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(spec.predictor_width))
        self.register_buffer("basis", torch.zeros(spec.predictor_width, spec.adapter_rank))
        self.B = nn.Parameter(torch.zeros(spec.adapter_rank + 1, spec.latent_dim))

    def phi(self, features: Tensor) -> Tensor:
        """(..., predictor_width) -> (..., k + 1)."""
        projected = (features.float() - self.mean) @ self.basis
        return torch.cat([projected, torch.ones_like(projected[..., :1])], dim=-1)

    def forward(self, features: Tensor) -> Tensor:
        """Correction (..., z) of the next latent."""
        return self.phi(features) @ self.B


@torch.no_grad()
def fit_adapter_basis(adapter: Adapter, features: Tensor, floor: float = 0.01) -> None:
    """Set the adapter's basis to the leading principal directions of public predictor features, whitened.

    Args:
        adapter: changed in place; ``B`` is left as it is.
        features: (n, predictor_width) last hidden layer on public transitions.
        floor: eigenvalues below ``floor`` of the largest count as that much, so a direction that public data hardly
            excites is not blown up on private data.

    Raises:
        ContractViolation: wrong shape, or fewer than two rows.
    """
    if features.ndim != 2 or len(features) < 2 or features.shape[1] != len(adapter.mean):
        raise ContractViolation(f"Features have shape {tuple(features.shape)}, expected (n >= 2, {len(adapter.mean)}).")
    rows = features.double()
    mean = rows.mean(dim=0)
    centred = rows - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(rows))
    rank = adapter.basis.shape[1]
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    # eigh leaves the sign open: fix it, so that equal data give an equal basis everywhere.
    largest = vectors.abs().argmax(dim=0)
    vectors = vectors * torch.sign(vectors[largest, torch.arange(rank)])
    scale = values.clamp(min=max(floor * float(values[0]), 1e-12)).rsqrt()
    adapter.mean.copy_(mean)
    adapter.basis.copy_(vectors * scale)
