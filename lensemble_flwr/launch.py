"""Starting one federation through Flower's own commands, and the truth about how it ended.

``flwr run --stream`` returns 0 whatever happened, leaves a background SuperLink behind and shares its port and state
with everybody on the machine. Here each run has a SuperLink of its own on a free port, its own Flower and ray folders
in one private temporary folder, and an end that is looked up (``flwr list``), not guessed.

Nothing is imported from Flower: only its commands are used (``flower-superlink``, ``flwr run/log/list/stop``).
"""

from __future__ import annotations

import collections
import contextlib
import errno
import http.client
import json
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from lensemble_flwr import processes
from lensemble_flwr.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, ConfigError, LaunchError, exit_status

STOP_FILE_VARIABLE = "LENSEMBLE_STOP_FILE"
"""Environment variable naming a file; once it exists, the ServerApp should end after the stage it is in."""

COMPLETED = "finished:completed"
_PACKAGES = ("lensemble_flwr", "strategies", "clients")
_CONNECTION = "lensemble"
_PREFIX = "lensemble-"
_MAGIC_ADDRESSES = (":local:", ":local-in-memory:")
_START_TIMEOUT_S = 90.0
_LOST_AFTER_S = 4.0
_CLAIM_S = 30
_MOST_STARTS = 6
"""Flower 1.42 gives its process 30 s (a constant of its source) from being started to asking for the run; then it
starts another one beside it. On a machine that is too busy no start ever gets there, and each adds to the load."""
_NO_HEARTBEAT = "No heartbeat received from the task"
_NEEDED_BYTES = 256 * 2**20
# A Unix socket's path may have 103 bytes (107 on Linux); ray appends up to 68 to its folder.
_LONGEST_BASE = 16
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CODE = re.compile(r"\[[A-Z]+(?:_[A-Z]+)*\] \S")
_EVENT = re.compile(r"(?:[A-Z]+\s*:\s*)?LENSEMBLE\|")
_BOX = re.compile(r"^[\s│╭╮╰╯─|]+|[\s│╭╮╰╯─|]+$")


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: Flower's status (``finished:completed``, ``finished:failed``, ``finished:stopped``), or
            ``interrupted`` (stopped by a signal to this command), or ``lost`` (its process died without a word).
        details: why, as text; the error's ``[CODE] message`` when the ServerApp raised one. Empty when completed.
        exit_status: 0 only for ``finished:completed`` after the ServerApp's "end" event; else 1, 2 (bad input),
            3 (budget), 130 (interrupted).
        run_id: Flower's number of the run, None if it never got one.
    """

    status: str
    details: str
    exit_status: int
    run_id: int | None


def run_federation(
    app: str | Path,
    overrides: str,
    *,
    num_supernodes: int,
    resume: str = "",
    client_cpus: int = 1,
    client_gpus: float = 0.0,
    superlink: str | None = None,
    revision: str = "",
    output: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    on_tick: Callable[[], None] = lambda: None,
    stop_grace_s: float = 20.0,
) -> RunResult:
    """Run one federation to its end and leave no process behind.

    Args:
        app: folder of the Flower app (see :func:`app_dir`).
        overrides: Hydra overrides as one string (quotes as in a shell), handed to both apps.
        num_supernodes: simulated participants; ignored with ``superlink``.
        resume: folder of the federation to continue, or "".
        client_cpus: CPU cores reserved for one simulated participant at work.
        client_gpus: share of a GPU reserved likewise.
        superlink: name of a connection in the user's own Flower configuration: the run goes there and nothing is
            started here. None: a private SuperLink with Flower's simulation runtime.
        revision: of the code, for the run's manifest; "" where it is not known (and for apps without that key).
        output: the run's folder. With ``superlink`` it takes the request to stop, if the ServerApp works in it here.
        on_line: called in this thread with each line of the run's log, without colours and line end.
        on_tick: called in this thread about four times a second.
        stop_grace_s: after the first SIGINT, SIGTERM or SIGHUP the ServerApp has this long to end by itself
            (see :data:`STOP_FILE_VARIABLE`); a second signal ends the run at once.

    Raises:
        ConfigError: ``superlink`` names no usable connection.
        LaunchError: something that is needed could not be started.
    """
    tools = _Tools.find()
    with _Signals() as signals, _Workspace.create() as space:
        staged = stage_app(Path(app), space.path / "app")
        run_config = space.path / "run.toml"
        run_config.write_text(f"overrides = {_toml(overrides)}\nresume = {_toml(resume)}\n", encoding="utf-8")
        if revision:
            with run_config.open("a", encoding="utf-8") as file:
                file.write(f"revision = {_toml(revision)}\n")
        arguments = ["--run-config", str(run_config), "--stream"]
        if superlink is None:
            environment = space.environment(tools)
            federation = f"num-supernodes={num_supernodes} client-resources-num-cpus={client_cpus}"
            federation += f" client-resources-num-gpus={float(client_gpus)}"
            if num_supernodes * client_cpus < (os.cpu_count() or 1):
                # Flower starts one ray worker for each core, however few participants there are.
                federation += f" init-args-num-cpus={num_supernodes * client_cpus}"
            arguments += ["--federation-config", federation]
            connection, local = _CONNECTION, _SuperLink(tools, space, environment, signals, on_line)
        else:
            find_connection(superlink)
            environment = _command_environment(tools)
            connection, local = superlink, None
        commands = _Commands(tools, environment, connection, space.children)
        stop = space.path / "stop" if local is not None else output / "state" / "stop" if output is not None else None
        run = _Run(commands, signals, space, local, stop, on_line, on_tick, stop_grace_s)
        return run.follow([str(staged), connection, *arguments])


# ------------------------------------------------------------------------------------------------- the app


def app_dir() -> Path:
    """Folder of the Flower app: the source checkout this package lies in, or the installed package's parent.

    Raises:
        LaunchError: neither holds the app's description.
    """
    package = Path(__file__).resolve().parent
    if (package.parent / "pyproject.toml").is_file() or (package / "app.toml").is_file():
        return package.parent
    raise LaunchError(
        f"The description of the Flower app is neither beside {package} (pyproject.toml) nor in it (app.toml).",
        "Install the project's wheel again, or run the command from a source checkout: pip install -e CHECKOUT.",
    )


def stage_app(source: Path, target: Path) -> Path:
    """Copy what belongs into the app bundle, and nothing else, to ``target``.

    Flower would otherwise walk the whole checkout (environments and outputs too) to find the same files. The list is
    ``fab-include`` in the app's description, so the bundle has the bytes, and the hash, that ``flwr build`` gives. An
    app without that list is used where it is. Installed as a wheel, the groups and the description lie inside the
    package and are put where they were.

    Returns:
        the folder to give to ``flwr run``.
    Raises:
        LaunchError: no such app, or the copy fails.
    """
    description = source / "pyproject.toml"
    package = source / "lensemble_flwr"
    if not description.is_file():
        description = package / "app.toml"
    try:
        text = description.read_bytes()
        patterns = tomllib.loads(text.decode()).get("tool", {}).get("flwr", {}).get("app", {}).get("fab-include")
    except (OSError, ValueError) as error:
        raise LaunchError(f"{description} cannot be read as a Flower app: {error}.") from error
    if not patterns:
        return source
    try:
        target.mkdir(parents=True)
        (target / "pyproject.toml").write_bytes(text)
        for pattern in patterns:
            root = source
            if description.name == "app.toml" and pattern.split("/")[0] not in _PACKAGES:
                root = package
            for file in root.glob(pattern):
                if file.is_file() and not file.is_symlink():
                    copy = target / file.relative_to(root)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
    except OSError as error:
        raise _os_error(error, "The app cannot be copied") from error
    return target


# --------------------------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class _Tools:
    """Flower's commands of the environment that this Python belongs to."""

    path: str
    flwr: str
    superlink: str

    @classmethod
    def find(cls) -> _Tools:
        # Flower finds its own programs by name on PATH, and the environment need not be activated.
        folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        path = os.pathsep.join(dict.fromkeys(f for f in folders if f))
        found = {name: shutil.which(name, path=path) for name in ("flwr", "flower-superlink")}
        missing = [name for name, place in found.items() if place is None]
        if missing:
            raise LaunchError(
                f"Flower's command {missing[0]} is not installed beside {sys.executable}.",
                "Install the project's dependencies: scripts/demo does, or pip install 'flwr[simulation]==1.42.*'.",
            )
        return cls(path, str(found["flwr"]), str(found["flower-superlink"]))


