"""DiLoCo against what others computed: PyTorch's optimizer, torchft's published histories, and plain training.

The last two groups go through the real round: join, shares, local steps, ring, masks, sum, outer step, checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lensemble_flwr.federation.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lensemble_flwr.federation.outer import checked_step, outer_step
from lensemble_flwr.federation.recipe import Recipe
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.torch_task import TorchTask
from lensemble_flwr.federation.wire import Stage
from tests.federation.harness import Federation

TORCHFT = json.loads((Path(__file__).parents[1] / "oracles" / "torchft_mocked.json").read_text())["cases"]

EVENTS = st.lists(
    st.one_of(
        st.floats(0.01, 1.5).map(lambda lr: ("step", lr)),
        st.just(("missing", 0.0)),  # a void or burnt round
        st.just(("resume", 0.0)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(events=EVENTS, mu=st.floats(0.01, 0.95), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 9))
def test_equals_torch_sgd_nesterov_to_1e12(events: list[tuple[str, float]], mu: float, seed: int, size: int) -> None:
    """Any schedule of outer step sizes, with missing rounds and resumes, in float64."""
    rng = np.random.default_rng(seed)
    theta, b = rng.standard_normal(size), np.zeros(size)
    reference = nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.SGD([reference], lr=1.0, momentum=mu, nesterov=True)
    for event, lr in events:
        if event == "resume":  # both sides from what they would have stored
            theta, b = np.frombuffer(theta.tobytes()), np.frombuffer(b.tobytes())
            stored = optimizer.state_dict()
            reference = nn.Parameter(reference.detach().clone())
            optimizer = torch.optim.SGD([reference], lr=1.0, momentum=mu, nesterov=True)
            optimizer.load_state_dict(stored)
        elif event == "step":
            delta = rng.standard_normal(size)
            theta, b = outer_step(theta, b, delta, lr, mu)
            optimizer.param_groups[0]["lr"] = lr
            reference.grad = torch.from_numpy(-delta)
            optimizer.step()
    scale = max(1.0, float(np.abs(theta).max()))
    assert np.abs(theta - reference.detach().numpy()).max() <= 1e-12 * scale


def test_a_checkpoint_between_two_rounds_changes_no_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    deltas = rng.standard_normal((6, 5))
    theta, b = rng.standard_normal(5).astype(np.float32), np.zeros(5)
    kept, momentum = theta, b
    for i, delta in enumerate(deltas):
        theta, b = outer_step(theta, b, delta, 0.7, 0.9)
        kept, momentum = outer_step(kept, momentum, delta, 0.7, 0.9)
        save_checkpoint(tmp_path / str(i), Checkpoint(bytes(32), i + 1, bytes(32), {"w": kept}, momentum))
        read = load_checkpoint(tmp_path / str(i))
        kept, momentum = read.parameters["w"], read.momentum
    assert theta.tobytes() == kept.tobytes()
    assert b.tobytes() == momentum.tobytes()


# ---------------------------------------------------------------- torchft's histories


@pytest.mark.parametrize("case", TORCHFT, ids=lambda case: f"delay{case['delay']}-alpha{case['alpha']}")
def test_reproduces_torchfts_published_histories(case: dict[str, Any]) -> None:
    """Two replicas, two fragments that are synchronised in turn, every third step; integer sums as from the ring.

    A fragment's update is taken ``delay`` steps before it is applied; the replica then mixes ``alpha`` of its own
    weight with ``1 - alpha`` of the new global one (Streaming DiLoCo, arXiv:2501.18512).
    """
    replicas, every, scale_log2 = 2, 3, 8
    shared = [np.ones(1), np.ones(1)]
    momentum = [np.zeros(1), np.zeros(1)]
    local = np.ones((replicas, 2))
    waiting: dict[int, np.ndarray] = {}
    history = {"0": [1.0, 1.0]}
    for step in range(16):
        for r in range(replicas):
            assert local[r].tolist() == case["local"][step]
        local = local - 1.0 * 2.0  # inner SGD
        taken = step + 1 + case["delay"]
        if taken % every == 0:
            fragment = (taken // every - 1) % 2
            waiting[taken] = np.rint((local[:, fragment] - shared[fragment]) * 2**scale_log2).astype(np.int64)
        if (step + 1) in waiting:
            fragment = ((step + 1) // every - 1) % 2
            total = waiting.pop(step + 1).sum(keepdims=True)
            shared[fragment], momentum[fragment] = checked_step(
                shared[fragment], momentum[fragment], total, scale_log2, replicas, 2.0, 0.0, round_index=step
            )
            local[:, fragment] = case["alpha"] * local[:, fragment] + (1 - case["alpha"]) * shared[fragment]
            history[str(step + 1)] = [float(shared[0][0]), float(shared[1][0])]
    for step, both in case["global"].items():
        assert history[step] == both, step


# ---------------------------------------------------------------- through the real round

MASKED = "privacy=disabled secagg.range=8 diloco.outer_lr=1 diloco.outer_momentum=0"


def grid(federation: Federation) -> float:
    """Distance of two neighbouring values on the ring of this federation."""
    for stage, _, fields, _ in federation.transport.log:
        if stage == Stage.OPEN:
            return 2.0 ** -RoundOpen.decode(fields["body"]).scale_log2
    raise AssertionError("no round was opened")


def test_one_inner_step_of_size_one_is_fedsgd(tmp_path: Path) -> None:
    """H = 1, inner SGD of size 1, outer lr 1, mu 0: the committed model is the mean of the participants' models, and
    a gradient step on the mean of their losses."""
    federation = Federation(tmp_path, f"{MASKED} diloco.rounds=1 diloco.inner_steps=1 inner.lr=1.0")
    task = federation.task
    final = federation.start()
    models, gradients = [], []
    for i in range(4):
        models.append(task.local_update(task.initial(), i, None, steps=1, sketch_seed=0, round_index=0).theta)
        x, y = task._data(f"participant {i}", 40)  # type: ignore[attr-defined]
        gradients.append(x.T @ (x @ task.initial() - y) / len(y))
    tolerance = grid(federation) + 1e-6
    assert np.abs(final - np.mean(models, axis=0)).max() < tolerance
    assert np.abs(final - (task.initial() - np.mean(gradients, axis=0))).max() < tolerance
    assert np.abs(final - task.initial()).max() > 0.1


class Alone:
    """A task whose participants all hold what participant 0 holds: their mean is one participant."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def local_update(self, theta: np.ndarray, partition: int, state: bytes | None, **kw: Any) -> Any:
        return self._task.local_update(theta, 0, state, **kw)


