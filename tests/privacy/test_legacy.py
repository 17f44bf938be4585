"""The earlier report's accountant and aggregator: what of its behaviour is kept, and by how much the rest is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.accountant import PRVAccountant, build_accountant
from lensemble_flwr.privacy.legacy import (
    DPFederatedAggregator,
    MomentsAccountant,
    legacy_log_moment,
    legacy_moments_epsilon,
)

# (z, q, T), the formula's epsilon at delta 1e-5 as measured from the report's own code, and the truth: exact (60-digit
# arithmetic) for q = 1 and T = 1, else the tightest of several published accountants.
UNDER = [
    (1.0, 1.0, 1, 0.6907, 4.3772),
    (1.0, 1.0, 100, 50.98, 91.8173),
    (5.0, 1.0, 100, 2.2145, 9.9973),
    (1.0, 0.99, 100, 15.29, 90.6573),
    (1.0, 0.5, 100, 13.12, 39.975),
    (0.3, 0.001, 1, 0.2826, 5.65379),
]
OVER = [(1.0, 0.01, 1000, 4.307, 1.82824)]


def our(z: float, q: float, count: int) -> float:
    accountant = PRVAccountant()
    accountant.step(noise_multiplier=z, sample_rate=q, count=count)
    return accountant.spent(target_delta=1e-5)


@pytest.mark.parametrize(("z", "q", "count", "reported", "truth"), UNDER + OVER)
def test_the_formula_is_the_reports_and_not_a_bound(z, q, count, reported, truth):
    assert legacy_moments_epsilon([(z, q, count)], 1e-5) == pytest.approx(reported, rel=1e-3)
    assert our(z, q, count) == pytest.approx(truth, rel=1e-4)
    if (z, q, count, reported, truth) in UNDER:
        assert legacy_moments_epsilon([(z, q, count)], 1e-5) < 0.6 * our(z, q, count)


@pytest.mark.parametrize(("z", "q", "order", "first"), [(1.0, 0.01, 32, 10), (1.0, 0.5, 32, 4), (0.5, 0.01, 32, 3)])
def test_its_moment_is_below_the_true_one(z, q, order, first):
    """The exact moment of the Poisson-subsampled Gaussian at integer order is a finite sum; from ``first`` on the
    formula is below it, far below at high orders (.293 against 349 at z=1, q=.01, order 32)."""

    def exact(alpha: int) -> float:
        terms = [
            math.lgamma(alpha + 1) - math.lgamma(j + 1) - math.lgamma(alpha - j + 1)
            + (alpha - j) * math.log1p(-q) + j * math.log(q) + j * (j - 1) / (2 * z * z)
            for j in range(alpha + 1)
        ]  # fmt: skip
        return float(np.logaddexp.reduce(terms))

    assert legacy_log_moment(first, z, q) < exact(first)
    assert legacy_log_moment(first - 1, z, q) >= exact(first - 1)
    assert legacy_log_moment(order, z, q) < 0.1 * exact(order)
    if (z, q, order) == (1.0, 0.01, 32):
        assert legacy_log_moment(order, z, q) == pytest.approx(0.293, abs=5e-4)
        assert exact(order) == pytest.approx(349, abs=0.5)


def test_observed_frequencies_amplify_nothing():
    """Blocks of ten consecutive rounds, T = 100, so everybody is seen in a tenth of the rounds: each makes ten releases
    that all can see. By the report's rule, rate = largest observed frequency = 1, then .5, .33 .. .1 after each block:
    it never charges a round again. Exact: ten rounds at rate 1."""
    rounds, seen = [], 0
    for t in range(100):
        seen = max(seen, min(t + 1, 10))
        rounds.append((1.0, max(0.1, min(1.0, seen / (t + 1))), 1))
    reported = legacy_moments_epsilon(rounds, 1e-5)
    exact = gaussian.epsilon(math.sqrt(10), 1e-5)
    assert exact == pytest.approx(17.857, abs=1e-3)
    assert reported == pytest.approx(14.401, abs=0.01)


# --- accountant: the report's own tests where they are sound ---


def test_nothing_released_nothing_spent_and_reset():
    made = MomentsAccountant()
    assert made.get_epsilon(1e-5) == made.legacy_epsilon(1e-5) == 0.0
    made.accumulate(1.0, count=3)
    assert made.get_epsilon(1e-5) > 0.0
    made.accumulate(1.0, count=0)
    made.reset()
    assert made.get_epsilon(1e-5) == 0.0


@settings(deadline=None, max_examples=50)
@given(st.floats(0.05, 50.0), st.floats(0.001, 1.0), st.integers(1, 500))
def test_accumulation_is_monotone_and_ignores_the_rate(z, q, count):
    made = MomentsAccountant()
    made.accumulate(z, q, count)
    before = made.get_epsilon(1e-5), made.legacy_epsilon(1e-5)
    assert before[0] == pytest.approx(gaussian.epsilon(math.sqrt(count) / z, 1e-5), rel=1e-9)
    made.accumulate(z, q)
    assert made.get_epsilon(1e-5) > before[0]
    assert made.legacy_epsilon(1e-5) >= before[1]
    assert made.get_epsilon(1e-6) > made.get_epsilon(1e-5)
    again = MomentsAccountant()
    again.accumulate(z, q, count + 1)
    assert again.get_epsilon(1e-5) == made.get_epsilon(1e-5)


@pytest.mark.parametrize(("order", "z"), [(63, 0.1), (64, 1e-3), (2, 1e-200), (64, 1e6)])
def test_no_overflow(order, z):
    value = legacy_log_moment(order, z, 0.01)
    assert value >= 0.0
    assert value == legacy_log_moment(order, z, 0.01)
    assert legacy_log_moment(order, z, 0.0) == 0.0


def test_bad_values():
    for args in ((1.0, 1.0, 0.5), (2, 0.0, 0.5), (2, 1.0, 1.1), (2, math.nan, 0.5), (2, 1.0, math.nan)):
        with pytest.raises(ContractViolation):
            legacy_log_moment(*args)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ContractViolation):
            legacy_moments_epsilon([(1.0, 1.0, 1)], delta)
    for args in ((0.0, 1.0, 5), (1.0, 0.0, 5), (math.inf, 1.0, 5), (1.0, 1.0, 0), (1.0, 1.0, 2.5), (1.0, math.nan, 5)):
        with pytest.raises(ContractViolation):
            DPFederatedAggregator(*args)


# --- clipping ---


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.floats(-1e300, 1e300),
        st.lists(st.floats(-1e300, 1e300), max_size=30),
        st.lists(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), min_size=1, max_size=5),
    ),
    st.floats(1e-3, 1e3),
)
def test_clipping_is_of_the_whole_vector(gradient, clip):
    made = DPFederatedAggregator(clip, 1.0, 5)
    clipped = made.clip_gradients(gradient)
    values = np.array(gradient, dtype=np.float64)
    assert clipped.shape == values.shape
    assert math.sqrt(math.fsum(clipped.ravel() ** 2)) <= clip
    if math.hypot(*values.ravel()) <= clip * (1 - 1e-12):
        assert np.array_equal(clipped, values)
    elif values.size:
        assert np.linalg.norm(clipped) >= clip * (1 - 1e-9)


def test_a_vector_is_one_client_not_many():
    """The report clips [10, -5] to [1, -1], norm 1.41 > C; over 10^4 coordinates the norm reaches 100 C."""
    made = DPFederatedAggregator(1.0, 1.0, 5)
    assert made.clip_gradients([10.0, -5.0]) == pytest.approx(np.array([10.0, -5.0]) / math.sqrt(125))
    assert np.linalg.norm(np.clip(np.full(10**4, 9.0), -1, 1)) == pytest.approx(100.0)
    assert np.linalg.norm(made.clip_gradients(np.full(10**4, 9.0))) <= 1.0
    assert made.clip_gradients(-7.0) == pytest.approx(-1.0)
    assert not made.clip_gradients(np.zeros((3, 2))).any()
    for bad in ([math.nan], [math.inf], np.ones((1, 1, 1))):
        with pytest.raises(ContractViolation):
            made.clip_gradients(bad)


# --- rounds ---


def test_an_empty_round_is_empty_and_free():
    made = DPFederatedAggregator(1.0, 1.0, 5)
    assert made.aggregate_round({}).size == 0
    assert made.rounds == 0
    assert made.get_epsilon(1e-5) == 0.0
    assert made.frequencies() == {}


def test_shapes_that_differ_are_refused_before_anything_is_charged():
    made = DPFederatedAggregator(1.0, 1.0, 5)
    for bad in ({"a": [1.0, 2.0], "b": [1.0]}, {"a": [1.0], "b": [[1.0]]}, {"a": 1.0, "b": [1.0]}, {"a": [math.nan]}):
        with pytest.raises(ContractViolation):
            made.aggregate_round(bad)
    with pytest.raises(ContractViolation, match="planned"):
        made.aggregate_round({str(i): [1.0] for i in range(6)})
    assert made.rounds == 0
    assert made.get_epsilon(1e-5) == 0.0


def test_an_unrecorded_round_is_unknown_not_free():
    made = DPFederatedAggregator(1.0, 1.0, 5)
    made.aggregate_round({"a": [1.0]})
    assert made.get_epsilon(1e-5) == pytest.approx(4.377178, abs=1e-6)
    made.aggregate_round({"a": [1.0]}, record_privacy=False)
    assert made.get_epsilon(1e-5) == math.inf
    made.aggregate_round({"a": [1.0]})
    assert made.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("came", [1, 3, 10])
def test_noise_does_not_depend_on_how_many_came(came):
    """std z C / 10 whoever comes (6 standard errors); by the report's rule it would be z C / came, and a mean over the
    actual number moves by nearly 2 C / m when one of m clients with opposite gradients is missing."""
    made = DPFederatedAggregator(2.0, 1.5, 10)
    size = 40_000
    noise = made.aggregate_round({str(i): np.zeros(size) for i in range(came)})
    assert noise.std() == pytest.approx(2.0 * 1.5 / 10, rel=6 / math.sqrt(2 * size))
    with_it, without = np.mean([1.0] * 9 + [-1.0]), np.mean([1.0] * 9)
    assert abs(with_it - without) == pytest.approx(0.2)  # 2 C / m at m = 10, not C / m


def test_the_mean_and_fresh_noise():
    made = DPFederatedAggregator(1.0, 1e-9, 4)
    gradients = {"a": [[0.1, 0.2]], "b": [[0.3, 0.2]]}
    first = made.aggregate_round(gradients)
    assert first == pytest.approx(np.array([[0.1, 0.1]]), abs=1e-7)
    assert not np.array_equal(first, made.aggregate_round(gradients)), "the noise is drawn anew"
    scalar = DPFederatedAggregator(1.0, 1e-9, 2).aggregate_round({"a": 0.5, "b": 0.25})
    assert np.shape(scalar) == ()
    assert float(scalar) == pytest.approx(0.375, abs=1e-6)


def test_frequencies_are_a_diagnostic():
    """The one that stays in 5 of 15 rounds has frequency 1/3; it changes no epsilon."""
    made, quiet = DPFederatedAggregator(1.0, 1.0, 3), MomentsAccountant()
    for t in range(15):
        made.aggregate_round({"always": 0.1, "early": 0.1} if t < 5 else {"always": 0.1})
    assert made.frequencies() == {"always": 1.0, "early": pytest.approx(1 / 3)}
    quiet.accumulate(1.0, count=15)
    assert made.get_epsilon(1e-5) == quiet.get_epsilon(1e-5)


def test_fifty_rounds_of_a_hundred_clients():
    rng = np.random.default_rng(1)
    loud, soft = (DPFederatedAggregator(1.0, z, 100) for z in (4.0, 1.0))
    last = 0.0
    for _ in range(50):
        gradients = {str(i): rng.normal(size=8) for i in rng.choice(100, 10, replace=False)}
        loud.aggregate_round(gradients)
        soft.aggregate_round(gradients)
        assert last < soft.get_epsilon(1e-5)
        last = soft.get_epsilon(1e-5)
    assert loud.get_epsilon(1e-5) < last == pytest.approx(gaussian.epsilon(math.sqrt(50), 1e-5), rel=1e-9)


# --- no configuration selects any of it ---


def test_no_configuration_selects_it():
    for name in ("moments", "legacy"):
        with pytest.raises(ConfigError, match="less than is spent"):
            load_config(f"privacy.accountant={name}")
        with pytest.raises(ConfigError):
            build_accountant(name)
