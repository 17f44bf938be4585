"""The integer checksum: a public linear hash of the payload, taken over the integers and not in the ring.

A member computes c = sum_j r_j q_j mod 2^64 over its payload q before masking, masks c modulo 2^64 and sends it
as the tail of its vector (zero-padded where the lanes hold more: a sum over the integers would show how large the
summands were). The coordinator compares the sum of the c with the hash of the sum. Since r_j is odd and
2^64 is larger than the ring, one wrong coordinate is always noticed, one that wrapped around the ring included; of
faults in several, about 2^-64 (2^-31 if all are wraps of the largest ring) pass. The weights are public: this catches
faults, not a member that lies about c, which can only make the round fail.

Weights: key = SHA-256("checksum" || T1); coordinate o of segment s has r = rows[s] * columns[o mod COLUMNS], with
columns and rows the 64-bit little-endian words of the key's keystreams in segments 0 and 1, made odd. So a segment is
first folded to COLUMNS sums, an addition per coordinate in place of a multiplication of twice the cost; the price is
that two errors of one segment which cancel exactly, a multiple of COLUMNS apart, are not seen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lensemble_flwr.secagg import keystream, mask_loops
from lensemble_flwr.secagg.ring import RingParams

COLUMNS = 1 << 12
BITS = 64
_MODULUS = 1 << BITS


@dataclass(frozen=True)
class Weights:
    columns: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]


def weights(t1: bytes, ring: RingParams) -> Weights:
    key = hashlib.sha256(b"checksum" + t1).digest()

    def odd_words(segment: int, count: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(keystream.stream(key, segment, 8 * count), "<u8") | np.uint64(1)

    return Weights(odd_words(0, COLUMNS), odd_words(1, ring.segments))


class SegmentDigest:
    """The term of one segment, fed with its coordinates in order. They are below 2^31, so no column overflows."""

    def __init__(self, segment: int, weights: Weights) -> None:
        self._row, self._weights = int(weights.rows[segment]), weights.columns
        self._columns = np.zeros(COLUMNS, np.int64)
        self._at = 0  # the column of the next coordinate

    def update(self, values: npt.NDArray[Any]) -> None:
        lead = min(-self._at % COLUMNS, values.size)
        whole = lead + (values.size - lead) // COLUMNS * COLUMNS
        self._columns[self._at : self._at + lead] += values[:lead]
        if whole > lead:
            self._columns += np.add.reduce(values[lead:whole].reshape(-1, COLUMNS), axis=0, dtype=np.int64)
        self._columns[: values.size - whole] += values[whole:]
        self._at = (self._at + values.size) % COLUMNS

    def fold(self, values: npt.NDArray[Any], lanes: npt.NDArray[Any], limit: int) -> bool:
        """:meth:`update`, and lanes = values, by a compiled loop; whether all |values| <= limit."""
        outside = mask_loops.fold.compiled()(values, lanes, self._columns, self._at, limit)
        self._at = (self._at + values.size) % COLUMNS
        return not outside

    def tally(self, values: npt.NDArray[Any], limit: int) -> bool:
        """:meth:`update` by a compiled loop; whether all |values| <= limit."""
        outside = mask_loops.tally.compiled()(values, self._columns, self._at, limit)
        self._at = (self._at + values.size) % COLUMNS
        return not outside

    def term(self) -> int:
        return int(np.dot(self._columns.view(np.uint64), self._weights)) * self._row % _MODULUS  # dot wraps mod 2^64


def total(terms: list[int]) -> int:
    return sum(terms) % _MODULUS


def matches(claimed: int, terms: list[int]) -> bool:
    """`claimed` is the sum of the members' checksums mod 2^64."""
    return claimed % _MODULUS == total(terms)
