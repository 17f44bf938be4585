"""A model of one's own: theta and back, the same steps each time, what stays at a site, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from lensemble_flwr.config import Config, load_config
from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation, DataError
from lensemble_flwr.federation import torch_task
from lensemble_flwr.federation.recipe import Recipe
from lensemble_flwr.federation.torch_task import LocalState, TorchTask
from tests.federation.harness import Federation, Node


class Net(nn.Module):
    """Federated: two layers. The site's own: a gain. Frozen: a basis. A buffer that training changes."""

    count: torch.Tensor
    gain: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.basis = nn.Linear(4, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(6))
        self.hidden, self.drop, self.out = nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return self.out(self.drop(torch.tanh(self.hidden(self.basis(x) * self.gain))))[:, 0]


class Regression(Recipe):
    def build_model(self) -> nn.Module:
        return Net()

    def federated(self, model: nn.Module) -> list[str]:
        return ["out.weight", "hidden.weight", "hidden.bias", "out.bias"]

    def local_data(self, partition: int) -> Any:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(partition))
        return x, x.sum(1)

    def public_data(self, share: int) -> Any:
        return self.local_data(1000 + share)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, self.local_data(5000)))}


def config(more: str = "") -> Config:
    own = "experiment=linear task=tests.federation.test_torch_task:Regression inner.lr=0.05 inner.batch_size=8 "
    return load_config(own + "inner.device=cpu " + more)


def task(more: str = "", recipe: type[Recipe] = Regression) -> TorchTask:
    return TorchTask(recipe(config(more)))


TASK = task()


def steps(own: TorchTask, theta: np.ndarray, state: bytes | None = None, *, count: int = 5, index: int = 0) -> Any:
    return own.local_update(theta, 0, state, steps=count, sketch_seed=0, round_index=index)


# ------------------------------------------------------------------ theta


@given(theta=arrays(np.float32, TASK.dimension, elements=st.floats(-1e6, 1e6, width=32)))
def test_theta_goes_into_the_model_and_back(theta: np.ndarray) -> None:
    model = TASK.model(theta)
    np.testing.assert_array_equal(TASK._flatten(model), theta)
    named = dict(model.named_parameters())
    for part in TASK.layout:
        np.testing.assert_array_equal(
            named[part.name].detach().numpy().reshape(-1), theta[part.start : part.start + part.size]
        )


def test_the_layout_is_the_models_order_and_only_what_is_federated() -> None:
    assert [part.name for part in TASK.layout] == ["hidden.weight", "hidden.bias", "out.weight", "out.bias"]
    assert TASK.dimension == 30 + 5 + 5 + 1 == TASK.initial().size
    assert [part.start for part in TASK.layout] == [0, 30, 35, 40]
    for bad in (np.zeros(41), np.zeros(40, np.float32)):
        with pytest.raises(ContractViolation):
            TASK.model(bad)


def test_two_parties_build_the_same_and_another_seed_or_basis_is_another() -> None:
    torch.manual_seed(17)
    before = torch.random.get_rng_state()
    other = task()
    assert torch.equal(torch.random.get_rng_state(), before)  # the caller's generator is as it was
    np.testing.assert_array_equal(other.initial(), TASK.initial())
    assert other.base_hash == TASK.base_hash
    assert task("seed=1").base_hash != TASK.base_hash

    class Renamed(Regression):
        pass

    assert task(recipe=Renamed).base_hash != TASK.base_hash


def test_another_version_of_the_source_is_another_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_task, "_source_hash", lambda cls: b"another")
    assert task().base_hash != TASK.base_hash


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("head_lr", ["0", "0.05"])
def test_the_same_steps_give_the_same_bytes(optimizer: str, head_lr: str) -> None:
    more = f"inner.optimizer={optimizer} inner.head_lr={head_lr}"
    torch.manual_seed(1)
    one = steps(task(more), TASK.initial())
    torch.manual_seed(2)  # dropout and shuffling do not follow the caller's generator
    two = steps(task(more), TASK.initial())
    np.testing.assert_array_equal(one.theta, two.theta)
    assert one.state == two.state
    assert not np.array_equal(one.theta, steps(task(more), TASK.initial(), index=1).theta)
    np.testing.assert_array_equal(TASK.initial(), task(more).initial())


