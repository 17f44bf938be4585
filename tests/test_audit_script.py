"""scripts/audit_privacy in small: its table, its verdict, and its exit status when what it attacks is broken."""

from __future__ import annotations

import os
from hashlib import shake_256
from types import ModuleType

import pytest

from lensemble_flwr.privacy import mechanism
from lensemble_flwr.privacy.noise import RoundedGaussian
from scripts.loading import load

SMALL = ["--releases", "600", "--epsilons", "4", "--dimension", "20", "--crowd", "60"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("audit_privacy")


@pytest.fixture(autouse=True)
def _fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**9))
    monkeypatch.setattr(os, "urandom", lambda n: shake_256(b"script %d" % next(calls)).digest(n))


def test_the_real_path_passes(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(SMALL) == 0
    out = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(script.plan([4.0])) == 14
    for row in rows:
        accounted, bound, mu_accounted, mu, mu_epsilon = map(float, row[4:9])
        assert accounted == pytest.approx(4.0, abs=2e-3)
        assert mu_accounted == pytest.approx(0.925, abs=2e-3)
        assert 0 <= bound < accounted
        assert 0 <= mu < mu_accounted
        assert 0 <= mu_epsilon < accounted
    assert "No bound is above what is accounted." in out
    assert "One round, 59 canaries" in out


def test_a_broken_path_is_an_exit_status(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mechanism, "RoundedGaussian", lambda std, ratio: RoundedGaussian(std / 8, ratio))
    assert script.main(SMALL) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_the_default_table_gives_the_strongest_canary_enough_releases(script: ModuleType) -> None:
    for row in script.plan([1.0, 2.0, 4.0]):
        if row.share == 1.0:
            assert row.canary == "first"
            assert 2 * row.attempts(100_000) * row.rounds >= 100_000


def test_bad_arguments(script: ModuleType) -> None:
    for arguments in (["--releases", "10"], ["--confidence", "1"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            script.main(arguments)
    assert script.main(["--epsilons", "-1"]) == 2
