"""Launching a federation: against stand-ins for Flower's commands (quick), and through Flower itself (runtime)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr import launch, processes
from lensemble_flwr.errors import ConfigError, LaunchError
from lensemble_flwr.launch import RunResult, read_event, run_federation

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "fixtures" / "tinyapp"
END = 'INFO :      LENSEMBLE|{"event": "end"}'

# ------------------------------------------------------------------------------- stand-ins for Flower's commands

FLWR = """
import json, os, sys, time
plan_file = os.environ["STUB_PLAN"]
plan = json.load(open(plan_file))
with open(plan_file + ".calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
command = sys.argv[1]
if command == "run":
    with open(sys.argv[sys.argv.index("--run-config") + 1]) as f, open(plan_file + ".toml", "w") as g:
        g.write(f.read())
if command in ("run", "log"):
    for line in plan.get(command, []):
        if line == "WAIT":
            while not os.path.exists(os.environ.get("LENSEMBLE_STOP_FILE", "/nowhere")):
                time.sleep(0.02)
        elif line == "HANG":
            time.sleep(60)
        else:
            print(line, flush=True)
    sys.exit(plan.get("run_exit", 0))
if command == "list":
    states = plan["list"]
    status, details = states.pop(0) if len(states) > 1 else states[0]
    json.dump(plan, open(plan_file, "w"))
    print("Displaying information ...")
    print(json.dumps({"success": True, "runs": [{"status": status, "status-details": details}]}))
"""

SUPERLINK = """
import http.server, json, os, sys
plan = json.load(open(os.environ["STUB_PLAN"]))
for line in plan.get("superlink", []):
    print(line, flush=True)
if plan.get("superlink_exit") is not None:
    sys.exit(plan["superlink_exit"])
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *unused):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print(f"INFO Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)", flush=True)
server.serve_forever()
"""


class Stub:
    """A folder with stand-ins and the plan that they follow."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan = folder / "plan.json"
        for name, code in (("flwr", FLWR), ("flower-superlink", SUPERLINK)):
            (folder / name).write_text(f"#!{sys.executable}\n{code}")
            (folder / name).chmod(0o755)
        tools = launch._Tools(str(folder), str(folder / "flwr"), str(folder / "flower-superlink"))
        monkeypatch.setattr(launch._Tools, "find", classmethod(lambda cls: tools))
        monkeypatch.setenv("STUB_PLAN", str(self.plan))

    def run(self, plan: dict[str, Any], **options: Any) -> tuple[RunResult, list[str]]:
        lines: list[str] = []
        started = ["Using SuperLink: lensemble", "Successfully started run 77", "INFO : Starting logstream for run"]
        plan = {"list": [["finished:completed", "N/A"]], **plan}
        if "run" in plan and plan.get("run_exit", 0) == 0:
            plan["run"] = [*started, *plan["run"]]
        self.plan.write_text(json.dumps(plan))
        settings: dict[str, Any] = {"num_supernodes": 3, "on_line": lines.append, **options}
        result = run_federation(TINY, settings.pop("overrides", "a=1"), **settings)
        return result, lines

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in Path(f"{self.plan}.calls").read_text().splitlines()]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(tmp_path, monkeypatch)


def no_workspace_left() -> bool:
    """No private folder of this process."""
    for owner in Path("/tmp").glob("lensemble-*/owner.json"):  # noqa: S108
        try:
            if json.loads(owner.read_text())["pid"] == os.getpid():
                return False
        except (OSError, ValueError):
            continue
    return True


def test_completed(stub: Stub) -> None:
    overrides = "a=\"x y\" b=[1,2] c='q\\z' d=ü"
    result, lines = stub.run(
        {"run": ["\x1b[92mINFO \x1b[0m: hello", END]}, overrides=overrides, resume="/r", client_cpus=2
    )
    assert result == RunResult("finished:completed", "", 0, 77)
    assert "INFO : hello" in lines
    assert tomllib.loads(Path(f"{stub.plan}.toml").read_text()) == {"overrides": overrides, "resume": "/r"}
    federation = stub.calls[0][stub.calls[0].index("--federation-config") + 1].split()
    assert federation[:3] == [
        "num-supernodes=3",
        "client-resources-num-cpus=2",
        "client-resources-num-gpus=0.0",
    ]
    assert no_workspace_left()


