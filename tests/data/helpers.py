"""Small random episodes."""

from __future__ import annotations

import numpy as np

from lensemble_flwr.data import ActionSpec, Episode, MemorySource


def make_episode(seed: int = 0, steps: int = 3, side: int = 8, dim: int = 2, **changes: object) -> Episode:
    rng = np.random.default_rng(seed)
    values: dict = {
        "frames": rng.integers(0, 256, (steps + 1, side, side, 3), dtype=np.uint8),
        "actions": rng.uniform(-1, 1, (steps, dim)).astype(np.float32),
        "states": rng.standard_normal((steps + 1, 8)).astype(np.float32),
        "embodiment": "body",
        "meta": {"seed": seed},
    }
    return Episode(**{**values, **changes})


def make_source(lengths: list[int], name: str = "mine", side: int = 8, first_seed: int = 0) -> MemorySource:
    episodes = [make_episode(first_seed + i, steps, side) for i, steps in enumerate(lengths)]
    return MemorySource(name, ActionSpec("continuous", 2), episodes)
