"""Clip, noise, encode: the only way from a local update to something that may leave a participant.

Public functions on tensors: :func:`clip_delta`, :func:`add_gaussian_noise`,
:func:`privatize`. Inside a round the same steps are types, each made from the one before and from nothing else:

    clip_to_grid / zero_update -> ClippedUpdate (-> take_part) -> add_noise -> NoisedUpdate -> to_release -> Release

so that noise is never added to what was not clipped, and nothing un-noised is released; :func:`private_release` takes
them all in one pass, with the same result. All private arithmetic after
clipping is on integers of a public power-of-two grid g0 <= 2^-40 (C + 10 s): what is
released then depends on the update only through the sum "integer + integer noise", never through floating-point
rounding.

The bound is exact: the Euclidean norm of a ClippedUpdate, and of what clip_delta returns, is at most C in real numbers,
not up to float32 accuracy.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.compiled import use
from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation
from lensemble_flwr.privacy import noise_loops
from lensemble_flwr.privacy.discrete import DiscreteGaussian
from lensemble_flwr.privacy.noise import (
    BLOCK,
    Cells,
    Entropy,
    OsEntropy,
    ReplayEntropy,
    RoundedGaussian,
    Scaled,
    blocks,
    entropy_kind,
)
from lensemble_flwr.privacy.participation import SecretParticipation

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


def own_noise_std(
    guarantee: str, noise_multiplier: float, clip_norm: float, min_survivors: int, colluders: int, per_person: int = 1
) -> float:
    """Std of one participant's own noise: sigma C sqrt(p), or sigma C p / sqrt(m - k) for a central guarantee.

    The only place that knows. In the central view the m - k noises that an observer cannot know add up to sigma times
    the p C by which one person's data can move the sum; in the local view the p releases of one person compose.

    Args:
        guarantee: ``"local"`` or ``"central"``.
        noise_multiplier: sigma, > 0.
        clip_norm: C.
        min_survivors: m, the fewest updates a sum may hold.
        colluders: k, how many of those may pool their views or add no noise.
        per_person: p, how many participants may hold data of one person.

    Raises:
        ConfigError: unknown guarantee, values out of range, or a central guarantee with m - k < max(2, p) or k < 1.
    """
    _check_clip(clip_norm)
    _check_noise("noise_multiplier", noise_multiplier)
    if noise_multiplier == 0.0:
        raise ConfigError("noise_multiplier=0 adds no noise and gives no guarantee.", "Use a positive value.")
    if type(min_survivors) is not int or type(colluders) is not int or not 0 <= colluders < min_survivors:
        raise ConfigError(f"min_survivors={min_survivors!r} and colluders={colluders!r} must be integers, 0 <= k < m.")
    if type(per_person) is not int or per_person < 1:
        raise ConfigError(f"per_person={per_person!r} must be an integer of at least 1.")
    if guarantee == "local":
        return noise_multiplier * clip_norm * math.sqrt(per_person)
    if guarantee != "central":
        raise ConfigError(f"privacy.guarantee={guarantee!r} is unknown.", "Use local or central.")
    if min_survivors - colluders < 2 or colluders < 1:
        raise ConfigError(
            f"A central guarantee needs min_survivors - colluders >= 2 and colluders >= 1, not m={min_survivors}, "
            f"k={colluders}.",
            "Raise secagg.min_survivors, or use privacy.guarantee=local.",
        )
    if per_person > min_survivors - colluders:
        raise ConfigError(
            f"A sum over m={min_survivors} with k={colluders} colluders hides one person at {per_person} participants "
            "no better than updates seen one by one.",
            "Use privacy.guarantee=local.",
        )
    return noise_multiplier * clip_norm * per_person / math.sqrt(min_survivors - colluders)


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


def _norm(x: NDArray[Any]) -> tuple[float, int]:
    """Euclidean norm as (m, e), m 2^e, of shape (d,); relative error below 2^-46.

    Squares are summed in float64, by halving within blocks and exactly over blocks. e is 0 unless squares of x leave
    the range of float64; they are then taken in units of the largest coordinate.

    Raises:
        ContractViolation: NaN or infinities.
    """
    total = _sum_of_squares(x, 0)
    if 1e-200 < total < 1e200:  # False for NaN
        return math.sqrt(total), 0
    largest = float(np.max([np.abs(x[block]).max() for block in blocks(x.size)])) if x.size else 0.0  # NaN wins
    if not math.isfinite(largest):
        raise _non_finite()
    if largest == 0.0:
        return 0.0, 0
    exponent = math.frexp(largest)[1]
    return math.sqrt(_sum_of_squares(x, exponent)), exponent


def _sum_of_squares(x: NDArray[Any], exponent: int) -> float:
    """Sum of (x 2^-exponent)^2; NaN when it overflows.

    A block is padded with zeros to a power of two and its upper half added to the lower until one number is left: an
    order that is the same on every machine.
    """
    scratch = np.empty(1 << max(2, (min(x.size, BLOCK) - 1).bit_length()), np.float64)
    fast = not exponent and x.dtype != np.float16 and x.flags.c_contiguous and use(x.size, noise_loops.sum_of_squares)
    sums = []
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for block in blocks(x.size, scratch.size):
            count = block.stop - block.start
            if fast and count == scratch.size:
                sums.append(noise_loops.sum_of_squares.compiled()(x[block], scratch))
                continue
            scratch[:count] = x[block]
            scratch[count:] = 0.0
            if exponent:
                np.ldexp(scratch, -exponent, out=scratch)
            np.multiply(scratch, scratch, out=scratch)
            half = scratch.size
            while half > 1:
                half //= 2
                np.add(scratch[:half], scratch[half : 2 * half], out=scratch[:half])
            sums.append(float(scratch[0]))
    scratch[:] = 0.0
    return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan


def _within(x: NDArray[Any], bound: float) -> bool:
    """Whether the norm is at most ``bound``, in exact arithmetic."""
    mantissas, exponents = np.frexp(x.astype(np.float64))
    least = int(exponents.min())
    integers = np.ldexp(mantissas, 53).astype(np.int64).tolist()
    total = sum((v << e) ** 2 for v, e in zip(integers, (exponents - least).tolist(), strict=True))
    return Fraction(total) * Fraction(2) ** (2 * (least - 53)) <= Fraction(bound) ** 2


def _scaling(x: NDArray[Any], clip_norm: float) -> tuple[float, int] | None:
    """(f, e) such that x 2^-e f has norm at most C after any rounding by 2^-53 per coordinate; None if x has already.

    Norms above C end at C (1 - 2^-38 - d 2^-53): also a sum of squares in float64 in any order then stays below C^2.
    """
    mantissa, exponent = _norm(x)
    try:
        norm = math.ldexp(mantissa, exponent)
    except OverflowError:
        norm = math.inf
    if norm * (1.0 + _DOUBT) <= clip_norm:
        return None
    if norm <= clip_norm * (1.0 + _DOUBT) and x.size <= _EXACT_SIZE and _within(x, clip_norm):
        return None
    return clip_norm / mantissa * (1.0 - _SHRINK - x.size * 2.0**-53), exponent


def _scaled(x: NDArray[Any], scaling: tuple[float, int], out: NDArray[np.float64]) -> NDArray[np.float64]:
    out[...] = x
    if scaling[1]:
        np.ldexp(out, -scaling[1], out=out)
    out *= scaling[0]
    return out


def _toward_zero(y: NDArray[np.float64], out: NDArray[Any]) -> None:
    """Cast to a narrower float type without raising any magnitude."""
    out[...] = y
    grown = np.abs(out.astype(np.float64)) > np.abs(y)
    out[grown] = np.nextafter(out[grown], out.dtype.type(0))


# --- public functions on tensors ---


def clip_delta(delta: Tensor, clip_norm: float) -> tuple[Tensor, float]:
    """Scale ``delta`` to Euclidean norm at most C. Pure, deterministic, the same bytes on every device.

    Args:
        delta: any shape; float16, bfloat16, float32 or float64.
        clip_norm: C, > 0.

    Returns:
        A new tensor of the same shape, dtype and device, and its norm in float64, at most C. If the norm of ``delta``
        is at most C, the values are those of ``delta``; otherwise they are scaled and rounded toward zero, and the norm
        ends just below C (by about 1e-7 relative in float32, 4e-12 in float64).

    Raises:
        ConfigError: C is not positive and finite.
        ContractViolation: not such a tensor, NaN or infinities.
    """
    _check_clip(clip_norm)
    x = _as_array(delta)
    scaling = _scaling(x, clip_norm)
    if scaling is None:
        return delta.detach().clone(), _float_norm(x, clip_norm)
    import torch

    clipped = np.empty(x.size, x.dtype)
    scratch = np.empty(min(x.size, 1 << 15), np.float64)
    for block in blocks(x.size):
        y = _scaled(x[block], scaling, scratch[: block.stop - block.start])
        _toward_zero(y, clipped[block])
    if delta.dtype == torch.bfloat16:
        clipped.view(np.int32)[:] &= -65536  # bfloat16 is float32 without its low 16 bits
    return _like(delta, clipped), _float_norm(clipped, clip_norm)


def add_gaussian_noise(
    delta: Tensor, clip_norm: float, noise_multiplier: float, generator: torch.Generator | None = None
) -> Tensor:
    """Add N(0, (sigma C)^2) to every coordinate of an already clipped ``delta``.

    The sum is formed in integers of the fine grid and rounded to the dtype afterwards, so its low bits tell nothing.

    Args:
        delta: any shape; float16, bfloat16, float32 or float64. It is not clipped here: without ``clip_delta`` before,
            the noise protects nothing.
        clip_norm: C.
        noise_multiplier: sigma >= 0; 0 returns ``delta`` as it is, without any privacy.
        generator: None draws from the operating system's CSPRNG. A ``torch.Generator`` means replay: reproducible, and
            therefore no guarantee towards anybody who may know its state.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ConfigError: bad C or sigma, or the operating system's random source failed.
        ContractViolation: not such a tensor, NaN, infinities, values far above C, or another kind of generator.
    """
    _check_clip(clip_norm)
    _check_noise("noise_multiplier", noise_multiplier)
    x = _as_array(delta)
    entropy = _generator_entropy(generator)
    if noise_multiplier == 0.0:
        return delta.detach().clone()
    std = noise_multiplier * clip_norm
    grid_log2 = fine_grid_log2(clip_norm, std)
    limit = math.ldexp(1.0, min(grid_log2 + 61, 1000))
    values = np.empty(x.size, np.int64)
    scratch = np.empty(min(x.size, 1 << 15), np.float64)
    for block in blocks(x.size):
        part = scratch[: block.stop - block.start]
        part[...] = x[block]
        if not np.abs(part).max() < limit:
            if not np.isfinite(part).all():
                raise _non_finite()
            raise ContractViolation("The update is far above clip_norm.", "Call clip_delta before adding noise.")
        values[block] = np.ldexp(part, -grid_log2, out=part)
    with entropy.open() as stream:
        RoundedGaussian(math.ldexp(std, -grid_log2), clip_norm / std).add_to(values, stream)
    noised = np.empty(x.size, x.dtype)
    with np.errstate(over="ignore"):
        for block in blocks(x.size):
            noised[block] = np.ldexp(values[block].astype(np.float64), grid_log2)
    return _like(delta, noised)


def privatize(delta: Tensor, cfg: DPConfig, generator: torch.Generator | None = None) -> tuple[Tensor, float]:
    """Clip, then noise.

    Returns:
        The noised tensor and the float64 norm it was clipped to, which is private: it must not leave the site. With
        ``cfg.enabled`` False, ``delta`` itself and its norm.

    Raises:
        ConfigError, ContractViolation: see :func:`clip_delta` and :func:`add_gaussian_noise`.
    """
    if not isinstance(cfg, DPConfig):
        raise ContractViolation(f"cfg must be a DPConfig, not {type(cfg).__name__}.")
    if not cfg.enabled:
        return delta, _float_norm(_as_array(delta), math.inf)
    clipped, norm = clip_delta(delta, cfg.clip_norm)
    return add_gaussian_noise(clipped, cfg.clip_norm, cfg.noise_multiplier, generator), norm


def _float_norm(x: NDArray[Any], bound: float) -> float:
    """The norm, known to be at most ``bound``, as a float that is so too."""
    mantissa, exponent = _norm(x)
    try:
        return min(math.ldexp(mantissa, exponent), bound)
    except OverflowError:
        return bound


def _as_array(delta: Tensor) -> NDArray[Any]:
    """A flat array on the CPU, never written to: float16, float32 or float64 (bfloat16 as float32)."""
    import torch

    if not isinstance(delta, torch.Tensor):
        raise ContractViolation(f"The update must be a torch.Tensor, not {type(delta).__name__}.")
    if delta.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ContractViolation(f"The update must be of a floating-point type, not {delta.dtype}.")
    flat = delta.detach().to("cpu").reshape(-1).contiguous()
    return (flat.float() if delta.dtype == torch.bfloat16 else flat).numpy()


def _like(delta: Tensor, values: NDArray[Any]) -> Tensor:
    import torch

    return torch.from_numpy(values).to(delta.dtype).reshape(delta.shape).to(delta.device)


def _generator_entropy(generator: torch.Generator | None) -> Entropy:
    if generator is None:
        return OsEntropy()
    import torch

    if not isinstance(generator, torch.Generator):
        raise ContractViolation(f"generator must be None or a torch.Generator, not {type(generator).__name__}.")
    seed = torch.randint(0, 256, (32,), generator=generator, device=generator.device, dtype=torch.uint8)
    return ReplayEntropy(bytes(seed.tolist()))


# --- the types of the release path ---


class _Sealed:
    """Made only by this module, never copied or pickled: a copy could be noised twice, which costs twice."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__:
            raise ContractViolation(f"{cls.__name__} cannot extend a type of the release path.")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ContractViolation(f"{type(self).__name__} cannot be changed.")

    def __delattr__(self, name: str) -> NoReturn:
        raise ContractViolation(f"{type(self).__name__} cannot be changed.")

    def __reduce__(self) -> NoReturn:
        raise ContractViolation(f"{type(self).__name__} can be neither copied nor pickled.")

    def __repr__(self) -> str:  # never the values
        return f"<{type(self).__name__}>"

    def _fill(self, key: object, **fields: object) -> None:
        if key is not _PASS:
            raise ContractViolation(
                f"{type(self).__name__} cannot be made directly.",
                "Use clip_to_grid or zero_update, then add_noise, then to_release.",
            )
        for name, value in fields.items():
            object.__setattr__(self, name, value)


