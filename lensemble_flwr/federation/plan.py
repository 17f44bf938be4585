"""From a configuration and a roster to the numbers of a round: noise, ring, thresholds, charge. Pure.

Coordinator, participants and preflight all compute them here, so that what is printed before a run is what runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

from lensemble_flwr.config import Config, config_hash
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.records import Guarantee, Mechanism, RoundOpen
from lensemble_flwr.federation.task import Task, sketch_seed
from lensemble_flwr.privacy import concentrated
from lensemble_flwr.privacy.accountant import build_accountant
from lensemble_flwr.privacy.bounds import release_delta, ring_bound
from lensemble_flwr.privacy.discrete_bounds import Price, release_price
from lensemble_flwr.privacy.ledger import Budget, Charge, Spending
from lensemble_flwr.privacy.mechanism import own_noise_std
from lensemble_flwr.privacy.participation import ALWAYS, SecretParticipation
from lensemble_flwr.secagg import RingParams, SessionParams, default_threshold

_P = TypeVar("_P")


@dataclass(frozen=True)
class Plan:
    """The public numbers of every round of one federation with a roster of ``n``."""

    n: int
    dimension: int
    guarantee: Guarantee
    noise_multiplier: float
    noise_std: float
    clip_norm: float
    threshold: int
    min_survivors: int
    colluders: int
    two_party: bool
    ring: RingParams
    delta_extra: float
    """Implementation terms (rounding, clamping, sampling) added to delta for each release."""
    discrete: Price | None = None
    """What a release costs if its noise is a discrete Gaussian; None: it is a continuous one."""

    @property
    def mechanism(self) -> Mechanism:
        """Whose law the noise follows."""
        return Mechanism.GAUSSIAN if self.discrete is None else Mechanism.DISCRETE_GAUSSIAN

    participation: SecretParticipation = ALWAYS
    """The secret coin that each participant throws for itself."""
    per_person: int = 1
    """How many participants may hold data of one person; the noise is sized for a person."""

    @property
    def charge(self) -> Charge:
        """What one release costs its participant."""
        if self.discrete is not None:
            return discrete_charge(self.guarantee, self.min_survivors, self.colluders, self.discrete)
        return charge(
            self.guarantee,
            self.noise_std,
            self.clip_norm,
            self.min_survivors,
            self.colluders,
            self.delta_extra,
            self.participation,
            self.per_person,
        )


def discrete_charge(guarantee: Guarantee, min_survivors: int, colluders: int, price: Price) -> Charge:
    """The ledger's charge for one release whose noise is a discrete Gaussian."""
    return Charge(
        own_multiplier=price.own_multiplier,
        min_survivors=min_survivors,
        colluders=colluders,
        delta_extra=price.delta_extra,
        guarantee=guarantee.name.lower(),
        mechanism="discrete_gaussian",
        gap=price.gap,
    )


def charge(
    guarantee: Guarantee,
    std: float,
    clip: float,
    min_survivors: int,
    colluders: int,
    extra: float,
    participation: SecretParticipation,
    per_person: int,
) -> Charge:
    """The ledger's charge for one release."""
    own = std / clip if guarantee != Guarantee.NONE else 0.0
    return Charge(
        own_multiplier=own,
        min_survivors=min_survivors,
        colluders=colluders,
        delta_extra=extra,
        guarantee=guarantee.name.lower(),
        participation=participation,
        per_person=per_person,
    )


