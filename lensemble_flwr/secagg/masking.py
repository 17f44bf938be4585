"""The masked vector: built at a member, added up and opened at the coordinator. Layout: :mod:`.ring`.

All three work segment by segment and in place. None of them builds a mask, or a copy of anything, as long as the
vector: the opened sum stands where the masked one was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lensemble_flwr.compiled import use
from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import checksum, keystream, mask_loops
from lensemble_flwr.secagg.keystream import SEGMENT, Key
from lensemble_flwr.secagg.ring import (
    Lanes,
    RingParams,
    center,
    center_in_place,
    check_array,
    check_lanes,
    check_range,
    out_of_reach,
)

_FOLD = 12 * checksum.COLUMNS  # coordinates that numpy passes over several times, in the first-level caches
_TAIL_SEGMENT = 2**32 - 1  # the tail has a keystream segment of its own


def mask(
    out: Lanes,
    q: npt.NDArray[Any],
    ring: RingParams,
    t1: bytes,
    plus: Sequence[Key],
    minus: Sequence[Key],
    threads: int = 1,
) -> None:
    """Write the masked vector of payload q into `out`.

    Args:
        out: lanes, shape (padded,), overwritten. Zeroed if anything fails, so that no unmasked part of q stays there.
        q: the encoded payload, shape (d,): signed int32 or int64, or ring lanes. Not altered.
        ring, t1: the round's ring and transcript.
        plus, minus: keys of the masks to add and to subtract.
        threads: the result does not depend on it.

    Raises:
        SecureAggregationError: malformed_update for wrong arrays or a value over the range. No value is in the text.
    """
    check_array(q, ring.dimension, (np.dtype("=i4"), np.dtype("=i8"), ring.lane), "The payload")
    check_array(out, ring.padded, (ring.lane,), "The output")
    if not out.flags.writeable or np.may_share_memory(out, q):
        raise SecureAggregationError("The output must be writable and apart from q.", cause="malformed_update")
    weights = checksum.weights(t1, ring)

    fast = q.dtype != ring.lane and use(q.size, mask_loops.fold)

    def one(segment: int) -> int:
        digest = checksum.SegmentDigest(segment, weights)
        masks = keystream.Masks(segment, plus, minus, ring.lane)
        for target, values in _walk(out, q, ring, segment, masks):
            ones = target.size - values.size
            target[:ones] = 1
            if not (
                digest.fold(values, target[ones:], ring.qmax) if fast else _fold(values, target[ones:], digest, ring)
            ):
                raise SecureAggregationError(
                    "The payload has a coordinate over the range of the ring.",
                    "Clamp to qmax before masking.",
                    cause="malformed_update",
                )
            masks.apply(target)
            _reduce(target, ring)
        masks.wipe()
        return digest.term()

    try:
        terms = keystream.for_each(one, ring.segments, threads)
        _write_tail(out, ring, checksum.total(terms) + _tail_mask(ring, plus, minus))
    except BaseException:
        out.fill(0)
        raise


def _fold(values: npt.NDArray[Any], lanes: Lanes, digest: checksum.SegmentDigest, ring: RingParams) -> bool:
    """lanes = values, wrapped, and the values into the digest; whether all of them are in range."""
    for start in range(0, values.size, _FOLD):
        part, target = values[start : start + _FOLD], lanes[start : start + _FOLD]
        if part.dtype == ring.lane:
            check_lanes(part, ring)
            part = center(part, ring)
        if part.max() > ring.qmax or part.min() < -ring.qmax:
            return False
        np.copyto(target, part, casting="unsafe")  # wraps
        digest.update(part)
    return True


def accumulate(total: Lanes, vector: Lanes, ring: RingParams, threads: int = 1) -> None:
    """total += vector, in place. Both are checked first, so that a bad vector leaves `total` as it was.

    Args:
        threads: the result does not depend on it.

    Raises:
        SecureAggregationError: malformed_update.
    """
    check_array(vector, ring.padded, (ring.lane,), "The masked vector")
    check_lanes(vector, ring)

    def one(segment: int) -> None:
        part = slice(segment * SEGMENT, min((segment + 1) * SEGMENT, ring.body))
        np.add(total[part], vector[part], out=total[part])  # a 24-bit ring is reduced once, when the sum is opened

    keystream.for_each(one, ring.segments, threads)
    _write_tail(total, ring, _read_tail(total, ring) + _read_tail(vector, ring))


def unmask(
    total: Lanes, ring: RingParams, t1: bytes, plus: Sequence[Key], minus: Sequence[Key], count: int, threads: int = 1
) -> npt.NDArray[np.signedinteger[Any]]:
    """Add `plus` and subtract `minus` from the sum of `count` masked vectors, in place, and verify what appears.

    Verified are the sentinels, the range and the checksum. `total` is lost either way: it holds the result, or zeros.

    Returns:
        signed integers as wide as a lane, shape (d,): the sum of the payloads, a view of `total`.

    Raises:
        SecureAggregationError: sum_check_failed.
    """
    weights = checksum.weights(t1, ring)
    fast = use(ring.dimension, mask_loops.tally)

    def one(segment: int) -> int:
        digest = checksum.SegmentDigest(segment, weights)
        masks = keystream.Masks(segment, plus, minus, ring.lane)
        lanes, ahead = total[segment * SEGMENT : min((segment + 1) * SEGMENT, ring.body)], ring.sentinels
        for block in masks.blocks(lanes.size):
            target = lanes[block]
            masks.apply(target)
            if ahead and not np.all(_reduced(target[:ahead], ring) == count):
                raise _unbalanced(f"The sentinels of segment {segment} do not count {count} members.")
            values, ahead = center_in_place(target[ahead:], ring), 0
            if fast:
                if not digest.tally(values, count * ring.qmax):
                    raise out_of_reach()
                continue
            for start in range(0, values.size, _FOLD):
                part = values[start : start + _FOLD]
                check_range(part, count * ring.qmax)
                digest.update(part)
        masks.wipe()
        return digest.term()

    try:
        terms = keystream.for_each(one, ring.segments, threads)
        claimed = _read_tail(total, ring) + _tail_mask(ring, plus, minus)
        if not checksum.matches(claimed % (1 << checksum.BITS), terms):
            raise _unbalanced("The checksum of the sum is not the sum of the checksums.")
    except BaseException:
        total.fill(0)
        raise
    return _close_up(total, ring)


def _close_up(total: Lanes, ring: RingParams) -> npt.NDArray[np.signedinteger[Any]]:
    """Move the payload together over the sentinels; what is behind it becomes zero."""
    room = SEGMENT - ring.sentinels
    for segment in range(ring.segments):
        first, size = segment * room, min(room, ring.dimension - segment * room)
        start = segment * SEGMENT + ring.sentinels
        total[first : first + size] = total[start : start + size]  # numpy copies where the two overlap
    total[ring.dimension :] = 0
    return total[: ring.dimension].view(f"<i{ring.lane.itemsize}")


def _unbalanced(message: str) -> SecureAggregationError:
    return SecureAggregationError(
        message, "A mask did not cancel or a vector was altered; discard the round.", cause="sum_check_failed"
    )


def _walk(
    vector: Lanes, payload: npt.NDArray[Any], ring: RingParams, segment: int, masks: keystream.Masks
) -> Iterator[tuple[Lanes, npt.NDArray[Any]]]:
    """Views of a segment's lanes and payload, by blocks; the first block has the sentinels ahead of its payload."""
    first = segment * SEGMENT
    lanes = vector[first : min(first + SEGMENT, ring.body)]
    ahead = first - segment * ring.sentinels
    for block in masks.blocks(lanes.size):
        start = max(block.start - ring.sentinels, 0)
        yield lanes[block], payload[ahead + start : ahead + block.stop - ring.sentinels]


def _reduce(lanes: Lanes, ring: RingParams) -> None:
    if ring.bits == 24:
        np.bitwise_and(lanes, lanes.dtype.type(0xFFFFFF), out=lanes)


def _reduced(lanes: Lanes, ring: RingParams) -> Lanes:
    return lanes & lanes.dtype.type(0xFFFFFF) if ring.bits == 24 else lanes


def _tail_mask(ring: RingParams, plus: Sequence[Key], minus: Sequence[Key]) -> int:
    def one(key: Key) -> int:
        return int.from_bytes(keystream.stream(key, _TAIL_SEGMENT, ring.tail_bits // 8), "little")

    return sum(map(one, plus)) - sum(map(one, minus))


def _read_tail(vector: Lanes, ring: RingParams) -> int:
    return sum(int(lane) << (index * ring.bits) for index, lane in enumerate(vector[ring.body :]))


def _write_tail(vector: Lanes, ring: RingParams, value: int) -> None:
    """Modulo 2^64, also where the lanes have room for more: a carry beyond would tell how large the summands were."""
    value %= 1 << checksum.BITS
    for index in range(ring.tail_lanes):
        vector[ring.body + index] = value >> (index * ring.bits) & ((1 << ring.bits) - 1)
