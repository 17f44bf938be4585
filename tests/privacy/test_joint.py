"""Joint Gaussian releases: outside numbers, brute force over sets of shifts, and hostile input."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.accountant import PRVAccountant, build_accountant, joint_gaussian_mu
from lensemble_flwr.privacy.joint import Ball, Box, Shifts

CASES = json.loads((Path(__file__).parents[1] / "oracles" / "accounting.json").read_text())
JOINT = [pytest.param(case, id=case["id"]) for case in CASES if case["kind"].startswith("joint")]

# google/differential-privacy issue 428: delta at epsilon = 1 of (x + Z_A, c x + Z_B), sigma = sensitivity = 1. First
# the exact value (60-digit arithmetic), then the figure that the issue prints from 3 million samples.
COUPLED = [
    (0.0, 0.1269367, 0.1268),
    (0.1, 0.1286959, 0.1286),
    (0.3, 0.1426812, 0.1427),
    (0.5, 0.1700867, 0.1700),
    (0.7, 0.2095258, 0.2094),
    (1.0, 0.2862082, 0.2862),
]


@pytest.mark.parametrize("case", JOINT)
def test_oracle(case):
    mu = joint_gaussian_mu(case["cov"], case["shift"])
    assert float(case["lo"]) <= gaussian.epsilon(mu * math.sqrt(case["T"]), case["delta"]) <= float(case["hi"])


@pytest.mark.parametrize(("c", "exact", "sampled"), COUPLED)
def test_the_published_table(c, exact, sampled):
    found = gaussian.delta(joint_gaussian_mu(np.eye(2), [1.0, c]), 1.0)
    assert found == pytest.approx(exact, abs=5e-8)
    assert found == pytest.approx(sampled, abs=2e-4)  # 0.2 standard errors of the sample at most


def test_forgetting_the_second_output_under_reports():
    alone, both = (joint_gaussian_mu(np.eye(2), [1.0, c]) for c in (0.0, 1.0))
    assert gaussian.epsilon(alone, 1e-5) == pytest.approx(4.377178, abs=1e-6)
    assert gaussian.epsilon(both, 1e-5) == pytest.approx(6.572970, abs=1e-6)


def test_joint_independent_and_correlated():
    assert joint_gaussian_mu(np.eye(3) * 4, [1, 2, 2]) == pytest.approx(1.5, rel=1e-14)
    for c in (0.0, 0.3, 1.0):
        for rho in (-0.5, 0.0, 0.9):
            exact = math.sqrt((1 - 2 * rho * c + c * c) / (1 - rho * rho))
            assert joint_gaussian_mu([[1, rho], [rho, 1]], [1, c]) == pytest.approx(exact, rel=1e-12)
    assert joint_gaussian_mu([[2.0]], [0.0]) == 0.0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_joint_agrees_with_linear_algebra(n, seed):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((n, n)) + 2 * np.eye(n)
    cov, shift = root @ root.T, rng.standard_normal(n)
    expected = math.sqrt(shift @ np.linalg.solve((cov + cov.T) / 2, shift))
    assert joint_gaussian_mu((cov + cov.T) / 2, shift) == pytest.approx(expected, rel=1e-6)


def test_joint_singular_covariance():
    ones = np.ones((2, 2))
    assert joint_gaussian_mu(ones, [1, 1]) == pytest.approx(1.0, rel=1e-12)
    assert joint_gaussian_mu(ones, [1, 1 + 1e-15]) == math.inf
    assert joint_gaussian_mu(ones, [1, 0.5]) == math.inf
    assert joint_gaussian_mu(np.zeros((2, 2)), [0, 1e-300]) == math.inf
    assert joint_gaussian_mu([[0, 0], [0, 4]], [0, 2]) == pytest.approx(1.0)
    assert joint_gaussian_mu([[4, 0], [0, 0]], [2, 0]) == pytest.approx(1.0)
    # nearly singular is not singular: a tolerance would call the second output free
    assert joint_gaussian_mu(np.diag([1.0, 1e-40]), [1.0, 1e-18]) == pytest.approx(100.0, rel=1e-3)


def test_joint_singular_up_to_rounding():
    rng = np.random.default_rng(5)
    for _ in range(20):
        root = rng.standard_normal((4, 2))
        cov, z = root @ root.T, rng.standard_normal(2)
        mu = joint_gaussian_mu(cov, root @ z)
        assert mu == pytest.approx(float(np.linalg.norm(z)), rel=1e-3) or mu > np.linalg.norm(z)
        assert joint_gaussian_mu(cov, root @ z + rng.standard_normal(4)) > 1e5


def test_joint_large_and_malformed():
    rng = np.random.default_rng(1)
    root = rng.standard_normal((40, 40)) + 10 * np.eye(40)
    cov, shift = root @ root.T, rng.standard_normal(40)
    expected = math.sqrt(shift @ np.linalg.solve(cov, shift))
    assert joint_gaussian_mu(cov, shift) == pytest.approx(expected, rel=1e-9)
    degenerate = np.zeros((40, 40))
    degenerate[0, 0] = 1.0
    assert joint_gaussian_mu(degenerate, np.eye(40)[1]) == math.inf
    assert joint_gaussian_mu([[math.nan]], [1.0]) == math.inf
    assert joint_gaussian_mu([[1.0]], [math.inf]) == math.inf
    for cov, shift in (([[1, 0.5], [0, 1]], [1, 1]), ([[1, 2], [2, 1]], [1, 1]), ([[1, 0]], [1]), ([[1]], [[1]])):
        with pytest.raises(ConfigError):
            joint_gaussian_mu(cov, shift)
    with pytest.raises(ConfigError):
        joint_gaussian_mu("x", "y")


# --- sets of shifts ---


def covariance(rng, n, rank=None):
    root = rng.standard_normal((n, rank or n)) + (0 if rank else np.eye(n))
    cov = root @ root.T
    return (cov + cov.T) / 2


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_box_is_its_worst_corner(n, seed):
    rng = np.random.default_rng(seed)
    cov, bounds = covariance(rng, n), rng.uniform(0.0, 2.0, n)
    bounds[rng.uniform(size=n) < 0.2] = 0.0
    corners = [np.array(signs) * bounds for signs in itertools.product((-1.0, 1.0), repeat=n)]
    found = joint_gaussian_mu(cov, Box(bounds))
    worst = joint_gaussian_mu(cov, Shifts(corners))
    assert worst * (1 - 1e-14) <= found <= worst * (1 + 1e-6)
    for _ in range(20):
        assert joint_gaussian_mu(cov, rng.uniform(-bounds, bounds)) <= found * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0.01, 100.0))
def test_ball_is_the_smallest_eigenvalue(n, seed, radius):
    rng = np.random.default_rng(seed)
    cov = covariance(rng, n)
    found = joint_gaussian_mu(cov, Ball(radius))
    values, vectors = np.linalg.eigh(cov)
    assert found == pytest.approx(radius / math.sqrt(values[0]), rel=1e-6)
    assert joint_gaussian_mu(cov, radius * vectors[:, 0]) <= found * (1 + 1e-9)
    for _ in range(20):
        m = rng.standard_normal(n)
        assert joint_gaussian_mu(cov, radius * m / np.linalg.norm(m)) <= found * (1 + 1e-12)


def test_sets_of_independent_outputs():
    assert joint_gaussian_mu(np.diag([1.0, 4.0]), Box([3.0, 8.0])) == pytest.approx(5.0, rel=1e-14)
    assert joint_gaussian_mu(np.diag([1.0, 4.0]), Ball(3.0)) == pytest.approx(3.0, rel=1e-14)
    assert joint_gaussian_mu(np.diag([1.0, 1e-40]), Ball(1e-20)) == pytest.approx(1.0, rel=1e-12)
    many = joint_gaussian_mu(np.eye(300), Box(np.full(300, 0.1)))
    assert many == pytest.approx(math.sqrt(3.0), rel=1e-9)


def test_correlation_hurts_even_one_output():
    """Noise that the other output shares can be subtracted; the sign of the other shift is the attacker's choice."""
    cov = [[1.0, 0.9], [0.9, 1.0]]
    assert joint_gaussian_mu(cov, Box([1.0, 0.0])) == pytest.approx(1 / math.sqrt(1 - 0.81), rel=1e-12)
    assert joint_gaussian_mu(cov, Box([1.0, 1.0])) == pytest.approx(math.sqrt(2 / 0.1), rel=1e-12)
    assert joint_gaussian_mu(cov, [1.0, 1.0]) == pytest.approx(math.sqrt(2 / 1.9), rel=1e-12)


