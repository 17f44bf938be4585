"""The world model as a function: what is federated is what it answers on public windows, not its weights.

theta holds the latents of the public windows' frames and the predictions of their last latents. Everybody turns theta
into a network by the same public computation (:meth:`FunctionTask.student`): from the public start, taught theta. A
participant trains that network on its own data, brings its answers into the reference frame and releases the change of
the answers: clipped, noised, masked and summed like any other vector. The coordinator's network is the student of the
mean; it never sees the answers of one participant. Participants' encoders may differ in width.

Layer 4 of the gauge: the fallback where averaging weights is unstable or impossible. What public windows do not ask is
not shared, and is learned anew by each participant in each round.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from lensemble_flwr.config import Config
from lensemble_flwr.data.episodes import episode_hash
from lensemble_flwr.errors import ContractViolation, ProbeError
from lensemble_flwr.federation.readings import Readings
from lensemble_flwr.federation.site_dataset import SiteDataset
from lensemble_flwr.federation.task import LocalResult, Progress, Slice
from lensemble_flwr.federation.world_task import WorldTask
from lensemble_flwr.gauge.align import FrameSurface, align
from lensemble_flwr.home import cache_lock
from lensemble_flwr.model.distill import PublicWindows, answers, distil
from lensemble_flwr.model.inner import InnerResult, InnerState, LrFactor, inner_steps
from lensemble_flwr.model.layout import ParameterLayout
from lensemble_flwr.model.spec import ModelSpec
from lensemble_flwr.model.trajectories import LatentTrajectories, Trajectories
from lensemble_flwr.model.world_model import WorldModel

_EXACT = 1e-6


class FunctionTask(WorldTask):
    """See the module. ``gauge.windows``, ``distill_steps``, ``distill_lr``, ``student_widths`` belong to it."""

    def __init__(self, config: Config, data_dir: Path | None = None, dataset: SiteDataset | None = None) -> None:
        super().__init__(config, data_dir, dataset)
        count, z = config.gauge.windows, self.model_spec.latent_dim
        self.layout = (
            Slice("function.latents", (3 * count, z), 0),
            Slice("function.predictions", (count, z), 3 * count * z),
        )
        self._students: dict[tuple[bytes, int], WorldModel] = {}

    # ------------------------------------------------------------------ public constants

    @property
    def dimension(self) -> int:
        last = self.layout[-1]
        return last.start + last.size

    @cached_property
    def windows(self) -> PublicWindows:
        """What is asked, and what the public start answers."""
        return PublicWindows.load(self._windows_path)

    @property
    def _windows_path(self) -> Path:
        return self._cache(f".windows{self.config.gauge.windows}")

    @cached_property
    def base_hash(self) -> bytes:
        return hashlib.sha256(
            b"lensemble function 1\0" + bytes.fromhex(self.warm.content_hash) + self.windows.hash
        ).digest()

    def initial(self) -> np.ndarray:
        return self._as_theta(self.windows.latents, self.windows.predictions)

    def prepare(self, progress: Progress | None = None) -> None:
        super().prepare(progress)
        with cache_lock(self._windows_path):
            if not self._windows_path.is_file():
                self._make_windows().save(self._windows_path)

    def public_files(self) -> tuple[Path, ...]:
        return (*super().public_files(), self._windows_path)

    def prepare_participant(self, partition: int, public: Path | None = None, progress: Progress | None = None) -> None:
        super().prepare_participant(partition, public, progress)
        _ = self.windows  # verified as it loads

    def _make_windows(self) -> PublicWindows:
        """Windows from the probe's episodes, which no participant trains on; spread over them."""
        count, held = self.config.gauge.windows, self.probe.episode_hashes
        frames, embedded = [], []
        bodies = self.world.embodiments
        for number, body in enumerate(bodies):
            source, head = self.world.public(body), self.warm.head(body)
            episodes = [e for e in (source.episode(i) for i in range(len(source))) if episode_hash(e) in held]
            share = count // len(bodies) + (number < count % len(bodies))
            spots = [(e, t) for e in range(len(episodes)) for t in range(len(episodes[e].frames) - 2)]
            if share > len(spots):
                raise ProbeError(
                    f"The probe's episodes of {body} have {len(spots)} windows, {share} are asked.",
                    "Lower gauge.windows, or raise data.public_episodes.",
                )
            rng = np.random.default_rng([self.config.seed, number, 0x77696E])
            for place in sorted(rng.choice(len(spots), share, replace=False).tolist()):
                e, t = spots[place]
                pictures = np.ascontiguousarray(episodes[e].frames[t : t + 3].transpose(0, 3, 1, 2))
                frames.append(torch.from_numpy(pictures))
                with torch.no_grad():
                    embedded.append(head(torch.from_numpy(episodes[e].actions[t + 1 : t + 2].copy()))[0])
        stacked, actions = torch.stack(frames), torch.stack(embedded)
        latents, predictions = answers(self.warm.build_model(), stacked, actions)
        return PublicWindows(stacked, actions, latents, predictions)

    # ------------------------------------------------------------------ functions and networks

    def _as_theta(self, latents: torch.Tensor, predictions: torch.Tensor) -> np.ndarray:
        return torch.cat([latents, predictions]).reshape(-1).float().numpy().copy()

    def _spec(self, partition: int) -> ModelSpec:
        """A participant's own architecture: of another width if ``gauge.student_widths`` says so."""
        widths = self.config.gauge.student_widths
        width = widths[partition % len(widths)] if widths else self.model_spec.width
        return dataclasses.replace(self.model_spec, width=width)

    def student(self, theta: np.ndarray, spec: ModelSpec | None = None) -> WorldModel:
        """A network that answers like theta; the same at every party up to rounding.

        Args:
            theta: (d,) float32.
            spec: its architecture; None: the public start's.

        Raises:
            ContractViolation: theta has another shape.
        """
        spec = spec or self.model_spec
        if theta.shape != (self.dimension,):
            raise ContractViolation(f"theta has shape {theta.shape}, expected ({self.dimension},).")
        key = hashlib.sha256(theta.tobytes()).digest(), spec.width
        if key not in self._students:
            model = self._start(spec)
            z = spec.latent_dim
            wanted = torch.from_numpy(theta.astype(np.float32)).view(-1, z)
            latents, predictions = wanted[: len(self.windows.latents)], wanted[len(self.windows.latents) :]
            same = torch.cat(answers(model, self.windows.frames, self.windows.actions))
            if (same - wanted).abs().max() > _EXACT:
                gauge = self.config.gauge
                distil(model, self.windows, latents, predictions, steps=gauge.distill_steps, lr=gauge.distill_lr)
            while len(self._students) > 2 * max(1, len(self.config.gauge.student_widths)):
                self._students.pop(next(iter(self._students)))
            self._students[key] = model
        return copy.deepcopy(self._students[key])

    def _start(self, spec: ModelSpec) -> WorldModel:
        if spec == self.model_spec:
            return self.warm.build_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            model = WorldModel(spec)
        model.encoder.mean_image.copy_(self.warm.state["encoder.mean_image"])
        return model

    def _released(self, model: WorldModel) -> np.ndarray:
        """Answers of a trained model, in the frame of the public start (INV-ALIGN-BEFORE-RELEASE)."""
        latents, predictions = answers(model, self.windows.frames, self.windows.actions)
        gauge = self.config.gauge
        if gauge.align:
            outcome = align(
                {}, FrameSurface((), ()), latents, self.windows.latents, threshold_deg=gauge.drift_threshold_deg
            )
            if outcome.q is not None:  # a function is turned by turning its values
                latents, predictions = (v.double() @ outcome.q for v in (latents, predictions))
        return self._as_theta(latents, predictions)

    # ------------------------------------------------------------------ participants

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
        # The student is a new network each round, so the moments of the last one are void.
        kept = self._inner_state(partition, state).without_moments()
        data, spec = self.training_data(partition), self._spec(partition)
        seed = self._sketch(sketch_seed, partition)
        lr_factor = self._lr_factor(round_index if outer_step is None else outer_step, steps)
        model, result = self._trained(theta, spec, data, kept, steps, seed, round_index * steps, lr_factor)
        return LocalResult(self._released(model), result.state.without_moments().to_bytes())

    def public_update(
        self, theta: np.ndarray, share: int, *, steps: int, sketch_seed: int, outer_step: int = 0
    ) -> np.ndarray:
        body, data = self._public_share(share)
        state = InnerState.start(self.warm.head(body), shuffle_seed=share)
        lr_factor = self._lr_factor(outer_step, steps)
        return self._released(self._trained(theta, self._spec(share), data, state, steps, sketch_seed, 0, lr_factor)[0])

    def _trained(
        self,
        theta: np.ndarray,
        spec: ModelSpec,
        data: Trajectories | LatentTrajectories,
        state: InnerState,
        steps: int,
        sketch_seed: bytes | int,
        first_step: int,
        lr_factor: LrFactor,
    ) -> tuple[WorldModel, InnerResult]:
        model = self.student(theta, spec)
        layout = ParameterLayout.of(spec, "full")
        result = inner_steps(
            model,
            layout,
            layout.flatten(model),
            data,
            state,
            steps=steps,
            spec=self.inner_spec,
            objective=self._objective,
            sketch_seed=sketch_seed,
            first_step=first_step,
            lr_factor=lr_factor,
            landmarks=self._normalised_by,
        )
        if not result.finite:
            raise ContractViolation("The local steps diverged.")
        return model, result

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, theta: np.ndarray, body: str | None = None) -> dict[str, float]:
        """Metrics of the student, and ``distillation_rms``: how far its answers are from theta."""
        model = self.student(theta)
        got = self._as_theta(*answers(model, self.windows.frames, self.windows.actions))
        metrics = super().evaluate(self._layout.flatten(model), body)
        return metrics | {"distillation_rms": float(np.sqrt(np.mean((got - theta) ** 2.0)))}

    def readings(self, thetas: Mapping[str, np.ndarray]) -> Readings | None:
        return super().readings({name: self._layout.flatten(self.student(theta)) for name, theta in thetas.items()})
