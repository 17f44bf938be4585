"""How loud the noise will be, from public numbers alone: signal-to-noise before any data is read.

Signal: the norm of the sum of n clipped updates with mean pairwise cosine c, C sqrt(n (1 + (n - 1) c)).
Noise: the norm of the sum of n noises, s sqrt(n d). The ratio predicts well within one parameterisation and fails
across them, so it is printed beside a rehearsal on public data, which judges (see federation.rehearsal).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lensemble_flwr.errors import ContractViolation

COHERENCE = 0.1
"""Mean cosine between participants' updates that is assumed when nothing was measured."""
REFUSE, WARN = 0.3, 0.7
"""Below REFUSE a linear adapter did not gain in our measurements, below WARN it lost part of its gain."""


def preflight(n: int, dimension: int, noise_std: float, clip_norm: float, coherence: float = COHERENCE) -> float:
    """Expected signal-to-noise ratio of one round's sum.

    Args:
        n: participants in the sum.
        dimension: d.
        noise_std: s, each participant's own noise per coordinate.
        clip_norm: C; every update is assumed to reach it.
        coherence: c.

    Raises:
        ContractViolation: a value that cannot be.
    """
    if n < 1 or dimension < 1 or not clip_norm > 0 or not noise_std >= 0 or not -1 <= coherence <= 1:
        raise ContractViolation("n, d and C must be positive, s >= 0 and -1 <= c <= 1.")
    signal = clip_norm * math.sqrt(max(0.0, n * (1 + (n - 1) * coherence)))
    noise = noise_std * math.sqrt(n * dimension)
    return signal / noise if noise else math.inf


def largest_dimension(n: int, noise_std: float, clip_norm: float, ratio: float = WARN) -> int:
    """The largest d at which the expected ratio is still at least ``ratio`` (0: not even one coordinate)."""
    return int((preflight(n, 1, noise_std, clip_norm) / ratio) ** 2)


def fewest_participants(std_of: Callable[[int], float], dimension: int, clip_norm: float, ratio: float = WARN) -> int:
    """The smallest n (to 1 %) at which the expected ratio is at least ``ratio``.

    Args:
        std_of: each participant's own noise std in a federation of n (falls with n for a central guarantee).
        dimension, clip_norm, ratio: see :func:`preflight`.
    """
    low, high = 1, 4
    while preflight(high, dimension, std_of(high), clip_norm) < ratio:
        low, high = high, 2 * high
        if high > 1 << 40:
            return high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if preflight(middle, dimension, std_of(middle), clip_norm) < ratio:
            low = middle
        else:
            high = middle
    return high
