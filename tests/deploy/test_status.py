"""`lensemble status` from a run's public files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr.cli import main
from lensemble_flwr.config import config_hash, load_config
from lensemble_flwr.deploy import status as status_module
from lensemble_flwr.deploy.coordinator_folder import create_coordinator, open_coordinator
from lensemble_flwr.deploy.status import _held, read_status
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.claim_inputs import claim_rows
from lensemble_flwr.federation.manifest import new_manifest
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.federation.run_folder import RunFolder
from tests.federation.harness import Federation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished linear run of three rounds."""
    federation = Federation(tmp_path)
    federation.start()
    write_manifest(federation, "completed")
    return tmp_path / "run"


def write_manifest(federation: Federation, status: str) -> None:
    import dataclasses

    config, task = federation.config, federation.task
    plan = make_plan(config, 4, task.dimension)
    rows, grade, why_not = claim_rows(config, plan, False)
    assert federation.folder is not None
    manifest = new_manifest(
        federation_id=federation.folder.federation_id,
        config=config,
        plan=plan,
        claims=rows,
        claim_grade=grade,
        why_not=why_not,
        base_hash=task.base_hash,
        probe_hash=task.probe_hash,
        simulation=False,
        sites_dir="",
    )
    assert manifest.config_hash == config_hash(config).hex()
    dataclasses.replace(manifest, status=status).write(federation.folder.path)


def set_status(run: Path, status: str, **more: str) -> None:
    tree: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**tree, "status": status, **more}))


def test_a_completed_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    text = capsys.readouterr().out
    assert "completed: 3 of 3 rounds" in text
    assert "central 8" in text
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3


