"""The mask generator: AES-256 in counter mode, by segments, added in place.

Specification (so that another implementation can interoperate): the keystream of segment s under a 32-byte key is
AES-256-CTR with initial counter block BE32(s) || 0^8 || 00000002, read as little-endian lanes of the ring's width.
A segment is SEGMENT lanes, the last one may be shorter. Nothing else depends on block size, order or threads, since
ring additions commute.

How it is computed: AES-GCM with the nonce BE32(s) || 0^8 encrypts from exactly that counter block, so the ciphertext
of zeros is the keystream, too. OpenSSL's GCM is up to twice as fast as its CTR on processors with AVX-512, and half as
fast on others, so a process tries both once. The tag is never asked for. The walk is in blocks that stay in the core's
cache: for every block, one reused buffer receives each key's keystream and is
added at once, so no mask of the vector's length ever exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

SEGMENT = 1 << 20  # lanes; far below GCM's 64 GiB for one nonce
BLOCK_BYTES = 1 << 17  # keystream, zeros and accumulator of one block share a core's L2 cache of 512 KiB

_ZEROS = memoryview(bytes(BLOCK_BYTES))
_CACHE_LINE = 64
_AES_BLOCK = 16

Key = bytes | bytearray
T = TypeVar("T")


def _encryptor(key: Key, segment: int) -> Any:
    return _MAKERS[_faster()](key, segment)


def _gcm(key: Key, segment: int) -> Any:
    return Cipher(algorithms.AES256(key), modes.GCM(segment.to_bytes(4, "big") + bytes(8))).encryptor()


def _ctr(key: Key, segment: int) -> Any:
    counter = segment.to_bytes(4, "big") + bytes(11) + b"\x02"
    return Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()


_MAKERS = {"gcm": _gcm, "ctr": _ctr}


@lru_cache(maxsize=1)
def _faster() -> str:
    """Which of the two gives the keystream sooner on this machine: a millisecond, once. The bytes are the same."""
    room, spent = bytearray(len(_ZEROS) + _AES_BLOCK), dict.fromkeys(_MAKERS, float("inf"))
    for _ in range(5):
        for name, make in _MAKERS.items():
            update_into = make(bytes(32), 0).update_into
            start = time.perf_counter()
            update_into(_ZEROS, room)
            spent[name] = min(spent[name], time.perf_counter() - start)
    return min(spent, key=lambda name: spent[name])


def stream(key: Key, segment: int, count: int) -> bytes:
    """The first `count` bytes of the keystream of one segment."""
    return _encryptor(key, segment).update(bytes(count))


class Masks:
    """The masks of one segment, applied from its first lane to its last, a block at a time.

    Args:
        segment: index of the segment.
        plus, minus: 32-byte keys whose keystreams are added and subtracted.
        lane: dtype of the lanes, uint16 or uint32.
    """

    def __init__(self, segment: int, plus: Iterable[Key], minus: Iterable[Key], lane: np.dtype[Any]) -> None:
        self._steps: list[tuple[Any, np.ufunc]] = [(_encryptor(key, segment).update_into, np.add) for key in plus]
        self._steps += [(_encryptor(key, segment).update_into, np.subtract) for key in minus]
        room = np.zeros(BLOCK_BYTES + _AES_BLOCK + _CACHE_LINE, np.uint8)
        self._buffer = room[-room.ctypes.data % _CACHE_LINE :]  # aligned, which is 3 % of the time
        self._lanes = self._buffer[:BLOCK_BYTES].view(lane)

    def blocks(self, size: int) -> Iterator[slice]:
        """The blocks of `size` lanes, for :meth:`apply`."""
        step = self._lanes.size
        return (slice(start, min(start + step, size)) for start in range(0, size, step))

    def apply(self, target: npt.NDArray[Any]) -> None:
        """Add the next ``target.size`` lanes of every keystream to `target`, wrapping, in place."""
        zeros, mask = _ZEROS[: target.nbytes], self._lanes[: target.size]
        for update_into, combine in self._steps:
            update_into(zeros, self._buffer)
            combine(target, mask, out=target)

    def wipe(self) -> None:
        """Forget the last block, which is a secret."""
        self._buffer[:] = 0


def apply(out: npt.NDArray[Any], plus: Sequence[Key], minus: Sequence[Key], *, threads: int = 1) -> None:
    """``out += sum of keystreams(plus) - sum of keystreams(minus)`` over all segments of `out`, wrapping, in place.

    Args:
        out: uint16 or uint32 lanes, 1-D, contiguous.
        plus, minus: 32-byte keys.
        threads: the result does not depend on it.
    """

    def one(segment: int) -> None:
        part = out[segment * SEGMENT : (segment + 1) * SEGMENT]
        masks = Masks(segment, plus, minus, out.dtype)
        for block in masks.blocks(part.size):
            masks.apply(part[block])
        masks.wipe()

    for_each(one, -(-out.size // SEGMENT), threads)


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def for_each(work: Callable[[int], T], count: int, threads: int) -> list[T]:
    """[work(0), .. work(count - 1)], on up to `threads` threads (ciphers and numpy release the interpreter lock)."""
    if threads <= 1 or count <= 1:
        return [work(index) for index in range(count)]
    with ThreadPoolExecutor(min(threads, count)) as pool:
        return list(pool.map(work, range(count)))
