"""An attack on the whole release path: canaries in, what an observer sees out, one number per attempt.

What is attacked is the code that a participant runs, from :func:`release_update` (clip, noise, ring grid) over the
ring sum to the decoded vector, with the numbers that a configuration gives. The accountant is not asked.
:mod:`lensemble_flwr.privacy.audit` turns the numbers into lower bounds.

One attempt is T rounds of one participant. Its updates are a canary's or zero, as in the zero-out relation; all other
participants release zero, which is as good for the attacker as anything else that it knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.linear_task import LinearTask
from lensemble_flwr.federation.plan import make_plan, opened_charge, round_open
from lensemble_flwr.federation.records import Guarantee, RoundOpen
from lensemble_flwr.federation.release import release_update
from lensemble_flwr.secagg.ring import RingParams, center, decode, wrap

CANARIES = {
    "first": "C on the first coordinate",
    "last": "C on the last coordinate",
    "spread": "C spread evenly over all coordinates",
    "long": "a million C, spread: what clipping is for",
    "steps": "just over half a ring step on as many coordinates as C allows: rounding before the noise raises it",
    "turns": "C on the first coordinate, with another sign in every other round",
}


@dataclass(frozen=True)
class Canary:
    """The updates of one attempt: one per round, float32, shape (d,)."""

    name: str
    updates: tuple[NDArray[np.float32], ...]


def audited_round(
    guarantee: str,
    noise_multiplier: float,
    dimension: int,
    *,
    participants: int = 4,
    min_survivors: int = 3,
    colluders: int = 1,
    ring_bits: int = 32,
) -> RoundOpen:
    """The public numbers of a round as a federation with this configuration would announce them.

    Raises:
        ConfigError: numbers that no federation would run with.
    """
    config = load_config(
        [
            "experiment=linear",
            f"federation.participants={participants}",
            f"federation.min_participants={participants}",
            f"secagg.min_survivors={min_survivors}",
            f"secagg.assumed_colluders={colluders}",
            f"secagg.ring_bits={ring_bits}",
            f"privacy.guarantee={guarantee}",
            f"privacy.noise_multiplier={noise_multiplier!r}",
        ]
    )
    plan = make_plan(config, participants, dimension)
    roster = tuple(i.to_bytes(32, "big") for i in range(1, participants + 1))
    opened = round_open(config, LinearTask(config), plan, bytes(32), 0, bytes(32), roster)
    return dataclasses.replace(opened, dimension=dimension)


def accounted_mu(opened: RoundOpen, view: str, rounds: int) -> float:
    """The mu that is claimed for ``rounds`` such rounds; the audit must stay below it.

    It is what the noise multiplier promises, or what the ledger charges if that is less.
    """
    honest = opened.min_survivors - opened.colluders
    promised = 1.0 / opened.noise_multiplier
    if opened.guarantee == Guarantee.CENTRAL and view == "local":
        promised *= math.sqrt(honest)
    if opened.guarantee == Guarantee.LOCAL and view == "central":
        promised /= math.sqrt(honest)
    return math.sqrt(rounds) * min(promised, math.sqrt(opened_charge(opened).mu2(view)))


def make_canary(name: str, opened: RoundOpen, rounds: int = 1) -> Canary:
    """One of :data:`CANARIES`, for ``rounds`` rounds.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in CANARIES:
        raise ConfigError(f"There is no canary {name!r}.", f"Use {', '.join(CANARIES)}.")
    d, clip = opened.dimension, opened.clip_norm
    x = np.zeros(d, np.float64)
    whole = np.nextafter(np.float32(clip), np.float32(0))  # at C itself the norm is decided in slow exact arithmetic
    if name in ("first", "turns"):
        x[0] = whole
    elif name == "last":
        x[-1] = whole
    elif name == "steps":
        size = math.ldexp(0.51, -opened.scale_log2)
        x[: int((clip / size) ** 2)] = size
    else:
        x[:] = clip / math.sqrt(d) * (1e6 if name == "long" else 1.0)
        x[1::2] *= -1.0
    signs = [-1.0 if name == "turns" and t % 2 else 1.0 for t in range(rounds)]
    return Canary(name, tuple((sign * x).astype(np.float32) for sign in signs))


def observe(opened: RoundOpen, view: str, updates: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float64]:
    """What the view's observer is left with after one round, in units of the update.

    Args:
        opened: the round.
        view: ``"local"``: the release of the first participant. ``"central"``: the ring sum over the m - k
            participants whose noise nobody else knows; the observer has subtracted what the others sent.
        updates: of those participants, the first being the one under attack; missing ones are zero.

    Returns:
        float64, shape (d,).
    """
    ring = RingParams(opened.ring_bits, len(opened.roster), opened.scale_log2, opened.dimension)
    count = 1 if view == "local" else opened.min_survivors - opened.colluders
    total: NDArray[Any] = np.zeros(opened.dimension, ring.lane)
    for i, identity in enumerate(opened.roster[:count]):
        update = updates[i] if i < len(updates) else None
        total += wrap(release_update(update, opened, identity, simulation=False).q.astype(np.int64), ring)
    return decode(center(total, ring), ring, count)


def statistics(
    opened: RoundOpen,
    canary: Canary,
    view: str,
    count: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The matched filter over ``count`` attempts without the canary and ``count`` with it.

    Args:
        opened: the round; it is repeated as often as the canary has updates.
        canary: see :func:`make_canary`.
        view: ``"local"`` or ``"central"``.
        count: attempts of each kind.
        progress: called with the number of attempts done so far, with and without.

    Returns:
        Two float64 arrays of shape (count,).
    """
    rounds = [dataclasses.replace(opened, round=t, rounds=len(canary.updates)) for t in range(len(canary.updates))]
    filters = []
    for update in canary.updates:
        x = update.astype(np.float64)
        filters.append(x / max(opened.clip_norm, float(np.linalg.norm(x))))
    found = np.empty((2, count))
    for i in range(count):
        for j in (0, 1):
            found[j, i] = sum(
                float(observe(opened_t, view, [update if j else None]) @ weights)
                for opened_t, update, weights in zip(rounds, canary.updates, filters, strict=True)
            )
        progress(2 * (i + 1))
    return found[0], found[1]


def one_run_scores(opened: RoundOpen, included: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The scores of many canaries in a single round: participant i adds C to coordinate i of its update, or does not.

    Args:
        opened: a round with at least m - k coordinates, and m - k participants under attack.
        included: the coins, shape (m - k,).

    Returns:
        float64, shape (m - k,): the coordinates of the decoded sum.
    """
    updates: list[NDArray[np.float32] | None] = []
    for i, coin in enumerate(included.tolist()):
        x = np.zeros(opened.dimension, np.float32)
        x[i] = opened.clip_norm if coin else 0.0
        updates.append(x)
    return observe(opened, "central", updates)[: included.size]
