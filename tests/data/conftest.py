"""One tiny simulated set for the whole session: real simulator, 20 episodes of 4 pictures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lensemble_flwr.data import LanderData, LanderSpec, ensure_dataset

SPEC = LanderSpec.tiny()


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("lander")
    ensure_dataset(SPEC, cache, processes=1)
    return cache


@pytest.fixture
def tiny_copy(tiny_cache: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_cache, tmp_path / "cache"))


@pytest.fixture
def tiny(tiny_cache: Path) -> LanderData:
    return ensure_dataset(SPEC, tiny_cache)
