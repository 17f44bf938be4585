"""A :class:`.recipe.Recipe` as a task: theta and the model, H local steps, what stays at a site, public hashes."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lensemble_flwr.config import InnerConfig
from lensemble_flwr.errors import ArtifactError, ConfigError, ContractViolation, DataError
from lensemble_flwr.federation.recipe import Recipe
from lensemble_flwr.federation.schedule import Schedule
from lensemble_flwr.federation.task import LocalResult, Progress, Slice
from lensemble_flwr.model.inner import determinism, resolve_device
from lensemble_flwr.model.trajectories import file_metadata

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class LocalState:
    """What a participant keeps between rounds. It never leaves the participant.

    Attributes:
        local: parameters and buffers that are not federated, by name, CPU.
        moments: AdamW's, {"exp_avg": {name: tensor}, "exp_avg_sq": ...}, CPU float32.
        counts: AdamW steps that each weight has behind it.
    """

    local: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {kind: {} for kind in _MOMENTS})
    counts: dict[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As one safetensors file."""
        tensors = {f"local/{name}": value.contiguous().clone() for name, value in self.local.items()}
        for kind, held in self.moments.items():
            tensors |= {f"{kind}/{name}": value.contiguous().clone() for name, value in held.items()}
        plain = json.dumps({"version": 1, "counts": self.counts}, sort_keys=True)
        return safetensors.torch.save(tensors, metadata={"own": plain})

    @staticmethod
    def from_bytes(data: bytes) -> LocalState:
        """Read :meth:`to_bytes`.

        Raises:
            ArtifactError: not such a file.
        """
        try:
            plain = json.loads(file_metadata(data)["own"])
            if plain["version"] != 1:
                raise ValueError("version")
            groups: dict[str, dict[str, Tensor]] = {"local": {}, **{kind: {} for kind in _MOMENTS}}
            for name, value in safetensors.torch.load(data).items():
                kind, rest = name.split("/", 1)
                groups[kind][rest] = value
            counts = {str(name): int(count) for name, count in plain["counts"].items()}
            return LocalState(groups.pop("local"), groups, counts)
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError, ArtifactError) as error:
            raise ArtifactError(
                "The stored local state is damaged.", "Delete it: training goes on with a fresh one."
            ) from error


