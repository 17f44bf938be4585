"""A site's own policy: what its operator allows. Judged before anything is computed; a run can only be stricter.

The policy is ``policy.yaml`` in the site's folder (``policy.json``, of earlier releases and of simulated sites, is read
as well). A real site must have one; a simulated site writes its own at first use: lifetime = the run's target for the
claimed guarantee, the other view unlimited.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lensemble_flwr.config import BUILT_IN_TASKS, DOTTED_TASK, NAMED_TASK, Config
from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError, PolicyViolation
from lensemble_flwr.federation.records import Guarantee, Mechanism, RoundOpen
from lensemble_flwr.federation.roster import Roster
from lensemble_flwr.federation.yaml_text import format_yaml, parse_yaml
from lensemble_flwr.privacy.ledger import Budget
from lensemble_flwr.privacy.spending import MECHANISMS

POLICY_VERSION = 1

RULES = {
    "version": "Format of this file.",
    "max_epsilon_local": "Most epsilon over the site's whole life against anyone, the coordinator included, by this\n"
    "site's own noise alone. null: this view is not limited.",
    "max_epsilon_central": "Most epsilon over the site's whole life against a reader of the models, by the noise of\n"
    "all. null: this view is not limited.",
    "delta": "The delta of both.",
    "unlimited": "true: no lifetime budget is wanted (then both above must be null).",
    "allow_non_private": "Whether updates may leave without noise (masked only).",
    "allow_replay": "Seeded noise; only simulated sites allow it.",
    "allow_two_party": "Whether a federation of two is accepted: the peer then sees this site's update, noised, in\n"
    "every sum.",
    "allow_sampling": "Whether rounds may count with a secret coin (sample_rate below 1). The site throws it itself,\n"
    "but then has to keep it from whoever sees its memory, its disk beside its data, or how long it works.",
    "min_own_noise": "Least standard deviation of this site's own noise, in units of the clipping bound C.",
    "min_noise_multiplier": "Least sigma of a run.",
    "min_survivors": "Fewest updates that a revealed sum may hold.",
    "min_colluders": "Fewest colluding participants that a run must assume.",
    "min_participants_per_person": "How many participants, this site included, may hold data of one person, as far as\n"
    "its operator knows; a run must count with at least that many.",
    "min_threshold": "Least share of the roster that is needed to unmask a sum, between 0 and 1.",
    "max_clip_norm": "Largest clipping bound C.",
    "max_inner_steps": "Most local steps H in a round (of gauge.distill_steps with federation.surface=function, too).\n"
    "null: any number.",
    "max_rounds": "Most rounds that a run may plan. null: any number.",
    "max_participants": "Most participants that a run may plan. null: any number.",
    "max_weights": "Most weights of a run's model, judged before anything of it is built. null: any number. (Of a\n"
    "task of one's own only the vector of a round is judged: what its options make it build is up to its code.)",
    "max_processes": "Most processes that a run may start here to share its batches (inner.parallel), each with one\n"
    "more copy of the model. null: any number. (What a task of one's own starts is up to its code.)",
    "min_roster": "Fewest participants in a federation.",
    "guarantee": "The guarantee that a run's noise must be sized for: local, central, or null for either.",
    "ring_bits": "Sizes of the ring that are accepted.",
    "mechanisms": "Kinds of noise that are accepted: gaussian, discrete_gaussian (for coarse rings). A lifetime\n"
    "budget adds up one kind; with both the proof assumes that no run was configured by what earlier ones showed.",
    "dataset": "The name of the data set (data.name) that a run must ask for; null: any.",
    "allowed_coordinators": "SHA-256 fingerprints of the certificate authorities that ca.crt may hold; null: any.",
    "allowed_fabs": "Hashes (SHA-256 of the content) of the apps that may run here, judged by bin/flwr-clientapp\n"
    "before any line of the app runs; []: none; any: whatever a submitter sends. A real site must have this rule.",
    "allowed_tasks": "Tasks of this site's own installation that a run may ask for, besides the built-in ones:\n"
    "package.module:Class, or the name of an entry point. Their code runs here, on this site's data. []: none.",
    "log_releases": "Keep a copy of every (noised) release at the site, for audits.",
    "require_roster": "Refuse rounds while no roster is pinned here (lensemble site roster).",
    "require_consistency": "Refuse rounds in which the members do not compare what they were shown.",
    "require_verify_sum": "Refuse rounds in which this site cannot check that the model is what the sums gave.",
}
"""Every rule, and what its comment in a policy file says."""

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Policy:
    """What one site allows, for ever; :data:`RULES` says what each rule means.

    At least one view has a budget, unless ``unlimited`` says that none is wanted.

    Raises:
        ConfigError: a value that cannot be; its ``rule`` names the rule.
    """

    version: int = POLICY_VERSION
    max_epsilon_local: float | None = None
    max_epsilon_central: float | None = None
    delta: float = 1e-5
    unlimited: bool = False
    allow_non_private: bool = False
    allow_replay: bool = False
    allow_two_party: bool = False
    allow_sampling: bool = False
    min_own_noise: float = 0.0
    min_noise_multiplier: float = 0.0
    min_survivors: int = 3
    min_colluders: int = 1
    min_participants_per_person: int = 1
    min_threshold: float = 0.0
    max_clip_norm: float | None = None
    max_inner_steps: int | None = 100_000
    max_rounds: int | None = 10_000
    max_participants: int | None = 1024
    max_weights: int | None = 1_000_000_000
    max_processes: int | None = 4
    min_roster: int = 3
    guarantee: str | None = None
    ring_bits: tuple[int, ...] = (16, 24, 32)
    mechanisms: tuple[str, ...] = ("gaussian",)
    dataset: str | None = None
    allowed_coordinators: tuple[str, ...] | None = None
    allowed_fabs: tuple[str, ...] | str | None = None
    allowed_tasks: tuple[str, ...] = ()
    log_releases: bool = False
    require_roster: bool = False
    require_consistency: bool = False
    require_verify_sum: bool = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (int, float)) and not (0 <= value <= 1e300):
                raise _wrong(f.name, f"{value!r} must be finite and >= 0")
        if self.version != POLICY_VERSION:
            raise _wrong("version", f"{self.version!r} is unknown; this release reads {POLICY_VERSION}")
        if not 0 < self.delta < 1:
            raise _wrong("delta", f"{self.delta!r} must lie between 0 and 1")
        if self.min_threshold > 1:
            raise _wrong("min_threshold", f"{self.min_threshold!r} must lie between 0 and 1")
        if self.guarantee not in (None, "local", "central"):
            raise _wrong("guarantee", f"{self.guarantee!r} must be local, central or null")
        if not set(self.ring_bits) <= {16, 24, 32}:
            raise _wrong("ring_bits", f"{list(self.ring_bits)} must be a list of 16, 24 and 32")
        if not set(self.mechanisms) <= set(MECHANISMS):
            raise _wrong("mechanisms", f"{list(self.mechanisms)} must be a list of {' and '.join(MECHANISMS)}")
        for name in ("allowed_coordinators", "allowed_fabs"):
            rule = getattr(self, name)
            if name == "allowed_fabs" and rule == "any":
                continue
            if isinstance(rule, str):
                raise _wrong(name, f"{rule!r} is no list of hashes", "List SHA-256 hashes, or say any.")
            for item in rule or ():
                if not _HASH.fullmatch(item):
                    raise _wrong(name, f"{item!r} is not a SHA-256 hash (64 lower-case hex digits, in quotes)")
        for task in self.allowed_tasks:
            if not (DOTTED_TASK.fullmatch(task) or NAMED_TASK.fullmatch(task)):
                raise _wrong("allowed_tasks", f"{task!r} is neither package.module:Class nor an entry point's name")
        finite = self.max_epsilon_local is not None or self.max_epsilon_central is not None
        if not finite and not self.unlimited:
            raise _wrong(
                "unlimited",
                "there is no lifetime budget",
                "Set max_epsilon_local or max_epsilon_central, or unlimited to true if none is wanted.",
            )
        if self.unlimited and finite:
            raise _wrong("unlimited", "true contradicts a lifetime budget", "Remove one of them.")
        if self.allow_non_private and finite:
            raise _wrong(
                "allow_non_private",
                "true contradicts a finite lifetime budget (an update without noise spends all)",
                "Remove the budgets or set allow_non_private to false.",
            )

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The lifetime budgets that the ledger is held against."""
        pairs = (("local", self.max_epsilon_local), ("central", self.max_epsilon_central))
        return tuple(Budget(view, epsilon, self.delta, "lifetime") for view, epsilon in pairs if epsilon is not None)

    def violations(self, opened: RoundOpen, roster: Roster | None = None) -> Iterator[PolicyViolation]:
        """Every rule that the public values of a round break; ``roster`` as in :meth:`check`."""
        n, two = len(opened.roster), opened.two_party
        if not opened.private and not self.allow_non_private:
            yield _forbids("allow_non_private", "privacy is off")
        if opened.replay and not self.allow_replay:
            yield _forbids("allow_replay", "its noise is seeded")
        if opened.sample_rate < 1.0 and not self.allow_sampling:
            yield _forbids("allow_sampling", f"its sample rate is {opened.sample_rate:g}")
        if two and not self.allow_two_party:
            yield _forbids("allow_two_party", "only two participants")
        if n < (2 if two else self.min_roster):
            yield _forbids("min_roster", f"{n} joined")
        if opened.min_survivors < (2 if two else self.min_survivors):
            yield _forbids("min_survivors", f"it may be summed over {opened.min_survivors}")
        if roster is None:
            if self.require_roster:
                yield _forbids("require_roster", "no roster is pinned here")
            if opened.pinned:
                yield _forbids("roster", "it needs a pinned roster and there is none (lensemble site roster)")
        elif strangers := roster.strangers(opened.roster):
            names = ", ".join(identity.hex()[:16] for identity in strangers[:3])
            yield _forbids("roster", f"{len(strangers)} of its members are not pinned here ({names} ...)")
        if self.require_consistency and not opened.consistency:
            yield _forbids("require_consistency", "views are not compared (the run needs secagg.pinned=true)")
        if self.require_verify_sum and not opened.verify_sum:
            yield _forbids("require_verify_sum", "sums are not verified (the run needs secagg.verify_sum=true)")
        if opened.colluders < self.min_colluders:
            yield _forbids("min_colluders", f"it assumes {opened.colluders}")
        if opened.per_person < self.min_participants_per_person:
            yield _forbids(
                "min_participants_per_person", f"it counts with one person's data at {opened.per_person} participants"
            )
        if opened.threshold < self.min_threshold * n:
            yield _forbids("min_threshold", f"{opened.threshold} of {n} can unmask")
        if opened.ring_bits not in self.ring_bits:
            yield _forbids("ring_bits", f"its ring has {opened.ring_bits} bits")
        if opened.private:
            own, view = opened.noise_std / opened.clip_norm, Guarantee(opened.guarantee).name.lower()
            if not own >= self.min_own_noise:
                yield _forbids("min_own_noise", f"own noise is {own:.6g} C")
            if not opened.noise_multiplier >= self.min_noise_multiplier:
                yield _forbids("min_noise_multiplier", f"sigma is {opened.noise_multiplier:.6g}")
            if (mechanism := Mechanism(opened.mechanism).name.lower()) not in self.mechanisms:
                yield _forbids("mechanisms", f"its noise is a {mechanism}")
            if self.guarantee not in (None, view):
                yield _forbids("guarantee", f"its noise is sized for the guarantee {view}")
        if self.max_clip_norm is not None and not opened.clip_norm <= self.max_clip_norm:
            yield _forbids("max_clip_norm", f"C is {opened.clip_norm:g}")
        if self.max_inner_steps is not None and opened.inner_steps > self.max_inner_steps:
            yield _forbids("max_inner_steps", f"H is {opened.inner_steps}")
        if self.max_weights is not None and opened.dimension > self.max_weights:
            yield _forbids("max_weights", f"its vectors have {opened.dimension} weights")

    def check(self, opened: RoundOpen, roster: Roster | None = None) -> None:
        """Judge the public values of a round.

        Args:
            opened: the round.
            roster: whom the site pinned; None if nobody.

        Raises:
            PolicyViolation: names the rule; leaves the site only as the code POLICY.
        """
        for violation in self.violations(opened, roster):
            raise violation

    def check_run(self, config: Config, coordinators: Sequence[str]) -> None:
        """Judge what is known before a round opens.

        Args:
            config: the run's configuration, bound to every round by its hash.
            coordinators: fingerprints of the certificate authorities that this site trusts for its SuperLink.

        Raises:
            PolicyViolation: names the rule; leaves the site only as the code POLICY.
        """
        for violation in self.run_violations(config, coordinators):
            raise violation

    def run_violations(self, config: Config, coordinators: Sequence[str]) -> Iterator[PolicyViolation]:
        """Every rule that :meth:`check_run` finds broken."""
        violation = forbidden_task(config.task, self.allowed_tasks)
        if violation is not None:
            yield violation
        h = config.diloco.inner_steps
        planned = (
            ("max_inner_steps", self.max_inner_steps, h, f"H is {h}"),
            (
                "max_inner_steps",
                self.max_inner_steps,
                config.taught_steps,
                f"it teaches for {config.taught_steps} steps",
            ),
            ("max_rounds", self.max_rounds, config.diloco.rounds, f"it plans {config.diloco.rounds} rounds"),
            (
                "max_participants",
                self.max_participants,
                config.federation.participants,
                f"it plans {config.federation.participants} participants",
            ),
            ("max_weights", self.max_weights, config.weights, f"its model has about {config.weights:,} weights"),
            (
                "max_processes",
                self.max_processes,
                config.inner.parallel,
                f"it starts {config.inner.parallel} processes",
            ),
        )
        for rule, most, value, text in planned:
            if most is not None and value > most:
                yield _forbids(rule, text)
        if config.privacy.sample_rate < 1.0 and not self.allow_sampling:
            yield _forbids("allow_sampling", f"its sample rate is {config.privacy.sample_rate:g}")
        if config.privacy.enabled and config.privacy.mechanism not in self.mechanisms:
            yield _forbids("mechanisms", f"its noise is a {config.privacy.mechanism}")
        if self.dataset is not None and config.data.name != self.dataset:
            yield _forbids("dataset", f"it asks for the data set {config.data.name!r}")
        if self.allowed_coordinators is not None:
            strangers = [name for name in coordinators if name not in self.allowed_coordinators]
            if strangers or not coordinators:
                yield _forbids(
                    "allowed_coordinators", f"ca.crt holds {strangers[0] if strangers else 'no certificate'}"
                )