def _command_environment(tools: _Tools) -> dict[str, str]:
    """For Flower's commands: quiet, offline, not interactive."""
    environment = dict(os.environ)
    environment.pop(processes.MARK, None)
    loopback = "127.0.0.1,localhost"
    for name in ("NO_PROXY", "no_proxy"):  # the private SuperLink must not be looked for behind a proxy
        environment[name] = ",".join(filter(None, (environment.get(name, ""), loopback)))
    return environment | {
        "PATH": tools.path,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }


def _runtime_environment(tools: _Tools, folder: Path, mark: str) -> dict[str, str]:
    """For a private SuperLink and everything below it. LENSEMBLE_HOME and the like pass through."""
    environment = _command_environment(tools)
    for name in list(environment):
        if name.startswith(("FLWR_LOCAL_", "RAY_ADDRESS", "RAY_AUTH_")) or name in ("RAY_NAMESPACE", "FLWR_DATABASE"):
            del environment[name]
    own = {
        processes.MARK: mark,
        STOP_FILE_VARIABLE: str(folder / "stop"),
        "FLWR_HOME": str(folder / "flwr"),
        # Otherwise Flower installs the app's dependencies anew, from the network, for every run.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "TMPDIR": str(folder / "t"),
        "RAY_TMPDIR": str(folder),
        "RAY_ADDRESS": "local",  # never join a cluster that happens to run here
        "RAY_USAGE_STATS_ENABLED": "0",
        # ray listens on every network interface and runs what it is sent: let it in only with this run's secret.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    if environment.get("FLWR_LOG_LEVEL", "").upper() != "DEBUG":
        own["FLWR_LOG_LEVEL"] = "INFO"  # the events are log lines of this level
    tuned = {
        "RAY_prestart_worker_first_driver": "0",  # these workers would be of no use: Flower's have another environment
        "RAY_enable_metrics_collection": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(2**30),
    }
    return tuned | environment | own


def _toml(text: str) -> str:
    """A TOML string: JSON's, except that TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _os_error(error: OSError, what: str) -> LaunchError:
    remedy = "Set TMPDIR to a folder that you can write and whose path is short."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"Free space on the disk of {tempfile.gettempdir()}, or set TMPDIR to a short path on another one."
    elif error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        remedy = "The machine has no processes, open files or memory left for it; look at ulimit -a and free."
    return LaunchError(f"{what}: {error.strerror or error}.", remedy)


class _Workspace:
    """The private temporary folder of one run, its mark, and the guard that ends the run if this process dies."""

    def __init__(self, path: Path, mark: str) -> None:
        self.path = path
        self.mark = mark
        self.children: list[subprocess.Popen] = []
        self._guard: subprocess.Popen | None = None
        self._alive = -1

    @classmethod
    def create(cls) -> _Workspace:
        base = next((b for b in (tempfile.gettempdir(), "/tmp") if len(b) <= _LONGEST_BASE), "/tmp")  # noqa: S108
        _sweep(Path(base))
        try:
            free = shutil.disk_usage(base).free
            if free < _NEEDED_BYTES:
                raise OSError(errno.ENOSPC, f"only {free / 2**20:.0f} MiB are free in {base}")
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise _os_error(error, "The run's temporary folder cannot be made") from error
        space = cls(path, secrets.token_hex(16))
        try:
            space._prepare()
        except OSError as error:
            space.close()
            raise _os_error(error, "The run's temporary folder cannot be filled") from error
        return space

    def _prepare(self) -> None:
        for name in ("flwr", "t"):
            (self.path / name).mkdir()
        owner = {"pid": os.getpid(), "started": processes.start_time(os.getpid()), "mark": self.mark}
        (self.path / "owner.json").write_text(json.dumps(owner), encoding="utf-8")
        read_end, self._alive = os.pipe()
        try:
            self._guard = processes.start_guard(read_end, self.mark, str(self.path))
        finally:
            os.close(read_end)

    def environment(self, tools: _Tools) -> dict[str, str]:
        return _runtime_environment(tools, self.path, self.mark)

    def close(self) -> None:
        processes.end_family(self.mark, children=self.children)
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._alive >= 0:
            os.close(self._alive)  # the guard sees it, finds nothing left to do and ends
            self._alive = -1
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout=10)

    def __enter__(self) -> _Workspace:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _sweep(base: Path) -> None:
    """End and remove what runs left that were killed together with their guard."""
    for owner in base.glob(f"{_PREFIX}*/owner.json"):
        try:
            if owner.stat().st_uid != os.getuid():
                continue
            record = json.loads(owner.read_text(encoding="utf-8"))
            pid, mark = int(record["pid"]), str(record["mark"])
            if processes.start_time(pid) == record["started"] or not re.fullmatch(r"[0-9a-f]{32}", mark):
                continue
        except (OSError, ValueError, KeyError, TypeError):
            continue
        processes.end_family(mark, grace_s=0.0)
        shutil.rmtree(owner.parent, ignore_errors=True)


class _Signals:
    """Counts SIGINT, SIGTERM and SIGHUP while a run is under way, instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a script's background job
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- SuperLink


def find_connection(name: str) -> Mapping[str, object]:
    """A connection of the user's own Flower configuration that leads to a SuperLink somewhere.

    Raises:
        ConfigError: there is no such one.
    """
    file = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        connections = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {})
        if not isinstance(connections, Mapping):
            raise ValueError("superlink is no table")
    except FileNotFoundError:
        connections = {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"Flower's configuration {file} cannot be read: {error}.") from error
    known = sorted(k for k, v in connections.items() if isinstance(v, Mapping) and _leads_somewhere(v))
    if name not in known:
        entry = connections.get(name)
        why = "is Flower's simulation on this machine" if isinstance(entry, Mapping) else f"is not in {file}"
        hint = f"Known there: {', '.join(known)}. " if known else ""
        raise ConfigError(
            f"The SuperLink connection {name!r} {why}.",
            f'{hint}Add [superlink.{name}] with address = "HOST:PORT" and root-certificates = "/path/ca.crt", '
            "or leave --superlink out for a simulation on this machine. A coordinator has its own connection in its "
            "folder: FLWR_HOME=COORDINATOR/flwr lensemble run ...",
        )
    return dict(connections[name])


