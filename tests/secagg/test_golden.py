"""Bytes that must not change: releases interoperate, or the protocol version is raised.

``WRITE_GOLDEN=1 pytest tests/secagg/test_golden.py`` writes the files again; do that together with a new
``transcript.VERSION`` only. All entropy is the reproducible one of the driver.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lensemble_flwr.secagg import RingParams, checksum, encode, keystream, quantize, shamir, to_wire
from tests.secagg.driver import Drbg, Round, make_params, payloads

FOLDER = Path(__file__).parent / "golden"


def check(name: str, found: dict[str, Any]) -> None:
    path = FOLDER / f"{name}.json"
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(path.read_text())
    assert list(found) == list(expected)
    for key, value in found.items():
        assert value == expected[key], key


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_whole_session(bits):
    """Five members, the last drops out after its shares; every message, every state, the sum."""
    params = make_params(5, 12, bits=bits, consistency=True)
    q = payloads(params)
    session = Round.begin(params, seed=("golden", bits))
    found: dict[str, Any] = {"T0": params.hash.hex()}

    def states(stage: str) -> None:
        found[f"state of 0 after {stage}"] = session.clients[0].to_bytes().hex()

    session.keys()
    states("keys")
    found |= {f"keys {i}": session.messages["keys", i].hex() for i in range(5)}
    found["roster"] = session.server.roster_keys().hex()
    session.shares()
    states("shares")
    found["T1"] = session.server._t1.hex()
    found |= {f"shares {i}": session.messages["shares", i].hex() for i in range(5)}
    session.masked(q, range(4))
    states("masked")
    for i in range(4):
        found[f"envelopes {i}"] = session.messages["envelopes", i].hex()
        found[f"payload {i}"] = q[i].tolist()
        found[f"masked {i}"] = to_wire(session.vectors[i], params.ring).tobytes().hex()
        found[f"masked message {i}"] = session.messages["masked", i].hex()
    found["survivors"] = session.server.survivors().hex()
    session.agree(range(4))
    states("consistency")
    found |= {f"consistency {i}": session.messages["agree", i].hex() for i in range(4)}
    found["confirmed"] = session.server.confirmed().hex()
    session.reveal(range(4))
    states("reveal")
    found |= {f"reveal {i}": session.messages["reveal", i].hex() for i in range(4)}
    found["sum"] = session.server.unmask().tolist()
    assert found["sum"] == sum(q[:4]).tolist()
    check(f"session{bits}", found)


def test_keystream():
    streams = {
        f"key {name} segment {segment}": keystream.stream(key, segment, 80).hex()
        for name, key in (("00..1f", bytes(range(32))), ("zero", bytes(32)))
        for segment in (0, 1, 2**32 - 1)
    }
    check("keystream", streams)


def test_shamir():
    secret = bytes(range(32))
    shares = shamir.split(secret, 3, [1, 2, 3, 4, 5], Drbg("golden"))
    check("shamir", {"secret": secret.hex(), "threshold": 3} | {str(x): share.hex() for x, share in shares.items()})


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_encoding(bits):
    x = np.array([0.0, 1.0, -1.0, 0.1, -0.1, 0.5 / 256, 1.5 / 256, -0.5 / 256, 3.14159, -2.71828])
    ring = RingParams(bits, 5, 8, x.size)
    k = np.array([0, 1, -1, 2**32, -(2**32), 3 * 2**31, 2**31, -(2**31), 2**62, -(2**62)])
    check(
        f"encode{bits}",
        {
            "x": x.tolist(),
            "nearest float64": encode(x, ring).tolist(),
            "nearest float32": encode(x.astype(np.float32), ring).tolist(),
            "stochastic": encode(x, ring, "stochastic", Drbg("golden")).tolist(),
            "k": k.tolist(),
            "quantized from 2^-40": quantize(k, -40, ring).tolist(),
        },
    )


def test_checksum():
    ring = RingParams(32, 5, 0, 10_000)
    weights = checksum.weights(bytes(range(32)), ring)
    digest = checksum.SegmentDigest(0, weights)
    payload = np.arange(10_000) - 5000
    digest.update(payload)
    found = {
        "columns": hashlib.sha256(weights.columns.tobytes()).hexdigest(),
        "rows": [int(r) for r in weights.rows],
        "c": digest.term(),
    }
    r = [int(c) * found["rows"][0] for c in weights.columns]
    assert found["c"] == sum(r[o % 4096] * int(v) for o, v in enumerate(payload)) % 2**64
    for cuts in ([1, 4095, 4096, 4097], [5000], [4096, 8192], range(100, 10_000, 700)):
        parts = checksum.SegmentDigest(0, weights)
        for part in np.split(payload, list(cuts)):
            parts.update(part)
        assert parts.term() == found["c"]
    check("checksum", found)


# --- the same masked vector, computed apart from the module: from the documented formulas and single AES blocks


def by_single_blocks(key: bytes, segment: int, count: int) -> bytes:
    blocks = b"".join(struct.pack(">IQI", segment, 0, 2 + i) for i in range(-(-count // 16)))
    return Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(blocks)[:count]  # noqa: S305


def hkdf(salt: bytes, secret: bytes, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt, info).derive(secret)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_masked_vector_from_the_specification(bits):
    if os.environ.get("WRITE_GOLDEN"):
        pytest.skip("writing")
    golden = json.loads((FOLDER / f"session{bits}.json").read_text())
    params = make_params(5, 12, bits=bits, consistency=True)
    t1 = bytes.fromhex(golden["T1"])
    width, lane_bytes = bits // 8, 2 if bits == 16 else 4
    me = 1
    private = []
    for i in range(5):  # the driver's entropy: c and s first, then the seed
        entropy = Drbg((("golden", bits), i))
        private.append((entropy(32), entropy(32), entropy(32)))
    keys = [bytes.fromhex(golden[f"keys {i}"])[34:] for i in range(5)]
    entries = b"".join(params.roster[i] + keys[i] for i in range(5))
    assert t1 == hashlib.sha256(bytes.fromhex(golden["T0"]) + entries).digest()

    streams = [(1, hkdf(t1, private[me][2], b"self"))]
    for j in {0, 2, 3, 4}:
        shared = X25519PrivateKey.from_private_bytes(private[me][1]).exchange(
            X25519PublicKey.from_public_bytes(keys[j][32:64])
        )
        pair = sorted((params.roster[me], params.roster[j]))
        streams.append((1 if j > me else -1, hkdf(t1, shared, b"mask" + b"".join(pair))))

    q = golden[f"payload {me}"]
    ones = 1 if bits == 32 else 2
    vector = []
    for position, value in enumerate([1] * ones + q):
        for sign, key in streams:
            at = position * lane_bytes
            stream = by_single_blocks(key, 0, (ones + len(q)) * lane_bytes)
            value += sign * int.from_bytes(stream[at : at + lane_bytes], "little")
        vector.append(value % 2**bits)
    check_key = hashlib.sha256(b"checksum" + t1).digest()
    columns = struct.unpack("<12Q", by_single_blocks(check_key, 0, 96))
    row = struct.unpack("<Q", by_single_blocks(check_key, 1, 8))[0] | 1
    tail = sum((c | 1) * row * v for c, v in zip(columns, q, strict=True)) % 2**64
    tail_bytes = 9 if bits == 24 else 8
    for sign, key in streams:
        tail += sign * int.from_bytes(by_single_blocks(key, 2**32 - 1, tail_bytes), "little")
    wire = b"".join(value.to_bytes(width, "little") for value in vector)
    wire += (tail % 2**64).to_bytes(tail_bytes, "little")
    assert wire.hex() == golden[f"masked {me}"]

    def message(name: str) -> bytes:
        return bytes.fromhex(golden[name])[34:]

    def check_signature(stage: int, binding: bytes, signature: bytes, *parts: bytes) -> None:
        digest = hashlib.sha256(b"".join(parts)).digest()
        statement = b"LSA1 signature\x02" + bytes([stage]) + binding + params.roster[me] + digest
        Ed25519PublicKey.from_public_bytes(params.roster[me]).verify(signature, statement)

    root = hashlib.sha256(b"vector" + hashlib.sha256(wire).digest()).digest()
    roots = b"".join(message(f"masked message {i}")[:32] for i in range(4))
    assert roots[32:64] == root
    assert message("survivors") == b"\x0f" + roots
    view = hashlib.sha256(b"view" + t1 + b"\x1f" + b"\x0f" + roots).digest()
    check_signature(0x10, bytes.fromhex(golden["T0"]), keys[me][64:], keys[me][:64])
    for stage, name in ((0x30, "shares"), (0x80, "reveal")):
        body = message(f"{name} {me}")
        check_signature(stage, t1, body[-64:], body[:-64])
    bound = hashlib.sha256(b"associated").digest()
    check_signature(0x50, t1, message(f"masked message {me}")[32:], b"\x1f", root, bound)
    check_signature(0x70, t1, message(f"consistency {me}"), view)
    assert message("confirmed") == b"\x0f" + b"".join(message(f"consistency {i}") for i in range(4))
