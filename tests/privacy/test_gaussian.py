"""The closed form against 60-digit arithmetic, over the whole range that the ledgers may see."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import gaussian
from tests.effort import calls

MUS = [1e-7, 1e-5, 1e-4, 9.99e-4, 1.001e-3, 0.01, 0.1, 1.0, 3.0, 30.0, 1e3, 3.2e6, 1e8]
DELTAS = [0.9, 0.5, 0.1, 1e-5, 1e-10, 1e-15, 1e-50, 1e-300]


def exact_log_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        with mpmath.workdps(400 if mu < 1e-2 or e > 500 else 120):
            upper = mpmath.erfc((e / m - m / 2) / mpmath.sqrt(2)) / 2
            lower = mpmath.exp(e) * mpmath.erfc((e / m + m / 2) / mpmath.sqrt(2)) / 2
            return mpmath.log(upper - lower)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_is_an_upper_bound_and_tight(mu, delta):
    found = gaussian.epsilon(mu, delta)
    target = mpmath.log(mpmath.mpf(delta))
    if found == 0.0:
        assert exact_log_delta(mu, 0.0) <= target
        return
    assert exact_log_delta(mu, found) <= target, "unsound"
    below = found * (1 - 2e-11)
    assert exact_log_delta(mu, below) > target, "looser than stated"


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0, 12.0])
def test_delta_is_an_upper_bound_and_tight(mu, factor):
    epsilon = factor * (mu + mu * mu / 2)
    found, truth = gaussian.delta(mu, epsilon), exact_log_delta(mu, epsilon)
    assert mpmath.log(mpmath.mpf(found)) >= truth
    if mu <= 1e4 and truth > -690:
        slope = 1 + (abs(epsilon / mu) + mu) ** 2  # delta moves by about a * da when mu moves by its margin
        assert mpmath.log(mpmath.mpf(found)) - truth < 8e-12 * slope


@settings(deadline=None, max_examples=300)
@given(st.floats(1e-6, 1e5), st.floats(1e-300, 0.999), st.floats(1.0001, 10.0))
def test_monotone_and_consistent(mu, delta, more):
    epsilon = gaussian.epsilon(mu, delta)
    assert 0.0 <= epsilon <= gaussian.epsilon(mu * more, delta)
    assert epsilon >= gaussian.epsilon(mu, min(delta * more, 1.0))
    assert gaussian.delta(mu, epsilon * (1 + 1e-9) + 1e-300) <= delta * (1 + 1e-6)
    if epsilon > 0.0:
        assert gaussian.delta(mu, 0.0) > delta * (1 - 1e-9)


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-6, 1e6), st.floats(1e-100, 0.5))
def test_mu_for_inverts(epsilon, delta):
    mu = gaussian.mu_for(epsilon, delta)
    assert gaussian.epsilon(mu, delta) <= epsilon
    assert gaussian.epsilon(mu * (1 + 1e-10), delta) > epsilon


def test_whatever_is_no_number_is_infinite():
    nan, inf = math.nan, math.inf
    for mu, delta in [(nan, 1e-5), (inf, 1e-5), (-1.0, 1e-5), (1.0, nan), (1.0, 0.0), (1.0, -1.0), (1e300, 1e-5)]:
        assert gaussian.epsilon(mu, delta) == inf
    for mu, epsilon in [(nan, 1.0), (inf, 1.0), (-1.0, 1.0), (1.0, nan), (1.0, -1.0), (1e300, 1.0)]:
        assert gaussian.delta(mu, epsilon) == 1.0
    assert gaussian.epsilon(0.0, 1e-5) == 0.0
    assert gaussian.delta(0.0, 0.0) == 0.0
    assert 0.0 < gaussian.delta(1.0, inf) < 1e-300
    assert gaussian.epsilon(5.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(math.nan, 1e-5), (math.inf, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)]
)
def test_mu_for_refuses(epsilon, delta):
    with pytest.raises(ConfigError):
        gaussian.mu_for(epsilon, delta)


def test_mu_for_epsilon_zero():
    mu = gaussian.mu_for(0.0, 1e-5)
    assert 0 < mu
    assert gaussian.epsilon(mu, 1e-5) == 0.0
    assert gaussian.epsilon(mu * (1 + 1e-10), 1e-5) > 0.0


def test_fast():
    gaussian.epsilon(2.0, 1e-5)  # loads what it needs
    assert calls(lambda: gaussian.epsilon(3.0, 1e-5)) < 500


def test_log_tail():
    with mpmath.workdps(60):
        for x in (-3.0, 0.0, 10.0, 30.0, 64.0):
            truth = mpmath.log(mpmath.erfc(x / mpmath.sqrt(2)) / 2)
            assert gaussian.log_tail(x) == pytest.approx(float(truth), rel=1e-12)
