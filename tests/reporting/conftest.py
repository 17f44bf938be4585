"""Run folders are made once a session and copied by those tests that change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reporting import runs

KINDS = ("private", "replay", "silos", "burnt", "budget", "empty")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind; not to be changed."""
    base = tmp_path_factory.mktemp("runs")
    return {kind: getattr(runs, f"{kind}_run")(base / kind) for kind in KINDS}


@pytest.fixture
def own(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a kind of run that the test may change."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(made[kind], tmp_path / kind))

    return copy