def _wrong(rule: str, text: str, remediation: str = "") -> ConfigError:
    return ConfigError(f"Policy: {rule}: {text}.", remediation, rule=rule)


def _forbids(rule: str, text: str) -> PolicyViolation:
    return PolicyViolation(f"The site's rule {rule} forbids this round: {text}.", rule=rule)


def forbidden_task(task: str, allowed: Collection[str]) -> PolicyViolation | None:
    """Why a task may not be imported; names are compared whole, so there is no pattern to slip through."""
    if task in BUILT_IN_TASKS or task in allowed:
        return None
    return _forbids("allowed_tasks", f"it asks for the task {task!r}")


def load_policy(path: Path) -> Policy:
    """Read and validate a policy file: YAML, or JSON where the name ends in ``.json``.

    Raises:
        ConfigError: missing, unreadable, unknown or mistyped keys; its ``rule`` names the rule where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            tree = json.loads(text, object_pairs_hook=_distinct)
        else:
            tree = parse_yaml(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"The site has no policy file {path}.", "Write one; without it nothing is released."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"The policy file {path} cannot be read: {error}.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"The policy file {path} must hold one object.")
    return Policy(**{name: _typed(path, name, value) for name, value in tree.items()})


def _typed(path: Path, name: str, value: Any) -> Any:
    """The value of a rule in its own type; no other type is silently turned into it."""
    hint = {f.name: str(f.type) for f in dataclasses.fields(Policy)}.get(name)
    if hint is None:
        raise ConfigError(f"The policy file {path} has an unknown rule {name!r}.", rule=name)
    kinds = set(hint.split(" | "))
    if value is None and "None" in kinds:
        return None
    if type(value) in (bool, int) and type(value).__name__ in kinds:
        return value
    if type(value) in (int, float) and "float" in kinds:
        return float(value) if abs(value) < 1e300 else math.inf
    if type(value) is str and "str" in kinds:
        return value
    if type(value) is list:
        for item, wanted in ((int, "tuple[int, ...]"), (str, "tuple[str, ...]")):
            if wanted in kinds and all(type(v) is item for v in value):
                return tuple(value)
    raise ConfigError(f"The policy file {path}: {name}={reprlib.repr(value)} has the wrong type ({hint}).", rule=name)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all differ: of two equal ones the last would silently win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a rule stands there twice")
    return found


def simulated_policy(config: Config) -> Policy:
    """The policy of a simulated site at its first use."""
    privacy = config.privacy
    central = privacy.guarantee == "central"
    return Policy(
        max_epsilon_local=privacy.target_epsilon if privacy.enabled and not central else None,
        max_epsilon_central=privacy.target_epsilon if privacy.enabled and central else None,
        delta=privacy.target_delta,
        unlimited=not privacy.enabled,
        allow_non_private=not privacy.enabled,
        allow_replay=True,
        allow_two_party=config.secagg.allow_two_party,
        allow_sampling=True,
        mechanisms=MECHANISMS,
        allowed_tasks=() if config.task in BUILT_IN_TASKS else (config.task,),
        max_inner_steps=None,
        max_rounds=None,
        max_participants=None,
        max_weights=None,
        max_processes=None,
        min_roster=2 if config.secagg.allow_two_party else 3,
    )


def save_policy(path: Path, policy: Policy) -> None:
    """Write a policy file atomically, readable by its owner only: commented YAML, or JSON if the name says so."""
    tree = dataclasses.asdict(policy)
    text = json.dumps(tree, indent=1) + "\n" if path.suffix == ".json" else format_yaml(tree, RULES)
    atomic_write(path, text.encode(), mode=0o600)


def run_budget(opened: RoundOpen) -> tuple[Budget, ...]:
    """The budget of this federation: its target, in the view that its noise is sized for."""
    if not opened.private:
        return ()
    view = "central" if opened.guarantee == Guarantee.CENTRAL else "local"
    return (Budget(view, opened.target_epsilon, opened.target_delta, "federation"),)