def test_training_helps_and_public_steps_are_their_own() -> None:
    own = task("inner.optimizer=adamw")
    theta = own.initial()
    before = own.evaluate(theta)["loss"]
    state = None
    for index in range(8):
        result = steps(own, theta, state, count=10, index=index)
        theta, state = result.theta, result.state
    assert own.evaluate(theta)["loss"] < 0.5 * before
    public = [own.public_update(own.initial(), share, steps=3, sketch_seed=1) for share in (0, 0, 1)]
    np.testing.assert_array_equal(public[0], public[1])
    assert not np.array_equal(public[0], public[2])


def test_moments_go_on_as_if_training_had_not_stopped() -> None:
    class Full(Regression):  # without shuffling and dropout two halves make a whole
        def batches(self, data: Any, rng: np.random.Generator) -> Any:
            yield data

        def build_model(self) -> nn.Module:
            model = Net()
            model.drop = nn.Dropout(0.0)
            return model

    own = task("inner.optimizer=adamw inner.head_lr=0.05", Full)
    half = steps(own, own.initial(), count=4)
    whole = steps(own, own.initial(), count=8)
    second = steps(own, half.theta, half.state, count=4, index=1)
    np.testing.assert_allclose(second.theta, whole.theta, rtol=1e-6, atol=1e-7)
    kept = LocalState.from_bytes(second.state)
    assert kept.counts["out.bias"] == 8
    assert int(kept.local["count"]) == 8
    reset = task("inner.optimizer=adamw inner.head_lr=0.05 inner.reset_optimizer=true", Full)
    assert not np.allclose(steps(reset, half.theta, half.state, count=4, index=1).theta, whole.theta, atol=1e-5)


def test_the_sites_own_weights_stay_there_and_frozen_ones_stay_as_they_are() -> None:
    own = task("inner.head_lr=0.05")
    kept = LocalState.from_bytes(steps(own, own.initial()).state)
    assert set(kept.local) == {"gain", "count"}
    assert not torch.equal(kept.local["gain"], torch.ones(6))
    assert int(kept.local["count"]) == 5
    still = LocalState.from_bytes(steps(task(), TASK.initial()).state)
    assert set(still.local) == {"count"}  # no step size, so the gain is frozen
    again = LocalState.from_bytes(kept.to_bytes())
    assert again.counts == kept.counts
    assert torch.equal(again.local["gain"], kept.local["gain"])


def test_a_kept_state_cannot_stand_for_a_federated_weight() -> None:
    theta = TASK.initial()
    planted = LocalState({"out.bias": torch.full((1,), 99.0)})
    np.testing.assert_array_equal(TASK._flatten(TASK.model(theta, planted)), theta)
    for other in (LocalState({"gain": torch.ones(7)}), LocalState({"absent": torch.ones(1)})):
        with pytest.raises(ContractViolation):
            TASK.model(theta, other)


@given(data=st.binary(max_size=200))
def test_a_damaged_state_is_named(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        LocalState.from_bytes(data)


def test_the_frame_is_absorbed_before_the_release_and_its_moments_forgotten() -> None:
    class Turned(Regression):
        def align(self, model: nn.Module) -> tuple[str, ...]:
            assert isinstance(model, Net)
            model.out.bias.zero_()
            return ("out.bias",)

    result = steps(task("inner.optimizer=adamw", Turned), TASK.initial())
    assert result.theta[40] == 0
    kept = LocalState.from_bytes(result.state)
    assert "out.bias" not in kept.counts
    assert set(kept.moments["exp_avg"]) == {"hidden.weight", "hidden.bias", "out.weight"}


# ------------------------------------------------------------------ what goes wrong


def broken(what: str) -> type[Recipe]:
    class Broken(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            loss = super().loss(model, batch)
            return {"nan": loss * float("nan"), "vector": loss.repeat(2)}.get(what, loss)

        def batches(self, data: Any, rng: np.random.Generator) -> Any:
            return iter(()) if what == "empty" else super().batches(data, rng)

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"accuracy": 1.0} if what == "metric" else super().evaluate(model)

    return Broken


@pytest.mark.parametrize(("what", "error"), [("nan", ContractViolation), ("vector", ContractViolation)])
def test_a_bad_loss_ends_the_steps(what: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        steps(task(recipe=broken(what)), TASK.initial())


def test_no_batches_and_no_metric() -> None:
    with pytest.raises(DataError):
        steps(task(recipe=broken("empty")), TASK.initial())
    with pytest.raises(ConfigError, match="evaluate gave no loss"):
        task(recipe=broken("metric")).evaluate(TASK.initial())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["out.weight", "absent"], "no parameter 'absent'"),
        ([], "names no parameter"),
        (["out.bias", "out.bias"], "one twice"),
        (["basis.weight"], "requires no gradient"),
        (["count"], "no parameter"),
    ],
)
def test_what_cannot_be_federated_is_refused(names: list[str], says: str) -> None:
    class Names(Regression):
        def federated(self, model: nn.Module) -> list[str]:
            return names

    with pytest.raises(ConfigError, match=says):
        task(recipe=Names)


