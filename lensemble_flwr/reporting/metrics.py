"""What the metrics of a run mean: name, unit, and which way is better. An unknown metric is shown without judgement."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lensemble_flwr.federation.task import MetricLabel
from lensemble_flwr.reporting.run_data import RunData
from lensemble_flwr.reporting.wording import change, clean, figure


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: its key in the records.
        label: in words, for a sentence ("the 5-step prediction error").
        short: for a column.
        unit: empty if it has none.
        lower_is_better: None if unknown.
        latent: whether it describes the latent space (collapse) instead of a success.
        noise: figures smaller than this are rounding, and shown as zero.
    """

    name: str
    label: str
    short: str
    unit: str = ""
    lower_is_better: bool | None = None
    latent: bool = False
    noise: float = 0.0

    def figure(self, value: float) -> str:
        return figure(0.0 if abs(value) < self.noise else value)

    @property
    def direction(self) -> str:
        """ "lower is better", or empty."""
        if self.lower_is_better is None:
            return ""
        return "lower is better" if self.lower_is_better else "higher is better"

    def change(self, before: float, after: float) -> str:
        """How ``after`` stands to ``before`` in words; a difference where more is better (R2, accuracy): twice as much
        as almost nothing would mean nothing."""
        if self.lower_is_better is not False:
            return change(before, after)
        if not (math.isfinite(before) and math.isfinite(after)):
            return ""
        return f"{figure(abs(after - before))} {'lower' if after < before else 'higher'}"

    def better(self, a: float, b: float) -> bool | None:
        """Whether ``a`` is better than ``b``; None if that is unknown."""
        if self.lower_is_better is None or not (math.isfinite(a) and math.isfinite(b)):
            return None
        return a < b if self.lower_is_better else a > b


_KNOWN = (
    Metric("r5", "5-step prediction error", "5-step error", "error / copy-last error", True),
    Metric("heldout_error", "held-out error", "held-out error", "share of variance", True),
    Metric("r1", "1-step prediction error", "1-step error", "error / copy-last error", True),
    Metric("altitude_rmse", "5-step altitude error", "altitude error", "RMSE, simulator units", True),
    Metric("state_probe_r2", "held-out state-probe R\u00b2", "state-probe R\u00b2", "", False),
    Metric(
        "action_sensitivity", "action sensitivity", "action sensitivity", "error / error with true actions", None, True
    ),
    Metric("effective_rank", "effective rank of the latent", "effective rank", "dimensions", None, True),
    Metric("latent_std_mean", "mean latent std", "mean std", "latent units", None, True),
    Metric("latent_std_min", "smallest latent std", "smallest std", "latent units", None, True),
    Metric("sigreg", "held-out SIGReg", "SIGReg", "1 for Gaussian latents", None, True),
    Metric("frame_drift_deg", "frame drift from the public start", "frame drift", "degrees", None, True, 1e-3),
    Metric(
        "distillation_rms",
        "student's distance from the federated function",
        "distillation error",
        "latent units",
        True,
        True,
    ),
)
_BY_NAME = {m.name: m for m in _KNOWN}
_ORDER = {m.name: i for i, m in enumerate(_KNOWN)}
_PLACES = {"nominal": "nominal", "shifted": "shifted"}


Labels = Mapping[str, MetricLabel]
"""What a run's own task calls its metrics."""


def describe(name: str, labels: Labels | None = None) -> Metric:
    """The metric of that name: as its task calls it, or as it is known here; ``r5_nominal`` and the like are the same
    figure in another environment."""
    if labels and name in labels:
        own = labels[name]
        return Metric(name, clean(own.label), clean(own.label), clean(own.unit), own.lower_is_better)
    base, place = _split(name)
    if base in _BY_NAME:
        known = replace(_BY_NAME[base], name=name)
        if not place:
            return known
        return replace(known, label=f"{known.label} ({place})", short=f"{known.short}, {place}")
    shown = clean(name)
    return Metric(name, shown, shown, lower_is_better=False if name.endswith("r2") else None)


def _split(name: str) -> tuple[str, str]:
    """("r5", "nominal") of "r5_nominal", "nominal_r5", "nominal/r5"."""
    if name in _BY_NAME:
        return name, ""
    parts = re.split(r"[_/.]", name)
    for position in (0, -1):
        if len(parts) > 1 and parts[position] in _PLACES:
            rest = parts[1:] if position == 0 else parts[:-1]
            return "_".join(rest), _PLACES[parts[position]]
    return name, ""


def ordered(names: Iterable[str], labels: Labels | None = None) -> list[Metric]:
    """The metrics of these names: what matters most first, other environments after the run's own, unknown last."""

    own = {name: i - len(labels) for i, name in enumerate(labels)} if labels else {}

    def rank(name: str) -> tuple[bool, int, str]:
        if name in own:  # as the task lists them
            return False, own[name], name
        base, place = _split(name)
        return bool(place), _ORDER.get(base, len(_ORDER)), name

    return [describe(name, labels) for name in sorted(set(names), key=rank)]


def metrics_of(run: RunData, latent: bool = False) -> list[Metric]:
    """The metrics that this run's records hold: its successes, the headline first, or its latent health."""
    names = set(run.start)
    for record in run.rounds:
        names |= set(record.metrics)
    found = [m for m in ordered(names, run.labels) if m.latent == latent]
    if not latent:
        found.sort(key=lambda m: m.name != run.headline)
    return found


def primary(run: RunData) -> Metric | None:
    """The one metric that the outcome is told in; None if there is none."""
    return next(iter(metrics_of(run)), None)
