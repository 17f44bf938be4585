from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from lensemble_flwr.data import LanderData, LanderSpec, episode_hash, episode_hashes, lander
from lensemble_flwr.data.lander import (
    ACTION_SPECS,
    BODIES,
    CONTINUOUS,
    DISCRETE,
    Shard,
    World,
    body_of,
    camera_of,
    seed_of,
    simulate,
    world_of,
)
from lensemble_flwr.errors import ArtifactError, ConfigError, DataError

TINY = LanderSpec.tiny()
CALM = World(-5.0, 0.0, 0.0, (-0.1, 0.1))


@pytest.mark.parametrize(
    "changes",
    [
        {"flavour": "other"},
        {"cameras": "two"},
        {"cameras": "own"},
        {"cameras": "own", "participants": 5},
        {"participants": 0},
        {"participants": 2.0},
        {"participants": True},
        {"episodes_per_participant": 0},
        {"public_episodes": 0},
        {"heldout_shifted": -1},
        {"frames": 1},
        {"frameskip": 0},
        {"image_size": 8},
        {"seed": -1},
        {"gravity_nominal": 0.0},
        {"gravity_nominal": -12.0},
        {"gravity_nominal": float("nan")},
        {"gravity_shift": (-1.0, -2.0)},
        {"gravity_shift": (-13.0, -2.0)},
        {"gravity_shift": (-1.0,)},
        {"gravity_shift": "ab"},
        {"wind": 21.0},
        {"wind": -1.0},
        {"wind": "1"},
        {"turbulence": 3.0},
    ],
)
def test_a_bad_spec_is_a_config_error(changes: dict) -> None:
    with pytest.raises(ConfigError):
        LanderSpec(**changes)


def test_spec_round_trip_and_key() -> None:
    spec = LanderSpec.silos(seed=3)
    assert LanderSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(ConfigError):
        LanderSpec.from_dict({"other": 1})
    assert LanderSpec(wind=0).key() == LanderSpec(wind=0.0).key()
    assert len({s.key() for s in (LanderSpec(), LanderSpec.shift_a(), LanderSpec(seed=1), spec, TINY)}) == 5


def test_one_camera_keeps_the_key_and_own_cameras_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cameras" not in TINY.to_dict()  # the key of a set that was made before there were cameras
    own = replace(TINY, cameras="own")
    assert LanderSpec.from_dict(json.loads(json.dumps(own.to_dict()))) == own
    assert own.key() != TINY.key()
    before = own.key()
    monkeypatch.setattr(lander, "CAMERAS", (lander.CAMERAS[1], *lander.CAMERAS[1:]))
    assert own.key() != before


def test_a_camera_changes_pictures_and_nothing_else(tiny: LanderData) -> None:
    own = replace(TINY, cameras="own")
    for shard in TINY.shards():
        seen, drawn = simulate(own, shard, 1), tiny.source(shard.name).episode(1)
        np.testing.assert_array_equal(seen.states, drawn.states)
        np.testing.assert_array_equal(seen.actions, drawn.actions)
        assert seen.meta == drawn.meta
        camera = camera_of(own, shard, 1)
        assert (camera is None) == (shard.split in ("public", "heldout_nominal"))
        assert (seen.frames.tobytes() == drawn.frames.tobytes()) == (camera is None)
        assert episode_hash(seen) == episode_hash(simulate(own, shard, 1))


def test_cameras_of_silos_and_held_out() -> None:
    spec = LanderSpec.silos(cameras="own")
    assert [camera_of(spec, Shard("participant", body_of(i), i, 9), 3) for i in range(4)] == [0, 1, 2, 3]
    held = [camera_of(spec, Shard("heldout_shifted", CONTINUOUS, 0, 20), e) for e in range(20)]
    assert held[::2] == held[1::2] == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("camera", range(len(lander.CAMERAS)))
def test_what_a_camera_makes_of_colours(camera: int) -> None:
    colours = np.random.default_rng(camera).integers(0, 256, (50, 3), dtype=np.uint8)
    exact = np.clip(colours @ np.asarray(lander.CAMERAS[camera]).T, 0, 255)
    assert np.abs(lander.through_camera(colours, camera) - exact).max() < 2.0
    assert not lander.through_camera(np.zeros((2, 3), np.uint8), camera).any()


def test_the_key_names_the_library_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TINY.key()
    for name in lander.PIXEL_PACKAGES:
        with monkeypatch.context() as patch:
            patch.setattr(lander, "_package_version", lambda n, changed=name: "9" if n == changed else "1")
            one = TINY.key()
            patch.setattr(lander, "_package_version", lambda n: "1")
            assert TINY.key() != one != before


