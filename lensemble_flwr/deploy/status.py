"""``lensemble status``: how a run stands, from the public files in its folder, and which sites are connected."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from lensemble_flwr.config import load_config
from lensemble_flwr.deploy.coordinator_folder import nodes, open_coordinator
from lensemble_flwr.errors import EXIT_FAILURE, EXIT_OK, ArtifactError, ConfigError, LaunchError
from lensemble_flwr.federation.manifest import COMPLETED, read_manifest
from lensemble_flwr.federation.run_folder import RunFolder, no_run
from lensemble_flwr.privacy.printed import printed
from lensemble_flwr.reporting.wording import clean

LOGS = ("coordinator.log", "flower.log")
NO_RUN, NOT_STARTED = "no run", "not started"
RUNNING, INTERRUPTED = "running", "interrupted"
_MOST_S = 1e9  # seconds; no round and no run takes thirty years


@dataclass(frozen=True)
class Status:
    """How a run stands. ``state``: running, interrupted (nobody works on it), completed, not started, or an error's
    code."""

    state: str
    planned: int
    rounds: list[dict[str, Any]]
    target_epsilon: float | None
    age_s: float
    error: str = ""
    """What ended it, with what to do: the coordinator's own text, which holds public values only."""
    logs: tuple[Path, ...] = ()
    again: str = "start it again: it has no round to resume"
    """What a person does when it has stopped."""

    @property
    def healthy(self) -> bool:
        """Whether nobody needs to do anything."""
        return self.state in ("running", "completed")

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds until the end, from the mean of the rounds so far; None before the first."""
        timed = [r["seconds"] for r in self.rounds if r.get("seconds")]
        if not timed or self.state != "running":
            return None
        mean = sum(timed) / len(timed)
        return max(0.0, (self.planned - len(self.rounds)) * mean - min(self.age_s, mean))

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Mean seconds by message type over the timed rounds, and the coordinator's own work as "between"."""
        timed = [r for r in self.rounds if r.get("seconds") and r.get("stage_seconds")]
        names = list(dict.fromkeys(name for r in timed for name in r["stage_seconds"]))
        mean = {name: sum(r["stage_seconds"].get(name, 0.0) for r in timed) / len(timed) for name in names}
        if timed:
            mean["between"] = max(0.0, sum(r["seconds"] for r in timed) / len(timed) - sum(mean.values()))
        return mean

    def text(self, now: datetime) -> str:
        """What a person reads; nothing in it acts on a terminal."""
        return "\n".join(clean(line) for line in self._lines(now))

    def _lines(self, now: datetime) -> list[str]:
        lines = [f"{self.state}: {len(self.rounds)} of {self.planned} rounds" if self.planned else self.state]
        if self.rounds:
            last = self.rounds[-1]
            lines.append(
                f"last round: {last['round']}, {last['outcome']}, {last['participants']} of {last['roster']} in the "
                f"sum, {timedelta(seconds=round(self.age_s))} ago"
            )
            if last.get("private"):
                spent = ", ".join(f"{view} {_epsilon(last.get(f'epsilon_{view}'))}" for view in ("central", "local"))
                target = _epsilon(self.target_epsilon)
                lines.append(f"epsilon of this run's public rounds: {spent} (the run's target: {target})")
            elif not last.get("private"):
                lines.append("NON-PRIVATE: no epsilon is claimed")
        if self.stage_seconds:
            stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stage_seconds.items())
            lines.append(f"seconds of a round: {stages}")
        if self.seconds_left is not None and self.seconds_left < _MOST_S:
            lines.append(f"expected end: {now + timedelta(seconds=self.seconds_left):%Y-%m-%d %H:%M:%S}")
        if self.healthy:
            return lines
        if self.error:
            lines.append(f"why: {self.error}")
        lines += [f"log: {path}" for path in self.logs]
        why = "nobody works on it" if self.state == "interrupted" else "then"
        lines.append(f"{why}: {self.again}")
        return lines


def read_status(folder: Path, now: float) -> Status:
    """How the run in ``folder`` stands.

    Raises:
        ConfigError: there is no run, or its overrides are no longer understood. ArtifactError: a file is damaged.
    """
    logs = tuple(path for name in LOGS if (path := folder / name).is_file())
    if not (folder / "federation.json").is_file():
        if not logs:
            raise no_run(folder)
        if _held(folder / "flower.log"):  # lensemble run is at work and Flower has not come that far
            return Status("running", 0, [], None, 0.0)
        return Status(NOT_STARTED, 0, [], None, 0.0, "Its ServerApp never began, or had no folder.", logs)
    run = RunFolder.open(folder)
    rounds, state, detail = _sound(run), RUNNING, ""
    if (folder / "manifest.json").exists():
        state, detail, planned, target = _of_manifest(folder)
    else:  # it ended, or is still at work, before there was one
        composed = load_config(_overrides(run))
        planned, target = composed.diloco.rounds, composed.privacy.target_epsilon
    state, text = _how_it_stands(state, detail, run.last_word(), _held(folder / "state" / "lock"))
    path = folder / "rounds.jsonl"
    age = now - path.stat().st_mtime if path.is_file() else 0.0
    return Status(state, planned, rounds, target, max(0.0, age), text, logs, run.resume_command())


def _how_it_stands(state: str, detail: str, last: dict[str, str], held: bool | None) -> tuple[str, str]:
    """(state, why) from the manifest's, from the log's last word, which is newer where a resumption failed or died
    before it wrote a manifest, and from whether somebody holds the lock (None: not known)."""
    if held:
        return RUNNING, ""
    if state == COMPLETED:
        return state, ""
    if last["event"] == "error":
        return last["code"], last["text"]
    if state == RUNNING or last["event"] == "run":
        return (RUNNING if held is None else INTERRUPTED), ""
    return state, detail


