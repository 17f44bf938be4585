"""A sweep: a grid of configurations, each run as a federation of its own, one after the other or some at a time.

The grid is written as Hydra's multirun writes it (``seed=0,1,2``, ``choice(a,b)``, ``range(0,5)``) and parsed by
Hydra's own grammar. What a sweep leaves in its folder:

    sweep.json     the overrides as given, the swept keys, the points
    <id>/          a point's output folder, as `lensemble run` leaves it; the id begins its configuration's hash
    <id>.json      how its latest run ended
    <id>.log       what its runs printed

Each point is run by `lensemble run` in a process of its own, over fresh sites: its ledgers start empty, and no two
points share noise, keys or budgets. Because a point is named by its configuration, a sweep that is started again finds
what is finished and continues what is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lensemble_flwr import processes
from lensemble_flwr.config import config_hash, load_config, resolved
from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import (
    EXIT_BUDGET,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ArtifactError,
    ConfigError,
    exit_status,
)
from lensemble_flwr.home import home

SCHEMA_VERSION = 1
MOST_POINTS = 1000
FINISHED = (EXIT_OK, EXIT_BUDGET)
"""Exit statuses of a point that is not run again: its rounds are done, or its budget allows no more of them."""

Value: TypeAlias = "str | int | float | bool | None"

_FORBIDDEN = {
    "output_dir": "Each point has its own folder below outputs/sweeps; name the sweep with --name.",
    "federation.sites_dir": "Each point has fresh sites, so that points do not spend each other's budgets.",
}
_ERROR = re.compile(r"\[[A-Z]+(?:_[A-Z]+)*\] \S.*")


# ------------------------------------------------------------------------------------------------ the grid


@dataclass(frozen=True)
class Point:
    """One configuration of the grid.

    Attributes:
        id: "p" and the first 12 hex digits of the configuration's hash; names its folder.
        overrides: all of its overrides, without sweeps.
        values: swept key -> value. A list, or an option of a group, is the text that was given.
    """

    id: str
    overrides: tuple[str, ...]
    values: dict[str, Value]

    @property
    def label(self) -> str:
        """ "privacy.noise_multiplier=0.5 seed=1"."""
        return " ".join(f"{key}={as_text(value)}" for key, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """A grid: the overrides as given, and its points, the last swept key changing fastest."""

    overrides: tuple[str, ...]
    keys: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def default_name(self) -> str:
        """The same for the same grid, so that the same command finds its folder again."""
        experiment = load_config(self.points[0].overrides).experiment
        ids = "\0".join(sorted(point.id for point in self.points))
        return f"{experiment}-{hashlib.sha256(ids.encode()).hexdigest()[:8]}"


def as_text(value: Value) -> str:
    """A value as Hydra writes it."""
    if value is None:
        return "null"
    return (
        str(value).lower() if isinstance(value, bool) else f"{value:.10g}" if isinstance(value, float) else str(value)
    )


def expand(overrides: Sequence[str]) -> Sweep:
    """Parse overrides, some of them sweeps, and validate every point of the grid.

    Raises:
        ConfigError: an override that cannot be read, a sweep that is no finite list, no sweep at all, too many points,
            the same point twice, or a point that is no possible configuration (the first one is named).
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    axes: list[list[str]] = []
    swept: list[str] = []
    given: list[str] = []
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"The override {text!r} cannot be read: {_first_line(error)}") from error
        key = parsed.get_key_element()
        if key in _FORBIDDEN:
            raise ConfigError(f"{key} cannot be given to a sweep.", _FORBIDDEN[key])
        given.append(key)
        if parsed.is_sweep_override():
            swept.append(key)
            axes.append([f"{key}={value}" for value in _values(parsed, text)])
        else:
            axes.append([text])
    if not swept:
        raise ConfigError("No key is swept.", "Give one of them several values, as in seed=0,1,2, or: lensemble run")
    for key in swept:
        if given.count(key) > 1:
            raise ConfigError(f"{key} is given {given.count(key)} times.", "Give a swept key once.")
    total = math.prod(len(axis) for axis in axes)
    if total > MOST_POINTS:
        raise ConfigError(f"The grid has more than {MOST_POINTS} points, the most for one sweep.", "Use fewer values.")
    points: list[Point] = []
    for number, chosen in enumerate(itertools.product(*axes), 1):
        points.append(_point(chosen, swept, given, f"{number} of {total}"))
    seen: dict[str, Point] = {}
    for point in points:
        if point.id in seen:
            raise ConfigError(
                f"Two points are the same run: {seen[point.id].label!r} and {point.label!r}.",
                "Leave out the value that is there twice, or that changes nothing.",
            )
        seen[point.id] = point
    return Sweep(tuple(overrides), tuple(swept), tuple(points))


