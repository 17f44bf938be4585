"""The conversion of concentrated privacy against 60-digit arithmetic, and what must never be under-reported."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.privacy import concentrated, gaussian
from lensemble_flwr.privacy.accountant import build_accountant

mus, deltas = st.floats(1e-6, 1e5), st.floats(1e-290, 0.5)


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """The best order, by a fine search in 60 digits."""
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def value(b):
            return b * ((b + 1) * m * m / 2 - e) + (b + 1) * mpmath.log(b / (b + 1)) - mpmath.log(b)

        def slope(b):
            return m * m * (b + mpmath.mpf(1) / 2) - e - mpmath.log1p(1 / b)

        low, high = mpmath.mpf(10) ** -60, mpmath.mpf(10) ** 60
        for _ in range(400):
            middle = mpmath.sqrt(low * high)
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
        return mpmath.exp(value(low))


@pytest.mark.parametrize("mu", [1e-5, 0.01, 0.3, 1.0, 4.0, 60.0, 3e3])
@pytest.mark.parametrize("factor", [0.0, 0.3, 2.0, 6.0])
def test_delta_is_the_best_order_rounded_up(mu: float, factor: float) -> None:
    epsilon = mu * mu / 2 + factor * mu
    truth, found = exact_delta(mu, epsilon), concentrated.delta(mu, epsilon)
    assert found >= truth
    assert found <= truth * (1 + mpmath.mpf(10) ** -8 * (1 + factor**2))


@settings(deadline=None, max_examples=300)
@given(mus, deltas)
def test_epsilon_and_delta_are_inverse(mu: float, delta: float) -> None:
    epsilon = concentrated.epsilon(mu, delta)
    assert math.isfinite(epsilon)
    if epsilon > 0:
        back = concentrated.delta(mu, epsilon)
        assert back <= delta * (1 + 1e-7 * (1 + abs(math.log(delta)) + epsilon * 1e-3))
        assert concentrated.delta(mu, epsilon * (1 - 1e-4)) > delta * (1 - 1e-6)


@settings(deadline=None, max_examples=200)
@given(mus, deltas)
def test_it_is_above_the_gaussian_and_not_above_the_accountant(mu: float, delta: float) -> None:
    epsilon = concentrated.epsilon(mu, delta)
    assert epsilon >= gaussian.epsilon(mu, delta) * (1 - 1e-9)
    rdp = build_accountant("rdp")
    rdp.step(noise_multiplier=1 / mu)
    assert epsilon <= rdp.spent(target_delta=delta) * (1 + 1e-9) + 1e-9


def test_its_price_at_usual_targets() -> None:
    """The figures of docs/privacy.md: 7 to 9 % more epsilon than the continuous Gaussian."""
    for mu, plain, more in ((0.5, 1.99, 1.09), (1.0, 4.38, 1.08), (2.0, 10.0, 1.07)):
        assert gaussian.epsilon(mu, 1e-5) == pytest.approx(plain, abs=0.02)
        assert concentrated.epsilon(mu, 1e-5) / gaussian.epsilon(mu, 1e-5) == pytest.approx(more, abs=0.015)


@settings(deadline=None, max_examples=100)
@given(st.floats(1e-3, 1e4), st.floats(1e-200, 0.4))
def test_mu_for_is_the_largest(epsilon: float, delta: float) -> None:
    mu = concentrated.mu_for(epsilon, delta)
    assert concentrated.epsilon(mu, delta) <= epsilon
    assert concentrated.epsilon(mu * (1 + 1e-9), delta) > epsilon


@settings(deadline=None)
@given(mus, mus, st.floats(0, 1e4), st.floats(0, 1e4))
def test_delta_is_monotone(a: float, b: float, e: float, f: float) -> None:
    low, high = sorted((a, b))
    near, far = sorted((e, f))
    assert concentrated.delta(low, far) <= concentrated.delta(high, near) * (1 + 1e-6)


def test_edges() -> None:
    nan, inf = math.nan, math.inf
    assert concentrated.delta(0.0, 0.0) == 0.0
    assert concentrated.epsilon(0.0, 1e-5) == 0.0
    assert concentrated.epsilon(1.0, 1.0) == 0.0
    for mu, epsilon in ((nan, 1.0), (1.0, nan), (-1.0, 1.0), (1.0, -1.0), (inf, 1.0), (1e9, 1.0)):
        assert concentrated.delta(mu, epsilon) == 1.0
    for mu, delta in ((nan, 1e-5), (1.0, nan), (-1.0, 1e-5), (1.0, 0.0), (inf, 1e-5), (1e9, 1e-5)):
        assert concentrated.epsilon(mu, delta) == inf
    assert 0.0 < concentrated.delta(1.0, inf) < 1e-300
    assert 0.0 < concentrated.delta(1e-8, 1e6) < 1e-300
    assert concentrated.mu_for(1e-9, 1e-300) > 0
