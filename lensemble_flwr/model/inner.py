"""H local steps of one participant: the inner half of a DiLoCo round.

The function is pure in what matters: weights, head and optimizer state go in and come out as values, so that a caller
can keep the new ones beside the encoded update and adopt both together, and a retry never trains again. The module
handed in is a workspace: when the call returns it holds the trained weights.

Two paths. *Closed*: adapter, full-batch SGD, frozen head. The prediction is linear in B, so everything about the
local data that a step needs is two small matrices, and a step is one product. *Generic*: any surface, AdamW or SGD,
shuffled epochs over all local windows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation, DataError
from lensemble_flwr.model.encoder import attach_landmark_norm, fold_normaliser
from lensemble_flwr.model.heads import ActionHead, clone_state, head_from_state
from lensemble_flwr.model.layout import ParameterLayout
from lensemble_flwr.model.objective import Encode, Objective
from lensemble_flwr.model.parallel import run_parallel
from lensemble_flwr.model.spec import HeadSpec, InnerSpec
from lensemble_flwr.model.team import Team, Total
from lensemble_flwr.model.trajectories import LatentTrajectories, Trajectories, file_metadata
from lensemble_flwr.model.world_model import WorldModel, encode_trajectories

_MOMENTS = ("exp_avg", "exp_avg_sq")
LrFactor = Callable[[int], float]
"""What a step's size is multiplied by, by its number."""


@dataclass(frozen=True)
class InnerState:
    """What a participant keeps between rounds. It never leaves the participant.

    Attributes:
        head_spec: action space of this participant's body.
        head: weights of its action head, CPU.
        moments: AdamW moments by name of the weight: {"exp_avg": {...}, "exp_avg_sq": {...}}, CPU float32. Head
            weights are named ``head.*``.
        counts: AdamW steps that each weight has behind it.
        drawn: windows drawn so far; says where in which shuffled epoch the next batch starts.
        shuffle_seed: of the order of the windows.
    """

    head_spec: HeadSpec
    head: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {name: {} for name in _MOMENTS})
    counts: dict[str, int] = field(default_factory=dict)
    drawn: int = 0
    shuffle_seed: int = 0

    @staticmethod
    def start(head: ActionHead, shuffle_seed: int = 0) -> InnerState:
        """State of a participant that has not trained yet."""
        return InnerState(head.head, clone_state(head), shuffle_seed=shuffle_seed)

    def without_moments(self, names: tuple[str, ...] | None = None) -> InnerState:
        """The same with the moments of ``names`` (None: all) forgotten.

        Needed for the weights that an alignment rotated: their moments still point along the old axes.
        """
        gone = set(self.counts if names is None else names)
        moments = {kind: {n: t for n, t in held.items() if n not in gone} for kind, held in self.moments.items()}
        return replace(self, moments=moments, counts={n: c for n, c in self.counts.items() if n not in gone})

    def to_bytes(self) -> bytes:
        """As one safetensors file."""
        tensors = {f"head/{name}": value.contiguous() for name, value in self.head.items()}
        for kind, held in self.moments.items():
            tensors.update({f"{kind}/{name}": value.contiguous() for name, value in held.items()})
        plain = {
            "version": 1,
            "head": [self.head_spec.kind, self.head_spec.dim],
            "counts": self.counts,
            "drawn": self.drawn,
            "shuffle_seed": self.shuffle_seed,
        }
        return safetensors.torch.save(tensors, metadata={"inner": json.dumps(plain, sort_keys=True)})

    @staticmethod
    def from_bytes(data: bytes) -> InnerState:
        """Read :meth:`to_bytes`.

        Raises:
            ArtifactError: not such a file.
        """
        try:
            tensors = safetensors.torch.load(data)
            plain = json.loads(file_metadata(data)["inner"])
            if plain["version"] != 1:
                raise ValueError("version")
            moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in _MOMENTS}
            head: dict[str, Tensor] = {}
            for name, value in tensors.items():
                kind, rest = name.split("/", 1)
                (head if kind == "head" else moments[kind])[rest] = value
            counts = {str(name): int(count) for name, count in plain["counts"].items()}
            spec = HeadSpec(*plain["head"])
            return InnerState(spec, head, moments, counts, int(plain["drawn"]), int(plain["shuffle_seed"]))
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError, ConfigError) as error:
            raise ArtifactError(
                "The stored optimizer state is damaged.", "Delete it: training goes on with fresh moments."
            ) from error


