"""Messages over Flower's grid. One exchange is what Flower calls ``send_and_receive``, asking for replies more often.

Replies are matched by ``reply_to_message_id``: an error reply about a lost node names the SuperLink as its sender.
A node that does not answer within the time is simply absent; its message dies with the same ttl, so that it cannot
spend budget afterwards.

Large vectors are pulled one reply at a time and handed over before the next is pulled, so what the coordinator holds
does not grow with the number of participants. How a vector is cut into arrays: :mod:`clients.vectors`.

A node that sends what is no reply is a dropout: :mod:`strategies.reply_bounds`. Should Flower 1.42 raise all the same
over what it found, it has deleted it: those nodes drop out once, for from then on each reply is asked for alone.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from clients.egress import ARRAYS, FIELDS
from clients.vectors import from_record, to_record
from lensemble_flwr.federation.coordinator import Reply
from lensemble_flwr.federation.wire import BODY, MAX_BODY_BYTES, REFUSAL, SALT, VECTOR, Refusal
from strategies.reply_bounds import MALFORMED, ReplyBounds, bounded

HELD_BYTES = 1 << 26
"""Replies are pulled together while their vectors are no more than this."""
LATE_S = 60.0
"""How long after the deadline the rest of a reply is waited for that has begun to come."""
POLL_S, POLL_S_SIMULATED = 0.5, 0.05
"""Seconds between two looks for replies: over the network, and within one machine's simulation."""


class GridTransport:
    """:class:`lensemble_flwr.federation.coordinator.Transport` over a Flower grid."""

    def __init__(self, grid: Grid, group: str = "") -> None:
        self._grid = grid
        self._group = group
        self._alone = False

    @property
    def simulation(self) -> bool:
        """Whether this is Flower's in-memory simulation grid (detected, never configured)."""
        return any(cls.__name__ == "InMemoryGrid" for cls in inspect.getmro(type(self._grid)))

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def exchange(
        self, stage: str, requests: Mapping[int, Mapping[str, Any]], timeout: float, max_bytes: int = 0
    ) -> Iterator[tuple[int, Reply]]:
        if not requests:
            return
        node_of = self._push(stage, requests, timeout)
        for reply in self._receive(set(node_of), timeout, max_bytes):
            asked = node_of.get(reply.metadata.reply_to_message_id)
            if asked is None or reply.has_error():
                continue  # a crashed or lost node is a dropout, whatever its error says
            parsed = parse_reply(reply.content, max_bytes)
            del reply
            if parsed is not None:
                yield asked, parsed
                del parsed  # before the next one is pulled

    def _push(self, stage: str, requests: Mapping[int, Mapping[str, Any]], ttl: float) -> dict[str, int]:
        """{id of a message that was sent: its node}. What was sent is not kept."""
        vectors: dict[int, ArrayRecord] = {}  # the same theta goes to everyone: serialise it once
        messages = []
        for node, fields in requests.items():
            # Flower takes a reply for that of the message it names, whoever sent it: an id that nobody else can know.
            salt = {SALT: os.urandom(16)}
            content = RecordDict({FIELDS: ConfigRecord({k: v for k, v in fields.items() if k != VECTOR} | salt)})
            if VECTOR in fields:
                vector = fields[VECTOR]
                if id(vector) not in vectors:
                    vectors[id(vector)] = to_record(vector)
                content[ARRAYS] = vectors[id(vector)]
            messages.append(Message(content, message_type=stage, dst_node_id=node, group_id=self._group, ttl=ttl))
        sent = {name for name in self._grid.push_messages(messages) if name}  # None: could not be sent
        return {m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id in sent}

    def _receive(self, left: set[str], timeout: float, max_bytes: int) -> Iterator[Message]:
        """Replies to these messages, pulled together while their vectors are short.

        Flower 1.42 looks for replies every three seconds, which is most of what a short exchange takes. What has come
        by the deadline is read to the end, however long that takes.
        """
        at_once = max(1, HELD_BYTES // max(max_bytes, 1))
        deadline = time.monotonic() + timeout
        bounds = ReplyBounds(max_bytes, deadline + LATE_S)
        while left:
            last, found = time.monotonic() >= deadline, False
            names = sorted(left)
            while names:
                size = 1 if self._alone else at_once
                look, names = names[:size], names[size:]
                try:
                    with bounded(bounds):
                        replies = list(self._grid.pull_messages(look))
                except MALFORMED:
                    self._alone, found = True, True
                    if len(look) == 1:
                        left.discard(look[0])
                    continue
                found |= bool(replies)
                while replies:
                    left.discard(replies[-1].metadata.reply_to_message_id)
                    yield replies.pop()
            if last and not found:
                return
            if left and not found:
                time.sleep(POLL_S_SIMULATED if self.simulation else POLL_S)


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
    if not isinstance(body, bytes) or len(body) > MAX_BODY_BYTES:
        return None
    return Reply(body=body, vector=read_vector(content, max_bytes))


def read_vector(content: RecordDict, max_bytes: int) -> np.ndarray | None:
    """The flat vector of a message, or None for anything else. It is taken out: the message holds none afterwards."""
    record = content.array_records.get(ARRAYS)
    return from_record(record, max_bytes) if record is not None else None