@pytest.mark.parametrize(
    ("details", "log", "status", "told"),
    [
        ("Simulation failed with exception: [BUDGET] Round 3.", [], 3, "[BUDGET] Round 3."),
        ("ServerApp failed with exception: [CONFIG] Bad.", [], 2, "[CONFIG] Bad."),
        ("Simulation failed with exception: [SECURE_AGGREGATION] x", [], 1, "[SECURE_AGGREGATION] x"),
        ("Simulation failed with exception: boom", [], 1, "boom"),
        ("Simulation failed with exception: An error was encountered.", ["X: [BUDGET] why"], 3, "[BUDGET] why"),
        ("N/A", [], 1, "Flower gives no reason."),
    ],
)
def test_failed(stub: Stub, details: str, log: list[str], status: int, told: str) -> None:
    result, _ = stub.run({"run": log, "list": [["finished:failed", details]]})
    assert result == RunResult("finished:failed", told, status, 77)


def test_completed_without_the_end_is_a_failure(stub: Stub) -> None:
    """sys.exit in a simulated ServerApp counts as completed for Flower."""
    result, _ = stub.run({"run": ["INFO : LENSEMBLE|" + json.dumps({"event": "round"})]})
    assert (result.status, result.exit_status) == ("finished:completed", 1)


def test_stopped_by_somebody_else(stub: Stub) -> None:
    result, _ = stub.run({"run": [], "list": [["finished:stopped", "N/A"]]})
    assert result.exit_status == 1


def test_broken_stream_is_taken_up_again(stub: Stub) -> None:
    plan = {
        "run": ["one", "two"],
        "log": ["Using SuperLink", "INFO : Starting logstream for run", "one", "two", "three", END],
        "list": [["running", "N/A"], ["finished:completed", "N/A"]],
    }
    result, lines = stub.run(plan)
    assert result.exit_status == 0
    assert [line for line in lines if line in ("one", "two", "three")] == ["one", "two", "three"]
    assert [call[0] for call in stub.calls] == ["run", "list", "log", "list"]


def test_refused_submission(stub: Stub) -> None:
    box = ["╭─ Error ─╮", "│ FAB size exceeds maximum allowed size │", "╰─────────╯"]
    with pytest.raises(LaunchError, match="FAB size exceeds maximum allowed size"):
        stub.run({"run": box, "run_exit": 1})
    assert no_workspace_left()


def test_superlink_that_does_not_start(stub: Stub) -> None:
    lines: list[str] = []
    with pytest.raises(LaunchError, match="no such module"):
        stub.run({"superlink": ["ImportError: no such module"], "superlink_exit": 1}, on_line=lines.append)
    assert lines == ["(superlink) ImportError: no such module"]
    assert no_workspace_left()


def test_port_taken_meanwhile(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    free = launch._free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], free(), free()]
        monkeypatch.setattr(launch, "_free_port", lambda: ports.pop(0))
        result, _ = stub.run({"run": [END]})
    assert result.exit_status == 0
    assert len(ports) == 1


def test_signal_stops_in_order_and_a_second_at_once(stub: Stub) -> None:
    def later(*numbers: int) -> None:
        def send() -> None:
            for number in numbers:
                while not Path(f"{stub.plan}.calls").exists():
                    time.sleep(0.02)
                time.sleep(0.5)
                os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()

    before = signal.getsignal(signal.SIGINT)
    later(signal.SIGTERM)
    result, _ = stub.run({"run": ["WAIT", "stopped in order"], "list": [["finished:failed", "N/A"]]})
    assert (result.status, result.exit_status) == ("interrupted", 130)
    later(signal.SIGTERM, signal.SIGTERM)
    began = time.monotonic()
    result, _ = stub.run({"run": ["HANG"]})
    assert result.exit_status == 130
    assert time.monotonic() - began < 55  # a run that hangs, here, hangs for 60
    assert signal.getsignal(signal.SIGINT) == before
    assert no_workspace_left()


