"""The mask generator: AES-256 in counter mode, by segments, added in place.

Specification (so that another implementation can interoperate): the keystream of segment s under a 32-byte key is
AES-256-CTR with initial counter block BE32(s) || 0^8 || 00000002, read as little-endian lanes of the ring's width.
A segment is SEGMENT lanes, the last one may be shorter. Nothing else depends on block size, order or threads, since
ring additions commute.

How it is computed: AES-GCM with the nonce BE32(s) || 0^8 encrypts from exactly that counter block, so the ciphertext
of zeros is the keystream, and OpenSSL's GCM is up to twice as fast as its CTR. The tag is never asked for. The walk is
in blocks that stay in the core's cache: for every block, one reused buffer receives each key's keystream and is
added at once, so no mask of the vector's length ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 32
SEGMENT = 1 << 20  # lanes; far below GCM's 64 GiB for one nonce
BLOCK_BYTES = 1 << 17  # keystream, zeros and accumulator of one block fit a 1 MiB L2 cache together

_ZEROS = memoryview(bytes(BLOCK_BYTES))

Key = bytes | bytearray
T = TypeVar("T")


def _encryptor(key: Key, segment: int) -> Any:
    return Cipher(algorithms.AES256(key), modes.GCM(segment.to_bytes(4, "big") + bytes(8))).encryptor()


def stream(key: Key, segment: int, count: int) -> bytes:
    """The first `count` bytes of the keystream of one segment."""
    return _encryptor(key, segment).update(bytes(count))


def apply_segment(out: npt.NDArray[Any], segment: int, plus: Iterable[Key], minus: Iterable[Key]) -> None:
    """``out += sum(stream(k) for k in plus) - sum(stream(k) for k in minus)``, wrapping, in place.

    Args:
        out: uint16 or uint32 lanes of this one segment, contiguous, at most SEGMENT long.
        segment: its index.
        plus, minus: 32-byte keys.
    """
    width = out.dtype.itemsize
    block = BLOCK_BYTES // width
    buffer = bytearray(BLOCK_BYTES + 15)  # update_into wants room for one block less a byte
    lanes = np.frombuffer(buffer, out.dtype, block)
    steps: list[tuple[Any, np.ufunc]] = [(_encryptor(key, segment).update_into, np.add) for key in plus]
    steps += [(_encryptor(key, segment).update_into, np.subtract) for key in minus]
    for start in range(0, out.size, block):
        target = out[start : start + block]
        zeros, mask = _ZEROS[: target.size * width], lanes[: target.size]
        for update_into, combine in steps:
            update_into(zeros, buffer)
            combine(target, mask, out=target)
    lanes[:] = 0  # the last block of a keystream is a secret


def apply(out: npt.NDArray[Any], plus: Sequence[Key], minus: Sequence[Key], *, threads: int = 1) -> None:
    """:func:`apply_segment` over a whole vector. The result is the same for every number of threads."""
    for_each(
        lambda s: apply_segment(out[s * SEGMENT : (s + 1) * SEGMENT], s, plus, minus), -(-out.size // SEGMENT), threads
    )


def for_each(work: Callable[[int], T], count: int, threads: int) -> list[T]:
    """[work(0), .. work(count - 1)], on up to `threads` threads (ciphers and numpy release the interpreter lock)."""
    if threads <= 1 or count <= 1:
        return [work(index) for index in range(count)]
    with ThreadPoolExecutor(min(threads, count)) as pool:
        return list(pool.map(work, range(count)))
