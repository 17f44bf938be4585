"""LunarLander-v3 (gymnasium, Box2D) as a fleet of participants: pictures that a third party's simulator drew.

Two bodies share one world: "lander-continuous" (two throttles) and "lander-discrete" (four engines to choose from).
The terrain is fixed; each episode has a start pose, a start velocity and a smooth random pilot of its own. Public
episodes fly under nominal gravity, participants each under a gravity of their own from a shifted range, so that a
model warm-started in public has something to learn from the fleet.

Everything is a function of :class:`LanderSpec`: the random numbers of an episode come from
SHA-256(seed | split | index | ...), so splits are disjoint by construction, and participant i has the same data
whatever the size of the fleet.

This module simulates; :mod:`lensemble_flwr.data.store` caches. gymnasium, pygame and cv2 are imported when the
first episode is simulated, so reading a cached set needs only numpy.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.episodes import ActionSpec, Episode, MetaValue
from lensemble_flwr.errors import ArtifactError, ConfigError, DataError

GENERATOR_VERSION = 1
"""Raise it whenever the same spec would give other episodes: it is part of the cache key."""

PIXEL_PACKAGES = ("gymnasium", "box2d", "pygame", "opencv-python-headless", "numpy")
"""Packages whose version can change a pixel or a pose: their versions are part of the cache key."""

CONTINUOUS, DISCRETE = "lander-continuous", "lander-discrete"
BODIES = (CONTINUOUS, DISCRETE)
ACTION_SPECS = {CONTINUOUS: ActionSpec("continuous", 2), DISCRETE: ActionSpec("discrete", 4)}

STATE_DIM = 8
"""x, y, their velocities, angle, its velocity, and which leg touches the ground, in the simulator's own units."""

MAX_ATTEMPTS = 400

# Limits of the centre of the lander in the simulator's own units, |x| from the middle and height above the pad:
# inside them the whole craft is in the picture.
_VIEW_X, _VIEW_TOP = 0.93, 1.30
# Start region in the same units, velocities in metres (units of the simulator's world) per second, angles in rad.
_START_X, _START_Y = (-0.6, 0.6), (0.5, 1.15)
_START_VX, _START_VY, _START_ANGLE, _START_SPIN = 2.0, (-1.5, 2.5), 0.25, 0.2
# The pilot: an autoregressive throttle, or a sticky choice of engine (nothing, left, main, right). It seldom turns,
# so that most of what happens in a picture is thrust against gravity, which is what the participants' worlds change.
_PILOT_KEEP, _PILOT_MEAN, _PILOT_SPREAD = 0.6, (-0.25, 0.0), (0.8, 0.45)
_CHOICE_KEEP, _CHOICES = 0.5, (0.44, 0.11, 0.34, 0.11)
_FLIGHT = (
    (_VIEW_X, _VIEW_TOP, _START_X, _START_Y, _START_VX, _START_VY, _START_ANGLE, _START_SPIN),
    (_PILOT_KEEP, _PILOT_MEAN, _PILOT_SPREAD, _CHOICE_KEEP, _CHOICES, MAX_ATTEMPTS),
)  # in the cache key, so that tuning a number cannot meet an old cache


# What a camera makes of a colour: out = clip(M rgb), red, green and blue weighed anew. Black stays black.
# Participant i has camera i; the last one is nobody's and occurs in held-out episodes only. Public episodes are as
# they were drawn.
CAMERAS = (
    ((1.00, 0.00, 0.00), (0.00, 0.55, 0.00), (0.00, 0.00, 0.35)),  # warm light
    ((0.00, 0.00, 0.90), (0.90, 0.00, 0.00), (0.00, 0.90, 0.00)),  # channels rotated
    ((0.00, 0.70, 0.00), (0.00, 0.00, 0.70), (0.70, 0.00, 0.00)),  # rotated the other way, and darker
    ((0.40, 0.40, 0.40), (0.40, 0.40, 0.40), (0.40, 0.40, 0.40)),  # grey, and brighter
    ((0.53, -0.27, 0.53), (0.53, 0.53, -0.27), (-0.27, 0.53, 0.53)),  # hue turned by 60 degrees, and darker
)


