"""What one reply may cost the coordinator before Flower has put it together: objects, bytes, time.

A reply comes as objects that name each other. Flower 1.42 pulls as many as the sender listed, waits for each of them
for more than an hour, and joins an array's chunks as often as the sender says, so a megabyte sent can become any size.
Here a reply that has more or larger objects than the widest honest one, or lacks some, or whose objects are no message,
is an unavailable message to Flower, and so a dropout to the round; and Flower raises nothing over it, which would lose
the replies that it found in the same look. How a vector is cut into arrays of one chunk: :mod:`clients.vectors`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.superlink.grid import http_grid
from google.protobuf.message import DecodeError

from clients.vectors import PART_BYTES
from lensemble_flwr.federation.wire import MAX_BODY_BYTES

_HEAD_BYTES = 4096
"""For the head of an object and a body without data; names and the ids of parts come on top."""
_PART_NAMES_BYTES = 256

_EMPTY_CHUNK = b"ArrayChunk  0\0"

MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
    RecursionError,
    MemoryError,
    DecodeError,
)
"""What Flower raises over objects that are not what they say; what a lost connection raises is none of these."""

_flower_pulls = http_grid.pull_objects


@dataclass(frozen=True)
class ReplyBounds:
    """Of one reply.

    Args:
        max_bytes: of its vector; 0: it has none.
        until: what has not been sent by then is not waited for, in seconds of ``time.monotonic``.
    """

    max_bytes: int
    until: float

    @property
    def parts(self) -> int:
        """Arrays of the longest vector."""
        return -(-self.max_bytes // PART_BYTES)

    @property
    def objects(self) -> int:
        """Message, RecordDict, ConfigRecord; with a vector an ArrayRecord, and an Array and a chunk for each part."""
        return 3 + (1 + 2 * self.parts if self.parts else 0)

    def fits(self, content: bytes) -> bool:
        """Whether these bytes can be one object of such a reply."""
        try:
            kind, children, _ = inflatable_object.get_object_head_values_from_object_content(content)
            if children and kind in ("ArrayChunk", "ConfigRecord"):
                return False
            names = _HEAD_BYTES + _PART_NAMES_BYTES * self.parts
            most = {
                "ArrayChunk": PART_BYTES + _HEAD_BYTES,
                "ConfigRecord": MAX_BODY_BYTES + _HEAD_BYTES,
                "Array": _HEAD_BYTES,
                "ArrayRecord": names,
                "RecordDict": names,
                "Message": names,
            }[kind]
            if len(content) > most:
                return False
            if kind in ("Array", "ArrayRecord", "RecordDict"):
                body = json.loads(content.partition(b"\0")[2])
                return isinstance(body, dict) and (kind != "Array" or body.get("arraychunk_ids") == [0])
            return True
        except (ValueError, LookupError, RecursionError):
            return False


_bounds: ContextVar[ReplyBounds | None] = ContextVar("reply_bounds", default=None)


@contextmanager
def bounded(bounds: ReplyBounds) -> Iterator[None]:
    """Replies that are pulled in the block are held to these bounds."""
    token = _bounds.set(bounds)
    try:
        yield
    finally:
        _bounds.reset(token)


def _pull_objects(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **more: Any) -> dict[str, bytes]:
    """In place of Flower's, where its grid looks for it. Raises ObjectPullError, which Flower makes an error reply."""
    bounds = _bounds.get()
    if bounds is None:
        return _flower_pulls(object_ids, pull_object_fn, **more)
    if len(object_ids) > bounds.objects:
        raise inflatable_utils.ObjectPullError(object_ids[-1], "the message has more objects than a reply can have")

    def pull(object_id: str) -> bytes:
        content = pull_object_fn(object_id)
        if not bounds.fits(content):
            raise inflatable_utils.ObjectPullError(object_id, "it cannot be an object of a reply")
        return content

    found = _flower_pulls(object_ids, pull, **{**more, "max_time": max(0.0, bounds.until - time.monotonic())})
    if not _is_message(object_ids[-1], found):
        raise inflatable_utils.ObjectPullError(object_ids[-1], "its objects are no message")
    return found


def _is_message(name: str, objects: Mapping[str, bytes]) -> bool:
    """Whether Flower can put them together, found out without the data of the arrays."""
    small = {n: _EMPTY_CHUNK if content.startswith(b"ArrayChunk ") else content for n, content in objects.items()}
    try:
        return isinstance(inflatable_utils.inflate_object_from_contents(name, small), Message)
    except MALFORMED:
        return False


http_grid.pull_objects = _pull_objects
