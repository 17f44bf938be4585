"""The public start: a world model trained on public episodes, which every participant begins from.

A federation of small updates adapts a model, it does not raise one from nothing, so everything that is expensive or
cannot be made private is done here, on public data: encoder, predictor, one action head per body, the mean image and
the basis of the adapter. The result is one file with a content hash; participants pin the hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ConfigError, ContractViolation, DataError
from lensemble_flwr.model.encoder import attach_normaliser, fit_pixels, fold_normaliser
from lensemble_flwr.model.evaluate import Progress
from lensemble_flwr.model.heads import ActionHead, clone_state, head_from_state
from lensemble_flwr.model.objective import Objective
from lensemble_flwr.model.predictor import fit_adapter_basis
from lensemble_flwr.model.pretrained import Pretrained
from lensemble_flwr.model.spec import HeadSpec, ModelSpec, ObjectiveSpec, WarmStartSpec, from_plain, to_plain
from lensemble_flwr.model.trajectories import LatentTrajectories, Trajectories
from lensemble_flwr.model.world_model import WorldModel, encode_trajectories, state_digest

FORMAT = 1
RECIPE = 2
"""Raised when the same settings would train another model than before. Belongs into the name of a cached start."""


@dataclass(frozen=True)
class WarmStart:
    """A trained public start.

    Attributes:
        model_spec: sizes.
        state: all weights and constants of the :class:`WorldModel`, CPU.
        bodies: action space of each body that has a public head.
        heads: weights of each public head; a participant starts from the one of its body.
        settings: how it was made (plain values: objective, training).
        notes: what was measured while it was made (CPU seconds, loss); not part of the content hash.
    """

    model_spec: ModelSpec
    state: dict[str, Tensor]
    bodies: dict[str, HeadSpec]
    heads: dict[str, dict[str, Tensor]]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def build_model(self) -> WorldModel:
        """A fresh :class:`WorldModel` with these weights, CPU."""
        with torch.device("meta"):
            model = WorldModel(self.model_spec)
        model = model.to_empty(device="cpu")
        model.load_state_dict(self.state)
        return model

    def head(self, body: str) -> ActionHead:
        """A fresh action head of a body.

        Raises:
            ConfigError: the public start knows no such body.
        """
        if body not in self.bodies:
            raise ConfigError(
                f"The public start has no action head for body {body!r}.",
                f"It knows {', '.join(sorted(self.bodies))}.",
            )
        return head_from_state(self.bodies[body], self.model_spec, self.heads[body])

    def tensors(self) -> dict[str, Tensor]:
        """Everything as one flat state, the way it is stored."""
        flat = {f"model/{name}": value for name, value in self.state.items()}
        for body, head in self.heads.items():
            flat.update({f"head/{body}/{name}": value for name, value in head.items()})
        return flat

    def _described(self) -> str:
        plain = {
            "format": FORMAT,
            "model": to_plain(self.model_spec),
            "bodies": {body: to_plain(spec) for body, spec in self.bodies.items()},
            "settings": self.settings,
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    @property
    def content_hash(self) -> str:
        """SHA-256 over description, names, shapes and bytes, as hex. Does not depend on the file's own layout."""
        return hashlib.sha256(self._described().encode() + b"\0" + state_digest(self.tensors())).hexdigest()


def save_warm_start(warm: WarmStart, path: str | os.PathLike[str]) -> str:
    """Write a warm start as safetensors; the file appears whole or not at all.

    Returns:
        Its content hash.

    Raises:
        ArtifactError: the file cannot be written.
    """
    target = Path(path)
    metadata = {"warm_start": warm._described(), "content_hash": warm.content_hash, "notes": json.dumps(warm.notes)}
    data = safetensors.torch.save({n: t.contiguous() for n, t in warm.tensors().items()}, metadata=metadata)
    with file_errors(target.parent, "create"):
        target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, data, mode=0o644)  # made of public data
    return warm.content_hash