@dataclass(frozen=True)
class LanderSpec:
    """What to simulate. Sizes are episodes; "per body" means for each of the two bodies.

    Attributes:
        flavour: "fleet" (each participant one gravity, few episodes) or "silos" (few participants with many episodes:
            each has its own band of the shifted range, start region and wind, so their data differ in kind).
        participants: number of participants; participant i flies body i mod 2.
        episodes_per_participant, public_episodes (per body), heldout_shifted (per body), heldout_nominal (per body).
        gravity_nominal: of public and heldout_nominal, m/s^2, between -12 and 0.
        gravity_shift: range of the participants' and heldout_shifted's gravities, m/s^2.
        cameras: "one" (everybody sees what the simulator draws) or "own" (participant i sees through ``CAMERAS[i]``,
            held-out shifted episodes through all of them in turn). It changes pictures only, no flight and no label.
        wind, turbulence: the simulator's wind_power (0..20) and turbulence_power (0..2) for shifted episodes.
        frames: pictures of an episode (actions: one fewer). frameskip: simulator steps (1/50 s) between pictures.
        image_size: pixels a side. terrain_seed: fixes the ground. seed: fixes everything else.

    Raises:
        ConfigError: a value outside its range.
    """

    flavour: str = "fleet"
    participants: int = 64
    episodes_per_participant: int = 4
    public_episodes: int = 160
    heldout_shifted: int = 40
    heldout_nominal: int = 30
    gravity_nominal: float = -10.0
    gravity_shift: tuple[float, float] = (-1.5, -0.5)
    wind: float = 0.0
    turbulence: float = 0.0
    frames: int = 17
    frameskip: int = 4
    image_size: int = 64
    terrain_seed: int = 7
    seed: int = 0
    cameras: str = "one"

    def __post_init__(self) -> None:
        if self.flavour not in ("fleet", "silos"):
            raise ConfigError(f"unknown lander flavour {self.flavour!r}.", "Use 'fleet' or 'silos'.")
        if self.cameras not in ("one", "own"):
            raise ConfigError(f"data.cameras={self.cameras!r} is unknown.", "Use 'one' or 'own'.")
        whole = {
            "participants": (1, 10_000),
            "episodes_per_participant": (1, 10_000),
            "public_episodes": (1, 100_000),
            "heldout_shifted": (0, 100_000),
            "heldout_nominal": (0, 100_000),
            "frames": (2, 1_000),
            "frameskip": (1, 50),
            "image_size": (16, 256),
            "terrain_seed": (0, 2**31),
            "seed": (0, 2**63 - 1),
        }
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"data.{name}={value!r} is not a whole number in {low}..{high}.", "Change it.")
        if self.cameras == "own" and self.participants >= len(CAMERAS):
            raise ConfigError(
                f"data.cameras=own has cameras for {len(CAMERAS) - 1} participants, not {self.participants}.",
                "Use fewer participants, or data.cameras=one.",
            )
        if isinstance(self.gravity_shift, list):  # configuration files have no tuples
            object.__setattr__(self, "gravity_shift", tuple(self.gravity_shift))
        if not isinstance(self.gravity_shift, tuple) or len(self.gravity_shift) != 2:
            raise ConfigError(f"data.gravity_shift={self.gravity_shift!r} is not a pair.", "Give [lowest, highest].")
        for name, gravity in (
            ("gravity_nominal", self.gravity_nominal),
            ("gravity_shift[0]", self.gravity_shift[0]),
            ("gravity_shift[1]", self.gravity_shift[1]),
        ):
            if not _is_real(gravity) or not -12.0 < gravity < 0.0:
                raise ConfigError(f"data.{name}={gravity!r} is not between -12 and 0.", "Change it.")
        if self.gravity_shift[0] > self.gravity_shift[1]:
            raise ConfigError(f"data.gravity_shift={self.gravity_shift!r} is not in order.", "Give [lowest, highest].")
        for name, power, most in (("wind", self.wind, 20.0), ("turbulence", self.turbulence, 2.0)):
            if not _is_real(power) or not 0.0 <= power <= most:
                raise ConfigError(f"data.{name}={power!r} is not in 0..{most}.", "Change it.")
        for name in ("gravity_nominal", "wind", "turbulence"):
            object.__setattr__(self, name, float(getattr(self, name)))  # 0 and 0.0 must have one cache key
        object.__setattr__(self, "gravity_shift", (float(self.gravity_shift[0]), float(self.gravity_shift[1])))

    @classmethod
    def shift_a(cls, **changes: Any) -> LanderSpec:
        """Gravities -4..-2: the milder shift."""
        return cls(**{"gravity_shift": (-4.0, -2.0), **changes})

    @classmethod
    def silos(cls, **changes: Any) -> LanderSpec:
        """Four silos with 192 episodes each that differ in gravity, wind and where they fly."""
        kept = {"flavour": "silos", "participants": 4, "episodes_per_participant": 192}
        return cls(**{**kept, "gravity_shift": (-4.0, -0.5), "wind": 8.0, "turbulence": 0.5, **changes})

    @classmethod
    def tiny(cls, **changes: Any) -> LanderSpec:
        """A few short episodes: for tests and smoke runs."""
        sizes = {"participants": 3, "episodes_per_participant": 2, "public_episodes": 3, "heldout_shifted": 2}
        return cls(**{**sizes, "heldout_nominal": 2, "frames": 4, **changes})

    @property
    def steps(self) -> int:
        """Actions of an episode."""
        return self.frames - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {**asdict(self), "gravity_shift": list(self.gravity_shift)}
        if self.cameras == "one":
            del values["cameras"]  # a set that was made before there were cameras keeps its key
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LanderSpec:
        """Inverse of :meth:`to_dict`. Unknown keys raise ConfigError."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown lander settings {sorted(unknown)}.", "Remove them.")
        return cls(**values)

    def key(self) -> str:
        """Hex key of the cache: the spec, the generator and every package that can change a pixel."""
        packages = {name: _package_version(name) for name in PIXEL_PACKAGES}
        generator = [GENERATOR_VERSION, _FLIGHT]
        what: dict[str, Any] = {"spec": self.to_dict(), "generator": generator, "packages": packages}
        if self.cameras == "own":
            what["cameras"] = CAMERAS
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]

    def shards(self) -> tuple[Shard, ...]:
        """All files of the set, in the order in which they are generated."""
        out = [Shard("public", body, i, self.public_episodes) for i, body in enumerate(BODIES)]
        for split, count in (("heldout_nominal", self.heldout_nominal), ("heldout_shifted", self.heldout_shifted)):
            if count:
                out += [Shard(split, body, i, count) for i, body in enumerate(BODIES)]
        out += [Shard("participant", body_of(i), i, self.episodes_per_participant) for i in range(self.participants)]
        return tuple(out)


@dataclass(frozen=True)
class Shard:
    """One file of the set: ``count`` episodes of one body, of one split (and one participant)."""

    split: str
    body: str
    index: int
    count: int

    @property
    def name(self) -> str:
        """Name of the shard, also of its file: ``public-continuous``, ``participant-00012`` ..."""
        if self.split == "participant":
            return f"participant-{self.index:05d}"
        return f"{self.split}-{self.body.removeprefix('lander-')}"


@dataclass(frozen=True)
class World:
    """Physics of one episode: gravity (m/s^2), wind and turbulence power, and the start region in x."""

    gravity: float
    wind: float
    turbulence: float
    start_x: tuple[float, float]


def body_of(participant: int) -> str:
    """The body that participant ``participant`` flies."""
    return BODIES[participant % 2]


def seed_of(spec: LanderSpec, *path: object) -> int:
    """256-bit seed of the stream named by ``path``. Different names never share a stream (SHA-256, JSON framing)."""
    named = json.dumps(["lensemble.lander.v1", spec.seed, *path]).encode()
    return int.from_bytes(hashlib.sha256(named).digest(), "big")


def world_of(spec: LanderSpec, shard: Shard, episode: int) -> World:
    """Physics of an episode, without simulating it."""
    if shard.split in ("public", "heldout_nominal"):
        return World(spec.gravity_nominal, 0.0, 0.0, _START_X)
    low, high = spec.gravity_shift
    if shard.split == "heldout_shifted":
        # One gravity an episode, all over the range; no participant draws from this stream.
        rng = np.random.default_rng(seed_of(spec, "world", shard.split, shard.body, episode))
        wind = spec.wind if spec.flavour == "fleet" else spec.wind * float(rng.uniform())
        return World(float(rng.uniform(low, high)), wind, spec.turbulence, _START_X)
    if spec.flavour == "fleet":
        rng = np.random.default_rng(seed_of(spec, "world", shard.split, shard.index))
        return World(float(rng.uniform(low, high)), spec.wind, spec.turbulence, _START_X)
    # Silos: participant i owns the i-th band of gravity, a third of the sky (left, right, middle, ...), and calm or
    # windy weather, so that no silo alone covers what the held-out set asks.
    band = (high - low) / spec.participants
    rng = np.random.default_rng(seed_of(spec, "world", shard.split, shard.index, episode))
    gravity = float(rng.uniform(low + band * shard.index, low + band * (shard.index + 1)))
    third = (_START_X[1] - _START_X[0]) / 3
    left = _START_X[0] + third * (0, 2, 1)[shard.index % 3]
    wind = spec.wind * shard.index / max(1, spec.participants - 1)
    return World(gravity, wind, spec.turbulence, (left, left + third))


def camera_of(spec: LanderSpec, shard: Shard, episode: int) -> int | None:
    """Index into ``CAMERAS`` of an episode; None: as the simulator drew it.

    Held-out episodes change cameras in pairs, so that even and odd ones (a probe is fitted on the even ones and read
    on the odd ones) have the same cameras.
    """
    if spec.cameras == "one" or shard.split in ("public", "heldout_nominal"):
        return None
    return shard.index if shard.split == "participant" else episode // 2 % len(CAMERAS)


def through_camera(frames: NDArray[np.uint8], camera: int) -> NDArray[np.uint8]:
    """Pictures uint8 [..., 3] as camera ``camera`` sees them."""
    table = np.rint(np.asarray(CAMERAS[camera]) * 256).astype(np.int32)  # whole numbers: the same on every machine
    return np.clip((frames.astype(np.int32) @ table.T + 128) >> 8, 0, 255).astype(np.uint8)


class _Craft:
    """One body of the simulator, moved to a start pose of our choice. Use one per process and body."""

    def __init__(self, body: str) -> None:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no display is needed or opened
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            import cv2
            import gymnasium

            env = gymnasium.make("LunarLander-v3", continuous=body == CONTINUOUS, render_mode="rgb_array")
        except Exception as error:  # gymnasium's own errors derive from Exception only
            raise ArtifactError(
                f"the LunarLander simulator cannot start: {error}",
                "Install gymnasium, box2d, pygame and opencv-python-headless, or use another data source.",
            ) from error
        self._cv2 = cv2
        self._env: Any = env.unwrapped
        self.body = body
        self._noop: Any = np.zeros(2, np.float32) if body == CONTINUOUS else 0
        self._leg_poses: list[tuple[tuple[float, float], float]] = []

    def place(self, spec: LanderSpec, world: World, rng: np.random.Generator) -> NDArray[np.float32]:
        """Put the lander somewhere in the sky; return its state (8 numbers)."""
        env = self._env
        if not self._leg_poses:
            self._leg_poses = self._settled_legs(spec)
        env.gravity, env.enable_wind = world.gravity, world.wind > 0 or world.turbulence > 0
        env.wind_power, env.turbulence_power = world.wind, world.turbulence
        env.reset(seed=spec.terrain_seed)
        # From here on the simulator draws from the episode's own stream. With the terrain's, every episode would
        # have the same engine noise and the same gusts.
        env.np_random = rng
        if env.enable_wind:
            env.wind_idx, env.torque_idx = (int(v) for v in rng.integers(-9999, 9999, size=2))
        width, height = _world_size()
        x = width / 2 * (1 + rng.uniform(*world.start_x))
        y = env.helipad_y + 0.6 + height / 2 * rng.uniform(*_START_Y)
        angle = rng.uniform(-_START_ANGLE, _START_ANGLE)
        vx, vy = rng.uniform(-_START_VX, _START_VX), rng.uniform(*_START_VY)
        spin = rng.uniform(-_START_SPIN, _START_SPIN)
        lander = env.lander
        lander.position, lander.angle = (x, y), angle
        lander.linearVelocity, lander.angularVelocity = (vx, vy), spin
        for leg, ((dx, dy), turn) in zip(env.legs, self._leg_poses, strict=True):
            # The legs hang on joints: move them with the hull as one rigid body, or the joints would throw it.
            rx = math.cos(angle) * dx - math.sin(angle) * dy
            ry = math.sin(angle) * dx + math.cos(angle) * dy
            leg.position, leg.angle = (x + rx, y + ry), angle + turn
            leg.linearVelocity, leg.angularVelocity = (vx - spin * ry, vy + spin * rx), spin
        return self.step(self._noop)[0]  # one idle step: the state comes from the simulator itself

    def step(self, action: Any) -> tuple[NDArray[np.float32], bool]:
        """One simulator step (1/50 s): state, and whether the flight is over."""
        state, _, ended, _, _ = self._env.step(action)
        return state, bool(ended)

    def picture(self, size: int) -> NDArray[np.uint8]:
        """The simulator's own picture, resized: uint8 [size, size, 3]."""
        env = self._env
        # render() ends in a strided copy of 720 kB that costs as much as drawing. With a mode it does not know it
        # draws the same picture into env.surf and returns nothing; we read that surface without a copy.
        env.render_mode = "surface"
        try:
            env.render()
        finally:
            env.render_mode = "rgb_array"
        surface = getattr(env, "surf", None)
        if surface is not None and surface.get_bytesize() == 4 and surface.get_shifts()[:3] == (16, 8, 0):
            width, height = surface.get_size()
            buffer = np.frombuffer(surface.get_buffer(), np.uint8)
            bgrx = buffer.reshape(height, surface.get_pitch())[:, : 4 * width].reshape(height, width, 4)
            small = self._cv2.resize(bgrx, (size, size), interpolation=self._cv2.INTER_AREA)
            return np.ascontiguousarray(small[..., 2::-1])
        return self.picture_plain(size)

    def picture_plain(self, size: int) -> NDArray[np.uint8]:
        """The same by the simulator's documented way (another renderer's surfaces; the reference in the tests)."""
        small = self._cv2.resize(self._env.render(), (size, size), interpolation=self._cv2.INTER_AREA)
        return np.ascontiguousarray(small)

    def _settled_legs(self, spec: LanderSpec) -> list[tuple[tuple[float, float], float]]:
        # A fresh lander's legs swing out during its first steps; episodes should start with them at rest.
        env = self._env
        env.gravity, env.enable_wind = -1.0, False
        env.reset(seed=spec.terrain_seed)
        env.world.gravity = (0.0, 0.0)
        for _ in range(40):
            env.step(self._noop)
        poses = []
        for leg in env.legs:
            local = env.lander.GetLocalPoint(leg.position)
            poses.append(((float(local[0]), float(local[1])), float(leg.angle - env.lander.angle)))
        return poses


