"""Whole federations in one process: commits, drops, void, burnt, budgets. Only Flower is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import (
    ArtifactError,
    ConfigError,
    FaultToleranceExceeded,
    LensembleError,
    NonDeterministicAggregation,
    PrivacyBudgetExceeded,
    RoundError,
    SecureAggregationError,
)
from lensemble_flwr.federation.coordinator import Reply
from lensemble_flwr.federation.outer import mean_of_sum, outer_step
from lensemble_flwr.federation.policy import save_policy
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import theta_hash
from lensemble_flwr.federation.wire import Stage
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.ledger import PrivacyLedger
from lensemble_flwr.privacy.mechanism import Release
from lensemble_flwr.secagg import ClientSession
from tests.federation.harness import Federation


def released(federation: Federation, index: int) -> dict[int, np.ndarray]:
    """What each site released in a round, from its own cache (deleted when the round closes, so read in time)."""
    assert federation.folder is not None
    found = {}
    for number, node in federation.transport.members.items():
        for path in (node.site.folder / "releases").glob(f"*-{index}.q"):
            stored = path.read_bytes()
            found[number] = Release.from_bytes(stored, hashlib.sha256(stored).digest()).q
    return found


def test_the_committed_model_is_the_outer_step_of_the_mean_of_the_releases(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3 diloco.outer_lr=0.7 diloco.outer_momentum=0.9")
    theta, momentum = federation.task.initial(), np.zeros(17)
    seen: list[dict[int, np.ndarray]] = []
    federation.on_event = lambda name, f: seen.append(released(federation, f["round"])) if name == "asked" else None
    final = federation.start()
    scale = None
    for stage, _, fields, _ in federation.transport.log:
        if stage == Stage.OPEN:
            scale = RoundOpen.decode(fields["body"]).scale_log2
    assert scale is not None
    assert len(seen) == 3
    for updates in seen:
        assert len(updates) == 4
        mean = mean_of_sum(np.sum(list(updates.values()), axis=0), scale, 4)
        theta, momentum = outer_step(theta, momentum, mean, 0.7, 0.9)
    assert theta.tobytes() == final.tobytes()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3


def test_every_site_ends_with_the_final_model_byte_for_byte(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    final = federation.start()
    for node in federation.transport.members.values():
        (model,) = (node.site.folder / "models").iterdir()
        assert model.read_bytes() == final.astype("<f4").tobytes()
        assert not list((node.site.folder / "releases").iterdir())
        assert node.memory == {}


def test_training_without_privacy_learns(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "privacy=disabled secagg.range=4 diloco.rounds=10")
    federation.start()
    errors = [r["metrics"]["heldout_error"] for r in federation.rounds()]
    assert errors[-1] < 0.05 < errors[0]
    assert all(r["epsilon_central"] is None and not r["private"] for r in federation.rounds())


@pytest.mark.parametrize("pinned", ["false", "true"])
def test_no_message_holds_anything_but_the_list(tmp_path: Path, pinned: str) -> None:
    """Every reply has the one size that public values give, whatever the data; no update, norm or count is in it."""
    federation = Federation(tmp_path, f"secagg.pinned={pinned}")
    federation.start()
    sizes: dict[str, set[tuple[int, int]]] = {}
    for stage, _, _, reply in federation.transport.log:
        assert reply is not None
        assert reply.refusal is None
        length = 0 if reply.vector is None else reply.vector.nbytes
        sizes.setdefault(stage, set()).add((len(reply.body), length))
    assert set(sizes) == set(Stage.ALL) - {Stage.OPEN_SHARE} - ({Stage.AGREE} if pinned == "false" else set())
    assert all(len(s) == 1 for s in sizes.values())


def test_masked_vectors_look_uniform(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=40 privacy.target_epsilon=50")
    federation.start()
    vectors = [r.vector for s, _, _, r in federation.transport.log if s == Stage.TRAIN and r is not None]
    counts = np.bincount(np.concatenate([v for v in vectors if v is not None]), minlength=256)
    expected = counts.sum() / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)


# ---------------------------------------------------------------- drops

STAGES = [Stage.OPEN, Stage.SHARE, Stage.TRAIN, Stage.UNMASK]


@pytest.mark.parametrize("stage", STAGES)
def test_one_drop_at_each_stage_gives_the_exact_sum_over_the_survivors(tmp_path: Path, stage: str) -> None:
    federation = Federation(tmp_path, "privacy=disabled secagg.range=4 diloco.rounds=2")
    lost: list[int] = []

    def before(at: str, node: int, fields: Any) -> Any:
        return False if at == stage and node == 102 and lost == [] and not lost.append(node) else None

    federation.transport.before = before
    caught: list[dict[int, np.ndarray]] = []
    federation.on_event = lambda name, f: caught.append(released(federation, f["round"])) if name == "asked" else None
    federation.start()
    first = federation.rounds()[0]
    assert first["outcome"] == "committed"
    assert first["participants"] == (4 if stage == Stage.UNMASK else 3)
    assert federation.rounds()[1]["participants"] == 4  # it is back in the next round
    if stage != Stage.UNMASK:
        assert 102 not in caught[0]


def test_two_drops_make_the_round_void_and_the_retry_sends_the_same_update_under_other_masks(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    attempts: list[int] = []

    def before(at: str, node: int, fields: Any) -> Any:
        if at == Stage.OPEN and node == 100:
            attempts.append(fields["attempt"])
        return False if at == Stage.TRAIN and node in (102, 103) and len(attempts) == 1 else None

    federation.transport.before = before
    federation.start()
    assert attempts == [1, 2]
    sent = [r.vector for s, n, _, r in federation.transport.log if s == Stage.TRAIN and n == 100 and r is not None]
    assert len(sent) == 2
    assert not np.array_equal(sent[0], sent[1])
    assert [name for name, _ in federation.events].count("void") == 1
    assert federation.rounds()[0]["outcome"] == "committed"
    assert federation.ledger_rounds() == [1, 1, 1, 1]


def test_the_cached_update_is_the_same_in_every_attempt(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    cached: dict[int, bytes] = {}
    trained: list[int] = []

    def after(at: str, node: int, reply: Any) -> Any:
        if at != Stage.TRAIN:
            return reply
        trained.append(node)
        cached.setdefault(node, released(federation, 0)[node].tobytes())
        assert released(federation, 0)[node].tobytes() == cached[node]
        return reply if len(trained) <= 2 or len(trained) > 4 else None  # two replies are lost: the attempt is void

    federation.transport.after = after
    federation.start()
    assert len(trained) == 8
    assert federation.rounds()[0]["attempt"] == 2


def test_three_void_attempts_burn_the_round_and_end_the_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.transport.before = lambda at, node, fields: at != Stage.TRAIN or node not in (102, 103)
    before = federation.task.initial()
    with pytest.raises(SecureAggregationError, match="3 attempts"):
        federation.start()
    (record,) = federation.rounds()
    assert record["outcome"] == "burnt"
    assert record["theta_hash"] == theta_hash(federation.task.layout, before).hex()


def test_too_few_reveals_burn_the_round_and_the_run_goes_on(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3")
    seen: list[int] = []

    def before(at: str, node: int, fields: Any) -> Any:
        if at == Stage.UNMASK:
            seen.append(node)
            return not (len(seen) <= 4 and node in (102, 103))
        return None

    federation.transport.before = before
    federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["burnt", "committed", "committed"]
    assert federation.ledger_rounds() == [3, 3, 3, 3]  # a burnt round stays spent


def test_two_burnt_rounds_in_a_row_end_the_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=5")
    federation.transport.before = lambda at, node, fields: at != Stage.UNMASK
    with pytest.raises(SecureAggregationError, match="in a row"):
        federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["burnt", "burnt"]


def test_too_few_join(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    del federation.transport.members[100], federation.transport.members[101]
    with pytest.raises(FaultToleranceExceeded, match=r"2 of 4.*cannot hide"):
        federation.start()
    waiting = [fields for name, fields in federation.events if name == "waiting"]
    assert [{**w, "seconds_left": 0} for w in waiting] == [
        {"joined": 2, "participants": 4, "least": federation.config.federation.min_participants, "seconds_left": 0}
    ]
    assert 0 < waiting[0]["seconds_left"] <= 5


# ---------------------------------------------------------------- hostile or faulty replies


@pytest.mark.parametrize(
    "vector",
    [
        None,
        np.zeros(3, np.uint8),
        np.zeros((10, 10), np.uint8),
        np.zeros(200, np.float32),
        np.zeros(0, np.uint8),
    ],
)
def test_a_malformed_masked_vector_is_left_out(tmp_path: Path, vector: np.ndarray | None) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.transport.after = lambda at, node, reply: (
        Reply(reply.body, vector) if at == Stage.TRAIN and node == 101 else reply
    )
    federation.start()
    assert federation.rounds()[0]["participants"] == 3


def test_a_wrong_or_missing_dataset_root_is_not_summed(tmp_path: Path) -> None:
    for number, root in enumerate((b"", b"x" * 32)):
        federation = Federation(tmp_path / str(number), "diloco.rounds=1")
        federation.transport.after = lambda at, node, reply, root=root: (
            Reply(root, reply.vector) if at == Stage.TRAIN and node == 101 else reply
        )
        federation.start()
        assert federation.rounds()[0]["participants"] == 3
        assert federation.excluded(0) == {"COMMITMENT_MISMATCH"}


def test_a_member_that_ignores_the_clipping_bound_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    honest, calls = ClientSession.masked, []

    def poison(self: ClientSession, envelopes: bytes, q: np.ndarray, **kw: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == 1:  # every coordinate in range, the whole far beyond C
            q = np.full_like(q, self._params.ring.qmax)
        return honest(self, envelopes, q, **kw)

    monkeypatch.setattr(ClientSession, "masked", poison)
    federation.start()
    first, second = federation.rounds()
    assert first["outcome"] == "burnt"
    assert "longer than any honest sum" in first["cause"]
    assert second["outcome"] == "committed"


def test_a_faulty_reducer_commits_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    flips = iter(range(100))

    def flaky(params: np.ndarray, momentum: np.ndarray, mean: np.ndarray, lr: float, mu: float, **kw: int):
        theta, b = outer_step(params, momentum, mean, lr, mu)
        theta[0] += next(flips) % 2
        return theta, b

    with pytest.raises(NonDeterministicAggregation):
        federation.start(step=flaky)
    assert federation.rounds() == []


# ---------------------------------------------------------------- wrong public values


def reopen(**changes: Any) -> Any:
    """A ``before`` hook that alters the RoundOpen on its way to node 101."""

    def before(at: str, node: int, fields: Any) -> Any:
        if at == Stage.OPEN and node == 101:
            opened = dataclasses.replace(RoundOpen.decode(fields["body"]), **changes)
            return {**fields, "body": opened.encode()}
        return None

    return before


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"probe_hash": b"x" * 32}, "HASH_MISMATCH"),
        ({"base_hash": b"x" * 32}, "HASH_MISMATCH"),
        ({"theta_hash": b"x" * 32}, "HASH_MISMATCH"),
        ({"sketch_hash": b"x" * 32}, "HASH_MISMATCH"),
        ({"sketch_seed": 5}, "HASH_MISMATCH"),
        ({"config_hash": b"x" * 32}, "HASH_MISMATCH"),
        ({"inner_steps": 500}, "HASH_MISMATCH"),
        ({"dimension": 18}, "HASH_MISMATCH"),
        ({"threshold": 2}, "HASH_MISMATCH"),
        ({"threshold": 4}, "HASH_MISMATCH"),
        ({"guarantee": 1}, "HASH_MISMATCH"),
        ({"replay": True}, "HASH_MISMATCH"),
        ({"rounds": 99}, "HASH_MISMATCH"),
        ({"target_epsilon": 80.0}, "HASH_MISMATCH"),
        ({"target_delta": 0.2}, "HASH_MISMATCH"),
        ({"scale_log2": 3}, "HASH_MISMATCH"),
        ({"ring_bits": 16}, "HASH_MISMATCH"),
        ({"colluders": 2}, "HASH_MISMATCH"),
        ({"min_survivors": 2}, "POLICY"),
        ({"colluders": 0}, "POLICY"),
        ({"guarantee": 0}, "POLICY"),
        ({"noise_std": 1e-9}, "HASH_MISMATCH"),
        ({"clip_norm": 1e9}, "HASH_MISMATCH"),
        ({"roster": (b"\x01" * 32, b"\x02" * 32, b"\x03" * 32)}, "PROTOCOL"),
    ],
)
def test_a_lie_in_the_round_open_is_refused_and_costs_nothing(tmp_path: Path, changes: Any, code: str) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.transport.before = reopen(**changes)
    federation.start()
    assert (Stage.OPEN, code) in federation.refusals
    assert federation.rounds()[0]["participants"] == 3
    assert federation.ledger_rounds() == [1, 0, 1, 1]


def test_a_little_less_noise_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")

    def before(at: str, node: int, fields: Any) -> Any:
        if at == Stage.OPEN and node == 101:
            opened = RoundOpen.decode(fields["body"])
            return {**fields, "body": dataclasses.replace(opened, noise_std=opened.noise_std * 0.99).encode()}
        return None

    federation.transport.before = before
    federation.start()
    assert (Stage.OPEN, "HASH_MISMATCH") in federation.refusals
    assert federation.ledger_rounds() == [1, 0, 1, 1]


def test_a_node_that_claims_a_connected_members_identity_does_not_join(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    victim = federation.transport.members[101]
    federation.transport.members[999] = dataclasses.replace(victim, memory={})
    federation.start()
    assert (Stage.JOIN, "IDENTITY_IN_USE") in federation.refusals
    assert federation.rounds()[0]["participants"] == 4
    assert not any(n == 999 for s, n, _, _ in federation.transport.log if s != Stage.JOIN)


def test_a_stop_between_rounds_closes_properly_and_can_be_resumed(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=3")
    with pytest.raises(RoundError, match="asked to stop"):
        federation.start(stop_asked=lambda: len(federation.rounds()) == 1)
    assert len(federation.rounds()) == 1
    assert all(list((n.site.folder / "models").iterdir()) for n in federation.transport.members.values())
    federation.resume()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3


def test_another_theta_to_one_participant_is_refused_before_it_trains(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.transport.before = lambda at, node, f: (
        {**f, "vector": f["vector"] + 1} if at == Stage.TRAIN and node == 101 else None
    )
    federation.start()
    assert (Stage.TRAIN, "HASH_MISMATCH") in federation.refusals
    assert federation.ledger_rounds() == [1, 0, 1, 1]


def test_a_stale_round_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    federation.start()
    opens = [f for s, n, f, _ in federation.transport.log if s == Stage.OPEN and n == 101]
    reply = federation.transport.deliver(Stage.OPEN, 101, {**opens[0], "attempt": 9})
    assert reply.refusal is not None
    assert reply.refusal.name == "STALE"


def test_a_round_is_answered_once_whatever_the_attempt(tmp_path: Path) -> None:
    """Decision 13: t members reveal in attempt 1; nobody can be made to reveal again, directly or by a new attempt."""
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.start()
    opens = [f for s, n, f, _ in federation.transport.log if s == Stage.OPEN]
    unmasks = [f for s, n, f, _ in federation.transport.log if s == Stage.UNMASK]
    for node in federation.transport.members:
        assert federation.transport.deliver(Stage.OPEN, node, {**opens[0], "attempt": 2}).refusal is not None
        assert federation.transport.deliver(Stage.UNMASK, node, unmasks[0]).refusal is not None


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 8.0), (2.0, 8.0), (3.0, 4.0)])
def test_a_budget_of_k_rounds_commits_exactly_k(tmp_path: Path, sigma: float, epsilon: float) -> None:
    k = max(t for t in range(1, 100) if gaussian.epsilon(math.sqrt(t) / sigma, 1e-5 * (1 - 1e-9)) <= epsilon)
    if (sigma, epsilon) == (1.0, 8.0):
        assert k == 2
    overrides = f"privacy=local privacy.clip_norm=1 privacy.noise_multiplier={sigma} privacy.target_epsilon={epsilon}"
    federation = Federation(tmp_path, f"{overrides} diloco.rounds={k + 5}")
    with pytest.raises(PrivacyBudgetExceeded, match=f"Round {k} was refused") as caught:
        federation.start()
    assert f"{epsilon:g}" in str(caught.value)
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * k
    assert federation.ledger_rounds() == [k] * 4  # no ledger grew in the refused round
    for node in federation.transport.members.values():
        assert list((node.site.folder / "models").iterdir())  # the last committed model is there


def test_every_site_charges_for_a_person_at_several_participants(tmp_path: Path) -> None:
    """Each ledger holds p times the price, and a site whose policy fears more copies of a person refuses the round."""
    base = "privacy=local privacy.noise_multiplier=4 privacy.target_epsilon=30 diloco.rounds=2"
    federation = Federation(tmp_path, base + " privacy.max_participants_per_person=3")
    federation.start()
    for node in federation.transport.members.values():
        with node.site.ledger() as ledger:
            assert ledger.mu2("local") == pytest.approx(2 / 16)  # s = 4 C sqrt(3): the target is met for the person
            assert ledger.mu2("central") == pytest.approx(2 / 16)  # m - k = 2 < p: a sum hides no more than that
    node = federation.transport.members[101]
    careful = dataclasses.replace(node.site.policy, min_participants_per_person=4)
    save_policy(node.site.folder / "policy.json", careful)
    (tmp_path / "again").mkdir()
    again = Federation(tmp_path / "again", base + " privacy.max_participants_per_person=3", sites=federation.sites)
    with contextlib.suppress(LensembleError):
        again.start()
    refusals = [error for _, name, error in again.transport.errors if name == 101]
    assert [error.rule for error in refusals] == ["min_participants_per_person"] * len(refusals)
    assert refusals
    assert again.ledger_rounds()[1] == 0


def test_unequal_ledgers_stop_at_the_smallest(tmp_path: Path) -> None:
    """k_i = 5, 3, 5, 5 more rounds: exactly 3 are committed, without faults."""
    base = "privacy=local privacy.noise_multiplier=4 privacy.target_epsilon=30 diloco.rounds=9"
    federation = Federation(tmp_path, base)
    node = federation.transport.members[101]
    mu = math.sqrt(3.5) / 4
    policy = dataclasses.replace(node.site.policy, max_epsilon_local=gaussian.epsilon(mu, 1e-5))
    save_policy(node.site.folder / "policy.json", policy)
    with pytest.raises(PrivacyBudgetExceeded, match="Round 3"):
        federation.start()
    assert federation.ledger_rounds() == [3, 3, 3, 3]


def test_leave_goes_on_without_the_exhausted_one(tmp_path: Path) -> None:
    base = "privacy=local privacy.noise_multiplier=4 privacy.target_epsilon=30 diloco.rounds=4"
    federation = Federation(tmp_path, base + " privacy.on_exhausted=leave")
    node = federation.transport.members[101]
    policy = dataclasses.replace(node.site.policy, max_epsilon_local=gaussian.epsilon(math.sqrt(1.5) / 4, 1e-5))
    save_policy(node.site.folder / "policy.json", policy)
    federation.start()
    assert federation.ledger_rounds() == [4, 1, 4, 4]
    assert [r["participants"] for r in federation.rounds()] == [4, 3, 3, 3]
    assert [r["roster"] for r in federation.rounds()] == [4, 4, 3, 3]


def test_a_second_run_over_the_same_sites_starts_with_what_was_spent(tmp_path: Path) -> None:
    overrides = "privacy=local privacy.noise_multiplier=1 diloco.rounds=1"
    Federation(tmp_path / "a", overrides, sites=tmp_path / "sites").start()
    second = Federation(tmp_path / "b", overrides.replace("rounds=1", "rounds=3"), sites=tmp_path / "sites")
    with pytest.raises(PrivacyBudgetExceeded, match="Round 1"):  # one of the two rounds was spent before
        second.start()
    assert second.ledger_rounds() == [1, 1, 1, 1]


@pytest.mark.parametrize("damage", ["delete", "edit", "swap", "shorten"])
def test_a_damaged_ledger_refuses(tmp_path: Path, damage: str) -> None:
    overrides = "privacy=local privacy.noise_multiplier=4 privacy.target_epsilon=30 diloco.rounds=1"
    federation = Federation(tmp_path, overrides)
    federation.start()
    path = federation.transport.members[101].site.folder / "ledger.jsonl"
    other = federation.transport.members[102].site.folder / "ledger.jsonl"
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "edit":
        path.write_bytes(content.replace(b"reserved", b"reServed", 1))
    elif damage == "swap":
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(content[: content.rstrip().rfind(b"\n") + 1])
    second = Federation(tmp_path / "b", overrides, sites=tmp_path / "sites")
    second.start()
    assert second.rounds()[0]["participants"] == 3
    assert "LEDGER" in {f.get("code") for name, f in second.events if name == "refused"}


# ---------------------------------------------------------------- private failures look like nothing


class Broken:
    """A task whose training fails in a given way."""

    def __init__(self, task: Any, how: Any) -> None:
        self._task, self._how = task, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def local_update(self, theta: np.ndarray, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._how, Exception):
            raise self._how
        result = self._task.local_update(theta, *args, **kwargs)
        changes = self._how if isinstance(self._how, dict) else {"theta": np.full_like(theta, self._how)}
        return dataclasses.replace(result, **changes)


@pytest.mark.parametrize(
    "how",
    [
        float("nan"),
        float("inf"),
        MemoryError("secret 17"),
        RuntimeError("secret 17"),
        {"theta": np.zeros(1, np.float32)},
        {"theta": np.zeros((2, 17), np.float32)},
        {"theta": None},
        {"state": "no bytes"},
    ],
)
def test_a_private_failure_has_the_transcript_of_a_healthy_round(tmp_path: Path, how: Any) -> None:
    healthy = Federation(tmp_path / "a", "diloco.rounds=1")
    healthy.start()
    broken = Federation(tmp_path / "b", "diloco.rounds=1")
    broken.transport.members[101].task = Broken(broken.task, how)
    broken.start()

    def shape(federation: Federation) -> list[Any]:
        return sorted(
            (s, n, len(r.body), 0 if r.vector is None else r.vector.size, str(r.refusal))
            for s, n, _, r in federation.transport.log
            if r is not None
        )

    assert shape(broken) == shape(healthy)
    assert broken.ledger_rounds() == [1, 1, 1, 1]
    log = (broken.transport.members[101].site.folder / "site.log").read_text()
    assert "zero update" in log


def test_a_state_that_cannot_be_written_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is one depends on private data: training may have failed."""
    federation = Federation(tmp_path, "diloco.rounds=1")
    federation.transport.members[101].task = Broken(federation.task, {"state": b"of its own"})
    stage = Site.stage_local_state

    def full(self: Site, *args: Any) -> None:
        if self.folder == federation.transport.members[101].site.folder:
            raise ArtifactError("Cannot write: no space left.")
        stage(self, *args)

    monkeypatch.setattr(Site, "stage_local_state", full)
    federation.start()
    assert federation.rounds()[0]["participants"] == 4
    assert federation.ledger_rounds() == [1, 1, 1, 1]
    assert "zero update" in (federation.transport.members[101].site.folder / "site.log").read_text()


