"""Accountants: how much privacy a list of Gaussian releases has spent.

Neighbours are zero-out: one participant's clipped update is replaced by zero in every round (sensitivity C, the
add/remove relation). At full participation (``sample_rate = 1``) the composed Gaussian is exact and one number is
enough, mu^2 = sum 1/sigma^2. It is kept as an integer in units of 2^-200, each term rounded up, so it depends neither
on the order nor on the grouping of the rounds. ``sample_rate < 1`` means Poisson sampling by a secret coin of the
participant itself that nobody ever sees; an observed frequency or a dropout is not that. There, several sound bounds
are computed and the smallest counts.

Fail closed: a step that is no number, an overflow or a failing backend makes the spent epsilon infinite;
:meth:`Accountant.would_exceed` is False only if the budget was shown to hold.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.joint import joint_gaussian_mu as joint_gaussian_mu
from lensemble_flwr.privacy.special import brentq

STATE_VERSION = 1
MAX_SIGMA = 1e6
"""Largest noise multiplier that calibration returns."""

_UNIT_LOG2 = 200
_PLD_POINTS = 2_000_000  # a composed grid is no larger than about this: seconds and some 300 MB
_PLD_INTERVAL = 1e-4  # the finest step; a wider loss gets a coarser grid, which is looser but no less sound
_PLD_COARSEST = 10.0
_PLD_STAGE = 1 << 20
_PLD_TAIL = 1e-15  # cut from each stage and charged to delta
_MOST_ROUNDS = 1 << 40  # beyond it nothing is asked of the costly backends
_SLACK = 1e-7  # calibrated sigmas are this much larger, so that other roundings of the same budget agree


@runtime_checkable
class Accountant(Protocol):
    """Composes Gaussian releases of sensitivity 1 and noise std sigma. All arguments by keyword."""

    def calibrate_sigma(
        self, *, target_epsilon: float, target_delta: float, num_rounds: int, sample_rate: float = 1.0
    ) -> float:
        """Smallest noise multiplier (to 1e-6 relative, never too small) that keeps ``num_rounds`` releases within the
        target. What was spent before is not considered.

        Raises:
            ConfigError: infeasible or malformed target; the text says what would be feasible.
        """
        ...

    def step(self, *, noise_multiplier: float, sample_rate: float = 1.0, count: int = 1) -> None:
        """Account for ``count`` releases. A noise multiplier or rate that makes no sense spends everything.

        Raises:
            ContractViolation: ``count`` is no integer >= 0.
        """
        ...

    def spent(self, *, target_delta: float) -> float:
        """Epsilon spent at ``target_delta``: never negative, never NaN, never too small; inf if not bounded.

        Raises:
            ConfigError: ``target_delta`` is not between 0 and 1.
        """
        ...

    def would_exceed(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        noise_multiplier: float,
        sample_rate: float = 1.0,
        count: int = 1,
    ) -> bool:
        """Whether ``count`` more releases could pass the target. False only if they were shown not to.

        Microseconds at ``sample_rate=1``. Below it the first question about a (sigma, rate) on top of a given history
        of other releases finds how many rounds of that kind fit (seconds); the next ones look that number up.
        """
        ...


_Self = TypeVar("_Self", bound="_Composition")
_Sampled = tuple[tuple[float, float, int], ...]  # (sigma, rate < 1, count), sorted


class _Composition(ABC):
    """What both accountants share: the history, the fail-closed rules, calibration and the state."""

    name = ""

    def __init__(self) -> None:
        self._mu2 = 0  # in units of 2^-_UNIT_LOG2
        self._sampled: dict[tuple[float, float], int] = {}
        self._infinite = False
        self._cache: tuple[Any, float] | None = None

    @abstractmethod
    def _epsilon(self, mu: float, sampled: _Sampled, delta: float, enough: float = 0.0) -> float:
        """Upper bound on epsilon of the full history; any value <= ``enough`` will do, so that costly bounds can be
        skipped."""

    def _cheap(self, mu: float, sampled: _Sampled, delta: float) -> float:
        """A bound that costs microseconds and is never below :meth:`_epsilon`; inf if there is none."""
        return math.inf

    def step(self, *, noise_multiplier: float, sample_rate: float = 1.0, count: int = 1) -> None:
        _check_count(count)
        mu2, sampled, infinite = self._after(noise_multiplier, sample_rate, count)
        self._mu2, self._infinite, self._cache = mu2, infinite, None
        self._sampled = {(sigma, rate): n for sigma, rate, n in sampled}

    def step_mu(self, *, mu: float, count: int = 1) -> None:
        """Account for ``count`` Gaussian releases of this mu each, such as joint ones (:func:`joint_gaussian_mu`).

        The same as ``step(noise_multiplier=1 / mu)`` without the rounding of 1 / mu. A mu that is no number >= 0, or
        infinite, spends everything.

        Raises:
            ContractViolation: ``count`` is no integer >= 0.
        """
        _check_count(count)
        value = 0.0 if mu == 0.0 and type(mu) in (int, float) else _positive(mu)
        if value is None and count:
            self._infinite = True
        elif value is not None:
            top, bottom = value.as_integer_ratio()
            self._mu2 += count * -(-(top * top << _UNIT_LOG2) // (bottom * bottom))
        self._cache = None

    def spent(self, *, target_delta: float) -> float:
        delta = _check_delta(target_delta)
        key = (self._mu2, tuple(sorted(self._sampled.items())), self._infinite, delta)
        if self._cache is None or self._cache[0] != key:
            now = self._after(1.0, 1.0, 0)
            self._cache = (key, self._bound(*now, delta))
        return self._cache[1]

    def would_exceed(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        noise_multiplier: float,
        sample_rate: float = 1.0,
        count: int = 1,
    ) -> bool:
        _check_count(count)
        try:
            if not (0.0 <= target_epsilon and 0.0 < target_delta < 1.0):
                return True
            s, q = _positive(noise_multiplier), _positive(sample_rate)
            if count and s is not None and q is not None and q < 1.0 and not self._infinite:
                mu2, sampled, _ = self._after(s, q, count)
                if self._cheap(_root(mu2), sampled, float(target_delta)) <= target_epsilon:
                    return False
                done = self._sampled.get((s, q), 0)
                others = tuple((*key, n) for key, n in sorted(self._sampled.items()) if key != (s, q))
                history = (type(self), self._mu2, others, s, q)
                return done + count > _rounds_allowed(*history, float(target_epsilon), float(target_delta))
            after = self._after(noise_multiplier, sample_rate, count)
            return not self._bound(*after, float(target_delta), float(target_epsilon)) <= target_epsilon
        except (TypeError, ValueError, ArithmeticError):
            return True

    def calibrate_sigma(
        self, *, target_epsilon: float, target_delta: float, num_rounds: int, sample_rate: float = 1.0
    ) -> float:
        epsilon, delta, rate = _check_target(target_epsilon, target_delta, num_rounds, sample_rate)

        @cache
        def needed(sigma: float) -> float:
            fresh = type(self)()
            return fresh._bound(*fresh._after(sigma, rate, num_rounds), delta, epsilon)

        if not needed(MAX_SIGMA) <= epsilon:
            raise self._infeasible(epsilon, delta, num_rounds, needed)
        guess = self._guess(epsilon, delta, num_rounds, rate)
        if rate == 1.0:
            return _smallest(needed, epsilon, guess)
        sigma = _smallest(needed, epsilon, guess, stride=0.03)
        loose = sigma * (1.0 + _SLACK)
        return loose if needed(loose) <= epsilon else sigma

    def _guess(self, epsilon: float, delta: float, num_rounds: int, rate: float = 1.0) -> float:
        """A sigma that surely suffices without amplification, or near it; with a rate below 1, a starting point."""
        mu = gaussian.mu_for(epsilon, delta)
        if mu <= 0:
            return MAX_SIGMA
        if rate < 1.0:  # the central limit: mu^2 = rounds rate^2 (e^(1/sigma^2) - 1), never relied on
            return min(MAX_SIGMA, math.log1p(mu**2 / num_rounds / rate**2) ** -0.5)
        return min(MAX_SIGMA, math.sqrt(num_rounds) / mu * (1.0 + _SLACK))

    def _infeasible(self, epsilon: float, delta: float, rounds: int, needed: Callable[[float], float]) -> ConfigError:
        least = needed(MAX_SIGMA)
        most, low = 0, 1
        if math.isfinite(least):
            mu = gaussian.mu_for(epsilon, delta)
            most = int(min(rounds - 1, (mu * MAX_SIGMA) ** 2))
        advice = f"At this delta and {rounds} rounds epsilon >= {least:.4g} is feasible"
        advice += f", or at this epsilon about {most} rounds." if most >= low else ", or raise delta."
        return ConfigError(
            f"No noise multiplier up to {MAX_SIGMA:g} keeps {rounds} rounds within epsilon={epsilon!r}, "
            f"delta={delta!r} ({self.name} accountant).",
            advice,
            feasible_epsilon=least,
            feasible_rounds=most,
        )

    def _after(self, sigma: float, rate: float, count: int) -> tuple[int, _Sampled, bool]:
        """The history with ``count`` more releases: (mu^2 in units, sampled releases, infinite)."""
        mu2, infinite = self._mu2, self._infinite
        sampled = dict(self._sampled)
        if count:
            s, q = _positive(sigma), _positive(rate)
            if s is None or q is None or q > 1.0:
                infinite = True
            elif q == 1.0:
                mu2 += count * _inverse_square(s)
            else:
                sampled[s, q] = sampled.get((s, q), 0) + count
        return mu2, tuple((s, q, n) for (s, q), n in sorted(sampled.items())), infinite

    def _bound(self, mu2: int, sampled: _Sampled, infinite: bool, delta: float, enough: float = 0.0) -> float:
        if infinite:
            return math.inf
        try:
            value = self._epsilon(_root(mu2), sampled, delta, enough)
        except ArithmeticError:
            return math.inf
        return value if value >= 0.0 else math.inf  # False for NaN

    def state_dict(self) -> dict[str, Any]:
        """The history as JSON values; nothing is lost. :meth:`from_state_dict` restores it."""
        return {
            "version": STATE_VERSION,
            "accountant": self.name,
            "mu2_units": hex(self._mu2),
            "sampled": [[sigma, rate, count] for (sigma, rate), count in sorted(self._sampled.items())],
            "infinite": self._infinite,
        }

    @classmethod
    def from_state_dict(cls: type[_Self], state: dict[str, Any]) -> _Self:
        """Inverse of :meth:`state_dict`.

        Raises:
            ArtifactError: not such a state, another version or another accountant's.
        """
        made = cls()
        try:
            version, kind = state["version"], state["accountant"]
            if version != STATE_VERSION or kind != cls.name:
                raise ArtifactError(
                    f"The accountant state is of version {version!r} and kind {kind!r}; this reads version "
                    f"{STATE_VERSION} of {cls.name!r}.",
                    "Rebuild it from the ledger.",
                )
            if set(state) != {"version", "accountant", "mu2_units", "sampled", "infinite"}:
                raise ValueError("keys")
            made._mu2 = int(state["mu2_units"], 16)
            if made._mu2 < 0 or type(state["infinite"]) is not bool:
                raise ValueError("range")
            made._infinite = state["infinite"]
            for sigma, rate, count in state["sampled"]:
                if _positive(sigma) is None or _positive(rate) is None or not rate < 1 or type(count) is not int:
                    raise ValueError("sampled")
                if count < 1 or (float(sigma), float(rate)) in made._sampled:
                    raise ValueError("sampled")
                made._sampled[float(sigma), float(rate)] = count
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError("The accountant state is damaged.", "Rebuild it from the ledger.") from error
        return made


class PRVAccountant(_Composition):
    """Exact at full participation; otherwise the smallest of the privacy-loss distribution (dp-accounting), Renyi
    accounting, the exact amplification of a single release, and no amplification at all."""

    name = "prv"

    def _epsilon(self, mu: float, sampled: _Sampled, delta: float, enough: float = 0.0) -> float:
        best = self._cheap(mu, sampled, delta)
        if not sampled:
            return best
        if mu == 0.0 and len(sampled) == 1 and sampled[0][2] == 1:
            return min(best, _single_sampled(*sampled[0][:2], delta))
        for bound in (_renyi_sampled, _pld_epsilon):
            if best <= enough:
                break
            value = bound(mu, sampled, delta)
            if value >= 0.0:
                best = min(best, value)
        return best

    def _cheap(self, mu: float, sampled: _Sampled, delta: float) -> float:
        return gaussian.epsilon(_unamplified(mu, sampled) if sampled else mu, delta)


class RDPAccountant(_Composition):
    """Renyi accounting with the conversion of Canonne, Kamath and Steinke (2020), proposition 12: a few per cent above
    :class:`PRVAccountant`. At full participation the divergence of order alpha is alpha mu^2 / 2."""

    name = "rdp"

    def _epsilon(self, mu: float, sampled: _Sampled, delta: float, enough: float = 0.0) -> float:
        return _renyi_sampled(mu, sampled, delta) if sampled else _renyi_gaussian(mu, delta)


_BACKENDS: dict[str, type[_Composition]] = {"prv": PRVAccountant, "rdp": RDPAccountant}


def build_accountant(name: str) -> PRVAccountant | RDPAccountant:
    """A fresh accountant: ``"prv"`` (exact, default) or ``"rdp"``.

    Raises:
        ConfigError: unknown name.
    """
    if not isinstance(name, str) or name not in _BACKENDS:
        raise ConfigError(f"privacy.accountant={name!r} is unknown.", f"Use one of {', '.join(_BACKENDS)}.")
    return _BACKENDS[name]()  # type: ignore[return-value]


@lru_cache(maxsize=256)
def _rounds_allowed(
    kind: type[_Composition], mu2: int, others: _Sampled, sigma: float, rate: float, epsilon: float, delta: float
) -> int:
    """Most rounds at (sigma, rate < 1) that fit into the target beside the other releases; -1 if those alone do not.

    The answer was seen to fit and one round more was seen not to. Fewer rounds spend no more, so they fit too.
    """
    accountant = kind()

    def needed(count: int) -> float:
        sampled = ((sigma, rate, count),) if count else ()
        return accountant._bound(mu2, tuple(sorted((*others, *sampled))), False, delta)

    low, high, at_low, at_high = -1, 1, 0.0, needed(1)
    if not at_high <= epsilon:
        return 0 if needed(0) <= epsilon else -1
    while at_high <= epsilon:
        if high >= _MOST_ROUNDS:
            return high
        low, at_low = high, at_high
        # epsilon grows about like sqrt(rounds) at first, like rounds later
        guess = 2.0 if not at_low > 0.0 else min(64.0, max(1.1, 1.05 * (epsilon / at_low) ** 1.5))
        high = min(_MOST_ROUNDS, max(high + 1, math.ceil(high * guess)))
        at_high = needed(high)
    bisect = False
    while high - low > 1:  # by interpolation, and by halves when that does not move
        width = high - low
        share = (epsilon - at_low) / (at_high - at_low) if at_high < math.inf and at_high > at_low else 0.5
        middle = low + (width // 2 if bisect else min(width - 1, max(1, round(width * share))))
        value = needed(middle)
        if value <= epsilon:
            low, at_low = middle, value
        else:
            high, at_high = middle, value
        bisect = 2 * (high - low) > width
    return low


# --- numbers ---------------------------------------------------------------------------------------------------------


def _positive(value: object) -> float | None:
    """A positive finite float, or None."""
    if isinstance(value, (bool, str)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0.0 < number < math.inf else None


def _inverse_square(sigma: float) -> int:
    """1/sigma^2 in units, rounded up."""
    top, bottom = sigma.as_integer_ratio()
    return -(-(bottom * bottom << _UNIT_LOG2) // (top * top))


def _root(units: int) -> float:
    """sqrt(units), rounded up; inf on overflow."""
    if units == 0:
        return 0.0
    shift = max(0, units.bit_length() - 120) & ~1
    root = math.isqrt(-(-units >> shift)) + 1  # >= 2^59 when it was shifted, so its own rounding up is below 2^-59
    try:
        return math.nextafter(math.ldexp(float(root), (shift - _UNIT_LOG2) // 2), math.inf)
    except OverflowError:
        return math.inf


def _unamplified(mu: float, sampled: _Sampled) -> float:
    """Sampling never hurts: the same releases at rate 1 bound it from above."""
    units = sum(count * _inverse_square(sigma) for sigma, _, count in sampled)
    return math.hypot(mu, _root(units))


def _check_count(count: object) -> None:
    if type(count) is not int or count < 0:
        raise ContractViolation(f"The number of releases must be an integer >= 0, not {count!r}.")


def _check_delta(delta: object) -> float:
    value = _positive(delta)
    if value is None or not value < 1.0:
        raise ConfigError(f"target_delta={delta!r} must lie between 0 and 1.")
    return value


def _check_target(epsilon: object, delta: object, rounds: object, rate: object) -> tuple[float, float, float]:
    e, d, q = _positive(epsilon), _check_delta(delta), _positive(rate)
    if e is None:
        raise ConfigError(
            f"target_epsilon={epsilon!r} cannot be met.", "Use a positive finite epsilon; any one above 0 is feasible."
        )
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(f"num_rounds={rounds!r} must be an integer of at least 1.")
    if q is None or q > 1.0:
        raise ConfigError(f"sample_rate={rate!r} must be above 0 and at most 1.")
    return e, d, q


def _smallest(needed: Callable[[float], float], epsilon: float, start: float, stride: float = 1e-3) -> float:
    """Smallest sigma with needed(sigma) <= epsilon, to 1e-6 relative: the result was seen to fit, and a sigma at most
    9e-7 below it was seen not to. The search leaves ``start`` by the relative ``stride``, growing."""
    high, low, factor = start, start * (1.0 - 2 * _SLACK), 1.0 + stride
    while not needed(high) <= epsilon:
        low, high, factor = high, min(MAX_SIGMA, high * factor), factor * factor
    factor = 1.0 - stride
    while needed(low) <= epsilon:  # the start was not tight (amplification)
        high, low, factor = low, low * factor, factor * factor
        if low < 1e-12:
            return high
    if high - low <= 8e-7 * high:
        return high

    def excess(log_sigma: float) -> float:
        value = needed(math.exp(log_sigma))
        return 50.0 if value == math.inf else math.log(max(value, epsilon * 1e-20) / epsilon)

    root = math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-7, maxiter=60))
    step = 2e-7
    if root * (1.0 + step) < high and needed(root * (1.0 + step)) <= epsilon:
        high = root * (1.0 + step)
    if root * (1.0 - step) > low and not needed(root * (1.0 - step)) <= epsilon:
        low = root * (1.0 - step)
    while high - low > 8e-7 * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if needed(middle) <= epsilon else (middle, high)
    return high


# --- bounds ----------------------------------------------------------------------------------------------------------

_ORDERS = np.concatenate([1.0 + np.logspace(-6, 0, 300), np.logspace(math.log10(2.0), 9, 900)])


def _convert(orders: np.ndarray, divergence: np.ndarray, delta: float) -> float:
    """Epsilon from Renyi divergences, rounded up. Any subset of the orders is sound."""
    log_delta = math.log(delta)
    values = divergence + np.log1p(-1.0 / orders) - (log_delta + np.log(orders)) / (orders - 1.0)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return math.inf
    return max(0.0, float(finite.min()) * (1.0 + 1e-12) + 1e-12)


def _renyi_gaussian(mu: float, delta: float) -> float:
    if mu == 0.0:
        return 0.0
    with np.errstate(over="ignore"):
        best = 1.0 + math.sqrt(-2.0 * math.log(delta)) / mu  # optimal order of the plain conversion
        near = 1.0 + (best - 1.0) * np.linspace(0.5, 1.5, 201)
        orders = np.concatenate([near[near > 1.0], _ORDERS])
        return _convert(orders, 0.5 * orders * (mu * (1.0 + gaussian.MARGIN)) ** 2, delta)


def _unconverged(record: logging.LogRecord) -> bool:
    """Keeps dp-accounting from printing a line for each order that it leaves out, which is sound."""
    return not str(record.msg).startswith("_compute_log_a_frac failed to converge")


_RENYI_DOUBT = 1e-12  # absolute, of the logarithm of a moment near 1: thousands of roundings in its series


def _renyi_sampled(mu: float, sampled: _Sampled, delta: float) -> float:
    """Renyi accounting of Poisson-sampled releases, divergences by dp-accounting; inf when it fails.

    They are converted here: dp-accounting takes an order whose divergence was rounded to zero or below for a proof of
    epsilon = 0. Each step's divergence is first raised by more than its rounding can have lowered it.
    """
    try:
        from dp_accounting import dp_event
        from dp_accounting.rdp import rdp_privacy_accountant as rdp

        logging.getLogger("absl").addFilter(_unconverged)
        backend = rdp.RdpAccountant()
        for sigma, rate, count in sampled:
            backend.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), count)
        if mu > 0.0:
            backend.compose(dp_event.GaussianDpEvent(1.0 / mu))
        orders = np.array(backend._orders, np.float64)
        divergence = np.array(backend._rdp, np.float64)
        steps = sum(count for _, _, count in sampled) + 1
        raised = np.maximum(divergence, 0.0) * (1.0 + 1e-9) + steps * (_RENYI_DOUBT + 1e-14 * orders) / (orders - 1.0)
        return _padded(_convert(orders, raised, delta))
    except Exception:  # a bound that could not be computed is no bound
        return math.inf


def _padded(epsilon: float) -> float:
    """Room for the rounding of a float64 backend; inf for what is no epsilon."""
    return float(epsilon) * (1.0 + 1e-9) + 1e-12 if epsilon >= 0.0 else math.inf


def _pld_epsilon(mu: float, sampled: _Sampled, delta: float) -> float:
    """Privacy-loss distributions of dp-accounting, rounded pessimistically; inf when too large, or on failure."""
    try:
        releases = [*sampled, *([(1.0 / mu, 1.0, 1)] if mu > 0.0 else [])]
        width = sum(_composed_width(sigma, rate, count) for sigma, rate, count in releases)
        interval = _PLD_INTERVAL
        while not width / interval <= _PLD_POINTS:
            interval *= 2.0
            if interval > _PLD_COARSEST:
                return math.inf
        total = None
        for sigma, rate, count in releases:
            one = _pld(sigma, rate, interval)
            many = _composed(one, count)
            total = many if total is None else total.compose(many)
        assert total is not None
        left = delta - _fourier_doubt(total, sum(count for _, _, count in releases))
        return _padded(total.get_epsilon_for_delta(left)) if left > 0.0 else math.inf
    except Exception:  # whatever failed in there: what was not computed is not bounded
        return math.inf


@lru_cache(maxsize=32)
def _pld(sigma: float, rate: float, interval: float) -> Any:
    """The privacy-loss distribution of one release, rounded pessimistically."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval, pessimistic_estimate=True
    )


