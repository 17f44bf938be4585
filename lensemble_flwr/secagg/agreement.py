"""Key agreement: fresh X25519 pairs, and what HKDF-SHA256 makes of them. Salt is always the transcript T1."""

from __future__ import annotations

import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lensemble_flwr.errors import SecureAggregationError

_FIELD = 2**255 - 19
# A fixed clamped scalar: the exchange with it is zero exactly for the points of small order.
_PROBE = X25519PrivateKey.from_private_bytes(bytes(31) + b"\x40")


def load(private: bytes | bytearray) -> X25519PrivateKey:
    """A private key ready for use: loading costs a scalar multiplication, as much as an exchange."""
    return X25519PrivateKey.from_private_bytes(private)


def public_key(private: bytes | bytearray) -> bytes:
    return load(private).public_key().public_bytes_raw()


def check_public_keys(keys: dict[str, tuple[bytes, ...]]) -> None:
    """Refuse keys that are not canonical or not all distinct. (Small order shows when a secret is agreed on.)

    Args:
        keys: {name of the member, for the error: its public keys}.

    Raises:
        SecureAggregationError: key_agreement_failed, `member` naming whose key it is.
    """
    seen: set[bytes] = set()
    for member, pair in keys.items():
        for key in pair:
            if key in seen:
                raise _failed("A public key occurs twice in the roster.", member)
            seen.add(key)
            # X25519 ignores the top bit and reduces: without this, distinct bytes could be one and the same key.
            if int.from_bytes(key, "little") >= _FIELD:
                raise _failed("A public key is not in canonical form.", member)


def refuse_small_order(public: bytes, member: str) -> None:
    """Raises SecureAggregationError: key_agreement_failed for a key with which nobody can agree on a secret."""
    _exchange(_PROBE, public, member)


def shared_secret(private: X25519PrivateKey, public: bytes, member: str) -> bytes:
    """X25519. Raises SecureAggregationError: key_agreement_failed for a point of small order."""
    return _exchange(private, public, member)


def _exchange(private: X25519PrivateKey, public: bytes, member: str) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise _failed("A public key is a point of small order.", member) from None


def _failed(message: str, member: str) -> SecureAggregationError:
    return SecureAggregationError(message, cause="key_agreement_failed", member=member)


def envelope_key(t1: bytes, shared: bytes, sender: bytes, reader: bytes) -> bytes:
    """Key of the one envelope from `sender` to `reader` (identities): each direction has its own."""
    return _derive(t1, shared, b"env" + sender + reader)


def pair_mask_key(t1: bytes, shared: bytes, one: bytes, other: bytes) -> bytes:
    """Key of the mask that two members (identities) share; the lower position adds it, the higher subtracts it."""
    return _derive(t1, shared, b"mask" + min(one, other) + max(one, other))


def self_mask_key(t1: bytes, seed: bytes) -> bytes:
    """Key of the mask that a member adds for itself, from its secret seed."""
    return _derive(t1, seed, b"self")


def group_key(t1: bytes, members: bytes, nonces: bytes) -> bytes:
    """The key that the members of U2 (a bitmap) share, from one nonce of each, by position."""
    return _derive(t1, nonces, b"sum" + members)


def _derive(salt: bytes, secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) for one block of output: extract, then expand once. Two calls instead of an object."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\x01", "sha256")
