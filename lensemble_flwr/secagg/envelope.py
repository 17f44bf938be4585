"""One member's two shares for one peer, sealed so that the coordinator can carry but not read or swap them.

AES-256-GCM under a key of this pair, direction and transcript; associated data T1 || "share" || sender || reader.
The nonce is random although a key seals once: a member that restarts from an older state may seal twice.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import shamir

NONCE_BYTES = 12


def seal(
    key: bytes, nonce: bytes, seed_share: bytes, key_share: bytes, context: bytes, group_nonce: bytes = b""
) -> bytes:
    """nonce 12 || ciphertext 66 || tag 16; in rounds whose members verify the sum the ciphertext is 32 longer."""
    return nonce + AESGCM(key).encrypt(nonce, seed_share + key_share + group_nonce, context)


def unseal(key: bytes | bytearray, envelope: bytes, context: bytes, member: str) -> bytes:
    """The two shares, 66 bytes, each a field element, and what else was sealed.

    Raises:
        SecureAggregationError: share_decrypt_failed, `member` naming whose envelope it is.
    """
    try:
        pair = AESGCM(key).decrypt(envelope[:NONCE_BYTES], envelope[NONCE_BYTES:], context)
    except InvalidTag:
        raise SecureAggregationError(
            "An envelope does not open: it was altered, swapped, replayed, or its sender was shown another round.",
            "Nothing was sent. Retry the round with fresh keys.",
            cause="share_decrypt_failed",
            member=member,
        ) from None
    try:
        shamir.parse(pair[: shamir.SHARE_BYTES])
        shamir.parse(pair[shamir.SHARE_BYTES : 2 * shamir.SHARE_BYTES])
    except SecureAggregationError:
        raise SecureAggregationError(
            "An envelope holds something that is not two shares.", cause="share_decrypt_failed", member=member
        ) from None
    return pair


def context(t1: bytes, sender: bytes, reader: bytes) -> bytes:
    """Associated data of the envelope from `sender` to `reader` (identities)."""
    return t1 + b"share" + sender + reader
