"""Lower bounds from test statistics, against the exact trade-off of the Gaussian mechanism and randomised response.

Simulations use fixed seeds, so they cannot flake.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.privacy import audit, gaussian
from lensemble_flwr.privacy.audit import (
    epsilon_from_rates,
    lower_bounds,
    mu_from_rates,
    one_run_epsilon,
    rate_bound,
)


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (9, 10), (10, 10), (17, 5000)])
@pytest.mark.parametrize("confidence", [0.9, 0.999])
def test_rate_bound_is_clopper_pearson(hits: int, trials: int, confidence: float) -> None:
    oracle = stats.binomtest(hits, trials, alternative="less").proportion_ci(confidence, "exact").high
    assert float(rate_bound(hits, trials, confidence)) == pytest.approx(oracle, rel=1e-9)


@settings(deadline=None)
@given(st.floats(0.05, 5.0), st.floats(-8.0, 8.0), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_no_threshold_refutes_a_true_epsilon_and_every_threshold_shows_the_true_mu(
    mu: float, threshold: float, delta: float
) -> None:
    alpha, beta = stats.norm.sf(threshold), stats.norm.cdf(threshold - mu)
    assert epsilon_from_rates(alpha, beta, delta) <= gaussian.epsilon(mu, delta) + 1e-9
    if 1e-6 < alpha < 1 - 1e-6 and 1e-6 < beta < 1 - 1e-6:
        assert mu_from_rates(alpha, beta) == pytest.approx(mu, rel=1e-6)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_the_best_threshold_shows_the_exact_epsilon(mu: float) -> None:
    t = np.linspace(-8, 12, 200_001)
    best = float(np.max(epsilon_from_rates(stats.norm.sf(t), stats.norm.cdf(t - mu), 1e-5)))
    assert best == pytest.approx(gaussian.epsilon(mu, 1e-5), rel=1e-4)


def test_rates_that_say_nothing_bound_nothing() -> None:
    assert float(epsilon_from_rates(1.0, 1.0, 1e-5)) == 0.0
    assert float(epsilon_from_rates(0.5, 0.5, 1e-5)) == 0.0
    assert float(mu_from_rates(1.0, 0.1)) == 0.0
    assert float(mu_from_rates(0.6, 0.6)) == 0.0


def test_bounds_are_too_large_as_seldom_as_they_say() -> None:
    """500 audits of N(0, 1) against N(1, 1) at 90 %: each bound is too large in at most 50 of them, up to 4.5 standard
    errors (30)."""
    rng = np.random.default_rng(0)
    truth = gaussian.epsilon(1.0, 1e-5)
    over = np.zeros(2, int)
    for _ in range(500):
        found = lower_bounds(rng.standard_normal(200), 1.0 + rng.standard_normal(200), 1e-5, 0.9)
        over += found.epsilon > truth, found.mu > 1.0
    assert over.max() <= 80
    assert over[1] >= 1, "so cautious that the bound would be of no use"


@pytest.mark.parametrize(("mu", "least"), [(0.3, 0.7), (1.0, 0.9), (3.0, 0.9)])
def test_the_bound_on_mu_is_sharp(mu: float, least: float) -> None:
    rng = np.random.default_rng(1)
    found = lower_bounds(rng.standard_normal(50_000), mu + rng.standard_normal(50_000), 1e-5, 0.999)
    assert least * mu < found.mu < mu
    assert found.mu_epsilon == gaussian.epsilon(found.mu, 1e-5)


def test_no_overlap_is_limited_by_the_number_of_runs_only() -> None:
    found = lower_bounds(np.zeros(2000), np.ones(2000), 1e-5, 0.99)
    least = float(rate_bound(0, 1000, 0.995))
    assert found.epsilon == pytest.approx(math.log((1 - 1e-5 - least) / least))


def test_statistics_that_cannot_be_audited_are_refused() -> None:
    good = np.arange(10.0)
    for bad in (good[:3], np.array([1.0, 2.0, 3.0, math.nan]), good.reshape(2, 5)):
        with pytest.raises(ContractViolation):
            lower_bounds(bad, good, 1e-5, 0.9)
        with pytest.raises(ContractViolation):
            lower_bounds(good, bad, 1e-5, 0.9)
    for delta, confidence in ((0.0, 0.9), (1e-5, 1.0), (1e-5, 0.0), (1.0, 0.9)):
        with pytest.raises(ContractViolation):
            lower_bounds(good, good, delta, confidence)


# --- one run ---


def test_one_run_p_value_against_the_theorem_written_out() -> None:
    m, r, v, delta, epsilon = 40, 20, 15, 1e-3, 1.0
    p = 1 / (1 + math.exp(-epsilon))
    tail = [stats.binom.sf(x - 1, r, p) for x in range(v + 1)]
    expected = tail[v] + 2 * m * delta * max((tail[v - i] - tail[v]) / i for i in range(1, v + 1))
    assert audit._one_run_p_value(m, r, v, delta, epsilon) == pytest.approx(expected, rel=1e-9)
    assert audit._one_run_p_value(m, r, 0, delta, epsilon) == 1.0


def test_one_run_on_randomised_response() -> None:
    """Each canary is told truly with probability e^2/(1 + e^2): exactly epsilon 2. At 90 %, 100 runs."""
    rng, over, found = np.random.default_rng(2), 0, []
    for _ in range(100):
        coins = rng.random(1000) < 0.5
        told = coins ^ (rng.random(1000) > 1 / (1 + math.exp(-2)))
        found.append(one_run_epsilon(told + 0.5 * rng.random(1000), coins, 1e-9, 0.9))
        over += found[-1] > 2.0
    assert over <= 10 + 4.5 * math.sqrt(9)
    assert np.median(found) > 1.6


def test_one_run_refuses() -> None:
    coins = np.ones(10, bool)
    for scores in (np.zeros(9), np.full(10, math.nan), np.zeros((5, 2)), np.zeros(0)):
        with pytest.raises(ContractViolation):
            one_run_epsilon(scores, coins, 1e-9, 0.9)
    for delta, confidence, shares in ((0.0, 0.9, (0.1,)), (1e-9, 1.0, (0.1,)), (1e-9, 0.9, (0.0,))):
        with pytest.raises(ContractViolation):
            one_run_epsilon(np.zeros(10), coins, delta, confidence, shares)
