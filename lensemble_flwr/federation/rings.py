"""What each ring costs: bytes on the wire against the rounding it adds. Pure; preflight prints it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.plan import Plan, make_plan

NEGLIGIBLE = 1e-3
"""Rounding may add this share to the variance of the noise (without privacy: of a public update) unnoticed."""


@dataclass(frozen=True)
class RingCost:
    """One ring for a federation.

    Attributes:
        bits: 16, 24 or 32.
        step: size of a ring step in units of the update.
        added: variance of the rounding over that of the noise, or, without privacy, over the mean square of a public
            update's coordinates.
        wire_bytes: of one masked vector.
    """

    bits: int
    step: float
    added: float
    wire_bytes: int

    @property
    def negligible(self) -> bool:
        return self.added <= NEGLIGIBLE


def ring_costs(config: Config, n: int, dimension: int, mean_square: float = 0.0) -> list[RingCost]:
    """The rings that the claim allows, narrowest first.

    Rounding to the nearest step adds step^2/12 (after noise of at least two steps, which the claim asks for);
    stochastic rounding, the path without privacy, at most step^2/4.

    Args:
        config: the run's.
        n, dimension: the roster and d.
        mean_square: of the coordinates of a public update; only used without privacy. 0: unknown.
    """
    found = []
    for bits in (16, 24, 32):
        try:
            secagg = dataclasses.replace(config.secagg, ring_bits=bits)
            plan = make_plan(dataclasses.replace(config, secagg=secagg), n, dimension)
        except ConfigError:
            continue
        found.append(RingCost(bits, plan.ring.grid, _added(plan, mean_square), plan.ring.wire_bytes))
    return found


def _added(plan: Plan, mean_square: float) -> float:
    if plan.noise_std > 0.0:
        return plan.ring.grid**2 / 12 / plan.noise_std**2
    return plan.ring.grid**2 / 4 / mean_square if mean_square > 0.0 else float("inf")


def recommended(costs: list[RingCost]) -> RingCost | None:
    """The narrowest ring whose rounding is negligible; None if none is."""
    return next((cost for cost in costs if cost.negligible), None)


def ring_line(bits: int, costs: list[RingCost], against: str = "the noise") -> str:
    """What preflight says of the configured ring."""
    best = recommended(costs)
    listed = ", ".join(f"{cost.bits} bits {_share(cost.added)}" for cost in costs)
    text = f"ring of {bits} bits; variance of the rounding over that of {against}: {listed}"
    own = next((cost for cost in costs if cost.bits == bits), None)
    if best is None or own is None or best.bits == bits:
        return text
    if best.bits < bits:
        saved = 1 - best.wire_bytes / own.wire_bytes
        return (
            f"{text}. secagg.ring_bits={best.bits} would make the masked vector ({own.wire_bytes:,} bytes, a part of "
            f"what is sent) {saved:.0%} shorter at no loss to speak of"
        )
    return f"{text}. WARNING: too coarse; use secagg.ring_bits={best.bits}"


def _share(added: float) -> str:
    return "unknown" if added == float("inf") else f"{added:.1e}"
