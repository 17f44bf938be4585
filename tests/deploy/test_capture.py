"""Nothing else leaves: every byte that a site sent in a real run, read by a relay that has the coordinator's own key.

The sites' app is the real one and one file more, which writes down at the site what must not leave it (the frames,
actions, states, losses, norm and update of the round, the secret keys of its protocol session).
"""

from __future__ import annotations

import base64
import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.federation.site import Site
from tests.deploy import capture
from tests.deploy.capture import Request
from tests.deploy.deployment import Federation, script, staged, through_relays, wait

MARK = "PRIVATE-WITNESS-7f3a"

WITNESS = f'''
"""Writes down at the site what must not leave it."""
import numpy as np
from lensemble_flwr.data.episodes import iterate
from lensemble_flwr.federation import participant, world_task
losses = []
def steps(*args, inner=world_task.inner_steps, **words):
    result = inner(*args, **words)
    losses.extend([result.first_loss, result.last_loss])
    return result
world_task.inner_steps = steps
def release(delta, opened, identity, simulation, inner=participant.release_update):
    result = inner(delta, opened, identity, simulation)
    np.save(f"{{here[0]}}/witness-q.npy", result.q)
    return result
participant.release_update = release
here = []
def delta(self, opened, theta, inner=participant.SiteParticipant._delta):
    value, state = inner(self, opened, theta)
    here[:] = [self.site.folder]
    episodes = list(iterate(self.task.recordings(self.partition)))
    np.savez(self.site.folder / "witness.npz", delta=value, losses=losses,
        norm=np.linalg.norm(value.astype(np.float64)),
        frames=np.concatenate([e.frames for e in episodes]), actions=np.concatenate([e.actions for e in episodes]),
        states=np.concatenate([e.states for e in episodes]))
    self.site.log.info("{MARK} the loss fell from %r to %r", *losses)
    return value, state
participant.SiteParticipant._delta = delta
def remember(self, opened, attempt, session, inner=participant.SiteParticipant._remember):
    inner(self, opened, attempt, session)
    held = [getattr(session._state, name, b"") for name in ("c_private", "s_private", "self_key")]
    held += getattr(session._state, "mask_keys", dict()).values()
    with open(self.site.folder / "witness.keys", "a") as file:
        file.writelines(bytes(key).hex() + "\\n" for key in held if key)
participant.SiteParticipant._remember = remember
'''

SIZES = {
    "query.join": 136,
    "query.open_round": 162,
    "query.share_keys": 318,
    "train.masked_update": 162,
    "query.agree": 98,
    "query.unmask": 197,
    "query.close_round": 1,
}
"""The table of docs/threat-model.md for three sites: 94 bytes a peer more in share_keys, 33 in unmask."""

PATHS = {
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
}
"""What a SuperNode of Flower 1.42 asks for, below /v1/fleet/."""


def test_a_planted_value_is_found() -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (2, 8, 8, 3), np.uint8)
    wanted = capture.blocks(frames)
    noise = rng.bytes(5000)
    assert capture.found_blocks(wanted, noise) == 0
    for offset in (0, 1, 7):
        assert capture.found_blocks(wanted, noise + b"x" * offset + frames.tobytes()[33:64] + noise) == 1
    loss, key = 0.123456789, bytes(range(32))
    for text in (np.float64(loss).tobytes(), f"loss={loss}".encode(), repr(loss).encode()):
        assert capture.present(capture.writings(loss), noise + text)
    assert capture.present(capture.short_writings(loss), b"a" + np.float32(loss).tobytes())
    for text in (key, key.hex().encode(), base64.b64encode(key)):
        assert capture.present(capture.key_writings(key), b"key " + text)
    assert not capture.present(capture.key_writings(key), noise)


def test_requests_are_read_whole_or_not_at_all() -> None:
    one = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    assert [r.body for r in capture.requests(one + one + one[:-1])] == [b"abc", b"abc"]
    answers = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno"
    assert [r.answer for r in capture.requests(one * 3, answers)] == [b"ab", b"", b""]
    with pytest.raises(ValueError, match="no request"):
        list(capture.requests(one + b"something else\r\n\r\n"))
    with pytest.raises(ValueError, match="plain"):
        list(capture.requests(one.replace(b"Host: a", b"Transfer-Encoding: chunked")))


