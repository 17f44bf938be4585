"""The checksum in the tail of a masked vector tells the coordinator no more than the sum does."""

from __future__ import annotations

import numpy as np
import pytest

from lensemble_flwr.secagg import RingParams, masking
from tests.secagg.driver import Round, make_params

SEEDS = range(6)


def sum_of_vectors(bits: int, payloads: list[list[int]], seed: int) -> tuple[np.ndarray, list[np.ndarray], RingParams]:
    """(what the coordinator holds once all masked vectors are added, the vectors, the ring). A seed fixes the masks."""
    params = make_params(len(payloads), len(payloads[0]), bits=bits)
    session = Round.begin(params, seed=("leak", seed))
    session.keys()
    session.shares()
    session.masked([np.array(q, np.int64) for q in payloads])
    total = np.zeros_like(session.vectors[0])
    for vector in session.vectors.values():
        masking.accumulate(total, vector, params.ring)
    return total, list(session.vectors.values()), params.ring


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_updates_with_one_sum_add_up_to_the_same_bytes(bits: int) -> None:
    """A checksum that is added beyond 64 bits carries, and how often tells (5, 5, 5, 5) from (20, 0, 0, 0)."""
    equal, apart = [[5], [5], [5], [5]], [[20], [0], [0], [0]]
    for seed in SEEDS:
        one, two = (sum_of_vectors(bits, payloads, seed)[0] for payloads in (equal, apart))
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_tail_has_no_bits_beyond_the_checksum(bits: int) -> None:
    for seed in SEEDS:
        total, vectors, ring = sum_of_vectors(bits, [[7, -3], [1, 2], [0, 0], [-5, 9]], seed)
        for vector in (total, *vectors):
            tail = sum(int(lane) << (i * bits) for i, lane in enumerate(vector[ring.body :]))
            assert 0 < tail < 2**64
