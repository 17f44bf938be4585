"""Predictor, adapter and action heads."""

from __future__ import annotations

import pytest
import torch

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model import ActionHead, Adapter, HeadSpec, Predictor, WorldModel, head_from_state, preset
from lensemble_flwr.model.heads import clone_state
from lensemble_flwr.model.predictor import fit_adapter_basis

SPEC = preset("tiny")


def test_constant_velocity_without_a_correction() -> None:
    predictor = Predictor(SPEC)
    torch.nn.init.zeros_(predictor.out_proj.weight)
    before, now = torch.randn(5, 8), torch.randn(5, 8)
    assert torch.allclose(predictor(before, now, torch.randn(5, 16)), 2 * now - before)


def test_rollout_feeds_predictions_back() -> None:
    torch.manual_seed(0)
    model = WorldModel(SPEC)
    before, now, actions = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 3, 16)
    rolled = model.rollout(before, now, actions)
    first = model.predict(before, now, actions[:, 0])
    second = model.predict(now, first, actions[:, 1])
    assert rolled.shape == (4, 3, 8)
    assert torch.equal(rolled[:, 0], first)
    assert torch.equal(rolled[:, 1], second)


def test_a_new_adapter_changes_nothing_and_is_linear_in_b() -> None:
    torch.manual_seed(0)
    model = WorldModel(SPEC)
    fit_adapter_basis(model.adapter, torch.randn(200, 32))
    args = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 16)
    base = model.predict(*args).detach()
    assert torch.allclose(base, model.predictor(*args))
    b = torch.randn(4, 8)
    with torch.no_grad():
        model.adapter.B.copy_(b)
        once = model.predict(*args)
        model.adapter.B.copy_(2 * b)
        twice = model.predict(*args)
    assert torch.allclose(twice - base, 2 * (once - base), atol=1e-5)


def test_basis_whitens_down_to_its_floor() -> None:
    torch.manual_seed(0)
    spread = torch.ones(32)
    spread[0], spread[1], spread[2:] = 10, 3, 0.01
    features = torch.randn(4000, 32) * spread + 5
    adapter = Adapter(SPEC)
    fit_adapter_basis(adapter, features, floor=0.01)
    phi = adapter.phi(features)
    assert phi.shape == (4000, 4)
    assert torch.allclose(phi[:, 3], torch.ones(4000))
    std = phi[:, :3].std(dim=0)
    assert std[:2].tolist() == pytest.approx([1, 1], abs=0.02)
    assert std[2] < 0.05  # below the floor: not blown up
    assert phi[:, :3].mean(dim=0).abs().max() < 1e-3
    again = Adapter(SPEC)
    fit_adapter_basis(again, features.flip(0), floor=0.01)
    assert torch.allclose(adapter.basis, again.basis, atol=1e-5)  # signs are fixed
    with pytest.raises(ContractViolation):
        fit_adapter_basis(adapter, features[:, :5])


def test_heads_of_both_kinds() -> None:
    discrete, continuous = ActionHead(HeadSpec("discrete", 4), SPEC), ActionHead(HeadSpec("continuous", 2), SPEC)
    numbers = torch.tensor([[0, 3], [2, 1]])
    onehot = torch.nn.functional.one_hot(numbers, 4).float()
    assert torch.equal(discrete(numbers), discrete(onehot))
    assert discrete(onehot).shape == (2, 2, 16)
    assert continuous(torch.zeros(7, 2)).shape == (7, 16)
    for head, actions in ((continuous, torch.zeros(3, dtype=torch.long)), (continuous, torch.zeros(3, 4))):
        with pytest.raises(ContractViolation):
            head(actions)
    copy = head_from_state(HeadSpec("discrete", 4), SPEC, clone_state(discrete))
    assert torch.equal(copy(onehot), discrete(onehot))
    with pytest.raises(ContractViolation):
        head_from_state(HeadSpec("continuous", 2), SPEC, clone_state(discrete))


def test_a_model_without_adapter() -> None:
    model = WorldModel(preset("tiny", adapter_rank=0))
    assert model.adapter is None
    assert model.predict(torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(1, 16)).shape == (1, 8)
