"""A crash, a power cut or a full disk at every byte and every system call: nothing that was promised is forgotten."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lensemble_flwr.errors import LedgerError
from lensemble_flwr.privacy.ledger import PrivacyLedger
from lensemble_flwr.privacy.ledger_repair import verify
from tests.privacy.ledger_helpers import (
    FID,
    IDENTITY,
    SIGMA_1,
    UNLIMITED,
    checkpoint_every,
    files,
    fill,
    h,
    memory_folder,
    put,
    start,
)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


# ---------------------------------------------------------------------- every byte

ACTS: dict[str, Callable[[PrivacyLedger], None]] = {
    "reserved": lambda ledger: ledger.reserve(FID, 9, SIGMA_1, UNLIMITED),
    "encoded": lambda ledger: ledger.encoded(FID, 8, h(1), h(2)),
    "forfeited": lambda ledger: ledger.forfeit(FID, 2, "a crash"),
    "closed": lambda ledger: ledger.close(FID, 2, "committed"),
    "event": lambda ledger: ledger.event("note", {"a": "b"}),
}


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("act", ACTS)
def test_a_crash_at_every_byte_of_a_record(tmp_path: Path, act: str) -> None:
    path = start(tmp_path)
    fill(path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 8, SIGMA_1, UNLIMITED)
        before, log = ledger.mu2("local"), path.read_bytes()
        head = path.with_suffix(".head").read_bytes()
        ACTS[act](ledger)
        after, line = ledger.mu2("local"), path.read_bytes()[len(log) :]
    for length in range(len(line) + 1):
        put(path, log + line[:length], head)
        whole = length == len(line)
        report = verify(path)
        assert report.ok
        assert report.beyond == whole
        assert report.torn_bytes == (0 if whole else length)
        assert PrivacyLedger.open(path, read_only=True).mu2("local") == (after if whole else before)
        with PrivacyLedger.open(path, IDENTITY) as ledger:
            assert ledger.mu2("local") == (after if whole else before)
            assert len(ledger.recovered) == (length > 0)
            torn = tmp_path / "ledger.torn-0"
            assert torn.exists() == (0 < length < len(line))
            if torn.exists():
                assert torn.read_bytes() == line[:length]
            # What was under way: a reservation that never took effect may be made, a torn `encoded` is lost for good.
            if act == "reserved" and not whole:
                assert ledger.state(FID, 9).state is None
            elif act == "reserved":
                assert ledger.state(FID, 9).state == "reserved"
                ledger.forfeit(FID, 9, "crash")
            elif act == "encoded" and not whole:
                assert ledger.state(FID, 8).state == "reserved"
                with pytest.raises(LedgerError, match="Forfeit it"):
                    ledger.encoded(FID, 8, h(1), h(2))
                ledger.forfeit(FID, 8, "torn")
            elif act == "encoded":
                assert ledger.state(FID, 8).q_hash == h(1)
            ledger.reserve(FID, 10, SIGMA_1, UNLIMITED)
        with PrivacyLedger.open(path) as ledger:
            assert ledger.recovered == []
            assert ledger.mu2("local") == (after if whole else before) + 1


@pytest.mark.usefixtures("no_fsync")
def test_a_crash_at_every_byte_of_the_head(tmp_path: Path) -> None:
    path = start(tmp_path)
    fill(path)
    log, old = files(path)
    with PrivacyLedger.open(path) as ledger:
        ledger.reserve(FID, 9, SIGMA_1, UNLIMITED)
        after = ledger.mu2("local")
    log, new = files(path)
    for length in range(len(new) + 1):  # written beside the old one, not yet renamed
        put(path, log, old)
        (tmp_path / ".ledger.head.tmp").write_bytes(new[:length])
        with PrivacyLedger.open(path) as ledger:
            assert ledger.mu2("local") == after
            ledger.reserve(FID, 10, SIGMA_1, UNLIMITED)
        assert sorted(os.listdir(tmp_path)) == ["ledger.head", "ledger.jsonl"]


# ---------------------------------------------------------------------- every system call


class Stop(BaseException):
    """The end of the process."""


class Disk:
    """Counts the calls that change the disk, stops the process at one of them, and knows what a power cut leaves.

    A power cut forgets every byte that was not synced since it was written and every name whose folder was not.
    """

    CALLS = ("pwrite", "fsync", "replace", "ftruncate")

    def __init__(self, folder: Path, stop_at: int, error: int | None, short: bool) -> None:
        self.folder, self.stop_at, self.error, self.short = folder, stop_at, error, short
        self.calls, self.real = 0, {name: getattr(os, name) for name in self.CALLS}
        self.names = self._names()
        self.synced = {inode: (folder / name).read_bytes() for name, inode in self.names.items()}

    def _names(self) -> dict[str, int]:
        return {name: (self.folder / name).stat().st_ino for name in os.listdir(self.folder)}

    def call(self, name: str, *args):
        self.calls += 1
        if self.calls == self.stop_at:
            if name == "pwrite" and self.short:
                handle, data, offset = args
                self.real["pwrite"](handle, bytes(data)[: len(data) // 2], offset)
            raise Stop if self.error is None else OSError(self.error, os.strerror(self.error))
        result = self.real[name](*args)
        if name == "fsync":
            inode = os.fstat(args[0]).st_ino
            if inode == self.folder.stat().st_ino:
                self.names = self._names()
            else:
                self.synced[inode] = Path(f"/proc/self/fd/{args[0]}").read_bytes()
        return result

    def power_cut(self) -> None:
        left = {name: self.synced.get(inode, b"") for name, inode in self.names.items()}
        for name in os.listdir(self.folder):
            (self.folder / name).unlink()
        for name, data in left.items():
            (self.folder / name).write_bytes(data)


@contextmanager
def watched(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in Disk.CALLS:
            patch.setattr(os, name, lambda *args, name=name: disk.call(name, *args))
        yield


def live(path: Path, promised: list[tuple[str, int]]) -> None:
    """Two rounds and a bit; ``promised`` grows with every call that returned."""
    with PrivacyLedger.open(path, IDENTITY) as ledger:
        for index in (20, 21):
            ledger.reserve(FID, index, SIGMA_1, UNLIMITED)
            promised.append(("reserved", index))
            ledger.encoded(FID, index, h(1), h(2))
            promised.append(("encoded", index))
            ledger.close(FID, index, "committed")
            promised.append(("closed", index))
        ledger.reserve(FID, 22, SIGMA_1, UNLIMITED)
        promised.append(("reserved", 22))


LATER = {None: 0, "reserved": 1, "encoded": 2, "closed": 3}


def check_promises(path: Path, promised: list[tuple[str, int]], spent_before: float) -> None:
    with PrivacyLedger.open(path, IDENTITY) as ledger:
        rounds = [index for state, index in promised if state == "reserved"]
        assert spent_before + len(rounds) <= ledger.mu2("local") <= spent_before + len(rounds) + 1
        for state, index in promised:
            assert LATER[ledger.state(FID, index).state] >= LATER[state]
        for index in ledger.open_rounds(FID):
            ledger.close(FID, index, "burnt")
        ledger.reserve(FID, 30, SIGMA_1, UNLIMITED)
    assert verify(path).ok


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("found", ["clean", "torn", "beyond"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("short", [False, True], ids=["", "half a write"])
def test_the_end_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, power: bool, short: bool
) -> None:
    """From a clean ledger, and from one that must first recover from an earlier crash."""
    path = start(tmp_path)
    fill(path)
    log, head = files(path)
    spent = 4.25
    if found == "torn":
        log += b'{"crc":"0000'
    elif found == "beyond":
        with PrivacyLedger.open(path) as ledger:
            ledger.reserve(FID, 19, SIGMA_1, UNLIMITED)
        log, spent = path.read_bytes(), 5.25
    stop_at = 0
    with checkpoint_every(3):
        while True:
            stop_at += 1
            put(path, log, head)
            disk, promised = Disk(tmp_path, stop_at, None, short), []
            with watched(disk, monkeypatch):
                try:
                    live(path, promised)
                    break
                except Stop:
                    pass
            if power:
                disk.power_cut()
            check_promises(path, promised, spent)
    assert stop_at > 7 * 5, "every call was tried"


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("power", [False, True], ids=["", "then a power cut"])
def test_a_full_or_failing_disk_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, power: bool
) -> None:
    path = start(tmp_path)
    fill(path)
    log, head = files(path)
    stop_at = 0
    while True:
        stop_at += 1
        put(path, log + b"torn", head)
        disk, promised, failure = Disk(tmp_path, stop_at, number, short=True), [], None
        with watched(disk, monkeypatch):
            try:
                live(path, promised)
                break
            except LedgerError as error:
                failure = error
        assert os.strerror(number) in failure.message
        assert failure.remediation
        if power:
            disk.power_cut()
        check_promises(path, promised, 4.25)
    assert stop_at > 7 * 5


@pytest.mark.usefixtures("no_fsync")
def test_a_failed_sync_then_a_restart_then_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync the bytes can be read though they are not on the disk: recovery must not trust them."""
    path = start(tmp_path)
    fill(path)
    log, head = files(path)
    for stop_at in range(1, 6):
        put(path, log, head)
        disk, promised = Disk(tmp_path, stop_at, errno.EIO, short=False), []
        with watched(disk, monkeypatch):
            with pytest.raises(LedgerError):
                live(path, promised)
            with PrivacyLedger.open(path) as ledger:
                spent = ledger.mu2("local")
        disk.power_cut()
        with PrivacyLedger.open(path) as ledger:
            assert ledger.mu2("local") == spent


