"""Signatures of the members: Ed25519 under the identity that the roster names.

Signed is ``"LSA1 signature" || version || stage || binding || identity || SHA-256(parts)``: a signature of one stage,
attempt, round or member is none of another. Per stage the binding is that of the message's header, and the parts are

    KEYS         cpk || spk || [vouch, in rounds whose members verify the sum]
    SHARES       commitment || envelopes
    MASKED       set(U2) || root of the vector || [masked tag] || SHA-256(what the caller binds to it: the dataset root)
    CONSISTENCY  the view, see :mod:`.transcript`
    REVEAL       shares

Whether an identity is the one that it should be is decided outside: each participant pins a roster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg.transcript import PROTOCOL, VERSION
from lensemble_flwr.secagg.wire import Stage

Sign = Callable[[bytes], bytes]
"""From a statement to its 64-byte signature: the member's identity key, wherever it is kept."""

_FIELD = 2**255 - 19
# y coordinates of the points of order 1, 2, 4 and 8: under such a "key" a signature can fit almost any statement.
_Y8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _Y8, _FIELD - _Y8})


def statement(stage: Stage, binding: bytes, identity: bytes, *parts: bytes) -> bytes:
    """The bytes that a member signs. For a given stage and binding the parts have fixed sizes."""
    head = PROTOCOL + b" signature" + bytes([VERSION, stage])
    return head + binding + identity + hashlib.sha256(b"".join(parts)).digest()


def holds(signature: bytes, stage: Stage, binding: bytes, identity: bytes, *parts: bytes) -> bool:
    """Whether this is the member's signature."""
    return signature_holds(identity, signature, statement(stage, binding, identity, *parts))


def signature_holds(identity: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the holder of an identity's private key signed these bytes."""
    if weak(identity):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def verify(signature: bytes, stage: Stage, binding: bytes, identity: bytes, *parts: bytes) -> None:
    """Raises SecureAggregationError: bad_signature, `member` naming whose it should be."""
    if not holds(signature, stage, binding, identity, *parts):
        raise SecureAggregationError(
            f"The {stage.name} signature is not this member's, or was made for another round, attempt or set.",
            "Nothing was sent. Compare identities with the member out of band.",
            cause="bad_signature",
            member=identity.hex(),
        )


def weak(identity: bytes) -> bool:
    """Whether a public key is not canonical or of small order, so that anybody could sign for it."""
    y = int.from_bytes(identity, "little") & ((1 << 255) - 1)
    return len(identity) != 32 or y >= _FIELD or y in _SMALL_ORDER
