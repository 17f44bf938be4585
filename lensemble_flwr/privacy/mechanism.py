"""Clip, noise, encode: the only way from a local update to something that may leave a participant.

Public functions on tensors, with the signatures of seed RFC-0012: :func:`clip_delta`, :func:`add_gaussian_noise`,
:func:`privatize`. Inside a round the same steps are types, each made from the one before and from nothing else:

    clip_to_grid / zero_update -> ClippedUpdate -> add_noise -> NoisedUpdate -> to_release -> Release

so that noise is never added to what was not clipped, and nothing un-noised is released. All private arithmetic after
clipping is on integers of a public power-of-two grid g0 <= 2^-40 (C + 10 s) (design: decisions 10, 11): what is
released then depends on the update only through the sum "integer + integer noise", never through floating-point
rounding.

The bound is exact: the Euclidean norm of a ClippedUpdate, and of what clip_delta returns, is at most C in real numbers,
not up to float32 accuracy.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation
from lensemble_flwr.privacy.noise import (
    MAX_STD,
    MIN_STD,
    Entropy,
    Keystream,
    OsEntropy,
    ReplayEntropy,
    RoundedGaussian,
    blocks,
    entropy_kind,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TAIL = 10.0
"""A ring holds at least C + TAIL * s per participant and coordinate."""

_FINE_LOG2 = -40  # g0 <= 2^-40 (C + 10 s)
_LEAST_STEPS_LOG2 = 20  # and g0 <= 2^-20 s, for noise that is tiny beside C
_DOUBT = 2.0**-40  # relative; computed norms are within 2^-46 of the true ones
_SHRINK = 2.0**-38  # relative; by this much more than necessary a long vector is scaled, so that rounding cannot matter
_EXACT_SIZE = 1 << 16  # up to this many coordinates a norm within _DOUBT of C is decided in exact arithmetic
_PASS = object()  # only this module can make the types below


# --- configuration ---


@dataclass(frozen=True)
class DPConfig:
    """Update-level privacy parameters of one participant.

    Args:
        clip_norm: C, > 0.
        noise_multiplier: sigma, noise std = sigma * C; >= 0, and 0 means no noise, which is not private.
        target_epsilon: > 0.
        target_delta: between 0 and 1; below 1 / participants by convention.
        enabled: False means that nothing is clipped or noised and that the run is recorded as non-private.

    Raises:
        ConfigError: a value of the wrong type, not finite, or out of range.
    """

    clip_norm: float
    noise_multiplier: float
    target_epsilon: float
    target_delta: float
    enabled: bool = True

    def __post_init__(self) -> None:
        _check_clip(self.clip_norm)
        _check_noise("noise_multiplier", self.noise_multiplier)
        if not (_is_number(self.target_epsilon) and 0.0 < self.target_epsilon < math.inf):
            raise ConfigError(f"target_epsilon={self.target_epsilon!r} must be positive and finite.")
        if not (_is_number(self.target_delta) and 0.0 < self.target_delta < 1.0):
            raise ConfigError(f"target_delta={self.target_delta!r} must lie between 0 and 1.")
        if type(self.enabled) is not bool:
            raise ConfigError(f"enabled={self.enabled!r} must be true or false.")


def own_noise_std(guarantee: str, noise_multiplier: float, clip_norm: float, min_survivors: int, colluders: int) -> float:
    """Std of one participant's own noise: sigma C, or sigma C / sqrt(m - k) for a central guarantee (decision 7).

    The only place that knows. In the central view the m - k noises that an observer cannot know then add up to sigma C.

    Args:
        guarantee: ``"local"`` or ``"central"``.
        noise_multiplier: sigma, > 0.
        clip_norm: C.
        min_survivors: m, the fewest updates a sum may hold.
        colluders: k, how many of those may pool their views or add no noise.

    Raises:
        ConfigError: unknown guarantee, values out of range, or a central guarantee with m - k < 2 or k < 1.
    """
    _check_clip(clip_norm)
    _check_noise("noise_multiplier", noise_multiplier)
    if noise_multiplier == 0.0:
        raise ConfigError("noise_multiplier=0 adds no noise and gives no guarantee.", "Use a positive value.")
    if type(min_survivors) is not int or type(colluders) is not int or not 0 <= colluders < min_survivors:
        raise ConfigError(f"min_survivors={min_survivors!r} and colluders={colluders!r} must be integers, 0 <= k < m.")
    if guarantee == "local":
        return noise_multiplier * clip_norm
    if guarantee != "central":
        raise ConfigError(f"privacy.guarantee={guarantee!r} is unknown.", "Use local or central.")
    if min_survivors - colluders < 2 or colluders < 1:
        raise ConfigError(
            f"A central guarantee needs min_survivors - colluders >= 2 and colluders >= 1, not m={min_survivors}, "
            f"k={colluders}.",
            "Raise secagg.min_survivors, or use privacy.guarantee=local.",
        )
    return noise_multiplier * clip_norm / math.sqrt(min_survivors - colluders)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_clip(clip_norm: object) -> None:
    if not (_is_number(clip_norm) and 1e-100 <= clip_norm <= 1e100):  # type: ignore[operator]
        raise ConfigError(f"clip_norm={clip_norm!r} must be a positive finite number (between 1e-100 and 1e100).")


def _check_noise(name: str, value: object) -> None:
    if not (_is_number(value) and 0.0 <= value <= 1e100):  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r} must be a finite number of at least 0 (and at most 1e100).")


# --- the grid ---


def fine_grid_log2(clip_norm: float, noise_std: float) -> int:
    """log2 of the fine grid g0: the largest power of two <= 2^-40 (C + 10 s) and, for tiny noise, <= 2^-20 s.

    Raises:
        ConfigError: values out of range, or noise so small beside C (below about 2^-41 C) that no grid holds both.
    """
    _check_clip(clip_norm)
    _check_noise("noise_std", noise_std)
    exponent = _floor_log2(Fraction(clip_norm) + 10 * Fraction(noise_std)) + _FINE_LOG2
    if noise_std > 0.0:
        exponent = min(exponent, _floor_log2(Fraction(noise_std)) - _LEAST_STEPS_LOG2)
    if _floor_log2(Fraction(clip_norm)) - exponent > 60:
        raise ConfigError(
            f"A noise std of {noise_std!r} is too small beside clip_norm={clip_norm!r}.", "Raise the noise multiplier."
        )
    return exponent


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


# --- norms and clipping ---


def _non_finite() -> ContractViolation:
    return ContractViolation(
        "The update holds NaN or infinities.", "Release the zero update instead.", reason="non_finite"
    )


def _norm(x: NDArray[Any]) -> float:
    """Euclidean norm, shape (d,), relative error below 2^-46: pairwise sums of squares in float64 within blocks, exact
    summation over blocks. Raises ContractViolation for NaN and infinities."""
    total = _sum_of_squares(x, 1.0)
    if 1e-200 < total < 1e200 or (total == 0.0 and x.dtype.itemsize <= 4):
        return math.sqrt(total)
    largest = max((float(np.abs(x[b]).max()) for b in blocks(x.size)), default=0.0)  # NaN is the maximum
    if not math.isfinite(largest):
        raise _non_finite()
    if largest == 0.0:
        return 0.0
    exponent = math.frexp(largest)[1]  # squares would leave the range of float64: in units of the largest instead
    try:
        return math.ldexp(math.sqrt(_sum_of_squares(x, exponent)), exponent)
    except OverflowError:
        return math.inf


def _sum_of_squares(x: NDArray[Any], exponent: float) -> float:
    scratch = np.empty(min(x.size, 1 << 15), np.float64)
    sums = []
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks(x.size):
            part = scratch[: block.stop - block.start]
            part[...] = x[block]
            if exponent != 1.0:
                np.ldexp(part, -int(exponent), out=part)
            np.multiply(part, part, out=part)
            sums.append(float(np.add.reduce(part)))
    return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
