"""The cache of decoded pictures: right, bounded, private, removable, and never in the way."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lensemble_flwr.data.formats import cache as module
from lensemble_flwr.data.formats.cache import FrameCache, cache_key, remove
from lensemble_flwr.errors import ArtifactError, ContractViolation
from tests.data.formats.conftest import Open, write_npz

SIDE = 8
PICTURE = SIDE * SIDE * 3


def pictures(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, SIDE, SIDE, 3), dtype=np.uint8)


def make(folder: Path, lengths: list[int], limit: int = 1 << 30, key: str = "k") -> FrameCache:
    return FrameCache(folder, cache_key({"name": key}), lengths, SIDE, limit)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5), order=st.randoms())
def test_what_was_put_is_what_comes_back(
    lengths: list[int], order: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("frames")
    cache = make(folder, lengths)
    numbers = list(range(len(lengths)))
    order.shuffle(numbers)  # type: ignore[attr-defined]
    for number in numbers:
        assert cache.get(number) is None
        assert cache.whole() is None
        wanted = pictures(number, lengths[number])
        got = cache.put(number, iter(wanted))
        assert got is not None
        assert (got == wanted).all()
        assert not got.flags.writeable
    again = make(folder, lengths)
    whole = again.whole()
    assert whole is not None
    assert (whole == np.concatenate([pictures(i, n) for i, n in enumerate(lengths)])).all()


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = make(tmp_path / "frames", [3])
        cache.put(0, iter(pictures(0, 3)))
    finally:
        os.umask(old)
    for path in [tmp_path / "frames", *(tmp_path / "frames").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_damaged_or_half_written_episode_is_decoded_again(tmp_path: Path) -> None:
    cache = make(tmp_path, [3, 4])
    for number, length in enumerate((3, 4)):
        cache.put(number, iter(pictures(number, length)))
    with open(cache.path / "frames", "r+b") as file:
        file.seek(5)
        file.write(b"\xaa\xbb")
    again = make(tmp_path, [3, 4])
    assert again.get(0) is None
    assert again.get(1) is not None

    def dies() -> Iterator[np.ndarray]:
        yield from pictures(7, 2)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        again.put(0, dies())
    assert make(tmp_path, [3, 4]).get(0) is None


@pytest.mark.parametrize("count", [2, 4, 300])
def test_another_number_of_pictures_is_refused_and_harms_no_neighbour(count: int, tmp_path: Path) -> None:
    cache = make(tmp_path, [3, 4])
    cache.put(1, iter(pictures(1, 4)))
    with pytest.raises(ContractViolation):
        cache.put(0, iter(pictures(0, count)))
    again = make(tmp_path, [3, 4])
    assert again.get(0) is None
    assert (again.get(1) == pictures(1, 4)).all()  # type: ignore[union-attr]


def test_the_bound_keeps_first_episodes_and_removes_what_nobody_uses(tmp_path: Path) -> None:
    lengths = [100, 100, 100]
    old = make(tmp_path, lengths, key="old")
    for number in range(3):
        old.put(number, iter(pictures(number, 100)))
    held = old.path
    limit = 250 * PICTURE
    del old
    used = make(tmp_path, lengths, limit, key="used")
    assert not held.exists()  # unused, and the bound needed its room
    assert used.episodes == 2
    assert used.put(2, iter(pictures(2, 100))) is None
    for number in range(2):
        used.put(number, iter(pictures(number, 100)))
    third = make(tmp_path, lengths, limit, key="third")
    assert used.path.exists()  # in use: not removed
    assert third.episodes == 0
    assert not remove(used.path)
    path = used.path
    del used
    assert remove(path)
    assert not path.exists()


def test_a_full_disk_ends_the_cache_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(tmp_path, [3, 4])
    cache.put(0, iter(pictures(0, 3)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_all", full)
    assert cache.put(1, iter(pictures(1, 4))) is None
    assert cache.get(0) is not None
    assert cache.get(1) is None
    assert cache.whole() is None


def test_a_removed_cache_serves_those_who_hold_it(tmp_path: Path) -> None:
    import shutil

    cache = make(tmp_path, [3])
    frames = cache.put(0, iter(pictures(0, 3)))
    shutil.rmtree(cache.path)
    assert frames is not None
    assert (frames == pictures(0, 3)).all()
    assert make(tmp_path, [3]).get(0) is None


# ------------------------------------------------------------------ as recordings use it


def frame_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "frames").glob("*/frames"))


def test_another_option_or_a_changed_file_is_another_cache(opened: Open, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "mine/a.npz")
    opened(tmp_path / "mine").episode(0)
    opened(tmp_path / "mine", action_low=-2, action_high=2).episode(0)  # does not change pictures
    assert len(frame_files(tmp_path)) == 1
    opened(tmp_path / "mine", image_size=24).episode(0)
    assert len(frame_files(tmp_path)) == 2
    before = opened(tmp_path / "mine").episode(0).frames.copy()
    write_npz(path, e=3)
    after = opened(tmp_path / "mine").episode(0).frames
    assert len(frame_files(tmp_path)) == 3
    assert (before != after).any()


def test_pictures_come_from_the_cache_the_second_time(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npz(tmp_path / "mine/a.npz")
    wanted = opened(tmp_path / "mine").episode(0).frames.copy()
    source = opened(tmp_path / "mine")
    monkeypatch.setattr(source._reader, "frames", lambda *_: pytest.fail("decoded again"))
    assert (source.episode(0).frames == wanted).all()
    assert (source.window(0, 2, 3).frames[0] == wanted[2:5]).all()


def test_packed_says_what_to_do_when_the_bound_is_too_low(opened: Open, tmp_path: Path) -> None:
    write_npz(tmp_path / "mine/a.npz", steps=40)
    source = opened(tmp_path / "mine", cache_gb=1e-5)
    with pytest.raises(ArtifactError, match="cache_gb"):
        source.packed()
    assert len(source.episode(0)) == 40  # decoded each time instead
    assert sum(p.stat().st_blocks * 512 for p in (tmp_path / "frames").rglob("*")) < 10_000 + 3 * 4096
    with pytest.raises(ArtifactError, match="cache: true"):
        opened(tmp_path / "mine", cache=False).packed()
    assert len(frame_files(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_is_a_typed_error(opened: Open, tmp_path: Path) -> None:
    write_npz(tmp_path / "mine/a.npz")
    (tmp_path / "frames").write_text("in the way")
    with pytest.raises(ArtifactError, match="frame cache"):
        opened(tmp_path / "mine").episode(0)
    assert len(opened(tmp_path / "mine", cache=False).episode(0)) == 5