def test_a_large_box_gets_an_upper_bound():
    rng = np.random.default_rng(3)
    for n in (22, 40):  # rational, and by eigenvalues
        cov = np.round(covariance(rng, n) + 20 * np.eye(n), 1)
        cov, bounds = (cov + cov.T) / 2, np.ones(n)
        found = joint_gaussian_mu(cov, Box(bounds))
        reached = max(joint_gaussian_mu(cov, rng.choice([-1.0, 1.0], n)) for _ in range(20))
        assert reached <= found <= math.sqrt(n / np.linalg.eigvalsh(cov)[0]) * 2
    blocks = np.kron(np.eye(12), [[2.0, 1.0], [1.0, 2.0]])  # 24 coupled outputs, worst corner known: mu^2 = 12 * 2
    assert joint_gaussian_mu(blocks, Box(np.ones(24))) == pytest.approx(math.sqrt(24.0), rel=1e-9)
    assert joint_gaussian_mu(blocks[:20, :20], Box(np.ones(20))) == pytest.approx(math.sqrt(20.0), rel=1e-9)


def test_sets_of_shifts_and_singular_covariance():
    ones = np.ones((2, 2))
    assert joint_gaussian_mu(ones, Box([1, 1])) == math.inf  # (1, -1) leaves the range
    assert joint_gaussian_mu(ones, Shifts([[1, 1], [-2, -2]])) == pytest.approx(2.0)
    assert joint_gaussian_mu(ones, Shifts([[1, 1], [1, 0.5]])) == math.inf
    assert joint_gaussian_mu(ones, Ball(1e-9)) == math.inf
    assert joint_gaussian_mu(np.diag([4.0, 0.0]), Box([2.0, 0.0])) == pytest.approx(1.0)
    assert joint_gaussian_mu(np.diag([4.0, 0.0]), Box([2.0, 1e-300])) == math.inf
    assert joint_gaussian_mu(np.diag([4.0, 0.0]), Ball(1.0)) == math.inf
    big = np.eye(40)
    big[7, 7] = 0.0
    assert joint_gaussian_mu(big, Box(np.eye(40)[7])) == math.inf
    assert joint_gaussian_mu(big, Box(np.eye(40)[8])) == pytest.approx(1.0)
    for nothing in (Box([0.0, 0.0]), Ball(0.0), [0.0, 0.0], Shifts([[0.0, 0.0]])):
        assert joint_gaussian_mu(ones, nothing) == 0.0


