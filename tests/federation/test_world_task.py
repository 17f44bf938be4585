"""The world model as a task: alignment before release, residency of heads, contamination, and that it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import (
    ArtifactError,
    CheckpointIntegrityError,
    ConfigError,
    LensembleError,
    ResidencyViolation,
)
from lensemble_flwr.federation.task import theta_hash
from lensemble_flwr.federation.world_task import WorldTask
from lensemble_flwr.gauge.align import FrameSurface, conjugate
from lensemble_flwr.model.layout import ParameterLayout
from lensemble_flwr.model.world_model import frame_surface

TINY = (
    "model=tiny warmstart.steps=40 data.public_episodes=16 data.heldout_shifted=6 data.heldout_nominal=4 "
    "data.episodes_per_participant=2 federation.participants=4 federation.min_participants=4 secagg.min_survivors=3"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(home))


def make(overrides: str = "") -> WorldTask:
    task = WorldTask(load_config(f"{TINY} {overrides}"))
    task.prepare()
    return task


@pytest.mark.parametrize("surface", ["adapter", "predictor", "full"])
def test_surfaces(surface: str) -> None:
    task = make(f"federation.surface={surface} inner.optimizer=adamw inner.batch_size=16 inner.lr=0.001")
    theta = task.initial()
    assert theta.dtype == np.float32
    assert theta.shape == (task.dimension,)
    assert all(not part.name.startswith("head") for part in task.layout)
    result = task.local_update(theta, 1, None, steps=3, sketch_seed=5, round_index=0)
    assert np.abs(result.theta - theta).max() > 0
    again = task.local_update(result.theta, 1, result.state, steps=3, sketch_seed=6, round_index=1)
    assert np.isfinite(again.theta).all()
    metrics = task.evaluate(again.theta)
    assert {"r5", "r1", "effective_rank", "latent_std_mean", "state_probe_r2"} <= set(metrics)


def test_landmark_norm_moves_the_full_surface_only() -> None:
    common = "inner.optimizer=adamw inner.batch_size=8"
    trained = {}
    for surface in ("full", "predictor"):
        for norm in ("true", "false"):
            task = make(f"federation.surface={surface} {common} inner.landmark_norm={norm}")
            result = task.local_update(task.initial(), 0, None, steps=2, sketch_seed=5, round_index=0)
            trained[surface, norm] = result.theta
    assert not np.array_equal(trained["full", "true"], trained["full", "false"])
    assert np.array_equal(trained["predictor", "true"], trained["predictor", "false"])


def test_cameras_of_their_own_share_the_warm_start_and_are_read_by_one_probe() -> None:
    one, own = make("federation.surface=full"), make("federation.surface=full data.cameras=own data.heldout_shifted=20")
    assert one.base_hash == own.base_hash  # public data are seen through no camera
    assert not torch.equal(one.local_data(2).frames, own.local_data(2).frames)
    metrics = own.evaluate(own.initial())
    assert np.isfinite(metrics["state_probe_r2"])
    assert metrics["unseen_camera_r2"] != metrics["state_probe_r2"]
    assert "unseen_camera_r2" not in one.evaluate(one.initial())


def test_everybody_builds_the_same_public_constants() -> None:
    one, two = make(), make()
    assert one.base_hash == two.base_hash
    assert one.probe_hash == two.probe_hash
    assert theta_hash(one.layout, one.initial()) == theta_hash(two.layout, two.initial())
    assert one.sketch_hash(9) == two.sketch_hash(9) != one.sketch_hash(10)


def test_another_warm_start_than_the_pinned_one_is_refused() -> None:
    make()
    with pytest.raises(CheckpointIntegrityError, match="expected"):
        _ = WorldTask(load_config(f"{TINY} warmstart.sha256={'ab' * 32}")).base_hash


def test_a_missing_warm_start_is_told() -> None:
    with pytest.raises(ArtifactError):
        _ = WorldTask(load_config(f"{TINY} warmstart.steps=41")).base_hash


@pytest.mark.parametrize("reflect", [False, True])
def test_a_rotated_participant_is_restored_before_it_releases(reflect: bool) -> None:
    """Rotated by a known Q (a reflection too), the aligned weights are the unrotated ones to 1e-5."""
    task = make("federation.surface=full")
    model = task.warm.build_model()
    generator = torch.Generator().manual_seed(3)
    d = task.model_spec.latent_dim
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    if (torch.det(q) < 0) != reflect:
        q[:, 0] *= -1
    layout = ParameterLayout.of(task.model_spec, "full")
    unrotated = layout.flatten(model)
    model.load_state_dict(conjugate(model.state_dict(), FrameSurface(**frame_surface(task.model_spec)), q))
    assert np.abs(layout.flatten(model) - unrotated).max() > 0.1
    aligned, reset = task._aligned(model)
    assert np.abs(aligned - unrotated).max() < 1e-5
    assert "encoder.frame_proj.weight" in reset


def test_the_sum_of_aligned_updates_is_the_sum_of_unrotated_ones() -> None:
    """Three participants trained the dynamics, and each turned its latent frame on the way."""
    task = make("federation.surface=full")
    theta = task.initial()
    layout = ParameterLayout.of(task.model_spec, "full")
    surface = FrameSurface(**frame_surface(task.model_spec))
    inside = np.concatenate(
        [np.full(p.size, p.name.startswith("predictor.") and p.name not in surface.names) for p in task.layout]
    )
    plain, aligned = np.zeros(task.dimension), np.zeros(task.dimension)
    for partition in range(3):
        rng = np.random.default_rng(partition)
        local = (theta + 0.05 * inside * rng.standard_normal(theta.size)).astype(np.float32)
        plain += local - theta
        model = task.warm.build_model()
        layout.write(model, local)
        generator = torch.Generator().manual_seed(partition)
        d = task.model_spec.latent_dim
        q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        model.load_state_dict(conjugate(model.state_dict(), surface, q))
        aligned += task._aligned(model)[0] - theta
    assert np.abs(plain).max() > 0.1
    assert np.abs(aligned - plain).max() < 3e-5


def test_an_action_head_cannot_be_federated() -> None:
    with pytest.raises(ResidencyViolation):
        ParameterLayout.from_shapes("full", {"encoder.a": (2,), "head.w": (2,)})


def test_probe_episodes_in_a_participants_data_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make()
    own = task.episode_hashes(0)
    whole = task.local_data(0)
    monkeypatch.setitem(task.__dict__, "reserved", frozenset({own[0]}))
    assert len(task.local_data(0).lengths) == len(whole.lengths) - 1


def test_pseudo_participants_hold_public_episodes_only() -> None:
    task = make()
    private = {h for i in range(4) for h in task.episode_hashes(i)}
    from lensemble_flwr.data.episodes import episode_hashes

    public = {h for body in task.world.embodiments for h in episode_hashes(task.world.public(body))}
    assert not private & public
    assert task.public_update(task.initial(), 1, steps=2, sketch_seed=0).shape == (task.dimension,)


def test_a_real_site_holds_its_own_recordings_and_verified_public_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = make()
    steps = {"steps": 1, "sketch_seed": 1, "round_index": 0}
    theirs = shared.local_update(shared.initial(), 1, None, **steps)  # now: what is read later comes from another home
    hashes, constants = shared.episode_hashes(1), (shared.base_hash, shared.probe_hash)
    public = tmp_path / "public"
    public.mkdir()
    for path in shared.public_files():
        (public / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "site-home"))
    site = WorldTask(load_config(TINY), tmp_path / "data")
    site.prepare_participant(1, public)
    assert [p.name for p in (tmp_path / "data").rglob("*.npz")] == ["participant-00001.npz"]
    assert not list((tmp_path / "site-home").rglob("*.npz"))  # nobody else's data, and no public recordings
    assert (site.base_hash, site.probe_hash) == constants
    assert site.episode_hashes(1) == hashes
    assert np.array_equal(site.local_update(site.initial(), 1, None, **steps).theta, theirs.theta)
    with pytest.raises(ConfigError, match="participant 4"):
        site.prepare_participant(4, public)
    with pytest.raises(ArtifactError):
        site.episode_hashes(0)

    for path in public.iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(LensembleError):
            WorldTask(load_config(TINY), tmp_path / "data").prepare_participant(1, public)
        path.unlink()
        with pytest.raises(ArtifactError, match="does not hold"):
            WorldTask(load_config(TINY), tmp_path / "data").prepare_participant(1, public)
        path.write_bytes(whole)
