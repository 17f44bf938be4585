"""`lensemble preflight`: what a run will claim, cost and survive, before any private data is read."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from dataclasses import dataclass

import numpy as np

from lensemble_flwr.compiled import describe
from lensemble_flwr.config import Config
from lensemble_flwr.errors import ConfigError, PrivacyBudgetExceeded
from lensemble_flwr.federation.claim_inputs import claims_of, sum_checked_by
from lensemble_flwr.federation.plan import Plan, epsilon_after, make_plan, round_open
from lensemble_flwr.federation.records import Guarantee
from lensemble_flwr.federation.rehearsal import Rehearsal, rehearse
from lensemble_flwr.federation.rings import RingCost, ring_costs, ring_line
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import Progress, Task
from lensemble_flwr.federation.tasks import build_task, own_choice
from lensemble_flwr.home import sites_folder
from lensemble_flwr.privacy.claims import Claim, claim_grade, claims_table
from lensemble_flwr.privacy.mechanism import own_noise_std
from lensemble_flwr.privacy.preflight import REFUSE, WARN, fewest_participants, largest_dimension
from lensemble_flwr.privacy.preflight import preflight as expected_ratio
from lensemble_flwr.privacy.printed import printed
from lensemble_flwr.secagg import Stage, message_size

MOST_REHEARSAL_S = 180.0
_PROCESS_BYTES = 450 << 20  # resident size of one simulated participant process with torch loaded
_START_S = 25.0  # Flower's simulation runtime until the first message, two cores
_EXCHANGE_S, _MESSAGE_S = 0.15, 0.012  # one exchange, and one message in it, two cores


@dataclass(frozen=True)
class Preflight:
    """All that preflight found; :meth:`text` prints it."""

    config: Config
    plan: Plan
    claims: list[Claim]
    epsilon_local: float
    epsilon_central: float
    ratio: float
    rehearsal: Rehearsal | None
    bytes_up: int
    bytes_down: int
    memory_bytes: int
    seconds: float | None
    """Of the whole run; None: how long a round takes follows from machines that are not here."""
    rings: tuple[RingCost, ...] = ()
    """The rings that would do, narrowest first."""
    left: int | None = None
    """Rounds that the ledgers of existing sites still allow (the fewest of them); None: there are no sites yet."""
    bodies: tuple[str, ...] = ()
    """The public bodies, where a site may have another; empty: every participant's body is public."""
    without_coin: tuple[float, float] | None = None
    """(sigma, expected ratio) of the same target without the secret coin; None: there is no coin, or sigma is given."""

    @property
    def hopeless(self) -> bool:
        """Whether the noise is expected to drown the update: the rehearsal's verdict, or the ratio's without one."""
        if not self.config.privacy.enabled:
            return False
        if self.rehearsal is not None:
            return self.rehearsal.verdict == "red"
        return self.ratio < REFUSE

    def refuse_if_hopeless(self) -> None:
        """Raises ConfigError unless the run can be useful or ``privacy.accept_noise`` is set."""
        if self.hopeless and not self.config.privacy.accept_noise:
            raise ConfigError(
                "The noise is expected to drown what is learnt" + self._evidence() + ".",
                self._what_would_do() + " Or run it all the same with privacy.accept_noise=true.",
            )

    def refuse_if_spent(self) -> None:
        """Raises PrivacyBudgetExceeded when the sites' ledgers allow no round at all."""
        if self.left == 0 and self.config.privacy.on_exhausted == "stop":
            sites = self.config.federation.sites_dir
            raise PrivacyBudgetExceeded(
                f"The sites in {sites} have spent their budget in earlier runs: not one more round of this kind fits.",
                f"See lensemble ledger show {sites}/site-0000; use other sites (federation.sites_dir), or raise the "
                "budget in each site's policy.yaml or policy.json.",
                round=0,
            )

    def _expected_time(self) -> str:
        if self.seconds is None:
            return "how long a round takes the sites' machines, lensemble status tells after the first"
        source = "local step timed here, Flower's cost as measured on two cores"
        return f"the whole run about {_duration(self.seconds)} ({source})"

    def _evidence(self) -> str:
        if self.rehearsal is not None:
            return f" (on public data it adds {_percent(self.rehearsal.cost)} of the start's {self.rehearsal.metric})"
        return f" (expected signal-to-noise {self.ratio:.2g}, below {REFUSE})"

    def _what_would_do(self) -> str:
        plan, privacy = self.plan, self.config.privacy
        share = plan.min_survivors / plan.n

        def std(n: int) -> float:
            if plan.guarantee != Guarantee.CENTRAL:
                return plan.noise_std
            m = max(plan.colluders + 2, math.floor(share * n))
            m = max(m, plan.colluders + plan.per_person)
            return own_noise_std("central", plan.noise_multiplier, plan.clip_norm, m, plan.colluders, plan.per_person)

        rate = plan.participation.rate
        participants = fewest_participants(std, plan.dimension, plan.clip_norm, sample_rate=rate)
        dimension = largest_dimension(plan.n, plan.noise_std, plan.clip_norm, sample_rate=rate)
        options = [f"about {participants:,} participants"]
        if dimension:
            options.append(f"at most {dimension:,} federated weights")
        if plan.guarantee == Guarantee.LOCAL:
            options.append("privacy.guarantee=central")
        return (
            f"At epsilon {privacy.target_epsilon:g} over {self.config.diloco.rounds} rounds it takes "
            + " or ".join(options)
            + ", or a smaller unit of privacy (one episode instead of a whole participant; not built)."
        )

    def text(self, short: bool = False) -> str:
        """What a person reads; the short form is what `lensemble run` prints first."""
        config, plan, privacy = self.config, self.plan, self.config.privacy
        lines = [
            f"{config.experiment}: {plan.n} participants, {config.diloco.rounds} rounds of {config.diloco.inner_steps} "
            f"local steps, {plan.dimension:,} federated weights ({config.federation.surface})"
        ]
        accountant = privacy.accountant if plan.discrete is None else "zCDP"
        if not privacy.enabled:
            lines.append("NON-PRIVATE: updates are masked but neither clipped nor noised; no epsilon is claimed.")
        else:
            lines += [
                f"noise: sigma {plan.noise_multiplier:.4g} (each participant's own std {plan.noise_std:.3g} = "
                f"{plan.noise_std / plan.clip_norm:.3g} C), calibrated by {accountant} to epsilon "
                f"{privacy.target_epsilon:g} at delta {privacy.target_delta:g}, guarantee {privacy.guarantee}"
                if privacy.noise_multiplier is None
                else f"noise: sigma {plan.noise_multiplier:.4g} as configured (each participant's own std "
                f"{plan.noise_std:.3g} = {plan.noise_std / plan.clip_norm:.3g} C), guarantee {privacy.guarantee}",
                f"epsilon of all rounds at delta {privacy.target_delta:g}: central {_number(self.epsilon_central)}, "
                f"local {_number(self.epsilon_local)}",
            ]
            if plan.discrete is not None:
                steps, gap = math.ldexp(plan.noise_std, plan.ring.scale_log2), plan.discrete.gap
                lines.append(
                    f"mechanism: discrete Gaussian on the ring, s/g = {steps:.3g}; its sum adds "
                    f"{f'{gap:.2g}' if gap > 1e-12 else 'nothing'} to the central mu of a round; converted as "
                    "concentrated privacy (zCDP)"
                )
            if privacy.sample_rate < 1.0:
                lines.append(self._coin_line())
            if privacy.entropy == "replay":
                lines.append("NON-PRIVATE: the noise is seeded (replay); no epsilon is claimed.")
            allowed = self.rounds_allowed
            if allowed < config.diloco.rounds:
                lines.append(
                    f"WARNING: the budget allows {allowed} of {config.diloco.rounds} rounds; the run will stop there "
                    "with exit status 3."
                )
            if self.left is not None and self.left < config.diloco.rounds:
                lines.append(
                    f"WARNING: the sites' own ledgers allow {self.left} more rounds of this kind; the run will stop "
                    "there with exit status 3."
                )
            lines.append(
                f"signal-to-noise expected from n, d and sigma: {self.ratio:.2g} "
                f"({'good' if self.ratio >= WARN else 'weak' if self.ratio >= REFUSE else 'very weak'}; "
                "a poor guide across parameterisations)"
            )
            if self.rehearsal is not None:
                lines.append(self._rehearsal_line(self.rehearsal))
            else:
                lines.append(f"no public rehearsal: it would take over {MOST_REHEARSAL_S:g} s; the ratio above judges")
        if self.bodies:
            lines.append(self._bodies_line())
        if plan.two_party:
            lines.append(
                "WARNING: two participants: each sees the other's update, hidden only by the other's own noise."
            )
        lines.append(
            f"per participant and round: {_bytes(self.bytes_up)} up, {_bytes(self.bytes_down)} down; a participant "
            f"needs about {_bytes(self.memory_bytes)} of memory; {self._expected_time()}"
        )
        if config.secagg.verify_sum:
            lines.append(f"that a model is what the sum gives is checked by {sum_checked_by(config)}")
        if self.rings:
            against = "the noise" if privacy.enabled else "a public update"
            lines.append(ring_line(plan.ring.bits, list(self.rings), against))
        if not short:
            lines.append(f"loops of the release path and the masks: {describe(plan.dimension)}")
            grade, why_not = claim_grade(self.claims, list(privacy.claim))
            lines += ["", claims_table(self.claims), ""]
            if privacy.claim:
                verdict = "holds" if grade else "does not hold: " + "; ".join(why_not)
                lines.append(f"privacy.claim = {', '.join(privacy.claim)}: {verdict}")
        if self.hopeless and self.config.privacy.accept_noise:
            lines.append(f"The noise may drown what is learnt{self._evidence()}; accepted by privacy.accept_noise.")
        elif self.hopeless:
            lines.append(f"The noise is expected to drown what is learnt{self._evidence()}. {self._what_would_do()}")
        return "\n".join(lines)

    @property
    def rounds_allowed(self) -> int:
        """Rounds that the run's own target allows at the plan's noise."""
        return rounds_allowed(self.config, self.plan)

    def _bodies_line(self) -> str:
        """What happens at a site whose body is not public; nobody but the site knows whether there is one."""
        rate = self.config.inner.head_lr
        fresh = f"trains a fresh action head (inner.head_lr={rate:g})" if rate > 0 else "keeps an untrained action head"
        return (
            f"{'' if rate > 0 else 'WARNING: '}public bodies, the only ones in a rehearsal: {', '.join(self.bodies)}; "
            f"a site with another {fresh}: not in these figures" + ("" if rate > 0 else ": set inner.head_lr above 0")
        )

    def _coin_line(self) -> str:
        """What the secret coin does here, and plainly whether it pays."""
        rate = self.config.privacy.sample_rate
        text = (
            f"secret coin: each participant's update is in with probability {rate:g}, else its release is noise alone; "
            f"sums are divided by {rate:g} times their size"
        )
        if self.without_coin is None:
            return text
        sigma, ratio = self.without_coin
        pays = "it pays" if self.ratio > ratio else "IT DOES NOT PAY: signal falls by the rate, noise by less"
        text += f". Without it sigma would be {sigma:.4g} and signal-to-noise {ratio:.2g}, not {self.ratio:.2g}: {pays}"
        return text

    @staticmethod
    def _rehearsal_line(rehearsal: Rehearsal) -> str:
        return (
            f"rehearsal on public data: {rehearsal.verdict}, noise adds {_percent(rehearsal.cost)} of the start's "
            f"{rehearsal.metric} ({rehearsal.start:.3g} at the start, {rehearsal.noiseless:.3g} without noise, "
            f"{rehearsal.noisy:.3g} with{_spread(rehearsal.draws)}); signal-to-noise there "
            f"{rehearsal.signal_to_noise:.2g}, median norm of an update {rehearsal.median_norm:.3g}"
        )