@pytest.mark.parametrize("bad", [Box([-1.0, 1.0]), Box([1.0]), Box("xy"), Ball(-1.0), Ball("1"), Ball(True), Shifts([]),
                                 Shifts([1.0, 2.0]), Shifts([[1.0]]), Box([[1.0, 1.0]]), [1.0, 1j],
                                 [[1.0], [1.0, 2.0]], {}, [10**400, 1]], ids=str)  # fmt: skip
def test_malformed_shifts(bad):
    with pytest.raises(ConfigError):
        joint_gaussian_mu(np.eye(2), bad)


@pytest.mark.parametrize("cov", [[], [[]], [1.0, 2.0], np.ones((2, 3)), "x", None, [[1.0, 2.0], [3.0]],
                                 [[1.0, 0.1], [0.0, 1.0]], [[-1.0, 0.0], [0.0, 1.0]]], ids=str)  # fmt: skip
@pytest.mark.parametrize("shift", [[1.0, 1.0], Box([1.0, 1.0]), Ball(1.0), Shifts([[1.0, 1.0]])], ids=str)
def test_malformed_covariance(cov, shift):
    with pytest.raises(ConfigError):
        joint_gaussian_mu(cov, shift)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_no_privacy(poison):
    bad = [[1.0, poison], [poison, 1.0]]
    for shift in ([1.0, 1.0], Box([1.0, 1.0]), Ball(1.0), Shifts([[1.0, 1.0]])):
        assert joint_gaussian_mu(bad, shift) == math.inf
    assert joint_gaussian_mu(np.eye(2), [1.0, None]) == math.inf
    for shift in ([1.0, poison], Shifts([[1.0, 0.0], [poison, 1.0]])):
        assert joint_gaussian_mu(np.eye(2), shift) == math.inf
    if poison > 0 or math.isnan(poison):
        assert joint_gaussian_mu(np.eye(2), Box([poison, 1.0])) == math.inf
    if poison > 0:
        assert joint_gaussian_mu(np.eye(2), Ball(poison)) == math.inf


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(width=64), min_size=9, max_size=9), st.lists(st.floats(width=64), min_size=3, max_size=3))
def test_any_numbers_end_in_a_bound_or_a_typed_error(entries, bounds):
    cov = np.array(entries).reshape(3, 3)
    cov = np.triu(cov) + np.triu(cov, 1).T
    for shift in (bounds, Box(np.abs(bounds)), Ball(abs(bounds[0])), Shifts([bounds])):
        try:
            assert joint_gaussian_mu(cov, shift) >= 0.0
        except ConfigError:
            pass