@pytest.mark.parametrize("here", [True, False])
def test_a_run_elsewhere_is_stopped_through_its_folder(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """The ServerApp that works in the output folder of this machine ends in order; another one is stopped by Flower."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.lab]\naddress = "10.0.0.1:8000"\n')
    out = tmp_path / "run"
    monkeypatch.setenv("LENSEMBLE_STOP_FILE", str(out / "state" / "stop"))
    if here:
        (out / "state").mkdir(parents=True)

    def send() -> None:
        while not Path(f"{stub.plan}.calls").exists():
            time.sleep(0.02)
        for _ in range(10):  # again, should one be lost while the command starts
            if over.wait(0.5) or (out / "state" / "stop").exists():
                return
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait(4.5)

    over = threading.Event()
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    here_ends, goes_on = [["finished:failed", "[STOPPED] x"]], [["running", ""]]
    plan = {"run": ["WAIT"] if here else ["HANG"], "list": here_ends if here else goes_on}
    try:
        result, _ = stub.run(plan, superlink="lab", output=out)
    finally:
        over.set()
        sender.join()  # no signal may reach the next test
    assert (result.status, result.exit_status) == ("interrupted", 130)
    assert ("stop" in [call[0] for call in stub.calls]) is not here


def test_the_revision_goes_to_apps_that_know_the_key(stub: Stub) -> None:
    stub.run({"run": [END]}, revision="a" * 40)
    assert tomllib.loads(Path(f"{stub.plan}.toml").read_text())["revision"] == "a" * 40


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_dead_simulation_is_noticed(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LOST_AFTER_S", 0.0)
    alive = [[processes.Process(1, 0, 1, "S", "flwr-simulation")], []]
    family = processes.family

    def fake(mark: str, *arguments: Any) -> list[processes.Process]:
        return (alive.pop(0) if alive else []) if not arguments else family(mark, *arguments)

    monkeypatch.setattr(processes, "family", fake)
    monkeypatch.setattr(launch._Run, "_LOOK_EVERY_S", 0.05)
    result, _ = stub.run({"run": ["HANG"]})
    assert (result.status, result.exit_status) == ("lost", 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("spoke", [False, True])
def test_a_process_that_flower_starts_again_and_again_is_told_and_ended(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, spoke: bool
) -> None:
    """Each look finds one process more, as on a machine where none is ready within Flower's 30 s."""
    pids: list[int] = []
    family = processes.family

    def fake(mark: str, *arguments: Any) -> list[processes.Process]:
        if arguments:
            return family(mark, *arguments)
        pids.append(len(pids) + 1)
        return [processes.Process(pid, 0, 1, "S", "flwr-simulation") for pid in pids]

    monkeypatch.setattr(processes, "family", fake)
    monkeypatch.setattr(launch._Run, "_LOOK_EVERY_S", 0.0)
    if spoke:  # then the run is under way, and they are its own
        said = 'INFO :      LENSEMBLE|{"event": "run"}'
        result, _ = stub.run({"run": [said, *["more"] * 30, END]})
        assert result.exit_status == 0
        assert len(pids) > 20
        return
    seen: list[str] = []
    with pytest.raises(LaunchError, match=r"too busy: Flower started its process 6 times"):
        stub.run({"run": ["HANG"]}, on_line=seen.append)
    told = [event for line in seen if (event := read_event(line))]
    assert told == [{"event": "restarted", "times": n, "seconds": 30} for n in range(2, 7)]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_child_that_still_has_its_parents_name_is_no_start(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and exec: each look finds another one below the same process."""
    looks: list[int] = []
    family = processes.family

    def fake(mark: str, *arguments: Any) -> list[processes.Process]:
        if arguments:
            return family(mark, *arguments)
        looks.append(len(looks) + 2)
        pairs = ((1, 0), (looks[-1], 1))
        return [processes.Process(pid, parent, 1, "S", "flwr-simulation") for pid, parent in pairs]

    monkeypatch.setattr(processes, "family", fake)
    monkeypatch.setattr(launch._Run, "_LOOK_EVERY_S", 0.0)
    seen: list[str] = []
    result, _ = stub.run({"run": [*["more"] * 30, END]}, on_line=seen.append)
    assert result.exit_status == 0
    assert len(looks) > 20
    assert not [line for line in seen if (event := read_event(line)) and event["event"] == "restarted"]


def test_a_run_without_a_sign_of_life_is_told_in_plain_words(stub: Stub) -> None:
    result, _ = stub.run({"run": [], "list": [["finished:failed", "No heartbeat received from the task"]]})
    assert result.details.startswith("[LAUNCH] The run's process gave Flower no sign of life")
    assert result.exit_status == 1


# ------------------------------------------------------------------------------------------------ connections


def test_own_connection(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    config = '[superlink.lab]\naddress = "10.0.0.1:8000"\n[superlink.local]\naddress = ":local:"\n'
    (tmp_path / "home" / "config.toml").write_text(config)
    result, _ = stub.run({"run": [END], "superlink_exit": 1}, superlink="lab")
    assert result.exit_status == 0
    assert stub.calls[0][2] == "lab"
    assert "--federation-config" not in stub.calls[0]
    for name, told in (("other", "not in"), ("local", "simulation on this machine")):
        with pytest.raises(ConfigError, match=told) as caught:
            stub.run({"run": [END]}, superlink=name)
        assert "lab" in caught.value.remediation
    (tmp_path / "home" / "config.toml").unlink()
    with pytest.raises(ConfigError, match="not in"):
        stub.run({"run": [END]}, superlink="lab")


# ------------------------------------------------------------------------------------------------- environment


def test_environment_is_private_and_passes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/elsewhere")
    monkeypatch.setenv("FLWR_LOCAL_CONTROL_API_PORT", "39093")
    monkeypatch.setenv("LENSEMBLE_HOME", "/home/of/lensemble")
    monkeypatch.setenv("RAY_enable_metrics_collection", "1")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("FLWR_LOG_LEVEL", "ERROR")
    tools = launch._Tools("/venv/bin:/bin", "", "")
    environment = launch._runtime_environment(tools, tmp_path, "m" * 32)
    assert environment["RAY_ADDRESS"] == "local"
    assert environment["FLWR_HOME"] == str(tmp_path / "flwr")
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["LENSEMBLE_HOME"] == "/home/of/lensemble"
    assert environment["RAY_enable_metrics_collection"] == "1"
    assert environment["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert environment["PATH"] == "/venv/bin:/bin"
    assert environment["FLWR_LOG_LEVEL"] == "INFO"
    assert "RAY_AUTH_TOKEN_PATH" not in environment
    assert "FLWR_LOCAL_CONTROL_API_PORT" not in environment
    other = launch._runtime_environment(tools, tmp_path, "m" * 32)
    assert environment["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


def test_missing_flower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="flwr is not installed"):
        launch._Tools.find()


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LaunchError, match="only 1 MiB are free") as caught:
        launch._Workspace.create()
    assert "Free space" in caught.value.remediation


def test_os_errors_have_a_remedy() -> None:
    assert "ulimit" in launch._os_error(OSError(errno.EAGAIN, "no processes"), "x").remediation
    assert "TMPDIR" in launch._os_error(OSError(errno.EACCES, "denied"), "x").remediation


def test_long_temporary_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unix sockets below it would have too long a path."""
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(tmp_path / ("x" * 60)))
    with launch._Workspace.create() as space:
        assert space.path.parent == Path("/tmp")  # noqa: S108
        assert stat.S_IMODE(space.path.stat().st_mode) == 0o700
    assert not space.path.exists()


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mark = "0123456789abcdef" * 2
    stale, mine, odd = (tmp_path / f"lensemble-{name}" for name in ("stale", "mine", "odd"))
    for folder, pid, started in ((stale, gone.pid, "1"), (mine, os.getpid(), processes.start_time(os.getpid()))):
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps({"pid": pid, "started": started, "mark": mark}))
    odd.mkdir()
    (odd / "owner.json").write_text("not json")
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"],
        env=os.environ | {processes.MARK: mark},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    with orphan:
        assert orphan.stdout is not None
        orphan.stdout.readline()  # its environment can be read only once it runs
        launch._sweep(tmp_path)
        assert orphan.wait(timeout=50) == -signal.SIGKILL
    assert not stale.exists()
    assert mine.exists()
    assert odd.exists()


