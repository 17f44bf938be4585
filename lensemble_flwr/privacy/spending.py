"""What a release costs, what a budget allows, and the exact sum of many charges.

A release is a Gaussian mechanism at full participation, so a participant's whole history is one number per view:
mu^2, the sum of 1/sigma_t^2. A discrete Gaussian has one too, but only its concentrated privacy is that of a Gaussian:
once there was one, the whole history is converted so (:mod:`.concentrated`), which holds for both kinds.

Sums are exact: a float is a whole multiple of 2^-1074, so they are kept as integers of that unit, and a charge is
rounded up to it once. They never under-count, do not depend on the order of the rounds, and n rounds in one step equal
n steps of one round. Floats come in only when a sum is turned into an epsilon or a delta, and are then rounded to the
unfavourable side.

Releases under a secret coin (:mod:`.participation`) have no such number. They are kept beside the sums as what they
were and how often, and the accountant composes them with the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import concentrated, gaussian
from lensemble_flwr.privacy.accountant import PRVAccountant, RDPAccountant, sampled_within
from lensemble_flwr.privacy.participation import ALWAYS, SecretParticipation

VIEWS = ("local", "central")
SCOPES = ("lifetime", "federation")
GUARANTEES = ("local", "central", "none")
MECHANISMS = ("gaussian", "discrete_gaussian")

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
        participation: the secret coin under which the update was in it; without one the release is charged in full.
        guarantee: which view the noise was sized for, ``local``, ``central`` or ``none``; recorded, not priced.
        mechanism: ``gaussian`` or ``discrete_gaussian``; of the latter ``own_multiplier`` is 1/mu of the local view.
        gap: what mu of the central view is raised by; only for a discrete Gaussian.
        per_person: p, how many participants may hold data of one person, at least 1. With p > 1 the ledger counts for
            a person: each of the p participants charges as if all of them had released.

    Raises:
        ConfigError: a value of the wrong type or range.
    """

    own_multiplier: float
    min_survivors: int
    colluders: int
    delta_extra: float = 0.0
    participation: SecretParticipation = ALWAYS
    guarantee: str = "local"
    mechanism: str = "gaussian"
    gap: float = 0.0
    per_person: int = 1

    def __post_init__(self) -> None:
        own = _number("own_multiplier", self.own_multiplier)
        extra = _number("delta_extra", self.delta_extra)
        object.__setattr__(self, "own_multiplier", own if math.isfinite(own) else 0.0)
        object.__setattr__(self, "delta_extra", extra if extra <= 1.0 else 1.0)
        for name, least in (("min_survivors", 1), ("colluders", 0), ("per_person", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"Charge: {name}={value!r} must be a whole number of at least {least}.")
        if type(self.participation) is not SecretParticipation:
            raise ConfigError(
                f"Charge: participation={self.participation!r} is no secret coin: a release is charged in full, "
                "because who takes part in a round is seen by others and so amplifies nothing.",
                "Leave it out.",
            )
        if self.guarantee not in GUARANTEES:
            raise ConfigError(f"Charge: guarantee={self.guarantee!r} must be one of {', '.join(GUARANTEES)}.")
        if self.mechanism not in MECHANISMS:
            raise ConfigError(f"Charge: mechanism={self.mechanism!r} must be one of {', '.join(MECHANISMS)}.")
        gap = _number("gap", self.gap)
        if not (gap == 0.0 or (self.mechanism != "gaussian" and math.isfinite(gap))):
            raise ConfigError(f"Charge: gap={self.gap!r} must be finite, and 0 unless the noise is discrete.")
        object.__setattr__(self, "gap", gap)
        if self.per_person > 1 and not (self.mechanism == "gaussian" and self.participation.always):
            raise ConfigError(
                "Charge: a person at several participants needs a continuous Gaussian and no coin.",
                "Use mechanism=gaussian and sample_rate=1.",
            )
        if self.mechanism != "gaussian" and not self.participation.always:
            raise ConfigError(
                "Charge: a discrete Gaussian under a secret coin is not accounted for.", "Use mechanism=gaussian."
            )

    @cached_property
    def units(self) -> Spending:
        """The price of one such release."""
        if self.own_multiplier == 0.0:
            return Spending(0, 0, _exact(self.delta_extra), endless=True)
        noisy = max(1, self.min_survivors - self.colluders)
        if not self.participation.always:
            kind = (self.own_multiplier, noisy, self.participation.rate)
            return Spending(0, 0, _exact(self.delta_extra), sampled=((kind, 1),))
        numerator, denominator = self.own_multiplier.as_integer_ratio()
        p = self.per_person
        square = _UNIT * denominator**2 * p
        local, central = (-(-square * min(p, n) // (numerator**2 * n)) for n in (1, noisy))
        if self.gap and noisy > 1:
            mu = math.sqrt(_float_up(central)) * (1.0 + 2.0**-50) + self.gap
            raised = math.nextafter(mu * mu, math.inf)
            if raised == math.inf:
                return Spending(0, 0, _exact(self.delta_extra), endless=True)
            central = _exact(raised)
        return Spending(local, central, _exact(self.delta_extra), concentrated=self.mechanism != "gaussian")

    def mu2(self, view: str) -> float:
        """mu^2 of one such release against the observers of ``view``, rounded up; infinite without noise. A secret coin
        only makes it cheaper than this.

        Local: p (C/s)^2, own noise alone. Central: (p C/s)^2 / (m - k), the noise of m - k participants in the sum, but
        never above local, of which the sum is a function; with nobody else to rely on (m - k < 1) it equals local.
        """
        return self.units.mu2(view)

    def record(self) -> dict[str, Any]:
        """The charge as plain JSON values. ``mechanism`` and ``gap`` stand there only for a discrete Gaussian,
        ``sample_rate`` only below 1, ``per_person`` only above 1: an older release reads what it understands and
        refuses the rest."""
        record: dict[str, Any] = {
            "own_multiplier": self.own_multiplier,
            "min_survivors": self.min_survivors,
            "colluders": self.colluders,
            "delta_extra": self.delta_extra,
            "guarantee": self.guarantee,
        }
        if self.mechanism != "gaussian":
            record |= {"mechanism": self.mechanism, "gap": self.gap}
        if self.per_person > 1:
            record["per_person"] = self.per_person
        return record if self.participation.always else {**record, "sample_rate": self.participation.rate}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Charge:
        """The charge of :meth:`record`. Raises ConfigError, KeyError or TypeError when it is none."""
        return _from_items(tuple(record.items()))


@lru_cache(maxsize=4096)
def _from_items(items: tuple[tuple[str, Any], ...]) -> Charge:
    values = dict(items)
    if "participation" in values:
        raise TypeError("participation")
    if "sample_rate" in values:
        values["participation"] = SecretParticipation(values.pop("sample_rate"))
    return Charge(**values)  # rounds of one federation share their charge


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


Kind = tuple[float, int, float]
"""What a release under a secret coin was: (own_multiplier, noisy participants in a sum, rate)."""


class Spending(NamedTuple):
    """The exact sum of charges, in units of 2^-1074. ``endless``: a charge without noise was among them;
    ``concentrated``: a discrete Gaussian was. ``sampled``: how many releases of each kind were made under a secret
    coin, in order; they are not in the sums of mu^2."""

    local: int = 0
    central: int = 0
    delta: int = 0
    endless: bool = False
    concentrated: bool = False
    sampled: tuple[tuple[Kind, int], ...] = ()

    def plus(self, charge: Charge, rounds: int = 1) -> Spending:
        """The sum after ``rounds`` more releases at ``charge``."""
        local, central, delta, endless, concentrated, sampled = charge.units
        return Spending(
            self.local + rounds * local,
            self.central + rounds * central,
            self.delta + rounds * delta,
            self.endless or endless,
            self.concentrated or concentrated,
            self.sampled if not sampled else _merged(self.sampled, sampled, rounds),
        )

    def joined(self, other: Spending) -> Spending:
        """Both sums together."""
        return Spending(
            self.local + other.local,
            self.central + other.central,
            self.delta + other.delta,
            self.endless or other.endless,
            self.concentrated or other.concentrated,
            self.sampled if not other.sampled else _merged(self.sampled, other.sampled),
        )

    def record(self) -> list[Any]:
        """The sums as plain JSON values: four, then True if ``concentrated``, then ``sampled`` if there is any."""
        sums = [f"{self.local:x}", f"{self.central:x}", f"{self.delta:x}", self.endless]
        if self.concentrated:
            sums.append(True)
        return [*sums, [[*kind, count] for kind, count in self.sampled]] if self.sampled else sums

    @classmethod
    def from_record(cls, record: list[Any]) -> Spending:
        """The sums of :meth:`record`. Raises TypeError or ValueError when they are none."""
        local, central, delta, endless, *rest = record
        concentrated = rest[:1] == [True]
        made = cls(
            int(local, 16), int(central, 16), int(delta, 16), bool(endless), concentrated, _kinds(*rest[concentrated:])
        )
        if made.record() != record:
            raise ValueError(f"{record!r} is no spending")
        return made

    def mu2(self, view: str) -> float:
        """Composed mu^2, rounded up. Releases under a secret coin are counted as if there had been none."""
        _known_view(view)
        if self.endless:
            return math.inf
        units = self.central if view == "central" else self.local
        for (own, noisy, _), count in self.sampled:
            numerator, denominator = own.as_integer_ratio()
            honest = noisy if view == "central" else 1
            units += count * -(-_UNIT * denominator**2 // (numerator**2 * honest))
        return _float_up(units)

    @property
    def delta_extra(self) -> float:
        """Sum of the releases' ``delta_extra``, rounded up."""
        return _float_up(self.delta)

    @property
    def _theory(self) -> Any:
        return concentrated if self.concentrated else gaussian

    def _mu(self, view: str) -> float:
        return math.sqrt(self.mu2(view))  # its own rounding is far below the margin that gaussian adds

    def _coins(self, view: str) -> tuple[float, tuple[tuple[float, float, int], ...]]:
        """What an accountant composes: mu of the releases without a coin, and (sigma, rate, count) of the others."""
        counts: dict[tuple[float, float], int] = {}
        for (own, noisy, rate), count in self.sampled:
            sigma = own * math.sqrt(noisy if view == "central" else 1) * (1.0 - gaussian.MARGIN)
            counts[sigma, rate] = counts.get((sigma, rate), 0) + count
        mu = self._replace(sampled=())._mu(view) * (1.0 + gaussian.MARGIN)
        return mu, tuple((*kind, count) for kind, count in sorted(counts.items()))

    def within(self, budget: Budget) -> bool:
        """Whether this much spending keeps the budget. True only if it was computed to be so; any failure is False."""
        if budget.epsilon == math.inf:
            return True
        try:
            mu = self._mu(budget.view)
            if not math.isinf(mu):
                reached = 0.0 if mu == 0.0 else float(self._theory.delta(mu, budget.epsilon))
                if _exact(reached) + self.delta <= _exact(budget.delta):
                    return True
            left = _float_down(_exact(budget.delta) - self.delta)
            if not self.sampled or self.endless or left <= 0.0:
                return False
            if self.concentrated:
                return _mixed_epsilon(*self._coins(budget.view), left) <= budget.epsilon
            return sampled_within(*self._coins(budget.view), budget.epsilon, left)
        except Exception:  # overflow, NaN, a defect: what was not shown to fit does not fit
            return False

    def epsilon(self, view: str, delta: float) -> float:
        """Smallest epsilon (never too small) at which the composed releases are (epsilon, delta)-DP; inf if none."""
        mu = self._mu(view)
        try:
            left = _float_down(_exact(delta) - self.delta)
            if left <= 0.0 or self.endless:
                return math.inf
            value = 0.0 if mu == 0.0 else float(self._theory.epsilon(mu, left))
            if self.sampled:
                bound = _mixed_epsilon if self.concentrated else _sampled_epsilon
                value = min(value, bound(*self._coins(view), left))
        except Exception:  # as in within: what was not computed is not bounded
            return math.inf
        return value if value >= 0.0 else math.inf


@lru_cache(maxsize=256)  # up to seconds of work, asked again for every line that is printed
def _sampled_epsilon(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float) -> float:
    value = PRVAccountant()._epsilon(mu, sampled, delta)
    return value if value >= 0.0 else math.inf


@lru_cache(maxsize=256)
def _mixed_epsilon(mu: float, sampled: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Coins beside discrete Gaussians: both have Renyi divergences of every order, and these add up."""
    value = RDPAccountant()._epsilon(mu, sampled, delta)
    return value if value >= 0.0 else math.inf


def _merged(
    one: tuple[tuple[Kind, int], ...], other: tuple[tuple[Kind, int], ...], rounds: int = 1
) -> tuple[tuple[Kind, int], ...]:
    """Counts of ``one`` and ``rounds`` times those of ``other``."""
    counts = dict(one)
    for kind, count in other:
        counts[kind] = counts.get(kind, 0) + rounds * count
    return tuple(sorted(counts.items()))


def _kinds(rows: list[list[Any]] | None = None) -> tuple[tuple[Kind, int], ...]:
    """The sampled part of a record. Raises TypeError or ValueError when it is none."""
    kinds = []
    for own, noisy, rate, count in rows or ():
        charge = Charge(own, noisy, 0, participation=SecretParticipation(rate))  # checks types and ranges
        if charge.own_multiplier == 0.0 or charge.participation.always or type(count) is not int or count < 1:
            raise ValueError(f"{[own, noisy, rate, count]!r} was no release under a secret coin")
        kinds.append(((charge.own_multiplier, noisy, charge.participation.rate), count))
    if sorted(dict(kinds).items()) != kinds:
        raise ValueError("the releases under a secret coin are not in order")
    return tuple(kinds)


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
