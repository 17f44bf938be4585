"""A task of any size that learns nothing: for measuring what a round costs. Option: ``dimension`` d.

theta starts at zero and every local update moves each coordinate by a little; no data, no torch, hardly any time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.task import LocalResult, MetricLabel, Progress, Slice

MAX_DIMENSION = 1 << 32


class Wide:
    """See the module. theta is one parameter of shape (d,)."""

    headline = rehearsal_metric = "distance"
    metrics: Mapping[str, MetricLabel] = {}

    def __init__(self, config: Config, data_dir: Path | None = None) -> None:
        """Raises ConfigError for a dimension that is none."""
        dimension = config.task_options.get("dimension", 1000)
        if type(dimension) is not int or not 0 < dimension <= MAX_DIMENSION:
            raise ConfigError(f"task_options.dimension={dimension!r} is not a whole number from 1 to 2^32.")
        self.dimension = dimension
        self.layout = (Slice("weight", (dimension,), 0),)
        self.base_hash = hashlib.sha256(b"lensemble wide task 1" + dimension.to_bytes(8, "big")).digest()
        self.probe_hash = bytes(32)

    def initial(self) -> np.ndarray:
        return np.zeros(self.dimension, np.float32)

    def sketch_hash(self, sketch_seed: int) -> bytes:
        return hashlib.sha256(b"wide sketch" + sketch_seed.to_bytes(8, "big")).digest()

    def episode_hashes(self, partition: int) -> list[bytes]:
        return [hashlib.sha256(b"wide" + partition.to_bytes(8, "big")).digest()]

    def local_update(
        self, theta: np.ndarray, partition: int, state: bytes | None, *, steps: int, sketch_seed: int, round_index: int
    ) -> LocalResult:
        return LocalResult(self.public_update(theta, partition, steps=steps, sketch_seed=sketch_seed), b"")

    def public_update(self, theta: np.ndarray, share: int, *, steps: int, sketch_seed: int) -> np.ndarray:
        return theta + np.float32(0.01 / self.dimension**0.5)

    def evaluate(self, theta: np.ndarray) -> dict[str, float]:
        return {"distance": float(np.dot(theta, theta)) ** 0.5}

    def prepare(self, progress: Progress | None = None) -> None:
        return None

    def public_files(self) -> tuple[Path, ...]:
        return ()

    def prepare_participant(self, partition: int, public: Path | None = None, progress: Progress | None = None) -> None:
        return None
