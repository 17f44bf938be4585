"""CEM finds what can be found, and a cost from a model is the distance at the end of its rollout."""

from __future__ import annotations

import pytest
import torch

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.model import ActionHead, HeadSpec, WorldModel, preset
from lensemble_flwr.model.planning import CEM, model_cost


def test_finds_the_minimum_of_a_bowl_inside_the_bounds() -> None:
    target = torch.tensor([[0.4, -0.6], [2.0, 0.1]])  # one coordinate outside: the bound is best
    plan = CEM(samples=128, iterations=12).plan(
        lambda a: (a - target).square().sum(dim=(1, 2)), torch.zeros(2, 2), torch.Generator().manual_seed(0)
    )
    assert (plan - target.clamp(-1, 1)).abs().max() < 0.1


def test_never_worse_than_the_start_and_repeatable() -> None:
    def cost(actions: torch.Tensor) -> torch.Tensor:
        return actions.abs().sum(dim=(1, 2))

    plans = [CEM().plan(cost, torch.zeros(3, 2), torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(plans[0], torch.zeros(3, 2))
    assert torch.equal(*plans)
    nowhere = CEM().plan(lambda a: a.sum(dim=(1, 2)) * float("nan"), torch.ones(3, 2), torch.Generator())
    assert torch.equal(nowhere, torch.ones(3, 2))


def test_the_cost_of_a_model() -> None:
    torch.manual_seed(0)
    model, head = WorldModel(preset("tiny")), ActionHead(HeadSpec("continuous", 2), preset("tiny"))
    before, now, goal = torch.zeros(8), torch.ones(8), torch.full((8,), 3.0)
    actions = torch.randn(5, 4, 2)
    with torch.no_grad():
        last = model.rollout(before.expand(5, -1), now.expand(5, -1), head(actions))[:, -1]
    found = model_cost(model, head, before, now, lambda z: z, goal)(actions)
    assert torch.allclose(found, (last - 3).square().sum(dim=1))


def test_refuses_a_search_that_keeps_nothing() -> None:
    with pytest.raises(ContractViolation):
        CEM(elites=1)
    with pytest.raises(ContractViolation):
        CEM(samples=4, elites=8)
