"""A secret linear hash with which members verify a sum that the coordinator publishes.

The members of one attempt share a key K that the coordinator does not know: each seals a fresh nonce for each other
member (:mod:`.envelope`), and K = HKDF(salt T1, the nonces of U2 by position, "sum" || set(U2)). K gives weights r and
a shift r0 modulo p = 2^61 - 1. The tag of a payload q is

    t = r0 + sum_j r_j q_j  mod p,      r_j = rows[j div COLUMNS] * columns[j mod COLUMNS]

over the integers q_j, not over the ring. Members send their tags masked modulo p, so that the coordinator opens
T = sum of t together with S = sum of q, over the same U3 and with the same seeds, and nothing else. A member accepts
(S, T) for n summands if T = n r0 + sum_j r_j S_j.

Forging. Let n be |U3|. T is uniform given S and r, as r0 is and 0 < n < p: what the coordinator saw says nothing about
r. Had it (S', T', n') accepted, then n T' - n' T = <r, n S' - n' S> mod p, where all but r is known to it. If the means
S'/n' and S/n differ, the vector n S' - n' S is not zero, nor zero mod p, its entries being below 2^42. Take a row of it
that is not zero: its product with `columns` is zero with probability <= e, and if it is not, its product with the row's
own weight hits the one value that passes with probability <= e. No weight takes a value more often than e = 9/2^64, and
r0 is 8/2^64 from uniform. So one try passes with probability <= 26/2^64 < 2^-59, and g tries with <= g 2^-59, up to the
pseudo-randomness of HKDF and the keystream.

Weights: 64-bit little-endian words of K's keystreams modulo p; columns from segment 0, rows from 1, r0 from 2. The mask
of a tag under the key of a vector's mask is the first 16 bytes of its keystream in segment 2^32 - 2, modulo p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lensemble_flwr.compiled import use
from lensemble_flwr.secagg import agreement, keystream, projection_loops
from lensemble_flwr.secagg.keystream import Key

PRIME = (1 << 61) - 1
NONCE_BYTES = 32
TAG_BYTES = 8
COLUMNS = 1 << 11
_ROWS = 1 << 5  # rows folded at a time: half a megabyte of float64, in a core's cache
_MASK_SEGMENT = 2**32 - 2
_LIMB, _LIMBS = 11, 6  # 2^11 products of 31 and 11 bits are exact in float64

Read = Callable[[slice], npt.NDArray[Any]]
"""Some coordinates of a vector, int32 or int64, |value| <= 2^31."""


@dataclass(frozen=True)
class Weights:
    """r as its two factors, uint64 below p, and r0."""

    columns: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    shift: int


def group_key(t1: bytes, members: bytes, nonces: Iterable[bytes]) -> bytes:
    """K, 32 bytes. `members` is set(U2), `nonces` are theirs by position."""
    return agreement.group_key(t1, members, b"".join(nonces))


def weights(key: Key, dimension: int) -> Weights:
    def words(segment: int, count: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(keystream.stream(key, segment, 8 * count), "<u8") % np.uint64(PRIME)

    return Weights(words(0, COLUMNS), words(1, -(-dimension // COLUMNS)), int(words(2, 1)[0]))


def tag(read: Read, dimension: int, key: Key, count: int = 1, threads: int = 1) -> int:
    """count r0 + <r, values> mod p: of one payload, or of a sum of `count` of them.

    Args:
        read: the vector.
        dimension: d.
        key: K.
        count: payloads in the vector.
        threads: the result does not depend on it.
    """
    secret = weights(key, dimension)
    fast = use(dimension, projection_loops.rows)
    fold = _compiled(secret.columns) if fast else _by_blas(secret.columns)
    step = _ROWS * COLUMNS

    def one(block: int) -> int:
        values = read(slice(block * step, min((block + 1) * step, dimension)))
        scale = secret.rows[block * _ROWS : (block + 1) * _ROWS].tolist()
        return sum(r * x for r, x in zip(scale, fold(values), strict=True)) % PRIME

    terms = keystream.for_each(one, -(-dimension // step), threads)
    return (count * secret.shift + sum(terms)) % PRIME


def _compiled(columns: npt.NDArray[np.uint64]) -> Callable[[npt.NDArray[Any]], list[int]]:
    limbs = [np.ascontiguousarray(columns >> np.uint64(at) & np.uint64(top), np.int64) for at, top in _COMPILED_LIMBS]

    def fold(values: npt.NDArray[Any]) -> list[int]:
        sums = np.empty((-(-values.size // COLUMNS), 3), np.int64)
        wide = values if values.dtype.itemsize >= 4 else values.astype(np.int32)
        projection_loops.rows.compiled()(wide, *limbs, sums)
        return [x + (y << 21) + (z << 42) for x, y, z in sums.tolist()]

    return fold


_COMPILED_LIMBS = ((0, 2**21 - 1), (21, 2**21 - 1), (42, 2**19 - 1))


def _by_blas(columns: npt.NDArray[np.uint64]) -> Callable[[npt.NDArray[Any]], list[int]]:
    shifts = np.arange(0, _LIMB * _LIMBS, _LIMB, dtype=np.uint64)
    limbs = (columns[:, None] >> shifts & np.uint64(2**_LIMB - 1)).astype(np.float64)

    def fold(values: npt.NDArray[Any]) -> list[int]:
        whole = values.size // COLUMNS * COLUMNS
        sums = (values[:whole].reshape(-1, COLUMNS).astype(np.float64) @ limbs).tolist()
        if whole < values.size:
            rest = values[whole:].astype(np.float64)
            sums.append((rest @ limbs[: rest.size]).tolist())
        return [sum(int(x) << (_LIMB * i) for i, x in enumerate(row)) for row in sums]

    return fold


def mask(plus: Sequence[Key], minus: Sequence[Key]) -> int:
    """What the masks of these keys add to a tag, mod p. Within 2^-67 of uniform for each key."""

    def one(key: Key) -> int:
        return int.from_bytes(keystream.stream(key, _MASK_SEGMENT, 16), "little")

    return (sum(map(one, plus)) - sum(map(one, minus))) % PRIME
