"""The plots of a sweep: the frontier of privacy and utility, and the metric against each swept number.

A marker is the mean over seeds, its bar reaches from the smallest to the largest. Only finished points are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lensemble_flwr.reporting.drawing import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PANEL,
    PURPLE,
    RED,
    WIDE,
    Line,
    Plot,
    capital,
    few_ticks,
    name_lines,
    slug,
    svg,
    value_limits,
)
from lensemble_flwr.reporting.metrics import Metric
from lensemble_flwr.reporting.sweep import SIGMA, Group, Row, Spread, SweepData, short_keys
from lensemble_flwr.reporting.wording import clean, figure, listed, size_unit
from lensemble_flwr.sweep import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PRIVACY_KEYS = (SIGMA, "privacy.target_epsilon")
_LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "D"), (RED, "v"), (INK, "P"))
_MOST_SERIES = len(_LOOKS)
_WIDE_RANGE = 10.0
"""From this ratio of largest to smallest on, an axis is logarithmic."""


@dataclass(frozen=True)
class Mark:
    """One marker: its place, the range of its metric, and the rows behind it."""

    x: float
    y: Spread
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Series:
    """The marks that share the values of all keys but one."""

    name: str
    marks: tuple[Mark, ...]


def sweep_plots(data: SweepData) -> list[Plot]:
    """Every plot that the sweep has data for: the frontier first, then one for each swept number but the seed."""
    metrics = [m for m in data.metrics if not m.latent]
    if not metrics:
        return []
    plots = []
    if frontier := _frontier(data, metrics[0]):
        plots.append(frontier)
    for key in numeric_keys(data):
        if plot := _against(data, key, metrics[0], wide=not plots):
            plots.append(plot)
    return plots


def numeric_keys(data: SweepData) -> list[str]:
    """Swept keys with at least two different numbers; truth values and the seed are none."""
    found = []
    for key in data.group_keys:
        values = [row.point.values[key] for row in data.rows]
        numbers = {v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)}
        if len(numbers) > 1 and all(v is None or v in numbers for v in values):
            found.append(key)
    return found


# ------------------------------------------------------------------------------------------------ the plots


def _against(data: SweepData, key: str, metric: Metric, wide: bool) -> Plot | None:
    def place(group: Group) -> float:
        value = group.values[key]
        return float(value) if isinstance(value, (int, float)) else math.nan

    series = _series(data, [key], place, metric)
    if not series:
        return None
    short = _short(data, key)
    title = f"{capital(metric.label)} by {short}"
    name = f"sweep-{slug(key)}"
    caption = _caption(series, metric, f"against {key}")
    traffic = [
        [Mark(m.x, Spread.of(r.payload("up") + r.payload("down") for r in m.rows), m.rows) for m in s.marks]
        for s in series
    ]
    means = [mark.y.mean for marks in traffic for mark in marks if mark.y.count]
    costs = bool(means) and max(means) > 1.01 * min(means)  # bytes that do not depend on the key need no panel
    start = Spread.of(row.before(metric.name) for row in data.rows if row.finished)
    lost: dict[float, int] = {}  # value of the key -> points without a result
    for group in data.groups():
        without = sum(not (row.finished and math.isfinite(row.after(metric.name))) for row in group.rows)
        if without and math.isfinite(place(group)):
            lost[place(group)] = lost.get(place(group), 0) + without

    def draw(fig: Figure) -> None:
        if costs:
            axes, below = fig.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.7, 1]})
        else:
            axes, below = fig.subplots(), None
        _draw(axes, series, metric, start)
        bottom = axes if below is None else below
        if below is not None:
            unit, divisor = size_unit(max(means))
            curves: dict[tuple[tuple[float, float], ...], Line] = {}  # series that cost the same share one
            for (colour, shape), marks, one in zip(_LOOKS, traffic, series, strict=False):
                curve = tuple((m.x, m.y.mean / divisor) for m in marks if m.y.count)
                if curve and curve not in curves:
                    x, y = zip(*curve, strict=True)
                    below.plot(x, y, color=colour, marker=shape, linewidth=2, markersize=5)
                    curves[curve] = Line(y[-1], one.name, colour)
            lines = list(curves.values()) if len(curves) > 1 else []
            below.set_ylim(0, 1.15 * max(means) / divisor)
            few_ticks(below, 3)
            below.set_ylabel(f"Payload ({unit})")
            name_lines(below, lines)
            axes.tick_params(labelbottom=False)
        if lost:  # on the edge of the axes, where no figure can be read off them
            where: Any = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            axes.plot(list(lost), [0.0] * len(lost), "x", color=RED, markersize=8, markeredgewidth=2.2, **where)
        bottom.set_xlabel(capital(short))
        _x_axis(bottom, [*(m.x for s in series for m in s.marks), *lost])

    if lost:
        counts = listed([f"{count} at {value:g}" for value, count in sorted(lost.items())[:6]])
        caption += f" Red crosses on the axis: {sum(lost.values())} points without a result ({counts})."
    if costs:
        caption += " Below: payload of all rounds, up and down, all participants together."
    return Plot(
        name=name,
        title=title,
        caption=caption,
        svg=svg(name, title, caption, PANEL, draw, names=_room(series)),
        wide=svg(f"{name}-wide", title, caption, WIDE, draw, names=_room(series)) if wide else "",
    )


def _frontier(data: SweepData, metric: Metric) -> Plot | None:
    """Utility against epsilon, if sigma or the target was swept and a finite epsilon came out."""
    swept = [key for key in PRIVACY_KEYS if key in data.group_keys]
    if not swept:
        return None

    def place(group: Group) -> float:
        spent = [row.epsilon(row.view) for row in group.rows if row.finished]
        return max(spent, default=math.nan)  # it holds for each of the seeds

    series = _series(data, swept, place, metric)
    if not series:
        return None
    views = {row.view for s in series for m in s.marks for row in m.rows}
    view = f"{views.pop()} view" if len(views) == 1 else "each in its own view"
    title = f"The frontier: {metric.label} against epsilon"
    caption = _caption(series, metric, f"against the epsilon of all rounds ({view})")
    caption += " \u03c3 is the noise multiplier; smaller epsilon protects more."
    start = Spread.of(row.before(metric.name) for row in data.rows if row.finished)

    def draw(fig: Figure) -> None:
        axes = fig.subplots()
        _draw(axes, series, metric, start)
        axes.set_xlabel(f"Epsilon ({view})")
        marks = [m for s in series for m in s.marks]
        _x_axis(axes, [m.x for m in marks], ticks=False)
        for mark in series[0].marks if len(marks) <= 24 else ():
            sigma = Spread.of(row.sigma for row in mark.rows)
            axes.annotate(
                f"\u03c3 {sigma.mean:.3g}",
                (mark.x, mark.y.high),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=11,
                color=INK,
            )

    name = "sweep-frontier"
    room = _room(series)
    return Plot(
        name=name,
        title=title,
        caption=caption,
        svg=svg(name, title, caption, PANEL, draw, names=room),
        wide=svg(f"{name}-wide", title, caption, WIDE, draw, names=room),
    )


# ------------------------------------------------------------------------------------------------ parts


def _series(data: SweepData, along: Sequence[str], place: Callable[[Group], float], metric: Metric) -> list[Series]:
    """Marks by the keys that are neither ``along`` nor the seed; x by ``place``; empty ones are left out."""
    others = [key for key in data.group_keys if key not in along]
    names = dict(zip(others, short_keys(others), strict=True))
    found: dict[str, list[Mark]] = {}
    for group in data.groups():
        rows = tuple(row for row in group.rows if row.finished and math.isfinite(row.after(metric.name)))
        x = place(group)
        if not rows or not math.isfinite(x):
            continue
        name = ", ".join(f"{names[key].replace('_', ' ')} {as_text(group.values[key])}" for key in others)
        mark = Mark(x, Spread.of(row.after(metric.name) for row in rows), rows)
        found.setdefault(clean(name), []).append(mark)
    return [Series(name, tuple(sorted(marks, key=lambda m: m.x))) for name, marks in found.items()]


def _draw(axes: Axes, series: Sequence[Series], metric: Metric, start: Spread) -> None:
    shown = series[:_MOST_SERIES]
    lines, values = [], []
    xs = [m.x for s in shown for m in s.marks]
    if start.count:
        axes.axhline(start.mean, color=FAINT, linewidth=1.4, linestyle=(0, (1, 1.6)), zorder=2)
        lines.append(Line(start.mean, f"start {figure(start.mean)}", FAINT))
        values.append(start.mean)
    for number, (one, (colour, shape)) in enumerate(zip(shown, _LOOKS, strict=False)):
        x = [_beside(m.x, number - (len(shown) - 1) / 2, xs) for m in one.marks]
        y = [m.y.mean for m in one.marks]
        reach = [[m.y.mean - m.y.low for m in one.marks], [m.y.high - m.y.mean for m in one.marks]]
        style = {"color": colour, "marker": shape, "markersize": 6, "linewidth": 2, "elinewidth": 1.4}
        axes.errorbar(x, y, yerr=reach, capsize=4, zorder=3, **style)  # type: ignore[arg-type]
        for place, mark in zip(x, one.marks, strict=True):
            if mark.y.count > 1:  # each run
                runs = [row.after(metric.name) for row in mark.rows]
                axes.plot([place] * len(runs), runs, ".", color=colour, alpha=0.55, markersize=5, zorder=2.5)
        values += [v for m in one.marks for v in (m.y.low, m.y.high)]
        lines.append(Line(y[-1], one.name or f"end {figure(y[-1])}", colour, True))
    value_limits(axes, values)
    axes.set_ylabel(capital(metric.unit or metric.short))
    name_lines(axes, lines)


def _beside(x: float, steps: float, xs: Sequence[float]) -> float:
    """``x`` moved a little, so that the bars of several series do not hide each other."""
    if _logarithmic(xs):
        return float(x * (max(xs) / min(xs)) ** (0.006 * steps))
    return x + 0.006 * steps * (max(xs) - min(xs))


def _logarithmic(xs: Sequence[float]) -> bool:
    return min(xs) > 0 and max(xs) / min(xs) >= _WIDE_RANGE


def _x_axis(axes: Axes, xs: Sequence[float], ticks: bool = True) -> None:
    """Logarithmic over a wide range; a tick at each value where there is room, else at round numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    wide = _logarithmic(xs)
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        if not ticks or len(set(xs)) > 8:
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    if ticks and len(set(xs)) <= 8:
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(xs))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.4g}"))
    axes.margins(x=0.09)


def _room(series: Sequence[Series]) -> float:
    """CSS pixels at the right for the longest name."""
    longest = max((len(s.name) for s in series[:_MOST_SERIES]), default=0)
    return float(min(230, max(118, 24 + 7.2 * longest)))


def _caption(series: Sequence[Series], metric: Metric, against: str) -> str:
    direction = f"{capital(metric.direction)}. " if metric.direction else ""
    counts = {m.y.count for s in series for m in s.marks}
    low, high = min(counts), max(counts)
    seeds = f"{low}" if low == high else f"{low} to {high}"
    if high == 1:
        text = f"{direction}The {metric.label} on public held-out data {against}. One run a marker: no ranges."
    else:
        text = (
            f"{direction}The {metric.label} on public held-out data {against}. Markers: means over {seeds} seeds; "
            "dots: each run; bars: from the smallest to the largest."
        )
    if len(series) > _MOST_SERIES:
        text += f" The first {_MOST_SERIES} of {len(series)} combinations; the table has all."
    return text


def _short(data: SweepData, key: str) -> str:
    return clean(dict(zip(data.group_keys, short_keys(data.group_keys), strict=True))[key]).replace("_", " ")
