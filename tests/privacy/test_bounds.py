"""The delta terms against brute force where brute force is possible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import bounds, gaussian
from lensemble_flwr.privacy.bounds import (
    central_terms,
    local_terms,
    log_aliasing,
    log_tails,
    release_delta,
    ring_bound,
)


def ring(bits: int, n: int, bound: float) -> tuple[int, int]:
    """(scale_log2, qmax) as the round computes them."""
    qmax = (2 ** (bits - 1) - 1) // n
    return math.floor(math.log2(qmax / bound)), qmax


# --- lemma 1 ---


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 60),
    st.floats(2.5, 30.0),
    st.floats(0.0, 40.0),
    st.floats(0.0, 3.0),
    st.integers(0, 2**32 - 1),
)
def test_tails_bound_every_placement(dimension, edge, norm, power, seed):
    raw = np.random.default_rng(seed).random(dimension)
    raw = (raw / raw.max()) ** (10.0**power)  # from evenly spread to all in one coordinate
    a = raw / np.linalg.norm(raw) * norm
    exact = np.sum(stats.norm.sf(edge - a) + stats.norm.sf(edge + a))
    assert min(exact, 1.0) <= math.exp(log_tails(dimension, edge, norm)) * (1 + 1e-6)


def test_tails_are_not_loose():
    for dimension, edge, norm in ((1, 10.0, 0.0), (1000, 11.0, 1.0), (10, 12.0, 6.0)):
        corner = 2 * stats.norm.sf(edge - norm) + 2 * (dimension - 1) * stats.norm.sf(edge)
        assert math.exp(log_tails(dimension, edge, norm)) < 10 * corner
    assert log_tails(5, 10.0, 20.0) == 0.0
    assert log_tails(5, 1.0, 0.0) == 0.0
    assert log_tails(5, 10.0, math.nan) == 0.0


# --- lemma 2 ---


def law_of_sum(shifts: list[float], std: float, modulus: int) -> np.ndarray:
    """Exact law of sum round(x_i + N(0, std^2)) mod modulus."""
    total = np.zeros(modulus)
    total[0] = 1.0
    k = np.arange(-modulus, modulus + 1)
    for x in shifts:
        p = stats.norm.cdf((k + 0.5 - x) / std) - stats.norm.cdf((k - 0.5 - x) / std)
        one = np.zeros(modulus)
        np.add.at(one, k % modulus, p)
        total = np.real(np.fft.ifft(np.fft.fft(total) * np.fft.fft(one)))
    return total


@pytest.mark.parametrize("std", [0.5, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("honest", [2, 3, 5])
def test_aliasing_bound_holds_where_it_can_be_seen(monkeypatch, std, honest):
    monkeypatch.setattr(bounds, "MIN_RING_STD", 0.5)
    bits = 8
    bound = math.exp(log_aliasing(std, bits, honest))
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(60):
        x, shift = rng.uniform(-3, 3, honest), rng.uniform(-5, 5)
        alone, spread = x.copy(), x + shift / honest
        alone[0] += shift
        difference = law_of_sum(list(alone), std, 1 << bits) - law_of_sum(list(spread), std, 1 << bits)
        worst = max(worst, 0.5 * np.abs(difference).sum())
    assert worst <= bound + 1e-14
    if worst > 1e-10:
        assert bound < 2e4 * worst, "the bound follows the truth"


def test_aliasing_numbers():
    assert log_aliasing(2.0, 32, 1) == -math.inf
    assert log_aliasing(1.99, 32, 3) == math.inf
    assert log_aliasing(math.nan, 32, 3) == math.inf
    assert log_aliasing(2.0, 32, 2) < math.log(1e-11)
    assert log_aliasing(2.0, 32, 3) < math.log(1e-17)
    assert log_aliasing(8.0, 16, 2) < math.log(1e-250)
    for honest in (2, 3, 10, 500):
        assert log_aliasing(3.0, 32, honest) < log_aliasing(2.5, 32, honest)
        assert log_aliasing(2.0, 16, honest) < log_aliasing(2.0, 32, honest)


@pytest.mark.parametrize("honest", [2, 3])
@pytest.mark.parametrize("std", [2.0, 3.3])
def test_rounded_sums_keep_the_central_guarantee(honest, std):
    """Theorem 2 by brute force in one dimension: others anywhere, the protected update C or 0, sums mod 256."""
    rng = np.random.default_rng(2)
    c = 2.5 * std
    mu = c / (std * math.sqrt(honest))
    extra = math.exp(log_aliasing(std, 8, honest))
    for _ in range(20):
        others = list(rng.uniform(-c, c, honest - 1))
        sign = rng.choice([-1, 1])
        p = law_of_sum([sign * c, *others], std, 256)
        q = law_of_sum([0.0, *others], std, 256)
        for epsilon in (0.0, 0.5, 1.0, 3.0, 6.0):
            for one, other in ((p, q), (q, p)):
                delta = np.maximum(one - math.exp(epsilon) * other, 0.0).sum()
                assert delta <= gaussian.delta(mu, epsilon) + extra + 1e-12


# --- releases ---


@pytest.mark.parametrize(
    ("dimension", "n", "m", "bits", "sigma", "rounds"),
    [
        (128, 4, 3, 32, 1.0, 10),
        (10**7, 10, 8, 16, 1.0, 100),
        (3 * 10**8, 100, 80, 32, 1.0, 100),
        (3 * 10**8, 100, 80, 24, 0.2, 100),
        (10**6, 3, 3, 32, 0.05, 100),
    ],
)
@pytest.mark.parametrize("view", ["local", "central"])
def test_terms_are_negligible_for_sound_rings(dimension, n, m, bits, sigma, rounds, view):
    std = sigma if view == "local" else sigma / math.sqrt(m - 1)
    scale_log2, qmax = ring(bits, n, ring_bound(1.0, std))
    extra = release_delta(
        noise_std=std,
        clip_norm=1.0,
        scale_log2=scale_log2,
        ring_bits=bits,
        dimension=dimension,
        roster=n,
        min_survivors=m,
        colluders=1,
    )
    assert 0.0 < rounds * extra < 1e-12
    terms = central_terms(1.0, std, dimension, bits, scale_log2, qmax, m - 1)
    assert extra >= max(terms.total, local_terms(1.0, std, dimension).total)
    assert terms.clamp > 0.0
    assert terms.aliasing > 0.0
    assert terms.sampler > 0.0


def test_tight_range_costs_at_small_noise():
    """Why rings hold 1.5 C: with C + 10 s exactly, the proof pays for updates that all lean to the same side."""
    std, n = 0.1, 3
    qmax = (2**31 - 1) // n
    tight = central_terms(1.0, std, 10, 32, 28, round((1.0 + 10 * std) * 2**28) + 1, 2)
    roomy = central_terms(1.0, std, 10, 32, 28, round(ring_bound(1.0, std) * 2**28), 2)
    assert tight.clamp > 1e-8
    assert roomy.clamp < 1e-20
    assert qmax >= ring_bound(1.0, std) * 2**28


@pytest.mark.parametrize(("people", "m"), [(2, 3), (3, 8), (7, 8)])
def test_a_person_at_several_participants(people, m):
    """The event of the proof by brute force: the p updates of one person spread over h = m - 1 members leave the ring,
    or noise read off there leaves the table, about as often as the bound says at most."""
    std, dimension, honest = 0.4, 3, m - 1
    reaches = np.array([1.0, 0.0, 0.0])
    edge = 5.0
    scale_log2 = 10
    qmax = round(edge * 2**scale_log2)
    terms = central_terms(1.0, std, dimension, 32, scale_log2, qmax, honest, people)
    spread = reaches * people / honest

    def out(means):
        inside = [stats.norm.cdf((edge - a) / std) - stats.norm.cdf((-edge - a) / std) for a in means]
        return 1 - np.prod(inside)

    truth = honest * (out(reaches) + out(reaches + spread))
    assert truth <= terms.clamp < 1e-3
    assert terms.clamp > central_terms(1.0, std, dimension, 32, scale_log2, qmax, honest, 1).clamp
    scale_log2, qmax = ring(32, m, ring_bound(1.0, std, people))
    sizes = {"noise_std": std, "clip_norm": 1.0, "scale_log2": scale_log2, "ring_bits": 32, "dimension": 10**6}
    extra = release_delta(**sizes, roster=m, min_survivors=m, colluders=1, per_person=people)
    assert 0.0 < extra < 1e-15
    one = central_terms(1.0, std, 10**6, 32, scale_log2, qmax, honest, people)
    assert extra >= people * max(one.total, local_terms(1.0, std, 10**6).total)
    alone = release_delta(**sizes, roster=m, min_survivors=m, colluders=1, per_person=m)  # no central view
    assert alone == m * local_terms(1.0, std, 10**6).total
    with pytest.raises(ConfigError):
        central_terms(1.0, std, 10, 32, scale_log2, qmax, honest, honest + 1)


def test_two_parties_only_pay_for_the_sampler():
    extra = release_delta(
        noise_std=1.0, clip_norm=1.0, scale_log2=5, ring_bits=16, dimension=10, roster=2, min_survivors=2, colluders=1
    )
    assert extra == local_terms(1.0, 1.0, 10).total
    assert extra < 1e-40


def test_refusals():
    good = {"noise_std": 1.0, "clip_norm": 1.0, "scale_log2": 4, "ring_bits": 16, "dimension": 10, "roster": 10}
    good |= {"min_survivors": 5, "colluders": 1}
    assert release_delta(**good) < 1e-15
    with pytest.raises(ConfigError, match="too coarse"):
        release_delta(**{**good, "scale_log2": 0})
    with pytest.raises(ConfigError, match="hold"):
        release_delta(**{**good, "scale_log2": 9})
    for name, bad in (("noise_std", 0.0), ("noise_std", math.nan), ("clip_norm", math.inf), ("dimension", 0)):
        with pytest.raises(ConfigError):
            release_delta(**{**good, name: bad})
    with pytest.raises(ConfigError):
        central_terms(1.0, 1.0, 10, 16, 4, 3276, 1)


def test_noise_too_small_for_the_sampler_is_no_guarantee():
    assert local_terms(1.0, 0.01, 1).sampler >= 1.0
    assert local_terms(1.0, 0.03, 10**8).sampler < 1e-100
