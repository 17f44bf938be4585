"""scripts/loading: a script runs with what the project pinned, whatever the machine's python3 has installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import loading


class Restarted(Exception):
    """Stands for os.execv, which does not come back."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script of this folder has been started; the project has an environment. Its Python."""
    script = loading.ROOT / "scripts" / "bench_secagg"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", [str(script), "--ring", "24"])
    python = tmp_path / "project" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("LENSEMBLE_VENV", str(tmp_path / "project"))

    def execv(path: Path, words: list[str]) -> None:
        raise Restarted(str(path), *words)

    monkeypatch.setattr(os, "execv", execv)
    return python


def runs_in(monkeypatch: pytest.MonkeyPatch, prefix: str, base: str) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(sys, "base_prefix", base)


def test_the_systems_python_gives_way_even_if_it_has_everything(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_in(monkeypatch, "/usr", "/usr")
    with pytest.raises(Restarted) as caught:
        loading.enter("json")
    assert caught.value.args == (str(started), str(started), *sys.argv)


def test_an_environment_without_the_module_gives_way(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_in(monkeypatch, "/home/somebody/env", "/usr")
    with pytest.raises(Restarted):
        loading.enter("no_such_module")


def test_an_environment_that_somebody_chose_stays(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_in(monkeypatch, "/home/somebody/env", "/usr")
    loading.enter("json")


def test_it_is_not_started_for_ever(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_in(monkeypatch, str(started.parent.parent), "/usr")
    with pytest.raises(SystemExit, match="run scripts/install --dev first"):
        loading.enter("no_such_module", "scripts/install --dev")


def test_without_an_environment_of_the_projects(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started.unlink()
    runs_in(monkeypatch, "/usr", "/usr")
    loading.enter("json")
    with pytest.raises(SystemExit, match="run scripts/install first"):
        loading.enter("no_such_module")


def test_an_imported_script_starts_nothing(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="/usr/bin/pytest"))  # type: ignore[arg-type]
    runs_in(monkeypatch, "/usr", "/usr")
    loading.enter("no_such_module")


def test_a_script_is_loaded_once_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    script = loading.load("attack_secagg")
    assert callable(script.main)
    assert loading.load("attack_secagg") is script
    assert capsys.readouterr() == ("", "")
    with pytest.raises(FileNotFoundError):
        loading.load("no_such_script")
    assert "no_such_script_script" not in sys.modules