@lru_cache(maxsize=64)
def make_plan(config: Config, n: int, dimension: int) -> Plan:
    """The numbers of a federation of ``n`` participants over ``dimension`` federated coordinates.

    Raises:
        ConfigError: the target cannot be met, or the ring is too coarse for the noise.
    """
    privacy, secagg = config.privacy, config.secagg
    k, m = secagg.assumed_colluders, secagg.min_survivors
    two_party = n == 2 and secagg.allow_two_party
    guarantee = Guarantee[privacy.guarantee.upper()] if privacy.enabled else Guarantee.NONE
    if n < m:
        raise ConfigError(
            f"{n} participants are fewer than secagg.min_survivors={m}.", "Lower secagg.min_survivors or wait for more."
        )
    threshold = secagg.threshold if secagg.threshold is not None else default_threshold(n, k)
    sigma = std = extra = 0.0
    price = None
    if privacy.enabled and privacy.mechanism == "discrete_gaussian":
        sigma, std, ring, price = _discrete(config, guarantee, n, dimension)
        extra = price.delta_extra
    elif privacy.enabled:
        rounds = config.diloco.rounds
        # The implementation terms depend on sigma only through s/g, which is astronomically large for sound rings:
        # calibrate once without them, price them at that sigma, and calibrate again with what is left of delta.
        sigma = privacy.noise_multiplier or _calibrate(config, privacy.target_delta)
        std, ring, extra = _ring_and_extra(config, guarantee, sigma, n, dimension, m, k)
        if privacy.noise_multiplier is None:
            left = privacy.target_delta - rounds * extra
            if left <= 0:
                raise ConfigError(
                    f"Rounding to {secagg.ring_bits} bits alone costs delta {rounds * extra:.2g}, more than "
                    f"privacy.target_delta={privacy.target_delta:g}.",
                    "Use secagg.ring_bits=32.",
                )
            sigma = _calibrate(config, left)
            std, ring, extra = _ring_and_extra(config, guarantee, sigma, n, dimension, m, k)
    else:
        ring = RingParams.for_range(secagg.ring_bits, n, secagg.range, dimension)
    return Plan(
        n=n,
        dimension=dimension,
        guarantee=guarantee,
        noise_multiplier=sigma,
        noise_std=std,
        clip_norm=privacy.clip_norm,
        threshold=threshold,
        min_survivors=m,
        colluders=k,
        two_party=two_party,
        ring=ring,
        delta_extra=extra,
        discrete=price,
        participation=SecretParticipation(privacy.sample_rate),
        per_person=privacy.max_participants_per_person,
    )


@lru_cache(maxsize=64)  # seconds of work below a sample rate of 1
def _calibrate(config: Config, delta: float) -> float:
    return build_accountant(config.privacy.accountant).calibrate_sigma(
        target_epsilon=config.privacy.target_epsilon,
        target_delta=delta,
        num_rounds=config.diloco.rounds,
        sample_rate=config.privacy.sample_rate,
    )


def _ring_and_extra(
    config: Config, guarantee: Guarantee, sigma: float, n: int, dimension: int, m: int, k: int
) -> tuple[float, RingParams, float]:
    people = config.privacy.max_participants_per_person
    std = own_noise_std(guarantee.name.lower(), sigma, config.privacy.clip_norm, m, k, people)
    bound = ring_bound(config.privacy.clip_norm, std, people)
    ring = RingParams.for_range(config.secagg.ring_bits, n, bound, dimension)
    extra = release_delta(
        noise_std=std,
        clip_norm=config.privacy.clip_norm,
        scale_log2=ring.scale_log2,
        ring_bits=ring.bits,
        dimension=dimension,
        roster=n,
        min_survivors=m,
        colluders=k,
        per_person=people,
    )
    return std, ring, extra


_RAISE = 1.01
_MOST_RAISED = 1.25  # a coarse grid may cost this much more noise than its target alone; then it is refused


def _discrete(config: Config, guarantee: Guarantee, n: int, dimension: int) -> tuple[float, float, RingParams, Price]:
    """Noise multiplier, own std, ring and price of a discrete Gaussian.

    The multiplier is that of the whole federation, whoever is there: a smaller roster's ring is finer and its gap
    smaller, so the target holds for it, too, and a round with fewer never has less noise than the claims table says.
    """
    sigma = config.privacy.noise_multiplier
    if sigma is None:
        sigma = _discrete_multiplier(config, guarantee, max(n, config.federation.participants), dimension)
    return _discrete_at(config, n, dimension, sigma)


