"""SIGReg: keep latents close to a standard Gaussian, seen along random directions.

For unit directions a_1..a_K and latents z_1..z_N (rows) the statistic is the Epps-Pulley distance between the
empirical characteristic function of the projections and that of N(0, 1), scaled by N:

    T = N * mean over k of  integral over t of  |1/N sum_n exp(i t <a_k, z_n>) - exp(-t^2 / 2)|^2  exp(-t^2 / 2) dt

taken over t in [-t_max, t_max]. The integrand is even, so twice the half-line is computed, with the trapezoid rule.
Nothing is centred or standardised: a standardised projection hides exactly the collapse that this term is there to
prevent, and centring would let the latent frame drift by a translation. With the factor N the value is about 1 for
standard Gaussian latents at every batch size, so one weight fits all.

(Formula: Balestriero and LeCun, LeJEPA, arXiv 2511.08544; written from the formula.)

Directions are a function of (sketch seed, step) alone and come out bit for bit the same on every CPU: integers from
the counter-based Philox generator, then only IEEE operations that are exactly rounded (+ - * / sqrt) in a fixed order.
torch's and numpy's own Gaussian generators call a vendor's log and cos, whose last bit differs.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model.team import Total

_TAG = b"lensemble/sketch/1"
_LOG_2 = math.log(2.0)
# log m = 2 sum s^(2j+1) / (2j+1), s = (m-1)/(m+1); with |s| < .172 thirteen terms leave an error below 1e-21.
_LOG_TERMS = 13


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of 0 < x < 1 from exactly rounded operations only."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, mantissa * 2, mantissa)
    exponent = exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / (2 * _LOG_TERMS - 1))
    for j in range(_LOG_TERMS - 2, -1, -1):
        series = series * square
        series = series + 1.0 / (2 * j + 1)
    return 2.0 * s * series + exponent * _LOG_2


def _gaussians(bits: np.random.Philox, count: int) -> NDArray[np.float64]:
    """``count`` standard normal numbers by Marsaglia's polar method, in order of acceptance."""
    parts: list[NDArray[np.float64]] = []
    have = 0
    while have < count:
        pairs = (count - have) // 2 + 1
        raw = bits.random_raw(2 * (pairs + pairs // 3 + 8))
        uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
        u, v = uniform[0::2], uniform[1::2]
        radius = u * u + v * v
        inside = (radius > 0) & (radius < 1)
        u, v, radius = u[inside], v[inside], radius[inside]
        factor = np.sqrt(-2.0 * _log(radius) / radius)
        made = np.stack([u * factor, v * factor], axis=1).reshape(-1)
        parts.append(made)
        have += len(made)
    return np.concatenate(parts)[:count]


def _seed_bytes(sketch_seed: bytes | int) -> bytes:
    if isinstance(sketch_seed, bytes):
        return b"b" + sketch_seed
    if isinstance(sketch_seed, int) and not isinstance(sketch_seed, bool) and 0 <= sketch_seed < 2**256:
        return b"i" + sketch_seed.to_bytes(32, "little")
    raise ContractViolation(f"A sketch seed must be bytes or a number in 0..2^256-1, not {type(sketch_seed).__name__}.")


def sketch_directions(sketch_seed: bytes | int, step: int, dim: int, count: int) -> NDArray[np.float32]:
    """Random unit directions of one step.

    Args:
        sketch_seed: s_t of the round (public).
        step: number of the inner step, 0 or more.
        dim: latent dimension.
        count: K, number of directions.

    Returns:
        (dim, count) float32; the columns have length one. Equal bytes on every machine.

    Raises:
        ContractViolation: a bad seed, step or size.
    """
    if dim < 1 or count < 1 or not 0 <= step < 2**63:
        raise ContractViolation(f"No directions for dim {dim}, count {count}, step {step}.", "Use positive sizes.")
    key = hashlib.sha256(_TAG + _seed_bytes(sketch_seed) + step.to_bytes(8, "little")).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    rows = _gaussians(bits, dim * count).reshape(dim, count)
    square = np.zeros(count)
    for row in rows:  # a fixed order of addition: numpy's own sum may split it by the width of the CPU
        square = square + row * row
    return (rows / np.sqrt(square)).astype(np.float32)


def sketch_hash(sketch_seed: bytes | int, dim: int, count: int) -> bytes:
    """H(A): SHA-256 over seed, sizes and the directions of step 0, 32 bytes.

    A participant recomputes it from RoundOpen's seed; another value means that it would regularise along other
    directions than its peers.
    """
    directions = sketch_directions(sketch_seed, 0, dim, count)
    digest = hashlib.sha256(_TAG + b"/hash" + len(_seed_bytes(sketch_seed)).to_bytes(2, "little"))
    digest.update(_seed_bytes(sketch_seed) + dim.to_bytes(8, "little") + count.to_bytes(8, "little"))
    digest.update(directions.astype("<f4").tobytes())
    return digest.digest()


def epps_pulley(projections: Tensor, knots: int = 17, t_max: float = 3.0, total: Total | None = None) -> Tensor:
    """N-scaled Epps-Pulley statistic of each column.

    Args:
        projections: (N, K).
        knots: points of the trapezoid rule on [0, t_max].
        t_max: end of the integral.
        total: adds a tensor up over processes, with gradient; then the samples are those of all processes.

    Returns:
        (K,) float32, differentiable.
    """
    samples = projections.float()
    t = torch.linspace(0, t_max, knots, device=samples.device)
    gauss = torch.exp(-0.5 * t * t)
    step = t_max / (knots - 1)
    weight = 2 * step * gauss
    weight[0] *= 0.5
    weight[-1] *= 0.5
    angle = samples.unsqueeze(-1) * t
    count = len(samples)
    if total is None:
        real, imaginary = torch.cos(angle).mean(dim=0), torch.sin(angle).mean(dim=0)
    else:
        sums = total(torch.stack([torch.cos(angle).sum(dim=0), torch.sin(angle).sum(dim=0)]))
        count = int(total(torch.tensor(float(count), device=samples.device)))
        real, imaginary = sums / count
    real = real - gauss
    return count * ((real.square() + imaginary.square()) @ weight)


def sigreg(
    latents: Tensor,
    sketch_seed: bytes | int,
    step: int,
    sketch_dim: int = 64,
    knots: int = 17,
    t_max: float = 3.0,
    total: Total | None = None,
) -> Tensor:
    """SIGReg of a batch of latents along the directions of (sketch_seed, step).

    Args:
        latents: (N, d), N >= 2.
        sketch_seed: s_t of the round.
        step: number of the inner step; each step has its own directions.
        sketch_dim: number of directions.
        knots, t_max: quadrature.
        total: see :func:`epps_pulley`.

    Returns:
        Scalar float32, differentiable; about 1 for N(0, I) latents.

    Raises:
        ContractViolation: not a batch of vectors.
    """
    if latents.ndim != 2 or len(latents) < 2:
        raise ContractViolation(f"SIGReg needs latents of shape (N >= 2, d), got {tuple(latents.shape)}.")
    directions = torch.from_numpy(sketch_directions(sketch_seed, step, latents.shape[1], sketch_dim))
    with torch.autocast(latents.device.type, enabled=False):
        return epps_pulley(latents.float() @ directions.to(latents.device), knots, t_max, total).mean()
