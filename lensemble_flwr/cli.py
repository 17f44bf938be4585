"""The ``lensemble`` command. Its exit status is the truth: 0 done, 1 failed, 2 bad input, 3 budget spent, 130 stopped.

Heavy modules are imported by the command that needs them, so that ``--help`` and typing errors answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lensemble_flwr.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ArtifactError,
    ConfigError,
    LensembleError,
    exit_status,
)

if TYPE_CHECKING:
    from lensemble_flwr.config import Config

LOG_NAME = "flower.log"
"""The command's own file in a run's folder; a folder with only this counts as empty."""


# ------------------------------------------------------------------------------------------------ commands


def _run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lensemble run",
        description="Run one federation through Flower and tell the truth about its end.",
        epilog="On a CPU, in half a minute: lensemble run experiment=linear",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration, as in diloco.rounds=3")
    parser.add_argument("--superlink", metavar="NAME", help="connection in Flower's config.toml; else simulate here")
    parser.add_argument("--resume", metavar="DIR", help="continue the federation in this output folder")
    parser.add_argument("--verbose", action="store_true", help="show Flower's own log lines too")
    arguments = parser.parse_intermixed_args(argv)

    from lensemble_flwr.config import check_length, join_overrides, load_config
    from lensemble_flwr.federation.manifest import git_revision
    from lensemble_flwr.federation.run_folder import RunFolder, resume_command
    from lensemble_flwr.launch import app_dir, run_federation

    if arguments.superlink is not None:  # before a rehearsal, and before a folder is made for a run that cannot be
        from lensemble_flwr.deploy.superlink import check_superlink

        check_superlink(arguments.superlink)
    overrides = list(arguments.overrides)
    if arguments.resume is not None:
        if overrides:
            raise ConfigError(
                f"The override {overrides[0]!r} cannot be given with --resume.",
                "A run is continued as it was started; leave the overrides out.",
            )
        folder = _folder_of_run(arguments.resume, "federation.json")
        overrides = _overrides_of_run(folder)
        RunFolder(folder).check_runtime(arguments.superlink is None)
        config = load_config(overrides)
    else:
        config = load_config(overrides)
        folder = _new_folder(config)
        overrides = [*(o for o in overrides if not o.startswith("output_dir=")), f"output_dir={_hydra(str(folder))}"]
        if arguments.superlink is None:
            sites = _sites_of_run(config, folder)
            kept = [o for o in overrides if not o.startswith("federation.sites_dir=")]
            overrides = [*kept, f"federation.sites_dir={_hydra(str(sites))}"]
            if config.data.name == "recordings":  # this import is slow
                from lensemble_flwr.federation.site_dataset import check_simulated

                check_simulated(config, sites)
        config = load_config(overrides)
    if arguments.superlink is not None:
        check_length(join_overrides(overrides))
    if arguments.resume is None:
        try:
            _print_preflight(config, simulation=arguments.superlink is None)
        except BaseException:  # nothing was started: leave nothing behind
            if arguments.superlink is None:
                with contextlib.suppress(OSError):  # a folder of earlier runs is not empty, and stays
                    sites.rmdir()
            raise
    elif _completed(folder):
        if arguments.superlink is None:
            print(f"The run in {folder} is complete; there is nothing to resume.")
            return EXIT_OK
        print(f"The run in {folder} is complete. Sites that are connected now are told so and sent its model.")
    _make_folder(folder)
    print(f"Output: {folder}", flush=True)
    if arguments.superlink is None:
        print(f"Sites:  {config.federation.sites_dir} (simulated: keys, ledgers, own logs)", flush=True)
    try:
        log = open(folder / LOG_NAME, "a", encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"{folder / LOG_NAME} cannot be written: {error.strerror}.") from error
    with log:
        _hold(log, folder)
        display = Display(sys.stdout, log, verbose=arguments.verbose)
        revision = git_revision(app_dir())
        try:
            result = run_federation(
                app_dir(),
                join_overrides(overrides),
                num_supernodes=config.federation.participants,
                resume=str(folder) if arguments.resume is not None else "",
                client_gpus=_gpu_share(config),
                superlink=arguments.superlink,
                revision=revision if revision != "unknown" else "",
                output=folder,
                stop_grace_s=20.0 if arguments.superlink is None else 120.0,
                on_line=display.line,
                on_tick=display.tick,
            )
        finally:
            display.close()
    if (folder / "rounds.jsonl").is_file():
        _print_report(folder)
    if result.exit_status == EXIT_INTERRUPTED:
        print(f"Stopped. To continue: {resume_command(folder, arguments.superlink)}", file=sys.stderr)
    elif result.exit_status != EXIT_OK:
        print(_shown(f"The federation failed: {result.details}"), file=sys.stderr)
        print(f"Flower's log: {folder / LOG_NAME}", file=sys.stderr)
    return result.exit_status


def _preflight(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lensemble preflight",
        description="What a run would claim, cost and lose to noise, before any participant's data is read.",
        epilog="On a CPU: lensemble preflight experiment=quickstart",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration, as in diloco.rounds=3")
    arguments = parser.parse_args(argv)
    from lensemble_flwr.config import load_config
    from lensemble_flwr.preflight import run_preflight

    print(run_preflight(load_config(arguments.overrides), Preparing()).text())
    return EXIT_OK


def _report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lensemble report",
        description="Write report.html again, from what the run left in its folder.",
        epilog="On a CPU, in seconds: lensemble report outputs/RUN",
    )
    parser.add_argument("folder", metavar="DIR", help="a run's output folder")
    _print_report(_folder_of_run(parser.parse_args(argv).folder, "manifest.json"))
    return EXIT_OK


def _ledger(argv: Sequence[str]) -> int:
    from lensemble_flwr.privacy.ledger_cli import ledger_command

    return ledger_command(list(argv))


def _site(argv: Sequence[str]) -> int:
    from lensemble_flwr.deploy.site_cli import site_command

    return site_command(argv)


def _coordinator(argv: Sequence[str]) -> int:
    from lensemble_flwr.deploy.coordinator_cli import coordinator_command

    return coordinator_command(argv)


def _data(argv: Sequence[str]) -> int:
    from lensemble_flwr.data_cli import data_command

    return data_command(argv)


def _status(argv: Sequence[str]) -> int:
    from lensemble_flwr.deploy.status import status_command

    return status_command(argv)


def _sweep(argv: Sequence[str]) -> int:
    from lensemble_flwr.sweep_cli import sweep_command

    return sweep_command(list(argv), Preparing())


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (_run, "run one federation"),
    "sweep": (_sweep, "run a grid of configurations and compare them"),
    "preflight": (_preflight, "privacy, signal, bytes and time of a run, before it is started"),
    "report": (_report, "write a run's report again"),
    "data": (_data, "a site's own recordings: inspect, prove, verify"),
    "ledger": (_ledger, "a participant's privacy ledger: init, show, verify, repair"),
    "status": (_status, "how a run stands, and which sites are connected"),
    "site": (_site, "a real participant in one folder: init, connect, roster, prepare, refresh, rotate, check"),
    "coordinator": (
        _coordinator,
        "the SuperLink's machine: init, admit, dismiss, register, ping, nodes, renew, public",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status; a known error is printed in plain lines, never as a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="lensemble",
        description="Federated training of a world model across participants that do not trust each other.",
        epilog="Commands:\n"
        + "\n".join(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items())
        + "\n\nlensemble COMMAND --help tells more. On a CPU, in half a minute: lensemble run experiment=linear",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="lensemble [-h] COMMAND ...",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    command = parser.parse_args(arguments[:1]).command
    try:
        return COMMANDS[command][0](arguments[1:])
    except LensembleError as error:
        if os.environ.get("LENSEMBLE_DEBUG") == "1":
            traceback.print_exc()
        print(_shown(f"[{error.code}] {error.message}"), file=sys.stderr)
        if error.remediation:
            print(_shown(error.remediation), file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a file of the user's, not a defect
            if os.environ.get("LENSEMBLE_DEBUG") == "1":
                traceback.print_exc()
            print(f"[{ArtifactError.code}] {error.filename}: {error.strerror}.", file=sys.stderr)
            print("Check the path and its permissions, and which user runs this.", file=sys.stderr)
            return EXIT_FAILURE
        return _unexpected(command, error)


def _unexpected(command: str, error: Exception) -> int:
    """A defect: the traceback goes to a file, one line names it."""
    text = traceback.format_exc()
    if os.environ.get("LENSEMBLE_DEBUG") == "1":
        print(text, file=sys.stderr)
    what = f"[INTERNAL] lensemble {command} failed unexpectedly ({type(error).__name__})"
    try:
        from lensemble_flwr.home import home

        file = home() / "logs" / f"{command}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"{what}; the traceback is in {file}", file=sys.stderr)
    except (OSError, LensembleError):
        print(f"{what}; set LENSEMBLE_DEBUG=1 to see the traceback.", file=sys.stderr)
    return EXIT_FAILURE


# -------------------------------------------------------------------------------- seams to later modules


def _print_preflight(config: Config, *, simulation: bool) -> None:
    """The short form before a run. A hopeless run is refused (ConfigError) unless it is accepted."""
    from lensemble_flwr.preflight import run_preflight

    found = run_preflight(config, Preparing(), simulation)
    print(found.text(short=True), flush=True)
    found.refuse_if_hopeless()
    found.refuse_if_spent()


class Preparing:
    """Progress of what is made before a run: one line that rewrites itself, or a line per quarter."""

    def __init__(self) -> None:
        self._said: tuple[str, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        quarter = (what, done * 4 // max(total, 1))  # however many are done at once
        if sys.stderr.isatty():
            end = "\n" if done >= total else ""
            print(f"\r{what}: {done}/{total}\x1b[K", end=end, file=sys.stderr, flush=True)
        elif self._said != quarter:
            self._said = quarter
            print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)


def _print_report(folder: Path) -> None:
    """Write report.html; print the closing sentence and its path."""
    from lensemble_flwr.reporting.report import write_report
    from lensemble_flwr.reporting.run_data import load_run
    from lensemble_flwr.reporting.summary import closing_sentence
    from lensemble_flwr.reporting.tensorboard import write_events

    report = write_report(folder)
    write_events(folder)
    print(closing_sentence(load_run(folder)))
    print(f"Report: {report}", flush=True)


# ------------------------------------------------------------------------------------------------- folders


def _hydra(value: str) -> str:
    """A value quoted for Hydra's override grammar, where a backslash only counts before a quote or at the end."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", value):
        return value
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def _sites_of_run(config: Config, folder: Path) -> Path:
    """Absolute folder of the simulated sites: the one that was asked for, or a fresh one; writable, and not shared.

    A fresh name each time: an output folder's name can come again, and ledgers never start anew.

    Raises:
        ConfigError: below the output folder. ArtifactError: it cannot be written.
    """
    from lensemble_flwr.home import home

    if config.federation.sites_dir is not None:
        sites = Path(config.federation.sites_dir).expanduser().absolute()
    else:
        sites = home() / "sites" / f"{folder.name}-{secrets.token_hex(4)}"
    if sites.is_relative_to(folder):
        raise ConfigError(
            f"federation.sites_dir={sites} lies below the output folder {folder}.",
            "Sites hold keys and ledgers, outputs are shared: choose another folder.",
        )
    try:
        sites.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = sites / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ArtifactError(
            f"The folder of the sites, {sites}, cannot be written: {error.strerror}.",
            "Choose another federation.sites_dir.",
        ) from error
    return sites


