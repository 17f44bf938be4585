"""Function-space federation: answers travel, a student is taught their mean, encoders may differ in size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation
from lensemble_flwr.federation.function_task import FunctionTask
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.federation.world_task import WorldTask
from lensemble_flwr.gauge.align import FrameSurface, conjugate
from lensemble_flwr.model.distill import PublicWindows, answers
from lensemble_flwr.model.layout import ParameterLayout
from lensemble_flwr.model.world_model import WorldModel, frame_surface
from tests.federation.harness import Federation
from tests.gauge.test_procrustes import random_orthogonal

TINY = (
    "model=tiny warmstart.steps=40 data.public_episodes=16 data.heldout_shifted=6 data.heldout_nominal=4 "
    "data.episodes_per_participant=2 federation.participants=4 federation.min_participants=4 secagg.min_survivors=3 "
    "federation.surface=function gauge.windows=24 gauge.distill_steps=15 inner.batch_size=8"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(home))


def make(overrides: str = "") -> FunctionTask:
    task = build_task(load_config(f"{TINY} {overrides}"))
    assert isinstance(task, FunctionTask)
    task.prepare()
    return task


STEPS = {"steps": 2, "sketch_seed": 5, "round_index": 0}


def test_theta_is_what_the_public_start_answers() -> None:
    task = make()
    z = task.model_spec.latent_dim
    assert task.dimension == 4 * 24 * z == len(task.initial())
    assert [part.name for part in task.layout] == ["function.latents", "function.predictions"]
    student = task.student(task.initial())
    got = torch.cat(answers(student, task.windows.frames, task.windows.actions)).reshape(-1)
    assert np.abs(got.numpy() - task.initial()).max() < 1e-5
    assert make().base_hash == task.base_hash


def test_windows_come_from_the_probes_episodes_only() -> None:
    """Those are left out of participants' training, so nobody trains on what is asked."""
    task = make()
    held = task.probe.episode_hashes
    sources = [task.world.public(body) for body in task.world.embodiments]
    from lensemble_flwr.data.episodes import episode_hash

    pictures = {
        np.ascontiguousarray(frame.transpose(2, 0, 1)).tobytes()
        for source in sources
        for e in (source.episode(i) for i in range(len(source)))
        if episode_hash(e) in held
        for frame in e.frames
    }
    assert all(frame.numpy().tobytes() in pictures for frame in task.windows.frames.flatten(0, 1))


def test_local_training_moves_the_answers_and_the_student_follows_them() -> None:
    task = make("gauge.distill_steps=120")
    theta = task.initial()
    result = task.local_update(theta, 1, None, **STEPS)
    moved = np.abs(result.theta - theta).max()
    assert moved > 1e-3
    metrics = task.evaluate(result.theta)
    assert metrics["distillation_rms"] < 0.5 * float(np.sqrt(np.mean((result.theta - theta) ** 2)))
    assert np.isfinite(task.local_update(result.theta, 1, result.state, **STEPS).theta).all()


def test_what_is_read_is_read_from_the_students() -> None:
    task = make()
    theta = task.initial()
    found = task.readings({"start": theta, "final": np.zeros_like(theta)})
    assert found is not None
    start, final = found.models
    assert (start.model, final.model) == ("start", "final")
    assert np.isfinite(start.seen).all()
    assert not np.allclose(start.seen, final.seen)


def test_students_do_not_share_a_workspace() -> None:
    task = make()
    theta = task.initial()
    task.local_update(theta, 0, None, **STEPS)
    again = torch.cat(answers(task.student(theta), task.windows.frames, task.windows.actions)).reshape(-1)
    assert np.abs(again.numpy() - theta).max() < 1e-5


@pytest.mark.parametrize("reflect", [False, True])
def test_a_turned_function_is_brought_back(reflect: bool) -> None:
    task = make()
    model = task.student(task.initial())
    q = random_orthogonal(task.model_spec.latent_dim, 4, reflect)
    model.load_state_dict(conjugate(model.state_dict(), FrameSurface(**frame_surface(task.model_spec)), q))
    assert np.abs(task._released(model) - task.initial()).max() < 1e-4
    off = make("gauge.align=false")
    assert np.abs(off._released(model) - task.initial()).max() > 0.1


