"""Configuration: Hydra groups under ``conf/`` -> frozen, validated dataclasses.

Both Flower apps and the command line compose the same overrides string with :func:`load_config`, so one run has one
configuration, named by :func:`config_hash`. Unknown keys, wrong types and impossible combinations are a
:class:`~lensemble_flwr.errors.ConfigError` at once, before anything is started.

``seed`` governs: the generated data, the warm start, the shuffling of local data, the sketch directions. It never
governs noise, masks, keys, salts or nonces: those come from the operating system at each site.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import shlex
import types
import typing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.options import Options, options_from

BUILT_IN_TASKS = ("linear", "world_model")
_WORD = r"[A-Za-z][A-Za-z0-9_]*"
DOTTED_TASK = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}")
"""``package.module:Class``: plain names only, so nothing private, relative or outside ASCII."""
NAMED_TASK = re.compile(r"[a-z][a-z0-9_-]*")
"""A built-in task, or an entry point in the group ``lensemble.tasks``."""
OBSERVERS = ("model_reader", "peers", "coordinator", "anyone")
SURFACES = ("full", "predictor", "adapter", "function")
LEAST_SAMPLE_RATE = 1e-6
MOST_OVERRIDES = 2000
"""Characters of a run's overrides that a real site reads: reading more would cost it over a second, whatever its policy
says then."""


def _require(ok: bool, message: str, remediation: str = "") -> None:
    if not ok:
        raise ConfigError(message, remediation)


def _at_most(name: str, value: int, most: int) -> None:
    """Beyond these a number is a mistake or an attack; a site's own rules are far below (``federation/policy.py``)."""
    _require(value <= most, f"{name} must be at most {most:,}, not {value:,}.")


def _positive(name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, f"{name} must be a positive finite number, not {value!r}.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name}={value!r} is unknown.", f"Choose one of: {', '.join(allowed)}.")


@dataclass(frozen=True)
class DiLoCoConfig:
    """Outer loop: ``rounds`` rounds of ``inner_steps`` (H) local steps, one Nesterov step each (lr, momentum)."""

    rounds: int
    inner_steps: int
    outer_lr: float
    outer_momentum: float

    def __post_init__(self) -> None:
        _require(self.rounds >= 1, f"diloco.rounds must be at least 1, not {self.rounds}.")
        _require(self.inner_steps >= 1, f"diloco.inner_steps must be at least 1, not {self.inner_steps}.")
        _at_most("diloco.rounds", self.rounds, 10**6)
        _at_most("diloco.inner_steps", self.inner_steps, 10**9)
        _positive("diloco.outer_lr", self.outer_lr)
        _require(self.outer_lr <= 1000, f"diloco.outer_lr must be at most 1000, not {self.outer_lr!r}.")
        _require(0 <= self.outer_momentum < 1, f"diloco.outer_momentum must be in [0, 1), not {self.outer_momentum}.")


@dataclass(frozen=True)
class FederationConfig:
    """Who takes part and how long the coordinator waits (seconds)."""

    participants: int
    min_participants: int
    timeout_s: float
    join_timeout_s: float
    surface: str
    sites_dir: str | None

    def __post_init__(self) -> None:
        _require(self.participants >= 2, f"federation.participants must be at least 2, not {self.participants}.")
        _at_most("federation.participants", self.participants, 4096)
        _require(
            2 <= self.min_participants <= self.participants,
            f"federation.min_participants={self.min_participants} must lie between 2 and "
            f"federation.participants={self.participants}.",
            f"For {self.participants} participants set also, for example, "
            f"federation.min_participants={max(3, math.ceil(0.8 * self.participants))} "
            f"secagg.min_survivors={max(3, math.ceil(0.8 * self.participants))}."
            if self.participants > 2
            else "Two participants cannot hide from each other: use three, or set secagg.allow_two_party=true "
            "federation.min_participants=2 secagg.min_survivors=2.",
        )
        _positive("federation.timeout_s", self.timeout_s)
        _positive("federation.join_timeout_s", self.join_timeout_s)
        _one_of("federation.surface", self.surface, SURFACES)


