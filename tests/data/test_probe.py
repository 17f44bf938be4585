from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.data import LanderData, Probe, build_probe, check_probe, episode_hashes, load_probe, save_probe
from lensemble_flwr.errors import ArtifactError, ProbeError
from tests.data.helpers import make_source


def test_landmarks_come_from_different_episodes_of_every_source() -> None:
    sources = [make_source([5] * 12, "a"), make_source([7] * 12, "b", first_seed=100)]
    probe = build_probe(sources, latent_dim=5, seed=3)
    assert len(probe) == 20
    assert len(probe.episode_hashes) == 20
    known = [set(episode_hashes(s)) for s in sources]
    assert [len(probe.episode_hashes & hashes) for hashes in known] == [10, 10]
    by_hash = {h: s.episode(i) for s in sources for i, h in enumerate(episode_hashes(s))}
    for picture, origin in zip(probe.frames, probe.episodes, strict=True):
        assert any(np.array_equal(picture, f) for f in by_hash[origin.tobytes()].frames)


def test_with_few_episodes_landmarks_spread_evenly_and_no_picture_is_used_twice() -> None:
    source = make_source([9, 9, 9])
    probe = build_probe([source], latent_dim=2, seed=0, landmarks=20)
    counts = [int((probe.episodes == np.frombuffer(h, np.uint8)).all(1).sum()) for h in episode_hashes(source)]
    assert sorted(counts) == [6, 7, 7]
    assert len({f.tobytes() for f in probe.frames}) == 20


def test_seed_and_content_decide_the_hash() -> None:
    sources = [make_source([5] * 12)]
    one = build_probe(sources, 2, seed=1)
    assert one.hash == build_probe(sources, 2, seed=1).hash
    assert one.hash != build_probe(sources, 2, seed=2).hash
    frames, episodes = one.frames.copy(), one.episodes.copy()
    frames[0, 0, 0, 0] ^= 1
    episodes[-1, 0] ^= 1
    changed = {one.hash, Probe(frames, one.episodes).hash, Probe(one.frames, episodes).hash}
    swapped = Probe(one.frames[::-1].copy(), one.episodes[::-1].copy())
    assert len({*changed, swapped.hash}) == 4


def test_probe_hash_is_pinned() -> None:
    frames = (np.arange(2 * 8 * 8 * 3) % 251).astype(np.uint8).reshape(2, 8, 8, 3)
    episodes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    assert Probe(frames, episodes).hash.hex() == "6a6c96f86bb5d22f919670617b2f6d1835a909897f6082f3d4697271d3c07afd"


def test_save_and_load(tmp_path: Path, tiny: LanderData) -> None:
    probe = build_probe([tiny.public(b) for b in tiny.embodiments], 4, seed=0)
    path = tmp_path / "deep" / "probe.safetensors"
    save_probe(probe, path)
    again = load_probe(path, probe.hash)
    assert again.hash == probe.hash
    np.testing.assert_array_equal(again.frames, probe.frames)
    assert [p.name for p in path.parent.iterdir()] == ["probe.safetensors"]
    with pytest.raises(ProbeError) as caught:
        load_probe(path, bytes(32))
    assert caught.value.fields["got_hash"] == probe.hash.hex()
    check_probe(probe, None)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    probe = build_probe([make_source([5] * 12)], 2, seed=1)
    save_probe(probe, path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-5])
    with pytest.raises(ProbeError):
        load_probe(path)
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ProbeError):
        load_probe(path, probe.hash)
    for junk in (b"", b"hello", b"\xff" * 64):
        path.write_bytes(junk)
        with pytest.raises(ProbeError):
            load_probe(path)
    from safetensors.numpy import save

    path.write_bytes(save({"other": np.zeros(3)}))
    with pytest.raises(ProbeError):
        load_probe(path)
    path.write_bytes(save({"frames": probe.frames.copy(), "episodes": np.zeros((3, 32), np.uint8)}))
    with pytest.raises(ProbeError):
        load_probe(path)
    with pytest.raises(ArtifactError):
        load_probe(tmp_path / "absent")
    with pytest.raises(ArtifactError):
        save_probe(probe, path / "below-a-file")


def test_too_few_landmarks_or_pictures() -> None:
    source = make_source([5] * 3)
    for arguments in ({"landmarks": 7}, {"landmarks": 19}, {"latent_dim": 0}, {"latent_dim": 20_000}):
        with pytest.raises(ProbeError):
            build_probe([source], **{"latent_dim": 2, "seed": 0, **arguments})
    with pytest.raises(ProbeError):
        build_probe([], 2, seed=0)
    with pytest.raises(ProbeError):
        build_probe([source, make_source([5] * 3, side=16)], 2, seed=0)
