"""Where the noise's randomness may not go, and what happens when there is none.

A spy records every key, keystream and noise of a federation. Everything that the federation wrote, sent, logged or
held is then searched for them. The searcher is shown to find what is hidden.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ConfigError, ContractViolation, LensembleError
from lensemble_flwr.federation.participant import Runtime, SiteParticipant
from lensemble_flwr.federation.policy import Policy, save_policy, simulated_policy
from lensemble_flwr.federation.release import release_update
from lensemble_flwr.federation.wire import Refusal, Stage
from lensemble_flwr.privacy import noise
from lensemble_flwr.privacy.mechanism import add_noise, zero_update
from lensemble_flwr.privacy.noise import Cells, Keystream, OsEntropy, RoundedGaussian
from lensemble_flwr.reporting.report import write_report
from lensemble_flwr.reporting.tensorboard import write_events
from tests.federation.harness import Federation
from tests.federation.test_release import opened
from tests.reporting.test_real_run import finish

PIECE = 16
"""Bytes in a row that count as a find. By chance one is found with probability below 2^-80."""


@dataclasses.dataclass
class Spy:
    """What nobody may see."""

    keys: list[bytes] = dataclasses.field(default_factory=list)
    streams: list[bytes] = dataclasses.field(default_factory=list)
    noises: list[tuple[np.ndarray, float]] = dataclasses.field(default_factory=list)  # fine steps, step size in std

    def pieces(self) -> set[bytes]:
        """Every piece of PIECE bytes that would give something away, however it was written."""
        whole = list(self.streams)
        for key in self.keys:
            whole += [key, key[::-1], key.hex().encode(), key.hex().upper().encode(), base64.b64encode(key)]
        for values, std in self.noises:
            scaled = values / std
            whole += [values.astype("<i8").tobytes(), values.astype("<f8").tobytes(), scaled.tobytes()]
            whole += [str(v).encode() for v in values.tolist()] + [repr(v).encode() for v in scaled.tolist()]
        return {text[i : i + PIECE] for text in whole for i in range(len(text) - PIECE + 1)}


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found, init, words, stream_to = Spy(), Keystream.__init__, Keystream.words, RoundedGaussian.stream_to

    def opening(self: Keystream, key: bytearray) -> None:
        found.keys.append(bytes(key))
        init(self, key)

    def reading(self: Keystream, count: int) -> np.ndarray:
        result = words(self, count)
        found.streams.append(result.tobytes())
        return result

    def adding(self: RoundedGaussian, load: Any, cells: Cells, out: Any, stream: Keystream, scaled: Any = None) -> None:
        key, fine = bytearray(stream._key), np.zeros(out.size, np.int64)
        integers = np.zeros(out.size, np.int64)

        def loading(block: slice, part: np.ndarray) -> None:
            load(block, part)
            integers[block] = part

        stream_to(self, loading, cells, out, stream, scaled)
        if scaled is not None and not integers.any():
            integers[:] = np.trunc(scaled.x.astype(np.float64) * scaled.factor * scaled.inverse_step)
        again = Keystream.__new__(Keystream)  # the ring's cells do not show the noise: it is drawn once more, unseen
        init(again, key)
        again.words = functools.partial(words, again)  # type: ignore[method-assign]
        with again:
            stream_to(self, lambda block, part: part.fill(0), Cells(), fine, again)
        assert np.array_equal(out, cells(integers + fine)), "the noise that was really added"
        found.noises.append((fine, float(self._table.std)))

    monkeypatch.setattr(Keystream, "__init__", opening)
    monkeypatch.setattr(Keystream, "words", reading)
    monkeypatch.setattr(RoundedGaussian, "stream_to", adding)
    return found


def contents(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        yield str(path).encode()
        if path.is_file():
            yield path.read_bytes()


def flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name).encode()
            yield from flat(item)
    else:
        yield repr(value).encode()


def holds_any(blobs: set[bytes], pieces: set[bytes]) -> list[bytes]:
    return [b[i : i + PIECE] for b in blobs for i in range(len(b) - PIECE + 1) if b[i : i + PIECE] in pieces]


def everything(federation: Federation, logged: str) -> Callable[[], set[bytes]]:
    """Collects, after every message, all that exists outside the release path: files and memory; at the end messages,
    events, logs, environment and arguments as well."""
    seen: set[bytes] = set()

    def collect() -> set[bytes]:
        seen.update(contents(federation.tmp))
        for node in federation.transport.members.values():
            seen.update(flat(node.memory))
        for stage, _, fields, reply in federation.transport.log:
            seen.update([stage.encode(), *flat(dict(fields))])
            if reply is not None:
                seen.update([reply.body, *flat(reply.vector), repr(reply.refusal).encode()])
        seen.update(repr(event).encode() for event in federation.events)
        seen.update(repr(error).encode() for error in federation.transport.errors)
        seen.update(f"{name}={value}".encode() for name, value in os.environ.items())
        for name in ("cmdline", "environ", "comm"):
            if Path(f"/proc/self/{name}").is_file():
                seen.add(Path(f"/proc/self/{name}").read_bytes())
        return seen

    return collect


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Two private rounds whose sites also keep copies of what they release."""
    federation = Federation(tmp_path, "diloco.rounds=2")
    policy = dataclasses.replace(simulated_policy(federation.config), log_releases=True)
    for node in federation.transport.members.values():
        save_policy(node.site.folder / "policy.json", policy)
    return federation


