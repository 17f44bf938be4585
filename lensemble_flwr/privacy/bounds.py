"""What the implementation adds to delta: clamping, rounding and the sampler. Proofs in docs/privacy.md, sections 3-5.

With h = m - k participants whose noise an observer does not know, the claim of one release is
(epsilon, delta_gaussian(epsilon) + terms), the terms being the same at every epsilon and adding up over releases:

* clamp: some ring coordinate of an honest update leaves +-qmax. Free in the local view (post-processing).
* aliasing: the sum of rounded values is not quite a function of the sum of the values. Free in the local view.
* sampler: the noise is cut at R std, R >= 14. The only term of the local view.

For d = 3e8, n = 100 and a 32-bit ring they are below 1e-12 a release, most of it room for a worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy.gaussian import log_tail
from lensemble_flwr.privacy.mechanism import TAIL
from lensemble_flwr.privacy.noise import reach
from lensemble_flwr.privacy.special import gammaln, logsumexp

MIN_RING_STD = 2.0
"""Smallest s/g for a central claim: own noise std in ring steps."""

_LOG_2 = math.log(2.0)
_LOG_ALIASES = math.log(2.001)


@dataclass(frozen=True)
class DeltaTerms:
    """Added to delta by one release; each rounded up, infinite if there is no bound."""

    clamp: float
    aliasing: float
    sampler: float

    @property
    def total(self) -> float:
        return (self.clamp + self.aliasing + self.sampler) * (1.0 + 2.0**-50)


def ring_bound(clip_norm: float, noise_std: float, per_person: int = 1) -> float:
    """The range a ring should hold per participant and coordinate: 1.5 C + 10 s (2 C + 10 s for p > 1).

    C + 10 s keeps honest updates inside. The rest is for the proof of the central view, which spreads the p updates of
    one person evenly over h >= max(2, p) participants; without it the clamp term grows for own noise below about C/6.
    """
    return (1.5 if per_person == 1 else 2.0) * clip_norm + TAIL * noise_std


def release_delta(
    *,
    noise_std: float,
    clip_norm: float,
    scale_log2: int,
    ring_bits: int,
    dimension: int,
    roster: int,
    min_survivors: int,
    colluders: int,
    per_person: int = 1,
) -> float:
    """What one release adds to delta, in whichever view, at every epsilon.

    For a person at p participants it is p times the term of a round, so that the p ledgers, each of which knows its
    own rounds only, bound the person's total (docs/privacy.md, section 13).

    Args:
        noise_std: s, each participant's own.
        clip_norm: C.
        scale_log2: of the ring, g = 2^-scale_log2.
        ring_bits: 16, 24 or 32.
        dimension: d.
        roster: n, which fixes qmax.
        min_survivors: m.
        colluders: k. With m - k < max(2, p) there is no central view and only the local term is added.
        per_person: p, how many participants may hold data of one person.

    Raises:
        ConfigError: a value out of range, a ring that does not hold C + 10 s, or one too coarse for a central view.
    """
    honest = min_survivors - colluders
    qmax = (2 ** (ring_bits - 1) - 1) // roster
    local = local_terms(clip_norm, noise_std, dimension).total
    if honest < max(2, per_person):
        return per_person * local
    central = central_terms(clip_norm, noise_std, dimension, ring_bits, scale_log2, qmax, honest, per_person)
    if math.isinf(central.aliasing):
        raise ConfigError(
            f"The ring of {ring_bits} bits is too coarse: the noise std is "
            f"{math.ldexp(noise_std, scale_log2):.3g} ring steps, a central view needs {MIN_RING_STD:g}.",
            "Use secagg.ring_bits=32, or more noise.",
        )
    return per_person * max(central.total, local)


def local_terms(clip_norm: float, noise_std: float, dimension: int) -> DeltaTerms:
    """Terms of one release against somebody who sees it unmasked."""
    ratio = _ratio(clip_norm, noise_std, dimension)
    return DeltaTerms(0.0, 0.0, _up(log_tails(dimension, reach(ratio), ratio)))


def central_terms(
    clip_norm: float,
    noise_std: float,
    dimension: int,
    ring_bits: int,
    scale_log2: int,
    qmax: int,
    honest: int,
    per_person: int = 1,
) -> DeltaTerms:
    """Terms of one release against somebody who sees the sum and knows all but ``honest`` >= max(2, p) of the summands.

    Raises:
        ConfigError: a value out of range, or a ring that does not hold C + 10 s.
    """
    ratio = _ratio(clip_norm, noise_std, dimension)
    if honest < max(2, per_person) or per_person < 1 or qmax < 1:
        raise ConfigError(
            f"There is no central view with {honest} unknown summands, {per_person} per person and qmax={qmax}."
        )
    edge = math.ldexp(qmax, -scale_log2) / noise_std
    if edge < (ratio + TAIL) * (1.0 - 2.0**-40):
        raise ConfigError("The ring does not hold C + 10 s.", "Lower its scale or use more bits.")
    shifted = ratio * per_person / honest * (1.0 + 2.0**-50)
    clamp = [log_tails(dimension, edge, ratio), log_tails(dimension, edge, ratio + shifted)]
    return DeltaTerms(
        clamp=_up(math.log(honest) + float(logsumexp(clamp))),
        aliasing=_up(math.log(dimension) + log_aliasing(math.ldexp(noise_std, scale_log2), ring_bits, honest)),
        sampler=_up(math.log(honest) + log_tails(dimension, reach(ratio), shifted)),
    )


def log_tails(dimension: int, edge: float, norm: float) -> float:
    """log of a bound on P(some |a_j + Z_j| > edge) over all a in R^d of Euclidean norm at most ``norm``; at most 0.

    2 Q(edge - a_j) is convex in a_j^2 where a_j (edge - a_j) >= 1, so there one coordinate with the whole norm is the
    worst, and the others are bounded by where that begins (docs/privacy.md, lemma 1).
    """
    if edge <= 2.0:
        return 0.0
    root = math.sqrt(edge * edge - 4.0)
    begins, ends = 2.0 / (edge + root), 0.5 * (edge + root)
    if not norm <= ends:
        return 0.0
    both = np.logaddexp(math.log(dimension) + log_tail(edge - begins), log_tail(edge - norm))
    return min(0.0, _LOG_2 + float(both) + 1e-9)


def log_aliasing(ring_std: float, ring_bits: int, honest: int) -> float:
    """log of a bound on the total variation, per coordinate, between sums of ``honest`` rounded Gaussians that differ
    only in how one shift is spread over the summands (docs/privacy.md, lemma 2). inf if the ring is too coarse.

    Args:
        ring_std: s/g.
        ring_bits: b; sums are known modulo 2^b.
        honest: h.
    """
    if honest < 2:
        return -math.inf
    if not ring_std >= MIN_RING_STD:
        return math.inf
    i = np.arange(1, honest + 1, dtype=np.float64)
    binomial = gammaln(honest + 1) - gammaln(i + 1) - gammaln(honest - i + 1)
    exponent = np.where(2 * i <= honest, 2.0 * math.pi**2 * i * (honest - i) / honest, 0.5 * math.pi**2 * honest)
    terms = binomial + i * _LOG_ALIASES - ring_std**2 * exponent
    return 0.5 * ring_bits * _LOG_2 + float(logsumexp(terms)) + 1e-6


def _ratio(clip_norm: float, noise_std: float, dimension: int) -> float:
    if not (0.0 < clip_norm < math.inf and 0.0 < noise_std < math.inf) or dimension < 1:
        raise ConfigError(f"No bound for clip_norm={clip_norm!r}, noise_std={noise_std!r}, dimension={dimension!r}.")
    return clip_norm / noise_std * (1.0 + 2.0**-50)


def _up(log_value: float) -> float:
    """exp, rounded up: never zero for what is not zero."""
    if log_value == -math.inf:
        return 0.0
    if not log_value < 700.0:
        return math.inf
    return max(math.exp(log_value) * (1.0 + 1e-12), math.ulp(0.0))
