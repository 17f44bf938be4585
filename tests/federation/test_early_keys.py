"""Keys of the next round ride on the last reply of this one: an exchange less, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import PrivacyBudgetExceeded
from lensemble_flwr.federation.plan import next_keys_binding
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.wire import BODY, KEYS, NEXT, Refusal, Stage
from lensemble_flwr.secagg import keys_ahead
from lensemble_flwr.secagg.wire import HEADER_BYTES, KEY_ENTRY_BYTES
from tests.federation.harness import Federation

EARLY = "secagg.early_keys=true "
NORMAL, SHORT = [Stage.OPEN, Stage.SHARE], [Stage.OPEN_SHARE]
NODE = 101


def stages(federation: Federation) -> list[list[str]]:
    """The exchanges of each round, in order, up to its end."""
    rounds: list[list[str]] = [[]]
    for stage, _, _, _ in federation.transport.log:
        if stage in (Stage.JOIN, Stage.CLOSE):
            continue
        if rounds[-1] and rounds[-1][-1] == Stage.UNMASK and stage != Stage.UNMASK:
            rounds.append([])
        if not rounds[-1] or rounds[-1][-1] != stage:
            rounds[-1].append(stage)
    return rounds


def outcomes(federation: Federation) -> list[str]:
    return [record["outcome"] for record in federation.rounds()]


def in_round(federation: Federation, index: int) -> bool:
    return len(federation.rounds()) == index


@pytest.mark.parametrize("pinned", [False, True])
def test_an_exchange_less_from_the_second_round_on(tmp_path: Path, pinned: bool) -> None:
    federation = Federation(tmp_path, EARLY + f"diloco.rounds=4 secagg.pinned={str(pinned).lower()}")
    federation.start()
    rest = [Stage.TRAIN, *([Stage.AGREE] if pinned else []), Stage.UNMASK]
    assert stages(federation) == [NORMAL + rest, *[SHORT + rest] * 3]
    assert outcomes(federation) == ["committed"] * 4
    assert [record["participants"] for record in federation.rounds()] == [4] * 4
    assert federation.transport.errors == []
    assert all(node.memory == {} for node in federation.transport.members.values())


def test_without_noise_the_models_are_the_same(tmp_path: Path) -> None:
    """Stochastic rounding aside, which is below 1e-6 here."""
    models = []
    for early in ("true", "false"):
        federation = Federation(tmp_path / early, f"privacy=disabled secagg.early_keys={early}")
        models.append(federation.start())
    np.testing.assert_allclose(models[0], models[1], atol=1e-6)


def test_off_unless_asked_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.start()
    assert all(opening[:2] == NORMAL for opening in stages(federation))
    assert not any(NEXT in fields for _, _, fields, _ in federation.transport.log)


@pytest.mark.parametrize("stage", [Stage.TRAIN, Stage.UNMASK])
def test_after_a_dropout_the_keys_are_asked_for_again(tmp_path: Path, stage: str) -> None:
    federation = Federation(tmp_path, EARLY)
    federation.transport.before = lambda at, node, fields: (
        not (at == stage and node == NODE and in_round(federation, 0))
    )
    federation.start()
    assert [opening[0] for opening in stages(federation)] == [Stage.OPEN, Stage.OPEN, Stage.OPEN_SHARE]
    assert outcomes(federation) == ["committed"] * 3
    assert [record["participants"] for record in federation.rounds()][1:] == [4, 4]


def test_a_site_that_lost_its_keys_is_a_dropout_and_the_next_round_is_whole(tmp_path: Path) -> None:
    federation = Federation(tmp_path, EARLY + "diloco.rounds=4")

    def before(stage: str, node: int, fields: Mapping[str, Any]) -> None:
        if stage == Stage.OPEN_SHARE and node == NODE and in_round(federation, 1):
            federation.transport.members[NODE].memory.clear()

    federation.transport.before = before
    federation.start()
    assert [record["participants"] for record in federation.rounds()] == [4, 3, 4, 4]
    assert [opening[0] for opening in stages(federation)] == [
        Stage.OPEN,
        Stage.OPEN_SHARE,
        Stage.OPEN,
        Stage.OPEN_SHARE,
    ]


def test_too_few_with_keys_is_void_and_the_retry_makes_fresh_ones(tmp_path: Path) -> None:
    federation = Federation(tmp_path, EARLY + "diloco.rounds=2")
    federation.transport.before = lambda stage, node, fields: not (stage == Stage.OPEN_SHARE and node != NODE)
    federation.start()
    assert outcomes(federation) == ["committed", "committed"]
    assert [name for name, _ in federation.events].count("void") == 1
    assert stages(federation)[1][:3] == [Stage.OPEN_SHARE, *NORMAL]
    keys = [r.body for s, n, _, r in federation.transport.log if s == Stage.OPEN and n == NODE and r is not None]
    assert len(set(keys)) == 2, "round 0, and the second attempt at round 1"


def test_a_spent_budget_is_told_when_the_next_round_opens(tmp_path: Path) -> None:
    federation = Federation(tmp_path, EARLY)
    real = federation.transport.deliver

    def deliver(stage: str, node: int, fields: Mapping[str, Any]) -> Any:
        if stage == Stage.OPEN_SHARE and node == NODE:
            site = federation.transport.members[NODE].site
            path = next(p for p in (site.folder / "policy.json", site.folder / "policy.yaml") if p.exists())
            from lensemble_flwr.federation.policy import save_policy

            path.unlink()
            save_policy(path, dataclasses.replace(site.policy_before, max_epsilon_local=1e-3, unlimited=False))  # type: ignore[attr-defined]
        return real(stage, node, fields)

    for member in federation.transport.members.values():
        member.site.policy_before = member.site.policy  # type: ignore[attr-defined]
    federation.transport.deliver = deliver  # type: ignore[method-assign]
    with pytest.raises(PrivacyBudgetExceeded):
        federation.start()
    assert outcomes(federation) == ["committed"]


def refusals(federation: Federation, stage: str, node: int = NODE) -> list[Refusal | None]:
    return [r.refusal for s, n, _, r in federation.transport.log if s == stage and n == node and r is not None]


def replayed(federation: Federation, change: Any) -> list[Any]:
    """At NODE's first OPEN_SHARE: the real message, then, with the memory of before put back, a changed one."""
    seen: list[Any] = []

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage == Stage.OPEN_SHARE and node == NODE and not seen:
            member = federation.transport.members[NODE]
            newer = dict(member.memory)
            member.memory.clear()
            member.memory.update(stale)
            fields = change(dict(sent))
            seen.append(federation.transport.deliver(Stage.OPEN_SHARE, NODE, fields))
            member.memory.clear()
            member.memory.update(newer)
        return reply

    stale: dict[str, bytes] = {}
    sent: dict[str, Any] = {}

    def before(stage: str, node: int, fields: Mapping[str, Any]) -> None:
        if stage == Stage.OPEN_SHARE and node == NODE and not seen:
            stale.update(federation.transport.members[NODE].memory)
            sent.update(fields)

    federation.transport.before, federation.transport.after = before, after
    federation.start()
    return seen