def test_nothing_from_which_noise_follows_is_anywhere(
    federation: Federation, spy: Spy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    collect = everything(federation, caplog.text)

    def after(stage: str, node: int, reply: Any) -> Any:
        collect()
        return reply

    federation.transport.after = after
    federation.start()
    folder = finish(federation)
    write_report(folder)
    write_events(folder)
    blobs = collect() | {caplog.text.encode()}
    assert len(spy.noises) == 2 * 4
    assert len(spy.keys) >= 2 * 4
    assert len(set(spy.keys)) == len(spy.keys)
    assert any(b"LQR1" in blob for blob in blobs), "the cached releases were seen"
    assert any(path.suffix == ".html" for path in folder.rglob("*")), "the report was searched"
    assert holds_any(blobs, spy.pieces()) == []


@pytest.mark.parametrize("leak", ["key", "stream", "noise", "log", "message"])
def test_the_search_finds_what_is_hidden(
    federation: Federation, spy: Spy, caplog: pytest.LogCaptureFixture, leak: str
) -> None:
    collect = everything(federation, caplog.text)
    node = federation.transport.members[101]

    def after(stage: str, number: int, reply: Any) -> Any:
        if stage == Stage.TRAIN and number == 101:
            hidden = {
                "key": spy.keys[-1].hex().encode(),
                "stream": b"." + max(spy.streams, key=len)[40:60],
                "noise": spy.noises[-1][0][3:5].tobytes(),
            }
            if leak in hidden:
                (node.site.folder / "notes").write_bytes(b"something " + hidden[leak])
            elif leak == "log":
                node.site.log.error("key %s", spy.keys[-1].hex())
            else:
                federation.transport.log.append((stage, number, {"extra": spy.keys[-1]}, None))
        return reply

    federation.transport.after = after
    federation.start()
    assert holds_any(collect() | {caplog.text.encode()}, spy.pieces())


def test_a_round_takes_one_fresh_key_a_release(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the key that only shows that the source works."""
    drawn: list[bytes] = []
    real = Keystream.__init__

    def opening(self: Keystream, key: bytearray) -> None:
        drawn.append(bytes(key))
        real(self, key)

    monkeypatch.setattr(Keystream, "__init__", opening)
    federation.start()
    assert len(drawn) == len(set(drawn)) == 2 * 4 * 2


# ---------------------------------------------------------------- a failing source


@pytest.mark.parametrize("failure", [OSError("no entropy"), NotImplementedError(), b"short", bytes(32)], ids=repr)
@pytest.mark.parametrize("stage", [Stage.OPEN, Stage.SHARE, Stage.TRAIN])
def test_a_site_without_randomness_refuses_before_it_trains_or_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any, stage: str
) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    real, trained, broken = os.urandom, [], []
    update = federation.task.local_update
    monkeypatch.setattr(
        federation.task, "local_update", lambda theta, i, *a, **k: trained.append(i) or update(theta, i, *a, **k)
    )

    def source(count: int) -> bytes:
        if not broken:
            return real(count)
        if isinstance(failure, Exception):
            raise failure
        return failure

    def before(at: str, node: int, fields: Any) -> None:
        broken[:] = [1] if node == 101 and at in list(Stage.ALL)[list(Stage.ALL).index(stage) :] else []

    def after(at: str, node: int, reply: Any) -> Any:
        broken.clear()
        return reply

    monkeypatch.setattr(os, "urandom", source)
    federation.transport.before, federation.transport.after = before, after
    federation.start()
    refusals = [r.refusal for s, n, _, r in federation.transport.log if n == 101 and r is not None and r.refusal]
    assert refusals, "it refused"
    raised = [error for _, node, error in federation.transport.errors if node == 101]
    assert all(isinstance(error, LensembleError) for error in raised)
    if stage == Stage.TRAIN:
        assert refusals[0] == Refusal.POLICY
        assert isinstance(raised[0], ConfigError)
        assert "random source" in str(raised[0])
    assert sorted(trained) == [0, 2, 3]
    assert federation.ledger_rounds() == [1, 0, 1, 1], "nothing was reserved"
    assert federation.rounds()[0]["participants"] == 3


# ---------------------------------------------------------------- replay


def test_a_run_cannot_turn_replay_on_against_a_policy(tmp_path: Path, spy: Spy) -> None:
    federation = Federation(tmp_path, "privacy.entropy=replay")
    for node in federation.transport.members.values():
        save_policy(node.site.folder / "policy.json", Policy(max_epsilon_central=8.0, allow_replay=False))
    with pytest.raises(LensembleError):
        federation.start()
    codes = {r.refusal for s, _, _, r in federation.transport.log if s == Stage.OPEN and r is not None}
    assert codes == {Refusal.POLICY}
    assert all("allow_replay" in str(error) for _, _, error in federation.transport.errors)
    assert federation.ledger_rounds() == [0] * 4
    assert spy.noises == []


def test_replay_exists_only_in_a_simulation(tmp_path: Path, spy: Spy) -> None:
    """Whatever the policy says: a real SuperNode runs with Runtime(simulation=False), which no configuration sets."""
    federation = Federation(tmp_path, "privacy.entropy=replay")
    transport = federation.transport

    def participant(node: int) -> SiteParticipant:
        member = transport.members[node]
        return SiteParticipant(
            member.site, federation.config, federation.task, member.partition, member.memory, Runtime(False)
        )

    transport.participant = participant  # type: ignore[method-assign]
    with pytest.raises(LensembleError):
        federation.start()
    codes = {r.refusal for s, _, _, r in transport.log if s == Stage.OPEN and r is not None}
    assert codes == {Refusal.POLICY}
    assert federation.ledger_rounds() == [0] * 4
    assert spy.noises == []


@pytest.mark.parametrize(
    "override", ["simulation=true", "privacy.allow_replay=true", "policy.allow_replay=true", "runtime.simulation=true"]
)
def test_no_configuration_key_speaks_for_the_site(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(f"experiment=linear {override}")


def test_a_policy_does_not_allow_replay_unless_it_says_so() -> None:
    assert not Policy(max_epsilon_local=1.0).allow_replay


# ---------------------------------------------------------------- processes


def in_children(count: int, work: Callable[[], bytes]) -> list[bytes]:
    """What ``work`` returns in each of ``count`` children that are forked from here."""
    found = []
    for _ in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                with os.fdopen(writer, "wb") as out:
                    out.write(work())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            found.append(stream.read())
        os.waitpid(child, 0)
    return found


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork does not exist here")


@needs_fork
def test_forked_children_never_draw_the_same_noise() -> None:
    """Sampler, tables and the source itself exist before the fork; the noise does not."""
    source, count = OsEntropy(), 2000
    add_noise(zero_update(count, 1.0, 1.0), 1.0, source)

    def draw() -> bytes:
        return add_noise(zero_update(count, 1.0, 1.0), 1.0, source).v.tobytes()

    drawn = [np.frombuffer(b, np.int64) for b in (*in_children(3, draw), draw())]
    for one, other in itertools.combinations(drawn, 2):
        assert one.size == count
        assert not (one == other).any()
        assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(count)


@needs_fork
def test_an_open_keystream_is_of_no_use_in_a_child() -> None:
    with OsEntropy().open() as stream:

        def draw() -> bytes:
            try:
                return stream.words(4).tobytes()
            except ContractViolation as error:
                return error.message.encode()

        assert in_children(2, draw) == [b"A keystream was carried into another process."] * 2
        assert len(draw()) == 32


@needs_fork
def test_noise_is_independent_across_rounds_participants_and_processes() -> None:
    """20000 coordinates: a correlation of .042, in values or squares, would be found."""
    record = opened("")
    rounds = [dataclasses.replace(record, round=r) for r in range(3)]

    def draw(r: int, i: int) -> np.ndarray:
        return release_update(None, rounds[r], record.roster[i], False).q

    drawn = [draw(r, i) for r in range(2) for i in range(2)]
    for body in in_children(2, lambda: draw(2, 2).tobytes()):
        drawn.append(np.frombuffer(body, np.int32))
    bound = 6 / math.sqrt(record.dimension)
    for one, other in itertools.combinations(drawn, 2):
        a, b = (x.astype(np.float64) for x in (one, other))
        for power in (1, 2):
            assert abs(np.corrcoef(a**power, b**power)[0, 1]) < bound
            assert abs(np.corrcoef(a[1:] ** power, b[:-1] ** power)[0, 1]) < bound


def test_the_source_is_the_operating_system_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's and NumPy's generators in one state the noise differs; with one answer of the OS it does not."""
    import random

    def draw() -> np.ndarray:
        random.seed(0)
        np.random.seed(0)
        return add_noise(zero_update(100, 1.0, 1.0), 1.0, OsEntropy()).v

    assert not np.array_equal(draw(), draw())
    monkeypatch.setattr(noise.os, "urandom", lambda n: bytes(range(n)))
    assert np.array_equal(draw(), draw())
