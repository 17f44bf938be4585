"""Whatever dies, no round is half committed, no budget is lost or regained, and the run goes on or can be resumed.

One real deployment for all tests of this file (four sites, three of which are enough); each test is one federation.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr.federation.wire import Stage
from tests.deploy.deployment import (
    OVERRIDES,
    Federation,
    assert_consistent,
    kill_node,
    script,
    server_apps,
    supervise,
    wait,
)

pytestmark = [pytest.mark.runtime, pytest.mark.slow]


def test_supernodes_die_before_keys_in_training_and_before_unmasking(deployment: Any, tmp_path: Path) -> None:
    """One after the other; each dies as soon as it is at its stage, and its supervisor brings it back."""
    federation = Federation(deployment, [*OVERRIDES[:-2], "diloco.rounds=6", OVERRIDES[-1]], tmp_path / "run")
    stages = ("keys", "training", "unmask")
    for number, (site, stage) in enumerate(zip(deployment.sites, stages, strict=False)):
        # From the next round on: in the one under way, whoever died last may be missing, and two are too many.
        (site.folder / f"hang-{stage}").write_text(str(len(federation.rounds()) + 1 if number else 0))
        if number == 0:
            federation.start()
        wait((site.folder / f"hangs-{stage}").exists, 400, f"{site.name} at {stage}")
        kill_node(site)
        supervise(deployment, site)
        deployment.wait_for_sites(120)
    assert federation.end(900) == 0
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 6
    assert_consistent(federation, disturbed=deployment.sites[:3])
    assert 0 not in federation.states(deployment.sites[0])  # it died before its keys: it sent nothing, it paid nothing
    assert set(federation.states(deployment.sites[3])) == set(range(6))
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
    assert_consistent(federation, disturbed=deployment.sites)
    for site in deployment.sites:
        assert set(federation.states(site)) <= {0, 1, 2}


def test_the_server_app_dies_in_each_stage(deployment: Any, tmp_path: Path) -> None:
    """In the exchange after the named one. Before anybody is asked to reveal the round is taken up again, with the
    updates that were paid for; after that it is burnt."""
    overrides = [*OVERRIDES[:-2], "diloco.rounds=2", OVERRIDES[-1]]
    federation = Federation(deployment, overrides, tmp_path / "run")
    paid: list[dict[int, str]] = []
    stages = (Stage.JOIN, Stage.OPEN, Stage.SHARE, Stage.TRAIN)
    for number, stage in enumerate(stages):
        seen = len(federation.events())
        federation.start(resume=number > 0)
        federation.wait_for_stage(stage, seen)
        if stage == Stage.SHARE:  # let the sites train and pay: their updates are on the way
            wait(lambda: all(federation.states(s) for s in deployment.sites), 60, "every site's charge")
        for pid in server_apps(deployment):
            os.kill(pid, signal.SIGKILL)
        assert federation.end(300) == 1, stage
        assert federation.rounds() == [], stage
        states = [federation.states(site) for site in deployment.sites]
        if stage in (Stage.JOIN, Stage.OPEN):
            assert states == [{}] * 4, stage
        else:
            assert [set(s) for s in states] == [{0}] * 4, stage
            paid.append({number: q_hash(federation, site) for number, site in enumerate(deployment.sites)})
    assert paid[0] == paid[1]  # the same update, never a second draw
    federation.start(resume=True)
    assert federation.end(600) == 0
    assert [r["outcome"] for r in federation.rounds()] == ["burnt", "committed"]
    assert_consistent(federation)
    for site in deployment.sites:
        assert set(federation.states(site)) == {0, 1}


def q_hash(federation: Federation, site: Any) -> str:
    """Name of the update that a site holds for round 0."""
    with script().PrivacyLedger.open(site.folder / "ledger.jsonl", read_only=True) as ledger:
        return str(ledger.state(federation.federation_id(), 0).q_hash.hex())


def test_a_supernode_dies_after_its_upload_and_is_in_the_sum(deployment: Any, tmp_path: Path) -> None:
    """Another site still trains, so the survivors are not yet named: the dead one's mask is removed by the others."""
    dead, late = deployment.sites[:2]
    federation = Federation(deployment, [*OVERRIDES[:-2], "diloco.rounds=2", OVERRIDES[-1]], tmp_path / "run")
    (late.folder / "hang-training").write_text("0")
    log = dead.folder / "supernode.log"
    before = log.read_text().count("Sending: train.masked_update")
    federation.start()
    try:
        wait((late.folder / "hangs-training").exists, 200, "training")
        wait(lambda: log.read_text().count("Sending: train.masked_update") > before, 40, "the upload")
        wait(lambda: list(federation.states(dead).values()) == ["encoded"], 10, "the record of the upload")
        time.sleep(2)  # until what is being sent has arrived
        assert federation.rounds() == []
        assert not [e for e in federation.events() if e["event"] == "asked"]
        kill_node(dead)
    finally:
        (late.folder / "hangs-training").unlink(missing_ok=True)
    supervise(deployment, dead)
    assert federation.end(600) == 0
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 2
    assert records[0]["participants"] == 4
    # Paid once and for ever. It was not told how the round ended: the next round that it takes part in closes it.
    assert federation.states(dead)[0] in ("encoded", "closed")
    assert federation.sent(dead) == set(federation.states(dead))
    for site in deployment.sites[1:]:
        assert set(federation.states(site).items()) == {(0, "closed"), (1, "closed")}


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
    assert_consistent(federation, disturbed=deployment.sites[3:])


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk of its own needs root")
def test_the_disk_of_one_site_is_full_for_a_while(deployment: Any, tmp_path: Path) -> None:
    site = deployment.sites[3]
    federation = Federation(deployment, OVERRIDES, tmp_path / "run")
    filler = site.folder / "filler"
    fill(filler)
    federation.start()
    try:
        federation.wait_for_rounds(1)
        assert federation.states(site) == {}  # what could not be written was neither released nor charged
    finally:
        filler.unlink()
    assert federation.end(600) == 0
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 3
    assert records[0]["participants"] == 3
    assert 0 not in federation.states(site)
    assert_consistent(federation)
    assert site.lensemble("ledger", "verify", site.folder, check=False).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk of its own needs root")
