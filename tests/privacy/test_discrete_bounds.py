"""The lemmas of docs/privacy.md, section 9, against brute force: laws of sums, divergences and hockey sticks."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import bounds, concentrated, gaussian
from lensemble_flwr.privacy import discrete_bounds as db

STDS = [0.5, 0.6, 0.8, 1.0]
K = np.arange(-80, 81)


def one(centre: float, std: float) -> np.ndarray:
    """The law of D(centre, std) on K, in 80-bit floats."""
    p = np.exp(-((K.astype(np.longdouble) - centre) ** 2) / (2 * np.longdouble(std) ** 2))
    return p / p.sum()


def law_of_sum(centres: list[float], std: float) -> np.ndarray:
    """The law of a sum of independent D(c, std), on -80 h .. 80 h."""
    total = one(centres[0], std)
    for centre in centres[1:]:
        total = np.convolve(total, one(centre, std))
    return total


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """Renyi divergence."""
    both = (p > 0) & (q > 0)
    logs = order * np.log(p[both]) + (1 - order) * np.log(q[both])
    top = logs.max()
    return float((np.log(np.exp(logs - top).sum()) + top) / (order - 1))


# --- lemma 3: variance; lemma 4: the sum ---


@pytest.mark.parametrize("std", STDS)
def test_the_largest_variance(std: float) -> None:
    excess = []
    for centre in np.linspace(0, 1, 65):
        p = one(centre, std)
        mean = float((p * K).sum())
        excess.append(float((p * (K - mean) ** 2).sum()) / std**2 - 1)
    bound = math.exp(db.log_excess(std))
    assert max(excess) <= bound * (1 + 1e-6)
    assert bound < 1.001 * max(excess)


@pytest.mark.parametrize("std", STDS)
def test_the_ripple_of_theta(std: float) -> None:
    heights = [float(np.exp(-((K - c) ** 2) / (2 * std**2)).sum()) for c in np.linspace(0, 1, 65)]
    ratios = [h / (math.sqrt(2 * math.pi) * std) for h in heights]
    bound = math.exp(db.log_ripple(std))
    assert 1 - bound - 1e-12 <= min(ratios) <= max(ratios) <= 1 + bound + 1e-12
    assert max(ratios) - 1 > 0.99 * bound


@pytest.mark.parametrize("std", [*STDS, 1.5, 2.0])
@pytest.mark.parametrize("honest", [2, 3, 4, 5])
def test_the_theta_series_of_the_dual_root_lattice(std: float, honest: int) -> None:
    """Class by class against plain enumeration: integer vectors up to multiples of (1 .. 1), so with a last entry 0."""
    x = 2 * math.pi**2 * std**2
    reach = 5 if honest < 5 else 3
    total = 0.0
    for n in itertools.product(range(-reach, reach + 1), repeat=honest - 1):
        if any(n):
            total += math.exp(-x * (sum(v * v for v in n) - sum(n) ** 2 / honest))
    bound = math.exp(db.log_ripple_of_sum(std, honest))
    assert total * (1 - 1e-9) <= bound < 1.2 * total


@pytest.mark.parametrize("honest", [2, 3, 4, 7])
@pytest.mark.parametrize("std", STDS)
def test_a_sum_is_nearly_a_discrete_gaussian(std: float, honest: int) -> None:
    rng = np.random.default_rng(1)
    e = math.exp(db.log_ripple_of_sum(std, honest))
    most = (1 + e) / (1 - e)
    z = np.arange(-80 * honest, 80 * honest + 1)
    worst = 1.0
    for trial in range(40):
        centres = list(rng.uniform(-0.5, 0.5, honest)) if trial else [0.0] * honest
        p = law_of_sum(centres, std)
        shape = np.exp(-((z.astype(np.longdouble) - sum(centres)) ** 2) / (2 * honest * np.longdouble(std) ** 2))
        near = np.abs(z) < 12 * std * math.sqrt(honest)  # beyond, truncation at +-80 and rounding show
        ratio = p[near] / shape[near]
        worst = max(worst, float(ratio.max() / ratio.min()))
    assert worst <= most * (1 + 1e-12)
    if e > 1e-6:
        assert worst - 1 > 0.1 * (most - 1), "the bound follows the truth"


def test_ripple_numbers() -> None:
    assert db.log_ripple_of_sum(1.0, 1) == -math.inf
    assert math.exp(db.log_ripple_of_sum(1.0, 2)) == pytest.approx(2 * math.exp(-(math.pi**2)), rel=1e-3)
    for honest in (2, 3, 10, 80, 1023):
        values = [db.log_ripple_of_sum(s, honest) for s in (0.5, 0.7, 1.0, 1.5, 2.0)]
        assert values == sorted(values, reverse=True)
        assert all(-1e5 < db.log_ripple_of_sum(s, honest) < -700.0 for s in (30.0, 2048.0))
        shortest = math.log(2 * honest) - 2 * math.pi**2 * (honest - 1) / honest
        assert db.log_ripple_of_sum(1.0, honest) >= shortest - math.log(2) * (honest == 2) - 1e-6
    assert db.sum_gap(1.0, 1, 10) == 0.0
    assert db.sum_gap(0.5, 1023, 10) == math.inf
    assert 0.0 < db.sum_gap(2048.0, 2, 10) < 1e-290
    assert 1e-3 < db.sum_gap(1.0, 80, 10**6) < 2e-3  # one step of noise, a million coordinates
    assert db.sum_gap(1.5, 80, 10**6) < 1e-13


# --- theorems 3 and 4 ---

ORDERS = [1.01, 1.5, 2.0, 4.0, 9.0]


@pytest.mark.parametrize("std", STDS)
def test_local_concentrated_privacy_for_any_two_centres(std: float) -> None:
    rng = np.random.default_rng(2)
    factor = 1 + math.exp(db.log_excess(std))
    closest = 0.0
    for trial in range(60):
        a, b = rng.uniform(-1, 1, 2) if trial else (0.0, 1.0)
        for order in ORDERS:
            bound = order * (a - b) ** 2 * factor / (2 * std**2)
            found = divergence(one(a, std), one(b, std), order)
            assert found <= bound * (1 + 1e-9) + 1e-13
            closest = max(closest, found / bound)
    assert closest > 0.9


@pytest.mark.parametrize("honest", [2, 3, 5])
@pytest.mark.parametrize("std", [0.5, 0.6, 0.8])
def test_central_concentrated_privacy_in_one_and_two_dimensions(std: float, honest: int) -> None:
    rng = np.random.default_rng(3)
    factor = 1 + math.exp(db.log_excess(std))
    for _ in range(15):
        others = rng.uniform(-2, 2, (2, honest - 1))
        x = rng.uniform(-1.5, 1.5, 2)
        p = [law_of_sum([x[i], *others[i]], std) for i in (0, 1)]
        q = [law_of_sum([0.0, *others[i]], std) for i in (0, 1)]
        for order in ORDERS:
            for swap in (False, True):
                d1, d2 = (divergence(*((q[i], p[i]) if swap else (p[i], q[i])), order) for i in (0, 1))
                flat = abs(x[0]) * math.sqrt(factor / honest) / std + db.sum_gap(std, honest, 1)
                plane = float(np.hypot(*x)) * math.sqrt(factor / honest) / std + db.sum_gap(std, honest, 2)
                assert d1 <= order * flat**2 / 2 + 1e-12
                assert d1 + d2 <= order * plane**2 / 2 + 1e-12  # a product: divergences add


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


@pytest.mark.parametrize("honest", [2, 4])
@pytest.mark.parametrize("std", [0.6, 0.8, 1.2])
def test_hockey_sticks_of_sums_by_enumeration(std: float, honest: int) -> None:
    """The printed (epsilon, delta) itself, in one and two dimensions, and it is not loose by much."""
    rng = np.random.default_rng(4)
    closest = 0.0
    for trial in range(12):
        others = rng.uniform(-2, 2, (2, honest - 1))
        x = rng.uniform(-3, 3, 2) if trial else np.array([3.0, 0.0])
        price = db.release_price(
            noise_std=std,
            clip_norm=float(np.hypot(*x)),
            scale_log2=0,
            ring_bits=16,
            dimension=2,
            roster=honest + 1,
            min_survivors=honest + 1,
            colluders=1,
        )
        mu = 1 / (price.own_multiplier * math.sqrt(honest)) + price.gap
        p = [law_of_sum([x[i], *others[i]], std) for i in (0, 1)]
        q = [law_of_sum([0.0, *others[i]], std) for i in (0, 1)]
        near = slice(80 * honest - 40, 80 * honest + 41)
        plane_p, plane_q = np.outer(p[0][near], p[1][near]), np.outer(q[0][near], q[1][near])
        for epsilon in (0.0, 0.5, 2.0, 5.0):
            allowed = concentrated.delta(mu, epsilon)
            for a, b in ((plane_p, plane_q), (plane_q, plane_p)):
                found = hockey_stick(a, b, epsilon)
                assert found <= allowed * (1 + 1e-9) + 1e-13
                if allowed > 1e-9:
                    closest = max(closest, found / allowed)
    assert closest > 0.2


def test_the_closed_form_of_the_continuous_gaussian_is_not_valid() -> None:
    """Why a discrete history is converted otherwise: figures of docs/privacy.md."""
    found = hockey_stick(one(2.0, 1.0), one(0.0, 1.0), 7.557788944723618)
    assert found / gaussian.delta(2.0, 7.557788944723618) == pytest.approx(1.64, abs=0.01)
    assert found < concentrated.delta(2.0, 7.557788944723618)


def test_hockey_sticks_with_clamps(monkeypatch) -> None:
    """Theorem 4 with a ring so narrow that clamping happens: sums of clamped values, terms of 1 % and more."""
    monkeypatch.setattr(bounds, "TAIL", 2.0)
    std, honest, qmax, clip = 1.5, 2, 8, 3.0
    ring_bits = 16
    extra = db.central_terms(clip, std, 1, ring_bits, 0, qmax, honest)
    assert 1e-4 < extra.clamp < 0.2
    price_mu = 1 / (db.own_multiplier(clip, std, std) * math.sqrt(honest)) + db.sum_gap(std, honest, 1)

    def clamped(centre: float) -> np.ndarray:
        law, out = one(centre, std), np.zeros(2 * qmax + 1, np.longdouble)
        np.add.at(out, np.clip(K, -qmax, qmax) + qmax, law)
        return out

    for others in (-clip, -0.7, 0.0, 2.2, clip):
        p = np.convolve(clamped(clip), clamped(others))
        q = np.convolve(clamped(0.0), clamped(others))
        for epsilon in (0.0, 1.0, 3.0, 10.0, 40.0):
            for a, b in ((p, q), (q, p)):
                assert hockey_stick(a, b, epsilon) <= concentrated.delta(price_mu, epsilon) + extra.clamp + 1e-15


@pytest.mark.parametrize("honest", [2, 3])
@pytest.mark.parametrize("std", [0.5, 0.7])
def test_lemma_6_single_values_given_the_shifted_sum(std: float, honest: int) -> None:
    """The sum drawn with the update, the members given the sum without it: each is at most F times a Gaussian at its
    own centre plus x/h."""
    e, e_sum, e_one = (
        math.exp(v)
        for v in (
            db.log_ripple_of_sum(std, honest),
            db.log_ripple(std * math.sqrt(honest)),
            db.log_ripple(std),
        )
    )
    factor = ((1 + e) / (1 - e)) ** 2 * (1 + e_sum) / (1 - e_sum) * ((1 + e_one) / (1 - e_one)) ** honest
    rng = np.random.default_rng(5)
    for _ in range(5):
        x, centres = rng.uniform(-2, 2), list(rng.uniform(-1, 1, honest))
        with_x = law_of_sum([centres[0] + x, *centres[1:]], std)
        without = law_of_sum(centres, std)
        rest = law_of_sum(centres[:-1], std)  # all but the last member
        last = one(centres[-1], std)
        for i in range(80 - 4, 80 + 5):
            total = np.longdouble(0)
            for j in range(len(rest)):
                if without[i + j] > 1e-300:
                    total += with_x[i + j] * last[i] * rest[j] / without[i + j]
            centre = centres[-1] + x / honest
            shape = math.exp(-((K[i] - centre) ** 2) / (2 * std**2)) / (math.sqrt(2 * math.pi) * std)
            assert float(total) <= factor * shape * (1 + 1e-9)


# --- prices ---

NUMBERS = {
    "noise_std": 1.0,
    "clip_norm": 2.0,
    "scale_log2": 0,
    "ring_bits": 16,
    "dimension": 1000,
    "roster": 100,
    "min_survivors": 80,
    "colluders": 1,
}


def test_prices() -> None:
    price = db.release_price(**NUMBERS)
    assert 0.5 * (1 - 1e-6) < price.own_multiplier < 0.5
    assert 0.0 < price.gap < 1e-4
    assert 0.0 < price.delta_extra < 1e-30
    alone = db.release_price(**{**NUMBERS, "min_survivors": 2})
    assert alone.gap == 0.0
    with mpmath.workdps(40):
        nu = 8 * mpmath.pi**2 * mpmath.exp(-2 * mpmath.pi**2)
        assert 1 / mpmath.mpf(price.own_multiplier) > 2 * mpmath.sqrt(1 + nu)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"noise_std": 0.49}, "too coarse"),
        ({"noise_std": 0.5, "min_survivors": 99}, "not nearly"),
        ({"noise_std": 3000.0, "roster": 3, "min_survivors": 3}, "too fine"),
        ({"noise_std": 40.0}, "does not hold"),
    ],
)
def test_what_is_refused(change, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        db.release_price(**{**NUMBERS, **change})
