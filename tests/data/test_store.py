from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.data import EpisodeSource, LanderData, LanderSpec, _lander_worker, ensure_dataset, lander, store
from lensemble_flwr.data import open_dataset as open_set
from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation, DataError

SPEC = LanderSpec.tiny()
ONE = LanderSpec(participants=1, episodes_per_participant=1, public_episodes=1, heldout_shifted=0, heldout_nominal=0,
                 frames=2, image_size=16)  # fmt: skip
ROOT = Path(__file__).parents[2]


def no_generation(*_: object) -> None:
    raise AssertionError("generated again")


def tree(cache: Path) -> dict[str, bytes]:
    return {str(p.relative_to(cache)): p.read_bytes() for p in sorted(cache.rglob("*")) if p.is_file()}


def test_a_complete_set_is_not_generated_again(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_generate", no_generation)
    calls: list = []
    data = ensure_dataset(SPEC, tiny_cache, lambda *a: calls.append(a))
    assert not calls
    assert isinstance(data.participant(0), EpisodeSource)
    assert open_set(SPEC, tiny_cache).fingerprint == data.fingerprint


def test_the_manifest_describes_the_files(tiny: LanderData) -> None:
    manifest = json.loads((tiny.directory / "manifest.json").read_text())
    assert LanderSpec.from_dict(manifest["spec"]) == SPEC
    files = {p.stem: p for p in tiny.directory.glob("*.npz")}
    assert set(files) == set(manifest["shards"]) == {s.name for s in SPEC.shards()}
    for name, entry in manifest["shards"].items():
        raw = files[name].read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert {p.suffix for p in tiny.directory.iterdir()} == {".npz", ".json"}


def test_other_processes_make_the_same_bytes(tiny_cache: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    ensure_dataset(SPEC, tmp_path, lambda d, n: progress.append((d, n)), processes=2)
    assert tree(tmp_path) == tree(tiny_cache)
    done = [d for d, _ in progress]
    assert done[0] == 0
    assert done == sorted(done)
    assert progress[-1] == (20, 20)


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "junk"])
def test_a_damaged_file_is_refused_and_made_again(tiny_copy: Path, damage: str) -> None:
    before = tree(tiny_copy)
    path = store.dataset_dir(SPEC, tiny_copy) / "participant-00001.npz"
    raw = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": raw[:-7], "flip": raw[:99] + bytes([raw[99] ^ 4]) + raw[100:], "junk": b"x"}[damage])
    data = open_set(SPEC, tiny_copy)
    assert len(data.participant(0).episode(0)) == 3  # others are not affected
    with pytest.raises(ArtifactError, match="missing, cut or altered"):
        data.participant(1).episode(0)
    progress: list = []
    ensure_dataset(SPEC, tiny_copy, lambda *a: progress.append(a))
    assert progress[-1] == (2, 2)  # only that file
    assert tree(tiny_copy) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}', None])
def test_a_damaged_manifest_is_made_again(tiny_copy: Path, text: str | None) -> None:
    before = tree(tiny_copy)
    manifest = store.dataset_dir(SPEC, tiny_copy) / "manifest.json"
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    with pytest.raises(ArtifactError):
        open_set(SPEC, tiny_copy)
    ensure_dataset(SPEC, tiny_copy, processes=1)
    assert tree(tiny_copy) == before


def test_an_altered_manifest_entry_is_not_believed(tiny_copy: Path) -> None:
    manifest = store.dataset_dir(SPEC, tiny_copy) / "manifest.json"
    values = json.loads(manifest.read_text())
    for field, value in (("sha256", "xyz"), ("bytes", "3"), ("fingerprint", None)):
        changed = json.loads(json.dumps(values))
        changed["shards"]["participant-00000"][field] = value
        manifest.write_text(json.dumps(changed))
        with pytest.raises(ArtifactError):
            open_set(SPEC, tiny_copy)