class Cubic(Recipe):
    """A small network on rows of numbers; AdamW moments have to survive from round to round."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def local_data(self, partition: int) -> Any:
        x = torch.randn(32, 3, generator=torch.Generator().manual_seed(partition))
        return x, x[:, :1] ** 3

    def public_data(self, share: int) -> Any:
        return self.local_data(100 + share)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, self.local_data(0)))}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_participant_is_plain_local_training(tmp_path: Path, optimizer: str) -> None:
    """T rounds of H steps with lr 1, mu 0 are T H steps of a plain loop, moments and all, to the ring's precision."""
    rounds, steps, lr = 4, 6, 0.02
    overrides = f"{MASKED} diloco.rounds={rounds} diloco.inner_steps={steps} inner.optimizer={optimizer}"
    federation = Federation(tmp_path, f"{overrides} inner.lr={lr} inner.weight_decay=0.01 inner.batch_size=0")
    task = TorchTask(Cubic(federation.config))
    federation.task = federation.transport.task = Alone(task)
    final = federation.start()

    model = task.model(task.initial())
    x, y = task.recipe.local_data(0)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    plain = kind(model.parameters(), lr=lr, weight_decay=0.01)
    for _ in range(rounds * steps):
        plain.zero_grad()
        (model(x) - y).square().mean().backward()
        plain.step()
    trained = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    # Rounding to the grid happens once a round; training a few steps on does not blow it up here.
    assert np.abs(final - trained).max() < 4 * rounds * grid(federation) + 2e-6
    assert np.abs(final - task.initial()).max() > 0.05


def test_forgetting_the_moments_is_not_plain_training(tmp_path: Path) -> None:
    """The test above can fail: with ``inner.reset_optimizer`` AdamW starts anew every round."""
    finals = []
    for reset in ("false", "true"):
        overrides = f"{MASKED} diloco.rounds=3 inner.optimizer=adamw inner.lr=0.02 inner.reset_optimizer={reset}"
        federation = Federation(tmp_path / reset, overrides)
        federation.task = federation.transport.task = Alone(TorchTask(Cubic(federation.config)))
        finals.append(federation.start())
    assert np.abs(finals[0] - finals[1]).max() > 1e-3
