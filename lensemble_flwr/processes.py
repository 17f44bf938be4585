"""Finding and ending every process of one run, also when the command that started it is gone.

Flower's runtime starts its parts in sessions of their own and ray starts servers and workers below them, so neither
"my child" nor "my process group" covers a run. What does: every process of a run inherits one environment variable
with a random value, and the family is closed under session (on macOS: process group) and parenthood.

This file uses the standard library only and is also a program: ``python -I -S processes.py guard FD MARK FOLDER``
waits until the pipe FD is closed, which happens when the command that holds its other end dies in any way
(``kill -9`` too), then ends the family of MARK and removes FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

MARK = "LENSEMBLE_RUN_MARK"


@dataclass(frozen=True)
class Process:
    """One line of the process table. ``group`` is the session id on Linux, the process group id elsewhere."""

    pid: int
    parent: int
    group: int
    state: str
    command: str

    @property
    def alive(self) -> bool:
        return self.state != "Z"


def start_time(pid: int) -> str:
    """When a process started, as an opaque text, empty if there is no such process: tells a reused pid apart."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    if os.path.isdir("/proc/self"):
        return ""
    return _ps("-o", "lstart=", "-p", str(pid)).strip()


def _ps(*arguments: str) -> str:
    try:
        done = subprocess.run(["ps", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _table_from_proc(mark: str) -> tuple[dict[int, Process], set[int]]:
    needle = f"{MARK}={mark}".encode()
    table: dict[int, Process] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                head, _, tail = file.read().rpartition(")")
            state, parent, _, session = tail.split()[:4]
            table[pid] = Process(pid, int(parent), int(session), state, head.partition("(")[2])
            with open(f"/proc/{pid}/environ", "rb") as raw:
                if needle in raw.read().split(b"\0"):
                    marked.add(pid)
        except (OSError, ValueError):  # gone meanwhile, or another user's
            continue
    return table, marked


def _table_from_ps(mark: str) -> tuple[dict[int, Process], set[int]]:
    table: dict[int, Process] = {}
    for line in _ps("-axo", "pid=,ppid=,pgid=,stat=,comm=").splitlines():
        fields = line.split(None, 4)
        if len(fields) == 5:
            pid, parent, group = (int(f) for f in fields[:3])
            table[pid] = Process(pid, parent, group, fields[3][:1], fields[4])
    needle = f"{MARK}={mark}"
    marked = {
        int(line.split(None, 1)[0]) for line in _ps("-axEwwo", "pid=,command=").splitlines() if needle in line.split()
    }
    return table, marked


def family(mark: str, roots: Collection[int] = (), groups: Collection[int] = ()) -> list[Process]:
    """Every process of the run ``mark``: those that carry it, ``roots``, members of ``groups``, all their
    descendants and session mates. Some of ray's agents overwrite their environment, hence the closure.
    The caller itself is never part of it."""
    table, marked = _table_from_proc(mark) if os.path.isdir("/proc/self") else _table_from_ps(mark)
    own = os.getpid()
    own_group = table[own].group if own in table else -1
    members = {pid for pid in (*marked, *roots) if pid in table and pid != own}
    trusted = set(groups)
    while True:
        trusted |= {table[pid].group for pid in members}
        trusted -= {own_group, 0}
        more = {
            p.pid
            for p in table.values()
            if p.pid != own and p.pid not in members and (p.parent in members or p.group in trusted)
        }
        if not more:
            return [table[pid] for pid in sorted(members)]
        members |= more


def _reap(children: Iterable[subprocess.Popen]) -> None:
    for child in children:
        child.poll()


def end_family(
    mark: str,
    roots: Collection[int] = (),
    *,
    grace_s: float = 2.0,
    kill_s: float = 5.0,
    children: Collection[subprocess.Popen] = (),
    clock: Callable[[], float] = time.monotonic,
) -> list[Process]:
    """End the family: SIGTERM, ``grace_s`` seconds, SIGKILL until nothing is left or ``kill_s`` seconds passed.

    Args:
        children: own child processes, reaped on the way so that they do not count as left.
    Returns:
        What is still alive (normally nothing).
    """
    started = clock()
    groups: set[int] = set()
    asked: set[int] = set()
    while True:
        _reap(children)
        left = [p for p in family(mark, roots, groups) if p.alive]
        elapsed = clock() - started
        if not left or elapsed > grace_s + kill_s:
            return left
        # A session id stays taken while it has members, so a group seen with a member of the run is safe to follow
        # for the seconds of this loop; across calls it is looked up anew.
        groups |= {p.group for p in left} - {0}
        for process in left:
            if elapsed >= grace_s:
                _signal(process.pid, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                _signal(process.pid, signal.SIGTERM)
        time.sleep(0.05)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def start_guard(read_end: int, mark: str, folder: str) -> subprocess.Popen:
    """Start this file as the guard of a run (see the module text); ``read_end`` is inherited by it."""
    environment = {k: v for k, v in os.environ.items() if k != MARK}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), "guard", str(read_end), mark, folder],
        pass_fds=(read_end,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=environment,
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 4 or arguments[0] != "guard":
        print(__doc__, file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe, mark, folder = int(arguments[1]), arguments[2], arguments[3]
    while True:
        try:
            if not os.read(pipe, 1):
                break
        except InterruptedError:
            continue
    left = end_family(mark)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
