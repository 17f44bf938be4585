"""The ledger as its callers see it: states, budgets, identity, the lock, and a model it must agree with."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lensemble_flwr.errors import ContractViolation, LedgerError, PrivacyBudgetExceeded
from lensemble_flwr.privacy import concentrated
from lensemble_flwr.privacy import ledger as ledger_module
from lensemble_flwr.privacy.ledger import MOST_ROUNDS, Budget, Charge, EntryState, PrivacyLedger, replay, snapshot
from lensemble_flwr.privacy.ledger_file import Head, bodies, check_chain, record_hash
from lensemble_flwr.privacy.ledger_repair import verify
from tests.effort import calls
from tests.privacy.ledger_helpers import (
    FID,
    FID2,
    IDENTITY,
    MEMORY,
    SIGMA_1,
    SIGMA_2,
    UNLIMITED,
    checkpoint_every,
    fill,
    h,
    memory_folder,
    start,
)

EPS_8 = (Budget("local", 8.0, 1e-5),)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


# ---------------------------------------------------------------------- life of a round


def test_the_states_of_a_round_and_what_stays(tmp_path: Path) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path, IDENTITY) as ledger:
        assert ledger.state(FID, 0) == EntryState()
        assert ledger.state(FID, 0).state is None
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        assert ledger.state(FID, 0) == EntryState("reserved", SIGMA_1)
        ledger.encoded(FID, 0, h(1), h(2))
        assert ledger.state(FID, 0) == EntryState("encoded", SIGMA_1, h(1), h(2))
        ledger.reserve(FID, 7, SIGMA_2, UNLIMITED)
        ledger.forfeit(FID, 7, "no file")
        assert ledger.open_rounds(FID) == (0,)
        ledger.close(FID, 0, "burnt")
        ledger.reserve(FID2, 0, SIGMA_1, UNLIMITED)
    for read_only in (False, True):
        with PrivacyLedger.open(path, IDENTITY, read_only=read_only) as ledger:
            assert ledger.state(FID, 0) == EntryState("closed", note="burnt")
            assert ledger.state(FID, 7) == EntryState("forfeited", note="no file")
            assert ledger.state(FID2, 0) == EntryState("reserved", SIGMA_1)
            assert (ledger.rounds(FID), ledger.rounds(FID2), ledger.rounds(h(9))) == ((0, 7), (0,), ())
            assert (ledger.open_rounds(FID), ledger.open_rounds(FID2)) == ((), (0,))
            assert ledger.mu2("local") == 2.25
            assert ledger.mu2("local", FID) == 1.25
            assert ledger.mu2("local", FID2) == 1.0
            assert ledger.mu2("central", FID) == 0.5 + 0.25 / 4
            assert ledger.spent("local", 1e-5, FID2) == pytest.approx(4.37718, abs=1e-4)
            assert ledger.identity == IDENTITY
            assert ledger.recovered == []


MOVES = {
    "reserve": lambda ledger: ledger.reserve(FID, 0, SIGMA_1, UNLIMITED),
    "encoded": lambda ledger: ledger.encoded(FID, 0, h(1), h(2)),
    "forfeit": lambda ledger: ledger.forfeit(FID, 0, "why"),
    "close": lambda ledger: ledger.close(FID, 0, "void"),
}
PATHS = {
    "nothing": (),
    "reserved": ("reserve",),
    "encoded": ("reserve", "encoded"),
    "forfeited": ("reserve", "forfeit"),
    "closed": ("reserve", "encoded", "close"),
}
ALLOWED = {"nothing": {"reserve"}, "reserved": {"encoded", "forfeit", "close"}, "encoded": {"forfeit", "close"}}


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("state", PATHS)
def test_every_move_from_every_state(tmp_path: Path, state: str, reopened: bool) -> None:
    for move, act in MOVES.items():
        path = start(Path(tempfile.mkdtemp(dir=tmp_path)))
        ledger = PrivacyLedger.open(path)
        for step in PATHS[state]:
            MOVES[step](ledger)
        if reopened:
            ledger.unlock()
            ledger = PrivacyLedger.open(path)
        before = ledger.state(FID, 0), ledger.mu2("local"), path.read_bytes()
        # A reservation of an earlier opening may have been drawn: it can never be encoded.
        if move in ALLOWED.get(state, ()) and not (reopened and state == "reserved" and move == "encoded"):
            act(ledger)
            assert ledger.mu2("local") == 1.0
        else:
            with pytest.raises(LedgerError) as caught:
                act(ledger)
            assert caught.value.remediation
            assert (ledger.state(FID, 0), ledger.mu2("local"), path.read_bytes()) == before
        ledger.reserve(FID, 1, SIGMA_1, UNLIMITED)  # a refusal does not spoil the ledger
        ledger.unlock()


def test_events_and_rotation_of_the_identity(tmp_path: Path) -> None:
    path, new = start(tmp_path), h(77)
    with PrivacyLedger.open(path, IDENTITY) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        ledger.event("dataset_root", {"root": "ab", "text": 'a "quoted"\nline é'})
        ledger.event("identity_rotated", {"identity": new.hex().upper(), "why": "lost card"})
        assert ledger.identity == new
    with pytest.raises(LedgerError, match="belongs to identity"):
        PrivacyLedger.open(path, IDENTITY)
    with PrivacyLedger.open(path, new) as ledger:
        assert ledger.mu2("local") == 1.0
        assert [event.kind for event in ledger.events()] == ["dataset_root", "identity_rotated"]
        assert ledger.events("dataset_root")[0].data == {"root": "ab", "text": 'a "quoted"\nline é'}
        assert ledger.events("dataset_root")[0].seq == 2
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == 4


def test_a_wrong_identity_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = start(tmp_path)
    for read_only in (False, True):
        with pytest.raises(LedgerError, match="belongs to identity"):
            PrivacyLedger.open(path, h(1), read_only=read_only)
    PrivacyLedger.open(path, IDENTITY).unlock()


def test_there_is_one_ledger_for_ever(tmp_path: Path) -> None:
    path = start(tmp_path)
    with pytest.raises(LedgerError, match="exists already"):
        PrivacyLedger.init(path, IDENTITY)
    path.unlink()
    with pytest.raises(LedgerError, match=r"ledger\.head exists already"):
        PrivacyLedger.init(path, IDENTITY)
    with pytest.raises(LedgerError, match="Create its folder"):
        PrivacyLedger.init(tmp_path / "no" / "ledger.jsonl", IDENTITY)


def test_the_head_may_lie_elsewhere(tmp_path: Path) -> None:
    path, head = tmp_path / "ledger.jsonl", tmp_path / "disk2" / "head"
    head.parent.mkdir()
    PrivacyLedger.init(path, IDENTITY, head)
    with PrivacyLedger.open(path, head_path=head) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
    assert not path.with_suffix(".head").exists()
    moved = tmp_path / "disk3"
    head.rename(moved)
    with PrivacyLedger.open(path, head_path=moved) as ledger:
        assert ledger.rounds(FID) == (0,)
    with pytest.raises(LedgerError, match=r"head .* is missing"):
        PrivacyLedger.open(path)


def test_files_may_be_links_to_other_disks(tmp_path: Path) -> None:
    path, disk = start(tmp_path), tmp_path / "disk2"
    disk.mkdir()
    for name in ("ledger.jsonl", "ledger.head"):
        (tmp_path / name).rename(disk / name)
        (tmp_path / name).symlink_to(disk / name)
    fill(path)
    assert path.is_symlink()
    assert path.with_suffix(".head").is_symlink()
    assert verify(path).ok
    disk.rename(tmp_path / "gone")
    with pytest.raises(LedgerError, match="missing"):
        PrivacyLedger.open(path)
    with pytest.raises(LedgerError, match="exists already"):
        PrivacyLedger.init(path, IDENTITY)


def test_files_are_the_owners_alone_and_records_are_canonical(tmp_path: Path) -> None:
    path = start(tmp_path)
    fill(path)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    for number, line in enumerate(path.read_bytes().splitlines()):
        record = json.loads(line)
        assert record["seq"] == number
        assert int(record["len"]) == len(line)
        assert b" " not in line.replace(b"a test", b"")
    reserved = json.loads(path.read_bytes().splitlines()[2])
    assert reserved["charge"] == SIGMA_1.record()
    assert reserved["fid"] == FID.hex()


@pytest.mark.parametrize("value", [math.pi, 1 / 3, 1e-300, 5e-324, 1.7976931348623157e308, 0.1 + 0.2])
def test_floats_read_back_exactly(tmp_path: Path, value: float) -> None:
    path = start(tmp_path)
    charge = Charge(value, 3, 1, delta_extra=min(value, 0.3))
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, charge, UNLIMITED)
        sums = ledger.summary()["lifetime"]
    with PrivacyLedger.open(path) as ledger:
        assert ledger.state(FID, 0).charge == charge
        assert ledger.summary()["lifetime"] == sums


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.reserve(FID[:31], 0, SIGMA_1, UNLIMITED),
        lambda ledger: ledger.reserve(FID.hex(), 0, SIGMA_1, UNLIMITED),
        lambda ledger: ledger.reserve(FID, -1, SIGMA_1, UNLIMITED),
        lambda ledger: ledger.reserve(FID, True, SIGMA_1, UNLIMITED),
        lambda ledger: ledger.reserve(FID, 0.0, SIGMA_1, UNLIMITED),
        lambda ledger: ledger.encoded(FID, 0, b"", h(1)),
        lambda ledger: ledger.close(FID, 0, "lost"),
        lambda ledger: ledger.event("x", {"a": 1}),
        lambda ledger: ledger.event("", {}),
        lambda ledger: ledger.event("identity_rotated", {"identity": "zz"}),
        lambda ledger: ledger.event("identity_rotated", {}),
        lambda ledger: ledger.would_exceed(SIGMA_1, EPS_8, FID, count=0),
        lambda ledger: ledger.would_exceed(SIGMA_1, EPS_8, b""),
        lambda ledger: ledger.rounds(b""),
    ],
)
def test_broken_contracts_are_named_and_change_nothing(tmp_path: Path, call) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        with pytest.raises(ContractViolation):
            call(ledger)
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)


def test_a_record_that_is_too_long_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        with pytest.raises(LedgerError, match="too long"):
            ledger.event("novel", {"text": "x" * 10**6})
        ledger.event("novel", {"text": "x" * 500_000})


# ---------------------------------------------------------------------- budgets


def test_sigma_one_epsilon_eight_delta_1e_5_is_two_rounds(tmp_path: Path) -> None:
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        assert ledger.remaining(SIGMA_1, EPS_8, FID) == 2
        ledger.reserve(FID, 0, SIGMA_1, EPS_8)
        assert ledger.remaining(SIGMA_1, EPS_8, FID) == 1
        ledger.reserve(FID, 1, SIGMA_1, EPS_8)
        assert ledger.would_exceed(SIGMA_1, EPS_8, FID) == EPS_8[0]
        before = ledger.path.read_bytes()
        with pytest.raises(PrivacyBudgetExceeded) as caught:
            ledger.reserve(FID2, 0, SIGMA_1, EPS_8)
        error = caught.value
        assert error.fields.pop("epsilon_spent") == pytest.approx(6.5730, abs=1e-3)
        public = {"round": 0, "view": "local", "scope": "lifetime", "epsilon_budget": 8.0, "delta": 1e-5}
        assert error.fields == public
        assert error.remediation
        assert ledger.path.read_bytes() == before
        assert ledger.state(FID2, 0).state is None
        assert ledger.remaining(SIGMA_1, EPS_8, FID) == 0
        assert ledger.remaining(Charge(1000.0, 3, 1), EPS_8, FID) > 100, "more noise still fits"


def test_whatever_became_of_a_round_it_stays_spent(tmp_path: Path) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, EPS_8)
        ledger.forfeit(FID, 0, "x")
        ledger.reserve(FID, 1, SIGMA_1, EPS_8)
        ledger.encoded(FID, 1, h(0), h(0))
        ledger.close(FID, 1, "void")
        with pytest.raises(PrivacyBudgetExceeded):
            ledger.reserve(FID, 2, SIGMA_1, EPS_8)


def test_lifetime_and_federation_budgets_both_hold_and_the_first_is_named(tmp_path: Path) -> None:
    life, run = Budget("local", 8.0, 1e-5, "lifetime"), Budget("local", 5.0, 1e-5, "federation")
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        assert ledger.remaining(SIGMA_1, (life, run), FID) == 1
        ledger.reserve(FID, 0, SIGMA_1, (life, run))
        assert ledger.would_exceed(SIGMA_1, (life, run), FID) == run
        assert ledger.would_exceed(SIGMA_1, (life, run), FID2) is None
        ledger.reserve(FID2, 0, SIGMA_1, (life, run))
        assert ledger.would_exceed(SIGMA_1, (life, run), FID2) == life
        assert ledger.would_exceed(SIGMA_1, (run, life), FID2) == run
        assert ledger.would_exceed(SIGMA_1, (run, life), h(5)) == life


def test_views_are_held_apart(tmp_path: Path) -> None:
    local, central = Budget("local", 8.0, 1e-5), Budget("central", 8.0, 1e-5)
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        charge = Charge(1.0, 11, 1)
        assert ledger.remaining(charge, (local,), FID) == 2
        assert ledger.remaining(charge, (central,), FID) == 27  # a tenth of the mu^2: at least ten times as many
        unlimited = Budget("local", math.inf, 1e-5)
        assert ledger.remaining(charge, (unlimited, central), FID) == 27


def test_remaining_is_what_reserve_lets_through(tmp_path: Path) -> None:
    budgets = (Budget("local", 3.0, 1e-6), Budget("central", 1.5, 1e-7, "federation"))
    for number, own in enumerate((1.3, 2.0, 3.7, 5.0)):
        with PrivacyLedger.open(start(Path(tempfile.mkdtemp(dir=tmp_path)))) as ledger:
            charge, done = Charge(own, 4, 1, 1e-9), 0
            expected = ledger.remaining(charge, budgets, FID)
            while ledger.would_exceed(charge, budgets, FID) is None:
                ledger.reserve(FID, done, charge, budgets)
                done += 1
                assert ledger.remaining(charge, budgets, FID) == expected - done
            assert done == expected, number


def test_without_limits_and_without_noise(tmp_path: Path) -> None:
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        bare = Charge(0.0, 3, 1, guarantee="none")
        assert ledger.remaining(SIGMA_1, UNLIMITED, FID) == ledger.remaining(bare, (), FID) == MOST_ROUNDS
        assert ledger.remaining(bare, EPS_8, FID) == 0
        ledger.reserve(FID, 0, bare, UNLIMITED)
        assert ledger.spent("local", 1e-5) == ledger.mu2("central") == math.inf
        assert ledger.remaining(Charge(1e9, 3, 1), EPS_8, FID2) == 0, "what was shown once is shown for ever"
        json.dumps(ledger.summary())


def test_questions_take_constant_time(tmp_path: Path) -> None:
    with PrivacyLedger.open(start(tmp_path)) as ledger:

        def cost() -> int:
            return calls(lambda: ledger.would_exceed(SIGMA_2, EPS_8, FID))

        cost()
        before = cost()
        for index in range(400):
            ledger._book.apply(
                {"kind": "reserved", "fid": FID.hex(), "round": index, "charge": SIGMA_2.record(), "seq": index + 1}
            )
        assert cost() < 5 * before


# ---------------------------------------------------------------------- one holder at a time


HOLD = """
import sys
from lensemble_flwr.privacy.ledger import PrivacyLedger
with PrivacyLedger.open(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_holds_it(tmp_path: Path) -> None:
    path = start(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match="in use"):
            PrivacyLedger.open(path, timeout_s=0.1)
        assert PrivacyLedger.open(path, read_only=True).mu2("local") == 0
        assert verify(path).ok
    finally:
        holder.kill()
        holder.communicate()
    PrivacyLedger.open(path).unlock()  # a killed holder leaves no lock behind


RACE = """
import sys
from lensemble_flwr.errors import LedgerError, PrivacyBudgetExceeded
from lensemble_flwr.privacy.ledger import Budget, Charge, PrivacyLedger
charge, budgets, done = Charge(4.0, 3, 1), (Budget("local", 8.0, 1e-5),), 0
for index in range(1000):
    with PrivacyLedger.open(sys.argv[1], timeout_s=30) as ledger:
        try:
            ledger.reserve(bytes(31) + sys.argv[2].encode(), index, charge, budgets)
        except PrivacyBudgetExceeded:
            break
        done += 1
print(done)
"""


def test_two_processes_share_one_budget(tmp_path: Path) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        rounds = ledger.remaining(Charge(4.0, 3, 1), EPS_8, FID)
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, str(path), name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    done = [int(racer.communicate()[0]) for racer in racers]
    assert sum(done) == rounds
    assert rounds > 20
    with PrivacyLedger.open(path) as ledger:
        assert ledger.mu2("local") == rounds / 16


def test_a_file_that_is_replaced_while_waiting_for_its_lock_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = start(tmp_path), fcntl.flock

    def flock(handle: int, how: int) -> None:
        real(handle, how)
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / "new").write_bytes(path.read_bytes())
        os.replace(tmp_path / "new", path)  # a repair came first

    monkeypatch.setattr(fcntl, "flock", flock)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
    assert PrivacyLedger.open(path, read_only=True).mu2("local") == 1.0


