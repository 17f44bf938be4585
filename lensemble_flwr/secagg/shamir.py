"""Shamir secret sharing of 32-byte secrets over the prime field of p = 2^256 + 297.

p is the first prime above 2^256, so every 32-byte string is a field element and a share is 33 bytes, big-endian.
Fewer than `threshold` shares say nothing at all about the secret, provided that the coefficients are fresh and
uniform; they are drawn from `entropy`, never derived. The arithmetic is Python's and takes time that depends on the
values: do not use where an attacker can time it finely (here a participant shares once a round, behind its network).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from lensemble_flwr.errors import ContractViolation, SecureAggregationError
from lensemble_flwr.secagg.entropy import Entropy

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33

_COEFFICIENT_BYTES = 64  # reduced mod p: within 2^-254 of uniform


def split(secret: bytes | bytearray, threshold: int, points: Collection[int], entropy: Entropy) -> dict[int, bytes]:
    """One share per point; any `threshold` of them give the secret back.

    Args:
        secret: 32 bytes.
        threshold: 1 .. len(points).
        points: distinct non-zero field elements (roster positions, counted from 1).
        entropy: entropy(k) gives k uniform random bytes.
    """
    _check_points(points)
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(points):
        raise ContractViolation("split() takes a 32-byte secret and a threshold of 1 .. number of points.")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [int.from_bytes(entropy(_COEFFICIENT_BYTES), "big") % PRIME for _ in range(threshold - 1)]
    coefficients.reverse()
    return {x: _polynomial(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in points}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret from `threshold` shares, keyed by their points. Wrong shares give a wrong secret: the caller checks.

    Raises:
        SecureAggregationError: malformed_message for a share that is not one, mask_reconstruction_failed if the
            result is no 32-byte string.
    """
    value = interpolate(shares, 0)
    if value >= 1 << 256:
        raise SecureAggregationError(
            "The shares do not give a secret of 32 bytes; at least one is wrong.", cause="mask_reconstruction_failed"
        )
    return value.to_bytes(SECRET_BYTES, "big")


def interpolate(shares: Mapping[int, bytes], at: int) -> int:
    """Value at `at` of the polynomial of degree < len(shares) through these shares."""
    points = tuple(shares)
    weights = _weights(points, at)
    return sum(parse(share) * weight for share, weight in zip(shares.values(), weights, strict=True)) % PRIME


def parse(share: bytes) -> int:
    """The field element of a share. Raises SecureAggregationError: malformed_message if it is not one."""
    if len(share) != SHARE_BYTES or (value := int.from_bytes(share, "big")) >= PRIME:
        raise SecureAggregationError("A share is not an element of the field.", cause="malformed_message")
    return value


def _polynomial(coefficients: list[int], x: int) -> int:
    """Horner's rule, highest coefficient first. Points are small, so a value grows by a few bits a step and is reduced
    once in a while."""
    value, run = 0, max(1, 160 // x.bit_length())
    for start in range(0, len(coefficients), run):
        for coefficient in coefficients[start : start + run]:
            value = value * x + coefficient
        value %= PRIME
    return value


def _check_points(points: Collection[int]) -> None:
    if len(set(points)) != len(points) or not all(0 < x < PRIME for x in points):
        raise ContractViolation("The points of shares must be distinct and not zero.")


@lru_cache(maxsize=64)  # a whole round is recovered from one set of members
def _weights(points: tuple[int, ...], at: int) -> tuple[int, ...]:
    _check_points(points)
    weights = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * (at - other) % PRIME
                below = below * (x - other) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
