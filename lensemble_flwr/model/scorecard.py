"""Which figures of a model give it away as broken, next to a healthy one.

No single metric sees everything: a linear probe does not notice a changed frame, relative errors and rank do not
notice a latent that shrinks, and a spread does not notice a latent that says nothing about the world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

_Rule = Callable[[float, float], bool]

RULES: Mapping[str, tuple[str, _Rule]] = {
    "state_probe_r2": ("0.1 lower", lambda healthy, now: now < healthy - 0.1),
    "r1": ("a quarter higher", lambda healthy, now: now > 1.25 * healthy),
    "r5": ("a quarter higher", lambda healthy, now: now > 1.25 * healthy),
    "effective_rank": ("half", lambda healthy, now: now < 0.5 * healthy),
    "latent_std_mean": ("a fifth lower", lambda healthy, now: now < 0.8 * healthy),
    "latent_std_min": ("half", lambda healthy, now: now < 0.5 * healthy),
    "action_sensitivity": ("below 1.05", lambda healthy, now: now < 1.05 <= healthy),
    "sigreg": ("twice as high", lambda healthy, now: now > 2 * healthy),
    "frame_drift_deg": ("above 15 degrees", lambda healthy, now: now > 15 >= healthy),
}
"""For each metric of a scorecard: in words, and whether a model is noticed beside a healthy one."""


def noticed(healthy: Mapping[str, float], now: Mapping[str, float]) -> tuple[str, ...]:
    """Metrics by which a model stands out from a healthy one; a figure that is not a number does."""
    return tuple(
        name
        for name, (_, rule) in RULES.items()
        if name in healthy and name in now and (not math.isfinite(now[name]) or rule(healthy[name], now[name]))
    )
