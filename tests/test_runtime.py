"""Through Flower's own runtime: simulation SuperLink, ray actors, real messages, real kill -9.

Faults are put in by staging a copy of the app with one more module in it; the code under test is unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.config import config_hash, load_config
from lensemble_flwr.federation.checkpoint import load_checkpoint
from lensemble_flwr.federation.outer import mean_of_sum, outer_step
from lensemble_flwr.federation.policy import simulated_policy
from lensemble_flwr.federation.site import Site
from lensemble_flwr.launch import RunResult, run_federation
from lensemble_flwr.privacy.mechanism import Release
from tests.test_readme import flwr_command

pytestmark = pytest.mark.runtime

ROOT = Path(__file__).resolve().parents[1]

CAPTURE = '''
"""Every reply that reaches the coordinator is also written to a file."""
import os, pickle
from strategies.grid_transport import GridTransport
_exchange = GridTransport.exchange
def exchange(self, stage, requests, timeout, max_bytes=0):
    for node, reply in _exchange(self, stage, requests, timeout, max_bytes):
        size = None if reply.vector is None else (reply.vector.dtype.str, reply.vector.shape)
        with open(os.environ["CAPTURE"], "ab") as file:
            pickle.dump((stage, node, len(reply.body), size, reply.refusal), file)
        yield node, reply
GridTransport.exchange = exchange
'''

KILL_SERVER = '''
"""kill -9 of the server app's own process at one event of one round."""
import os, signal
import lensemble_flwr.server_app as real
_emit = real.emit
def emit(name, fields):
    _emit(name, fields)
    if name == os.environ["KILL_AT"] and fields.get("round") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
real.emit = emit
'''

KILL_CLIENT = '''
"""kill -9 of one participant's process between reserving and encoding in round 0, once."""
import os, signal
from pathlib import Path
from lensemble_flwr.federation import participant
_release = participant.release_update
def release_update(delta, opened, identity, simulation):
    flag = Path(os.environ["CAPTURE"])
    if opened.round == 0 and identity.hex() == os.environ["VICTIM"] and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _release(delta, opened, identity, simulation)
participant.release_update = release_update
'''


def staged(tmp: Path, module: str, component: str) -> Path:
    """A copy of the app whose server or client app also imports ``module``, in whatever process it runs."""
    app = tmp / "app"
    app.mkdir()
    for name in ("lensemble_flwr", "strategies", "clients", "conf"):
        shutil.copytree(ROOT / name, app / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, app / name)
    (app / "lensemble_flwr" / "staged.py").write_text(module)
    with open(app / "lensemble_flwr" / f"{component}.py", "a") as file:
        file.write("\n\nimport lensemble_flwr.staged\n")
    return app


LOSE_CLIENTS = '''
"""One participant is slow with its shares in round 0, another fails at unmasking in round 1, each once."""
import os, time
from pathlib import Path
from lensemble_flwr.federation.participant import SiteParticipant
_share, _unmask = SiteParticipant.share_keys, SiteParticipant.unmask
def once(self, who, index):
    flag = Path(os.environ["CAPTURE"] + who)
    if self.site.identity.hex() == os.environ[who] and self.public_round().round == index and not flag.exists():
        flag.touch()
        return True
def share_keys(self, *args):
    if once(self, "SLOW", 0):
        time.sleep(14)
    return _share(self, *args)
def unmask(self, *args):
    if once(self, "FAILS", 1):
        raise RuntimeError("secret 17")
    return _unmask(self, *args)
