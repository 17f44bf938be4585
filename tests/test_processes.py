"""Ending every process of a run."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lensemble_flwr import processes

SLEEP = "import time; time.sleep(60)"


def start(mark: str, code: str = SLEEP, **options: object) -> subprocess.Popen:
    environment = os.environ | {processes.MARK: mark}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, start_new_session=True, stdout=subprocess.PIPE, **options
    )  # type: ignore[call-overload]


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(16)


def test_family_is_closed_over_environment_session_and_parenthood(mark: str) -> None:
    """A child without the mark, one in a session of its own, and an orphan: all belong to the run."""
    code = (
        "import os, subprocess, sys, time\n"
        f"sleep = [sys.executable, '-c', {SLEEP!r}]\n"
        "plain = subprocess.Popen(sleep, env={})\n"
        "apart = subprocess.Popen(sleep, start_new_session=True)\n"
        "orphan = subprocess.run([sys.executable, '-c', 'import subprocess, sys; "
        "print(subprocess.Popen(sys.argv[1:], env={}, stdout=subprocess.DEVNULL).pid)', *sleep], "
        "stdout=subprocess.PIPE, text=True).stdout.strip()\n"
        "print(plain.pid, apart.pid, orphan, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = start(mark, code)
    try:
        assert root.stdout is not None
        pids = {root.pid, *map(int, root.stdout.readline().split())}
        assert len(pids) == 4
        assert {p.pid for p in processes.family(mark)} == pids
        assert processes.family(secrets.token_hex(16)) == []
    finally:
        left = processes.end_family(mark, children=[root])
        root.stdout.close()  # type: ignore[union-attr]
    assert left == []
    assert processes.family(mark) == []


def test_who_ignores_the_polite_signal_is_killed(mark: str) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    root = start(mark, code)
    assert root.stdout is not None
    root.stdout.readline()
    began = time.monotonic()
    assert processes.end_family(mark, grace_s=0.3, children=[root]) == []
    assert 0.3 <= time.monotonic() - began < 50  # its sleep takes 60
    root.stdout.close()


def test_guard_ends_the_run_when_its_owner_dies(mark: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    root = start(mark)
    read_end, write_end = os.pipe()
    guard = processes.start_guard(read_end, mark, str(folder))
    os.close(read_end)
    time.sleep(0.3)
    assert root.poll() is None
    assert folder.exists()
    os.close(write_end)  # what the system does when the owner is killed
    assert guard.wait(timeout=20) == 0
    assert root.wait(timeout=5) < 0
    assert not folder.exists()
    root.stdout.close()  # type: ignore[union-attr]


def test_start_time_tells_processes_apart() -> None:
    assert processes.start_time(os.getpid()) == processes.start_time(os.getpid()) != ""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert processes.start_time(child.pid) == ""
