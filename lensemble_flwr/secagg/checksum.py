"""The integer checksum: a public linear hash of the payload, taken over the integers and not in the ring.

A member computes c = sum_j r_j q_j mod 2^64 over its payload q before masking, masks c modulo 2^tail_bits and sends
it as the tail of its vector. The coordinator compares the sum of the c with the hash of the sum. Since r_j is odd and
2^64 is larger than the ring, one wrong coordinate is always noticed, one that wrapped around the ring included; of
other faults, a fraction of about 2^-32 (wraps only) to 2^-64 passes. The weights are public: this catches faults, not a
member that lies about c, which can only abort the round.

Weights: key = SHA-256("checksum" || T1); coordinate o of segment s has r = rows[s] * columns[o mod COLUMNS], with
columns and rows the 64-bit little-endian words of the key's keystream in segments 0 and 1, made odd. So the rows of a
segment are added first, which costs a third of a multiplication per coordinate; the price is that two errors which
cancel exactly, a multiple of COLUMNS apart in one segment, are not seen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lensemble_flwr.secagg import keystream
from lensemble_flwr.secagg.ring import RingParams

COLUMNS = 1 << 15
_MODULUS = 1 << 64


@dataclass(frozen=True)
class Weights:
    columns: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]


def weights(t1: bytes, ring: RingParams) -> Weights:
    key = hashlib.sha256(b"checksum" + t1).digest()

    def odd_words(segment: int, count: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(keystream.stream(key, segment, 8 * count), "<u8") | np.uint64(1)

    return Weights(odd_words(0, min(COLUMNS, ring.dimension)), odd_words(1, ring.segments))


def digest_segment(payload: npt.NDArray[np.int64], segment: int, weights: Weights) -> int:
    """This segment's term of the checksum, mod 2^64. |payload| < 2^31, so the column sums cannot overflow."""
    whole = payload.size // COLUMNS * COLUMNS
    rest = payload[whole:]
    if whole:
        columns = payload[:whole].reshape(-1, COLUMNS).sum(axis=0)
        columns[: rest.size] += rest
    else:
        columns = rest
    hashed = np.dot(columns.view(np.uint64), weights.columns[: columns.size])  # wraps mod 2^64
    return int(hashed) * int(weights.rows[segment]) % _MODULUS


def total(terms: list[int]) -> int:
    return sum(terms) % _MODULUS


def matches(claimed: int, terms: list[int]) -> bool:
    """`claimed` is the sum of the members' checksums mod 2^tail_bits, tail_bits >= 64."""
    return claimed % _MODULUS == total(terms)
