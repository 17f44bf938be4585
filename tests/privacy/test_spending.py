"""Charges, budgets and their exact sums."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.privacy import concentrated, gaussian
from lensemble_flwr.privacy.accountant import build_accountant, joint_gaussian_mu
from lensemble_flwr.privacy.participation import SecretParticipation
from lensemble_flwr.privacy.spending import Budget, Charge, Spending

multipliers = st.floats(1e-3, 1e6)


def test_views() -> None:
    charge = Charge(2.0, 10, 2)
    assert charge.mu2("local") == 0.25
    assert charge.mu2("central") == 0.25 / 8
    assert Charge(2.0, 2, 2).mu2("central") == Charge(2.0, 2, 5).mu2("central") == 0.25
    with pytest.raises(ConfigError, match="view"):
        charge.mu2("global")


@given(st.floats(0.01, 100.0), st.integers(1, 12), st.integers(2, 40), st.integers(0, 39))
def test_a_person_at_several_participants(own, p, m, k):
    """p times (C/s)^2 one by one, p^2 / (m - k) in the sum, which is never worse than what it is a function of."""
    one, person = Charge(own, m, k), Charge(own, m, k, per_person=p)
    honest = max(1, m - k)
    assert person.mu2("local") == pytest.approx(p * one.mu2("local"), rel=1e-12)
    assert person.mu2("central") == pytest.approx(min(p * p / honest, p) / own**2, rel=1e-12)
    assert person.mu2("central") <= person.mu2("local")
    assert Charge.from_record(person.record()) == person
    assert ("per_person" in person.record()) == (p > 1)


@given(
    st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(5, 9),
    st.integers(0, 4),
    st.floats(0.3, 3.0),
)
def test_the_ledgers_of_all_holders_bound_the_person(rounds, m, k, own):
    """Holders 0..4 of one person release in different rounds. What the observer gains in all, from the joint
    covariance, is at most what the fullest ledger says, in both views (docs/privacy.md, theorem 8)."""
    p, honest = 5, max(1, m - k)
    charge = Charge(own, m, k, 1e-12, per_person=p)
    ledgers = [Spending().plus(charge, sum(holder in there for there in rounds)) for holder in range(p)]
    local = sum(len(there) for there in rounds) / own**2
    noises = [max(honest, len(there)) for there in rounds]  # the holders that are there add noise themselves
    shifts = zip(rounds, noises, strict=True)
    central = sum(joint_gaussian_mu([[noise * own**2]], [len(there)]) ** 2 for there, noise in shifts)
    assert local <= max(ledger.mu2("local") for ledger in ledgers) * (1 + 1e-12)
    assert central <= max(ledger.mu2("central") for ledger in ledgers) * (1 + 1e-12)


@given(multipliers, st.integers(1, 50), st.integers(0, 60), st.integers(1, 10**9))
def test_sums_are_exact_and_rounded_up(own: float, m: int, k: int, rounds: int) -> None:
    charge = Charge(own, m, k)
    for view, noisy in (("local", 1), ("central", max(1, m - k))):
        truth = rounds / (Fraction(own) ** 2 * noisy)
        value = Spending().plus(charge, rounds).mu2(view)
        assert Fraction(value) >= truth
        assert Fraction(value) - truth <= Fraction(math.ulp(value))


@given(st.lists(st.tuples(multipliers, st.floats(0, 1e-3)), min_size=1, max_size=20), st.randoms())
def test_sums_depend_neither_on_order_nor_on_steps(charges: list[tuple[float, float]], random) -> None:
    items = [Charge(own, 5, 1, extra) for own, extra in charges]
    shuffled = random.sample(items, len(items))
    one, other = Spending(), Spending()
    for a, b in zip(items, shuffled, strict=True):
        one, other = one.plus(a).plus(a).plus(a), other.plus(b, 3)
    assert one == other
    assert Fraction(one.delta_extra) >= 3 * sum(Fraction(item.delta_extra) for item in items)


def test_sigma_one_epsilon_eight_is_exactly_two_rounds() -> None:
    budget, charge = Budget("local", 8.0, 1e-5), Charge(1.0, 3, 1)
    assert Spending().plus(charge, 2).within(budget)
    assert not Spending().plus(charge, 3).within(budget)
    assert Spending().plus(charge, 1).epsilon("local", 1e-5) == pytest.approx(4.37717, abs=1e-4)


def test_published_sums_of_the_central_view() -> None:
    """100 rounds of 10 participants with s = sqrt(10) C: exact figures for 0, 1, 5 and 9 colluders, and local."""
    for colluders, epsilon in ((0, 4.3772), (1, 4.6530), (3, 5.3882), (5, 6.5730), (9, 17.8566), (10, 17.8566)):
        spent = Spending().plus(Charge(math.sqrt(10), 10, colluders), 100)
        assert spent.epsilon("central", 1e-5) == pytest.approx(epsilon, abs=1e-4)
        assert spent.epsilon("local", 1e-5) == pytest.approx(17.8566, abs=1e-4)


def test_delta_extra_adds_to_delta() -> None:
    spent = Spending().plus(Charge(1.0, 3, 1), 2)
    reached = gaussian.delta(math.nextafter(math.sqrt(2), 2), 8.0)
    room = 1e-5 - reached
    assert spent.plus(Charge(1e12, 3, 1, room * 0.999)).within(Budget("local", 8.0, 1e-5))
    assert not spent.plus(Charge(1e12, 3, 1, room * 1.001)).within(Budget("local", 8.0, 1e-5))
    assert Spending().plus(Charge(1e9, 3, 1, 1e-5)).epsilon("local", 1e-5) == math.inf
    assert Spending().plus(Charge(1e9, 3, 1, 1e-6), 11).epsilon("local", 1e-5) == math.inf


@pytest.mark.parametrize("own", [0.0, -0.0, math.inf, math.nan, 5e-324, 1e-200, 10**400])
def test_charges_that_hide_nothing_fit_no_finite_budget(own: float) -> None:
    spent = Spending().plus(Charge(own, 3, 1))
    for view in ("local", "central"):
        assert not spent.within(Budget(view, 1e300, 0.999))
        assert spent.epsilon(view, 0.5) == math.inf
        assert spent.within(Budget(view, math.inf, 1e-5)), "an unprotected view is never passed"
    assert not spent.plus(Charge(1.0, 3, 1), 10**9).within(Budget("local", 1e300, 0.999))


@pytest.mark.parametrize("extra", [math.nan, math.inf, 1.0, 2.0])
def test_a_delta_extra_that_is_none_fits_no_budget(extra: float) -> None:
    assert Charge(1.0, 3, 1, extra).delta_extra == 1.0
    assert not Spending().plus(Charge(1.0, 3, 1, extra)).within(Budget("local", 1e6, 0.999999))


def failing(*_: float) -> float:
    raise FloatingPointError("no convergence")


@pytest.mark.parametrize("broken", [lambda *_: math.nan, lambda *_: math.inf, lambda *_: -math.inf, failing])
def test_a_failing_accountant_refuses(monkeypatch: pytest.MonkeyPatch, broken) -> None:
    spent, budget = Spending().plus(Charge(100.0, 3, 1)), Budget("local", 8.0, 1e-5)
    assert spent.within(budget)
    monkeypatch.setattr(gaussian, "delta", broken)
    monkeypatch.setattr(gaussian, "epsilon", broken)
    assert not spent.within(budget)
    assert spent.epsilon("local", 1e-5) == math.inf


def test_nothing_spent_is_nothing() -> None:
    assert Spending().mu2("local") == Spending().epsilon("central", 1e-9) == Spending().delta_extra == 0.0
    assert Spending().within(Budget("local", 0.0, 1e-300))


@given(st.floats(1e-2, 300), st.floats(-12, -2), st.integers(1, 5000), st.floats(0, 0.5))
def test_a_calibrated_run_fits_to_its_last_round_and_not_one_more(eps: float, log_delta: float, t: int, part: float):
    """Noise sized for T rounds (with 1e-12 to spare) fits T rounds at once and in any view; twice as many do not."""
    delta = 10.0**log_delta
    extra = part * delta / t
    sigma = math.sqrt(t) / gaussian.mu_for(eps, delta - t * extra) * (1 + 1e-12)
    local, central = Charge(sigma, 3, 1, extra), Charge(sigma / math.sqrt(7), 8, 1, extra)
    assert Spending().plus(local, t).within(Budget("local", eps, delta))
    assert Spending().plus(central, t).within(Budget("central", eps, delta))
    assert not Spending().plus(local, 2 * t).within(Budget("local", eps, delta))


@given(st.lists(st.floats(0.3, 300), min_size=1, max_size=30), st.floats(1e-12, 1e-2))
def test_the_accountant_says_the_same(multipliers: list[float], delta: float) -> None:
    accountant, spent = build_accountant("prv"), Spending()
    for own in multipliers:
        accountant.step(noise_multiplier=own)
        spent = spent.plus(Charge(own, 3, 1))
    assert spent.epsilon("local", delta) == pytest.approx(accountant.spent(target_delta=delta), rel=1e-9, abs=1e-12)


@given(st.floats(1e-3, 1e3), st.integers(0, 10**6), st.floats(0.01, 100), st.floats(1e-12, 1e-2))
def test_a_budget_that_is_passed_stays_passed(own: float, rounds: int, eps: float, delta: float) -> None:
    budget, spent = Budget("local", eps, delta), Spending().plus(Charge(own, 3, 1), rounds)
    more = spent.plus(Charge(own, 3, 1))
    assert spent.within(budget) or not more.within(budget)
    assert more.epsilon("local", delta) >= spent.epsilon("local", delta)


@given(st.builds(Charge, multipliers, st.integers(1, 99), st.integers(0, 99), st.floats(0, 1)))
def test_charges_survive_their_record(charge: Charge) -> None:
    assert Charge.from_record(charge.record()) == charge
    spent = Spending().plus(charge, 7)
    assert Spending.from_record(spent.record()) == spent


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"own_multiplier": -1.0}, "own_multiplier"),
        ({"own_multiplier": "1"}, "own_multiplier"),
        ({"own_multiplier": True}, "own_multiplier"),
        ({"min_survivors": 0}, "min_survivors"),
        ({"min_survivors": 3.0}, "min_survivors"),
        ({"colluders": -1}, "colluders"),
        ({"delta_extra": -1e-9}, "delta_extra"),
        ({"participation": 0.5}, "seen by others"),
        ({"participation": None}, "seen by others"),
        ({"guarantee": "global"}, "guarantee"),
        ({"mechanism": "laplace"}, "mechanism"),
        ({"gap": 0.1}, "gap"),
        ({"mechanism": "discrete_gaussian", "gap": -0.1}, "gap"),
        ({"mechanism": "discrete_gaussian", "gap": math.inf}, "gap"),
        ({"mechanism": "discrete_gaussian", "gap": math.nan}, "gap"),
        ({"per_person": 0}, "per_person"),
        ({"per_person": 2.0}, "per_person"),
    ],
)
def test_bad_charges(values: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Charge(**{"own_multiplier": 1.0, "min_survivors": 3, "colluders": 1, **values})


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"view": "global"}, "view"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"scope": "run"}, "scope"),
    ],
)
def test_bad_budgets(values: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Budget(**{"view": "local", "epsilon": 1.0, "delta": 1e-5, **values})


# --- discrete Gaussians ---


def discrete(own: float = 2.0, m: int = 10, k: int = 2, extra: float = 0.0, gap: float = 0.0) -> Charge:
    return Charge(own, m, k, extra, mechanism="discrete_gaussian", gap=gap)


@given(multipliers, st.integers(1, 50), st.integers(0, 60), st.floats(0, 10), st.integers(1, 1000))
def test_the_gap_raises_the_central_mu_only(own: float, m: int, k: int, gap: float, rounds: int) -> None:
    spent = Spending().plus(discrete(own, m, k, gap=gap), rounds)
    plain = Spending().plus(Charge(own, m, k), rounds)
    assert spent.mu2("local") == plain.mu2("local")
    noisy = max(1, m - k)
    truth = rounds * (1 / (own * math.sqrt(noisy)) + (gap if noisy > 1 else 0.0)) ** 2
    assert truth * (1 - 1e-14) <= spent.mu2("central") <= truth * (1 + 1e-14)
    assert spent.mu2("central") >= plain.mu2("central")


def test_one_discrete_release_makes_the_whole_history_concentrated() -> None:
    """Sound for both kinds, and never cheaper than what a continuous history of the same mu costs."""
    plain = Spending().plus(Charge(2.0, 10, 2), 5)
    mixed = plain.plus(discrete())
    assert (plain.concentrated, mixed.concentrated) == (False, True)
    assert plain.joined(mixed).concentrated
    assert mixed.joined(plain).concentrated
    for view in ("local", "central"):
        mu = math.sqrt(mixed.mu2(view))
        assert mixed.epsilon(view, 1e-5) == concentrated.epsilon(mu, 1e-5)
        assert mixed.epsilon(view, 1e-5) > gaussian.epsilon(mu, 1e-5)
        epsilon = mixed.epsilon(view, 1e-5)
        assert mixed.within(Budget(view, epsilon * (1 + 1e-9), 1e-5))
        assert not mixed.within(Budget(view, epsilon * (1 - 1e-9), 1e-5))
        assert mixed.plus(Charge(1e9, 3, 1)).epsilon(view, 1e-5) >= epsilon


@pytest.mark.parametrize("broken", [lambda *_: math.nan, lambda *_: math.inf, failing])
def test_a_failing_conversion_of_a_discrete_history_refuses(monkeypatch: pytest.MonkeyPatch, broken) -> None:
    spent, budget = Spending().plus(discrete(100.0)), Budget("local", 8.0, 1e-5)
    assert spent.within(budget)
    monkeypatch.setattr(concentrated, "delta", broken)
    monkeypatch.setattr(concentrated, "epsilon", broken)
    assert not spent.within(budget)
    assert spent.epsilon("local", 1e-5) == math.inf


@pytest.mark.parametrize("charge", [discrete(5e-324, 10, 2, gap=1.0), discrete(1.0, 10, 2, gap=1e200)])
def test_a_discrete_charge_beyond_all_bounds_is_endless(charge: Charge) -> None:
    spent = Spending().plus(charge)
    assert spent.epsilon("central", 0.5) == math.inf
    assert not spent.within(Budget("central", 1e300, 0.9))


def test_records_of_discrete_charges_and_old_ones() -> None:
    charge = discrete(1.5, 8, 1, 1e-9, 0.125)
    assert Charge.from_record(charge.record()) == charge
    assert "mechanism" not in Charge(1.5, 8, 1).record(), "an older release reads what it understands"
    assert "gap" not in Charge(1.5, 8, 1).record()
    spent = Spending().plus(charge)
    assert Spending.from_record(spent.record()) == spent
    old = Spending().plus(Charge(1.0, 3, 1)).record()
    assert len(old) == 4
    assert not Spending.from_record(old).concentrated
    for damaged in ([*old, False], [*old, 1.5], [*old, True, True], old[:3]):
        with pytest.raises((TypeError, ValueError)):
            Spending.from_record(damaged)


def test_coins_beside_discrete_gaussians_compose_as_renyi_divergences() -> None:
    """A ledger that saw both: neither conversion alone covers the history."""
    coin = Charge(2.0, 8, 1, participation=SecretParticipation(0.1))
    both = Spending().plus(discrete(3.0, 8, 1, 0.0, 0.0), 4).plus(coin, 20)
    assert both == Spending.from_record(both.record())
    epsilon = both.epsilon("local", 1e-5)
    alone = Spending().plus(discrete(3.0, 8, 1, 0.0, 0.0), 4).epsilon("local", 1e-5)
    unamplified = Spending().plus(discrete(3.0, 8, 1, 0.0, 0.0), 4).plus(Charge(2.0, 8, 1), 20).epsilon("local", 1e-5)
    assert alone < epsilon < unamplified
    assert both.within(Budget("local", epsilon, 1e-5))
    assert not both.within(Budget("local", alone, 1e-5))
    with pytest.raises(ConfigError, match="secret coin"):
        Charge(1.0, 8, 1, mechanism="discrete_gaussian", participation=SecretParticipation(0.5))
