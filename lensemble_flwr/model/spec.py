"""Sizes and weights of the world model, as frozen values that check themselves.

Everything here is plain data: no tensors, no files. The configuration layer fills these classes from ``conf/model``
and ``conf/objective``; :func:`preset` gives the named sizes, from one that a test trains in seconds to ViT-L.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, TypeVar

from lensemble_flwr.errors import ConfigError

_T = TypeVar("_T")


def _require(ok: bool, what: str, remedy: str) -> None:
    if not ok:
        raise ConfigError(what, remedy)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive_ints(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        _require(
            _is_int(value) and value > 0,
            f"{type(spec).__name__}.{name} is {value!r}; it must be a whole number above zero.",
            f"Set {name} to a positive whole number.",
        )


def _check_weights(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        _require(
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0,
            f"{type(spec).__name__}.{name} is {value!r}; it must be a finite number, zero or more.",
            f"Set {name} to zero or a positive number.",
        )


def to_plain(spec: Any) -> dict[str, Any]:
    """A spec as a plain dictionary (JSON-ready); the inverse of :func:`from_plain`."""
    return dataclasses.asdict(spec)


def from_plain(kind: type[_T], values: dict[str, Any]) -> _T:
    """Build the spec ``kind`` from a dictionary.

    Raises:
        ConfigError: a key that ``kind`` does not have, or a value it refuses.
    """
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    _require(
        not unknown,
        f"{kind.__name__} has no field {', '.join(map(repr, unknown))}.",
        f"Known fields: {', '.join(sorted(known))}.",
    )
    return kind(**values)


@dataclass(frozen=True)
class ModelSpec:
    """Shape of encoder, predictor and adapter.

    Attributes:
        image_size: pixels per side of the square input.
        channels: colour channels.
        patch: pixels per side of a patch; divides ``image_size``.
        width, depth, heads: of the vision transformer; ``heads`` divides ``width``.
        mlp_ratio: hidden width of a block's MLP over ``width``.
        projector_width: hidden width between the pooled tokens and the latent.
        latent_dim: z, the dimension of the shared latent frame.
        predictor_width, predictor_depth: width and number of residual layers of the predictor.
        action_embed_dim: what an action head hands to the predictor.
        action_hidden: hidden width of an action head.
        adapter_rank: k; the adapter is a (k + 1) x z matrix. 0: no adapter.
        velocity_gain: the predictor sees ``velocity_gain * (z_t - z_{t-1})``, so that the small step between two
            frames weighs about as much as the latent itself.
        pixel_gain: factor on pixels (0..1, mean image subtracted). Content fills a small part of a patch; the gain
            makes it about as loud as the position embedding.
    """

    image_size: int = 64
    channels: int = 3
    patch: int = 16
    width: int = 64
    depth: int = 3
    heads: int = 4
    mlp_ratio: float = 2.0
    projector_width: int = 128
    latent_dim: int = 16
    predictor_width: int = 128
    predictor_depth: int = 2
    action_embed_dim: int = 16
    action_hidden: int = 32
    adapter_rank: int = 7
    velocity_gain: float = 4.0
    pixel_gain: float = 4.0

    def __post_init__(self) -> None:
        _check_positive_ints(
            self,
            *("image_size", "channels", "patch", "width", "depth", "heads", "projector_width", "latent_dim"),
            *("predictor_width", "predictor_depth", "action_embed_dim", "action_hidden"),
        )
        _require(
            self.image_size % self.patch == 0,
            f"patch {self.patch} does not divide image_size {self.image_size}.",
            "Choose a patch that divides the image size.",
        )
        _require(
            self.width % self.heads == 0,
            f"heads {self.heads} does not divide width {self.width}.",
            "Choose a number of heads that divides the width.",
        )
        _require(
            _is_int(self.adapter_rank) and 0 <= self.adapter_rank <= self.predictor_width,
            f"adapter_rank is {self.adapter_rank!r}; it must lie in 0..predictor_width ({self.predictor_width}).",
            "Choose a smaller adapter_rank.",
        )
        _check_weights(self, "mlp_ratio", "velocity_gain", "pixel_gain")
        _require(self.pixel_gain > 0, "pixel_gain is 0: the model would see nothing.", "Set pixel_gain above zero.")
        _require(
            self.width * self.mlp_ratio >= 1,
            f"mlp_ratio {self.mlp_ratio} leaves no hidden unit at width {self.width}.",
            "Raise mlp_ratio.",
        )

    @property
    def patches(self) -> int:
        """Number of patches of one frame."""
        return (self.image_size // self.patch) ** 2

    @property
    def adapter_size(self) -> int:
        """Number of adapter weights, (k + 1) z; 0 without an adapter."""
        return (self.adapter_rank + 1) * self.latent_dim if self.adapter_rank else 0


@dataclass(frozen=True)
class ObjectiveSpec:
    """Weights of the training loss (see :mod:`lensemble_flwr.model.objective`).

    Attributes:
        lambda_pred, lambda_sig, lambda_anc: weights of prediction, SIGReg and frame anchor.
        sketch_dim: number of random directions of SIGReg.
        knots, t_max: quadrature of the Epps-Pulley integral.
        teacher_weight, rollout_weight: the two halves of the prediction error.
        target_stop_gradient: detach the prediction target (off: both sides are trained; SIGReg prevents collapse).
        segment: frames of one training window; at least 3, because the predictor reads two frames.
    """

    lambda_pred: float = 1.0
    lambda_sig: float = 0.05
    lambda_anc: float = 0.0
    sketch_dim: int = 64
    knots: int = 17
    t_max: float = 3.0
    teacher_weight: float = 1.0
    rollout_weight: float = 1.0
    target_stop_gradient: bool = False
    segment: int = 5

    def __post_init__(self) -> None:
        _check_positive_ints(self, "sketch_dim", "knots", "segment")
        _check_weights(self, "lambda_pred", "lambda_sig", "lambda_anc", "teacher_weight", "rollout_weight")
        _require(self.knots >= 3, f"knots is {self.knots}; the quadrature needs at least 3.", "Set knots to 17.")
        _require(
            math.isfinite(self.t_max) and self.t_max > 0,
            f"t_max is {self.t_max!r}; it must be above zero.",
            "Set t_max to 3.",
        )
        _require(
            self.segment >= 3,
            f"segment is {self.segment}; the predictor reads two frames and predicts a third.",
            "Set segment to 3 or more.",
        )
        _require(
            self.teacher_weight + self.rollout_weight > 0 or self.lambda_pred == 0,
            "teacher_weight and rollout_weight are both zero, so there is nothing to predict.",
            "Give one of them a positive weight.",
        )


@dataclass(frozen=True)
class HeadSpec:
    """Action space of one body: ``dim`` entries of an encoded action (real ones, one-hot blocks, or both)."""

    kind: str
    dim: int

    def __post_init__(self) -> None:
        _require(
            self.kind in ("continuous", "discrete", "multi_discrete", "mixed"),
            f"action kind {self.kind!r} is unknown.",
            "Use 'continuous', 'discrete', 'multi_discrete' or 'mixed'.",
        )
        _check_positive_ints(self, "dim")


@dataclass(frozen=True)
class InnerSpec:
    """How a participant trains between two releases.

    Attributes:
        optimizer: ``adamw`` or ``sgd``.
        lr: step size. Adapter with full-batch SGD: capped at the site at 1 / lambda_max of its own features.
        weight_decay: decoupled (AdamW) or added to the gradient (SGD).
        batch_size: windows of a step; 0 means all of them (full batch).
        head_lr: step size of the local action head; 0 freezes it.
        grad_clip: largest gradient norm of a step, 0 for none. (Not the privacy clip.)
        device: ``auto``, ``cpu`` or ``cuda``.
        deterministic: ask torch for deterministic algorithms only, and never use bf16.
        parallel: processes that share each batch.
    """

    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    batch_size: int = 32
    head_lr: float = 0.0
    grad_clip: float = 0.0
    device: str = "auto"
    deterministic: bool = False
    parallel: int = 1

    def __post_init__(self) -> None:
        _check_positive_ints(self, "parallel")
        _require(
            self.optimizer in ("adamw", "sgd"),
            f"inner.optimizer is {self.optimizer!r}.",
            "Use 'adamw' or 'sgd'.",
        )
        _require(
            self.device in ("auto", "cpu", "cuda"),
            f"inner.device is {self.device!r}.",
            "Use 'auto', 'cpu' or 'cuda'.",
        )
        _check_weights(self, "lr", "weight_decay", "head_lr", "grad_clip")
        _require(self.lr > 0, f"inner.lr is {self.lr!r}; it must be above zero.", "Set inner.lr to a positive number.")
        _require(
            _is_int(self.batch_size) and self.batch_size >= 0,
            f"inner.batch_size is {self.batch_size!r}.",
            "Use a whole number; 0 means all local windows at once.",
        )


@dataclass(frozen=True)
class WarmStartSpec:
    """Public pre-training.

    Attributes:
        steps: AdamW steps. 600 costs about half of 1200; 0 leaves random weights, whose hidden units are normalised by
            public frames all the same.
        lr: peak of the one-cycle schedule.
        weight_decay: decoupled weight decay.
        segments: windows of a step, shared out evenly over the bodies.
        warmup: share of the steps that the rise to ``lr`` takes.
        grad_clip: largest gradient norm of a step, 0 for none.
        seed: of the initial weights and of the order of the windows.
        pca_floor: adapter features are whitened with eigenvalues no smaller than ``pca_floor`` of the largest.
    """

    steps: int = 1200
    lr: float = 2e-3
    weight_decay: float = 0.01
    segments: int = 24
    warmup: float = 0.15
    grad_clip: float = 1.0
    seed: int = 0
    pca_floor: float = 0.01

    def __post_init__(self) -> None:
        _check_positive_ints(self, "segments")
        _require(
            _is_int(self.steps) and self.steps >= 0,
            f"warm-start steps are {self.steps!r}.",
            "Use a whole number, zero or more.",
        )
        _check_weights(self, "lr", "weight_decay", "grad_clip", "pca_floor")
        _require(
            _is_int(self.seed) and 0 <= self.seed < 2**63,
            f"warm-start seed is {self.seed!r}.",
            "Use a whole number, zero or more.",
        )
        _require(0 <= self.warmup < 1, f"warmup is {self.warmup!r}.", "Use a share between 0 and 1.")


_VIT: dict[str, Any] = {"image_size": 128, "mlp_ratio": 4.0}
_PRESETS: dict[str, dict[str, Any]] = {
    # `tiny` is for tests: it trains in seconds. `small` is what the quickstart federates.
    "tiny": {"width": 32, "depth": 1, "projector_width": 64, "latent_dim": 8, "predictor_width": 32, "adapter_rank": 3},
    "small": {},
    "vit_s": {"width": 384, "depth": 12, "heads": 6, "projector_width": 1536, "latent_dim": 192}
    | {"predictor_width": 1024, "predictor_depth": 4, "action_embed_dim": 64}
    | _VIT,
    "vit_b": {"width": 768, "depth": 12, "heads": 12, "projector_width": 2048, "latent_dim": 384}
    | {"predictor_width": 2048, "predictor_depth": 6, "action_embed_dim": 128}
    | _VIT,
    "vit_l": {"width": 1024, "depth": 24, "heads": 16, "projector_width": 2048, "latent_dim": 1024}
    | {"predictor_width": 4096, "predictor_depth": 8, "action_embed_dim": 256}
    | _VIT,
}

PRESETS = tuple(_PRESETS)


def preset(name: str, **changes: Any) -> ModelSpec:
    """A named size, optionally with some fields changed.

    Raises:
        ConfigError: unknown name or field, or an impossible combination.
    """
    if name not in _PRESETS:
        raise ConfigError(f"There is no model preset {name!r}.", f"Choose one of {', '.join(PRESETS)}.")
    return from_plain(ModelSpec, {**_PRESETS[name], **changes})
