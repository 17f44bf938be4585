"""Recordings of made-up robots on disk: a square that moves by the first entries of its actions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SIDE, STEPS = 64, 11


def record(folder: Path, kind: str, episodes: int, seed: int, states: bool = True) -> Path:
    """A plain folder of npz recordings.

    Args:
        kind: "dot" (two numbers in metres a second, -3..3), "arm" (seven joints, -0.5..0.5, the first two move it) or
            "grid" (four choices).
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(episodes):
        if kind == "grid":
            raw = rng.integers(0, 4, STEPS)
            moves = np.array([[5, 0], [-5, 0], [0, 5], [0, -5]])[raw]
            actions: np.ndarray = raw[:, None]
        else:
            limit, width = (3.0, 2) if kind == "dot" else (0.5, 7)
            actions = rng.uniform(-limit, limit, (STEPS, width))
            moves = 5 * actions[:, :2] / limit
        places = [rng.uniform(16, 48, 2)]
        for move in moves:
            places.append(np.clip(places[-1] + move, 6, SIDE - 6))
        frames = np.full((STEPS + 1, SIDE, SIDE, 3), 20, np.uint8)
        for t, (x, y) in enumerate(np.array(places).astype(int)):
            frames[t, y - 5 : y + 5, x - 5 : x + 5] = (230, 180, 40) if kind != "grid" else (40, 180, 230)
        columns = {"frames": frames, "actions": actions}
        if states:
            columns["state"] = np.array(places, np.float32)
        np.savez(folder / f"{number:03d}.npz", **columns)
    about: dict[str, object] = {"fps": 10, "body": kind}
    if kind == "grid":
        about |= {"actions": "discrete", "choices": 4}
    else:
        about |= {"action_low": [-3.0] * 2 if kind == "dot" else [-0.5] * 7}
        about |= {"action_high": [3.0] * 2 if kind == "dot" else [0.5] * 7}
    (folder / "recordings.json").write_text(json.dumps(about))
    return folder


def public(folder: Path, states: bool = True) -> Path:
    """Public recordings of a dot and a grid, and the file that lists them."""
    record(folder / "dot", "dot", 10, 900, states)
    record(folder / "grid", "grid", 10, 901, states)
    keys = ", state_keys: [state]" if states else ""
    (folder / "sets.yaml").write_text(f"dot: {{path: dot{keys}}}\ngrid: {{path: grid{keys}}}\n")
    return folder / "sets.yaml"
