"""The expected signal-to-noise of a round: against a simulation, and consistent with what it is inverted for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.privacy.preflight import fewest_participants, largest_dimension, preflight


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
def test_the_ratio_is_that_of_simulated_sums(rate: float) -> None:
    """Mean of the sum over its root mean square deviation, over coins and noise; orthogonal updates of norm C."""
    n, d, std, clip, rng = 20, 40, 0.07, 0.5, np.random.default_rng(7)
    updates = np.zeros((n, d))
    updates[np.arange(n), np.arange(n)] = clip
    coins = rng.random((4000, n)) < rate
    sums = coins @ updates + std * math.sqrt(n) * rng.standard_normal((4000, d))
    mean = rate * updates.sum(0)
    deviation = math.sqrt(float(((sums - mean) ** 2).sum(1).mean()))
    expected = float(np.linalg.norm(mean)) / deviation
    assert preflight(n, d, std, clip, coherence=0.0, sample_rate=rate) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
def test_the_largest_dimension_and_the_fewest_participants_are_at_the_edge(rate: float) -> None:
    d = largest_dimension(100, 0.05, 1.0, ratio=0.5, sample_rate=rate)
    assert d > 10
    assert preflight(100, d, 0.05, 1.0, sample_rate=rate) >= 0.5 * (1 - 1e-9)
    assert preflight(100, d + 1, 0.05, 1.0, sample_rate=rate) < 0.5
    n = fewest_participants(lambda n: 0.5, 100, 1.0, ratio=0.5, sample_rate=rate)
    assert preflight(n, 100, 0.5, 1.0, sample_rate=rate) >= 0.5
    assert preflight(int(n * 0.98) - 1, 100, 0.5, 1.0, sample_rate=rate) < 0.5


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.1, math.nan])
def test_bad_rates(bad: float) -> None:
    with pytest.raises(ContractViolation, match="sample rate"):
        preflight(10, 10, 1.0, 1.0, sample_rate=bad)