SiteParticipant.share_keys, SiteParticipant.unmask = share_keys, unmask
'''


class Run:
    """One output folder and its sites below ``tmp``."""

    def __init__(self, tmp: Path, overrides: str = "") -> None:
        self.tmp, self.out, self.sites = tmp, tmp / "run", tmp / "sites"
        self.overrides = f"experiment=linear {overrides} output_dir={self.out} federation.sites_dir={self.sites}"
        self.config = load_config(self.overrides)
        self.lines: list[str] = []

    def go(self, app: Path = ROOT, resume: bool = False, nodes: int | None = None) -> RunResult:
        return run_federation(
            app,
            self.overrides,
            num_supernodes=nodes or self.config.federation.participants,
            resume=str(self.out) if resume else "",
            on_line=self.lines.append,
        )

    def make_sites(self, **rules: Any) -> list[Site]:
        """The simulated sites before the first run, with a policy of their own."""
        policy = dataclasses.replace(simulated_policy(self.config), **rules)
        count = self.config.federation.participants
        return [Site.create(self.sites / f"site-{i:04d}", policy) for i in range(count)]

    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "rounds.jsonl").read_text().splitlines()]

    def ledgers(self) -> list[int]:
        fid = bytes.fromhex(json.loads((self.out / "federation.json").read_text())["federation_id"])
        counts = []
        for folder in sorted(p for p in self.sites.iterdir() if p.is_dir()):
            with Site(folder).ledger() as ledger:
                counts.append(len(ledger.rounds(fid)))
        return counts


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))


def test_a_whole_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the outer step of what the sites logged; sites end with it; messages hold the list and no more."""
    monkeypatch.setenv("CAPTURE", str(tmp_path / "capture"))
    run = Run(tmp_path, "diloco.outer_momentum=0.5")
    run.make_sites(log_releases=True)
    result = run.go(staged(tmp_path, CAPTURE, "server_app"))
    assert (result.status, result.exit_status) == ("finished:completed", 0), result.details
    assert [r["outcome"] for r in run.rounds()] == ["committed"] * 3

    manifest = json.loads((run.out / "manifest.json").read_text())
    scale = manifest["plan"]["ring"]["scale_log2"]
    assert manifest["status"] == "completed"
    assert manifest["claim_grade"] is True
    assert len(manifest["dataset_roots"]) == 4
    assert manifest["config_hash"] == config_hash(run.config).hex()

    theta, momentum = np.zeros(17, np.float32), np.zeros(17)
    for index in range(3):
        stored = [path.read_bytes() for path in run.sites.glob(f"*/released/*-{index}.q")]
        releases = [Release.from_bytes(s, hashlib.sha256(s).digest()) for s in stored]
        assert len(releases) == 4
        assert all(r.claimable for r in releases)
        theta, momentum = outer_step(
            theta, momentum, mean_of_sum(sum(r.q.astype(np.int64) for r in releases), scale, 4), 1.0, 0.5
        )
    final = load_checkpoint(run.out / "checkpoints/round-00003.safetensors")
    committed = np.concatenate([final.parameters["weight"], final.parameters["bias"]])
    assert committed.tobytes() == theta.tobytes()
    models = [path.read_bytes() for path in run.sites.glob("*/models/*")]
    assert models == [theta.astype("<f4").tobytes()] * 4

    # Nothing that leaves the sites derives their keys, salts or noise.
    public = "\n".join(run.lines).encode() + b"".join(p.read_bytes() for p in run.out.rglob("*") if p.is_file())
    for site in run.sites.glob("site-*/"):
        for name in ("identity.key", "site.secret"):
            secret = (site / name).read_bytes()
            assert secret not in public
            assert secret.hex().encode() not in public

    import pickle

    sizes: dict[str, set[Any]] = {}
    with open(tmp_path / "capture", "rb") as file:
        while True:
            try:
                stage, _, body, vector, refusal = pickle.load(file)  # noqa: S301
            except EOFError:
                break
            assert refusal is None
            sizes.setdefault(stage, set()).add((body, vector))
    assert all(len(kinds) == 1 for kinds in sizes.values())
    assert {stage for stage, kinds in sizes.items() if any(v for _, v in kinds)} == {"train.masked_update"}


def test_a_budget_of_two_rounds_and_a_second_run_over_the_same_sites(tmp_path: Path) -> None:
    run = Run(tmp_path, "privacy=local privacy.noise_multiplier=1 diloco.rounds=4")
    result = run.go()
    assert result.exit_status == 3, result
    assert "Round 2 was refused" in result.details
    assert [r["outcome"] for r in run.rounds()] == ["committed"] * 2
    assert run.ledgers() == [2] * 4
    assert json.loads((run.out / "manifest.json").read_text())["status"] == "BUDGET"
    assert len(list(run.sites.glob("*/models/*"))) == 4

    again = Run(tmp_path, "privacy=local privacy.noise_multiplier=1 diloco.rounds=4")
    again.out = tmp_path / "again"
    again.overrides = again.overrides.replace(str(run.out), str(again.out))
    assert again.go().exit_status == 3
    assert not (again.out / "rounds.jsonl").exists()
    assert again.ledgers() == [0] * 4


@pytest.mark.parametrize(
    ("event", "outcomes"),
    [("sum_stored", ["committed"] * 3), ("asked", ["committed", "burnt", "committed"])],
)
def test_kill_9_of_the_server_app_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, outcomes: list[str]
) -> None:
    monkeypatch.setenv("KILL_AT", event)
    run = Run(tmp_path)
    assert run.go(staged(tmp_path, KILL_SERVER, "server_app")).exit_status == 1
    assert len(run.rounds()) == 1
    assert run.go(resume=True).exit_status == 0
    assert [r["outcome"] for r in run.rounds()] == outcomes
    assert run.ledgers() == [3] * 4


def test_kill_9_of_a_participant_between_reserve_and_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's simulation goes on using the dead process, so the round is lost; resume brings everybody back."""
    run = Run(tmp_path, "diloco.rounds=2")
    sites = run.make_sites()
    monkeypatch.setenv("CAPTURE", str(tmp_path / "flag"))
    monkeypatch.setenv("VICTIM", sites[1].identity.hex())
    app = staged(tmp_path, KILL_CLIENT, "client_app")
    # ray's actors import from the working folder first, then along PYTHONPATH, and only then the installed package.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(app))
    result = run.go(app)
    assert (tmp_path / "flag").exists()
    assert result.exit_status == 1
    assert result.details.startswith("[SECURE_AGGREGATION]")
    assert run.go(app, resume=True).exit_status == 0
    assert [r["outcome"] for r in run.rounds()] == ["burnt", "committed"]
    assert run.rounds()[1]["participants"] == 4
    fid = bytes.fromhex(json.loads((run.out / "federation.json").read_text())["federation_id"])
    with sites[1].ledger() as ledger:
        assert ledger.state(fid, 0).state == "forfeited"  # spent, and never drawn again
        assert ledger.rounds(fid) == (0, 1)


def test_dropouts_after_the_keys_and_at_unmasking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "diloco.rounds=3 federation.timeout_s=10")
    sites = run.make_sites()
    monkeypatch.setenv("CAPTURE", str(tmp_path / "flag-"))
    monkeypatch.setenv("SLOW", sites[1].identity.hex())
    monkeypatch.setenv("FAILS", sites[2].identity.hex())
    app = staged(tmp_path, LOSE_CLIENTS, "client_app")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(app))
    assert run.go(app).exit_status == 0
    rounds = run.rounds()
    assert [r["outcome"] for r in rounds] == ["committed"] * 3
    assert rounds[0]["participants"] == 3  # without its shares it is not in the sum
    assert rounds[2]["participants"] == 4  # and later it is back
    assert (tmp_path / "flag-FAILS").exists()
    assert not any("secret 17" in line for line in run.lines)  # the text of an error stays at its site
    assert "secret 17" in (sites[2].folder / "site.log").read_text()


def test_flower_default_of_two_supernodes_is_told_in_one_line(tmp_path: Path) -> None:
    result = Run(tmp_path).go(nodes=2)
    assert result.exit_status == 1
    assert "cannot hide from each other" in result.details
    assert "num-supernodes=4" in result.details


def test_plain_flwr_run_as_the_readme_says(tmp_path: Path) -> None:
    """`flwr run .` with overrides and a number of SuperNodes, on Flower's own local SuperLink."""
    flwr = Path(sys.executable).parent / "flwr"
    environment = {
        **os.environ,
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "39391",
        "FLWR_LOCAL_CONTROL_API_PORT": "39392",
        "PATH": f"{flwr.parent}:{os.environ['PATH']}",
    }
    words = flwr_command()
    words[0], words[words.index(".")] = str(flwr), str(ROOT)
    try:
        subprocess.run(
            words,
            env=environment,
            cwd=tmp_path,
            timeout=240,
            check=True,
            capture_output=True,
        )
        (out,) = (tmp_path / "home/outputs").iterdir()
        assert len((out / "rounds.jsonl").read_text().splitlines()) == 2
    finally:
        subprocess.run(["pkill", "-f", str(tmp_path)], check=False)
        subprocess.run(["pkill", "-f", "flower-superlink.*39391"], check=False)