class ClippedUpdate(_Sealed):
    """Integers k, the update in steps of g0 = 2^g0_log2, with norm of k g0 at most C. Used up by :func:`add_noise`."""

    __slots__ = ("_k", "clip_norm", "dimension", "g0_log2", "noise_std")
    _k: NDArray[np.int64] | None
    clip_norm: float
    noise_std: float
    g0_log2: int
    dimension: int

    def __init__(self, key: object = None, **fields: object) -> None:
        self._fill(key, **fields)

    @property
    def k(self) -> NDArray[np.int64]:
        """int64, shape (d,), read-only, in steps of the fine grid. Private.

        Raises:
            ContractViolation: the update was noised; what it was is gone.
        """
        if self._k is None:
            raise ContractViolation("This update was noised and is used up.")
        return self._k


class NoisedUpdate(_Sealed):
    """Integers k + rint(N / g0), or multiples of the ring step from :func:`add_discrete_noise`.

    ``entropy`` is "csprng", "replay", or "none" if the std was 0.
    """

    __slots__ = ("clip_norm", "dimension", "entropy", "g0_log2", "noise_std", "v")
    v: NDArray[np.int64]
    clip_norm: float
    noise_std: float
    g0_log2: int
    dimension: int
    entropy: str

    def __init__(self, key: object = None, **fields: object) -> None:
        self._fill(key, **fields)