# --- composition ---


def test_steps_compose_joint_releases():
    """Two rounds of a joint release are one joint release of twice the size, and mu steps are sigma steps."""
    cov, shift = np.array([[1.0, 0.3], [0.3, 2.0]]), np.array([0.7, -0.4])
    mu = joint_gaussian_mu(cov, shift)
    whole = joint_gaussian_mu(np.kron(np.eye(3), cov), np.tile(shift, 3))
    for name in ("prv", "rdp"):
        by_mu, by_sigma = build_accountant(name), build_accountant(name)
        by_mu.step_mu(mu=mu, count=2)
        by_mu.step_mu(mu=mu)
        by_sigma.step(noise_multiplier=1 / mu, count=3)
        assert by_mu.spent(target_delta=1e-5) == pytest.approx(by_sigma.spent(target_delta=1e-5), rel=1e-12)
    assert PRVAccountant().spent(target_delta=1e-5) == 0.0
    by_mu = PRVAccountant()
    by_mu.step_mu(mu=mu, count=3)
    assert by_mu.spent(target_delta=1e-5) == pytest.approx(gaussian.epsilon(whole, 1e-5), rel=1e-11)


def test_a_mu_that_makes_no_sense_spends_everything():
    for bad in (math.nan, math.inf, -1.0, None, "1", True, False):
        made = PRVAccountant()
        made.step_mu(mu=bad, count=0)
        assert made.spent(target_delta=1e-5) == 0.0
        made.step_mu(mu=bad)
        assert made.spent(target_delta=0.5) == math.inf
    made = PRVAccountant()
    made.step_mu(mu=0.0, count=10)
    assert made.spent(target_delta=1e-5) == 0.0
    made.step_mu(mu=1e-320)
    assert 0.0 <= made.spent(target_delta=1e-5) < 1e-6


# --- which couplings exist in this federation (docs/privacy.md, section 13) ---


@pytest.mark.parametrize(("people", "n"), [(1, 5), (2, 5), (5, 5)])
def test_one_person_at_several_participants(people, n):
    """sqrt(p) seen one by one, p in the sum. The sum is the worst linear function of the joint release for p = n."""
    std, clip = 2.0, 1.0
    shift = np.array([clip] * people + [0.0] * (n - people))
    assert joint_gaussian_mu(std**2 * np.eye(n), shift) == pytest.approx(math.sqrt(people) * clip / std, rel=1e-12)
    total = joint_gaussian_mu([[n * std**2]], [shift.sum()])
    assert total == pytest.approx(people * clip / (std * math.sqrt(n)), rel=1e-12)
    box = Box([clip] * people + [0.0] * (n - people))  # updates of any direction
    assert joint_gaussian_mu(std**2 * np.eye(n), box) == pytest.approx(math.sqrt(people) * clip / std, rel=1e-12)
    assert total <= joint_gaussian_mu(std**2 * np.eye(n), shift) * (1 + 1e-12)


def test_a_sum_and_one_of_its_summands():
    """Who sees the sum and one of the updates in it: (x + N_1, x + N_1 + .. + N_n), singular for nobody, and exactly as
    bad as the update alone, since the rest of the sum is noise that does not know x."""
    n, std = 4, 1.5
    cov = std**2 * np.array([[1.0, 1.0], [1.0, n]])
    assert joint_gaussian_mu(cov, [1.0, 1.0]) == pytest.approx(1 / std, rel=1e-12)
    # with another summand of the same person, the second output adds what the others' noise leaves of it
    assert joint_gaussian_mu(cov, [1.0, 2.0]) == pytest.approx(math.sqrt(1 + 1 / (n - 1)) / std, rel=1e-12)


def test_the_sum_twice_under_fresh_noise_is_two_releases():
    assert joint_gaussian_mu(np.eye(2), [1.0, 1.0]) == pytest.approx(math.sqrt(2.0))
    assert joint_gaussian_mu(np.ones((2, 2)), [1.0, 1.0]) == pytest.approx(1.0), "the same bytes again are one release"