@lru_cache(maxsize=1)
def _world_size() -> tuple[float, float]:
    from gymnasium.envs.box2d import lunar_lander

    return lunar_lander.VIEWPORT_W / lunar_lander.SCALE, lunar_lander.VIEWPORT_H / lunar_lander.SCALE


_simulating = threading.Lock()  # the crafts are shared: one thread at a time flies them


@lru_cache(maxsize=2)
def _craft(body: str) -> _Craft:
    return _Craft(body)


def simulate(spec: LanderSpec, shard: Shard, episode: int) -> Episode:
    """Simulate episode ``episode`` of ``shard``: a pure function of its arguments.

    A flight that ends early or leaves the picture is drawn again, at most ``MAX_ATTEMPTS`` times.

    Raises:
        ArtifactError: the simulator is not installed.
        DataError: no attempt stayed in view (too many frames for this gravity, or too much wind).
    """
    world = world_of(spec, shard, episode)
    with _simulating:
        craft = _craft(shard.body)
        for attempt in range(MAX_ATTEMPTS):
            seed = seed_of(spec, "flight", shard.split, shard.body, shard.index, episode, attempt)
            flight = _fly(craft, spec, world, np.random.default_rng(seed))
            if flight is not None:
                break
    if flight is not None:
        frames, actions, states = flight
        camera = camera_of(spec, shard, episode)
        frames = frames if camera is None else through_camera(frames, camera)
        meta: dict[str, MetaValue] = {"split": shard.split, "index": shard.index, "episode": episode}
        meta |= {"attempt": attempt, "gravity": world.gravity, "wind": world.wind, "turbulence": world.turbulence}
        return Episode(frames, actions, states, shard.body, meta)
    raise DataError(
        f"no flight of {spec.frames} frames stayed in view under gravity {world.gravity:.2f}, wind {world.wind:.1f} "
        f"({MAX_ATTEMPTS} attempts).",
        "Use fewer data.frames, a smaller data.frameskip, or less wind.",
    )


