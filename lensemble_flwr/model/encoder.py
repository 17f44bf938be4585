"""Frames to latents: a small vision transformer without any batch statistics.

The latent frame must be free to rotate (see :mod:`lensemble_flwr.gauge`), so the encoder ends in a plain bias-free
``Linear(z, z)``, the ``frame_proj``, and nothing stands behind it. There is no BatchNorm anywhere: its running
statistics would leave a participant un-noised. What BatchNorm is usually needed for here, keeping a JEPA from
collapsing at the start, is done by two public constants and an initialisation instead:

* the mean public image is subtracted and the rest is scaled to unit variance, so a frame is what moves in it;
* :func:`whiten_output` sets the last weights so that latents of *public* frames start with mean zero and identity
  covariance. SIGReg then starts at its optimum. Near z = 0 its gradient is proportional to z, so it keeps a healthy
  latent healthy but cannot raise a collapsed one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from lensemble_flwr.errors import ContractViolation, DataError
from lensemble_flwr.model.spec import ModelSpec


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, width) -> (B, N, width)."""
        batch, length, width = tokens.shape
        qkv = self.qkv(self.norm_attention(tokens)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.mlp_out(functional.gelu(self.mlp_in(self.norm_mlp(tokens))))


class Encoder(nn.Module):
    """Vision transformer from frames (B, C, H, W) to latents (B, z).

    Parameters are federated when the surface is ``full``; the buffers ``mean_image`` and ``pixel_scale`` are public
    constants of the warm start and never change after it.
    """

    mean_image: Tensor
    pixel_scale: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        width, size = spec.width, spec.image_size
        self.register_buffer("mean_image", torch.zeros(spec.channels, size, size))
        self.register_buffer("pixel_scale", torch.ones(()))
        self.patch_embed = nn.Linear(spec.channels * spec.patch**2, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        # Background patches are all zero after the mean image is gone, so position must be loud enough to be seen
        # beside the few patches that carry content.
        self.position = nn.Parameter(torch.randn(1, spec.patches + 1, width) * 0.3)
        self.blocks = nn.ModuleList(
            Block(width, spec.heads, max(1, round(width * spec.mlp_ratio))) for _ in range(spec.depth)
        )
        self.norm = nn.LayerNorm(2 * width)
        self.projector = nn.Linear(2 * width, spec.projector_width)
        self.to_latent = nn.Linear(spec.projector_width, spec.latent_dim)
        self.frame_proj = nn.Linear(spec.latent_dim, spec.latent_dim, bias=False)
        with torch.no_grad():
            self.frame_proj.weight.copy_(torch.eye(spec.latent_dim))

    def pixels(self, frames: Tensor) -> Tensor:
        """Frames as the transformer sees them: (B, C, H, W), uint8 or floats in 0..1, to centred, scaled floats."""
        spec = self.spec
        if frames.ndim != 4 or tuple(frames.shape[1:]) != (spec.channels, spec.image_size, spec.image_size):
            raise ContractViolation(
                f"Frames have shape {tuple(frames.shape)}, "
                f"expected (B, {spec.channels}, {spec.image_size}, {spec.image_size}).",
                "Resize the frames or change model.image_size.",
            )
        if frames.dtype == torch.uint8:
            scaled = frames.to(self.mean_image.dtype) / 255
        elif frames.is_floating_point():
            scaled = frames.to(self.mean_image.dtype)
        else:
            raise ContractViolation(f"Frames have dtype {frames.dtype}.", "Use uint8, or floats in 0..1.")
        return (scaled - self.mean_image) * self.pixel_scale

    def hidden(self, frames: Tensor) -> Tensor:
        """Activations before the last two linear maps, (B, projector_width)."""
        pixels, patch = self.pixels(frames), self.spec.patch
        tokens = self.patch_embed(functional.unfold(pixels, patch, stride=patch).transpose(1, 2))
        tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], dim=1) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        # The class token alone saw too little at the start of training; the mean of the patches always carries
        # where something is.
        pooled = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
        return functional.gelu(self.projector(self.norm(pooled)))

    def forward(self, frames: Tensor) -> Tensor:
        """Latents of frames: (B, C, H, W) uint8 or floats in 0..1 -> (B, z) float32.

        Raises:
            ContractViolation: wrong shape or dtype.
        """
        return self.frame_proj(self.to_latent(self.hidden(frames))).float()


@torch.no_grad()
def fit_pixels(encoder: Encoder, frames: Tensor) -> None:
    """Set the public pixel constants: the mean image, and one over the standard deviation of what is left of it.

    Args:
        encoder: changed in place.
        frames: public frames (B, C, H, W), uint8 or floats in 0..1.

    Raises:
        DataError: all frames are equal, so there is nothing to encode.
    """
    encoder.mean_image.zero_()
    encoder.pixel_scale.fill_(1.0)
    total = torch.zeros_like(encoder.mean_image, dtype=torch.float64)
    for part in frames.split(512):
        total += encoder.pixels(part).double().sum(dim=0)
    mean = total / len(frames)
    encoder.mean_image.copy_(mean)
    square = sum(float(encoder.pixels(part).double().square().sum()) for part in frames.split(512))
    variance = square / frames.numel()
    if not variance > 1e-12:
        raise DataError("All public frames are equal.", "Record public episodes in which something moves.")
    encoder.pixel_scale.fill_(variance**-0.5)


@torch.no_grad()
def whiten_output(encoder: Encoder, frames: Tensor) -> None:
    """Set ``to_latent`` so that latents of these public frames have mean zero and identity covariance.

    The z leading principal directions of the hidden activations are taken, each scaled to unit variance. Directions
    that hold less than 1e-4 of the largest variance are scaled as if they held that much: they carry rounding noise.

    Args:
        encoder: changed in place; ``frame_proj`` becomes the identity.
        frames: public frames (B, C, H, W); a few hundred from different episodes.

    Raises:
        DataError: the hidden activations do not vary.
    """
    hidden = torch.cat([encoder.hidden(part) for part in frames.split(256)]).double()
    mean = hidden.mean(dim=0)
    centred = hidden - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(hidden))
    values, vectors = values.flip(0), vectors.flip(1)
    if not float(values[0]) > 0:
        raise DataError("The public frames all look the same to the encoder.", "Use public episodes that differ.")
    latent = encoder.spec.latent_dim
    weight = torch.zeros(latent, hidden.shape[1], dtype=torch.float64)
    kept = min(latent, hidden.shape[1])
    scale = values[:kept].clamp(min=1e-4 * float(values[0])).rsqrt()
    weight[:kept] = vectors[:, :kept].T * scale[:, None]
    encoder.to_latent.weight.copy_(weight)
    encoder.to_latent.bias.copy_(-(weight @ mean))
    encoder.frame_proj.weight.copy_(torch.eye(latent))
