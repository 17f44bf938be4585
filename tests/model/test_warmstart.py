"""The public start: it learns, does not collapse, is repeatable, and its file is pinned by content."""

from __future__ import annotations

import pytest
import torch

from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ConfigError, DataError
from lensemble_flwr.model import (
    InnerSpec,
    InnerState,
    Objective,
    ObjectiveSpec,
    ParameterLayout,
    WarmStartSpec,
    WorldModel,
    effective_rank,
    encode_trajectories,
    evaluate,
    fit_probe,
    inner_steps,
    load_warm_start,
    preset,
    save_warm_start,
    train_warm_start,
)
from lensemble_flwr.model.warmstart import one_cycle
from tests.model.blobs import CONTINUOUS, DISCRETE, blobs


def held_out(model):
    data = {"push": blobs(CONTINUOUS, 20, 21), "choose": blobs(DISCRETE, 20, 22)}
    return {body: encode_trajectories(model, episodes) for body, episodes in data.items()}


def test_it_learns_dynamics_and_does_not_collapse(warm) -> None:
    model = warm.build_model()
    data = held_out(model)
    scores = evaluate(model, {b: warm.head(b) for b in warm.bodies}, data)
    assert scores.r1 < 0.6
    assert scores.r5 < 0.6
    assert scores.effective_rank > 2.5
    assert scores.std_min > 0.2
    assert 0.5 < scores.std_mean < 1.5
    assert scores.action_sensitivity > 1.0
    z, states = (torch.cat([getattr(data[b], k) for b in data]) for k in ("latents", "states"))
    probe = fit_probe(z[::2], states[::2])
    assert probe.r2(z[1::2], states[1::2]).min() > 0.7


def test_it_beats_a_random_model(warm) -> None:
    model = WorldModel(warm.model_spec)
    data = held_out(model)
    scores = evaluate(model, {b: warm.head(b) for b in warm.bodies}, data)
    assert scores.std_mean < 0.2  # what "collapsed" looks like
    assert not scores.r5 < 0.6


def test_full_training_without_batch_statistics_stays_healthy(warm) -> None:
    """After the start there is no normaliser left: SIGReg alone has to hold the latent open."""
    model = warm.build_model()
    layout = ParameterLayout.of(model, "full")
    inner_steps(
        *(model, layout, layout.flatten(model), blobs(CONTINUOUS, 20, 3, 0.01), InnerState.start(warm.head("push"))),
        **{"steps": 120, "spec": InnerSpec(lr=1e-3, batch_size=16), "objective": Objective(ObjectiveSpec())},
        sketch_seed=1,
    )
    z = encode_trajectories(model, blobs(CONTINUOUS, 10, 4)).latents
    assert z.std(dim=0).min() > 0.2
    assert effective_rank(z) > 2.5


def test_repeatable_and_leaves_the_random_state_alone() -> None:
    public = {"push": (CONTINUOUS, blobs(CONTINUOUS, 6, 1))}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    told = []
    one = train_warm_start(
        preset("tiny"), public, WarmStartSpec(steps=3), progress=lambda *args: told.append(args), threads=1
    )
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(6)
    two = train_warm_start(preset("tiny"), public, WarmStartSpec(steps=3), threads=1)
    other = train_warm_start(preset("tiny"), public, WarmStartSpec(steps=3, seed=1), threads=1)
    assert one.content_hash == two.content_hash != other.content_hash
    assert [(done, total) for done, total, _ in told] == [(1, 3), (3, 3)]
    assert {"loss", "prediction", "sigreg", "std"} <= set(told[0][2])
    assert one.notes["cpu_seconds"] > 0


def test_no_steps_are_random_weights_with_normalised_hidden_units() -> None:
    public = blobs(CONTINUOUS, 12, 1)
    start = train_warm_start(preset("tiny"), {"push": (CONTINUOUS, public)}, WarmStartSpec(steps=0), threads=1)
    model = start.build_model()
    units = model.encoder.projected(public.frames)
    assert units.mean(dim=0).abs().max() < 1e-3
    assert (units.std(dim=0) - 1).abs().max() < 0.02
    torch.manual_seed(0)
    untrained = WorldModel(preset("tiny"))
    assert torch.equal(model.encoder.patch_embed.weight, untrained.encoder.patch_embed.weight)
    assert torch.equal(model.predictor.in_proj.weight, untrained.predictor.in_proj.weight)


def test_file_round_trip_and_pin(warm, tmp_path) -> None:
    path = tmp_path / "sub" / "warm.safetensors"
    digest = save_warm_start(warm, path)
    assert digest == warm.content_hash
    again = load_warm_start(path, digest)
    assert again.content_hash == digest
    assert again.model_spec == warm.model_spec
    assert again.bodies == warm.bodies
    frames = blobs(CONTINUOUS, 1, 9).frames
    assert torch.equal(again.build_model().encode(frames), warm.build_model().encode(frames))
    assert torch.equal(again.head("choose")(torch.eye(4)), warm.head("choose")(torch.eye(4)))
    assert not list(path.parent.glob(".*"))
    with pytest.raises(CheckpointIntegrityError):
        load_warm_start(path, "00" * 32)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointIntegrityError):
        load_warm_start(path)
    path.write_bytes(bytes(data[:200]))
    with pytest.raises(ArtifactError):
        load_warm_start(path)
    with pytest.raises(ArtifactError):
        load_warm_start(tmp_path / "none.safetensors")


def test_the_adapter_starts_at_zero_on_a_public_basis(warm) -> None:
    model = warm.build_model()
    assert not model.adapter.B.any()
    assert model.adapter.basis.abs().sum() > 0


def test_refusals(warm) -> None:
    with pytest.raises(ConfigError, match="swim"):
        warm.head("swim")
    with pytest.raises(DataError):
        train_warm_start(preset("tiny"), {})
    with pytest.raises(DataError):
        train_warm_start(preset("tiny"), {"push": (CONTINUOUS, blobs(CONTINUOUS, 3, 0, frames=4))})


def test_one_cycle_rises_and_falls() -> None:
    rates = [one_cycle(step, 100, 1.0, 0.2) for step in range(100)]
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == 19
    assert rates[0] < 0.1
    assert rates[-1] < 0.01
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
