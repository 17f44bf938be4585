"""A run in words and in text tables: what was gained, what is claimed. The terminal and the report share them.

ASCII only, whatever a name holds, so that any terminal can print it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lensemble_flwr.reporting.metrics import Metric, metrics_of, ordered, primary
from lensemble_flwr.reporting.run_data import Claim, Round, RunData
from lensemble_flwr.reporting.wording import (
    clean,
    data_size,
    delta,
    duration,
    epsilon,
    figure,
    listed,
    observer,
    short_epsilon,
)

RUN_ROW = "this run"
NOTICEABLE = 0.05
"""A metric that changed by less than this share is not called worse: evaluations are small samples."""
TWO_PARTY = (
    "WARNING: with two participants, each can subtract its own update from the sum and see the other's: only the "
    "other's own noise hides it, and the masks hide it from the coordinator alone."
)


def start_name(run: RunData) -> str:
    """What the model before round 0 is called: only a world model is warm-started."""
    return "warm start" if run.task == "world_model" else "start"


def closing_sentence(run: RunData) -> str:
    """The outcome in one sentence: how far it came, what was gained, what is claimed (and a warning for two)."""
    warning = f" {TWO_PARTY}" if run.two_party else ""
    return f"{how_far(run)}{gained(run)}{lost(run)}; {claimed(run)}.{warning}"


def how_far(run: RunData) -> str:
    """ "After all 10 rounds", "The privacy budget ended the run after 2 of 10 rounds"."""
    done, planned, status = len(run.rounds), run.planned_rounds, run.manifest.status
    burnt = f" ({run.burnt} burnt)" if run.burnt else ""
    if status == "BUDGET":
        return f"The privacy budget ended the run after {_of(done, planned)}{burnt}"
    if status == "running":
        if not done:
            return "No round is finished (the run is under way or was interrupted)"
        return f"After {_of(done, planned)}{burnt} (the run is under way or was interrupted)"
    if status == "STOPPED":
        return f"The run was stopped after {_of(done, planned)}{burnt}"
    if status != "completed":
        return f"The run failed with [{_ascii(status)}] after {_of(done, planned)}{burnt}"
    everything = f"all {planned} rounds" if planned > 1 else "the only round"
    return f"After {everything if done == planned else _of(done, planned)}{burnt}"


def _of(done: int, planned: int) -> str:
    if done == 0:
        return f"none of {planned} rounds" if planned > 1 else "no round"
    return f"{done} of {planned} round{'' if planned == 1 else 's'}"


def gained(run: RunData) -> str:
    """The primary metric against the start and the baselines, as a clause that starts with its own separator."""
    metric = primary(run)
    if metric is None:
        return ""
    # how_far ends in a whole sentence, except in "After ..." where this clause is the sentence.
    joint = ", " if how_far(run).startswith("After") else "; "
    before, after = run.start.get(metric.name, math.nan), run.final.get(metric.name, math.nan)
    label = f"the {_ascii(metric.label)}"
    if not run.committed:
        known = f" of {figure(before)}" if math.isfinite(before) else ""
        return f"{joint}the model is the {start_name(run)} with a {_ascii(metric.label)}{known}"
    if not math.isfinite(after):
        return f"{joint}{label} is no longer finite (the model diverged)"
    if not math.isfinite(before):
        return f"{joint}{label} is {figure(after)} (that of the start is not stored)"
    asides = [a for a in (metric.change(before, after), *_against(run, metric)) if a]
    aside = f" ({'; '.join(asides)})" if asides else ""
    better = metric.better(after, before)
    verdict = "" if better is not False or figure(after) == figure(before) else ", WORSE than before"
    verb = "fell" if after < before else "rose"
    if figure(after) == figure(before):
        return f"{joint}{label} stayed at {figure(before)}{aside}"
    return f"{joint}{label} {verb} from {figure(before)} at the {start_name(run)} to {figure(after)}{verdict}{aside}"


def lost(run: RunData) -> str:
    """What became clearly worse besides the primary metric (forgetting), as a clause with its own separator."""
    if not run.committed:
        return ""
    worse = []
    for metric in metrics_of(run)[1:]:
        before, after = run.start.get(metric.name, math.nan), run.final.get(metric.name, math.nan)
        if metric.better(after, before) is False and abs(after - before) > NOTICEABLE * abs(before):
            verb = "fell" if after < before else "rose"
            worse.append(f"the {_ascii(metric.label)} {verb} from {figure(before)} to {figure(after)}")
    return f"; but {listed(worse)}" if worse else ""


def _against(run: RunData, metric: Metric) -> list[str]:
    """The best local-only and pooled rows, where they were computed."""
    found = []
    for kind, words in (("local", "training alone"), ("pooled", "pooled data")):
        values = [
            b.metrics[metric.name]
            for b in run.baselines
            if baseline_kind(b.name) == kind and math.isfinite(b.metrics.get(metric.name, math.nan))
        ]
        if values:
            best = min(values) if metric.lower_is_better is not False else max(values)
            found.append(f"{words} {figure(best)}")
    return found


def claimed(run: RunData) -> str:
    """What the claims table allows to be said, as a clause."""
    if run.replay:
        return "NON-PRIVATE: the noise is seeded and can be replayed, so nothing is claimed"
    if not run.private:
        return "NON-PRIVATE: differential privacy is off, so nothing is claimed"
    holding = [c for c in run.claims if c.holds and c.epsilon < math.inf]
    others = [c for c in run.claims if c not in holding]
    if not holding:
        return "no privacy claim holds"
    groups: dict[tuple[float, float | None, str], list[Claim]] = {}
    for claim in holding:
        groups.setdefault((claim.epsilon, claim.delta, claim.unit), []).append(claim)
    parts = []
    for (eps, dlt, unit), claims in groups.items():
        protects = f", protecting {_ascii(unit)}," if unit and len(unit) <= 60 else ""
        whom = listed([_ascii(observer(c.observer)) for c in claims])
        parts.append(f"epsilon {epsilon(eps)} at delta {delta(dlt)}{protects} against {whom}")
    when = f" for all {run.planned_rounds} planned rounds" if len(run.rounds) < run.planned_rounds else ""
    text = f"claimed{when} is {listed(parts)}"
    if others:
        text += f"; nothing against {listed([_ascii(observer(c.observer)) for c in others]).replace(' and ', ' or ')}"
    return text


# ------------------------------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Comparison:
    """One row of the comparison: a model, its metrics, how its primary metric stands against the start."""

    name: str
    metrics: dict[str, float]
    against_start: str
    note: str
    is_run: bool = False


def comparison(run: RunData) -> tuple[list[Metric], list[Comparison]]:
    """The start, this run and the baselines, in that order, and the metrics that they have.

    A stored baseline that is the warm start takes the place of the run's own start.
    """
    start = dict(run.start)
    baselines = list(run.baselines)
    for row in list(baselines):
        if baseline_kind(row.name) == "start":
            baselines.remove(row)
            start = {**row.metrics, **start}
    chief = primary(run)

    def against(metrics: dict[str, float]) -> str:
        if chief is None:
            return ""
        return chief.change(start.get(chief.name, math.nan), metrics.get(chief.name, math.nan))

    rows = [Comparison(start_name(run), start, "", "before round 0")] if start else []
    if run.rounds:
        rows.append(Comparison(RUN_ROW, run.final, against(run.final), f"after round {len(run.rounds) - 1}", True))
    rows += [Comparison(clean(b.name), b.metrics, against(b.metrics), clean(b.note)) for b in baselines]
    own = metrics_of(run)
    known = {m.name for m in own}
    extra = {name for b in baselines for name in b.metrics} - known
    return own + [m for m in ordered(extra, run.labels) if not m.latent], rows


def rounds_rows(run: RunData) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of rounds; the last column holds remarks. The first row may be the start."""
    metrics = metrics_of(run)[:2]
    head = ["round", "outcome", "in sum", *[m.short for m in metrics]]
    head += ["eps central", "eps local", "down", "up", "time", "remarks"]
    body = []
    if run.start and metrics:
        body.append(["start", "", "", *[figure(run.start.get(m.name)) for m in metrics], "", "", "", "", "", ""])
    for record in run.rounds:
        body.append(
            [
                str(record.index),
                record.outcome,
                f"{record.participants}/{record.roster}",
                *[figure(record.metrics.get(m.name)) for m in metrics],
                short_epsilon(record.epsilon_central),
                short_epsilon(record.epsilon_local),
                data_size(record.bytes_down),
                data_size(record.bytes_up),
                duration(record.seconds),
                remark(record),
            ]
        )
    return head, body


def remark(record: Round) -> str:
    """What was unusual about a round; mostly empty."""
    notes = []
    if record.cause:
        notes.append(clean(record.cause))
    if record.replayed:
        notes.append("replayed at resume from the stored sum")
    if record.attempt is not None and record.attempt > 1:
        notes.append(f"attempt {record.attempt}")
    return "; ".join(notes)


def baseline_kind(name: str) -> str:
    """ "start", "local", "pooled", or "other" for a baseline that goes by that name."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if "local" in words or "alone" in words:
        return "local"
    if words & {"pooled", "pool", "union", "centralised", "centralized"}:
        return "pooled"
    if words & {"warm", "warmstart", "start"}:
        return "start"
    return "other"


def _ascii(text: str) -> str:
    return clean(text).replace("\u00b2", "2").encode("ascii", "replace").decode()