def _completed(folder: Path) -> bool:
    import json

    try:
        return json.loads((folder / "manifest.json").read_text())["status"] == "completed"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _new_folder(config: Config) -> Path:
    """Absolute output folder of a new run; it must be empty."""
    if config.output_dir is not None:
        folder = Path(config.output_dir).expanduser().absolute()
    else:
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{config.experiment}-{config.seed}"
        folder = Path("outputs", name).absolute()
    try:
        there = sorted(p.name for p in folder.iterdir() if p.name != LOG_NAME)
    except FileNotFoundError:
        return folder
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be used: {error.strerror}.", "Choose another folder.") from error
    if there:
        from lensemble_flwr.federation.run_folder import not_empty

        raise not_empty(folder, there[0])
    return folder


def _hold(log: TextIO, folder: Path) -> None:
    """One command at a time works on a run; the lock goes with its process."""
    import fcntl

    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"Another lensemble run is working in {folder}.", "Wait for it or stop it.") from error
    except OSError:  # a file system without locks
        return


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be created: {error.strerror}.", "Choose a folder that you can write."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={folder} cannot be written.", "Choose a folder that you can write.")


def _folder_of_run(name: str, file: str) -> Path:
    folder = Path(name).expanduser().absolute()
    if not (folder / file).is_file():
        from lensemble_flwr.federation.run_folder import no_run

        raise no_run(folder)
    return folder


