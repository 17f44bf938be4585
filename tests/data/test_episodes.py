from __future__ import annotations

import hashlib
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data import ActionSpec, EpisodeSource, MemorySource, canonical_bytes, episode_hash, episode_hashes
from lensemble_flwr.errors import ContractViolation, DataError
from tests.data.helpers import make_episode, make_source

F, A = np.zeros((4, 8, 8, 3), np.uint8), np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": F[:3]},
        {"frames": F[:1], "actions": A[:0]},
        {"frames": F[..., :1]},
        {"frames": F[:, :4]},
        {"frames": F.astype(np.float32)},
        {"frames": F[0]},
        {"frames": [1, 2]},
        {"frames": None},
        {"actions": A.astype(np.float64)},
        {"actions": A[:, 0]},
        {"actions": A[:, :0]},
        {"actions": np.full((3, 2), np.nan, np.float32)},
        {"actions": np.full((3, 2), np.inf, np.float32)},
        {"actions": np.zeros((3, 300), np.float32)},
        {"states": np.zeros((4, 0), np.float32)},
        {"states": np.zeros((3, 8), np.float32)},
        {"states": np.full((4, 8), np.nan, np.float32)},
        {"embodiment": ""},
        {"embodiment": "é"},
        {"embodiment": "a\nb"},
        {"embodiment": "a" * 65},
        {"embodiment": 3},
        {"meta": {str(i): i for i in range(33)}},
        {"meta": {"a": [1]}},
        {"meta": {1: 1}},
        {"meta": 3},
    ],
)
def test_a_bad_episode_is_refused_with_a_typed_error(changes: dict) -> None:
    with pytest.raises(DataError) as caught:
        make_episode(**changes)
    assert caught.value.remediation


def test_an_episode_is_read_only_and_leaves_the_callers_arrays_alone() -> None:
    frames = F.copy()
    episode = make_episode(frames=frames)
    with pytest.raises(ValueError):
        episode.frames[0] = 1
    with pytest.raises(TypeError):
        episode.meta["a"] = 1  # type: ignore[index]
    frames[0] = 7
    assert len(episode) == 3
    assert make_episode(states=None).states is None


def test_an_episode_survives_pickling() -> None:
    episode = make_episode(5)
    copy = pickle.loads(pickle.dumps(episode))  # noqa: S301
    assert episode_hash(copy) == episode_hash(episode)
    assert copy.meta == episode.meta
    assert not copy.frames.flags.writeable
    np.testing.assert_array_equal(copy.states, episode.states)


def test_canonical_bytes_follow_the_documented_layout() -> None:
    e = make_episode(1, steps=2, side=8, dim=3)
    expected = b"lensemble.episode\x00v1\x00" + struct.pack("<I", 4) + b"body"
    expected += struct.pack("<I", 3) + b"|u1" + struct.pack("<IQQQQ", 4, 3, 8, 8, 3) + e.frames.tobytes()
    expected += struct.pack("<I", 3) + b"<f4" + struct.pack("<IQQ", 2, 2, 3) + e.actions.tobytes()
    assert canonical_bytes(e) == expected
    assert episode_hash(e) == hashlib.sha256(expected).digest()


def test_episode_hash_is_pinned() -> None:
    frames = (np.arange(2 * 8 * 8 * 3) % 251).astype(np.uint8).reshape(2, 8, 8, 3)
    episode = make_episode(frames=frames, actions=np.array([[0.5, -1.0]], np.float32), states=None)
    assert episode_hash(episode).hex() == "130dca7386e8ee881be3710a01995580410e95cb7534c201f07e2e595bf38047"


def test_labels_and_notes_are_not_in_the_hash_but_everything_else_is() -> None:
    base = make_episode(2)
    same = make_episode(2, states=None, meta={"x": 1.5})
    assert episode_hash(same) == episode_hash(base)
    strided = make_episode(2, frames=np.asfortranarray(base.frames), actions=base.actions[::1].copy(order="F"))
    assert episode_hash(strided) == episode_hash(base)
    frames, actions = base.frames.copy(), base.actions.copy()
    frames[-1, -1, -1, -1] ^= 1
    actions[-1, -1] = np.nextafter(actions[-1, -1], np.float32(2))
    for other in (
        make_episode(2, frames=frames),
        make_episode(2, actions=actions),
        make_episode(2, embodiment="bodz"),
        make_episode(2, frames=base.frames.reshape(4, 12, 16, 1).repeat(3, 3)[:, :8, :8].copy()),
    ):
        assert episode_hash(other) != episode_hash(base)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_different_shapes_never_share_an_encoding(data: st.DataObject) -> None:
    def draw() -> tuple:
        key = data.draw(st.tuples(st.integers(1, 3), st.integers(8, 10), st.integers(8, 10), st.integers(1, 3)))
        return (*key, data.draw(st.sampled_from(["a", "b", "ab"])))

    def build(key: tuple):
        steps, height, width, dim, body = key
        return make_episode(
            frames=np.zeros((steps + 1, height, width, 3), np.uint8),
            actions=np.zeros((steps, dim), np.float32),
            states=None,
            embodiment=body,
        )

    one, two = draw(), draw()
    assert (episode_hash(build(one)) == episode_hash(build(two))) == (one == two)


@pytest.mark.parametrize(("kind", "dim"), [("other", 2), ("discrete", 0), ("continuous", 257), ("discrete", True)])
def test_a_bad_action_spec_is_refused(kind: str, dim: int) -> None:
    with pytest.raises(DataError):
        ActionSpec(kind, dim)  # type: ignore[arg-type]


def test_actions_must_be_those_of_the_spec() -> None:
    ActionSpec("continuous", 2).check(np.array([[1, -1]], np.float32))
    ActionSpec("discrete", 2).check(np.eye(2, dtype=np.float32))
    for spec, actions in (
        (ActionSpec("continuous", 2), [[1.5, 0]]),
        (ActionSpec("continuous", 2), [[np.nan, 0]]),
        (ActionSpec("continuous", 3), [[0, 0]]),
        (ActionSpec("discrete", 2), [[1, 1]]),
        (ActionSpec("discrete", 2), [[0, 0]]),
        (ActionSpec("discrete", 2), [[0.5, 0.5]]),
        (ActionSpec("discrete", 2), [[2, -1]]),
    ):
        with pytest.raises(DataError):
            spec.check(np.array(actions, np.float32))


def test_memory_source() -> None:
    source = make_source([3, 5])
    assert isinstance(source, EpisodeSource)
    assert (len(source), source.name, source.action_spec.dim) == (2, "mine", 2)
    assert len(source.episode(1)) == 5
    assert source.fingerprint == make_source([3, 5], "other").fingerprint
    assert source.fingerprint != make_source([5, 3]).fingerprint
    assert episode_hashes(source) == [episode_hash(source.episode(0)), episode_hash(source.episode(1))]
    for index in (-1, 2):
        with pytest.raises(ContractViolation):
            source.episode(index)


def test_a_memory_source_has_one_body_and_one_frame_size() -> None:
    spec = ActionSpec("continuous", 2)
    for episodes in (
        [],
        [make_episode(0), make_episode(1, side=16)],
        [make_episode(0), make_episode(1, embodiment="other")],
        [make_episode(0, dim=3)],
    ):
        with pytest.raises(DataError):
            MemorySource("mine", spec, episodes)
