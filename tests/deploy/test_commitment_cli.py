"""What a site's operator can prove of the root that the site joined with, and what a changed recording does to it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lensemble_flwr.cli import main
from lensemble_flwr.config import load_config
from lensemble_flwr.data.formats import RecordingSpec
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_dataset import load_dataset, save_dataset
from lensemble_flwr.federation.world_task import WorldTask
from tests.federation.harness import Federation
from tests.federation.robots import public, record

RUN = "experiment=recordings model=tiny warmstart.steps=4 diloco.rounds=1 diloco.inner_steps=1"


class Joined:
    """Three sites that joined one federation on recordings of their own."""

    def __init__(self, tmp: Path) -> None:
        public(tmp / "public")
        base = f"{RUN} data.public={tmp / 'public' / 'sets.yaml'}"
        pin = WorldTask(load_config(base)).world.pin()  # type: ignore[attr-defined]
        self.overrides, self.tmp = f"{base} data.public_sha256={pin}", tmp
        self.site = tmp / "sites" / "site-0000"
        for number, kind in enumerate(("arm", "dot", "grid")):
            folder = tmp / "sites" / f"site-{number:04d}"
            Site.create(folder, Policy(unlimited=True, allow_non_private=True))
            save_dataset(folder, record(tmp / kind, kind, 4, number), RecordingSpec())
        WorldTask(load_config(self.overrides)).prepare()

    def federate(self, name: str) -> Federation:
        federation = Federation(self.tmp / name, self.overrides, sites=self.tmp / "sites")
        for node in federation.transport.members.values():
            node.task = WorldTask(federation.config, None, load_dataset(node.site.folder))
        federation.start()
        return federation

    def run(self, *argv: object) -> int:
        return main(["data", *map(str, argv), *self.overrides.split()])


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Joined:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    return Joined(tmp_path)


def test_one_episode_is_opened_and_nothing_else(joined: Joined, capsys: pytest.CaptureFixture[str]) -> None:
    federation = joined.federate("one")
    assert federation.folder is not None
    root = Site(joined.site).dataset_root(federation.folder.federation_id)
    assert root is not None
    capsys.readouterr()
    assert joined.run("prove", joined.site, "--episode", 2) == 0
    text = capsys.readouterr().out
    proof = joined.tmp / "proof.json"
    proof.write_text(text)
    tree = json.loads(text)
    hashes = WorldTask(federation.config, None, load_dataset(joined.site)).episode_hashes(0)
    assert tree["episode"] == hashes[2].hex()
    assert tree["root"] == root.hex()
    assert not any(other.hex() in text for i, other in enumerate(hashes) if i != 2)

    check = ["data", "verify", "--proof", str(proof), "--root"]
    assert main([*check, root.hex()]) == 0
    assert main([*check, "00" * 32]) == 1
    assert main([*check, "00"]) == 2
    arm, other = str(joined.tmp / "arm"), str(joined.tmp / "dot")
    assert main([*check, root.hex(), "--data", arm, "--episode", "2"]) == 0
    assert main([*check, root.hex(), "--data", arm, "--episode", "1"]) == 1
    assert main([*check, root.hex(), "--data", other, "--episode", "2"]) == 1
    assert main([*check, root.hex(), "--data", arm, "--episode", "2", "image_size=32"]) == 1
    tree["episode"] = hashes[1].hex()
    proof.write_text(json.dumps(tree))
    assert main([*check, root.hex()]) == 1
    for wrong in ("{}", "[", json.dumps({**tree, "version": 9}), json.dumps({**tree, "proof": {"version": 1}})):
        proof.write_text(wrong)
        assert main([*check, root.hex()]) == 2
    assert joined.run("prove", joined.site, "--episode", 4) == 2
    assert joined.run("prove", joined.tmp / "sites" / "site-0001", "--episode", 0, "--federation", "zz") == 2


def test_a_site_is_verified_from_its_files(joined: Joined, capsys: pytest.CaptureFixture[str]) -> None:
    assert joined.run("verify", joined.site) == 0
    assert "no federation" in capsys.readouterr().out
    assert joined.run("prove", joined.site, "--episode", 0) == 2
    joined.federate("one")
    assert joined.run("verify", joined.site) == 0
    assert "ledger" not in capsys.readouterr().out
    # Another recording under the same stamps: only reading everything anew finds it.
    path = joined.tmp / "arm" / "000.npz"
    before = path.stat()
    with open(path, "r+b") as file:
        file.write((joined.tmp / "arm" / "001.npz").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_ino) == (before.st_size, before.st_ino)
    assert joined.run("prove", joined.site, "--episode", 1) == 0
    shutil.rmtree(joined.site / "cache" / "frames", ignore_errors=True)
    assert joined.run("verify", joined.site) == 1
    assert "OTHER" in capsys.readouterr().out
    assert joined.run("verify", joined.site) == 1
    assert "ledger" not in capsys.readouterr().out  # entered once
    with Site(joined.site).ledger() as ledger:
        joining, changed = (event.data for event in ledger.events("dataset_root"))
    assert changed["recordings"] != joining["recordings"]
    assert (changed["federation"], changed["root"]) == ("", "")
    assert joined.run("prove", joined.site, "--episode", 1) == 1


def test_a_changed_data_set_is_an_event_of_the_one_ledger(joined: Joined) -> None:
    joined.federate("one")
    joined.federate("two")
    shutil.rmtree(joined.tmp / "arm")
    record(joined.tmp / "arm", "arm", 4, 50)
    joined.federate("three")
    with Site(joined.site).ledger() as ledger:
        events = [event.data for event in ledger.events("dataset_root")]
    assert len({event["root"] for event in events}) == 3  # of one data set too, so that nobody can link federations
    assert len({event["federation"] for event in events}) == 3
    assert events[0]["recordings"] == events[1]["recordings"] != events[2]["recordings"]
    for event in events:
        assert event["recordings"] != event["root"]
