"""What a run left in its folder, read strictly: the input of every report.

    manifest.json      what ran and what is claimed
    rounds.jsonl       one record per finished round (missing while no round is finished)
    evaluation.json    {"start": {metric: value}, "headline": metric}: the model before round 0 (optional)
    baselines.json     {"rows": [{"name", "metrics", "note"}]}, computed outside the federation (optional)
    readings.json      what the models read along one public held-out episode (optional; federation.readings)

Only public values are in these files. A run that was interrupted is read as far as it got.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.federation.manifest import RunManifest, read_manifest
from lensemble_flwr.federation.readings import MAX_BYTES, Readings, from_json
from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.federation.task import MetricLabel

RECORD_SCHEMA = 1
COMMITTED, BURNT = "committed", "burnt"

_MISSING = object()


@dataclass(frozen=True)
class Round:
    """One finished round.

    Attributes:
        index: the coordinator's number of the round, from 0.
        outcome: "committed", or "burnt" (budgets spent, model unchanged).
        participants: survivors in the sum (0 if burnt), of ``roster`` that it was opened with.
        bytes_down, bytes_up: payload to and from all participants, bytes; None if not measured (replayed rounds).
        epsilon_central, epsilon_local: after this round, at the run's target delta; infinite without a guarantee.
        metrics: of the model after this round; NaN where a figure is missing.
        seconds: wall time, None if not measured.
        attempt: which attempt succeeded (1 unless earlier ones were void), None if not recorded.
        replayed: committed at resume from a sum that an earlier process stored.
        cause: why it was burnt.
    """

    index: int
    outcome: str
    participants: int
    roster: int
    theta_hash: str
    bytes_down: int | None
    bytes_up: int | None
    epsilon_central: float
    epsilon_local: float
    metrics: dict[str, float]
    seconds: float | None
    attempt: int | None
    replayed: bool
    cause: str

    @property
    def committed(self) -> bool:
        """Whether this round changed the model."""
        return self.outcome == COMMITTED


@dataclass(frozen=True)
class Claim:
    """One row of the manifest's claims table (privacy.claims.Claim says what each field means).

    Epsilons are infinite where nothing is guaranteed, NaN where an older run did not record them. In a row that holds,
    ``why_not`` is a remark.
    """

    observer: str
    holds: bool
    epsilon: float
    delta: float | None
    epsilon_per_round: float
    epsilon_local: float
    epsilon_central: float
    why_not: str
    assumptions: tuple[str, ...]
    guarantee: str
    unit: str
    neighbours: str
    theorem: str


@dataclass(frozen=True)
class Baseline:
    """A model to compare with that the federation did not make."""

    name: str
    metrics: dict[str, float]
    note: str


@dataclass(frozen=True)
class RunData:
    """One run, as its folder holds it."""

    folder: Path
    manifest: RunManifest
    rounds: tuple[Round, ...]
    claims: tuple[Claim, ...]
    start: dict[str, float]
    """Metrics of the model before round 0; empty if not stored."""
    headline: str
    """The metric that the run's task tells its outcome in; empty if not stored."""
    baselines: tuple[Baseline, ...]
    labels: dict[str, MetricLabel] = field(default_factory=dict)
    """What the run's own task calls its metrics."""
    readings: Readings | None = None
    readings_after: int = 0
    """How many rounds the final model of :attr:`readings` has behind it."""

    # ---------------------------------------------------------------- what was asked for

    def setting(self, key: str, kind: type | tuple[type, ...] = object) -> Any:
        """The value of a dotted configuration key.

        Raises:
            ArtifactError: missing, or of another type.
        """
        node: Any = self.manifest.config
        for part in key.split("."):
            node = node.get(part, _MISSING) if isinstance(node, dict) else _MISSING
        if node is _MISSING or not isinstance(node, kind) or (isinstance(node, bool) and kind is not bool):
            _damaged(self.folder / "manifest.json", f"its configuration has no proper {key}")
        return node

    @property
    def experiment(self) -> str:
        return str(self.setting("experiment", str))

    @property
    def task(self) -> str:
        return str(self.setting("task", str))

    @property
    def two_party(self) -> bool:
        """Whether only two participants took part, by explicit consent."""
        return self.manifest.plan.get("two_party") is True

    @property
    def planned_rounds(self) -> int:
        return int(self.setting("diloco.rounds", int))

    @property
    def guarantee(self) -> str:
        """The view that the noise is sized for: "central" or "local" ("none" without privacy)."""
        if not self.setting("privacy.enabled", bool):
            return "none"
        return str(self.setting("privacy.guarantee", str))

    @property
    def surface(self) -> str:
        """Which parameters are federated: "full", "predictor" or "adapter"."""
        return str(self.setting("federation.surface", str))

    @property
    def target_epsilon(self) -> float:
        return float(self.setting("privacy.target_epsilon", (int, float)))

    @property
    def target_delta(self) -> float:
        return float(self.setting("privacy.target_delta", (int, float)))

    # ---------------------------------------------------------------- what came out

    @property
    def private(self) -> bool:
        return self.manifest.private

    @property
    def replay(self) -> bool:
        """Whether the noise is seeded, so that anybody can subtract it."""
        return self.manifest.entropy == "replay"

    @property
    def committed(self) -> int:
        return sum(r.committed for r in self.rounds)

    @property
    def burnt(self) -> int:
        return len(self.rounds) - self.committed

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the model as it stands (of the start while no round is finished)."""
        return self.rounds[-1].metrics if self.rounds else self.start

    def epsilon(self, view: str, after: int = -1) -> float:
        """Epsilon after a round in the "central" or "local" view; 0 before any, infinite without a guarantee."""
        if not self.private:
            return math.inf
        if not self.rounds:
            return 0.0
        record = self.rounds[after]
        return record.epsilon_central if view == "central" else record.epsilon_local


def load_run(folder: Path | str) -> RunData:
    """Read one run.

    Args:
        folder: the run's output folder.

    Raises:
        ArtifactError: a file is missing, damaged, or of another release; says which. An interrupted run is not
            damaged: no rounds, a torn last line and status "running" are read as they are.
    """
    folder = Path(folder)
    manifest = _checked_manifest(folder)
    path = folder / "rounds.jsonl"
    try:
        records = RunFolder(folder).rounds()
    except OSError as error:
        _damaged(path, str(error.strerror or error))
    start = _optional(folder / "evaluation.json")
    baselines = _optional(folder / "baselines.json")
    readings, readings_after = _readings(folder / "readings.json")
    run = RunData(
        folder=folder,
        manifest=manifest,
        rounds=tuple(_round(path, i, r, manifest.private) for i, r in enumerate(records)),
        claims=tuple(_claim(folder / "manifest.json", r) for r in manifest.claims),
        start=_metrics(folder / "evaluation.json", start.get("start")) if start is not None else {},
        headline=_headline(folder / "evaluation.json", start),
        baselines=_baselines(folder / "baselines.json", baselines) if baselines is not None else (),
        labels=_labels(folder / "evaluation.json", start),
        readings=readings,
        readings_after=readings_after,
    )
    # Read every key once: a report must not fail halfway.
    _ = run.experiment, run.task, run.planned_rounds, run.guarantee, run.surface
    _ = run.target_epsilon, run.target_delta
    return run


# ------------------------------------------------------------------------------------------------ parsing


def _damaged(path: Path, what: str) -> NoReturn:
    raise ArtifactError(f"{path} cannot be used: {what}.", "Restore the run's folder from a backup.")


def _checked_manifest(folder: Path) -> RunManifest:
    manifest = read_manifest(folder)
    texts = ["federation_id", "status", "created_utc", "config_hash", "entropy", "base_hash", "probe_hash", "frame"]
    texts += ["runtime", "python", "platform", "git", "detail"]
    kinds: dict[str, type] = dict.fromkeys(texts, str)
    kinds |= {"private": bool, "claim_grade": bool, "config": dict, "plan": dict, "versions": dict}
    kinds |= dict.fromkeys(("overrides", "claim_grade_why_not", "claims", "dataset_roots", "notes"), list)
    for name, kind in kinds.items():
        if not isinstance(getattr(manifest, name), kind):
            _damaged(folder / "manifest.json", f"{name} is not {kind.__name__}")
    return manifest


def _readings(path: Path) -> tuple[Readings | None, int]:
    if not path.is_file():
        return None, 0
    try:
        with open(path, "rb") as file:
            return from_json(file.read(MAX_BYTES + 1))
    except OSError as error:
        _damaged(path, str(error.strerror or error))


def _optional(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        _damaged(path, str(error))
    if not isinstance(tree, dict):
        _damaged(path, "it is not an object")
    return tree


def _headline(path: Path, tree: dict[str, Any] | None) -> str:
    name = (tree or {}).get("headline", "")
    if not isinstance(name, str):
        _damaged(path, "headline is not text")
    return name


def _labels(path: Path, tree: dict[str, Any] | None) -> dict[str, MetricLabel]:
    found = (tree or {}).get("labels", {})
    try:
        return labels_from(found)
    except (TypeError, AttributeError):
        _damaged(path, "labels are not what a task says of its metrics")


def labels_from(tree: Any) -> dict[str, MetricLabel]:
    """The labels of metrics as a run's records hold them.

    Raises:
        TypeError, AttributeError: they are something else.
    """
    labels = {name: MetricLabel(**fields) for name, fields in tree.items()}
    for label in labels.values():
        if type(label.label) is not str or type(label.unit) is not str:
            raise TypeError("a label is not text")
        if label.lower_is_better is not None and type(label.lower_is_better) is not bool:
            raise TypeError("lower_is_better is not true, false or null")
    return labels


def _metrics(path: Path, tree: Any) -> dict[str, float]:
    if not isinstance(tree, dict):
        _damaged(path, "metrics are not an object")
    return {name: math.nan if value is None else _number(path, name, value) for name, value in tree.items()}


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _damaged(path, f"{name} is not a number")
    try:
        return float(value)
    except OverflowError:
        _damaged(path, f"{name} is out of range")


def _round(path: Path, number: int, record: Any, run_is_private: bool) -> Round:
    line = f"line {number + 1}"
    if not isinstance(record, dict):
        _damaged(path, f"{line} is not an object")

    def take(name: str, kind: type, default: Any = _MISSING) -> Any:
        value = record.get(name, default)
        if value is default and default is not _MISSING:
            return default
        wrong = not isinstance(value, kind) or (isinstance(value, int) and kind is int and value < 0)
        if wrong or (kind is int and isinstance(value, bool)):
            _damaged(path, f"{line} has no proper {name}")
        return value

    def epsilon(name: str) -> float:
        value = record.get(name)
        # Replayed noise: the ledgers count as if, so that they can be tested, but a report claims nothing.
        if value is None or not private:
            return math.inf
        number = _number(path, f"{line}: {name}", value)
        if number < 0:
            _damaged(path, f"{line}: {name} is negative")
        return number if number < math.inf else math.inf  # NaN too: no guarantee

    if take("schema_version", int) != RECORD_SCHEMA:
        _damaged(path, f"{line} has schema {record['schema_version']}, not {RECORD_SCHEMA}")
    if take("round", int) != number:
        _damaged(path, f"{line} is round {record['round']}, not {number}")
    outcome = take("outcome", str)
    if outcome not in (COMMITTED, BURNT):
        _damaged(path, f"{line} has the unknown outcome {outcome!r}")
    participants, roster = take("participants", int), take("roster", int)
    if participants > roster:
        _damaged(path, f"{line} sums {participants} participants of a roster of {roster}")
    private = take("private", bool) and run_is_private
    seconds = record.get("seconds")
    replayed = take("replayed", bool, False)
    return Round(
        index=number,
        outcome=outcome,
        participants=participants,
        roster=roster,
        theta_hash=take("theta_hash", str),
        bytes_down=None if replayed else take("bytes_down", int),
        bytes_up=None if replayed else take("bytes_up", int),
        epsilon_central=epsilon("epsilon_central"),
        epsilon_local=epsilon("epsilon_local"),
        metrics=_metrics(path, record.get("metrics")),
        seconds=None if seconds is None else _number(path, f"{line}: seconds", seconds),
        attempt=take("attempt", int, None),
        replayed=replayed,
        cause=take("cause", str, ""),
    )


def _claim(path: Path, row: Any) -> Claim:
    if not isinstance(row, dict) or not isinstance(row.get("observer"), str) or not isinstance(row.get("holds"), bool):
        _damaged(path, "a row of its claims has no observer or does not say whether it holds")

    def words(name: str) -> tuple[str, ...]:
        value = row.get(name)
        if value is None or value == "":
            return ()
        return tuple(str(v) for v in value) if isinstance(value, list) else (str(value),)

    def number(name: str) -> float | None:
        value = row.get(name)
        return None if value is None else _number(path, f"a claim's {name}", value)

    def epsilon(name: str) -> float:
        value = number(name) if name in row else math.nan
        return math.inf if value is None or value == -math.inf else value

    total = epsilon("epsilon")
    return Claim(
        observer=row["observer"],
        holds=row["holds"],
        epsilon=total if total < math.inf else math.inf,
        delta=number("delta"),
        epsilon_per_round=epsilon("epsilon_per_round"),
        epsilon_local=epsilon("epsilon_local"),
        epsilon_central=epsilon("epsilon_central"),
        why_not="; ".join(words("why_not")),
        assumptions=words("assumptions"),
        guarantee="; ".join(words("guarantee")),
        unit="; ".join(words("unit")),
        neighbours="; ".join(words("neighbours")),
        theorem="; ".join(words("theorem")),
    )


def _baselines(path: Path, tree: Mapping[str, Any]) -> tuple[Baseline, ...]:
    rows = tree.get("rows")
    if not isinstance(rows, list):
        _damaged(path, "it has no list of rows")
    found = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            _damaged(path, "a row has no name")
        found.append(Baseline(row["name"], _metrics(path, row.get("metrics")), str(row.get("note") or "")))
    return tuple(found)
