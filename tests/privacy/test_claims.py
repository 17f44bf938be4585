"""What is claimed to whom. Every rule that a row depends on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import concentrated, discrete_bounds, gaussian
from lensemble_flwr.privacy.accountant import joint_gaussian_mu
from lensemble_flwr.privacy.bounds import ring_bound
from lensemble_flwr.privacy.claims import OBSERVERS, SIMULATED, ClaimInputs, claim_grade, claims, claims_table
from lensemble_flwr.privacy.mechanism import own_noise_std

READERS = ("model_reader", "peers")


def inputs(**changes) -> ClaimInputs:
    values = {
        "guarantee": "central",
        "noise_multiplier": 1.0,
        "clip_norm": 1.0,
        "rounds": 10,
        "delta": 1e-5,
        "n": 10,
        "min_survivors": 8,
        "colluders": 1,
        "dimension": 1000,
        "ring_bits": 32,
        "secagg_enabled": True,
        "identities_pinned": True,
        "consistency_stage": True,
        "entropy": "csprng",
        "simulation": False,
        "privacy_enabled": True,
        **changes,
    }
    if "scale_log2" not in values:
        people = values.get("per_person", 1)
        sigma = values["noise_multiplier"] if values["noise_multiplier"] > 0 else 1.0
        qmax = (2 ** (values["ring_bits"] - 1) - 1) // values["n"]
        values["qmax"] = qmax
        values["scale_log2"] = math.floor(
            math.log2(qmax / ring_bound(values["clip_norm"], people * sigma * values["clip_norm"], people))
        )
    return ClaimInputs(**values)


def rows(**changes) -> dict:
    found = claims(inputs(**changes))
    assert tuple(row.observer for row in found) == OBSERVERS
    return {row.observer: row for row in found}


LOCAL_OF_CENTRAL = gaussian.epsilon(math.sqrt(10 * 7), 1e-5)  # own noise is sigma C / sqrt(7)
TARGET = gaussian.epsilon(math.sqrt(10), 1e-5)


def test_central_with_everything_in_place():
    found = rows()
    for observer in (*READERS, "coordinator"):
        row = found[observer]
        assert row.guarantee == "central"
        assert row.epsilon == pytest.approx(TARGET, rel=1e-9)
        assert row.epsilon_per_round == pytest.approx(gaussian.epsilon(1.0, 1e-5), rel=1e-9)
        assert row.holds
        assert row.why_not == ""
        assert "Theorem 2" in row.theorem
        assert any("m - k = 7" in a for a in row.assumptions)
        assert any("computational" in a for a in row.assumptions)
        assert row.unit == "all rounds of one participant"
        assert row.neighbours == "zero-out"
        assert 1e-5 < row.delta < 1.0001e-5
    anyone = found["anyone"]
    assert anyone.guarantee == "local"
    assert anyone.epsilon == pytest.approx(LOCAL_OF_CENTRAL, rel=1e-9)
    assert anyone.holds
    assert anyone.epsilon_central == math.inf
    assert claim_grade(found.values(), OBSERVERS) == (True, [])


@pytest.mark.parametrize(("pinned", "consistent"), [(False, True), (True, False), (False, False)])
def test_coordinator_needs_pinned_identities_and_consistency(pinned, consistent):
    found = rows(identities_pinned=pinned, consistency_stage=consistent)
    row = found["coordinator"]
    assert row.guarantee == "local"
    assert row.epsilon == pytest.approx(LOCAL_OF_CENTRAL, rel=1e-9)
    assert row.holds
    assert row.why_not.startswith("local only")
    assert ("pinned identities" in row.why_not) is not pinned
    assert ("consistency" in row.why_not) is not consistent
    for observer in READERS:
        assert found[observer].guarantee == "central"


def test_central_without_masks_is_local_for_everybody():
    for row in rows(secagg_enabled=False).values():
        assert row.guarantee == "local"
        assert row.epsilon == pytest.approx(LOCAL_OF_CENTRAL, rel=1e-9)
        assert row.epsilon_central == math.inf
        assert "no masks" in row.why_not


def test_local_holds_against_anyone_without_masks_or_pins():
    for changes in ({}, {"secagg_enabled": False, "identities_pinned": False, "consistency_stage": False}):
        found = rows(guarantee="local", **changes)
        for row in found.values():
            assert row.guarantee == "local"
            assert row.epsilon == pytest.approx(TARGET, rel=1e-9)
            assert row.holds
            assert row.why_not == ""
        expected = gaussian.epsilon(math.sqrt(10 / 7), 1e-5) if not changes else math.inf
        assert found["model_reader"].epsilon_central == pytest.approx(expected, rel=1e-9)


def test_simulation_claims_for_model_readers_only():
    for guarantee in ("local", "central"):
        found = rows(guarantee=guarantee, simulation=True)
        assert found["model_reader"].holds
        assert found["model_reader"].guarantee == guarantee
        for observer in ("peers", "coordinator", "anyone"):
            assert not found[observer].holds
            assert found[observer].why_not == SIMULATED
        assert claim_grade(found.values(), ["model_reader"]) == (True, [])
        grade, reasons = claim_grade(found.values(), ["model_reader", "coordinator"])
        assert not grade
        assert reasons == [f"coordinator: {SIMULATED}"]


@pytest.mark.parametrize(
    "changes", [{"entropy": "replay"}, {"privacy_enabled": False}, {"entropy": "replay", "simulation": True}]
)
def test_replay_and_no_privacy_claim_nothing(changes):
    for row in rows(**changes).values():
        assert row.epsilon == row.epsilon_per_round == row.epsilon_local == row.epsilon_central == math.inf
        assert row.delta == 1.0
        assert row.guarantee == "none"
        assert not row.holds
        assert row.why_not
        assert not claim_grade([row], [row.observer])[0]


def test_privacy_off_does_not_look_at_the_noise():
    assert claims(inputs(privacy_enabled=False, noise_multiplier=0.0, guarantee="local"))[0].epsilon == math.inf


def test_two_parties_have_their_own_noise_only():
    two = {"n": 2, "min_survivors": 2, "two_party": True, "guarantee": "local"}
    found = rows(**two)
    for row in found.values():
        assert row.guarantee == "local"
        assert row.epsilon == pytest.approx(TARGET, rel=1e-9)
        assert row.epsilon_central == math.inf
        assert row.holds
    assert any("peer" in a for a in found["peers"].assumptions)
    with pytest.raises(ConfigError):
        inputs(**{**two, "guarantee": "central"})
    with pytest.raises(ConfigError):
        inputs(guarantee="central", two_party=True)


def test_a_view_whose_terms_are_not_negligible_is_refused():
    coarse = rows(guarantee="local", scale_log2=0, qmax=2**20)
    assert coarse["model_reader"].epsilon_central == math.inf
    assert coarse["model_reader"].epsilon == pytest.approx(TARGET, rel=1e-9)
    central = rows(scale_log2=2, qmax=2**20)  # s/g = 1.5
    assert central["model_reader"].guarantee == "local"
    assert "ring steps" in central["model_reader"].why_not
    tiny = rows(guarantee="local", noise_multiplier=0.005, rounds=1)
    for row in tiny.values():
        assert row.epsilon == math.inf
        assert not row.holds
        assert "delta" in row.why_not


@settings(deadline=None, max_examples=150)
@given(
    guarantee=st.sampled_from(["local", "central"]),
    sigma=st.floats(0.3, 20.0),
    rounds=st.integers(0, 1000),
    n=st.integers(3, 100),
    data=st.data(),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_invariants(guarantee, sigma, rounds, n, data, flags):
    m = data.draw(st.integers(3, n))
    k = data.draw(st.integers(1, m - 2))
    masks, pinned, consistent, simulation, private = flags
    given_ = inputs(
        guarantee=guarantee,
        noise_multiplier=sigma,
        rounds=rounds,
        n=n,
        min_survivors=m,
        colluders=k,
        secagg_enabled=masks,
        identities_pinned=pinned,
        consistency_stage=consistent,
        simulation=simulation,
        privacy_enabled=private,
    )
    found = claims(given_)
    std = own_noise_std(guarantee, sigma, 1.0, m, k)
    for row in found:
        assert row.epsilon >= 0.0
        assert row.holds <= (row.epsilon < math.inf)
        assert bool(row.why_not) or row.holds
        if not private:
            continue
        own = gaussian.epsilon(math.sqrt(rounds) / std, 1e-5)
        assert row.epsilon_local == pytest.approx(own, rel=1e-9)
        assert row.epsilon <= own * (1 + 1e-9), "the local guarantee holds for everybody"
        assert row.epsilon == (row.epsilon_central if row.guarantee == "central" else row.epsilon_local)
        if row.guarantee == "central":
            assert masks
            assert row.observer != "anyone"
            assert row.observer != "coordinator" or (pinned and consistent)
            assert row.epsilon == pytest.approx(gaussian.epsilon(math.sqrt(rounds) / sigma, 1e-5), rel=1e-9)
        if simulation:
            assert row.holds <= (row.observer == "model_reader")
    text = claims_table(found)
    assert all(row.observer in text for row in found)


@pytest.mark.parametrize("people", [1, 2, 3, 7])
@pytest.mark.parametrize("guarantee", ["local", "central"])
def test_a_person_at_several_participants(guarantee, people):
    """Both views against the joint Gaussian of what is seen: p releases one by one, or the sum of m - k = 7 noises."""
    found = rows(guarantee=guarantee, per_person=people)
    std = own_noise_std(guarantee, 1.0, 1.0, 8, 1, people)
    one_by_one = joint_gaussian_mu(std**2 * np.eye(people), np.ones(people))
    summed = joint_gaussian_mu([[7 * std**2]], [people])
    for row in found.values():
        assert row.epsilon_local == pytest.approx(gaussian.epsilon(math.sqrt(10) * one_by_one, 1e-5), rel=1e-9)
        if row.observer != "anyone":
            assert row.epsilon_central == pytest.approx(gaussian.epsilon(math.sqrt(10) * summed, 1e-5), rel=1e-9)
        if row.guarantee == guarantee:
            assert row.epsilon == pytest.approx(TARGET, rel=1e-9), "the noise is sized for the person"
        assert ("person" in row.unit) == (people > 1)
        assert any("hold the person's data" in a for a in row.assumptions) == (people > 1)
    text = claims_table(list(found.values()))
    assert ("Theorem 6" in text or "Theorem 7" in text) == (people > 1)
    assert found["model_reader"].unit in text


def test_a_person_at_more_participants_than_a_sum_hides():
    found = rows(guarantee="local", per_person=9)
    assert found["peers"].epsilon_central == math.inf
    assert found["peers"].epsilon == pytest.approx(TARGET, rel=1e-9)
    with pytest.raises(ConfigError):
        inputs(guarantee="central", per_person=8)
    assert "person" in rows(privacy_enabled=False, per_person=2)["peers"].unit


def test_accountant_and_sample_rate():
    exact, loose = rows()["model_reader"], rows(accountant="rdp")["model_reader"]
    assert exact.epsilon < loose.epsilon < 1.2 * exact.epsilon
    sampled = rows(sample_rate=0.1, rounds=1, guarantee="local")["anyone"]
    assert sampled.epsilon < rows(rounds=1, guarantee="local")["anyone"].epsilon
    assert any("secret coin" in a for a in sampled.assumptions)


@pytest.mark.parametrize(
    "bad",
    [
        {"guarantee": "both"},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"min_survivors": 2},
        {"colluders": 0},
        {"colluders": 8},
        {"min_survivors": 11},
        {"rounds": -1},
        {"rounds": 1.0},
        {"delta": 0.0},
        {"entropy": "seed"},
        {"sample_rate": 0.0},
        {"sample_rate": 1.1},
        {"accountant": "gdp"},
        {"dimension": 0},
        {"per_person": 0},
        {"per_person": 1.5},
    ],
    ids=str,
)
def test_inputs_are_checked(bad):
    with pytest.raises(ConfigError):
        inputs(**bad)


def test_claim_grade_edges():
    found = claims(inputs())
    assert claim_grade(found, [])[0] is False
    assert claim_grade(found[:1], ["peers"])[1] == ["peers: no such row"]
    with pytest.raises(ConfigError):
        claim_grade(found, ["everyone"])
    with pytest.raises(ConfigError):
        claims({"guarantee": "local"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].holds = False


def test_table_says_it_all():
    text = claims_table(claims(inputs(identities_pinned=False)))
    for part in (
        "observer",
        "model_reader",
        "17.857",
        "69.877",
        "zero-out",
        "local only",
        "assumes",
        "Theorem 1",
        "yes",
    ):
        assert part in text
    text = claims_table(claims(inputs(entropy="replay")))
    assert "inf" in text
    assert "not claimed: the noise is replayed" in text
    assert "17.8" not in text


# --- the discrete Gaussian ---


def coarse(**changes) -> ClaimInputs:
    """500 participants on a 16-bit ring: about one ring step of noise."""
    values = {"mechanism": "discrete_gaussian", "n": 500, "min_survivors": 400, "ring_bits": 16, "qmax": 65}
    return inputs(**{**values, "rounds": 3, "scale_log2": 4, "noise_multiplier": 1.4, **changes})


def test_a_coarse_ring_has_a_central_claim_only_with_the_discrete_mechanism() -> None:
    found = {row.observer: row for row in claims(coarse())}
    row = found["model_reader"]
    assert row.holds
    assert row.guarantee == "central"
    assert "Theorem 4" in row.theorem
    assert "concentrated" in row.theorem
    assert found["anyone"].theorem.startswith("Theorem 3")
    std = own_noise_std("central", 1.4, 1.0, 400, 1)
    steps = std * 16
    assert 1.0 < steps < 1.2
    mu = math.sqrt(3) * (1 / 1.4 + discrete_bounds.sum_gap(steps, 399, 1000))
    assert row.epsilon == pytest.approx(concentrated.epsilon(mu, 1e-5), rel=1e-6)
    assert found["anyone"].epsilon == pytest.approx(concentrated.epsilon(math.sqrt(3) / std, 1e-5), rel=1e-6)
    rounded = {row.observer: row for row in claims(coarse(mechanism="gaussian"))}["model_reader"]
    assert rounded.guarantee == "local"
    assert "ring steps" in rounded.why_not


@pytest.mark.parametrize("changes", [{"scale_log2": 2}, {"scale_log2": 20}])
def test_a_grid_beside_the_discrete_range_claims_nothing(changes) -> None:
    for row in claims(coarse(**changes)):
        assert not row.holds
        assert row.epsilon == math.inf
        assert "too coarse" in row.why_not or "too fine" in row.why_not


def test_a_sum_that_is_not_nearly_discrete_has_the_local_claim_only() -> None:
    for row in claims(coarse(noise_multiplier=0.64)):  # half a step
        assert row.guarantee == "local"
        assert row.epsilon_central == math.inf


def test_an_unknown_mechanism() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.mechanism='laplace'"):
        inputs(mechanism="laplace")
