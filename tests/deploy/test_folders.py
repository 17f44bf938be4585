"""A site's and a coordinator's folder, and what `site check` finds in them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr.cli import main
from lensemble_flwr.config import load_config
from lensemble_flwr.deploy import site_check
from lensemble_flwr.deploy.bundle import bundle_hash
from lensemble_flwr.deploy.coordinator_folder import admit, create_coordinator, dismiss, open_coordinator, read_roster
from lensemble_flwr.deploy.keys import read_node_key
from lensemble_flwr.deploy.site_check import check_site
from lensemble_flwr.deploy.site_folder import connect_site, create_site
from lensemble_flwr.deploy.tls import Server, read_authority
from lensemble_flwr.errors import ConfigError, LensembleError, PolicyViolation
from lensemble_flwr.federation.plan import make_plan, round_open
from lensemble_flwr.federation.policy import Policy, save_policy
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_settings import SiteSettings, load_settings
from lensemble_flwr.federation.tasks import build_task

APP = hashlib.sha256(b"an app").hexdigest()
POLICY = Policy(max_epsilon_central=8.0, allowed_fabs=(APP,))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(site_check, "bundle_hash", lambda: APP)
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return create_site(tmp_path / "north", SiteSettings("north"), POLICY)


@pytest.fixture
def connected(site: Site, tmp_path: Path) -> Site:
    coordinator = create_coordinator(tmp_path / "co", "lab", ["127.0.0.1"], 8000)
    connect_site(site, "127.0.0.1:8000", coordinator.folder / "ca.crt")
    return site


def levels(folder: Path, about: str, **more: Any) -> list[str]:
    return [level for level, what, _ in check_site(folder, online=False, **more).lines if what == about]


def test_secrets_are_for_their_owner_alone_and_in_no_other_file(connected: Site) -> None:
    secrets = {name: (connected.folder / name).read_bytes() for name in ("identity.key", "site.secret")}
    secrets["supernode.key"] = (connected.folder / "supernode.key").read_bytes().split(b"\n")[2]
    for name in (*secrets, ""):
        assert stat.S_IMODE((connected.folder / name).stat().st_mode) & 0o077 == 0
    for path in connected.folder.rglob("*"):
        if path.is_file():
            for name, secret in secrets.items():
                assert path.name == name or (secret not in path.read_bytes() and secret.hex() not in path.name), path
                assert path.name == name or secret.hex().encode() not in path.read_bytes(), path
    words = (connected.folder / "supernode.sh").read_text()
    assert '--auth-supernode-private-key "$SITE/supernode.key"' in words  # a path, never the key
    assert "--insecure" not in words


@pytest.mark.parametrize("name", ["supernode.sh", "superlink.sh"])
def test_scripts_are_shell(connected: Site, tmp_path: Path, name: str) -> None:
    folder = connected.folder if name == "supernode.sh" else tmp_path / "co"
    subprocess.run(["sh", "-n", str(folder / name)], check=True)
    assert os.access(folder / name, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(folder / name)], check=True)


def test_a_site_is_made_once(site: Site) -> None:
    before = site.identity
    with pytest.raises(ConfigError, match="already"):
        create_site(site.folder, SiteSettings("north"), POLICY)
    assert Site(site.folder).identity == before


@pytest.mark.parametrize("name", ["", "a/b", "-x", "ü", "a" * 64, "a b"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        create_site(tmp_path / "s", SiteSettings(name), POLICY)


def test_folders_that_flower_cannot_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="node-config"):
        create_site(tmp_path / 'a"b', SiteSettings("ab"), POLICY)
    with pytest.raises(ConfigError, match="not there"):
        create_site(tmp_path / "s", SiteSettings("s", data=str(tmp_path / "none")), POLICY)


def test_settings_come_back_and_odd_ones_are_refused(site: Site) -> None:
    assert load_settings(site.folder) == SiteSettings("north")
    for odd in ("{", "[]", "{}", '{"name": 1}', '{"name": "a", "participant": true}', '{"name": "a", "x": 1}'):
        (site.folder / "site.json").write_text(odd)
        with pytest.raises(ConfigError):
            load_settings(site.folder)


# ------------------------------------------------------------------------------------------- site check


def test_a_fresh_and_connected_site_is_sound(connected: Site) -> None:
    found = check_site(connected.folder, load_config("experiment=linear"), online=False)
    assert found.sound, found.text()
    assert "REFUSED" not in found.text()


def _loose(site: Site) -> None:
    (site.folder / "identity.key").chmod(0o640)


def _no_shim(site: Site) -> None:
    (site.folder / "bin" / "flwr-clientapp").write_text("#!/bin/sh\n")


def _no_ledger(site: Site) -> None:
    (site.folder / "ledger.jsonl").unlink()


def _no_key(site: Site) -> None:
    (site.folder / "supernode.key").write_text("x")


def _no_ca(site: Site) -> None:
    (site.folder / "ca.crt").unlink()


def _other_ca(site: Site) -> None:
    save_policy(site.folder / "policy.yaml", dataclasses.replace(POLICY, allowed_coordinators=("ab" * 32,)))


def _no_policy(site: Site) -> None:
    (site.folder / "policy.yaml").write_text("max_epsilon_central: eight")


def _no_data(site: Site) -> None:
    (site.folder / "data").rmdir()


@pytest.mark.parametrize(
    ("damage", "about"),
    [
        (_loose, "secrets"),
        (_no_shim, "app"),
        (_no_ledger, "ledger"),
        (_no_key, "node key"),
        (_no_ca, "coordinator"),
        (_other_ca, "coordinator"),
        (_no_policy, "policy"),
        (_no_data, "data"),
    ],
)
def test_damage_is_found_and_named(connected: Site, damage: Callable[[Site], None], about: str) -> None:
    damage(connected)
    assert "REFUSED" in levels(connected.folder, about)
    assert main(["site", "check", "--offline", str(connected.folder)]) == 1


@pytest.mark.parametrize(
    ("ahead", "level"), [(0.0, "ok"), (-5.5, "warning"), (-3600.0, "REFUSED"), (200.0, "warning"), (3600.0, "REFUSED")]
)
def test_the_clock_is_held_against_the_superlinks(
    connected: Site, monkeypatch: pytest.MonkeyPatch, ahead: float, level: str
) -> None:
    server = Server(read_authority(connected.folder / "ca.crt"), ahead)
    monkeypatch.setattr(site_check, "visit", lambda address, authority: server)
    found = check_site(connected.folder)
    assert [lv for lv, what, _ in found.lines if what == "clock"] == [level]


def test_flower_still_has_the_tolerance_that_the_check_names() -> None:
    from flwr.supercore import constant

    assert constant.MAX_TIMESTAMP_DIFF_SECONDS - constant.SYSTEM_TIME_TOLERANCE == site_check.CLOCK_BAD_S
    assert -constant.MIN_TIMESTAMP_DIFF_SECONDS == site_check.CLOCK_WARN_S


def test_what_a_run_would_be_refused_for_is_all_named(connected: Site) -> None:
    policy = dataclasses.replace(POLICY, max_inner_steps=1, max_clip_norm=0.1, max_processes=0, dataset="gripper")
    save_policy(connected.folder / "policy.yaml", policy)
    text = check_site(connected.folder, load_config("experiment=linear"), online=False).text()
    for rule in ("max_inner_steps", "max_clip_norm", "max_processes", "dataset"):
        assert f"rule {rule} forbids" in text


def test_a_spent_budget_is_told_before_anybody_trains(connected: Site) -> None:
    config = load_config("experiment=linear diloco.rounds=2")
    charge = make_plan(config, 4, build_task(config).dimension).charge
    with connected.ledger() as ledger:
        for index in range(2):
            ledger.reserve(bytes(32), index, charge, ())
    found = check_site(connected.folder, config, online=False)
    assert not found.sound
    assert "allow 0 of its 2 rounds" in found.text()
    assert "2 rounds" in next(text for _, what, text in found.lines if what == "ledger")


# ------------------------------------------------------------------------------------------ coordinator


def test_cards_make_the_roster(tmp_path: Path, site: Site) -> None:
    coordinator = create_coordinator(tmp_path / "co", "lab", ["lab.example.org", "10.0.0.1"], 8000)
    assert admit(coordinator, site.folder / "card.json") == "north"
    assert admit(coordinator, site.folder / "card.json") == "north"  # again: nothing changes
    assert read_roster(open_coordinator(tmp_path / "co")) == {"north": site.identity.hex()}
    assert (tmp_path / "co/sites/north.pub").read_text() == (site.folder / "supernode.pub").read_text()

    card = json.loads((site.folder / "card.json").read_text())
    for change in (
        {"identity": "ab" * 32},
        {"name": "south"},
        {"name": "../x", "identity": "cd" * 32},
        {"version": 9},
        {"name": "east", "identity": "ef" * 32, "supernode_key": "ssh-rsa AAAA"},
    ):
        (tmp_path / "card.json").write_text(json.dumps({**card, **change}))
        with pytest.raises(ConfigError):
            admit(coordinator, tmp_path / "card.json")
    assert read_roster(coordinator) == {"north": site.identity.hex()}
    dismiss(coordinator, "north")
    assert read_roster(coordinator) == {}
    assert not list((tmp_path / "co/sites").iterdir())
    with pytest.raises(ConfigError, match="no site"):
        dismiss(coordinator, "north")


def test_an_authority_is_made_once_and_renewal_keeps_it(tmp_path: Path) -> None:
    coordinator = create_coordinator(tmp_path / "co", "lab", ["lab.example.org"], 8000)
    authority, server = ((tmp_path / "co" / name).read_bytes() for name in ("ca.crt", "server.crt"))
    with pytest.raises(ConfigError, match="already"):
        create_coordinator(tmp_path / "co", "lab", ["lab.example.org"], 8000)
    assert main(["coordinator", "renew", str(tmp_path / "co"), "--host", "new.example.org"]) == 0
    assert (tmp_path / "co/ca.crt").read_bytes() == authority
    assert (tmp_path / "co/server.crt").read_bytes() != server
    assert open_coordinator(tmp_path / "co").address == "new.example.org:8000"
    assert coordinator.fingerprint == open_coordinator(tmp_path / "co").fingerprint
    (tmp_path / "co/ca.key").rename(tmp_path / "ca.key")  # kept elsewhere, as the threat model says
    with pytest.raises(ConfigError, match="already"):
        create_coordinator(tmp_path / "co", "lab", ["lab.example.org"], 8000)
    assert main(["coordinator", "renew", str(tmp_path / "co")]) == 2


def test_a_site_takes_only_an_authority_that_its_policy_allows(site: Site, tmp_path: Path) -> None:
    coordinator = create_coordinator(tmp_path / "co", "lab", ["127.0.0.1"], 8000)
    save_policy(site.folder / "policy.yaml", dataclasses.replace(POLICY, allowed_coordinators=("ab" * 32,)))
    with pytest.raises(LensembleError, match="allowed_coordinators"):
        connect_site(site, "127.0.0.1:8000", coordinator.folder / "ca.crt")
    save_policy(
        site.folder / "policy.yaml", dataclasses.replace(POLICY, allowed_coordinators=(coordinator.fingerprint,))
    )
    connect_site(site, "127.0.0.1:8000", coordinator.folder / "ca.crt")
    assert site.coordinators() == (coordinator.fingerprint,)


@pytest.mark.parametrize("words", [["site", "check", "a", "--what"], ["site", "refresh", "a", "x=1"], ["coordinator"]])
def test_bad_arguments_end_with_two(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_overrides_may_stand_anywhere(connected: Site) -> None:
    folder = str(connected.folder)
    assert main(["site", "check", folder, "--offline", "experiment=linear", "diloco.rounds=2"]) == 0
    assert main(["site", "check", "--offline", folder, "experiment=linear"]) == 0


def test_the_hash_of_this_installation_is_that_of_flwr_build() -> None:
    first = bundle_hash()
    assert len(bytes.fromhex(first)) == 32
    assert bundle_hash() == first


def test_the_ledgers_head_on_another_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An old copy of the site's whole disk is then found out: the head is not on it."""
    other, folder = tmp_path / "other disk", tmp_path / "south"
    assert main(["site", "init", str(folder), "--ledger-head", str(other / "south.head")]) == 2
    assert "for the ledger's head" in capsys.readouterr().err
    other.mkdir()
    assert main(["site", "init", str(folder), "--ledger-head", str(other / "south.head")]) == 0
    site = Site(folder)
    assert not (folder / "ledger.head").exists()
    shutil.copy(folder / "ledger.jsonl", tmp_path / "backup")
    with site.ledger() as ledger:
        ledger.event("dataset_root", {"federation": "00" * 32, "root": "11" * 32})
    shutil.copy(tmp_path / "backup", folder / "ledger.jsonl")
    with pytest.raises(LensembleError, match="head"):
        site.ledger()
    assert levels(folder, "ledger") == [site_check.BAD]