@dataclass(frozen=True)
class RingGrid:
    """What a release is counted in: steps of 2^-scale_log2, at most qmax of them."""

    scale_log2: int
    qmax: int

    @property
    def step(self) -> float:
        return math.ldexp(1.0, -self.scale_log2)


class Release(_Sealed):
    """What may be masked and sent: integers on the ring grid.

    Attributes:
        q: int32, shape (d,), read-only, |q| <= ring.qmax.
        ring: the grid.
        private: whether noise was added.
        entropy: "csprng", "replay" or "none".
        claimable: whether a privacy claim may rest on it: noise from the operating system's CSPRNG.
        dimension: d.
    """

    __slots__ = ("dimension", "entropy", "private", "q", "ring")
    q: NDArray[np.int32]
    ring: RingGrid
    private: bool
    entropy: str
    dimension: int

    def __init__(self, key: object = None, **fields: object) -> None:
        self._fill(key, **fields)

    @property
    def claimable(self) -> bool:
        return self.private and self.entropy == "csprng"

    def to_bytes(self) -> bytes:
        """The release as stored at the site, 4 bytes a coordinate. Keep its SHA-256 with the ledger."""
        return b"".join(self.pieces())

    def pieces(self) -> tuple[bytes, memoryview]:
        """What :meth:`to_bytes` joins, without a copy of q."""
        head = _STORED.pack(
            _MAGIC, _ENTROPIES.index(self.entropy), self.private, self.ring.scale_log2, self.ring.qmax, self.dimension
        )
        return head, np.ascontiguousarray(self.q, "<i4").view(np.uint8).data

    @staticmethod
    def from_bytes(stored: bytes, sha256: bytes) -> Release:
        """A stored release again, for a retry that must send the same numbers.

        Args:
            stored: bytes of :meth:`to_bytes`.
            sha256: their hash as recorded in the ledger, so that only what was released there can be released again.

        Raises:
            ArtifactError: another hash, or damaged.
        """
        if not hmac.compare_digest(hashlib.sha256(stored).digest(), bytes(sha256)):
            raise ArtifactError("The stored release is not the one that the ledger recorded.")
        try:
            magic, kind, private, scale_log2, qmax, dimension = _STORED.unpack_from(stored)
            q = np.frombuffer(stored, "<i4", offset=_STORED.size).astype(np.int32, copy=False)
            if magic != _MAGIC or q.size != dimension or private > 1 or _outside(q, qmax):
                raise ValueError("content")
            entropy = _ENTROPIES[kind]
        except (struct.error, ValueError, IndexError) as error:
            raise ArtifactError("The stored release is damaged.") from error
        return _release(q, RingGrid(scale_log2, qmax), bool(private), entropy)