# ------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('LENSEMBLE|{"event": "round", "round": 1}', "round"),
        ('INFO :      LENSEMBLE|{"event": "end"}', "end"),
        ('WARNING :   LENSEMBLE|{"event": "note"} and more', "note"),
        ('(ClientAppActor pid=7) LENSEMBLE|{"event": "end"}', None),
        ("LENSEMBLE|{broken", None),
        ("LENSEMBLE|" + '{"a":' * 100_000, None),
        ("LENSEMBLE|[1]", None),
        ('LENSEMBLE|{"event": 1}', None),
        ("nothing", None),
    ],
)
def test_read_event(line: str, name: str | None) -> None:
    event = read_event(line)
    assert (event and event["event"]) == name


# ------------------------------------------------------------------------------------------------------ the app


def fab(folder: Path) -> bytes:
    from flwr.cli.build import build_fab_from_files

    files: dict[str, Path] = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("outputs", "__pycache__")]
        files |= {Path(path, n).relative_to(folder).as_posix(): Path(path, n) for n in names}
    return build_fab_from_files(files)[0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('{\n  "success": false,\n  "error-message": "Listing...\\n\\n  It is down. "\n}\n', "Listing... It is down."),
        ('note {"success": false, "error-message": "It is registered\\nalready."}', "It is registered already."),
        ("╭─ Error ──╮\n│ No such  │\n│ command. │\n╰──────────╯\n", "No such command."),
        ('Cannot read {"a": 1}', 'Cannot read {"a": 1}'),
        ("{", "{"),
        ('{"a":' * 1000 + "1", ('{"a":' * 1000 + "1")[-600:]),
        ("", ""),
    ],
)
def test_words_of_a_command_that_failed(said: str, words: str) -> None:
    assert launch.words_of(said) == words


