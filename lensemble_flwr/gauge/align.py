"""Bring a trained model back into the reference frame before anything of it is released.

The full local weights are turned, never the difference to the global ones: turning is not linear in that difference.
Only weights that write or read latents change; in between the network is untouched, so encoder and predictor compute
exactly what they did, in the other frame. Afterwards the caller takes the difference again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lensemble_flwr.errors import ContractViolation, FrameDriftExceeded
from lensemble_flwr.gauge.drift import FrameDrift, frame_drift
from lensemble_flwr.gauge.procrustes import (
    DEFAULT_TOLERANCE,
    procrustes_align,
    require_orthogonal,
    residual_of,
)

DEFAULT_THRESHOLD_DEG = 15.0
DEFAULT_IMPROVEMENT = 0.8
DRIFT_RIDGE = 1e-3


@dataclass(frozen=True)
class FrameSurface:
    """Which weights of a state a frame change z -> z Q touches (torch's ``y = x W' + b`` convention).

    Attributes:
        rows: weights and biases whose output is a latent: W <- Q' W, b <- Q' b.
        columns: (name, blocks of input columns that read a latent): W[:, block] <- W[:, block] Q.
        right: (n, d) matrices used as ``x W`` whose result is a latent: W <- W Q.
    """

    rows: tuple[str, ...]
    columns: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    right: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All weights that a frame change touches."""
        return (*self.rows, *(name for name, _ in self.columns), *self.right)


def conjugate(state: Mapping[str, Tensor], surface: FrameSurface, q: Tensor) -> dict[str, Tensor]:
    """A state whose latents are those of ``state`` times Q, and which predicts the same in the new frame.

    Args:
        state: full weights (not a difference). Names of ``surface`` that are missing in it are skipped: with no
            adapter there is nothing to turn there.
        surface: which of them read or write latents.
        q: (d, d) orthogonal.

    Returns:
        A new state; tensors that do not change are shared, the others keep their dtype. Products are taken in float64.

    Raises:
        ContractViolation: Q is not orthogonal, or a weight does not fit it.
    """
    turn = require_orthogonal(q)
    changed = dict(state)
    try:
        for name in surface.rows:
            if name in state:
                changed[name] = (turn.T.to(state[name].device) @ state[name].detach().double()).to(state[name].dtype)
        for name, blocks in surface.columns:
            if name in state:
                weight = state[name].detach().double().clone()
                for start, stop in blocks:
                    weight[:, start:stop] = weight[:, start:stop] @ turn.to(weight.device)
                changed[name] = weight.to(state[name].dtype)
        for name in surface.right:
            if name in state:
                changed[name] = (state[name].detach().double() @ turn.to(state[name].device)).to(state[name].dtype)
    except RuntimeError as error:
        raise ContractViolation(f"{name} does not fit a frame change of size {len(q)}.") from error
    return changed


@dataclass(frozen=True)
class Alignment:
    """What :func:`align` found and did. Private to the participant: none of it is ever sent.

    Attributes:
        state: the weights to release, turned or as they were.
        fired: whether they were turned.
        drift: of the trained frame against the reference, before: of the applied rotation if it fired, otherwise
            measured with a ridge.
        residual_before, residual_after: ``||f(P) - f_ref(P)||_F`` as trained, and after the best rotation.
        reset: weights whose AdamW moments must be forgotten because they were turned.
        q: (d, d) float64, the frame change that was applied; None if it did not fire.
    """

    state: dict[str, Tensor]
    fired: bool
    drift: FrameDrift
    residual_before: float
    residual_after: float
    reset: tuple[str, ...]
    q: Tensor | None


def align(
    state: Mapping[str, Tensor],
    surface: FrameSurface,
    latents: Tensor,
    reference: Tensor,
    *,
    threshold_deg: float = DEFAULT_THRESHOLD_DEG,
    improvement: float = DEFAULT_IMPROVEMENT,
    tolerance: float = DEFAULT_TOLERANCE,
    reencode: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
) -> Alignment:
    """Measure the drift of a trained model on the public landmarks and turn it back if there is one.

    It fires when the largest principal angle is over the threshold *and* turning brings the residual below
    ``improvement`` times what it was. Both are needed: in directions in which the latents hardly vary Procrustes
    finds large rotations that mean nothing, and turning by them moves weights for no gain. A drift that no rotation
    explains is no change of frame, and the state passes unchanged, bit for bit.

    Args:
        state: full trained weights.
        surface: which of them a frame change touches.
        latents: (k, d) landmark latents of the trained model.
        reference: (k, d) landmark latents of the public start.
        threshold_deg: largest principal angle that is tolerated.
        improvement: see above.
        tolerance: conditioning of the landmarks that an exact rotation needs.
        reencode: landmark latents under a state; if given, the drift is measured once more after turning.

    Raises:
        DegenerateProcrustes: a turn is called for, but the landmarks do not determine it. Never release then.
        FrameDriftExceeded: the drift is over the threshold even after turning. Never release then.
        ContractViolation: shapes that do not fit, or a latent that is not finite.
    """
    before = residual_of(latents, reference)
    # The ridge keeps null directions from inventing drift; the exact rotation is only taken when it will be used.
    measured, after = procrustes_align(latents, reference, tolerance=0.0, ridge=DRIFT_RIDGE)
    drift = frame_drift(measured)
    if drift.max_deg <= threshold_deg or after >= improvement * before:
        return Alignment(dict(state), False, drift, before, after, (), None)
    q, after = procrustes_align(latents, reference, tolerance=tolerance)
    drift = frame_drift(q)
    turned = conjugate(state, surface, q)
    if reencode is not None:
        left, _ = procrustes_align(reencode(turned), reference, tolerance=0.0, ridge=DRIFT_RIDGE)
        rest = frame_drift(left).max_deg
        if rest > threshold_deg:
            raise FrameDriftExceeded(
                f"The frame is still {rest:.1f} degrees off after alignment, more than {threshold_deg:.1f}.",
                "Lower diloco.inner_steps or inner.lr, or raise objective.lambda_anc.",
                drift_deg=rest,
                threshold_deg=threshold_deg,
            )
    reset = tuple(name for name in surface.names if name in state)
    return Alignment(turned, True, drift, before, after, reset, q)