_STORED = struct.Struct("<4sBBiQQ")
_MAGIC = b"LQR1"
_ENTROPIES = ("none", "csprng", "replay")


def clip_to_grid(delta: NDArray[Any], clip_norm: float, noise_std: float) -> ClippedUpdate:
    """Clip to C and truncate onto the fine grid, so that the norm of the result is at most C exactly.

    Args:
        delta: float32 or float64, shape (d,).
        clip_norm: C.
        noise_std: s of the noise that will be added (:func:`own_noise_std`); it fixes the grid.

    Raises:
        ConfigError: C or s out of range.
        ContractViolation: wrong shape or dtype; ``reason="non_finite"`` for NaN and infinities.
    """
    grid_log2 = fine_grid_log2(clip_norm, noise_std)
    truncation = _Truncation(_check_vector(delta), clip_norm, grid_log2)
    k = np.empty(delta.size, np.int64)
    for block in blocks(k.size):
        truncation.write(block, k[block])
    truncation.check()
    return _clipped(k, clip_norm, noise_std, grid_log2)


class _Truncation:
    """An update in steps of the fine grid, truncated toward zero, a block at a time."""

    def __init__(self, x: NDArray[Any], clip_norm: float, grid_log2: int) -> None:
        self._x, self._clip_norm, self._grid_log2 = x, clip_norm, grid_log2
        self._factor, self._exponent = _scaling(x, clip_norm) or (1.0, 0)
        self._inverse_step = math.ldexp(1.0, -grid_log2)
        self._scratch = np.empty(BLOCK, np.float64)
        self._sums: list[float] = []
        self._fast = not self._exponent and x.flags.c_contiguous and use(x.size, noise_loops.truncate)

    def write(self, block: slice, out: NDArray[np.int64]) -> None:
        """The integers of one block of at most BLOCK coordinates; each block once."""
        x = self._x[block]
        if self._fast:
            truncate = noise_loops.truncate.compiled()
            self._sums.append(truncate(x, self._factor, self._inverse_step, self._scratch, out))
            return
        y = _scaled(x, (self._factor, self._exponent), self._scratch[: x.size])
        np.ldexp(y, -self._grid_log2, out=y)
        np.trunc(y, out=y)
        out[...] = y
        self._sums.append(float(np.dot(y, y)))

    @property
    def scaled(self) -> Scaled | None:
        """The whole for the compiled loop that also draws, which then takes the place of :meth:`write`."""
        return Scaled(self._x, self._factor, self._inverse_step, self._sums) if self._fast else None

    def check(self) -> None:
        """Raises ContractViolation if the blocks together are longer than C. Ends the use of this object."""
        self._scratch[:] = 0.0
        norm = math.ldexp(math.sqrt(math.fsum(self._sums)), self._grid_log2)
        if not norm <= self._clip_norm * (1.0 + _DOUBT):
            raise ContractViolation("INV-DP-BOUND: a clipped update is longer than C.", "This is a defect; report it.")


