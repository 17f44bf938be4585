"""What a session allocates, in units of one masked vector on the wire; inputs that it is handed are not its own."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.secagg import mask_loops
from tests.secagg.driver import Round, make_params

DIMENSION = 3 << 20  # more than two segments


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("bits", [16, 32])
def test_a_member_holds_one_vector_and_the_coordinator_one_sum(bits, kernels, monkeypatch, tmp_path):
    if kernels == "numba":
        pytest.importorskip("numba")
        monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path))
        assert mask_loops.fold.compiled()  # before anything is counted
        assert mask_loops.tally.compiled()
    monkeypatch.setenv("LENSEMBLE_KERNELS", kernels)
    params = make_params(4, DIMENSION, bits=bits)
    q = np.full(DIMENSION, -3, np.int32)
    session = Round.begin(params)
    session.keys()
    session.shares()
    vectors, messages = [], []
    for i in range(4):
        envelopes = session.server.envelopes_for(session.identity(i))
        out, peak = peak_of(lambda i=i, e=envelopes: session.clients[i].masked(e, q))
        assert peak < 1.5 * params.ring.wire_bytes
        vectors.append(out)
        messages.append(session.clients[i].masked_message())

    def sum_up() -> np.ndarray:
        for i in range(3):  # the last one drops out
            session.server.add_masked(session.identity(i), messages[i], vectors[i])
        session.reveal(range(3))
        return session.server.unmask()

    total, peak = peak_of(sum_up)
    assert (total == -9).all()
    assert peak < 1.5 * params.ring.wire_bytes, "beside the one vector that is being added"