def _values(parsed: Any, text: str) -> list[str]:
    """The values of one sweep as texts for an override; at most one more than :data:`MOST_POINTS`."""
    from hydra.errors import HydraException

    if not parsed.is_discrete_sweep() or parsed.value_type.name == "GLOB_CHOICE_SWEEP":
        raise ConfigError(f"The sweep {text!r} is no list of values.", "Write KEY=A,B,... or KEY=range(START,STOP).")
    if getattr(parsed._value, "shuffle", False):
        raise ConfigError(f"The sweep {text!r} has a random order.", "Leave shuffle out: the order changes nothing.")
    try:
        values = list(itertools.islice(parsed.sweep_string_iterator(), MOST_POINTS + 1))
    except (ArithmeticError, ValueError, HydraException) as error:
        raise ConfigError(f"The sweep {text!r} cannot be listed: {_first_line(error)}") from error
    if not values:
        raise ConfigError(f"The sweep {text!r} has no value.", "A range must lead from its start towards its stop.")
    return values


def _point(chosen: tuple[str, ...], swept: list[str], given: list[str], which: str) -> Point:
    picked = {key: text.partition("=")[2] for key, text in zip(given, chosen, strict=True) if key in swept}
    try:
        config = load_config(chosen)
    except ConfigError as error:
        label = " ".join(f"{key}={value}" for key, value in picked.items())
        raise ConfigError(f"Point {which} ({label}) is impossible: {error.message}", error.remediation) from error
    tree = resolved(config)
    values = {key: _leaf(tree, key, text) for key, text in picked.items()}
    return Point("p" + config_hash(config).hex()[:12], chosen, values)


def _leaf(tree: Any, key: str, text: str) -> Value:
    """The resolved value of a key; the text that was given where it is a list or an option of a group."""
    for part in key.split("."):
        tree = tree.get(part, ()) if isinstance(tree, dict) else ()
    return tree if tree is None or isinstance(tree, (str, int, float)) else text


def _first_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n")[0].rstrip(".")
    return f"{text or type(error).__name__}."


# ------------------------------------------------------------------------------------------------ the folder


@dataclass(frozen=True)
class Outcome:
    """How a point's latest run ended.

    Attributes:
        exit_status: that of `lensemble run`.
        seconds: wall time of the point's runs together, as far as it is known; None if not at all.
        detail: the error's words; empty if there was none.
    """

    exit_status: int
    seconds: float | None
    detail: str = ""


