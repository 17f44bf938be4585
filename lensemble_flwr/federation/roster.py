"""The roster that a participant pins: whom it is willing to sum with, known from elsewhere than the coordinator.

A JSON file, ``roster.json`` in the site's folder::

    {"version": 1, "members": {"hospital-a": "<64 hex digits>", "hospital-b": "<64 hex digits>"}}

Keys are Ed25519 public keys (a participant's identity); names are for people and mean nothing to the protocol. The hash
covers the keys alone, so that two operators who read it to each other know that they pinned the same participants.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.secagg import MAX_ROSTER, weak_identity

ROSTER_VERSION = 1
ROSTER_FILE = "roster.json"
PUBLIC_KEY_FILE = "identity.pub"
MAX_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Roster:
    """Names and keys of the participants that are allowed.

    Args:
        members: {name: 32-byte Ed25519 public key}.

    Raises:
        ConfigError: a bad name; a key that is none, is of small order or occurs twice; too many members.
    """

    members: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if len(self.members) > MAX_ROSTER:
            raise ConfigError(f"The roster has {len(self.members)} members; at most {MAX_ROSTER} are possible.")
        seen: dict[bytes, str] = {}
        for name, key in self.members.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(f"The roster's name {name!r} is not 1 to 64 letters, digits, dots, dashes.")
            if not isinstance(key, bytes) or weak_identity(key):
                raise ConfigError(f"The roster's key of {name} is not an Ed25519 public key.", "Ask for it again.")
            if key in seen:
                raise ConfigError(f"The roster has one key for {seen[key]} and {name}.", "Remove one of them.")
            seen[key] = name

    @property
    def digest(self) -> str:
        """SHA-256 of the sorted keys, hex: what operators compare."""
        keys = sorted(self.members.values())
        return hashlib.sha256(b"lensemble roster" + len(keys).to_bytes(4, "big") + b"".join(keys)).hexdigest()

    def strangers(self, identities: Iterable[bytes]) -> list[bytes]:
        """Those of `identities` that are not pinned."""
        known = set(self.members.values())
        return [identity for identity in identities if identity not in known]

    def encode(self) -> bytes:
        """The file's bytes."""
        members = {name: key.hex() for name, key in sorted(self.members.items())}
        return (json.dumps({"version": ROSTER_VERSION, "members": members}, indent=1) + "\n").encode()


def parse_key(text: object) -> bytes:
    """32 bytes from 64 lower-case hex digits. Raises ConfigError."""
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise ConfigError(f"The identity {str(text)[:80]!r} is not 64 lower-case hex digits.")
    return bytes.fromhex(text)


def parse_roster(content: bytes) -> Roster:
    """The roster of a file's bytes. Nothing unknown, doubled or mistyped is accepted.

    Raises:
        ConfigError: says what is wrong.
    """
    if len(content) > MAX_BYTES:
        raise ConfigError(f"The roster has {len(content)} bytes; at most {MAX_BYTES} are read.")
    try:
        tree = json.loads(content.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The roster is no JSON: {error}.") from error
    if not isinstance(tree, dict) or set(tree) != {"version", "members"} or not isinstance(tree["members"], dict):
        raise ConfigError('The roster must be {"version": 1, "members": {name: key, ...}} and nothing else.')
    if type(tree["version"]) is not int or tree["version"] != ROSTER_VERSION:
        raise ConfigError(f"The roster has version {tree['version']!r}; this release reads {ROSTER_VERSION}.")
    return Roster({name: parse_key(text) for name, text in tree["members"].items()})


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def load_roster(path: Path) -> Roster | None:
    """The roster in a file, or None if there is no such file.

    Raises:
        ConfigError: unreadable, malformed, or others than its owner may write it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        # A link that leads nowhere (a disk that is not mounted) is no consent to sum with anybody.
        raise ConfigError(f"The roster {path} cannot be read: {error.strerror}.") from error
    if mode & 0o022:
        raise ConfigError(f"The roster {path} can be written by others (mode {mode:o}).", f"Run: chmod 644 {path}")
    try:
        return parse_roster(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.remediation) from error


def save_roster(path: Path, roster: Roster) -> None:
    """Write a roster file atomically. It holds no secret."""
    atomic_write(path, roster.encode(), mode=0o644)


def simulated_roster(folder: Path) -> Roster:
    """The sites beside each other in one folder: what simulated sites pin, which have no operators to compare keys.

    Raises:
        ConfigError: a site's public key is damaged.
    """
    paths = sorted(folder.glob(f"*/{PUBLIC_KEY_FILE}"))
    return Roster({path.parent.name: parse_key(path.read_text("ascii", "replace").strip()) for path in paths})