def load_warm_start(path: str | os.PathLike[str], expected_hash: str | None = None) -> WarmStart:
    """Read :func:`save_warm_start`.

    Args:
        path: the file.
        expected_hash: the pinned content hash, hex; None takes the one in the file.

    Raises:
        ArtifactError: missing or not such a file.
        CheckpointIntegrityError: the content does not match the hash.
    """
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        described = json.loads(metadata["warm_start"])
        if described["format"] != FORMAT:
            raise ArtifactError(f"{path} has format {described['format']}, not {FORMAT}.", "Make it again.")
        model_spec = from_plain(ModelSpec, described["model"])
        bodies = {body: from_plain(HeadSpec, spec) for body, spec in described["bodies"].items()}
        stored_hash, notes = metadata["content_hash"], json.loads(metadata.get("notes", "{}"))
    except FileNotFoundError as error:
        raise ArtifactError(f"There is no warm start at {path}.", "Make one, or correct the path.") from error
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, ConfigError) as error:
        raise ArtifactError(f"{path} is not a warm start of this version.", "Delete it and make it again.") from error
    state = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
    heads = {
        body: {n.removeprefix(f"head/{body}/"): t for n, t in tensors.items() if n.startswith(f"head/{body}/")}
        for body in bodies
    }
    warm = WarmStart(model_spec, state, bodies, heads, described["settings"], notes)
    wanted = expected_hash or stored_hash
    if warm.content_hash != wanted:
        raise CheckpointIntegrityError(
            f"{path} has content hash {warm.content_hash[:16]}, expected {wanted[:16]}.",
            "Get the file again from where the hash came from.",
        )
    return warm


def one_cycle(step: int, steps: int, peak: float, warmup: float) -> float:
    """Step size of a one-cycle schedule: cosine up from peak / 25 to peak, then cosine down to almost zero."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        low, share = peak / 25, (step + 1) / rise
        return low + (peak - low) * 0.5 * (1 - math.cos(math.pi * share))
    share = (step - rise + 1) / max(1, steps - rise)
    return peak * (1e-3 + (1 - 1e-3) * 0.5 * (1 + math.cos(math.pi * share)))


def adapter_features(model: WorldModel, head: ActionHead, latents: LatentTrajectories) -> Tensor:
    """Last hidden layer of the predictor at every transition, (n, predictor_width); what the adapter reads."""
    starts = latents.starts(3)
    with torch.no_grad():
        return model.predictor.features(
            latents.latents[starts], latents.latents[starts + 1], head(latents.actions[starts + 1])
        )


def fit_public_basis(
    model: WorldModel,
    heads: Mapping[str, ActionHead],
    public: Mapping[str, LatentTrajectories],
    floor: float = 0.01,
) -> None:
    """Fit the adapter's basis on the public transitions of all bodies (in the order of their names)."""
    if model.adapter is None:
        return
    features = torch.cat([adapter_features(model, heads[body], public[body]) for body in sorted(public)])
    fit_adapter_basis(model.adapter, features, floor)


class _Threads:
    """Sets torch's thread number for a while."""

    def __init__(self, count: int | None) -> None:
        self.count, self.before = count, torch.get_num_threads()

    def __enter__(self) -> None:
        if self.count:
            torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def train_warm_start(
    spec: ModelSpec,
    public: Mapping[str, tuple[HeadSpec, Trajectories]],
    training: WarmStartSpec | None = None,
    objective: ObjectiveSpec | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    device: str = "cpu",
    pretrained: Pretrained | None = None,
) -> WarmStart:
    """Train encoder, predictor and one head per body on public episodes.

    The global random state of torch is left as it was. On one machine with one number of threads the result is the
    same each time.

    Args:
        spec: sizes.
        public: action space and public episodes of each body.
        training: steps, step size, seed.
        objective: loss weights; its anchor weight is not used here (this model *defines* the frame).
        progress: called every 20 steps with ``loss``, ``prediction``, ``sigreg`` and ``std`` (mean latent std).
        threads: torch threads while it trains; None leaves them.
        device: ``cpu`` or ``cuda``.
        pretrained: weights that the encoder begins with; what they leave out begins at random.

    Raises:
        DataError: no body, or a body whose episodes are shorter than a training window.
        ContractViolation: the training diverged.
    """
    training = training or WarmStartSpec()
    goal = objective or ObjectiveSpec()
    if not public:
        raise DataError("There are no public episodes to start from.", "Give at least one body.")
    names = sorted(public)
    starts = {body: public[body][1].starts(goal.segment) for body in names}
    for body in names:
        if not len(starts[body]):
            raise DataError(f"No public episode of {body} has {goal.segment} frames.", "Record longer episodes.")
    began = time.process_time()
    with _Threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model = WorldModel(spec)
        if pretrained is not None:
            model.encoder.load_state_dict(pretrained.state, strict=False)
        heads = {body: ActionHead(public[body][0], spec) for body in names}
        sample = _sample([public[body][1] for body in names], 2048)
        fit_pixels(model.encoder, sample)
        attach_normaliser(model.encoder)
        model.to(device)
        for head in heads.values():
            head.to(device)
        _train(model, heads, public, starts, training, goal, progress, device)
        fold_normaliser(model.encoder, sample)
        model.cpu()
        for head in heads.values():
            head.cpu()
        encoded = {body: encode_trajectories(model, public[body][1]) for body in names}
        fit_public_basis(model, heads, encoded, training.pca_floor)
    origin = {} if pretrained is None else {"encoder": pretrained.sha256}
    return WarmStart(
        model_spec=spec,
        state=clone_state(model),
        bodies={body: public[body][0] for body in names},
        heads={body: clone_state(heads[body]) for body in names},
        settings={"recipe": RECIPE, "training": to_plain(training), "objective": to_plain(goal), **origin},
        notes={
            "cpu_seconds": round(time.process_time() - began, 2),
            "threads": threads or torch.get_num_threads(),
            **({} if pretrained is None else {"unfit": list(map(str, pretrained.unfit)), "fresh": pretrained.fresh}),
        },
    )


