"""Which ring a federation needs: measured rounding against the noise, and what preflight says of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.federation.rings import RingCost, recommended, ring_costs, ring_line
from lensemble_flwr.privacy.mechanism import encode_exact, private_release
from lensemble_flwr.privacy.noise import ReplayEntropy
from lensemble_flwr.secagg import RingParams

D = 200_000


def config(overrides: str):
    return load_config(f"experiment=linear {overrides}")


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_rounding_after_noise_adds_what_is_said(noise: float) -> None:
    """The same noise on a fine ring and on one of 16 bits; n = 2e5, so a variance off by 2 % would be 6 errors away."""
    settings = config(f"privacy.noise_multiplier={noise} privacy.clip_norm=1 privacy.guarantee=local")
    n = settings.federation.participants
    costs = {cost.bits: cost for cost in ring_costs(settings, n, D)}
    plan = make_plan(settings, n, D)
    values = {}
    for bits in (16, 32):
        ring = RingParams(bits, n, round(-math.log2(costs[bits].step)), D)
        release = private_release(None, D, 1.0, plan.noise_std, ReplayEntropy(1), ring.scale_log2, ring.qmax)
        values[bits] = release.q * ring.grid
    error = values[16] - values[32]
    assert error.var() / plan.noise_std**2 == pytest.approx(costs[16].added, rel=0.02)
    assert abs(error.mean()) < 5 * error.std() / math.sqrt(D)
    assert costs[16].added > 1e4 * costs[32].added


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_stochastic_rounding_without_privacy_adds_no_more_than_is_said(bits: int) -> None:
    settings = config(f"privacy.enabled=false secagg.ring_bits={bits}")
    n = settings.federation.participants
    x = np.random.default_rng(0).standard_normal(D) * settings.secagg.range / 10
    ring = make_plan(settings, n, D).ring
    release = encode_exact(x, ring.scale_log2, ring.qmax, ReplayEntropy(2), settings.secagg.range)
    error = (release.q * ring.grid - x).var() / np.mean(x**2)
    (said,) = (cost.added for cost in ring_costs(settings, n, D, float(np.mean(x**2))) if cost.bits == bits)
    assert said / 2 < error < said


def test_recommendation() -> None:
    fine, middle, coarse = RingCost(32, 1e-9, 1e-18, 400), RingCost(24, 1e-6, 1e-12, 300), RingCost(16, 1e-3, 0.1, 200)
    assert recommended([coarse, middle, fine]) is middle
    assert recommended([coarse]) is None
    assert "secagg.ring_bits=24 would make the masked vector" in ring_line(32, [coarse, middle, fine])
    assert "25% shorter" in ring_line(32, [coarse, middle, fine])
    assert "WARNING" in ring_line(16, [coarse, middle, fine])
    for said in (ring_line(24, [coarse, middle, fine]), ring_line(16, [coarse]), ring_line(32, [])):
        assert "ring_bits=" not in said


def test_a_ring_that_the_claim_forbids_is_not_offered() -> None:
    settings = config(
        "federation.participants=100 federation.min_participants=100 secagg.min_survivors=99 "
        "privacy.noise_multiplier=0.05 privacy.clip_norm=1 privacy.guarantee=central"
    )
    assert [cost.bits for cost in ring_costs(settings, 100, D)] == [24, 32]


def test_the_rings_of_the_shipped_experiments() -> None:
    """64 participants at epsilon 8: the noise is some twenty steps of the 16-bit ring, and 16 bits do."""
    settings = load_config("experiment=quickstart")
    best = recommended(ring_costs(settings, settings.federation.participants, 128))
    assert best is not None
    assert best.bits in (16, 24)
    assert best.negligible
