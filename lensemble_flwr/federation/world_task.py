"""The world model as a task: an action-conditioned JEPA, from a public start, on any :class:`.world_data.WorldData`.

Surfaces: ``adapter`` (encoder and predictor frozen, a linear adapter moves), ``predictor``, ``full`` (encoder and
predictor; the latent frame is then federated, and participants align it before they release).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble_flwr.config import Config
from lensemble_flwr.data.episodes import Episode, EpisodeSource, episode_hashes, iterate
from lensemble_flwr.data.probe import Probe, build_probe, load_probe, save_probe
from lensemble_flwr.data.windowed import StoredPictures, windowed
from lensemble_flwr.data.windows import usable, without
from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ArtifactError, ContractViolation, DataError
from lensemble_flwr.federation.readings import MAX_STEPS, Reading, Readings, spaced
from lensemble_flwr.federation.schedule import Schedule
from lensemble_flwr.federation.site_dataset import SiteDataset
from lensemble_flwr.federation.task import LocalResult, MetricLabel, Progress, Slice
from lensemble_flwr.federation.world_data import HeldOut, build_world
from lensemble_flwr.gauge.align import DRIFT_RIDGE, FrameSurface, align
from lensemble_flwr.gauge.anchor import FrameAnchor
from lensemble_flwr.gauge.drift import frame_drift
from lensemble_flwr.gauge.procrustes import procrustes_align
from lensemble_flwr.home import cache_lock, home
from lensemble_flwr.model.evaluate import Probe as StateProbe
from lensemble_flwr.model.evaluate import evaluate, fit_probe, open_loop, probe_rmse
from lensemble_flwr.model.heads import ActionHead, head_from_state
from lensemble_flwr.model.inner import InnerState, LrFactor, inner_steps
from lensemble_flwr.model.layout import ParameterLayout
from lensemble_flwr.model.objective import Objective
from lensemble_flwr.model.pretrained import Pretrained, load_pretrained
from lensemble_flwr.model.proprio import StateScale
from lensemble_flwr.model.sigreg import sketch_hash
from lensemble_flwr.model.spec import HeadSpec, InnerSpec, ModelSpec, ObjectiveSpec, WarmStartSpec, to_plain
from lensemble_flwr.model.trajectories import LatentTrajectories, Trajectories
from lensemble_flwr.model.warmstart import RECIPE, WarmStart, load_warm_start, save_warm_start, train_warm_start
from lensemble_flwr.model.world_model import WorldModel, encode_trajectories, frame_surface

_RESERVED = "lensemble evaluation episodes 1"
_STILL = 1e-6
_AHEAD = 5


@dataclasses.dataclass(frozen=True)
class _Labels:
    """Held-out labels, a row for each frame: (N, c) position, (N,) whether its episode is under known conditions, is
    even, and which one it is."""

    position: torch.Tensor
    names: tuple[str, ...]
    known: torch.Tensor
    even: torch.Tensor
    episode: torch.Tensor

    def probe(self, latents: LatentTrajectories) -> StateProbe:
        """Fitted on even episodes under known conditions."""
        fit = self.known & self.even
        return fit_probe(latents.latents[fit], self.position[fit])

    def first_read(self, least: int) -> torch.Tensor | None:
        """Rows of the first episode of ``least`` frames or more that is known and not fitted on."""
        for episode in torch.unique(self.episode[self.known & ~self.even]).tolist():
            rows = torch.nonzero(self.episode == episode).flatten()
            if len(rows) >= least:
                return rows
        return None


class WorldTask:
    """See the module. Everything public is cached below the home folder; participants only read."""

    metrics: Mapping[str, MetricLabel] = {}

    def __init__(self, config: Config, data_dir: Path | None = None, dataset: SiteDataset | None = None) -> None:
        """``data_dir``, ``dataset``: where a real site's own episodes lie; generated ones are in the home folder."""
        model, inner, objective = config.model, config.inner, config.objective
        self.config = config
        self.world = build_world(config, data_dir, dataset)
        self._cache_dir = None if dataset is None else dataset.cache
        self.model_spec = ModelSpec(
            image_size=model.image_size,
            patch=model.patch,
            width=model.width,
            depth=model.depth,
            heads=model.heads,
            mlp_ratio=model.mlp_ratio,
            projector_width=model.projector_width,
            latent_dim=model.latent_dim,
            predictor_width=model.predictor_width,
            predictor_depth=model.predictor_depth,
            action_embed_dim=model.action_embed_dim,
            adapter_rank=model.adapter_rank,
        )
        self.inner_spec = InnerSpec(
            optimizer=inner.optimizer,
            lr=inner.lr,
            weight_decay=inner.weight_decay,
            batch_size=inner.batch_size,
            head_lr=inner.head_lr,
            device=inner.device,
            deterministic=inner.deterministic,
            parallel=inner.parallel,
        )
        self.objective_spec = ObjectiveSpec(
            lambda_pred=objective.lambda_pred,
            lambda_sig=objective.lambda_sig,
            lambda_anc=objective.lambda_anc if config.gauge.anchor != "none" else 0.0,
            sketch_dim=objective.sketch_dim,
        )
        self.schedule = Schedule.of(config)
        self.warm_spec = WarmStartSpec(steps=config.warmstart.steps, seed=config.seed)
        surface = config.federation.surface
        self._frame_moves = surface in ("full", "function")
        self._layout = ParameterLayout.of(self.model_spec, "full" if self._frame_moves else surface)
        self.layout = tuple(Slice(e.name, e.shape, e.offset) for e in self._layout.entries)
        # A relative error lives in the model's own latent space: with a moving encoder only the state probe compares.
        labelled = getattr(self.world, "labelled", self.world.state_targets is not None)
        self.headline = "state_probe_r2" if self._frame_moves and labelled else "r5"
        self.rehearsal_metric = (
            "r5" if self.world.rehearsal_set == self.world.main_set else f"r5_{self.world.rehearsal_set}"
        )
        self._shares: dict[int, tuple[str, Trajectories | LatentTrajectories]] = {}
        self._encoded: dict[int, LatentTrajectories] = {}
        self._scales: dict[str, StateScale | None] = {}

    # ------------------------------------------------------------------ public constants

    @property
    def dimension(self) -> int:
        return self._layout.size

    @cached_property
    def _public_key(self) -> str:
        """Names the warm start by everything that it is made from."""
        parts = [
            RECIPE,
            self.world.key(),
            to_plain(self.model_spec),
            to_plain(self.warm_spec),
            self.config.warmstart.lambda_sig,
        ]
        if self.config.model.proprio != "none":
            parts.append(f"proprio {self.config.model.proprio}")
        if self.config.warmstart.path is not None:  # not where it lies: sites have no such file
            parts.append(f"encoder {self.config.warmstart.sha256}")
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]

    def _cache(self, name: str) -> Path:
        return home() / "warmstart" / f"{self._public_key}{name}"

    @cached_property
    def warm(self) -> WarmStart:
        """The public warm start, verified against its pinned hash."""
        return load_warm_start(self._cache(".safetensors"), self._start_hash)

    @cached_property
    def probe(self) -> Probe:
        """The public probe: landmark pictures."""
        return load_probe(self._cache(".probe"))

    @cached_property
    def _guard(self) -> Path:
        parts = json.dumps([self._public_key, self.world.heldout_key()], sort_keys=True)
        return home() / "warmstart" / f"{hashlib.sha256(parts.encode()).hexdigest()[:20]}.evaluation"

    @cached_property
    def reserved(self) -> frozenset[bytes]:
        """Hashes of public probe and evaluation episodes: nobody may train on them."""
        return self.probe.episode_hashes | load_reserved(self._guard)

    @cached_property
    def base_hash(self) -> bytes:
        """Content hash of the warm start: frozen weights, basis, mean picture, public heads."""
        return bytes.fromhex(self.warm.content_hash)

    @cached_property
    def probe_hash(self) -> bytes:
        return self.probe.hash

    def initial(self) -> np.ndarray:
        # Not from self._model: that is the workspace of local steps and holds whatever was trained last.
        return self._layout.flatten({name: self.warm.state[name] for name in self._layout.names})

    def sketch_hash(self, sketch_seed: int) -> bytes:
        return sketch_hash(sketch_seed, self.model_spec.latent_dim, self.objective_spec.sketch_dim)

    def prepare(self, progress: Progress | None = None) -> None:
        tell = progress or (lambda what, done, total: None)
        self.world.prepare(tell)
        path = self._cache(".safetensors")
        with cache_lock(path):
            if not path.is_file():
                public = {body: self.world.public(body) for body in self.world.embodiments}
                warm = train_warm_start(
                    self.model_spec,
                    {
                        body: (self._head_spec(source), self._public_frames(body, source))
                        for body, source in public.items()
                    },
                    self.warm_spec,
                    ObjectiveSpec(lambda_sig=self.config.warmstart.lambda_sig),
                    progress=lambda done, total, figures: tell("training the public warm start", done, total),
                    pretrained=self._pretrained(tell),
                    threads=1,  # the same bytes whatever the machine's cores, and two gain little at this size
                )
                save_warm_start(warm, path)
            if not self._cache(".probe").is_file():
                sources = [self.world.public(body) for body in self.world.embodiments]
                save_probe(build_probe(sources, self.model_spec.latent_dim, self.config.seed), self._cache(".probe"))
            if not self._guard.is_file():
                held = [held.source for per_body in self._sets.values() for held in per_body.values()]
                save_reserved(self._guard, [digest for source in held for digest in episode_hashes(source)])

    def _pretrained(self, progress: Progress) -> Pretrained | None:
        start = self.config.warmstart
        if start.path is None or start.sha256 is None:
            return None
        found = load_pretrained(start.path, start.sha256, self.model_spec)
        for number, tensor in enumerate(found.unfit):
            progress(f"not taken from {Path(start.path).name}: {tensor}", number + 1, len(found.unfit))
        return found

    @property
    def _start_hash(self) -> str | None:
        """The pinned content hash of the public start; None where the configuration pins its encoder's file."""
        return self.config.warmstart.sha256 if self.config.warmstart.path is None else None

    def public_files(self) -> tuple[Path, ...]:
        return self._cache(".safetensors"), self._cache(".probe"), self._guard

    def prepare_participant(self, partition: int, public: Path | None = None, progress: Progress | None = None) -> None:
        tell = progress or (lambda what, done, total: None)
        self.world.prepare_participant(partition, tell)
        if public is None:
            return self.prepare(progress)
        for path in self.public_files():
            if not (public / path.name).is_file():
                raise ArtifactError(
                    f"{public} does not hold {path.name}, the public start of this configuration.",
                    "Ask the coordinator to export it with these overrides: lensemble coordinator public.",
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, (public / path.name).read_bytes(), mode=0o644)
        load_warm_start(self._cache(".safetensors"), self._start_hash)  # all are verified as they load
        load_probe(self._cache(".probe"))
        load_reserved(self._guard)
        return None

    # ------------------------------------------------------------------ participants

    def recordings(self, partition: int) -> EpisodeSource:
        """A participant's own recordings; opens no other participant's file."""
        return self.world.participant(partition)

    def body(self, partition: int) -> str:
        """The embodiment that a participant has."""
        return self.world.body(partition)

    def episode_hashes(self, partition: int) -> list[bytes]:
        return episode_hashes(self.recordings(partition))

    def excluded(self, partition: int) -> list[str]:
        """Names of a participant's episodes that it does not train on, because they are public probe or evaluation
        episodes. For its own operator: telling others would let them ask whether a site holds a recording."""
        source = self.recordings(partition)
        label = getattr(source, "label", "episode {}".format)
        return [label(i) for i, digest in enumerate(episode_hashes(source)) if digest in self.reserved]

    def local_data(self, partition: int) -> Trajectories:
        """A participant's episodes, without public probe and evaluation episodes that may have slipped in.

        Pictures of recordings stay on the disk, and a batch reads its own.
        """
        source = self.recordings(partition)
        stored = windowed(source)
        if stored is None:
            episodes, _ = without(source, self.reserved)
            return self._frames(episodes, self._local_scale(episodes))
        kept = usable(source, self.reserved)
        actions, states = zip(*map(stored.labels, kept), strict=True)
        scale = self._scale_of(states)
        pictures = StoredPictures(stored, kept)
        return Trajectories.stored(
            pictures, pictures.lengths.tolist(), [_inputs(a, s, scale) for a, s in zip(actions, states, strict=True)]
        )

    def training_data(self, partition: int) -> Trajectories | LatentTrajectories:
        """What a participant trains on: its frames, or, when the encoder is frozen, their latents (encoded once)."""
        if self._frame_moves:
            return self.local_data(partition)
        if partition not in self._encoded:
            self._encoded[partition] = self._own_latents(partition)
        return self._encoded[partition]

    def _own_latents(self, partition: int) -> LatentTrajectories:
        """A participant's latents; a real site keeps them, because every message is a new process."""
        if self._cache_dir is None:
            return encode_trajectories(self._model, self.local_data(partition))
        source = self.recordings(partition)
        parts = [self.base_hash, *sorted(self.reserved), *episode_hashes(source), self.config.model.proprio.encode()]
        key, path = hashlib.sha256(b"".join(parts)).hexdigest(), self._cache_dir / "latents.safetensors"
        if path.is_file():
            with contextlib.suppress(ArtifactError, OSError):
                kept = LatentTrajectories.from_bytes(path.read_bytes(), key)
                if kept is not None:
                    return kept
        made = encode_trajectories(self._model, self.local_data(partition))
        atomic_write(path, made.to_bytes(key))
        return made

    # ------------------------------------------------------------------ what an action head reads

    def _scale_of(self, states: Sequence[np.ndarray | None]) -> StateScale | None:
        """How states are scaled beside actions; None where heads read actions alone."""
        known = [s for s in states if s is not None]
        if self.config.model.proprio == "none" or not known:
            return None
        if len(known) != len(states):
            raise DataError("Some recordings have states and others do not.", "Give all of them states, or none.")
        return StateScale.of(known)

    def _local_scale(self, episodes: Sequence[Episode]) -> StateScale | None:
        return self._scale_of([e.states for e in episodes])

    def _public_scale(self, body: str) -> StateScale | None:
        if self.config.model.proprio == "none":
            return None
        if body not in self._scales:
            self._scales[body] = self._local_scale(list(iterate(self.world.public(body))))
        return self._scales[body]

    def _frames(self, episodes: Sequence[Episode], scale: StateScale | None) -> Trajectories:
        actions = [_inputs(e.actions, e.states, scale) for e in episodes]
        return Trajectories.from_episodes([e.frames for e in episodes], actions)

    def _public_frames(self, body: str, source: EpisodeSource) -> Trajectories:
        """Public or held-out episodes of a body, with their state labels where all have them."""
        episodes = list(iterate(source))
        found = self._frames(episodes, self._public_scale(body))
        states = [e.states for e in episodes if e.states is not None]
        if len(states) != len(episodes):
            return found
        return dataclasses.replace(found, states=torch.from_numpy(np.concatenate(states).astype(np.float32)))

    def _head_spec(self, source: EpisodeSource) -> HeadSpec:
        """What the head of a source's body reads: its actions, and its states where they are an input."""
        spec = source.action_spec
        if self.config.model.proprio == "none":
            return HeadSpec(spec.kind, spec.dim)
        states = source.episode(0).states
        return HeadSpec(spec.kind, spec.dim) if states is None else HeadSpec("mixed", spec.dim + states.shape[1])

    def _head(self, body: str, spec: HeadSpec, *seed: object) -> ActionHead:
        """The public head of a body; a fresh one for a body or an action space that the public start does not know."""
        if self.warm.bodies.get(body) == spec:
            return self.warm.head(body)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed("head", self.config.seed, *seed))
            return ActionHead(spec, self.model_spec)

    def local_update(
        self,
        theta: np.ndarray,
        partition: int,
        state: bytes | None,
        *,
        steps: int,
        sketch_seed: int,
        round_index: int,
        outer_step: int | None = None,
    ) -> LocalResult:
        kept = self._inner_state(partition, state)
        data = self.training_data(partition)
        model = self.warm.build_model() if self._frame_moves else self._model
        result = inner_steps(
            model,
            self._layout,
            theta,
            data,
            kept,
            steps=steps,
            spec=self.inner_spec,
            objective=self._objective,
            sketch_seed=self._sketch(sketch_seed, partition),
            first_step=round_index * steps,
            lr_factor=self._lr_factor(round_index if outer_step is None else outer_step, steps),
            landmarks=self._normalised_by,
        )
        if not result.finite:
            raise ContractViolation("The local steps diverged.")
        if not self._frame_moves:
            return LocalResult(result.theta, result.state.to_bytes())
        aligned, reset = self._aligned(model)
        return LocalResult(aligned, result.state.without_moments(reset).to_bytes())

    def public_update(
        self, theta: np.ndarray, share: int, *, steps: int, sketch_seed: int, outer_step: int = 0
    ) -> np.ndarray:
        body, data = self._public_share(share)
        model = self.warm.build_model() if self._frame_moves else self._model
        head = self._head(body, self._head_spec(self.world.public(body)), "public", share)
        state = InnerState.start(head, shuffle_seed=share)
        result = inner_steps(
            model,
            self._layout,
            theta,
            data,
            state,
            steps=steps,
            spec=self.inner_spec,
            objective=self._objective,
            sketch_seed=sketch_seed,
            lr_factor=self._lr_factor(outer_step, steps),
            landmarks=self._normalised_by,
        )
        return self._aligned(model)[0] if self._frame_moves else result.theta

    def _lr_factor(self, outer_step: int, steps: int) -> LrFactor:
        return self.schedule.since(outer_step * steps)

    def _public_share(self, share: int) -> tuple[str, Trajectories | LatentTrajectories]:
        """Public episodes of a pseudo-participant: as many as a participant has, dealt out like its data."""
        if share not in self._shares:
            bodies, count = self.world.embodiments, self.world.share
            body = bodies[share % len(bodies)]
            source = self.world.public(body)
            first = share // len(bodies) * count
            episodes = [source.episode((first + i) % len(source)) for i in range(count)]
            frames = self._frames(episodes, self._public_scale(body))
            data = frames if self._frame_moves else encode_trajectories(self._model, frames)
            self._shares[share] = (body, data)
        return self._shares[share]

    def _inner_state(self, partition: int, state: bytes | None) -> InnerState:
        if state is None:
            source = self.recordings(partition)
            head = self._head(self.body(partition), self._head_spec(source), partition)
            return InnerState.start(head, shuffle_seed=_seed("shuffle", self.config.seed, partition))
        kept = InnerState.from_bytes(state)
        return kept.without_moments() if self.config.inner.reset_optimizer else kept

    def _sketch(self, sketch_seed: int, partition: int) -> bytes | int:
        """Seed of the SIGReg directions: the round's, or, with the shared sketch switched off, one's own."""
        return sketch_seed if self.config.gauge.shared_sketch else f"own/{sketch_seed}/{partition}".encode()

    def _aligned(self, model: WorldModel) -> tuple[np.ndarray, tuple[str, ...]]:
        """The trained full weights in the public frame (INV-ALIGN-BEFORE-RELEASE), and which moments to forget."""
        if not self.config.gauge.align:
            return self._layout.flatten(model), ()
        landmarks = self._landmarks

        def reencode(state) -> torch.Tensor:
            turned = self.warm.build_model()
            turned.load_state_dict(dict(state))
            with torch.no_grad():
                return turned.encode(landmarks)

        with torch.no_grad():
            latents = model.encode(landmarks)
        outcome = align(
            model.state_dict(),
            FrameSurface(**frame_surface(self.model_spec)),
            latents,
            self._landmark_targets,
            threshold_deg=self.config.gauge.drift_threshold_deg,
            reencode=reencode,
        )
        return self._layout.flatten(outcome.state), outcome.reset

    # ------------------------------------------------------------------ evaluation on public data

    def evaluate(self, theta: np.ndarray, body: str | None = None) -> dict[str, float]:
        """Metrics on held-out episodes of one body; None: the mean over all bodies."""
        model = self.warm.build_model()
        self._layout.write(model, theta)
        sets = {
            name: {b: latents for b, latents in self._held_out(name, model).items() if body in (None, b)}
            for name in self._sets
        }
        main = self.world.main_set
        others = [name for name in sets if name != main]
        scores = evaluate(model, self._public_heads, sets[main])
        metrics = {
            "r5": scores.r5,
            "r1": scores.r1,
            **{f"r5_{name}": evaluate(model, self._public_heads, sets[name]).r5 for name in others},
            "effective_rank": scores.effective_rank,
            "latent_std_mean": scores.std_mean,
            "latent_std_min": scores.std_min,
            "action_sensitivity": scores.action_sensitivity,
            "sigreg": scores.sigreg,
        }
        if self._frame_moves:
            metrics["frame_drift_deg"] = self._drift(model)
        metrics.update(self._state_metrics(model, main, sets[main]))
        return {name: float(value) for name, value in metrics.items()}

    @torch.no_grad()
    def _drift(self, model: WorldModel) -> float:
        """Largest principal angle between this model's frame and the public start's, degrees."""
        q, _ = procrustes_align(model.encode(self._landmarks), self._landmark_targets, tolerance=0.0, ridge=DRIFT_RIDGE)
        return frame_drift(q).max_deg

    def _state_metrics(self, model: WorldModel, name: str, held_out: dict[str, LatentTrajectories]) -> dict[str, float]:
        """Means over bodies: R^2 of the position (fit on even held-out episodes, read on odd ones), and its error.

        Episodes under conditions that nobody trains in are left out of the probe and get a figure of their own, read
        by the same probe.
        """
        targets = self.world.state_targets
        if targets is None:
            return {}
        found: dict[str, list[float]] = {}
        for body, latents in held_out.items():
            labels = self._labels(name, body, latents)
            if labels is None:
                continue
            known, read, position = labels.known, ~labels.even, labels.position
            probe = labels.probe(latents)
            for metric, these in (("state_probe_r2", read & known), (self.world.unseen_metric, read & ~known)):
                if these.any():
                    r2 = probe.r2(latents.latents[these], position[these]).mean()
                    found.setdefault(metric, []).append(float(r2))
            if targets.error is not None:
                metric, column = targets.error
                error = probe_rmse(model, self._public_heads[body], latents, probe, column)
                found.setdefault(metric, []).append(error)
        return {metric: sum(values) / len(values) for metric, values in found.items()}

    def _labels(self, name: str, body: str, held: Trajectories | LatentTrajectories) -> _Labels | None:
        """What of a body's held-out states is read, and which frames the probe is fitted on; None: nothing is."""
        targets = self.world.state_targets
        if targets is None or held.states is None:
            return None
        rows = torch.repeat_interleave(torch.arange(len(held.lengths)), torch.tensor(held.lengths))
        unseen = self._sets[name][body].unseen
        known = torch.ones(len(held.lengths), dtype=torch.bool) if unseen is None else ~torch.from_numpy(unseen)
        known, even, columns = known[rows], rows % 2 == 0, list(targets.position)
        if not columns:  # all but those that stand still: of them nothing can be read
            moves = [held.states[part].std(dim=0) > _STILL for part in (known & even, ~even)]
            columns = torch.nonzero(moves[0] & moves[1]).flatten().tolist()
            if not columns:
                return None
        names = targets.names or tuple(f"state {column}" for column in columns)
        return _Labels(held.states[:, columns], names, known, even, rows)

    def readings(self, thetas: Mapping[str, np.ndarray]) -> Readings | None:
        """Of the first held-out episode that the probe is not fitted on; see :class:`.task.Shows`."""
        for body, frames in self._frames_held_out[self.world.main_set].items():
            labels = self._labels(self.world.main_set, body, frames)
            rows = None if labels is None else labels.first_read(_AHEAD + 2)
            if labels is not None and rows is not None:
                return self._readings(thetas, body, labels, rows)
        return None

    def _readings(self, thetas: Mapping[str, np.ndarray], body: str, labels: _Labels, rows: torch.Tensor) -> Readings:
        name, targets = self.world.main_set, self.world.state_targets
        frames, found = self._frames_held_out[name][body], []
        for model_name, theta in thetas.items():
            model = self.warm.build_model()
            self._layout.write(model, theta)
            encoded = encode_trajectories(model, frames) if self._frame_moves else self._frozen_held_out[name][body]
            one = LatentTrajectories(encoded.latents[rows], encoded.actions[rows], (len(rows),))
            probe, predicted = labels.probe(encoded), np.full((len(rows), len(labels.names)), np.nan)
            predicted[_AHEAD + 1 :] = probe(open_loop(model, self._public_heads[body], one, _AHEAD)[0]).numpy()
            found.append(Reading(model_name, probe(one.latents).numpy(), predicted))
        place = None if targets is None else targets.in_picture
        shown = () if place is None else spaced(_AHEAD + 1, min(len(rows), MAX_STEPS) - 1)
        pictures = frames.at(rows[list(shown)]).permute(0, 2, 3, 1).contiguous().numpy() if shown else None
        truth = labels.position[rows].double().numpy()
        return Readings(body, labels.names, _AHEAD, truth, tuple(found), place, shown, pictures)

    def _held_out(self, name: str, model: WorldModel) -> dict[str, LatentTrajectories]:
        if not self._frame_moves:  # one frozen encoder: encode once
            return self._frozen_held_out[name]
        return {body: encode_trajectories(model, frames) for body, frames in self._frames_held_out[name].items()}

    @cached_property
    def _sets(self) -> Mapping[str, Mapping[str, HeldOut]]:
        return self.world.heldout()

    @cached_property
    def _frames_held_out(self) -> dict[str, dict[str, Trajectories]]:
        return {
            name: {body: self._public_frames(body, held.source) for body, held in per_body.items()}
            for name, per_body in self._sets.items()
        }

    @cached_property
    def _frozen_held_out(self) -> dict[str, dict[str, LatentTrajectories]]:
        return {
            name: {body: encode_trajectories(self._model, frames) for body, frames in per_body.items()}
            for name, per_body in self._frames_held_out.items()
        }

    # ------------------------------------------------------------------ built once per process

    @cached_property
    def _model(self) -> WorldModel:
        return self.warm.build_model()

    @cached_property
    def _public_heads(self) -> dict[str, ActionHead]:
        warm = self.warm
        return {body: head_from_state(warm.bodies[body], warm.model_spec, warm.heads[body]) for body in warm.bodies}

    @cached_property
    def _landmarks(self) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.probe.frames.transpose(0, 3, 1, 2)))

    @property
    def _normalised_by(self) -> torch.Tensor | None:
        return self._landmarks if self._frame_moves and self.config.inner.landmark_norm else None

    @cached_property
    def _landmark_targets(self) -> torch.Tensor:
        with torch.no_grad():
            return self.warm.build_model().encode(self._landmarks)

    @cached_property
    def _objective(self) -> Objective:
        anchor = None
        if self.objective_spec.lambda_anc > 0:
            anchor = FrameAnchor(self._landmarks, self._landmark_targets, self.config.gauge.anchor)
        return Objective(self.objective_spec, anchor)


