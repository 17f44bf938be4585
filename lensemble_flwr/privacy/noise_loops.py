"""The release path's inner loops for :mod:`lensemble_flwr.compiled`: one pass over a block that stays in the cache.

Each does exactly what the numpy path of :mod:`.noise` and :mod:`.mechanism` does, operation by operation, so that the
integers are the same. Integer constants are made int64 or uint64 by hand: numba turns a mixture into float64. A block
is walked in chunks, each by several short loops, since a loop that only computes is vectorised and one that looks up
or branches is not.
"""

# mypy: disallow_untyped_defs=False, check_untyped_defs=False

from __future__ import annotations

import numpy as np

from lensemble_flwr.compiled import loop

CHUNK = 1 << 12
"""Coordinates of a chunk: its scratch stays in the first-level cache."""

_ONE, _TWO = np.uint64(1), np.uint64(2)
_LOW_BITS = np.uint64(11)  # a double takes the upper 53 bits of a word


@loop(
    "float64(Array(float32, 1, 'C', readonly=True), float64[::1])",
    "float64(Array(float64, 1, 'C', readonly=True), float64[::1])",
)
def sum_of_squares(x, scratch):
    """The squares of x, of a power of two coordinates, added by halving: the upper half onto the lower, and again."""
    half = x.size // 2
    lower, upper = x[:half], x[half:]
    for i in range(half):
        scratch[i] = np.float64(lower[i]) * np.float64(lower[i]) + np.float64(upper[i]) * np.float64(upper[i])
    while half > 1:
        half //= 2
        left, right = scratch[:half], scratch[half : 2 * half]
        for i in range(half):
            left[i] += right[i]
    return scratch[0]


@loop(
    "float64(Array(float32, 1, 'C', readonly=True), float64, float64, float64[::1], int64[::1])",
    "float64(Array(float64, 1, 'C', readonly=True), float64, float64, float64[::1], int64[::1])",
)
def truncate(x, factor, inverse_step, scratch, k):
    """k = x * factor * inverse_step, truncated toward zero. Returns the sum of their squares, rounded."""
    total = 0.0
    for low in range(0, x.size, CHUNK):
        given, made = x[low : low + CHUNK], k[low : low + CHUNK]
        half = CHUNK
        square = scratch[:half]
        for i in range(given.size):
            y = np.trunc(np.float64(given[i]) * factor * inverse_step)
            made[i] = np.int64(y)
            square[i] = y * y
        for i in range(given.size, half):
            square[i] = 0.0
        while half > 1:
            half //= 2
            left, right = scratch[:half], scratch[half : 2 * half]
            for i in range(half):
                left[i] += right[i]
        total += scratch[0]
    return total


@loop("int64(uint64[::1], int64[::1], int64[::1], int64, int64[::1])")
def choose(first, high, starts, fraction_bits, begin):
    """The stratum of each first word. Returns how many fractions tie with their threshold, which decides nothing."""
    column_shift, fraction_mask = np.uint64(fraction_bits + 1), (_ONE << np.uint64(fraction_bits)) - _ONE
    ties = 0
    for i in range(first.size):
        column = first[i] >> column_shift
        fraction = np.int64(first[i] & fraction_mask)
        threshold = high[column]
        ties += fraction == threshold
        begin[i] = starts[_TWO * column + np.uint64(fraction >= threshold)]
    return np.int64(ties)


@loop(
    "int64(int64[::1], uint64[::1], uint64[::1], int64[::1], int64, int64, float64, float64, float64,"
    " int64[::1], float64[::1], int64[::1], int64[::1], float64[::1], int64[::1], int64[::1])"
)
def propose(
    values,
    first,
    second,
    begin,
    sign_bit,
    width_bits,
    half_inverse_square,
    unit,
    limit,
    proposals,
    sums,
    at,
    proposal,
    t,
    v,
    size,
):
    """Add to ``values`` the proposals that a first look accepts. Returns how many are in doubt, listed in the last five
    arrays."""
    sign_shift, width_shift = np.uint64(sign_bit), np.uint64(width_bits)
    offset_mask = (_ONE << width_shift) - _ONE
    found = np.uint64(0)
    for low in range(0, values.size, CHUNK):
        one, two = first[low : low + CHUNK], second[low : low + CHUNK]
        origin, target = begin[low : low + CHUNK], values[low : low + CHUNK]
        for i in range(one.size):
            sign = np.int64((one[i] >> sign_shift) & _ONE)
            offset = np.int64(two[i] & offset_mask)
            length = offset + sign
            ratio = np.float64(length) * np.float64(2 * origin[i] + length) * half_inverse_square
            sums[i] = ratio + np.float64(np.int64(two[i] >> width_shift)) * unit
            proposals[i] = (origin[i] + offset) ^ -sign
        for i in range(one.size):
            if sums[i] < limit:
                target[i] += proposals[i]
            else:
                length = np.int64(two[i] & offset_mask) + np.int64((one[i] >> sign_shift) & _ONE)
                at[found] = low + i
                proposal[found] = proposals[i]
                t[found] = np.float64(length) * np.float64(2 * origin[i] + length) * half_inverse_square
                v[found] = np.int64(two[i] >> width_shift)
                size[found] = length
                found += _ONE
    return np.int64(found)


@loop(
    "int64(int64[::1], int64[::1], int64[::1], float64[::1], int64[::1], uint64[::1], float64[::1],"
    " int64, float64, float64, int8[::1])"
)
def decide(values, at, proposal, t, v, more, taylor, terms, unit, margin, verdicts):
    """Add to ``values`` the doubtful proposals that the polynomial accepts; verdicts are 1 (accepted), 0 (rejected) and
    2 (still in doubt). Returns how many are still in doubt."""
    open_cases = 0
    for i in range(at.size):
        uniform = (np.float64(v[i]) + np.float64(np.int64(more[i] >> _LOW_BITS)) * 2.0**-53) * unit
        ratio = taylor[terms]
        for j in range(terms - 1, -1, -1):
            ratio = taylor[j] - ratio * t[i]
        if uniform < ratio - margin:
            values[at[i]] += proposal[i]
            verdicts[i] = 1
        elif uniform <= ratio + margin:
            verdicts[i] = 2
            open_cases += 1
        else:
            verdicts[i] = 0
    return np.int64(open_cases)


@loop("void(int64[::1], int64, int64, int64, int32[::1])")
def to_ring(v, half, shift, qmax, q):
    """q = floor(v / 2^shift + 1/2), clamped to +-qmax."""
    for i in range(v.size):
        q[i] = np.int32(min(max((v[i] + half) >> shift, -qmax), qmax))


@loop(
    "int64(Array(float32, 1, 'C', readonly=True), float64, float64, uint64[::1], int32[::1])",
    "int64(Array(float64, 1, 'C', readonly=True), float64, float64, uint64[::1], int32[::1])",
)
def round_stochastically(x, scale, limit, words, q):
    """q = floor(x * scale), plus one with the probability of the rest. Returns how many |x| are over the limit (NaN
    too), whose q means nothing."""
    outside = 0
    for i in range(x.size):
        value = np.float64(x[i])
        inside = abs(value) <= limit
        outside += not inside
        scaled = value * scale if inside else 0.0
        below = np.floor(scaled)
        up = np.float64(np.int64(words[i] >> _LOW_BITS)) * 2.0**-53 < scaled - below
        q[i] = np.int32(below) + np.int32(up)
    return np.int64(outside)
