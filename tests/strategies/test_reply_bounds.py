"""Hostile replies through Flower's own grid: each is one dropout, at bounded cost, and takes nobody with it."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid, http_grid

from clients.egress import ARRAYS, FIELDS
from clients.vectors import PART_BYTES, to_record
from lensemble_flwr.federation.wire import BODY, MAX_BODY_BYTES, SALT, Stage
from strategies import grid_transport
from strategies.grid_transport import GridTransport
from strategies.reply_bounds import ReplyBounds
from tests.effort import peak_bytes

pytestmark = pytest.mark.usefixtures("flower_task")
HOSTILE, HONEST = 1, 2
Objects = dict[str, bytes]


class SuperLink:
    """What the Runtime API answers: node 2's honest reply, and whatever node 1 made of its own."""

    def __init__(self, vector: np.ndarray | None, spoil: Any) -> None:
        self.vector, self.spoil = vector, spoil
        self.waiting: dict[str, tuple[Any, ObjectTree]] = {}
        self.objects: Objects = {}
        self.asked: list[Any] = []
        self.pulls = 0

    def PushMessages(self, request: Any) -> PushAppMessagesResponse:
        self.asked += list(request.messages_list)
        return PushAppMessagesResponse(message_ids=[m.metadata.message_id for m in request.messages_list])

    def PushObject(self, request: Any) -> PushObjectResponse:
        return PushObjectResponse(stored=True)

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        found = PullAppMessagesResponse()
        for asked in [a for a in self.asked if a.metadata.message_id in set(request.message_ids)]:
            self.asked.remove(asked)
            reply, tree = self._reply(asked.metadata)
            found.messages_list.append(reply)
            found.message_object_trees.append(tree)
        return found

    def _reply(self, asked: Any) -> tuple[Any, ObjectTree]:
        content = RecordDict({FIELDS: ConfigRecord({BODY: b"root %d" % asked.dst_node_id})})
        if self.vector is not None:
            content[ARRAYS] = to_record(self.vector)
        question = Message(RecordDict(), dst_node_id=asked.dst_node_id, message_type=asked.message_type)
        question.metadata.__dict__["_message_id"] = asked.message_id
        reply = Message(content, reply_to=question)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = {name: thing.deflate() for name, thing in get_all_nested_objects(reply).items()}
        tree = get_object_tree(reply)
        if asked.dst_node_id == HOSTILE:
            objects, tree = self.spoil(objects, tree)
        self.objects |= objects
        return message_to_proto(remove_content_from_message(reply)), tree

    def PullObject(self, request: Any) -> PullObjectResponse:
        self.pulls += 1
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass


def answered(vector: np.ndarray | None, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], SuperLink]:
    """Who was heard in an exchange with a hostile and an honest node."""
    link, grid = SuperLink(vector, spoil), HttpGrid(token="t")  # noqa: S106
    monkeypatch.setattr(HttpGrid, "_runtime_client", link)
    monkeypatch.setattr(grid_transport, "LATE_S", 0.2)
    grid.set_run(Run.create_empty(1))
    requests = {node: {BODY: b"x"} for node in (HOSTILE, HONEST)}
    size = 0 if vector is None else vector.nbytes
    got = dict(GridTransport(grid).exchange(Stage.TRAIN, requests, timeout=1.0, max_bytes=size))
    for node, reply in got.items():
        assert reply.body == b"root %d" % node
        if vector is not None:
            np.testing.assert_array_equal(reply.vector, vector)
    return set(got), link


def remade(objects: Objects, tree: ObjectTree, kind: str, body: bytes) -> tuple[Objects, ObjectTree]:
    """The same message with another body in its first object of a kind, and with names that are true again."""
    name = next(n for n, content in objects.items() if content.startswith(kind.encode() + b" "))
    old = objects.pop(name)
    new = old.partition(b"\0")[0].rpartition(b" ")[0] + b" %d\0" % len(body) + body
    objects[get_object_id(new)] = new

    def renamed(node: ObjectTree) -> ObjectTree:
        here = get_object_id(new) if node.object_id == name else node.object_id
        return ObjectTree(object_id=here, children=[renamed(child) for child in node.children])

    return objects, renamed(tree)


