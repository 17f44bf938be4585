"""Two processes that share each batch make the same update as one: SIGReg and anchor are no means over windows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.gauge import FrameAnchor
from lensemble_flwr.model import (
    ActionHead,
    InnerResult,
    InnerSpec,
    InnerState,
    Objective,
    ObjectiveSpec,
    ParameterLayout,
    Trajectories,
    WorldModel,
    inner_steps,
    preset,
)
from lensemble_flwr.model import parallel as parallel_module
from lensemble_flwr.model.inner import unscaled
from lensemble_flwr.model.parallel import run_parallel
from lensemble_flwr.model.sigreg import sigreg
from lensemble_flwr.model.team import Team
from tests.model.blobs import CONTINUOUS, blobs

SGD = InnerSpec(optimizer="sgd", lr=1e-3, batch_size=7, head_lr=1e-3, device="cpu")
DATA = blobs(CONTINUOUS, 4, 40, 0.02)


def trained(
    spec: InnerSpec, steps: int = 2, sig: float = 0.3, norm: bool = False, data: Any = DATA, factor: Any = unscaled
) -> InnerResult:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = WorldModel(preset("tiny"))
        head = ActionHead(CONTINUOUS, model.spec)
        with torch.no_grad():  # a latent of a healthy spread
            model.encoder.to_latent.weight.mul_(10)
    landmarks = blobs(CONTINUOUS, 6, 41).frames[:40]
    with torch.no_grad():
        targets = model.encode(landmarks)
    anchor = FrameAnchor(landmarks, targets, tolerance=0.0)
    layout = ParameterLayout.of(model, "full")
    return inner_steps(
        model,
        layout,
        layout.flatten(model),
        data,
        InnerState.start(head),
        steps=steps,
        spec=spec,
        objective=Objective(ObjectiveSpec(lambda_sig=sig, lambda_anc=0.2), anchor),
        sketch_seed=5,
        lr_factor=factor,
        landmarks=landmarks if norm else None,
    )


def test_two_processes_make_the_update_of_one() -> None:
    """An odd batch, so that their parts differ in size; all terms of the loss, landmark norm and action head, too."""
    one = trained(SGD, norm=True, factor=(0.5, 1.0).__getitem__)
    two = trained(dataclasses.replace(SGD, parallel=2), norm=True, factor=(0.5, 1.0).__getitem__)
    assert np.abs(one.theta - two.theta).max() < 1e-5
    for name, value in one.state.head.items():
        assert (value - two.state.head[name]).abs().max() < 1e-5
    assert one.state.drawn == two.state.drawn
    start = trained(dataclasses.replace(SGD, lr=1e-12, head_lr=1e-12), steps=1, norm=True)
    assert np.abs(one.theta - start.theta).max() > 1e-3  # there was something to get wrong


@pytest.mark.slow
def test_adamw_too() -> None:
    """AdamW divides a gradient by its size, so where the gradient is rounding noise alone (the keys' bias: softmax
    does not depend on it) the step is noise as well. Everywhere else the updates agree."""
    spec = InnerSpec(optimizer="adamw", lr=1e-4, batch_size=8, device="cpu")
    one, two = trained(spec), trained(dataclasses.replace(spec, parallel=2))
    moment = np.concatenate(
        [
            one.state.moments["exp_avg_sq"][n].numpy().reshape(-1)
            for n in ParameterLayout.of(preset("tiny"), "full").names
        ]
    )
    real = moment > 1e-4 * np.median(moment)
    assert real.mean() > 0.85  # 0.91 here: nearly all weights are compared
    assert np.abs(one.theta - two.theta)[real].max() < 1e-5
    for name, value in one.state.moments["exp_avg"].items():
        assert torch.allclose(value, two.state.moments["exp_avg"][name], atol=1e-5, rtol=1e-3)


def test_the_parts_of_a_batch_are_the_batch() -> None:
    rows = torch.arange(11)
    parts = [Team(rank, 3).part(rows) for rank in range(3)]
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    assert sum(Team(r, 3).weight(len(p), 11) for r, p in enumerate(parts)) == pytest.approx(3)
    assert Team().part(rows) is rows
    assert Team().weight(3, 9) == 1
    assert Team().total is None


def test_sigreg_of_parts_is_not_the_mean_of_their_statistics() -> None:
    """Why the sums are added inside the loss."""
    z = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(-1, 1, 64)[:, None]
    whole = float(sigreg(z, 0, 0))
    assert abs(whole - np.mean([float(sigreg(part, 0, 0)) for part in z.split(32)])) > 0.1 * whole
    other = z[32:]

    def with_the_other(value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 0:
            return value + len(other)
        from lensemble_flwr.model.sigreg import sketch_directions

        angle = (other @ torch.from_numpy(sketch_directions(0, 0, 8, 64))).unsqueeze(-1) * torch.linspace(0, 3, 17)
        return value + torch.stack([torch.cos(angle).sum(0), torch.sin(angle).sum(0)])

    assert float(sigreg(z[:32], 0, 0, total=with_the_other)) == pytest.approx(whole, rel=1e-5)


def test_an_error_in_a_process_is_raised_here() -> None:
    broken = Trajectories(DATA.frames[:2], DATA.actions[:2], (2,))
    with pytest.raises(Exception, match="No local episode has 5 frames"):
        trained(dataclasses.replace(SGD, parallel=2), data=broken)


def test_gradients_do_not_pass_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    tell = "torch.save({'result': os.environ['GLOO_SOCKET_IFNAME']}, sys.stdout.buffer)"
    monkeypatch.setattr(parallel_module, "_PROGRAM", f"import os, sys, torch; sys.stdin.buffer.read(); {tell}")
    assert run_parallel(1, {})["result"] in ("lo", "lo0")


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_module, "_PROGRAM", "import sys; sys.exit(3)")
    with pytest.raises(ContractViolation, match="ended with exit status 3"):
        run_parallel(2, {})


def test_too_many_processes_for_a_batch() -> None:
    with pytest.raises(ConfigError, match="cannot be shared"):
        trained(dataclasses.replace(SGD, batch_size=1, parallel=2))
    with pytest.raises(ConfigError):
        InnerSpec(parallel=0)