def test_after_a_failed_write_the_ledger_must_be_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start(tmp_path)
    with PrivacyLedger.open(path) as ledger:

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "failed")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(LedgerError, match="failed"):
                ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        for act in (
            lambda: ledger.reserve(FID, 1, SIGMA_1, UNLIMITED),
            lambda: ledger.encoded(FID, 0, h(0), h(0)),
            lambda: ledger.event("x", {}),
        ):
            with pytest.raises(LedgerError, match=r"not open|earlier write|before the ledger was opened"):
                act()
    with PrivacyLedger.open(path) as ledger:
        assert ledger.mu2("local") == 1.0, "the bytes are there, so they count"
        ledger.forfeit(FID, 0, "the disk failed")


def test_fsyncs_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three records a round: the log, the new head, the folder of its name. The order is the guarantee."""
    path = start(tmp_path)
    steps: list[str] = []
    with PrivacyLedger.open(path) as ledger:
        real_fsync, real_replace = os.fsync, os.replace

        def fsync(handle: int) -> None:
            steps.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
            real_fsync(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), real_replace(a, b)))
        ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
        assert steps == ["sync ledger.jsonl", "sync .ledger.head.tmp", "rename", f"sync {tmp_path.name}"]
        ledger.encoded(FID, 0, h(1), h(2))
        ledger.close(FID, 0, "committed")
    assert sum(step.startswith("sync") for step in steps) == 9


# ---------------------------------------------------------------------- the real thing

WORKER = """
import hashlib, sys
from lensemble_flwr.privacy.ledger import Charge, PrivacyLedger
fid, charge = bytes(32), Charge(1.0, 3, 1)
with PrivacyLedger.open(sys.argv[1]) as ledger:
    print("ready", flush=True)
    first = max(ledger.rounds(fid), default=-1) + 1
    for index in range(first, first + 10**6):
        ledger.reserve(fid, index, charge, ())
        print(index, "reserved", flush=True)
        ledger.encoded(fid, index, bytes(32), bytes(32))
        print(index, "encoded", flush=True)
        ledger.close(fid, index, "committed")
        print(index, "closed", flush=True)