def _fourier_doubt(total: Any, count: int) -> float:
    """What rounding may have taken from delta: the composition is a power ``count`` of a Fourier transform of N points,
    each of relative error about 2^-53 log2 N, and delta a sum of up to N of its points (Cauchy-Schwarz)."""
    points = max(2, total._pmf_remove.size, total._pmf_add.size)
    return 2.0**-52 * math.log2(points) * math.sqrt(points) * (1 + count)


def _composed(one: Any, count: int) -> Any:
    """``count`` releases composed, at most _PLD_STAGE at a time: dp-accounting cuts tails at orders that fit the width
    of what it composes, so a great many narrow losses at once would get a grid far wider than their sum is."""
    total = None
    while True:
        count, left = divmod(count, _PLD_STAGE)
        if left:
            many = one.self_compose(left, _PLD_TAIL) if left > 1 else one
            total = many if total is None else total.compose(many)
        if not count:
            return total
        one = one.self_compose(_PLD_STAGE, _PLD_TAIL)


def _loss_width(sigma: float, rate: float) -> float:
    """About the width of the privacy loss of one release, cut at its 10-sigma tails."""
    largest = 0.5 / sigma**2 + 10.0 / sigma
    return 2.0 * max(0.0, largest + math.log(rate)) + 20.0 * rate / sigma


