"""Int8-grade quantization: RFC-0003's bound on the round trip, an equal sum whatever the order, bytes on the wire."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.secagg import RingParams, center, decode, encode
from tests.secagg.driver import Drbg, make_params, run


def int8_ring(n: int, bound: float, d: int, bits: int = 16) -> RingParams:
    """The public scale at which |x| <= bound takes at most 127 steps, in a ring that holds the sum of n of them."""
    scale = math.floor(math.log2(127 / bound))
    ring = RingParams(bits, n, scale, d)
    assert ring.qmax >= 127
    return ring


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 250), st.integers(1, 2000), st.floats(-20, 20), st.integers(0, 2**32 - 1))
def test_round_trip_error_of_int8(n, d, bound_log2, seed):
    """||x - dequantize(quantize(x))|| <= sqrt(d)/2 steps to the nearest, < sqrt(d) steps stochastically."""
    bound = 2.0**bound_log2
    ring = int8_ring(n, bound, d)
    assert bound / 127 <= ring.grid < 2 * bound / 127
    x = np.random.default_rng(seed).uniform(-bound, bound, d).astype(np.float32)
    nearest, stochastic = encode(x, ring), encode(x, ring, "stochastic", Drbg(seed))
    for lanes in (nearest, stochastic):
        assert np.abs(center(lanes, ring)).max() <= 128
    assert np.linalg.norm(decode(nearest, ring, 1) - x) <= math.sqrt(d) / 2 * ring.grid * (1 + 1e-12)
    assert np.linalg.norm(decode(stochastic, ring, 1) - x) < math.sqrt(d) * ring.grid


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_the_dequantized_sum_is_the_same_in_any_order(bits):
    """Floating-point sums are not: that is why the sum is taken in the ring."""
    n, d = 5, 3000
    ring = int8_ring(n, 1.0, d, bits)
    xs = np.random.default_rng(0).uniform(-1, 1, (n, d)).astype(np.float32)
    lanes = [encode(x, ring, "stochastic", Drbg(i)) for i, x in enumerate(xs)]
    sums = set()
    for order in itertools.permutations(range(n)):
        total = np.zeros(d, ring.lane)
        for i in order:
            total += lanes[i]
        if bits == 24:
            total &= np.uint32(0xFFFFFF)
        sums.add(decode(total, ring, n).tobytes())
    assert len(sums) == 1
    (only,) = sums
    exact = sum(np.float64(center(lane, ring)) for lane in lanes) * ring.grid
    assert only == exact.tobytes()
    plain = {xs[list(order)].sum(axis=0, dtype=np.float32).tobytes() for order in itertools.permutations(range(n))}
    assert len(plain) > 1


def test_the_dequantized_sum_through_the_whole_protocol():
    params = make_params(5, 3000, bits=16)
    ring = RingParams(16, 5, 6, 3000)
    xs = np.random.default_rng(1).uniform(-1, 1, (5, 3000)).astype(np.float32)
    q = [center(encode(x, ring, "stochastic", Drbg(i)), ring) for i, x in enumerate(xs)]
    found = {
        decode(run(params, q, lost={"masked": [4]}, seed=seed, threads=threads)[0], ring, 4).tobytes()
        for seed, threads in ((1, 1), (2, 1), (1, 3))
    }
    assert found == {(sum(q[:4]) * ring.grid).tobytes()}


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("d", [20_000, 10**6, 3 * 10**8])
def test_bytes_on_the_wire(bits, d):
    """ring/8 bytes a coordinate and less than 0.1 % more."""
    assert bits / 8 <= RingParams(bits, 100, 8, d).wire_bytes / d < bits / 8 * 1.001
