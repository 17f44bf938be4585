"""``lensemble sweep``: check the grid, estimate, run it, and tell how it went."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lensemble_flwr.config import load_config, resolved
from lensemble_flwr.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError
from lensemble_flwr.federation.task import Progress
from lensemble_flwr.preflight import check_plan, estimated_seconds, rounds_allowed
from lensemble_flwr.ready_sweeps import READY_SWEEPS, ready_overrides
from lensemble_flwr.reporting.sweep import ENDS, closing, table_text, write_sweep
from lensemble_flwr.reporting.wording import clean, duration
from lensemble_flwr.sweep import (
    FINISHED,
    Outcome,
    Point,
    Sweep,
    expand,
    is_finished,
    locked,
    open_sweep,
    outcome_of,
    run_points,
    sweep_status,
)

_MANY = 50
"""From more points on, checking them takes so long that its progress is shown."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def sweep_command(argv: Sequence[str], progress: Progress | None = None) -> int:
    """Run a sweep, or write the report of one again; returns the exit status.

    Raises:
        ConfigError: bad arguments, or a point of the grid that cannot work. Nothing was started.
        ArtifactError: the sweep's folder cannot be read or written.
    """
    parser = argparse.ArgumentParser(
        prog="lensemble sweep",
        description="Run a grid of configurations, each a federation of its own over fresh sites, and compare them. "
        "The same command again goes on: finished points are not run again.",
        epilog="On a CPU, in two minutes: lensemble sweep experiment=linear privacy.noise_multiplier=1,2 seed=0,1. "
        "Exit status: 0 every point is finished (all its rounds, or all its budget), 1 some are not, "
        "2 bad input (nothing was started), 130 stopped.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=A,B", help="configuration; several values, choice() or range() are swept"
    )
    parser.add_argument("--name", help="folder below outputs/sweeps (default: made from the grid)")
    parser.add_argument("--ready", metavar="QUESTION", help=f"a ready-made sweep: {', '.join(READY_SWEEPS)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default 1)")
    parser.add_argument("--report", metavar="DIR", help="write CSV, table and page of this sweep again")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.report is not None:
        if arguments.overrides or arguments.name or arguments.ready:
            raise ConfigError(
                "--report takes no overrides, no --name and no --ready.", "Name the sweep's folder alone."
            )
        _report(Path(arguments.report))
        return EXIT_OK
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs} is below 1.", "Use 1, or as many runs as the machine can bear.")
    if arguments.name is not None and not _NAME.fullmatch(arguments.name):
        raise ConfigError(f"--name {arguments.name!r} is no plain name.", "Use letters, digits, . - and _.")
    ready = arguments.ready
    sweep = expand(arguments.overrides if ready is None else ready_overrides(ready, arguments.overrides))
    total = len(sweep.points)
    short = []
    for number, point in enumerate(sweep.points, 1):
        if (warning := _check(point, f"{number} of {total}")) is not None:
            short.append(warning)
        if progress is not None and total > _MANY:
            progress("checking the points", number, total)
    folder = Path("outputs", "sweeps", arguments.name or sweep.default_name).absolute()
    again = f"lensemble sweep {shlex.join(argv)}"
    with locked(folder):
        open_sweep(sweep, folder)
        for warning in short:
            print(warning, file=sys.stderr, flush=True)
        return _run(sweep, folder, arguments.jobs, again, progress)


def _check(point: Point, which: str) -> str | None:
    """A warning if the point's privacy target ends its run early."""
    config = load_config(point.overrides)
    try:
        allowed, rounds = rounds_allowed(config, check_plan(config)), config.diloco.rounds
    except ConfigError as error:
        message = f"Point {which} ({point.label}) is impossible: {error.message}"
        raise ConfigError(message, error.remediation) from error
    if allowed == rounds:
        return None
    end = "its run will train nothing" if allowed == 0 else "its run will stop there"
    return f"WARNING: {point.label}: the budget allows {allowed} of {rounds} rounds; {end}."