def test_silently_other_content_is_refused(tiny_copy: Path) -> None:
    """A lost file, and a machine on which the simulator gives other numbers: the dataset root would change."""
    directory = store.dataset_dir(SPEC, tiny_copy)
    values = json.loads((directory / "manifest.json").read_text())
    values["shards"]["participant-00000"]["fingerprint"] = "00" * 32
    (directory / "manifest.json").write_text(json.dumps(values))
    (directory / "participant-00000.npz").unlink()
    with pytest.raises(ArtifactError, match="gives other content"):
        ensure_dataset(SPEC, tiny_copy)


def test_a_well_hashed_file_of_another_shape_is_refused(tiny_copy: Path) -> None:
    directory = store.dataset_dir(SPEC, tiny_copy)
    values = json.loads((directory / "manifest.json").read_text())
    for raw in (store._pack({"frames": np.zeros((2, 4, 8, 8, 3), np.uint8)}), b"no zip", store._pack({})):
        (directory / "participant-00000.npz").write_bytes(raw)
        values["shards"]["participant-00000"] |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (directory / "manifest.json").write_text(json.dumps(values))
        with pytest.raises(ArtifactError):
            open_set(SPEC, tiny_copy).participant(0).arrays()


def test_a_reader_opens_its_own_file_only(tiny_copy: Path) -> None:
    directory = store.dataset_dir(SPEC, tiny_copy)
    data = open_set(SPEC, tiny_copy)
    opened: list[str] = []
    active = True

    def audit(event: str, arguments: tuple) -> None:
        if active and event == "open" and str(directory) in str(arguments[0]):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(audit)
    try:
        data.participant(2).episode(1)
        data.participant(2).episode(0)
    finally:
        active = False
    assert opened == ["participant-00002.npz"]


def test_arrays_and_episodes_agree_and_are_read_only(tiny: LanderData) -> None:
    source = tiny.public("lander-discrete")
    arrays = source.arrays()
    assert arrays.frames.shape == (3, 4, 64, 64, 3)
    assert not arrays.frames.flags.writeable
    episode = source.episode(2)
    np.testing.assert_array_equal(episode.frames, arrays.frames[2])
    np.testing.assert_array_equal(episode.actions, arrays.actions[2])
    np.testing.assert_array_equal(episode.states, arrays.states[2])
    assert np.shares_memory(episode.frames, arrays.frames)
    for index in (-1, 3):
        with pytest.raises(ContractViolation):
            source.episode(index)
    with pytest.raises(ContractViolation):
        tiny.participant(3)


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    data = ensure_dataset(SPEC, tmp_path, only=["participant-00001"])
    assert [p.name for p in data.directory.glob("*.npz")] == ["participant-00001.npz"]
    assert len(data.participant(1)) == 2
    with pytest.raises(ArtifactError, match="never generated"):
        data.public("lander-discrete")
    first = data.participant(1).fingerprint
    data = ensure_dataset(SPEC, tmp_path, only=["participant-00000"])
    assert data.participant(1).fingerprint == first
    with pytest.raises(ConfigError):
        ensure_dataset(SPEC, tmp_path, only=["participant-9"])


