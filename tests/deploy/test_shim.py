"""The judge of apps, through Flower's own client app program: a bundle with one changed byte runs no line."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr.deploy.shim import MOST_BYTES, AppRefused, allowed_fabs, content_hash, judge
from lensemble_flwr.deploy.site_folder import shim_text
from lensemble_flwr.federation.policy import Policy, save_policy

DRIVER = """
# Flower's real run_clientapp; only its connection to the SuperNode is replaced.
import importlib, importlib.util, json, os, sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
site, fab, name, version, told_hash = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), *sys.argv[3:6]
from flwr.app import Context, Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
message = Message(RecordDict(), dst_node_id=1, message_type="query")
message.metadata.__dict__["_src_node_id"] = 1
message.metadata.__dict__["_message_id"] = "m"
context = Context(1, 1, {}, RecordDict(), {})
run = Run.create_empty(1)
run.fab_id, run.fab_version, run.fab_hash = name, version, told_hash
class Client:
    @classmethod
    def from_server_address(cls, **unused): return cls()
    def __getattr__(self, name): return lambda *a, **k: None
class Heartbeat:
    def __init__(self, *unused): pass
    is_running = False
    def start(self): pass
def push(client, reply, context):
    print(json.dumps({"error": reply.error.reason if reply.has_error() else None}))