def test_a_model_of_doubles_or_no_model_is_refused() -> None:
    class Doubles(Regression):
        def build_model(self) -> nn.Module:
            return Net().double()

    class Nothing(Regression):
        def build_model(self) -> nn.Module:
            return None  # type: ignore[return-value]

    with pytest.raises(ConfigError, match="not float32"):
        task(recipe=Doubles)
    with pytest.raises(ConfigError, match="not a torch"):
        task(recipe=Nothing)


def test_hashes_of_rows_differ_and_repeat() -> None:
    hashes = TASK.episode_hashes(0)
    assert len(set(hashes)) == 24
    assert task().episode_hashes(0) == hashes
    assert not set(TASK.episode_hashes(1)) & set(hashes)


# ------------------------------------------------------------------ in a federation


def federation(tmp_path: Path, own: TorchTask, more: str = "") -> Federation:
    made = Federation(tmp_path, more)
    made.config, made.task = config(more), own
    made.transport.config, made.transport.task = made.config, own
    return made


@pytest.mark.parametrize("mode", ["", "privacy=disabled secagg.range=5"])
def test_rounds_with_masks_and_noise(tmp_path: Path, mode: str) -> None:
    from lensemble_flwr.federation.policy import save_policy, simulated_policy

    more = f"diloco.rounds=2 {mode}".strip()
    made = federation(tmp_path, task(more), more)
    for node in made.transport.members.values():
        save_policy(node.site.folder / "policy.json", simulated_policy(made.config))
    made.start()
    assert made.transport.errors == []
    assert [(r["outcome"], r["participants"]) for r in made.rounds()] == [("committed", 4)] * 2
    assert all("loss" in r["metrics"] for r in made.rounds())


@pytest.mark.parametrize("private", [True, False])
def test_a_loss_that_is_not_finite_is_a_zero_update_that_nobody_sees(tmp_path: Path, private: bool) -> None:
    from lensemble_flwr.federation.policy import save_policy, simulated_policy

    more = "diloco.rounds=1 " + ("" if private else "privacy=disabled secagg.range=5")
    made = federation(tmp_path, task(more), more)
    for node in made.transport.members.values():
        save_policy(node.site.folder / "policy.json", simulated_policy(made.config))
    victim: Node = next(iter(made.transport.members.values()))
    bad = broken("nan")
    bad.__module__, bad.__qualname__ = Regression.__module__, Regression.__qualname__  # the same code, other data
    victim.task = TorchTask(bad(made.config))
    made.start()
    [record] = made.rounds()
    assert (record["outcome"], record["participants"]) == ("committed", 4 if private else 3)
    assert bool(made.transport.errors) == (not private)
    log = (victim.site.folder / "site.log").read_text() if private else ""
    assert ("a zero update is sent" in log) == private


def test_a_site_whose_rules_do_not_list_the_task_does_not_join(tmp_path: Path) -> None:
    more = "diloco.rounds=1"
    made = federation(tmp_path, task(more), more)  # these sites' policies were written for task=linear
    with pytest.raises(Exception, match=r"FAULT_TOLERANCE|joined"):
        made.start()
    assert {type(error).__name__ for _, _, error in made.transport.errors} == {"PolicyViolation"}
    assert made.ledger_rounds() == [0, 0, 0, 0]
