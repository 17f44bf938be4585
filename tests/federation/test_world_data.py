"""The seam between the task and a world: the lander's caches keep their names, and another world needs only a class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lensemble_flwr.config import Config, config_hash, load_config, resolved
from lensemble_flwr.data import ActionSpec, Episode, MemorySource, lander
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation import world_data
from lensemble_flwr.federation.world_data import HeldOut, StateTargets, build_world
from lensemble_flwr.federation.world_task import WorldTask
from lensemble_flwr.options import Options


def test_the_landers_warm_start_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed key would train every cached warm start anew, and another one than a consortium has pinned."""
    monkeypatch.setattr(lander, "_package_version", lambda name: "1.0")
    keys = {e: WorldTask(load_config(f"experiment={e}"))._public_key for e in ("quickstart", "silos")}
    assert keys == {"quickstart": "399612f44d0271cce230", "silos": "23a85d5a9f24862468cf"}


def test_the_data_group_is_judged_by_the_file_of_its_world() -> None:
    config = load_config("data.wind=8 data.gravity_shift=[-4,-2]")
    assert (config.data.name, config.data.wind, config.data.gravity_shift) == ("lander", 8.0, (-4.0, -2.0))
    assert type(config.data.wind) is float
    assert resolved(config)["data"]["frames"] == 17
    assert config_hash(config) != config_hash(load_config("data.wind=7"))
    with pytest.raises(AttributeError):
        _ = config.data.nothing
    for wrong in ("data.frames=4.5", "data.frames=true", "data.flavour=3", "data.gravity_shift=1", "data.name=nobodys"):
        with pytest.raises(ConfigError):
            load_config(wrong)
    with pytest.raises(ConfigError, match=r"data\.frames"):
        load_config("data.frame=3")


class Blob:
    """A dot that moves by its action: two bodies with other action widths."""

    embodiments = ("one", "two")
    share = 2
    state_targets = StateTargets((0,), ("x",), ("x_rmse", 0))
    main_set = rehearsal_set = "held"
    unseen_metric = "unseen_r2"

    def __init__(self, config: Config, data_dir: Path | None) -> None:
        self.size = config.model.image_size

    def key(self) -> Any:
        return ["blob", self.size]

    heldout_key = key

    def _source(self, name: str, body: str, seed: int, count: int = 4) -> MemorySource:
        width = 1 if body == "one" else 3
        rng = np.random.default_rng(seed)
        episodes = []
        for _ in range(count):
            actions = rng.uniform(-1, 1, (9, width)).astype(np.float32)
            x = np.clip(32 + np.cumsum(np.r_[rng.uniform(-8, 8), 5 * actions[:, 0]]), 4, 59)
            frames = np.zeros((10, self.size, self.size, 3), np.uint8)
            for t, place in enumerate(x.astype(int)):
                frames[t, 28:36, place - 4 : place + 4] = 255
            episodes.append(Episode(frames, actions, x[:, None].astype(np.float32), body))
        return MemorySource(name, ActionSpec("continuous", width), episodes)

    def public(self, body: str) -> MemorySource:
        return self._source("public", body, len(body), 8)

    def heldout(self) -> Mapping[str, Mapping[str, HeldOut]]:
        return {"held": {body: HeldOut(self._source("held", body, 50 + len(body))) for body in self.embodiments}}

    def participant(self, index: int) -> MemorySource:
        return self._source("own", self.body(index), 100 + index)

    def body(self, index: int) -> str:
        return self.embodiments[index % 2]

    def prepare(self, progress: Any) -> None:
        progress("drawing", 1, 1)

    def prepare_participant(self, index: int, progress: Any) -> None: ...


@pytest.fixture
def blob(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    monkeypatch.setitem(world_data.WORLDS, "blob", f"{__name__}:Blob")
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path))
    config = load_config("model=tiny warmstart.steps=20")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, name="blob", options=Options()))


def test_another_world_is_one_class(blob: Config) -> None:
    task = WorldTask(blob)
    task.prepare()
    assert task.rehearsal_metric == "r5"
    for partition in (0, 1):
        result = task.local_update(task.initial(), partition, None, steps=2, sketch_seed=1, round_index=0)
        assert np.isfinite(result.theta).all()
    assert task.public_update(task.initial(), 1, steps=1, sketch_seed=0).shape == (task.dimension,)
    metrics = task.evaluate(task.initial())
    assert {"r5", "r1", "state_probe_r2", "x_rmse", "effective_rank", "latent_std_min"} <= set(metrics)
    assert not {name for name in metrics if "nominal" in name or "altitude" in name or "camera" in name}


def test_an_unknown_world_is_refused(blob: Config) -> None:
    with pytest.raises(ConfigError, match="There is no data="):
        build_world(dataclasses.replace(blob, data=dataclasses.replace(blob.data, name="else")), None)
