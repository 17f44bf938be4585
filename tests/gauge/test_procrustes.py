"""Procrustes: recovers any orthogonal frame change, says when it cannot, and differentiates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes

from lensemble_flwr.errors import ContractViolation, DegenerateProcrustes
from lensemble_flwr.gauge import conditioning, polar_factor, procrustes_align


def random_orthogonal(d: int, seed: int, reflect: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    q = q * torch.sign(torch.diagonal(r))
    if (torch.linalg.slogdet(q).sign < 0) != reflect:
        q[:, 0] = -q[:, 0]
    return q


def rows(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 24), seed=st.integers(0, 10_000), reflect=st.booleans())
def test_recovers_rotations_and_reflections(d: int, seed: int, reflect: bool) -> None:
    source, q = rows(4 * d, d, seed), random_orthogonal(d, seed + 1, reflect)
    found, residual = procrustes_align(source, source @ q)
    assert torch.allclose(found, q, atol=1e-9)
    assert residual < 1e-9 * (4 * d) ** 0.5 * 10


@pytest.mark.parametrize(
    ("d", "reflect"), [(16, False), (16, True), (64, False), (64, True), (256, False), (256, True), (1024, True)]
)
def test_restores_float32_latents_to_1e5(d: int, reflect: bool) -> None:
    source, q = rows(4 * d, d).float(), random_orthogonal(d, 3, reflect)
    turned = (source.double() @ q.T).float()
    found, _ = procrustes_align(turned, source)
    assert (turned.double() @ found - source.double()).abs().max() < 1e-5
    assert torch.linalg.slogdet(found).sign == (-1 if reflect else 1)


@settings(max_examples=25, deadline=None)
@given(d=st.integers(2, 12), seed=st.integers(0, 10_000))
def test_agrees_with_scipy_on_noisy_data(d: int, seed: int) -> None:
    source, target = rows(6 * d, d, seed), rows(6 * d, d, seed + 1) + rows(6 * d, d, seed)
    found, residual = procrustes_align(source, target)
    theirs, _ = orthogonal_procrustes(source.numpy(), target.numpy())
    assert np.allclose(found.numpy(), theirs, atol=1e-8)
    assert residual == pytest.approx(np.linalg.norm(source.numpy() @ theirs - target.numpy()), rel=1e-9)


def test_no_orthogonal_matrix_does_better() -> None:
    source, target = rows(40, 6, 1), rows(40, 6, 2)
    _, best = procrustes_align(source, target)
    for seed in range(50):
        other = random_orthogonal(6, seed, seed % 2 == 0)
        assert torch.linalg.matrix_norm(source @ other - target) >= best - 1e-9


def test_refuses_a_frame_that_the_landmarks_do_not_span() -> None:
    flat = rows(100, 8)
    flat[:, 7] = 0
    with pytest.raises(DegenerateProcrustes) as caught:
        procrustes_align(flat, flat)
    assert caught.value.ratio < 1e-6
    with pytest.raises(DegenerateProcrustes):
        procrustes_align(torch.zeros(10, 3), torch.zeros(10, 3))


def test_the_test_is_relative_to_the_scale() -> None:
    small = 1e-6 * rows(50, 4)
    q, _ = procrustes_align(small, small)
    assert torch.allclose(q, torch.eye(4, dtype=torch.float64))


def test_ridge_is_the_identity_where_data_say_nothing() -> None:
    flat, noise = rows(200, 8), rows(200, 8, 9)
    source = flat.clone()
    source[:, 4:] = 1e-5 * noise[:, 4:]
    target = flat.clone()
    target[:, 4:] = 1e-5 * rows(200, 8, 10)[:, 4:]
    q, _ = procrustes_align(source, target, ridge=1e-3)
    assert (q[4:, 4:] - torch.eye(4)).abs().max() < 1e-4
    plain, _ = procrustes_align(source, target, tolerance=0.0)
    assert (plain[4:, 4:] - torch.eye(4)).abs().max() > 0.1


def test_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ContractViolation):
        procrustes_align(rows(5, 3), rows(6, 3))
    bad = rows(20, 3)
    bad[0, 0] = float("nan")
    with pytest.raises(ContractViolation):
        procrustes_align(bad, rows(20, 3))


def test_polar_factor_gradient() -> None:
    matrix = rows(5, 5).requires_grad_(True)
    assert torch.autograd.gradcheck(polar_factor, (matrix,))
    # Equal singular values, where torch's own derivative of the SVD is not finite.
    same = (2 * random_orthogonal(4, 0)).requires_grad_(True)
    weight = rows(4, 4, 5)
    (polar_factor(same) * weight).sum().backward()
    assert torch.isfinite(same.grad).all()
    assert torch.autograd.gradcheck(polar_factor, (same,))


def test_conditioning() -> None:
    assert conditioning(torch.diag(torch.tensor([4.0, 2.0]))) == pytest.approx(0.5)
    assert conditioning(torch.zeros(3, 3)) == 0.0
