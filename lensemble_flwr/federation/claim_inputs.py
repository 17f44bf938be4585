"""From a configuration and its plan to the rows of the claims table (decision 9)."""

from __future__ import annotations

import dataclasses
from typing import Any

from lensemble_flwr.config import Config
from lensemble_flwr.federation.plan import Plan
from lensemble_flwr.privacy.claims import Claim, ClaimInputs, claim_grade, claims


def claim_inputs(config: Config, plan: Plan, simulation: bool) -> ClaimInputs:
    """What the claims of this run depend on."""
    raise NotImplementedError


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
