"""A model as what it answers on public windows, and a network that is taught to give such answers.

Weights of networks of different size cannot be averaged, and averaged weights of networks that have drifted apart
answer badly. Answers can always be averaged: latents and predictions are vectors of one space. So participants release
answers, and everybody teaches a student the mean (Lin et al. 2020, arXiv:2006.07242, from released means only).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import ArtifactError, ContractViolation
from lensemble_flwr.model.world_model import WorldModel, state_digest

_TAG = b"lensemble/public-windows/1"


@dataclass(frozen=True)
class PublicWindows:
    """Public windows of three frames, and what the public start answers on them.

    Attributes:
        frames: (W, 3, C, H, W) uint8.
        actions: (W, e) float32, embeddings (public heads) of the actions that lead from the second frame to the third.
        latents: (3 W, z) float32, the public start's latents of all frames: the reference frame.
        predictions: (W, z) float32, its prediction of the third frame's latent.
    """

    frames: Tensor
    actions: Tensor
    latents: Tensor
    predictions: Tensor

    @property
    def hash(self) -> bytes:
        """SHA-256 of the content, 32 bytes."""
        return hashlib.sha256(_TAG + state_digest({f.name: getattr(self, f.name) for f in fields(self)})).digest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as safetensors, whole or not at all.

        Raises:
            ArtifactError: it cannot be written.
        """
        target = Path(path)
        tensors = {f.name: getattr(self, f.name).contiguous() for f in fields(self)}
        with file_errors(target.parent, "create"):
            target.parent.mkdir(parents=True, exist_ok=True)
        raw = safetensors.torch.save(tensors, metadata={"content_hash": self.hash.hex()})
        atomic_write(target, raw, mode=0o644)  # made of public data

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PublicWindows:
        """Read :meth:`save`.

        Raises:
            ArtifactError: missing, damaged, or not such a file.
        """
        try:
            with safetensors.safe_open(os.fspath(path), framework="pt") as stored:
                found = PublicWindows(**{f.name: stored.get_tensor(f.name) for f in fields(PublicWindows)})
                wanted = (stored.metadata() or {}).get("content_hash")
        except (OSError, safetensors.SafetensorError, KeyError, TypeError) as error:
            raise ArtifactError(f"There are no public windows at {path}.", "Make them again.") from error
        if found.hash.hex() != wanted:
            raise ArtifactError(f"The public windows at {path} do not match their hash.", "Get the file again.")
        return found


def _answers(model: WorldModel, frames: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    latents = model.encode(frames.flatten(0, 1)).view(len(frames), 3, -1)
    return latents, model.predict(latents[:, 0], latents[:, 1], actions)


@torch.no_grad()
def answers(model: WorldModel, frames: Tensor, actions: Tensor, batch: int = 64) -> tuple[Tensor, Tensor]:
    """What a model says about windows.

    Args:
        model: on the CPU.
        frames: (W, 3, C, H, W).
        actions: (W, e) embeddings.
        batch: windows at a time.

    Returns:
        Latents (3 W, z) of all frames and predictions (W, z) of the third ones.
    """
    parts = [_answers(model, f, a) for f, a in zip(frames.split(batch), actions.split(batch), strict=True)]
    return torch.cat([p[0] for p in parts]).flatten(0, 1), torch.cat([p[1] for p in parts])


def distil(
    model: WorldModel,
    windows: PublicWindows,
    latents: Tensor,
    predictions: Tensor,
    *,
    steps: int,
    lr: float,
    batch: int = 32,
    seed: int = 0,
) -> float:
    """Teach a model to answer like this: AdamW on the mean squared error of latents and predictions.

    Args:
        model: changed in place; encoder and predictor train, the adapter stays.
        windows: what is asked.
        latents, predictions: what should be answered, (3 W, z) and (W, z).
        steps, lr, batch: cosine schedule from ``lr`` to zero; windows of a step.
        seed: of the order of the windows.

    Returns:
        Root mean squared error of all answers afterwards.

    Raises:
        ContractViolation: answers of another shape.
    """
    if latents.shape != windows.latents.shape or predictions.shape != windows.predictions.shape:
        raise ContractViolation(f"Answers {tuple(latents.shape)}, {tuple(predictions.shape)} fit no window.")
    count = len(windows.frames)
    target = latents.view(count, 3, -1)
    draw = torch.Generator().manual_seed(seed)
    parameters = [p for n, p in model.named_parameters() if not n.startswith("adapter.")]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < min(batch, count):
            order = torch.cat([order, torch.randperm(count, generator=draw)])
        picked, order = order[:batch], order[batch:]
        got, predicted = _answers(model, windows.frames[picked], windows.actions[picked])
        loss = (got - target[picked]).square().mean() + (predicted - predictions[picked]).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    got, predicted = answers(model, windows.frames, windows.actions)
    error = torch.cat([got - latents, predicted - predictions])
    return float(error.double().square().mean().sqrt())