def zero_update(dimension: int, clip_norm: float, noise_std: float) -> ClippedUpdate:
    """The update of a participant that has nothing to say, or must not say it: zeros, noised like any other.

    Raises:
        ConfigError: C or s out of range.
        ContractViolation: ``dimension`` is no positive integer.
    """
    grid_log2 = fine_grid_log2(clip_norm, noise_std)
    if type(dimension) is not int or dimension < 1:
        raise ContractViolation(f"An update has a positive number of coordinates, not {dimension!r}.")
    return _clipped(np.zeros(dimension, np.int64), clip_norm, noise_std, grid_log2)


def take_part(update: ClippedUpdate, participation: SecretParticipation, entropy: Entropy) -> ClippedUpdate:
    """Throw the secret coin: the update with probability q exactly, zero otherwise. Nobody learns which.

    The coin is a uniform integer of at least 64 bits, compared with q's exact binary value. It multiplies every
    coordinate, so the work is the same either way, and it is kept nowhere. At q = 1 it always shows the update.

    Args:
        update: from :func:`clip_to_grid` or :func:`zero_update`; used up.
        participation: the public rate.
        entropy: one fresh key of it is used.

    Raises:
        ConfigError: the operating system's random source failed; the update is untouched.
        ContractViolation: not a ClippedUpdate, one that is used up, no rate, or no source of entropy.
    """
    if type(update) is not ClippedUpdate or type(participation) is not SecretParticipation:
        raise ContractViolation("Only a ClippedUpdate takes part, at the rate of a SecretParticipation.")
    entropy_kind(entropy)
    values = update.k
    below, bits = participation.threshold
    with entropy.open() as stream:
        object.__setattr__(update, "_k", None)
        values.flags.writeable = True
        values *= int(stream.integer(bits) < below)
    return _clipped(values, update.clip_norm, update.noise_std, update.g0_log2)


