"""Messages over Flower's grid. One exchange is what Flower calls ``send_and_receive``, asking for replies more often.

Replies are matched by ``reply_to_message_id``: an error reply about a lost node names the SuperLink as its sender.
A node that does not answer within the time is simply absent; its message dies with the same ttl, so that it cannot
spend budget afterwards.
"""

from __future__ import annotations

import inspect
import io
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from clients.egress import ARRAYS, FIELDS
from lensemble_flwr.federation.coordinator import Reply
from lensemble_flwr.federation.wire import BODY, REFUSAL, VECTOR, Refusal

POLL_S, POLL_S_SIMULATED = 0.5, 0.05
"""Seconds between two looks for replies: over the network, and within one machine's simulation."""


class GridTransport:
    """:class:`lensemble_flwr.federation.coordinator.Transport` over a Flower grid."""

    def __init__(self, grid: Grid, group: str = "") -> None:
        self._grid = grid
        self._group = group

    @property
    def simulation(self) -> bool:
        """Whether this is Flower's in-memory simulation grid (detected, never configured)."""
        return any(cls.__name__ == "InMemoryGrid" for cls in inspect.getmro(type(self._grid)))

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def exchange(
        self, stage: str, requests: Mapping[int, Mapping[str, Any]], timeout: float, max_bytes: int = 0
    ) -> dict[int, Reply]:
        if not requests:
            return {}
        vectors: dict[int, ArrayRecord] = {}  # the same theta goes to everyone: serialise it once
        messages = []
        for node, fields in requests.items():
            content = RecordDict({FIELDS: ConfigRecord({k: v for k, v in fields.items() if k != VECTOR})})
            if VECTOR in fields:
                vector = fields[VECTOR]
                if id(vector) not in vectors:
                    vectors[id(vector)] = ArrayRecord({VECTOR: Array(vector)})
                content[ARRAYS] = vectors[id(vector)]
            messages.append(Message(content, message_type=stage, dst_node_id=node, group_id=self._group, ttl=timeout))
        replies = self._send_and_receive(messages, timeout)
        node_of = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        answers: dict[int, Reply] = {}
        for reply in replies:
            asked = node_of.get(reply.metadata.reply_to_message_id)
            if asked is None or reply.has_error():
                continue  # a crashed or lost node is a dropout, whatever its error says
            parsed = parse_reply(reply.content, max_bytes)
            if parsed is not None:
                answers[asked] = parsed
        return answers

    def _send_and_receive(self, messages: list[Message], timeout: float) -> list[Message]:
        """Flower 1.42 looks for replies every three seconds, which is most of what a short exchange takes."""
        left = {name for name in self._grid.push_messages(messages) if name}  # None: could not be sent
        deadline = time.monotonic() + timeout
        replies: list[Message] = []
        while left and time.monotonic() < deadline:
            new = list(self._grid.pull_messages(left))
            replies += new
            left -= {reply.metadata.reply_to_message_id for reply in new}
            if left:
                time.sleep(POLL_S_SIMULATED if self.simulation else POLL_S)
        return replies


def parse_reply(content: RecordDict, max_bytes: int = 0) -> Reply | None:
    """A reply's body and vector, or its refusal; None for anything else (the sender counts as dropped out).

    Args:
        content: whatever a node sent.
        max_bytes: of the vector that public numbers allow here.
    """
    fields = content.config_records.get(FIELDS)
    if fields is None:
        return None
    if REFUSAL in fields:
        code = fields[REFUSAL]
        return Reply(refusal=Refusal(code)) if type(code) is int and code in tuple(Refusal) else None
    body = fields.get(BODY)
    if not isinstance(body, bytes):
        return None
    return Reply(body=body, vector=read_vector(content, max_bytes))


def read_vector(content: RecordDict, max_bytes: int) -> np.ndarray | None:
    """The flat vector of a message, or None for anything else. No allocation before the sizes were compared.

    Flower's own parser is not used: numpy's file format can name other shapes, objects and huge sizes.
    """
    record = content.array_records.get(ARRAYS)
    if record is None or list(record) != [VECTOR]:
        return None
    array = record[VECTOR]
    data, dtype = array.data, _DTYPES.get(array.dtype)
    if dtype is None or not isinstance(data, bytes) or len(data) > max_bytes + _NPY_HEADER:
        return None
    header = npy_header(dtype, (len(data) - _header_bytes(data)) // dtype.itemsize)
    if not data.startswith(header) or (len(data) - len(header)) % dtype.itemsize:
        return None
    values = np.frombuffer(data, dtype, offset=len(header))
    return values if values.nbytes <= max_bytes and tuple(array.shape) == values.shape else None


_DTYPES = {name: np.dtype(name) for name in ("float32", "uint8")}
_NPY_HEADER = 128


def _header_bytes(data: bytes) -> int:
    """Length of a version 1.0 npy header, 0 when there is none."""
    return 10 + int.from_bytes(data[8:10], "little") if len(data) >= 10 else 0


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """What numpy writes ahead of a flat array of this dtype and length."""
    buffer = io.BytesIO()
    description = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()
