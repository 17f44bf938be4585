"""The audit passes the release path as it is, and finds every defect that is planted into it, with as many releases.

The operating system's source is replaced by a fixed sequence of keys, so nothing here can flake; everything else is
the real path.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation import plan, release
from lensemble_flwr.federation.audit import (
    CANARIES,
    accounted_mu,
    audited_round,
    make_canary,
    observe,
    one_run_scores,
    statistics,
)
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.privacy import gaussian, mechanism
from lensemble_flwr.privacy.audit import LowerBounds, lower_bounds
from lensemble_flwr.privacy.noise import RoundedGaussian

DELTA, CONFIDENCE = 1e-5, 0.9999
D, COUNT = 32, 1200


@pytest.fixture(autouse=True)
def _fixed_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    calls = iter(range(10**9))
    monkeypatch.setattr(os, "urandom", lambda n: hashlib.shake_256(b"audit %d" % next(calls)).digest(n))
    plan.make_plan.cache_clear()
    yield
    plan.make_plan.cache_clear()


def audit(opened: RoundOpen, canary: str, view: str, rounds: int, count: int) -> tuple[LowerBounds, float]:
    off, on = statistics(opened, make_canary(canary, opened, rounds), view, count)
    return lower_bounds(off, on, DELTA, CONFIDENCE), accounted_mu(opened, view, rounds)


# --- planted defects: each takes (patch, RoundOpen) ---


def step_by_step(patch: pytest.MonkeyPatch) -> None:
    """The typed steps in place of the single pass, which gives the same integers (test_mechanism): a place to plant."""

    def steps(delta: Any, dimension: int, clip: float, std: float, entropy: Any, scale_log2: int, qmax: int) -> Any:
        zero = mechanism.zero_update
        clipped = zero(dimension, clip, std) if delta is None else release.clip_to_grid(delta, clip, std)
        return release.to_release(release.add_noise(clipped, std, entropy), scale_log2, qmax)

    patch.setattr(release, "private_release", steps)


def half_scale(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    patch.setattr(mechanism, "RoundedGaussian", lambda std, ratio: RoundedGaussian(std / 2, ratio))


def _without_clipping(delta: np.ndarray, clip_norm: float, noise_std: float) -> mechanism.ClippedUpdate:
    grid = mechanism.fine_grid_log2(clip_norm, noise_std)
    return mechanism._clipped(np.ldexp(delta.astype(np.float64), -grid).astype(np.int64), clip_norm, noise_std, grid)


def no_clip(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    step_by_step(patch)
    patch.setattr(release, "clip_to_grid", _without_clipping)


def clip_after_noise(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    step_by_step(patch)
    real = release.add_noise

    def noise_then_clip(update: Any, std: float, entropy: Any) -> mechanism.NoisedUpdate:
        done = real(update, std, entropy)
        norm = math.ldexp(float(np.linalg.norm(done.v.astype(np.float64))), done.g0_log2)
        v = np.rint(done.v * min(1.0, done.clip_norm / norm)).astype(np.int64)
        fields = {name: getattr(done, name) for name in mechanism.NoisedUpdate.__slots__}
        return mechanism.NoisedUpdate(mechanism._PASS, **{**fields, "v": v})

    patch.setattr(release, "clip_to_grid", _without_clipping)
    patch.setattr(release, "add_noise", noise_then_clip)


def same_key_in_two_rounds(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    calls = iter(range(10**9))
    patch.setattr(os, "urandom", lambda n: hashlib.shake_256(b"reused %d" % (next(calls) // 2)).digest(n))


def round_before_noise(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    step_by_step(patch)
    real = release.clip_to_grid

    def to_ring_grid(delta: np.ndarray, clip_norm: float, noise_std: float) -> mechanism.ClippedUpdate:
        clipped = real(delta, clip_norm, noise_std)
        shift = -opened.scale_log2 - clipped.g0_log2
        k = (clipped.k + (1 << (shift - 1))) >> shift << shift
        return mechanism._clipped(k, clip_norm, noise_std, clipped.g0_log2)

    patch.setattr(release, "clip_to_grid", to_ring_grid)


def noise_on_half_of_the_coordinates(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    step_by_step(patch)
    real = RoundedGaussian.add_to
    patch.setattr(RoundedGaussian, "add_to", lambda self, values, s: real(self, values[: values.size // 2], s))


def no_noise_on_a_zero_update(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    step_by_step(patch)
    real = RoundedGaussian.add_to
    patch.setattr(RoundedGaussian, "add_to", lambda self, values, s: real(self, values, s) if values.any() else None)


def share_of_m(patch: pytest.MonkeyPatch, opened: RoundOpen) -> None:
    patch.setattr(plan, "own_noise_std", lambda g, sigma, clip, m, k, people: sigma * clip / math.sqrt(m))
    plan.make_plan.cache_clear()


NORMAL: dict[str, Any] = {}
COARSE = {"participants": 400, "ring_bits": 16, "dimension": 61}
TRUSTING = {"participants": 5, "min_survivors": 4, "colluders": 2}

# defect, canary that is meant for it, view, rounds, sigma, federation, attempts with and as many without the canary
PLANTS = [
    (half_scale, "first", "local", 1, 0.5, NORMAL, COUNT // 2),
    (half_scale, "spread", "central", 1, 0.5, NORMAL, COUNT // 2),
    (half_scale, "first", "local", 3, 0.8, NORMAL, COUNT // 2),
    (no_clip, "long", "local", 1, 2.0, NORMAL, COUNT // 2),
    (clip_after_noise, "long", "local", 1, 2.0, NORMAL, COUNT // 2),
    (clip_after_noise, "long", "central", 1, 2.0, NORMAL, COUNT // 2),
    (same_key_in_two_rounds, "turns", "local", 2, 2.0, NORMAL, COUNT // 2),
    (round_before_noise, "steps", "local", 1, 1.0, COARSE, COUNT),
    (noise_on_half_of_the_coordinates, "last", "local", 1, 2.0, NORMAL, COUNT // 2),
    (noise_on_half_of_the_coordinates, "spread", "central", 1, 0.5, NORMAL, COUNT),
    (no_noise_on_a_zero_update, "first", "local", 1, 2.0, NORMAL, COUNT // 2),
    (share_of_m, "first", "central", 1, 0.4, TRUSTING, COUNT + COUNT // 2),
]


@pytest.mark.parametrize(
    ("defect", "canary", "view", "rounds", "sigma", "federation", "count"),
    PLANTS,
    ids=lambda value: value.__name__ if callable(value) else str(value) if isinstance(value, (str, int)) else "",
)
def test_a_planted_defect_is_found_and_the_real_path_passes(
    defect: Any,
    canary: str,
    view: str,
    rounds: int,
    sigma: float,
    federation: dict[str, Any],
    count: int,
) -> None:
    numbers = {"dimension": D, **federation}
    opened = audited_round(view, sigma, **numbers)
    found, mu = audit(opened, canary, view, rounds, count)
    assert found.mu < mu
    assert found.epsilon < gaussian.epsilon(mu, DELTA)
    with pytest.MonkeyPatch.context() as patch:
        defect(patch, opened)
        broken = audited_round(view, sigma, **numbers)
        found, mu_broken = audit(broken, canary, view, rounds, count)
    assert mu_broken == pytest.approx(mu), "what is claimed does not depend on the defect"
    assert found.mu > mu
    assert found.mu_epsilon > gaussian.epsilon(mu, DELTA)
    if defect in (no_clip, clip_after_noise, same_key_in_two_rounds, no_noise_on_a_zero_update):
        assert found.epsilon > gaussian.epsilon(mu, DELTA), "also without the assumption that it is Gaussian"


@pytest.mark.parametrize("view", ["local", "central"])
def test_what_is_accounted_is_what_the_ledger_charges(view: str) -> None:
    for guarantee in ("local", "central"):
        opened = audited_round(guarantee, 1.5, D, **TRUSTING)
        charged = plan.opened_charge(opened).mu2(view)
        assert accounted_mu(opened, view, 9) == pytest.approx(3 * math.sqrt(charged))
        if guarantee == view:
            assert accounted_mu(opened, view, 9) == pytest.approx(3 / 1.5)


@pytest.mark.parametrize("name", CANARIES)
def test_canaries_are_no_longer_than_they_say(name: str) -> None:
    opened = audited_round("local", 1.0, 61, participants=400, ring_bits=16)
    canary = make_canary(name, opened, 3)
    assert len(canary.updates) == 3
    norms = [float(np.linalg.norm(x.astype(np.float64))) for x in canary.updates]
    if name == "long":
        assert min(norms) > 1e5 * opened.clip_norm
    else:
        assert all(0.9 * opened.clip_norm < norm <= opened.clip_norm * (1 + 1e-6) for norm in norms)
    assert (canary.updates[0] == canary.updates[1]).all() == (name != "turns")
    with pytest.raises(ConfigError):
        make_canary("none", opened)


def test_the_observer_sees_the_clipped_update_and_the_noise_of_its_view() -> None:
    """Standard error of a std over 20000 coordinates is .5 %; 5 of them are allowed."""
    for view, members in (("local", 1), ("central", 2)):
        opened = audited_round("local", 2.0, 20_000)
        x = np.zeros(20_000, np.float32)
        x[0] = 1e9
        seen = observe(opened, view, [x])
        assert seen[1:].std() == pytest.approx(math.sqrt(members) * opened.noise_std, rel=0.025)
        assert abs(seen[0] - opened.clip_norm) < 6 * math.sqrt(members) * opened.noise_std


def test_one_run_scores_follow_the_coins() -> None:
    opened = audited_round("central", 0.25, 40, participants=40, min_survivors=40)
    coins = np.arange(39) % 2 == 0
    scores = one_run_scores(opened, coins)
    assert scores.shape == (39,)
    assert scores[coins].min() > scores[~coins].max(), "at sigma = 1/4 they are 4 std apart"
