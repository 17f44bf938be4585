"""Sites train on recordings of their own: other robots, fresh heads, public evaluation, and what is left out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble_flwr.config import Config, load_config
from lensemble_flwr.data.formats import RecordingSpec
from lensemble_flwr.errors import ConfigError, DataError, LensembleError, PolicyViolation
from lensemble_flwr.federation.site_dataset import (
    SiteDataset,
    check_dataset,
    check_simulated,
    load_dataset,
    save_dataset,
)
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.federation.world_task import WorldTask
from lensemble_flwr.model.inner import InnerState
from lensemble_flwr.model.spec import HeadSpec
from lensemble_flwr.preflight import run_preflight
from tests.federation.harness import Federation
from tests.federation.robots import public, record

RUN = "experiment=recordings model=tiny warmstart.steps=8 diloco.rounds=2 diloco.inner_steps=3 inner.batch_size=8"
TWO = "federation.participants=2 federation.min_participants=2 secagg.min_survivors=2 secagg.allow_two_party=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Public recordings, those of two sites, and a home with the public start."""
    folder = tmp_path_factory.mktemp("robots")
    public(folder / "public")
    record(folder / "dot", "dot", 5, 1)
    record(folder / "arm", "arm", 4, 2)
    return folder


@pytest.fixture(autouse=True)
def own_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(folder / "home"))


def pinned(folder: Path, more: str = "") -> str:
    """Overrides with the fingerprint of the public recordings, as `coordinator public` prints it."""
    overrides = f"{RUN} data.public={folder / 'public' / 'sets.yaml'} {more}"
    with pytest.raises(ConfigError) as caught:
        WorldTask(load_config(overrides)).prepare()
    return f"{overrides} {caught.value.message.split()[-1]}"


def coordinator(folder: Path, more: str = "") -> tuple[str, WorldTask]:
    overrides = pinned(folder, more)
    task = WorldTask(load_config(overrides))
    task.prepare()
    return overrides, task


def site(config: Config, folder: Path, name: str, tmp: Path, **spec: object) -> WorldTask:
    found = SiteDataset(folder / name, RecordingSpec.from_dict(spec), tmp / f"cache-{name}")
    return WorldTask(config, None, found)


def head_of(state: bytes) -> HeadSpec:
    return InnerState.from_bytes(state).head_spec


def test_two_robots_federate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, task = coordinator(folder, TWO)
    federation = Federation(tmp_path, overrides)
    nodes = sorted(federation.transport.members.items())
    sites = [site(federation.config, folder, name, tmp_path) for name in ("dot", "arm")]
    for (_, node), own in zip(nodes, sites, strict=True):
        node.task = own
    theta = federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"] * 2
    assert not federation.transport.errors
    assert np.abs(theta - task.initial()).max() > 0
    metrics = task.evaluate(theta)
    assert {"r5", "r1", "effective_rank", "latent_std_mean", "state_probe_r2"} <= set(metrics)
    assert all(np.isfinite(value) for value in metrics.values())
    assert task.headline == task.rehearsal_metric == "r5"
    kept = [node.site.local_state(federation.folder.federation_id) for _, node in nodes]  # type: ignore[union-attr]
    assert [head_of(state) for state in kept if state] == [HeadSpec("continuous", 2), HeadSpec("continuous", 7)]
    known, fresh = (InnerState.from_bytes(state).head for state in kept if state)
    assert {name for name in known} == {name for name in fresh}
    # Both trained their heads, each from its own start; neither is in what travels.
    assert not any("head" in part.name for part in task.layout)
    # Every message is a new process at a real site: it reads the latents that it kept, and they are the same.
    again = site(federation.config, folder, "arm", tmp_path)
    monkeypatch.setattr(again, "local_data", lambda partition: pytest.fail("encoded again"))
    assert torch.equal(again.training_data(1).actions, sites[1].training_data(1).actions)


