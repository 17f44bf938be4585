"""The part of a report that shows one public held-out episode and what a linear probe reads of it from the models.

Where the state has a place in the picture: frames with marks on them, told apart by shape. Elsewhere: a curve for each
column. The marks of the start and of the final model come from probes fitted alike on other public episodes.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.federation.readings import Floats, Line, Reading, Readings
from lensemble_flwr.reporting.drawing import BLUE, FAINT, INK, PANEL, RED, Plot, capital, name_lines, svg, value_limits
from lensemble_flwr.reporting.drawing import Line as Label
from lensemble_flwr.reporting.page import Child, Markup, el, figure_of, scrollable
from lensemble_flwr.reporting.run_data import RunData
from lensemble_flwr.reporting.wording import clean, figure, listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_START, _FINAL = "start", "final"
_OUTSIDE = 0.02
"""How near the edge of a picture a mark lies that belongs outside of it."""


def episode_section(run: RunData) -> Markup | None:
    """The section, or None where the run left nothing of the kind."""
    readings = run.readings
    if readings is None:
        return None
    place = readings.in_picture
    shown: Child
    if place is not None:
        shown = [_legend(readings, run.readings_after), *_strips(readings, place)]
    else:
        plots = [figure_of(plot) for plot in _curves(readings, run.readings_after)]
        shown = el("div", plots, class_="grid")
    return el(
        "section",
        el("h2", "One episode, as the models see it"),
        el("p", _intro(run, readings)),
        shown,
        _distances(readings, run.readings_after),
        class_="episode",
    )


def _intro(run: RunData, readings: Readings) -> str:
    text = (
        f"A public held-out episode ({clean(readings.body)}), never a participant's: the first that the probe is not "
        f"fitted on, not the best one. A linear probe reads {listed([clean(n) for n in readings.names])} from the "
        "latent of each frame, and from the latent that the model predicts "
        f"{readings.steps} steps ahead from the true actions, without seeing the frames between."
    )
    if _same(readings):
        text += " Both models read the frames themselves alike."
    if run.readings_after != len(run.rounds):
        text += f" This is the model after {run.readings_after} of the {len(run.rounds)} finished rounds."
    return text


def _same(readings: Readings) -> bool:
    """Whether all models read the frames alike."""
    first = readings.models[0].seen
    return len(readings.models) > 1 and all(np.array_equal(first, m.seen, equal_nan=True) for m in readings.models)


def _name(model: str, rounds: int) -> str:
    if model == _FINAL:
        return f"after {rounds} round" + "s" * (rounds != 1)
    return "at the start" if model == _START else clean(model)


# ------------------------------------------------------------------------------------------------ pictures


def _legend(readings: Readings, rounds: int) -> Markup:
    items = [("true", _mark("true", 8, 8)), *((m.model, _mark(m.model, 8, 8)) for m in readings.models)]
    words = {"true": "true position"} | {m.model: f"read {_name(m.model, rounds)}" for m in readings.models}
    return el(
        "ul",
        [
            el("li", el("svg", mark, viewBox="0 0 16 16", class_="key", aria_hidden="true"), words[name])
            for name, mark in items
        ],
        class_="legend",
    )


def _strips(readings: Readings, place: tuple[Line, Line]) -> list[Markup]:
    kinds: list[tuple[str, str, Callable[[Reading], Floats]]] = [
        ("Read from the frame itself", "from the frame", lambda m: m.seen),
        (
            f"Read from the prediction made {readings.steps} steps before",
            f"from the prediction made {readings.steps} steps before",
            lambda m: m.predicted,
        ),
    ]
    strips = []
    for title, words, take in kinds:
        frames = [
            _frame(readings, place, index, words, {m.model: take(m)[frame] for m in readings.models}, frame)
            for index, frame in enumerate(readings.shown)
        ]
        strips.append(el("figure", el("h3", title), el("div", frames, class_="strip")))
    return strips


def _frame(
    readings: Readings, place: tuple[Line, Line], index: int, words: str, read: dict[str, Any], frame: int
) -> Markup:
    assert readings.pictures is not None
    truth = readings.truth[frame]
    where = {"true": _at(truth, place)} | {name: _at(values, place) for name, values in read.items()}
    marks: list[Child] = []
    if where["true"] and where.get(_FINAL):
        (x, y), (u, v) = (_inside(where[name]) for name in ("true", _FINAL))
        marks.append(el("path", d=f"M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}", class_="off"))
    for name, at in where.items():
        if at is not None:
            x, y = _inside(at)
            marks.append(_mark(name, x, y))
    said = ", ".join(f"{name} {_pair(values, readings.names)}" for name, values in (("true", truth), *read.items()))
    picture = readings.pictures[index]
    height, width = picture.shape[:2]
    tall = 100 * height / width
    return el(
        "div",
        el(
            "svg",
            el("title", f"Frame {frame}, {words}: {said}"),
            el(
                "image",
                href=_data_uri(picture),
                width="100",
                height=f"{tall:g}",
                preserveAspectRatio="none",
                class_="pixels",
            ),
            el("g", marks, transform=f"scale(1 {tall / 100:g})") if height != width else marks,
            viewBox=f"0 0 100 {tall:g}",
            role="img",
        ),
        el("div", f"frame {frame}", class_="under"),
    )


def _pair(values: Any, names: tuple[str, ...]) -> str:
    return " ".join(f"{clean(n)} {figure(v)}" for n, v in zip(names, map(float, values), strict=True))


def _at(values: Any, place: tuple[Line, Line]) -> tuple[float, float] | None:
    """Place in a picture in hundredths of its sides, or None if that is no number."""
    at = [100 * (a + b * float(v)) for (a, b), v in zip(place, values, strict=True)]
    return (at[0], at[1]) if all(map(math.isfinite, at)) else None


def _inside(at: tuple[float, float] | None) -> tuple[float, float]:
    assert at is not None
    low, high = 100 * _OUTSIDE, 100 * (1 - _OUTSIDE)
    return min(max(at[0], low), high), min(max(at[1], low), high)


def _mark(name: str, x: float, y: float) -> Markup:
    """Ring: the truth. Disc: the final model. Cross: the start. Each on a halo, so that it is seen on any picture."""
    if name == "true":
        circle: dict[str, str | None] = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "6"}
        return el("g", el("circle", **circle, class_="halo"), el("circle", **circle, class_="ring"))
    if name == _FINAL:
        return el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="3.2", class_="disc")
    a, b, c, d = x - 3.5, x + 3.5, y - 3.5, y + 3.5
    path = f"M{a:.1f} {c:.1f}L{b:.1f} {d:.1f}M{a:.1f} {d:.1f}L{b:.1f} {c:.1f}"
    return el("g", el("path", d=path, class_="halo"), el("path", d=path, class_="cross"))


def _data_uri(picture: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(picture)).decode()


def png(picture: NDArray[np.uint8]) -> bytes:
    """(H, W, 3) uint8 as a PNG file."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture, format="png")
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------ figures