class TorchTask:
    """See the module; satisfies :class:`.task.Task`."""

    def __init__(self, recipe: Recipe) -> None:
        """Build the model once.

        Raises:
            ConfigError: the model or its federated parameters cannot be used.
        """
        self.recipe, self._inner, self._seed = recipe, recipe.config.inner, recipe.config.seed
        self.headline, self.rehearsal_metric, self.metrics = recipe.headline, recipe.rehearsal_metric, recipe.metrics
        self.probe_hash = bytes(32)
        self.schedule = Schedule.of(recipe.config)
        with _seeded(_digest("model", self._seed)):
            model = recipe.build_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"build_model gave {type(model).__name__}, not a torch.nn.Module.", "Return the module.")
        self._start = model.cpu()
        self.layout = _layout(model, list(recipe.federated(model)))
        self._data: dict[tuple[str, int], Any] = {}

    # ------------------------------------------------------------------ public constants

    @property
    def dimension(self) -> int:
        last = self.layout[-1]
        return last.start + last.size

    @cached_property
    def base_hash(self) -> bytes:
        """The recipe's name and source, and all weights and buffers that are not federated, as they start."""
        own = type(self.recipe)
        digest = hashlib.sha256(f"lensemble own task 1\0{own.__module__}:{own.__qualname__}\0".encode())
        digest.update(_source_hash(own))
        federated = {part.name for part in self.layout}
        for kind in (self._start.named_parameters(), self._start.named_buffers()):
            for name, value in kind:
                if name not in federated:
                    plain = value.detach().contiguous()
                    digest.update(f"{name}\0{plain.dtype}{tuple(plain.shape)}\0".encode())
                    digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def initial(self) -> NDArray[np.float32]:
        return self._flatten(self._start)

    def sketch_hash(self, sketch_seed: int) -> bytes:
        """There are no sketch directions: the hash of the seed."""
        return hashlib.sha256(b"own task sketch" + sketch_seed.to_bytes(8, "big")).digest()

    # ------------------------------------------------------------------ theta and the model

    def _flatten(self, model: nn.Module) -> NDArray[np.float32]:
        """(d,) float32, a copy."""
        named = dict(model.named_parameters())
        return np.concatenate([named[part.name].detach().cpu().numpy().reshape(-1) for part in self.layout])

    @torch.no_grad()
    def model(self, theta: NDArray[np.float32], state: LocalState | None = None) -> nn.Module:
        """A model of its own with these federated weights, and what a site kept of the others.

        Raises:
            ContractViolation: theta, or a tensor of the state, has another shape or dtype.
        """
        if theta.dtype != np.float32 or theta.shape != (self.dimension,):
            raise ContractViolation(f"theta is {theta.dtype} {theta.shape}, expected float32 ({self.dimension},).")
        model = copy.deepcopy(self._start)
        named = dict(model.named_parameters())
        rest = {**named, **dict(model.named_buffers())}
        for name, value in state.local.items() if state is not None else ():
            if name not in rest or rest[name].shape != value.shape:
                raise ContractViolation("The kept local state is of another model.")
            rest[name].copy_(value)
        for part in self.layout:  # last, so that no kept tensor can stand for a federated one
            values = theta[part.start : part.start + part.size]
            named[part.name].copy_(torch.from_numpy(values.copy()).view(part.shape))
        return model

    # ------------------------------------------------------------------ participants

    def _local(self, kind: str, number: int) -> Any:
        if (kind, number) not in self._data:
            with _seeded(_digest(kind, self._seed, number)):
                read = self.recipe.local_data if kind == "local" else self.recipe.public_data
                self._data[kind, number] = read(number)
        return self._data[kind, number]

    def episode_hashes(self, partition: int) -> list[bytes]:
        return self.recipe.hashes(self._local("local", partition))

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
        kept = LocalState() if state is None else LocalState.from_bytes(state)
        if self._inner.reset_optimizer:
            kept = LocalState(kept.local)
        data = self._local("local", partition)
        seed = _digest("steps", self._seed, partition, round_index)
        place = round_index if outer_step is None else outer_step
        trained, after = self._train(theta, data, kept, steps, seed, place)
        return LocalResult(trained, after.to_bytes())

    def public_update(
        self, theta: np.ndarray, share: int, *, steps: int, sketch_seed: int, outer_step: int = 0
    ) -> np.ndarray:
        seed = _digest("public steps", self._seed, share, sketch_seed)
        return self._train(theta, self._local("public", share), LocalState(), steps, seed, outer_step)[0]

    def _train(
        self, theta: np.ndarray, data: Any, kept: LocalState, steps: int, seed: int, outer_step: int
    ) -> tuple[NDArray[np.float32], LocalState]:
        """``steps`` optimizer steps from theta, with the step sizes of outer step ``outer_step``.

        Raises:
            ContractViolation: a loss or a weight is not finite, or the loss is no scalar.
            DataError: there is no batch.
        """
        device = resolve_device(self._inner.device)
        model = self.model(theta, kept).to(device).train()
        named = self._trainable(model)
        optimizer = _optimizer(named, {part.name for part in self.layout}, kept, self._inner)
        with determinism(self._inner.deterministic, device), _seeded(seed):
            batches = _endless(self.recipe, data, np.random.default_rng(seed))
            whole = [group["lr"] for group in optimizer.param_groups]
            for step in range(steps):
                factor = self.schedule.factor(outer_step * steps + step)
                for group, lr in zip(optimizer.param_groups, whole, strict=True):
                    group["lr"] = lr * factor
                loss = self.recipe.loss(model, _to(next(batches), device))
                if loss.numel() != 1:
                    raise ContractViolation(f"The loss has the shape {tuple(loss.shape)}, not one value.")
                if not math.isfinite(float(loss.detach())):
                    raise ContractViolation("The local loss is not finite.")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            model.cpu().eval()
            with torch.no_grad():
                void = set(self.recipe.align(model))
        trained = self._flatten(model)
        if not np.isfinite(trained).all():
            raise ContractViolation("The local steps diverged.")
        return trained, self._kept(model, named, optimizer, void)

    def _trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The federated parameters, and the site's own where they have a step size; all others are frozen."""
        federated, found = {part.name for part in self.layout}, {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in federated or (parameter.requires_grad and self._inner.head_lr > 0))
            if parameter.requires_grad:
                found[name] = parameter
        return found

    def _kept(
        self, model: nn.Module, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, void: set[str]
    ) -> LocalState:
        federated = {part.name for part in self.layout}
        local = {name: p.detach().cpu() for name, p in named.items() if name not in federated}
        local |= {name: value.detach().cpu() for name, value in model.named_buffers()}
        moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in _MOMENTS}
        counts = {}
        for name, parameter in named.items():
            held = optimizer.state.get(parameter, {})
            if "exp_avg" in held and name not in void:
                for kind in _MOMENTS:
                    moments[kind][name] = held[kind].detach().cpu()
                counts[name] = int(held["step"])
        return LocalState(local, moments, counts)

    # ------------------------------------------------------------------ evaluation and files

    def evaluate(self, theta: np.ndarray) -> dict[str, float]:
        with torch.no_grad(), _seeded(_digest("evaluation", self._seed)):
            found = {str(name): float(value) for name, value in self.recipe.evaluate(self.model(theta).eval()).items()}
        missing = {self.headline, self.rehearsal_metric} - found.keys()
        if missing:
            raise ConfigError(
                f"evaluate gave no {', '.join(sorted(missing))}.",
                f"Return what {type(self.recipe).__name__}.headline and rehearsal_metric name.",
            )
        return found

    def prepare(self, progress: Progress | None = None) -> None:
        self.recipe.prepare(progress)

    def public_files(self) -> tuple[Path, ...]:
        return ()

    def prepare_participant(self, partition: int, public: Path | None = None, progress: Progress | None = None) -> None:
        self.recipe.prepare(progress)
        self.recipe.local_data(partition)  # an operator wants to know now whether it can be read


