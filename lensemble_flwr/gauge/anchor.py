"""What holds the latent frame still while participants train: targets on public landmarks.

Prediction and SIGReg do not change when all latents turn by a Q in O(d), so nothing in them keeps participants in one
frame. The anchor does, by pulling the latents of public landmark frames towards where the public start put them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lensemble_flwr.errors import ConfigError, ContractViolation, DegenerateProcrustes, ProbeError
from lensemble_flwr.gauge.procrustes import DEFAULT_TOLERANCE, conditioning, polar_factor

LANDMARKS_PER_DIMENSION = 4
"""Fewer than about 4 landmarks a latent dimension leave some direction of a trained latent undetermined."""


def check_landmarks(
    targets: Tensor, *, tolerance: float = DEFAULT_TOLERANCE, per_dimension: int = LANDMARKS_PER_DIMENSION
) -> float:
    """Whether landmarks can pin a frame: enough of them, and spread in all directions.

    Args:
        targets: (k, d) reference latents of the landmarks.
        tolerance: smallest accepted s_min / s_max of ``targets' targets``.
        per_dimension: k must be at least this many times d.

    Returns:
        s_min / s_max.

    Raises:
        ProbeError: too few landmarks, or a target that is not finite.
        DegenerateProcrustes: the landmarks hardly vary in some direction.
    """
    if targets.ndim != 2 or not torch.isfinite(targets).all():
        raise ProbeError(f"Landmark targets must be finite and of shape (k, d), got {tuple(targets.shape)}.")
    count, dim = targets.shape
    if count < per_dimension * dim:
        raise ProbeError(
            f"{count} landmarks cannot pin a frame of dimension {dim}; {per_dimension * dim} are needed.",
            "Use a larger public probe.",
            num_landmarks=count,
            d=dim,
        )
    ratio = conditioning(targets.detach().double().T @ targets.detach().double())
    if not ratio >= tolerance:
        raise DegenerateProcrustes(
            f"The landmarks hardly vary in some latent direction: s_min / s_max = {ratio:.2e}, below {tolerance:.0e}.",
            "Take landmarks from more episodes.",
            ratio=ratio,
            tolerance=tolerance,
        )
    return ratio


class FrameAnchor:
    """Anchor loss on public landmarks; call it with the encode function of the model that trains.

    ``landmark``: mean over landmarks of ``||f(p_i) - t_i||^2``. ``rotational``: ``||Q* - I||_F^2``, with Q* the
    Procrustes rotation of f(P) onto the targets; it leaves everything free but the frame.

    Args:
        landmarks: (k, ...) public landmark inputs, such as frames.
        targets: (k, d) latents of them under the public start; detached here.
        kind: ``landmark`` or ``rotational``.
        tolerance, per_dimension: see :func:`check_landmarks`.

    Raises:
        ConfigError: unknown kind.
        ProbeError, DegenerateProcrustes: see :func:`check_landmarks`.
    """

    def __init__(
        self,
        landmarks: Tensor,
        targets: Tensor,
        kind: str = "landmark",
        *,
        tolerance: float = DEFAULT_TOLERANCE,
        per_dimension: int = LANDMARKS_PER_DIMENSION,
    ) -> None:
        if kind not in ("landmark", "rotational"):
            raise ConfigError(f"gauge.anchor is {kind!r}.", "Use landmark, rotational or none.")
        if len(landmarks) != len(targets):
            raise ProbeError(f"{len(landmarks)} landmarks but {len(targets)} targets.")
        self.conditioning = check_landmarks(targets, tolerance=tolerance, per_dimension=per_dimension)
        self.kind = kind
        self.tolerance = tolerance
        self.landmarks = landmarks
        self.targets = targets.detach().clone()

    def __call__(self, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss, a scalar that is differentiable in the weights behind ``encode``.

        Raises:
            ContractViolation: ``encode`` gives latents of another shape.
            DegenerateProcrustes: (rotational) the latents determine no rotation.
        """
        latents = encode(self.landmarks)
        targets = self.targets.to(latents.device)
        if latents.shape != targets.shape:
            raise ContractViolation(f"Landmark latents are {tuple(latents.shape)}, targets {tuple(targets.shape)}.")
        if self.kind == "landmark":
            return (latents - targets).square().sum(dim=1).mean()
        matrix = latents.double().T @ targets.double()
        ratio = conditioning(matrix.detach())
        if not ratio >= self.tolerance:
            raise DegenerateProcrustes(
                f"The landmark latents determine no rotation: s_min / s_max = {ratio:.2e}.",
                "Use gauge.anchor=landmark, or a larger probe.",
                ratio=ratio,
                tolerance=self.tolerance,
            )
        q = polar_factor(matrix)
        # ||Q - I||^2 = 2 d - 2 tr Q for an orthogonal Q.
        return (2 * len(q) - 2 * torch.trace(q)).to(latents.dtype)