def _spread(draws: tuple[float, ...]) -> str:
    if len(draws) < 2:
        return ", one draw"
    return f", the median of {len(draws)} draws from {min(draws):.3g} to {max(draws):.3g}"


class _Sizes:
    """Just enough of a task for a specimen RoundOpen."""

    def __init__(self, dimension: int) -> None:
        self.dimension, self.base_hash, self.probe_hash = dimension, bytes(32), bytes(32)

    def sketch_hash(self, sketch_seed: int) -> bytes:
        return bytes(32)


def _specimen(config: Config, plan: Plan, task: Task | None):
    roster = tuple(i.to_bytes(32, "big") for i in range(plan.n))
    return round_open(config, task or _Sizes(plan.dimension), plan, bytes(32), 0, bytes(32), roster)  # type: ignore[arg-type]


def run_preflight(config: Config, progress: Progress | None = None, simulation: bool = True) -> Preflight:
    """Make the public data and warm start if they are missing, rehearse, and gather the figures.

    Raises:
        ConfigError: the configuration cannot work (infeasible target, ring too coarse).
    """
    task = build_task(config, allowed=own_choice(config))
    task.prepare(progress)
    plan = make_plan(config, config.federation.participants, task.dimension)
    opened = _specimen(config, plan, None)
    rehearsal = None
    update, update_seconds = _timed_update(task, config)
    if config.privacy.enabled:
        if _rehearsal_seconds(config, plan, update_seconds) <= MOST_REHEARSAL_S:
            rehearsal = rehearse(task, config, plan, progress)
            update_seconds = rehearsal.update_seconds
    mean_square = float(np.mean(np.square(update, dtype=np.float64)))
    up, down = _traffic(plan, config.secagg.compares_views, config.secagg.verify_sum)
    return Preflight(
        config=config,
        plan=plan,
        claims=claims_of(config, plan, simulation),
        epsilon_local=epsilon_after(opened, config.diloco.rounds, "local"),
        epsilon_central=epsilon_after(opened, config.diloco.rounds, "central"),
        ratio=_ratio(config, plan),
        rehearsal=rehearsal,
        bytes_up=up,
        bytes_down=down,
        # theta, trained copy, AdamW moments and gradients (float32), k (int64), the masked vector, Flower's copies
        memory_bytes=_PROCESS_BYTES + plan.dimension * (5 * 4 + 8) + 6 * plan.ring.wire_bytes,
        seconds=_run_seconds(config, plan, update_seconds) if simulation else None,
        rings=tuple(ring_costs(config, plan.n, plan.dimension, mean_square)),
        left=_rounds_left(config, plan) if simulation else None,
        bodies=_public_bodies(config, task),
        without_coin=_without_coin(config, plan),
    )


