"""SIGReg: the statistic against an independent integral, its invariances, and reproducible directions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model import sigreg, sketch_directions, sketch_hash
from lensemble_flwr.model.sigreg import _log, epps_pulley


def gaussian(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_statistic_is_the_trapezoid_sum_of_the_definition() -> None:
    samples = gaussian(40, 3).double().numpy() * 1.3 + 0.2
    t = np.linspace(0, 3, 17)
    phi = np.exp(-(t**2) / 2)
    for k in range(3):
        empirical = np.exp(1j * t[:, None] * samples[:, k]).mean(axis=1)
        expected = 40 * 2 * np.trapezoid(np.abs(empirical - phi) ** 2 * phi, t)
        assert float(epps_pulley(torch.from_numpy(samples))[k]) == pytest.approx(expected, rel=1e-5)


def test_statistic_converges_to_the_integral() -> None:
    samples = gaussian(30, 1, 3).double().numpy()[:, 0] * 0.7

    def integrand(t: float) -> float:
        return abs(np.exp(1j * t * samples).mean() - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2)

    expected = 30 * integrate.quad(integrand, -3, 3, epsabs=1e-12)[0]
    many = float(epps_pulley(torch.from_numpy(samples)[:, None], knots=2001)[0])
    assert many == pytest.approx(expected, rel=1e-4)
    assert float(epps_pulley(torch.from_numpy(samples)[:, None])[0]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("n", [16, 64, 256, 1024])
def test_standard_gaussian_reads_one_at_every_batch_size(n: int) -> None:
    mean = np.mean([float(sigreg(gaussian(n, 16, seed), seed, 0, 128)) for seed in range(12)])
    assert 0.8 < mean < 1.25


def test_reads_collapse_shift_and_low_rank() -> None:
    z = gaussian(256, 64)
    rank4 = gaussian(256, 4, 1) @ torch.linalg.qr(gaussian(64, 4, 2))[0].T * 4
    healthy = float(sigreg(z, 0, 0, 512))
    assert float(sigreg(z * 0.05, 0, 0, 512)) > 50 * healthy
    assert float(sigreg(rank4, 0, 0, 512)) > 5 * healthy
    assert float(sigreg(z + 3, 0, 0, 512)) > 100 * healthy  # uncentred: a translation is seen


def test_gradient_points_back_to_unit_scale_and_vanishes_at_zero() -> None:
    for scale, sign in ((0.3, -1), (2.0, 1)):
        z = (gaussian(256, 8) * scale).requires_grad_(True)
        sigreg(z, 0, 0).backward()
        # Gradient descent moves the scale towards one.
        assert math.copysign(1, float((z.grad * z.detach()).sum())) == sign
    zero = torch.zeros(64, 8, requires_grad=True)
    sigreg(zero, 0, 0).backward()
    assert zero.grad.abs().max() < 1e-6  # why a collapsed latent cannot be raised


def test_turning_latents_and_directions_together_changes_nothing() -> None:
    z, q = gaussian(128, 12).double(), torch.linalg.qr(gaussian(12, 12, 5).double())[0]
    a = torch.from_numpy(sketch_directions(7, 3, 12, 64)).double()
    assert torch.allclose(epps_pulley(z @ a), epps_pulley((z @ q) @ (q.T @ a)), atol=1e-4)


def test_turning_latents_alone_changes_only_the_sample_of_directions() -> None:
    """In expectation over directions SIGReg does not see the frame: that is why frames drift."""
    z, q = gaussian(128, 6) * torch.tensor([2.0, 1, 1, 1, 0.5, 0.5]), torch.linalg.qr(gaussian(6, 6, 5))[0]
    one, other = float(sigreg(z, 0, 0, 64)), float(sigreg(z @ q, 0, 0, 64))
    assert abs(one - other) > 1e-3
    many, turned = float(sigreg(z, 0, 0, 40_000)), float(sigreg(z @ q, 0, 0, 40_000))
    assert turned == pytest.approx(many, rel=0.02)


def test_directions_are_unit_uniform_and_named_by_seed_and_step() -> None:
    a = sketch_directions(b"round seed", 4, 16, 4096)
    assert a.dtype == np.float32
    assert a.shape == (16, 4096)
    assert np.allclose(np.linalg.norm(a, axis=0), 1, atol=1e-6)
    # One coordinate of a uniform direction in d = 16: t / sqrt(t^2 + 15) with a Student t of 15 degrees.
    scaled = a[0] * np.sqrt(15) / np.sqrt(1 - a[0].astype(np.float64) ** 2)
    assert stats.kstest(scaled, stats.t(15).cdf).pvalue > 1e-3
    assert np.abs(a @ a.T / 4096 - np.eye(16) / 16).max() < 0.01
    assert np.array_equal(a, sketch_directions(b"round seed", 4, 16, 4096))
    assert not np.array_equal(a, sketch_directions(b"round seed", 5, 16, 4096))
    assert not np.array_equal(a, sketch_directions(b"round sees", 4, 16, 4096))
    assert not np.array_equal(sketch_directions(1, 0, 4, 4), sketch_directions((1).to_bytes(32, "little"), 0, 4, 4))


def test_global_random_state_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state()
    first = sketch_directions(5, 0, 8, 8)
    torch.manual_seed(2)
    assert np.array_equal(first, sketch_directions(5, 0, 8, 8))
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state())


def test_directions_are_pinned() -> None:
    """Participants on different CPUs must draw the same bytes; a change of these is a protocol change."""
    assert sketch_hash(b"s", 16, 64).hex() == GOLDEN_HASH
    assert sketch_directions(0, 0, 3, 2).view(np.uint32).tolist() == GOLDEN_BITS


def test_own_logarithm_is_accurate() -> None:
    x = np.concatenate([np.random.default_rng(0).uniform(0, 1, 10_000), [2.0**-60, 1 - 2.0**-53, 0.5, np.sqrt(0.5)]])
    x = x[x > 0]
    assert np.allclose(_log(x), np.log(x), rtol=4e-16 * 4, atol=1e-17)


def test_sketch_hash_covers_everything() -> None:
    base = sketch_hash(3, 8, 16)
    assert len(base) == 32
    assert base == sketch_hash(3, 8, 16)
    assert len({base, sketch_hash(4, 8, 16), sketch_hash(3, 16, 8), sketch_hash(3, 8, 17)}) == 4


def test_refuses_bad_input() -> None:
    for seed in (-1, 1.5, "s", True, 2**256):
        with pytest.raises(ContractViolation):
            sketch_directions(seed, 0, 4, 4)  # type: ignore[arg-type]
    with pytest.raises(ContractViolation):
        sketch_directions(0, -1, 4, 4)
    with pytest.raises(ContractViolation):
        sigreg(torch.zeros(1, 4), 0, 0)
    with pytest.raises(ContractViolation):
        sigreg(torch.zeros(4), 0, 0)


GOLDEN_HASH = "39aeaffe6326424890585beddcaaef65f2757e3748a054716e861a15a1775dbf"
GOLDEN_BITS = [[1041831872, 3169472662], [3165960025, 1062875469], [3212644176, 3204821490]]
