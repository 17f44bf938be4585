"""A dot on a dark square that every action swipes somewhere else: a world that is written down in three lines.

    p' = clamp(p + k a, 0, 1),  a ~ U(-1, 1)^2,  p_0 ~ U(.15, .85)^2
    b  = exp(-|x - p|^2 / (2 s^2))  on the grid linspace(0, 1, S)^2
    channels: b,  .35 + .65 b,  1 - .55 b

With k near one a step crosses the whole square, so nothing but position and action tells where the dot goes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import ActionSpec
from lensemble_flwr.data.episodes import Episode, MemorySource

BODY = "swipe"
ACTION_SPEC = ActionSpec("continuous", 2)
Box = tuple[float, float, float]
"""x and y of a square's corner, and its side."""
WHOLE: Box = (0.0, 0.0, 1.0)


def draw(positions: NDArray[np.float64], size: int, spread: float) -> NDArray[np.uint8]:
    """Pictures of the dot.

    Args:
        positions: (T, 2) x and y in 0..1; x counts columns.
        size: S, pixels a side.
        spread: s, standard deviation of the dot, in sides of the square.

    Returns:
        (T, S, S, 3) uint8.
    """
    grid = np.linspace(0.0, 1.0, size)
    along = np.exp(-((grid - positions[:, :, None]) ** 2) / (2 * spread**2))  # (T, 2, S)
    dot = along[:, 1, :, None] * along[:, 0, None, :]
    channels = np.stack([dot, 0.35 + 0.65 * dot, 1.0 - 0.55 * dot], axis=-1)
    return np.rint(channels * 255).astype(np.uint8)


def source(
    name: str,
    seed: int,
    episodes: int,
    *,
    steps: int = 16,
    size: int = 48,
    reach: float = 0.7,
    spread: float = 0.06,
    box: Box = WHOLE,
) -> MemorySource:
    """Episodes of one seed; more of them begin with the same ones.

    Args:
        name: of the source.
        seed: of starts and actions.
        episodes: how many.
        steps: actions of an episode.
        size: pixels a side.
        reach: k, what an action of one moves the dot by, in sides of the square.
        spread: s, see :func:`draw`.
        box: where the dot stays: it starts within .15 to .85 of this square and is clamped to it.

    Returns:
        Episodes of ``steps`` actions; their states are (x, y).
    """
    rng = np.random.default_rng(seed)
    low, side = np.array(box[:2]), box[2]
    made = []
    for _ in range(episodes):
        positions = [low + side * rng.uniform(0.15, 0.85, 2)]
        actions = rng.uniform(-1.0, 1.0, (steps, 2)).astype(np.float32)
        for action in actions:
            positions.append(np.clip(positions[-1] + reach * action, low, low + side))
        path = np.stack(positions)
        made.append(Episode(draw(path, size, spread), actions, path.astype(np.float32), BODY))
    return MemorySource(name, ACTION_SPEC, made)