"""


def test_kill_9_in_the_middle_of_rounds(tmp_path: Path) -> None:
    path = start(tmp_path)
    known = 0.0
    for life in range(5):
        worker = subprocess.Popen([sys.executable, "-c", WORKER, str(path)], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.037 * life)
        worker.send_signal(signal.SIGKILL)
        lines = worker.communicate()[0].splitlines()
        told = [line.split() for line in lines if line.endswith(("reserved", "encoded", "closed"))]
        rounds = sum(state == "reserved" for _, state in told)
        with PrivacyLedger.open(path, IDENTITY) as ledger:
            assert known + rounds <= ledger.mu2("local") <= known + rounds + 1
            for index, state in told:
                assert LATER[ledger.state(bytes(32), int(index)).state] >= LATER[state]
            known = ledger.mu2("local")
        assert rounds > 0
    assert verify(path).ok


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("small", ["log", "head", "both"])
def test_a_really_full_disk(tmp_path: Path, small: str) -> None:
    """A tiny file system for the log, the head or both: writing fails, is typed, and what was promised is there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount")
    try:
        path = (disk if small != "head" else tmp_path) / "ledger.jsonl"
        head = (disk if small != "log" else tmp_path) / "ledger.head"
        PrivacyLedger.init(path, IDENTITY, head)
        if small == "head":
            (disk / "ballast").write_bytes(b"x" * (15 * 4096))
        promised = 0
        with PrivacyLedger.open(path, head_path=head) as ledger:
            try:
                for index in range(1000):
                    ledger.reserve(FID, index, SIGMA_1, UNLIMITED)
                    promised += 1
            except LedgerError as error:
                full = error
        assert "Free space" in full.remediation
        assert small == "head" or promised > 50
        spent = PrivacyLedger.open(path, head_path=head, read_only=True).mu2("local")
        assert promised <= spent <= promised + 1
        if small == "head":
            (disk / "ballast").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        with PrivacyLedger.open(path, head_path=head) as ledger:
            assert promised <= ledger.mu2("local") <= promised + 1
            ledger.reserve(FID, 5000, SIGMA_1, UNLIMITED)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount")
    try:
        path = start(disk)
        fill(path)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(LedgerError, match=r"Read-only.*mounted read-only"):
            PrivacyLedger.open(path)
        with pytest.raises(LedgerError, match="mounted read-only"):
            PrivacyLedger.init(disk / "other.jsonl", IDENTITY)
        assert PrivacyLedger.open(path, read_only=True).mu2("local") == 4.25
        assert verify(path).ok
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    path = start(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with PrivacyLedger.open(path) as ledger, pytest.raises(LedgerError, match="writable"):
            ledger.reserve(FID, 0, SIGMA_1, UNLIMITED)
    finally:
        tmp_path.chmod(0o700)
    with PrivacyLedger.open(path) as ledger:
        assert ledger.mu2("local") == 1.0, "the record was whole before its head failed"
