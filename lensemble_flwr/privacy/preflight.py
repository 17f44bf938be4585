"""How loud the noise will be, from public numbers alone: signal-to-noise before any data is read.

Signal: the norm of the sum of n clipped updates with mean pairwise cosine c, C sqrt(n (1 + (n - 1) c)).
Noise: the norm of the sum of n noises, s sqrt(n d). A secret coin of rate q leaves q of the signal and adds the coins'
own deviation, C sqrt(n q (1 - q)), to the noise. The ratio predicts well within one parameterisation and fails
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


def preflight(
    n: int,
    dimension: int,
    noise_std: float,
    clip_norm: float,
    coherence: float = COHERENCE,
    sample_rate: float = 1.0,
) -> float:
    """Expected signal-to-noise ratio of one round's sum.

    Args:
        n: participants in the sum.
        dimension: d.
        noise_std: s, each participant's own noise per coordinate.
        clip_norm: C; every update is assumed to reach it.
        coherence: c.
        sample_rate: q, of each participant's secret coin.

    Raises:
        ContractViolation: a value that cannot be.
    """
    if n < 1 or dimension < 1 or not clip_norm > 0 or not noise_std >= 0 or not -1 <= coherence <= 1:
        raise ContractViolation("n, d and C must be positive, s >= 0 and -1 <= c <= 1.")
    if not 0 < sample_rate <= 1:
        raise ContractViolation(f"The sample rate {sample_rate!r} must be above 0 and at most 1.")
    signal = sample_rate * clip_norm * math.sqrt(max(0.0, n * (1 + (n - 1) * coherence)))
    noise = math.sqrt(n * (noise_std**2 * dimension + sample_rate * (1 - sample_rate) * clip_norm**2))
    return signal / noise if noise else math.inf


def largest_dimension(n: int, noise_std: float, clip_norm: float, ratio: float = WARN, sample_rate: float = 1.0) -> int:
    """The largest d at which the expected ratio is still at least ``ratio`` (0: not even one coordinate)."""
    # 1/ratio^2 is a constant (the coins' part) plus a term proportional to d.
    one, two = (preflight(n, d, noise_std, clip_norm, sample_rate=sample_rate) ** -2 for d in (1, 2))
    return max(0, int(1 + (ratio**-2 - one) / (two - one))) if two > one else 0


def fewest_participants(
    std_of: Callable[[int], float], dimension: int, clip_norm: float, ratio: float = WARN, sample_rate: float = 1.0
) -> int:
    """The smallest n (to 1 %) at which the expected ratio is at least ``ratio``.

    Args:
        std_of: each participant's own noise std in a federation of n (falls with n for a central guarantee).
        dimension, clip_norm, ratio, sample_rate: see :func:`preflight`.
    """

    def expected(n: int) -> float:
        return preflight(n, dimension, std_of(n), clip_norm, sample_rate=sample_rate)

    low, high = 1, 4
    while expected(high) < ratio:
        low, high = high, 2 * high
        if high > 1 << 40:
            return high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if expected(middle) < ratio:
            low = middle
        else:
            high = middle
    return high
