"""The mask generator against independent computations of its specification."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lensemble_flwr.secagg import keystream
from lensemble_flwr.secagg.keystream import BLOCK_BYTES, SEGMENT
from tests.secagg.driver import Drbg

KEY = bytes(range(32))


def by_ctr(key: bytes, segment: int, count: int) -> bytes:
    counter = struct.pack(">IQI", segment, 0, 2)
    return Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor().update(bytes(count))


def by_single_blocks(key: bytes, segment: int, count: int) -> bytes:
    blocks = b"".join(struct.pack(">IQI", segment, 0, 2 + i) for i in range(-(-count // 16)))
    return Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(blocks)[:count]  # noqa: S305


@pytest.mark.parametrize("segment", [0, 1, 255, 2**32 - 1])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, BLOCK_BYTES + 5])
def test_three_ways_to_the_same_stream(segment, count):
    for key in (KEY, Drbg(segment)(32)):
        stream = keystream.stream(key, segment, count)
        assert stream == by_ctr(key, segment, count) == by_single_blocks(key, segment, count)


def test_known_block():
    """AES-256 of FIPS 197 C.3 pins the cipher itself, so that the three ways above cannot be wrong together."""
    block = bytes.fromhex("00112233445566778899aabbccddeeff")
    cipher = Cipher(algorithms.AES256(KEY), modes.ECB()).encryptor()  # noqa: S305
    assert cipher.update(block).hex() == "8ea2b7ca516745bfeafc49904b496089"


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("size", [1, 7, 1000, BLOCK_BYTES // 2 + 3, SEGMENT, SEGMENT + 9])
def test_apply_is_the_sum_of_streams(dtype, size):
    keys = [Drbg(i)(32) for i in range(3)]
    start = np.arange(size).astype(dtype)
    expected = start.copy()
    width = np.dtype(dtype).itemsize
    for key, combine in zip(keys, (np.add, np.add, np.subtract), strict=True):
        for segment in range(-(-size // SEGMENT)):
            part = expected[segment * SEGMENT : (segment + 1) * SEGMENT]
            combine(part, np.frombuffer(by_ctr(key, segment, part.size * width), dtype), out=part)
    for threads in (1, 2, 5):
        out = start.copy()
        keystream.apply(out, keys[:2], keys[2:], threads=threads)
        assert np.array_equal(out, expected)
    keystream.apply(out, keys[2:], keys[:2])
    assert np.array_equal(out, start)


@pytest.mark.parametrize("block", [64, 4096, 1 << 17])
def test_the_block_size_does_not_matter(block, monkeypatch):
    keys = [KEY, Drbg(0)(32)]
    expected = np.zeros(100_001, np.uint32)
    keystream.apply(expected, keys, [])
    monkeypatch.setattr(keystream, "BLOCK_BYTES", block)
    out = np.zeros(100_001, np.uint32)
    keystream.apply(out, keys, [])
    assert np.array_equal(out, expected)


def test_related_keys_give_unrelated_streams():
    """Keys that differ in the order of their 4-byte words only, which some generators fold together."""
    other = np.frombuffer(KEY, "<u4")[::-1].tobytes()
    one, two = (np.unpackbits(np.frombuffer(keystream.stream(key, 0, 1 << 16), np.uint8)) for key in (KEY, other))
    assert abs(int((one == two).sum()) - one.size / 2) < 5 * np.sqrt(one.size) / 2


def test_the_last_block_can_be_forgotten():
    masks = keystream.Masks(0, [KEY], [], np.dtype("<u4"))
    masks.apply(np.zeros(100, np.uint32))
    assert np.any(masks._buffer)
    masks.wipe()
    assert not np.any(masks._buffer)


def test_keys_are_32_bytes():
    with pytest.raises(ValueError, match="key size"):
        keystream.stream(bytes(16), 0, 1)


@pytest.mark.parametrize("segment", [0, 1, 2**32 - 1])
def test_both_ways_to_compute_it_give_the_same_bytes(segment):
    key, count = Drbg("ways")(32), keystream.SEGMENT * 4
    gcm, ctr = (make(key, segment) for make in keystream._MAKERS.values())
    for size in (1, 15, 16, 17, count - 49):  # in pieces, to the end of the longest segment
        assert gcm.update(bytes(size)) == ctr.update(bytes(size))