def _public_bodies(config: Config, task: Task) -> tuple[str, ...]:
    world = getattr(task, "world", None)
    return tuple(world.embodiments) if world is not None and config.data.name == "recordings" else ()


def rounds_allowed(config: Config, plan: Plan) -> int:
    """Rounds, of those that are planned, that the run's own target allows at the plan's noise; needs no data."""
    rounds = config.diloco.rounds
    if not config.privacy.enabled:
        return rounds
    opened, most = _specimen(config, plan, None), config.privacy.target_epsilon * (1 + 1e-9)
    if epsilon_after(opened, rounds) <= most:
        return rounds
    low, high = 0, rounds + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon_after(opened, middle) <= most else (low, middle)
    return low


def check_plan(config: Config) -> Plan:
    """The numbers of a run, without data.

    Raises:
        ConfigError: the configuration cannot work (infeasible target, ring too coarse).
    """
    return make_plan(config, config.federation.participants, build_task(config, allowed=own_choice(config)).dimension)


def estimated_seconds(config: Config, progress: Progress | None = None) -> float:
    """Seconds that `lensemble run` will take, its rehearsal included. Makes the public data and warm start if missing.

    Raises:
        ConfigError: as :func:`check_plan`.
    """
    plan = check_plan(config)
    task = build_task(config, allowed=own_choice(config))
    task.prepare(progress)
    _, update_seconds = _timed_update(task, config)
    rehearsal = _rehearsal_seconds(config, plan, update_seconds) if config.privacy.enabled else 0.0
    return _run_seconds(config, plan, update_seconds) + (rehearsal if rehearsal <= MOST_REHEARSAL_S else 0.0)