def _sample(sets: Sequence[Trajectories], about: int) -> Tensor:
    """Every k-th frame of all sets end to end, ``about`` so many."""
    total = sum(map(len, sets))
    rows, parts = torch.arange(0, total, max(1, total // about)), []
    for each in sets:
        parts.append(each.at(rows[(rows >= 0) & (rows < len(each))]))
        rows = rows - len(each)
    return torch.cat(parts)


def _train(
    model: WorldModel,
    heads: Mapping[str, ActionHead],
    public: Mapping[str, tuple[HeadSpec, Trajectories]],
    starts: Mapping[str, Tensor],
    training: WarmStartSpec,
    goal: ObjectiveSpec,
    progress: Progress | None,
    device: str,
) -> None:
    names = sorted(public)
    draw = torch.Generator().manual_seed(training.seed)
    parameters = [p for n, p in model.named_parameters() if not n.startswith("adapter.")]
    parameters += [p for head in heads.values() for p in head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=training.weight_decay)
    loss_of = Objective(_without_anchor(goal))
    each = {
        body: training.segments // len(names) + (i < training.segments % len(names)) for i, body in enumerate(names)
    }
    span = torch.arange(goal.segment)
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = one_cycle(step, training.steps, training.lr, training.warmup)
        frames, embeddings = [], []
        for body in names:
            if not each[body]:
                continue
            picked = starts[body][torch.randint(len(starts[body]), (each[body],), generator=draw)]
            index = picked[:, None] + span
            frames.append(public[body][1].at(index).flatten(0, 1))
            embeddings.append(heads[body](public[body][1].actions[index[:, :-1]].to(device)))
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device == "cuda"):
            latents = model.encode(torch.cat(frames).to(device)).view(-1, goal.segment, model.spec.latent_dim)
            terms = loss_of(model, latents, torch.cat(embeddings), training.seed, step)
        optimizer.zero_grad(set_to_none=True)
        terms.total.backward()
        if training.grad_clip:
            torch.nn.utils.clip_grad_norm_(parameters, training.grad_clip)
        optimizer.step()
        last = step + 1 == training.steps
        if step % 20 == 0 or last:
            total = float(terms.total.detach())
            if not math.isfinite(total):
                raise ContractViolation(f"The warm start diverged at step {step}.", "Lower its learning rate.")
            if progress is not None:
                figures = {"loss": total, "prediction": float(terms.prediction.detach())}
                figures["sigreg"] = 0.0 if terms.sigreg is None else float(terms.sigreg.detach())
                figures["std"] = float(latents.detach().flatten(0, 1).std(dim=0).mean())
                progress(step + 1, training.steps, figures)


def _without_anchor(goal: ObjectiveSpec) -> ObjectiveSpec:
    return from_plain(ObjectiveSpec, {**to_plain(goal), "lambda_anc": 0.0})
