"""Accountants against the oracle file, and what must never go wrong whatever comes in."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation
from lensemble_flwr.privacy import accountant as module
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.accountant import (
    Accountant,
    PRVAccountant,
    RDPAccountant,
    build_accountant,
)
from tests.effort import calls, peak_bytes

CASES = json.loads((Path(__file__).parents[1] / "oracles" / "accounting.json").read_text())
NAMES = ("prv", "rdp")
BAD_NUMBERS = [math.nan, 0.0, -1.0, math.inf, "1", None, True, 10**400, [1.0]]


def by_id(*kinds: str) -> list:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] in kinds]


def spent(name: str, rounds: list, delta: float) -> float:
    made = build_accountant(name)
    for sigma, rate, count in rounds:
        made.step(noise_multiplier=sigma, sample_rate=rate, count=count)
    return made.spent(target_delta=delta)


# --- oracles ---


@pytest.mark.parametrize("case", by_id("closed", "hetero_closed", "sub1_closed", "sub_composed", "published"))
def test_oracle_epsilon(case):
    # The oracles trust Fourier transforms to the last bit. Their rounding is charged to delta here, so that the Renyi
    # bound takes over below 1e-8 or so, where a transform's noise is as large as delta.
    composed = any(rate < 1.0 for _, rate, _ in case["rounds"])
    room = 1.0 if not composed else 1.0 + 2e-5 if case["delta"] >= 1e-8 else 1.15
    assert case["lo"] <= spent("prv", case["rounds"], case["delta"]) <= case["hi"] * room
    assert case["lo"] <= spent("rdp", case["rounds"], case["delta"])


@pytest.mark.parametrize("case", by_id("inverse"))
def test_oracle_calibration(case):
    sigma = build_accountant("prv").calibrate_sigma(
        target_epsilon=case["epsilon"], target_delta=case["delta"], num_rounds=case["T"], sample_rate=case["q"]
    )
    assert case["sigma_lo"] <= sigma <= case["sigma_hi"]


def test_every_oracle_case_is_used():  # the joint ones in test_joint.py
    known = "closed hetero_closed sub1_closed sub_composed published joint joint_singular inverse".split()
    assert {case["kind"] for case in CASES} == set(known)


# --- protocol ---


@pytest.mark.parametrize("name", NAMES)
def test_protocol_and_names(name):
    made = build_accountant(name)
    assert isinstance(made, Accountant)
    assert made.name == name
    assert made.spent(target_delta=1e-5) == 0.0
    with pytest.raises(ConfigError, match="unknown"):
        build_accountant(name + "x")


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.tuples(st.floats(0.05, 100.0), st.integers(1, 1000)), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_order_and_grouping_do_not_matter(name, steps, order):
    shuffled = [(sigma, part) for sigma, count in steps for part in (count // 2, count - count // 2)]
    order.shuffle(shuffled)
    one, other = build_accountant(name), build_accountant(name)
    for sigma, count in steps:
        one.step(noise_multiplier=sigma, count=count)
    for sigma, count in shuffled:
        other.step(noise_multiplier=sigma, count=count)
    assert one.spent(target_delta=1e-6) == other.spent(target_delta=1e-6)
    assert one.state_dict() == other.state_dict()


@settings(deadline=None, max_examples=100)
@given(st.floats(0.01, 1e4), st.integers(1, 10**9), st.floats(1e-300, 0.1))
def test_prv_is_exact_and_never_above_rdp(sigma, count, delta):
    prv, rdp = spent("prv", [(sigma, 1.0, count)], delta), spent("rdp", [(sigma, 1.0, count)], delta)
    assert prv == pytest.approx(gaussian.epsilon(math.sqrt(count) / sigma, delta), rel=1e-11)
    assert prv <= rdp
    assert rdp <= 1.5 * prv + 1.0


def test_huge_counts_stay_exact():
    made = PRVAccountant()
    for _ in range(1000):
        made.step(noise_multiplier=1e4, count=10**6)
    assert made.spent(target_delta=1e-5) == spent("prv", [(1e4, 1.0, 10**9)], 1e-5)


# --- the budget ---


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(
    done=st.integers(0, 50),
    more=st.integers(0, 50),
    sigma=st.floats(0.1, 50.0),
    epsilon=st.floats(0.0, 100.0),
    delta=st.floats(1e-12, 0.5),
)
def test_would_exceed_agrees_with_spent_and_is_monotone(name, done, more, sigma, epsilon, delta):
    made = build_accountant(name)
    made.step(noise_multiplier=sigma, count=done)

    def exceeds(**changed):
        given_ = {"target_epsilon": epsilon, "target_delta": delta, "noise_multiplier": sigma, "count": more}
        return made.would_exceed(**{**given_, **changed})

    answer = exceeds()
    if answer:
        assert exceeds(count=more + 1)
        assert exceeds(noise_multiplier=sigma / 2)
        assert exceeds(target_epsilon=epsilon / 2)
        assert exceeds(target_delta=delta / 2)
    before = made.state_dict()
    after = type(made).from_state_dict(before)
    after.step(noise_multiplier=sigma, count=more)
    assert answer == (after.spent(target_delta=delta) > epsilon)
    assert made.state_dict() == before


@pytest.mark.parametrize("name", NAMES)
def test_budget_is_exhausted_at_the_right_round(name):
    target = {"target_epsilon": 8.0, "target_delta": 1e-5}
    sigma = build_accountant(name).calibrate_sigma(num_rounds=10, **target)
    made = build_accountant(name)
    for _ in range(10):
        assert not made.would_exceed(noise_multiplier=sigma, **target)
        made.step(noise_multiplier=sigma)
    assert made.would_exceed(noise_multiplier=sigma, **target)
    assert 7.99 < made.spent(target_delta=1e-5) <= 8.0


def test_would_exceed_is_fast():
    made = PRVAccountant()
    for i in range(100):
        made.step(noise_multiplier=1.0 + i / 7, count=3)
    ask = {"target_epsilon": 30.0, "target_delta": 1e-5}
    made.would_exceed(**ask, noise_multiplier=1.0)
    assert calls(lambda: made.would_exceed(**ask, noise_multiplier=1.5)) < 500


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=str)
def test_a_step_that_makes_no_sense_spends_everything(name, bad):
    target = {"target_epsilon": 1e9, "target_delta": 0.5}
    made = build_accountant(name)
    assert made.would_exceed(noise_multiplier=bad, **target)
    made.step(noise_multiplier=bad)
    assert made.spent(target_delta=0.5) == math.inf
    assert made.would_exceed(noise_multiplier=1e5, **target)
    assert type(made).from_state_dict(made.state_dict()).spent(target_delta=0.5) == math.inf
    rated = build_accountant(name)
    if bad != math.inf:
        rated.step(noise_multiplier=1e5, sample_rate=bad)
        assert rated.spent(target_delta=0.5) == math.inf


@pytest.mark.parametrize("name", NAMES)
def test_bad_targets_and_counts(name):
    made = build_accountant(name)
    for bad in (math.nan, 0.0, -1.0, 1.0, 2.0, None):
        with pytest.raises(ConfigError):
            made.spent(target_delta=bad)
        assert made.would_exceed(target_epsilon=1.0, target_delta=bad, noise_multiplier=10.0)
    for bad in (math.nan, -1.0, None, "8"):
        assert made.would_exceed(target_epsilon=bad, target_delta=1e-5, noise_multiplier=1e5)
    for bad in (-1, 1.0, True, None):
        with pytest.raises(ContractViolation):
            made.step(noise_multiplier=1.0, count=bad)
        with pytest.raises(ContractViolation):
            made.would_exceed(target_epsilon=1.0, target_delta=1e-5, noise_multiplier=1.0, count=bad)
    made.step(noise_multiplier=math.nan, count=0)
    assert made.spent(target_delta=1e-5) == 0.0


def test_overflow_is_infinite():
    made = PRVAccountant()
    made.step(noise_multiplier=1e-300, count=10**9)
    assert made.spent(target_delta=1e-5) == math.inf
    assert spent("rdp", [(1e-300, 1.0, 10**9)], 1e-5) == math.inf
    assert spent("prv", [(1e-300, 0.5, 1), (1.0, 0.5, 1)], 1e-5) == math.inf


# --- calibration ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds"),
    [
        (1.0, 1e-5, 1),
        (8.0, 1e-5, 100),
        (0.01, 1e-5, 10),
        (0.1, 1e-10, 10**6),
        (300.0, 1e-6, 1),
        (1e5, 1e-300, 3),
        (6000.0, 1e-5, 1),
        (20.0, 1e-12, 10**9),
    ],
)
def test_calibrated_sigma_is_the_smallest(name, epsilon, delta, rounds):
    made = build_accountant(name)
    sigma = made.calibrate_sigma(target_epsilon=epsilon, target_delta=delta, num_rounds=rounds)
    assert spent(name, [(sigma, 1.0, rounds)], delta) <= epsilon
    assert spent(name, [(sigma * (1 - 1e-6), 1.0, rounds)], delta) > epsilon
    assert made.spent(target_delta=delta) == 0.0


def test_calibration_at_a_secret_sampling_rate():
    sigma = PRVAccountant().calibrate_sigma(target_epsilon=2.0, target_delta=1e-5, num_rounds=1, sample_rate=0.05)
    assert spent("prv", [(sigma, 0.05, 1)], 1e-5) <= 2.0 < spent("prv", [(sigma * (1 - 1e-6), 0.05, 1)], 1e-5)
    assert sigma < PRVAccountant().calibrate_sigma(target_epsilon=2.0, target_delta=1e-5, num_rounds=1)


def test_infeasible_target_says_what_would_be_feasible():
    for name, epsilon, rounds in (("prv", 1e-5, 10**6), ("rdp", 1e-9, 10**9)):
        with pytest.raises(ConfigError, match="feasible") as caught:
            build_accountant(name).calibrate_sigma(target_epsilon=epsilon, target_delta=1e-15, num_rounds=rounds)
        feasible = caught.value.feasible_epsilon
        assert epsilon < feasible
        assert spent(name, [(module.MAX_SIGMA, 1.0, rounds)], 1e-15) == feasible


@pytest.mark.parametrize(
    "change",
    [
        {"target_epsilon": 0.0},
        {"target_epsilon": math.nan},
        {"target_epsilon": math.inf},
        {"target_delta": 0.0},
        {"target_delta": 5},
        {"num_rounds": 0},
        {"num_rounds": 2.0},
        {"sample_rate": 0.0},
        {"sample_rate": 1.5},
        {"sample_rate": math.nan},
    ],
    ids=str,
)
def test_malformed_targets(change):
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "num_rounds": 10, "sample_rate": 1.0}
    with pytest.raises(ConfigError):
        PRVAccountant().calibrate_sigma(**{**target, **change})


# --- secret sampling ---


@pytest.mark.parametrize("name", NAMES)
def test_every_round_may_have_its_own_sigma_and_rate(name):
    rounds = [(1.5, 0.1, 3), (2.0, 1.0, 1), (1.2, 0.25, 2)]
    forward, backward = spent(name, rounds, 1e-6), spent(name, rounds[::-1], 1e-6)
    assert forward == backward
    assert forward < spent(name, [(sigma, 1.0, count) for sigma, _, count in rounds], 1e-6)
    assert forward > spent(name, rounds[:-1], 1e-6)


def test_sampled_bounds_are_ordered():
    rounds, delta = [(1.0, 0.01, 50), (2.0, 0.1, 20), (5.0, 1.0, 2)], 1e-6
    prv, rdp = spent("prv", rounds, delta), spent("rdp", rounds, delta)
    full = spent("prv", [(sigma, 1.0, count) for sigma, _, count in rounds], delta)
    assert spent("prv", [rounds[-1]], delta) < prv <= rdp < full


def test_backends_that_fail_or_are_too_large_are_no_bound(monkeypatch):
    rounds, delta = [(0.05, 0.9, 1000)], 1e-6
    full = spent("prv", [(0.05, 1.0, 1000)], delta)
    assert 0.0 < spent("prv", rounds, delta) <= full
    assert module._pld_epsilon(0.0, ((1e-4, 0.9, 10**9),), delta) == math.inf  # no grid holds it
    for name in ("dp_accounting", "dp_accounting.rdp", "dp_accounting.pld"):
        monkeypatch.setitem(sys.modules, name, None)
    module._pld.cache_clear()
    assert spent("prv", rounds, delta) == full
    assert spent("rdp", rounds, delta) == math.inf
    monkeypatch.setattr(module, "_renyi_sampled", lambda *_: math.nan)
    monkeypatch.setattr(module, "_pld_epsilon", lambda *_: math.nan)
    assert spent("prv", rounds, delta) == full
    assert spent("rdp", rounds, delta) == math.inf


def test_running_out_of_memory_is_no_bound_and_the_process_survives():
    """The grid of this case needs tens of MB; with 5 MB left the backend fails and the bound without it counts."""
    code = (
        "import resource, math\n"
        "from lensemble_flwr.privacy import accountant as a\n"
        "import dp_accounting.pld.privacy_loss_distribution, dp_accounting.rdp.rdp_privacy_accountant\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 5 * 2**20,) * 2)\n"
        "assert a._pld_epsilon(0.0, ((0.5, 0.9, 10**4),), 1e-6) == math.inf\n"
        "p = a.PRVAccountant(); p.step(noise_multiplier=0.5, sample_rate=0.9, count=10**4)\n"
        "print(p.spent(target_delta=1e-6))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert 17_555 < float(done.stdout) <= spent("prv", [(0.5, 1.0, 10**4)], 1e-6)


@pytest.mark.parametrize(
    ("sigma", "rate", "count", "delta"),
    [
        (0.01, 1e-6, 10**9, 1e-5),
        (0.01, 0.999, 10**9, 1e-300),
        (0.5, 0.9, 10**4, 1e-6),
        (100.0, 0.5, 10**9, 1e-5),
        (1e4, 1e-9, 10**9, 1e-15),
    ],
)
def test_no_case_takes_long_or_much(sigma, rate, count, delta):
    """Published backends ask for terabytes or do not end here; ours has a grid of bounded size."""
    peak, found = peak_bytes(lambda: spent("prv", [(sigma, rate, count)], delta))
    assert peak < 250_000_000
    assert 0.0 <= found <= gaussian.epsilon(math.sqrt(count) / sigma, delta) * (1 + 1e-12)
    width = module._composed_width(sigma, rate, count)
    assert width > 0.0


def test_few_loud_rounds_are_not_accounted_by_their_moments():
    """sigma .1 at rate .001 for 1000 rounds: Renyi accounting gives 1258.8. A lower bound on the truth is what counting
    the outputs above a threshold tells (binomial against binomial); the bound must lie between."""
    found = spent("prv", [(0.1, 0.001, 1000)], 1e-5)
    least = 0.0
    for threshold in np.linspace(0.3, 0.9, 25):
        null, shifted = stats.norm.logsf(threshold / 0.1), stats.norm.sf((threshold - 1) / 0.1)
        with_it = 0.999 * math.exp(null) + 0.001 * shifted
        for hits in range(1, 12):
            power = stats.binom.sf(hits - 1, 1000, with_it)
            level = math.log(math.comb(1000, hits)) + hits * null  # P(hits or more) is at most this
            if power > 1e-5:
                least = max(least, math.log(power - 1e-5) - level)
    assert 200.0 < least < found < 345.0


@pytest.fixture
def small_grids(monkeypatch):
    """Coarser grids: looser, no less sound, and quick."""
    monkeypatch.setattr(module, "_PLD_POINTS", 50_000)
    yield
    module._rounds_allowed.cache_clear()


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.1, 50.0), st.floats(1e-6, 0.99), st.integers(1, 10**5), st.floats(1e-8, 1e-3))
def test_sampled_prv_is_never_above_rdp_nor_below_the_exact_single_round(small_grids, sigma, rate, count, delta):
    prv, rdp = spent("prv", [(sigma, rate, count)], delta), spent("rdp", [(sigma, rate, count)], delta)
    assert module._single_sampled(sigma, rate, delta) <= prv <= rdp
    coarse = module._pld_epsilon(0.0, ((sigma, rate, 1),), delta)
    assert coarse >= module._single_sampled(sigma, rate, delta) * (1 - 1e-9)


def test_sampled_would_exceed_looks_up_how_many_rounds_fit(small_grids):
    made, target = PRVAccountant(), {"target_epsilon": 8.0, "target_delta": 1e-5}
    ask = {**target, "noise_multiplier": 2.0, "sample_rate": 0.1}
    assert not made.would_exceed(**ask)
    fits = module._rounds_allowed(PRVAccountant, 0, (), 2.0, 0.1, 8.0, 1e-5)
    assert spent("prv", [(2.0, 0.1, fits)], 1e-5) <= 8.0 < spent("prv", [(2.0, 0.1, fits + 1)], 1e-5)
    answers: list[bool] = []
    asked = calls(lambda: answers.extend(made.would_exceed(**ask, count=count) for count in range(fits + 3)))
    assert asked < 1000 * (fits + 3)
    assert answers == [False] * (fits + 1) + [True] * 2
    made.step(noise_multiplier=2.0, sample_rate=0.1, count=fits)
    assert made.would_exceed(**ask)
    assert not made.would_exceed(**ask, count=0)
    made.step(noise_multiplier=0.2)  # another history, another number
    assert made.would_exceed(**ask, count=0)
    assert not PRVAccountant().would_exceed(
        target_epsilon=1e9, target_delta=1e-5, noise_multiplier=100.0, sample_rate=1e-6, count=10**9
    )


def test_enough_skips_the_costly_bounds(monkeypatch):
    monkeypatch.setattr(module, "_pld_epsilon", lambda *_: pytest.fail("not needed"))
    monkeypatch.setattr(module, "_renyi_sampled", lambda *_: pytest.fail("not needed"))
    target = {"target_epsilon": 20.0, "target_delta": 1e-5}
    assert not PRVAccountant().would_exceed(noise_multiplier=1.0, sample_rate=0.5, count=3, **target)


# --- state ---


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_json(name):
    made = build_accountant(name)
    made.step(noise_multiplier=0.7, count=12)
    made.step(noise_multiplier=1.5, sample_rate=0.25, count=1)
    again = type(made).from_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.state_dict() == made.state_dict()
    assert again.spent(target_delta=1e-5) == made.spent(target_delta=1e-5)


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"accountant": "rdp"},
        {"mu2_units": "-0x1"},
        {"mu2_units": 5},
        {"infinite": 0},
        {"sampled": [[1.0, 0.5, -1]]},
        {"sampled": [[1.0, 1.0, 1]]},
        {"sampled": [[1.0, 0.5, 1], [1.0, 0.5, 1]]},
        {"sampled": [[math.nan, 0.5, 1]]},
        {"sampled": [1]},
        {"extra": 1},
    ],
    ids=str,
)
def test_damaged_state_is_refused(damage):
    with pytest.raises(ArtifactError):
        PRVAccountant.from_state_dict({**PRVAccountant().state_dict(), **damage})
    with pytest.raises(ArtifactError):
        RDPAccountant.from_state_dict({})


def test_imports_stay_light():
    code = (
        "import sys, lensemble_flwr.privacy.accountant as a\n"
        "p = a.PRVAccountant(); p.step(noise_multiplier=1.0); p.spent(target_delta=1e-5)\n"
        "r = a.RDPAccountant(); r.step(noise_multiplier=1.0); r.spent(target_delta=1e-5)\n"
        "assert not {'torch', 'flwr', 'dp_accounting', 'opacus'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