def test_rotating_the_supernode_key_changes_nothing_else(site: Site, tmp_path: Path) -> None:
    coordinator = create_coordinator(tmp_path / "co", "lab", ["127.0.0.1"], 8000)
    admit(coordinator, site.folder / "card.json")
    before = {p.name: p.read_bytes() for p in site.folder.iterdir() if p.is_file()}
    roster = read_roster(coordinator)
    assert main(["site", "rotate", str(site.folder)]) == 0
    after = {p.name: p.read_bytes() for p in site.folder.iterdir() if p.is_file()}
    assert set(after) == set(before)
    assert {n for n in after if after[n] != before[n]} == {"supernode.key", "supernode.pub", "card.json"}
    assert stat.S_IMODE((site.folder / "supernode.key").stat().st_mode) == 0o600
    assert read_node_key(site.folder / "supernode.key") == (site.folder / "supernode.pub").read_text().strip()
    assert admit(coordinator, site.folder / "card.json") == "north"  # the same site with another key
    assert read_roster(coordinator) == roster
    assert (coordinator.folder / "sites" / "north.pub").read_bytes() == after["supernode.pub"]
    (site.folder / "supernode.key").unlink()
    assert main(["site", "rotate", str(site.folder)]) == 0
    assert read_node_key(site.folder / "supernode.key") != after["supernode.pub"].decode().strip()


