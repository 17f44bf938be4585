"""The release path between a local update and the ring: variance, order, and who may seed it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.federation.claim_inputs import claims_of
from lensemble_flwr.federation.linear_task import LinearTask
from lensemble_flwr.federation.plan import epsilon_after, make_plan, opened_charge, round_open
from lensemble_flwr.federation.records import Mechanism, RoundOpen
from lensemble_flwr.federation.release import release_update
from lensemble_flwr.privacy import concentrated, gaussian
from lensemble_flwr.privacy.spending import Spending

D = 20_000


def opened(overrides: str, n: int = 6) -> RoundOpen:
    sizes = f"federation.participants={n} federation.min_participants={n} secagg.min_survivors={n - 1}"
    config = load_config(f"experiment=linear {sizes} {overrides}")
    plan = make_plan(config, n, D)
    roster = tuple(i.to_bytes(32, "big") for i in range(1, n + 1))
    record = round_open(config, LinearTask(config), plan, bytes(32), 0, bytes(32), roster)
    return dataclasses.replace(record, dimension=D)


@pytest.mark.parametrize("guarantee", ["local", "central"])
def test_variance_of_the_summed_noise(guarantee: str) -> None:
    """n sigma^2 C^2 with a local guarantee, n / (m - k) sigma^2 C^2 with a central one (6 standard errors)."""
    record = opened(f"privacy.guarantee={guarantee} privacy.noise_multiplier=2 privacy.clip_norm=0.5")
    total = sum(release_update(None, record, identity, False).q for identity in record.roster)
    values = np.ldexp(np.asarray(total, np.float64), -record.scale_log2)
    sigma2 = (2 * 0.5) ** 2
    expected = 6 * sigma2 if guarantee == "local" else 6 * sigma2 / (5 - 1)
    assert abs(values.var() / expected - 1) < 6 * math.sqrt(2 / D)
    assert abs(values.mean()) < 6 * math.sqrt(expected / D)
    assert record.noise_std == pytest.approx(math.sqrt(expected / 6))


def test_the_update_is_in_the_release_clipped() -> None:
    record = opened("privacy.noise_multiplier=0.5 privacy.guarantee=local")
    delta = np.zeros(D, np.float32)
    delta[0] = 1e6
    q = release_update(delta, record, record.roster[0], False).q
    first = math.ldexp(float(q[0]), -record.scale_log2)
    assert abs(first - record.clip_norm) < 8 * record.noise_std


def test_noise_is_fresh_each_time_and_never_from_the_run_seed() -> None:
    record = opened("seed=7")
    one, two = (release_update(None, record, record.roster[0], True).q for _ in range(2))
    assert not np.array_equal(one, two)


def test_replay_is_the_same_each_time_differs_by_participant_and_round_and_needs_a_simulation() -> None:
    record = opened("privacy.entropy=replay")
    one, again = (release_update(None, record, record.roster[0], True) for _ in range(2))
    np.testing.assert_array_equal(one.q, again.q)
    assert not one.claimable
    other = release_update(None, record, record.roster[1], True).q
    later = release_update(None, dataclasses.replace(record, round=1), record.roster[0], True).q
    assert not np.array_equal(one.q, other)
    assert not np.array_equal(one.q, later)
    with pytest.raises(ContractViolation, match="simulation"):
        release_update(None, record, record.roster[0], False)


def test_without_privacy_nothing_is_clipped_or_noised_and_too_large_is_an_error() -> None:
    record = opened("privacy=disabled secagg.range=4")
    delta = np.linspace(-3.9, 3.9, D).astype(np.float32)
    q = release_update(delta, record, record.roster[0], False).q
    np.testing.assert_allclose(np.ldexp(q.astype(float), -record.scale_log2), delta, atol=2.0**-record.scale_log2)
    with pytest.raises(ContractViolation):
        release_update(None, record, record.roster[0], False)
    delta[0] = 1e9
    with pytest.raises(ConfigError, match="range"):
        release_update(delta, record, record.roster[0], False)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_plan_meets_its_target_exactly(rounds: int) -> None:
    record = opened(f"diloco.rounds={rounds}")
    assert epsilon_after(record, rounds) <= 8.0
    assert epsilon_after(record, rounds) > 8.0 * (1 - 1e-5)
    assert epsilon_after(record, rounds + 1) > 8.0
    cost = opened_charge(record)
    direct = gaussian.epsilon(math.sqrt(rounds * record.clip_norm**2 / record.noise_std**2 / 4), 1e-5)
    assert epsilon_after(record, rounds) == pytest.approx(direct, rel=1e-6)
    assert cost.delta_extra < 1e-40


@pytest.mark.parametrize("guarantee", ["local", "central"])
def test_the_plan_meets_its_target_for_a_person_at_several_participants(guarantee: str) -> None:
    record = opened(f"privacy.guarantee={guarantee} privacy.max_participants_per_person=3 diloco.rounds=2")
    assert 8.0 * (1 - 1e-5) < epsilon_after(record, 2) <= 8.0 < epsilon_after(record, 3)
    cost = opened_charge(record)
    ratio2 = (record.clip_norm / record.noise_std) ** 2
    assert cost.mu2("local") == pytest.approx(3 * ratio2)
    assert cost.mu2("central") == pytest.approx(9 * ratio2 / 4)
    alone = opened(f"privacy.guarantee={guarantee} diloco.rounds=2")
    factor = math.sqrt(3) if guarantee == "local" else 3
    assert record.noise_std == pytest.approx(factor * alone.noise_std, rel=1e-6)
    assert opened_charge(RoundOpen.decode(record.encode())) == cost


def test_a_ring_that_is_too_coarse_for_the_central_claim_is_refused() -> None:
    with pytest.raises(ConfigError, match="ring"):
        opened("secagg.ring_bits=16 privacy.noise_multiplier=0.05 privacy.clip_norm=1", n=100)


def test_a_target_that_cannot_be_met_says_what_would() -> None:
    with pytest.raises(ConfigError):
        opened("privacy.target_epsilon=1e-9 privacy.target_delta=1e-300 diloco.rounds=1000000")


# --- the discrete Gaussian ---

COARSE = "secagg.ring_bits=16 privacy.mechanism=discrete_gaussian privacy.target_delta=1e-6"


def test_the_discrete_plan_meets_its_target_on_a_ring_too_coarse_for_rounding() -> None:
    with pytest.raises(ConfigError, match="too coarse"):
        opened(COARSE.replace("discrete_", ""), n=500)
    record = opened(COARSE, n=500)
    assert record.mechanism == Mechanism.DISCRETE_GAUSSIAN
    steps = math.ldexp(record.noise_std, record.scale_log2)
    assert 0.5 < steps < 2.0
    assert 8.0 * (1 - 1e-5) < epsilon_after(record, record.rounds) <= 8.0
    assert epsilon_after(record, record.rounds + 1) > 8.0
    cost = opened_charge(record)
    assert cost.mechanism == "discrete_gaussian"
    mu = math.sqrt(record.rounds) * (record.clip_norm / (record.noise_std * math.sqrt(498)) + cost.gap)
    assert epsilon_after(record, record.rounds) == pytest.approx(concentrated.epsilon(mu, 1e-6), rel=1e-3)
    assert epsilon_after(record, 1, "local") > 100


def test_the_discrete_plan_is_tight_where_the_gap_is_nothing() -> None:
    for guarantee in ("local", "central"):
        record = opened(f"{COARSE} privacy.guarantee={guarantee}")
        assert 8.0 * (1 - 1e-6) < epsilon_after(record, record.rounds) <= 8.0


def test_coarse_releases_sum_to_the_mean_with_no_more_than_the_noise() -> None:
    record = dataclasses.replace(opened(COARSE, n=500), dimension=2000)
    delta = np.full(2000, record.clip_norm / math.sqrt(2000) * 0.99, np.float32)  # 0.07 ring steps a coordinate
    total = np.zeros(2000)
    for identity in record.roster:
        release = release_update(delta, record, identity, False)
        assert release.claimable
        total += release.q
    mean = np.ldexp(total / 500, -record.scale_log2)
    std = record.noise_std / math.sqrt(500)
    assert abs((mean - delta).mean()) < 5 * std / math.sqrt(2000)
    assert abs((mean - delta).std() / std - 1) < 5 / math.sqrt(2 * 2000)


def test_discrete_replay_is_the_same_each_time_and_differs_by_participant() -> None:
    record = opened(f"{COARSE} privacy.entropy=replay")
    one, again = (release_update(None, record, record.roster[0], True) for _ in range(2))
    np.testing.assert_array_equal(one.q, again.q)
    assert not one.claimable
    assert not np.array_equal(one.q, release_update(None, record, record.roster[1], True).q)


def test_discrete_refusals_say_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"too fine.*mechanism=gaussian"):
        opened(COARSE.replace("ring_bits=16", "ring_bits=32"))
    with pytest.raises(ConfigError, match=r"ring steps.*not nearly.*ring_bits"):
        opened(COARSE, n=900)
    with pytest.raises(ConfigError, match=r"needs 0.5.*ring_bits"):
        opened(f"{COARSE} privacy.noise_multiplier=0.5", n=1000)
    with pytest.raises(ConfigError, match=r"too coarse for 800 participants.*ring_bits"):
        opened(COARSE, n=800)
    with pytest.raises(ConfigError, match=r"privacy\.mechanism='laplace'"):
        opened("privacy.mechanism=laplace")
    explicit = opened(f"{COARSE} privacy.noise_multiplier=3")
    assert explicit.noise_multiplier == 3.0


def test_the_table_of_the_docs() -> None:
    """docs/privacy.md, section 9: every row, as planned now."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    table = text[text.index("| n | gaussian, 24 bit") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    fine = "secagg.ring_bits=24 privacy.target_delta=1e-6"
    for line in table:
        n, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for overrides, shown in zip((fine, COARSE.replace("discrete_", ""), COARSE), cells[:3], strict=True):
            if shown == "refused":
                with pytest.raises(ConfigError, match="too coarse"):
                    opened(overrides, n=int(n))
                continue
            record = opened(overrides, n=int(n))
            assert f"{record.noise_multiplier:.3f}" == shown
        if cells[2] != "refused":
            assert f"{math.ldexp(record.noise_std, record.scale_log2):.2f}" == cells[3]
            gap = opened_charge(record).gap
            assert (f"{gap:.3f}" if gap > 1e-3 else f"{gap:.0e}") == cells[4]


def test_a_smaller_roster_never_has_less_noise_than_the_claims_say() -> None:
    """The claims table is made for all participants; rounds may open with fewer."""
    config = load_config(
        f"experiment=linear {COARSE} diloco.rounds=3 federation.participants=600 federation.min_participants=450 "
        "secagg.min_survivors=450"
    )
    dimension = 20_000
    whole = make_plan(config, 600, dimension)
    for n in (450, 500, 599):
        part = make_plan(config, n, dimension)
        assert part.noise_multiplier == whole.noise_multiplier
        assert part.noise_std == whole.noise_std
        assert part.discrete is not None
        assert whole.discrete is not None
        assert part.discrete.gap <= whole.discrete.gap
    rows = {row.observer: row for row in claims_of(config, whole, False)}
    for view, observer in (("local", "anyone"), ("central", "model_reader")):
        for n in (450, 600):
            charge = make_plan(config, n, dimension).charge
            spent = Spending().plus(charge, 3).epsilon(view, config.privacy.target_delta)
            assert spent <= rows[observer].epsilon * (1 + 1e-9)
