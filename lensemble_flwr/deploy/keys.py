"""SuperNode key pairs (ECDSA on P-384, OpenSSH format, as Flower's authentication wants them) and file permissions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError

_SSH = serialization.PublicFormat.OpenSSH


def write_node_key(private: Path, public: Path) -> str:
    """Make a SuperNode's key pair; returns the public key as one OpenSSH line.

    Raises:
        ArtifactError: a file cannot be written.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    atomic_write(
        private,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, _SSH).decode()
    atomic_write(public, (line + "\n").encode(), mode=0o644)
    return line


def read_node_key(private: Path) -> str:
    """The public key (OpenSSH line) that belongs to a private key file.

    Raises:
        ConfigError: missing, unreadable, or no EC key.
    """
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"The SuperNode's key {private} cannot be read: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"The SuperNode's key {private} is no EC key.", "Flower wants ECDSA on a NIST curve.")
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, _SSH).decode()


def check_public_key(line: str) -> str:
    """A SuperNode's public key without its comment.

    Raises:
        ConfigError: not an OpenSSH EC public key.
    """
    try:
        key = serialization.load_ssh_public_key(line.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{line[:40]!r} is no OpenSSH public key: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{line[:40]!r} is no EC public key.", "Flower wants ECDSA on a NIST curve.")
    return key.public_bytes(serialization.Encoding.OpenSSH, _SSH).decode()


def open_to_others(path: Path) -> str | None:
    """What is wrong with a secret's owner or permissions, in words; None when only its owner can use it."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user (uid {status.st_uid})"
    loose = stat.S_IMODE(status.st_mode) & 0o077
    return f"{path} can be used by others (mode {stat.S_IMODE(status.st_mode):o})" if loose else None