def _discrete_at(config: Config, n: int, dimension: int, sigma: float) -> tuple[float, float, RingParams, Price]:
    privacy, m, k = config.privacy, config.secagg.min_survivors, config.secagg.assumed_colluders
    std = own_noise_std(privacy.guarantee, sigma, privacy.clip_norm, m, k)
    ring = RingParams.for_range(config.secagg.ring_bits, n, ring_bound(privacy.clip_norm, std), dimension)
    price = release_price(
        noise_std=std,
        clip_norm=privacy.clip_norm,
        scale_log2=ring.scale_log2,
        ring_bits=ring.bits,
        dimension=dimension,
        roster=n,
        min_survivors=m,
        colluders=k,
    )
    return sigma, std, ring, price


@lru_cache(maxsize=64)
def _discrete_multiplier(config: Config, guarantee: Guarantee, n: int, dimension: int) -> float:
    """The least noise multiplier whose rounds, by ``n`` participants, meet the target.

    More noise makes the grid relatively finer and so the gap smaller, until the ring's step doubles: a few steps up
    from what the target needs without a gap find the multiplier, or show that the grid is too coarse.

    Raises:
        ConfigError: no noise does.
    """
    privacy, m, k = config.privacy, config.secagg.min_survivors, config.secagg.assumed_colluders
    rounds, view = config.diloco.rounds, privacy.guarantee
    budget = Budget(view, privacy.target_epsilon, privacy.target_delta)

    def fits(price: Price) -> bool:
        return Spending().plus(discrete_charge(guarantee, m, k, price), rounds).within(budget)

    mu = max(concentrated.mu_for(privacy.target_epsilon, privacy.target_delta) / math.sqrt(rounds), 1e-90)
    least = low = sigma = 1.0 / mu
    found = _discrete_at(config, n, dimension, least)
    while not fits(found[3]) and sigma <= _MOST_RAISED * least:
        low, sigma = sigma, sigma * _RAISE
        found = _discrete_at(config, n, dimension, sigma)
    if fits(found[3]):
        while sigma > low * (1.0 + 1e-7):
            middle = 0.5 * (low + sigma)
            low, sigma = (low, middle) if fits(_discrete_at(config, n, dimension, middle)[3]) else (middle, sigma)
        return sigma
    raise ConfigError(
        f"A ring of {config.secagg.ring_bits} bits is too coarse for {n} participants and {dimension} coordinates: at "
        f"{math.ldexp(found[1], found[2].scale_log2):.3g} ring steps of noise the gap between a sum of discrete "
        f"Gaussians and one of them alone takes {found[3].gap / mu:.2g} times the mu of the target.",
        "Use more secagg.ring_bits, fewer participants, or a smaller epsilon.",
    )


def round_open(
    config: Config,
    task: Task,
    plan: Plan,
    federation_id: bytes,
    index: int,
    theta: bytes,
    roster: tuple[bytes, ...],
    momentum: bytes = bytes(32),
    steps: int = 0,
) -> RoundOpen:
    """The record of a round.

    Args:
        config, task, plan, federation_id, index: what runs.
        theta: the model's hash.
        roster: the sorted identities that joined.
        momentum: hash of the outer momentum, where participants verify sums.
        steps: the outer steps so far.
    """
    seed = sketch_seed(federation_id, index)
    return RoundOpen(
        federation_id=federation_id,
        config_hash=config_hash(config),
        round=index,
        rounds=config.diloco.rounds,
        theta_hash=theta,
        base_hash=task.base_hash,
        probe_hash=task.probe_hash,
        sketch_seed=seed,
        sketch_hash=task.sketch_hash(seed),
        inner_steps=config.diloco.inner_steps,
        dimension=task.dimension,
        ring_bits=plan.ring.bits,
        scale_log2=plan.ring.scale_log2,
        clip_norm=plan.clip_norm,
        noise_multiplier=plan.noise_multiplier,
        noise_std=plan.noise_std,
        target_epsilon=config.privacy.target_epsilon,
        target_delta=config.privacy.target_delta,
        guarantee=plan.guarantee,
        mechanism=plan.mechanism,
        replay=config.privacy.entropy == "replay",
        threshold=plan.threshold,
        min_survivors=plan.min_survivors,
        colluders=plan.colluders,
        two_party=plan.two_party,
        sample_rate=plan.participation.rate,
        pinned=config.secagg.pinned,
        consistency=config.secagg.compares_views,
        per_person=plan.per_person,
        verify_sum=config.secagg.verify_sum,
        momentum_hash=momentum,
        steps=steps,
        roster=roster,
    )


