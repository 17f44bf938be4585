"""Orthogonal Procrustes: the rotation or reflection that brings one set of latents onto another.

Latents are rows throughout, a frame change is ``z -> z Q`` with Q in O(d). Reflections are included: nothing in the
training objective tells a latent from its mirror image, so a frame may come back mirrored. Everything is computed in
float64 whatever comes in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lensemble_flwr.errors import ContractViolation, DegenerateProcrustes

DEFAULT_TOLERANCE = 1e-6
"""Smallest s_min / s_max of the cross-covariance at which a rotation counts as determined."""


def cross_covariance(source: Tensor, target: Tensor) -> Tensor:
    """``source' target`` (d, d) float64 of two (n, d) sets of rows.

    Raises:
        ContractViolation: shapes differ, or a value is not finite.
    """
    if source.ndim != 2 or source.shape != target.shape or not len(source):
        raise ContractViolation(f"Procrustes needs two equal (n, d) sets, got {source.shape} and {target.shape}.")
    left, right = source.detach().double(), target.detach().double()
    if not (torch.isfinite(left).all() and torch.isfinite(right).all()):
        raise ContractViolation("A latent is not finite.", "Look for a diverged training step.")
    return left.T @ right


def conditioning(matrix: Tensor) -> float:
    """s_min / s_max of a matrix; 0 for a zero matrix."""
    values = torch.linalg.svdvals(matrix.double())
    return float(values[-1] / values[0]) if float(values[0]) > 0 else 0.0


def procrustes_align(
    source: Tensor,
    target: Tensor,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    ridge: float = 0.0,
) -> tuple[Tensor, float]:
    """Q in O(d) that minimises ``||source Q - target||_F``.

    With M = source' target = U S V', Q = U V'. A direction in which the latents hardly vary contributes a tiny
    singular value, and Q is then arbitrary there; hence the test. ``ridge`` > 0 takes the polar factor of
    ``M + ridge * s_max * I`` instead, which is the identity where the data say nothing; it is meant for *measuring*
    drift and is not exact.

    Args:
        source: (n, d) rows to be turned.
        target: (n, d) rows they should match.
        tolerance: smallest accepted s_min / s_max (of the matrix whose polar factor is taken).
        ridge: see above, as a share of the largest singular value.

    Returns:
        Q (d, d) float64 and the residual ``||source Q - target||_F``.

    Raises:
        DegenerateProcrustes: s_min / s_max is below ``tolerance``.
        ContractViolation: shapes differ, or a value is not finite.
    """
    matrix = cross_covariance(source, target)
    if ridge:
        largest = float(torch.linalg.matrix_norm(matrix, ord=2))
        matrix = matrix + ridge * largest * torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    left, values, right = torch.linalg.svd(matrix)
    ratio = float(values[-1] / values[0]) if float(values[0]) > 0 else 0.0
    if not ratio >= tolerance:
        raise DegenerateProcrustes(
            f"The landmarks determine no rotation: s_min / s_max = {ratio:.2e}, below {tolerance:.0e}.",
            "Use more landmarks from more episodes, or a latent of lower dimension.",
            ratio=ratio,
            tolerance=tolerance,
        )
    q = left @ right
    residual = float(torch.linalg.matrix_norm(source.detach().double() @ q - target.detach().double()))
    return q, residual


def residual_of(source: Tensor, target: Tensor) -> float:
    """``||source - target||_F`` in float64."""
    return float(torch.linalg.matrix_norm(source.detach().double() - target.detach().double()))


class _Polar(torch.autograd.Function):
    """Polar factor U V' of M = U S V', with a derivative that is finite for equal singular values.

    torch's own derivative of the SVD divides by s_i^2 - s_j^2. The polar factor needs only s_i + s_j:
    dQ = U [(U' dM V - V' dM' U) / (s_i + s_j)] V'.
    """

    @staticmethod
    def forward(ctx, matrix: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(matrix)
        ctx.save_for_backward(left, values, right)
        return left @ right

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        left, values, right = ctx.saved_tensors
        inner = left.T @ grad @ right.T
        inner = (inner - inner.T) / (values[:, None] + values[None, :])
        return left @ inner @ right


def polar_factor(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to ``matrix`` (d, d), differentiable where ``matrix`` is not singular."""
    return _Polar.apply(matrix)


def require_orthogonal(q: Tensor, slack: float = 1e-6) -> Tensor:
    """``q`` as float64, after a check that it is orthogonal.

    Raises:
        ContractViolation: not a square orthogonal matrix.
    """
    if q.ndim != 2 or q.shape[0] != q.shape[1]:
        raise ContractViolation(f"A frame change must be square, got {tuple(q.shape)}.")
    square = q.detach().double()
    error = float((square.T @ square - torch.eye(len(square), dtype=torch.float64, device=q.device)).abs().max())
    if not error <= slack or not math.isfinite(error):
        raise ContractViolation(f"The matrix is not orthogonal (error {error:.1e}).")
    return square
