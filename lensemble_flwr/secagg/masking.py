"""The masked vector: built at a member, added up and opened at the coordinator. Layout: :mod:`.ring`.

All three work segment by segment and in place. None of them builds a mask, or a copy of anything, as long as the
vector (the opened sum, which is int64, aside).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import checksum, keystream
from lensemble_flwr.secagg.keystream import SEGMENT, Key
from lensemble_flwr.secagg.ring import Lanes, RingParams, center, check_array, check_lanes, check_range

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

    def one(segment: int) -> int:
        digest = checksum.SegmentDigest(segment, weights)
        masks = keystream.Masks(segment, plus, minus, ring.lane)
        for target, values in _walk(out, q, ring, segment, masks):
            if values.dtype == ring.lane:
                check_lanes(values, ring)
                values = center(values, ring)
            if values.size and (values.max() > ring.qmax or values.min() < -ring.qmax):
                raise SecureAggregationError(
                    "The payload has a coordinate over the range of the ring.",
                    "Clamp to qmax before masking.",
                    cause="malformed_update",
                )
            digest.update(values.astype(np.int64, copy=False))
            ones = target.size - values.size
            target[:ones] = 1
            np.copyto(target[ones:], values, casting="unsafe")  # wraps
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


def accumulate(total: Lanes, vector: Lanes, ring: RingParams) -> None:
    """total += vector, in place. Both are checked first, so that a bad vector leaves `total` as it was.

    Raises:
        SecureAggregationError: malformed_update.
    """
    check_array(vector, ring.padded, (ring.lane,), "The masked vector")
    check_lanes(vector, ring)
    body = total[: ring.body]
    np.add(body, vector[: ring.body], out=body)  # a 24-bit ring is reduced once, when the sum is opened
    _write_tail(total, ring, _read_tail(total, ring) + _read_tail(vector, ring))


def unmask(
    total: Lanes, ring: RingParams, t1: bytes, plus: Sequence[Key], minus: Sequence[Key], count: int, threads: int = 1
) -> npt.NDArray[np.int64]:
    """Add `plus` and subtract `minus` from the sum of `count` masked vectors, in place, and verify what appears.

    Verified are the sentinels, the range and the checksum.

    Returns:
        int64, shape (d,): the sum of the payloads.

    Raises:
        SecureAggregationError: sum_check_failed.
    """
    weights = checksum.weights(t1, ring)
    opened = np.empty(ring.dimension, np.int64)

    def one(segment: int) -> int:
        digest = checksum.SegmentDigest(segment, weights)
        masks = keystream.Masks(segment, plus, minus, ring.lane)
        for target, values in _walk(total, opened, ring, segment, masks):
            masks.apply(target)
            _reduce(target, ring)
            ones = target.size - values.size
            if not np.all(target[:ones] == count):
                raise _unbalanced(f"The sentinels of segment {segment} do not count {count} members.")
            center(target[ones:], ring, out=values)
            check_range(values, count * ring.qmax)
            digest.update(values)
        masks.wipe()
        return digest.term()

    terms = keystream.for_each(one, ring.segments, threads)
    claimed = _read_tail(total, ring) + _tail_mask(ring, plus, minus)
    if not checksum.matches(claimed % (1 << checksum.BITS), terms):
        raise _unbalanced("The checksum of the sum is not the sum of the checksums.")
    return opened


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
