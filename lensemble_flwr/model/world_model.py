"""Encoder, predictor and adapter as one module."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lensemble_flwr.model.encoder import Encoder
from lensemble_flwr.model.predictor import Adapter, Predictor
from lensemble_flwr.model.spec import ModelSpec
from lensemble_flwr.model.trajectories import LatentTrajectories, Trajectories


class WorldModel(nn.Module):
    """An action-conditioned JEPA world model without its action heads.

    Names of the state are stable: ``encoder.*``, ``predictor.*`` and, when ``adapter_rank > 0``, ``adapter.*``.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = Encoder(spec)
        self.predictor = Predictor(spec)
        self.adapter = Adapter(spec) if spec.adapter_rank else None

    def encode(self, frames: Tensor) -> Tensor:
        """Frames (B, C, H, W) -> latents (B, z) float32."""
        return self.encoder(frames)

    def predict(self, before: Tensor, now: Tensor, action: Tensor) -> Tensor:
        """Next latent (..., z) from z_{t-1}, z_t (..., z) and the action embedding (..., e)."""
        features = self.predictor.features(before, now, action)
        following = self.predictor.step(before, now, features)
        return following if self.adapter is None else following + self.adapter(features)

    def rollout(self, before: Tensor, now: Tensor, actions: Tensor) -> Tensor:
        """Open-loop prediction.

        Args:
            before, now: z_{t-1}, z_t, each (B, z).
            actions: (B, K, e) embeddings of the actions at t .. t + K - 1.

        Returns:
            (B, K, z): z_{t+1} .. z_{t+K}.
        """
        predicted = []
        for k in range(actions.shape[1]):
            before, now = now, self.predict(before, now, actions[:, k])
            predicted.append(now)
        return torch.stack(predicted, dim=1)


@torch.no_grad()
def encode_trajectories(model: WorldModel, trajectories: Trajectories, batch: int = 256) -> LatentTrajectories:
    """Encode every frame once; what a participant with a frozen encoder trains and evaluates on.

    Args:
        model: on any device; frames are moved to it batch by batch, latents come back to the CPU.
        trajectories: episodes as frames.
        batch: frames at a time.

    Returns:
        The same episodes as latents, on the CPU.
    """
    device = next(model.parameters()).device
    blocks = torch.arange(len(trajectories)).split(batch)
    parts = [model.encode(trajectories.at(rows).to(device)).cpu() for rows in blocks]
    return LatentTrajectories(torch.cat(parts), trajectories.actions, trajectories.lengths, trajectories.states)


def frame_surface(spec: ModelSpec) -> dict[str, tuple]:
    """Which weights a rotation of the latent frame touches.

    Returns:
        ``rows``: names whose output (or, for a bias, whole vector) is a latent, W' = Q^T W;
        ``columns``: (name, ((start, stop), ...)), blocks of input columns that read latents, W' = W Q;
        ``right``: names of (n, z) matrices used as ``x W``, W' = W Q.
    """
    z = spec.latent_dim
    return {
        "rows": ("encoder.frame_proj.weight", "predictor.out_proj.weight", "predictor.out_proj.bias"),
        "columns": (("predictor.in_proj.weight", ((0, z), (z, 2 * z))),),
        "right": ("adapter.B",) if spec.adapter_rank else (),
    }


def state_digest(state: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over sorted names, dtypes, shapes and little-endian bytes of a state, 32 bytes.

    Covers weights and constants alike; used to name what a cache was made with.
    """
    digest = hashlib.sha256(b"lensemble/state/1")
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        raw = value.numpy()
        digest.update(raw.astype(raw.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.digest()