def add_noise(update: ClippedUpdate, std: float, entropy: Entropy) -> NoisedUpdate:
    """Add rint(N / g0), N ~ N(0, std^2), to every coordinate, and use the update up.

    Args:
        update: from :func:`clip_to_grid` or :func:`zero_update`; a second call with it is refused.
        std: the ``noise_std`` that it was clipped for. 0 adds nothing; the result is then not private.
        entropy: :class:`OsEntropy` (one fresh key for this draw) or :class:`ReplayEntropy`.

    Raises:
        ConfigError: the operating system's random source failed; the update is untouched.
        ContractViolation: not a ClippedUpdate, one that is used up, another std, or no source of entropy.
    """
    values = _open_update(update, std)
    kind = entropy_kind(entropy)
    if std > 0.0:
        steps = math.ldexp(std, -update.g0_log2)
        with entropy.open() as stream:
            _take(update, values)
            RoundedGaussian(steps, update.clip_norm / std).add_to(values, stream)
            values.flags.writeable = False
    else:
        object.__setattr__(update, "_k", None)
        kind = "none"
    return _noised(update, values, kind)


def add_discrete_noise(update: ClippedUpdate, std: float, entropy: Entropy, scale_log2: int) -> NoisedUpdate:
    """Replace every coordinate by a discrete Gaussian on the ring grid 2^-scale_log2, centred at it; use the update up.

    :func:`to_release` on the same grid then has nothing left to round.

    Args:
        update: from :func:`clip_to_grid` or :func:`zero_update`; a second call with it is refused.
        std: the ``noise_std`` that it was clipped for, > 0: the parameter s of the discrete Gaussian.
        entropy: :class:`OsEntropy` (one fresh key for this draw) or :class:`ReplayEntropy`.
        scale_log2: the ring's scale.

    Raises:
        ConfigError: the operating system's random source failed; the update is untouched.
        ContractViolation: not a ClippedUpdate, one that is used up, another std, no source of entropy, or a grid on
            which s is not between 0.5 and 2048 steps.
    """
    values = _open_update(update, std)
    kind = entropy_kind(entropy)
    ratio = update.clip_norm / std if std > 0.0 else 0.0
    noise = DiscreteGaussian(math.ldexp(std, scale_log2), -scale_log2 - update.g0_log2, ratio)
    with entropy.open() as stream:
        _take(update, values)
        noise.move(values, stream)
        values.flags.writeable = False
    return _noised(update, values, kind)