def test_default_sizes_are_the_recipe() -> None:
    spec = LanderSpec()
    sizes: dict[str, int] = {}
    for shard in spec.shards():
        sizes[shard.split] = sizes.get(shard.split, 0) + shard.count
    assert sizes == {"public": 320, "heldout_nominal": 60, "heldout_shifted": 80, "participant": 256}
    assert [body_of(i) for i in range(3)] == [CONTINUOUS, DISCRETE, CONTINUOUS]
    assert len({s.name for s in spec.shards()}) == len(spec.shards())


def test_every_stream_of_random_numbers_has_its_own_seed() -> None:
    spec = LanderSpec.silos(participants=40, episodes_per_participant=20)
    seen = set()
    for shard in spec.shards():
        for episode in range(shard.count):
            seen.add(seed_of(spec, "flight", shard.split, shard.body, shard.index, episode, 0))
    assert len(seen) == sum(s.count for s in spec.shards())
    assert seed_of(spec, "a", 11) != seed_of(spec, "a", 1, 1) != seed_of(replace(spec, seed=1), "a", 1, 1)


def test_gravities_of_the_fleet() -> None:
    spec = LanderSpec()
    by_shard = {s.name: [world_of(spec, s, e) for e in range(s.count)] for s in spec.shards()}
    own = []
    for name, worlds in by_shard.items():
        gravities = {w.gravity for w in worlds}
        if name.startswith(("public", "heldout_nominal")):
            assert gravities == {-10.0}
        else:
            assert all(-1.5 <= g <= -0.5 for g in gravities)
            assert len(gravities) == (1 if name.startswith("participant") else len(worlds))
            own += sorted(gravities)
        assert {(w.wind, w.turbulence) for w in worlds} == {(0.0, 0.0)}
    assert len(set(own)) == len(own) == 64 + 80  # no held-out gravity is a participant's
    assert np.ptp(own) > 0.9


def test_silos_differ_and_together_cover_what_is_asked() -> None:
    spec = LanderSpec.silos()
    bands = []
    for i in range(4):
        worlds = [world_of(spec, Shard("participant", body_of(i), i, 192), e) for e in range(192)]
        bands.append((min(w.gravity for w in worlds), max(w.gravity for w in worlds)))
        assert len({(w.wind, w.start_x) for w in worlds}) == 1
    assert all(a[1] < b[0] for a, b in itertools.pairwise(bands))
    starts = {world_of(spec, Shard("participant", body_of(i), i, 1), 0).start_x for i in range(3)}
    assert len(starts) == 3
    held = [world_of(spec, Shard("heldout_shifted", CONTINUOUS, 0, 40), e).gravity for e in range(40)]
    assert min(held) < -3
    assert max(held) > -1


def test_a_participants_data_do_not_depend_on_the_size_of_the_fleet(tiny: LanderData) -> None:
    larger = replace(TINY, participants=9, public_episodes=50, episodes_per_participant=7)
    shard = Shard("participant", body_of(1), 1, 7)
    assert episode_hash(simulate(larger, shard, 1)) == episode_hash(tiny.participant(1).episode(1))


def test_no_episode_occurs_twice_in_any_two_splits(tiny: LanderData) -> None:
    hashes = [h for shard in TINY.shards() for h in episode_hashes(tiny.source(shard.name))]
    assert len(set(hashes)) == len(hashes) == 2 * (3 + 2 + 2) + 3 * 2
    frames = [f.tobytes() for s in TINY.shards() for f in tiny.source(s.name).arrays().frames.reshape(-1, 64 * 64 * 3)]
    assert len(set(frames)) == len(frames)


def test_episodes_are_what_the_spec_says(tiny: LanderData) -> None:
    for shard in TINY.shards():
        source = tiny.source(shard.name)
        assert source.action_spec == ACTION_SPECS[shard.body]
        for i in range(len(source)):
            episode = source.episode(i)
            assert episode.frames.shape == (4, 64, 64, 3)
            assert episode.embodiment == source.embodiment == shard.body
            source.action_spec.check(episode.actions)
            assert (episode.meta["split"], episode.meta["episode"]) == (shard.split, i)


def test_the_lander_is_in_every_picture_and_moves() -> None:
    for body, gravity in itertools.product(BODIES, (-10.0, -1.0)):
        spec = LanderSpec.tiny(frames=17, gravity_nominal=gravity)
        episode = simulate(spec, Shard("public", body, BODIES.index(body), 1), 0)
        # The hull is the only thing of this colour.
        red, green, blue = (episode.frames[..., c].astype(int) for c in range(3))
        hull = (blue > 100) & (blue > red + 30) & (blue > green + 30)
        assert (hull.sum((1, 2)) >= 4).all()
        centre = np.array([np.argwhere(h).mean(0) for h in hull])
        assert np.abs(centre[-1] - centre[0]).max() > 2
        # Pictures agree with the labels: pixel columns are linear in x, rows in height.
        x, y = episode.states[:, 0], episode.states[:, 1]
        np.testing.assert_allclose(centre[:, 1], 31.5 + 32 * x, atol=1.6)
        np.testing.assert_allclose(centre[:, 0], 64 - (3.93 + y * 20 / 3) / (40 / 3) * 64, atol=2.2)


