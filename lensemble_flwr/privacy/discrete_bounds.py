"""What the discrete Gaussian on the ring costs: its mu in both views, and what it adds to delta.

Proofs are in docs/privacy.md, section 9. With S = s/g, A = C/s and q = exp(-2 pi^2 S^2):

* local: mu = A sqrt(1 + nu), nu of order S^2 q (:func:`log_excess`), with nothing added but the sampler's cut.
* central, h = m - k >= 2 unknown noises: mu = A sqrt((1 + nu) / h) + gap. The sum of h discrete Gaussians is only
  nearly one; the gap is sqrt(d) log((1 + e) / (1 - e)), e of order 2 h exp(-2 pi^2 S^2 (h - 1)/h)
  (:func:`log_ripple_of_sum`).

Both are to be converted as concentrated privacy (:mod:`.concentrated`), not as a continuous Gaussian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import bounds
from lensemble_flwr.privacy.bounds import DeltaTerms
from lensemble_flwr.privacy.discrete import MAX_STD, MIN_STD, fits
from lensemble_flwr.privacy.special import gammaln, logsumexp

_LOG_2 = math.log(2.0)
_UP = 1e-9  # relative; far above the rounding errors here, and above the terms that the sums leave out


def log_ripple(ring_std: float) -> float:
    """log of e_1 = 2 (q + q^4 + ..): theta_S(c) = sum over integers y of exp(-(y - c)^2/2S^2) is sqrt(2 pi) S times a
    factor within 1 +- e_1. Rounded up.

    Args:
        ring_std: S, at least 0.5.
    """
    x = 2.0 * math.pi**2 * ring_std**2
    return _LOG_2 - x + math.log1p(math.exp(-3.0 * x) + math.exp(-8.0 * x)) + _UP * (1.0 + x)


def log_excess(ring_std: float) -> float:
    """log of nu: no discrete Gaussian of parameter S, wherever its centre, has a variance over S^2 (1 + nu). Rounded
    up.

    Args:
        ring_std: S, at least 0.5.
    """
    x = 2.0 * math.pi**2 * ring_std**2
    series = math.log1p(4.0 * math.exp(-3.0 * x) + 9.0 * math.exp(-8.0 * x))
    rest = -math.log1p(-math.exp(log_ripple(ring_std)))
    return math.log(8.0 * math.pi**2 * ring_std**2) - x + series + rest + _UP * (1.0 + x)


def log_ripple_of_sum(ring_std: float, honest: int) -> float:
    """log of e_h: the law of a sum of h discrete Gaussians is proportional to exp(-(z - X)^2 / (2 h S^2)) times a
    factor within 1 +- e_h, X the sum of their centres. Rounded up.

    It is the theta series of the dual of the root lattice A_(h-1) without its first term: the sum of exp(-x |v|^2),
    x = 2 pi^2 S^2, over integer vectors n up to multiples of (1 .. 1), |v|^2 = sum n^2 - (sum n)^2 / h. Classes of
    sum n = i modulo h are counted one by one: their shortest vectors exactly, binom(h, i) of norm i (h - i) / h, the
    others by a Chernoff bound on the generating function.

    Args:
        ring_std: S, at least 0.5.
        honest: h.
    """
    if honest < 2:
        return -math.inf
    h, x = honest, 2.0 * math.pi**2 * ring_std**2
    i = np.arange(1, h // 2 + 1, dtype=np.float64)
    odds = i / (h - i)
    twice = np.where(2 * i == h, 0.0, _LOG_2)
    shortest = gammaln(h + 1) - gammaln(i + 1) - gammaln(h - i + 1) - x * i * (h - i) / h
    # Others of class i: [y^i] of (1 + q y + r(y))^h - (1 + q y)^h, at y = odds / q. All powers in units of q.
    r = odds**-1.0 * math.exp(-2.0 * x)
    for n in range(2, 7):
        r += odds**n * math.exp(-x * (n * n - n)) + odds**-n * math.exp(-x * (n * n + n))
    r *= 1.0 + _UP
    with np.errstate(divide="ignore"):  # a count that underflows is far below the rounding up
        many = np.log(np.expm1(h * np.log1p(r * (h - i) / h)))
    entropy = -i * np.log(odds) + h * np.log(h / (h - i))
    others = entropy - x * i * (h - i) / h + many
    root = 1.0 + math.exp(-x)  # class 0: [y^0], at y = 1
    zero = h * math.log(root) + math.log(
        max(math.expm1(h * math.log1p(math.exp(-x) * (1.0 + 2.0 * math.exp(-2.0 * x)) / root)), 5e-324)
    )
    terms = np.concatenate([shortest + twice, others + twice, [zero]])
    return float(logsumexp(terms)) + _UP * (1.0 + x)


def sum_gap(ring_std: float, honest: int, dimension: int) -> float:
    """What the central mu of one release is raised by because the sum is not quite discrete Gaussian. Rounded up; inf
    if the grid is too coarse to say.

    Args:
        ring_std: S.
        honest: h; below 2 there is no sum, and no gap.
        dimension: d.
    """
    log_e = log_ripple_of_sum(ring_std, honest)
    if honest < 2:
        return 0.0
    if not log_e < math.log(0.5):
        return math.inf
    if log_e < -700.0:
        return math.sqrt(dimension) * 1e-300
    return math.sqrt(dimension) * 2.0 * math.atanh(math.exp(log_e)) * (1.0 + _UP)


def own_multiplier(clip_norm: float, noise_std: float, ring_std: float) -> float:
    """1/mu of one release against somebody who sees it unmasked, s / (C sqrt(1 + nu)); rounded down."""
    return noise_std / clip_norm / math.sqrt(1.0 + math.exp(log_excess(ring_std))) * (1.0 - 2.0**-48)


def check_std(clip_norm: float, noise_std: float, ring_std: float) -> None:
    """Refuse a grid on which the discrete Gaussian is not provided.

    Raises:
        ConfigError: S out of range; the text says what would do.
    """
    if not ring_std >= MIN_STD:
        raise ConfigError(
            f"The ring is too coarse: the noise std is {ring_std:.3g} ring steps, "
            f"privacy.mechanism=discrete_gaussian needs {MIN_STD:g}.",
            "Use more secagg.ring_bits, fewer participants, or more noise (privacy.noise_multiplier).",
        )
    if not fits(ring_std, clip_norm / noise_std):
        raise ConfigError(
            f"The ring is too fine for privacy.mechanism=discrete_gaussian: the noise std is {ring_std:.3g} ring "
            f"steps, the clip norm {clip_norm / noise_std * ring_std:.3g}; it goes to about {MAX_STD:g}.",
            "Use privacy.mechanism=gaussian (rounding is free on such a ring), or secagg.ring_bits=16.",
        )


@dataclass(frozen=True)
class Price:
    """What one release of a discrete Gaussian costs.

    Args:
        own_multiplier: 1/mu of the local view, slightly below s/C; rounded down.
        gap: what the central mu, 1/(own_multiplier sqrt(m - k)), is raised by; 0 where there is no central view.
        delta_extra: added to delta in either view.
    """

    own_multiplier: float
    gap: float
    delta_extra: float


def release_price(
    *,
    noise_std: float,
    clip_norm: float,
    scale_log2: int,
    ring_bits: int,
    dimension: int,
    roster: int,
    min_survivors: int,
    colluders: int,
) -> Price:
    """The price of one release, in both views. Arguments as of :func:`.bounds.release_delta`.

    Raises:
        ConfigError: a value out of range, a ring that does not hold C + 10 s, or one too coarse or too fine for a
            discrete Gaussian.
    """
    ring_std = math.ldexp(noise_std, scale_log2)
    check_std(clip_norm, noise_std, ring_std)
    honest = min_survivors - colluders
    qmax = (2 ** (ring_bits - 1) - 1) // roster
    own = own_multiplier(clip_norm, noise_std, ring_std)
    extra = local_terms(clip_norm, noise_std, dimension, scale_log2).total
    if honest < 2:
        return Price(own, 0.0, extra)
    gap = sum_gap(ring_std, honest, dimension)
    if gap == math.inf:
        raise ConfigError(
            f"The ring is too coarse: the noise std is {ring_std:.3g} ring steps, and a sum of {honest} such noises is "
            "not nearly a discrete Gaussian.",
            "Use more secagg.ring_bits, fewer participants, or more noise (privacy.noise_multiplier).",
        )
    central = central_terms(clip_norm, noise_std, dimension, ring_bits, scale_log2, qmax, honest)
    return Price(own, gap, max(central.total, extra))


def local_terms(clip_norm: float, noise_std: float, dimension: int, scale_log2: int) -> DeltaTerms:
    """What one release adds to delta against somebody who sees it unmasked: the sampler's cut."""
    plain = bounds.local_terms(clip_norm, noise_std, dimension)
    return _scaled(plain, 1.0 / (1.0 - math.exp(log_ripple(math.ldexp(noise_std, scale_log2)))))


