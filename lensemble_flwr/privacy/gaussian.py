"""The exact privacy of composed Gaussian releases, in float64 and log space.

Releases with noise multipliers sigma_t at full participation compose to one Gaussian mechanism with
mu^2 = sum 1/sigma_t^2, and

    delta(epsilon) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)

is exact (Balle and Wang 2018; Dong, Roth and Su 2019). With a = epsilon/mu - mu/2, b = a + mu, phi the normal density
and R(x) = Phi(-x)/phi(x) Mills' ratio this is phi(a) (R(a) - R(b)), which neither overflows nor underflows. Everything
is solved in ``a``: epsilon = mu (a + mu/2) then has no cancellation at any size of epsilon.

Nothing here under-reports. mu is first raised by the factor 1 + 2^-40 (:data:`MARGIN`), far more than the rounding of
whatever mu was computed from, and the rounding of delta is bounded and added. The price is below 1e-11 relative in
epsilon. NaN, infinities and failures give epsilon = inf and delta = 1. Checked for mu in [1e-7, 1e8] (sigma .01..1e4 at
up to 1e9 rounds) and delta down to 1e-300, against 60-digit arithmetic.
"""

from __future__ import annotations

import math

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy.special import erfcx, log_ndtr, ndtri_exp

MARGIN = 2.0**-40
"""Relative amount by which mu is raised before it is used."""

_ULP = 2.0**-52
_SQRT_HALF = math.sqrt(0.5)
_MILLS_ZERO = math.sqrt(math.pi / 2)
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SMALL_MU = 1e-3  # below it R(a) - R(a + mu) is taken from its Taylor series, where the difference would cancel
_MAX_MU = 1e8  # above it epsilon is over 1e15 whatever delta is


def _mills(x: float) -> float:
    return _MILLS_ZERO * float(erfcx(x * _SQRT_HALF))


def log_tail(x: float) -> float:
    """log P(N(0, 1) > x), finite for |x| up to 1e150."""
    return float(log_ndtr(-x))


def _log_delta(mu: float, a: float, a_error: float = 0.0) -> tuple[float, float]:
    """Upper bound on log delta at epsilon = mu (a + mu/2) >= 0, and minus its slope in a.

    Args:
        mu: positive, at most _MAX_MU.
        a: at least -mu/2.
        a_error: a bound on the error of a; the bound holds for every true value within.
    """
    a -= a_error
    b = a + mu
    if a < -5.0:  # delta is near 1: no cancellation, and R(a) would overflow
        above = math.exp(-0.5 * a * a - _LOG_SQRT_2PI) * _mills(b)
        value = 0.5 * math.erfc(a * _SQRT_HALF) - above
        error = 16 * _ULP
        return math.log(value) + error, mu * above / value
    r_b = _mills(b)
    if mu < _SMALL_MU:
        x = a + 0.5 * mu  # R(a) - R(b) = mu D(x) + mu^3/24 D''(x) + O(mu^5), D = -R'
        r = _mills(x)
        d = 1.0 - x * r
        diff = mu * (d + mu * mu / 24 * (2.0 + x * x - (3.0 * x + x**3) * r))
        error = 8 * _ULP * (1.0 + x * x) / d + mu**4  # remainder below 24/1920 mu^4 D
    else:
        r_a = _mills(a)
        diff = r_a - r_b
        error = 8 * _ULP * r_a / diff
    error += 4 * _ULP * (1.0 + a * a)  # of the exponent
    return -0.5 * a * a - _LOG_SQRT_2PI + math.log(diff) + error, mu * r_b / diff


def delta(mu: float, epsilon: float) -> float:
    """Smallest delta at which composed Gaussian releases are (epsilon, delta)-DP, rounded up.

    Args:
        mu: sqrt(sum 1/sigma_t^2), >= 0.
        epsilon: >= 0; infinity is allowed (delta is then the smallest positive float, unless mu = 0).

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
    try:
        ratio = epsilon / mu
        if ratio > 1e6 + mu:  # a above 1e6: delta is no float any more
            return math.ulp(0.0)
        a = ratio - 0.5 * mu
        if a < -0.5 * mu:
            a = -0.5 * mu
        log_value, _ = _log_delta(mu, a, 2 * _ULP * (ratio + mu) if epsilon > 0 else 0.0)
        value = math.exp(min(log_value, 0.0)) * (1.0 + 1e-13)
    except (ArithmeticError, ValueError):
        return 1.0
    if not value <= 1.0:
        return 1.0
    return max(value, math.ulp(0.0))


def epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 at which composed Gaussian releases are (epsilon, delta)-DP, rounded up.

    Args:
        mu: sqrt(sum 1/sigma_t^2), >= 0.
        delta: target, in (0, 1).

    Returns:
        epsilon; inf for arguments that are no numbers or out of range, and when mu is beyond 1e8.
    """
    if not (mu >= 0.0 and delta > 0.0):
        return math.inf
    if mu == 0.0 or delta >= 1.0:
        return 0.0
    if mu > _MAX_MU:
        return math.inf
    mu *= 1.0 + MARGIN
    try:
        return _solve(mu, math.log(delta))
    except (ArithmeticError, ValueError):
        return math.inf


def _solve(mu: float, log_target: float) -> float:
    least = -0.5 * mu
    if _log_delta(mu, least)[0] <= log_target:
        return 0.0
    # log delta is concave and decreasing in a (a convolution of log-concave functions), and delta <= Phi(-a): Newton
    # from Phi(-a) = delta runs down to the root without crossing it, so every iterate is a valid, larger epsilon.
    a = max(-float(ndtri_exp(log_target)), least)
    for _ in range(200):
        value, slope = _log_delta(mu, a)
        step = (value - log_target) / slope
        if step > 0.0 or not step < 0.0:
            break
        a = max(a + step, least)
        if -step <= 1e-14 * (1.0 + abs(a)):
            break
    nudge = 1e-14 * (1.0 + abs(a))
    while not _log_delta(mu, a)[0] <= log_target:  # verified, never assumed
        a += nudge
        nudge *= 2.0
    result = mu * (a + 0.5 * mu) * (1.0 + 4 * _ULP) + 4 * _ULP * mu * (abs(a) + mu)
    return result if result >= 0.0 else math.inf


_epsilon = epsilon  # for functions with an argument of that name


def mu_for(epsilon: float, delta: float) -> float:
    """Largest mu whose :func:`epsilon` at ``delta`` is at most ``epsilon``, rounded down by at most 1e-11 relative.

    Args:
        epsilon: target, >= 0, finite.
        delta: target, in (0, 1).

    Raises:
        ConfigError: a target that is no number or out of range.
    """
    if not (0.0 <= epsilon < math.inf and 0.0 < delta < 1.0):
        raise ConfigError(
            f"There is no Gaussian mechanism for epsilon={epsilon!r}, delta={delta!r}.",
            "Use a finite epsilon >= 0 and 0 < delta < 1.",
        )

    def fits(mu: float) -> bool:
        return _epsilon(mu, delta) <= epsilon

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2.0 * high
        if high > _MAX_MU:
            break
    while low == 0.0:
        if fits(0.5 * high):
            low = 0.5 * high
        else:
            high *= 0.5
            if high < 1e-300:
                return 0.0
    while high - low > 1e-13 * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