def test_two_processes_at_once_generate_once(tmp_path: Path) -> None:
    code = (
        "import sys; from lensemble_flwr.data import *; calls = [];"
        "data = ensure_dataset(LanderSpec.tiny(), sys.argv[1], lambda d, n: calls.append(d), processes=1);"
        "print(len(calls), data.fingerprint)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [child.communicate(timeout=120)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers[0][1] == answers[1][1]
    assert sorted(a[0] == "0" for a in answers) == [False, True]


def test_a_killed_generator_leaves_a_set_that_can_be_completed(tiny_cache: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from lensemble_flwr.data import *;"
        "ensure_dataset(LanderSpec.tiny(), sys.argv[1], lambda d, n: d >= 9 and os.kill(os.getpid(), 9), processes=1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=120, check=False)
    directory = store.dataset_dir(SPEC, tmp_path)
    assert 0 < len(list(directory.glob("*.npz"))) < 9
    (directory / "public-continuous.npz.1.tmp").write_bytes(b"half")
    progress: list = []
    ensure_dataset(SPEC, tmp_path, lambda *a: progress.append(a), processes=1)
    assert progress[0][1] < 20  # finished shards were kept
    assert tree(tmp_path) == tree(tiny_cache)


def test_an_interrupt_stops_the_workers(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_dataset(SPEC, tmp_path, interrupt, processes=2)
    deadline = time.monotonic() + 5
    while any(t.name == "lander-worker" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(t.name == "lander-worker" for t in threading.enumerate())
    ensure_dataset(SPEC, tmp_path, processes=1)  # the lock is free again


def test_a_lock_that_stays_taken_is_said(tmp_path: Path) -> None:
    path = store.dataset_dir(SPEC, tmp_path).with_suffix(".lock")
    with store._locked(path, 1.0), pytest.raises(ArtifactError, match="another process held"):
        ensure_dataset(SPEC, tmp_path, lock_timeout_s=0.3)


def test_a_full_disk_is_an_artifact_error_and_leaves_nothing_half(tmp_path: Path) -> None:
    """The system itself refuses to write more than 2 kB a file (the closest to a full disk without a disk)."""
    code = (
        "import resource, sys; from lensemble_flwr.data import *; from lensemble_flwr.errors import *;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: ensure_dataset(LanderSpec.tiny(), sys.argv[1], processes=1)\n"
        "except ArtifactError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "[ARTIFACT] Cannot write" in done.stdout
    assert "ulimit -f" in done.stdout
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_a_cache_folder_that_is_a_file_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="Cannot write"):
        ensure_dataset(ONE, tmp_path / "file")


def test_a_worker_that_dies_is_an_artifact_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ArtifactError, match="simulator process died"):
        ensure_dataset(SPEC, tmp_path, processes=2)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(ArtifactError, match="cannot start"):
        ensure_dataset(SPEC, tmp_path, processes=2)


def test_a_workers_typed_error_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lander, "MAX_ATTEMPTS", 1)
    impossible = LanderSpec.tiny(frames=200)
    tasks = [(s, 0, 1) for s in impossible.shards()[:1]]
    line = json.dumps([tasks[0][0].split, tasks[0][0].body, 0, 3, 0, 1])
    sink = io.BytesIO()
    _lander_worker.serve(io.BytesIO(f"{json.dumps(impossible.to_dict())}\n{line}\n".encode()), sink)
    kind, size = _lander_worker.HEADER.unpack(sink.getvalue()[: _lander_worker.HEADER.size])
    answer = sink.getvalue()[_lander_worker.HEADER.size :]
    assert (kind, size) == (b"E", len(answer))

    class Relay:
        """The worker's answer on the other end of the pipe."""

        def __init__(self, _: LanderSpec) -> None:
            self._stdin, self._stdout, self._spec = io.BytesIO(), io.BytesIO(sink.getvalue()), impossible

        work, _send, _receive = store._Child.work, store._Child._send, store._Child._receive
        _put, _died = staticmethod(store._Child._put), store._Child._died

        def close(self) -> None: ...

    monkeypatch.setattr(store, "_Child", Relay)
    with pytest.raises(DataError, match="stayed in view"):
        list(store._in_processes(impossible, tasks, 2))


def test_reading_needs_no_simulator(tiny_cache: Path) -> None:
    """No torch, no Flower, no simulator: a site with cached data needs numpy only."""
    code = (
        "import sys; from lensemble_flwr.data import *;"
        "open_dataset(LanderSpec.tiny(), sys.argv[1]).participant(0).episode(0);"
        "print([m for m in ('torch', 'flwr', 'gymnasium', 'Box2D', 'pygame', 'cv2') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_cache)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_generating_leaves_no_trace_in_the_output(tmp_path: Path) -> None:
    code = "import sys; from lensemble_flwr.data import *; ensure_dataset(LanderSpec.tiny(), sys.argv[1], processes=1)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={k: v for k, v in os.environ.items() if k not in ("SDL_VIDEODRIVER", "DISPLAY")},
    )
    assert done.stdout == ""