def test_a_known_body_starts_from_the_public_head_and_another_from_a_fresh_one(folder: Path, tmp_path: Path) -> None:
    overrides, task = coordinator(folder)
    config = load_config(overrides)
    dot, arm = (site(config, folder, name, tmp_path) for name in ("dot", "arm"))
    state = dot._inner_state(0, None)
    assert all(torch.equal(value, task.warm.heads["dot"][name]) for name, value in state.head.items())
    assert arm._inner_state(0, None).head_spec == HeadSpec("continuous", 7)
    assert torch.equal(arm._inner_state(0, None).head["inner.weight"], arm._inner_state(0, None).head["inner.weight"])
    other = site(config, folder, "dot", tmp_path, body="grid")  # the name of a public body, other actions
    assert other._inner_state(0, None).head_spec == HeadSpec("continuous", 2)
    # The first step of the head that a site does not share moves it.
    trained = arm.local_update(arm.initial(), 0, None, steps=2, sketch_seed=1, round_index=0)
    assert not torch.equal(
        InnerState.from_bytes(trained.state).head["inner.weight"], arm._inner_state(0, None).head["inner.weight"]
    )


@pytest.mark.parametrize("surface", ["adapter", "predictor", "full"])
def test_every_surface_trains_on_recordings(folder: Path, tmp_path: Path, surface: str) -> None:
    overrides, task = coordinator(folder, f"federation.surface={surface} privacy=central privacy.clip_norm=1")
    arm = site(load_config(overrides), folder, "arm", tmp_path)
    result = arm.local_update(arm.initial(), 0, None, steps=2, sketch_seed=1, round_index=0)
    assert np.abs(result.theta - arm.initial()).max() > 0
    assert task.public_update(task.initial(), 1, steps=1, sketch_seed=0).shape == (task.dimension,)


def test_the_run_names_the_public_recordings_and_only_their_hash_names_the_start(folder: Path, tmp_path: Path) -> None:
    overrides, task = coordinator(folder)
    site_config = load_config(overrides.replace(str(folder / "public" / "sets.yaml"), "/nowhere"))
    own = WorldTask(site_config, None, SiteDataset(folder / "arm", RecordingSpec(), tmp_path / "cache"))
    assert own.base_hash == task.base_hash
    with pytest.raises(ConfigError, match=r"data\.public_sha256"):
        _ = WorldTask(load_config(f"{RUN}"))._public_key
    wrong = " ".join(o for o in overrides.split() if "sha256" not in o) + f" data.public_sha256={'ab' * 32}"
    with pytest.raises(ConfigError, match="abab"):
        WorldTask(load_config(wrong)).prepare()
    with pytest.raises(DataError, match="no recordings"):
        task.local_data(0)


def test_public_files_are_all_that_a_site_needs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, task = coordinator(folder)
    files = tmp_path / "files"
    files.mkdir()
    for path in task.public_files():
        shutil.copy(path, files)
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    own = site(load_config(overrides), folder, "arm", tmp_path)
    own.prepare_participant(0, files)
    assert own.base_hash == task.base_hash
    assert not (tmp_path / "home" / "public").exists()
    damaged = files / task.public_files()[2].name
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(LensembleError, match="evaluation"):
        site(load_config(overrides), folder, "arm", tmp_path).prepare_participant(0, files)


def plant(folder: Path, tmp_path: Path, task: WorldTask, own: int) -> Path:
    """A site's folder with ``own`` recordings of its own and every public one of the body that is held out."""
    where = tmp_path / "planted"
    record(where, "dot", own, 77) if own else shutil.copytree(folder / "dot", where)
    if not own:
        for path in where.glob("*.npz"):
            path.unlink()
    held = task.world.heldout()["heldout"]["dot"].source
    names = {str(held.episode(i).meta["recording"]) for i in range(len(held))}
    for name in names:
        shutil.copy(folder / "public" / "dot" / name, where / f"copy-{name}")
    return where


def test_public_evaluation_episodes_are_left_out_and_named_at_the_site_only(folder: Path, tmp_path: Path) -> None:
    overrides, task = coordinator(folder)
    plant(folder, tmp_path, task, 3)
    own = site(load_config(overrides), tmp_path, "planted", tmp_path)
    assert own.excluded(0) == sorted(p.name for p in (tmp_path / "planted").glob("copy-*"))
    assert len(own.episode_hashes(0)) == 3 + len(own.excluded(0))  # the root commits to all that is there
    assert len(own.training_data(0).lengths) == 3
    assert len(own.local_data(0).lengths) == 3
    assert site(load_config(overrides), folder, "dot", tmp_path).excluded(0) == []


