"""The secret coin: its exact odds, who may throw it, what it costs, and how its charges are kept."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_ndtr

from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.privacy import accountant, mechanism
from lensemble_flwr.privacy.accountant import PRVAccountant, sampled_within
from lensemble_flwr.privacy.mechanism import add_noise, clip_to_grid, take_part, zero_update
from lensemble_flwr.privacy.noise import Keystream, OsEntropy, ReplayEntropy
from lensemble_flwr.privacy.participation import ALWAYS, SecretParticipation
from lensemble_flwr.privacy.spending import Budget, Charge, Spending
from tests.effort import calls, peak_bytes

HALF = SecretParticipation(0.5)
BAD_RATES = [0, 0.0, 1.0000001, 2, -1, math.nan, math.inf, "x", "0.5", None, True, [0.5], np.ones(1)]


# --- the coin ---


@given(st.floats(0.0, 1.0, exclude_min=True))
def test_the_odds_are_exactly_the_rate(rate: float) -> None:
    below, bits = SecretParticipation(rate).threshold
    assert Fraction(below, 2**bits) == Fraction(rate)
    assert bits >= 64


@pytest.mark.parametrize("bad", BAD_RATES, ids=repr)
def test_hostile_rates(bad: object) -> None:
    with pytest.raises(ConfigError, match="sample_rate"):
        SecretParticipation(bad)  # type: ignore[arg-type]


def update(values: np.ndarray | None = None) -> mechanism.ClippedUpdate:
    return clip_to_grid(np.array([0.5, -0.25, 0.0]) if values is None else values, 1.0, 1.0)


@pytest.mark.parametrize("rate", [0.5, 0.1, 2.0**-1074, math.nextafter(1.0, 0.0)])
def test_the_coin_falls_at_the_threshold_and_not_beside_it(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    coin = SecretParticipation(rate)
    below, bits = coin.threshold
    for value, shown in ((0, True), (below - 1, True), (below, False), (2**bits - 1, False)):

        def drawn(self: Keystream, asked: int, value: int = value) -> int:
            assert asked == bits
            return value

        monkeypatch.setattr(Keystream, "integer", drawn)
        k = update().k.copy()
        after = take_part(update(), coin, OsEntropy()).k
        np.testing.assert_array_equal(after, k if shown else 0 * k)


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.9])
def test_the_coin_is_fair_and_each_throw_is_its_own(rate: float) -> None:
    coin, entropy, count = SecretParticipation(rate), OsEntropy(), 6000
    k = int(update(np.array([0.5])).k[0])
    thrown = np.empty(count)
    for i in range(count):
        thrown[i] = take_part(clip_to_grid(np.array([0.5]), 1.0, 1.0), coin, entropy).k[0] / k
    assert set(thrown) == {0.0, 1.0}
    assert abs(thrown.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / count)
    centred = thrown - thrown.mean()
    assert abs(np.mean(centred[1:] * centred[:-1])) < 5 * rate * (1 - rate) / math.sqrt(count)


def test_replayed_coins_are_the_same_again_and_apart_from_the_noise() -> None:
    def replayed(seed: int) -> list[int]:
        entropy = ReplayEntropy(seed)
        after = take_part(update(), HALF, entropy)
        return [int(after.k[0]), *add_noise(after, 1.0, entropy).v.tolist()]

    assert replayed(3) == replayed(3)
    shown = [bool(replayed(seed)[0]) for seed in range(64)]
    assert 10 < sum(shown) < 54


def test_the_update_is_used_up_and_only_one_takes_part() -> None:
    before = update()
    after = take_part(before, HALF, OsEntropy())
    with pytest.raises(ContractViolation, match="used up"):
        take_part(before, HALF, OsEntropy())
    assert repr(after) == "<ClippedUpdate>"
    assert not set(dir(after)) - set(dir(before)), "nothing on it tells the coin"
    for wrong in (0.5, True, None, "1"):
        with pytest.raises(ContractViolation, match="SecretParticipation"):
            take_part(update(), wrong, OsEntropy())  # type: ignore[arg-type]
    with pytest.raises(ContractViolation, match="entropy"):
        take_part(update(), HALF, np.random.default_rng(0))  # type: ignore[arg-type]
    np.testing.assert_array_equal(take_part(zero_update(3, 1.0, 1.0), HALF, OsEntropy()).k, 0)
    assert take_part(update(), ALWAYS, OsEntropy()).k.any()


def test_a_failing_source_throws_no_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = update()
    monkeypatch.setattr("os.urandom", lambda n: bytes(n))
    with pytest.raises(ConfigError, match="random source"):
        take_part(kept, HALF, OsEntropy())
    assert kept.k.any()


# --- the bound ---


def hockey_stick(epsilon: float, sigma: float, rate: float) -> tuple[float, float]:
    """delta(epsilon) of two rounds, with against without the update and the reverse, by plain quadrature."""
    x = np.linspace(-9 * sigma, 1 + 9 * sigma, 3001)
    without = np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    within = (1 - rate) * without + rate * np.exp(-((x - 1) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    p, q = np.multiply.outer(within, within), np.multiply.outer(without, without)
    cell = (x[1] - x[0]) ** 2
    return tuple(float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell) for a, b in ((p, q), (q, p)))


@pytest.mark.parametrize(("sigma", "rate", "epsilon"), [(1.0, 0.3, 0.2), (1.0, 0.6, 1.0), (3.0, 0.9, 0.2)])
def test_the_accountant_covers_both_directions_and_no_more(sigma: float, rate: float, epsilon: float) -> None:
    truth = max(hockey_stick(epsilon, sigma, rate))
    made = PRVAccountant()
    made.step(noise_multiplier=sigma, sample_rate=rate, count=2)
    assert made.spent(target_delta=truth * (1 - 1e-4)) >= epsilon * (1 - 1e-4)
    assert made.spent(target_delta=truth * (1 + 1e-2)) <= epsilon * (1 + 1e-3)


def test_one_round_removal_is_the_worse_direction() -> None:
    """What lets the closed form of a single round look at one direction only (docs/privacy.md)."""
    x = np.linspace(-12, 13, 400_001)
    for sigma, rate, epsilon in ((1.0, 0.3, 0.1), (0.5, 0.8, 1.0), (2.0, 0.05, 0.01)):
        without = np.exp(-(x**2) / (2 * sigma**2))
        within = (1 - rate) * without + rate * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
        there = np.maximum(within - math.exp(epsilon) * without, 0).sum()
        assert there >= np.maximum(without - math.exp(epsilon) * within, 0).sum()


def test_calibration_with_a_coin_is_the_smallest_and_leaves_room_for_other_roundings() -> None:
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    sigma = PRVAccountant().calibrate_sigma(num_rounds=2, sample_rate=0.5, **target)

    def exceeds(value: float) -> bool:
        return PRVAccountant().would_exceed(noise_multiplier=value, sample_rate=0.5, count=2, **target)

    assert not exceeds(sigma)
    assert not exceeds(sigma * (1 - 1e-12))
    assert exceeds(sigma * (1 - 1e-6))


# --- charges ---

COIN = Charge(1.2, 3, 1, 1e-30, HALF)
BUDGET = Budget("local", 8.0, 1e-5)


@pytest.mark.parametrize("bad", [0.5, 1.0, None, "x", 3, (0.5,)], ids=repr)
def test_only_a_secret_coin_makes_a_charge_cheaper(bad: object) -> None:
    with pytest.raises(ConfigError, match="seen by others"):
        Charge(1.0, 3, 1, participation=bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Charge(1.0, 3, 1, sample_rate=0.5)  # type: ignore[call-arg]


@given(st.floats(1e-3, 1e3), st.integers(1, 20), st.floats(0.0, 1.0, exclude_min=True), st.floats(0, 1e-6))
def test_charges_survive_their_record(own: float, m: int, rate: float, extra: float) -> None:
    charge = Charge(own, m, 1, extra, SecretParticipation(rate))
    assert Charge.from_record(charge.record()) == charge
    assert ("sample_rate" in charge.record()) == (rate < 1.0)
    spent = Spending().plus(charge, 7).plus(Charge(2.0, 5, 1)).plus(charge)
    assert Spending.from_record(spent.record()) == spent


def test_old_records_mean_what_they_meant() -> None:
    old = {"own_multiplier": 2.0, "min_survivors": 5, "colluders": 1, "delta_extra": 0.0, "guarantee": "local"}
    assert Charge.from_record(old) == Charge(2.0, 5, 1) == Charge.from_record({**old, "sample_rate": 1.0})
    assert Charge(2.0, 5, 1).record() == old
    assert len(Spending().plus(Charge(2.0, 5, 1)).record()) == 4
    assert Spending.from_record(["1", "2", "3", False]) == Spending(1, 2, 3)


@pytest.mark.parametrize("bad", [0, 1.0000001, -1, math.nan, "x", None, True])
def test_hostile_rates_in_records(bad: object) -> None:
    with pytest.raises(ConfigError):
        Charge.from_record({**COIN.record(), "sample_rate": bad})
    with pytest.raises((ConfigError, TypeError, ValueError)):
        Spending.from_record(["0", "0", "0", False, [[1.2, 2, bad, 1]]])


@pytest.mark.parametrize(
    "rows",
    [
        [[1.2, 2, 0.5, 0]],
        [[1.2, 2, 0.5, -1]],
        [[1.2, 2, 0.5, 1.0]],
        [[1.2, 2, 0.5, True]],
        [[0.0, 2, 0.5, 1]],
        [[math.nan, 2, 0.5, 1]],
        [[1.2, 0, 0.5, 1]],
        [[1.2, 2, 1.0, 1]],
        [[1.2, 2, 0.5]],
        [[1.2, 2, 0.5, 1], [1.2, 2, 0.5, 2]],
        [[1.3, 2, 0.5, 1], [1.2, 2, 0.5, 2]],
        [],
        3,
    ],
    ids=repr,
)
def test_damaged_sums_are_refused(rows: object) -> None:
    with pytest.raises((ConfigError, TypeError, ValueError)):
        Spending.from_record(["0", "0", "0", False, rows])


def test_sums_depend_neither_on_order_nor_on_steps() -> None:
    items = [Charge(1.0 + i / 8, 4, i % 3, 1e-9, SecretParticipation((1 + i % 4) / 4)) for i in range(12)]
    one, other, parts = Spending(), Spending(), [Spending(), Spending()]
    for i, item in enumerate(items):
        one = one.plus(item).plus(item)
        parts[i % 2] = parts[i % 2].plus(item, 2)
    for item in reversed(items):
        other = other.plus(item, 2)
    assert one == other == parts[0].joined(parts[1]) == parts[1].joined(parts[0])
    assert sum(count for _, count in one.sampled) == 2 * 9


def test_a_budget_ends_at_the_very_round_that_the_accountant_says() -> None:
    made, spent = PRVAccountant(), Spending()
    target = {"target_epsilon": 8.0, "target_delta": 1e-5}
    while True:
        done = sum(count for _, count in spent.sampled)
        refused = made.would_exceed(noise_multiplier=1.2, sample_rate=0.5, **target)
        assert spent.plus(COIN).within(BUDGET) == (not refused)
        if refused:
            break
        made.step(noise_multiplier=1.2, sample_rate=0.5)
        spent = spent.plus(COIN)
    assert done == 9, "sigma 1.2 gives epsilon 8.0028 for ten rounds (tests/oracles)"
    assert spent.epsilon("local", 1e-5) == pytest.approx(made.spent(target_delta=1e-5), rel=1e-9)
    assert not spent.plus(COIN, 11).within(BUDGET)
    full = Spending().plus(Charge(1.2, 3, 1), 9)
    assert spent.epsilon("local", 1e-5) < full.epsilon("local", 1e-5)
    assert spent.mu2("local") == pytest.approx(full.mu2("local")), "mu^2 is as if there were no coin"


def test_both_views_and_mixed_histories_compose() -> None:
    charge, plain = Charge(0.5, 10, 2, 0.0, HALF), Charge(2.0, 3, 1)
    made = PRVAccountant()
    made.step(noise_multiplier=0.5 * math.sqrt(8), sample_rate=0.5, count=3)
    central = Spending().plus(charge, 3)
    assert central.epsilon("central", 1e-5) == pytest.approx(made.spent(target_delta=1e-5), rel=1e-9)
    assert central.epsilon("local", 1e-5) > 3 * central.epsilon("central", 1e-5)
    mixed = Spending().plus(COIN, 3).plus(plain, 2)
    made = PRVAccountant()
    made.step(noise_multiplier=1.2, sample_rate=0.5, count=3)
    made.step(noise_multiplier=2.0, count=2)
    truth = made.spent(target_delta=1e-5)
    assert mixed.epsilon("local", 1e-5) == pytest.approx(truth, rel=1e-9)
    assert mixed.within(Budget("local", truth * (1 + 1e-6), 1e-5))
    assert not mixed.within(Budget("local", truth * (1 - 1e-4), 1e-5))


def test_delta_extra_comes_off_the_budget() -> None:
    spent = Spending().plus(COIN, 9)
    assert spent.within(BUDGET)
    assert not spent.plus(Charge(1e9, 3, 1, 9.9e-6)).within(BUDGET)
    assert Spending().plus(Charge(1e9, 3, 1, 1e-5, HALF)).epsilon("local", 1e-5) == math.inf
    assert not Spending().plus(Charge(1e9, 3, 1, 1e-5, HALF)).within(BUDGET)


@pytest.mark.parametrize("own", [0.0, math.inf, math.nan, 5e-324, 1e-200])
def test_a_coin_does_not_make_up_for_noise(own: float) -> None:
    spent = Spending().plus(Charge(own, 3, 1, participation=HALF))
    for view in ("local", "central"):
        assert not spent.within(Budget(view, 1e300, 0.3))
        assert spent.epsilon(view, 0.3) == math.inf


def failing(*_: object) -> float:
    raise MemoryError


@pytest.mark.parametrize("broken", [lambda *_: math.nan, lambda *_: math.inf, lambda *_: -math.inf, failing])
def test_a_failing_backend_refuses(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    spent, budget = Spending().plus(Charge(1.21, 3, 1, 0.0, HALF), 7), Budget("local", 8.5, 1.1e-5)
    accountant._proven.cache_clear()
    monkeypatch.setattr(PRVAccountant, "_epsilon", broken)
    assert not spent.within(budget)
    unamplified = Spending().plus(Charge(1.21, 3, 1), 7).epsilon("local", 1.3e-5)
    assert spent.epsilon("local", 1.3e-5) in (math.inf, pytest.approx(unamplified))
    monkeypatch.undo()
    accountant._proven.cache_clear()
    assert spent.within(budget)


def test_questions_between_answers_cost_nothing() -> None:
    charge = Charge(3.1, 3, 1, 1e-30, HALF)
    spent = Spending().plus(charge, 60)
    assert spent.within(BUDGET)
    for count in range(1, 61):
        assert calls(lambda: Spending().plus(charge, count).within(BUDGET)) < 1000  # noqa: B023
        assert Spending().plus(charge, count).within(BUDGET)


def test_answers_are_monotone_and_a_huge_count_is_refused_in_bounded_memory() -> None:
    kinds = ((2.0, 0.25, 4),)
    assert sampled_within(0.0, kinds, 3.0, 1e-5)
    assert sampled_within(0.0, ((2.0, 0.25, 1),), 3.0, 2e-5)
    peak, fits = peak_bytes(lambda: sampled_within(0.0, ((2.0, 0.25, 10**9),), 3.0, 1e-5))
    assert not fits
    assert peak < 250_000_000
    assert not sampled_within(0.0, ((2.0, 0.25, 2 * 10**9),), 3.0, 1e-6)
    assert not sampled_within(math.inf, kinds, 3.0, 1e-5)
    assert not sampled_within(math.nan, kinds, 3.0, 1e-5)


@pytest.mark.parametrize(
    ("rate", "sigma", "rounds", "delta"),
    [
        (7.4718467542976344e-15, 0.15697238741305375, 10**7, 1e-16),
        (7.52e-15, 0.15697, 10**7, 1e-12),
        (5.15e-12, 0.2376, 10**6, 1e-9),
    ],
)
def test_tiny_rates_are_not_free(rate: float, sigma: float, rounds: int, delta: float) -> None:
    """Divergences that were rounded to zero are no proof, nor is a Fourier transform below its own rounding.

    Reference: the test "some release lies above t", whose power under both neighbours bounds epsilon from below."""
    spent = Spending().plus(Charge(sigma, 1, 0, participation=SecretParticipation(rate)), rounds)
    truth = 0.0
    for threshold in 0.5 + np.arange(4000) * 0.01 * sigma:
        without = float(log_ndtr(-threshold / sigma))
        hit = math.exp(without) * (1 - rate) + rate * math.exp(float(log_ndtr(-(threshold - 1) / sigma)))
        power = -math.expm1(rounds * math.log1p(-hit)) if hit < 1 else 1.0
        if power > delta:
            truth = max(truth, math.log(power - delta) - without - math.log(rounds))
    assert truth > 0.01
    assert spent.epsilon("local", delta) >= truth
    assert not spent.within(Budget("local", 0.99 * truth, delta))