def _open_update(update: ClippedUpdate, std: float) -> NDArray[np.int64]:
    if type(update) is not ClippedUpdate:
        raise ContractViolation(f"Noise is added to a ClippedUpdate only, not to {type(update).__name__}.")
    values = update.k
    if std != update.noise_std:
        raise ContractViolation(f"The update was clipped for a noise std of {update.noise_std!r}, not {std!r}.")
    return values


def _take(update: ClippedUpdate, values: NDArray[np.int64]) -> None:
    object.__setattr__(update, "_k", None)  # from here on there is no way back to the exact values
    values.flags.writeable = True


def _noised(update: ClippedUpdate, values: NDArray[np.int64], kind: str) -> NoisedUpdate:
    return NoisedUpdate(
        _PASS,
        v=values,
        clip_norm=update.clip_norm,
        noise_std=update.noise_std,
        g0_log2=update.g0_log2,
        dimension=values.size,
        entropy=kind,
    )


def to_release(update: NoisedUpdate, scale_log2: int, qmax: int) -> Release:
    """Onto the ring grid g = 2^-scale_log2: q = floor(v g0/g + 1/2), clamped to +-qmax. Exact integer arithmetic.

    Halves go up, not to even: all cells are then equally wide and the sum over participants has the clean law on which
    the central claim rests (docs/privacy.md, section 5). Post-processing of a noised value, so it may be repeated.

    Args:
        update: from :func:`add_noise`.
        scale_log2: the ring's scale.
        qmax: its largest value of one participant, below 2^31.

    Raises:
        ConfigError: the ring does not hold C + 10 s.
        ContractViolation: not a NoisedUpdate.
    """
    if type(update) is not NoisedUpdate:
        raise ContractViolation(f"Only a NoisedUpdate becomes a release, not a {type(update).__name__}.")
    ring = _check_ring(scale_log2, qmax)
    cells = _ring_cells(ring, update.clip_norm, update.noise_std, update.g0_log2)
    q = np.empty(update.dimension, np.int32)
    for block in blocks(q.size):
        q[block] = cells(update.v[block])
    return _release(q, ring, update.entropy != "none", update.entropy)


def _ring_cells(ring: RingGrid, clip_norm: float, noise_std: float, g0_log2: int) -> Cells:
    """g/g0 is at least 2^9: g >= 2^-31 (C + 10 s), g0 <= 2^-40 (C + 10 s)."""
    if math.ldexp(ring.qmax, -ring.scale_log2) < (clip_norm + TAIL * noise_std) * (1.0 - 2.0**-50):
        raise ConfigError(
            f"The ring's range qmax * 2^-{ring.scale_log2} does not hold C + {TAIL:g} s.",
            "Lower its scale or use more bits.",
        )
    return Cells(-ring.scale_log2 - g0_log2, ring.qmax)


def private_release(
    delta: NDArray[Any] | None,
    dimension: int,
    clip_norm: float,
    noise_std: float,
    entropy: Entropy,
    scale_log2: int,
    qmax: int,
) -> Release:
    """:func:`clip_to_grid` (:func:`zero_update` for None), :func:`add_noise` and :func:`to_release` in one pass.

    The same integers as by the three steps, but neither the clipped nor the noised vector ever exists: beside update
    and release it takes a few blocks, and about 0.4 bytes a coordinate for what the sampler draws a second time.

    Args:
        delta: float32 or float64, shape (d,), or None for the zero update.
        dimension: d.
        clip_norm: C.
        noise_std: s, > 0.
        entropy, scale_log2, qmax: see :func:`add_noise` and :func:`to_release`.

    Raises:
        ConfigError: C, s or the ring out of range, or the operating system's random source failed.
        ContractViolation: wrong shape or dtype, no source of entropy; ``reason="non_finite"`` for NaN and infinities.
    """
    kind, ring = entropy_kind(entropy), _check_ring(scale_log2, qmax)
    grid_log2 = fine_grid_log2(clip_norm, noise_std)
    if noise_std == 0.0:
        raise ConfigError("noise_std=0 adds no noise and gives no guarantee.", "Use a positive value.")
    if type(dimension) is not int or dimension < 1:
        raise ContractViolation(f"An update has a positive number of coordinates, not {dimension!r}.")
    cells = _ring_cells(ring, clip_norm, noise_std, grid_log2)
    truncation = None
    if delta is not None:
        if _check_vector(delta).size != dimension:
            raise ContractViolation(f"The update has {delta.size} coordinates, not {dimension}.")
        truncation = _Truncation(delta, clip_norm, grid_log2)
    q = np.empty(dimension, np.int32)
    with entropy.open() as stream:
        sampler = RoundedGaussian(math.ldexp(noise_std, -grid_log2), clip_norm / noise_std)
        if truncation is None:
            sampler.stream_to(lambda block, part: part.fill(0), cells, q, stream)
        else:
            sampler.stream_to(truncation.write, cells, q, stream, truncation.scaled)
    if truncation is not None:
        truncation.check()
    return _release(q, ring, True, kind)