@dataclass(frozen=True)
class InnerResult:
    """Outcome of :func:`inner_steps`. Everything here is private to the participant.

    Attributes:
        theta: (d,) float32, the trained surface.
        state: to be adopted together with the update, or dropped with it.
        first_loss, last_loss: of the first and last step; for the participant's own log.
        lr: the step size that was used (the closed path may have lowered it).
        finite: False if a weight is not finite; the caller then releases the zero update.
    """

    theta: NDArray[np.float32]
    state: InnerState
    first_loss: float
    last_loss: float
    lr: float
    finite: bool


def resolve_device(name: str) -> torch.device:
    """``auto``: a GPU if there is one.

    Raises:
        ConfigError: ``cuda`` without a GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("inner.device is 'cuda' but torch sees no GPU.", "Use inner.device=auto or cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@contextlib.contextmanager
def determinism(wanted: bool, device: torch.device) -> Iterator[None]:
    """Only deterministic kernels inside, if wanted.

    Raises:
        ConfigError: a GPU that was not prepared for it.
    """
    if not wanted:
        yield
        return
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise ConfigError(
            "Deterministic training on a GPU needs CUBLAS_WORKSPACE_CONFIG.",
            "Set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before Python starts.",
        )
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def window_order(shuffle_seed: int, drawn: int, count: int, windows: int) -> Tensor:
    """Which windows the next batch takes: positions ``drawn .. drawn + count`` of an endless run of shuffled epochs.

    Each epoch holds every window once, in an order of its own, so all local data is read before any is read twice.
    """
    picked = []
    while count > 0:
        epoch, position = divmod(drawn, windows)
        digest = hashlib.sha256(f"lensemble/shuffle/1/{shuffle_seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        part = torch.randperm(windows, generator=generator)[position : position + count]
        picked.append(part)
        drawn += len(part)
        count -= len(part)
    return torch.cat(picked)


def unscaled(step: int) -> float:
    """Every step has its whole size."""
    return 1.0


@dataclass(frozen=True)
class AdapterProblem:
    """The local least-squares problem of the adapter: all that its gradient needs.

    ``loss(B) = 1/2 mean ||phi B - r||^2 = 1/2 tr(B' gram B) - tr(B' cross) + constant``

    Attributes:
        gram: (k + 1, k + 1) float64, phi' phi / n.
        cross: (k + 1, z) float64, phi' r / n, with r what the frozen predictor misses.
        constant: 1/2 mean ||r||^2.
    """

    gram: Tensor
    cross: Tensor
    constant: float

    @property
    def safe_lr(self) -> float:
        """1 / lambda_max(gram): the largest step size at which no direction overshoots."""
        return 1 / max(float(torch.linalg.eigvalsh(self.gram)[-1]), 1e-12)

    def loss(self, b: Tensor) -> float:
        """Loss at B (k + 1, z)."""
        return float(0.5 * (b * (self.gram @ b)).sum() - (b * self.cross).sum()) + self.constant

    def descend(
        self, b: Tensor, steps: int, lr: float, weight_decay: float = 0.0, lr_factor: LrFactor = unscaled
    ) -> Tensor:
        """``steps`` full-batch gradient steps from B (k + 1, z) float64, of size ``lr``, each times its factor."""
        for step in range(steps):
            b = b - lr * lr_factor(step) * (self.gram @ b - self.cross + weight_decay * b)
        return b


@torch.no_grad()
def adapter_problem(model: WorldModel, head: ActionHead, latents: LatentTrajectories) -> AdapterProblem:
    """Set up :class:`AdapterProblem` from encoded local episodes, on the CPU.

    Raises:
        ContractViolation: the model has no adapter.
        DataError: no episode has three frames.
    """
    if model.adapter is None:
        raise ContractViolation("The model has no adapter.", "Set model.adapter_rank above zero.")
    starts = latents.starts(3)
    if not len(starts):
        raise DataError("No local episode has three frames.", "Record longer episodes.")
    before, now, following = (latents.latents[starts + i] for i in range(3))
    features = model.predictor.features(before, now, head(latents.actions[starts + 1]))
    phi = model.adapter.phi(features).double()
    missed = (following - model.predictor.step(before, now, features)).double()
    n = len(starts)
    return AdapterProblem(phi.T @ phi / n, phi.T @ missed / n, float(0.5 * missed.square().sum() / n))


def inner_steps(
    model: WorldModel,
    layout: ParameterLayout,
    theta: NDArray[np.float32],
    data: Trajectories | LatentTrajectories,
    state: InnerState,
    *,
    steps: int,
    spec: InnerSpec,
    objective: Objective,
    sketch_seed: bytes | int,
    first_step: int = 0,
    lr_factor: LrFactor = unscaled,
    landmarks: Tensor | None = None,
    team: Team | None = None,
) -> InnerResult:
    """Train ``steps`` steps on one participant's data.

    Args:
        model: workspace; its weights outside the surface are used as they are. Holds the trained weights afterwards
            (on the CPU).
        layout: the federated surface.
        theta: (d,) float32, the weights of the surface at the start of the round.
        data: local episodes. Latents will do (and are faster) when the encoder is not in the surface; they must come
            from this model's encoder.
        state: what this participant kept from its last round.
        steps: H.
        spec: optimizer.
        objective: loss; with its frame anchor, if there is one.
        sketch_seed: s_t of the round.
        first_step: number of the first step, for the random directions of SIGReg.
        lr_factor: of ``spec.lr`` and ``spec.head_lr``, by step from 0; it must pickle if ``spec.parallel`` > 1.
        landmarks: (k, C, H, W) public frames that the encoder's hidden units are normalised by while it trains (see
            :class:`~lensemble_flwr.model.encoder.LandmarkNorm`); the anchor's, if there is one. None: not normalised.
        team: this process's place among ``spec.parallel``; None: start them, if there are to be several.

    Returns:
        New weights and state; ``theta`` and ``state`` are not changed.

    Raises:
        ContractViolation: ``steps`` below 1, latents although the encoder trains, or a head that does not fit.
        DataError: no local episode is long enough for one window.
        ConfigError: the device is not there, or cannot be deterministic.
    """
    if steps < 1:
        raise ContractViolation(f"There must be at least one inner step, got {steps}.")
    trains_encoder = layout.surface == "full"
    if trains_encoder and isinstance(data, LatentTrajectories):
        raise ContractViolation("The encoder is in the federated surface, so training needs frames, not latents.")
    device = resolve_device(spec.device)
    head = head_from_state(state.head_spec, model.spec, state.head)
    layout.write(model, theta)
    with determinism(spec.deterministic, device):
        if layout.surface == "adapter" and spec.optimizer == "sgd" and not spec.batch_size and not spec.head_lr:
            return _closed(model, layout, data, head, state, steps, lr_factor, spec)
        if team is None and spec.parallel > 1:
            _batch_of(spec, len(data.starts(objective.spec.segment)))  # before processes start, which takes seconds
            job = {
                "model_spec": model.spec,
                "weights": model.state_dict(),
                "layout": layout,
                "theta": theta,
                "data": data,
                "state": state,
                "steps": steps,
                "spec": spec,
                "objective": objective,
                "sketch_seed": sketch_seed,
                "first_step": first_step,
                "lr_factor": lr_factor,
                "landmarks": landmarks,
            }
            found: InnerResult = run_parallel(spec.parallel, job)["result"]
            layout.write(model, found.theta)
            return found
        try:
            model.to(device)
            head.to(device)
            if not trains_encoder and isinstance(data, Trajectories):
                data = encode_trajectories(model, data)
            public = landmarks if trains_encoder else None
            if public is not None:
                attach_landmark_norm(model.encoder, public)
            result = _generic(
                *(model, layout, data, head, state, steps, lr_factor, spec, objective, sketch_seed, first_step),
                *(device, public),
                team or Team(),
            )
        finally:
            model.encoder.normaliser = nn.Identity()  # folded, or the call failed and the workspace is void
            model.to("cpu")
            model.requires_grad_(True)
    return result


def _finish(
    layout: ParameterLayout, model: WorldModel, state: InnerState, losses: tuple[float, float], lr: float
) -> InnerResult:
    theta = layout.flatten(model)
    finite = bool(np.isfinite(theta).all()) and all(bool(torch.isfinite(t).all()) for t in state.head.values())
    return InnerResult(theta, state, losses[0], losses[1], lr, finite)


@torch.no_grad()
def _closed(
    model: WorldModel,
    layout: ParameterLayout,
    data: Trajectories | LatentTrajectories,
    head: ActionHead,
    state: InnerState,
    steps: int,
    lr_factor: LrFactor,
    spec: InnerSpec,
) -> InnerResult:
    latents = encode_trajectories(model, data) if isinstance(data, Trajectories) else data
    problem = adapter_problem(model, head, latents)
    assert model.adapter is not None  # adapter_problem refused otherwise
    lr = min(spec.lr, problem.safe_lr)
    start = model.adapter.B.double()
    trained = problem.descend(start, steps, lr, spec.weight_decay, lr_factor)
    model.adapter.B.copy_(trained)
    return _finish(layout, model, state, (problem.loss(start), problem.loss(trained)), lr)


def _optimizer(
    named: dict[str, nn.Parameter], state: InnerState, spec: InnerSpec, device: torch.device
) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for n, p in named.items() if not n.startswith("head.")], "lr": spec.lr},
        {"params": [p for n, p in named.items() if n.startswith("head.")], "lr": spec.head_lr},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, weight_decay=spec.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, weight_decay=spec.weight_decay)
    for name, parameter in named.items():
        held = [state.moments[kind].get(name) for kind in _MOMENTS]
        if any(moment is None or moment.shape != parameter.shape for moment in held):
            continue
        restored = {k: m.to(device, copy=True) for k, m in zip(_MOMENTS, held, strict=True) if m is not None}
        optimizer.state[parameter] = {"step": torch.tensor(float(state.counts.get(name, 0))), **restored}
    return optimizer


def _kept(
    named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: InnerState, head: ActionHead, drawn: int
) -> InnerState:
    moments = {kind: dict(held) for kind, held in state.moments.items()}
    counts = dict(state.counts)
    for name, parameter in named.items():
        held = optimizer.state.get(parameter, {})
        if "exp_avg" in held:
            for kind in _MOMENTS:
                moments[kind][name] = held[kind].detach().to("cpu", copy=True)
            counts[name] = int(held["step"])
    return replace(state, head=clone_state(head), moments=moments, counts=counts, drawn=drawn)


def _only(landmarks: Tensor, latents: Tensor) -> Encode:
    """An encode function that knows the landmarks alone."""

    def encode(frames: Tensor) -> Tensor:
        if frames is not landmarks:
            raise ContractViolation("The anchor's landmarks are not those that the encoder is normalised by.")
        return latents

    return encode


class _Loss(nn.Module):
    """Loss of one process's windows as a module, so that gradients can be averaged over a team."""

    def __init__(
        self,
        model: WorldModel,
        head: ActionHead,
        objective: Objective,
        sketch_seed: bytes | int,
        landmarks: Tensor | None,
    ) -> None:
        super().__init__()
        self.model, self.head = model, head
        self._objective, self._sketch_seed, self._landmarks = objective, sketch_seed, landmarks

    def forward(
        self, seen: Tensor, actions: Tensor, windows: int, encoded: bool, step: int, weight: float, total: Total | None
    ) -> Tensor:
        """Total loss.

        Args:
            seen: on the device: frames (windows * L, C, H, W), followed by the landmarks if there are any, or latents
                (windows, L, z) if ``encoded``.
            actions: (windows, L - 1, a).
            windows, encoded: see above.
            step: number of the inner step.
            weight, total: of the team.
        """
        encode: Encode | None = None
        if encoded:
            latents = seen
        else:
            encode, rows = self.model.encode, windows * (actions.shape[1] + 1)
            latents = self.model.encode(seen)
            if self._landmarks is not None:
                # One pass: the landmarks normalise the batch, and the anchor takes their latents from it.
                encode, latents = _only(self._landmarks, latents[rows:]), latents[:rows]
            latents = latents.view(windows, actions.shape[1] + 1, -1)
        terms = self._objective(
            *(self.model, latents, self.head(actions), self._sketch_seed, step),
            encoder_trains=not encoded,
            encode=encode,
            weight=weight,
            total=total,
        )
        return terms.total


