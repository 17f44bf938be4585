"""Local training: pure in its values, persistent where it should be, and a closed path that equals the generic one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lensemble_flwr.errors import ArtifactError, ContractViolation, DataError
from lensemble_flwr.gauge import FrameAnchor, FrameSurface, align
from lensemble_flwr.model import (
    InnerSpec,
    InnerState,
    LatentTrajectories,
    Objective,
    ObjectiveSpec,
    ParameterLayout,
    WarmStart,
    adapter_problem,
    encode_trajectories,
    frame_surface,
    inner_steps,
    relative_error,
)
from lensemble_flwr.model.inner import window_order
from tests.model.blobs import CONTINUOUS, blobs

GRAVITY = 0.02
ONE_STEP = ObjectiveSpec(rollout_weight=0, segment=3, lambda_sig=0)


@pytest.fixture(scope="module")
def local():
    return blobs(CONTINUOUS, 6, 40, GRAVITY)


def start(warm: WarmStart, surface: str):
    model = warm.build_model()
    layout = ParameterLayout.of(model, surface)
    return model, layout, layout.flatten(model), InnerState.start(warm.head("push"))


def run(warm, surface, data, state=None, steps=5, spec=None, goal=None, theta=None, **extra):
    model, layout, base, fresh = start(warm, surface)
    return inner_steps(
        model,
        layout,
        base if theta is None else theta,
        data,
        state or fresh,
        steps=steps,
        spec=spec or InnerSpec(batch_size=8),
        objective=Objective(goal or ObjectiveSpec()),
        sketch_seed=3,
        **extra,
    )


def test_landmark_norm_trains_and_is_folded_away(warm, local) -> None:
    landmarks = blobs(CONTINUOUS, 6, 41).frames[:32]
    model, layout, theta, state = start(warm, "full")
    units = model.encoder.projected(landmarks)
    anchor = FrameAnchor(landmarks, model.encode(landmarks), tolerance=0)
    goal = Objective(ObjectiveSpec(lambda_anc=0.1), anchor)
    extra = {"steps": 6, "spec": InnerSpec(lr=3e-3, batch_size=8), "objective": goal, "sketch_seed": 3}
    result = inner_steps(model, layout, theta, local, state, landmarks=landmarks, **extra)
    assert result.finite
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in warm.build_model().named_parameters()}
    after = model.encoder.projected(landmarks)
    assert torch.allclose(after.mean(dim=0), units.mean(dim=0), atol=1e-2)  # what the normaliser holds
    plain = inner_steps(warm.build_model(), layout, theta, local, state, **extra)
    assert not np.array_equal(plain.theta, result.theta)
    again = inner_steps(warm.build_model(), layout, theta, local, state, landmarks=landmarks, **extra)
    assert np.array_equal(again.theta, result.theta)


def test_landmark_norm_needs_the_anchors_landmarks(warm, local) -> None:
    landmarks = blobs(CONTINUOUS, 6, 41).frames[:32]
    model, layout, theta, state = start(warm, "full")
    goal = Objective(ObjectiveSpec(lambda_anc=0.1), FrameAnchor(landmarks, model.encode(landmarks), tolerance=0))
    with pytest.raises(ContractViolation, match="landmarks"):
        inner_steps(
            *(model, layout, theta, local, state),
            **{"steps": 1, "spec": InnerSpec(), "objective": goal, "sketch_seed": 3, "landmarks": landmarks.clone()},
        )
    model.encode(local.frames[:2])  # the workspace is usable again


@pytest.mark.parametrize("surface", ["full", "predictor", "adapter"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_trains_and_leaves_its_arguments_alone(warm, local, surface, optimizer) -> None:
    model, layout, theta, state = start(warm, surface)
    before, head = theta.copy(), {n: t.clone() for n, t in state.head.items()}
    frozen = {n: t.clone() for n, t in model.state_dict().items() if n not in layout.names}
    spec = InnerSpec(optimizer=optimizer, lr=1e-3 if optimizer == "adamw" else 0.05, batch_size=8)
    result = inner_steps(
        *(model, layout, theta, local, state),
        **{"steps": 12, "spec": spec, "objective": Objective(ObjectiveSpec()), "sketch_seed": b"s"},
    )
    assert np.array_equal(theta, before)
    assert result.theta.dtype == np.float32
    assert result.finite
    assert not np.array_equal(result.theta, theta)
    assert np.array_equal(layout.flatten(model), result.theta)  # the workspace holds the trained weights
    assert all(torch.equal(model.state_dict()[n], t) for n, t in frozen.items())
    assert all(torch.equal(result.state.head[n], t) for n, t in head.items())  # head_lr 0: frozen
    assert result.state.drawn == state.drawn + 12 * 8
    assert bool(result.state.counts) == (optimizer == "adamw")
    assert all(p.requires_grad for p in model.parameters())


def test_learning_lowers_the_loss(warm, local) -> None:
    result = run(warm, "predictor", local, steps=60, spec=InnerSpec(batch_size=0, lr=2e-3), goal=ONE_STEP)
    assert result.last_loss < 0.8 * result.first_loss


def test_repeatable_and_independent_of_global_random_state(warm, local) -> None:
    torch.manual_seed(1)
    one = run(warm, "full", local, spec=InnerSpec(batch_size=8, deterministic=True))
    torch.manual_seed(2)
    two = run(warm, "full", local, spec=InnerSpec(batch_size=8, deterministic=True))
    assert np.array_equal(one.theta, two.theta)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("surface", ["full", "predictor"])
def test_two_calls_with_kept_state_equal_one_long_call(warm, local, surface) -> None:
    spec = InnerSpec(batch_size=8, head_lr=1e-3)
    whole = run(warm, surface, local, steps=9, spec=spec)
    first = run(warm, surface, local, steps=4, spec=spec)
    kept = InnerState.from_bytes(first.state.to_bytes())  # as if another process went on
    second = run(warm, surface, local, kept, steps=5, spec=spec, theta=first.theta, first_step=4)
    assert np.allclose(second.theta, whole.theta, atol=1e-6)
    assert second.state.drawn == whole.state.drawn
    assert second.state.counts == whole.state.counts
    fresh = run(warm, surface, local, first.state.without_moments(), steps=5, spec=spec, theta=first.theta)
    assert not np.allclose(fresh.theta, whole.theta, atol=1e-5)


@pytest.mark.parametrize(("surface", "optimizer", "batch"), [("full", "adamw", 8), ("adapter", "sgd", 0)])
def test_step_sizes_follow_their_factors(warm, local, surface, optimizer, batch) -> None:
    """One call with factors is a call a step with that step size; the second case is the closed path."""
    spec, factors = InnerSpec(optimizer, lr=1e-3, batch_size=batch), (0.25, 1.0, 0.5, 0.0)
    data = encode_trajectories(warm.build_model(), local) if surface == "adapter" else local
    whole = run(warm, surface, data, steps=4, spec=spec, lr_factor=factors.__getitem__)
    theta, state = None, None
    for step, factor in enumerate(factors[:3]):
        each = replace(spec, lr=spec.lr * factor)
        one = run(warm, surface, data, state, steps=1, spec=each, theta=theta, first_step=step)
        theta, state = one.theta, one.state
    assert np.allclose(whole.theta, theta, atol=1e-7)  # the last step has no size
    plain = run(warm, surface, data, steps=4, spec=spec)
    assert not np.allclose(whole.theta, plain.theta, atol=1e-6)
    assert np.array_equal(run(warm, surface, data, steps=4, spec=spec, lr_factor=lambda step: 1.0).theta, plain.theta)


def test_frames_and_latents_train_the_same_when_the_encoder_is_frozen(warm, local) -> None:
    latents = encode_trajectories(warm.build_model(), local)
    for surface in ("predictor", "adapter"):
        assert np.array_equal(run(warm, surface, local).theta, run(warm, surface, latents).theta)
    with pytest.raises(ContractViolation):
        run(warm, "full", latents)


def test_a_head_can_be_trained_and_stays_local(warm, local) -> None:
    result = run(warm, "predictor", local, spec=InnerSpec(batch_size=8, head_lr=1e-2))
    assert any(not torch.equal(result.state.head[n], t) for n, t in warm.heads["push"].items())
    assert any(name.startswith("head.") for name in result.state.counts)
    assert result.theta.shape == (ParameterLayout.of(warm.model_spec, "predictor").size,)


def test_closed_path_equals_autograd(warm, local) -> None:
    latents = encode_trajectories(warm.build_model(), local)
    goal = Objective(ONE_STEP)
    model, layout, theta, state = start(warm, "adapter")
    closed = inner_steps(
        *(model, layout, theta, latents, state),
        **{"steps": 10, "spec": InnerSpec("sgd", lr=0.05, batch_size=0), "objective": goal, "sketch_seed": 0},
    )
    # 1/2 mean squared norm against mean over coordinates: the same gradient at lr * z / 2.
    spec = InnerSpec("sgd", lr=0.05 * warm.model_spec.latent_dim / 2, batch_size=0, head_lr=1e-30)
    generic = run(warm, "adapter", latents, steps=10, spec=spec, goal=ONE_STEP)
    assert closed.lr == 0.05
    assert np.allclose(closed.theta, generic.theta, atol=1e-5)
    assert closed.last_loss < closed.first_loss


def test_closed_path_converges_to_least_squares(warm, local) -> None:
    model = warm.build_model()
    latents = encode_trajectories(model, local)
    problem = adapter_problem(model, warm.head("push"), latents)
    best = torch.linalg.lstsq(problem.gram, problem.cross).solution
    reached = problem.descend(torch.zeros_like(problem.cross), 20_000, problem.safe_lr)
    assert problem.loss(reached) <= problem.loss(best) * 1.01 + 1e-9
    assert problem.loss(torch.zeros_like(best)) == pytest.approx(problem.constant)


def test_step_size_is_capped_where_it_would_diverge(warm, local) -> None:
    latents = encode_trajectories(warm.build_model(), local)
    result = run(warm, "adapter", latents, steps=200, spec=InnerSpec("sgd", lr=1e6, batch_size=0), goal=ONE_STEP)
    assert result.lr < 1e6
    assert result.finite
    assert result.last_loss <= result.first_loss


def test_adaptation_helps_on_held_out_episodes(warm, local, shifted) -> None:
    model, layout, theta, state = start(warm, "adapter")
    head = warm.head("push")
    before = relative_error(model, head, shifted["push"], 5)
    inner_steps(
        *(model, layout, theta, local, state),
        **{"steps": 300, "spec": InnerSpec("sgd", lr=0.1, batch_size=0), "objective": Objective(ONE_STEP)},
        sketch_seed=0,
    )
    assert relative_error(model, head, shifted["push"], 5) < 0.8 * before


def test_every_window_is_seen_once_an_epoch() -> None:
    seen = torch.cat([window_order(5, drawn, 7, 20) for drawn in range(0, 140, 7)])
    assert torch.equal(seen[:20].sort().values, torch.arange(20))
    assert torch.equal(seen.view(7, 20).sort(dim=1).values, torch.arange(20).expand(7, 20))
    assert not torch.equal(seen[:20], seen[20:40])
    assert not torch.equal(window_order(6, 0, 20, 20), window_order(5, 0, 20, 20))


def test_rotated_layers_forget_their_moments(warm, local) -> None:
    result = run(warm, "full", local)
    names = frame_surface(warm.model_spec)["rows"]
    less = result.state.without_moments(names)
    assert set(result.state.counts) - set(less.counts) == set(names)
    assert not set(names) & set(less.moments["exp_avg"])


def test_an_update_made_in_another_frame_aligns_back(warm, local) -> None:
    """Model and gauge together: a turned participant trains as it would have in the common frame."""
    model, layout, theta, state = start(warm, "full")
    names = FrameSurface(**frame_surface(warm.model_spec))
    landmarks = blobs(CONTINUOUS, 8, 77).frames
    reference = model.encode(landmarks).detach()
    q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    from lensemble_flwr.gauge import conjugate

    goal = Objective(ObjectiveSpec(lambda_sig=0))
    spec = InnerSpec("sgd", lr=0.003, batch_size=8)
    args = {"steps": 5, "spec": spec, "objective": goal, "sketch_seed": 0}
    straight = inner_steps(model, layout, theta, local, state, **args)
    model.load_state_dict(conjugate(warm.state, names, q))
    turned = inner_steps(model, layout, layout.flatten(model), local, state, **args)
    found = align(model.state_dict(), names, model.encode(landmarks), reference)
    assert found.fired
    back = layout.flatten(found.state)
    assert np.abs(turned.theta - straight.theta).max() > 0.1
    # SGD on a loss that does not see the frame commutes with the turn; what is left is the fit of Q to a frame
    # that training itself moved a little.
    assert np.linalg.norm(back - straight.theta) < 0.2 * np.linalg.norm(turned.theta - straight.theta)


def test_anchor_holds_the_frame(warm, local) -> None:
    model, layout, theta, state = start(warm, "full")
    landmarks = blobs(CONTINUOUS, 8, 77).frames
    reference = model.encode(landmarks).detach()
    moved = []
    for weight in (0.0, 10.0):
        goal = Objective(ObjectiveSpec(lambda_anc=weight), FrameAnchor(landmarks, reference))
        inner_steps(
            *(model, layout, theta, local, state),
            **{"steps": 20, "spec": InnerSpec(lr=2e-3, batch_size=8), "objective": goal, "sketch_seed": 0},
        )
        moved.append(float((model.encode(landmarks).detach() - reference).square().mean()))
    assert moved[1] < 0.5 * moved[0]


def test_non_finite_training_is_reported(warm, local) -> None:
    result = run(warm, "predictor", local, steps=30, spec=InnerSpec("sgd", lr=1e12, batch_size=8))
    assert not result.finite


def test_state_round_trips_and_refuses_damage(warm, local) -> None:
    state = run(warm, "predictor", local, spec=InnerSpec(batch_size=8, head_lr=1e-3)).state
    data = state.to_bytes()
    again = InnerState.from_bytes(data)
    assert again.head_spec == state.head_spec
    assert again.counts == state.counts
    assert all(torch.equal(again.moments[k][n], t) for k in state.moments for n, t in state.moments[k].items())
    assert all(torch.equal(again.head[n], t) for n, t in state.head.items())
    for bad in (b"", b"x" * 100, data[:-5], data[:30]):
        with pytest.raises(ArtifactError):
            InnerState.from_bytes(bad)


def test_refusals(warm, local) -> None:
    with pytest.raises(ContractViolation):
        run(warm, "adapter", local, steps=0)
    short = blobs(CONTINUOUS, 2, 0, frames=2)
    for surface, spec in (("full", None), ("adapter", InnerSpec("sgd", batch_size=0))):
        with pytest.raises(DataError):
            run(warm, surface, short, spec=spec)
    wrong = InnerState.start(warm.head("choose"))
    with pytest.raises(ContractViolation):
        run(warm, "predictor", local, wrong)


def test_latent_cache(warm, local) -> None:
    latents = encode_trajectories(warm.build_model(), local)
    data = latents.to_bytes("key")
    again = LatentTrajectories.from_bytes(data, "key")
    assert again is not None
    assert torch.equal(again.latents, latents.latents)
    assert again.lengths == latents.lengths
    assert LatentTrajectories.from_bytes(data, "another") is None
    with pytest.raises(ArtifactError):
        LatentTrajectories.from_bytes(data[:50], "key")
