"""What an operator may do by mistake: wrong user, lost files, odd paths. Nothing is forgotten or fails open."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

from lensemble_flwr.cli import main
from lensemble_flwr.config import load_config
from lensemble_flwr.deploy import site_check, site_cli, site_folder
from lensemble_flwr.deploy.coordinator_folder import admit, create_coordinator
from lensemble_flwr.deploy.keys import check_public_key, read_node_key
from lensemble_flwr.deploy.scripts import TASK_PROGRAMS, systemd_unit
from lensemble_flwr.deploy.site_check import check_site
from lensemble_flwr.deploy.site_folder import connect_site, create_site, write_shim
from lensemble_flwr.errors import ArtifactError, ConfigError
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_dataset import load_dataset
from lensemble_flwr.federation.site_settings import SiteSettings
from lensemble_flwr.owners import check_owner
from lensemble_flwr.privacy.ledger import Charge
from tests.federation.robots import record

APP = "ab" * 32
POLICY = Policy(max_epsilon_central=8.0, allowed_fabs=(APP,))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (site_check, site_cli):
        monkeypatch.setattr(module, "bundle_hash", lambda: APP)
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return create_site(tmp_path / "north", SiteSettings("north"), POLICY)


def text_of(folder: Path, about: str) -> str:
    return "\n".join(f"{lv} {text}" for lv, what, text in check_site(folder, online=False).lines if what == about)


# ------------------------------------------------------------------------------------------- lost files


@pytest.mark.parametrize("left", ["ledger", "head", "latch"])
def test_a_new_site_is_not_made_over_what_one_has_spent(site: Site, left: str) -> None:
    """The key is gone, and a second `site init` is the first thing that comes to mind."""
    with site.ledger() as ledger:
        ledger.reserve(bytes(32), 0, Charge(1.0, 3, 1), ())
    site.answer_once(bytes(32), 0)
    for name in {"ledger": ("ledger.head",), "head": ("ledger.jsonl",), "latch": ("ledger.jsonl", "ledger.head")}[left]:
        (site.folder / name).unlink()
    if left != "latch":
        shutil.rmtree(site.folder / "answered")
    (site.folder / "identity.key").rename(site.folder.parent / "identity.key")
    before = {p: p.read_bytes() for p in site.folder.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="forget what was spent"):
        create_site(site.folder, SiteSettings("north"), POLICY)
    assert {p: p.read_bytes() for p in site.folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("lost", ["identity.key", "identity.key ledger.head", "identity.key ledger.jsonl ledger.head"])
def test_a_site_whose_making_broke_off_is_made_by_another_call(site: Site, lost: str) -> None:
    for name in (*lost.split(), "card.json"):
        (site.folder / name).unlink()
    again = create_site(site.folder, SiteSettings("north"), POLICY)
    assert json.loads((site.folder / "card.json").read_text())["identity"] == again.identity.hex()


def test_everything_else_of_a_site_is_there_before_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-made folder would be no site for `site connect`, a whole one for `site init`, and sound for the check."""

    def full(*unused: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_node_key", "write_shim", "write_scripts"):
        with monkeypatch.context() as patch:
            patch.setattr(site_folder, name, full)
            with pytest.raises(OSError, match="No space"):
                create_site(tmp_path / "north", SiteSettings("north"), POLICY)
        assert not Site.exists(tmp_path / "north")
    site = create_site(tmp_path / "north", SiteSettings("north"), POLICY)
    (site.folder / "card.json").unlink()  # the only file that comes later
    coordinator = create_coordinator(tmp_path / "co", "lab", ["127.0.0.1"], 8000)
    connect_site(site, "127.0.0.1:8000", coordinator.folder / "ca.crt")
    assert admit(coordinator, site.folder / "card.json") == "north"


def test_a_real_site_without_settings_is_no_simulated_one(site: Site) -> None:
    (site.folder / "site.json").unlink()
    with pytest.raises(ConfigError, match=r"site\.json is missing"):
        _ = site.settings
    assert not check_site(site.folder, online=False).sound


def test_a_roster_or_data_set_behind_a_broken_link_is_not_none(site: Site) -> None:
    """On a disk that is not mounted: else the site would sum with whomever the coordinator names."""
    for name in ("roster.json", "dataset.yaml"):
        (site.folder / name).symlink_to(site.folder / "not mounted")
    with pytest.raises(ConfigError, match="cannot be read"):
        _ = site.roster
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dataset(site.folder)


def test_the_ledger_commands_know_where_the_head_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told that it is missing, an operator would repair the ledger beside its real head, and part the two for ever."""
    folder, head = tmp_path / "north", tmp_path / "disk" / "north.head"
    head.parent.mkdir()
    assert main(["site", "init", str(folder), "--ledger-head", str(head)]) == 0
    for words in (["show"], ["verify"]):
        assert main(["ledger", *words, str(folder)]) == 0
        assert main(["ledger", *words, str(folder / "ledger.jsonl")]) == 0
    assert main(["ledger", "repair", str(folder), "--charge-rounds", "2", "--own-noise", "1"]) == 0
    assert not (folder / "ledger.head").exists()
    with Site(folder).ledger() as ledger:
        assert ledger.head.encode() == head.read_bytes()
    head.unlink()
    assert main(["ledger", "verify", str(folder)]) == 1
    assert str(head) in capsys.readouterr().out


def test_two_commands_do_not_make_a_site_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(folder: Path) -> None:
        with pytest.raises(ArtifactError, match="Another process is writing it"):
            create_site(folder, SiteSettings("north"), POLICY)
        write_shim(folder)

    monkeypatch.setattr(site_folder, "write_shim", second)
    made = create_site(tmp_path / "north", SiteSettings("north"), POLICY)
    assert read_node_key(made.folder / "supernode.key") in (made.folder / "card.json").read_text()


# ------------------------------------------------------------------------------------------- what the check says


def test_the_check_names_what_to_do(tmp_path: Path) -> None:
    site = create_site(
        tmp_path / "north",
        SiteSettings("north"),
        dataclasses.replace(POLICY, max_epsilon_central=1e-3, require_roster=True, require_consistency=True),
    )
    found = check_site(site.folder, load_config(["experiment=quickstart"]), online=False)
    said = {what: [text for _, about, text in found.lines if about == what] for what in ("roster", "data", "run")}
    assert said["roster"] == [
        f"the policy requires a roster, and none is pinned: lensemble site roster {site.folder} --add NAME=IDENTITY ..."
    ]
    assert said["data"][-1].endswith(f"lensemble site prepare {site.folder} [--public DIR] KEY=VALUE ...")
    assert any("secagg.pinned=true" in text for text in said["run"])
    assert any("more would pass the rule max_epsilon_central (0.001 at delta 1e-05)" in text for text in said["run"])


def test_another_port_for_flowers_own_use(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "refresh", str(site.folder), "--runtime-port", "9200"]) == 0
    assert "--port 9200 " in (site.folder / "supernode.sh").read_text()
    assert main(["site", "refresh", str(site.folder)]) == 0
    assert site.settings is not None
    assert site.settings.runtime_port == 9200
    for port in ("0", "65536", "-1", "a", "1e3"):
        with pytest.raises(SystemExit):
            main(["site", "refresh", str(site.folder), "--runtime-port", port])
    assert "is no port" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- the wrong user


def test_nobody_writes_into_another_users_folder(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that root writes there can no longer be read by the SuperNode: a mere check would stop the site."""
    coordinator = create_coordinator(tmp_path / "co", "lab", ["127.0.0.1"], 8000)
    head = (site.folder / "ledger.head").read_bytes()
    with site.ledger() as ledger:
        ledger.event("x", {})
    (site.folder / "ledger.head").write_bytes(head)  # as after a crash: who opens the ledger writes its head
    check_owner(site.folder)
    here = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: here + 1)
    folder, other = str(site.folder), str(coordinator.folder)
    for words in (
        ["site", "connect", folder, "127.0.0.1:8000", f"{other}/ca.crt"],
        ["site", "rotate", folder],
        ["site", "refresh", folder],
        ["site", "roster", folder],
        ["site", "init", folder],
        ["ledger", "repair", folder],
        ["ledger", "init", folder, "--identity", "00" * 32],
        ["coordinator", "renew", other],
        ["coordinator", "admit", other, f"{folder}/card.json"],
        ["coordinator", "dismiss", other, "north"],
    ):
        assert main(words) == 2, words
        assert "belongs to the user" in capsys.readouterr().err
    assert "belongs to the user" in text_of(site.folder, "site")
    assert (site.folder / "ledger.head").read_bytes() == head