@dataclass
class Watch:
    """Every object that the SuperLink's database held at any time."""

    path: Path
    objects: dict[str, bytes] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.wait(0.1):
            try:
                with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=5) as database:
                    rows = database.execute("select object_id, content from objects where is_available").fetchall()
            except sqlite3.OperationalError:
                continue
            self.objects.update({name: bytes(content) for name, content in rows if content})


@dataclass
class Captured:
    deployment: Any
    overrides: list[str]
    federation: Federation
    streams: dict[str, list[Request]]
    stored: dict[str, bytes]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    """Three sites with pinned rosters train a tiny world model for one round, each through a relay of its own."""
    folder = tmp_path_factory.mktemp("capture")
    overrides = [*script().run_overrides(3, "world", 1), "secagg.pinned=true"]
    app = staged(folder / "app", WITNESS)
    made = script().Deployment(folder / "machines", 3, namespaces=os.geteuid() == 0, app=app)
    try:
        made.set_up(overrides, budget=1000, pinned=True)
        through_relays(made, folder)
        made.start_superlink()
        made.register()
        for site in made.sites:
            made.start_site(site)
        made.wait_for_sites()
        watch = Watch(made.coordinator.folder / "state.db")
        thread = threading.Thread(target=watch.run)
        thread.start()
        federation = Federation(made, overrides, folder / "run")
        try:
            federation.start()
            assert federation.end(500) == 0
        finally:
            watch.stop.set()
            thread.join()
        for site in made.sites:
            site.stop()
        wait(lambda: not any(site.processes for site in made.sites), 5, "the end of the sites")
        streams = {site.name: capture.sent(folder / site.name) for site in made.sites}
        yield Captured(made, overrides, federation, streams, watch.objects)
    finally:
        made.close()


def everything(streams: list[Request]) -> bytes:
    return b"\n".join(r.path.encode() + r.head + r.body for r in streams)


@pytest.mark.runtime
@pytest.mark.slow
def test_every_message_is_one_of_the_table_and_has_its_size(captured: Captured) -> None:
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    config = load_config(captured.overrides)
    for site in captured.deployment.sites:
        streams = captured.streams[site.name]
        assert {r.path.removeprefix("/v1/fleet/") for r in streams} <= PATHS
        store, seen = capture.objects(streams), []
        used: set[str] = set()
        for request in streams:
            if not request.path.endswith("/push-messages"):
                continue
            pushed = PushMessagesRequest.FromString(request.body)
            for message, tree in zip(pushed.messages_list, pushed.message_object_trees, strict=True):
                stage, names = message.metadata.message_type, capture.tree_ids(tree)
                used.update(names)
                assert not message.HasField("error")
                assert not message.content.ByteSize()
                kinds = [capture.flower_object(store[name]) for name in names if name in store]
                records = [value for kind, value in kinds if kind == "ConfigRecord"]
                chunks = [value for kind, value in kinds if kind == "ArrayChunk"]
                others = {kind for kind, _ in kinds} - {"ConfigRecord", "ArrayChunk"}
                assert others <= {"Message", "RecordDict", "ArrayRecord", "Array"}
                seen.append((message.metadata.created_at, stage))
                for record in records:
                    assert list(record) == ["body"], stage
                    assert len(record["body"]) == SIZES[stage], stage
                plan = make_plan(config, 3, json.loads(dimension(captured)))
                vector = plan.ring.wire_bytes
                assert [len(c) for c in chunks] == ([vector + 128] if stage == "train.masked_update" else []), stage
                for name, (kind, value) in zip([n for n in names if n in store], kinds, strict=True):
                    if kind not in ("ConfigRecord", "ArrayChunk"):
                        assert len(value) < 700, (kind, len(value), name)
        assert [stage for _, stage in sorted(seen)] == list(SIZES), site.name
        assert set(store) <= used
        assert set(store) <= set(captured.stored) | set(store)


def dimension(captured: Captured) -> str:
    """Coordinates of the update: from the public manifest."""
    manifest = json.loads((captured.federation.out / "manifest.json").read_text())
    return str(manifest["plan"]["dimension"])


