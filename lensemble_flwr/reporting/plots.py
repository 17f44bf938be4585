"""The plots of a report: matplotlib figures turned into SVG that can stand inside an HTML page.

Every x axis counts rounds as the records do, from 0, with the model before round 0 at "start". Rounds that never ran
stay on the axis as a hatched area. Nothing is told by colour alone: lines have markers, dashes and written labels.
Matplotlib's object interface is used, so no state is shared with a caller that plots too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    whole_ticks,
)
from lensemble_flwr.reporting.metrics import Metric, metrics_of, primary
from lensemble_flwr.reporting.run_data import RunData
from lensemble_flwr.reporting.summary import baseline_kind, start_name
from lensemble_flwr.reporting.wording import clean, data_size, delta, duration, epsilon, figure, size_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BASELINE_COLOURS = {"start": FAINT, "local": ORANGE, "pooled": GREEN, "other": PURPLE}
_BASELINE_DASHES: dict[str, Any] = {"start": (0, (1, 1.6)), "local": (0, (5, 2)), "pooled": (0, (7, 2, 1.5, 2))}
_MOST_BASELINES = 4
_MOST_MARKERS = 40
_MOST_BARS = 80


def all_plots(run: RunData) -> list[Plot]:
    """Every plot that this run has data for, the most important first. Empty while no round is finished."""
    if not run.rounds:
        return []
    chief = primary(run)
    plots = []
    if chief is not None:
        plots.append(_evaluation(run, chief, wide=True))
    plots.append(_epsilon(run))
    plots.append(_participants(run))
    others = [m for m in metrics_of(run) if chief is None or m.name != chief.name]
    plots += [_evaluation(run, m) for m in others if _moves(run, m)]
    plots += _latent(run)
    plots.append(_traffic(run))
    if any(r.seconds is not None for r in run.rounds):
        plots.append(_seconds(run))
    return plots


def _moves(run: RunData, metric: Metric) -> bool:
    """Whether training changed it: what only a frozen part of the model decides needs no plot."""
    values = [run.start.get(metric.name), *(r.metrics.get(metric.name) for r in run.rounds)]
    return len({figure(v) for v in values}) > 1 or len(values) < 3


# ------------------------------------------------------------------------------------------------ the plots


def _evaluation(run: RunData, metric: Metric, wide: bool = False) -> Plot:
    start = run.start.get(metric.name, math.nan)
    values = [r.metrics.get(metric.name, math.nan) for r in run.rounds]
    lines = []
    if math.isfinite(start):
        lines.append(Line(start, f"{start_name(run)} {metric.figure(start)}", _BASELINE_COLOURS["start"]))
    others = [b for b in run.baselines if math.isfinite(b.metrics.get(metric.name, math.nan))]
    others = [b for b in others if baseline_kind(b.name) != "start"]
    others.sort(key=lambda b: ("local", "pooled", "other").index(baseline_kind(b.name)))
    kinds = ["start"] * len(lines)
    for baseline in others[: _MOST_BASELINES - len(lines)]:
        kind = baseline_kind(baseline.name)
        value = baseline.metrics[metric.name]
        lines.append(Line(value, f"{_shortened(baseline.name)} {metric.figure(value)}", _BASELINE_COLOURS[kind]))
        kinds.append(kind)
    last = next((v for v in reversed(values) if math.isfinite(v)), math.nan)

    def draw(fig: Figure) -> None:
        axes = fig.subplots()
        x, y = [-1, *_x(run)], [start, *values]
        for line, kind in zip(lines, kinds, strict=True):
            dashes = _BASELINE_DASHES.get(kind, (0, (2, 2)))
            axes.axhline(line.y, color=line.colour, linewidth=1.4, linestyle=dashes, zorder=2)
        _curve(axes, run, x, y, BLUE)
        _rounds_axis(axes, run)
        axes.set_ylabel(capital(metric.unit or metric.short))
        value_limits(axes, [*y, *(line.y for line in lines)])
        named = [*lines, Line(last, f"this run {metric.figure(last)}", BLUE, True)] if math.isfinite(last) else lines
        name_lines(axes, named)

    title = capital(metric.label) + " by round"
    note = f"{capital(metric.direction)}. " if metric.direction else ""
    unit = {
        "error / copy-last error": "1 is the error of predicting that nothing moves. ",
        "error / error with true actions": "Above 1 the model uses the actions. ",
        "share of variance": "1 is the error of always predicting the mean. ",
    }.get(metric.unit, "")
    story = f"{metric.figure(start)} at the start, " if math.isfinite(start) else ""
    caption = (
        f"{note}{unit}Public held-out data: {story}{metric.figure(values[-1])} after round {run.rounds[-1].index}."
    )
    if run.burnt:
        caption += " Hollow markers: burnt rounds, which left the model as it was."
    return Plot(
        name=f"evaluation-{slug(metric.name)}",
        title=title,
        caption=caption,
        svg=svg(f"evaluation-{slug(metric.name)}", title, caption, PANEL, draw),
        wide=svg(f"evaluation-{slug(metric.name)}-wide", title, caption, WIDE, draw) if wide else "",
    )


def _epsilon(run: RunData) -> Plot:
    title = "Privacy spent by round"
    views = ["central", "local"] if run.guarantee != "local" else ["local", "central"]
    spent = {v: [run.epsilon(v, i) for i in range(len(run.rounds))] for v in views}
    words = {
        "central": "central view: noise of the others counts",
        "local": "local view: own noise only",
    }

    if not run.private:
        caption = f"Epsilon is {epsilon(math.inf)} in both views from the first round on."

        def empty(fig: Figure) -> None:
            axes = fig.subplots()
            _rounds_axis(axes, run)
            axes.set_yticks([])
            axes.set_ylabel("Epsilon")
            style: Any = {"ha": "center", "transform": axes.transAxes, "color": RED, "fontweight": "bold"}
            axes.text(0.5, 0.56, "infinite (no guarantee)", fontsize=17, **style)
            axes.text(0.5, 0.42, "this run is non-private", fontsize=13, **style)

        return Plot("epsilon", title, caption, svg("epsilon", title, caption, PANEL, empty, names=12))

    def draw(fig: Figure) -> None:
        top, bottom = fig.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.55, 1]})
        for axes, view, colour in ((top, views[0], BLUE), (bottom, views[1], PURPLE)):
            values = spent[view]
            finite = [v for v in values if math.isfinite(v)]
            _curve(axes, run, [-1, *_x(run)], [0.0, *values], colour)
            _rounds_axis(axes, run, label=axes is bottom)
            named = [Line(finite[-1], epsilon(finite[-1]), colour, True)] if finite else []
            highest = max(finite, default=1.0)
            if axes is top:
                axes.axhline(run.target_epsilon, color=RED, linewidth=1.6, linestyle=(0, (6, 2)), zorder=2)
                named.append(Line(run.target_epsilon, f"budget {run.target_epsilon:g}", RED))
                highest = max(highest, run.target_epsilon)
            axes.set_ylim(0, highest * 1.16)
            few_ticks(axes, 4 if axes is top else 3)
            axes.set_ylabel("Epsilon")
            axes.set_title(capital(words[view]), loc="left", fontsize=11.5, color=INK)
            if not finite:
                axes.text(
                    0.5,
                    0.5,
                    epsilon(math.inf),
                    ha="center",
                    va="center",
                    transform=axes.transAxes,
                    color=RED,
                    fontweight="bold",
                )
            name_lines(axes, named)

    ends = {v: epsilon(spent[v][-1]) for v in views}
    caption = (
        f"At delta {delta(run.target_delta)}, from the public record: burnt rounds and dropouts count as spent. "
        f"Now {ends[views[0]]} of {run.target_epsilon:g} in the {views[0]} view, which the noise is sized for, and "
        f"{ends[views[1]]} in the {views[1]} view. A figure is a promise only where the claims table says so."
    )
    return Plot("epsilon", title, caption, svg("epsilon", title, caption, PANEL, draw))


def _participants(run: RunData) -> Plot:
    title = "Participants in the sum by round"
    need = run.manifest.plan.get("min_survivors")
    need = need if isinstance(need, int) and not isinstance(need, bool) else None

    def draw(fig: Figure) -> None:
        axes = fig.subplots()
        committed = [r for r in run.rounds if r.committed]
        burnt = [r for r in run.rounds if not r.committed]
        _bars(axes, {r.index: r.roster for r in run.rounds}, color="#dbe6f0", zorder=1)
        _bars(axes, {r.index: r.participants for r in committed}, color=BLUE, zorder=2)
        if burnt:
            rosters = [r.roster for r in burnt]
            axes.bar(
                [r.index for r in burnt],
                rosters,
                0.72,
                facecolor="white",
                edgecolor=RED,
                hatch="////",
                linewidth=1.2,
                zorder=2,
            )
            for r in burnt if len(run.rounds) <= _MOST_MARKERS else ():
                axes.annotate(
                    "burnt",
                    (r.index, r.roster / 2),
                    ha="center",
                    va="center",
                    rotation=90,
                    color=RED,
                    fontweight="bold",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
                    zorder=4,
                )
        lines = []
        highest = max([r.roster for r in run.rounds] + [1])
        if need is not None:
            axes.axhline(need, color=RED, linewidth=1.6, linestyle=(0, (6, 2)), zorder=3)
            lines.append(Line(need, f"needed {need}", RED))
            highest = max(highest, need)
        if len({r.roster for r in run.rounds}) == 1 and run.rounds[0].roster != need:
            lines.append(Line(run.rounds[0].roster, f"roster {run.rounds[0].roster}", FAINT))
        axes.set_ylim(0, highest * 1.12)
        whole_ticks(axes)
        _rounds_axis(axes, run, start=False)
        axes.set_ylabel("Participants")
        name_lines(axes, lines)

    sums = [r.participants for r in run.rounds if r.committed]
    if sums:
        caption = f"Dark: survivors in the sum ({_span(sums)}). Light: the round's roster."
    else:
        caption = "No round was summed."
    if run.burnt:
        caption += " Hatched: burnt, nobody's update was used and its budget stays spent."
    return Plot("participants", title, caption, svg("participants", title, caption, PANEL, draw))


def _latent(run: RunData) -> list[Plot]:
    """Effective rank and spread side by side: rank is blind to scale, spread to collapse onto few directions."""
    health = metrics_of(run, latent=True)
    ranks = [m for m in health if m.unit == "dimensions"]
    spreads = [m for m in health if m.unit == "latent units"]
    plots = []
    if ranks or spreads:
        title = "Latent health by round"
        size = run.manifest.config.get("model", {}).get("latent_dim")
        size = size if isinstance(size, int) and not isinstance(size, bool) else None
        panels = [p for p in (ranks, spreads) if p]

        def draw(fig: Figure) -> None:
            grid = fig.subplots(len(panels), 1, sharex=True, squeeze=False)
            colours = (BLUE, ORANGE, GREEN)
            for axes, group in zip(grid[:, 0], panels, strict=True):
                named, heights = [], [0.0]
                for metric, colour in zip(group[:3], colours, strict=False):
                    y = [
                        run.start.get(metric.name, math.nan),
                        *(r.metrics.get(metric.name, math.nan) for r in run.rounds),
                    ]
                    _curve(axes, run, [-1, *_x(run)], y, colour)
                    finite = [v for v in y if math.isfinite(v)]
                    if finite:
                        word = metric.short.removesuffix(" std") if group is spreads else "rank"
                        named.append(Line(finite[-1], f"{word} {figure(finite[-1])}", colour, True))
                        heights += finite
                if group is ranks and size is not None:
                    axes.axhline(size, color=FAINT, linewidth=1.4, linestyle=_BASELINE_DASHES["start"], zorder=2)
                    named.append(Line(size, f"largest {size}", FAINT))
                    heights.append(size)
                axes.set_ylim(0, max(heights) * 1.16 or 1.0)
                few_ticks(axes, 3)
                _rounds_axis(axes, run, label=axes is grid[-1, 0])
                axes.set_ylabel("Dimensions" if group is ranks else "Latent units")
                heading = "Effective rank" if group is ranks else "Standard deviation of a latent coordinate"
                axes.set_title(heading, loc="left", fontsize=11.5, color=INK)
                name_lines(axes, named)

        caption = (
            "A collapsed encoder shows a rank near 1 or a standard deviation near 0. "
            + ("The encoder is frozen here, so both should stay flat. " if run.surface != "full" else "")
            + "Public held-out data."
        )
        plots.append(Plot("latent", title, caption, svg("latent", title, caption, PANEL, draw)))
    rest = [m for m in health if m not in ranks and m not in spreads and _moves(run, m)]
    return plots + [_evaluation(run, m) for m in rest]


def _traffic(run: RunData) -> Plot:
    title = "Bytes by round, all participants together"
    known = [r for r in run.rounds if r.bytes_down is not None and r.bytes_up is not None]
    largest = max([max(r.bytes_down or 0, r.bytes_up or 0) for r in known] + [1])
    unit, divisor = size_unit(largest)

    def draw(fig: Figure) -> None:
        axes = fig.subplots()
        down = {r.index: (r.bytes_down or 0) / divisor for r in known}
        up = {r.index: (r.bytes_up or 0) / divisor for r in known}
        _bars(axes, down, shift=-0.2, width=0.38, color=BLUE, edgecolor=BLUE, label="down, to participants")
        _bars(axes, up, shift=0.2, width=0.38, color="white", edgecolor=BLUE, label="up, to coordinator")
        axes.set_ylim(0, largest / divisor * 1.08)
        few_ticks(axes, 5)
        _rounds_axis(axes, run, start=False)
        axes.set_ylabel(f"Payload ({unit})")
        place = (-0.02, 0.98)  # above the axes, where no bar can be
        axes.legend(
            loc="lower left", bbox_to_anchor=place, ncols=2, frameon=False, fontsize=11.5, handlelength=1.2, borderpad=0
        )

    if known:
        last = known[-1]
        each = [(b or 0) / max(1, last.roster) for b in (last.bytes_down, last.bytes_up)]
        caption = (
            f"Round {last.index}: {data_size(last.bytes_down)} down and {data_size(last.bytes_up)} up, that is "
            f"{data_size(each[0])} and {data_size(each[1])} for each of {last.roster} participants. Payload only, "
            "without the transport's own framing."
        )
    else:
        caption = "Not measured: every round was replayed from a stored sum."
    return Plot("bytes", title, caption, svg("bytes", title, caption, PANEL, draw, names=12))


def _seconds(run: RunData) -> Plot:
    title = "Seconds by round"
    timed = [(r.index, r.seconds) for r in run.rounds if r.seconds is not None and math.isfinite(r.seconds)]

    def draw(fig: Figure) -> None:
        axes = fig.subplots()
        _bars(axes, dict(timed), color=BLUE)
        axes.set_ylim(0, max([s for _, s in timed] + [1e-3]) * 1.12)
        few_ticks(axes, 5)
        _rounds_axis(axes, run, start=False)
        axes.set_ylabel("Wall time (s)")

    total = sum(s for _, s in timed)
    caption = f"{duration(total)} for {len(timed)} timed rounds, from RoundOpen to the stored sum"
    caption += ", all participants on one machine." if run.manifest.runtime.startswith("simulation") else "."
    return Plot("seconds", title, caption, svg("seconds", title, caption, PANEL, draw, names=12))


# ------------------------------------------------------------------------------------------------ parts


def _x(run: RunData) -> list[int]:
    return [r.index for r in run.rounds]


def _curve(axes: Axes, run: RunData, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """A line through all finite values; markers while they can be told apart, hollow where a round was burnt."""
    axes.plot(x, [v if math.isfinite(v) else math.nan for v in y], color=colour, linewidth=2.2, zorder=3)
    burnt = {r.index for r in run.rounds if not r.committed}
    for position, value in zip(x, y, strict=True):
        if math.isfinite(value) and (position in burnt or len(x) <= _MOST_MARKERS):
            face = "white" if position in burnt else colour
            axes.plot([position], [value], "o", color=colour, markerfacecolor=face, markersize=5.5, zorder=4)


def _bars(
    axes: Axes, heights: Mapping[int, float], shift: float = 0.0, width: float = 0.72, zorder: int = 2, **style: Any
) -> None:
    """A bar for each round; so many that none could be told apart are drawn as one outline."""
    if len(heights) <= _MOST_BARS:
        places = [index + shift for index in heights]
        axes.bar(places, list(heights.values()), width, zorder=zorder, **style)
        return
    first, last = min(heights), max(heights)
    tops = [heights.get(index, 0.0) for index in range(first, last + 1)]
    edges = [index - 0.5 for index in range(first, last + 2)]
    if style.get("color") == "white":  # over the others: an outline alone
        axes.stairs(tops, edges, color=ORANGE, linewidth=1.6, zorder=zorder + 1, label=style.get("label"))
    else:
        axes.stairs(tops, edges, fill=True, color=style["color"], zorder=zorder, label=style.get("label"))


def _rounds_axis(axes: Axes, run: RunData, start: bool = True, label: bool = True) -> None:
    """Rounds from 0, "start" before them, and a hatched area for planned rounds that did not run."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    done, planned = len(run.rounds), max(run.planned_rounds, len(run.rounds))
    axes.set_xlim(-1.35 if start else -0.6, planned - 0.4)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if planned / s <= 12)
    ticks = list(range(0, planned, step))
    if start and step > 1:
        ticks = [t for t in ticks if t]  # 0 would run into "start"
    axes.xaxis.set_major_locator(FixedLocator([-1, *ticks] if start else ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: "start" if v < 0 else f"{v:.0f}"))
    if label:
        axes.set_xlabel("Round")
    else:
        axes.tick_params(labelbottom=False)
    if done < planned:
        axes.axvspan(
            done - 0.5, planned - 0.4, facecolor="#f6f7f9", edgecolor="#cfd5dc", hatch="///", linewidth=0, zorder=0
        )
        if label and (planned - done) / planned > 0.25:
            axes.text(
                (done - 0.5 + planned - 0.4) / 2,
                0.5,
                "not run",
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
                color=FAINT,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 3},
                zorder=1.5,
            )


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low} in every round" if low == high else f"{low} to {high}"


def _shortened(name: str, most: int = 16) -> str:
    shown = clean(name)
    return shown if len(shown) <= most else shown[: most - 1] + "\u2026"
