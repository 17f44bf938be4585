from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data import batches, episode_hash, gather, order, pack, window, without
from lensemble_flwr.errors import ContractViolation, DataError
from tests.data.helpers import make_episode, make_source


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(2, 6), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_windows_are_exactly_the_slices_of_each_episode(lengths: list[int], length: int, stride: int) -> None:
    expected = [(e, s) for e, n in enumerate(lengths) for s in range(0, n - length + 1, stride)]
    if not expected:
        with pytest.raises(DataError):
            window(lengths, length, stride)
        return
    rows = window(lengths, length, stride)
    assert rows.dtype == np.int64
    assert [tuple(r) for r in rows.tolist()] == expected


def test_gather_gives_the_frames_and_the_actions_between_them() -> None:
    source = make_source([3, 6, 2])
    episodes = [source.episode(i) for i in range(3)]
    packed = pack(episodes)
    rows = window(packed.lengths, 3)
    batch = gather(packed, rows, 3)
    assert batch.frames.shape == (len(rows), 3, 8, 8, 3)
    assert batch.actions.shape == (len(rows), 2, 2)
    for (number, start), frames, actions in zip(rows, batch.frames, batch.actions, strict=True):
        np.testing.assert_array_equal(frames, episodes[number].frames[start : start + 3])
        np.testing.assert_array_equal(actions, episodes[number].actions[start : start + 2])


def test_gather_refuses_a_window_outside_its_episode() -> None:
    packed = pack([make_episode(0, 3), make_episode(1, 3)])
    for row in ([0, 2], [0, -1], [2, 0], [-1, 0]):
        with pytest.raises(ContractViolation):
            gather(packed, np.array([row]), 3)
    with pytest.raises(ContractViolation):
        gather(packed, np.array([[0, 0]]), 1)


def test_bad_window_sizes() -> None:
    for length, stride in ((1, 1), (2, 0)):
        with pytest.raises(ContractViolation):
            window([5], length, stride)
    with pytest.raises(DataError):
        window([], 2)


def test_pack_refuses_mixtures_and_nothing() -> None:
    for episodes in ([], [make_episode(0), make_episode(1, side=16)], [make_episode(0), make_episode(1, dim=3)]):
        with pytest.raises(DataError):
            pack(episodes)
    with pytest.raises(DataError):
        pack([make_episode(0), make_episode(1, embodiment="other")])


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_each_epoch_uses_each_window_once_and_any_step_can_be_entered(n: int, size: int, seed: int, step: int) -> None:
    stream = batches(n, size, seed)
    taken = [next(stream) for _ in range(step + 1)]
    assert {len(b) for b in taken} == {min(n, size)}
    np.testing.assert_array_equal(order(n, size, seed, step), taken[step])
    used = np.concatenate(taken)
    for start in range(0, len(used) - n + 1, n):
        assert sorted(used[start : start + n]) == list(range(n))


def test_the_seed_chooses_the_order() -> None:
    one = np.concatenate([order(50, 25, 1, k) for k in range(4)])
    np.testing.assert_array_equal(one, np.concatenate([order(50, 25, 1, k) for k in range(4)]))
    assert not np.array_equal(one, np.concatenate([order(50, 25, 2, k) for k in range(4)]))
    assert not np.array_equal(one[:50], one[50:])
    assert not np.array_equal(order(50, 25, [1, 7], 0), order(50, 25, [1, 8], 0))


@pytest.mark.parametrize(("n", "size", "start"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_bad_batches(n: int, size: int, start: int) -> None:
    with pytest.raises(ContractViolation):
        order(n, size, 0, start)


def test_public_episodes_are_left_out_whatever_their_labels() -> None:
    source = make_source([3, 4, 5])
    relabelled = make_episode(1, 4, states=None, meta={})
    kept, left_out = without(source, {episode_hash(relabelled), bytes(32)})
    assert left_out == 1
    assert [len(e) for e in kept] == [3, 5]
    assert without(source, ()) == ([source.episode(i) for i in range(3)], 0)
    with pytest.raises(DataError):
        without(source, [episode_hash(source.episode(i)) for i in range(3)])
