"""The release path: from a local update to the integers that may be masked and sent (INV-ALIGN-BEFORE-RELEASE).

align (in the task) -> re-difference -> clip -> secret coin (if there is one) -> noise -> ring -> mask. The types of
:mod:`lensemble_flwr.privacy` carry the order: noise can only be added to a clipped update, only a noised update becomes
a release, and only a release is returned here. The caller has reserved the budget before.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.federation.records import Mechanism, RoundOpen
from lensemble_flwr.privacy.mechanism import (
    Release,
    add_discrete_noise,
    add_noise,
    clip_to_grid,
    encode_exact,
    private_release,
    take_part,
    to_release,
    zero_update,
)
from lensemble_flwr.privacy.noise import Entropy, OsEntropy, ReplayEntropy
from lensemble_flwr.secagg import RingParams


def release_update(delta: np.ndarray | None, opened: RoundOpen, identity: bytes, simulation: bool) -> Release:
    """Clip, noise and encode one update; ``None`` is the zero update, which looks like any other.

    Args:
        delta: aligned update, float32, shape (d,).
        opened: the round's public numbers.
        identity: only used to tell participants apart when noise is replayed.
        simulation: whether replay is possible at all here.

    Returns:
        The one thing that may be masked and sent: multiples of the ring's grid, |q| <= qmax.

    Raises:
        ContractViolation: wrong shape, or seeded noise outside a simulation.
        ConfigError: without privacy, a coordinate lies outside the public range.
    """
    ring = RingParams(opened.ring_bits, len(opened.roster), opened.scale_log2, opened.dimension)
    entropy = _entropy(opened, identity, simulation)
    if not opened.private:
        if delta is None:
            raise ContractViolation("Without privacy there is no zero update.")
        return encode_exact(delta, ring.scale_log2, ring.qmax, entropy)
    if delta is not None and delta.shape != (opened.dimension,):
        raise ContractViolation(f"The update has shape {delta.shape}, not ({opened.dimension},).")
    if opened.sample_rate == 1.0 and opened.mechanism == Mechanism.GAUSSIAN:  # the steps below in one pass
        return private_release(
            delta, opened.dimension, opened.clip_norm, opened.noise_std, entropy, ring.scale_log2, ring.qmax
        )
    if delta is None:
        clipped = zero_update(opened.dimension, opened.clip_norm, opened.noise_std)
    else:
        clipped = clip_to_grid(delta, opened.clip_norm, opened.noise_std)
    if opened.sample_rate < 1.0:  # a public value; the zero update of a failure throws its coin, too
        clipped = take_part(clipped, opened.participation, entropy)
    if opened.mechanism == Mechanism.DISCRETE_GAUSSIAN:
        noised = add_discrete_noise(clipped, opened.noise_std, entropy, ring.scale_log2)
    else:
        noised = add_noise(clipped, opened.noise_std, entropy)
    return to_release(noised, ring.scale_log2, ring.qmax)


def _entropy(opened: RoundOpen, identity: bytes, simulation: bool) -> Entropy:
    if not opened.replay:
        return OsEntropy()
    if not simulation:
        raise ContractViolation("Seeded noise exists only in a simulation.")
    digest = hashlib.sha256(b"lensemble replay\0" + opened.config_hash + identity + opened.round.to_bytes(4, "big"))
    return ReplayEntropy(int.from_bytes(digest.digest()[:8], "big"))