def test_running_is_told_from_interrupted_by_the_lock_which_is_not_taken(run: Path) -> None:
    set_status(run, "running")
    assert read_status(run, 0).state == "interrupted"
    assert main(["status", str(run)]) == 1
    with open(run / "state" / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert read_status(run, 0).state == "running"


def test_a_lock_on_another_disks_file_of_that_number_is_not_this_runs(tmp_path: Path) -> None:
    lock, locks = tmp_path / "lock", tmp_path / "locks"
    with lock.open("w"):
        inode = lock.stat().st_ino
        locks.write_text(f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:ff:{inode} 0 EOF\n")
        assert _held(lock, locks)
    assert not _held(lock, locks)  # this process has it open no more: the lock is on another file
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 0 00:ff:{inode} 0 EOF\n")
    assert _held(lock, locks)  # a process that cannot be seen from here


def test_the_expected_end(run: Path) -> None:
    set_status(run, "running")
    lines = (run / "rounds.jsonl").read_text().splitlines()
    record = {**json.loads(lines[0]), "seconds": 60.0}
    (run / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    os.utime(run / "rounds.jsonl", (1000, 1000))
    with open(run / "state" / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert read_status(run, 1010).seconds_left == 110.0


def test_seconds_by_stage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    stages = ["query.open_round", "query.share_keys", "train.masked_update", "query.unmask"]
    for record in records:
        assert list(record["stage_seconds"]) == stages
        assert sum(record["stage_seconds"].values()) <= record["seconds"] + 0.01
    for record, seconds in zip(records, (1.0, 2.0, 6.0), strict=True):
        record |= {"stage_seconds": dict.fromkeys(stages, seconds), "seconds": 4 * seconds + 0.5}
    del records[1]["stage_seconds"]  # of an older release
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["status", str(run)]) == 0
    assert "unmask 3.5, between 0.5" in capsys.readouterr().out
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stage_seconds"] == {**dict.fromkeys(stages, 3.5), "between": 0.5}


def test_a_run_that_ended_with_an_error_says_why_and_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_status(run, "ROUND", detail="[ROUND] 3 participants refused to join (POLICY) and 0 joined. Their logs say why.")
    (run / "rounds.jsonl").unlink()
    (run / "coordinator.log").write_text("")
    assert main(["status", str(run)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"run: {run}\nROUND: 0 of 3 rounds\nwhy: [ROUND] 3 participants refused to join (POLICY)")
    assert f"log: {run / 'coordinator.log'}" in text
    assert "lensemble run --resume" in text
    assert main(["status", str(run), "--json"]) == 1
    assert "refused to join" in json.loads(capsys.readouterr().out)["error"]
    set_status(run, "completed", detail="")
    assert main(["status", str(run)]) == 0
    assert "why:" not in capsys.readouterr().out


def test_a_run_that_failed_before_it_had_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("experiment=linear")
    folder = RunFolder.create(tmp_path / "run", config_hash(config), config.overrides)
    with folder.lock():
        assert read_status(folder.path, 0).state == "running"
    folder.log("run", {})
    assert read_status(folder.path, 0).state == "interrupted"
    folder.log("error", {"code": "DATA", "text": "[DATA] The public probe is missing. Fetch it."})
    assert main(["status", str(folder.path)]) == 1
    assert "DATA: 0 of 3 rounds\nwhy: [DATA] The public probe is missing. Fetch it." in capsys.readouterr().out
    folder.log("run", {})  # taken up again: that error is past
    assert read_status(folder.path, 0).error == ""


def test_the_newest_error_is_the_one_that_is_shown(run: Path) -> None:
    folder = RunFolder(run)
    set_status(run, "FAULT_TOLERANCE", detail="[FAULT_TOLERANCE] Old.")
    found = read_status(run, 0)
    assert (found.state, found.error) == ("FAULT_TOLERANCE", "[FAULT_TOLERANCE] Old.")  # its log is lost
    folder.log("run", {})
    with folder.lock():  # a resumption prepares
        found = read_status(run, 0)
        assert (found.state, found.error) == ("running", "")
    assert read_status(run, 0).state == "interrupted"  # it was killed meanwhile
    folder.log("error", {"code": "DATA", "text": "[DATA] New."})
    for status in ("FAULT_TOLERANCE", "running"):
        set_status(run, status)
        found = read_status(run, 0)
        assert (found.state, found.error) == ("DATA", "[DATA] New.")
    set_status(run, "completed")  # and could not be told again
    assert read_status(run, 0).healthy


def test_nothing_that_is_shown_acts_on_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a\x1b[2Jb", "a\ud800b", "a\u202eb"):
        set_status(run, text, detail=text)
        assert main(["status", str(run)]) == 1
        assert "why: a\N{REPLACEMENT CHARACTER}" in capsys.readouterr().out
        RunFolder(run).log("error", {"code": text, "text": text})
        assert main(["status", str(run)]) == 1
        shown = capsys.readouterr().out
        assert shown.splitlines()[1].startswith("a\N{REPLACEMENT CHARACTER}")
        assert "why: a\N{REPLACEMENT CHARACTER}" in shown
        assert main(["status", str(run), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["error"] == text
        (run / "coordinator.log").unlink()


def test_a_log_of_garbage_is_passed_over(run: Path) -> None:
    set_status(run, "running")
    RunFolder(run).log("error", {"code": "DATA", "text": "[DATA] New."})
    with open(run / "coordinator.log", "a") as file:
        file.write("[" * 200_000 + "\n5\n\0\n" + "9" * 5000 + "\n")
    assert read_status(run, 0).state == "DATA"
    with open(run / "coordinator.log", "a") as file:
        file.write("x" * (1 << 20))
    assert read_status(run, 0).state == "interrupted"  # too far back to look for


DAMAGES: dict[str, tuple[str, Any]] = {
    "no overrides": ("federation.json", lambda tree: tree.pop("overrides")),
    "a number for overrides": ("federation.json", lambda tree: tree.update(overrides=5)),
    "a number for an override": ("federation.json", lambda tree: tree.update(overrides=[5])),
    "no configuration": ("manifest.json", lambda tree: tree.update(config={})),
    "no rounds": ("manifest.json", lambda tree: tree["config"]["diloco"].update(rounds=None)),
    "an epsilon in words": ("manifest.json", lambda tree: tree["config"]["privacy"].update(target_epsilon="much")),
    "an unknown key": ("manifest.json", lambda tree: tree.update({"\x1b[2J": 1})),
    "no outcome": ("rounds.jsonl", lambda tree: tree.pop("outcome")),
    "no roster": ("rounds.jsonl", lambda tree: tree.pop("roster")),
    "a round of words": ("rounds.jsonl", lambda tree: tree.update(seconds="long")),
    "a round for ever": ("rounds.jsonl", lambda tree: tree.update(seconds=1e300)),
    "stages in words": ("rounds.jsonl", lambda tree: tree.update(stage_seconds="long")),
}


@pytest.mark.parametrize("what", [*DAMAGES, "nested too deep"])
def test_a_damaged_file_is_named(run: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, damage = DAMAGES.get(what, ("manifest.json", None))
    if name == "federation.json":
        (run / "manifest.json").unlink()
    if damage is None:
        (run / name).write_text("[" * 200_000)
    else:
        first, *more = (run / name).read_text().splitlines() if name == "rounds.jsonl" else [(run / name).read_text()]
        tree = json.loads(first)
        damage(tree)
        (run / name).write_text("\n".join([json.dumps(tree), *more]) + "\n")
    assert main(["status", str(run)]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"[ARTIFACT] {run / name}")
    assert "\x1b" not in shown.err
    assert shown.out == ""


def test_a_run_whose_server_app_never_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flower.log").write_text("flwr run: no space left\n")
    assert main(["status", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"run: {tmp_path}\nnot started\n")
    assert f"log: {tmp_path / 'flower.log'}" in text
    assert "start it again" in text
    with open(tmp_path / "flower.log") as handle:  # as lensemble run holds it while it is at work
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert read_status(tmp_path, 0).healthy


def test_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert main(["status", str(tmp_path)]) == 2


def test_the_run_is_named_and_a_sweep_is_no_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "newest").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith(f"run: {tmp_path / 'outputs' / 'newest'}\n")
    sweep = tmp_path / "sweep"
    (sweep / "p0123456789ab").mkdir(parents=True)
    (sweep / "sweep.json").touch()
    for words in (["status", str(sweep)], ["run", "--resume", str(sweep)], ["report", str(sweep)]):
        assert main(words) == 2
        assert f"as {sweep}/p0123456789ab." in capsys.readouterr().err


def test_a_superlink_that_is_down_hides_nothing_else(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "coordinator"
    create_coordinator(folder, "lab", ["127.0.0.1"], 1)
    assert main(["status", str(run), "--coordinator", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].startswith("completed: 3 of 3 rounds")
    assert "sites: not known. The SuperLink at 127.0.0.1:1 does not answer: Connection refused." in shown
    assert main(["status", str(run), "--coordinator", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["healthy"], found["sites"]) == (False, None)


def test_the_sites_of_a_coordinator_that_has_no_run_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    create_coordinator(tmp_path / "coordinator", "lab", ["127.0.0.1"], 1)
    words = ["status", "--coordinator", str(tmp_path / "coordinator")]
    found = [("north (node 12)", "online")]
    monkeypatch.setattr(status_module, "nodes", lambda coordinator: found)
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == ["run: no run below outputs/ yet", "site north (node 12): online"]
    found.clear()
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["run"], said["state"], said["healthy"], said["sites"]) == (None, "no run", True, {})
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "sites: none registered"
    assert main(["status"]) == 2
    assert "There is no run below outputs/." in capsys.readouterr().err


def test_a_coordinators_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_coordinator(tmp_path / "coordinator", "lab", ["127.0.0.1"], 1)

    def denied(self: Path, *args: object, **kwargs: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        open_coordinator(tmp_path / "coordinator")
