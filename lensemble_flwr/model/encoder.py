"""Frames to latents: a small vision transformer without any batch statistics.

The latent frame must be free to rotate (see :mod:`lensemble_flwr.gauge`), so the encoder ends in a plain bias-free
``Linear(z, z)``, the ``frame_proj``, and nothing stands behind it. There is no BatchNorm in it: running statistics
would leave a participant un-noised, and batches of one participant are not those of another. What BatchNorm is
usually needed for here, keeping a JEPA from collapsing at the start, is done on public data only:

* the mean public image is subtracted, so a frame is what moves in it;
* while the public start is trained, the projector's hidden units are normalised over the batch; at its end
  :func:`fold_normaliser` puts the statistics of the public frames into the projector's own weights, which computes
  the same, and the normaliser is gone. From then on SIGReg alone keeps the latent healthy. (Near z = 0 its gradient
  is proportional to z: it keeps a healthy latent healthy but cannot raise a collapsed one.)
* participants may normalise too, but by what *public* landmarks give under the current weights
  (:class:`LandmarkNorm`), and fold it before they release: nothing of their own batches is in it.
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

    Parameters are federated when the surface is ``full``; the buffer ``mean_image`` is a public constant of the warm
    start and never changes after it. ``normaliser`` is the identity except while the warm start is trained.
    """

    mean_image: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        width, size = spec.width, spec.image_size
        self.register_buffer("mean_image", torch.zeros(spec.channels, size, size))
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
        self.normaliser: nn.Module = nn.Identity()
        self.to_latent = nn.Linear(spec.projector_width, spec.latent_dim)
        self.frame_proj = nn.Linear(spec.latent_dim, spec.latent_dim, bias=False)
        with torch.no_grad():
            self.frame_proj.weight.copy_(torch.eye(spec.latent_dim))

    def pixels(self, frames: Tensor) -> Tensor:
        """Frames as the transformer sees them: (B, C, H, W), uint8 or floats in 0..1, to centred, scaled floats.

        Frames may lie on another device than the model: landmarks stay on the CPU while a model trains on a GPU.
        """
        spec = self.spec
        if frames.ndim != 4 or tuple(frames.shape[1:]) != (spec.channels, spec.image_size, spec.image_size):
            raise ContractViolation(
                f"Frames have shape {tuple(frames.shape)}, "
                f"expected (B, {spec.channels}, {spec.image_size}, {spec.image_size}).",
                "Resize the frames or change model.image_size.",
            )
        if frames.dtype != torch.uint8 and not frames.is_floating_point():
            raise ContractViolation(f"Frames have dtype {frames.dtype}.", "Use uint8, or floats in 0..1.")
        gain = spec.pixel_gain / 255 if frames.dtype == torch.uint8 else spec.pixel_gain
        return (frames.to(self.mean_image) * gain).sub_(self.mean_image * spec.pixel_gain)

    def patches(self, frames: Tensor) -> Tensor:
        """Pixels cut into patches, (B, patches, C * patch * patch)."""
        spec = self.spec
        side = spec.image_size // spec.patch
        cut = self.pixels(frames).reshape(-1, spec.channels, side, spec.patch, side, spec.patch)
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def projected(self, frames: Tensor) -> Tensor:
        """Hidden units of the projector before their normaliser, (B, projector_width)."""
        tokens = self.patch_embed(self.patches(frames))
        tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], dim=1) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        # The class token alone saw too little at the start of training; the mean of the patches always carries
        # where something is.
        pooled = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
        return self.projector(self.norm(pooled))

    def forward(self, frames: Tensor) -> Tensor:
        """Latents of frames: (B, C, H, W) uint8 or floats in 0..1 -> (B, z) float32.

        Raises:
            ContractViolation: wrong shape or dtype.
        """
        hidden = functional.gelu(self.normaliser(self.projected(frames)))
        return self.frame_proj(self.to_latent(hidden)).float()


