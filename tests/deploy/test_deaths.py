"""Whatever dies, no round is half committed, no budget is lost or regained, and the run goes on or can be resumed.

One real deployment for all tests of this file (four sites, three of which are enough); each test is one federation.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.deployment import Federation, kill_node, script, server_apps, staged, supervise, wait

pytestmark = [pytest.mark.runtime, pytest.mark.slow]

OVERRIDES = [*script().run_overrides(4, "linear", 3), "federation.timeout_s=45"]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("deployment")
    app = staged(folder / "app")
    made = script().Deployment(folder / "machines", 4, namespaces=os.geteuid() == 0, app=app)
    try:
        made.set_up(OVERRIDES, budget=1000)
        made.start_superlink()
        made.register()
        for site, stage in zip(made.sites, ("keys@0", "training@1", "unmask@3", ""), strict=True):
            site.extra["HANG_AT"] = stage
            made.start_site(site)
        made.wait_for_sites()
        yield made
    finally:
        made.close()


def assert_consistent(federation: Federation) -> None:
    """Every round is whole: who is in its sum was charged for it; nothing is left open."""
    for record in federation.rounds():
        assert record["outcome"] in ("committed", "burnt")
        charged = [s for s in federation.deployment.sites if record["round"] in federation.states(s)]
        assert len(charged) >= record["participants"]
    for site in federation.deployment.sites:
        assert not set(federation.states(site).values()) & {"reserved", "encoded"}, site.name


def test_supernodes_die_before_keys_in_training_and_before_unmasking(deployment: Any, tmp_path: Path) -> None:
    """Each dies as soon as it is at its stage (of rounds 0, 1 and 3), and its supervisor brings it back."""
    federation = Federation(deployment, [*OVERRIDES[:-2], "diloco.rounds=5", OVERRIDES[-1]], tmp_path / "run")
    federation.start()
    supervisors = []
    for site, stage in zip(deployment.sites, ("keys", "training", "unmask"), strict=False):
        wait((site.folder / f"hangs-{stage}").exists, 300, f"{site.name} at {stage}")
        kill_node(site)
        supervisors.append(threading.Thread(target=supervise, args=(deployment, site)))
        supervisors[-1].start()
        rounds = len(federation.rounds())
        federation.wait_for_rounds(rounds + 1)
    assert federation.end(600) == 0
    for supervisor in supervisors:
        supervisor.join()
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 5
    assert_consistent(federation)
    assert 0 not in federation.states(deployment.sites[0])  # it died before its keys: it sent nothing, it paid nothing
    assert set(federation.states(deployment.sites[3])) == {0, 1, 2, 3, 4}
    for record in records:  # all who were charged are in the sum, all in the sum were charged
        charged = sum(record["round"] in federation.states(site) for site in deployment.sites)
        assert charged == record["participants"], record["round"]


def test_server_app_and_superlink_die_and_the_run_is_resumed(deployment: Any, tmp_path: Path) -> None:
    federation = Federation(deployment, OVERRIDES, tmp_path / "run")
    federation.start()
    federation.wait_for_rounds(1)
    for pid in server_apps(deployment):
        os.kill(pid, signal.SIGKILL)
    assert federation.end(300) == 1
    assert_committed_is_kept(federation, 1)

    federation.start(resume=True)
    federation.wait_for_rounds(2)
    kill_superlink(deployment)
    assert federation.end(300) == 1
    assert_committed_is_kept(federation, 2)

    deployment.start_superlink()
    deployment.wait_for_sites()
    federation.start(resume=True)
    assert federation.end(600) == 0
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3
    assert_consistent(federation)
    for site in deployment.sites:
        assert set(federation.states(site)) <= {0, 1, 2}


def assert_committed_is_kept(federation: Federation, count: int) -> None:
    records = federation.rounds()
    assert [r["outcome"] for r in records][:count] == ["committed"] * count
    for index in range(count):
        assert sum(index in federation.states(s) for s in federation.deployment.sites) == records[index]["participants"]


def kill_superlink(deployment: Any) -> None:
    """kill -9 of the SuperLink's session and of the ServerApps that it leaves."""
    for process in [p for p in deployment.coordinator.processes if "superlink.sh" in str(p.args)]:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deployment.coordinator.processes.remove(process)
    for pid in server_apps(deployment):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_network_of_one_site_is_cut_for_a_round(deployment: Any, tmp_path: Path) -> None:
    federation = Federation(deployment, OVERRIDES, tmp_path / "run")
    federation.start()
    federation.wait_for_rounds(1)
    deployment.network.cable("site3", "down")
    try:
        federation.wait_for_rounds(2)
    finally:
        deployment.network.cable("site3", "up")
    assert federation.end(600) == 0
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 3
    assert records[1]["participants"] == 3
    assert_consistent(federation)
