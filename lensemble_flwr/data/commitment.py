"""The dataset root: one 32-byte commitment to a participant's episodes, and proofs that open one of them.

Every hash is SHA-256 with a domain tag in front, so that no leaf can be read as a node:

    leaf_key_e = HMAC-SHA256(salt, "leaf key" || episode_hash_e)      blinds leaf e, and only leaf e
    leaf_e     = H(LEAF || leaf_key_e || episode_hash_e)
    node       = H(NODE || left || right)                             an odd node at the end moves up unchanged
    root       = H(ROOT || top)

Leaves are sorted, so the root does not depend on the order of the files. The salt comes from the site's secret and
the federation id (:func:`derive_salt`): without it nobody can test a guess ("do they hold this public recording?"),
and the roots of one site in two federations cannot be linked. The number of episodes is not part of the root. A proof
does show roughly how many there are (the length of its path); it is made by a site's operator, never by the protocol.

The root binds where an update comes from, not that its training was honest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lensemble_flwr.errors import ContractViolation, DataError

HASH_BYTES = 32
MAX_DEPTH = 64

_PREFIX = b"lensemble.merkle\x00v1\x00"
_LEAF_KEY, _LEAF, _NODE, _ROOT = (_PREFIX + tag + b"\x00" for tag in (b"leaf key", b"leaf", b"node", b"root"))
_SALT_INFO = b"lensemble.dataset-salt\x00v1\x00"


@dataclass(frozen=True)
class InclusionProof:
    """Opens one episode of a root.

    Attributes:
        leaf_key: 32 bytes, the blinding of this leaf. It says nothing about any other leaf.
        path: from the leaf up, (sibling is on the left, sibling hash 32 bytes).
    """

    leaf_key: bytes
    path: tuple[tuple[bool, bytes], ...]

    def __post_init__(self) -> None:
        ok = len(self.path) <= MAX_DEPTH and all(isinstance(left, bool) for left, _ in self.path)
        if not ok or any(not _is_hash(h) for h in (self.leaf_key, *(sibling for _, sibling in self.path))):
            raise DataError("an inclusion proof is malformed.", "Ask the site for the proof again.")

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        path = [{"left": left, "hash": sibling.hex()} for left, sibling in self.path]
        return {"version": 1, "leaf_key": self.leaf_key.hex(), "path": path}

    @classmethod
    def from_dict(cls, values: Any) -> InclusionProof:
        """Inverse of :meth:`to_dict`; anything else raises DataError."""
        try:
            if values["version"] != 1 or len(values["path"]) > MAX_DEPTH:
                raise ValueError
            path = tuple((step["left"], bytes.fromhex(step["hash"])) for step in values["path"])
            return cls(bytes.fromhex(values["leaf_key"]), path)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError("an inclusion proof is malformed.", "Ask the site for the proof again.") from error


def derive_salt(site_secret: bytes, federation_id: bytes) -> bytes:
    """The site's salt in a federation: HKDF-SHA256 (RFC 5869), 32 bytes.

    Args:
        site_secret: at least 32 random bytes that never leave the site.
        federation_id: 32 bytes.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if not isinstance(site_secret, bytes) or len(site_secret) < 32:
        raise ContractViolation("a site secret must be at least 32 bytes.")
    if not _is_hash(federation_id):
        raise ContractViolation("a federation id must be 32 bytes.")
    return HKDF(algorithm=SHA256(), length=HASH_BYTES, salt=federation_id, info=_SALT_INFO).derive(site_secret)


def root(episode_hashes: Sequence[bytes], salt: bytes) -> bytes:
    """The dataset root (32 bytes) of these episodes, in any order.

    Raises:
        DataError: no episodes. ContractViolation: a hash or the salt is not 32 bytes.
    """
    level = sorted(leaf for leaf, _ in _leaves(episode_hashes, salt))
    while len(level) > 1:
        level = _next_level(level)
    return _hash(_ROOT, level[0])


def prove(episode_hashes: Sequence[bytes], salt: bytes, index: int) -> InclusionProof:
    """Proof that ``episode_hashes[index]`` is under ``root(episode_hashes, salt)``.

    Raises:
        DataError: no episodes. ContractViolation: no such index, or a hash or the salt is not 32 bytes.
    """
    leaves = _leaves(episode_hashes, salt)
    if not 0 <= index < len(leaves):
        raise ContractViolation(f"episode {index} does not exist (there are {len(leaves)}).")
    leaf, leaf_key = leaves[index]
    level = sorted(other for other, _ in leaves)
    position, path = level.index(leaf), []
    while len(level) > 1:
        sibling = position ^ 1
        if sibling < len(level):
            path.append((sibling < position, level[sibling]))
        level, position = _next_level(level), position // 2
    return InclusionProof(leaf_key, tuple(path))


def verify(dataset_root: bytes, episode: bytes, proof: InclusionProof) -> bool:
    """Whether the episode with hash ``episode`` is under ``dataset_root``. Needs no salt."""
    if not _is_hash(dataset_root) or not _is_hash(episode):
        return False
    node = _hash(_LEAF, proof.leaf_key, episode)
    for sibling_is_left, sibling in proof.path:
        node = _hash(_NODE, sibling, node) if sibling_is_left else _hash(_NODE, node, sibling)
    return hmac.compare_digest(_hash(_ROOT, node), dataset_root)


def _leaves(episode_hashes: Sequence[bytes], salt: bytes) -> list[tuple[bytes, bytes]]:
    if not episode_hashes:
        raise DataError("there are no episodes to commit to.", "Check the data folder of this participant.")
    if not _is_hash(salt) or not all(_is_hash(h) for h in episode_hashes):
        raise ContractViolation("episode hashes and the salt must be 32 bytes each.")
    keys = [hmac.digest(salt, _LEAF_KEY + h, "sha256") for h in episode_hashes]
    return [(_hash(_LEAF, key, h), key) for key, h in zip(keys, episode_hashes, strict=True)]


def _next_level(level: list[bytes]) -> list[bytes]:
    pairs = [_hash(_NODE, level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return pairs + level[2 * len(pairs) :]


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _is_hash(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == HASH_BYTES
