"""What is printed never promises more than what holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.privacy.printed import printed


@given(st.floats(1e-6, 1e12), st.integers(2, 8))
def test_never_below_and_never_a_digit_above(value: float, digits: int) -> None:
    shown = float(printed(value, digits))
    assert shown >= value * (1 - 2e-9)
    assert shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.0000000002, "8"),
        (7.9999, "8"),
        (8.0001, "8.001"),
        (120.7123, "120.8"),
        (0.0, "0"),
        (12345.6, "1.235e+04"),
        (math.inf, "infinite"),
        (math.nan, "infinite"),
        (None, "infinite"),
        (True, "infinite"),
    ],
)
def test_examples(value: float | None, text: str) -> None:
    assert printed(value) == text