def test_a_central_budget_does_not_count_on_participants_that_nobody_pinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a coordinator could invent 399 participants and get an update with a thirtieth of the noise."""
    for name, more, wary in (
        ("a", [], True),
        ("b", ["--max-epsilon-central", "2"], True),
        ("c", ["--max-epsilon-local", "8"], False),
        ("d", ["--trust-coordinator"], False),
    ):
        assert main(["site", "init", str(tmp_path / name), *more]) == 0
        policy = Site(tmp_path / name).policy
        assert (policy.require_roster, policy.require_consistency) == (wary, wary)
        assert (site_check.WARNING in levels(tmp_path / name, "policy")) == (name == "d")
    config = load_config("experiment=linear")
    opened = round_open(
        config,
        build_task(config),
        make_plan(config, 4, 17),
        bytes(32),
        0,
        bytes(32),
        tuple(bytes([i]) * 32 for i in range(1, 5)),
    )
    with pytest.raises(PolicyViolation, match="require_roster"):
        Site(tmp_path / "a").policy.check(opened, None)


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["site", "check"],
        ["site", "roster"],
        ["ledger", "show"],
        ["ledger", "verify"],
        ["coordinator", "nodes"],
        ["coordinator", "ping"],
        ["report"],
    ],
)
def test_a_folder_that_is_not_there_ends_with_two(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        assert main([*words, str(folder)]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_site_that_lost_its_ledger_is_no_wrong_path(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ledger.jsonl", "ledger.head"):
        (site.folder / name).unlink()
    for words in (["ledger", "show"], ["ledger", "verify"], ["site", "check", "--offline"]):
        assert main([*words, str(site.folder)]) == 1


def test_a_superlink_that_is_down_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "coordinator"
    create_coordinator(folder, "lab", ["127.0.0.1"], 1)
    capsys.readouterr()
    for command in ("nodes", "ping"):
        assert main(["coordinator", command, str(folder)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("[LAUNCH] The SuperLink at 127.0.0.1:1 does not answer: Connection refused.\n")
        assert "superlink.sh" in err