def _timed_update(task: Task, config: Config) -> tuple[np.ndarray, float]:
    """A public update, and its seconds: the best of three, because the first builds what later ones find."""
    best = math.inf
    for _ in range(3):
        started = time.monotonic()
        update = task.public_update(task.initial(), 0, steps=config.diloco.inner_steps, sketch_seed=0)
        best = min(best, time.monotonic() - started)
    return update, best


def _rehearsal_seconds(config: Config, plan: Plan, update_seconds: float) -> float:
    return 2 * config.diloco.rounds * plan.n * update_seconds


def _run_seconds(config: Config, plan: Plan, update_seconds: float) -> float:
    exchanges = 4 * (_EXCHANGE_S + plan.n * _MESSAGE_S)
    return _START_S + config.diloco.rounds * (exchanges + plan.n * update_seconds / (os.cpu_count() or 1))


def _ratio(config: Config, plan: Plan) -> float:
    if not config.privacy.enabled:
        return math.inf
    return expected_ratio(plan.n, plan.dimension, plan.noise_std, plan.clip_norm, sample_rate=plan.participation.rate)


def _without_coin(config: Config, plan: Plan) -> tuple[float, float] | None:
    privacy = config.privacy
    if privacy.sample_rate == 1.0 or privacy.noise_multiplier is not None:
        return None
    full = dataclasses.replace(config, privacy=dataclasses.replace(privacy, sample_rate=1.0))
    other = make_plan(full, plan.n, plan.dimension)
    return other.noise_multiplier, _ratio(full, other)