module.RuntimeHttpClient, module.HeartbeatSender, module.push_message = Client, Heartbeat, push
module.pull_task_input = lambda client: (message, context, run, Fab(told_hash, fab, {}))
loader = SourceFileLoader("judge", str(site / "bin" / "flwr-clientapp"))
judge = importlib.util.module_from_spec(importlib.util.spec_from_loader("judge", loader))
loader.exec_module(judge)
sys.argv = ["flwr-clientapp", "--runtime-api-address", "127.0.0.1:1", "--token", "t", "--insecure"]
judge.main()
"""


def bundle(folder: Path, code: str) -> bytes:
    """A bundle of an app whose import and handler leave a trace."""
    app = folder / "app"
    (app / "traceapp").mkdir(parents=True)
    (app / "traceapp" / "__init__.py").write_text("")
    (app / "traceapp" / "app.py").write_text(code)
    (app / "pyproject.toml").write_text(
        textwrap.dedent("""
            [project]
            name = "traceapp"
            version = "1.0.0"
            license = "Apache-2.0"
            dependencies = []
            [tool.flwr.app]
            publisher = "tests"
            [tool.flwr.app.components]
            serverapp = "traceapp.app:server"
            clientapp = "traceapp.app:app"
            [tool.flwr.app.config]
        """)
    )
    return importlib.import_module("flwr.cli.build").build_fab_from_disk(app)


def trace_code(trace: Path) -> str:
    return textwrap.dedent(f"""
        from pathlib import Path
        Path({str(trace)!r}).touch()
        from flwr.app import Message, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        app, server = ClientApp(), ServerApp()
        @app.query()
        def query(message, context):
            return Message(RecordDict(), reply_to=message)
    """)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "flwr-clientapp").write_text(shim_text())
    return folder


def run(site: Path, fab: bytes, told: str | None = None) -> str | None:
    """The error that reaches the coordinator, None when the app answered."""
    (site / "driver.py").write_text(DRIVER)
    (site / "app.fab").write_bytes(fab)
    words = [sys.executable, "-I", "driver.py", str(site), "app.fab", "tests/traceapp", "1.0.0"]
    done = subprocess.run(
        [*words, told or hashlib.sha256(fab).hexdigest()],
        cwd=site,
        env={"FLWR_HOME": str(site / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout + done.stderr
    error: str | None = json.loads(lines[0])["error"]
    return error


def allow(site: Path, *fabs: bytes) -> None:
    save_policy(
        site / "policy.yaml",
        Policy(max_epsilon_local=1.0, allowed_fabs=tuple(hashlib.sha256(fab).hexdigest() for fab in fabs)),
    )


def test_the_content_is_what_is_listed_however_it_was_compressed(site: Path, tmp_path: Path) -> None:
    """The same files from another zlib are the same app; one other byte, one more file, a name twice are another."""
    fab = bundle(tmp_path / "app", "x = 1\n")
    save_policy(site / "policy.yaml", Policy(max_epsilon_local=1.0, allowed_fabs=(content_hash(fab),)))

    def again(method: int, change: Any = lambda items: items) -> bytes:
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            items = [(item.filename, archive.read(item)) for item in archive.infolist()]
        made = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(made, "w", method) as archive:
            warnings.simplefilter("ignore")
            for name, data in change(items):
                archive.writestr(name, data)
        return made.getvalue()

    for same in (fab, again(zipfile.ZIP_STORED), again(zipfile.ZIP_BZIP2), again(0, lambda items: items[::-1])):
        judge(site, same)
    changes = (
        lambda items: [(name, data + b"\n") for name, data in items],
        lambda items: items[1:],
        lambda items: [*items, ("one_more.py", b"")],
        lambda items: [*items, items[0]],
        lambda items: [(items[0][0] + "x", items[0][1]), *items[1:]],
        lambda items: [*items, ("zeros", bytes(MOST_BYTES))],
    )
    for change in changes:
        with pytest.raises(AppRefused, match="does not list"):
            judge(site, again(zipfile.ZIP_DEFLATED, change))


def test_one_changed_byte_runs_no_line(site: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    fab = bundle(tmp_path / "good", trace_code(trace))
    changed = bundle(tmp_path / "bad", trace_code(trace).replace("query(message", "quarry(message"))
    same_length = bytearray(fab)
    same_length[10] ^= 1  # a bit of the first entry's time stamp: every file keeps its content
    with zipfile.ZipFile(io.BytesIO(bytes(same_length))) as archive:
        assert archive.testzip() is None
    allow(site, fab)
    for other in (changed, bytes(same_length), b"", fab + b"\0"):
        error = run(site, other)
        assert error is not None
        assert "allowed_fabs" in error
        assert not trace.exists()
        assert not (site / "flwr" / "apps").exists()  # not even unpacked
    assert content_hash(changed) in (site / "site.log").read_text()
    assert run(site, fab) is None
    assert trace.exists()


def test_the_folder_that_is_loaded_is_the_bundle_that_was_judged(site: Path, tmp_path: Path) -> None:
    """The coordinator tells name and hash of the folder to load apart from the bundle."""
    trace = tmp_path / "trace"
    other, fab = bundle(tmp_path / "other", trace_code(trace)), bundle(tmp_path / "fab", "import flwr\n")
    importlib.import_module("flwr.cli.install").install_from_fab(other, site / "flwr", skip_prompt=True)
    allow(site, fab)
    assert run(site, fab, told=hashlib.sha256(other).hexdigest()) is not None
    assert not trace.exists()


@pytest.mark.parametrize("damage", ["edit", "more", "less", "link"])
def test_a_folder_that_is_there_already_is_not_believed(site: Path, tmp_path: Path, damage: str) -> None:
    """Flower takes a folder of the bundle's short name as it is: half copied by a kill -9, or put there on purpose."""
    trace, evil = tmp_path / "trace", tmp_path / "evil"
    fab = bundle(tmp_path / "fab", trace_code(trace))
    folder = Path(importlib.import_module("flwr.cli.install").install_from_fab(fab, site / "flwr", skip_prompt=True))
    code = folder / "traceapp" / "app.py"
    if damage == "edit":
        code.write_text(f"open({str(evil)!r}, 'w')\n" + code.read_text())
    elif damage == "more":
        (folder / "flwr.py").write_text(f"open({str(evil)!r}, 'w')\n")
    elif damage == "less":
        code.unlink()
    else:
        (tmp_path / "elsewhere.py").write_text(f"open({str(evil)!r}, 'w')\n" + code.read_text())
        code.unlink()
        code.symlink_to(tmp_path / "elsewhere.py")
    allow(site, fab)
    assert run(site, fab) is None
    assert trace.exists()
    assert not evil.exists()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "[",
        "allowed_fabs: 5",
        "allowed_fabs: [1]",
        "- 1",
        "allowed_fabs: null\nallowed_fabs: []",
        "allowed_fabs: []\n'allowed_fabs': null",
        "max_epsilon_local: 1",
        "allowed_fab: [abc]",
        "allowed_fabs:",
        "allowed_fabs: all",
    ],
)
def test_a_policy_that_cannot_be_read_lets_nothing_run(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(AppRefused):
        judge(tmp_path, b"app")


def test_a_log_that_cannot_be_written_tells_the_coordinator_nothing(site: Path) -> None:
    """The text of the error is sent: it must not be an OSError's, which names the site's folder."""
    allow(site)
    (site / "site.log").mkdir()
    with pytest.raises(AppRefused, match="does not list this app"):
        judge(site, b"app")


def test_an_app_that_cannot_be_installed_names_no_folder_of_the_site(site: Path, tmp_path: Path) -> None:
    fab = bundle(tmp_path / "fab", "import flwr\n")
    allow(site, fab)
    (site / "flwr").write_text("a file, or a full disk")
    error = run(site, fab)
    assert error is not None
    assert str(site) not in error
    assert "cannot be installed" in error
    assert str(site) in (site / "site.log").read_text()


def test_any_means_any_app_and_an_empty_list_none(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy.yaml", Policy(max_epsilon_local=1.0, allowed_fabs="any"))
    assert allowed_fabs(tmp_path) is None
    judge(tmp_path, b"app")
    allow(tmp_path)
    with pytest.raises(AppRefused):
        judge(tmp_path, b"app")
    assert "app" in (tmp_path / "site.log").read_text()


def test_flower_still_has_what_the_judge_wraps() -> None:
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    assert callable(module.install_from_fab)
    assert callable(importlib.import_module("flwr.clientapp.utils").get_project_dir)
