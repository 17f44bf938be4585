"""The secret coin through the whole protocol: what it does to a release, and that nothing else tells how it fell."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import PrivacyBudgetExceeded, SecureAggregationError
from lensemble_flwr.federation import release as release_module
from lensemble_flwr.federation.outer import outer_step
from lensemble_flwr.federation.policy import save_policy
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.wire import BODY, Refusal, Stage
from lensemble_flwr.privacy import mechanism
from lensemble_flwr.privacy.accountant import PRVAccountant
from lensemble_flwr.privacy.participation import SecretParticipation
from tests.federation.harness import Federation, Killed

COIN = "privacy.sample_rate=0.5 privacy.noise_multiplier=1.7"
"""An explicit sigma: calibrating one takes seconds."""


@contextmanager
def always(shown: bool) -> Iterator[None]:
    """Let every coin fall that way, whatever its rate says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecretParticipation, "threshold", property(lambda self: (int(shown) << 64, 64)))
        yield


def run(folder: Path, overrides: str) -> Federation:
    folder.mkdir()
    federation = Federation(folder, overrides)
    federation.start()
    return federation


def shapes(federation: Federation) -> list[Any]:
    """Every message and reply: types and sizes (sorted, because the order is that of fresh identities)."""

    def size(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return ("array", value.dtype.str, value.shape)
        return (type(value).__name__, len(value) if isinstance(value, bytes) else None)

    found = [
        (stage, node, {name: size(value) for name, value in fields.items()}, size(reply.body), size(reply.vector))
        for stage, node, fields, reply in federation.transport.log
        if reply is not None
    ]
    return sorted(found, key=repr)


def ledgers(federation: Federation) -> list[list[dict[str, Any]]]:
    """Every record of every ledger without what is a hash or a fresh name."""
    fresh = {"crc", "prev", "q_hash", "open_hash", "fid", "identity", "data"}
    return [
        [
            {name: value for name, value in json.loads(line).items() if name not in fresh}
            for line in (member.site.folder / "ledger.jsonl").read_text().splitlines()
        ]
        for member in federation.transport.members.values()
    ]


def files(federation: Federation) -> list[Counter[Any]]:
    """Every file of every site: its folder and size (names hold hashes of fresh keys)."""
    return [
        Counter(
            (str(path.parent.relative_to(member.site.folder)), path.suffix, path.stat().st_size)
            for path in sorted(member.site.folder.rglob("*"))
            if path.is_file()
        )
        for member in federation.transport.members.values()
    ]


def test_both_sides_of_the_coin_look_the_same_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = []
    for name, shown in (("in", True), ("out", False)):
        with always(shown):
            federation = run(tmp_path / name, COIN)
        assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 3
        assert federation.ledger_rounds() == [3] * 4
        assert not federation.transport.errors
        memory = [{k: len(v) for k, v in m.memory.items()} for m in federation.transport.members.values()]
        logs = [list(m.site.folder.glob("site.log*")) for m in federation.transport.members.values()]
        output = capfd.readouterr()
        seen.append((shapes(federation), ledgers(federation), files(federation), memory, logs, output.out, output.err))
    for one, other in zip(*seen, strict=True):
        assert one == other
    charge = seen[0][1][0][2]["charge"]
    assert charge["sample_rate"] == 0.5


def test_with_replayed_noise_only_the_release_and_the_models_differ(tmp_path: Path) -> None:
    """Everything else at the site is the same byte for byte: here the noise and the keys of two sites are the same."""
    releases, states = [], []
    for name, shown in (("in", True), ("out", False)):
        federation = Federation(tmp_path / name, COIN + " privacy.entropy=replay diloco.rounds=1")
        for member in federation.transport.members.values():
            save_policy(member.site.folder / "policy.json", dataclasses.replace(member.site.policy, log_releases=True))
            member.site.identity = bytes([member.partition + 1]) * 32  # replayed noise depends on it
        with always(shown):
            opened, delta = specimen(federation)
            releases.append(release_module.release_update(delta, opened, opened.roster[0], True).q)
            states.append(release_module.release_update(None, opened, opened.roster[0], True).q)
    step = 2.0**-opened.scale_log2
    assert np.abs((releases[0] - releases[1]) * step - np.asarray(delta)).max() < 2 * step
    np.testing.assert_array_equal(releases[1], states[0])
    np.testing.assert_array_equal(states[0], states[1])


def specimen(federation: Federation) -> tuple[RoundOpen, np.ndarray]:
    """A RoundOpen of this federation, and a short update."""
    from lensemble_flwr.federation.plan import make_plan, round_open

    plan = make_plan(federation.config, 4, federation.task.dimension)
    roster = tuple(bytes([i]) * 32 for i in range(1, 5))
    opened = round_open(federation.config, federation.task, plan, bytes(32), 0, bytes(32), roster)
    return opened, np.linspace(-0.2, 0.2, federation.task.dimension).astype(np.float32)


@pytest.mark.parametrize("rate", [0.25, 0.8])
def test_releases_hold_the_update_as_often_as_the_rate_says(tmp_path: Path, rate: float) -> None:
    """Real coins through the real path, told apart only because there is nearly no noise."""
    overrides = f"privacy.sample_rate={rate} privacy.noise_multiplier=0.01 privacy.guarantee=local"
    opened, delta = specimen(Federation(tmp_path, overrides))
    count, shown = 1500, 0
    for _ in range(count):
        q = release_module.release_update(delta, opened, opened.roster[0], False).q
        part = float(np.ldexp(q.astype(float), -opened.scale_log2) @ delta / (delta @ delta))
        assert min(abs(part), abs(part - 1)) < 0.2
        shown += part > 0.5
    assert abs(shown - rate * count) < 5 * (rate * (1 - rate) * count) ** 0.5


def test_at_rate_one_no_coin_is_thrown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_module, "take_part", lambda *_: pytest.fail("a coin"))
    federation = run(tmp_path / "run", "diloco.rounds=1")
    assert [r["outcome"] for r in federation.rounds()] == ["committed"]
    assert "sample_rate" not in ledgers(federation)[0][2]["charge"]


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    thrown: list[int] = []
    real = mechanism.take_part

    def count(*args: Any) -> Any:
        thrown.append(1)
        return real(*args)

    monkeypatch.setattr(release_module, "take_part", count)
    return thrown


