"""The loss: its parts, its weights, and its blindness to the latent frame."""

from __future__ import annotations

import pytest
import torch

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model import Objective, ObjectiveSpec, WorldModel, frame_surface, preset, sigreg

SPEC = preset("tiny")


@pytest.fixture
def batch() -> tuple[WorldModel, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return WorldModel(SPEC), torch.randn(6, 5, 8), torch.randn(6, 4, 16)


def test_terms_add_up(batch) -> None:
    model, z, a = batch
    spec = ObjectiveSpec(lambda_pred=2.0, lambda_sig=0.5, lambda_anc=3.0)
    terms = Objective(spec, anchor=lambda encode: torch.tensor(4.0))(model, z, a, 1, 2)
    assert terms.sigreg.item() == pytest.approx(float(sigreg(z.reshape(-1, 8), 1, 2, 64)))
    assert terms.total.item() == pytest.approx(
        2 * terms.prediction.item() + 0.5 * terms.sigreg.item() + 3 * 4.0, rel=1e-6
    )


def test_prediction_is_teacher_forced_plus_rolled_out(batch) -> None:
    model, z, a = batch
    forced = torch.stack([model.predict(z[:, t - 1], z[:, t], a[:, t]) for t in (1, 2, 3)], dim=1)
    rolled = model.rollout(z[:, 0], z[:, 1], a[:, 1:])
    expected = [(3 * (made - z[:, 2:]).square().mean()).item() for made in (forced, rolled)]
    for weights, value in (((1, 0), expected[0]), ((0, 1), expected[1]), ((1, 1), sum(expected))):
        spec = ObjectiveSpec(teacher_weight=weights[0], rollout_weight=weights[1])
        assert Objective(spec).prediction(model, z, a).item() == pytest.approx(value, rel=1e-5)


def test_a_frozen_encoder_leaves_prediction_only(batch) -> None:
    model, z, a = batch
    spec = ObjectiveSpec(lambda_anc=1.0)
    terms = Objective(spec, anchor=lambda encode: 1 / 0)(model, z, a, 0, 0, encoder_trains=False)
    assert terms.sigreg is None
    assert terms.anchor is None


def test_target_gradient_can_be_stopped(batch) -> None:
    model, z, a = batch
    z = z.requires_grad_(True)
    grads = []
    for stop in (False, True):
        loss = Objective(ObjectiveSpec(target_stop_gradient=stop)).prediction(model, z, a)
        grads.append(torch.autograd.grad(loss, z)[0])
    assert grads[0][:, -1].abs().sum() > 0
    assert grads[1][:, -1].abs().sum() == 0


def test_prediction_does_not_see_the_frame(batch) -> None:
    """The gauge freedom itself: model and latents turned together give the same loss."""
    model, z, a = batch
    q = torch.linalg.qr(torch.randn(8, 8))[0]
    other = WorldModel(SPEC)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    names = frame_surface(SPEC)
    for name in names["rows"]:
        state[name] = q.T @ state[name]
    for name, blocks in names["columns"]:
        for start, stop in blocks:
            state[name][:, start:stop] = state[name][:, start:stop] @ q
    for name in names["right"]:
        state[name] = state[name] @ q
    other.load_state_dict(state)
    loss = Objective(ObjectiveSpec())
    assert loss.prediction(other, z @ q, a).item() == pytest.approx(loss.prediction(model, z, a).item(), rel=1e-5)


def test_refusals(batch) -> None:
    model, z, a = batch
    with pytest.raises(ContractViolation):
        Objective(ObjectiveSpec(lambda_anc=0.1))
    with pytest.raises(ContractViolation):
        Objective(ObjectiveSpec()).prediction(model, z[:, :2], a[:, :1])
    with pytest.raises(ContractViolation):
        Objective(ObjectiveSpec()).prediction(model, z, a[:, :3])
