"""The swipe-dot world against its formula."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data.episodes import episode_hash, iterate
from lensemble_flwr.data.swipe_dot import draw, source


@given(seed=st.integers(0, 2**32), reach=st.floats(0.1, 2.0))
@settings(max_examples=20, deadline=None)
def test_every_step_is_the_formula(seed: int, reach: float) -> None:
    for episode in iterate(source("s", seed, 2, steps=7, size=12, reach=reach)):
        states, actions = episode.states.astype(np.float64), episode.actions.astype(np.float64)
        assert ((states[0] >= 0.15) & (states[0] <= 0.85)).all()
        moved = np.clip(states[:-1] + reach * actions, 0, 1)
        np.testing.assert_allclose(states[1:], moved, atol=1e-6)
        assert np.abs(actions).max() <= 1


@given(x=st.floats(0, 1), y=st.floats(0, 1), row=st.integers(0, 11), column=st.integers(0, 11))
def test_a_pixel_is_the_formula(x: float, y: float, row: int, column: int) -> None:
    """x counts columns, y counts rows."""
    picture = draw(np.array([[x, y]]), 12, 0.06)[0]
    away = (column / 11 - x) ** 2 + (row / 11 - y) ** 2
    b = math.exp(-away / (2 * 0.06**2))
    wanted = np.array([b, 0.35 + 0.65 * b, 1 - 0.55 * b]) * 255
    np.testing.assert_allclose(picture[row, column], wanted, atol=0.5 + 1e-6)


def test_more_episodes_begin_with_the_same_ones() -> None:
    few, many = (list(map(episode_hash, iterate(source("s", 99, count, steps=6, size=8)))) for count in (2, 4))
    assert many[:2] == few
    assert len(set(many)) == 4
    assert not set(many) & set(map(episode_hash, iterate(source("s", 98, 4, steps=6, size=8))))


@given(seed=st.integers(0, 2**32), x=st.floats(0, 0.5), y=st.floats(0, 0.5))
@settings(max_examples=20, deadline=None)
def test_a_confined_dot_stays_in_its_square(seed: int, x: float, y: float) -> None:
    for episode in iterate(source("s", seed, 1, steps=20, size=8, box=(x, y, 0.5))):
        away = episode.states - np.array([x, y], np.float32)
        assert (away >= -1e-6).all()
        assert (away <= 0.5 + 1e-6).all()
        assert away.max() > 0.499, "its walls are reached"
