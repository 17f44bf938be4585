"""The loop of :mod:`.projection` for :mod:`lensemble_flwr.compiled`."""

# mypy: disallow_untyped_defs=False, check_untyped_defs=False

from __future__ import annotations

import numpy as np

from lensemble_flwr.compiled import loop


@loop(
    "void(Array(int32, 1, 'C', readonly=True), int64[::1], int64[::1], int64[::1], int64[:, ::1])",
    "void(Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1], int64[::1], int64[:, ::1])",
)
def rows(values, low, middle, high, sums):
    """sums[a] = the products of row a of the values with the three limbs of the columns' weights; the last row may be
    short. No sum overflows: 2^11 products of 21 and 31 bits."""
    width = low.size
    for a in range(sums.shape[0]):
        row = values[a * width : (a + 1) * width]
        x, y, z = np.int64(0), np.int64(0), np.int64(0)
        for b in range(row.size):
            value = np.int64(row[b])
            x += low[b] * value
            y += middle[b] * value
            z += high[b] * value
        sums[a, 0], sums[a, 1], sums[a, 2] = x, y, z