def central_terms(
    clip_norm: float, noise_std: float, dimension: int, ring_bits: int, scale_log2: int, qmax: int, honest: int
) -> DeltaTerms:
    """What one release adds to delta against somebody who sees the sum and knows all but ``honest`` >= 2 summands:
    the clamp and the sampler's cut of the rounded Gaussian times the constant of lemma 6, and no aliasing.

    Raises:
        ConfigError: a value out of range, or a ring that does not hold C + 10 s.
    """
    plain = bounds.central_terms(clip_norm, noise_std, dimension, ring_bits, scale_log2, qmax, honest)
    ring_std = math.ldexp(noise_std, scale_log2)
    log_factor = 4.0 * _atanh(log_ripple_of_sum(ring_std, honest))
    log_factor += 2.0 * _atanh(log_ripple(ring_std * math.sqrt(honest)))
    log_factor += honest * 2.0 * _atanh(log_ripple(ring_std))
    return _scaled(plain, math.exp(log_factor) if log_factor < 700.0 else math.inf)


def _atanh(log_value: float) -> float:
    """artanh, of which log((1 + e)/(1 - e)) is twice; inf where that is not defined."""
    return math.atanh(math.exp(log_value)) if log_value < 0.0 else math.inf


def _scaled(terms: DeltaTerms, factor: float) -> DeltaTerms:
    factor *= 1.0 + _UP
    return DeltaTerms(terms.clamp * factor, 0.0, terms.sampler * factor)
