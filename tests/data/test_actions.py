"""Action specs: what encode gives, what is refused, and what names a spec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data import ActionSpec
from lensemble_flwr.errors import DataError

ARM = ActionSpec.continuous([0, -2, 5], [10, 2, 5], names=["x", "y", "z"], rate_hz=20, relative=True)


def test_continuous_entries_are_scaled_by_their_bounds() -> None:
    encoded = ARM.encode([[0, 2, 5], [10, 0, 5], [5, -2, 5]])
    np.testing.assert_allclose(encoded, [[-1, 1, 0], [1, 0, 0], [0, -1, 0]])
    assert encoded.dtype == np.float32
    assert ARM.width == ARM.raw_width == 3
    np.testing.assert_allclose(ActionSpec("continuous", 1).encode([-1, 0.25, 1]), [[-1], [0.25], [1]])


def test_choices_become_one_hot_blocks() -> None:
    np.testing.assert_array_equal(ActionSpec.discrete(3).encode([2, 0]), [[0, 0, 1], [1, 0, 0]])
    multi = ActionSpec.multi_discrete([2, 3])
    np.testing.assert_array_equal(multi.encode([[1, 2]]), [[0, 1, 0, 0, 1]])
    assert (multi.width, multi.raw_width) == (5, 2)


def test_mixed_parts_stand_side_by_side() -> None:
    spec = ActionSpec.mixed(
        [ActionSpec.continuous([0], [4]), ActionSpec.discrete(2), ActionSpec.multi_discrete([2, 2])]
    )
    assert (spec.width, spec.raw_width) == (7, 4)
    np.testing.assert_array_equal(spec.encode([[4, 1, 0, 1]]), [[1, 0, 1, 1, 0, 0, 1]])
    spec.check(spec.encode([[1, 0, 1, 1]]))
    with pytest.raises(DataError):
        spec.check(np.array([[0, 1, 1, 1, 0, 1, 0]], np.float32))


@pytest.mark.parametrize(
    ("spec", "raw"),
    [
        (ARM, [[11, 0, 5]]),
        (ARM, [[np.nan, 0, 5]]),
        (ARM, [[np.inf, 0, 5]]),
        (ARM, [[1, 0]]),
        (ARM, [1, 0, 5]),
        (ActionSpec.discrete(3), [3]),
        (ActionSpec.discrete(3), [-1]),
        (ActionSpec.discrete(3), [0.5]),
        (ActionSpec.multi_discrete([2, 2]), [[0, 2]]),
    ],
)
def test_what_does_not_fit_is_refused(spec: ActionSpec, raw: list) -> None:
    with pytest.raises(DataError) as caught:
        spec.encode(raw)
    assert caught.value.remediation


@pytest.mark.parametrize(
    "make",
    [
        lambda: ActionSpec.continuous([0, 0], [1]),
        lambda: ActionSpec.continuous([1], [0]),
        lambda: ActionSpec.continuous([0], [np.inf]),
        lambda: ActionSpec.continuous([], []),
        lambda: ActionSpec.continuous([0], [1], names=["a", "b"]),
        lambda: ActionSpec.continuous([0], [1], rate_hz=0),
        lambda: ActionSpec.multi_discrete([2, 0]),
        lambda: ActionSpec.multi_discrete([]),
        lambda: ActionSpec.mixed([]),
        lambda: ActionSpec.mixed([ActionSpec.mixed([ActionSpec.discrete(2)])]),
        lambda: ActionSpec("multi_discrete", 3),
        lambda: ActionSpec("continuous", 3, sizes=(3,)),
        lambda: ActionSpec("discrete", 2, low=(0.0, 0.0), high=(1.0, 1.0)),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(make) -> None:
    with pytest.raises(DataError):
        make()


SIMPLE = st.one_of(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=4).map(
        lambda rows: ActionSpec.continuous([low for low, _ in rows], [low + span for low, span in rows])
    ),
    st.integers(1, 6).map(ActionSpec.discrete),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(ActionSpec.multi_discrete),
)
SPECS = st.one_of(SIMPLE, st.lists(SIMPLE, min_size=1, max_size=3).map(ActionSpec.mixed))


def draw(spec: ActionSpec, rng: np.random.Generator, steps: int) -> np.ndarray:
    if spec.parts:
        return np.concatenate([draw(part, rng, steps) for part in spec.parts], axis=1)
    if spec.kind == "continuous":
        low, high = np.array(spec.low), np.array(spec.high)
        return low + (high - low) * rng.random((steps, spec.dim))
    return np.stack([rng.integers(0, n, steps) for n in spec.sizes or (spec.dim,)], axis=1).astype(float)


@settings(max_examples=80, deadline=None)
@given(SPECS, st.integers(0, 2**32))
def test_whatever_fits_encodes_to_what_is_checked(spec: ActionSpec, seed: int) -> None:
    encoded = spec.encode(draw(spec, np.random.default_rng(seed), 5))
    assert encoded.shape == (5, spec.width)
    assert encoded.dtype == np.float32
    spec.check(encoded)
    again = ActionSpec.from_dict(spec.to_dict())
    assert again == spec
    assert again.hash == spec.hash


def test_the_hash_covers_everything_and_the_public_shape_only_the_shape() -> None:
    other = ActionSpec.continuous([0, -2, 5], [10, 3, 5], names=["x", "y", "z"], rate_hz=20, relative=True)
    assert other.hash != ARM.hash
    assert other.public() == ARM.public() == {"kind": "continuous", "width": 3}
    assert ActionSpec.multi_discrete([2, 3]).public() == {"kind": "multi_discrete", "width": 5, "sizes": [2, 3]}
    for wrong in (
        None,
        {},
        {"kind": "continuous", "dim": 1, "more": 2},
        {"kind": "continuous", "dim": 1, "low": ["a"]},
    ):
        with pytest.raises(DataError):
            ActionSpec.from_dict(wrong)
