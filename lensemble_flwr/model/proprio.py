"""Proprioceptive state as an input of the local action head.

Joints, grippers and their units differ between bodies, so a state has no meaning in the shared encoder. It is read by
the head, beside the action, and like the head it stays at its participant (``model.proprio=local``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.errors import DataError

_LEAST_SPREAD = 1e-6


@dataclass(frozen=True, eq=False)
class StateScale:
    """Mean and spread of each entry of a body's states, float32 [s]. Where it is private it stays with its data."""

    mean: NDArray[np.float32]
    spread: NDArray[np.float32]

    @staticmethod
    def of(states: Sequence[NDArray[np.float32]]) -> StateScale:
        """From the states [T + 1, s] of some episodes. An entry that never changes is left at zero.

        Raises:
            DataError: no episodes, or states of different widths.
        """
        if not states or len({each.shape[1] for each in states}) != 1:
            raise DataError("Episodes have states of different widths.", "Give every recording the same state columns.")
        rows = np.concatenate([np.asarray(each, np.float64) for each in states])
        spread = rows.std(axis=0)
        still = spread < _LEAST_SPREAD
        return StateScale(rows.mean(axis=0).astype(np.float32), np.where(still, np.inf, spread).astype(np.float32))

    def beside(self, actions: NDArray[np.float32], states: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the head reads: actions [T, a] and the standardised states before them -> float32 [T, a + s].

        Raises:
            DataError: states of another width or length.
        """
        if states.shape[1] != len(self.mean) or len(states) != len(actions) + 1:
            raise DataError(
                f"States are {states.shape}, expected ({len(actions) + 1}, {len(self.mean)}).",
                "Give every recording the same state columns.",
            )
        scaled = (states[:-1] - self.mean) / self.spread
        return np.concatenate([actions, scaled.astype(np.float32)], axis=1)
