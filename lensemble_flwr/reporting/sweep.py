"""A sweep in one table: a row a point (sweep.csv), means and ranges over seeds, and the page that joins them.

Everything is read from the folders of the points, so it can be made again at any time. A point that failed, was
refused, or was not reached has its row too.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import EXIT_BAD_INPUT, EXIT_BUDGET, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, ArtifactError
from lensemble_flwr.reporting.metrics import Metric, metrics_of, ordered
from lensemble_flwr.reporting.run_data import RunData, load_run
from lensemble_flwr.reporting.wording import clean, data_size, duration, figure, listed, short_epsilon
from lensemble_flwr.sweep import FINISHED, Outcome, Point, Sweep, Value, as_text, outcome_of, read_sweep

SEED = "seed"
SIGMA = "privacy.noise_multiplier"
ENDS = {
    EXIT_OK: "completed",
    EXIT_FAILURE: "failed",
    EXIT_BAD_INPUT: "refused",
    EXIT_BUDGET: "budget spent",
    EXIT_INTERRUPTED: "interrupted",
    None: "not started",
}


@dataclass(frozen=True)
class Row:
    """One point: what was set, how it ended, and what its run left (None if nothing that can be read)."""

    point: Point
    outcome: Outcome | None
    run: RunData | None

    @property
    def exit_status(self) -> int | None:
        return None if self.outcome is None else self.outcome.exit_status

    @property
    def end(self) -> str:
        """How it ended, in words."""
        return ENDS.get(self.exit_status, "failed")

    @property
    def finished(self) -> bool:
        """Whether its figures are those of a whole run: all rounds, or all that the budget allowed."""
        return self.run is not None and self.exit_status in FINISHED

    @property
    def sigma(self) -> float:
        """Noise multiplier; 0 without noise, NaN if unknown."""
        value = self.run.manifest.plan.get("noise_multiplier") if self.run is not None else None
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def view(self) -> str:
        """The view of epsilon that the noise is sized for."""
        return self.run.guarantee if self.run is not None and self.run.guarantee != "none" else "central"

    def epsilon(self, view: str) -> float:
        """Epsilon of all its rounds; infinite without a guarantee, NaN if unknown."""
        return math.nan if self.run is None else self.run.epsilon(view)

    def before(self, metric: str) -> float:
        return math.nan if self.run is None else self.run.start.get(metric, math.nan)

    def after(self, metric: str) -> float:
        """The metric of the model as the run left it; NaN if unknown."""
        return math.nan if self.run is None else self.run.final.get(metric, math.nan)

    def payload(self, direction: str) -> float:
        """Bytes "up" or "down" of all participants in all measured rounds; NaN if none was measured."""
        if self.run is None:
            return math.nan
        counts = [r.bytes_up if direction == "up" else r.bytes_down for r in self.run.rounds]
        known = [count for count in counts if count is not None]
        return float(sum(known)) if known else math.nan


@dataclass(frozen=True)
class Group:
    """Points that differ in their seed alone."""

    values: dict[str, Value]
    rows: tuple[Row, ...]

    def spread(self, of: Callable[[Row], float]) -> Spread:
        """Mean and range over the seeds whose run is finished."""
        return Spread.of(of(row) for row in self.rows if row.finished)


@dataclass(frozen=True)
class Spread:
    """Mean and range of the finite values; NaN if there are none."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        finite = [v for v in values if math.isfinite(v)]
        if not finite:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(math.fsum(finite) / len(finite), min(finite), max(finite), len(finite))

    def text(self, write: Callable[[float], str] = figure) -> str:
        """ "0.364 [0.351, 0.372]"; values that are written alike have no range."""
        if not self.count:
            return "-"
        mean, low, high = (write(v) for v in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class SweepData:
    """A sweep's folder as it stands."""

    folder: Path
    sweep: Sweep
    rows: tuple[Row, ...]

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the points' runs: the headline of the first run with results first, latent health last."""
        runs = [row.run for row in self.rows if row.run is not None]
        names = {name for run in runs for name in (*run.start, *run.final)}
        first = metrics_of(runs[0])[:1] if runs else []
        labels = runs[0].labels if runs else {}
        return first + [m for m in ordered(names, labels) if m.name not in {f.name for f in first}]

    @property
    def group_keys(self) -> list[str]:
        """The swept keys without the seed."""
        return [key for key in self.sweep.keys if key != SEED]

    def groups(self) -> list[Group]:
        """The rows by everything but the seed, in the grid's order."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            # With their types: true and 1 are two values.
            key = tuple(as_text(row.point.values[k]) for k in self.group_keys)
            found.setdefault(key, []).append(row)
        return [Group({k: rows[0].point.values[k] for k in self.group_keys}, tuple(rows)) for rows in found.values()]

    def count(self, end: str) -> int:
        return sum(row.end == end for row in self.rows)


def load_sweep(folder: Path | str) -> SweepData:
    """Read a sweep and what its points left.

    Raises:
        ConfigError: no sweep there. ArtifactError: sweep.json is damaged. A point's damaged folder is told in its row.
    """
    folder = Path(folder).expanduser().absolute()
    sweep = read_sweep(folder)
    return SweepData(folder, sweep, tuple(_row(folder, point) for point in sweep.points))


def _row(folder: Path, point: Point) -> Row:
    outcome, run = outcome_of(folder, point), None
    if (folder / point.id / "manifest.json").is_file():
        try:
            run = load_run(folder / point.id)
        except ArtifactError as error:
            outcome = Outcome(EXIT_FAILURE, outcome.seconds if outcome else None, str(error))
    return Row(point, outcome, run)


# ------------------------------------------------------------------------------------------------ CSV


def csv_text(data: SweepData) -> str:
    """One row a point, comma-separated, with a head. Empty: not known; inf: no guarantee, or it diverged."""
    metrics = [m.name for m in data.metrics]
    head = [*data.sweep.keys, "sigma", "epsilon_central", "epsilon_local", "delta", "claim_grade"]
    head += ["rounds_committed", "rounds_burnt", "rounds_planned", "ended", "exit_status"]
    head += [f"{name}_{when}" for name in metrics for when in ("before", "after")]
    head += ["bytes_up", "bytes_down", "seconds", "folder", "error"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    for row in data.rows:
        writer.writerow(_cells(row, metrics))
    return buffer.getvalue()


def _cells(row: Row, metrics: Sequence[str]) -> list[str]:
    run, outcome = row.run, row.outcome
    cells = [as_text(value) if not isinstance(value, float) else repr(value) for value in row.point.values.values()]
    cells += [_csv(row.sigma), _csv(row.epsilon("central")), _csv(row.epsilon("local"))]
    if run is None:
        cells += [""] * 5
    else:
        cells += [_csv(run.target_delta), "yes" if run.manifest.claim_grade else "no"]
        cells += [str(run.committed), str(run.burnt), str(run.planned_rounds)]
    cells += [row.end, "" if outcome is None else str(outcome.exit_status)]
    cells += [_csv(of(name)) for name in metrics for of in (row.before, row.after)]
    cells += [_whole(row.payload("up")), _whole(row.payload("down"))]
    cells.append("" if outcome is None or outcome.seconds is None else f"{outcome.seconds:.2f}")
    return [*cells, row.point.id, clean(outcome.detail) if outcome is not None else ""]


def _csv(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def _whole(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}"


# ------------------------------------------------------------------------------------------------ table


def short_keys(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or the whole where that is not unique."""
    last = [key.rpartition(".")[2] for key in keys]
    return [part if last.count(part) == 1 else key for part, key in zip(last, keys, strict=True)]


def group_cells(data: SweepData) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of groups: means, with ranges over seeds in brackets; the headline metric alone."""
    metrics = [m for m in data.metrics if not m.latent][:1]
    groups = data.groups()
    sigma = SIGMA not in data.group_keys  # else it is a column already
    head = [*short_keys(data.group_keys), *["sigma"] * sigma, "eps central", "eps local"]
    for metric in metrics:
        head += [f"{metric.short} at start", metric.short]
    head += ["committed", "bytes", "time", "points"]
    body = []
    for group in groups:
        cells = [clean(as_text(value)) for value in group.values.values()]
        cells += [group.spread(lambda row: row.sigma).text()] * sigma
        for view in ("central", "local"):
            # The largest over the seeds, so that it holds for each of them.
            values = [row.epsilon(view) for row in group.rows if row.finished]
            cells.append(short_epsilon(max(values)) if values else "-")
        for metric in metrics:
            cells.append(group.spread(partial(Row.before, metric=metric.name)).text())
            cells.append(group.spread(partial(Row.after, metric=metric.name)).text())
        cells.append(rounds_of(group.rows))
        traffic = group.spread(lambda row: row.payload("up") + row.payload("down"))
        cells.append(data_size(traffic.mean) if traffic.count else "-")
        seconds = group.spread(lambda row: row.outcome.seconds or math.nan if row.outcome else math.nan)
        cells.append(duration(seconds.mean))
        cells.append(ends_of(group.rows))
        body.append(cells)
    return head, body


def rounds_of(rows: Sequence[Row]) -> str:
    """Committed rounds of finished runs, "10" or "4 to 6"; "4 of 10" where a budget ended before the rounds did."""
    runs = [row.run for row in rows if row.finished and row.run is not None]
    if not runs:
        return "-"
    committed = [run.committed for run in runs]
    text = " to ".join(map(str, sorted({min(committed), max(committed)})))
    planned = max(run.planned_rounds for run in runs)
    short = any(row.exit_status == EXIT_BUDGET for row in rows if row.finished)
    return f"{text} of {planned}" if short and min(committed) < planned else text


def ends_of(rows: Sequence[Row]) -> str:
    """ "2 completed, 1 failed"."""
    counts = [(sum(row.end == end for row in rows), end) for end in dict.fromkeys(ENDS.values())]
    return ", ".join(f"{count} {end}" for count, end in counts if count)


def table_text(data: SweepData) -> str:
    """The table of groups for a terminal, then the points that did not finish, each with its reason. ASCII."""
    head, body = group_cells(data)
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (head, *body)]
    lines = [line.rstrip() for line in lines]
    lines.insert(1, "  ".join("-" * w for w in widths))
    if any(len(group.rows) > 1 for group in data.groups()):
        lines.append("Means over seeds [smallest, largest]; epsilon is the largest. Unfinished points are left out.")
    if any(row.finished and row.exit_status == EXIT_BUDGET for row in data.rows):
        lines.append("K of T committed: the budget ended there, so the figures are those of a shorter run.")
    for row in data.rows:
        if row.exit_status not in FINISHED and row.outcome is not None:
            why = f": {row.outcome.detail}" if row.outcome.detail else ""
            lines.append(f"{row.point.id} {row.point.label} {row.end}{why}")
    return "\n".join(clean(line).replace("\u00b2", "2").encode("ascii", "replace").decode() for line in lines)


def closing(data: SweepData) -> str:
    """How the sweep stands, in one sentence."""
    total = len(data.rows)
    what = listed(list(data.sweep.keys))
    return f"{total} points over {what}: {ends_of(data.rows)}."


# ------------------------------------------------------------------------------------------------ files


def write_sweep(folder: Path | str) -> tuple[SweepData, list[Path]]:
    """Write ``sweep.csv`` and ``sweep.html`` into a sweep's folder, from what is there; again at any time.

    Raises:
        ConfigError, ArtifactError: as :func:`load_sweep`; or the files cannot be written.
    """
    from lensemble_flwr.reporting.sweep_page import render

    data = load_sweep(folder)
    paths = [data.folder / "sweep.csv", data.folder / "sweep.html"]
    atomic_write(paths[0], csv_text(data).encode(), mode=0o644)
    atomic_write(paths[1], render(data).encode(), mode=0o644)
    return data, paths


def command_line(sweep: Sweep) -> str:
    """The command that runs the same grid."""
    return f"lensemble sweep {shlex.join(sweep.overrides)}"