def _of_manifest(folder: Path) -> tuple[str, str, int, float | None]:
    """(status, detail, planned rounds, target epsilon)."""
    manifest = read_manifest(folder)
    try:
        target = manifest.config["privacy"]["target_epsilon"]
        planned = int(manifest.config["diloco"]["rounds"])
        return str(manifest.status), str(manifest.detail), planned, None if target is None else float(target)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(
            f"{folder / 'manifest.json'} has not the configuration of a run ({type(error).__name__}).",
            "Restore it from a backup.",
        ) from error


def _overrides(run: RunFolder) -> list[str]:
    overrides = run.federation.get("overrides")
    if isinstance(overrides, list) and all(isinstance(override, str) for override in overrides):
        return overrides
    raise ArtifactError(
        f"{run.path / 'federation.json'} has no list of overrides.",
        "Restore it from a backup; without it the run cannot be continued.",
    )


def _sound(run: RunFolder) -> list[dict[str, Any]]:
    """The records of the finished rounds, each with what is shown of it."""
    rounds = run.rounds()
    for number, record in enumerate(rounds, 1):
        stages = record.get("stage_seconds") or {}
        seconds = [record.get("seconds"), *(stages.values() if isinstance(stages, dict) else [stages])]
        fits = all(isinstance(record.get(name), int) for name in ("participants", "roster"))
        fits = fits and isinstance(record.get("outcome"), str)
        if not fits or not all(s is None or (isinstance(s, int | float) and 0 <= s < _MOST_S) for s in seconds):
            raise ArtifactError(
                f"{run.path / 'rounds.jsonl'}: line {number} is not the record of a round.", "Restore it from a backup."
            )
    return rounds


def _held(lock: Path, locks: Path = Path("/proc/locks")) -> bool | None:
    """Whether a process of this machine holds the lock; None where the system does not tell. Takes no lock itself."""
    if not lock.exists():
        return False
    try:
        status = lock.stat()
        return any(
            words[5].endswith(f":{status.st_ino}") and _has_open(words[4], status)
            for line in locks.read_text().splitlines()
            if len(words := line.split()) > 5 and words[1] == "FLOCK"
        )
    except OSError:
        return None


def _has_open(pid: str, file: os.stat_result) -> bool:
    """Whether a process has a file open; yes where it cannot be seen. An inode's number is one disk's only, and the
    device that the system names beside it is not everywhere the file's."""
    try:
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True
    for handle in handles:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(handle.stat(), file):
                return True
    return False


def _epsilon(value: Any) -> str:
    return printed(value if isinstance(value, int | float) else None)


def _folder(named: Path | None, needed: bool) -> Path | None:
    """The run's folder; None: there is none, and it is not needed."""
    if named is not None:
        return named.expanduser().absolute()
    newest = _newest()
    if newest is None and needed:
        raise ConfigError("There is no run below outputs/.", "Name a run's folder.")
    return None if newest is None else newest.absolute()


def _newest() -> Path | None:
    names = ("manifest.json", "federation.json", *LOGS)
    files = (path for name in names for path in Path("outputs").glob(f"*/{name}"))
    runs = sorted(files, key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else None


def status_command(argv: Sequence[str]) -> int:
    """Run the command; exit status 0 when nobody needs to do anything, else 1."""
    parser = argparse.ArgumentParser(
        prog="lensemble status",
        description="How a run stands: rounds, epsilon of its public rounds, expected end; which sites are connected.",
        epilog="Exit status: 0 running or completed, 1 otherwise, 2 no run. On a CPU: lensemble status outputs/RUN",
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a run's folder; default: the newest")
    parser.add_argument("--coordinator", type=Path, metavar="DIR", help="list the sites of this coordinator, too")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for monitoring")
    options = parser.parse_args(list(argv))
    folder = _folder(options.folder, needed=options.coordinator is None)
    status = Status(NO_RUN, 0, [], None, 0.0) if folder is None else read_status(folder, time.time())
    sites, silent = None, ""
    if options.coordinator:
        try:
            sites = nodes(open_coordinator(options.coordinator.expanduser()))
        except LaunchError as error:
            silent = error.message
    healthy = (status.healthy or folder is None) and not silent
    if options.json:
        last = status.rounds[-1] if status.rounds else {}
        print(
            json.dumps(
                {
                    "run": None if folder is None else str(folder),
                    "state": status.state,
                    "healthy": healthy,
                    "rounds": len(status.rounds),
                    "planned": status.planned,
                    "seconds_left": status.seconds_left,
                    "stage_seconds": status.stage_seconds,
                    "error": status.error or None,
                    "seconds_since_last_round": round(status.age_s),
                    "epsilon_central": last.get("epsilon_central"),
                    "epsilon_local": last.get("epsilon_local"),
                    "sites": dict(sites) if sites is not None else None,
                }
            )
        )
    else:
        if folder is None:
            print(f"run: {NO_RUN} below outputs/ yet")
        else:
            print(clean(f"run: {folder}"))
            print(status.text(datetime.now()))
        for name, state in sites or ():
            print(clean(f"site {name}: {state}"))
        if sites == []:
            print("sites: none registered")
        if silent:
            print(clean(f"sites: not known. {silent}"))
    return EXIT_OK if healthy else EXIT_FAILURE