def test_the_unit_runs_as_whoever_made_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody")  # runuser and the like leave root's
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user without a name: KeyError
    site = create_site(tmp_path / "north", SiteSettings("north"), POLICY)
    assert f"User={os.geteuid()}\n" in (site.folder / "lensemble-site.service").read_text()


# ------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("name", ["a b", "50% off", "$HOME", "ü"])
def test_units_with_odd_paths(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    script = folder / "start.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    (tmp_path / "x.service").write_text(systemd_unit("what 100%", script, "root"))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not there")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "x.service")], capture_output=True, text=True, timeout=60
    )
    assert str(tmp_path) not in done.stderr.replace(str(tmp_path / "x.service") + " ", ""), done.stderr
    assert "x.service" not in done.stderr, done.stderr


def test_a_folder_that_no_unit_can_run(tmp_path: Path) -> None:
    for name in ('a"b', "a\\b", "a'b", "a\nb"):
        with pytest.raises(ConfigError, match="systemd"):
            create_coordinator(tmp_path / name, "lab", ["127.0.0.1"], 8000)


def test_the_judge_is_on_every_path_that_a_site_may_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PATH"):  # two entries, and neither has the judge
        create_site(tmp_path / "a:b", SiteSettings("b"), POLICY)


@pytest.mark.parametrize("folder", ["my env", "e" * 250])
def test_an_environment_that_no_first_line_can_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The system could not start the judge, and would take Flower's own program, which runs anything."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / folder / "bin" / "python"))
    with pytest.raises(ConfigError, match="first line"):
        write_shim(tmp_path)


