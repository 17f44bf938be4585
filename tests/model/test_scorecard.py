"""Every broken model is noticed, and by the metric that is meant to notice it; the healthy one is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.gauge.align import FrameSurface, align
from lensemble_flwr.gauge.controls import averaged, flattened, in_random_frames, shrunk
from lensemble_flwr.gauge.drift import frame_drift
from lensemble_flwr.gauge.procrustes import procrustes_align
from lensemble_flwr.model import WarmStart, WorldModel, encode_trajectories, evaluate, fit_probe, frame_surface
from lensemble_flwr.model.evaluate import held_out_sigreg
from lensemble_flwr.model.scorecard import RULES, noticed
from tests.model.blobs import CONTINUOUS, DISCRETE, blobs

DATA = {"push": blobs(CONTINUOUS, 20, 21), "choose": blobs(DISCRETE, 20, 22)}
LANDMARKS = DATA["push"].frames[::4][:40]


def card(warm: WarmStart, state: dict[str, Tensor]) -> dict[str, float]:
    model = warm.build_model()
    model.load_state_dict(state)
    held_out = {body: encode_trajectories(model, data) for body, data in DATA.items()}
    scores = evaluate(model, {body: warm.head(body) for body in DATA}, held_out)
    r2 = []
    for latents in held_out.values():
        assert latents.states is not None
        half = len(latents.latents) // 2
        probe = fit_probe(latents.latents[:half], latents.states[:half])
        r2.append(float(probe.r2(latents.latents[half:], latents.states[half:]).mean()))
    with torch.no_grad():
        now, then = model.encode(LANDMARKS), warm.build_model().encode(LANDMARKS)
    return {
        "state_probe_r2": sum(r2) / len(r2),
        "r1": scores.r1,
        "r5": scores.r5,
        "effective_rank": scores.effective_rank,
        "latent_std_mean": scores.std_mean,
        "latent_std_min": scores.std_min,
        "action_sensitivity": scores.action_sensitivity,
        "sigreg": scores.sigreg,
        "frame_drift_deg": frame_drift(procrustes_align(now, then, tolerance=0.0, ridge=1e-3)[0]).max_deg,
    }


@pytest.fixture(scope="module")
def healthy(warm: WarmStart) -> dict[str, float]:
    return card(warm, warm.state)


def surface(warm: WarmStart) -> FrameSurface:
    return FrameSurface(**frame_surface(warm.model_spec))


def test_the_healthy_model_is_healthy(healthy: dict[str, float]) -> None:
    assert healthy["state_probe_r2"] > 0.5
    assert healthy["r1"] < 1
    assert healthy["action_sensitivity"] > 1.05
    assert noticed(healthy, healthy) == ()
    assert set(RULES) == set(healthy)


def test_a_random_encoder(warm: WarmStart, healthy: dict[str, float]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = WorldModel(warm.model_spec)
    model.encoder.mean_image.copy_(warm.state["encoder.mean_image"])
    seen = noticed(healthy, card(warm, model.state_dict()))
    assert {"state_probe_r2", "latent_std_mean"} <= set(seen)


def test_a_collapsed_magnitude_is_seen_by_spread_and_sigreg_alone(warm: WarmStart, healthy: dict[str, float]) -> None:
    now = card(warm, shrunk(warm.state, surface(warm), 1e-3))
    assert set(noticed(healthy, now)) == {"latent_std_mean", "latent_std_min", "sigreg"}
    for blind in ("r1", "r5", "state_probe_r2", "effective_rank"):
        assert now[blind] == pytest.approx(healthy[blind], rel=0.02)


def test_a_collapsed_rank(warm: WarmStart, healthy: dict[str, float]) -> None:
    with torch.no_grad():
        latents = warm.build_model().encode(LANDMARKS)
    now = card(warm, flattened(warm.state, surface(warm), latents))
    assert now["effective_rank"] == pytest.approx(1, abs=0.01)
    assert {"effective_rank", "sigreg"} <= set(noticed(healthy, now))
    assert "r1" not in noticed(healthy, now)  # predicting a line is easy


def test_a_naive_average_of_turned_participants_and_the_same_aligned(
    warm: WarmStart, healthy: dict[str, float]
) -> None:
    d = warm.model_spec.latent_dim
    turned = in_random_frames(warm.state, surface(warm), d, 3, seed=1)
    naive = card(warm, averaged(turned))
    seen = noticed(healthy, naive)
    assert {"latent_std_mean", "r5", "frame_drift_deg"} <= set(seen)
    with torch.no_grad():
        reference = warm.build_model().encode(LANDMARKS)

    def encode(state: dict[str, Tensor]) -> Tensor:
        model = warm.build_model()
        model.load_state_dict(state)
        with torch.no_grad():
            return model.encode(LANDMARKS)

    back = [align(s, surface(warm), encode(s), reference, tolerance=1e-12).state for s in turned]
    assert noticed(healthy, card(warm, averaged(back))) == ()


def test_one_frame_is_no_damage(warm: WarmStart, healthy: dict[str, float]) -> None:
    (turned,) = in_random_frames(warm.state, surface(warm), warm.model_spec.latent_dim, 1)
    assert set(noticed(healthy, card(warm, turned))) <= {"frame_drift_deg", "latent_std_min"}


def test_held_out_sigreg_does_not_grow_with_the_number_of_frames() -> None:
    rows = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    assert held_out_sigreg(rows) == pytest.approx(1, abs=0.2)
    assert held_out_sigreg(2 * rows[:512]) == pytest.approx(held_out_sigreg(2 * rows), rel=0.2)
    assert held_out_sigreg(rows[:10]) > 0


def test_what_is_not_a_number_is_noticed(healthy: dict[str, float]) -> None:
    assert noticed(healthy, {**healthy, "r5": math.nan}) == ("r5",)
    with pytest.raises(ContractViolation):
        averaged([])