def test_a_refused_charge_leaves_no_state_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, "diloco.rounds=1")
    member = federation.transport.members[101]
    member.task = Broken(federation.task, {"state": b"of its own"})
    reserve = PrivacyLedger.reserve

    def spent(self: PrivacyLedger, *args: Any) -> None:
        if self.summary()["identity"] == member.site.identity.hex():
            raise PrivacyBudgetExceeded("Spent meanwhile.")
        reserve(self, *args)

    monkeypatch.setattr(PrivacyLedger, "reserve", spent)
    federation.start()
    assert federation.rounds()[0]["participants"] == 3
    assert not list((member.site.folder / "local").glob("*.staged"))


def test_without_privacy_a_failure_is_told_by_a_code_and_the_model_does_not_take_it(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "privacy=disabled secagg.range=4 diloco.rounds=1")
    federation.transport.members[101].task = Broken(federation.task, float("nan"))
    federation.start()
    assert (Stage.TRAIN, "UPDATE") in federation.refusals
    assert federation.rounds()[0]["participants"] == 3


# ---------------------------------------------------------------- folders


def test_a_used_output_folder_is_refused(tmp_path: Path) -> None:
    Federation(tmp_path, "diloco.rounds=1").start()
    with pytest.raises(ConfigError, match="--resume"):
        Federation(tmp_path, "diloco.rounds=1", sites=tmp_path / "s2").start()