class _Batches:
    """Batches of this process on the device. On a GPU the next one is copied while the present one computes."""

    def __init__(
        self,
        data: Trajectories | LatentTrajectories,
        starts: Tensor,
        segment: int,
        landmarks: Tensor | None,
        device: torch.device,
        team: Team,
    ) -> None:
        self._data, self._starts, self._device, self._team = data, starts, device, team
        self._span, self._landmarks = torch.arange(segment), landmarks

    def load(self, order: Tensor | slice) -> tuple[Tensor, Tensor, int]:
        """Frames or latents, actions, and the number of windows."""
        rows = self._team.part(self._starts[order])
        index = rows[:, None] + self._span
        data = self._data
        if isinstance(data, Trajectories):
            seen = data.at(index).flatten(0, 1)
            seen = seen if self._landmarks is None else torch.cat([seen, self._landmarks])
        else:
            seen = data.latents[index]
        return self._send(seen), self._send(data.actions[index[:, :-1]]), len(rows)

    def _send(self, batch: Tensor) -> Tensor:
        if self._device.type == "cuda":  # pinned memory, so that the copy runs beside the computation
            return batch.pin_memory().to(self._device, non_blocking=True)
        return batch.to(self._device)


def _batch_of(spec: InnerSpec, windows: int) -> int:
    """Windows of a step."""
    batch = min(spec.batch_size or windows, windows)
    if 0 < batch < spec.parallel:
        raise ConfigError(
            f"A batch of {batch} windows cannot be shared by inner.parallel={spec.parallel} processes.",
            "Lower inner.parallel or raise inner.batch_size.",
        )
    return batch


