"""Reconstruction of a secret that can be checked, from shares some of which may be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import shamir


def recover(
    shares: Mapping[int, bytes], threshold: int, genuine: Callable[[bytes], bool], culprits: set[int]
) -> bytes | None:
    """The secret for which `genuine` holds, or None if no subset that is tried gives it.

    The first try takes the lowest points that are not under suspicion and is the only one in an honest round. After a
    failure every run of `threshold` neighbours on the circle of points is tried, which finds a set free of wrong
    shares whenever one member is bad and there is a share to spare (and often when more are). A genuine secret fixes
    the polynomial; whoever's share is not on it is added to `culprits`.

    Args:
        shares: {point: share}, at least `threshold`.
        threshold: t.
        genuine: compares a candidate with what was published about the secret.
        culprits: points known to be bad; extended.
    """
    points = sorted(shares)
    if culprits:
        points.sort(key=culprits.__contains__)  # stable
    for attempt, weights in enumerate(_runs(points, threshold)):
        try:
            secret = shamir.weighted(shares, weights)
        except SecureAggregationError:  # the interpolated value is no 32-byte string: some share is wrong
            continue
        if genuine(secret):
            if attempt:
                others = [x for x in points if x not in weights]
                expected = shamir.extrapolate(shares, weights, others)
                culprits |= {x for x in others if expected[x] != shamir.parse(shares[x])}
            return secret
    return None


def _runs(points: list[int], length: int) -> Iterator[Mapping[int, int]]:
    """The weights at zero of each run: those of the first, and then from run to run, so that a dealer whose shares fit
    no secret costs a pass over the runs and not a pass over the pairs of points for each of them."""
    weights = shamir.weights(tuple(points[:length]))
    yield weights
    if length < len(points):
        for new in (points[length:] + points[:length])[: len(points) - 1]:
            weights = shamir.slide(weights, new)
            yield weights