@pytest.mark.runtime
@pytest.mark.slow
def test_no_private_value_key_or_log_line_is_in_it(captured: Captured) -> None:
    stored = b"\n".join(captured.stored.values())
    for site in captured.deployment.sites:
        private = np.load(site.folder / "witness.npz")
        q = np.load(site.folder / "witness-q.npy")
        streams = captured.streams[site.name]
        text = everything(streams)
        plain = everything([r for r in streams if b"ArrayChunk" not in r.body])
        # What is public is there in the clear: the relay reads what the site says.
        opened = Site(site.folder)
        root = opened.dataset_root(captured.federation.federation_id())
        assert opened.identity in text
        assert root is not None
        assert root in text
        assert b"train.masked_update" in text
        for place in (text, stored):
            for name in ("frames", "actions", "states", "delta"):
                # A choice among few actions is plain: only a longer piece of it tells whose it is.
                long = name == "actions" and not capture.blocks(private[name])
                wanted = capture.blocks(private[name], 128, 3) if long else capture.blocks(private[name])
                assert wanted, name
                assert not capture.found_blocks(wanted, place), name
            for array in (private["delta"].astype("<f8"), q.astype("<i8"), q.astype("<i4"), q.astype("<i2")):
                assert not capture.found_blocks(capture.blocks(array), place)
            numbers = [float(private["norm"]), *private["losses"].tolist()]
            assert all(math.isfinite(value) and value for value in numbers)
            assert not [v for v in numbers if capture.present(capture.writings(v), place)]
            keys = [bytes.fromhex(line) for line in (site.folder / "witness.keys").read_text().split()]
            assert len(set(keys)) >= 5  # of two key pairs, a self mask, two masks with peers
            keys += [(site.folder / name).read_bytes() for name in ("identity.key", "site.secret")]
            assert not [key for key in keys if capture.present(capture.key_writings(key), place)]
            assert not capture.present((site.folder / "supernode.key").read_bytes().split(b"\n")[1:-2], place)
            lines = (site.folder / "site.log").read_text().splitlines()
            assert any(MARK in line for line in lines)
            assert not capture.present([json.loads(line)["text"].encode() for line in lines], place)
            assert MARK.encode() not in place
        assert not capture.present([w for v in numbers for w in capture.short_writings(v)], plain)


@pytest.mark.runtime
@pytest.mark.slow
def test_the_database_of_the_superlink_holds_what_the_sites_and_the_coordinator_sent_and_no_more(
    captured: Captured,
) -> None:
    from_sites = {name: c for streams in captured.streams.values() for name, c in capture.objects(streams).items()}
    kept = [name for name in from_sites if name in captured.stored]
    assert len(kept) > len(from_sites) / 2  # it was looked at often enough to see most of them before they went
    kinds = {capture.flower_object(content)[0] for content in captured.stored.values()}
    assert kinds <= {"Message", "RecordDict", "ConfigRecord", "ArrayRecord", "Array", "ArrayChunk"}
    for name, content in captured.stored.items():
        kind, value = capture.flower_object(content)
        if kind == "ConfigRecord" and name not in from_sites:  # downwards
            assert set(value) <= {"body", "attempt", "closes", "envelopes", "salt"}
            assert len(value["salt"]) == 16


@pytest.mark.runtime
@pytest.mark.slow
def test_every_line_of_the_logs_names_its_round(captured: Captured) -> None:
    """The site's log and the coordinator's can be laid side by side."""
    prefix = captured.federation.federation_id().hex()[:16]
    files = [site.folder / "site.log" for site in captured.deployment.sites]
    for path in (*files, captured.federation.out / "coordinator.log"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert all({"time", "level", "federation", "round", "stage", "event"} <= set(line) for line in lines)
        assert {line["federation"] for line in lines} == {prefix}
        inside = [line for line in lines if line["stage"] in list(SIZES)[1:]]
        assert {line["round"] for line in inside} == {0}
        assert [line["stage"] for line in lines if line["event"] in ("answered", "stage")] == list(SIZES)


@pytest.mark.runtime
@pytest.mark.slow
def test_pinned_rosters_give_the_central_guarantee_against_the_coordinator(captured: Captured) -> None:
    hashes = set(captured.deployment.roster_hashes().values())
    assert len(hashes) == 1
    assert all(len(digest) >= 16 for digest in hashes)
    claims = json.loads((captured.federation.out / "manifest.json").read_text())["claims"]
    assert {row["observer"]: row["guarantee"] for row in claims}["coordinator"] == "central"
    assert {row["holds"] for row in claims if row["observer"] == "coordinator"} == {True}