@torch.no_grad()
def fit_pixels(encoder: Encoder, frames: Tensor) -> None:
    """Set the public constant of the input, the mean image.

    Args:
        encoder: changed in place.
        frames: public frames (B, C, H, W), uint8 or floats in 0..1.

    Raises:
        DataError: all frames are equal, so there is nothing to encode.
    """
    encoder.mean_image.zero_()
    gain = encoder.spec.pixel_gain
    total = torch.zeros_like(encoder.mean_image, dtype=torch.float64)
    for part in frames.split(512):
        total += encoder.pixels(part).double().sum(dim=0) / gain
    encoder.mean_image.copy_(total / len(frames))
    if not any(float(encoder.pixels(part).abs().max()) > 1e-6 * gain for part in frames.split(512)):
        raise DataError("All public frames are equal.", "Record public episodes in which something moves.")


def attach_normaliser(encoder: Encoder) -> None:
    """Normalise the projector's hidden units over the batch; for training on public data only."""
    encoder.normaliser = nn.BatchNorm1d(encoder.spec.projector_width, affine=True).to(encoder.mean_image.device)


class LandmarkNorm(nn.Module):
    """Give every hidden unit the mean and spread that it had at first on public landmarks, whatever the weights below.

    The landmarks are the last ``count`` rows of each batch, so the gradient goes through their statistics, as in batch
    normalisation; but a frame's output does not depend on the private frames beside it, and what is computed in
    training is exactly what remains after :func:`fold_normaliser`.

    Args:
        hidden: (count, units), the landmarks' hidden units under the starting weights.
    """

    eps = 1e-5
    scale: Tensor
    shift: Tensor

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.count = len(hidden)
        self.register_buffer("scale", hidden.detach().var(dim=0, correction=0).add(self.eps).sqrt())
        self.register_buffer("shift", hidden.detach().mean(dim=0))

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, units) -> (B, units); the last ``count`` rows are the landmarks'."""
        scale, shift = self.fold(hidden[-self.count :])
        return hidden * scale + shift

    def fold(self, landmarks: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and summand, each (units,), for hidden units of landmarks (count, units)."""
        scale = self.scale.to(landmarks) * (landmarks.var(dim=0, correction=0) + self.eps).rsqrt()
        return scale, self.shift.to(landmarks) - landmarks.mean(dim=0) * scale


@torch.no_grad()
def attach_landmark_norm(encoder: Encoder, landmarks: Tensor) -> None:
    """Normalise by public landmarks (k, C, H, W) from here on. Changes no output of the present weights.

    From now on the encoder must be given batches that end in the landmarks, until :func:`fold_normaliser`.
    """
    encoder.normaliser = LandmarkNorm(encoder.projected(landmarks.to(encoder.mean_image.device)))


@torch.no_grad()
def fold_normaliser(encoder: Encoder, frames: Tensor) -> None:
    """Put the normaliser's scale and the statistics of these public frames into the projector, and remove it.

    Args:
        encoder: changed in place; computes afterwards what it computed with the statistics of ``frames``.
        frames: public frames (B, C, H, W), on any device; the landmarks if it was :func:`attach_landmark_norm`.
    """
    normaliser = encoder.normaliser
    if not isinstance(normaliser, (nn.BatchNorm1d, LandmarkNorm)):
        return
    units = torch.cat([encoder.projected(part).double() for part in frames.split(256)])
    if isinstance(normaliser, LandmarkNorm):
        scale, shift = normaliser.fold(units)
        bias = encoder.projector.bias.double() * scale + shift
    else:
        scale = normaliser.weight.double() * (units.var(dim=0, correction=0) + normaliser.eps).rsqrt()
        bias = (encoder.projector.bias.double() - units.mean(dim=0)) * scale + normaliser.bias.double()
    encoder.projector.weight.copy_(encoder.projector.weight.double() * scale[:, None])
    encoder.projector.bias.copy_(bias)
    encoder.normaliser = nn.Identity()
