"""What may be said about the privacy of a run, to whom, and on which assumptions.

:func:`claims` is the only place that turns a configuration into statements; the command line, the manifest, the report
and the README print its rows and nothing else. Theorems 1 and 2 are those of docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import concentrated, discrete_bounds
from lensemble_flwr.privacy.accountant import build_accountant
from lensemble_flwr.privacy.bounds import MIN_RING_STD, DeltaTerms, central_terms, local_terms
from lensemble_flwr.privacy.mechanism import own_noise_std
from lensemble_flwr.privacy.printed import printed
from lensemble_flwr.privacy.spending import MECHANISMS

OBSERVERS = ("model_reader", "peers", "coordinator", "anyone")
UNIT = "all rounds of one participant"
PERSON = "all rounds of one person, whose data at most {per_person} participants hold"
NEIGHBOURS = "zero-out"
_GROUP = "the observer is none of the participants that hold the person's data; at most {per_person} do, ever"
NEGLIGIBLE = 0.01
"""Implementation terms above this share of delta are not added but refused: the claim is then infinite."""

SIMULATED = "simulated, not claimed"

_WHO = {
    "model_reader": "reads the released models",
    "peers": "takes part and pools its view with up to k - 1 others",
    "coordinator": "runs the rounds and sees every message",
    "anyone": "sees one participant's update without its mask",
}
_HONEST_NOISE = "in every sum at least m - k = {honest} participants added their noise; this cannot be verified"
_MASKS = "masks hide everything but the sum (computational: AES-256, X25519, HKDF-SHA-256)"
_PINNED = "identities are pinned and the consistency stage compared what everybody saw"
_CSPRNG = "noise from the operating system's generator, AES-256 keystream, never disclosed"
_ROSTER = "roster, participation and dropouts are public and not protected"
_COIN = (
    "each participant's secret coin of rate {rate:g} decides whether its update is in its release; nobody sees it, nor "
    "the machine's memory, power or timing that could tell it"
)


@dataclass(frozen=True)
class ClaimInputs:
    """All that the claims of a run depend on.

    Args:
        guarantee: ``"local"`` or ``"central"``: which view the noise is sized for.
        noise_multiplier: sigma, > 0 with privacy on.
        clip_norm: C.
        rounds: releases that are composed: planned, or charged so far.
        delta: target of the Gaussian part.
        n: roster.
        min_survivors: m, the fewest updates a revealed sum may hold.
        colluders: k, how many of those pool their views with the observer or add no noise.
        dimension: d, federated coordinates.
        ring_bits, scale_log2, qmax: the ring.
        secagg_enabled: whether masks run.
        identities_pinned: whether each participant knows the others' signing keys from elsewhere.
        consistency_stage: whether the participants compare rosters and survivors before they reveal anything.
        entropy: ``"csprng"`` or ``"replay"``.
        simulation: all participants on one machine.
        privacy_enabled: whether updates are clipped and noised.
        sample_rate: 1, or the rate of a secret coin of each participant.
        accountant: ``"prv"`` or ``"rdp"``.
        two_party: the two-participant mode that both agreed to.
        mechanism: ``"gaussian"`` or ``"discrete_gaussian"``.
        per_person: p, how many participants may hold data of one person. With p > 1 the unit is a person.

    Raises:
        ConfigError: a value out of range, or a central guarantee that these numbers cannot give.
    """

    guarantee: str
    noise_multiplier: float
    clip_norm: float
    rounds: int
    delta: float
    n: int
    min_survivors: int
    colluders: int
    dimension: int
    ring_bits: int
    scale_log2: int
    qmax: int
    secagg_enabled: bool
    identities_pinned: bool
    consistency_stage: bool
    entropy: str
    simulation: bool
    privacy_enabled: bool
    sample_rate: float = 1.0
    accountant: str = "prv"
    two_party: bool = False
    mechanism: str = "gaussian"
    per_person: int = 1

    @property
    def unit(self) -> str:
        """What one row protects."""
        return UNIT if self.per_person == 1 else PERSON.format(per_person=self.per_person)

    def __post_init__(self) -> None:
        leasts = {"rounds": 0, "n": 1, "min_survivors": 1, "colluders": 0, "dimension": 1, "per_person": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} must be an integer of at least {least}.")
        if self.min_survivors > self.n:
            raise ConfigError(f"min_survivors={self.min_survivors} is more than the roster of {self.n}.")
        if self.entropy not in ("csprng", "replay"):
            raise ConfigError(f"privacy.entropy={self.entropy!r} is unknown.", "Use csprng or replay.")
        if not 0.0 < self.delta < 1.0:
            raise ConfigError(f"delta={self.delta!r} must lie between 0 and 1.")
        if not 0.0 < self.sample_rate <= 1.0:
            raise ConfigError(f"sample_rate={self.sample_rate!r} must be above 0 and at most 1.")
        build_accountant(self.accountant)
        if self.mechanism not in MECHANISMS:
            raise ConfigError(
                f"privacy.mechanism={self.mechanism!r} is unknown.", f"Use one of {', '.join(MECHANISMS)}."
            )
        if self.per_person > 1 and (self.mechanism != "gaussian" or self.sample_rate < 1.0):
            raise ConfigError(
                f"per_person={self.per_person} is accounted for only with the continuous Gaussian at sample_rate=1."
            )
        if self.privacy_enabled:
            _own_std(self)
            if self.guarantee == "central" and (self.two_party or self.n < 3):
                raise ConfigError(
                    "Two participants can only have a local guarantee: each can subtract itself from the sum.",
                    "Use privacy.guarantee=local.",
                )


@dataclass(frozen=True)
class Claim:
    """One row: what holds against one observer.

    ``holds`` is whether the row may be claimed for this run, and ``why_not`` says what is missing (or, in a row that
    holds, why it is only the local guarantee). ``epsilon`` is composed over all rounds, at ``delta``, which includes
    the implementation terms; they are infinite and 1 when nothing is guaranteed. ``epsilon_local`` and
    ``epsilon_central`` give both views of the run whichever of them the row claims; ``epsilon_central`` is infinite if
    this observer cannot be held to that view.
    """

    observer: str
    guarantee: str
    unit: str
    neighbours: str
    epsilon: float
    delta: float
    epsilon_per_round: float
    epsilon_local: float
    epsilon_central: float
    assumptions: tuple[str, ...]
    theorem: str
    holds: bool
    why_not: str


@dataclass(frozen=True)
class _View:
    """One of the two views: its epsilons at delta, or why it has none."""

    epsilon: float
    per_round: float
    delta: float
    missing: str = ""
    mu: float = math.inf
    """Of one round: sensitivity over noise, with a discrete Gaussian's gap."""


