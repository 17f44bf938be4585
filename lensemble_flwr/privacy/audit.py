"""From what an attacker measured to what privacy cannot be: lower bounds on epsilon and mu, at a stated confidence.

An audit runs a mechanism many times with and many times without a canary, reduces each output to one number (the test
statistic) and guesses "with" when it reaches a threshold. With false positive rate alpha and false negative rate beta,

* (epsilon, delta)-DP implies 1 - beta <= e^epsilon alpha + delta and the same with the rates swapped (Kairouz, Oh and
  Viswanath 2015), so rates bound epsilon from below whatever the mechanism is;
* mu-GDP implies mu >= Phi^-1(1 - alpha) - Phi^-1(beta) (Dong, Roth and Su 2019). That is far sharper when the claim
  under audit is mu-GDP, as it is here (Nasr et al. 2023): a threshold in the middle, where both rates are well known,
  says as much as one in the tails.

The rates are bounded by Clopper-Pearson on one half of the measurements, with a threshold chosen on the other half, so
no search over thresholds has to be paid for. The bounds cannot show that something is private; they can show that it
is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, betaincinv, ndtri

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.privacy import gaussian

_CANDIDATES = 999

_Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class LowerBounds:
    """What privacy cannot be. Each of the two statements holds with the confidence that was asked for.

    Attributes:
        epsilon: no smaller epsilon is possible at ``delta``, whatever the mechanism is.
        mu: the mechanism is not mu-GDP for any smaller mu.
        mu_epsilon: the epsilon at ``delta`` of that mu, to set beside an epsilon that was accounted from a mu.
        delta: of both.
    """

    epsilon: float
    mu: float
    mu_epsilon: float
    delta: float


def rate_bound(hits: Any, trials: int, confidence: float) -> Any:
    """Upper Clopper-Pearson bound on a probability from ``hits`` in ``trials``; hits may be an array."""
    count = np.asarray(hits, np.float64)
    inner = np.minimum(count, trials - 1.0)
    return np.where(count >= trials, 1.0, betaincinv(inner + 1.0, trials - inner, confidence))


def epsilon_from_rates(alpha: Any, beta: Any, delta: float) -> Any:
    """Smallest epsilon >= 0 at which a test may have false positive rate alpha and false negative rate beta."""
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    with np.errstate(divide="ignore"):
        one_way = np.log(np.maximum(1.0 - beta - delta, 0.0)) - np.log(alpha)
        other_way = np.log(np.maximum(1.0 - alpha - delta, 0.0)) - np.log(beta)
    return np.maximum(0.0, np.maximum(one_way, other_way))


def mu_from_rates(alpha: Any, beta: Any) -> Any:
    """Smallest mu >= 0 of a Gaussian mechanism that allows a test with these rates."""
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    known = (alpha < 1.0) & (beta < 1.0)
    return np.maximum(0.0, np.where(known, -ndtri(np.where(known, alpha, 0.5)) - ndtri(np.where(known, beta, 0.5)), 0))


def lower_bounds(without: _Floats, with_canary: _Floats, delta: float, confidence: float) -> LowerBounds:
    """Lower bounds from test statistics; large values speak for the canary.

    Args:
        without: statistics of independent runs without the canary, shape (n0,), n0 >= 4.
        with_canary: of independent runs with it, shape (n1,), n1 >= 4.
        delta: of the epsilons, in (0, 1).
        confidence: of each bound, in (0, 1): it is too large with probability at most 1 - confidence.

    Raises:
        ContractViolation: too few or not finite statistics, delta or confidence out of range.
    """
    if not (0.0 < delta < 1.0 and 0.0 < confidence < 1.0):
        raise ContractViolation(f"delta={delta!r} and confidence={confidence!r} must lie between 0 and 1.")
    halves = []
    for values in (without, with_canary):
        if values.ndim != 1 or values.size < 4 or not np.isfinite(values).all():
            raise ContractViolation("An audit needs at least 4 finite statistics of each kind.")
        middle = values.size // 2
        halves.append((np.sort(values[:middle]), np.sort(values[middle:])))
    (train_off, test_off), (train_on, test_on) = halves
    side = 1.0 - 0.5 * (1.0 - confidence)  # two rates
    places = np.linspace(0.0, 1.0, _CANDIDATES)
    thresholds = np.unique(np.concatenate([np.quantile(train_off, places), np.quantile(train_on, places)]))

    def rates(off: _Floats, on: _Floats, at: Any) -> tuple[Any, Any]:
        false_positives = off.size - np.searchsorted(off, at, "left")
        return rate_bound(false_positives, off.size, side), rate_bound(np.searchsorted(on, at, "left"), on.size, side)

    alpha, beta = rates(train_off, train_on, thresholds)
    best_epsilon = thresholds[int(np.argmax(epsilon_from_rates(alpha, beta, delta)))]
    best_mu = thresholds[int(np.argmax(mu_from_rates(alpha, beta)))]
    mu = float(mu_from_rates(*rates(test_off, test_on, best_mu)))
    return LowerBounds(
        epsilon=float(epsilon_from_rates(*rates(test_off, test_on, best_epsilon), delta)),
        mu=mu,
        mu_epsilon=gaussian.epsilon(mu, delta),
        delta=delta,
    )


def one_run_epsilon(
    scores: _Floats,
    included: NDArray[np.bool_],
    delta: float,
    confidence: float,
    shares: tuple[float, ...] = (0.03, 0.1, 0.3),
) -> float:
    """Lower bound on epsilon from a single run with many canaries, each included by a fair coin of its own.

    Guesses "included" for the highest and "left out" for the lowest scores, abstains on the rest, and counts. Nothing
    is assumed about how the canaries' scores depend on each other (Steinke, Nasr and Jagielski 2023, theorem 5.2).

    Args:
        scores: shape (m,); large values speak for inclusion.
        included: the coins, shape (m,).
        delta: of the epsilon.
        confidence: of the bound.
        shares: shares of the canaries to guess on. The confidence is split over them, the best bound counts.

    Raises:
        ContractViolation: shapes that do not fit, or values out of range.
    """
    m = scores.size
    if scores.shape != (m,) or included.shape != (m,) or m < 1 or not np.isfinite(scores).all():
        raise ContractViolation("Scores and coins must be finite and of the same shape (m,).")
    if not (0.0 < delta < 1.0 and 0.0 < confidence < 1.0) or not all(0.0 < s <= 1.0 for s in shares):
        raise ContractViolation("delta, confidence and shares must lie between 0 and 1.")
    order, allowed, best = np.argsort(scores, kind="stable"), (1.0 - confidence) / len(shares), 0.0
    for share in shares:
        each = int(0.5 * share * m)
        correct = int(included[order[m - each :]].sum() + (~included[order[:each]]).sum())
        best = max(best, _one_run(m, 2 * each, correct, delta, allowed))
    return best


def _one_run(m: int, guesses: int, correct: int, delta: float, allowed: float) -> float:
    """Largest epsilon that is refuted: under it so many correct guesses have a probability of at most ``allowed``."""

    def refuted(epsilon: float) -> bool:
        return _one_run_p_value(m, guesses, correct, delta, epsilon) <= allowed

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _one_run_p_value(m: int, guesses: int, correct: int, delta: float, epsilon: float) -> float:
    if correct == 0:
        return 1.0
    p = 1.0 / (1.0 + math.exp(-epsilon))
    tail = bdtrc(np.arange(correct, dtype=np.float64) - 1.0, guesses, p)  # P(Binomial >= 0 .. correct - 1)
    tail[0] = 1.0
    at = float(bdtrc(correct - 1.0, guesses, p))
    slopes = (tail[::-1] - at) / np.arange(1, correct + 1)
    return min(1.0, at + 2.0 * m * delta * float(slopes.max()))
