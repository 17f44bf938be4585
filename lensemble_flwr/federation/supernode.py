"""Which certificate authority the SuperNode above this process trusts, as far as the system can tell.

The connection to the SuperLink is the SuperNode's: a process of the app sees neither its socket nor the certificate on
it. What it can see is how the SuperNode was started (its command line) and the file that it was told to trust. Flower
reads that file once, at the start, so the file of now is the file of then only if nothing has touched it since: its
change time, which no program can set, must lie before the SuperNode's start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from lensemble_flwr.errors import ConfigError, PolicyViolation

_PROGRAM = "flower-supernode"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Ancestor:
    """A process above this one: its words, its working folder, and when it started (seconds since 1970)."""

    words: tuple[str, ...]
    folder: Path
    started: float


def fingerprints(path: Path) -> tuple[str, ...]:
    """SHA-256 fingerprints (hex) of the certificates in a PEM file; none without the file.

    Raises:
        ConfigError: the file holds no certificates.
    """
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} holds no readable certificate: {error}.") from error
    return tuple(certificate.fingerprint(hashes.SHA256()).hex() for certificate in certificates)


def trusted_authorities(own: Path, find: Callable[[], Ancestor | None] | None = None) -> tuple[str, ...]:
    """Fingerprints of the authorities that this process's SuperNode was started with.

    Args:
        own: the site's ``ca.crt``, which stands in where the system does not show other processes (no ``/proc``).
        find: looks for the SuperNode; another one in tests.

    Raises:
        PolicyViolation: it cannot be known: no SuperNode above this process, one without TLS or without a file of its
            own, or a file that was touched after it started.
        ConfigError: the file holds no certificates.
    """
    if find is None:
        if not (_PROC / "self").exists():
            return fingerprints(own)
        find = _supernode
    node = find()
    if node is None:
        raise _unknown("this process was not started by a SuperNode")
    named = _option(node.words, "--root-certificates")
    if "--insecure" in node.words or named is None:
        raise _unknown("the SuperNode was started without --root-certificates")
    path = node.folder / named
    if not path.exists() or path.stat().st_ctime >= node.started:
        raise _unknown(f"{path} was changed after the SuperNode had started; restart the SuperNode")
    return fingerprints(path)


def _unknown(why: str) -> PolicyViolation:
    text = f"The site's rule allowed_coordinators forbids this round: whom the SuperNode trusts is not known, {why}."
    return PolicyViolation(text, rule="allowed_coordinators")


def _option(words: tuple[str, ...], name: str) -> str | None:
    """The last value of an option, as argparse takes it."""
    found = None
    for word, following in zip(words, (*words[1:], None), strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _supernode() -> Ancestor | None:
    """The nearest process above this one that runs Flower's SuperNode program."""
    pid = os.getpid()
    try:
        while pid > 1:
            stat = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
            words = tuple((_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
            if any(Path(word).name == _PROGRAM for word in words[:3]):
                boot = next(
                    float(line.split()[1])
                    for line in (_PROC / "stat").read_text().splitlines()
                    if line.startswith("btime ")
                )
                started = boot + int(stat[19]) / os.sysconf("SC_CLK_TCK")
                return Ancestor(words, Path(os.readlink(_PROC / str(pid) / "cwd")), started)
            pid = int(stat[1])
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return None