def _run(sweep: Sweep, folder: Path, jobs: int, again: str, progress: Progress | None) -> int:
    waiting = [point for point in sweep.points if not is_finished(folder, point)]
    print(f"Sweep:  {folder}", flush=True)
    clock = Clock(estimates(waiting, progress), jobs)
    done = len(sweep.points) - len(waiting)
    before = f"{done} are finished already; " if done else ""
    print(f"{len(sweep.points)} points; {before}{clock.left()}", flush=True)
    display = _Display(sweep, clock)
    whole = run_points(
        folder, sweep.points, jobs=jobs, on_start=display.start, on_end=display.end, on_tick=display.tick
    )
    display.close()
    _report(folder)
    if not whole:
        print(f"Stopped. To go on: {again}", file=sys.stderr)
        return EXIT_INTERRUPTED
    status = sweep_status([outcome_of(folder, point) for point in sweep.points])
    if status != EXIT_OK:
        print(f"Not every point is finished. To try those again: {again}", file=sys.stderr)
    return status


def _report(folder: Path) -> None:
    data, paths = write_sweep(folder)
    print(f"\n{table_text(data)}\n\n{closing(data)}")
    for path in paths:
        print(f"{path.suffix[1:].upper()}: {path}", flush=True)


# ------------------------------------------------------------------------------------------------ time


def estimates(points: Sequence[Point], progress: Progress | None = None) -> dict[str, float]:
    """Point's id -> seconds that its run is expected to take.

    The local step is timed once for all points that differ in seed or privacy alone; warm starts that other seeds
    still need are not counted.
    """
    known: dict[str, float] = {}
    found = {}
    for point in points:
        config = load_config(point.overrides)
        tree = resolved(config)
        private = tree.pop("privacy")["enabled"]
        del tree["seed"]
        alike = json.dumps([tree, private], sort_keys=True)
        if alike not in known:
            known[alike] = estimated_seconds(config, progress)
        found[point.id] = known[alike]
    return found


class Clock:
    """What is left of a sweep's time: the estimates, scaled by how the points so far compared with theirs."""

    def __init__(self, expected: dict[str, float], jobs: int) -> None:
        self._left = dict(expected)
        self._jobs = jobs
        self._expected = self._measured = 0.0

    def ended(self, point: Point, outcome: Outcome, seconds: float) -> None:
        """A point's run took that long; only a whole run tells how good the estimates are."""
        expected = self._left.pop(point.id, 0.0)
        if outcome.exit_status in FINISHED:
            self._expected += expected
            self._measured += seconds

    def left(self) -> str:
        """ "about 12 min left"."""
        if not self._left:
            return "nothing left to run"
        pace = self._measured / self._expected if self._expected and self._measured else 1.0
        longest = max(self._left.values())
        return f"about {duration(pace * max(longest, sum(self._left.values()) / self._jobs))} left"


# ------------------------------------------------------------------------------------------------ display


class _Display:
    """Two lines a point: when it starts, and how it ended. On a terminal the last line tells for how long it runs."""

    def __init__(self, sweep: Sweep, clock: Clock, now: Callable[[], float] = time.monotonic) -> None:
        self._numbers = {point.id: i for i, point in enumerate(sweep.points, 1)}
        self._clock, self._now = clock, now
        self._since: dict[str, float] = {}
        self._live, self._drawn = sys.stdout.isatty(), False

    def _name(self, point: Point) -> str:
        return f"[{self._numbers[point.id]}/{len(self._numbers)}] {point.label}"

    def start(self, point: Point) -> None:
        self._since[point.id] = self._now()
        self._print(f"{self._name(point)} ({point.id}) ...")

    def end(self, point: Point, outcome: Outcome) -> None:
        seconds = self._now() - self._since.pop(point.id)
        self._clock.ended(point, outcome, seconds)
        end = ENDS.get(outcome.exit_status, "failed")
        why = f": {clean(outcome.detail)}" if outcome.detail else ""
        left = "" if outcome.exit_status == EXIT_INTERRUPTED else f"; {self._clock.left()}"
        self._print(f"{self._name(point)} {end} in {duration(seconds)}{why}{left}")

    def tick(self) -> None:
        if self._live and self._since:
            longest = self._now() - min(self._since.values())
            print(f"\r\x1b[K{len(self._since)} running ... {longest:.0f} s", end="", flush=True)
            self._drawn = True

    def close(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", flush=True)
            self._drawn = False

    def _print(self, text: str) -> None:
        self.close()
        print(text, flush=True)
