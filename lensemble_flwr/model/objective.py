"""The training loss: ``lambda_pred * prediction + lambda_sig * SIGReg + lambda_anc * anchor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model.sigreg import sigreg
from lensemble_flwr.model.spec import ObjectiveSpec
from lensemble_flwr.model.team import Total
from lensemble_flwr.model.world_model import WorldModel

Encode = Callable[[Tensor], Tensor]
"""Frames to latents."""

Anchor = Callable[[Encode], Tensor]
"""A frame anchor: takes the encode function, gives a scalar loss (``lensemble_flwr.gauge.FrameAnchor``)."""


@dataclass(frozen=True)
class LossTerms:
    """Scalar tensors of one step. ``sigreg`` and ``anchor`` are None when their weight is zero."""

    total: Tensor
    prediction: Tensor
    sigreg: Tensor | None
    anchor: Tensor | None


class Objective:
    """Loss of a batch of windows.

    Args:
        spec: the weights.
        anchor: what holds the latent frame; needed if ``lambda_anc > 0``. Called with the model's encode function.

    Raises:
        ContractViolation: ``lambda_anc > 0`` without an anchor.
    """

    def __init__(self, spec: ObjectiveSpec, anchor: Anchor | None = None) -> None:
        if spec.lambda_anc > 0 and anchor is None:
            raise ContractViolation(
                "objective.lambda_anc is above zero but there is no frame anchor.",
                "Set gauge.anchor, or objective.lambda_anc=0.",
            )
        self.spec = spec
        self.anchor = anchor

    def prediction(self, model: WorldModel, latents: Tensor, actions: Tensor) -> Tensor:
        """Weighted sum of the teacher-forced and the rolled-out mean squared error.

        Args:
            model: predicts.
            latents: (B, L, z), L >= 3 consecutive frames.
            actions: (B, L - 1, e) embeddings; ``actions[:, t]`` leads from frame t to t + 1.

        Returns:
            Scalar. Both errors are means over batch and latent coordinates, summed over the L - 2 predicted frames,
            so that a longer window weighs its later steps as much as its first against SIGReg.
        """
        spec = self.spec
        if latents.ndim != 3 or latents.shape[1] < 3 or actions.shape[:2] != (len(latents), latents.shape[1] - 1):
            raise ContractViolation(f"Latents {tuple(latents.shape)} and actions {tuple(actions.shape)} do not match.")
        steps = latents.shape[1] - 2
        target = latents[:, 2:].detach() if spec.target_stop_gradient else latents[:, 2:]
        loss = latents.new_zeros(())
        if spec.teacher_weight:
            forced = model.predict(latents[:, :-2], latents[:, 1:-1], actions[:, 1:])
            loss = loss + spec.teacher_weight * steps * (forced - target).square().mean()
        if spec.rollout_weight:
            rolled = model.rollout(latents[:, 0], latents[:, 1], actions[:, 1:])
            loss = loss + spec.rollout_weight * steps * (rolled - target).square().mean()
        return loss

    def __call__(
        self,
        model: WorldModel,
        latents: Tensor,
        actions: Tensor,
        sketch_seed: bytes | int,
        step: int,
        *,
        encoder_trains: bool = True,
        encode: Encode | None = None,
        weight: float = 1.0,
        total: Total | None = None,
    ) -> LossTerms:
        """All three terms.

        Args:
            model: predicts, and encodes the landmarks of the anchor.
            latents: (B, L, z) of consecutive frames.
            actions: (B, L - 1, e) embeddings.
            sketch_seed, step: name the random directions of SIGReg.
            encoder_trains: with a frozen encoder SIGReg and anchor are constants and are left out.
            encode: what the anchor is called with; None: the model's own.
            weight, total: of a process among several (:class:`~lensemble_flwr.model.team.Team`): factor on the
                prediction error of its part of the batch, and how SIGReg adds up over them.
        """
        spec = self.spec
        prediction = self.prediction(model, latents, actions)
        loss = spec.lambda_pred * weight * prediction
        gaussian = frame = None
        if encoder_trains and spec.lambda_sig:
            rows = latents.reshape(-1, latents.shape[-1])
            gaussian = sigreg(rows, sketch_seed, step, spec.sketch_dim, spec.knots, spec.t_max, total)
            loss = loss + spec.lambda_sig * gaussian
        if encoder_trains and spec.lambda_anc and self.anchor is not None:
            frame = self.anchor(encode or model.encode)
            loss = loss + spec.lambda_anc * frame
        return LossTerms(loss, prediction, gaussian, frame)
