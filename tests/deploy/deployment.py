"""Real SuperLink, real SuperNodes, real kill -9, for the tests of this folder: over what scripts/two_sites sets up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from scripts.loading import load
from tests.deploy import capture

ROOT = Path(__file__).resolve().parents[2]

HANG = '''
"""A participant hangs at a stage, once, in the first round from the one that the file hang-STAGE in its folder names;
the file is then called hangs-STAGE, and the participant goes on when it is gone."""
import time
from lensemble_flwr.federation.participant import SiteParticipant
from lensemble_flwr.federation.records import RoundOpen
def hang_at(stage, method):
    inner = getattr(SiteParticipant, method)
    def outer(self, *args):
        armed = self.site.folder / ("hang-" + stage)
        opened = RoundOpen.decode(args[0]) if stage == "keys" else self.public_round()
        if armed.exists() and opened.round >= int(armed.read_text()):
            hangs = armed.rename(self.site.folder / ("hangs-" + stage))
            while hangs.exists():
                time.sleep(0.2)
        return inner(self, *args)
    setattr(SiteParticipant, method, outer)
hang_at("keys", "open_round")
hang_at("training", "_delta")
hang_at("unmask", "unmask")
'''


def script() -> Any:
    """scripts/two_sites as a module."""
    return load("two_sites")


def staged(target: Path, code: str = HANG) -> Path:
    """A checkout whose client app also runs ``code``; by default it can be made to hang."""
    for name in ("lensemble_flwr", "strategies", "clients", "conf"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, target / name)
    (target / "lensemble_flwr" / "staged.py").write_text(code)
    with open(target / "lensemble_flwr" / "client_app.py", "a") as file:
        file.write("\n\nimport lensemble_flwr.staged\n")
    return target


def wait(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:.0f} s"
        time.sleep(0.3)


PATIENCE = script().PATIENCE
OVERRIDES = [*script().run_overrides(4, "linear", 3), f"federation.timeout_s={120 * PATIENCE:g}"]


def through_relays(deployment: Any, folder: Path) -> None:
    """Let every site reach the SuperLink through a relay of its own, which keeps each byte in ``folder``/SITE."""
    co = deployment.coordinator
    for number, site in enumerate(deployment.sites):
        (folder / site.name).mkdir(parents=True)
        listen = f"{co.address}:{8100 + number if deployment.network else script().free_port()}"
        relay = Path(capture.__file__).with_name("relay.py")
        words = [sys.executable, relay, listen, deployment.address, co.folder, folder / site.name]
        co.start([str(word) for word in words], "relay.log")
        site.lensemble("site", "connect", site.folder, listen, co.folder / "ca.crt")


class Federation:
    """One run on a deployment: its process on the coordinator's machine, its folder."""

    def __init__(self, deployment: Any, overrides: list[str], out: Path) -> None:
        self.deployment, self.overrides, self.out = deployment, overrides, out
        self.process: subprocess.Popen | None = None

    def start(self, *, resume: bool = False) -> None:
        words = self.deployment.run_arguments(self.overrides, self.out, resume=resume)
        self.process = self.deployment.coordinator.start(words, "run.log")

    def end(self, timeout_s: float) -> int:
        """Exit status of ``lensemble run``."""
        assert self.process is not None
        return self.process.wait(timeout_s * PATIENCE)

    def rounds(self) -> list[dict[str, Any]]:
        path = self.out / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def federation_id(self) -> bytes:
        return bytes.fromhex(json.loads((self.out / "federation.json").read_text())["federation_id"])

    def wait_for_rounds(self, count: int, timeout_s: float = 300) -> None:
        def there() -> bool:
            assert self.process is not None
            assert self.process.poll() is None or len(self.rounds()) >= count, "the run ended before"
            return len(self.rounds()) >= count

        wait(there, timeout_s, f"round {count - 1}")

    def events(self) -> list[dict[str, Any]]:
        """The whole lines of the coordinator's log."""
        path = self.out / "coordinator.log"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_stage(self, stage: str, after: int, timeout_s: float = 200) -> None:
        """Wait until the coordinator has all replies of a stage; the next stage is then under way.

        Args:
            after: how many lines the log had before.
        """

        def there() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, "the run ended before"
            return any(e["event"] == "stage" and e["stage"] == stage for e in self.events()[after:])

        wait(there, timeout_s, stage)

    def sent(self, site: Any) -> set[int]:
        """Rounds of this federation whose update left the site, as its relay saw it."""
        left = capture.updates(capture.sent(self.deployment.captures / site.name))
        return {index for federation, index in left if federation == self.federation_id()}

    def states(self, site: Any) -> dict[int, str]:
        """State of each round of this federation in a site's ledger."""
        ledger_class = script().PrivacyLedger
        with ledger_class.open(site.folder / "ledger.jsonl", read_only=True) as ledger:
            fid = self.federation_id()
            return {index: str(ledger.state(fid, index).state) for index in ledger.rounds(fid)}


def kill_node(site: Any) -> None:
    """kill -9 of a SuperNode and all that it started."""
    for process in site.processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    site.processes.clear()


def supervise(deployment: Any, site: Any, timeout_s: float = 240) -> None:
    """Start a SuperNode again and again, as its systemd unit does, until it stays (Flower refuses it for a minute)."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while time.monotonic() < deadline:
        process = deployment.start_site(site)
        try:
            process.wait(30 * PATIENCE)  # it checks the site, starts and asks to be let in
        except subprocess.TimeoutExpired:
            return
        site.processes.clear()
        time.sleep(5)
    raise AssertionError(f"{site.name} did not come back")


def server_apps(deployment: Any) -> list[int]:
    """Process ids of this deployment's own ServerApp processes."""
    home = f"FLWR_HOME={deployment.coordinator.folder / 'flwr'}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"flwr-serverapp" in (folder / "cmdline").read_bytes() and home in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def assert_consistent(federation: Federation, disturbed: Collection[Any] = ()) -> None:
    """Every round is whole: who is in its sum was charged for it; nothing is left open.

    But for the last round of a site that died in it and was in no later one: only a record of that very round, or a
    later round that it is in, tells a site that nobody will try it again. It is spent all the same.

    What a site was charged for is what left it. One that was ``disturbed`` may have been charged for an update that it
    then could not send: never the other way.
    """
    for record in federation.rounds():
        assert record["outcome"] in ("committed", "burnt")
        charged = [s for s in federation.deployment.sites if record["round"] in federation.states(s)]
        assert len(charged) >= record["participants"]
    for site in federation.deployment.sites:
        states, sent = federation.states(site), federation.sent(site)
        opened = {index for index, state in states.items() if state in ("reserved", "encoded")}
        last = max(states, default=-1)
        assert opened <= ({last} if last < len(federation.rounds()) - 1 else set()), site.name
        assert sent <= set(states), site.name
        assert site in disturbed or sent == set(states), site.name
