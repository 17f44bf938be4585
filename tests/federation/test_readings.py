"""readings.json: bounded whatever is written, strict about what is read; and what a world task puts into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from lensemble_flwr.config import load_config
from lensemble_flwr.data.swipe_dot import draw
from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.federation.linear_task import LinearTask
from lensemble_flwr.federation.readings import (
    MAX_BYTES,
    MAX_COLUMNS,
    MAX_PICTURES,
    MAX_SIDE,
    MAX_STEPS,
    Reading,
    Readings,
    from_json,
    spaced,
    to_json,
)
from lensemble_flwr.federation.swipe_dot_world import SwipeDotWorld
from lensemble_flwr.federation.task import Shows
from lensemble_flwr.federation.world_data import StateTargets
from lensemble_flwr.federation.world_task import WorldTask
from tests.federation.harness import Federation
from tests.federation.test_swipe_dot_world import SMALL

PLACE = ((0.5, 0.5), (0.7, -0.5))


def made(frames: int = 12, columns: int = 2, side: int = 24, pictures: bool = True) -> Readings:
    rng = np.random.default_rng(0)
    truth = rng.uniform(-1, 1, (frames, columns))
    models = []
    for name, noise in (("start", 0.5), ("final", 0.1)):
        read = truth + noise * rng.standard_normal(truth.shape)
        ahead = read.copy()
        ahead[:6] = np.nan
        models.append(Reading(name, read, ahead))
    shown = spaced(6, min(frames, MAX_STEPS) - 1) if pictures else ()
    seen = rng.integers(0, 256, (len(shown), side, side, 3), np.uint8) if pictures else None
    names = tuple(f"column {i}" for i in range(columns))
    return Readings("robot", names, 5, truth, tuple(models), PLACE if pictures else None, shown, seen)


def test_what_is_written_is_read() -> None:
    readings = made()
    found, rounds = from_json(to_json(readings, 7))
    assert rounds == 7
    assert (found.body, found.names, found.steps, found.shown) == ("robot", ("column 0", "column 1"), 5, readings.shown)
    assert found.in_picture == PLACE
    assert_allclose(found.truth, readings.truth, rtol=1e-4)
    for a, b in zip(found.models, readings.models, strict=True):
        assert a.model == b.model
        assert_allclose(a.predicted, b.predicted, rtol=1e-4)
    assert found.pictures is not None
    assert_array_equal(found.pictures, readings.pictures)


@pytest.mark.parametrize(("columns", "pictures"), [(2, True), (40, False)])
def test_the_file_is_bounded(columns: int, pictures: bool) -> None:
    data = to_json(made(1000, columns, 700, pictures), 3)
    assert len(data) < MAX_BYTES
    found, _ = from_json(data)
    assert found.truth.shape == (MAX_STEPS, min(columns, MAX_COLUMNS))
    if pictures:
        assert found.pictures is not None
        assert len(found.pictures) <= MAX_PICTURES
        assert max(found.pictures.shape[1:3]) <= MAX_SIDE


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree.update(values)


@pytest.mark.parametrize(
    "edit",
    [
        change(schema_version=2),
        change(rounds=-1),
        change(rounds=True),
        change(names=[]),
        change(names=["x", 3]),
        change(names=["x", "y", "z"]),
        change(names=["x" * 1000, "y"]),
        change(truth=[]),
        change(truth=[[1.0, 2.0]] * 5000),
        change(truth=[[1.0, "2"]] * 12),
        change(truth=[[1.0, 10**400]] * 12),
        change(models=[]),
        change(models="start"),
        change(shown=[99] * 6),
        change(shown=[7, 8]),
        change(in_picture=None),
        change(in_picture=[[0.5, 1e300], [0, 1]]),
        change(size=[10**9, 10**9]),
        change(size=[0, 24]),
        change(pictures=["!"] * 6),
        change(pictures=[3] * 6),
        change(steps=0),
        change(body=None),
        lambda tree: tree.pop("truth"),
        lambda tree: tree["models"][1].update(model="start"),
        lambda tree: tree["models"][0].update(seen=[[1.0, 2.0]]),
    ],
)
def test_anything_else_is_refused(edit: Callable[[dict[str, Any]], Any]) -> None:
    tree = json.loads(to_json(made(), 3))
    edit(tree)
    with pytest.raises(ArtifactError, match=r"readings\.json cannot be used"):
        from_json(json.dumps(tree).encode())


@settings(deadline=None)
@given(st.binary(max_size=60) | st.just(b"[" * 100_000) | st.just(b" " * (MAX_BYTES + 1)))
def test_no_bytes_end_in_anything_but_a_refusal(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        from_json(data)


def test_a_truncated_file_is_refused() -> None:
    data = to_json(made(), 3)
    for end in range(0, len(data) - 1, 997):
        with pytest.raises(ArtifactError):
            from_json(data[:end])


def test_figures_that_are_not_finite_are_gaps() -> None:
    tree = json.loads(to_json(made(), 3))
    text = json.dumps(tree).replace(f"{tree['truth'][0][0]}", "NaN", 1)
    found, _ = from_json(text.encode())
    assert np.isnan(found.truth[0, 0])
    assert np.isnan(found.models[0].predicted[:6]).all()


def test_spaced() -> None:
    assert spaced(6, 16) == (6, 8, 10, 12, 14, 16)
    assert spaced(6, 7) == (6, 7)
    assert spaced(6, 5) == ()


# ------------------------------------------------------------------------------------------------ tasks


def test_what_a_world_model_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path))
    task = WorldTask(load_config(SMALL))
    task.prepare()
    assert isinstance(task, Shows)
    start = task.initial()
    trained = task.local_update(start, 0, None, steps=3, sketch_seed=0, round_index=0).theta
    found = task.readings({"start": start, "final": trained})
    assert found is not None
    # The first odd held-out episode: the probe is fitted on the even ones.
    episode = task.world.heldout()["heldout"]["swipe"].source.episode(1)
    assert episode.states is not None
    assert_allclose(found.truth, episode.states, rtol=1e-6)
    assert found.pictures is not None
    assert_array_equal(found.pictures, episode.frames[list(found.shown)])
    for model in found.models:
        assert np.isfinite(model.seen).all()
        assert np.isnan(model.predicted[:6]).all()
        assert np.isfinite(model.predicted[6:]).all()
    assert not np.array_equal(found.models[0].seen, found.models[1].seen)


def test_without_labels_there_is_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path))
    task = WorldTask(load_config(SMALL))
    task.prepare()
    task.world.state_targets = None
    assert task.readings({"start": task.initial()}) is None
    task.world.state_targets = StateTargets((1,), ("y",))  # no place in a picture: no picture
    found = task.readings({"start": task.initial()})
    assert found is not None
    assert (found.names, found.pictures, found.shown, found.in_picture) == (("y",), None, (), None)


def test_a_task_without_a_state_has_nothing_to_show() -> None:
    assert not isinstance(LinearTask(load_config("experiment=linear")), Shows)


def test_where_the_dot_is_in_its_picture() -> None:
    world = SwipeDotWorld(load_config("experiment=swipe_dot"))
    assert world.state_targets is not None
    assert world.state_targets.in_picture is not None
    position = np.array([[0.25, 0.8]])
    brightest = np.argwhere(draw(position, 48, 0.02)[0, :, :, 0] == draw(position, 48, 0.02)[0, :, :, 0].max())[0]
    for (a, b), value, pixel in zip(world.state_targets.in_picture, position[0], brightest[::-1], strict=True):
        assert abs((a + b * value) * 48 - (pixel + 0.5)) <= 0.5


class Shown:
    """A linear federation whose task shows something, or fails to."""

    def __init__(self, federation: Federation, failure: Exception | None = None) -> None:
        self.asked: list[list[str]] = []

        def readings(thetas: dict[str, np.ndarray]) -> Readings:
            self.asked.append(list(thetas))
            if failure is not None:
                raise failure
            return made()

        federation.task.readings = readings  # type: ignore[attr-defined]


def test_the_coordinator_asks_once_at_the_end(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    shown = Shown(federation)
    federation.start()
    assert shown.asked == [["start", "final"]]
    assert federation.folder is not None
    assert from_json((federation.folder.path / "readings.json").read_bytes())[1] == len(federation.rounds())


@pytest.mark.parametrize("failure", [RuntimeError("linalg: singular"), KeyError("x"), None])
def test_no_run_fails_for_want_of_a_picture(tmp_path: Path, failure: Exception | None) -> None:
    federation = Federation(tmp_path)
    if failure is None:
        federation.task.readings = [1]  # type: ignore[attr-defined]
    else:
        Shown(federation, failure)
    federation.start()
    assert federation.folder is not None
    assert not (federation.folder.path / "readings.json").exists()
    (cause,) = [str(fields["cause"]) for name, fields in federation.events if name == "not_shown"]
    assert cause.startswith("TypeError: " if failure is None else f"{type(failure).__name__}: ")
