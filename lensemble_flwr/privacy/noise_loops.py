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

CHUNK = 1 << 7
"""Coordinates of a chunk: its scratch stays in the first-level cache."""

_ONE = np.uint64(1)
_LOW_BITS = np.uint64(11)  # a double takes the upper 53 bits of a word


@loop(
    "float64(Array(float32, 1, 'C', readonly=True), float64[::1])",
    "float64(Array(float64, 1, 'C', readonly=True), float64[::1])",
)
def sum_of_squares(x, scratch):
    """The squares of x, of shape (2^n,) and n >= 2, added by halving: the upper half onto the lower, again and
    again."""
    half = x.size // 4  # the first two halvings are one loop
    one, two, three, four = x[:half], x[half : 2 * half], x[2 * half : 3 * half], x[3 * half :]
    for i in range(half):
        a, b, c, d = np.float64(one[i]), np.float64(two[i]), np.float64(three[i]), np.float64(four[i])
        scratch[i] = (a * a + c * c) + (b * b + d * d)
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
    square = scratch[:CHUNK]
    for i in range(CHUNK):
        square[i] = 0.0
    for low in range(0, x.size, CHUNK):
        given, made = x[low : low + CHUNK], k[low : low + CHUNK]
        for i in range(given.size):
            y = np.trunc(np.float64(given[i]) * factor * inverse_step)
            made[i] = np.int64(y)
            square[i] += y * y
    total = 0.0
    for i in range(CHUNK):
        total += square[i]
    return total


# Rows of the scratch of the next two. 0 to 6 list the doubtful proposals: position, integer to be noised, proposal,
# upper bits of the uniform, first |k| of the stratum, steps from it, and as float64 the exponent t. 7 and 8 are free.
_DRAW = (
    "Tuple((int64, float64))({}, {scale}, {scale}, uint64[::1], uint64[::1], int64, int64, float64, float64, float64,"
    " int64, int64, int64, int64[:, ::1], float64[:, ::1], {}[::1])"
)


