"""From a published sum to the model that it gives: what coordinator and participants both compute. Pure.

A sum travels packed: bits/8 little-endian bytes a coordinate, like a masked vector without its frame; a model with its
outer momentum as float32 and float64 values, one after the other.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lensemble_flwr.errors import ContractViolation, SecureAggregationError
from lensemble_flwr.federation.outer import BLOCK, mean_of_sum, outer_step
from lensemble_flwr.secagg import RingParams, center, projection
from lensemble_flwr.secagg.ring import wrap

STATE_BYTES = 12
"""Bytes a coordinate of a model with its momentum."""


def momentum_hash(momentum: np.ndarray) -> bytes:
    """SHA-256 that names an outer momentum, float64."""
    return hashlib.sha256(b"lensemble momentum\0" + np.ascontiguousarray(momentum, "<f8").tobytes()).digest()


def pack_state(theta: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    """uint8, shape (12 d,)."""
    parts = (np.ascontiguousarray(theta, "<f4"), np.ascontiguousarray(momentum, "<f8"))
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpack_state(raw: np.ndarray, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """(theta, momentum), copies. Raises ContractViolation for a wrong type or size."""
    if raw.dtype != np.uint8 or raw.shape != (STATE_BYTES * dimension,):
        raise ContractViolation("A model with its momentum has another size.")
    split = 4 * dimension
    return np.frombuffer(raw[:split].tobytes(), "<f4"), np.frombuffer(raw[split:].tobytes(), "<f8")


def pack_sum(total: np.ndarray, ring: RingParams) -> np.ndarray:
    """uint8, shape (bits/8 d,), of an int64 sum that fits the ring."""
    raw = wrap(total, ring).view(np.uint8)
    return raw.reshape(-1, 4)[:, :3].reshape(-1) if ring.bits == 24 else raw


def sum_reader(packed: np.ndarray, ring: RingParams) -> projection.Read:
    """The integers of a packed sum, part by part. Raises ContractViolation for a wrong type or size."""
    width = ring.bits // 8
    if packed.dtype != np.uint8 or packed.shape != (width * ring.dimension,):
        raise ContractViolation("The sum has another size than its ring gives.")

    def read(part: slice) -> np.ndarray:
        raw = packed[width * part.start : width * part.stop]
        if ring.bits != 24:
            return raw.copy().view(f"<i{width}").astype(np.int32, copy=False)  # the copy is aligned
        lanes = np.zeros((part.stop - part.start, 4), np.uint8)
        lanes[:, :3] = raw.reshape(-1, 3)
        return center(lanes.reshape(-1).view(ring.lane), ring)

    return read


def check_sum(read: projection.Read, ring: RingParams, key: bytes, tag: int, count: int, threads: int = 1) -> None:
    """Verify a published sum of ``count`` payloads against its tag.

    Raises:
        SecureAggregationError: sum_forged.
    """
    if not (0 <= tag < projection.PRIME and projection.tag(read, ring.dimension, key, count, threads) == tag):
        raise SecureAggregationError(
            "The published sum does not fit its tag: it is not what the participants' updates add up to.",
            "Do not use the model. Either the coordinator forged the sum, or a participant lied about its tag.",
            cause="sum_forged",
        )


def advance(
    theta: np.ndarray,
    momentum: np.ndarray,
    read: projection.Read,
    scale_log2: int,
    count: int,
    lr: float,
    mu: float,
    sample_rate: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The outer step of the sum, block by block: the bytes that the coordinator's own step gives.

    Args:
        theta, momentum: float32 and float64, shape (d,).
        read: the sum.
        scale_log2, count, sample_rate: see :func:`.outer.mean_of_sum`.
        lr, mu: see :func:`.outer.outer_step`.

    Returns:
        (theta, momentum) after the round, new arrays.
    """
    after = np.empty_like(theta), np.empty_like(momentum)
    for start in range(0, theta.size, BLOCK):
        part = slice(start, min(start + BLOCK, theta.size))
        mean = mean_of_sum(np.asarray(read(part), np.int64), scale_log2, count, sample_rate)
        after[0][part], after[1][part] = outer_step(theta[part], momentum[part], mean, lr, mu)
    return after