@dataclass(frozen=True)
class PrivacyConfig:
    """Target of this federation. A site's own policy can only be stricter.

    ``sample_rate`` (q) is the rate of a secret coin that each participant throws for itself every round: with
    probability 1 - q its release is noise alone. 1 means that there is no coin.
    """

    enabled: bool
    clip_norm: float
    noise_multiplier: float | None
    target_epsilon: float
    target_delta: float
    sample_rate: float
    accountant: str
    guarantee: str
    claim: tuple[str, ...]
    max_participants_per_person: int
    mechanism: str
    on_exhausted: str
    accept_noise: bool
    entropy: str

    def __post_init__(self) -> None:
        _positive("privacy.clip_norm", self.clip_norm)
        if self.noise_multiplier is not None:
            _require(
                math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0,
                f"privacy.noise_multiplier must be a positive finite number or null, not {self.noise_multiplier!r}.",
                "Use privacy.enabled=false for a run without privacy; it will be labelled non-private.",
            )
        _positive("privacy.target_epsilon", self.target_epsilon)
        _require(
            0 < self.target_delta < 1, f"privacy.target_delta must lie between 0 and 1, not {self.target_delta!r}."
        )
        _require(
            LEAST_SAMPLE_RATE <= self.sample_rate <= 1,
            f"privacy.sample_rate must be at least {LEAST_SAMPLE_RATE:g} and at most 1, not {self.sample_rate!r}.",
            "Use 1 for no secret coin.",
        )
        _require(
            self.sample_rate == 1 or self.enabled,
            f"privacy.sample_rate={self.sample_rate!r} without privacy would only lose updates.",
            "Use privacy.sample_rate=1, or privacy.enabled=true.",
        )
        _require(
            self.accountant not in ("moments", "legacy"),
            f"privacy.accountant={self.accountant} is refused: the moments formula of that name is not a valid bound, "
            "it reports less than is spent (docs/privacy.md, section 15).",
            "Use privacy.accountant=prv (exact) or rdp.",
        )
        _one_of("privacy.accountant", self.accountant, ("prv", "rdp"))
        _require(
            self.max_participants_per_person >= 1,
            f"privacy.max_participants_per_person must be at least 1, not {self.max_participants_per_person}.",
        )
        _one_of("privacy.guarantee", self.guarantee, ("local", "central"))
        for observer in self.claim:
            _one_of("privacy.claim", observer, OBSERVERS)
        _one_of("privacy.mechanism", self.mechanism, ("gaussian", "discrete_gaussian"))
        _require(
            self.sample_rate == 1 or self.mechanism == "gaussian",
            f"privacy.sample_rate={self.sample_rate!r} with privacy.mechanism={self.mechanism} is not accounted for.",
            "Use privacy.mechanism=gaussian, or privacy.sample_rate=1.",
        )
        _require(
            self.max_participants_per_person == 1 or (self.sample_rate == 1 and self.mechanism == "gaussian"),
            f"privacy.max_participants_per_person={self.max_participants_per_person} is accounted for only with "
            "privacy.mechanism=gaussian and privacy.sample_rate=1.",
            "Use those, or let a person's data lie with one participant.",
        )
        _one_of("privacy.on_exhausted", self.on_exhausted, ("stop", "leave"))
        _one_of("privacy.entropy", self.entropy, ("csprng", "replay"))