def test_a_reader_meets_a_writer_between_the_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = start(tmp_path), ledger_module.read_bytes
    with PrivacyLedger.open(path) as ledger:
        rounds = iter(range(6))

        def read_bytes(file: Path, what: str) -> bytes:
            for _ in range(2):  # the log runs ahead of the head that was just read, three times in a row
                index = next(rounds, None)
                if index is not None:
                    ledger.reserve(FID, index, SIGMA_1, UNLIMITED)
            return real(file, what)

        monkeypatch.setattr(ledger_module, "read_bytes", read_bytes)
        assert PrivacyLedger.open(path, read_only=True).mu2("local") == 6.0
        rounds = iter(range(6, 1000))
        with pytest.raises(LedgerError, match="keeps changing"):
            PrivacyLedger.open(path, read_only=True)


def test_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path), pytest.raises(LedgerError, match="in use"):
        PrivacyLedger.open(path, timeout_s=0)
    PrivacyLedger.open(path).unlock()


def test_a_child_of_the_holder_cannot_write(tmp_path: Path) -> None:
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        child = os.fork()
        if child == 0:
            try:
                ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
            except LedgerError as error:
                os._exit(0 if "parent" in error.message else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        with pytest.raises(LedgerError, match="in use"):
            PrivacyLedger.open(ledger.path, timeout_s=0)


def test_after_unlock_and_read_only_nothing_is_written(tmp_path: Path) -> None:
    path = start(tmp_path)
    ledger = PrivacyLedger.open(path)
    ledger.unlock()
    ledger.unlock()
    for closed in (ledger, PrivacyLedger.open(path, read_only=True)):
        with pytest.raises(LedgerError, match="not open for writing"):
            closed.reserve(FID, 0, SIGMA_1, UNLIMITED)
    assert len(path.read_bytes().splitlines()) == 1


def test_files_that_change_while_it_is_held(tmp_path: Path) -> None:
    for change in ("append", "cut", "replace", "delete"):
        path = start(Path(tempfile.mkdtemp(dir=tmp_path)))
        with PrivacyLedger.open(path) as ledger:
            data = path.read_bytes()
            if change in ("replace", "delete"):
                path.unlink()
            if change != "delete":
                path.write_bytes({"append": data + b"x", "cut": data[:-1], "replace": data}[change])
            with pytest.raises(LedgerError, match=r"changed by something else|No such file"):
                ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
            assert ledger.mu2("local") == 0


# ---------------------------------------------------------------------- size


def test_a_year_of_rounds_opens_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start(tmp_path)
    head = path.with_suffix(".head")
    monkeypatch.setattr(ledger_module, "atomic_write", lambda *_: None)
    charge = Charge(100.0, 3, 1, 1e-12)
    with PrivacyLedger.open(path) as ledger:
        for index in range(6667):
            ledger.reserve(FID, index, charge, UNLIMITED)
            ledger.encoded(FID, index, h(index), h(-index))
            ledger.close(FID, index, "committed")
        head.write_bytes(ledger.head.encode())
        assert ledger.head.seq > 20_000

    assert calls(lambda: PrivacyLedger.open(path).unlock()) < 15_000, "fewer than there are lines"
    with PrivacyLedger.open(path) as ledger:
        assert ledger.rounds(FID) == tuple(range(6667))
        assert ledger.mu2("local") == pytest.approx(0.6667)
    assert verify(path).ok


def test_a_shortcut_knows_what_the_whole_ledger_knows(tmp_path: Path) -> None:
    path = start(tmp_path)
    with checkpoint_every(4):
        fill(path)
    head = path.with_suffix(".head")
    short, whole = (snapshot(path, head, shortcut) for shortcut in (True, False))
    assert short.head == whole.head
    assert short.size == whole.size
    assert whole.first == 0
    assert replay(short, path) == replay(whole, path)
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [i for i, body in enumerate(bodies(whole.lines)) if body["kind"] == "checkpoint"]
    assert len(ends) >= 3
    for end in ends:  # as it was when each of them was the last record
        data, head_then = b"".join(lines[: end + 1]), Head(end, record_hash(lines[end][:-1]))
        chains = [check_chain(data, head_then, path, shortcut) for shortcut in (True, False)]
        assert chains[0].first == end
        assert replay(chains[0], path) == replay(chains[1], path)


def test_text_that_looks_like_a_checkpoint_is_none(tmp_path: Path) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        ledger.event("note", {"kind": "checkpoint"})
        ledger.event("note", {"text": '"kind":"checkpoint"'})
    assert PrivacyLedger.open(path, read_only=True).mu2("local") == 1.0


# ---------------------------------------------------------------------- a model

FIDS = st.sampled_from([FID, FID2])
ROUNDS = st.integers(0, 3)
CHARGES = st.builds(
    Charge, st.sampled_from([0.5, 1.0, 1.7, 3.0]), st.sampled_from([2, 5]), st.just(1), st.sampled_from([0.0, 1e-9])
)


class Machine(RuleBasedStateMachine):
    """Random lives, with crashes, against a dictionary and a sum of fractions."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = start(Path(self.folder.name))
        self.checkpoints = checkpoint_every(5)
        self.checkpoints.__enter__()
        self.ledger = PrivacyLedger.open(self.path, IDENTITY)
        self.states: dict[tuple[bytes, int], str] = {}
        self.here: set[tuple[bytes, int]] = set()
        self.spent: list[tuple[bytes, Charge]] = []

    def expect(self, key: tuple[bytes, int], allowed: set[str | None], act, after: str) -> bool:
        if self.states.get(key) in allowed:
            act()
            self.states[key] = after
            return True
        with pytest.raises(LedgerError):
            act()
        return False

    @rule(fid=FIDS, index=ROUNDS, charge=CHARGES)
    def reserve(self, fid: bytes, index: int, charge: Charge) -> None:
        act = lambda: self.ledger.reserve(fid, index, charge, UNLIMITED)  # noqa: E731
        if self.expect((fid, index), {None}, act, "reserved"):
            self.here.add((fid, index))
            self.spent.append((fid, charge))

    @rule(fid=FIDS, index=st.integers(4, 50), charge=CHARGES)
    def reserve_within_a_budget(self, fid: bytes, index: int, charge: Charge) -> None:
        budgets = (Budget("local", 20.0, 1e-6), Budget("central", 9.0, 1e-6, "federation"))
        if self.ledger.would_exceed(charge, budgets, fid) is None:
            act = lambda: self.ledger.reserve(fid, index, charge, budgets)  # noqa: E731
            if self.expect((fid, index), {None}, act, "reserved"):
                self.here.add((fid, index))
                self.spent.append((fid, charge))
        elif (fid, index) not in self.states:
            with pytest.raises(PrivacyBudgetExceeded):
                self.ledger.reserve(fid, index, charge, budgets)

    @rule(fid=FIDS, index=ROUNDS)
    def encoded(self, fid: bytes, index: int) -> None:
        allowed: set[str | None] = {"reserved"} if (fid, index) in self.here else set()
        self.expect((fid, index), allowed, lambda: self.ledger.encoded(fid, index, h(index), h(9)), "encoded")

    @rule(fid=FIDS, index=ROUNDS)
    def forfeit(self, fid: bytes, index: int) -> None:
        act = lambda: self.ledger.forfeit(fid, index, "x")  # noqa: E731
        self.expect((fid, index), {"reserved", "encoded"}, act, "forfeited")

    @rule(fid=FIDS, index=ROUNDS, outcome=st.sampled_from(["committed", "burnt", "void"]))
    def close(self, fid: bytes, index: int, outcome: str) -> None:
        act = lambda: self.ledger.close(fid, index, outcome)  # noqa: E731
        self.expect((fid, index), {"reserved", "encoded"}, act, "closed")

    @rule(text=st.text(max_size=20))
    def event(self, text: str) -> None:
        self.ledger.event("note", {"text": text.encode("utf-8", "replace").decode()})

    @rule()
    def reopen(self) -> None:
        self.ledger.unlock()
        self.ledger = PrivacyLedger.open(self.path, IDENTITY)
        self.here.clear()

    @rule(torn=st.binary(min_size=1, max_size=40).map(lambda data: data.replace(b"\n", b"?")))
    def crash_in_the_middle_of_a_record(self, torn: bytes) -> None:
        self.ledger.unlock()
        with self.path.open("ab") as log:
            log.write(torn)
        self.reopen()
        assert len(self.ledger.recovered) == 1

    @precondition(lambda self: self.ledger.head.seq > 0)
    @rule()
    def crash_before_the_head(self) -> None:
        self.ledger.unlock()
        lines = self.path.read_bytes().splitlines()
        head = Head(len(lines) - 2, record_hash(lines[-2]))
        self.path.with_suffix(".head").write_bytes(head.encode())
        self.reopen()
        assert len(self.ledger.recovered) == 1

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for fid in (FID, FID2):
            for index in range(4):
                assert self.ledger.state(fid, index).state == self.states.get((fid, index))
            truth = sum((1 / Fraction(c.own_multiplier) ** 2 for f, c in self.spent if f == fid), Fraction(0))
            value = Fraction(self.ledger.mu2("local", fid))
            assert truth <= value <= truth * (1 + Fraction(1, 2**50))
            open_rounds = [i for (f, i), s in self.states.items() if f == fid and s in ("reserved", "encoded")]
            assert self.ledger.open_rounds(fid) == tuple(sorted(open_rounds))
        assert len(self.spent) == len(self.states) == self.ledger.summary()["lifetime"]["rounds"]

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.unlock()
            whole = snapshot(self.path, self.path.with_suffix(".head"), shortcut=False)
            assert replay(whole, self.path) == self.ledger._book
            assert verify(self.path).ok
            self.checkpoints.__exit__(None, None, None)
            self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_discrete_releases_are_converted_as_concentrated_for_ever(tmp_path: Path) -> None:
    path = start(tmp_path)
    charge = Charge(2.0, 10, 2, 1e-9, guarantee="central", mechanism="discrete_gaussian", gap=0.01)
    budget = Budget("central", 4.0, 1e-5)
    with checkpoint_every(4):
        for index in range(6):  # across checkpoints and openings
            with PrivacyLedger.open(path) as ledger:
                ledger.reserve(FID, index, charge, (budget,))
                ledger.encoded(FID, index, h(1), h(2))
        with PrivacyLedger.open(path) as ledger:
            mu = math.sqrt(ledger.mu2("central"))
            assert mu == pytest.approx(math.sqrt(6) * (0.5 / math.sqrt(8) + 0.01), rel=1e-12)
            expected = concentrated.epsilon(mu, 1e-5 - 6e-9)
            assert ledger.spent("central", 1e-5) == pytest.approx(expected, rel=1e-9)
            assert ledger.summary()["lifetime"]["concentrated"] is True
            left = ledger.remaining(charge, (budget,), FID)
            assert ledger.would_exceed(charge, (budget,), FID, left) is None
            assert ledger.would_exceed(charge, (budget,), FID, left + 1) == budget
    assert verify(path).ok