def started(site: Site, tmp_path: Path) -> dict[str, str]:
    """Which program Flower's SuperExec would start for each kind of app below this site's ``supernode.sh``: what it
    wrote ("nothing": none is found). Other programs of these names lie in the environment and elsewhere on the PATH."""
    environment, elsewhere = tmp_path / "env" / "bin", tmp_path / "elsewhere"
    names = list(TASK_TYPE_TO_COMMAND.values())
    for number, folder in enumerate((environment, elsewhere)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names if number == 0 else names[1:2]:
            (folder / name).write_text("#!/bin/sh\necho flower\n")
    (environment / "python").write_text("#!/bin/sh\n")  # the check of the site
    (environment / "flower-superexec").write_text(
        f"#!{sys.executable} -I\nimport json, subprocess\nfound = {{}}\n"
        f"for name in {names!r}:\n"
        "    try: found[name] = subprocess.run([name, '--judge'], capture_output=True, text=True).stdout.strip()\n"
        "    except OSError: found[name] = 'nothing'\n"
        "print(json.dumps(found))\n"
    )
    (environment / "flower-supernode").write_text(
        f"#!{sys.executable} -I\nimport subprocess\nsubprocess.run(['flower-superexec'], check=True)\n"
    )
    for path in (*environment.iterdir(), *elsewhere.iterdir()):
        path.chmod(0o700)
    script = site.folder / "supernode.sh"
    lines = script.read_text().splitlines()
    script.write_text("\n".join(f"PROGRAMS={environment}" if x.startswith("PROGRAMS=") else x for x in lines) + "\n")
    found_in = f"{elsewhere}::{environment}:{os.environ['PATH']}"
    done = subprocess.run([str(script)], env={**os.environ, "PATH": found_in}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_no_kind_of_app_gets_around_the_judge(site: Site, tmp_path: Path) -> None:
    """Flower hands an app that names an ``agentapp`` to another program than the judge: the submitter chooses it."""
    found = started(site, tmp_path)
    assert found == {**dict.fromkeys(TASK_TYPE_TO_COMMAND.values(), ""), "flwr-clientapp": "judge"}
    assert set(TASK_PROGRAMS) == set(found)


@pytest.mark.parametrize("broken", ["first line", "not executable", "gone"])
def test_no_other_program_is_started_in_place_of_the_judge(site: Site, tmp_path: Path, broken: str) -> None:
    """Flower looks for it by name, and execvp(3) goes on along the PATH where one cannot be started."""
    for name in TASK_PROGRAMS:
        program = site.folder / "bin" / name
        if broken == "first line":
            program.write_text("#!/no/such/python -I\n")
        elif broken == "not executable":
            program.chmod(0o600)
        else:
            program.unlink()
    found = started(site, tmp_path)
    if broken != "not executable" or os.geteuid() != 0:
        assert set(found.values()) == {"nothing"}
    assert "flower" not in found.values()
    assert text_of(site.folder, "app").count("REFUSED") == len(TASK_PROGRAMS)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"#!/no/such/python -I\n"])
