"""The smallest task: least squares on generated data. Every stage of a round is real, training takes microseconds.

Participant i holds 40 points of y = x.w + noise with x in R^16 drawn around its own centre; w is one public truth, so
the error of a model is known. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.federation.schedule import Schedule
from lensemble_flwr.federation.task import LocalResult, MetricLabel, Progress, Slice

FEATURES, POINTS = 16, 40


class LinearTask:
    """See the module. theta = (w in R^16, bias)."""

    headline = rehearsal_metric = "heldout_error"
    metrics: Mapping[str, MetricLabel] = {}

    def __init__(self, config: Config) -> None:
        self.layout: tuple[Slice, ...] = (Slice("weight", (FEATURES,), 0), Slice("bias", (1,), FEATURES))
        self.base_hash = hashlib.sha256(b"lensemble linear task 1").digest()
        self.probe_hash = bytes(32)
        self._lr = config.inner.lr
        self._seed = config.seed
        self.schedule = Schedule.of(config)

    @property
    def dimension(self) -> int:
        return FEATURES + 1

    def initial(self) -> np.ndarray:
        return np.zeros(self.dimension, np.float32)

    def sketch_hash(self, sketch_seed: int) -> bytes:
        return hashlib.sha256(b"linear sketch" + sketch_seed.to_bytes(8, "big")).digest()

    def _data(self, label: str, points: int) -> tuple[np.ndarray, np.ndarray]:
        digest = hashlib.sha256(f"linear/{self._seed}/{label}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        truth = np.linspace(-1, 1, self.dimension)
        x = rng.standard_normal((points, FEATURES)) + 0.5 * rng.standard_normal(FEATURES)
        x = np.concatenate([x, np.ones((points, 1))], 1)
        return x, x @ truth + 0.1 * rng.standard_normal(points)

    def episode_hashes(self, partition: int) -> list[bytes]:
        x, y = self._data(f"participant {partition}", POINTS)
        return [hashlib.sha256(x.tobytes() + y.tobytes()).digest()]

    def local_update(
        self,
        theta: np.ndarray,
        partition: int,
        state: bytes | None,
        *,
        steps: int,
        sketch_seed: int,
        round_index: int,
        outer_step: int | None = None,
    ) -> LocalResult:
        place = round_index if outer_step is None else outer_step
        return LocalResult(self._descend(theta, f"participant {partition}", steps, place), b"")

    def public_update(
        self, theta: np.ndarray, share: int, *, steps: int, sketch_seed: int, outer_step: int = 0
    ) -> np.ndarray:
        return self._descend(theta, f"public {share}", steps, outer_step)

    def _descend(self, theta: np.ndarray, label: str, steps: int, outer_step: int) -> np.ndarray:
        x, y = self._data(label, POINTS)
        w = theta.astype(np.float64)
        for step in range(steps):
            w -= self._lr * self.schedule.factor(outer_step * steps + step) * x.T @ (x @ w - y) / len(y)
        if not np.isfinite(w).all():
            raise ContractViolation("The local steps diverged.")
        return w.astype(np.float32)

    def evaluate(self, theta: np.ndarray) -> dict[str, float]:
        x, y = self._data("held-out", 400)
        return {"heldout_error": float(np.mean((x @ theta - y) ** 2) / np.var(y))}

    def prepare(self, progress: Progress | None = None) -> None:
        return None

    def public_files(self) -> tuple[Path, ...]:
        return ()

    def prepare_participant(self, partition: int, public: Path | None = None, progress: Progress | None = None) -> None:
        return None
