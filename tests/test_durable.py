"""Writes that survive a crash: what is on the disk after success, failure and a kill at every step."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lensemble_flwr import durable
from lensemble_flwr.durable import append_fsync, atomic_write, sync_folder
from lensemble_flwr.errors import ArtifactError


class _Crash(BaseException):
    """Stands for the end of the process: nothing after it runs, no handler either."""


def test_atomic_write_replaces_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"one")
    assert path.read_bytes() == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    atomic_write(path, b"two", mode=0o644)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["a"]


def test_atomic_write_syncs_the_file_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_sync, real_replace, real_folder = durable.sync, os.replace, durable.sync_folder
    monkeypatch.setattr(durable, "sync", lambda h: (steps.append("file"), real_sync(h)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), real_replace(a, b)))
    monkeypatch.setattr(durable, "sync_folder", lambda f: (steps.append("folder"), real_folder(f)))
    atomic_write(tmp_path / "a", b"x")
    assert steps == ["file", "rename", "folder"]


@pytest.mark.parametrize("step", ["write_all", "sync", "replace", "sync_folder"])
def test_a_crash_at_any_step_leaves_the_old_bytes_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"old")

    def crash(*_: object) -> None:
        raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(os if step == "replace" else durable, step, crash)
        with pytest.raises(_Crash):
            atomic_write(path, b"new!")
    assert path.read_bytes() == (b"new!" if step == "sync_folder" else b"old")
    atomic_write(path, b"later")
    assert path.read_bytes() == b"later"


def test_a_leftover_of_a_killed_writer_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp").write_bytes(b"half of something long")
    atomic_write(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    assert os.listdir(tmp_path) == ["a"]


def test_a_second_writer_of_the_same_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    real = durable.sync

    def meanwhile(handle: int) -> None:
        monkeypatch.setattr(durable, "sync", real)
        with pytest.raises(ArtifactError, match="Another process"):
            atomic_write(path, b"second")
        real(handle)

    monkeypatch.setattr(durable, "sync", meanwhile)
    atomic_write(path, b"first")
    assert path.read_bytes() == b"first"


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "other" / "real"
    target.parent.mkdir()
    atomic_write(target, b"1")
    link = tmp_path / "link"
    link.symlink_to(target)
    atomic_write(link, b"2")
    assert link.is_symlink()
    assert target.read_bytes() == b"2"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("step", ["write_all", "sync"])
def test_a_failing_disk_is_an_artifact_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"old")
    append_fsync(tmp_path / "log", b"one\n")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable, step, fail)
    for write in (lambda: atomic_write(path, b"new"), lambda: append_fsync(tmp_path / "log", b"two\n")):
        with pytest.raises(ArtifactError) as caught:
            write()
        assert caught.value.remediation
        assert os.strerror(number) in caught.value.message
        assert caught.value.errno == number  # type: ignore[attr-defined]
    assert path.read_bytes() == b"old"
    assert (tmp_path / "log").read_bytes() == b"one\n"
    assert sorted(os.listdir(tmp_path)) == ["a", "log"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda h, data, offset: real(h, bytes(data[:3]), offset))
    atomic_write(tmp_path / "a", b"0123456789")
    append_fsync(tmp_path / "a", b"abcdefgh")
    assert (tmp_path / "a").read_bytes() == b"0123456789abcdefgh"


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """The kernel itself refuses the bytes: an append is cut back, a replacement leaves the old file."""
    code = """
import sys
from lensemble_flwr.durable import append_fsync, atomic_write
from lensemble_flwr.errors import ArtifactError
failed = 0
for write in (append_fsync, atomic_write):
    try:
        write(sys.argv[1], b"x" * 5000)
    except ArtifactError as error:
        assert "ulimit" in error.remediation, error
        failed += 1
print(failed)
"""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    path = tmp_path / "a"
    path.write_bytes(b"kept")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], preexec_fn=limit, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "2"
    assert path.read_bytes() == b"kept"
    assert os.listdir(tmp_path) == ["a"]


def test_missing_folder_and_folder_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="Create its folder"):
        atomic_write(tmp_path / "no" / "a", b"x")
    with pytest.raises(ArtifactError, match="Create its folder"):
        append_fsync(tmp_path / "no" / "a", b"x")
    with pytest.raises(ArtifactError, match="It is a folder"):
        append_fsync(tmp_path, b"x")
    with pytest.raises(ArtifactError):
        atomic_write(tmp_path, b"x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactError, match="not a folder"):
        atomic_write(tmp_path / "file" / "a", b"x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ArtifactError, match="writable"):
            atomic_write(tmp_path / "a", b"x")
    finally:
        tmp_path.chmod(0o700)


def test_append_creates_and_syncs_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", lambda folder: folders.append(folder))
    append_fsync(tmp_path / "log", b"one\n")
    append_fsync(tmp_path / "log", b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert folders == [tmp_path]
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_file_system_without_folder_sync_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int):
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(ArtifactError, match="Input/output"):
        sync_folder(tmp_path)