def _fly(
    craft: _Craft, spec: LanderSpec, world: World, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]] | None:
    actions = _pilot(craft.body, spec.steps, rng)
    frames = np.empty((spec.frames, spec.image_size, spec.image_size, 3), np.uint8)
    states = np.empty((spec.frames, 8), np.float32)
    states[0] = craft.place(spec, world, rng)
    frames[0] = craft.picture(spec.image_size)
    for t in range(spec.steps):
        command: Any = actions[t] if craft.body == CONTINUOUS else int(actions[t].argmax())
        for _ in range(spec.frameskip):
            state, ended = craft.step(command)
            if ended:
                return None
        if abs(state[0]) > _VIEW_X or state[1] > _VIEW_TOP:
            return None
        states[t + 1] = state
        frames[t + 1] = craft.picture(spec.image_size)
    return frames, actions, states


def _pilot(body: str, steps: int, rng: np.random.Generator) -> NDArray[np.float32]:
    if body == CONTINUOUS:
        noise = rng.standard_normal((steps, 2)) * np.asarray(_PILOT_SPREAD)
        smooth = np.empty_like(noise)
        smooth[0] = noise[0]
        for t in range(1, steps):  # stationary: the spread is the same at every step
            smooth[t] = _PILOT_KEEP * smooth[t - 1] + math.sqrt(1 - _PILOT_KEEP**2) * noise[t]
        return np.clip(smooth + np.asarray(_PILOT_MEAN), -1.0, 1.0).astype(np.float32)
    choice = rng.choice(len(_CHOICES), size=steps, p=_CHOICES)
    keep = rng.random(steps) < _CHOICE_KEEP
    for t in range(1, steps):
        if keep[t]:
            choice[t] = choice[t - 1]
    return np.eye(len(_CHOICES), dtype=np.float32)[choice]


@lru_cache(maxsize=len(PIXEL_PACKAGES))
def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
