"""Clipping to the last bit, the grids, and the one-way road to a release."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation
from lensemble_flwr.privacy import mechanism
from lensemble_flwr.privacy.mechanism import (
    ClippedUpdate,
    DPConfig,
    NoisedUpdate,
    Release,
    add_gaussian_noise,
    add_noise,
    clip_delta,
    clip_to_grid,
    encode_exact,
    fine_grid_log2,
    own_noise_std,
    privatize,
    to_release,
    zero_update,
)
from lensemble_flwr.privacy.noise import OsEntropy, ReplayEntropy
from tests.effort import calls, peak_bytes

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def exact_square(values) -> Fraction:
    """Squared norm in rational arithmetic."""
    return sum((Fraction(float(v)) ** 2 for v in values), Fraction(0))


def vectors(dtype, largest):
    width, largest = (32, float(np.float32(largest))) if dtype == np.float32 else (64, largest)
    element = st.floats(-largest, largest, width=width, allow_nan=False)
    return st.lists(element, min_size=1, max_size=40).map(lambda v: np.array(v, dtype))


# --- configuration ---


@pytest.mark.parametrize("field", ["clip_norm", "noise_multiplier", "target_epsilon", "target_delta"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, "1", None, True, 5e300])
def test_config_refuses(field, bad):
    """Regression F3: NaN clip norm, infinite sigma, negative epsilon."""
    good = {"clip_norm": 1.0, "noise_multiplier": 1.0, "target_epsilon": 8.0, "target_delta": 1e-5}
    DPConfig(**good)
    if field == "target_epsilon" and bad == 5e300:
        return
    with pytest.raises(ConfigError):
        DPConfig(**{**good, field: bad})


def test_config_edges():
    for bad in (
        {"clip_norm": 0.0},
        {"target_epsilon": 0.0},
        {"target_delta": 0.0},
        {"target_delta": 5.0},
        {"enabled": 1},
    ):
        with pytest.raises(ConfigError):
            DPConfig(**{"clip_norm": 1, "noise_multiplier": 0, "target_epsilon": 8, "target_delta": 1e-5, **bad})


def test_own_noise_std():
    assert own_noise_std("local", 0.5, 2.0, 3, 1) == 1.0
    assert own_noise_std("local", 0.5, 2.0, 2, 1) == 1.0
    assert own_noise_std("central", 0.5, 2.0, 5, 1) == 0.5
    assert own_noise_std("local", 0.5, 2.0, 5, 1, 4) == 2.0  # a person at 4 participants, seen one by one
    assert own_noise_std("central", 0.5, 2.0, 5, 1, 4) == 2.0  # and in a sum with 4 unknown noises: no better
    assert own_noise_std("central", 0.5, 2.0, 17, 1, 2) == 0.5
    for bad in (("central", 0.5, 2.0, 5, 1, 5), ("local", 0.5, 2.0, 5, 1, 0), ("local", 0.5, 2.0, 5, 1, 1.0)):
        with pytest.raises(ConfigError):
            own_noise_std(*bad)
    bad_calls = [
        ("central", 1.0, 1.0, 2, 1),
        ("central", 1.0, 1.0, 3, 0),
        ("local", 1.0, 1.0, 3, 3),
        ("local", 1.0, 1.0, 3, -1),
        ("local", 1.0, 1.0, 3.0, 1),
        ("local", 0.0, 1.0, 3, 1),
        ("local", math.nan, 1.0, 3, 1),
        ("local", 1.0, 0.0, 3, 1),
        ("both", 1.0, 1.0, 3, 1),
    ]
    for call in bad_calls:
        with pytest.raises(ConfigError):
            own_noise_std(*call)


# --- clip_delta ---


@settings(deadline=None, max_examples=300)
@given(vectors(np.float32, 1e30) | vectors(np.float64, 1e300), st.floats(1e-20, 1e20))
def test_clip_bound_is_exact(x, clip):
    """Regression F1: never above C in real numbers, also for a handful of coordinates."""
    before = exact_square(x)
    delta = torch.from_numpy(x.copy())
    clipped, norm = clip_delta(delta, clip)
    after, bound = exact_square(clipped.numpy()), Fraction(clip) ** 2
    assert after <= bound
    assert norm <= clip
    assert np.array_equal(delta.numpy(), x)
    if before <= bound:
        assert np.array_equal(clipped.numpy(), x)
    elif after > Fraction(1, 10**30):
        assert after >= bound * (1 - Fraction(1, 10**6))
        assert norm == pytest.approx(math.sqrt(after), rel=1e-12)
    assert (np.sign(clipped.numpy()) * np.sign(x) >= 0).all()
    assert (np.abs(clipped.numpy()) <= np.abs(x)).all()


def test_clip_bound_is_exact_on_the_edge():
    for x, clip in (([3.0, 4.0], 5.0), ([0.1, 0.2, 0.3], float(np.sqrt(0.14))), ([1 / 3] * 9, 1.0)):
        for dtype in (torch.float32, torch.float64):
            delta = torch.tensor(x, dtype=dtype)
            for c in (math.nextafter(clip, 0), clip, math.nextafter(clip, 9)):
                clipped, norm = clip_delta(delta, c)
                fits = exact_square(delta.tolist()) <= Fraction(c) ** 2
                assert torch.equal(clipped, delta) == fits
                assert exact_square(clipped.tolist()) <= Fraction(c) ** 2
                assert norm <= c
    clipped, norm = clip_delta(torch.tensor([3.0, 4.0]), 5.0)
    assert norm == 5.0


@pytest.mark.parametrize("size", [10**5, 10**6, 10**7])
def test_clip_bound_at_size(size):
    """Regression F1: a float32 norm is 3e-4 off at 1e7 coordinates."""
    generator = torch.Generator().manual_seed(0)
    for delta in (torch.randn(size, generator=generator), torch.full((size,), 1e-2), torch.full((size,), 0.7)):
        clipped, norm = clip_delta(delta, 0.5)
        assert clipped.dtype == torch.float32
        true = math.sqrt(math.fsum(np.square(clipped.numpy().astype(np.float64)).reshape(-1, 100).sum(1)))
        assert true <= 0.5
        assert torch.linalg.vector_norm(clipped, dtype=torch.float64).item() <= 0.5
        assert float(np.linalg.norm(clipped.numpy().astype(np.float64))) <= 0.5
        assert norm <= 0.5
        assert 0.5 * (1 - 2e-7) < true
        assert norm == pytest.approx(true, rel=1e-12)
        again, norm_again = clip_delta(clipped, 0.5)
        assert torch.equal(again, clipped)
        assert norm_again == norm


def test_clip_bound_in_any_summation_order():
    """Equal coordinates make a running float64 sum drift the most."""
    clipped, _ = clip_delta(torch.full((10**7,), 0.1), 1.0)
    assert float(np.cumsum(np.square(clipped.numpy().astype(np.float64)))[-1]) <= 1.0


def test_overflowing_values_are_clipped_not_lost():
    """Regression F2: 1000 x 1e30 used to come out as zeros with norm 0."""
    for value, dtype in (
        (1e30, torch.float32),
        (-3e38, torch.float32),
        (1e200, torch.float64),
        (1.7e308, torch.float64),
    ):
        clipped, norm = clip_delta(torch.full((1000,), value, dtype=dtype), 2.0)
        assert norm == pytest.approx(2.0, rel=1e-6)
        assert torch.allclose(clipped, torch.full((1000,), math.copysign(2 / math.sqrt(1000), value), dtype=dtype))
    tiny, norm = clip_delta(torch.full((4,), 1e-250, dtype=torch.float64), 1e-90)
    assert norm == pytest.approx(2e-250, rel=1e-12)
    assert tiny[0] == 1e-250
    assert clip_delta(torch.full((4,), 5e-324, dtype=torch.float64), 1.0)[1] == 1e-323


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 70_000])
def test_non_finite_input_is_a_typed_error(bad, dtype, place):
    delta = torch.zeros(70_001, dtype=dtype)
    delta[-1] = 1.0
    delta[place] = bad
    for call in (clip_delta, lambda d, c: add_gaussian_noise(d, c, 1.0)):
        with pytest.raises(ContractViolation) as caught:
            call(delta, 1.0)
        assert caught.value.reason == "non_finite"
    if dtype in (torch.float32, torch.float64):
        with pytest.raises(ContractViolation):
            clip_to_grid(delta.numpy(), 1.0, 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (), (0,)])
def test_clip_keeps_shape_dtype_and_is_pure(dtype, shape):
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    clipped, norm = clip_delta(delta, 0.25)
    assert clipped.shape == delta.shape
    assert clipped.dtype == dtype
    assert not clipped.requires_grad
    assert exact_square(clipped.double().flatten().tolist()) <= Fraction(1, 16)
    assert norm == pytest.approx(float(clipped.double().norm()), rel=1e-12)
    assert torch.equal(clip_delta(delta, 0.25)[0], clipped)
    if delta.numel() > 1:
        assert norm > 0.24
    kept, _ = clip_delta(delta, 1e4)
    assert torch.equal(kept, delta)
    assert kept.data_ptr() != delta.data_ptr() or not delta.numel()


def test_clip_refuses_what_is_no_update():
    for bad in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.complex64), np.ones(3), [1.0]):
        with pytest.raises(ContractViolation):
            clip_delta(bad, 1.0)
    for bad in (0.0, -1.0, math.nan, math.inf, None):
        with pytest.raises(ConfigError):
            clip_delta(torch.ones(3), bad)


def test_strided_views():
    base = torch.randn(50, 60, generator=torch.Generator().manual_seed(2))
    view = base.t()[::2]
    assert torch.equal(clip_delta(view, 1.0)[0], clip_delta(view.contiguous(), 1.0)[0])
    matrix = base.numpy()[:, 3]
    assert np.array_equal(clip_to_grid(matrix, 1.0, 1.0).k, clip_to_grid(matrix.copy(), 1.0, 1.0).k)


# --- noise on tensors ---


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_noise_has_the_right_law(dtype):
    """n = 2e5: a std off by 1.5 % would be 9 standard errors away."""
    delta = torch.zeros(200_000, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    noised = add_gaussian_noise(delta, 2.0, 1.5, generator)
    assert noised.dtype == dtype
    z = noised.double().numpy() / 3.0
    assert abs(z.mean()) < 4.5 / math.sqrt(z.size)
    assert abs(z.var() - 1) < 4.5 * math.sqrt(2 / z.size)
    if dtype in (torch.float32, torch.float64):
        assert stats.kstest(z, "norm").pvalue > 1e-4


def test_generator_means_replay_and_none_means_fresh():
    delta = torch.zeros(2, 100)
    same = [add_gaussian_noise(delta, 1.0, 1.0, torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*same)
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(add_gaussian_noise(delta, 1.0, 1.0, generator), same[0])
    assert not torch.equal(add_gaussian_noise(delta, 1.0, 1.0, generator), same[0])
    assert not torch.equal(add_gaussian_noise(delta, 1.0, 1.0), add_gaussian_noise(delta, 1.0, 1.0))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    add_gaussian_noise(delta, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), before)
    for bad in (0, "x", np.random.default_rng(0)):
        with pytest.raises(ContractViolation):
            add_gaussian_noise(delta, 1.0, 1.0, bad)


def test_noised_values_lie_on_the_grid_whatever_the_input():
    """The low bits of the release must not depend on those of the input (Mironov 2012)."""
    delta = torch.tensor([1 / 3, 1e-9, -0.7, 0.0] * 200, dtype=torch.float64)
    noised = add_gaussian_noise(delta, 20.0, 0.5, torch.Generator().manual_seed(5))
    steps = noised * 2.0 ** -fine_grid_log2(20.0, 10.0)
    assert torch.equal(steps, steps.round())
    assert (steps % 2).abs().sum() > 0


def test_zero_noise_and_unclipped_input():
    delta = torch.randn(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(add_gaussian_noise(delta, 1.0, 0.0), delta)
    with pytest.raises(ContractViolation, match="clip_delta"):
        add_gaussian_noise(torch.full((3,), 1e30), 1.0, 1.0)


def test_privatize():
    delta = torch.full((1000,), 1.0)
    on = DPConfig(1.0, 0.5, 8.0, 1e-5)
    private, norm = privatize(delta, on, torch.Generator().manual_seed(6))
    clipped, clipped_norm = clip_delta(delta, 1.0)
    assert norm == clipped_norm
    expected = add_gaussian_noise(clipped, 1.0, 0.5, torch.Generator().manual_seed(6))
    assert torch.equal(private, expected)
    same, norm = privatize(delta, DPConfig(1.0, 0.5, 8.0, 1e-5, enabled=False))
    assert same is delta
    assert norm == pytest.approx(math.sqrt(1000))
    with pytest.raises(ContractViolation):
        privatize(delta, {"clip_norm": 1.0})


def test_a_failing_os_source_stops_everything(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda n: b"")
    with pytest.raises(ConfigError):
        add_gaussian_noise(torch.zeros(3), 1.0, 1.0)
    update = zero_update(3, 1.0, 1.0)
    with pytest.raises(ConfigError):
        add_noise(update, 1.0, OsEntropy())
    assert not update.k.any(), "not used up"


# --- the grids ---


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-50, 1e50), st.floats(1e-11, 1e6))
def test_fine_grid(clip, ratio):
    std = clip * ratio
    g0 = Fraction(2) ** fine_grid_log2(clip, std)
    assert g0 * 2**40 <= Fraction(clip) + 10 * Fraction(std)
    assert g0 * 2**20 <= Fraction(std)
    assert 2 * g0 * 2**40 > Fraction(clip) + 10 * Fraction(std) or 2 * g0 * 2**20 > Fraction(std)


def test_fine_grid_refuses():
    with pytest.raises(ConfigError, match="too small"):
        fine_grid_log2(1.0, 1e-14)
    for clip, std in ((0.0, 1.0), (math.nan, 1.0), (1.0, math.nan), (1.0, -1.0), (1.0, math.inf), (1e200, 1.0)):
        with pytest.raises(ConfigError):
            fine_grid_log2(clip, std)
    assert fine_grid_log2(1.0, 0.0) == -40


@settings(deadline=None, max_examples=200)
@given(vectors(np.float32, 1e30) | vectors(np.float64, 1e300), st.floats(1e-10, 1e10), st.floats(1e-3, 100.0))
def test_clipped_integers_keep_the_bound(x, clip, ratio):
    made = clip_to_grid(x, clip, clip * ratio)
    g0 = Fraction(2) ** made.g0_log2
    total = sum(int(v) ** 2 for v in made.k) * g0 * g0
    assert total <= Fraction(clip) ** 2
    assert made.k.dtype == np.int64
    if exact_square(x) <= Fraction(clip) ** 2 * Fraction(999, 1000):
        for value, k in zip(x, made.k, strict=True):
            assert int(k) == int(Fraction(float(value)) / g0), "truncation toward zero of the value itself"
    else:
        assert total >= Fraction(clip) ** 2 * Fraction(99, 100)


def test_clipped_integers_at_size():
    for x in (np.full(10**7, 0.3, np.float32), np.random.default_rng(0).standard_normal(10**7).astype(np.float32)):
        made = clip_to_grid(x, 1.0, 1.0)
        high, low = np.divmod(made.k, 1 << 20)
        squares = [
            (int((a * a).sum()) << 40) + (int((a * b).sum()) << 21) + int((b * b).sum())
            for a, b in zip(high.reshape(100, -1), low.reshape(100, -1), strict=True)
        ]
        norm = Fraction(sum(squares)) * Fraction(2) ** (2 * made.g0_log2)
        assert Fraction(999999, 1000000) < norm <= 1


def test_ring_rounding_is_exact_half_up_and_clamped():
    std = 1.0
    update = add_noise(zero_update(50_000, 1.0, std), std, ReplayEntropy(1))
    shift = -20 - update.g0_log2
    assert shift > 0
    half = 1 << (shift - 1)
    values = update.v.copy()
    values[:4] = [half, -half, half - 1, -half - 1]
    object.__setattr__(update, "v", values)
    release = to_release(update, 20, 2**31 - 1)
    assert release.q[:4].tolist() == [1, 0, 0, -1]
    expected = [math.floor(Fraction(int(v), 1 << shift) + Fraction(1, 2)) for v in values]
    assert release.q.tolist() == expected
    assert release.q.dtype == np.int32
    assert release.ring.step == 2.0**-20
    values[:2] = [1 << 60, -(1 << 60)]
    clamped = to_release(update, 20, 12_000_000)
    assert clamped.q[:2].tolist() == [12_000_000, -12_000_000]


def test_ring_that_does_not_fit_is_refused():
    update = add_noise(zero_update(10, 1.0, 1.0), 1.0, ReplayEntropy(1))
    to_release(update, 20, 11 << 20)
    with pytest.raises(ConfigError, match="hold"):
        to_release(update, 20, (11 << 20) - 1)
    for scale, qmax in ((20.0, 1 << 25), (20, 0), (20, 1 << 31), (20, True), (2000, 1 << 25)):
        with pytest.raises(ConfigError):
            to_release(update, scale, qmax)


def test_sum_of_releases_has_the_right_variance():
    """n = 6 x 1e5: a variance off by 3 % would be 6 standard errors away."""
    total = np.zeros(100_000, np.int64)
    for i in range(6):
        total += to_release(add_noise(zero_update(100_000, 1.0, 0.5), 0.5, ReplayEntropy(i)), 20, 2**28).q
    z = total * 2.0**-20 / (0.5 * math.sqrt(6))
    assert abs(z.var() - 1) < 4.5 * math.sqrt(2 / z.size)
    assert stats.kstest(z, "norm").pvalue > 1e-4


# --- one way ---


def noised(entropy=None, std=1.0):
    return add_noise(zero_update(100, 1.0, std), std, entropy or OsEntropy())


def test_no_type_can_be_made_directly():
    for kind in (ClippedUpdate, NoisedUpdate, Release):
        for arguments in ((), (None,), (object(),)):
            with pytest.raises(ContractViolation):
                kind(*arguments)
        with pytest.raises(ContractViolation):
            kind(q=np.zeros(3, np.int64), private=True, entropy="csprng")
        with pytest.raises(ContractViolation):
            type("Sub", (kind,), {})


def test_the_order_is_enforced():
    clipped, done = zero_update(100, 1.0, 1.0), noised()
    release = to_release(done, 20, 1 << 24)
    for bad in (None, np.zeros(3, np.int64), torch.zeros(3), done, release):
        with pytest.raises(ContractViolation):
            add_noise(bad, 1.0, OsEntropy())
    for bad in (None, np.zeros(3, np.int64), clipped, release):
        with pytest.raises(ContractViolation):
            to_release(bad, 20, 1 << 24)
    with pytest.raises(ContractViolation, match="std"):
        add_noise(clipped, 0.5, OsEntropy())
    for bad in (None, torch.Generator(), os.urandom):
        with pytest.raises(ContractViolation):
            add_noise(clipped, 1.0, bad)
    assert clipped.k.size == 100, "not used up by refused calls"


def test_an_update_is_noised_once():
    clipped = zero_update(100, 1.0, 1.0)
    add_noise(clipped, 1.0, OsEntropy())
    with pytest.raises(ContractViolation, match="used up"):
        add_noise(clipped, 1.0, OsEntropy())
    with pytest.raises(ContractViolation):
        _ = clipped.k


def test_releasing_twice_gives_the_same():
    update = noised()
    assert np.array_equal(to_release(update, 20, 1 << 24).q, to_release(update, 20, 1 << 24).q)


def test_types_are_closed():
    clipped, done = zero_update(100, 1.0, 1.0), noised()
    release = to_release(done, 20, 1 << 24)
    for value in (clipped, done, release):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ContractViolation):
                act(value)
        with pytest.raises(ContractViolation):
            value.entropy = "csprng"
        with pytest.raises(ContractViolation):
            del value.dimension
        assert repr(value) == f"<{type(value).__name__}>"
    for array in (clipped.k, done.v, release.q):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_labels():
    fresh, replayed, bare = noised(), noised(ReplayEntropy(0)), noised(std=0.0)
    assert [u.entropy for u in (fresh, replayed, bare)] == ["csprng", "replay", "none"]
    releases = [to_release(u, 20, 1 << 24) for u in (fresh, replayed, bare)]
    releases.append(encode_exact(np.zeros(3, np.float32), 20, 1 << 20, OsEntropy()))
    assert [r.private for r in releases] == [True, True, False, False]
    assert [r.claimable for r in releases] == [True, False, False, False]


def test_zero_update_looks_like_any_other():
    zero, other = zero_update(5, 1.0, 2.0), clip_to_grid(np.ones(5), 1.0, 2.0)
    assert (zero.g0_log2, zero.noise_std, zero.clip_norm, zero.dimension) == (
        other.g0_log2, other.noise_std, other.clip_norm, other.dimension)  # fmt: skip
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ContractViolation):
            zero_update(bad, 1.0, 1.0)


def test_stored_release():
    release = to_release(noised(), 20, 1 << 24)
    stored = release.to_bytes()
    again = Release.from_bytes(stored, hashlib.sha256(stored).digest())
    assert np.array_equal(again.q, release.q)
    for name in ("ring", "private", "entropy", "claimable", "dimension"):
        assert getattr(again, name) == getattr(release, name)
    with pytest.raises(ArtifactError):
        Release.from_bytes(stored, hashlib.sha256(b"").digest())
    for damaged in (
        stored[:-1],
        stored[:10],
        b"",
        b"XXXX" + stored[4:],
        stored + b"1234",
        stored[:4] + b"\7" + stored[5:],
    ):
        with pytest.raises(ArtifactError):
            Release.from_bytes(damaged, hashlib.sha256(damaged).digest())


def test_clip_to_grid_refuses_what_is_no_update():
    for bad in ([1.0], np.ones((2, 2)), np.ones(0), np.ones(3, np.int64), np.ones(3, np.float16), torch.ones(3)):
        with pytest.raises(ContractViolation):
            clip_to_grid(bad, 1.0, 1.0)


# --- without privacy ---


@settings(deadline=None, max_examples=100)
@given(vectors(np.float32, 8.0) | vectors(np.float64, 8.0), st.integers(0, 30))
def test_encode_exact_rounds_to_a_neighbour(x, seed):
    release = encode_exact(x, 10, 8 << 10, ReplayEntropy(seed), value_range=8.0)
    scaled = [Fraction(float(v)) * 1024 for v in x]
    for value, q in zip(scaled, release.q.tolist(), strict=True):
        assert math.floor(value) <= q <= math.ceil(value)


def test_encode_exact_is_unbiased():
    """n = 2e5: a bias of .006 steps would be 5 standard errors away."""
    release = encode_exact(np.full(200_000, 0.3, np.float64), 0, 100, ReplayEntropy(0))
    assert abs(release.q.mean() - 0.3) < 4.5 * math.sqrt(0.21 / 200_000)


def test_encode_exact_refuses():
    x = np.array([0.5, -2.0], np.float32)
    encode_exact(x, 10, 2 << 10, OsEntropy())
    with pytest.raises(ConfigError, match="range"):
        encode_exact(x, 10, (2 << 10) - 1, OsEntropy())
    with pytest.raises(ConfigError, match=r"secagg\.range"):
        encode_exact(x, 10, 2 << 10, OsEntropy(), value_range=1.0)
    for bad in (0.0, -1.0, math.nan, 3.0):
        with pytest.raises(ConfigError):
            encode_exact(x, 10, 2 << 10, OsEntropy(), value_range=bad)
    for bad in (math.nan, math.inf):
        with pytest.raises(ContractViolation):
            encode_exact(np.array([bad]), 10, 2 << 10, OsEntropy())
    with pytest.raises(ContractViolation):
        encode_exact(x, 10, 2 << 10, None)


# --- cost ---


def test_memory_and_time_are_linear_and_small():
    x = np.random.default_rng(0).standard_normal(2_000_000).astype(np.float32)
    to_release(add_noise(clip_to_grid(x[:10], 1.0, 1.0), 1.0, OsEntropy()), 20, 1 << 24)
    peak, _ = peak_bytes(lambda: to_release(add_noise(clip_to_grid(x, 1.0, 1.0), 1.0, OsEntropy()), 20, 1 << 24))
    assert peak < 2 * 8 * x.size + 12_000_000, "k and q, and nothing else of that size"
    made = calls(lambda: to_release(add_noise(clip_to_grid(x, 1.0, 1.0), 1.0, OsEntropy()), 20, 1 << 24))
    assert made < x.size / 100, "no loop over coordinates"


def test_module_does_not_import_torch():
    import subprocess
    import sys

    code = (
        "import sys, lensemble_flwr.privacy.claims\n"
        "assert not {'torch', 'flwr', 'lensemble_flwr.secagg'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mechanism.TAIL == 10.0
