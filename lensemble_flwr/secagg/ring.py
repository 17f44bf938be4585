"""Fixed point in Z/2^b: how real vectors become ring elements that add up exactly.

A round has one public :class:`RingParams`. A participant's value x becomes q = round(x * 2^scale_log2), |q| <= qmax,
and qmax = floor((2^(b-1) - 1) / roster), so the sum over any subset of the roster is in [-2^(b-1), 2^(b-1)) and the
integer sum can be read off the ring sum: overflow is impossible for honest participants, not merely unlikely.
Scale and range are public and the same for everybody; a scale of one's own would leak and would not add up.

Ring elements live in *lanes*: little-endian uint16 for b = 16, uint32 for b = 32, and uint32 for b = 24, whose upper
byte is cleared (Z/2^24 is a quotient of Z/2^32, so adding lanes and reducing commute) and is not sent.

The vector that is masked and sent is longer than the payload::

    [1 .. 1 | payload of segment 0] [1 .. 1 | payload of segment 1] ... [checksum]

`sentinels` ones open every segment of at most SEGMENT lanes: after unmasking each must equal the number of survivors.
`tail_lanes` lanes at the end hold one integer modulo 2^tail_bits, see :mod:`.checksum`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import keystream
from lensemble_flwr.secagg.entropy import Entropy, draw

SEGMENT = keystream.SEGMENT
TAIL_MIN_BITS = 64
MAX_ROSTER = 1024  # complete graph: every member has a key and an envelope for every other
MAX_DIMENSION = 1 << 40
MAX_SCALE_LOG2 = 512  # scaling any float32, and any float64 of use, stays exact and finite

_BLOCK = 1 << 16  # coordinates handled at a time, so that temporaries stay in cache

Lanes = npt.NDArray[np.unsignedinteger[Any]]


def _refuse(message: str, remediation: str = "") -> SecureAggregationError:
    return SecureAggregationError(message, remediation, cause="policy_violation")


def _malformed(message: str, remediation: str = "") -> SecureAggregationError:
    return SecureAggregationError(message, remediation, cause="malformed_update")


@dataclass(frozen=True)
class RingParams:
    """The public arithmetic of one round; part of RoundOpen and of the transcript.

    Args:
        bits: 16, 24 or 32.
        roster: number of identities in the roster, survivors or not; fixes `qmax`.
        scale_log2: one unit of the payload is 2^scale_log2 ring steps.
        dimension: payload length d.

    Raises:
        SecureAggregationError: policy_violation, naming the value that is out of range.
    """

    bits: int
    roster: int
    scale_log2: int
    dimension: int

    def __post_init__(self) -> None:
        for name in ("bits", "roster", "scale_log2", "dimension"):
            if type(getattr(self, name)) is not int:
                raise _refuse(f"Ring parameter {name} must be an integer, not {type(getattr(self, name)).__name__}.")
        if self.bits not in (16, 24, 32):
            raise _refuse(f"A ring of {self.bits} bits is not supported.", "Use 16, 24 or 32.")
        if not 2 <= self.roster <= MAX_ROSTER:
            raise _refuse(f"A roster of {self.roster} is outside 2..{MAX_ROSTER}.")
        if not 1 <= self.dimension <= MAX_DIMENSION:
            raise _refuse(f"A payload of {self.dimension} coordinates is outside 1..2^40.")
        if abs(self.scale_log2) > MAX_SCALE_LOG2:
            raise _refuse(f"scale_log2 = {self.scale_log2} is outside -{MAX_SCALE_LOG2}..{MAX_SCALE_LOG2}.")

    @classmethod
    def for_range(cls, bits: int, roster: int, bound: float, dimension: int) -> RingParams:
        """The finest power-of-two scale at which every |x| <= bound fits: bound * 2^scale_log2 <= qmax, exactly."""
        if not (isinstance(bound, (int, float)) and math.isfinite(bound) and bound > 0):
            raise _refuse("The range of a ring must be a positive finite number.")
        room = Fraction(cls(bits, roster, 0, dimension).qmax) / Fraction(bound)
        scale_log2 = room.numerator.bit_length() - room.denominator.bit_length()
        if Fraction(2) ** scale_log2 > room:
            scale_log2 -= 1
        return cls(bits, roster, scale_log2, dimension)

    @property
    def qmax(self) -> int:
        """Largest |q| of one participant."""
        return (2 ** (self.bits - 1) - 1) // self.roster

    @property
    def grid(self) -> float:
        """Size of one ring step in units of the payload."""
        return math.ldexp(1.0, -self.scale_log2)

    @property
    def lane(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.bits == 16 else "<u4")

    @property
    def sentinels(self) -> int:
        """Sentinel lanes per segment: at least 32 bits of them."""
        return 1 if self.bits == 32 else 2

    @property
    def segments(self) -> int:
        return -(-self.dimension // (SEGMENT - self.sentinels))

    @property
    def body(self) -> int:
        """Lanes before the tail: sentinels and payload."""
        return self.dimension + self.sentinels * self.segments

    @property
    def tail_lanes(self) -> int:
        return -(-TAIL_MIN_BITS // self.bits)

    @property
    def tail_bits(self) -> int:
        return self.tail_lanes * self.bits

    @property
    def padded(self) -> int:
        """Lanes of the masked vector."""
        return self.body + self.tail_lanes

    @property
    def wire_bytes(self) -> int:
        """Bytes of the masked vector on the wire."""
        return self.padded * (self.bits // 8)


def check_array(array: object, length: int, dtypes: tuple[Any, ...], what: str) -> None:
    """Refuse anything but a C-contiguous 1-D array of `length` with one of these dtypes (byte order included).

    Raises:
        SecureAggregationError: malformed_update.
    """
    if not isinstance(array, np.ndarray):
        raise _malformed(f"{what} must be a numpy array, not {type(array).__name__}.")
    if array.dtype not in dtypes:
        raise _malformed(
            f"{what} has dtype {array.dtype.str}; expected {' or '.join(np.dtype(d).str for d in dtypes)}."
        )
    if array.shape != (length,):
        raise _malformed(f"{what} has shape {array.shape}; expected ({length},).")
    if not array.flags.c_contiguous:
        raise _malformed(f"{what} must be contiguous.")


def check_lanes(lanes: Lanes, ring: RingParams) -> None:
    """Refuse lanes of a 24-bit ring with bits above it. Raises SecureAggregationError: malformed_update."""
    if ring.bits == 24 and lanes.size and lanes.max() >> 24:
        raise _malformed("A lane has a value outside its ring.")


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def encode(
    x: npt.NDArray[np.floating[Any]],
    ring: RingParams,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    entropy: Entropy | None = None,
) -> Lanes:
    """Payload lanes of q = round(x * 2^scale_log2).

    Args:
        x: float32 or float64, shape (d,), in units of the payload.
        ring: the round's ring.
        rounding: ``"nearest"`` (half to even) or ``"stochastic"`` (unbiased).
        entropy: ``entropy(k)`` gives k random bytes, 8 are used per coordinate; None expands a fresh key of the
            operating system's CSPRNG. Only read for stochastic rounding.

    Returns:
        uint lanes, shape (d,).

    Raises:
        SecureAggregationError: malformed_update for NaN, infinities, values over the range, a wrong shape or dtype.
            The text never holds a value of x.
    """
    check_array(x, ring.dimension, (np.dtype("=f4"), np.dtype("=f8")), "The update")
    if rounding not in ("nearest", "stochastic"):
        raise _refuse(f"Unknown rounding {rounding!r}.", "Use nearest or stochastic.")
    source = (entropy or _fresh_stream()) if rounding == "stochastic" else None
    scale = math.ldexp(1.0, ring.scale_log2)
    out = np.empty(ring.dimension, ring.lane)
    for block in _blocks(ring.dimension):
        with np.errstate(over="ignore"):
            scaled = x[block].astype(np.float64) * scale  # exact: the scale is a power of two
        if source is None:
            rounded = np.rint(scaled, out=scaled)
        else:
            rounded = _round_stochastically(scaled, source)
        if not np.all(np.abs(rounded) <= ring.qmax):  # false for NaN too
            raise _malformed(
                "The update has a coordinate that is not finite or is over the range of the ring.",
                "Clip before encoding, or widen the public range.",
            )
        out[block] = wrap(rounded.astype(np.int64), ring)
    return out


def _fresh_stream() -> Entropy:
    key, calls = os.urandom(32), iter(range(1 << 32))
    return lambda count: keystream.stream(key, next(calls), count)


def _round_stochastically(scaled: npt.NDArray[np.float64], source: Entropy) -> npt.NDArray[np.float64]:
    words = np.frombuffer(draw(source, 8 * scaled.size), "<u8")
    uniform = (words >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    with np.errstate(invalid="ignore"):
        below = np.floor(scaled)
        below += uniform < scaled - below
    return below


def quantize(k: npt.NDArray[np.int64], g0_log2: int, ring: RingParams) -> npt.NDArray[np.int64]:
    """From the fine grid to the ring grid: q = rint(k * 2^(g0_log2 + scale_log2)), half to even, clamped to +-qmax.

    Integer arithmetic throughout, so the result is a function of k alone on every machine; the clamp is
    post-processing of a noised value.

    Args:
        k: int64, shape (d,), in steps of 2^g0_log2.
        g0_log2: log2 of the fine step.
        ring: the round's ring.

    Returns:
        int64, shape (d,).

    Raises:
        SecureAggregationError: malformed_update for a wrong shape or dtype.
    """
    check_array(k, ring.dimension, (np.dtype("=i8"),), "The fine-grid vector")
    shift = g0_log2 + ring.scale_log2
    out = np.empty(ring.dimension, np.int64)
    for block in _blocks(ring.dimension):
        part = k[block]
        if shift >= 0:
            limit = ring.qmax >> shift if shift < 64 else 0  # |k| over this would be clamped anyway
            exact = np.clip(part, -limit - 1, limit + 1) << min(shift, 31)
            np.clip(exact, -ring.qmax, ring.qmax, out=out[block])
        else:
            np.clip(_halve(part, -shift), -ring.qmax, ring.qmax, out=out[block])
    return out


def _halve(k: npt.NDArray[np.int64], times: int) -> npt.NDArray[np.int64]:
    """rint(k / 2^times), half to even, times >= 1."""
    if times > 63:
        return np.zeros_like(k)  # |k| / 2^times <= 1/2, and half goes to even
    below = k >> times
    rest = k & ((1 << times) - 1)
    half = 1 << (times - 1)
    return below + ((rest > half) | ((rest == half) & ((below & 1) == 1)))


def wrap(q: npt.NDArray[np.int64], ring: RingParams) -> Lanes:
    """int64 -> lanes, modulo 2^bits."""
    lanes = q.astype(ring.lane)
    if ring.bits == 24:
        lanes &= lanes.dtype.type(0xFFFFFF)
    return lanes


def center(lanes: Lanes, ring: RingParams, out: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """Lanes -> the representative in [-2^(bits-1), 2^(bits-1)), int64. Bits of a lane above `bits` are ignored."""
    signed = (lanes << np.uint32(8) if ring.bits == 24 else lanes).view(f"<i{ring.lane.itemsize}")
    out = np.empty(lanes.size, np.int64) if out is None else out
    np.copyto(out, signed)
    if ring.bits == 24:
        out >>= 8
    return out


def center_in_place(lanes: Lanes, ring: RingParams) -> npt.NDArray[np.signedinteger[Any]]:
    """As :func:`center`, as wide as a lane and in its place."""
    signed = lanes.view(f"<i{ring.lane.itemsize}")
    if ring.bits == 24:
        np.left_shift(lanes, np.uint32(8), out=lanes)
        np.right_shift(signed, np.int32(8), out=signed)
    return signed


def decode(total: npt.NDArray[Any], ring: RingParams, count: int) -> npt.NDArray[np.float64]:
    """A sum of `count` encoded payloads, in units of the payload.

    Args:
        total: the sum, shape (d,): ring lanes, or signed integers as ServerSession.unmask returns them, or int64.
        ring: the round's ring.
        count: number of summands.

    Returns:
        float64, shape (d,); exact, since the scale is a power of two and |sum| < 2^31.

    Raises:
        SecureAggregationError: sum_check_failed if a coordinate is over count * qmax, malformed_update for a wrong
            shape or dtype.
    """
    signed = np.dtype(f"<i{ring.lane.itemsize}")
    check_array(total, ring.dimension, (ring.lane, signed, np.dtype("=i8")), "The sum")
    out = np.empty(ring.dimension, np.float64)
    for block in _blocks(ring.dimension):
        part = total[block]
        if part.dtype == ring.lane:
            check_lanes(part, ring)
            part = center(part, ring)
        check_range(part, count * ring.qmax)
        np.multiply(part, ring.grid, out=out[block])
    return out


def check_range(total: npt.NDArray[np.signedinteger[Any]], limit: int) -> None:
    """Refuse a sum that honest summands cannot have. Raises SecureAggregationError: sum_check_failed."""
    if total.size and (total.max() > limit or total.min() < -limit):
        raise out_of_reach()


def out_of_reach() -> SecureAggregationError:
    """The error of a sum that honest summands cannot have."""
    return SecureAggregationError(
        "A coordinate of the sum is over what its summands can reach.",
        "A mask did not cancel or a member left the range; discard the round.",
        cause="sum_check_failed",
    )


def to_wire(vector: Lanes, ring: RingParams) -> npt.NDArray[np.uint8]:
    """The bytes of a masked vector: bits/8 little-endian bytes per lane. A view where no byte is dropped."""
    check_array(vector, ring.padded, (ring.lane,), "The masked vector")
    raw = vector.view(np.uint8)
    return raw.reshape(-1, 4)[:, :3].reshape(-1) if ring.bits == 24 else raw


def from_wire(data: bytes | bytearray | memoryview | npt.NDArray[np.uint8], ring: RingParams) -> Lanes:
    """Lanes of a masked vector from its bytes. The size is checked before anything is allocated.

    Raises:
        SecureAggregationError: malformed_update.
    """
    try:
        raw = np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise _malformed("The masked vector is not a contiguous buffer of bytes.") from None
    if raw.size != ring.wire_bytes:
        raise _malformed(f"The masked vector has {raw.size} bytes; expected {ring.wire_bytes}.")
    if ring.bits != 24:
        return raw.view(ring.lane)
    lanes = np.zeros(ring.padded, ring.lane)
    lanes.view(np.uint8).reshape(-1, 4)[:, :3] = raw.reshape(-1, 3)
    return lanes
