"""Replies are matched by the message they answer; what is not exactly a reply is a dropout."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from clients.egress import ARRAYS, FIELDS
from clients.vectors import PART_BYTES, to_record
from lensemble_flwr.federation.wire import BODY, REFUSAL, VECTOR, Refusal, Stage
from strategies import SecureDiLoCo
from strategies.grid_transport import HELD_BYTES, GridTransport, parse_reply, read_vector
from strategies.reply_bounds import MALFORMED

pytestmark = pytest.mark.usefixtures("flower_task")


class FakeGrid:
    """Answers each message by a function; message ids as Flower gives them."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.sent: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return [3, 1, 2]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.replies: dict[str, Message | None] = {}
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            self.sent.append(message)
            reply = self.answer(message)
            self.replies[f"m{number}"] = reply
        return list(self.replies)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """One reply a look, so that several looks are needed."""
        there = [name for name in sorted(message_ids) if self.replies[name] is not None]
        return [reply for name in there[:1] if (reply := self.replies.pop(name)) is not None]


def body_reply(message: Message, body: Any = b"ok") -> Message:
    return Message(RecordDict({FIELDS: ConfigRecord({BODY: body})}), reply_to=message)


def test_an_error_reply_of_a_lost_node_is_nobodys_reply() -> None:
    """Flower sends it with the SuperLink's id as its source."""

    def answer(message: Message) -> Message | None:
        if message.metadata.dst_node_id == 1:
            reply = Message(Error(5, "node unavailable: secret"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        return body_reply(message) if message.metadata.dst_node_id == 2 else None

    transport = GridTransport(FakeGrid(answer))  # type: ignore[arg-type]
    assert transport.nodes() == [1, 2, 3]
    replies = dict(transport.exchange(Stage.OPEN, {n: {BODY: b"x"} for n in (1, 2, 3)}, timeout=1.0))
    assert {n: r.body for n, r in replies.items()} == {2: b"ok"}


class HostileGrid(FakeGrid):
    """Flower's, whose second node sent objects that are no message: it raises, and what it had found is gone."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = [name for name in sorted(message_ids) if self.replies[name] is not None]
        found = {name: self.replies.pop(name) for name in there}
        self.replies.update(dict.fromkeys(there))
        if "m1" in found:
            raise KeyError("an object that is not there")
        return [reply for reply in found.values() if reply is not None]


def test_a_reply_that_is_no_message_is_a_dropout_and_takes_others_with_it_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = GridTransport(HostileGrid(body_reply))  # type: ignore[arg-type]
    asked: dict[int, dict[str, Any]] = {n: {BODY: b"x"} for n in (1, 2, 3)}
    assert not dict(transport.exchange(Stage.OPEN, asked, timeout=0.1))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for what will not come"))
    assert set(dict(transport.exchange(Stage.SHARE, asked, timeout=60.0))) == {1, 3}


def test_flowers_own_errors_over_hostile_objects_are_known() -> None:
    message = body_reply(Message(RecordDict(), dst_node_id=2, message_type=Stage.OPEN, group_id="1"))
    message.content["v"] = to_record(np.ones(5, np.float32))
    whole = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
    rng, refused = np.random.default_rng(0), 0
    for _ in range(600):
        objects = dict(whole)
        name, other = rng.choice(list(whole), 2)
        kind, cut = rng.integers(4), int(rng.integers(len(objects[name])))
        if kind == 0:
            objects[name] = objects[name][:cut] + rng.bytes(1) + objects[name][cut + 1 :]
        elif kind == 1:
            objects[name] = objects[name][:cut]
        elif kind == 2:
            objects[name] = whole[other]
        else:
            del objects[name]
        try:
            inflated: Any = inflate_object_from_contents(message.object_id, objects)
            inflated.metadata.__dict__["_message_id"] = "m"
        except MALFORMED:
            refused += 1
    assert refused > 300
    assert not issubclass(httpx.HTTPError, MALFORMED)


def test_messages_die_with_the_timeout_and_theta_is_serialised_once() -> None:
    grid = FakeGrid(body_reply)
    theta = np.ones(4, np.float32)
    list(
        GridTransport(grid).exchange(Stage.TRAIN, {n: {VECTOR: theta, "envelopes": b"e"} for n in (1, 2)}, timeout=7.0)
    )  # type: ignore[arg-type]
    assert {m.metadata.ttl for m in grid.sent} == {7.0}
    records = [m.content.array_records[ARRAYS] for m in grid.sent]
    assert records[0] is records[1]


def test_nothing_to_send_asks_nobody() -> None:
    assert list(GridTransport(FakeGrid(None)).exchange(Stage.OPEN, {}, 1.0)) == []  # type: ignore[arg-type]


def test_a_fake_grid_is_no_simulation() -> None:
    assert GridTransport(FakeGrid(None)).simulation is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {BODY: "text"},
        {BODY: 3},
        {REFUSAL: 99},
        {REFUSAL: "BUDGET"},
        {REFUSAL: 0},
        {BODY: b"1" * 2_000_000},
    ],
)
def test_what_is_no_reply(fields: dict[str, Any]) -> None:
    assert parse_reply(RecordDict({FIELDS: ConfigRecord(fields)})) is None
    assert parse_reply(RecordDict()) is None


def test_a_refusal() -> None:
    reply = parse_reply(RecordDict({FIELDS: ConfigRecord({REFUSAL: int(Refusal.BUDGET)})}))
    assert reply is not None
    assert reply.refusal == Refusal.BUDGET


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2), np.uint8),
        np.zeros(3, np.float64),
        np.zeros(3, np.int64),
        np.zeros(3, ">f4"),
        np.zeros(3, [("a", "f4")]),
        np.array(["a"]),
    ],
)
def test_a_vector_of_another_kind_is_none(array: np.ndarray) -> None:
    assert read_vector(RecordDict({ARRAYS: ArrayRecord({VECTOR: Array(array)})}), 1000) is None


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("size", [1, 3, 9, 10, 100, 12345])
def test_a_vector_survives_the_wire(dtype: type, size: int) -> None:
    value: np.ndarray = np.arange(size).astype(dtype)
    content = RecordDict({ARRAYS: ArrayRecord({VECTOR: Array(value)})})
    np.testing.assert_array_equal(read_vector(content, value.nbytes), value)
    assert read_vector(content, value.nbytes - 1) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"PK\x03\x04" + bytes(200),
        b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + b"{'descr': '|u1', 'shape': (10**13,)}".ljust(118),
        b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + (b"-" * 117 + b"1"),
        b"\x93NUMPY\x03\x00" + bytes(300),
        b"\x93NUMPY\x01\x00\xff\xff" + bytes(50),
    ],
)
@pytest.mark.parametrize("stype", ["numpy.ndarray", "other", ""])
def test_hostile_bytes_are_none(data: bytes, stype: str) -> None:
    array = Array(dtype="uint8", shape=(10,), stype=stype, data=data)
    assert read_vector(RecordDict({ARRAYS: ArrayRecord({VECTOR: array})}), 1000) is None


def test_a_hostile_vector_does_not_stop_the_exchange() -> None:
    def answer(message: Message) -> Message:
        kind = "numpy.ndarray" if message.metadata.dst_node_id == 1 else "nonsense"
        array = Array(dtype="uint8", shape=(4,), stype=kind, data=b"PK\x03\x04")
        content = RecordDict({FIELDS: ConfigRecord({BODY: b"root"}), ARRAYS: ArrayRecord({VECTOR: array})})
        return Message(content, reply_to=message)

    transport = GridTransport(FakeGrid(answer))  # type: ignore[arg-type]
    replies = dict(transport.exchange(Stage.TRAIN, {n: {BODY: b"x"} for n in (1, 2)}, timeout=7.0, max_bytes=100))
    assert [(n, r.body, r.vector) for n, r in sorted(replies.items())] == [(1, b"root", None), (2, b"root", None)]


def test_a_vector_over_the_size_is_refused_before_it_is_parsed() -> None:
    content = RecordDict({ARRAYS: ArrayRecord({VECTOR: Array(np.zeros(10_000, np.uint8))})})
    assert read_vector(content, max_bytes=100) is None
    assert read_vector(content, max_bytes=10_000) is not None


def large_reply(message: Message) -> Message:
    content = RecordDict(
        {FIELDS: ConfigRecord({BODY: b"root"}), ARRAYS: to_record(np.full(2 * PART_BYTES, 7, np.uint8))}
    )
    return Message(content, reply_to=message)


def test_large_vectors_are_pulled_one_by_one_and_let_go() -> None:
    grid = FakeGrid(large_reply)
    seen: list[weakref.ref[np.ndarray]] = []
    asked: list[int] = []
    pull = grid.pull_messages

    def counted(message_ids: Iterable[str]) -> Iterable[Message]:
        asked.append(len(list(message_ids)))
        assert all(ref() is None for ref in seen), "the vector before is still held"
        return pull(message_ids)

    grid.pull_messages = counted  # type: ignore[method-assign]
    answered = []
    requests = {n: {BODY: b"x"} for n in range(5)}
    for node, reply in GridTransport(grid).exchange(Stage.TRAIN, requests, timeout=7.0, max_bytes=HELD_BYTES // 2 + 1):  # type: ignore[arg-type]
        assert reply.vector is not None
        assert reply.vector.size == 2 * PART_BYTES
        seen.append(weakref.ref(reply.vector))
        answered.append(node)
        del reply
    assert sorted(answered) == [0, 1, 2, 3, 4]
    assert set(asked) == {1}


def test_what_came_by_the_deadline_is_read_however_long_the_reader_takes() -> None:
    got = []
    requests = {n: {BODY: b"x"} for n in range(3)}
    for node, _ in GridTransport(FakeGrid(large_reply)).exchange(
        Stage.TRAIN, requests, timeout=0.2, max_bytes=HELD_BYTES
    ):  # type: ignore[arg-type]
        time.sleep(0.15)
        got.append(node)
    assert sorted(got) == [0, 1, 2]


def test_small_vectors_are_pulled_together() -> None:
    grid, asked = FakeGrid(body_reply), []
    pull = grid.pull_messages
    grid.pull_messages = lambda names: asked.append(len(list(names))) or pull(names)  # type: ignore[method-assign, func-returns-value]
    list(GridTransport(grid).exchange(Stage.TRAIN, {n: {BODY: b"x"} for n in range(5)}, timeout=7.0, max_bytes=1000))  # type: ignore[arg-type]
    assert asked[0] == 5


def test_damaged_array_bytes() -> None:
    array = Array(np.zeros(100, np.uint8))
    damaged = Array(dtype="uint8", shape=(100,), stype=array.stype, data=array.data[:50])
    assert read_vector(RecordDict({ARRAYS: ArrayRecord({VECTOR: damaged})}), 100) is None


def test_the_strategy_has_no_other_way_in() -> None:
    from lensemble_flwr.errors import ContractViolation

    strategy = SecureDiLoCo(None, None, None)  # type: ignore[arg-type]
    for call in (
        lambda: strategy.configure_train(1, None, None, None),  # type: ignore[arg-type]
        lambda: strategy.aggregate_train(1, []),
        lambda: strategy.configure_evaluate(1, None, None, None),  # type: ignore[arg-type]
        lambda: strategy.aggregate_evaluate(1, []),
    ):
        with pytest.raises(ContractViolation):
            call()
