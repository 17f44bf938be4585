"""The compiled loops give the integers of the numpy path, which is the reference: every one of them, in every case."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lensemble_flwr import compiled
from lensemble_flwr.compiled import Loop
from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.privacy import mechanism, noise_loops
from lensemble_flwr.privacy.mechanism import (
    add_noise,
    clip_to_grid,
    encode_exact,
    fine_grid_log2,
    private_release,
    to_release,
    zero_update,
)
from lensemble_flwr.privacy.noise import BLOCK, Cells, Keystream, OsEntropy, ReplayEntropy, RoundedGaussian, Scaled

STD = 2.0**36.4
PATHS = ("numpy", "numba")
LOOPS = (
    noise_loops.draw,
    noise_loops.decide,
    noise_loops.truncate,
    noise_loops.sum_of_squares,
    noise_loops.round_stochastically,
)


@pytest.fixture(autouse=True, scope="module")
def _compiled(tmp_path_factory):
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENSEMBLE_HOME", str(tmp_path_factory.mktemp("home")))
        for one in LOOPS:
            one.compiled()


def on(path: str, call, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENSEMBLE_KERNELS", path)
        return call(*arguments)


def noised(std: float, values: np.ndarray, seed: int, ratio: float = 1.0) -> tuple[np.ndarray, bytes]:
    """The values with noise, and the next words of the keystream: both paths must have read equally many."""
    values = values.copy()
    with ReplayEntropy(seed).open() as stream:
        RoundedGaussian(std, ratio).add_to(values, stream)
        return values, stream.words(4).tobytes()


def test_the_loops_are_really_compiled_and_without_fused_operations(monkeypatch):
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)  # code that was kept cannot be inspected
    for one in LOOPS:
        assert one.compiled() is not None
        machine_code = Loop(one.function, one._signatures).compiled().inspect_asm().values()
        assert all(len(code) > 1000 and "fmadd" not in code and "fmsub" not in code for code in machine_code)
    assert on("numba", lambda: compiled.use(1, *LOOPS))
    assert not on("numpy", lambda: compiled.use(1 << 40, *LOOPS))


@pytest.mark.parametrize("count", [0, 1, 5, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 1_000_000])
def test_noise_of_any_length(count):
    values = np.random.default_rng(count).integers(-(2**50), 2**50, count)
    one, two = (on(path, noised, STD, values, count) for path in PATHS)
    assert np.array_equal(one[0], two[0])
    assert one[1] == two[1]


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(6.0, 44.0), st.floats(0.0, 6.0), st.integers(0, 2**32))
def test_noise_of_any_std(log2_std, ratio, seed):
    one, two = (on(path, noised, 2.0**log2_std, np.zeros(30_000, np.int64), seed, ratio) for path in PATHS)
    assert np.array_equal(one[0], two[0])
    assert one[1] == two[1]


def floats(sampler: RoundedGaussian, size: int, stream: Keystream) -> np.ndarray:
    """Ring cells of an update in floats, which the compiled path takes without its integers."""
    x = np.linspace(-100.0, 100.0, size).astype(np.float32)
    out, sums = np.full(size, 7, np.int32), []

    def load(block: slice, part: np.ndarray) -> None:
        part[:] = np.trunc(x[block].astype(np.float64) * 0.7 * 2.0**20)
        sums.append(float(np.dot(part.astype(np.float64), part)))

    sampler.stream_to(load, Cells(9, 2**31 - 1), out, stream, Scaled(x, 0.7, 2.0**20, sums))
    truth = np.trunc(x.astype(np.float64) * 0.7 * 2.0**20)
    assert len(sums) == -(-size // BLOCK), "each block once"
    assert math.isclose(math.fsum(sums), float(np.dot(truth, truth)), rel_tol=1e-12)
    return out


def integers(sampler: RoundedGaussian, size: int, stream: Keystream) -> np.ndarray:
    values = np.arange(size) << 20
    sampler.add_to(values, stream)
    return values


@pytest.mark.parametrize("source", [floats, integers])
def test_wide_margins_reach_the_exact_decisions(monkeypatch, source):
    """With a margin of 2^-6 a few hundred draws of a block are decided in exact arithmetic."""
    asked = []
    exactly = RoundedGaussian._decide_exactly

    def spy(self, *arguments):
        asked.append(arguments[:4])
        return exactly(self, *arguments)

    monkeypatch.setattr(RoundedGaussian, "_decide_exactly", spy)

    def draw() -> np.ndarray:
        sampler = RoundedGaussian(4096.5)
        sampler._table = dataclasses.replace(sampler._table, margin=2.0**-6)
        with ReplayEntropy(3).open() as stream:
            return source(sampler, 4000, stream)

    one = on("numpy", draw)
    half = len(asked)
    two = on("numba", draw)
    assert half > 20
    assert asked[half:] == asked[:half]
    assert np.array_equal(one, two)


@pytest.mark.parametrize("source", [floats, integers])
def test_a_tie_is_broken_in_the_same_way(source):
    """Thresholds cut down to a few bits tie in about every second block, some of them decided by more bits."""

    def draw() -> tuple[np.ndarray, int]:
        sampler = RoundedGaussian(STD)
        table, ties = sampler._table, 0
        keep = ~np.int64((1 << (sampler._fraction_bits - 12)) - 1)
        sampler._table = dataclasses.replace(table, high=table.high & keep)

        class Coarse(Keystream):
            def words(self, count):
                got = super().words(count)
                if count > BLOCK:  # the fractions; keeps column, sign and the upper 12 bits
                    half = got[: count // 2]
                    half &= ~np.uint64((1 << (sampler._fraction_bits - 12)) - 1)
                return got

            def integer(self, bits):
                nonlocal ties
                ties += 1
                return super().integer(bits)

        with Coarse(bytearray(range(32))) as stream:
            return source(sampler, 3 * BLOCK, stream), ties

    one, two = (on(path, draw) for path in PATHS)
    assert one[1] == two[1] > 5
    assert np.array_equal(one[0], two[0])


def test_the_packed_table_holds_the_other_two():
    for std, ratio in ((64.0, 0.0), (STD, 1.0), (2.0**44, 50.0)):
        table = RoundedGaussian(std, ratio)._table
        packed, columns = table.packed.tolist(), 1 << table.column_bits
        assert [entry >> table.column_bits for entry in packed] == table.high.tolist()
        assert [entry % columns << table.j for entry in packed] == table.starts[1::2].tolist()
        assert table.starts[::2].tolist() == [column << table.j for column in range(columns)]


# --- the whole release ---


def ring_of(clip: float, std: float) -> tuple[int, int]:
    scale = math.floor(math.log2(2**27 / (clip + 10 * std)))
    return scale, math.ceil((clip + 10 * std) * 2.0**scale)


def three_steps(x, dimension, clip, std, seed, scale, qmax):
    update = zero_update(dimension, clip, std) if x is None else clip_to_grid(x, clip, std)
    return to_release(add_noise(update, std, ReplayEntropy(seed)), scale, qmax)


def one_pass(x, dimension, clip, std, seed, scale, qmax):
    return private_release(x, dimension, clip, std, ReplayEntropy(seed), scale, qmax)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 70_000),
    st.sampled_from([np.float32, np.float64]),
    st.floats(-40, 40),
    st.floats(-9, 6),
    st.integers(-12, 12),
    st.integers(0, 2**32),
)
def test_one_pass_and_three_steps_on_both_paths_agree(size, dtype, clip_log2, ratio_log10, length_log10, seed):
    clip, std = 2.0**clip_log2, 2.0**clip_log2 * 10.0**ratio_log10
    x = np.random.default_rng(seed).standard_normal(size)
    x = (x * clip * 10.0**length_log10 / math.sqrt(size)).astype(dtype)
    scale, qmax = ring_of(clip, std)
    releases = [
        on(path, way, x, size, clip, std, seed, scale, qmax) for path in PATHS for way in (three_steps, one_pass)
    ]
    for release in releases[1:]:
        assert np.array_equal(release.q, releases[0].q)
        assert release.to_bytes() == releases[0].to_bytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [1e30, 3e-42, 0.0, -3e38])
def test_values_at_the_ends_of_the_range(path, value):
    x = np.full(BLOCK + 3, value, np.float32)
    reference = on("numpy", three_steps, x, x.size, 1.0, 1.0, 1, *ring_of(1.0, 1.0))
    assert np.array_equal(on(path, one_pass, x, x.size, 1.0, 1.0, 1, *ring_of(1.0, 1.0)).q, reference.q)


@pytest.mark.parametrize("path", PATHS)
def test_zero_update_and_odd_arrays(path):
    numbers = (1.0, 0.5, 7, *ring_of(1.0, 0.5))
    zero = on(path, one_pass, None, 1000, *numbers)
    assert np.array_equal(zero.q, on("numpy", three_steps, None, 1000, *numbers).q)
    x = np.random.default_rng(0).standard_normal((1000, 2)).astype(np.float32)
    frozen = x[:, 0].copy()
    frozen.flags.writeable = False
    expected = on("numpy", three_steps, frozen, 1000, *numbers).q
    for odd in (x[:, 0], frozen):
        assert np.array_equal(on(path, one_pass, odd, 1000, *numbers).q, expected)
    assert zero.claimable is False
    assert on(path, private_release, None, 10, 1.0, 0.5, OsEntropy(), *ring_of(1.0, 0.5)).claimable


@pytest.mark.parametrize("path", PATHS)
def test_one_pass_refuses_what_the_steps_refuse(path):
    x = np.ones(100, np.float32)
    good = (x, 100, 1.0, 1.0, OsEntropy(), *ring_of(1.0, 1.0))

    def call(**changed):
        names = ("delta", "dimension", "clip_norm", "noise_std", "entropy", "scale_log2", "qmax")
        return on(path, lambda: private_release(**(dict(zip(names, good, strict=True)) | changed)))

    call()
    for bad in (
        {"clip_norm": 0.0},
        {"noise_std": 0.0},
        {"noise_std": -1.0},
        {"noise_std": math.nan},
        {"qmax": good[-1] - 1},
        {"qmax": 2**31},
        {"scale_log2": 1.0},
    ):
        with pytest.raises(ConfigError):
            call(**bad)
    for bad in (
        {"dimension": 99},
        {"dimension": 0},
        {"delta": x.astype(np.float16)},
        {"delta": x.reshape(10, 10)},
        {"delta": [1.0] * 100},
        {"entropy": None},
    ):
        with pytest.raises(ContractViolation):
            call(**bad)
    for value in (math.nan, math.inf):
        with pytest.raises(ContractViolation) as caught:
            call(delta=np.full(100, value, np.float32))
        assert caught.value.reason == "non_finite"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_nothing_without_noise_is_handed_on(path, dtype):
    """Whenever randomness is read, each coordinate of the result is still empty, 0, or already what it will be."""
    size, empty, seen = 200_000, -77, []
    out = np.full(size, empty, np.int32)
    x = np.full(size, 1 << 20, dtype)

    class Watching(Keystream):
        def words(self, count):
            seen.append(out.copy())
            return super().words(count)

    def draw():
        sampler = RoundedGaussian(2.0**28)
        scaled = Scaled(x, 1.0, 2.0**10, []) if dtype == np.float32 else None
        with Watching(bytearray(range(32))) as stream:
            sampler.stream_to(lambda block, part: part.fill(1 << 30), Cells(9, 2**30), out, stream, scaled)
        return sampler

    sampler = on(path, draw)
    assert np.all(out != empty)
    assert np.all(np.abs(out - (1 << 21)) < 14 << 19)
    waiting = 0
    for early in seen:
        assert np.all((early == empty) | (early == 0) | (early == out))
        waiting = max(waiting, np.count_nonzero(early == 0))
    assert 500 < waiting < 5000
    assert len(seen) > 2 * size / BLOCK
    assert not sampler._scratch.any()


def test_the_cells_of_a_block_are_those_of_the_reference():
    """Halves go up, both ends are clamped, and the widest shift leaves nothing."""
    v = np.array([-(2**61), -1537, -1536, -513, -512, -1, 0, 511, 512, 1535, 1536, 2**61])
    assert Cells(10, 1000)(v).tolist() == [-1000, -2, -1, -1, 0, 0, 0, 0, 1, 1, 2, 1000]
    assert Cells(63, 1000)(v).tolist() == [0] * v.size
    assert Cells()(v).tolist() == v.tolist()


@pytest.mark.parametrize("path", PATHS)
def test_peak_memory_of_one_pass(path):
    import tracemalloc

    x = np.random.default_rng(0).standard_normal(4_000_000).astype(np.float32)
    numbers = (1.0, 1.0, 1, *ring_of(1.0, 1.0))
    on(path, one_pass, x[:10], 10, *numbers)
    tracemalloc.start()
    on(path, one_pass, x, x.size, *numbers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * x.size + 6_000_000 + 0.6 * x.size, "the release, blocks, and what is drawn a second time"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [-3, 0, 20])
def test_stochastic_rounding_agrees(dtype, scale):
    limit = 2.0**-scale * (2**24)
    x = np.random.default_rng(abs(scale)).uniform(-limit, limit, 2 * BLOCK + 77).astype(dtype)
    x[:6] = [0.0, -0.0, limit, -limit, 5e-324, 0.5]
    one, two = (on(path, encode_exact, x, scale, 2**24, ReplayEntropy(3)) for path in PATHS)
    assert np.array_equal(one.q, two.q)
    for value in (math.nan, math.inf, -limit * 1.001):
        for place in (0, BLOCK + 1, x.size - 1):
            bad = x.copy()
            bad[place] = value
            errors = []
            for path in PATHS:
                with pytest.raises((ConfigError, ContractViolation)) as caught:
                    on(path, encode_exact, bad, scale, 2**24, ReplayEntropy(3))
                errors.append(repr(caught.value))
            assert errors[0] == errors[1]


def test_norms_agree():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, BLOCK - 1, BLOCK, 5 * BLOCK + 77):
        for dtype in (np.float32, np.float64):
            x = (rng.standard_normal(size) * 10.0 ** rng.uniform(-3, 3, size)).astype(dtype)
            assert on("numpy", mechanism._norm, x) == on("numba", mechanism._norm, x)
    assert fine_grid_log2(1.0, 1.0) == -37