def other_open(fields: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's second RoundOpen for the same keys: another attempt, so another T0."""
    return {**fields, "attempt": fields["attempt"] + 1}


@pytest.mark.parametrize("change", [lambda fields: fields, other_open])
def test_the_keys_serve_one_session_whatever_state_comes_back(tmp_path: Path, change: Any) -> None:
    federation = Federation(tmp_path, EARLY + "diloco.rounds=2")
    (reply,) = replayed(federation, change)
    assert reply.refusal == Refusal.PROTOCOL
    assert outcomes(federation) == ["committed", "committed"]


def swap_keys(fields: Mapping[str, Any], entry: bytes) -> dict[str, Any]:
    """Another entry for the first member in the roster of keys."""
    keys = bytearray(fields[KEYS])
    start = HEADER_BYTES + 1
    keys[start : start + KEY_ENTRY_BYTES] = entry
    return {**fields, KEYS: bytes(keys)}


@pytest.mark.parametrize("what", ["of another round", "unsigned", "of another member"])
def test_keys_that_are_not_a_members_own_for_this_round_are_refused(tmp_path: Path, what: str) -> None:
    federation = Federation(tmp_path, EARLY + "diloco.rounds=2")

    def before(stage: str, node: int, fields: Mapping[str, Any]) -> Any:
        if stage != Stage.OPEN_SHARE:
            return None
        opened = RoundOpen.decode(fields[BODY])
        first, second = (
            next(m.site for m in federation.transport.members.values() if m.site.identity == identity)
            for identity in opened.roster[:2]
        )
        if federation.transport.members[node].site.identity == first.identity:
            return None
        round_index = opened.round + (what == "of another round")
        parent = next(RoundOpen.decode(f[BODY]).digest() for s, _, f, _ in federation.transport.log if s == Stage.OPEN)
        binding = next_keys_binding(opened.federation_id, round_index, parent)
        signer = second if what == "of another member" else first
        message = keys_ahead(binding, first.identity, signer.sign)[1]
        entry = message[HEADER_BYTES:]
        return swap_keys(fields, entry[:64] + bytes(64) if what == "unsigned" else entry)

    federation.transport.before = before
    federation.start()
    first = min(m.site.identity for m in federation.transport.members.values())
    others = [n for n, m in federation.transport.members.items() if m.site.identity != first]
    assert all(refusals(federation, Stage.OPEN_SHARE, node) == [Refusal.PROTOCOL] for node in others)
    assert outcomes(federation) == ["committed", "committed"], "the second attempt makes keys of its own"


def test_a_member_that_sends_keys_that_do_not_fit_stops_nobody(tmp_path: Path) -> None:
    federation = Federation(tmp_path, EARLY)

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage == Stage.UNMASK and node == NODE and in_round(federation, 0) and reply.refusal is None:
            return dataclasses.replace(reply, body=reply.body[:-1] + bytes([reply.body[-1] ^ 1]))
        return reply

    federation.transport.after = after
    federation.start()
    assert [opening[0] for opening in stages(federation)] == [Stage.OPEN, Stage.OPEN, Stage.OPEN_SHARE]
    assert [record["participants"] for record in federation.rounds()] == [4, 4, 4]


@pytest.mark.parametrize(("overrides", "index"), [(EARLY + "diloco.rounds=2", 1), ("diloco.rounds=2", 0)])
def test_keys_are_made_only_where_there_is_a_next_round_and_the_run_has_them(
    tmp_path: Path, overrides: str, index: int
) -> None:
    """The refusal comes before the one answer of the round is used up."""
    federation, tried = Federation(tmp_path, overrides), []

    def before(stage: str, node: int, fields: Mapping[str, Any]) -> None:
        if stage == Stage.UNMASK and node == NODE and in_round(federation, index):
            tried.append(federation.transport.deliver(stage, node, {**fields, NEXT: 1}).refusal)

    federation.transport.before = before
    federation.start()
    assert tried == [Refusal.PROTOCOL]
    assert [record["participants"] for record in federation.rounds()] == [4, 4]


@pytest.mark.parametrize("value", [2, -1, True, 1.0, "1", b"1", None])
def test_the_field_is_0_or_1(tmp_path: Path, value: Any) -> None:
    federation, tried = Federation(tmp_path, EARLY + "diloco.rounds=2"), []

    def before(stage: str, node: int, fields: Mapping[str, Any]) -> None:
        if stage == Stage.UNMASK and node == NODE and in_round(federation, 0):
            tried.append(federation.transport.deliver(stage, node, {**fields, NEXT: value}).refusal)

    federation.transport.before = before
    federation.start()
    assert tried == [Refusal.PROTOCOL]


def test_keys_for_another_round_are_not_taken(tmp_path: Path) -> None:
    """The keys that were made in round 0 are for round 1: a coordinator cannot keep them for round 2."""
    federation, kept, tried = Federation(tmp_path, EARLY), {}, []

    def before(stage: str, node: int, fields: Mapping[str, Any]) -> None:
        memory = federation.transport.members[NODE].memory
        if stage == Stage.OPEN_SHARE and node == NODE:
            if in_round(federation, 1):
                kept.update(memory)
                return
            newer = dict(memory)
            memory.clear()
            memory.update(kept)
            tried.append(federation.transport.deliver(stage, node, fields).refusal)
            memory.clear()
            memory.update(newer)

    federation.transport.before = before
    federation.start()
    assert tried == [Refusal.PROTOCOL]
    assert [record["participants"] for record in federation.rounds()] == [4, 4, 4]


def test_after_a_resume_nobody_has_keys(tmp_path: Path) -> None:
    federation, over = Federation(tmp_path, EARLY), [False]

    class Stop(BaseException):
        pass

    def on_event(name: str, fields: dict[str, Any]) -> None:
        if name == "round" and not over[0]:
            over[0] = True
            raise Stop

    federation.on_event = on_event
    with pytest.raises(Stop):
        federation.start()
    federation.resume()
    assert outcomes(federation) == ["committed"] * 3
    assert [opening[0] for opening in stages(federation)] == [Stage.OPEN, Stage.OPEN, Stage.OPEN_SHARE]