def _rounds_left(config: Config, plan: Plan) -> int | None:
    """The fewest further rounds that the ledgers of simulated sites in ``federation.sites_dir`` allow."""
    if config.federation.sites_dir is None:
        return None
    sites = [p for p in sorted(sites_folder(config, "").glob("site-*")) if Site.exists(p)]
    fresh = bytes(32)  # a federation that no ledger knows: the run's own budget is untouched
    left = []
    for folder in sites[: plan.n]:
        site = Site(folder)
        with site.ledger() as ledger:
            left.append(ledger.remaining(plan.charge, site.policy.budgets, fresh))
    return min(left, default=None)


def _traffic(plan: Plan, compares_views: bool, verify: bool) -> tuple[int, int]:
    """Payload bytes of one participant in one round, (up, down), without drops."""
    n = plan.n
    sent = [Stage.KEYS, Stage.SHARES, Stage.MASKED, Stage.REVEAL] + [Stage.CONSISTENCY] * compares_views
    got = [Stage.ROSTER, Stage.ENVELOPES, Stage.SURVIVORS] + [Stage.CONFIRMED] * compares_views
    up, down = (sum(message_size(stage, n, n, verify) for stage in stages) for stages in (sent, got))
    down += 480 + 2 * 32 * n  # RoundOpen and RoundClose with their rosters
    if verify:  # the sum comes in place of the model, with a second RoundClose
        return up + plan.ring.wire_bytes + 32, down + 155 + 32 * n + plan.ring.bits // 8 * plan.dimension
    return up + plan.ring.wire_bytes + 32, down + 4 * plan.dimension


def _number(epsilon: float) -> str:
    return printed(epsilon) if math.isfinite(epsilon) else "infinite (no guarantee)"


def _percent(cost: float) -> str:
    return f"{100 * cost:+.1f} %" if cost < 10 else "more than ten times"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
