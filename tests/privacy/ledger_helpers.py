"""Ledgers for the tests: names, charges, and a sample with every kind of record."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lensemble_flwr.privacy import ledger as ledger_module
from lensemble_flwr.privacy.ledger import Budget, Charge, PrivacyLedger

IDENTITY = bytes(range(32))
FID, FID2 = (hashlib.sha256(name).digest() for name in (b"first", b"second"))
SIGMA_1 = Charge(1.0, 3, 1)
SIGMA_2 = Charge(2.0, 5, 1, delta_extra=1e-9, guarantee="central")
UNLIMITED = (Budget("local", math.inf, 1e-5),)


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
"""A file system in memory, where there is one: these tests rename thousands of files."""


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder for one test."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def h(number: int) -> bytes:
    """Some 32 bytes."""
    return hashlib.sha256(b"%d" % number).digest()


def start(folder: Path) -> Path:
    """A fresh ledger; returns the path of its log."""
    path = folder / "ledger.jsonl"
    PrivacyLedger.init(path, IDENTITY)
    return path


def fill(path: Path) -> None:
    """Every kind of record that a run writes; 4 rounds at sigma 1 and one at sigma 2."""
    with PrivacyLedger.open(path) as ledger:
        ledger.event("dataset_root", {"root": h(0).hex()})
        for index, end in enumerate(("close", "forfeit", "encoded", "reserved")):
            ledger.reserve(FID, index, SIGMA_1, UNLIMITED)
            if end == "forfeit":
                ledger.forfeit(FID, index, "a test")
            elif end != "reserved":
                ledger.encoded(FID, index, h(index), h(-index))
                if end == "close":
                    ledger.close(FID, index, "committed")
        ledger.reserve(FID2, 0, SIGMA_2, UNLIMITED)


def files(path: Path) -> tuple[bytes, bytes]:
    """The bytes of log and head."""
    return path.read_bytes(), path.with_suffix(".head").read_bytes()


def put(path: Path, log: bytes | None, head: bytes | None) -> None:
    """Set log and head to these bytes (None: remove), and remove everything else beside them."""
    for file in path.parent.iterdir():
        file.unlink()
    for name, data in ((path, log), (path.with_suffix(".head"), head)):
        if data is not None:
            name.write_bytes(data)


@contextmanager
def checkpoint_every(records: int) -> Iterator[None]:
    """Write checkpoints that often."""
    before = ledger_module.CHECKPOINT_EVERY
    ledger_module.CHECKPOINT_EVERY = records
    try:
        yield
    finally:
        ledger_module.CHECKPOINT_EVERY = before
