"""What the keys of a session are bound to.

    T0 = SHA-256("LSA1" || version || open_hash || attempt || numbers || n || roster)
    T1 = SHA-256(T0 || for each member of U1, by position: identity || cpk || spk || signature)
    view = SHA-256("view" || T1 || set(U2) || set(U3) || roots of the vectors of U3, by position)

T0 is known when the round opens, T1 once the public keys are relayed. T1 is the HKDF salt of every key and part of
every envelope's associated data: members that were shown another model, ring, threshold, roster or key derive other
keys, and their envelopes do not open. Integers are big-endian and of fixed width, so each encoding is unique.
The view is what the consistency stage compares: whose vectors, and which, are about to be opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

PROTOCOL = b"LSA1"
VERSION = 2


def opening(
    *, open_hash: bytes, attempt: int, roster: tuple[bytes, ...], numbers: tuple[int, ...], keys_binding: bytes = b""
) -> bytes:
    """T0. `numbers` are the parameters in a fixed order, each a signed 64-bit integer. `keys_binding` is what the keys
    are signed for where they were made before T0 was known, else empty."""
    digest = hashlib.sha256(PROTOCOL + bytes([VERSION]) + open_hash + attempt.to_bytes(4, "big"))
    for number in numbers:
        digest.update(number.to_bytes(8, "big", signed=True))
    digest.update(len(roster).to_bytes(4, "big") + b"".join(roster) + keys_binding)
    return digest.digest()


def keyed(t0: bytes, entries: Iterable[tuple[bytes, ...]]) -> bytes:
    """T1. One entry per member of U1, by position; all entries have the same fixed-size fields."""
    return hashlib.sha256(t0 + b"".join(b"".join(entry) for entry in entries)).digest()


def commitment(t1: bytes, seed: bytes) -> bytes:
    """Commitment to a self-mask seed: hiding since the seed is uniform, binding since SHA-256 is."""
    return hashlib.sha256(b"b-commit" + seed + t1).digest()


def view(t1: bytes, u2: bytes, u3: bytes, roots: Iterable[bytes]) -> bytes:
    """What one member was shown of the end of a session; `u2` and `u3` as bitmaps, one root per member of U3."""
    return hashlib.sha256(b"view" + t1 + u2 + u3 + b"".join(roots)).digest()