def more_objects(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    tree.children.extend(ObjectTree(object_id=f"{number:064x}") for number in range(10_000))
    return objects, tree


def never_sent(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    return {name: content for name, content in objects.items() if not content.startswith(b"Message ")}, tree


def not_its_root(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    return objects, tree.children[0]


def not_all_named(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    return objects, ObjectTree(object_id=tree.object_id)


def none_at_all(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    return {}, ObjectTree()


def nested(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    """A record that is its own child."""
    name = next(n for n, content in objects.items() if content.startswith(b"RecordDict "))
    objects[name] = b"RecordDict %s 2\0{}" % name.encode()
    return objects, tree


def bomb(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    shape = {"dtype": "uint8", "shape": [5], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 400}
    return remade(objects, tree, "Array", json.dumps(shape).encode())


def deep(kind: str) -> Any:
    return lambda objects, tree: remade(objects, tree, kind, b"[" * 100_000)


def shallow_bomb(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    return remade(objects, tree, "Array", b"[" * 3000)


def large(kind: str) -> Any:
    return lambda objects, tree: remade(objects, tree, kind, bytes(MAX_BODY_BYTES + PART_BYTES))


def of_another_kind(objects: Objects, tree: ObjectTree) -> tuple[Objects, ObjectTree]:
    name = next(n for n, content in objects.items() if content.startswith(b"ConfigRecord "))
    objects[name] = b"MetricRecord  0\0"
    return objects, tree


@pytest.mark.parametrize(
    "spoil",
    [
        more_objects,
        never_sent,
        not_its_root,
        not_all_named,
        none_at_all,
        nested,
        bomb,
        shallow_bomb,
        of_another_kind,
        *(deep(kind) for kind in ("RecordDict", "ArrayRecord", "Array", "ConfigRecord")),
        *(large(kind) for kind in ("Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk", "ConfigRecord")),
    ],
)
def test_a_hostile_reply_is_a_dropout_and_the_other_is_heard(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vector: np.ndarray = np.arange(100_000, dtype=np.float32)
    peak, (heard, link) = peak_bytes(lambda: answered(vector, spoil, monkeypatch))
    assert heard == {HONEST}
    assert link.pulls < 200
    assert peak < 60e6


@pytest.mark.parametrize("size", [None, 1, PART_BYTES // 4, PART_BYTES // 4 + 1, 3 * PART_BYTES // 4])
def test_honest_replies_of_any_length_are_within_their_bounds(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = None if size is None else np.arange(size, dtype=np.float32)
    heard, _ = answered(vector, lambda objects, tree: (objects, tree), monkeypatch)
    assert heard == {HOSTILE, HONEST}
    if vector is not None:  # no object more than the longest honest reply has
        reply = Message(
            RecordDict({FIELDS: ConfigRecord({BODY: b""}), ARRAYS: to_record(vector)}),
            dst_node_id=1,
            message_type=Stage.TRAIN,
        )
        assert len(get_all_nested_objects(reply)) == ReplyBounds(vector.nbytes, 0.0).objects


def test_the_longest_body_fits() -> None:
    record = ConfigRecord({BODY: bytes(MAX_BODY_BYTES)})
    assert ReplyBounds(0, 0.0).fits(record.deflate())
    assert not ReplyBounds(0, 0.0).fits(ConfigRecord({BODY: bytes(2 * MAX_BODY_BYTES)}).deflate())


@pytest.mark.parametrize("content", [b"", b"\0", b"Array", b"Array  x\0{}", b"\xff \xff 1\0", b"Other  0\0"])
def test_what_is_no_object_at_all(content: bytes) -> None:
    assert not ReplyBounds(100, 0.0).fits(content)


def test_others_who_pull_objects_are_as_before() -> None:
    assert http_grid.pull_objects([f"{n}" for n in range(50)], lambda name: b"any") == {
        f"{n}": b"any" for n in range(50)
    }
    with pytest.raises(inflatable_utils.ObjectPullError):
        http_grid.pull_objects(["a"], _never, max_tries_per_object=1)


def _never(name: str) -> bytes:
    raise inflatable_utils.ObjectUnavailableError(name)


def test_nobody_can_compute_the_id_of_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower takes a reply for that of the message it names, whoever sent it."""
    monkeypatch.setattr(time, "time", lambda: 1.0)
    seen = []

    class Grid:
        def push_messages(self, messages: Any) -> list[None]:
            seen.extend(messages)
            return []

    for _ in range(2):
        list(GridTransport(Grid()).exchange(Stage.CLOSE, {1: {BODY: b"same"}, 2: {BODY: b"same"}}, 0.0))  # type: ignore[arg-type]
    salts = {bytes(message.content.config_records[FIELDS][SALT]) for message in seen}
    assert len(salts) == 4
    assert {len(salt) for salt in salts} == {16}