def _distances(readings: Readings, rounds: int) -> Markup:
    """How far off the readings are in this episode."""
    place = readings.in_picture
    head = ["Model", "From the frame", f"From the prediction {readings.steps} steps before"]
    body = [
        el(
            "tr",
            el("th", capital(_name(m.model, rounds)), scope="row"),
            [el("td", figure(_rms(readings.truth, v, place)), class_="num") for v in (m.seen, m.predicted)],
            class_="mine" if m.model == _FINAL else None,
        )
        for m in readings.models
    ]
    heads = [el("th", word, scope="col", class_="num" if i else None) for i, word in enumerate(head)]
    unit = (
        "sides of the picture"
        if place is not None
        else "the state's own units, " + ("over all columns together" if len(readings.names) > 1 else "one column")
    )
    note = (
        f"Distance from the true state, root mean square over this episode's frames, in {unit}; lower is better. "
        "One episode illustrates; the metrics above are over all held-out episodes."
    )
    if place is not None:
        note += " A mark at the very edge of a picture belongs outside of it."
    table = el("table", el("thead", el("tr", heads)), el("tbody", body), class_="short")
    return el("div", scrollable(table, "Distances in this episode"), el("p", note, class_="under-table"))


def _rms(truth: Floats, read: Floats, place: tuple[Line, Line] | None) -> float | None:
    """Root of the mean squared distance over those frames that have both."""
    scale = np.ones(truth.shape[1]) if place is None else np.array([slope for _, slope in place])
    with np.errstate(over="ignore", invalid="ignore"):
        squares = (((read - truth) * scale) ** 2).sum(axis=1)
        squares = squares[np.isfinite(squares)]
        return float(np.sqrt(squares.mean())) if len(squares) else None


def _curves(readings: Readings, rounds: int) -> list[Plot]:
    """For each column its true course and what is read of it."""
    plots = []
    steps = readings.steps
    for column, raw in enumerate(readings.names):
        title = capital(clean(raw))
        lines: list[tuple[str, Floats, str, Any]] = [("true", readings.truth[:, column], INK, "-")]
        for m in readings.models:
            final = m.model == _FINAL
            lines.append(
                (f"frame, {clean(m.model)}", m.seen[:, column], BLUE if final else FAINT, "--" if final else ":")
            )
            if final:
                lines.append((f"{steps} steps ahead", m.predicted[:, column], RED, "-."))
        caption = (
            f"Line: true. Dashed: read from the frame {_name(_FINAL, rounds)}; dotted: at the start. Dots and "
            f"dashes: read from the prediction made {steps} steps before, {_name(_FINAL, rounds)}."
        )

        def draw(fig: Figure, lines: Any = lines) -> None:
            from matplotlib.ticker import MaxNLocator

            axes = fig.subplots()
            named, values = [], []
            for text, y, colour, dashes in lines:
                shown = np.where(np.abs(y) < 1e12, y, np.nan)  # NaN compares as false
                axes.plot(range(len(shown)), shown, color=colour, linestyle=dashes, linewidth=2)
                finite = shown[np.isfinite(shown)].tolist()
                values += finite
                if finite:
                    named.append(Label(finite[-1], text, colour, text == "true"))
            value_limits(axes, values)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_xlabel("Frame")
            name_lines(axes, named)

        name = f"episode-{column}"
        plots.append(Plot(name, title, caption, svg(name, title, caption, PANEL, draw)))
    return plots
