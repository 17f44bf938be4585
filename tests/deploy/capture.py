"""Reading what left a site: its updates, to hold its ledger against, and private values, that nothing may hold."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lensemble_flwr.federation.codec import HASH_BYTES
from lensemble_flwr.federation.records import RoundOpen

BINDING = slice(2, 34)
"""Where a message of secure aggregation names what it belongs to: T0 before there is a roster, T1 after."""

BLOCK = 16
"""Private arrays are looked for in blocks of this many bytes: whatever holds 31 bytes of them in a row holds one."""


@dataclass(frozen=True)
class Request:
    """One HTTP request of a SuperNode, and the body of what it was answered; nothing if that was an error."""

    path: str
    head: bytes
    body: bytes
    answer: bytes = b""


def requests(up: bytes, down: bytes = b"") -> Iterator[Request]:
    """The HTTP/1.1 requests of one connection, and their answers; one that was cut off at the end is left out.

    Raises:
        ValueError: something else stands there, so that not all of it would be judged.
    """
    answers = (body if words[1] == b"200" else b"" for words, _, body in _http(down))
    for words, head, body in _http(up):
        yield Request(words[1].decode(), head, body, next(answers, b""))


def _http(stream: bytes) -> Iterator[tuple[list[bytes], bytes, bytes]]:
    """(words of the first line, head, body) of each whole request or response."""
    while stream:
        head, end, rest = stream.partition(b"\r\n\r\n")
        if not end:
            return
        words = head.split(b"\r\n")[0].split(b" ")
        if len(words) < 3 or b"HTTP/1.1" not in (words[0], words[2]):
            raise ValueError(f"no request: {head[:80]!r}")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if b"transfer-encoding" in fields or b"content-encoding" in fields:
            raise ValueError("a body that is not plain")
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        yield words, head, rest[:length]
        stream = rest[length:]


def sent(folder: Path) -> list[Request]:
    """All requests of a site, connection by connection."""
    connections = [(path, path.with_name(path.name.replace("up", "down"))) for path in sorted(folder.glob("up-*"))]
    read = ((up.read_bytes(), down.read_bytes() if down.exists() else b"") for up, down in connections)
    return [request for up, down in read for request in requests(up, down)]


def objects(stream: list[Request]) -> dict[str, bytes]:
    """What a site put into the SuperLink's object store, by content hash."""
    from flwr.proto.message_pb2 import PushObjectRequest

    pushed = [PushObjectRequest.FromString(r.body) for r in stream if r.path.endswith("/push-object")]
    return {p.object_id: p.object_content for p in pushed}


def tree_ids(tree: Any) -> list[str]:
    return [tree.object_id, *(name for child in tree.children for name in tree_ids(child))]


def updates(stream: list[Request]) -> set[tuple[bytes, int]]:
    """(federation id, round) of every masked update that a site sent.

    From one message to the next by what binds them: the update names the same T1 as the site's shares, these answered a
    roster with the same T0 as the site's keys, and these answered a RoundOpen.
    """
    asked, opened, rosters, named = _asked(stream), {}, {}, set()
    for kind, question, said in _replies(stream):
        if kind == "query.open_round":
            opened[said[BINDING]] = RoundOpen.decode(asked[question])
        elif kind == "query.share_keys":
            rosters[said[BINDING]] = asked[question][BINDING]
        elif kind == "train.masked_update":
            named.add(said[HASH_BYTES:][BINDING])  # the root of the site's recordings comes first
    rounds = (opened[rosters[t1]] for t1 in named)
    return {(one.federation_id, one.round) for one in rounds}


def _asked(stream: list[Request]) -> dict[str, bytes]:
    """Bodies of the messages that a site was sent, by message id."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

    store, found = {}, {}
    for request in stream:
        if request.path.endswith("/pull-object"):
            content = PullObjectResponse.FromString(request.answer).object_content
            store[PullObjectRequest.FromString(request.body).object_id] = content
    for request in stream:
        if request.path.endswith("/pull-messages"):
            pulled = PullMessagesResponse.FromString(request.answer)
            for message, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                found[message.metadata.message_id] = _body(tree, store)
    return found


def _replies(stream: list[Request]) -> Iterator[tuple[str, str, bytes]]:
    """(type, id of what is answered, body) of each reply of a site that is no refusal."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    store = objects(stream)
    for request in stream:
        if request.path.endswith("/push-messages"):
            pushed = PushMessagesRequest.FromString(request.body)
            for message, tree in zip(pushed.messages_list, pushed.message_object_trees, strict=True):
                if body := _body(tree, store):
                    yield message.metadata.message_type, message.metadata.reply_to_message_id, body


def _body(tree: Any, store: dict[str, bytes]) -> bytes:
    for name in tree_ids(tree):
        kind, value = flower_object(store.get(name, b""))
        if kind == "ConfigRecord" and "body" in value:
            return bytes(value["body"])
    return b""


def flower_object(content: bytes) -> tuple[str, Any]:
    """(type, object) of one of Flower's stored objects; raw bytes for an array's data."""
    from flwr.app import ConfigRecord

    head, _, body = content.partition(b"\x00")
    kind = head.split(b" ")[0].decode()
    return kind, ConfigRecord.inflate(content) if kind == "ConfigRecord" else body


def blocks(array: np.ndarray, size: int = BLOCK, distinct: int = 7) -> set[bytes]:
    """An array's bytes in blocks, without those of fewer than ``distinct`` values: too plain to be anybody's."""
    raw = np.ascontiguousarray(array).tobytes()
    cut = (raw[i : i + size] for i in range(0, len(raw) - size + 1, size))
    return {block for block in cut if len(set(block)) >= distinct}


def found_blocks(wanted: set[bytes], captured: bytes) -> int:
    """How many positions of ``captured`` hold one of the blocks (all of one size)."""
    size = len(next(iter(wanted)))
    return sum(captured[i : i + size] in wanted for i in range(len(captured) - size + 1))


def writings(value: float) -> list[bytes]:
    """A number as it could stand in a message: both byte orders of double, and its first digits as text."""
    return [
        struct.pack("<d", value),
        struct.pack(">d", value),
        f"{value:.7g}".encode(),
        repr(float(value))[:9].encode(),
    ]


def short_writings(value: float) -> list[bytes]:
    """The same as single precision: four bytes, which chance finds in megabytes of noise, so not looked for there."""
    return [struct.pack("<f", value), struct.pack(">f", value)]


def key_writings(key: bytes) -> list[bytes]:
    """A secret raw, in hex and in base64."""
    return [key, key.hex().encode(), base64.b64encode(key).rstrip(b"=")[: 4 * len(key) // 3]]


def present(needles: Iterable[bytes], captured: bytes) -> list[bytes]:
    """Those that stand in ``captured``."""
    return [needle for needle in needles if needle in captured]