def _generic(
    model: WorldModel,
    layout: ParameterLayout,
    data: Trajectories | LatentTrajectories,
    head: ActionHead,
    state: InnerState,
    steps: int,
    lr_factor: LrFactor,
    spec: InnerSpec,
    objective: Objective,
    sketch_seed: bytes | int,
    first_step: int,
    device: torch.device,
    landmarks: Tensor | None,
    team: Team,
) -> InnerResult:
    segment = objective.spec.segment
    starts = data.starts(segment)
    if not len(starts):
        raise DataError(f"No local episode has {segment} frames.", "Record longer episodes.")
    parameters = dict(model.named_parameters())
    model.requires_grad_(False)
    head.requires_grad_(spec.head_lr > 0)
    named = {name: parameters[name] for name in layout.names}
    for parameter in named.values():
        parameter.requires_grad_(True)
    if spec.head_lr > 0:
        named.update({f"head.{name}": parameter for name, parameter in head.named_parameters()})
    optimizer = _optimizer(named, state, spec, device)
    batch = _batch_of(spec, len(starts))
    drawn, losses = state.drawn, [math.nan, math.nan]
    half = device.type == "cuda" and not spec.deterministic
    loss_of = team.wrap(_Loss(model, head, objective, sketch_seed, landmarks))
    batches = _Batches(data, starts, segment, landmarks, device, team)
    trained = list(named.values())

    def following() -> tuple[Tensor, Tensor, int]:
        # With everything in one batch the order does not matter, and keeping it makes steps repeatable.
        whole = batch == len(starts)
        return batches.load(slice(None) if whole else window_order(state.shuffle_seed, drawn, batch, len(starts)))

    waiting = following()
    whole_lr = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, whole_lr, strict=True):
            group["lr"] = lr * lr_factor(step)
        seen, actions, windows = waiting
        drawn += batch
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss = loss_of(
                *(seen, actions, windows, isinstance(data, LatentTrajectories), first_step + step),
                team.weight(windows, batch),
                team.total,
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step + 1 < steps:
            waiting = following()  # on a GPU the backward pass is still running
        if spec.grad_clip:
            nn.utils.clip_grad_norm_(trained, spec.grad_clip)
        optimizer.step()
        if step in (0, steps - 1):
            losses[1] = float(loss.detach())
            losses[0] = losses[1] if step == 0 else losses[0]
    kept = _kept(named, optimizer, state, head, drawn)
    if landmarks is not None:
        fold_normaliser(model.encoder, landmarks.to(device))
    model.to("cpu")
    return _finish(layout, model, kept, (losses[0], losses[1]), spec.lr)
