"""The loops around the keystream for :mod:`lensemble_flwr.compiled`: one pass where numpy takes four."""

# mypy: disallow_untyped_defs=False, check_untyped_defs=False

from __future__ import annotations

import numpy as np

from lensemble_flwr.compiled import loop


@loop(
    "int64(Array(int32, 1, 'C', readonly=True), uint32[::1], int64[::1], int64, int64)",
    "int64(Array(int32, 1, 'C', readonly=True), uint16[::1], int64[::1], int64, int64)",
    "int64(Array(int64, 1, 'C', readonly=True), uint32[::1], int64[::1], int64, int64)",
    "int64(Array(int64, 1, 'C', readonly=True), uint16[::1], int64[::1], int64, int64)",
)
def fold(values, lanes, columns, at, limit):
    """lanes = values, wrapped; add the values to the columns of the checksum, from column ``at`` on. Returns how often
    the limit in magnitude was passed.

    Four rows of the checksum go together, so that a column is read and written once for four coordinates."""
    outside, start, width = np.int64(0), 0, columns.size
    while start < values.size:
        if at == 0 and values.size - start >= 4 * width:
            second, third, fourth, end = start + width, start + 2 * width, start + 3 * width, start + 4 * width
            a, b, c, d = values[start:second], values[second:third], values[third:fourth], values[fourth:end]
            one, two, three, four = lanes[start:second], lanes[second:third], lanes[third:fourth], lanes[fourth:end]
            for i in range(width):
                p, q, r, s = np.int64(a[i]), np.int64(b[i]), np.int64(c[i]), np.int64(d[i])
                outside += (max(max(p, q), max(r, s)) > limit) | (min(min(p, q), min(r, s)) < -limit)
                columns[i] += p + q + r + s
                one[i], two[i], three[i], four[i] = p, q, r, s
            start = end
            continue
        run = min(width - at, values.size - start)
        given, made, sums = values[start : start + run], lanes[start : start + run], columns[at : at + run]
        for i in range(run):
            value = np.int64(given[i])
            outside += (value > limit) | (value < -limit)
            sums[i] += value
            made[i] = value
        start += run
        at = 0
    return outside


@loop(
    "int64(int32[::1], int64[::1], int64, int64)",
    "int64(int16[::1], int64[::1], int64, int64)",
)
def tally(values, columns, at, limit):
    """Add the values to the columns of the checksum, from column ``at`` on. Returns how many exceed the limit in
    magnitude."""
    outside, start = 0, 0
    while start < values.size:
        run = min(columns.size - at, values.size - start)
        given, sums = values[start : start + run], columns[at : at + run]
        for i in range(run):
            value = np.int64(given[i])
            outside += (value > limit) | (value < -limit)
            sums[i] += value
        start += run
        at = 0
    return np.int64(outside)
