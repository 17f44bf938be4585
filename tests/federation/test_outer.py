"""The outer step against torch.optim.SGD(nesterov=True), and byte for byte against itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import ContractViolation, NonDeterministicAggregation
from lensemble_flwr.federation.outer import checked_step, mean_of_sum, outer_step


@pytest.mark.parametrize("seed", range(5))
def test_equals_torch_sgd_nesterov_over_schedules_and_missing_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, b = rng.standard_normal(50), np.zeros(50)
    reference = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    mu = float(rng.uniform(0.1, 0.95))
    optimizer = torch.optim.SGD([reference], lr=1.0, momentum=mu, nesterov=True)
    for _ in range(60):
        if rng.random() < 0.2:
            continue  # a void or burnt round: nothing moves
        lr, delta = float(rng.uniform(0.05, 1.5)), rng.standard_normal(50)
        theta, b = outer_step(theta, b, delta, lr, mu)
        optimizer.param_groups[0]["lr"] = lr
        reference.grad = torch.from_numpy(-delta)
        optimizer.step()
    np.testing.assert_allclose(theta, reference.detach().numpy(), rtol=0, atol=1e-11)


def test_first_steps_in_closed_form() -> None:
    """G = 1 at lr .7, mu .9: -1.33, -3.227, -5.6343."""
    theta, b = np.zeros(1), np.zeros(1)
    seen = []
    for _ in range(3):
        theta, b = outer_step(theta, b, -np.ones(1), 0.7, 0.9)
        seen.append(theta[0])
    np.testing.assert_allclose(seen, [-1.33, -3.227, -5.6343], rtol=1e-12)


def test_plain_averaging_is_fedavg() -> None:
    deltas = np.random.default_rng(0).standard_normal((4, 7))
    theta, _ = outer_step(np.ones(7), np.zeros(7), deltas.mean(0), 1.0, 0.0)
    np.testing.assert_allclose(theta, (1 + deltas).mean(0), rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept_and_inputs_are_not_changed(dtype: type) -> None:
    params, b, delta = (np.ones(5, dtype) for _ in range(3))
    new, momentum = outer_step(params, b, delta, 0.5, 0.5)
    assert new.dtype == momentum.dtype == dtype
    assert (params == 1).all()
    assert (b == 1).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_bytes_do_not_depend_on_chunking(size: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = rng.standard_normal(size).astype(np.float32)
    b, delta = rng.standard_normal(size), rng.standard_normal(size)
    whole, part = outer_step(params, b, delta, 0.7, 0.9), outer_step(params, b, delta, 0.7, 0.9, block=block)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(whole, part, strict=True))


def test_bytes_do_not_depend_on_reply_order() -> None:
    rng = np.random.default_rng(1)
    updates = [rng.integers(-(2**20), 2**20, 64) for _ in range(4)]
    results = set()
    for order in itertools.permutations(range(4)):
        total = np.zeros(64, np.int64)
        for i in order:
            total += updates[i]
        theta, _ = checked_step(np.zeros(64, np.float32), np.zeros(64), total, 10, 4, 1.0, 0.0, round_index=0)
        results.add(theta.tobytes())
    assert len(results) == 1


def test_a_faulty_reducer_is_caught() -> None:
    calls = iter(range(10))

    def faulty(params: np.ndarray, momentum: np.ndarray, mean: np.ndarray, lr: float, mu: float, **kw: int):
        theta, b = outer_step(params, momentum, mean, lr, mu)
        theta[3] = np.nextafter(theta[3], np.float32(next(calls)) + 9)  # one bit, another time another way
        return theta, b

    def flaky(params: np.ndarray, momentum: np.ndarray, mean: np.ndarray, lr: float, mu: float, **kw: int):
        theta, b = outer_step(params, momentum, mean, lr, mu)
        if next(calls) % 2:
            theta[3] = np.nextafter(theta[3], np.float32(9))
        return theta, b

    zeros = np.zeros(8, np.float32), np.zeros(8), np.arange(8)
    with pytest.raises(NonDeterministicAggregation) as caught:
        checked_step(*zeros, 0, 1, 1.0, 0.0, round_index=7, step=flaky)
    assert caught.value.fields["round"] == 7
    checked_step(*zeros, 0, 1, 1.0, 0.0, round_index=7, step=faulty)  # the same wrong bytes twice cannot be told


@pytest.mark.parametrize(
    "bad",
    [
        (np.ones(3), np.ones(2), np.ones(3), 1.0, 0.0),
        (np.ones((1, 3)), np.ones((1, 3)), np.ones((1, 3)), 1.0, 0.0),
        (np.ones(3, int), np.ones(3), np.ones(3), 1.0, 0.0),
        (np.ones(3), np.ones(3), np.ones(3), float("nan"), 0.0),
        (np.ones(3), np.ones(3), np.ones(3), 1.0, 1.0),
        (np.ones(3), np.ones(3), np.array([1, np.nan, 1]), 1.0, 0.0),
        (np.ones(3, np.float32), np.ones(3), np.full(3, 1e300), 1.0, 0.0),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_input(bad: tuple) -> None:
    with pytest.raises(ContractViolation):
        outer_step(*bad)


def test_mean_of_sum() -> None:
    np.testing.assert_array_equal(mean_of_sum(np.array([8, -4]), 2, 2), [1.0, -0.5])
    with pytest.raises(ContractViolation):
        mean_of_sum(np.array([1.0]), 0, 1)
    with pytest.raises(ContractViolation):
        mean_of_sum(np.array([1]), 0, 0)
