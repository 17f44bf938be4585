"""The noise: keys and wiping, the sampler's exact tables and decisions, and its output.

Statistical tests use fixed replay seeds, so they cannot flake. Their power: with n = 4e6 draws a relative error of .3 %
in the std, a mean off by 0.0025 std, or a probability of .01 that is off by 3 % would each be more than 5 standard
errors away; the thresholds are 4.5 to 5.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.privacy import noise
from lensemble_flwr.privacy.noise import Keystream, OsEntropy, ReplayEntropy, RoundedGaussian, entropy_kind, reach
from tests.effort import calls

STD = 2.0**36.4
GOLDEN, GOLDEN_HEAD = "92a685e77d33537e", [116956859841, -36139601858, -15740081747]


def draw(std: float, count: int, seed: int = 0, ratio: float = 1.0) -> np.ndarray:
    values = np.zeros(count, np.int64)
    with ReplayEntropy(seed).open() as stream:
        RoundedGaussian(std, ratio).add_to(values, stream)
    return values


def exact_cell(std: float, k: int) -> mpmath.mpf:
    """P(rint(std Z) = k), to about 60 digits."""
    with mpmath.workdps(60 + 2 * int(math.log10(std)) + int(0.25 * (k / std) ** 2)):
        low, high = (mpmath.mpf(2 * abs(k) + s) / (2 * mpmath.mpf(std)) / mpmath.sqrt(2) for s in (-1, 1))
        return (mpmath.erfc(low) - mpmath.erfc(high)) / 2


# --- keys ---


def test_keystream_is_aes_counter_mode():
    key = bytes(range(32))
    with Keystream(bytearray(key)) as stream:
        words = np.concatenate([stream.words(n).copy() for n in (1, 3, 7, 1000)])
        stream._left = 0  # the next nonce
        after = stream.words(4).copy()
    for nonce, found in ((0, words), (1, after)):
        start = nonce.to_bytes(12, "big") + b"\0\0\0\2"
        expected = Cipher(algorithms.AES256(key), modes.CTR(start)).encryptor().update(bytes(8 * found.size))
        assert found.astype("<u8").tobytes() == expected


def test_key_and_buffer_are_wiped():
    key = bytearray(os.urandom(32))
    with Keystream(key) as stream:
        stream.words(100)
        assert any(stream._buffer)
    assert not any(key)
    assert not any(stream._buffer[:800])
    with pytest.raises(AttributeError):
        stream.words(1)
    failed = bytearray(os.urandom(32))
    with pytest.raises(RuntimeError), Keystream(failed):
        raise RuntimeError
    assert not any(failed)


def test_every_draw_has_its_own_key(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))
    source, seen = OsEntropy(), set()
    for _ in range(5):
        with source.open() as stream:
            seen.add(bytes(stream._key))
    assert asked == [32] * 5
    assert len(seen) == 5


@pytest.mark.parametrize("failure", [OSError("no"), NotImplementedError("no"), b"short", bytes(32)], ids=str)
def test_a_failing_os_source_is_an_error_and_has_no_fallback(monkeypatch, failure):
    def source(_):
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(os, "urandom", source)
    with pytest.raises(ConfigError, match="random source"):
        OsEntropy().open()


def test_replay_is_reproducible_and_never_repeats_a_draw():
    first, second = ReplayEntropy(7), ReplayEntropy(7)
    one = [first.open().words(4).tobytes() for _ in range(3)]
    two = [second.open().words(4).tobytes() for _ in range(3)]
    assert one == two
    assert len({*one, ReplayEntropy(8).open().words(4).tobytes(), ReplayEntropy(b"7").open().words(4).tobytes()}) == 5
    for bad in (-1, 1.5, "7", None, True):
        with pytest.raises(ContractViolation):
            ReplayEntropy(bad)


def test_only_the_two_sources_count_as_entropy():
    assert entropy_kind(OsEntropy()) == "csprng"
    assert entropy_kind(ReplayEntropy(0)) == "replay"

    class Fake(OsEntropy):
        pass

    for bad in (Fake(), None, np.random.default_rng(0), OsEntropy):
        with pytest.raises(ContractViolation):
            entropy_kind(bad)


def test_replayed_noise_is_a_format():
    """Integer arithmetic and + and * of float64 only: the same on every machine."""
    values = draw(STD, 100_000, seed=1).astype("<i8")
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == GOLDEN
    assert values[:3].tolist() == GOLDEN_HEAD


# --- exact tables ---


@pytest.mark.parametrize(("std", "ratio"), [(STD, 1.0), (2.0**33 + 12345.0, 1.0), (500.25, 1.0), (2.0**36.99, 4.0)])
def test_alias_table_gives_every_stratum_its_exact_mass(std, ratio):
    sampler = RoundedGaussian(std, ratio)
    table = sampler._table
    columns = 1 << table.column_bits
    capacity = 1 << (table.low_bits + 63 - table.column_bits)
    mass = dict.fromkeys(range(columns), 0)
    for column in range(columns):
        own, other = (int(v) >> table.j for v in table.starts[2 * column : 2 * column + 2])
        assert own == column
        assert 0 <= table.thresholds[column] <= capacity
        assert table.thresholds[column] >> table.low_bits == table.high[column]
        mass[own] += table.thresholds[column]
        mass[other] += capacity - table.thresholds[column]
    assert sum(mass.values()) == columns * capacity
    assert columns << table.j > reach(ratio) * std
    base = exact_cell(std, 0)
    for stratum in (1, 2, 50, 400, columns - 1):
        with mpmath.workdps(80):
            relative = mpmath.mpf(mass[stratum]) / mass[0] / (exact_cell(std, stratum << table.j) / base)
            assert abs(relative - 1) < mpmath.mpf(10) ** -25, (
                "60 digits of two erfc, minus what their difference cancels"
            )


@pytest.mark.parametrize("std", [64.0, 1000.5, STD])
def test_cell_series(std):
    import decimal

    with decimal.localcontext(decimal.Context(prec=50)):
        for k in (0, 1, int(std), int(9 * std)):
            found = noise._cell(k, decimal.Decimal(std))
            with mpmath.workdps(50):
                density = (
                    mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(std) ** 2)) / mpmath.sqrt(2 * mpmath.pi) / std
                )
                assert abs(mpmath.mpf(str(found)) * density / exact_cell(std, k) - 1) < mpmath.mpf(10) ** -30


class Scripted:
    """A keystream that says what it is told to, and fails when it is asked for more."""

    def __init__(self, words: list[int]) -> None:
        self.script = list(words)

    def words(self, count: int) -> np.ndarray:
        head, self.script = self.script[:count], self.script[count:]
        assert len(head) == count
        return np.array(head, np.uint64)

    integer = Keystream.integer


def test_a_tie_in_the_table_is_broken_by_more_bits():
    sampler = RoundedGaussian(STD)
    table, bits = sampler._table, 63 - sampler._table.column_bits
    column = next(c for c in range(200, 1024) if 0 < table.thresholds[c] < 1 << (bits + table.low_bits))
    first = column << (bits + 1) | int(table.high[column])
    low = table.thresholds[column] & ((1 << table.low_bits) - 1)
    assert low > 0
    count = -(-table.low_bits // 64)
    for extension, alias in ((low - 1, 0), (low, 1)):
        padded = extension << (64 * count - table.low_bits)
        stream = Scripted([first, 0, *(padded >> (64 * i) & (2**64 - 1) for i in range(count))])
        values, accepted = sampler._weigh(stream.words(2), stream)
        assert accepted.all()
        assert values[0] == table.starts[2 * column + alias]


def test_acceptance_is_decided_exactly():
    """Thresholds placed one unit to either side of p(k)/p(start), at 128 bits and beyond."""
    sampler = RoundedGaussian(1000.5)
    table = sampler._table
    for start, size in ((0, 5), (16, 1), (640, 13), (4000, 16)):
        with mpmath.workdps(120):
            edge = int(exact_cell(1000.5, start + size) / exact_cell(1000.5, start) * 2**128)
        assert sampler._decide_exactly(edge - 1, 128, start, size, Scripted([]))
        assert not sampler._decide_exactly(edge + 1, 128, start, size, Scripted([]))
        assert sampler._decide_exactly(edge, 128, start, size, Scripted([0] * 5))
        assert not sampler._decide_exactly(edge, 128, start, size, Scripted([2**64 - 1] * 5))
    assert sampler._decide_exactly(2**128 - 1, 128, 0, 0, Scripted([]))
    assert table.margin < 1e-3


def test_float_decisions_have_room():
    """The polynomial and t are within MARGIN/500 of the truth, for every t that can occur."""
    sampler = RoundedGaussian(STD, 30.0)
    table = sampler._table
    rng = np.random.default_rng(0)
    start = np.sort(rng.choice(np.unique(table.starts), 300))
    size = rng.integers(0, (1 << table.j) + 1, 300)
    t = size.astype(float) * (2 * start + size).astype(float) * table.half_inverse_square
    assert t.max() < 2.0
    terms = table.terms
    value = np.full_like(t, noise._TAYLOR[terms])
    for coefficient in reversed(noise._TAYLOR[:terms]):
        value = coefficient - value * t
    with mpmath.workdps(40):
        for a, b, found in zip(start.tolist(), size.tolist(), value, strict=True):
            truth = mpmath.exp(-mpmath.mpf(b * (2 * a + b)) / (2 * mpmath.mpf(STD) ** 2))
            assert abs(truth - found) < noise.MARGIN / 100


def test_doubt_everything_and_the_law_stays_the_same(monkeypatch):
    """With a margin of 1 every decision is made in exact arithmetic."""
    sampler = RoundedGaussian(4096.5)
    sampler._table = dataclasses.replace(sampler._table, margin=1.0)
    values = np.zeros(1500, np.int64)
    with ReplayEntropy(3).open() as stream:
        sampler.add_to(values, stream)
    assert stats.kstest((values + np.random.default_rng(0).random(values.size) - 0.5) / 4096.5, "norm").pvalue > 1e-4


# --- the law ---


@pytest.mark.parametrize("std", [333.25, 1500.0])
def test_every_integer_has_its_probability(std):
    count = 400_000
    values = draw(std, count, seed=5)
    edge = int(3.5 * std)
    expected = np.array([float(exact_cell(std, k)) for k in range(edge + 1)])
    expected = np.concatenate([expected[:0:-1], expected])
    inside = values[np.abs(values) <= edge] + edge
    observed = np.append(np.bincount(inside, minlength=2 * edge + 1), count - inside.size)
    expected = np.append(expected, 1 - expected.sum()) * count
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


@pytest.fixture(scope="module")
def sample():
    return draw(STD, 4_000_000, seed=11)


def test_moments_and_distribution(sample):
    z, n = sample / STD, sample.size
    assert abs(z.mean()) < 4.5 / math.sqrt(n)
    assert abs(z.var() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4.5 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4.5 * math.sqrt(96 / n)
    assert stats.kstest(z, "norm").pvalue > 1e-4
    for edge in (1.0, 2.0, 3.0, 4.0, 4.75):
        p = 2 * stats.norm.sf(edge)
        assert abs((np.abs(z) > edge).mean() - p) < 5 * math.sqrt(p / n)


def test_low_bits_are_uniform(sample):
    for shift in (0, 8, 16, 24):
        counts = np.bincount((sample >> shift) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_strata_are_not_visible(sample):
    """The place within a stratum and around its edges: a wrong acceptance would show as a sawtooth."""
    width = 1 << RoundedGaussian(STD)._table.j
    place = (np.abs(sample) % width) / width
    density = np.exp(-(((np.arange(600)[:, None] + np.linspace(0.005, 0.995, 100)) * width / STD) ** 2) / 2).sum(0)
    counts = np.histogram(place, 100, (0, 1))[0]
    assert stats.chisquare(counts, density * counts.sum() / density.sum()).pvalue > 1e-4


def test_neighbours_are_independent(sample):
    z = sample / STD
    for lag in (1, 2, 3, noise.BLOCK):
        for power in (1, 2):
            a, b = z[:-lag] ** power, z[lag:] ** power
            assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / math.sqrt(a.size)


@pytest.mark.parametrize("count", [0, 1, 5, noise.BLOCK - 1, noise.BLOCK, noise.BLOCK + 1, 3 * noise.BLOCK + 17])
def test_any_length_and_in_place(count):
    values = np.arange(count, dtype=np.int64) * 1000
    with ReplayEntropy(2).open() as stream:
        RoundedGaussian(STD).add_to(values, stream)
    assert np.array_equal(values - np.arange(count) * 1000, draw(STD, count, seed=2))


def test_scratch_is_wiped():
    sampler = RoundedGaussian(STD)
    with ReplayEntropy(2).open() as stream:
        sampler.add_to(np.zeros(1000, np.int64), stream)
    assert not sampler._scratch.any()


def test_limits():
    for bad in (63.0, 2.0**45, math.nan, math.inf):
        with pytest.raises(ContractViolation):
            RoundedGaussian(bad)
    with pytest.raises(ContractViolation):
        RoundedGaussian(STD, math.nan)
    assert reach(0.0) == 14.0
    assert reach(1e9) == 64.0
    largest = draw(2.0**44, 10_000, seed=1, ratio=50.0)
    assert stats.kstest(largest / 2.0**44, "norm").pvalue > 1e-4
    assert RoundedGaussian(2.0**44, 50.0)._table.starts.max() < 2**52
    assert Fraction(reach(2.0)) >= 14


def test_no_loop_over_coordinates():
    values, sampler = np.zeros(2_000_000, np.int64), RoundedGaussian(STD)
    with OsEntropy().open() as stream:
        assert calls(lambda: sampler.add_to(values, stream)) < values.size / 100
