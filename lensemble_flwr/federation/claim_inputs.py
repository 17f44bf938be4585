"""From a configuration and its plan to the rows of the claims table."""

from __future__ import annotations

import dataclasses
from typing import Any

from lensemble_flwr.config import Config
from lensemble_flwr.federation.plan import Plan
from lensemble_flwr.privacy.claims import Claim, ClaimInputs, claim_grade, claims


def claim_inputs(config: Config, plan: Plan, simulation: bool) -> ClaimInputs:
    """What the claims of this run depend on."""
    privacy = config.privacy
    return ClaimInputs(
        guarantee=privacy.guarantee,
        noise_multiplier=plan.noise_multiplier,
        clip_norm=plan.clip_norm,
        rounds=config.diloco.rounds,
        # What rounding and sampling cost comes off first, so that the row's total delta is within the target.
        delta=max(privacy.target_delta - config.diloco.rounds * plan.delta_extra, privacy.target_delta * 1e-3),
        n=plan.n,
        min_survivors=plan.min_survivors,
        colluders=plan.colluders,
        dimension=plan.dimension,
        ring_bits=plan.ring.bits,
        scale_log2=plan.ring.scale_log2,
        qmax=plan.ring.qmax,
        secagg_enabled=config.secagg.enabled,
        # Each participant holds the run to both: it refuses without a pinned roster, and it refuses a RoundOpen that
        # lacks the consistency stage of its own configuration or policy. The manifest knows no more than that.
        identities_pinned=config.secagg.pinned,
        consistency_stage=config.secagg.compares_views,
        entropy=privacy.entropy,
        simulation=simulation,
        privacy_enabled=privacy.enabled,
        sample_rate=plan.participation.rate,
        accountant=privacy.accountant,
        two_party=plan.two_party,
        mechanism=privacy.mechanism,
        per_person=plan.per_person,
    )


def sum_checked_by(config: Config) -> str:
    """Who finds out if a committed model is not what the sum gives; for people."""
    secagg = config.secagg
    if not secagg.verify_sum:
        return "nobody but the coordinator"
    sound = "the members of each round, unless one of them pools with the coordinator"
    return sound if secagg.pinned else f"{sound}, or the coordinator invents one (secagg.pinned=false)"


def claims_of(config: Config, plan: Plan, simulation: bool) -> list[Claim]:
    """The claims table of this run."""
    return claims(claim_inputs(config, plan, simulation))


def claim_rows(config: Config, plan: Plan, simulation: bool) -> tuple[list[dict[str, Any]], bool, list[str]]:
    """The claims table as plain data, whether every wanted line holds, and why not."""
    rows = claims_of(config, plan, simulation)
    grade, why_not = claim_grade(rows, list(config.privacy.claim))
    return [_plain(dataclasses.asdict(row)) for row in rows], grade, why_not


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null is "no guarantee"."""
    return {k: None if isinstance(v, float) and not v < float("inf") else v for k, v in row.items()}