def test_every_update_and_every_failure_throws_one_coin_and_pays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thrown = counting(monkeypatch)
    federation = Federation(tmp_path, COIN + " diloco.rounds=2")
    broken = federation.transport.members[101]

    class Broken(type(federation.task)):  # type: ignore[misc]
        def local_update(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("unreadable")

    broken.task = Broken(federation.config)
    federation.start()
    assert len(thrown) == 2 * 4
    records = ledgers(federation)
    assert records[0] == records[1] == records[2] == records[3]
    assert "a zero update is sent" in (broken.site.folder / "site.log").read_text()


def test_the_local_step_is_trained_and_kept_however_the_coin_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head and the moments at the site come from the model and the data; a coin in them would stay for ever."""
    kept = []
    for name, shown in (("in", True), ("out", False)):
        federation = Federation(tmp_path / name, COIN + " diloco.rounds=1")
        trained: list[int] = []

        class Stateful(type(federation.task)):  # type: ignore[misc]
            def local_update(self, *args: Any, **kwargs: Any) -> Any:
                result = super().local_update(*args, **kwargs)
                trained.append(1)  # noqa: B023
                return dataclasses.replace(result, state=b"state of " + result.theta.tobytes())

        for member in federation.transport.members.values():
            member.task = Stateful(federation.config)
        with always(shown):
            federation.start()
        assert len(trained) == 4
        assert federation.folder is not None
        fid = federation.folder.federation_id
        kept.append([member.site.local_state(fid) for member in federation.transport.members.values()])
    assert kept[0] == kept[1]
    assert all(kept[0])


def test_a_retry_sends_the_same_update_and_throws_no_second_coin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thrown = counting(monkeypatch)
    federation = Federation(tmp_path, COIN + " diloco.rounds=1")
    cached: list[dict[str, bytes]] = []

    def after(stage: str, node: int, reply: Any) -> Any:
        if stage == Stage.TRAIN and len(cached) < 8:
            sites = [member.site.folder for member in federation.transport.members.values()]
            cached.append({str(p): p.read_bytes() for folder in sites for p in (folder / "releases").glob("*.q")})
            return None if len(cached) in (3, 4) else reply  # two lost replies: void, tried again
        return reply

    federation.transport.after = after
    federation.start()
    assert federation.rounds()[0]["attempt"] == 2
    assert len(thrown) == 4
    assert cached[3] == cached[7]
    assert len(cached[3]) == 4


def test_a_crash_between_reserve_and_encoded_forfeits_and_throws_no_second_coin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thrown = counting(monkeypatch)
    federation = Federation(tmp_path, COIN + " diloco.rounds=2")
    victim = federation.transport.members[102].site
    real = type(victim).save_release
    died: list[int] = []

    def save(site: Any, fid: bytes, index: int, encoded: Any) -> bytes:
        if site.folder == victim.folder and not died:
            died.append(index)
            raise Killed  # the coin has fallen, nothing is written
        return real(site, fid, index, encoded)

    monkeypatch.setattr(type(victim), "save_release", save)
    deliver = federation.transport.deliver

    def dies(stage: str, node: int, fields: Any) -> Any:
        try:
            return deliver(stage, node, fields)
        except Killed:
            federation.transport.members[node].memory.clear()
            raise

    federation.transport.deliver = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        federation.start()
    federation.resume()
    assert federation.folder is not None
    with victim.ledger() as ledger:
        assert ledger.state(federation.folder.federation_id, 0).state == "forfeited"
        assert ledger.state(federation.folder.federation_id, 0).note == "no update was written"
        assert len(ledger.rounds(federation.folder.federation_id)) == 2, "the forfeited round stays paid"
    assert died == [0]
    assert len(thrown) == 2 * 4, "one a member and round, whatever died"


def test_the_mean_estimates_the_mean_update(tmp_path: Path) -> None:
    """The coordinator divides the sum by q C_t."""
    federation, means, sums = Federation(tmp_path, COIN + " diloco.rounds=1"), [], []

    def step(params: Any, momentum: Any, mean: Any, *args: Any, **kwargs: Any) -> Any:
        means.append(mean)
        return outer_step(params, momentum, mean, *args, **kwargs)

    def on_event(name: str, fields: dict[str, Any]) -> None:
        if name == "sum_stored":
            assert federation.folder is not None
            stored, opened = federation.folder.stored_sum(0), federation.folder.opened(0)
            assert stored is not None
            assert opened is not None
            sums.append(np.ldexp(stored.total.astype(float), -opened.scale_log2))

    federation.on_event = on_event
    federation.start(step=step)
    np.testing.assert_allclose(means[0], sums[0] / (0.5 * 4), rtol=1e-15)


def test_the_run_ends_at_the_very_round_that_the_accountant_says(tmp_path: Path) -> None:
    """An explicit sigma whose budget ends before the planned rounds; then the same sites have nothing left."""
    overrides = "privacy.sample_rate=0.5 privacy.noise_multiplier=2.5 privacy.target_epsilon=2 diloco.rounds=9"
    made, fits = PRVAccountant(), 0
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "noise_multiplier": 2.5, "sample_rate": 0.5}
    while not made.would_exceed(**target):  # type: ignore[arg-type]
        made.step(noise_multiplier=2.5, sample_rate=0.5)
        fits += 1
    assert 2 <= fits < 9
    federation = Federation(tmp_path, overrides)
    with pytest.raises(PrivacyBudgetExceeded):
        federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * fits
    assert federation.ledger_rounds() == [fits] * 4
    assert federation.rounds()[-1]["epsilon_central"] == pytest.approx(made.spent(target_delta=1e-5), rel=1e-6)
    again = Federation(tmp_path / "again", overrides, sites=federation.sites)
    with pytest.raises(PrivacyBudgetExceeded):
        again.start()
    assert again.rounds() == [], "the lifetime budget of the same sites is spent"


def test_a_site_that_does_not_allow_coins_refuses_by_policy(tmp_path: Path) -> None:
    federation = Federation(tmp_path, COIN + " diloco.rounds=1")
    site = federation.transport.members[100].site
    save_policy(site.folder / "policy.json", dataclasses.replace(site.policy, allow_sampling=False))
    federation.start()
    refused = [r.refusal for s, n, _, r in federation.transport.log if n == 100 and s == Stage.JOIN and r is not None]
    assert refused[:1] == [Refusal.POLICY]
    assert federation.ledger_rounds() == [0, 1, 1, 1]


@pytest.mark.parametrize("rate", [1.0, 0.25, np.nextafter(0.5, 1)])
def test_another_rate_than_the_configured_one_is_refused_and_costs_nothing(tmp_path: Path, rate: float) -> None:
    federation = Federation(tmp_path, COIN + " diloco.rounds=1")

    def before(stage: str, node: int, fields: Any) -> Any:
        if stage != Stage.OPEN:
            return None
        other = dataclasses.replace(RoundOpen.decode(fields[BODY]), sample_rate=float(rate))
        return {**fields, BODY: other.encode()}

    federation.transport.before = before
    with pytest.raises(SecureAggregationError):
        federation.start()
    refused = {r.refusal for s, _, _, r in federation.transport.log if s == Stage.OPEN and r is not None}
    assert refused == {Refusal.HASH_MISMATCH}
    assert federation.ledger_rounds() == [0] * 4
