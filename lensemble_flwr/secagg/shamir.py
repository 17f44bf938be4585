"""Shamir secret sharing of 32-byte secrets over the prime field of p = 2^256 + 297.

p is the first prime above 2^256, so every 32-byte string is a field element and a share is 33 bytes, big-endian.
Fewer than `threshold` shares say nothing at all about the secret, provided that the coefficients are fresh and
uniform; they are drawn from `entropy`, never derived. The arithmetic is Python's and takes time that depends on the
values: do not use where an attacker can time it finely (here a participant shares once a round, behind its network).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

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
    return weighted(shares, weights(tuple(shares)))


def weighted(shares: Mapping[int, bytes], at_zero: Mapping[int, int]) -> bytes:
    """:func:`combine` with weights that are known: those of `at_zero` are taken, whatever else is in `shares`."""
    value = sum(parse(shares[x]) * weight for x, weight in at_zero.items()) % PRIME
    if value >= 1 << 256:
        raise SecureAggregationError(
            "The shares do not give a secret of 32 bytes; at least one is wrong.", cause="mask_reconstruction_failed"
        )
    return value.to_bytes(SECRET_BYTES, "big")


@lru_cache(maxsize=64)  # a whole round is recovered from one set of members
def weights(points: tuple[int, ...]) -> Mapping[int, int]:
    """Lagrange's weights at zero, by point: the product of o / (o - x) over the other points o."""
    _check_points(points)
    return MappingProxyType({x: _weight(x, points) for x in points})


def slide(at_zero: Mapping[int, int], new: int) -> Mapping[int, int]:
    """The weights at zero once the first point has gone and `new` has come last, in linear time."""
    gone, *kept = at_zero
    common = _inverse(gone) * new % PRIME
    slid = {x: at_zero[x] * (gone - x) * common % PRIME * _inverse(new - x) % PRIME for x in kept}
    slid[new] = _weight(new, kept)
    return slid


def extrapolate(shares: Mapping[int, bytes], at_zero: Mapping[int, int], at: Collection[int]) -> dict[int, int]:
    """Values, at other points, of the polynomial through the shares of the points in `at_zero`; linear time for each.

    Lagrange's weight at z is that at zero times (z - o) / (0 - o) over the other points o.
    """
    terms = [(x, parse(shares[x]) * weight % PRIME * -x % PRIME) for x, weight in at_zero.items()]
    values, below = {}, pow(_product(-x for x in at_zero), -1, PRIME)
    for z in at:
        scale = _product(z - x for x in at_zero) * below % PRIME
        values[z] = sum(term * _inverse(z - x) for x, term in terms) * scale % PRIME
    return values


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


def _weight(x: int, points: Iterable[int]) -> int:
    """Lagrange's weight of x at zero, among itself and other points."""
    above = below = 1
    for other in points:
        if other != x:
            above = above * other % PRIME
            below = below * (other - x) % PRIME
    return above * pow(below, -1, PRIME) % PRIME


def _product(factors: Iterable[int]) -> int:
    value = 1
    for factor in factors:
        value = value * factor % PRIME
    return value


@lru_cache(maxsize=1 << 12)  # points are roster positions: few differences
def _inverse(value: int) -> int:
    return pow(value, -1, PRIME)
