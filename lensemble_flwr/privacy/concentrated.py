"""Epsilon and delta of zero-concentrated releases: what holds for Gaussians and for discrete Gaussians alike.

A history is mu-concentrated if its Renyi divergence of every order a > 1 is at most a mu^2 / 2 (zCDP with rho = mu^2/2;
Bun and Steinke 2016). mu^2 adds up under adaptive composition. The conversion is proposition 12 of Canonne, Kamath and
Steinke (2020), for every a > 1:

    log delta = (a - 1) (a mu^2 / 2 - epsilon) + a log(1 - 1/a) - log(a - 1).

Every order is sound, so the search for the best one needs no accuracy. Epsilon is a few per cent above that of the
continuous Gaussian with the same mu (:mod:`.gaussian`). Nothing here under-reports: mu is raised by
:data:`.gaussian.MARGIN`, results are rounded up, NaN and failures give epsilon = inf and delta = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lensemble_flwr.privacy.gaussian import MARGIN

_MAX_MU = 1e8
_FURTHEST = 400.0  # log of the largest a - 1 that is tried


def delta(mu: float, epsilon: float) -> float:
    """A delta at which every mu-concentrated history is (epsilon, delta)-DP, rounded up.

    Args:
        mu: >= 0.
        epsilon: >= 0; infinity is allowed.

    Returns:
        In [0, 1]; 1 for arguments that are no numbers or out of range. Above 0 whenever mu is.
    """
    if not (mu >= 0.0 and epsilon >= 0.0):
        return 1.0
    if mu == 0.0:
        return 0.0
    if mu > _MAX_MU:
        return 1.0
    mu *= 1.0 + MARGIN
    if epsilon == math.inf:
        return math.ulp(0.0)
    try:
        # The derivative in a is mu^2 (a - 1/2) - epsilon + log(1 - 1/a), which increases.
        b = _root(lambda b: mu * mu * (b + 0.5) - epsilon - math.log1p(1.0 / b) < 0.0)
        first, second = b * (0.5 * (b + 1.0) * mu * mu - epsilon), -(b + 1.0) * math.log1p(1.0 / b)
        third = -math.log(b)
        error = 1e-14 * (b * (b + 1.0) * mu * mu + b * epsilon + abs(second) + abs(third) + 1.0)
        value = math.exp(min(first + second + third + error, 0.0)) * (1.0 + 1e-13)
    except (ArithmeticError, ValueError):
        return 1.0
    return max(value, math.ulp(0.0)) if value <= 1.0 else 1.0


def epsilon(mu: float, delta: float) -> float:
    """An epsilon at which every mu-concentrated history is (epsilon, delta)-DP, rounded up.

    Args:
        mu: >= 0.
        delta: target, in (0, 1).

    Returns:
        epsilon >= 0; inf for arguments that are no numbers or out of range.
    """
    if not (mu >= 0.0 and delta > 0.0):
        return math.inf
    if mu == 0.0 or delta >= 1.0:
        return 0.0
    if mu > _MAX_MU:
        return math.inf
    mu *= 1.0 + MARGIN
    try:
        target = math.log(delta)
        # With b = a - 1 the derivative in a is mu^2 / 2 + (log(a) + log delta) / b^2, below zero first, then above.
        b = _root(lambda b: 0.5 * mu * mu * b * b + math.log1p(b) + target < 0.0)
        parts = (0.5 * (b + 1.0) * mu * mu, -math.log1p(1.0 / b), -(target + math.log1p(b)) / b)
        value = math.fsum(parts) + 1e-14 * sum(map(abs, parts))
    except (ArithmeticError, ValueError):
        return math.inf
    return max(value, 0.0) if value == value else math.inf


_epsilon = epsilon  # for functions with an argument of that name


def mu_for(epsilon: float, delta: float) -> float:
    """Largest mu, to 1e-12 relative and never too large, whose :func:`epsilon` at ``delta`` is at most ``epsilon``.

    Args:
        epsilon: target, positive and finite.
        delta: target, in (0, 1).

    Returns:
        mu; 0 if there is none above 1e-300.
    """
    low, high = math.log(1e-300), math.log(_MAX_MU)
    if not _epsilon(math.exp(low), delta) <= epsilon:
        return 0.0
    while high - low > 1e-12:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if _epsilon(math.exp(middle), delta) <= epsilon else (low, middle)
    return math.exp(low)


def _root(below: Callable[[float], bool]) -> float:
    """About where ``below`` turns from true to false on b > 0, by bisection of log b."""
    low, high = -_FURTHEST, _FURTHEST
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if below(math.exp(middle)) else (low, middle)
    return math.exp(high)