def test_the_disk_of_a_site_that_takes_part_is_full_for_a_round(deployment: Any, tmp_path: Path) -> None:
    site = deployment.sites[3]
    federation = Federation(deployment, [*OVERRIDES[:-2], "diloco.rounds=5", OVERRIDES[-1]], tmp_path / "run")
    filler = site.folder / "filler"
    federation.start()
    try:
        federation.wait_for_rounds(1)
        fill(filler)
        federation.wait_for_rounds(3)  # round 1 may have been paid already; round 2 falls wholly into it
    finally:
        filler.unlink(missing_ok=True)
    assert federation.end(600) == 0
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 5
    assert (records[0]["participants"], records[2]["participants"]) == (4, 3)
    assert 2 not in federation.states(site)
    assert records[4]["participants"] == 4  # with space again it takes part again
    assert_consistent(federation, disturbed=[site])
    assert site.lensemble("ledger", "verify", site.folder, check=False).returncode == 0


def fill(path: Path) -> None:
    """Use up every byte of a disk."""
    block = bytes(1 << 20)
    with open(path, "wb", buffering=0) as file:
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]


SHIFTED = """
import datetime as _d, time as _t
_ahead = 3600
class datetime(_d.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + _d.timedelta(seconds=_ahead)
_d.datetime = datetime
_time = _t.time
_t.time = lambda: _time() + _ahead
"""


def test_a_site_whose_clock_is_an_hour_ahead_is_told_and_kept_out(deployment: Any, tmp_path: Path) -> None:
    site = deployment.sites[3]
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)
    site.stop()
    site.extra["PYTHONPATH"] = f"{tmp_path}:{site.app}"
    try:
        checked = site.lensemble("site", "check", site.folder, check=False)
        assert checked.returncode == 1
        assert "REFUSED  clock" in checked.stdout
        process = deployment.start_site(site)
        with pytest.raises(script().LaunchError):
            deployment.wait_for_sites(30)
        assert process.poll() is not None or online(deployment) == 3
    finally:
        site.stop()
        del site.extra["PYTHONPATH"]
    supervise(deployment, site)
    deployment.wait_for_sites()


def online(deployment: Any) -> int:
    listed = deployment.coordinator.lensemble("coordinator", "nodes", deployment.coordinator.folder)
    return int(listed.stdout.count("online"))
