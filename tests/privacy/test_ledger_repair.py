"""Damage of every kind is refused, found out without a lock, and repaired without forgetting a charge."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble_flwr.errors import ConfigError, LedgerError
from lensemble_flwr.privacy.ledger import Charge, PrivacyLedger
from lensemble_flwr.privacy.ledger_cli import ledger_command
from lensemble_flwr.privacy.ledger_file import NO_HASH, Head, canonical, check_chain, frame, record_hash
from lensemble_flwr.privacy.ledger_repair import repair, verify
from tests.privacy.ledger_helpers import (
    FID,
    IDENTITY,
    SIGMA_1,
    SIGMA_2,
    UNLIMITED,
    checkpoint_every,
    files,
    fill,
    h,
    memory_folder,
    put,
    start,
)

FILLED = 4.25
"""mu^2 of the filled ledger, local view."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(params=[1024, 4], ids=["", "checkpoints"])
def filled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with checkpoint_every(request.param):
        path = start(tmp_path)
        fill(path)
        yield path


def assert_refused(path: Path) -> LedgerError:
    """Both ways of opening and the report refuse, with a remedy, and nothing is written."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(LedgerError) as caught:
        PrivacyLedger.open(path, timeout_s=0)
    assert caught.value.remediation
    with pytest.raises(LedgerError):
        PrivacyLedger.open(path, read_only=True)
    assert not verify(path).ok
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    return caught.value


# ---------------------------------------------------------------------- damage


def test_a_log_cut_anywhere_is_refused(filled: Path) -> None:
    log, head = files(filled)
    for length in range(len(log)):
        with pytest.raises(LedgerError, match=r"records were lost"):
            check_chain(log[:length], Head.decode(head), filled)
    for length in range(0, len(log), 37):
        put(filled, log[:length], head)
        assert_refused(filled)


def test_every_edited_byte_is_refused(filled: Path) -> None:
    log, head = files(filled)
    for place in range(len(log)):
        edited = bytearray(log)
        edited[place] ^= 1 << place % 8
        with pytest.raises(LedgerError):
            check_chain(bytes(edited), Head.decode(head), filled)
    for place in range(0, len(log), 97):  # the other two ways of reading, and bytes that split lines
        for new in b"\n\r\x00\xff":
            edited = bytearray(log)
            if edited[place] != new:
                edited[place] = new
                filled.write_bytes(edited)
                assert_refused(filled)
    filled.write_bytes(log)
    for place in range(len(head)):
        for flip in range(1, 256, 2):
            edited = bytearray(head)
            edited[place] ^= flip
            filled.with_suffix(".head").write_bytes(edited)
            with pytest.raises(LedgerError):
                PrivacyLedger.open(filled)


@pytest.mark.parametrize(
    "head", [b"", b"{}", b"[]", b"null", b"\xff", b'{"hash":"x","seq":-1}\n', b'{"hash":1,"seq":true}\n']
)
def test_a_head_that_is_none_is_refused(filled: Path, head: bytes) -> None:
    filled.with_suffix(".head").write_bytes(head)
    assert "head" in assert_refused(filled).message


def test_lines_that_are_moved_removed_or_doubled_are_refused(filled: Path) -> None:
    log, head = files(filled)
    lines = log.splitlines(keepends=True)
    for one in range(len(lines)):
        changed = [[*lines[:one], *lines[one + 1 :]], [*lines[: one + 1], lines[one], *lines[one + 1 :]]]
        for other in range(one):
            swapped = list(lines)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            changed.append(swapped)
        for new in changed:
            put(filled, b"".join(new), head)
            assert_refused(filled)


def test_an_old_copy_of_one_file_is_refused(filled: Path) -> None:
    log, head = files(filled)
    with PrivacyLedger.open(filled) as ledger:
        ledger.reserve(FID, 50, SIGMA_1, UNLIMITED)
        ledger.forfeit(FID, 50, "x")
    new_log, new_head = files(filled)
    put(filled, log, new_head)
    assert "old copy" in assert_refused(filled).message
    put(filled, new_log, head)
    assert "head is older" in assert_refused(filled).message
    put(filled, b"", new_head)
    assert_refused(filled)


def test_a_record_of_another_history_after_the_head_is_refused(filled: Path) -> None:
    """Right number, whole, but it follows another record than the last one here."""
    log, head = files(filled)
    with PrivacyLedger.open(filled) as ledger:
        ledger.reserve(FID, 50, SIGMA_1, UNLIMITED)
        size = filled.stat().st_size
        ledger.forfeit(FID, 50, "x")
    other = filled.read_bytes()[size:].splitlines(keepends=True)[0]
    put(filled, log, head)
    with PrivacyLedger.open(filled) as ledger:
        ledger.reserve(FID, 50, SIGMA_2, UNLIMITED)
    filled.write_bytes(filled.read_bytes() + other)
    assert "does not belong there" in assert_refused(filled).message


def test_a_missing_file_is_refused(filled: Path) -> None:
    log, head = files(filled)
    put(filled, None, head)
    assert "log" in assert_refused(filled).message
    put(filled, log, None)
    assert "head" in assert_refused(filled).message
    put(filled, None, None)
    assert "lensemble ledger init" in str(assert_refused(filled))
    with pytest.raises(LedgerError):
        PrivacyLedger.open(filled.parent)
    with pytest.raises(LedgerError):
        PrivacyLedger.open(filled.parent / "no" / "ledger.jsonl", read_only=True)


def forge(path: Path, *bodies: dict) -> None:
    """A ledger with a sound chain and head over these records."""
    lines, prev = [], NO_HASH
    for seq, body in enumerate(bodies):
        lines.append(frame(canonical({"seq": seq, **body}), prev))
        prev = record_hash(lines[-1])
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    path.with_suffix(".head").write_bytes(Head(len(lines) - 1, prev).encode())


GENESIS = {"kind": "genesis", "version": 1, "identity": IDENTITY.hex()}
RESERVED = {"kind": "reserved", "fid": FID.hex(), "round": 0, "charge": SIGMA_1.record()}


@pytest.mark.parametrize(
    "bodies",
    [
        [],
        [RESERVED],
        [{**GENESIS, "version": 2}],
        [{**GENESIS, "identity": "00"}],
        [GENESIS, GENESIS],
        [GENESIS, RESERVED, RESERVED],
        [GENESIS, {**RESERVED, "seq": 7}],
        [GENESIS, {**RESERVED, "round": -1}],
        [GENESIS, {**RESERVED, "charge": {"own_multiplier": 1.0}}],
        [GENESIS, {**RESERVED, "charge": {**SIGMA_1.record(), "own_multiplier": [1]}}],
        [GENESIS, {"kind": "encoded", "fid": FID.hex(), "round": 0, "q_hash": NO_HASH, "open_hash": NO_HASH}],
        [GENESIS, {"kind": "closed", "fid": FID.hex(), "round": 0, "outcome": "committed"}],
        [GENESIS, RESERVED, {"kind": "closed", "fid": FID.hex(), "round": 0, "outcome": "won"}],
        [GENESIS, {"kind": "refunded", "fid": FID.hex(), "round": 0}],
        [GENESIS, {"kind": "charged", "rounds": -5, "charge": SIGMA_1.record()}],
        [GENESIS, {"kind": "event", "event": "x", "data": 5}],
        [GENESIS, {"kind": "checkpoint", "book": {}, "prefix_sha256": NO_HASH}],
        [GENESIS, 5],
    ],
)
def test_a_sound_chain_of_records_that_mean_nothing_is_refused(tmp_path: Path, bodies: list) -> None:
    path = tmp_path / "ledger.jsonl"
    if 5 in bodies:
        line = frame(b'{"a"x', NO_HASH)
        path.write_bytes(line + b"\n")
        path.with_suffix(".head").write_bytes(Head(0, record_hash(line)).encode())
    else:
        forge(path, *bodies)
    assert_refused(path)


def test_a_checkpoint_that_forgets_is_found_out(tmp_path: Path) -> None:
    """A checkpoint is believed when the ledger is opened, and checked against all records by verify."""
    path = start(tmp_path)
    with checkpoint_every(4):
        fill(path)
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    bodies = [
        {name: value for name, value in record.items() if name not in ("crc", "len", "prev")} for record in records
    ]
    forged = next(body for body in bodies if body["kind"] == "checkpoint")
    forged["book"]["lifetime"] = forged["book"]["unnamed"]
    forge(path, *bodies)
    report = verify(path)
    assert not report.ok
    assert "checkpoint" in report.problem


# ---------------------------------------------------------------------- verify


def test_verify_reports_and_compares_with_a_noted_head(filled: Path) -> None:
    with PrivacyLedger.open(filled, read_only=True) as ledger:
        head, summary = ledger.head, ledger.summary()
    log, old = files(filled)
    report = verify(filled)
    assert (report.ok, report.records, report.head) == (True, summary["records"], head)
    with PrivacyLedger.open(filled) as ledger:
        for index in (50, 51):
            ledger.reserve(FID, index, SIGMA_1, UNLIMITED)
        new = ledger.head
    assert verify(filled, noted=head).ok
    assert verify(filled, noted=new).ok
    assert not verify(filled, noted=Head(head.seq, new.hash)).ok
    put(filled, log, old)  # both files go back: nothing but the note can tell
    assert verify(filled).ok
    report = verify(filled, noted=new)
    assert not report.ok
    assert "old copy" in report.problem
    assert report.lost == new.seq - head.seq


# ---------------------------------------------------------------------- repair


def test_nothing_is_repaired_without_a_reason_or_a_price(filled: Path) -> None:
    before = files(filled)
    with pytest.raises(ConfigError, match="nothing to repair"):
        repair(filled)
    with pytest.raises(ConfigError, match="price"):
        repair(filled, charge_all=1)
    with pytest.raises(ConfigError, match="charge_all"):
        repair(filled, charge_all=-1)
    with PrivacyLedger.open(filled), pytest.raises(LedgerError, match="in use"):
        repair(filled, charge_all=1, charge=SIGMA_1, timeout_s=0)
    assert files(filled) == before


def test_rounds_can_be_charged_after_a_backup_was_restored(filled: Path) -> None:
    assert repair(filled, charge_all=3, charge=SIGMA_1).ok
    with PrivacyLedger.open(filled, IDENTITY) as ledger:
        assert ledger.mu2("local") == FILLED + 3
        assert ledger.mu2("local", FID) == 4 + 3
        assert ledger.mu2("local", h(99)) == 3, "they count in every federation"
        assert ledger.state(FID, 0).state == "closed"
        assert ledger.state(FID, 2).q_hash == h(2)
        assert ledger.events("repaired")[0].data["log"] == "ledger.damaged-log-0"
        ledger.reserve(FID, 50, SIGMA_1, UNLIMITED)
    assert verify(filled).ok


def test_a_record_edited_in_the_middle(filled: Path) -> None:
    """The record itself is lost; the reservations after it are read and charged again, and closed to use."""
    log, head = files(filled)
    lines = log.splitlines(keepends=True)
    second = next(n for n, line in enumerate(lines) if b'"kind":"reserved","round":1' in line)
    damaged = b"".join(
        [*lines[:second], lines[second].replace(b'"own_multiplier":1.0', b'"own_multiplier":9.0'), *lines[second + 1 :]]
    )
    put(filled, damaged, head)
    report = verify(filled)
    assert (report.records, report.found, report.lost) == (second, 3, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        repair(filled)
    report = repair(filled, charge_all=1, charge=SIGMA_1)
    assert report.ok
    with PrivacyLedger.open(filled, IDENTITY) as ledger:
        assert ledger.mu2("local") == FILLED
        assert ledger.state(FID, 0).state == "closed"
        for index in (2, 3):
            assert ledger.state(FID, index).state == "forfeited"
        assert ledger.state(FID, 1).state is None
    assert (filled.parent / "ledger.damaged-log-0").read_bytes() == damaged
    assert (filled.parent / "ledger.damaged-head-0").read_bytes() == head


def test_repairs_at_every_cut_and_every_edited_line_never_forget(filled: Path) -> None:
    log, head = files(filled)
    lines = log.splitlines(keepends=True)
    damages = [log[:length] for length in range(0, len(log), 61)]
    for number, line in enumerate(lines):
        damages.append(b"".join([*lines[:number], line[:30] + b"#" + line[31:], *lines[number + 1 :]]))
        damages.append(b"".join([*lines[:number], line[:-1], *lines[number + 1 :]]))  # two lines become one
        damages.append(b"".join([*lines[:number], *lines[number + 1 :]]))
        damages.append(b"".join([*lines[:number], line, *lines[number:]]))
    for damage in damages:
        put(filled, damage, head)
        report = verify(filled)
        assert not report.ok
        repaired = repair(filled, charge_all=report.lost, charge=SIGMA_1, identity=IDENTITY)
        assert repaired.ok
        with PrivacyLedger.open(filled, IDENTITY) as ledger:
            assert ledger.mu2("local") >= FILLED
            ledger.reserve(FID, 50, SIGMA_1, UNLIMITED)


def test_a_line_that_stands_twice_does_not_stand_for_a_lost_one(filled: Path) -> None:
    log, head = files(filled)
    lines = log.splitlines(keepends=True)
    put(filled, b"".join([*lines[:3], *lines[4:], lines[1], lines[5]]), head)
    assert verify(filled).lost == 1


def test_a_lost_log_needs_the_identity_and_a_lost_head_does_not(filled: Path) -> None:
    log, head = files(filled)
    put(filled, None, head)
    lost = verify(filled).lost
    assert lost == Head.decode(head).seq + 1
    with pytest.raises(ConfigError, match="identity"):
        repair(filled, charge_all=lost, charge=SIGMA_1)
    assert repair(filled, charge_all=lost, charge=SIGMA_1, identity=IDENTITY).ok
    with PrivacyLedger.open(filled, IDENTITY) as ledger:
        assert ledger.mu2("local") == lost
    put(filled, log, None)
    with pytest.raises(LedgerError, match="belongs to"):
        repair(filled, identity=h(1))
    assert repair(filled).ok
    with PrivacyLedger.open(filled, IDENTITY) as ledger:
        assert ledger.mu2("local") == FILLED


def test_a_crash_in_a_repair_is_repaired(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lensemble_flwr.privacy import ledger_repair

    log, head = files(filled)
    for stop_at in range(1, 5):
        put(filled, log[:-1], head)
        real, calls = ledger_repair.atomic_write, [0]

        def write(path: Path, data: bytes, real=real, calls=calls, stop_at=stop_at) -> None:
            calls[0] += 1
            if calls[0] == stop_at:
                raise KeyboardInterrupt
            real(path, data)

        with monkeypatch.context() as patch:
            patch.setattr(ledger_repair, "atomic_write", write)
            with pytest.raises(KeyboardInterrupt):
                repair(filled, charge_all=1, charge=SIGMA_1)
        assert_refused(filled)
        report = repair(filled, charge_all=max(1, verify(filled).lost), charge=SIGMA_1)
        assert report.ok
        with PrivacyLedger.open(filled) as ledger:
            assert ledger.mu2("local") >= FILLED


def test_two_histories_after_an_old_copy_was_used_are_both_charged(filled: Path) -> None:
    log, head = files(filled)
    with PrivacyLedger.open(filled) as ledger:
        ledger.reserve(FID, 50, SIGMA_1, UNLIMITED)
    other = filled.read_bytes()[len(log) :]
    put(filled, log, head)
    with PrivacyLedger.open(filled) as ledger:
        ledger.reserve(FID, 50, Charge(2.0, 3, 1), UNLIMITED)
    filled.write_bytes(filled.read_bytes() + other)  # the operator puts the lost records behind
    assert verify(filled).found == 1
    assert repair(filled).ok
    with PrivacyLedger.open(filled) as ledger:
        assert ledger.mu2("local") == FILLED + 0.25 + 1


# ---------------------------------------------------------------------- command line


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.jsonl"
    assert ledger_command(["init", str(path), "--identity", IDENTITY.hex()]) == 0
    fill(path)
    capsys.readouterr()
    assert ledger_command(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    with PrivacyLedger.open(path, read_only=True) as ledger:
        head = ledger.head
        local = ledger.spent("local", 1e-5)
    assert f"head       {head}" in shown
    assert f"epsilon {local:.6g} local" in shown
    assert FID.hex() in shown
    assert "1 reserved, 1 encoded, 1 forfeited, 1 closed" in shown
    assert ledger_command(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == head.seq + 1
    assert ledger_command(["verify", str(path), "--noted", str(head)]) == 0
    path.write_bytes(path.read_bytes()[:-200])
    assert ledger_command(["verify", str(path)]) == 1
    assert "must charge at least 1 rounds" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="too few"):
        ledger_command(["repair", str(path)])
    assert ledger_command(["repair", str(path), "--charge-rounds", "2", "--own-noise", "1.0"]) == 0
    assert ledger_command(["verify", str(path), "--noted", str(head)]) == 1
    capsys.readouterr()
    assert ledger_command(["show", str(path), "--delta", "1e-6"]) == 0
    assert "charged by repairs" in capsys.readouterr().out


def test_infinite_spending_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, Charge(0.0, 3, 1), UNLIMITED)
    assert ledger_command(["show", str(path)]) == 0
    assert "epsilon infinite local" in capsys.readouterr().out
    assert ledger_command(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lifetime"]["mu2_local"] == "inf"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["forget", "x"],
        ["show"],
        ["show", "x", "--delta", "0"],
        ["init", "x"],
        ["init", "x", "--identity", "00"],
        ["verify", "x", "--noted", f"one:{NO_HASH}"],
        ["verify", "x", "--noted", "1:zz"],
        ["repair", "x", "--charge-rounds", "-1"],
        ["repair", "x", "--charge-rounds", "1.5"],
    ],
)
def test_bad_arguments_are_typed(args: list[str]) -> None:
    with pytest.raises(ConfigError):
        ledger_command(args)


def test_bad_paths_are_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        ledger_command(["show", str(tmp_path)])
    with pytest.raises(LedgerError):
        ledger_command(["init", str(tmp_path / "no" / "x.jsonl"), "--identity", IDENTITY.hex()])
    with pytest.raises(ConfigError, match="missing"):
        ledger_command(["verify", str(tmp_path / "no")])
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(LedgerError):
        ledger_command(["show", str(tmp_path / "text")])
