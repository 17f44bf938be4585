"""What a piece of code costs, counted and not timed: the same on any machine, busy or idle."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that `work` makes in this thread: a loop over coordinates shows."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def peak_bytes(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that Python and numpy held for `work` at once beyond what was held before, and its result."""
    tracemalloc.start()
    try:
        found = work()
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()
