"""Sites that go and come back, too few of them, and orderly stops, in a real deployment."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.deployment import (
    OVERRIDES,
    PATIENCE,
    Federation,
    assert_consistent,
    script,
    supervise,
    wait,
)

pytestmark = [pytest.mark.runtime, pytest.mark.slow]


def test_a_lost_quorum_ends_the_run_and_resume_goes_on(deployment: Any, tmp_path: Path) -> None:
    gone = deployment.sites[2:]
    overrides = [*OVERRIDES, f"federation.join_timeout_s={60 * PATIENCE:g}"]
    federation = Federation(deployment, overrides, tmp_path / "run")
    federation.start()
    federation.wait_for_rounds(1)
    for site in gone:
        site.stop()
    assert federation.end(400) == 1
    assert status(federation) == "FAULT_TOLERANCE"
    before = federation.rounds()
    assert len(before) <= 2
    for site in gone:
        supervise(deployment, site)
    deployment.wait_for_sites()
    federation.start(resume=True)
    assert federation.end(600) == 0
    records = federation.rounds()
    assert records[: len(before)] == before
    # If the two left between the question and their answers, that round is burnt; no other can be.
    assert [r["outcome"] for r in records[2:]] == ["committed"]
    assert records[2]["participants"] == 4
    assert_consistent(federation, disturbed=gone)


def test_orderly_stops_of_the_command_and_of_the_superlink(deployment: Any, tmp_path: Path) -> None:
    federation = Federation(deployment, OVERRIDES, tmp_path / "run")
    federation.start()
    federation.wait_for_rounds(1)
    assert federation.process is not None
    federation.process.send_signal(signal.SIGTERM)
    assert federation.end(200) == 130
    log = (deployment.coordinator.folder / "run.log").read_text()
    assert f"To continue: lensemble run --superlink {script().NAME} --resume {federation.out}" in log
    assert status(federation) == "STOPPED"
    done = len(federation.rounds())

    federation.start(resume=True)
    federation.wait_for_rounds(done + 1)
    superlink = next(p for p in deployment.coordinator.processes if "superlink.sh" in str(p.args))
    superlink.send_signal(signal.SIGTERM)
    assert superlink.wait(60 * PATIENCE) in (0, -signal.SIGTERM)  # by Flower's handler, or by its web server's
    deployment.coordinator.processes.remove(superlink)
    ended = federation.end(300)
    assert ended == (0 if len(federation.rounds()) == 3 else 1)
    text = deployment.coordinator.lensemble(
        "status", federation.out, "--coordinator", deployment.coordinator.folder, check=False
    )
    assert text.returncode == 1
    assert "sites: not known. The SuperLink at" in text.stdout

    deployment.start_superlink()
    deployment.wait_for_sites(180)
    if ended:
        federation.start(resume=True)
        assert federation.end(600) == 0
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3
    assert_consistent(federation, disturbed=deployment.sites)


def test_a_supernode_that_is_away_for_three_rounds_comes_back(deployment: Any, tmp_path: Path) -> None:
    site = deployment.sites[3]
    federation = Federation(deployment, [*OVERRIDES[:-2], "diloco.rounds=8", OVERRIDES[-1]], tmp_path / "run")
    federation.start()
    federation.wait_for_rounds(1)
    (node,) = site.processes
    site.stop()
    assert node.returncode == 0  # an orderly stop; it is taken again at once
    federation.wait_for_rounds(5)
    supervise(deployment, site)
    assert federation.end(900) == 0
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 8
    assert [r["roster"] for r in records[2:5]] == [3] * 3  # nobody waited for it
    assert records[7]["participants"] == records[7]["roster"] == 4
    mine = federation.states(site)
    assert 7 in mine
    assert not {2, 3, 4} & set(mine)
    assert_consistent(federation, disturbed=[site])


def status(federation: Federation) -> str:
    """The run's status as its manifest gives it, once its process has ended."""

    def read() -> str:
        return str(json.loads((federation.out / "manifest.json").read_text())["status"])

    wait(lambda: read() != "running", 60, "the end of the ServerApp")
    return read()
