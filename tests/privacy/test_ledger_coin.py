"""The ledger with charges under a secret coin: exact to the round, durable at every byte, refused when in doubt."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lensemble_flwr.errors import LedgerError, PrivacyBudgetExceeded
from lensemble_flwr.privacy.ledger import Budget, Charge, PrivacyLedger
from lensemble_flwr.privacy.ledger_cli import ledger_command
from lensemble_flwr.privacy.ledger_file import Head, canonical, frame, record_hash
from lensemble_flwr.privacy.ledger_repair import repair, verify
from lensemble_flwr.privacy.participation import SecretParticipation
from lensemble_flwr.privacy.spending import Spending
from tests.privacy.ledger_helpers import (
    FID,
    FID2,
    SIGMA_1,
    UNLIMITED,
    checkpoint_every,
    files,
    h,
    memory_folder,
    put,
    start,
)

COIN = Charge(1.2, 3, 1, 1e-30, SecretParticipation(0.5))
RARE = Charge(0.9, 5, 1, 0.0, SecretParticipation(0.1), "central")
BUDGETS = (Budget("local", 8.0, 1e-5), Budget("local", 8.0, 1e-5, "federation"))


def fill(path: Path) -> Spending:
    """Rounds with and without a coin in two federations; returns what they cost."""
    spent = Spending()
    with PrivacyLedger.open(path) as ledger:
        for index, charge in enumerate((COIN, SIGMA_1, COIN, RARE)):
            ledger.reserve(FID, index, charge, UNLIMITED)
            ledger.encoded(FID, index, h(index), h(-index))
            ledger.close(FID, index, "committed")
            spent = spent.plus(charge)
        ledger.reserve(FID2, 0, COIN, UNLIMITED)
    return spent.plus(COIN)


def book(path: Path) -> Spending:
    with PrivacyLedger.open(path) as ledger:
        return ledger._book.spent()


def test_it_refuses_at_the_very_round_and_after_every_reopening(tmp_path: Path) -> None:
    """Sigma 1.2 at rate 1/2 is epsilon 8.0028 after ten rounds (tests/oracles): nine fit."""
    path = start(tmp_path)
    for index in range(9):
        with PrivacyLedger.open(path) as ledger:
            assert ledger.would_exceed(COIN, BUDGETS, FID) is None
            ledger.reserve(FID, index, COIN, BUDGETS)
    with PrivacyLedger.open(path) as ledger:
        assert ledger.would_exceed(COIN, BUDGETS, FID) == BUDGETS[0]
        assert ledger.remaining(COIN, BUDGETS, FID) == 0
        with pytest.raises(PrivacyBudgetExceeded, match=r"7\.\d+ is spent") as caught:
            ledger.reserve(FID, 9, COIN, BUDGETS)
        assert "8.003 would be" in str(caught.value)
        assert ledger.would_exceed(COIN, BUDGETS[1:], FID2) is None, "another federation has its own target"
        assert ledger.spent("local", 1e-5) < 8.0 < Spending().plus(COIN, 10).epsilon("local", 1e-5)
        assert len(ledger.rounds(FID)) == 9


def test_remaining_counts_to_the_round(tmp_path: Path) -> None:
    with PrivacyLedger.open(start(tmp_path)) as ledger:
        assert ledger.remaining(COIN, BUDGETS, FID) == 9


def test_killed_at_every_byte_it_never_forgets_a_charge() -> None:
    with memory_folder() as folder:
        path = start(folder)
        with PrivacyLedger.open(path) as ledger:
            ledger.reserve(FID, 0, COIN, UNLIMITED)
        before, head = files(path)
        with PrivacyLedger.open(path) as ledger:
            ledger.reserve(FID, 1, RARE, UNLIMITED)
        after, _ = files(path)
        one, both = Spending().plus(COIN), Spending().plus(COIN).plus(RARE)
        for end in range(len(before), len(after) + 1):
            put(path, after[:end], head)
            assert book(path) == (both if end == len(after) else one)


def test_checkpoints_keep_the_coins(tmp_path: Path) -> None:
    path = start(tmp_path)
    with checkpoint_every(4):
        spent = fill(path)
    assert b'"kind":"checkpoint"' in path.read_bytes()
    assert book(path) == spent
    assert len(spent.sampled) == 2
    assert verify(path).ok, "the whole chain, read from genesis, gives the same sums"
    with PrivacyLedger.open(path) as ledger:
        assert ledger._book.spent(FID2.hex()) == Spending().plus(COIN)
        assert ledger.summary()["lifetime"]["mu2_local"] == pytest.approx(3 / 1.44 + 1 + 1 / 0.81)


def test_without_coins_the_records_are_what_they_were(tmp_path: Path) -> None:
    path = start(tmp_path)
    with checkpoint_every(2), PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
    assert b"sample_rate" not in path.read_bytes()
    (checkpoint,) = [json.loads(line) for line in path.read_bytes().splitlines() if b'"checkpoint"' in line]
    assert len(checkpoint["book"]["lifetime"]) == 4


@pytest.mark.parametrize("bad", [0, 0.0, 1.0000001, -1, "x", None, True, [0.5], 1e400])
def test_a_record_with_a_hostile_rate_is_refused(tmp_path: Path, bad: object) -> None:
    path = start(tmp_path)
    log = path.read_bytes()
    genesis = log.rstrip(b"\n")
    body = {"kind": "reserved", "seq": 1, "fid": FID.hex(), "round": 0, "charge": {**COIN.record(), "sample_rate": bad}}
    try:
        line = frame(canonical(body), record_hash(genesis))
    except ValueError:  # JSON has no infinity
        assert bad == math.inf
        return
    put(path, log + line + b"\n", Head(1, record_hash(line)).encode())
    with pytest.raises(LedgerError, match="cannot be understood"):
        PrivacyLedger.open(path)
    assert not verify(path).ok


def test_a_repair_enters_a_charge_under_a_coin_again_as_it_was(tmp_path: Path) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        ledger.reserve(FID, 1, COIN, UNLIMITED)
    log, head = files(path)
    lines = log.splitlines(keepends=True)
    put(path, lines[0] + lines[1].replace(b"1", b"2", 1) + lines[2], head)
    with pytest.raises(LedgerError):
        PrivacyLedger.open(path)
    repair(path, charge_all=1, charge=SIGMA_1)
    assert book(path) == Spending().plus(SIGMA_1).plus(COIN)


def test_show_prints_the_amplified_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 0, COIN, UNLIMITED)
    assert ledger_command(["show", str(path)]) == 0
    assert f"epsilon {Spending().plus(COIN).epsilon('local', 1e-5):.6g} local" in capsys.readouterr().out