def open_sweep(sweep: Sweep, folder: Path) -> None:
    """Write ``sweep.json``. A folder that holds a sweep may be given a larger one, never another one.

    Raises:
        ConfigError: the folder holds points that are not of this sweep, or something else.
        ArtifactError: it cannot be written.
    """
    with file_errors(folder, "make the folder"):
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    if (folder / "sweep.json").is_file():
        others = {point.id: point for point in read_sweep(folder).points}
        for point in sweep.points:
            others.pop(point.id, None)
        if others:
            raise ConfigError(
                f"{folder} holds another sweep (with the point {next(iter(others.values())).label!r}).",
                "Give the sweep another --name; the same name is for the same points, or for more of them.",
            )
    elif there:
        raise ConfigError(f"{folder} is not empty ({there[0]}) and holds no sweep.", "Give the sweep another --name.")
    tree = {"schema_version": SCHEMA_VERSION, **asdict(sweep)}
    atomic_write(folder / "sweep.json", (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode(), mode=0o644)


def read_sweep(folder: Path) -> Sweep:
    """The sweep of a folder.

    Raises:
        ConfigError: there is none. ArtifactError: it is damaged, or of another release.
    """
    path = folder / "sweep.json"
    if not path.is_file():
        raise ConfigError(f"There is no sweep in {folder} (no sweep.json).", "Name a folder below outputs/sweeps.")
    try:
        tree = json.loads(path.read_bytes())
        if tree["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"its schema is {tree['schema_version']!r}, not {SCHEMA_VERSION}")
        points = []
        for point in tree["points"]:
            if not re.fullmatch(r"p[0-9a-f]{12}", point["id"]):  # it names files
                raise ValueError(f"the point's id {point['id']!r} is none")
            values = {str(key): _scalar(point["values"][key]) for key in tree["keys"]}
            points.append(Point(point["id"], tuple(map(str, point["overrides"])), values))
        return Sweep(tuple(map(str, tree["overrides"])), tuple(map(str, tree["keys"])), tuple(points))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be used: {error}.", "Start the sweep again with its command.") from error


def _scalar(value: Any) -> Value:
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"{value!r} is no value of a key")


def outcome_of(folder: Path, point: Point) -> Outcome | None:
    """How a point stands; None if it was never started. Its run's own manifest tells where its process was killed."""
    tree = _object(folder / f"{point.id}.json")
    status, seconds = tree.get("exit_status"), tree.get("seconds")
    if isinstance(status, int) and isinstance(seconds, (int, float)):
        return Outcome(status, float(seconds), str(tree.get("detail", "")))
    if not (folder / point.id).is_dir():
        return None
    manifest = _object(folder / point.id / "manifest.json")
    word = manifest.get("status", "running")
    if word in ("running", "STOPPED"):
        return Outcome(EXIT_INTERRUPTED, None)
    if word == "completed":
        return Outcome(EXIT_OK, None)
    return Outcome(exit_status(f"[{word}]"), None, f"[{word}] {manifest.get('detail', '')}".strip())


def is_finished(folder: Path, point: Point) -> bool:
    """Whether a point need not be run again."""
    outcome = outcome_of(folder, point)
    return outcome is not None and outcome.exit_status in FINISHED


def _object(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        tree = json.loads(path.read_bytes())
        if isinstance(tree, dict):
            return tree
    return {}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One sweep at a time works in a folder.

    Raises:
        ConfigError: another one does. ArtifactError: the folder cannot be written.
    """
    with file_errors(folder, "lock the folder"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "w")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another sweep is working in {folder}.", "Wait for it or stop it.") from error
        yield


# ------------------------------------------------------------------------------------------------ running


def command_of(folder: Path, point: Point) -> list[str]:
    """The command that runs a point, or continues it, in the sweep's folder: `lensemble run`, of this very package."""
    root = Path(__file__).resolve().parents[1]
    start = f"import sys; sys.path.insert(0, {str(root)!r}); from lensemble_flwr.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, "run"]
    run = folder / point.id
    if (run / "federation.json").is_file():
        return [*command, "--resume", point.id]
    for name in ("checkpoints", "state"):  # a run that was killed before it had a name left these, empty
        with contextlib.suppress(OSError):
            (run / name).rmdir()
    return [*command, *point.overrides, f"output_dir={point.id}"]


def run_points(
    folder: Path,
    points: Sequence[Point],
    *,
    jobs: int = 1,
    on_start: Callable[[Point], None] = lambda point: None,
    on_end: Callable[[Point, Outcome], None] = lambda point, outcome: None,
    on_tick: Callable[[], None] = lambda: None,
) -> bool:
    """Run the points that are not finished, at most ``jobs`` at a time, each by its own `lensemble run`.

    SIGINT, SIGTERM and SIGHUP are handed to the runs, which then stop in order, and no other point is started; again,
    and the runs stop at once. If this process dies otherwise, a guard ends the runs.

    Returns:
        whether all points were run; False after a signal.

    Raises:
        ArtifactError: the sweep's folder cannot be written.
    """
    waiting = [point for point in points if not is_finished(folder, point)]
    with _Runs(folder) as runs:
        while runs.running or (waiting and not runs.stopping):
            while waiting and len(runs.running) < jobs and not runs.stopping:
                point = waiting.pop(0)
                on_start(point)
                runs.start(point)
            for point, outcome in runs.ended():
                on_end(point, outcome)
            on_tick()
            time.sleep(0.1)
        return not runs.stopping


@dataclass
class _Running:
    point: Point
    process: subprocess.Popen
    began: float
    before: float
    log_from: int


class _Runs:
    """The processes of a sweep that are under way, the signals meant for them, and their guard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = secrets.token_hex(16)
        self._handlers: dict[int, Any] = {}
        self.running: list[_Running] = []
        self.stopping = False

    def __enter__(self) -> _Runs:
        scratch = tempfile.mkdtemp(prefix="lensemble-sweep-")  # the guard removes it
        read_end, self._alive = os.pipe()
        try:
            self._guard = processes.start_guard(read_end, self._mark, scratch)
        finally:
            os.close(read_end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a script's background job
                self._handlers[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *unused: object) -> None:
        os.close(self._alive)  # the guard ends what is left, after an error, and itself
        self._guard.wait()
        for run in self.running:
            run.process.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True
        for run in self.running:
            self._hand_on(run)

    @staticmethod
    def _hand_on(run: _Running) -> None:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # the runs inherited that
        run.process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)

    def start(self, point: Point) -> None:
        """Start a point's run. What it prints goes to its log."""
        outcome = outcome_of(self._folder, point)
        before = (outcome.seconds if outcome else None) or 0.0
        path = self._folder / f"{point.id}.log"
        with file_errors(path, "write"):
            (self._folder / f"{point.id}.json").unlink(missing_ok=True)
            with open(path, "ab") as log:
                began, log_from = time.monotonic(), log.tell()
                process = subprocess.Popen(
                    command_of(self._folder, point),
                    cwd=self._folder,
                    env={**os.environ, processes.MARK: self._mark, "LENSEMBLE_HOME": str(home())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at the terminal is for this command, which hands it on
                )
                run = _Running(point, process, began, before, log_from)
                self.running.append(run)
        if self.stopping:  # the signal came while it was being started
            self._hand_on(run)

    def ended(self) -> list[tuple[Point, Outcome]]:
        """The runs that ended since the last call; how is on the disk then."""
        found = []
        for run in [r for r in self.running if r.process.poll() is not None]:
            self.running.remove(run)
            status, detail = run.process.returncode, ""
            if status in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
                status = EXIT_INTERRUPTED  # before it could stop in order
            elif status < 0:
                status, detail = EXIT_FAILURE, f"Its process was ended by signal {-status}."
            if status not in (EXIT_OK, EXIT_INTERRUPTED) and not detail:
                detail = self._last_words(run)
            outcome = Outcome(status, round(run.before + time.monotonic() - run.began, 2), detail)
            text = json.dumps(asdict(outcome)) + "\n"
            atomic_write(self._folder / f"{run.point.id}.json", text.encode(), mode=0o644)
            found.append((run.point, outcome))
        return found

    def _last_words(self, run: _Running) -> str:
        """The last error that a run printed, else its last line."""
        with open(self._folder / f"{run.point.id}.log", "rb") as log:
            log.seek(run.log_from)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [found[0] for line in lines if (found := _ERROR.search(line))]
        return (errors or lines or ["It said nothing."])[-1][:500]


def sweep_status(outcomes: Sequence[Outcome | None]) -> int:
    """Exit status of a sweep that was not stopped: 0 if every point is finished (all rounds, or all its budget).

    A budget that ends before the rounds do is what such a point was run to show. Any other end is 1.
    """
    return EXIT_OK if all(o is not None and o.exit_status in FINISHED for o in outcomes) else EXIT_FAILURE
