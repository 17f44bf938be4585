"""The outer step of DiLoCo (arXiv:2311.08105): Nesterov momentum on the mean pseudo-gradient.

With G = -mean(released Delta), in the form of torch.optim.SGD(nesterov=True, dampening=0):
``b <- mu b + G``, ``theta <- theta - lr (G + mu b)``. The velocity form found elsewhere equals it only while the
learning rate is constant, so it is not used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

from lensemble_flwr.errors import ContractViolation, NonDeterministicAggregation

BLOCK = 1 << 16
"""Coordinates per block: 512 KiB of float64, within a core's cache."""

_PART, _PRIME_PART = 1 << 20, 786_433

Step = tuple[np.ndarray, np.ndarray]


def outer_step(
    params: np.ndarray, momentum: np.ndarray, mean_delta: np.ndarray, lr: float, mu: float, *, block: int = BLOCK
) -> Step:
    """One outer step on flat vectors.

    Args:
        params: theta_t, shape (d,), any float dtype; the result has the same dtype.
        momentum: b_t, shape (d,), any float dtype, kept.
        mean_delta: mean of the released updates, shape (d,), any float dtype.
        lr: outer learning rate, > 0.
        mu: outer momentum, in [0, 1).
        block: coordinates per block; never changes a byte of the result.

    Returns:
        (theta_{t+1}, b_{t+1}), new arrays. Arithmetic is float64, coordinate by coordinate.

    Raises:
        ContractViolation: shapes or dtypes do not fit, or a value is not finite.
    """
    if not (params.ndim == 1 and params.shape == momentum.shape == mean_delta.shape):
        raise ContractViolation(
            f"params {params.shape}, momentum {momentum.shape}, mean_delta {mean_delta.shape} must be equal and flat."
        )
    if any(a.dtype.kind != "f" for a in (params, momentum, mean_delta)):
        raise ContractViolation("params, momentum and mean_delta must be of a float dtype.")
    if not (math.isfinite(lr) and lr > 0 and 0 <= mu < 1):
        raise ContractViolation(f"lr={lr!r} must be positive and mu={mu!r} in [0, 1).")
    new_params, new_momentum = np.empty_like(params), np.empty_like(momentum)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        for start in range(0, params.size, block):
            part = slice(start, start + block)
            gradient = -mean_delta[part].astype(np.float64)
            buffer = mu * momentum[part].astype(np.float64) + gradient
            new_momentum[part] = buffer
            new_params[part] = params[part].astype(np.float64) - lr * (gradient + mu * buffer)
    if not (np.isfinite(new_params).all() and np.isfinite(new_momentum).all()):
        raise ContractViolation(
            "The outer step gave a value that is not finite.", "Lower diloco.outer_lr or diloco.outer_momentum."
        )
    return new_params, new_momentum


def mean_of_sum(total: np.ndarray, scale_log2: int, count: int, sample_rate: float = 1.0) -> np.ndarray:
    """Mean of ``count`` released updates from their integer sum on the ring's grid; float64, exact up to the division.

    Args:
        total: shape (d,), signed integers, |value| < 2**53.
        scale_log2: the ring's grid is 2**-scale_log2.
        count: survivors C_t, > 0.
        sample_rate: q, the public rate of the participants' secret coins. The divisor is q C_t, so that the result is
            an unbiased estimate of the mean update (the fixed denominator of McMahan et al. 2018, arXiv:1710.06963).
    """
    if total.dtype.kind != "i" or count < 1 or not 0.0 < sample_rate <= 1.0:
        raise ContractViolation(
            f"A sum of {count} updates at rate {sample_rate!r} must be of signed integers, not {total.dtype}."
        )
    mean = total.astype(np.float64)
    np.ldexp(mean, -scale_log2, out=mean)
    mean /= sample_rate * count
    return mean


def checked_step(
    params: np.ndarray,
    momentum: np.ndarray,
    total: np.ndarray,
    scale_log2: int,
    count: int,
    lr: float,
    mu: float,
    *,
    round_index: int,
    sample_rate: float = 1.0,
    step: Callable[..., Step] = outer_step,
) -> Step:
    """The outer step from an integer sum, computed twice with different chunking and compared byte for byte.

    Both passes go through the vectors a part at a time, so that besides the result nothing as long as they exists.

    Args:
        step: :func:`outer_step`, or what a test puts in its place; called for parts of the vectors.

    Raises:
        NonDeterministicAggregation: the two derivations differ; nothing may be committed.
    """
    new_params, new_momentum = np.empty_like(params), np.empty_like(momentum)

    def derive(length: int, block: int, keep: bool) -> str:
        digests = hashlib.sha256(), hashlib.sha256()
        for start in range(0, params.size, length):
            part = slice(start, start + length)
            mean = mean_of_sum(total[part], scale_log2, count, sample_rate)
            made = step(params[part], momentum[part], mean, lr, mu, block=block)
            for digest, value in zip(digests, made, strict=True):
                digest.update(np.ascontiguousarray(value).data)
            if keep:
                new_params[part], new_momentum[part] = made
        return "".join(digest.hexdigest() for digest in digests)

    # Prime lengths share no boundary with the first pass.
    hashes = derive(_PART, BLOCK, True), derive(_PRIME_PART, 8191, False)
    if hashes[0] != hashes[1]:
        raise NonDeterministicAggregation(
            f"Round {round_index}: the same sum gave two models.",
            "Check the machine's memory and the numpy installation; the round is not committed.",
            round=round_index,
            expected_hash=hashes[0],
            got_hash=hashes[1],
        )
    return new_params, new_momentum
