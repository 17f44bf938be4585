"""sweep.html: what was swept, what came out, and which points have no result. Complete in itself, like report.html."""

from __future__ import annotations

import math

from lensemble_flwr.reporting.drawing import capital
from lensemble_flwr.reporting.page import Child, Markup, document, el, figure_of, scrollable, unbroken
from lensemble_flwr.reporting.sweep import (
    SIGMA,
    SweepData,
    closing,
    command_line,
    group_cells,
    short_keys,
)
from lensemble_flwr.reporting.sweep_plots import sweep_plots
from lensemble_flwr.reporting.wording import data_size, delta, duration, figure, listed, short_epsilon
from lensemble_flwr.sweep import FINISHED, as_text

_GREEK = {"sigma": "\u03c3", "eps central": "\u03b5 central", "eps local": "\u03b5 local"}


def render(data: SweepData) -> str:
    """The page's text."""
    plots = [figure_of(plot) for plot in sweep_plots(data)]
    first: Child = plots[:1] or el("p", "No point is finished, so there is nothing to plot yet.")
    return document(
        "Sweep report",
        _header(data),
        _banner(data),
        el("p", unbroken(closing(data)), class_="lede"),
        _unfinished(data),
        el("section", el("h2", "Result"), first, _groups(data)),
        el("section", el("h2", "By each swept key"), el("div", plots[1:], class_="grid")) if plots[1:] else None,
        _points(data),
        _limits(data),
        el("footer", "Figures are those in the points' own folders; sweep.csv has all of them."),
    )


def _header(data: SweepData) -> Markup:
    experiments = sorted({row.run.experiment for row in data.rows if row.run is not None})
    return el(
        "header",
        el("p", "Federated training: sweep report", class_="eyebrow"),
        el("h1", ", ".join(experiments) or data.folder.name),
        el("ul", el("li", el("code", command_line(data.sweep))), class_="facts"),
    )


def _banner(data: SweepData) -> Markup | None:
    runs = [row.run for row in data.rows if row.run is not None]
    open_runs = sum(not run.private for run in runs)
    if not open_runs:
        return None
    which = "Every point" if open_runs == len(runs) else f"{open_runs} of {len(runs)} points"
    why = f"{which} ran without differential privacy, or with noise that a seed can replay: epsilon is infinite there."
    return el("div", el("strong", "NON-PRIVATE RUNS"), el("p", why), class_="banner", role="note")


def _unfinished(data: SweepData) -> Markup | None:
    rows = [row for row in data.rows if row.exit_status not in FINISHED]
    if not rows:
        return None
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.outcome is not None:
            alike.setdefault((row.end, row.outcome.detail), []).append(row.point.label)
    items = [
        el("li", el("strong", end), f": {'; '.join(labels)}", f" \u2013 {detail}" if detail else "")
        for (end, detail), labels in alike.items()
    ]
    waiting = sum(row.outcome is None for row in rows)
    if waiting:
        items.append(el("li", f"{waiting} not started"))
    return el(
        "div",
        el(
            "p",
            f"{len(rows)} of {len(data.rows)} points have no result. They are in no mean; where a number was swept, a "
            "red cross marks them:",
        ),
        el("ul", items, class_="plain"),
        class_="notice",
    )


def _table(head: list[str], body: list[list[Child]], left: int, label: str, kinds: list[str | None]) -> Markup:
    """A table whose first ``left`` columns and whose last one are words, the others numbers."""

    def kind(i: int) -> str | None:
        return None if i < left or i == len(head) - 1 else "num"

    words = [_GREEK.get(h) or capital(h.replace("_", " ")) for h in head]
    heads = [el("th", word, scope="col", class_=kind(i)) for i, word in enumerate(words)]
    rows = [
        el("tr", [el("td", cell, class_=kind(i)) for i, cell in enumerate(cells)], class_=mark)
        for cells, mark in zip(body, kinds, strict=True)
    ]
    return scrollable(el("table", el("thead", el("tr", heads)), el("tbody", rows)), label)


def _groups(data: SweepData) -> Markup:
    head, body = group_cells(data)
    cells: list[list[Child]] = [list(row) for row in body]
    note = (
        "Means over seeds, with the smallest and the largest in brackets; epsilon is the largest over the seeds, at "
        "the run's target delta, rounded up. Unfinished points are left out."
    )
    return el(
        "div",
        _table(head, cells, len(data.group_keys), "Means and ranges", [None] * len(cells)),
        el("p", note, class_="under-table"),
        class_="compare",
    )


def _points(data: SweepData) -> Markup:
    metrics = [m for m in data.metrics if not m.latent][:2]
    sigma = SIGMA not in data.sweep.keys
    head = [*short_keys(data.sweep.keys), *["sigma"] * sigma, "eps central", "eps local", "claims hold"]
    head += [m.short for m in metrics] + ["committed", "bytes", "time", "run"]
    body: list[list[Child]] = []
    for row in data.rows:
        run, traffic = row.run, row.payload("up") + row.payload("down")
        cells: list[Child] = [as_text(value) for value in row.point.values.values()]
        cells += [figure(row.sigma) if math.isfinite(row.sigma) else "-"] * sigma
        cells += ["-" if run is None else short_epsilon(row.epsilon(view)) for view in ("central", "local")]
        cells += ["-" if run is None else "yes" if run.manifest.claim_grade else "no"]
        cells += ["-" if run is None else figure(row.after(m.name)) for m in metrics]
        cells += ["-" if run is None else f"{run.committed}/{run.planned_rounds}"]
        cells += [data_size(traffic) if math.isfinite(traffic) else "-"]
        cells += [duration(row.outcome.seconds if row.outcome is not None else None)]
        report = data.folder / row.point.id / "report.html"
        name: Child = el("a", row.point.id, href=f"{row.point.id}/report.html") if report.is_file() else row.point.id
        cells.append([name, "" if row.end == "completed" else f" {row.end}"])
        body.append(cells)
    kinds = [None if row.exit_status in FINISHED else "burnt" for row in data.rows]
    deltas = sorted({row.run.target_delta for row in data.rows if row.run is not None})
    note = (
        f"Epsilon is at delta {listed([delta(d) for d in deltas]) or '-'}. The metric is that of the model as the run "
        "left it. Claims hold: every observer that privacy.claim asks for. The links lead to the runs' own reports, "
        "where this page lies in the sweep's folder."
    )
    return el(
        "section",
        el("h2", "Points"),
        _table(head, body, len(data.sweep.keys), "Points", kinds),
        el("p", note, class_="under-table"),
    )


def _limits(data: SweepData) -> Markup:
    items = [
        "Chance beyond the seeds: a range is the smallest and the largest of a few runs, not a confidence interval. "
        "Noise is drawn anew for every run, so the same point run again gives other figures.",
        "Privacy of the sweep as a whole: each point has fresh sites, and its epsilon is its own. Whoever sees the "
        "models of several points that were trained on the same people's data has what these cost together, and "
        "choosing the best point is such a look.",
        "Real separation: all points are simulations on one machine.",
    ]
    return el(
        "section", el("h2", "What this page does not show"), el("ul", [el("li", i) for i in items], class_="plain")
    )