_NOTHING = _View(math.inf, math.inf, 1.0)


def claims(inputs: ClaimInputs) -> list[Claim]:
    """One row per observer, in the order of :data:`OBSERVERS`."""
    if not isinstance(inputs, ClaimInputs):
        raise ConfigError(f"claims needs ClaimInputs, not {type(inputs).__name__}.")
    off = _off(inputs)
    if off:
        return [_nothing(observer, off, inputs.unit) for observer in OBSERVERS]
    std = _own_std(inputs)
    if inputs.mechanism == "discrete_gaussian":
        local, central = _discrete_views(inputs, std)
    else:
        local, central = _local_view(inputs, std), _central_view(inputs, std)
    return [_row(observer, inputs, local, central) for observer in OBSERVERS]


def claim_grade(rows: Iterable[Claim], wanted: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether every observer in ``wanted`` has a row that holds, and the reasons if not.

    Raises:
        ConfigError: an unknown observer.
    """
    by_observer = {row.observer: row for row in rows}
    reasons = []
    for observer in wanted:
        if observer not in OBSERVERS:
            raise ConfigError(f"privacy.claim: {observer!r} is unknown.", f"Use {', '.join(OBSERVERS)}.")
        row = by_observer.get(observer)
        if row is None or not row.holds:
            reasons.append(f"{observer}: {row.why_not if row else 'no such row'}")
    if not wanted:
        reasons.append("no claim was asked for")
    return not reasons, reasons


def claims_table(rows: Sequence[Claim]) -> str:
    """The rows as plain text: a table, then assumptions and reasons."""
    head = ("observer", "guarantee", "epsilon", "delta", "per round", "local", "central", "holds")
    cells = [head]
    for r in rows:
        numbers = (_eps(r.epsilon), f"{r.delta:.3g}", _eps(r.epsilon_per_round), _eps(r.epsilon_local))
        cells.append((r.observer, r.guarantee, *numbers, _eps(r.epsilon_central), "yes" if r.holds else "no"))
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    unit = rows[0].unit if rows else UNIT
    whose = "one participant's" if unit == UNIT else "all those participants'"
    lines += ["", f"unit: {unit}; neighbours: {NEIGHBOURS} ({whose} clipped updates become zero)"]
    for r in rows:
        lines.append(f"{r.observer}: {_WHO[r.observer]}")
        if r.why_not:
            lines.append(f"  {'note' if r.holds else 'not claimed'}: {r.why_not}")
        if r.theorem:
            lines.append(f"  {r.theorem}")
        lines += [f"  assumes: {a}" for a in r.assumptions]
    return "\n".join(lines)


def _eps(value: float) -> str:
    return "inf" if value == math.inf else f"{math.ceil(value * 1e3) / 1e3:.3f}" if value < 1e6 else f"{value:.4g}"


def _off(inputs: ClaimInputs) -> str:
    if not inputs.privacy_enabled:
        return "privacy is off"
    if inputs.entropy != "csprng":
        return "the noise is replayed from a seed, so whoever knows the seed can subtract it"
    return ""


def _own_std(inputs: ClaimInputs) -> float:
    return own_noise_std(
        inputs.guarantee,
        inputs.noise_multiplier,
        inputs.clip_norm,
        inputs.min_survivors,
        inputs.colluders,
        inputs.per_person,
    )


def _nothing(observer: str, why: str, unit: str) -> Claim:
    inf = math.inf
    return Claim(observer, "none", unit, NEIGHBOURS, inf, 1.0, inf, inf, inf, (), "", False, why)


def _view(inputs: ClaimInputs, sigma: float, terms: DeltaTerms) -> _View:
    extra = max(1, inputs.rounds) * inputs.per_person * terms.total
    if not extra <= NEGLIGIBLE * inputs.delta:
        return _View(math.inf, math.inf, 1.0, f"clamping, rounding and sampling would add {extra:.2g} to delta")
    both = []
    for count in (inputs.rounds, 1):
        if inputs.mechanism == "discrete_gaussian":
            both.append(concentrated.epsilon(math.sqrt(count) / sigma, inputs.delta))
            continue
        accountant = build_accountant(inputs.accountant)
        accountant.step(noise_multiplier=sigma, sample_rate=inputs.sample_rate, count=count)
        both.append(accountant.spent(target_delta=inputs.delta))
    return _View(both[0], both[1], math.nextafter(inputs.delta + extra, 1.0), mu=1.0 / sigma)


def _discrete_views(inputs: ClaimInputs, std: float) -> tuple[_View, _View]:
    """Local and central view of a discrete Gaussian, theorems 3 and 4."""
    ring_std, honest = math.ldexp(std, inputs.scale_log2), inputs.min_survivors - inputs.colluders
    try:
        discrete_bounds.check_std(inputs.clip_norm, std, ring_std)
    except ConfigError as error:
        nothing = _View(math.inf, math.inf, 1.0, str(error))
        return nothing, nothing
    own = discrete_bounds.own_multiplier(inputs.clip_norm, std, ring_std)
    terms = discrete_bounds.local_terms(inputs.clip_norm, std, inputs.dimension, inputs.scale_log2)
    local = _view(inputs, own, terms)
    missing = _no_sum(inputs)
    gap = discrete_bounds.sum_gap(ring_std, honest, inputs.dimension)
    if not missing and gap == math.inf:
        missing = f"the noise of {ring_std:.3g} ring steps is too coarse for sums of it"
    if missing:
        return local, _View(math.inf, math.inf, 1.0, missing)
    terms = discrete_bounds.central_terms(
        inputs.clip_norm, std, inputs.dimension, inputs.ring_bits, inputs.scale_log2, inputs.qmax, honest
    )
    mu = 1.0 / (own * math.sqrt(honest)) * (1.0 + 2.0**-50) + gap
    return local, _view(inputs, 1.0 / mu * (1.0 - 2.0**-50), terms)


def _local_view(inputs: ClaimInputs, std: float) -> _View:
    sigma = std / (inputs.clip_norm * math.sqrt(inputs.per_person))
    return _view(inputs, sigma, local_terms(inputs.clip_norm, std, inputs.dimension))


def _central_view(inputs: ClaimInputs, std: float) -> _View:
    honest = inputs.min_survivors - inputs.colluders
    missing = _no_sum(inputs)
    if not missing and honest < inputs.per_person:
        missing = f"a person may be all that min_survivors - colluders = {honest} participants have"
    if not missing and math.ldexp(std, inputs.scale_log2) < MIN_RING_STD:
        missing = f"the noise is below {MIN_RING_STD:g} ring steps"
    if missing:
        return _View(math.inf, math.inf, 1.0, missing)
    terms = central_terms(
        inputs.clip_norm,
        std,
        inputs.dimension,
        inputs.ring_bits,
        inputs.scale_log2,
        inputs.qmax,
        honest,
        inputs.per_person,
    )
    return _view(inputs, std / (inputs.clip_norm * inputs.per_person) * math.sqrt(honest), terms)


def _no_sum(inputs: ClaimInputs) -> str:
    """Why nobody's noise but one's own counts in this run; empty if others' does."""
    honest = inputs.min_survivors - inputs.colluders
    if not inputs.secagg_enabled:
        return "no masks ran"
    if inputs.two_party or inputs.n < 3:
        return "with two participants each knows the other's share of the sum"
    if honest < 2 or inputs.colluders < 1:
        return f"min_survivors - colluders = {honest} leaves no noise but one's own"
    return ""


def _row(observer: str, inputs: ClaimInputs, local: _View, central: _View) -> Claim:
    honest = inputs.min_survivors - inputs.colluders
    bar = _no_central(observer, inputs, central)
    claimed_central = inputs.guarantee == "central" and not bar
    view = central if claimed_central else local
    assumptions = [_CSPRNG, _ROSTER]
    person = inputs.per_person > 1
    if person:
        assumptions.append(_GROUP.format(per_person=inputs.per_person))
    if inputs.sample_rate < 1.0:
        assumptions.append(_COIN.format(rate=inputs.sample_rate))
    if claimed_central:
        assumptions += [_HONEST_NOISE.format(honest=honest), _MASKS]
        if observer == "coordinator":
            assumptions.append(_PINNED)
        theorem = f"Theorem 2 (central): sigma_eff = s sqrt({honest}) / C"
        if person:
            theorem = f"Theorem 7 (central, person): sigma_eff = s sqrt({honest}) / ({inputs.per_person} C)"
    else:
        theorem = "Theorem 1 (local): sigma_eff = s / C, own noise alone"
        if person:
            theorem = f"Theorem 6 (local, person): sigma_eff = s / (C sqrt({inputs.per_person})), own noise alone"
    if inputs.mechanism == "discrete_gaussian":
        name = "Theorem 4 (central)" if claimed_central else "Theorem 3 (local)"
        theorem = f"{name}: mu = {printed(view.mu, 6)} a round (clipping to the grid"
        theorem += ", gap of the sum)" if claimed_central else ")"
        theorem += "; discrete Gaussian on the ring, converted as concentrated privacy"
    if inputs.sample_rate < 1.0:
        theorem += f"; Theorem 5 (secret coin): rate {inputs.sample_rate:g}"
    if inputs.two_party and observer == "peers":
        assumptions.append("two participants: the peer knows this update up to its own noise")
    holds, why_not = True, ""
    if inputs.guarantee == "central" and bar:
        why_not = f"local only: {bar}"
    if inputs.simulation and observer != "model_reader":
        holds, why_not = False, SIMULATED
    elif not view.epsilon < math.inf:
        holds, why_not = False, view.missing or "epsilon is not bounded"
    elif inputs.simulation:
        assumptions.append("the machine that simulated all participants is not the observer's")
    return Claim(
        observer=observer,
        guarantee="central" if claimed_central else "local",
        unit=inputs.unit,
        neighbours=NEIGHBOURS,
        epsilon=view.epsilon,
        delta=view.delta,
        epsilon_per_round=view.per_round,
        epsilon_local=local.epsilon,
        epsilon_central=math.inf if bar else central.epsilon,
        assumptions=tuple(assumptions),
        theorem=theorem,
        holds=holds,
        why_not=why_not,
    )


def _no_central(observer: str, inputs: ClaimInputs, central: _View) -> str:
    """Why the central view does not hold against this observer; empty if it does."""
    if central.missing:
        return central.missing
    if observer == "anyone":
        return "without masks only a participant's own noise protects it"
    if observer == "coordinator":
        needed = (("pinned identities", inputs.identities_pinned), ("the consistency stage", inputs.consistency_stage))
        lacking = " and ".join(name for name, there in needed if not there)
        if lacking:
            return f"without {lacking} it could isolate a participant's update"
    return ""