def test_a_site_with_nothing_else_sends_a_zero_update_and_nobody_learns_of_it(folder: Path, tmp_path: Path) -> None:
    overrides, task = coordinator(
        folder,
        "federation.surface=adapter privacy=central privacy.clip_norm=0.1 privacy.accept_noise=true "
        "privacy.target_epsilon=50 diloco.rounds=1",
    )
    plant(folder, tmp_path, task, 0)
    federation = Federation(tmp_path / "run", overrides)
    for (_, node), name in zip(sorted(federation.transport.members.items()), ("planted", "dot", "arm"), strict=True):
        where = tmp_path if name == "planted" else folder
        node.task = site(federation.config, where, name, tmp_path)
    federation.start()
    assert [r["outcome"] for r in federation.rounds()] == ["committed"]
    assert not federation.transport.errors
    logs = [node.site.folder / "site.log" for _, node in sorted(federation.transport.members.items())]
    assert ["zero update" in p.read_text() if p.is_file() else False for p in logs] == [True, False, False]


def test_state_is_an_input_of_the_local_head_only(folder: Path, tmp_path: Path) -> None:
    overrides, task = coordinator(folder, "model.proprio=local")
    plain = coordinator(folder)[1]
    assert task.base_hash != plain.base_hash
    assert task.layout == plain.layout  # nothing of it is federated
    assert task.warm.bodies["dot"] == HeadSpec("mixed", 4)
    own = site(load_config(overrides), folder, "arm", tmp_path, state_keys=["state"])
    assert own._inner_state(0, None).head_spec == HeadSpec("mixed", 9)
    data = own.training_data(0)
    assert data.actions.shape[1] == 9
    rows = data.actions[:, 7:]
    assert float(rows.abs().max()) < 10  # standardised
    result = own.local_update(own.initial(), 0, None, steps=2, sketch_seed=1, round_index=0)
    assert np.isfinite(result.theta).all()
    assert np.isfinite(list(task.evaluate(result.theta).values())).all()
    without = site(load_config(overrides), folder, "arm", tmp_path)  # optional: no states, no such input
    assert without._inner_state(0, None).head_spec == HeadSpec("continuous", 7)


def test_recordings_without_states_are_evaluated_without_a_probe(tmp_path: Path) -> None:
    public(tmp_path / "public", states=False)
    _, task = coordinator(tmp_path)
    metrics = task.evaluate(task.initial())
    assert "state_probe_r2" not in metrics
    assert {"r5", "r1", "effective_rank", "latent_std_min"} <= set(metrics)
    with pytest.raises(ConfigError, match="state_keys"):
        WorldTask(load_config(pinned_anyway(tmp_path))).prepare()


def pinned_anyway(folder: Path) -> str:
    return f"{RUN} data.public={folder / 'public' / 'sets.yaml'} data.state_probe=true data.public_sha256={'0' * 64}"


def test_the_runs_shape_binds_a_site(folder: Path, tmp_path: Path) -> None:
    run = load_config(f"{RUN} data.frameskip=2")
    with pytest.raises(PolicyViolation, match=r"dataset\.yaml"):
        check_dataset(run, None)
    with pytest.raises(PolicyViolation, match="frameskip"):
        check_dataset(run, SiteDataset(folder / "arm", RecordingSpec(), tmp_path))
    check_dataset(run, SiteDataset(folder / "arm", RecordingSpec(frameskip=2), tmp_path))
    check_dataset(load_config("experiment=linear"), None)
    overrides, _ = coordinator(folder)
    narrow = load_config(f"{overrides} data.max_action_width=4")
    with pytest.raises(DataError, match="7 wide"):
        site(narrow, folder, "arm", tmp_path).local_data(0)
    for wrong in ("data.heldout=1.5", "data.pseudo_episodes=0", "data.public_sha256=abc", "data.state_columns=[-1]"):
        with pytest.raises(ConfigError):
            WorldTask(load_config(f"{overrides} {wrong}"))