def test_resume_with_another_configuration_is_refused(tmp_path: Path) -> None:
    Federation(tmp_path, "diloco.rounds=1").start()
    with pytest.raises(ConfigError, match="another configuration"):
        Federation(tmp_path, "diloco.rounds=2").resume()


def test_participants_with_another_warm_start_refuse_to_join(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    other = Broken(federation.task, 0.0)
    other.base_hash = b"x" * 32
    federation.transport.members[101].task = other
    federation.start()  # three are enough, and one cannot stop them
    assert [r["participants"] for r in federation.rounds()] == [3] * 3
    lonely = Federation(tmp_path / "b")
    for node in (101, 102):
        lonely.transport.members[node].task = other
    with pytest.raises(RoundError, match=r"refused to join .HASH_MISMATCH"):
        lonely.start()


# ---------------------------------------------------------------- the discrete Gaussian

DISCRETE = "secagg.ring_bits=16 privacy.mechanism=discrete_gaussian"


def test_a_federation_with_discrete_noise_on_a_16_bit_ring(tmp_path: Path) -> None:
    federation = Federation(tmp_path, DISCRETE)
    final = federation.start()
    records = federation.rounds()
    assert [r["outcome"] for r in records] == ["committed"] * 3
    assert all(r["private"] for r in records)
    assert np.isfinite(final).all()
    target = federation.config.privacy.target_epsilon
    assert target * (1 - 1e-5) < records[-1]["epsilon_central"] <= target
    for node in federation.transport.members.values():
        with node.site.ledger() as ledger:
            spent = ledger.spent("central", federation.config.privacy.target_delta)
            assert spent == pytest.approx(records[-1]["epsilon_central"], rel=1e-9)
            assert ledger.summary()["lifetime"]["concentrated"] is True
    assert federation.config.privacy.mechanism == "discrete_gaussian"


def test_a_coordinator_that_names_another_mechanism_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, DISCRETE)

    def before(at: str, node: int, fields: Any) -> Any:
        if at != Stage.OPEN:
            return None
        lie = dataclasses.replace(RoundOpen.decode(fields["body"]), mechanism=0)
        return {**fields, "body": lie.encode()}

    federation.transport.before = before
    with pytest.raises(SecureAggregationError):
        federation.start()
    assert {str(error) for _, _, error in federation.transport.errors if "numbers" in str(error)}
    assert federation.ledger_rounds() == [0, 0, 0, 0]