def _layout(model: nn.Module, names: list[str]) -> tuple[Slice, ...]:
    """The federated parameters in the model's own order."""
    parameters = dict(model.named_parameters())
    for name in names:
        if name not in parameters:
            raise ConfigError(f"The model has no parameter {name!r} to federate.", "See model.named_parameters().")
        if parameters[name].dtype != torch.float32 or not parameters[name].requires_grad:
            raise ConfigError(f"{name} is not float32 or requires no gradient.", "Such weights cannot be federated.")
    wanted, start, layout = set(names), 0, []
    for name, parameter in parameters.items():
        if name in wanted and parameter.numel():
            layout.append(Slice(name, tuple(parameter.shape), start))
            start += layout[-1].size
    if not layout or len(wanted) != len(names):
        raise ConfigError("federated() names no parameter, or one twice.", "Name each parameter that travels once.")
    return tuple(layout)


def _optimizer(
    named: dict[str, nn.Parameter], federated: set[str], kept: LocalState, inner: InnerConfig
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name in federated], "lr": inner.lr},
        {"params": [p for name, p in named.items() if name not in federated], "lr": inner.head_lr},
    ]
    groups = [group for group in groups if group["params"]]
    if inner.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=inner.lr, weight_decay=inner.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=inner.lr, weight_decay=inner.weight_decay)
    for name, p in named.items():
        held = {kind: kept.moments[kind][name] for kind in _MOMENTS if name in kept.moments[kind]}
        if len(held) == len(_MOMENTS) and all(moment.shape == p.shape for moment in held.values()):
            step = torch.tensor(float(kept.counts.get(name, 0)))
            optimizer.state[p] = {"step": step, **{kind: m.to(p.device, copy=True) for kind, m in held.items()}}
    return optimizer


def _endless(recipe: Recipe, data: Any, rng: np.random.Generator) -> Iterator[Any]:
    while True:
        any_batch = False
        for batch in recipe.batches(data, rng):
            any_batch = True
            yield batch
        if not any_batch:
            raise DataError("There is no batch in the local data.", "Look at what local_data and batches give.")


def _to(batch: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and mappings go to the device; anything else is left as it is."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        return type(batch)(_to(item, device) for item in batch)
    if isinstance(batch, dict):
        return {key: _to(item, device) for key, item in batch.items()}
    return batch


def _digest(what: str, *numbers: int) -> int:
    """A seed of 63 bits for one purpose."""
    text = f"lensemble/own/1/{what}/{'/'.join(map(str, numbers))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class _seeded:
    """torch's global generators are seeded inside, and as they were afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed, self._fork = seed, torch.random.fork_rng()

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def _source_hash(cls: type) -> bytes:
    """SHA-256 of the file that defines a class, so that two versions of it do not train together; b"" without one."""
    try:
        source = Path(sys.modules[cls.__module__].__file__ or "").read_bytes()
    except (OSError, AttributeError, KeyError, TypeError):
        return b""
    return hashlib.sha256(source.replace(b"\r\n", b"\n")).digest()
