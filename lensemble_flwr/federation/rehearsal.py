"""The public rehearsal: the same noisy rounds on pseudo-participants dealt from public data.

A signal-to-noise ratio predicts well within one parameterisation and fails across them, so before a private run the
identical pipeline (local steps, clip, noise, ring, outer step) is run on public data with and without noise. It costs
no privacy and says how much damage the noise does to a model of exactly this shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.federation.outer import mean_of_sum, outer_step
from lensemble_flwr.federation.plan import Plan, round_open
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.release import release_update
from lensemble_flwr.federation.schedule import place
from lensemble_flwr.federation.task import Progress, Task, theta_hash

GREEN, AMBER = 0.1, 0.3
"""Added relative error: below GREEN the noise hardly hurts, above AMBER it is likely to destroy what is learnt."""


_DRAWS = 5
_QUICK_S = 2.0  # noisy rounds that take no longer are repeated: one draw of the noise can mislead in a small federation


@dataclass(frozen=True)
class Rehearsal:
    """What the rehearsal gave; everything is public.

    ``cost`` is the metric with noise minus without, over the metric at the start. ``median_norm`` is the median L2 norm
    of the pseudo-participants' first updates: the clip bound that the notes recommend. ``noisy`` is the median over
    ``draws``, the metric after each draw of the noise.
    """

    metric: str
    start: float
    noiseless: float
    noisy: float
    median_norm: float
    signal_to_noise: float
    coherence: float
    seconds: float
    update_seconds: float
    draws: tuple[float, ...] = ()

    @property
    def cost(self) -> float:
        if not np.isfinite(self.noisy):
            return float("inf")
        return (self.noisy - self.noiseless) / max(self.start, 1e-12)

    @property
    def verdict(self) -> str:
        return "green" if self.cost < GREEN else "amber" if self.cost <= AMBER else "red"


Update = Callable[[np.ndarray, int, RoundOpen], np.ndarray | None]
"""(theta, participant, RoundOpen) -> its local theta; None for a zero update."""

Count = Callable[[int], None]
"""Called with the number of rounds done."""


@dataclass
class FirstRound:
    """What the un-noised updates of the first round looked like."""

    norms: list[float]
    sum_norm: float = 0.0
    sum_of_squares: float = 0.0


def rounds_in_process(
    task: Task,
    config: Config,
    plan: Plan,
    update: Update,
    *,
    noisy: bool,
    progress: Count | None = None,
) -> tuple[np.ndarray, FirstRound]:
    """All rounds in this process on plain sums: local steps, clip, noise, ring and outer step as in a real run.

    Without ``noisy`` the updates are clipped only, and with privacy off not even that. No masks, no ledger, nothing is
    released: for rehearsals on public data and for experiments on generated data.

    Returns:
        (final theta, facts about the first round's clipped updates).
    """
    roster = tuple(i.to_bytes(32, "big") for i in range(1, plan.n + 1))
    theta, momentum = task.initial(), np.zeros(task.dimension)
    first = FirstRound([])
    diloco = config.diloco
    for index in range(diloco.rounds):
        theta_name = theta_hash(task.layout, theta)
        opened = round_open(config, task, plan, bytes(32), index, theta_name, roster, steps=index)
        total, clipped_sum = np.zeros(task.dimension, np.int64), np.zeros(task.dimension)
        for share in range(plan.n):
            local = update(theta, share, opened)
            delta = None if local is None else local - theta
            if delta is not None and not np.isfinite(delta).all():
                delta = None  # what a participant does with an update that is not finite
            if noisy:
                total += release_update(delta, opened, roster[share], simulation=True).q
            if delta is None:
                continue
            wide = delta.astype(np.float64)
            norm = float(np.linalg.norm(wide))
            clipped = wide * min(1.0, plan.clip_norm / norm) if norm and config.privacy.enabled else wide
            clipped_sum += clipped
            if index == 0:
                first.norms.append(norm)
                first.sum_of_squares += float(clipped @ clipped)
        if index == 0:
            first.sum_norm = float(np.linalg.norm(clipped_sum))
        mean = (
            mean_of_sum(total, plan.ring.scale_log2, plan.n, plan.participation.rate) if noisy else clipped_sum / plan.n
        )
        theta, momentum = outer_step(theta, momentum, mean, diloco.outer_lr, diloco.outer_momentum)
        if progress:
            progress(index + 1)
    return theta, first


def rehearse(task: Task, config: Config, plan: Plan, progress: Progress | None = None) -> Rehearsal:
    """Run all rounds twice on public data: clipped only, and clipped and noised as in the real run. What is quick is
    noised several times."""
    began = time.monotonic()
    steps, rounds = config.diloco.inner_steps, config.diloco.rounds
    update_seconds, updates = 0.0, 0

    def update(theta: np.ndarray, share: int, opened: RoundOpen) -> np.ndarray:
        nonlocal update_seconds, updates
        started = time.monotonic()
        seed, where = opened.sketch_seed, place(config, opened)
        local = task.public_update(theta, share, steps=steps, sketch_seed=seed, **where)
        update_seconds += time.monotonic() - started
        updates += 1
        return local

    def tell(done: int) -> None:
        if progress:
            progress("rehearsing on public data", done, 2 * rounds)

    quiet, first = rounds_in_process(task, config, plan, update, noisy=False, progress=tell)
    metric = task.rehearsal_metric

    def noised(tell: Count | None) -> float:
        try:
            loud, _ = rounds_in_process(task, config, plan, update, noisy=True, progress=tell)
        except ContractViolation:  # the noise made a weight overflow
            return float("inf")
        return task.evaluate(loud)[metric]

    started = time.monotonic()
    draws = [noised(lambda done: tell(rounds + done))]
    if time.monotonic() - started < _QUICK_S:
        draws += [noised(None) for _ in range(_DRAWS - 1)]
    rate = plan.participation.rate
    noise = (plan.noise_std**2 * plan.n * task.dimension + rate * (1 - rate) * first.sum_of_squares) ** 0.5
    pairs, mean_square = plan.n * (plan.n - 1), first.sum_of_squares / plan.n
    return Rehearsal(
        metric=metric,
        start=task.evaluate(task.initial())[metric],
        noiseless=task.evaluate(quiet)[metric],
        noisy=float(np.median(draws)),
        median_norm=float(np.median(first.norms)) if first.norms else 0.0,
        signal_to_noise=rate * first.sum_norm / noise if noise else float("inf"),
        coherence=(first.sum_norm**2 - first.sum_of_squares) / pairs / mean_square if mean_square else 0.0,
        seconds=time.monotonic() - began,
        update_seconds=update_seconds / updates,
        draws=tuple(draws),
    )
