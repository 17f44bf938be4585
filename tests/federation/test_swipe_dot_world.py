"""data=swipe_dot as a world: its recordings are those of its seeds, and a federation trains on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.data.episodes import episode_hashes
from lensemble_flwr.data.swipe_dot import BODY
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.swipe_dot_world import SwipeDotWorld
from lensemble_flwr.federation.world_data import build_world
from lensemble_flwr.federation.world_task import WorldTask

SMALL = (
    "experiment=swipe_dot model.width=16 model.depth=1 model.latent_dim=4 data.heldout_episodes=6 inner.batch_size=4 "
    "data.public_episodes=16 data.episodes_per_participant=4"
)


def test_the_benchmark_is_the_one_of_the_note() -> None:
    config = load_config("experiment=swipe_dot")
    world = build_world(config, None)
    assert isinstance(world, SwipeDotWorld)
    assert (world.spec.reach, world.spec.spread, world.spec.steps) == (0.7, 0.06, 16)
    assert (world.spec.silo_seeds, world.spec.heldout_seed) == ((11, 22, 33), 99)
    silos = [world.participant(i) for i in range(3)]
    assert [len(silo) for silo in silos] == [40, 40, 40]
    assert silos[0].episode(0).frames.shape == (17, 48, 48, 3)
    assert config.diloco.rounds * config.diloco.inner_steps == 300
    assert not config.privacy.enabled
    everybody = [set(episode_hashes(s)) for s in (*silos, world.public(BODY), world.heldout()["heldout"][BODY].source)]
    assert sum(map(len, everybody)) == len(set.union(*everybody))


def test_the_runs_seed_changes_weights_and_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path))
    one, two = (WorldTask(load_config(f"{SMALL} seed={seed}")) for seed in (0, 1))
    for task in (one, two):
        task.prepare()
    assert one.episode_hashes(1) == two.episode_hashes(1)
    assert not np.array_equal(one.initial(), two.initial())
    before = one.evaluate(one.initial())
    result = one.local_update(one.initial(), 0, None, steps=2, sketch_seed=0, round_index=0)
    assert not np.array_equal(result.theta, one.initial())
    assert set(before) == set(one.evaluate(result.theta)) >= {"state_probe_r2", "r5", "latent_std_mean"}
    assert one.headline == "state_probe_r2"
    assert one.rehearsal_metric in before


def test_confined_silos_see_their_own_corner_and_the_public_all() -> None:
    world = build_world(load_config(f"{SMALL} data.confinement=1"), None)
    for silo, corner in enumerate(([0, 0], [0.5, 0], [0, 0.5])):
        source = world.participant(silo)
        states = np.concatenate([source.episode(i).states for i in range(len(source))])
        np.testing.assert_allclose(states.min(axis=0), corner, atol=0.02)
        np.testing.assert_allclose(states.max(axis=0), np.array(corner) + 0.5, atol=0.02)
    seen = world.public(BODY)
    assert np.ptp(np.concatenate([seen.episode(i).states for i in range(len(seen))]), axis=0).min() > 0.9


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.silo_seeds=[11,22]", "Give each participant a seed"),
        ("data.silo_seeds=[11,22,99]", "equal seeds are equal recordings"),
        ("data.steps=5", "data.steps must lie in"),
        ("data.heldout_episodes=1", "at least 2"),
        ("data.episodes_per_participant=0", "at least 1"),
        ("data.spread=0", "must be positive"),
        ("data.confinement=1.5", "0..1"),
        ("data.confinement=nan", "must be finite"),
    ],
)
def test_impossible_worlds_are_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_world(load_config(["experiment=swipe_dot", override]), None)
    assert told in str(refused.value)


def test_there_is_no_fourth_participant() -> None:
    with pytest.raises(ConfigError, match="no participant 3"):
        build_world(load_config("experiment=swipe_dot"), None).participant(3)
