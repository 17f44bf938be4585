"""The scorecard, on latents whose dynamics are known."""

from __future__ import annotations

import math

import pytest
import torch

from lensemble_flwr.errors import ContractViolation, DataError
from lensemble_flwr.model import (
    ActionHead,
    HeadSpec,
    LatentTrajectories,
    Scores,
    WorldModel,
    effective_rank,
    evaluate,
    fit_probe,
    forgetting,
    join,
    open_loop,
    preset,
    probe_rmse,
    relative_error,
    score,
)

SPEC = preset("tiny")
HEAD = HeadSpec("continuous", 2)


@pytest.fixture
def still() -> tuple[WorldModel, ActionHead]:
    """A model that knows constant velocity and nothing else."""
    model = WorldModel(SPEC)
    torch.nn.init.zeros_(model.predictor.out_proj.weight)
    return model, ActionHead(HEAD, SPEC)


def flights(accelerate: float, episodes: int = 3, frames: int = 12) -> LatentTrajectories:
    t = torch.arange(frames, dtype=torch.float32)[:, None]
    generator = torch.Generator().manual_seed(0)
    paths = [
        torch.randn(8, generator=generator)
        + t * torch.randn(8, generator=generator)
        + 0.5 * accelerate * t * t * torch.ones(8)
        for _ in range(episodes)
    ]
    return LatentTrajectories(torch.cat(paths), torch.zeros(episodes * frames, 2), (frames,) * episodes)


def test_constant_velocity_is_predicted_exactly(still) -> None:
    scores = score(*still, flights(0.0))
    assert scores.r1 < 1e-10
    assert scores.r5 < 1e-9


def test_error_of_an_accelerated_flight_is_known(still) -> None:
    """With acceleration a the k-step error is a k (k + 1) / 2 a coordinate."""
    data = flights(0.1)
    for k in (1, 5):
        predicted, truth = open_loop(*still, data, k)
        assert torch.allclose(truth - predicted, torch.full_like(truth, 0.1 * k * (k + 1) / 2), atol=1e-4)
        now = torch.cat([data.latents.view(3, 12, 8)[e, 1 : 12 - k] for e in range(3)])
        expected = (0.1 * k * (k + 1) / 2) ** 2 * truth.numel() / float((now - truth).square().sum())
        assert relative_error(*still, data, k) == pytest.approx(expected, rel=1e-3)


def test_windows_do_not_cross_episodes(still) -> None:
    data = flights(0.0, episodes=2, frames=7)
    predicted, _ = open_loop(*still, data, 5)
    assert len(predicted) == 2
    uneven = LatentTrajectories(data.latents, data.actions, (3, 11))
    assert uneven.starts(4).tolist() == list(range(3, 11))
    with pytest.raises(DataError):
        relative_error(*still, LatentTrajectories(data.latents, data.actions, (4, 4, 6)), 5)


def test_copy_last_itself_scores_one(still) -> None:
    model, head = still
    data = flights(0.0)
    frozen = LatentTrajectories(data.latents, data.actions, data.lengths)
    model.rollout = lambda before, now, actions: now[:, None].expand(-1, actions.shape[1], -1)  # type: ignore[method-assign]
    assert relative_error(model, head, frozen, 1) == pytest.approx(1)
    assert relative_error(model, head, frozen, 5) == pytest.approx(1)


def test_effective_rank() -> None:
    z = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    assert effective_rank(z) == pytest.approx(8, abs=0.02)
    assert effective_rank(1e-6 * z) == pytest.approx(8, abs=0.02)
    flat = z.clone()
    flat[:, 2:] = 0
    assert effective_rank(flat) == pytest.approx(2, abs=0.01)
    one, three = z.clone(), math.log(4) - 0.75 * math.log(3)
    one[:, 0] *= math.sqrt(3)
    one[:, 2:] = 0
    assert effective_rank(one) == pytest.approx(math.exp(three), abs=0.02)


def test_probe_reads_what_is_linear_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2000, 8, generator=generator)
    target = torch.stack([z[:, 0] - 2 * z[:, 3] + 5, torch.randn(2000, generator=generator)], dim=1)
    probe = fit_probe(z[:1000], target[:1000])
    r2 = probe.r2(z[1000:], target[1000:])
    assert r2[0] > 0.999
    assert r2[1] < 0.02
    with pytest.raises(ContractViolation):
        fit_probe(z, target[:10])


def test_probe_is_blind_to_the_frame_but_the_errors_are_not(still) -> None:
    data = flights(0.0)
    q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    state = torch.randn(len(data.latents), 1, generator=torch.Generator().manual_seed(2))
    one, other = fit_probe(data.latents, state, 1e-9), fit_probe(data.latents @ q, state, 1e-9)
    assert torch.allclose(one(data.latents), other(data.latents @ q), atol=1e-3)


def test_probe_rmse_compares_predicted_with_true_latents(still) -> None:
    data = flights(0.1)
    probe = fit_probe(data.latents, data.latents[:, :2] * 3, 1e-9)
    assert probe_rmse(*still, data, probe, column=1) == pytest.approx(3 * 0.1 * 15, rel=1e-2)


def test_action_sensitivity() -> None:
    torch.manual_seed(0)
    model, head = WorldModel(SPEC), ActionHead(HEAD, SPEC)
    actions = torch.randn(60, 2)
    z = [torch.randn(8), torch.randn(8)]
    with torch.no_grad():
        model.predictor.out_proj.weight.mul_(50)
        for t in range(1, 59):
            z.append(model.predict(z[-2], z[-1], head(actions[t])) * 0.5)
    data = LatentTrajectories(torch.stack(z).detach(), actions, (60,))
    assert score(model, head, data).action_sensitivity > 0.5


def test_means_over_bodies_and_forgetting(still) -> None:
    model, head = still
    data = {"a": flights(0.1), "b": flights(0.3)}
    mean = evaluate(model, {"a": head, "b": head}, data)
    each = [score(model, head, data[b]) for b in ("a", "b")]
    assert mean.r5 == pytest.approx((each[0].r5 + each[1].r5) / 2)
    assert forgetting(each[0], each[1]) == pytest.approx(each[1].r5 - each[0].r5)
    with pytest.raises(ContractViolation):
        evaluate(model, {"a": head}, data)
    assert isinstance(mean, Scores)


def test_join() -> None:
    both = join([flights(0.0), flights(0.1)])
    assert both.lengths == (12,) * 6
    assert len(both.latents) == 72
    with pytest.raises(ContractViolation):
        join([])