def next_keys_binding(federation_id: bytes, round_index: int, before: bytes) -> bytes:
    """What keys for round ``round_index`` are signed for while its RoundOpen is not known.

    Args:
        before: hash of the RoundOpen of the round before it, whose unmask question the same reply answers.
    """
    text = b"lensemble keys of the next round\0" + federation_id + round_index.to_bytes(4, "big") + before
    return hashlib.sha256(text).digest()


def session_params(opened: RoundOpen, attempt: int, keys_binding: bytes | None = None) -> SessionParams:
    """The secure-aggregation parameters of one attempt at a round.

    ``keys_binding``: what its keys were signed for, if they were made in the round before.

    Raises:
        SecureAggregationError: the round's numbers are unsafe (threshold, survivors, two parties).
    """
    return SessionParams(
        open_hash=opened.digest(),
        attempt=attempt,
        roster=opened.roster,
        threshold=opened.threshold,
        min_survivors=opened.min_survivors,
        ring=RingParams(opened.ring_bits, len(opened.roster), opened.scale_log2, opened.dimension),
        colluders=opened.colluders,
        allow_two_party=opened.two_party,
        consistency=opened.consistency,
        verify=opened.verify_sum,
        keys_binding=keys_binding,
    )


def opened_charge(opened: RoundOpen) -> Charge:
    """What answering this RoundOpen costs, priced by the participant itself from the round's own numbers."""
    extra = 0.0
    if opened.private:
        if opened.mechanism == Mechanism.DISCRETE_GAUSSIAN:
            price = _priced(release_price, opened)
            return discrete_charge(Guarantee(opened.guarantee), opened.min_survivors, opened.colluders, price)
        extra = _priced(partial(release_delta, per_person=opened.per_person), opened)
    return charge(
        Guarantee(opened.guarantee),
        opened.noise_std,
        opened.clip_norm,
        opened.min_survivors,
        opened.colluders,
        extra,
        opened.participation,
        opened.per_person,
    )


def _priced(price: Callable[..., _P], opened: RoundOpen) -> _P:
    return price(
        noise_std=opened.noise_std,
        clip_norm=opened.clip_norm,
        scale_log2=opened.scale_log2,
        ring_bits=opened.ring_bits,
        dimension=opened.dimension,
        roster=len(opened.roster),
        min_survivors=opened.min_survivors,
        colluders=opened.colluders,
    )


def epsilon_after(opened: RoundOpen, rounds: int, view: str | None = None) -> float:
    """Epsilon of ``rounds`` releases like this round's, at its target delta (infinite without privacy).

    Args:
        opened: the round's public numbers.
        rounds: releases composed; committed, burnt and dropped-out rounds alike.
        view: "local", "central", or None for the view that the noise is sized for.
    """
    if not opened.private:
        return float("inf")
    if rounds == 0:
        return 0.0
    if view is None:
        view = Guarantee(opened.guarantee).name.lower()
    return Spending().plus(opened_charge(opened), rounds).epsilon(view, opened.target_delta)