def encode_exact(
    delta: NDArray[Any], scale_log2: int, qmax: int, entropy: Entropy, value_range: float | None = None
) -> Release:
    """The path without privacy: stochastic rounding onto the ring grid, unbiased, nothing clipped.

    Args:
        delta: float32 or float64, shape (d,).
        scale_log2: the ring's scale.
        qmax: its largest value of one participant.
        entropy: for the rounding.
        value_range: public bound on |x|; None means the ring's whole range, qmax * 2^-scale_log2.

    Raises:
        ConfigError: a coordinate is over the range, the range is over the ring's, or the random source failed.
        ContractViolation: wrong shape or dtype, NaN or infinities.
    """
    ring = _check_ring(scale_log2, qmax)
    entropy_kind(entropy)
    limit = math.ldexp(qmax, -scale_log2)
    if value_range is not None:
        if not (_is_number(value_range) and 0.0 < value_range <= limit):
            raise ConfigError(f"The range {value_range!r} must be positive and at most the ring's, {limit!r}.")
        limit = value_range
    x = _check_vector(delta)
    q = np.empty(x.size, np.int32)
    fast = x.flags.c_contiguous and use(x.size, noise_loops.round_stochastically)
    with entropy.open() as stream:
        for block in blocks(x.size):
            words = stream.words(block.stop - block.start)
            if fast:
                scale = math.ldexp(1.0, scale_log2)
                if not noise_loops.round_stochastically.compiled()(x[block], scale, limit, words, q[block]):
                    continue
            y = x[block].astype(np.float64)
            if not np.abs(y).max() <= limit:
                if not np.isfinite(y).all():
                    raise _non_finite()
                raise ConfigError(
                    f"The update has a coordinate over the public range {limit:g}.",
                    "Raise secagg.range.",
                    reason="range",
                )
            np.ldexp(y, scale_log2, out=y)
            below = np.floor(y)
            y -= below
            below += _uniform(words) < y
            q[block] = below
    return _release(q, ring, False, "none")


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check_vector(delta: NDArray[Any]) -> NDArray[Any]:
    if not isinstance(delta, np.ndarray) or delta.dtype not in (np.float32, np.float64):
        kind = delta.dtype if isinstance(delta, np.ndarray) else type(delta).__name__
        raise ContractViolation(f"The update must be a float32 or float64 array, not {kind}.")
    if delta.ndim != 1 or delta.size == 0:
        raise ContractViolation(f"The update must have shape (d,) with d >= 1, not {delta.shape}.")
    return delta


def _check_ring(scale_log2: object, qmax: object) -> RingGrid:
    if type(scale_log2) is not int or type(qmax) is not int or not (1 <= qmax < 2**31 and abs(scale_log2) <= 1000):
        raise ConfigError(f"scale_log2={scale_log2!r}, qmax={qmax!r} is no ring grid.")
    return RingGrid(scale_log2, qmax)


def _outside(q: NDArray[np.int32], qmax: int) -> bool:
    return bool(q.size) and bool(q.max() > qmax or q.min() < -qmax)


def _clipped(k: NDArray[np.int64], clip_norm: float, noise_std: float, g0_log2: int) -> ClippedUpdate:
    k.flags.writeable = False
    return ClippedUpdate(
        _PASS, _k=k, clip_norm=float(clip_norm), noise_std=float(noise_std), g0_log2=g0_log2, dimension=k.size
    )


def _release(q: NDArray[np.int32], ring: RingGrid, private: bool, entropy: str) -> Release:
    q.flags.writeable = False
    return Release(_PASS, q=q, ring=ring, private=private, entropy=entropy, dimension=q.size)
