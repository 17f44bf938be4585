"""Epsilon in text: rounded up, so that what is printed promises no more than what holds (to one part in 10^9)."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context

_SLACK = 1e-9
"""Relative. A calibrated target comes out as 8.0000000002: that is not 8.001."""


def printed(epsilon: float | None, digits: int = 4) -> str:
    """``epsilon`` with that many significant digits; "infinite" for no guarantee (infinity, NaN, None)."""
    if epsilon is None or isinstance(epsilon, bool) or not epsilon < math.inf:
        return "infinite"
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(epsilon * (1.0 - _SLACK))
    return f"{float(up):.{digits}g}"