def test_a_federation_of_encoders_of_different_size(tmp_path: Path) -> None:
    """Through the real round with masks: what is committed is the mean of what each released."""
    task = make("gauge.student_widths=[32,16]")
    shapes = {tuple(p.shape) for i in (0, 1) for p in WorldModel(task._spec(i)).parameters()}
    assert ParameterLayout.of(task._spec(0), "full").size != ParameterLayout.of(task._spec(1), "full").size
    assert shapes
    federation = Federation(tmp_path, "privacy=disabled secagg.range=64 diloco.rounds=1 diloco.inner_steps=2")
    released = {}
    inner = task.local_update

    def spy(theta: np.ndarray, partition: int, state: bytes | None, **kw: int) -> object:
        result = inner(theta, partition, state, **kw)  # type: ignore[arg-type]
        released[partition] = result.theta
        return result

    task.local_update = spy  # type: ignore[method-assign, assignment]
    federation.task = federation.transport.task = task
    final = federation.start()
    assert len(released) == 4
    assert np.abs(final - np.mean(list(released.values()), axis=0)).max() < 1e-5
    assert federation.rounds()[0]["metrics"]["r5"] > 0


def test_a_frozen_encoder_stays_bit_for_bit() -> None:
    """Fork A: with the predictor alone federated, no latent of any picture moves."""
    config = load_config(f"{TINY} federation.surface=predictor inner.optimizer=adamw")
    task = WorldTask(config)
    task.prepare()
    before = task.warm.build_model().encode(task._landmarks)
    result = task.local_update(task.initial(), 1, None, **STEPS)
    assert np.abs(result.theta - task.initial()).max() > 0
    model = task.warm.build_model()
    task._layout.write(model, result.theta)
    assert torch.equal(model.encode(task._landmarks), before)
    assert all(part.name.startswith("predictor.") for part in task.layout)


def test_layers_can_be_switched_off() -> None:
    full = f"{TINY} federation.surface=full inner.optimizer=adamw"
    thetas = {}
    for name, extra in {
        "all": "gauge.anchor=landmark objective.lambda_anc=0.5",
        "no anchor": "gauge.anchor=none objective.lambda_anc=0.5",
        "rotational": "gauge.anchor=rotational objective.lambda_anc=0.5",
        "own sketch": "gauge.anchor=landmark objective.lambda_anc=0.5 gauge.shared_sketch=false",
    }.items():
        task = WorldTask(load_config(f"{full} {extra}"))
        task.prepare()
        thetas[name] = task.local_update(task.initial(), 1, None, **STEPS).theta
    for name in ("no anchor", "rotational", "own sketch"):
        assert not np.array_equal(thetas["all"], thetas[name]), name
    untrained = WorldTask(load_config(f"{full} warmstart.steps=0"))
    untrained.prepare()
    assert untrained.base_hash != task.base_hash
    assert untrained.evaluate(untrained.initial())["r5"] > 0


def test_alignment_off_releases_the_turned_weights() -> None:
    task = WorldTask(load_config(f"{TINY} federation.surface=full gauge.align=false"))
    task.prepare()
    model = task.warm.build_model()
    q = random_orthogonal(task.model_spec.latent_dim, 4)
    model.load_state_dict(conjugate(model.state_dict(), FrameSurface(**frame_surface(task.model_spec)), q))
    released, reset = task._aligned(model)
    assert np.array_equal(released, task._layout.flatten(model))
    assert reset == ()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different size"):
        load_config("federation.surface=full gauge.student_widths=[32,16]")
    with pytest.raises(ConfigError):
        load_config("gauge.windows=0")
    task = make()
    with pytest.raises(ContractViolation):
        task.student(task.initial()[:-1])
    with pytest.raises(ArtifactError):
        PublicWindows.load(tmp_path / "none")
    path = tmp_path / "windows"
    task.windows.save(path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match="hash"):
        PublicWindows.load(path)