@dataclass(frozen=True)
class SecAggConfig:
    """Secure aggregation. ``range`` is the public per-coordinate bound used only when privacy is off.

    With ``pinned`` a participant that has not pinned a roster refuses to take part; ``consistency`` adds the stage in
    which members compare what they were shown, by default (auto) where identities are pinned. With ``verify_sum``
    members check that each new model is the outer step of the sum (docs/secure-aggregation.md, section 3). With
    ``early_keys`` the last reply of a round brings the keys of the next, which saves an exchange a round.
    """

    enabled: bool
    threshold: int | None
    min_survivors: int
    ring_bits: int
    range: float
    assumed_colluders: int
    allow_two_party: bool
    pinned: bool
    consistency: Literal["auto", True, False]
    verify_sum: bool
    early_keys: bool

    def __post_init__(self) -> None:
        _require(
            self.enabled,
            "secagg.enabled=false is refused: this project has no path on which an individual update is sent unmasked.",
            "Leave secagg.enabled at true; masks cost milliseconds.",
        )
        _require(self.ring_bits in (16, 24, 32), f"secagg.ring_bits must be 16, 24 or 32, not {self.ring_bits}.")
        _positive("secagg.range", self.range)
        _require(1e-9 <= self.range <= 1e9, f"secagg.range must lie in 1e-9..1e9, not {self.range!r}.")
        _require(
            self.assumed_colluders >= 1,
            f"secagg.assumed_colluders={self.assumed_colluders} must be at least 1: every peer knows its own share.",
        )
        _require(
            not (self.early_keys and self.verify_sum),
            "secagg.early_keys and secagg.verify_sum exclude each other: with its keys a member vouches for the model, "
            "which it does not know yet when it sends them early.",
            "Leave one of the two at false.",
        )

    @property
    def compares_views(self) -> bool:
        """Whether rounds have the consistency stage."""
        return self.pinned if self.consistency == "auto" else self.consistency


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of prediction, SIGReg (N-scaled) and landmark anchor; number of random sketch directions."""

    lambda_pred: float
    lambda_sig: float
    lambda_anc: float
    sketch_dim: int

    def __post_init__(self) -> None:
        for name in ("lambda_pred", "lambda_sig", "lambda_anc"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"objective.{name} must be finite and >= 0, not {value!r}.")
        _require(self.sketch_dim >= 1, f"objective.sketch_dim must be at least 1, not {self.sketch_dim}.")
        _at_most("objective.sketch_dim", self.sketch_dim, 65536)


@dataclass(frozen=True)
class GaugeConfig:
    """Latent frame: which anchor term, and the drift (degrees) over which a participant aligns.

    ``align`` and ``shared_sketch`` switch two layers off for ablations. The other keys are those of
    ``federation.surface=function``: how many public windows are answered, how a student is taught the consensus, and
    the widths of the participants' encoders in turn (none: all have ``model.width``).
    """

    anchor: str
    drift_threshold_deg: float
    coordinator_alignment: bool
    align: bool = True
    shared_sketch: bool = True
    windows: int = 128
    distill_steps: int = 200
    distill_lr: float = 1e-3
    student_widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _one_of("gauge.anchor", self.anchor, ("landmark", "rotational", "none"))
        _require(
            0 < self.drift_threshold_deg <= 180,
            f"gauge.drift_threshold_deg must lie in (0, 180], not {self.drift_threshold_deg}.",
        )
        _require(
            not self.coordinator_alignment,
            "gauge.coordinator_alignment=true is refused: a coordinator that sees only the masked sum cannot align "
            "individual updates (INV-ALIGN-BEFORE-RELEASE).",
            "Participants align before they clip; leave it at false.",
        )
        _require(self.windows >= 1, f"gauge.windows must be at least 1, not {self.windows}.")
        _require(self.distill_steps >= 1, f"gauge.distill_steps must be at least 1, not {self.distill_steps}.")
        _positive("gauge.distill_lr", self.distill_lr)
        _at_most("gauge.windows", self.windows, 10**9)
        _at_most("gauge.distill_steps", self.distill_steps, 10**9)
        for width in self.student_widths:
            _require(width >= 1, f"gauge.student_widths holds {width}; a width must be at least 1.")
            _at_most("gauge.student_widths", width, 65536)


@dataclass(frozen=True)
class InnerConfig:
    """The participant's H local steps. ``batch_size`` 0 means full batch, ``head_lr`` 0 a fixed head.

    ``landmark_norm``: while the encoder trains, normalise its hidden units by the public landmarks. ``parallel``:
    processes of one participant that share each batch. ``schedule``, ``warmup_steps``, ``final_lr_fraction``: the step
    sizes over all rounds (``federation/schedule.py``).
    """

    optimizer: str
    lr: float
    weight_decay: float
    batch_size: int
    head_lr: float
    device: str
    reset_optimizer: bool
    landmark_norm: bool
    deterministic: bool
    parallel: int = 1
    schedule: str = "constant"
    warmup_steps: int = 0
    final_lr_fraction: float = 0.0

    @property
    def scheduled(self) -> bool:
        """Whether step sizes change during a run."""
        return self.schedule != "constant" or self.warmup_steps > 0

    def __post_init__(self) -> None:
        _one_of("inner.optimizer", self.optimizer, ("adamw", "sgd"))
        _positive("inner.lr", self.lr)
        _require(self.head_lr >= 0, f"inner.head_lr must be >= 0 (0: the head stays), not {self.head_lr}.")
        _require(self.weight_decay >= 0, f"inner.weight_decay must be >= 0, not {self.weight_decay}.")
        _require(self.batch_size >= 0, f"inner.batch_size must be >= 0 (0: full batch), not {self.batch_size}.")
        _at_most("inner.batch_size", self.batch_size, 10**6)
        _one_of("inner.device", self.device, ("auto", "cpu", "cuda"))
        _require(1 <= self.parallel <= 64, f"inner.parallel must lie between 1 and 64, not {self.parallel}.")
        _one_of("inner.schedule", self.schedule, ("constant", "cosine"))
        _require(self.warmup_steps >= 0, f"inner.warmup_steps must be >= 0 (0: none), not {self.warmup_steps}.")
        _require(
            0 <= self.final_lr_fraction <= 1,
            f"inner.final_lr_fraction must lie in [0, 1], not {self.final_lr_fraction!r}.",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of encoder, predictor, adapter; see :mod:`lensemble_flwr.model`. ``proprio``: whether the local action head
    reads the recording's state, too."""

    name: str
    image_size: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp_ratio: float
    projector_width: int
    latent_dim: int
    predictor_width: int
    predictor_depth: int
    action_embed_dim: int
    adapter_rank: int
    proprio: str

    def __post_init__(self) -> None:
        _one_of("model.proprio", self.proprio, ("none", "local"))
        for name in ("depth", "predictor_depth", "heads"):
            _at_most(f"model.{name}", getattr(self, name), 1024)
        for name in ("image_size", "patch", "width", "projector_width", "latent_dim", "predictor_width"):
            _at_most(f"model.{name}", getattr(self, name), 65536)
        for name in ("action_embed_dim", "adapter_rank"):
            _at_most(f"model.{name}", getattr(self, name), 65536)
        _require(self.mlp_ratio <= 1024, f"model.mlp_ratio must be at most 1024, not {self.mlp_ratio}.")

    @property
    def weights(self) -> int:
        """About as many weights as encoder and predictor have, from these numbers alone: nothing is built for it."""
        block = (4 + 2 * math.ceil(self.mlp_ratio)) * self.width**2
        tokens = (self.image_size // max(self.patch, 1)) ** 2
        encoder = self.depth * block + (3 * self.patch**2 + tokens + self.projector_width) * self.width
        latent = (self.projector_width + self.latent_dim + self.adapter_rank) * self.latent_dim
        ends = 2 * (2 * self.latent_dim + self.action_embed_dim) * self.predictor_width
        return encoder + latent + ends + 2 * self.predictor_depth * self.predictor_width**2


@dataclass(frozen=True)
class DataConfig:
    """Which world, and its own keys: those of ``conf/data/NAME.yaml``, whose values give their types.

    ``config.data.frames`` reads the key ``frames``; what values mean and may be, the world itself says.
    """

    name: str
    options: Options

    def __getattr__(self, key: str) -> Any:
        try:
            return self.__dict__["options"][key]
        except KeyError:
            raise AttributeError(key) from None

    def __post_init__(self) -> None:
        for key, value in self.options.items():
            if type(value) is int:
                _at_most(f"data.{key}", value, 10**6 if key in ("frames", "frameskip") else 10**7)


@dataclass(frozen=True)
class WarmStartConfig:
    """The public warm start: trained steps, its weight of SIGReg, and the hash (hex) of the file every site must hold.

    0 steps: random weights, of which public pictures give only the mean image and the scale of the hidden units.
    With ``path`` its encoder begins with the weights of that safetensors file, and ``sha256`` is the file's.

    ``lambda_sig`` is not the participants' (``objective.lambda_sig``): theirs see a part of the world only, and SIGReg
    would spread that part over the whole latent.
    """

    steps: int
    lambda_sig: float
    path: str | None
    sha256: str | None

    def __post_init__(self) -> None:
        if self.path is not None:
            _require(
                re.fullmatch(r"[0-9a-f]{64}", self.sha256 or "") is not None,
                f"warmstart.path={self.path} needs warmstart.sha256, the SHA-256 of that file.",
                f"sha256sum {self.path}",
            )
        _require(self.steps >= 0, f"warmstart.steps must be at least 0, not {self.steps}.", "0: no training.")
        _require(
            math.isfinite(self.lambda_sig) and self.lambda_sig >= 0,
            f"warmstart.lambda_sig must be finite and >= 0, not {self.lambda_sig!r}.",
        )


@dataclass(frozen=True)
class Config:
    """One resolved configuration of one federation."""

    experiment: str
    task: str
    task_options: Options
    seed: int
    output_dir: str | None
    diloco: DiLoCoConfig
    federation: FederationConfig
    privacy: PrivacyConfig
    secagg: SecAggConfig
    objective: ObjectiveConfig
    gauge: GaugeConfig
    inner: InnerConfig
    model: ModelConfig
    data: DataConfig
    warmstart: WarmStartConfig
    overrides: tuple[str, ...] = field(default=(), compare=False)

    @property
    def weights(self) -> int:
        """About as many weights as the built-in task trains or holds; 0 for one's own tasks, whose code decides.

        With ``federation.surface=function`` of the widest student, or as many answers as a vector holds.
        """
        if self.task != "world_model":
            return 0
        if self.federation.surface != "function":
            return self.model.weights
        widest = dataclasses.replace(self.model, width=max(self.model.width, *self.gauge.student_widths, 0))
        return max(widest.weights, 4 * self.gauge.windows * self.model.latent_dim)

    @property
    def taught_steps(self) -> int:
        """Steps that each site teaches a student for, beside its local ones (``federation.surface=function``)."""
        return self.gauge.distill_steps if self.federation.surface == "function" else 0

    def __post_init__(self) -> None:
        n, secagg, privacy, federation = self.federation.participants, self.secagg, self.privacy, self.federation
        # Whether there is such a task is looked up where a policy was asked first (federation/tasks.py), not here.
        _require(
            len(self.task) <= 200 and bool(DOTTED_TASK.fullmatch(self.task) or NAMED_TASK.fullmatch(self.task)),
            f"task={self.task!r} is no name of a task.",
            f"Choose one of: {', '.join(BUILT_IN_TASKS)}, an entry point's name, package.module:Class.",
        )
        _require(self.seed >= 0, f"seed must be >= 0, not {self.seed}.")
        if n == 2:
            _require(
                secagg.allow_two_party,
                "federation.participants=2: two participants cannot hide from each other, because each can subtract "
                "its own update from the sum.",
                "Use at least 3 participants: for a simulation pass --federation-config 'num-supernodes=N' and set "
                "federation.participants=N. Or consent with secagg.allow_two_party=true "
                "(hidden from the coordinator only).",
            )
        two_party = n == 2 and secagg.allow_two_party
        least = 2 if two_party else 3
        _require(
            least <= secagg.min_survivors <= n,
            f"secagg.min_survivors={secagg.min_survivors} must lie between {least} and federation.participants={n}.",
        )
        _require(
            federation.min_participants >= secagg.min_survivors,
            f"federation.min_participants={federation.min_participants} is below "
            f"secagg.min_survivors={secagg.min_survivors}: such a round could never be summed.",
            "Raise federation.min_participants or lower secagg.min_survivors.",
        )
        k = secagg.assumed_colluders
        _require(
            two_party or secagg.min_survivors >= k + 2,
            f"secagg.min_survivors={secagg.min_survivors} must be at least secagg.assumed_colluders + 2 = {k + 2}: "
            "colluders subtract their own updates from the sum.",
        )
        if secagg.threshold is not None:
            t = secagg.threshold
            _require(
                t <= federation.min_participants,
                f"secagg.threshold={t} is above federation.min_participants={federation.min_participants}: "
                "such a round could never be unmasked.",
            )
            _require(
                t <= n and 2 * t > n + (0 if two_party else k),
                f"secagg.threshold={t} is unsafe or impossible for {n} participants and {k} colluders: "
                f"it must lie in ({(n + k) / 2:g}, {n}].",
            )
        people = privacy.max_participants_per_person
        _require(
            people <= n,
            f"privacy.max_participants_per_person={people} is more than federation.participants={n}.",
            f"Use at most {n}: a person cannot be at more participants than there are.",
        )
        if privacy.enabled:
            _require(
                privacy.target_delta < 1 / n,
                f"privacy.target_delta={privacy.target_delta:g} must be below 1/participants = {1 / n:g}: "
                "a larger delta allows revealing one participant outright.",
            )
            if privacy.guarantee == "central":
                _require(
                    not two_party,
                    "privacy.guarantee=central needs more than two participants.",
                    "Use privacy.guarantee=local.",
                )
                _require(
                    secagg.min_survivors - k >= 2,
                    f"privacy.guarantee=central needs secagg.min_survivors - secagg.assumed_colluders >= 2, "
                    f"not {secagg.min_survivors} - {k}.",
                )
                _require(
                    people <= secagg.min_survivors - k,
                    f"privacy.guarantee=central with privacy.max_participants_per_person={people} needs at least as "
                    f"many unknown noises in a sum, secagg.min_survivors - secagg.assumed_colluders = "
                    f"{secagg.min_survivors} - {k}: else the sum hides no more than updates seen one by one.",
                    f"Set secagg.min_survivors={people + k} and, where they are smaller, federation.min_participants="
                    f"{people + k} and federation.participants={people + k}; or use privacy.guarantee=local.",
                )
                t = secagg.threshold if secagg.threshold is not None else max(2 * n // 3, (n + k) // 2) + 1
                _require(k < t, f"secagg.assumed_colluders={k} must be below the threshold {t}.")
        steps = self.diloco.rounds * self.diloco.inner_steps
        _require(
            self.inner.warmup_steps < steps,
            f"inner.warmup_steps={self.inner.warmup_steps} leaves nothing of the {steps} local steps of all rounds "
            "(diloco.rounds * diloco.inner_steps).",
            "Lower it.",
        )
        if self.task in BUILT_IN_TASKS:
            _require(not self.task_options, f"task={self.task} has no task_options.", "Use the keys of its groups.")
        widths = self.gauge.student_widths
        _require(
            not widths or federation.surface == "function",
            f"gauge.student_widths={list(widths)}: weights of encoders of different size cannot be averaged.",
            "Use federation.surface=function, or leave it empty.",
        )
        if self.task == "linear":
            _require(federation.surface == "full", "task=linear has one surface: federation.surface=full.")


# ------------------------------------------------------------------------------------------------ composing


def conf_dir() -> Path:
    """Folder of the Hydra groups: ``conf/`` beside the package (checkout, FAB) or inside it (wheel)."""
    package = Path(__file__).resolve().parent
    for candidate in (package.parent / "conf", package / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError("The configuration groups (conf/) are not beside the package.", "Reinstall the package.")


def split_overrides(text: str) -> list[str]:
    """The run-config string ``'a=1 b="x y"'`` as a list of overrides, quotes as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"The overrides {text!r} cannot be split: {error}.", "Check the quotes.") from error


def join_overrides(overrides: list[str] | tuple[str, ...]) -> str:
    """Inverse of :func:`split_overrides`."""
    return shlex.join(overrides)


def check_length(text: str) -> str:
    """The overrides as one string, if a real site would read them. Raises ConfigError."""
    _require(
        len(text) <= MOST_OVERRIDES,
        f"The overrides have {len(text)} characters; a site reads at most {MOST_OVERRIDES}.",
        "Use a named experiment (experiment=...) for what is always the same.",
    )
    return text


def load_config(overrides: list[str] | tuple[str, ...] | str = ()) -> Config:
    """Compose ``conf/`` with Hydra overrides and validate.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, impossible combination.
    """
    if isinstance(overrides, str):
        overrides = split_overrides(overrides)
    return _load(tuple(overrides))


def _groups() -> set[str]:
    return {path.name for path in conf_dir().iterdir() if path.is_dir()}


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


@lru_cache(maxsize=32)
def _load(overrides: tuple[str, ...]) -> Config:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        _require("=" in override, f"The override {override!r} is not of the form key=value.")
        _require(
            not override.startswith(("hydra.", "hydra/", "+hydra", "~", "+")),
            f"The override {override!r} adds, removes or reconfigures keys.",
            "Only existing keys can be set: key=value.",
        )
        key, value = override.split("=", 1)
        _require(
            re.fullmatch(r"[A-Za-z0-9_.]*", key) is not None,
            f"Unknown key {key!r}.",
            "Only existing keys can be set: key=value.",
        )
        _require(
            key not in _groups() or re.fullmatch(r"[A-Za-z0-9_-]*", value) is not None,  # never a path
            f"{override!r} names no configuration of {key}.",
            f"Choose one of: {', '.join(_choices(key))}.",
        )
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            others = ["~task_options"] if _changes_task(overrides) else []
            composed = compose("config", overrides=others + [_addable(o) for o in overrides])
        tree = OmegaConf.to_container(composed, resolve=False)
    except RecursionError as error:
        raise ConfigError("The overrides are nested too deeply.", "Write them as key=value.") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: Hydra's own, for an empty key
        raise _explain(error, overrides) from error
    finally:
        GlobalHydra.instance().clear()
    assert isinstance(tree, dict)
    _refuse_interpolations(tree)
    tree.setdefault("task_options", {})
    tree["overrides"] = list(overrides)
    return _build(Config, tree, "")


def _changes_task(overrides: tuple[str, ...]) -> bool:
    """Whether another task takes the place of an experiment's own, whose options would mean nothing to it."""
    chosen = dict(o.split("=", 1) for o in overrides)
    name = chosen.get("experiment", "")
    if name not in _choices("experiment"):
        return False
    own = _file_of("experiment", name)
    return "task_options" in own and str(chosen.get("task", own.get("task"))).strip("'\"") != own.get("task")


def _addable(override: str) -> str:
    """A task's own options are the one group whose keys are not known beforehand."""
    return f"++{override}" if override.startswith(("task_options.", "task_options=")) else override


def _refuse_interpolations(value: Any) -> None:
    """An interpolation would let whoever submits a run read a site's environment (${oc.env:...}), however escaped."""
    if isinstance(value, dict):
        for item in value.values():
            _refuse_interpolations(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_interpolations(item)
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(f"The value {value!r} holds an interpolation.", "Write the value itself.")


def _known_keys(cls: type = Config, prefix: str = "") -> list[str]:
    keys = []
    for f in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[f.name]
        if hint is DataConfig:
            keys += sorted({f"data.{key}" for name in _choices("data") for key in _world_defaults(name)})
        elif dataclasses.is_dataclass(hint):
            keys += _known_keys(typing.cast(type, hint), f"{prefix}{f.name}.")
        else:
            keys.append(prefix + f.name)
    return keys


def _explain(error: Exception, overrides: tuple[str, ...]) -> ConfigError:
    groups = [p.name for p in conf_dir().iterdir() if p.is_dir()]
    known = _known_keys() + groups
    for override in overrides:
        key, _, value = override.partition("=")
        if key in groups:
            options = sorted(p.stem for p in (conf_dir() / key).glob("*.yaml"))
            if value not in options:
                return ConfigError(f"There is no {key}={value}.", f"Choose one of: {', '.join(options)}.")
        elif key not in known and not key.startswith("task_options."):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The keys are listed in {conf_dir() / 'config.yaml'}."
            return ConfigError(f"Unknown key {key!r}.", hint)
    first = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n")[0]
    return ConfigError(f"The overrides {join_overrides(overrides)!r} cannot be read: {first}.")


def _build(cls: type, tree: Any, path: str) -> Any:
    """A frozen dataclass from a mapping: no key missing, no key too many, no silent conversion of types."""
    _require(isinstance(tree, dict), f"{path.rstrip('.') or 'The configuration'} must be a group of keys.")
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    for name in tree:
        if name not in names:
            near = difflib.get_close_matches(str(name), sorted(names), n=1)
            raise ConfigError(f"Unknown key {path}{name!r}.", f"Did you mean {path}{near[0]}?" if near else "")
    values = {}
    for f in dataclasses.fields(cls):
        if f.name not in tree:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ConfigError(f"The key {path}{f.name} is missing.")
            continue
        values[f.name] = _convert(hints[f.name], tree[f.name], f"{path}{f.name}")
    return cls(**values)


@lru_cache(maxsize=32)
def _file_of(group: str, name: str) -> dict[str, Any]:
    """The keys of one file of a group."""
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml")))  # type: ignore[arg-type]


def _world_defaults(name: str) -> dict[str, Any]:
    """The keys of a world's own file, ``name`` among them."""
    _require(name in _choices("data"), f"There is no data={name}.", f"Choose one of: {', '.join(_choices('data'))}.")
    return _file_of("data", name)


def _data(tree: Any) -> DataConfig:
    """The group ``data``, judged by the file of the world that its name is of."""
    _require(isinstance(tree, dict) and isinstance(tree.get("name"), str), "data must be a group of keys with a name.")
    known = _world_defaults(tree["name"])
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            raise ConfigError(f"Unknown key data.{key}.", f"Did you mean data.{near[0]}?" if near else "")
    found = {k: _like(default, tree.get(k, default), f"data.{k}") for k, default in known.items() if k != "name"}
    return DataConfig(tree["name"], options_from(found, "data"))


def _like(default: Any, value: Any, path: str) -> Any:
    """A value of the type that the default has; null as a default takes any plain value."""
    if default is None or isinstance(default, dict):
        return value
    if isinstance(default, list):
        _require(isinstance(value, list), f"{path} must be a list, not {value!r}.", f"Write {path}=[a,b].")
        return [_like(default[0] if default else None, item, path) for item in value]
    return _convert(type(default), value, path)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if hint is DataConfig:
        return _data(value)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path + ".")
    if hint is Options:
        return options_from(value, path)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, path)
    if origin is typing.Literal:
        choices = ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in args)
        same = any(type(value) is type(a) and value == a for a in args)
        _require(same, f"{path} must be one of {choices}, not {value!r}.")
        return value
    if origin is tuple:
        _require(isinstance(value, list), f"{path} must be a list, not {value!r}.", f"Write {path}=[a,b].")
        return tuple(_convert(args[0], v, path) for v in value)
    wrong = f"{path} must be {_NAMES.get(hint, hint)}, not {value!r}."
    if hint is float:
        _require(isinstance(value, (int, float)) and not isinstance(value, bool), wrong)
        value = float(value)
        _require(math.isfinite(value), f"{path} must be finite, not {value!r}.")
        return value
    _require(isinstance(value, hint) and not (hint is int and isinstance(value, bool)), wrong)
    return value


_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


# ------------------------------------------------------------------------------------------------ hashing


def resolved(config: Config) -> dict[str, Any]:
    """The configuration as plain data for the manifest (without the raw overrides)."""
    tree = dataclasses.asdict(config)
    del tree["overrides"]
    tree["data"] = {"name": config.data.name, **config.data.options}
    return tree


def config_hash(config: Config) -> bytes:
    """SHA-256 over the canonical JSON of everything that decides what is computed (not where it is written)."""
    tree = resolved(config)
    del tree["output_dir"]
    del tree["federation"]["sites_dir"]
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(b"lensemble config 1\0" + text.encode()).digest()