@loop(
    _DRAW.format("Array(float32, 1, 'C', readonly=True)", "int32", scale="float64"),
    _DRAW.format("Array(float64, 1, 'C', readonly=True)", "int32", scale="float64"),
    _DRAW.format("int64[::1]", "int32", scale="none"),
    _DRAW.format("int64[::1]", "int64", scale="none"),
)
def draw(
    given,
    factor,
    inverse_step,
    words,
    table,
    column_bits,
    width_bits,
    half_inverse_square,
    unit,
    limit,
    half,
    shift,
    most,
    scratch,
    float_scratch,
    out,
):
    """From a block of the update and its keystream to cells of the ring, in one pass.

    The integers are ``given``, or trunc(given * factor * inverse_step). Where a first look accepts the proposal,
    ``out`` gets floor((integer + proposal) / 2^shift + 1/2), clamped to +-most. Elsewhere it is 0, and what is to be
    decided is listed in the scratch. Returns how many those are, and the sum of the squares of truncated integers. The
    number is -1 if a fraction ties with its threshold, which decides nothing: ``out`` then means nothing.
    """
    fraction_bits = 63 - column_bits
    column_shift, sign_shift, width_shift = (
        np.uint64(fraction_bits + 1),
        np.uint64(fraction_bits),
        np.uint64(width_bits),
    )
    fraction_mask, offset_mask = (_ONE << sign_shift) - _ONE, (_ONE << width_shift) - _ONE
    threshold_shift = np.uint64(column_bits)
    column_mask = (_ONE << threshold_shift) - _ONE
    size = given.size
    integers, entries, squares = scratch[7, :CHUNK], scratch[7, CHUNK : 2 * CHUNK], float_scratch[8, :CHUNK]
    for i in range(CHUNK):
        squares[i] = 0.0
    ties, found = 0, np.uint64(0)
    for low in range(0, size, CHUNK):
        x, target = given[low : low + CHUNK], out[low : low + CHUNK]
        one, two = words[low : min(low + CHUNK, size)], words[size + low : size + low + x.size]
        for i in range(x.size):
            entries[i] = np.int64(table[one[i] >> column_shift])
        for i in range(x.size):
            entry, column = np.uint64(entries[i]), one[i] >> column_shift
            fraction, threshold = one[i] & fraction_mask, entry >> threshold_shift
            ties += np.int64(fraction == threshold)
            start = np.int64((entry & column_mask if fraction >= threshold else column) << width_shift)
            sign, offset = np.int64((one[i] >> sign_shift) & _ONE), np.int64(two[i] & offset_mask)
            length = offset + sign
            t = np.float64(length) * np.float64(2 * start + length) * half_inverse_square
            accepted = t + np.float64(np.int64(two[i] >> width_shift)) * unit < limit
            if factor is None:
                integers[i] = x[i]
            else:
                y = np.trunc(np.float64(x[i]) * factor * inverse_step)
                integers[i] = np.int64(y)
                squares[i] += y * y
            noised = integers[i] + ((start + offset) ^ -sign)
            cell = min(max((noised + half) >> shift, -most), most)
            target[i] = cell if accepted else 0
            entries[i] = -1 if accepted else start
        for first in range(0, x.size, 8):  # one branch for 8 of them, nearly always taken
            all_accepted = entries[first]
            for i in range(first + 1, first + 8):
                all_accepted &= entries[i]
            if all_accepted < 0:  # the sign of each
                continue
            for i in range(first, min(first + 8, x.size)):
                if entries[i] >= 0:
                    start = entries[i]
                    sign, offset = np.int64((one[i] >> sign_shift) & _ONE), np.int64(two[i] & offset_mask)
                    length = offset + sign
                    scratch[0, found] = low + i
                    scratch[1, found] = integers[i]
                    scratch[2, found] = (start + offset) ^ -sign
                    scratch[3, found] = np.int64(two[i] >> width_shift)
                    scratch[4, found] = start
                    scratch[5, found] = length
                    float_scratch[6, found] = np.float64(length) * np.float64(2 * start + length) * half_inverse_square
                    found += _ONE
    total = 0.0
    for i in range(CHUNK):
        total += squares[i]
    return np.int64(found) if ties == 0 else np.int64(-1), total


_DECIDE = (
    "UniTuple(int64, 2)(int64[:, ::1], float64[:, ::1], uint64[::1], float64[::1], int64, float64, float64,"
    " int64, int64, int64, {}[::1], boolean[::1])"
)


@loop(_DECIDE.format("int32"), _DECIDE.format("int64"))
def decide(scratch, float_scratch, more, taylor, terms, unit, margin, half, shift, most, out, still):
    """Decide the listed proposals by the polynomial; ``out`` gets the cells of those accepted.

    The others move to the front of the list and of ``more``. ``still`` tells which of these are still in doubt, and not
    rejected. Returns how many others there are, and how many still in doubt.
    """
    t, ratio = float_scratch[6, : more.size], float_scratch[8, : more.size]
    for i in range(more.size):
        ratio[i] = taylor[terms]
    for j in range(terms - 1, -1, -1):
        for i in range(more.size):
            ratio[i] = taylor[j] - ratio[i] * t[i]
    others, in_doubt = 0, 0
    for i in range(more.size):
        uniform = (np.float64(scratch[3, i]) + np.float64(np.int64(more[i] >> _LOW_BITS)) * 2.0**-53) * unit
        if uniform < ratio[i] - margin:
            out[scratch[0, i]] = min(max((scratch[1, i] + scratch[2, i] + half) >> shift, -most), most)
        else:
            for row in range(6):
                scratch[row, others] = scratch[row, i]
            more[others] = more[i]
            still[others] = uniform <= ratio[i] + margin
            in_doubt += still[others]
            others += 1
    return others, in_doubt


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
