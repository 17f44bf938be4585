"""The public rehearsal (decision 22): the same noisy rounds on pseudo-participants dealt from public data.

A signal-to-noise ratio predicts well within one parameterisation and fails across them, so before a private run the
identical pipeline (local steps, clip, noise, ring, outer step) is run on public data with and without noise. It costs
no privacy and says how much damage the noise does to a model of exactly this shape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lensemble_flwr.config import Config
from lensemble_flwr.federation.outer import mean_of_sum, outer_step
from lensemble_flwr.federation.plan import Plan, round_open
from lensemble_flwr.federation.release import release_update
from lensemble_flwr.federation.task import Progress, Task, theta_hash

GREEN, AMBER = 0.1, 0.3
"""Added relative error: below GREEN the noise hardly hurts, above AMBER it is likely to destroy what is learnt."""


@dataclass(frozen=True)
class Rehearsal:
    """What the rehearsal gave; everything is public.

    ``cost`` is the metric with noise minus without, over the metric at the start. ``median_norm`` is the median L2 norm
    of the pseudo-participants' first updates: the clip bound that the notes recommend.
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

    @property
    def cost(self) -> float:
        if not np.isfinite(self.noisy):
            return float("inf")
        return (self.noisy - self.noiseless) / max(self.start, 1e-12)

    @property
    def verdict(self) -> str:
        return "green" if self.cost < GREEN else "amber" if self.cost <= AMBER else "red"


def rehearse(task: Task, config: Config, plan: Plan, progress: Progress | None = None) -> Rehearsal:
    """Run all rounds twice on public data: clipped only, and clipped and noised as in the real run."""
    began = time.monotonic()
    roster = tuple(i.to_bytes(32, "big") for i in range(1, plan.n + 1))
    thetas = {"noiseless": task.initial(), "noisy": task.initial()}
    momenta = {name: np.zeros(task.dimension) for name in thetas}
    norms: list[float] = []
    signal = coherence = update_seconds = 0.0
    diloco = config.diloco
    for index in range(diloco.rounds):
        for name in thetas:
            theta = thetas[name]
            opened = round_open(config, task, plan, bytes(32), index, theta_hash(task.layout, theta), roster)
            total = np.zeros(task.dimension, np.int64)
            clipped_sum, clipped_squares = np.zeros(task.dimension), 0.0
            for share in range(plan.n):
                started = time.monotonic()
                local = task.public_update(
                    theta, share, plan.n, steps=diloco.inner_steps, sketch_seed=opened.sketch_seed
                )
                update_seconds += time.monotonic() - started
                delta = (local - theta).astype(np.float64)
                norm = float(np.linalg.norm(delta))
                if index == 0 and name == "noiseless":
                    norms.append(norm)
                if not np.isfinite(norm):
                    delta, norm = np.zeros_like(delta), 0.0
                if name == "noisy":
                    total += release_update(delta.astype(np.float32), opened, roster[share], simulation=True).q
                clipped = delta * min(1.0, plan.clip_norm / norm) if norm else delta
                clipped_sum += clipped
                clipped_squares += float(clipped @ clipped)
            if name == "noisy":
                mean = mean_of_sum(total, plan.ring.scale_log2, plan.n)
            else:
                mean = clipped_sum / plan.n
                if index == 0:
                    length = float(clipped_sum @ clipped_sum)
                    noise = plan.noise_std * (plan.n * task.dimension) ** 0.5
                    signal = length**0.5 / noise if noise else float("inf")
                    pairs = plan.n * (plan.n - 1)
                    mean_square = clipped_squares / plan.n
                    coherence = (length - clipped_squares) / pairs / mean_square if mean_square else 0.0
            thetas[name], momenta[name] = outer_step(theta, momenta[name], mean, diloco.outer_lr, diloco.outer_momentum)
        if progress:
            progress("rehearsing on public data", index + 1, diloco.rounds)
    metric = task.rehearsal_metric
    return Rehearsal(
        metric=metric,
        start=task.evaluate(task.initial())[metric],
        noiseless=task.evaluate(thetas["noiseless"])[metric],
        noisy=task.evaluate(thetas["noisy"])[metric],
        median_norm=float(np.median(norms)),
        signal_to_noise=signal,
        coherence=coherence,
        seconds=time.monotonic() - began,
        update_seconds=update_seconds / (2 * diloco.rounds * plan.n),
    )
