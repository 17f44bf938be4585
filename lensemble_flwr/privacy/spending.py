"""What a release costs, what a budget allows, and the exact sum of many charges.

Every release is a Gaussian mechanism at full participation, so a participant's whole history is one number per view:
mu^2, the sum of 1/sigma_t^2. Sums are exact: a float is a whole multiple of 2^-1074, so
they are kept as integers of that unit, and a charge is rounded up to it once. They never under-count, do not depend on
the order of the rounds, and n rounds in one step equal n steps of one round. Floats come in only when a sum is turned
into an epsilon or a delta, and are then rounded to the unfavourable side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import gaussian

VIEWS = ("local", "central")
SCOPES = ("lifetime", "federation")
GUARANTEES = ("local", "central", "none")

_UNIT = 1 << 1074
"""Units in 1.0: the smallest positive float64 is one unit."""


@dataclass(frozen=True)
class Charge:
    """The price of one release.

    Args:
        own_multiplier: std of the participant's own noise over the clip bound C, s/C. Zero means that nothing is
            hidden: the charge is infinite. A value that is not finite cannot be trusted and is taken as zero.
        min_survivors: m, the fewest updates that a revealed sum may hold, at least 1.
        colluders: k, how many of those may add no noise or pool what they know with the observer.
        delta_extra: what this release's implementation (rounding, sampler, clamping) adds to delta, at every epsilon
            of every budget it is held against. Above 1 or not a number is taken as 1: no guarantee.
        sample_rate: 1.0. Amplification by subsampling needs a coin that nobody ever sees.
        guarantee: which view the noise was sized for, ``local``, ``central`` or ``none``; recorded, not priced.
        per_person: p, how many participants may hold data of one person, at least 1. With p > 1 the ledger counts for
            a person: each of the p participants charges as if all of them had released.

    Raises:
        ConfigError: a value of the wrong type or range.
    """

    own_multiplier: float
    min_survivors: int
    colluders: int
    delta_extra: float = 0.0
    sample_rate: float = 1.0
    guarantee: str = "local"
    per_person: int = 1

    def __post_init__(self) -> None:
        own = _number("own_multiplier", self.own_multiplier)
        extra = _number("delta_extra", self.delta_extra)
        object.__setattr__(self, "own_multiplier", own if math.isfinite(own) else 0.0)
        object.__setattr__(self, "delta_extra", extra if extra <= 1.0 else 1.0)
        object.__setattr__(self, "sample_rate", _number("sample_rate", self.sample_rate))
        for name, least in (("min_survivors", 1), ("colluders", 0), ("per_person", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"Charge: {name}={value!r} must be a whole number of at least {least}.")
        if self.sample_rate != 1.0:
            raise ConfigError(
                f"Charge: sample_rate={self.sample_rate!r} is not supported: a release is charged in full, because who "
                "takes part in a round is seen by others and so amplifies nothing.",
                "Use sample_rate=1.0.",
            )
        if self.guarantee not in GUARANTEES:
            raise ConfigError(f"Charge: guarantee={self.guarantee!r} must be one of {', '.join(GUARANTEES)}.")

    @cached_property
    def units(self) -> Spending:
        """The price of one such release."""
        if self.own_multiplier == 0.0:
            return Spending(0, 0, _exact(self.delta_extra), endless=True)
        numerator, denominator = self.own_multiplier.as_integer_ratio()
        noisy = max(1, self.min_survivors - self.colluders)
        p = self.per_person
        square = _UNIT * denominator**2 * p
        local, central = (-(-square * min(p, n) // (numerator**2 * n)) for n in (1, noisy))
        return Spending(local, central, _exact(self.delta_extra))

    def mu2(self, view: str) -> float:
        """mu^2 of one such release against the observers of ``view``, rounded up; infinite without noise.

        Local: p (C/s)^2, own noise alone. Central: (p C/s)^2 / (m - k), the noise of m - k participants in the sum, but
        never above local, of which the sum is a function; with nobody else to rely on (m - k < 1) it equals local.
        """
        return self.units.mu2(view)

    def record(self) -> dict[str, Any]:
        """The charge as plain JSON values (no ``sample_rate``, as there is only one; no ``per_person`` of 1)."""
        record: dict[str, Any] = {
            "own_multiplier": self.own_multiplier,
            "min_survivors": self.min_survivors,
            "colluders": self.colluders,
            "delta_extra": self.delta_extra,
            "guarantee": self.guarantee,
        }
        return record if self.per_person == 1 else {**record, "per_person": self.per_person}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Charge:
        """The charge of :meth:`record`. Raises ConfigError, KeyError or TypeError when it is none."""
        return _from_items(tuple(record.items()))


@lru_cache(maxsize=4096)
def _from_items(items: tuple[tuple[str, Any], ...]) -> Charge:
    return Charge(**dict(items))  # rounds of one federation share their charge


@dataclass(frozen=True)
class Budget:
    """The most that may be spent: (epsilon, delta) in one view, over a whole life or within one federation.

    An infinite epsilon means that this view is not protected: such a budget is never passed.

    Raises:
        ConfigError: a value of the wrong type or range.
    """

    view: str
    epsilon: float
    delta: float
    scope: str = "lifetime"

    def __post_init__(self) -> None:
        _known_view(self.view)
        object.__setattr__(self, "epsilon", _number("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _number("delta", self.delta))
        if math.isnan(self.epsilon):
            raise ConfigError("Budget: epsilon is not a number.")
        if not 0.0 < self.delta < 1.0:
            raise ConfigError(f"Budget: delta={self.delta!r} must lie between 0 and 1.")
        if self.scope not in SCOPES:
            raise ConfigError(f"Budget: scope={self.scope!r} must be one of {', '.join(SCOPES)}.")


class Spending(NamedTuple):
    """The exact sum of charges, in units of 2^-1074. ``endless``: a charge without noise was among them."""

    local: int = 0
    central: int = 0
    delta: int = 0
    endless: bool = False

    def plus(self, charge: Charge, rounds: int = 1) -> Spending:
        """The sum after ``rounds`` more releases at ``charge``."""
        local, central, delta, endless = charge.units
        return Spending(
            self.local + rounds * local,
            self.central + rounds * central,
            self.delta + rounds * delta,
            self.endless or endless,
        )

    def joined(self, other: Spending) -> Spending:
        """Both sums together."""
        return Spending(
            self.local + other.local,
            self.central + other.central,
            self.delta + other.delta,
            self.endless or other.endless,
        )

    def record(self) -> list[Any]:
        """The sums as plain JSON values."""
        return [f"{self.local:x}", f"{self.central:x}", f"{self.delta:x}", self.endless]

    @classmethod
    def from_record(cls, record: list[Any]) -> Spending:
        """The sums of :meth:`record`. Raises TypeError or ValueError when they are none."""
        local, central, delta, endless = record
        return cls(int(local, 16), int(central, 16), int(delta, 16), bool(endless))

    def mu2(self, view: str) -> float:
        """Composed mu^2, rounded up."""
        _known_view(view)
        return math.inf if self.endless else _float_up(self.central if view == "central" else self.local)

    @property
    def delta_extra(self) -> float:
        """Sum of the releases' ``delta_extra``, rounded up."""
        return _float_up(self.delta)

    def _mu(self, view: str) -> float:
        return math.sqrt(self.mu2(view))  # its own rounding is far below the margin that gaussian adds

    def within(self, budget: Budget) -> bool:
        """Whether this much spending keeps the budget. True only if it was computed to be so; any failure is False."""
        if budget.epsilon == math.inf:
            return True
        try:
            mu = self._mu(budget.view)
            if math.isinf(mu):
                return False
            reached = 0.0 if mu == 0.0 else float(gaussian.delta(mu, budget.epsilon))
            return _exact(reached) + self.delta <= _exact(budget.delta)
        except Exception:  # overflow, NaN, a defect: what was not shown to fit does not fit
            return False

    def epsilon(self, view: str, delta: float) -> float:
        """Smallest epsilon (never too small) at which the composed releases are (epsilon, delta)-DP; inf if none."""
        mu = self._mu(view)
        try:
            left = _float_down(_exact(delta) - self.delta)
            if left <= 0.0 or math.isinf(mu):
                return math.inf
            value = 0.0 if mu == 0.0 else float(gaussian.epsilon(mu, left))
        except Exception:  # as in within: what was not computed is not bounded
            return math.inf
        return value if value >= 0.0 else math.inf


def _known_view(view: str) -> None:
    if view not in VIEWS:
        raise ConfigError(f"view={view!r} must be one of {', '.join(VIEWS)}.")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} must be a number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if number < 0.0:
        raise ConfigError(f"{name}={value!r} must not be negative.")
    return number


def _exact(value: float) -> int:
    """A finite float in units. Raises OverflowError or ValueError for inf and NaN."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_UNIT // denominator)


def _float_up(units: int) -> float:
    """Smallest float that is at least ``units``."""
    try:
        value = units / _UNIT
    except OverflowError:
        return math.inf
    return value if _exact(value) >= units else math.nextafter(value, math.inf)


def _float_down(units: int) -> float:
    """Largest float that is at most ``units``."""
    value = units / _UNIT
    return value if _exact(value) <= units else math.nextafter(value, -math.inf)
