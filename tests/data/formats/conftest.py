"""Copies of the recordings that other projects' writers wrote, to read and to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.data.formats import RecordingSpec, open_recordings
from lensemble_flwr.data.formats.recordings import Recordings

FIXTURES = Path(__file__).parents[2] / "fixtures" / "recordings"
PACKAGES = {"lerobot": ("pyarrow", "av"), "robomimic": ("h5py",), "minari": ("h5py",), "zarr": ("numcodecs",)}
LENGTHS = (12, 9, 15)

Open = Callable[..., Recordings]


def need(name: str) -> None:
    """Skip where the packages of a format are not installed (they are in the development requirements)."""
    for package in PACKAGES.get(name.split("-")[0].split("/")[0], ()):
        pytest.importorskip(package)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        need(name)
        return Path(shutil.copytree(FIXTURES / name, tmp_path / "recordings"))

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def make(path: Path, **options: Any) -> Recordings:
        values = {"image_size": 16, **options}
        return open_recordings(path, RecordingSpec.from_dict(values), cache_dir=tmp_path / "frames")

    return make


def colour(e: int, t: int) -> np.ndarray:
    """What fixtures/recordings/write.py paints: the colour of frame t of episode e."""
    return np.array([20 + 12 * t, 60 + 50 * e, 128])


def middle(frames: np.ndarray) -> np.ndarray:
    """int [T, 3]: the colour in the middle of each picture."""
    return frames[:, frames.shape[1] // 2, frames.shape[2] // 2].astype(int)


def raw_action(e: int, t: int) -> np.ndarray:
    return np.array([t / 10 - 0.5, np.sin(t), e])


def write_npz(path: Path, e: int = 0, steps: int = 5, **changes: Any) -> Path:
    """An episode of the plain folder format, in the fixtures' colours."""
    frames = np.empty((steps + 1, 24, 32, 3), np.uint8)
    frames[:] = [colour(e, t)[None, None] for t in range(steps + 1)]
    values = {"frames": frames, "actions": np.zeros((steps, 2), np.float32), **changes}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{k: v for k, v in values.items() if v is not None})
    return path
