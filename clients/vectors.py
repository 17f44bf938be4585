"""How a flat vector travels in a Flower message: one array named ``vector``, or, beyond PART_BYTES, parts of that size.

Flower holds an array it reads up to three times over: its chunks, a growing buffer and the result. With parts, each
of one chunk, it is twice, and the receiver puts them together while it lets go of them, one by one. One reply is still
one message: parts cost no exchange.

    vector                                up to PART_BYTES
    vector.0, vector.1, ...               in this order; all but the last of exactly PART_BYTES

A vector has one form only, so sizes are known before a byte is copied. Flower's own parser is not used: numpy's file
format can name other shapes, objects and huge sizes.
"""

from __future__ import annotations

import io

import numpy as np
from flwr.app import Array, ArrayRecord

from lensemble_flwr.federation.wire import VECTOR

PART_BYTES = 1 << 22
"""With numpy's header it fits Flower's chunk of 5 MiB; it is also a segment of a ring of 32 bits."""

_DTYPES = {name: np.dtype(name) for name in ("float32", "uint8")}
_NPY_HEADER = 128


def to_record(vector: np.ndarray) -> ArrayRecord:
    """The arrays of a message: a flat, contiguous vector of float32 or uint8, copied once."""
    step = PART_BYTES // vector.itemsize
    if vector.size <= step:
        return ArrayRecord({VECTOR: _array(vector)})
    parts = (vector[start : start + step] for start in range(0, vector.size, step))
    return ArrayRecord({f"{VECTOR}.{number}": _array(part) for number, part in enumerate(parts)})


def _array(part: np.ndarray) -> Array:
    data = npy_header(part.dtype, part.size) + np.ascontiguousarray(part).data
    return Array(str(part.dtype), part.shape, "numpy.ndarray", data)


def from_record(record: ArrayRecord, max_bytes: int) -> np.ndarray | None:
    """The vector of at most ``max_bytes``, or None for anything else. ``record`` is emptied where it has parts.

    Nothing is allocated before all names, dtypes and sizes were compared.
    """
    names = list(record)
    if names == [VECTOR]:
        values = _values(record[VECTOR])
        return values if values is not None and values.nbytes <= min(max_bytes, PART_BYTES) else None
    # One array is the only form of a short vector, and no more parts are looked at than the bound allows.
    if not 2 <= len(names) <= -(-max_bytes // PART_BYTES):
        return None
    if names != [f"{VECTOR}.{number}" for number in range(len(names))]:
        return None
    sizes, dtypes = [], set()
    for name in names:
        values = _values(record[name])
        if values is None:
            return None
        sizes.append(values.nbytes)
        dtypes.add(values.dtype)
    if len(dtypes) != 1 or set(sizes[:-1]) != {PART_BYTES} or not 0 < sizes[-1] <= PART_BYTES or sum(sizes) > max_bytes:
        return None
    whole, at = np.empty(sum(sizes), np.uint8), 0
    for name, size in zip(names, sizes, strict=True):
        part = _values(record.pop(name))
        assert part is not None
        whole[at : at + size] = part.view(np.uint8)
        at += size
    return whole.view(dtypes.pop())


def _values(array: Array) -> np.ndarray | None:
    """A view of what one array holds, if it is exactly what :func:`to_record` makes."""
    data, dtype = array.data, _DTYPES.get(array.dtype)
    if dtype is None or not isinstance(data, bytes) or len(data) > PART_BYTES + _NPY_HEADER:
        return None
    header = npy_header(dtype, (len(data) - _header_bytes(data)) // dtype.itemsize)
    if not data.startswith(header) or (len(data) - len(header)) % dtype.itemsize:
        return None
    values = np.frombuffer(data, dtype, offset=len(header))
    return values if tuple(array.shape) == values.shape else None


def _header_bytes(data: bytes) -> int:
    """Length of a version 1.0 npy header, 0 when there is none."""
    return 10 + int.from_bytes(data[8:10], "little") if len(data) >= 10 else 0


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """What numpy writes ahead of a flat array of this dtype and length."""
    buffer = io.BytesIO()
    description = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()