def _composed_width(sigma: float, rate: float, count: int) -> float:
    """About the width of the grid of :func:`_composed`, whose tails are cut by Chernoff's bound at orders k / width."""
    width = _loss_width(sigma, rate)
    with np.errstate(over="ignore", under="ignore"):
        x = np.linspace(-12.0 * sigma, 1.0 + 12.0 * sigma, 4001)
        loss = np.logaddexp(math.log1p(-rate) if rate < 1.0 else -math.inf, math.log(rate) + (x - 0.5) / sigma**2)
        null = np.exp(-0.5 * (x / sigma) ** 2)
        weights = (1.0 - rate) * null + rate * np.exp(-0.5 * ((x - 1.0) / sigma) ** 2)
        variance = max(_variance(loss, null), _variance(loss, weights))
    while count > 1:
        step = min(count, _PLD_STAGE)
        orders = np.arange(1, 21) / width
        width += 2.0 * float(np.min(step * variance * orders / 2.0 - math.log(_PLD_TAIL / 4.0) / orders))
        variance *= step
        count = -(-count // step)
    return width


def _variance(values: np.ndarray, weights: np.ndarray) -> float:
    weights = weights / weights.sum()
    mean = float(weights @ values)
    return float(weights @ (values - mean) ** 2)


def _single_sampled(sigma: float, rate: float, delta: float) -> float:
    """Exact epsilon of one Poisson-sampled release: delta(log(1 + rate (e^x - 1))) = rate * delta_gaussian(x)."""
    if delta >= rate:
        return 0.0
    x = gaussian.epsilon(1.0 / sigma, delta / rate * (1.0 - 1e-14))
    if x > 500.0:
        return (x + math.log(rate) + (1.0 - rate) / rate * math.exp(-x)) * (1.0 + 1e-14)
    return math.log1p(rate * math.expm1(x)) * (1.0 + 1e-14)


# --- budgets at rates below 1 ----------------------------------------------------------------------------------------


class _Proven:
    """What was computed about one budget and one set of (sigma, rate): histories that keep it, and that do not.

    Composition only ever adds: a history with no more of anything than one that fits fits too, and one with no less of
    anything than one that was not shown to fit is refused. So most questions cost no computation.
    """

    def __init__(self) -> None:
        self.fits: list[tuple[float, ...]] = []
        self.refused: list[tuple[float, ...]] = []

    def answer(self, point: tuple[float, ...]) -> bool | None:
        """Of a history (mu, -delta, counts ...), or None when it has to be computed."""
        if any(all(a <= b for a, b in zip(point, known, strict=True)) for known in self.fits):
            return True
        if any(all(a >= b for a, b in zip(point, known, strict=True)) for known in self.refused):
            return False
        return None

    def learn(self, point: tuple[float, ...], fits: bool) -> bool:
        known = self.fits if fits else self.refused
        del known[:-63]
        known.append(point)
        return fits


@lru_cache(maxsize=64)
def _proven(epsilon: float, kinds: tuple[tuple[float, float], ...]) -> _Proven:
    return _Proven()


def sampled_within(mu: float, sampled: _Sampled, epsilon: float, delta: float) -> bool:
    """Whether a history with releases at rates below 1 is (epsilon, delta)-DP. True only if it was computed to be.

    The bound is :class:`PRVAccountant`'s. The first question about some (sigma, rate) costs seconds or less; later ones
    that lie between what was answered cost microseconds, and looking ahead makes those most of them.

    Args:
        mu: of the releases at rate 1, rounded up.
        sampled: (sigma, rate, count) of the others, sorted, each (sigma, rate) once.
        epsilon, delta: the budget.
    """
    if not (0.0 <= mu < math.inf and 0.0 < delta < 1.0):  # also NaN
        return False
    kinds = tuple((sigma, rate) for sigma, rate, _ in sampled)
    counts = tuple(count for _, _, count in sampled)
    proven = _proven(epsilon, kinds)

    def computed(counts: tuple[int, ...]) -> bool:
        history = tuple((*kind, count) for kind, count in zip(kinds, counts, strict=True))
        point = (mu, -delta, *counts)
        try:
            fits = 0.0 <= PRVAccountant()._epsilon(mu, history, delta, epsilon) <= epsilon  # False for NaN
        except Exception:  # what was not shown to fit does not fit
            fits = False
        return proven.learn(point, fits)

    known = proven.answer((mu, -delta, *counts))
    if known is not None:
        return known
    if not computed(counts):
        return False
    step = counts
    while any(step):  # look ahead once, as far as nothing is known to be refused
        ahead = tuple(count + more for count, more in zip(counts, step, strict=True))
        known = proven.answer((mu, -delta, *ahead))
        if known is None:
            computed(ahead)
        if known is not False:
            break
        step = tuple(more // 2 for more in step)
    return True