def _overrides_of_run(folder: Path) -> list[str]:
    import json

    try:
        return [str(o) for o in json.loads((folder / "federation.json").read_text(encoding="utf-8"))["overrides"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{folder / 'federation.json'} cannot be read ({type(error).__name__}: {error}).",
            "Restore it from a backup; without it the run cannot be continued.",
        ) from error


# --------------------------------------------------------------------------------------------------- GPUs


def _gpu_share(config: Config) -> float:
    """Share of a GPU for one simulated participant: all GPUs, dealt among those that work at the same time."""
    if config.inner.device == "cpu":
        return 0.0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    else:
        with contextlib.suppress(OSError):
            gpus = len(os.listdir("/proc/driver/nvidia/gpus"))
            return _share(gpus, config.federation.participants)
        return 0.0
    return _share(gpus, config.federation.participants)


def _share(gpus: int, participants: int) -> float:
    at_once = max(1, min(participants, os.cpu_count() or 1))
    return min(1.0, int(1000 * gpus / at_once) / 1000)


# ------------------------------------------------------------------------------------------------- display


_MOST_TOLD = 5
_NOT_ADMITTED = {
    "SILENT": "it did not answer; it is asked again",
    "FULL": "all places are taken",
    "STRANGER": "the roster does not name it",
    "IDENTITY_IN_USE": "it uses the identity of a site that is connected",
    "DATASET_ROOT": "it came back with another dataset",
    "BAD_SIGNATURE": "its signature does not hold",
    "MALFORMED": "its answer cannot be read",
}
"""Why the coordinator lets a node not in; other codes are a participant's own."""


class Display:
    """Shows what the ServerApp says in events, one table row a round, and keeps every line for the log file.

    On a terminal the line at the bottom tells what is going on and for how long.
    """

    def __init__(self, out: TextIO, log: TextIO, *, verbose: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._log, self._verbose, self._clock = out, log, verbose, clock
        self._live = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._metrics: list[str] | None = None
        self._headline: str | None = None
        self._labels: Any = None
        self._now, self._since, self._drawn = "", clock(), False
        self._troubles: dict[tuple[str, str], set[str]] = {}
        self._doing("starting Flower")

    def _keep(self, line: str) -> None:
        if self._log.closed:
            return
        try:
            self._log.write(line + "\n")
            self._log.flush()
        except OSError as error:  # the coordinator says what a full disk means for the run; this is only its log
            with contextlib.suppress(OSError):
                self._log.close()
            self._print(f"The log cannot be written any more ({error.strerror}); what follows is not in it.")

    def line(self, line: str) -> None:
        from lensemble_flwr.launch import read_event

        self._keep(line)
        event = read_event(line)
        if event is not None:
            show = getattr(self, f"_on_{event['event']}", None)
            if show is not None:
                show(event)
        elif self._verbose:
            self._print(line)

    def tick(self) -> None:
        if self._live:
            self._out.write(f"\r\x1b[K{_shown(self._now)} ... {self._clock() - self._since:.0f} s")
            self._out.flush()
            self._drawn = True

    def close(self) -> None:
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._drawn = False

    def _print(self, text: str) -> None:
        self.close()
        print(_shown(text), file=self._out, flush=True)

    def _doing(self, what: str, count: str = "") -> None:
        """Name the stage; a new stage gets a line where there is no bottom line to change."""
        if what != self._now.partition(",")[0]:
            self._since = self._clock()
            if not self._live:
                self._print(f"{what} ...")
        self._now = f"{what}, {count}" if count else what
        self.tick()

    # ---- one method for each event that is shown; the others are in the log only

    def _on_progress(self, event: dict[str, Any]) -> None:
        self._doing(str(event.get("what")), f"{event.get('done')} of {event.get('total')}")

    def _on_joined(self, event: dict[str, Any]) -> None:
        self._print(f"{event.get('participants')} participants joined.")

    def _on_waiting(self, event: dict[str, Any]) -> None:
        needed = f" ({event['least']} are needed)" if event.get("least") else ""
        self._print(
            f"{event.get('joined')} of {event.get('participants')} participants joined; waiting for the others for at "
            f"most {event.get('seconds_left')} s{needed}."
        )

    def _on_refused(self, event: dict[str, Any]) -> None:
        code = str(event.get("code"))
        if event.get("stage") == "query.join":
            why = _NOT_ADMITTED.get(code, f"refused ({code}); its own log says why")
            self._trouble(("join", code), f"{_who(event)} does not take part: {why}.")
        else:
            text = f"{_who(event)} refused {event.get('stage')} ({code}); its own log says why."
            self._trouble((str(event.get("stage")), code), text)

    def _on_excluded(self, event: dict[str, Any]) -> None:
        cause = str(event.get("cause"))
        self._trouble(("excluded", cause), f"What {_who(event)} sent was left out of the round ({cause}).")

    def _trouble(self, kind: tuple[str, str], text: str) -> None:
        """Say it once, and of each kind of trouble no more than a few."""
        said = self._troubles.setdefault(kind, set())
        if text in said or len(said) > _MOST_TOLD:
            return
        said.add(text)
        self._print(text if len(said) <= _MOST_TOLD else f"More of the same ({kind[1]}): see coordinator.log.")

    def _on_closed(self, event: dict[str, Any]) -> None:
        self._print(f"{event.get('sites')} of {event.get('of')} sites were told how it ended.")

    def _on_stopping(self, event: dict[str, Any]) -> None:
        self._print("Stopping after this stage (nothing that the sites paid for is lost); once more stops at once.")

    def _on_restarted(self, event: dict[str, Any]) -> None:
        self._print(
            f"This machine is busy: Flower's process did not get to work within {event.get('seconds')} s, and Flower "
            f"started it again (start {event.get('times')})."
        )

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self._print(
            f"rounds 0 to {event.get('rounds', 1) - 1} are done; the run goes on with round {event.get('rounds')}"
        )

    def _on_start(self, event: dict[str, Any]) -> None:
        self._headline, self._labels = event.get("headline"), event.get("labels")
        self._row(event.get("metrics") or {}, "start")

    def _on_round_open(self, event: dict[str, Any]) -> None:
        self._now, self._since = f"round {event.get('round')}", self._clock()
        self.tick()

    def _on_void(self, event: dict[str, Any]) -> None:
        self._print(f"round {event.get('round')}: attempt {event.get('attempt')} was void ({event.get('cause')})")

    def _on_replayed(self, event: dict[str, Any]) -> None:
        self._print(f"round {event.get('round')}: committed from the sum that was stored before the interruption")

    def _on_round(self, event: dict[str, Any]) -> None:
        self._row(
            event.get("metrics") or {},
            str(event.get("round")),
            str(event.get("outcome")),
            f"{event.get('participants')}/{event.get('roster')}",
            _epsilon(event.get("epsilon_central")),
            _epsilon(event.get("epsilon_local")),
            _size(event.get("bytes_up"), event.get("bytes_down")),
            "-" if event.get("seconds") is None else f"{event['seconds']:.1f} s",
        )

    def _row(self, metrics: dict[str, Any], *cells: str) -> None:
        if self._metrics is None:
            from lensemble_flwr.reporting.metrics import ordered
            from lensemble_flwr.reporting.run_data import labels_from

            known = ordered(metrics, labels_from(self._labels or {}))
            shown = sorted(known, key=lambda metric: metric.name != self._headline)[:2]
            self._metrics = [metric.name for metric in shown]
            head = ["round", "outcome", "in sum", "eps central", "eps local", "MB", "time", *(m.short for m in shown)]
            self._widths = [max(len(h), w) for h, w in zip(head, (5, 9, 7, 8, 8, 8, 8, 8, 8), strict=False)]
            self._print("  ".join(h.rjust(w) for h, w in zip(head, self._widths, strict=True)))
        padded = [*cells, *[""] * (7 - len(cells)), *(_number(metrics.get(name)) for name in self._metrics)]
        self._print("  ".join(c.rjust(w) for c, w in zip(padded, self._widths, strict=True)))


def _shown(text: str) -> str:
    """Lines that show what they hold: a SuperLink's or an app's words may hold what acts on a terminal."""
    from lensemble_flwr.reporting.wording import clean

    return "\n".join(map(clean, text.splitlines()))


def _who(event: dict[str, Any]) -> str:
    node = f"node {event.get('node')}"
    return f"site {event['site']} ({node})" if "site" in event else node


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"


def _epsilon(value: Any) -> str:
    from lensemble_flwr.privacy.printed import printed

    return "-" if value is None else printed(value)


def _size(*parts: Any) -> str:
    """Bytes as MB, "-" if not measured."""
    return f"{sum(parts) / 1e6:.2f}" if all(isinstance(p, int) for p in parts) else "-"


if __name__ == "__main__":
    sys.exit(main())