def _inputs(actions: NDArray[np.float32], states: NDArray | None, scale: StateScale | None) -> NDArray[np.float32]:
    """What the head of a body reads at each step: its actions, and its states beside them if they are an input."""
    return actions if scale is None or states is None else scale.beside(actions, states)


def _seed(*path: object) -> int:
    """56 bits named by a path."""
    digest = hashlib.sha256("/".join(map(str, path)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def save_reserved(path: Path, hashes: Iterable[bytes]) -> None:
    """Write the hashes of public evaluation episodes, sorted."""
    lines = sorted({digest.hex() for digest in hashes})
    body = "\n".join(lines)
    check = hashlib.sha256(body.encode()).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, f"{_RESERVED} {check}\n{body}\n".encode(), mode=0o644)


def load_reserved(path: Path) -> frozenset[bytes]:
    """Read :func:`save_reserved`.

    Raises:
        ArtifactError: missing, cut or altered.
    """
    try:
        head, _, body = path.read_text(encoding="ascii").partition("\n")
        if not body.endswith("\n") or head != f"{_RESERVED} {hashlib.sha256(body[:-1].encode()).hexdigest()}":
            raise ValueError("altered")
        return frozenset(bytes.fromhex(line) for line in body.split())
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is no list of evaluation episodes, or it is damaged.",
            "Get the public files again (lensemble coordinator public), or run the same command again.",
        ) from error