def _leads_somewhere(connection: Mapping[str, object]) -> bool:
    return bool(connection.get("address")) and connection["address"] not in _MAGIC_ADDRESSES


class _SuperLink:
    """A private SuperLink with the simulation runtime, on a free port of the loopback interface."""

    def __init__(
        self,
        tools: _Tools,
        space: _Workspace,
        environment: dict[str, str],
        signals: _Signals,
        on_line: Callable[[str], None],
    ) -> None:
        self._tools, self._space, self._environment = tools, space, environment
        self._signals, self._on_line = signals, on_line
        self.log = space.path / "superlink.log"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it and wait until it answers. Its end is the workspace's, with the rest of the family.

        Raises:
            LaunchError: it ends at once, or does not answer.
        """
        for _ in range(3):  # the port was free when asked, and may be gone when used
            try:
                port = _free_port()
                self._open(port)
            except OSError as error:
                raise _os_error(error, "Flower's SuperLink cannot be started") from error
            if self._wait(port):
                config = f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
                config += f'address = "127.0.0.1:{port}"\ninsecure = true\n'
                (self._space.path / "flwr" / "config.toml").write_text(config, encoding="utf-8")
                return
            if "address already in use" not in self.tail(50).lower():
                break
        raise LaunchError(f"Flower's SuperLink ended at its start: {self._last_words()}")

    def _open(self, port: int) -> None:
        command = [self._tools.superlink, "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for this command, which then stops the run in order
            )
        self._space.children.append(self.process)

    def _wait(self, port: int) -> bool:
        assert self.process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._signals.count:
                raise _Interrupted
            if self.process.poll() is not None:
                return False
            # The log line tells that it is this SuperLink that has the port, not somebody else who was faster.
            if f"running on http://127.0.0.1:{port}" in self.tail(50) and _healthy(port):
                return True
            time.sleep(0.05)
        raise LaunchError(
            f"Flower's SuperLink did not answer on 127.0.0.1 within {_START_TIMEOUT_S:.0f} s.",
            "Check that the loopback interface is up (ip link set lo up) and that the machine is not overloaded.",
        )

    def tail(self, lines: int) -> str:
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(0, self.log.stat().st_size - 200 * lines))
            return "\n".join(_ANSI.sub("", file.read().decode(errors="replace")).splitlines()[-lines:])
        return ""

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.tail(50).splitlines() if line.strip()]
        for line in lines:  # its log goes with the temporary folder
            self._on_line(f"(superlink) {line}")
        return lines[-1][:300] if lines else "it said nothing."

    def died(self) -> LaunchError | None:
        if self.process is None or self.process.poll() is None:
            return None
        return LaunchError(
            f"Flower's SuperLink died (exit status {self.process.returncode}): {self._last_words()}",
            "If the machine ran out of memory, use a smaller model or fewer cores; continue with --resume.",
        )


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# --------------------------------------------------------------------------------------- following one run


class _Commands:
    """Flower's command line, as far as it is needed here."""

    def __init__(
        self, tools: _Tools, environment: dict[str, str], connection: str, children: list[subprocess.Popen]
    ) -> None:
        self._tools, self._environment = tools, environment
        self._connection, self._children = connection, children

    def stream(self, *arguments: str) -> subprocess.Popen:
        try:
            process = subprocess.Popen(
                [self._tools.flwr, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise _os_error(error, "Flower's command flwr cannot be started") from error
        self._children.append(process)
        return process

    def _ask(self, *arguments: str, timeout: float) -> str:
        process = self.stream(*arguments)
        try:
            return _ANSI.sub("", process.communicate(timeout=timeout)[0].decode(errors="replace"))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return ""

    def state(self, run_id: int) -> tuple[str, str]:
        """(status, details); ("", reason) if it cannot be had."""
        text = ""
        for _ in range(3):
            text = self._ask("list", self._connection, "--run-id", str(run_id), "--format", "json", timeout=60)
            try:
                run = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["runs"][0]
                details = str(run.get("status-details") or "")
                return str(run["status"]), "" if details == "N/A" else details
            except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
                time.sleep(0.5)
        return "", words_of(text)

    def stop(self, run_id: int) -> None:
        self._ask("stop", str(run_id), self._connection, "--format", "json", timeout=30)

    def log(self, run_id: int) -> subprocess.Popen:
        return self.stream("log", str(run_id), self._connection, "--stream")


class _Interrupted(Exception):
    """A signal asked for the end."""


class _Lost(Exception):
    """The simulation's process is gone and Flower does not know yet."""


class _Run:
    """Follows one run from its submission to its end."""

    _LOOK_EVERY_S = 2.0

    def __init__(
        self,
        commands: _Commands,
        signals: _Signals,
        space: _Workspace,
        local: _SuperLink | None,
        stop: Path | None,
        on_line: Callable[[str], None],
        on_tick: Callable[[], None],
        stop_grace_s: float,
    ) -> None:
        self._stop = stop
        self._commands, self._signals, self._space, self._local = commands, signals, space, local
        self._on_line, self._on_tick, self._grace = on_line, on_tick, stop_grace_s
        self._recent: collections.deque[str] = collections.deque(maxlen=500)
        self._run_id: int | None = None
        self._ended = False
        self._log_lines = 0  # lines of the run's own log that were passed on
        self._stop_at: float | None = None
        self._seen_simulation = False
        self._starts: set[int] = set()  # processes that Flower started for this run before one of them spoke
        self._spoke = False
        self._missing_since: float | None = None
        self._looked_at = 0.0

    def follow(self, arguments: list[str]) -> RunResult:
        try:
            if self._local is not None:
                self._local.start()
            submission = self._commands.stream("run", *arguments)
            for line in self._lines(submission):
                self._pass_on(line)
            if self._run_id is None:
                raise self._refused(submission.returncode)
            while True:
                status, details = self._commands.state(self._run_id)
                if status.startswith("finished"):
                    return self._finished(status, details)
                self._check()
                if not status:
                    raise LaunchError(
                        f"The SuperLink no longer answers: {details or 'no answer'}",
                        "The run may go on without this command; look with flwr list, continue later with --superlink "
                        "and --resume.",
                    )
                self._reattach()
        except _Interrupted:
            return self._interrupted()
        except _Lost:
            details = "[LAUNCH] The simulation's process died without a word, most likely for lack of memory. "
            details += "Use a smaller model or fewer cores, then continue with --resume."
            return RunResult("lost", details, EXIT_FAILURE, self._run_id)

    # ---- reading

    def _lines(self, process: subprocess.Popen) -> Iterator[str]:
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=0.25)
            except queue.Empty:
                self._on_tick()
                self._check()
                continue
            if line is None:
                process.wait()
                return
            yield line
            self._check()

    def _pass_on(self, line: str) -> None:
        if self._run_id is None:
            if found := re.search(r"started run (\d+)", line):
                self._run_id = int(found[1])
        elif self._log_lines or "Starting logstream" not in line:
            self._log_lines += 1
        self._recent.append(line)
        event = read_event(line)
        self._spoke |= event is not None
        self._ended |= event is not None and event.get("event") == "end"
        self._on_line(line)

    def _reattach(self) -> None:
        """The stream broke while the run goes on. Flower sends the log again from its start: skip what is known."""
        time.sleep(1.0)
        assert self._run_id is not None
        process = self._commands.log(self._run_id)
        started, skip = False, self._log_lines
        for line in self._lines(process):
            if not started:
                started = "Starting logstream" in line
            elif skip > 0:
                skip -= 1
            else:
                self._pass_on(line)

    # ---- watching

    def _check(self) -> None:
        now = time.monotonic()
        if self._signals.count and self._stop_at is None:
            try:
                if self._run_id is None or self._stop is None:
                    raise _Interrupted
                self._stop.touch()
            except OSError as fault:  # the ServerApp works in no folder of this machine: nobody would see it
                raise _Interrupted from fault
            self._stop_at = now + self._grace
            self._on_line(_event("stopping"))
        if self._stop_at is not None and (self._signals.count > 1 or now > self._stop_at):
            raise _Interrupted
        if self._local is None or now - self._looked_at < self._LOOK_EVERY_S:
            return
        self._looked_at = now
        if error := self._local.died():
            raise error
        self._watch_simulation(now)

    def _watch_simulation(self, now: float) -> None:
        """Flower itself notices a dead simulation process only after its heartbeat ran out (a minute or more)."""
        if not os.path.isdir("/proc/self"):
            return
        named = [p for p in processes.family(self._space.mark) if p.alive and p.command == "flwr-simulation"]
        alive = {p.pid for p in named}
        # A child has its parent's name until it runs its own program: it is no start.
        alive -= {p.pid for p in named if p.parent in alive}
        if alive - self._starts and not self._spoke:
            self._count_starts(alive)
        if alive:
            self._seen_simulation, self._missing_since = True, None
        elif self._seen_simulation:
            self._missing_since = self._missing_since or now
            if now - self._missing_since > _LOST_AFTER_S:
                raise _Lost

    def _count_starts(self, alive: set[int]) -> None:
        self._starts |= alive
        count = len(self._starts)
        if count > _MOST_STARTS:
            raise LaunchError(
                f"This machine is too busy: Flower started its process {count - 1} times, and none of them got to work "
                f"within the {_CLAIM_S} s that Flower gives it.",
                "End other programs or wait until they are done, then start the run again.",
            )
        if count > 1:
            self._on_line(_event("restarted", times=count, seconds=_CLAIM_S))

    # ---- ending

    def _finished(self, status: str, details: str) -> RunResult:
        if self._stop_at is not None and not (status == COMPLETED and self._ended):
            return RunResult("interrupted", "Stopped by a signal.", EXIT_INTERRUPTED, self._run_id)
        if status == COMPLETED:
            if self._ended:
                return RunResult(status, "", EXIT_OK, self._run_id)
            # sys.exit in a simulated ServerApp counts as success for Flower.
            details = "[LAUNCH] The ServerApp left before its federation ended, without an error."
            return RunResult(status, details, EXIT_FAILURE, self._run_id)
        details = re.sub(r"^(Simulation|ServerApp) failed with exception: ", "", details).strip()
        if _NO_HEARTBEAT in details:
            details = (
                "[LAUNCH] The run's process gave Flower no sign of life for a minute: it was killed, or the machine "
            )
            details += "was too busy or asleep. When that is over, continue with --resume."
        if not _CODE.search(details):
            # A failure below the ServerApp hides its reason in the log.
            told = [line for line in self._recent if _CODE.search(line) and not line.startswith("LENSEMBLE|")]
            if told:
                details = told[-1][told[-1].index("[") :]
        return RunResult(status, details or "Flower gives no reason.", exit_status(details), self._run_id)

    def _interrupted(self) -> RunResult:
        if self._local is None and self._run_id is not None:
            self._commands.stop(self._run_id)
        return RunResult("interrupted", "Stopped by a signal.", EXIT_INTERRUPTED, self._run_id)

    def _refused(self, code: int) -> LaunchError:
        text = words_of("\n".join(self._recent))
        if self._local is not None and (error := self._local.died()):
            return error
        remedy = ""
        if "unavailable" in text:
            remedy = "Check that the SuperLink runs and that the connection's address and certificates are right."
        return LaunchError(f"flwr run refused the run (exit status {code}): {text or 'it said nothing.'}", remedy)


def _read(stream: IO[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    try:
        for raw in stream:
            lines.put(_ANSI.sub("", raw.decode(errors="replace")).rstrip("\r\n"))
    except ValueError:  # closed under our feet at the end
        pass
    finally:
        lines.put(None)


def read_event(line: str) -> dict[str, Any] | None:
    """The event that a log line of the ServerApp holds (``LENSEMBLE|{"event": ..., ...}``), or None.

    The mark may follow the logger's level. Lines that ray passes on from a participant's process start otherwise and
    are never taken for events. What follows the JSON (Flower's writer may join lines of two threads) is ignored.
    """
    found = _EVENT.match(line)
    if found is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        event = json.JSONDecoder().raw_decode(line, found.end())[0]
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return event
    return None


def _event(name: str, **fields: object) -> str:
    """A line as :func:`read_event` reads it, from this command itself."""
    return "LENSEMBLE|" + json.dumps({"event": name, **fields})


def words_of(text: str) -> str:
    """The words of one of Flower's commands that failed, on one line: without frames, and the message alone where the
    answer is JSON (``{"success": false, "error-message": ...}``; the exit status is 0 all the same)."""
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
        text = answer.get("error-message", text)
    lines = (_BOX.sub("", line).strip() for line in str(text).splitlines())
    return " ".join(line for line in lines if line and line != "Error")[-600:]