@pytest.mark.parametrize("body", BODIES)
def test_the_quick_picture_is_the_simulators_picture(body: str) -> None:
    one, two = lander._Craft(body), lander._Craft(body)
    shard = Shard("public", body, 0, 1)
    actions = lander._pilot(body, 12, np.random.default_rng(1))
    flights = []
    for craft, picture in ((one, one.picture), (two, two.picture_plain)):
        states = [craft.place(TINY, CALM, np.random.default_rng(3))]
        pictures = [picture(64)]
        for action in actions:
            for _ in range(4):
                states.append(craft.step(action if body == CONTINUOUS else int(action.argmax()))[0])
            pictures.append(picture(64))
        flights.append((np.stack(states), np.stack(pictures)))
    np.testing.assert_array_equal(flights[0][0], flights[1][0])
    np.testing.assert_array_equal(flights[0][1], flights[1][1])
    assert len({p.tobytes() for p in flights[0][1]}) == 13
    assert shard.name.startswith("public")


@pytest.mark.parametrize("gravity", [-10.0, -3.0, -0.7])
def test_free_fall_has_the_gravity_that_was_asked_for(gravity: float) -> None:
    """The label vy is velocity / 7.5 (simulator's documentation); 1/50 s a step. No engine: nothing but gravity."""
    craft = lander._Craft(DISCRETE)
    state = craft.place(TINY, World(gravity, 0.0, 0.0, (-0.1, 0.1)), np.random.default_rng(0))
    start, steps = state[3], 20
    for _ in range(steps):
        state, ended = craft.step(0)
        assert not ended
    assert (state[3] - start) * 7.5 / (steps / 50) == pytest.approx(gravity, rel=0.02)


def test_wind_pushes_and_differs_between_episodes() -> None:
    craft = lander._Craft(DISCRETE)
    pushes = []
    for seed in range(6):
        state = craft.place(TINY, World(-1.0, 20.0, 0.0, (-0.1, 0.1)), np.random.default_rng(seed))
        before = state[2]
        for _ in range(10):
            state, _ = craft.step(0)
        pushes.append(float(state[2] - before))
    assert len({round(p, 3) for p in pushes}) == 6
    assert max(np.abs(pushes)) > 0.05


def test_engine_noise_differs_between_episodes() -> None:
    """The terrain's seed is the same for all; without an own stream every flight would repeat its noise."""
    craft = lander._Craft(DISCRETE)
    ends = []
    for seed in (1, 2):
        state = craft.place(TINY, CALM, np.random.default_rng(9))
        craft._env.np_random = np.random.default_rng(seed)
        for _ in range(10):
            state, _ = craft.step(2)
        ends.append(state.tobytes())
    assert ends[0] != ends[1]


def test_legs_start_at_rest() -> None:
    """Nothing but gravity acts in the first steps: no jolt from a joint that was placed wrongly."""
    craft = lander._Craft(DISCRETE)
    for seed in range(5):
        state = craft.place(TINY, CALM, np.random.default_rng(seed))
        spin, drift = state[5], state[2]
        for _ in range(8):
            state, _ = craft.step(0)
        assert abs(state[5] - spin) < 0.02
        assert abs(state[2] - drift) < 0.01


def test_the_pilot_is_smooth_and_uses_all_engines() -> None:
    rng = np.random.default_rng(0)
    throttle = lander._pilot(CONTINUOUS, 4000, rng)
    assert np.corrcoef(throttle[1:, 0], throttle[:-1, 0])[0, 1] > 0.4
    assert 0.2 < (throttle[:, 0] > 0).mean() < 0.6
    choice = lander._pilot(DISCRETE, 4000, rng)
    assert choice.mean(0).min() > 0.05
    assert (choice[1:] == choice[:-1]).all(1).mean() > 0.5


def test_a_flight_that_cannot_stay_in_view_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lander, "MAX_ATTEMPTS", 3)
    spec = LanderSpec.tiny(frames=200)
    with pytest.raises(DataError, match="stayed in view"):
        simulate(spec, Shard("public", CONTINUOUS, 0, 1), 0)


def test_a_missing_simulator_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    with pytest.raises(ArtifactError, match="cannot start"):
        lander._Craft(CONTINUOUS)