def test_a_judge_that_cannot_be_started_is_found(site: Site, monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    judge = site.folder / "bin" / "flwr-clientapp"
    assert "REFUSED" not in text_of(site.folder, "app")
    judge.write_bytes(damage)
    assert "REFUSED" in text_of(site.folder, "app")
    # This release's, as it stands.
    monkeypatch.setattr(site_check, "programs", lambda: {"flwr-clientapp": damage.decode("latin-1")})
    assert "REFUSED" in text_of(site.folder, "app")


def test_an_old_start_script_is_named_and_written_anew(site: Site) -> None:
    script = site.folder / "supernode.sh"
    now = script.read_bytes()
    script.write_bytes(now.replace(b"FOUND", b"FUND"))
    assert "supernode.sh is not what this release writes" in text_of(site.folder, "app")
    assert main(["site", "refresh", str(site.folder)]) == 0
    assert script.read_bytes() == now


# ------------------------------------------------------------------------------------------- data


def test_an_empty_mount_point_holds_no_recordings(tmp_path: Path) -> None:
    """Else a site would pay for rounds and send noise alone: with privacy on nobody may learn that it has no data."""
    data = record(tmp_path / "disk", "dot", 3, 1)
    assert main(["site", "init", str(tmp_path / "north"), "--data", str(data)]) == 0
    assert "ok 3 recordings" in text_of(tmp_path / "north", "data")
    data.rename(tmp_path / "unmounted")
    data.mkdir()
    assert "REFUSED" in text_of(tmp_path / "north", "data")
    data.rmdir()
    assert "REFUSED" in text_of(tmp_path / "north", "data")


def test_a_folder_that_may_not_be_read_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*unused: object) -> None:
        raise PermissionError(13, "Permission denied", "/data")

    monkeypatch.setattr(site_check, "load_dataset", forbidden)
    (site.folder / "sums").mkdir()
    (site.folder / "sums" / "ab.forged").write_bytes(b"\xff")
    assert text_of(site.folder, "data").startswith("REFUSED cannot be read")
    assert text_of(site.folder, "sums").startswith("REFUSED")


def test_a_file_error_that_nobody_expected_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(folder: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(folder / "identity.key"))

    monkeypatch.setattr(Site, "exists", forbidden)
    assert main(["site", "check", "/somewhere"]) == 1
    assert "[ARTIFACT] /somewhere/identity.key: Permission denied." in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- cards


def test_a_hostile_card_is_no_card(site: Site, tmp_path: Path) -> None:
    coordinator = create_coordinator(tmp_path / "co", "lab", ["127.0.0.1"], 8000)
    card, path = json.loads((site.folder / "card.json").read_text()), tmp_path / "card.json"
    for text in ("[" * 200_000, json.dumps({**card, "identity": card["identity"].upper()}), "null"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            admit(coordinator, path)
    for key in ("ssh-foo AAAAB3", "ssh-dss AAAA"):
        with pytest.raises(ConfigError):
            check_public_key(key)
    assert not list((coordinator.folder / "sites").iterdir())
    (site.folder / "supernode.key").write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\nAA\n")
    with pytest.raises(ConfigError):
        read_node_key(site.folder / "supernode.key")
