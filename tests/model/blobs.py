"""A world of one bright blob, drawn on the fly: what the model tests train on. Nothing is read from disk.

The blob flies with a velocity; two bodies push it, one with a continuous thrust in two directions, one with four
choices. Gravity is a parameter, so there is a shift to adapt to.
"""

from __future__ import annotations

import numpy as np

from lensemble_flwr.model import HeadSpec, Trajectories

CONTINUOUS, DISCRETE = HeadSpec("continuous", 2), HeadSpec("discrete", 4)
_PUSH = np.array([[0, 0], [1, 0], [-1, 0], [0, 1]], np.float64)


def blobs(head: HeadSpec, episodes: int, seed: int, gravity: float = 0.0, frames: int = 9) -> Trajectories:
    rng = np.random.default_rng(seed)
    grid = np.linspace(0, 1, 64)
    pictures, moves, states = [], [], []
    for _ in range(episodes):
        if head.kind == "continuous":
            actions = rng.uniform(-1, 1, (frames - 1, head.dim)).astype(np.float32)
            force = actions[:, :2].astype(np.float64)
        else:
            choice = rng.integers(0, 4, frames - 1)
            actions, force = np.eye(4, dtype=np.float32)[choice], _PUSH[choice]
        place, speed = rng.uniform(0.3, 0.7, 2), rng.uniform(-0.03, 0.03, 2)
        path = [place.copy()]
        for push in force:
            speed = speed + 0.03 * push + np.array([0, gravity])
            place = np.clip(place + speed, 0.02, 0.98)
            path.append(place.copy())
        where = np.asarray(path)
        square = (grid[None, None, :] - where[:, 0, None, None]) ** 2 + (
            grid[None, :, None] - where[:, 1, None, None]
        ) ** 2
        blob = np.exp(-square / (2 * 0.05**2))
        pictures.append((255 * np.stack([blob, 0.35 + 0.6 * blob, 1 - 0.5 * blob], axis=-1)).astype(np.uint8))
        moves.append(actions)
        states.append(where.astype(np.float32))
    return Trajectories.from_episodes(pictures, moves, states)
