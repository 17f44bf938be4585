"""What a broken-off round becomes: retried with cached vectors, replayed from the stored sum, or burnt.

A crash of the coordinator is :class:`Killed` raised at an event; a crash of a participant is raised inside its
handler. In both cases everything in memory is dropped and only what was fsynced is seen again. Real kill -9 of real
processes is in tests/test_runtime.py.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.federation import participant as participant_module
from lensemble_flwr.federation.wire import Stage
from lensemble_flwr.privacy.ledger import PrivacyLedger
from tests.federation.harness import Federation, Killed


def kill_at(federation: Federation, event: str, round_index: int) -> None:
    def on_event(name: str, fields: dict[str, Any]) -> None:
        if name == event and fields.get("round") == round_index:
            raise Killed

    federation.on_event = on_event


def crash_and_resume(tmp: Path, event: str, overrides: str = "diloco.rounds=3") -> tuple[Federation, np.ndarray]:
    federation = Federation(tmp, overrides)
    kill_at(federation, event, 1)
    with pytest.raises(Killed):
        federation.start()
    federation.on_event = lambda name, fields: None
    return federation, federation.resume()


def test_killed_before_unmask_the_round_is_retried_with_the_cached_updates(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3")
    asked: list[Any] = []
    cached: dict[str, bytes] = {}
    sent: list[int] = []

    def before(at: str, node: int, fields: Any) -> Any:
        if at == Stage.UNMASK and not asked and len(federation.rounds()) == 1:
            asked.append(1)
        return None

    def after(at: str, node: int, reply: Any) -> Any:
        if at == Stage.TRAIN and len(federation.rounds()) == 1 and not cached:
            sent.append(node)
            if len(sent) < 4:
                return reply
            for member in federation.transport.members.values():
                for path in (member.site.folder / "releases").glob("*-1.q"):
                    cached[str(path)] = hashlib.sha256(path.read_bytes()).digest()
            raise Killed
        return reply

    federation.transport.before, federation.transport.after = before, after
    with pytest.raises(Killed):
        federation.start()
    assert len(cached) == 4
    opened = (tmp_path / "run/state/round-00001/open.bin").read_bytes()

    def check(name: str, fields: dict[str, Any]) -> None:
        if name == "asked" and fields["round"] == 1:
            assert (tmp_path / "run/state/round-00001/open.bin").read_bytes() == opened
            for path, digest in cached.items():
                assert hashlib.sha256(Path(path).read_bytes()).digest() == digest

    federation.on_event = check
    federation.resume()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3
    assert federation.ledger_rounds() == [3] * 4
    assert federation.rounds()[1]["attempt"] == 2


def test_killed_after_the_sum_is_stored_the_commit_is_replayed_byte_for_byte(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3")
    kill_at(federation, "sum_stored", 1)
    with pytest.raises(Killed):
        federation.start()
    first = federation.folder.load_checkpoint(1)  # type: ignore[union-attr]
    kill_at(federation, "round", 1)
    with pytest.raises(Killed):
        federation.resume()
    once = federation.folder.checkpoint_path(2).read_bytes()  # type: ignore[union-attr]
    assert federation.rounds()[1]["replayed"] is True
    assert federation.folder.load_checkpoint(2).parent == first.content_hash()  # type: ignore[union-attr]
    federation.on_event = lambda name, fields: None
    federation.resume()
    assert federation.folder.checkpoint_path(2).read_bytes() == once  # type: ignore[union-attr]
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3
    assert federation.ledger_rounds() == [3] * 4


def test_killed_between_checkpoint_and_record_the_same_bytes_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lensemble_flwr.federation.run_folder import RunFolder

    federation = Federation(tmp_path, "diloco.rounds=2")
    append = RunFolder.append_round

    def die(self: RunFolder, record: dict[str, Any]) -> None:
        raise Killed

    monkeypatch.setattr(RunFolder, "append_round", die)
    with pytest.raises(Killed):
        federation.start()
    written = federation.folder.checkpoint_path(1).read_bytes()  # type: ignore[union-attr]
    monkeypatch.setattr(RunFolder, "append_round", append)
    federation.resume()
    assert federation.folder.checkpoint_path(1).read_bytes() == written  # type: ignore[union-attr]


def test_killed_after_asking_the_round_is_burnt(tmp_path: Path) -> None:
    federation, _ = crash_and_resume(tmp_path, "asked")
    assert [r["outcome"] for r in federation.rounds()] == ["committed", "burnt", "committed"]
    assert federation.rounds()[1]["theta_hash"] == federation.rounds()[0]["theta_hash"]
    assert federation.ledger_rounds() == [3] * 4
    momentum = [federation.folder.load_checkpoint(i).momentum for i in (1, 2)]  # type: ignore[union-attr]
    np.testing.assert_array_equal(*momentum)


def test_killed_right_after_round_open(tmp_path: Path) -> None:
    federation, _ = crash_and_resume(tmp_path, "round_open")
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3


def test_a_torn_record_never_took_effect(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    final = federation.start()
    path = tmp_path / "run/rounds.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round": 2, "outc')
    assert len(federation.rounds()) == 2
    again = federation.resume()
    assert again.tobytes() == final.tobytes()


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    final = federation.start()
    records = (tmp_path / "run/rounds.jsonl").read_bytes()
    assert federation.resume().tobytes() == final.tobytes()
    assert (tmp_path / "run/rounds.jsonl").read_bytes() == records
    assert federation.ledger_rounds() == [3] * 4


def test_reveals_of_two_subsets_are_impossible_even_if_the_coordinator_forgets_that_it_asked(tmp_path: Path) -> None:
    """Two of four answered, the coordinator deletes its mark and tries again: the two that answered refuse for ever."""
    federation = Federation(tmp_path, "diloco.rounds=2")
    answered: list[int] = []

    def after(at: str, node: int, reply: Any) -> Any:
        if at == Stage.UNMASK and not federation.rounds():
            answered.append(node)
            if len(answered) == 2:
                raise Killed
        return reply

    federation.transport.after = after
    with pytest.raises(Killed):
        federation.start()
    (tmp_path / "run/state/round-00000/asked").unlink()
    federation.transport.log.clear()
    federation.transport.after = lambda at, node, reply: reply
    with pytest.raises(SecureAggregationError, match="3 attempts"):
        federation.resume()
    revealed = {n for s, n, _, r in federation.transport.log if s == Stage.UNMASK and r is not None and not r.refusal}
    assert not revealed
    refused = {n for s, n, _, r in federation.transport.log if s == Stage.OPEN and r is not None and r.refusal}
    assert refused == set(answered)


def test_a_full_disk_at_the_checkpoint_commits_nothing_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lensemble_flwr.errors import ArtifactError
    from lensemble_flwr.federation.run_folder import RunFolder

    federation = Federation(tmp_path, "diloco.rounds=2")
    save = RunFolder.save_checkpoint

    def full(self: RunFolder, checkpoint: Any) -> bytes:
        if checkpoint.round == 1:
            raise ArtifactError("Cannot write: No space left on device.", "Free space.")
        return save(self, checkpoint)

    monkeypatch.setattr(RunFolder, "save_checkpoint", full)
    with pytest.raises(ArtifactError, match="space"):
        federation.start()
    assert federation.rounds() == []
    monkeypatch.setattr(RunFolder, "save_checkpoint", save)
    federation.resume()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 2
    assert federation.rounds()[0]["replayed"] is True
    assert federation.ledger_rounds() == [2] * 4


def test_an_unwritable_output_folder(tmp_path: Path) -> None:
    from lensemble_flwr.errors import ArtifactError

    (tmp_path / "run").write_text("a file")
    with pytest.raises(ArtifactError, match="output folder"):
        Federation(tmp_path).start()


# ---------------------------------------------------------------- a participant dies


def die_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int = 1, after: bool = False) -> list[int]:
    """The named function kills its caller (before or after it ran) the first ``times`` times."""
    real, calls = getattr(owner, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            if after:
                real(*args, **kwargs)
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def lose_to_death(federation: Federation) -> None:
    """A participant that dies gives no reply, as with Flower."""
    deliver = federation.transport.deliver

    def guarded(stage: str, node: int, fields: Any) -> Any:
        try:
            return deliver(stage, node, fields)
        except Killed:
            return None

    federation.transport.deliver = guarded  # type: ignore[method-assign]
    federation.transport.after = lambda stage, node, reply: reply


def test_died_between_reserve_and_encoded_it_is_forfeited_and_never_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    lose_to_death(federation)
    draws = die_in(monkeypatch, participant_module, "release_update", times=2)
    with pytest.raises(SecureAggregationError, match="3 attempts"):  # two of four are gone for this round
        federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["burnt"]
    assert len(draws) == 4  # two died, two were cached: no retry drew again
    assert federation.ledger_rounds() == [1] * 4
    federation.resume()  # the next round is everybody's again
    assert [r["outcome"] for r in federation.rounds()] == ["burnt", "committed"]


def test_one_that_died_between_reserve_and_encoded_misses_the_round_and_joins_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    lose_to_death(federation)
    draws = die_in(monkeypatch, participant_module, "release_update")
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [3, 4]
    assert federation.ledger_rounds() == [2] * 4  # the forfeited reservation stays spent
    assert len(draws) == 8  # one draw per participant and round: never a second under one reservation
    assert federation.folder is not None
    states = []
    for node in federation.transport.members.values():
        with node.site.ledger() as ledger:
            states.append(ledger.state(federation.folder.federation_id, 0).state)
    assert sorted(map(str, states)) == ["closed", "closed", "closed", "forfeited"]


def test_one_that_died_after_encoded_sends_the_same_update_in_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1 federation.participants=4")
    lose_to_death(federation)
    die_in(monkeypatch, PrivacyLedger, "encoded", times=2, after=True)  # two die: void, then everybody is back
    draws: list[int] = []
    real = participant_module.release_update
    monkeypatch.setattr(participant_module, "release_update", lambda *a: draws.append(1) or real(*a))
    federation.start()
    assert federation.rounds()[0]["attempt"] == 2
    assert federation.rounds()[0]["participants"] == 4
    assert len(draws) == 4
    assert federation.ledger_rounds() == [1] * 4


def test_one_that_died_before_reserve_spent_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    lose_to_death(federation)
    die_in(monkeypatch, PrivacyLedger, "reserve")
    federation.start()
    assert federation.rounds()[0]["participants"] == 3
    assert sorted(federation.ledger_rounds()) == [0, 1, 1, 1]


def test_a_lost_or_altered_cached_update_is_forfeited(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    kill_at(federation, "asked", 99)

    def after(at: str, node: int, reply: Any) -> Any:
        if at == Stage.TRAIN and not federation.rounds():
            killed.append(node)
            if len(killed) == 4:
                raise Killed
        return reply

    killed: list[int] = []
    federation.transport.after = after
    with pytest.raises(Killed):
        federation.start()
    (path,) = (federation.transport.members[101].site.folder / "releases").iterdir()
    stored = path.read_bytes()
    path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    federation.resume()
    assert [r["participants"] for r in federation.rounds()] == [3, 4]
    assert federation.ledger_rounds() == [2] * 4


# ---------------------------------------------------------------- noise


def test_noise_differs_between_two_runs_of_one_seed(tmp_path: Path) -> None:
    finals = [Federation(tmp_path / name, "seed=3").start() for name in ("a", "b")]
    assert finals[0].tobytes() != finals[1].tobytes()


def test_replay_is_reproducible_and_claims_nothing(tmp_path: Path) -> None:
    from lensemble_flwr.federation.claim_inputs import claim_rows
    from lensemble_flwr.federation.plan import make_plan

    runs = [Federation(tmp_path / name, "privacy.entropy=replay", sites=tmp_path / "sites") for name in ("a", "b")]
    finals = [run.start() for run in runs[:1]]
    assert not any(r["private"] for r in runs[0].rounds())
    assert runs[0].ledger_rounds() == [3] * 4  # the ledgers count as if
    rows, grade, why_not = claim_rows(runs[0].config, make_plan(runs[0].config, 4, 17), True)
    assert not grade
    assert why_not
    assert all(row["epsilon"] is None and not row["holds"] for row in rows)
    assert len(finals) == 1


def test_a_new_folder_is_on_the_disk_before_what_it_holds_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may take a folder whose name was never synced, with every synced file in it: a latch, a RoundOpen."""
    synced: list[Path] = []
    for module in ("lensemble_flwr.federation.run_folder", "lensemble_flwr.federation.site"):
        monkeypatch.setattr(f"{module}.sync_folder", lambda folder: synced.append(Path(folder)))
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.start()
    assert any(folder.name == "state" for folder in synced)
    for path in tmp_path.rglob("over"):
        assert path.parent in synced
    assert [path for path in tmp_path.rglob("over") if path.is_dir()]