def test_bundle_is_small_and_the_same_from_checkout_copy_and_wheel(tmp_path: Path) -> None:
    """`lensemble run`, plain `flwr run .` and an installed wheel send the same bytes, so sites allow one hash."""
    assert launch.app_dir() == ROOT
    staged = launch.stage_app(ROOT, tmp_path / "staged")
    names = {p.relative_to(staged).as_posix() for p in staged.rglob("*") if p.is_file()}
    assert {"pyproject.toml", "conf/config.yaml", "lensemble_flwr/server_app.py", "strategies/__init__.py"} <= names
    assert not [n for n in names if n.startswith("tests/") or "__pycache__" in n]
    bundle = fab(staged)
    assert len(bundle) < 2 * 2**20
    assert bundle == fab(ROOT)

    site = tmp_path / "site-packages"
    for package in ("lensemble_flwr", "strategies", "clients"):
        shutil.copytree(ROOT / package, site / package)
    shutil.copytree(ROOT / "conf", site / "lensemble_flwr" / "conf")
    shutil.copy(ROOT / "pyproject.toml", site / "lensemble_flwr" / "app.toml")
    shutil.copy(ROOT / "LICENSE", site / "lensemble_flwr" / "LICENSE")
    assert fab(launch.stage_app(site, tmp_path / "from-wheel")) == bundle


def test_wheel_description_names_what_stage_app_needs() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert included["force-include"] == {
        "conf": "lensemble_flwr/conf",
        "pyproject.toml": "lensemble_flwr/app.toml",
        "LICENSE": "lensemble_flwr/LICENSE",
    }
    assert included["packages"] == list(launch._PACKAGES)


def test_no_app(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read as a Flower app"):
        launch.stage_app(tmp_path, tmp_path / "staged")


# ---------------------------------------------------------------------------------------------- Flower's runtime

RUN = """
import sys
from lensemble_flwr.launch import run_federation
result = run_federation(sys.argv[1], sys.argv[2], num_supernodes=3, on_line=lambda line: print(line, flush=True))
print(result, flush=True)
sys.exit(result.exit_status)
"""


def begin(overrides: str, log: Path) -> subprocess.Popen:
    """A run of the small app in a process of its own."""

    def hear_interrupts() -> None:  # a shell's background jobs are started deaf to Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(TINY), overrides],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=hear_interrupts,
        )


def wait_for(text: str, log: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def environment_of(log: Path) -> dict[str, str]:
    events = [event for line in log.read_text().splitlines() if (event := read_event(line))]
    return events[0]["environment"]


def assert_nothing_left(log: Path, within_s: float = 0.0) -> None:
    """No process of the run, none that names its private folder, and the folder is gone."""
    environment = environment_of(log)
    folder = environment["RAY_TMPDIR"]
    deadline = time.monotonic() + within_s
    while True:
        listed = subprocess.run(["ps", "-axwwo", "pid,args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in listed.splitlines() if folder in line]
        left += [f"{p.pid} {p.command}" for p in processes.family(environment["LENSEMBLE_RUN_MARK"]) if p.alive]
        if not left and not Path(folder).exists():
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.runtime
def test_two_at_once_each_with_its_own_end(tmp_path: Path) -> None:
    logs = [tmp_path / "good", tmp_path / "spent"]
    runs = [begin("", logs[0]), begin("fail=budget", logs[1])]
    assert [run.wait(timeout=300) for run in runs] == [0, 3], [log.read_text() for log in logs]
    assert "details='[BUDGET] Round 1 was refused.'" in logs[1].read_text()
    homes = [environment_of(log)["FLWR_HOME"] for log in logs]
    assert homes[0] != homes[1]
    for log in logs:
        rounds = [e for line in log.read_text().splitlines() if (e := read_event(line)) and e["event"] == "round"]
        assert [r["participants"] for r in rounds] == [3]
        assert_nothing_left(log)


@pytest.mark.runtime
def test_bad_input_ends_with_two(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert begin("fail=config", log).wait(timeout=300) == 2
    assert "details='[CONFIG] The value is bad. Change it.'" in log.read_text()
    assert_nothing_left(log)


@pytest.mark.runtime
def test_ctrl_c_stops_in_order_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = begin("wait", log)
    wait_for('"event": "round"', log, run)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) == 130, log.read_text()
    assert "Stopped on request" in log.read_text()
    assert_nothing_left(log)


@pytest.mark.runtime
def test_kill_leaves_nothing_either(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = begin("wait", log)
    wait_for('"event": "round"', log, run)
    run.kill()
    assert run.wait(timeout=60) == -signal.SIGKILL
    assert_nothing_left(log, within_s=30)
