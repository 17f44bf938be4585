"""The discrete Gaussian sampler: its law without approximation, and its output.

Statistical tests use fixed replay seeds, so they cannot flake; thresholds are 5 standard errors.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.privacy import discrete
from lensemble_flwr.privacy.discrete import MAX_STD, MIN_STD, DiscreteGaussian
from lensemble_flwr.privacy.mechanism import (
    RingGrid,
    add_discrete_noise,
    add_noise,
    clip_to_grid,
    fine_grid_log2,
    to_release,
    zero_update,
)
from lensemble_flwr.privacy.noise import BLOCK, Keystream, OsEntropy, ReplayEntropy

BITS = 30
GOLDEN, GOLDEN_HEAD = "cce0a56b718745c4", [-2, -4, -4, -3, -2, -3]


def draw(std: float, centres: np.ndarray, seed: int = 0, bits: int = BITS) -> np.ndarray:
    values = np.rint(np.asarray(centres) * 2.0**bits).astype(np.int64)
    with ReplayEntropy(seed).open() as stream:
        DiscreteGaussian(std, bits).move(values, stream)
    assert not (values & ((1 << bits) - 1)).any(), "every value is a whole step"
    return values >> bits


def law(std: float, centre: float, k: np.ndarray) -> np.ndarray:
    """P(y = k) for y from D(centre, std)."""
    reach = np.arange(math.floor(centre - 40 * std) - 2, math.ceil(centre + 40 * std) + 3)
    return np.exp(-((k - centre) ** 2) / (2 * std**2)) / np.exp(-((reach - centre) ** 2) / (2 * std**2)).sum()


# --- the law, exactly ---


@pytest.mark.parametrize("std", [0.5, 0.93, 4.0, 40.0])
def test_the_alias_table_holds_every_probability(std: float) -> None:
    table = discrete._table(std, discrete._column_bits(std, 1.0))
    columns = 1 << table.column_bits
    assert columns > 15.5 * std
    capacity = 1 << (table.low_bits + 63 - table.column_bits)
    found = [Fraction(0)] * columns
    for i, threshold in enumerate(table.thresholds):
        found[int(table.values[2 * i])] += Fraction(threshold, columns * capacity)
        found[int(table.values[2 * i + 1])] += Fraction(capacity - threshold, columns * capacity)
    assert sum(found) == 1
    with mpmath.workdps(120):
        exponent = mpmath.mpf(table.m) / (2 * mpmath.mpf(std) ** 2 * (table.m + 1))
        masses = [(1 if j == 0 else 2) * mpmath.exp(-exponent * j * j) for j in range(columns)]
        total = mpmath.fsum(masses)
        for j in range(columns):
            share = mpmath.mpf(found[j].numerator) / found[j].denominator
            assert abs(share * total / masses[j] - 1) < mpmath.mpf(10) ** -85


@pytest.mark.parametrize("std", [0.5, 0.9, 3.0])
def test_proposal_times_acceptance_is_the_law_and_acceptance_hides_the_centre(std: float) -> None:
    m = max(1, round(2 * std))
    reach = range(-60, 61)
    chances = []
    with mpmath.workdps(60):
        s = mpmath.mpf(std)
        for r in (mpmath.mpf(v) / 64 for v in range(-32, 32, 3)):
            proposal = {j: mpmath.exp(-(mpmath.mpf(j) ** 2) * m / (2 * s * s * (m + 1))) for j in reach}
            t = {j: ((j - (m + 1) * r) ** 2 / (m + 1) + m * (mpmath.mpf("0.25") - r * r)) / (2 * s * s) for j in reach}
            assert min(t.values()) >= 0, "a chance is at most 1"
            joint = {j: proposal[j] * mpmath.exp(-t[j]) for j in reach}
            target = {j: mpmath.exp(-((j - r) ** 2) / (2 * s * s)) for j in reach}
            ratios = [joint[j] / target[j] for j in reach]
            assert max(ratios) / min(ratios) - 1 < mpmath.mpf(10) ** -50
            chances.append(mpmath.fsum(joint.values()) / mpmath.fsum(proposal.values()))
    assert max(chances) / min(chances) - 1 < 5 * math.exp(-2 * math.pi**2 * std**2)


def test_float64_and_the_exact_path_decide_alike(monkeypatch) -> None:
    rng = np.random.default_rng(3)
    for std in (0.5, 1.3, 20.0, 1500.0):
        centres = rng.normal(0, 3, 400)
        fast = draw(std, centres)
        with monkeypatch.context() as patch:
            patch.setattr(discrete, "MARGIN", 4.0)  # everything is in doubt
            np.testing.assert_array_equal(draw(std, centres), fast)


def test_a_tie_in_the_table_is_decided_by_more_bits() -> None:
    sampler = DiscreteGaussian(1.0, BITS)
    table = sampler._table
    column = next(i for i, t in enumerate(table.thresholds) if 0 < t < 1 << (table.low_bits + sampler._fraction_bits))
    low = table.thresholds[column] & ((1 << table.low_bits) - 1)
    word = column << (sampler._fraction_bits + 1) | int(table.high[column])

    class Scripted:
        def __init__(self, more: int) -> None:
            self.more, self.asked = more, 0

        def words(self, count: int) -> np.ndarray:
            return np.array([word] + [0] * (count - 1), np.uint64)  # acceptance: a uniform of 0

        def integer(self, bits: int) -> int:
            self.asked += 1
            assert bits == table.low_bits
            return self.more

    for more, alias in ((low - 1, 0), (low, 1)):
        values = np.zeros(1, np.int64)
        stream = Scripted(more)
        sampler.move(values, stream)  # type: ignore[arg-type]
        assert stream.asked == 1
        assert abs(values[0] >> BITS) == table.values[2 * column + alias]


def test_a_tie_in_the_acceptance_is_decided_by_more_bits() -> None:
    sampler = DiscreteGaussian(1.0, BITS)
    with mpmath.workdps(60):
        ratio = mpmath.exp(-sampler._table.m * mpmath.mpf("0.25") / 2)  # j = 0, r = 0, S = 1
        bits = discrete.RELATIVE_BITS
        leading = int(ratio * 2**53)
        rest = int(mpmath.floor(ratio * mpmath.mpf(2) ** 150)) - (leading << 97)

    class Scripted:
        def __init__(self, more: int) -> None:
            self.more = more

        def integer(self, asked: int) -> int:
            assert asked == bits
            return self.more

    shift = bits - 97
    assert sampler._decide_exactly(leading, 0, 0, Scripted((rest - 1) << shift))  # type: ignore[arg-type]
    assert not sampler._decide_exactly(leading, 0, 0, Scripted((rest + 1) << shift))  # type: ignore[arg-type]
    assert sampler._decide_exactly(leading - 1, 0, 0, Scripted(0))  # type: ignore[arg-type]
    assert not sampler._decide_exactly(leading + 1, 0, 0, Scripted(0))  # type: ignore[arg-type]


# --- the output ---


@pytest.mark.parametrize("std", [0.5, 0.7, 1.0, 2.0, 9.3])
@pytest.mark.parametrize("centre", [0.0, 0.5, -0.25, 12345.4])
def test_chi_square_against_the_law(std: float, centre: float) -> None:
    count = 400_000
    y = draw(std, np.full(count, centre), seed=int(10 * std))
    k = np.arange(math.floor(centre - 12 * std), math.ceil(centre + 12 * std) + 1)
    expected = count * law(std, round(centre * 2**BITS) / 2**BITS, k)
    found = np.array([(y == v).sum() for v in k])
    assert found.sum() == count, "nothing beyond 12 std in so few draws"
    often = expected > 20
    pooled_found = np.append(found[often], found[~often].sum())
    pooled_expected = np.append(expected[often], expected[~often].sum())
    value = ((pooled_found - pooled_expected) ** 2 / np.maximum(pooled_expected, 1e-9)).sum()
    freedom = len(pooled_found) - 1
    assert value < freedom + 5 * math.sqrt(2 * freedom)


def test_wide_noise_passes_kolmogorov_smirnov_and_centres_are_kept() -> None:
    std, count = 700.0, 300_000
    centres = np.random.default_rng(4).uniform(-1e6, 1e6, count)
    noise = draw(std, centres, seed=9) - centres
    assert stats.kstest(noise / std, "norm").pvalue > 1e-4
    assert abs(noise.mean()) < 5 * std / math.sqrt(count)
    assert abs(noise.std() / std - 1) < 5 / math.sqrt(2 * count)


@pytest.mark.parametrize("std", [0.5, 0.6, 0.8, 1.0])
def test_the_mean_is_the_centre(std: float) -> None:
    """Exactly, up to 13 S^2 exp(-2 pi^2 S^2): 0.023 steps at S = 0.5, 4e-8 at S = 1. Nearest rounding has 0.5."""
    k = np.arange(-60, 61)
    worst = max(abs((k * law(std, c, k)).sum() - c) for c in np.linspace(0, 1, 101))
    assert worst < 13 * std**2 * math.exp(-2 * math.pi**2 * std**2) + 1e-14
    count = 400_000
    y = draw(std, np.full(count, 0.3))
    assert abs(y.mean() - 0.3) < worst + 5 * std / math.sqrt(count)


def test_a_shift_by_whole_steps_shifts_the_draw() -> None:
    centres = np.random.default_rng(5).normal(0, 4, 5000)
    np.testing.assert_array_equal(draw(1.1, centres + 37, 2), draw(1.1, centres, 2) + 37)


def test_neighbours_in_the_vector_are_independent() -> None:
    y = draw(0.8, np.zeros(400_001), seed=6).astype(float)
    correlation = (y[1:] * y[:-1]).mean() / y.var()
    assert abs(correlation) < 5 / math.sqrt(400_000)


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_every_size(size: int) -> None:
    y = draw(0.5, np.full(size, 0.5))
    assert y.shape == (size,)
    assert np.abs(y).max() < 12


def test_replay_and_golden_stream() -> None:
    centres = np.linspace(-3, 3, 70_000)
    one, again = draw(0.9, centres, 11), draw(0.9, centres, 11)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, draw(0.9, centres, 12))
    assert one[:6].tolist() == GOLDEN_HEAD
    assert hashlib.sha256(one.astype("<i8").tobytes()).hexdigest()[:16] == GOLDEN


def test_scratch_is_wiped() -> None:
    sampler = DiscreteGaussian(1.0, BITS)
    values = np.full(1000, 7 << 28, np.int64)
    with OsEntropy().open() as stream:
        sampler.move(values, stream)
    assert not sampler._scratch.any()


@pytest.mark.parametrize("std", [0.0, MIN_STD - 1e-9, MAX_STD + 1, math.nan, math.inf])
def test_std_out_of_range(std: float) -> None:
    with pytest.raises(ContractViolation, match="discrete noise"):
        DiscreteGaussian(std, BITS)
    for bits in (0, 51, 2.0):
        with pytest.raises(ContractViolation, match="step"):
            DiscreteGaussian(1.0, bits)  # type: ignore[arg-type]


def test_largest_std_and_far_reach_build() -> None:
    for std, ratio in ((MAX_STD, 1.0), (0.5, 50.0), (30.0, 100.0)):
        values = np.zeros(2000, np.int64)
        with ReplayEntropy(1).open() as stream:
            DiscreteGaussian(std, 20, ratio).move(values, stream)
        assert abs((values >> 20).std() / std - 1) < 0.15


def test_a_table_that_would_be_huge_is_refused() -> None:
    assert discrete.fits(2048.0, 1.0)
    assert not discrete.fits(2048.0, 20.0)
    assert discrete.fits(500.0, 34.0)
    with pytest.raises(ContractViolation, match="discrete noise"):
        DiscreteGaussian(2048.0, BITS, 20.0)
    for n in (2, 3, 10, 100):  # every 16-bit ring that holds 1.5 C + 10 s, exactly filled
        for ratio in (0.01, 1.0, 10.0, 54.0):
            std = (2**15 - 1) // n / (1.5 * ratio + 10.0)
            assert std < MIN_STD or discrete.fits(std, ratio)


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys, lensemble_flwr.privacy.discrete, lensemble_flwr.privacy.discrete_bounds;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- in the release path ---


def ring_for(clip: float, std: float, steps: float) -> RingGrid:
    """A ring on which s is about ``steps`` steps: the power of two nearest above."""
    scale = math.ceil(math.log2(steps / std))
    return RingGrid(scale, math.ceil(math.ldexp(1.5 * clip + 10 * std, scale)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.floats(1e-3, 1e3),
    st.floats(0.05, 20.0),
)
def test_the_centre_is_the_clipped_update_and_never_longer_than_the_bound(raw, clip, ratio) -> None:
    """Sensitivity, exactly: the draw reads nothing but k, and the norm of k g0 is at most C in rational arithmetic."""
    x, std = np.array(raw, np.float64), ratio * clip
    update = clip_to_grid(x, clip, std)
    k = update.k.copy()
    assert sum(int(v) ** 2 for v in k) * Fraction(2) ** (2 * update.g0_log2) <= Fraction(clip) ** 2
    norm = np.linalg.norm(x)
    kept = x * min(1.0, clip / norm) if norm else x
    np.testing.assert_allclose(np.ldexp(k.astype(float), update.g0_log2), kept, atol=1e-9 * clip + 2.0**update.g0_log2)
    ring = ring_for(clip, std, 1.0)
    q = to_release(add_discrete_noise(update, std, ReplayEntropy(1), ring.scale_log2), ring.scale_log2, ring.qmax).q
    with ReplayEntropy(1).open() as stream:
        DiscreteGaussian(math.ldexp(std, ring.scale_log2), -ring.scale_log2 - update.g0_log2, clip / std).move(
            k, stream
        )
    np.testing.assert_array_equal(q, np.clip(k >> (-ring.scale_log2 - update.g0_log2), -ring.qmax, ring.qmax))


def test_variance_on_a_coarse_ring_is_the_noise_alone() -> None:
    """At s = g the rounded Gaussian has variance s^2 + g^2/12, the discrete one s^2: 8 % less (6 standard errors)."""
    d, clip, std = 200_000, 1.0, 1.0
    ring = RingGrid(0, 100)
    x = np.random.default_rng(7).normal(size=d)
    x /= np.linalg.norm(x)  # coordinates of 0.002 steps: nearest rounding would lose them all
    update = clip_to_grid(x, clip, std)
    centres = np.ldexp(update.k.astype(float), update.g0_log2)
    discrete_q = to_release(add_discrete_noise(update, std, ReplayEntropy(3), 0), 0, ring.qmax).q
    rounded_q = to_release(add_noise(clip_to_grid(x, clip, std), std, ReplayEntropy(3)), 0, ring.qmax).q
    error = 6 * math.sqrt(2 / d)
    assert abs((discrete_q - centres).var() - 1.0) < error
    assert abs((rounded_q - centres).var() - (1 + 1 / 12)) < error * 1.1
    # The signal is still there: its correlation with the release is 1 / sqrt(d) times its norm, seen over many draws.
    seen = [
        float(to_release(add_discrete_noise(clip_to_grid(x, clip, std), std, ReplayEntropy(i), 0), 0, 100).q @ centres)
        for i in range(30)
    ]
    assert abs(np.mean(seen) - 1.0) < 5 / math.sqrt(30)


def test_an_update_is_noised_once_and_by_what_it_was_clipped_for() -> None:
    update = zero_update(10, 1.0, 2.0)
    with pytest.raises(ContractViolation, match="noise std"):
        add_discrete_noise(update, 1.0, OsEntropy(), 0)
    with pytest.raises(ContractViolation, match="discrete noise"):
        add_discrete_noise(update, 2.0, OsEntropy(), 20)  # far too fine a ring
    with pytest.raises(ContractViolation, match="entropy"):
        add_discrete_noise(update, 2.0, None, 0)  # type: ignore[arg-type]
    noised = add_discrete_noise(update, 2.0, OsEntropy(), 0)
    assert noised.entropy == "csprng"
    with pytest.raises(ContractViolation, match="used up"):
        add_discrete_noise(update, 2.0, OsEntropy(), 0)
    with pytest.raises(ContractViolation, match="ClippedUpdate"):
        add_discrete_noise(noised, 2.0, OsEntropy(), 0)  # type: ignore[arg-type]
    with pytest.raises(ContractViolation, match="discrete noise"):
        add_discrete_noise(zero_update(3, 1.0, 0.0), 0.0, OsEntropy(), 0)


def test_a_failing_random_source_leaves_the_update_untouched(monkeypatch) -> None:
    update = zero_update(10, 1.0, 2.0)
    monkeypatch.setattr("os.urandom", lambda n: bytes(n))
    with pytest.raises(Exception, match="random source"):
        add_discrete_noise(update, 2.0, OsEntropy(), 0)
    assert not update.k.any()


def test_the_fine_grid_divides_the_ring() -> None:
    for ratio in (0.01, 1.0, 50.0):
        for steps in (0.5, 2048.0):
            step_bits = -math.floor(math.log2(steps / ratio)) - fine_grid_log2(1.0, ratio)
            assert 9 <= step_bits <= 50


def test_a_keystream_is_all_it_takes() -> None:
    values = np.zeros(100, np.int64)
    with Keystream(bytearray(range(32))) as stream:
        DiscreteGaussian(1.0, 5).move(values, stream)
    assert values.any()