def test_a_simulated_run_names_the_sites_without_recordings(folder: Path, tmp_path: Path) -> None:
    config = load_config(f"{RUN} {TWO}")
    for number in range(2):
        with pytest.raises(ConfigError, match=f"{2 - number} of 2 sites .*: site-000{number}"):
            check_simulated(config, tmp_path)
        (tmp_path / f"site-000{number}").mkdir()
        save_dataset(tmp_path / f"site-000{number}", folder / "arm", RecordingSpec())
    check_simulated(config, tmp_path)
    check_simulated(load_config("experiment=linear"), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("rate", "text"), [("0.002", "trains a fresh"), ("0", "WARNING: .*untrained.*head_lr above 0")]
)
def test_preflight_says_which_bodies_are_public(folder: Path, rate: str, text: str) -> None:
    overrides, _ = coordinator(folder, f"inner.head_lr={rate}")
    line = next(x for x in run_preflight(load_config(overrides)).text(short=True).splitlines() if "bodies" in x)
    assert re.search(text, line)
    assert "dot, grid" in line


def test_a_sites_description_of_its_recordings(folder: Path, tmp_path: Path) -> None:
    assert load_dataset(tmp_path) is None
    save_dataset(tmp_path, folder / "arm", RecordingSpec(camera="top", frameskip=3, state_keys=("state",)))
    found = load_dataset(tmp_path)
    assert found is not None
    assert (found.path, found.spec.camera, found.spec.frameskip) == (folder / "arm", "top", 3)
    assert found.spec.state_keys == ("state",)
    assert (tmp_path / "dataset.yaml").stat().st_mode & 0o777 == 0o600
    for text in (
        "",
        "camera: top",
        "path: a\nimage_size: 3",
        "path: a\nnothing: 1",
        "path: a\nframeskip: x",
        "path: [1",
    ):
        (tmp_path / "dataset.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"dataset\.yaml"):
            load_dataset(tmp_path)


def test_a_changed_recording_is_hashed_again(folder: Path, tmp_path: Path) -> None:
    overrides, _ = coordinator(folder)
    shutil.copytree(folder / "arm", tmp_path / "arm")
    before = site(load_config(overrides), tmp_path, "arm", tmp_path).episode_hashes(0)
    task = site(load_config(overrides), tmp_path, "arm", tmp_path)
    task.world._own.source.episode = lambda index: pytest.fail("decoded again")  # type: ignore[attr-defined]
    assert task.episode_hashes(0) == before
    shutil.copy(folder / "public" / "dot" / "000.npz", tmp_path / "arm" / "000.npz")
    shutil.rmtree(tmp_path / "arm")
    record(tmp_path / "arm", "arm", 4, 3)
    assert site(load_config(overrides), tmp_path, "arm", tmp_path).episode_hashes(0) != before


@pytest.mark.parametrize(("cache", "proprio"), [(True, "none"), (False, "local")])
@pytest.mark.parametrize("surface", ["full", "predictor"])
def test_pictures_on_the_disk_train_the_same_weights_to_the_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surface: str, cache: bool, proprio: str
) -> None:
    overrides, task = coordinator(folder, f"federation.surface={surface} model.proprio={proprio}")
    plant(folder, tmp_path, task, 4)  # some episodes are left out

    def trained(name: str) -> tuple[np.ndarray, bytes]:
        own = site(load_config(overrides), tmp_path, "planted", tmp_path / name, cache=cache, state_keys=["state"])
        assert isinstance(own.local_data(0).frames, torch.Tensor) == (name == "memory")
        found = own.local_update(own.initial(), 0, None, steps=3, sketch_seed=1, round_index=0)
        return found.theta, found.state

    stored = trained("stored")
    monkeypatch.setattr("lensemble_flwr.federation.world_task.windowed", lambda source: None)
    memory = trained("memory")
    assert np.array_equal(stored[0], memory[0])
    assert stored[1] == memory[1]


def test_a_site_with_recordings_of_its_own_can_answer_as_a_function(tmp_path: Path) -> None:
    found = SiteDataset(tmp_path, RecordingSpec(), tmp_path / "cache")
    task = build_task(load_config(f"{RUN} federation.surface=function"), None, (), found)
    assert task._cache_dir == found.cache  # type: ignore[attr-defined]
