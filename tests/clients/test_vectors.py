"""A vector has one form on the wire; another count, size, order or name of parts is none, before a byte is copied."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from clients.vectors import PART_BYTES, from_record, to_record
from lensemble_flwr.federation.wire import VECTOR

EDGE = PART_BYTES


def vector(nbytes: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("nbytes", [0, 4, EDGE - 4, EDGE, EDGE + 4, 2 * EDGE, 2 * EDGE + 8, 3 * EDGE - 4])
def test_a_vector_survives_and_is_bounded(nbytes: int, dtype: Any) -> None:
    value = vector(nbytes, dtype)
    record = to_record(value)
    assert len(record) == max(1, -(-nbytes // EDGE))
    if nbytes:
        assert from_record(record, nbytes - 1) is None
    got = from_record(record, nbytes)
    assert got is not None
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert got.tobytes() == value.tobytes()


def test_a_view_that_is_not_contiguous_is_sent_as_its_values() -> None:
    value = vector(3 * EDGE)[::2]
    got = from_record(to_record(value), value.nbytes)
    assert np.array_equal(got, value)  # type: ignore[arg-type]


def parts(*sizes: int, dtype: Any = np.uint8) -> dict[str, Array]:
    return {f"{VECTOR}.{i}": Array(vector(size, dtype)) for i, size in enumerate(sizes)}


def renamed(names: list[str]) -> dict[str, Array]:
    return dict(zip(names, parts(EDGE, EDGE, 8).values(), strict=True))


HOSTILE: dict[str, Callable[[], dict[str, Array]]] = {
    "nothing": dict,
    "one part": lambda: parts(8),
    "one array over the size of a part": lambda: {VECTOR: Array(vector(EDGE + 8))},
    "a short part in the middle": lambda: parts(EDGE, EDGE - 8, EDGE),
    "a long part": lambda: parts(EDGE + 8, 8),
    "a long last part": lambda: parts(EDGE, EDGE + 8),
    "an empty last part": lambda: parts(EDGE, EDGE, 0),
    "many empty parts": lambda: parts(*[0] * 4),
    "many small parts": lambda: parts(*[8] * 4),
    "parts of two dtypes": lambda: {**parts(EDGE, 8), f"{VECTOR}.1": Array(vector(8, np.float32))},
    "reordered": lambda: renamed(["vector.1", "vector.0", "vector.2"]),
    "a gap": lambda: renamed(["vector.0", "vector.1", "vector.3"]),
    "from one": lambda: renamed(["vector.1", "vector.2", "vector.3"]),
    "another way to write a number": lambda: renamed(["vector.0", "vector.01", "vector.2"]),
    "the whole beside parts": lambda: renamed(["vector", "vector.0", "vector.1"]),
    "something beside the parts": lambda: {**parts(EDGE, 8), "more": Array(vector(8))},
    "a part of another kind": lambda: {**parts(EDGE, 8), "vector.1": Array(np.zeros(1))},
    "a part with a shape": lambda: {**parts(EDGE, 8), "vector.1": Array(vector(8).reshape(2, 4))},
    "a part that lies about its shape": lambda: {
        **parts(EDGE, 8),
        "vector.1": Array("uint8", (10**12,), "numpy.ndarray", parts(8)["vector.0"].data),
    },
    "a part without a header": lambda: {**parts(EDGE, 8), "vector.1": Array("uint8", (8,), "numpy.ndarray", bytes(8))},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_vector(name: str) -> None:
    record = ArrayRecord(HOSTILE[name]())
    before = list(record)
    tracemalloc.start()
    try:
        assert from_record(record, 3 * EDGE) is None
        assert tracemalloc.get_traced_memory()[1] < EDGE // 4
    finally:
        tracemalloc.stop()
    assert list(record) == before, "refused whole"


def test_more_parts_than_the_bound_allows_are_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ArrayRecord(parts(EDGE, EDGE, EDGE))
    monkeypatch.setattr("clients.vectors._values", lambda array: pytest.fail("looked at"))
    assert from_record(record, 2 * EDGE) is None


def test_a_part_is_let_go_as_soon_as_it_was_copied() -> None:
    record = to_record(vector(4 * EDGE))
    assert from_record(record, 4 * EDGE) is not None
    assert len(record) == 0
