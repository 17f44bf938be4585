"""Fixed point: exact sums, exact rounding, typed refusals, bytes on the wire."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.secagg import RingParams, center, decode, encode, from_wire, quantize, to_wire
from lensemble_flwr.secagg.ring import SEGMENT, wrap
from tests.secagg.driver import Drbg, refused

BITS = (16, 24, 32)
ring_bits = st.sampled_from(BITS)


@pytest.mark.parametrize(
    ("bits", "n", "qmax"),
    [(16, 2, 16383), (16, 3, 10922), (16, 10, 3276), (16, 100, 327), (24, 100, 83886), (32, 10, 214748364)],
)
def test_qmax(bits, n, qmax):
    assert RingParams(bits, n, 0, 1).qmax == qmax


@given(ring_bits, st.integers(2, 1000), st.floats(1e-30, 1e30))
def test_for_range_is_the_finest_scale_that_fits(bits, n, bound):
    ring = RingParams.for_range(bits, n, bound, 7)
    scaled = Fraction(bound) * Fraction(2) ** ring.scale_log2
    assert scaled <= ring.qmax < 2 * scaled
    assert ring.grid == 2.0**-ring.scale_log2


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), "1", None])
def test_for_range_refuses(bound):
    with refused("policy_violation"):
        RingParams.for_range(32, 3, bound, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"bits": 8},
        {"bits": 20},
        {"bits": 32.0},
        {"bits": True},
        {"roster": 1},
        {"roster": 1025},
        {"scale_log2": 513},
        {"dimension": 0},
        {"dimension": 2**41},
        {"dimension": "9"},
    ],
)
def test_params_refuse(bad):
    with refused("policy_violation"):
        RingParams(**({"bits": 32, "roster": 3, "scale_log2": 0, "dimension": 9} | bad))


@pytest.mark.parametrize("bits", BITS)
def test_layout(bits):
    head = {16: 2, 24: 2, 32: 1}[bits]
    tail = {16: 4, 24: 3, 32: 2}[bits]
    room = SEGMENT - head
    for d, segments in ((1, 1), (room, 1), (room + 1, 2), (3 * room, 3)):
        ring = RingParams(bits, 3, 0, d)
        assert (ring.segments, ring.padded) == (segments, d + head * segments + tail)
        assert ring.wire_bytes == ring.padded * bits // 8
        assert ring.body <= segments * SEGMENT


@given(ring_bits, st.integers(2, 60), st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float64]))
def test_sum_of_encodings_decodes_to_the_sum_of_rounded_values(bits, n, seed, dtype):
    rng = np.random.default_rng(seed)
    ring = RingParams.for_range(bits, n, 1.0, 17)
    xs = rng.uniform(-1, 1, (n, 17)).astype(dtype)
    lanes = [encode(x, ring) for x in xs]
    total = sum(lanes[1:], start=lanes[0].copy())
    if bits == 24:
        total &= 0xFFFFFF
    expected = np.rint(xs.astype(np.float64) / ring.grid).sum(axis=0) * ring.grid
    assert np.array_equal(decode(total, ring, n), expected)
    assert np.array_equal(decode(center(total, ring), ring, n), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [2, 3, 10, 100])
@pytest.mark.parametrize("sign", [-1, 1])
def test_everybody_at_the_limit_does_not_wrap(bits, n, sign):
    ring = RingParams(bits, n, 0, 3)
    x = np.full(3, float(sign * ring.qmax))
    total = np.zeros(3, ring.lane)
    for _ in range(n):
        total += encode(x, ring)
    if bits == 24:
        total &= 0xFFFFFF
    assert decode(total, ring, n).tolist() == [float(sign * n * ring.qmax)] * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -3e38])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_encode_refuses_what_does_not_fit_and_does_not_say_the_value(bad, rounding, dtype):
    x = np.zeros(70_000, dtype)
    x[69_999] = bad
    with refused("malformed_update") as error:
        encode(x, RingParams(32, 3, 0, x.size), rounding)
    assert "nan" not in str(error.value).lower().split()
    assert "69999" not in str(error.value)


def test_encode_refuses_one_step_over():
    ring = RingParams(16, 3, 0, 1)
    encode(np.array([ring.qmax + 0.25]), ring)
    with refused("malformed_update"):
        encode(np.array([ring.qmax + 1.0]), ring)
    with refused("malformed_update"):
        encode(np.array([-ring.qmax - 0.75]), ring)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(4),
        np.zeros((5, 1)),
        np.zeros(5, np.int64),
        np.zeros(5, ">f8"),
        np.zeros(10)[::2],
        [0.0] * 5,
        np.zeros(5, np.float16),
    ],
)
def test_encode_refuses_other_arrays(x):
    with refused("malformed_update"):
        encode(x, RingParams(32, 3, 0, 5))


def test_stochastic_rounding_without_entropy():
    with refused("key_agreement_failed"):
        encode(np.zeros(3), RingParams(32, 3, 0, 3), "stochastic", lambda count: bytes(count - 1))


def test_unknown_rounding():
    with refused("policy_violation"):
        encode(np.zeros(1), RingParams(32, 3, 0, 1), "up")


def test_stochastic_rounding_is_unbiased_reproducible_and_leaves_grid_points_alone():
    ring = RingParams(32, 3, 0, 100_000)
    for value in (0.25, -0.25, 1234.9, -3.5):
        x = np.full(ring.dimension, value)
        got = center(encode(x, ring, "stochastic", Drbg(value)), ring)
        assert set(np.unique(got)) == {np.floor(value), np.floor(value) + 1}
        assert abs(got.mean() - value) < 5 * 0.5 / np.sqrt(ring.dimension)
        assert np.array_equal(got, center(encode(x, ring, "stochastic", Drbg(value)), ring))
    whole = np.arange(ring.dimension) - 50_000.0
    assert np.array_equal(center(encode(whole, ring, "stochastic"), ring), whole)
    x = np.full(ring.dimension, 0.5)
    assert not np.array_equal(encode(x, ring, "stochastic"), encode(x, ring, "stochastic"))


@given(
    ring_bits,
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.integers(-110, 20),
    st.integers(-20, 80),
)
def test_quantize_is_exact_rational_rounding(bits, k, g0_log2, scale_log2):
    ring = RingParams(bits, 3, scale_log2, len(k))
    got = quantize(np.array(k, np.int64), g0_log2, ring)
    exact = [round(Fraction(v) * Fraction(2) ** (g0_log2 + scale_log2)) for v in k]  # half to even
    assert got.tolist() == [max(-ring.qmax, min(ring.qmax, v)) for v in exact]
    assert np.array_equal(center(wrap(got, ring), ring), got)


def test_quantize_refuses_other_arrays():
    for k in (np.zeros(3), np.zeros(3, np.int32), np.zeros(4, np.int64)):
        with refused("malformed_update"):
            quantize(k, -40, RingParams(32, 3, 8, 3))


def test_decode_refuses_sums_out_of_reach():
    ring = RingParams(32, 4, 8, 2)
    decode(np.array([3 * ring.qmax, 0]), ring, 3)
    for bad in (3 * ring.qmax + 1, -3 * ring.qmax - 1):
        with refused("sum_check_failed"):
            decode(np.array([0, bad]), ring, 3)
    with refused("malformed_update"):
        decode(np.zeros(2), ring, 3)
    with refused("malformed_update"):
        decode(np.array([1 << 24, 0], np.uint32), RingParams(24, 4, 8, 2), 3)


@given(ring_bits, st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_wire_round_trip(bits, d, seed):
    ring = RingParams(bits, 3, 0, d)
    vector = np.random.default_rng(seed).integers(0, 2**bits, ring.padded).astype(ring.lane)
    raw = to_wire(vector, ring)
    assert raw.nbytes == ring.wire_bytes
    assert int.from_bytes(raw.tobytes()[: bits // 8], "little") == vector[0]
    for data in (raw, raw.tobytes(), bytearray(raw.tobytes()), memoryview(raw.tobytes())):
        assert np.array_equal(from_wire(data, ring), vector)
    for data in (raw.tobytes()[:-1], raw.tobytes() + b"\0", b"", "text", None, raw.astype(np.float64)):
        with refused("malformed_update"):
            from_wire(data, ring)
