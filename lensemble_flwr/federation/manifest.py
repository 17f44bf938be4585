"""RunManifest: what ran, with which code, on which claim. Public values only; entropy is named, never shown."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lensemble_flwr.config import Config, config_hash, resolved
from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.federation.claim_inputs import sum_checked_by
from lensemble_flwr.federation.plan import Plan

SCHEMA_VERSION = 1
COMPLETED = "completed"
_PACKAGES = (
    "lensemble-flwr",
    "flwr",
    "torch",
    "numpy",
    "cryptography",
    "dp-accounting",
    "opacus",
    "gymnasium",
    "box2d",
)


@dataclass(frozen=True)
class RunManifest:
    """One run in one JSON object; see the fields."""

    schema_version: int
    federation_id: str
    status: str
    """running, completed, or the code of the error that ended the run."""
    created_utc: str
    config: dict[str, Any]
    config_hash: str
    overrides: list[str]
    seed: int
    entropy: str
    """csprng: noise from each participant's operating system. replay: seeded, non-private."""
    private: bool
    claim_grade: bool
    claim_grade_why_not: list[str]
    claims: list[dict[str, Any]]
    plan: dict[str, Any]
    base_hash: str
    probe_hash: str
    frame: str
    """Whether the latent frame is federated (and aligned by participants) or fixed by the frozen encoder."""
    secure_sum_is_only_input: bool
    runtime: str
    dataset_roots: list[str]
    versions: dict[str, str]
    python: str
    platform: str
    git: str
    sites_dir: str = ""
    sum_checked_by: str = ""
    """Who finds out if a committed model is not what the sum gives."""
    detail: str = ""
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` atomically."""
        text = json.dumps(asdict(self), indent=1, allow_nan=False, sort_keys=True)
        atomic_write(folder / "manifest.json", (text + "\n").encode(), mode=0o644)


def read_manifest(folder: Path) -> RunManifest:
    """The manifest of a run.

    Raises:
        ArtifactError: missing, damaged, or of another schema.
    """
    path = folder / "manifest.json"
    try:
        tree = json.loads(path.read_text())
        if tree["schema_version"] != SCHEMA_VERSION:
            raise ArtifactError(f"{path} has schema {tree['schema_version']!r}, not {SCHEMA_VERSION}.")
        return RunManifest(**tree)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} cannot be read: {ascii(str(error))[1:-1]}.", "Give the output folder of a run."
        ) from error


def versions() -> dict[str, str]:
    """Installed versions of what decides the result."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_revision(folder: Path) -> str:
    """Commit of the checkout that ``folder`` lies in ("+" when changed), or "unknown"."""
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def new_manifest(
    *,
    federation_id: bytes,
    config: Config,
    plan: Plan,
    claims: list[dict[str, Any]],
    claim_grade: bool,
    why_not: list[str],
    base_hash: bytes,
    probe_hash: bytes,
    simulation: bool,
    sites_dir: str,
    revision: str = "",
) -> RunManifest:
    """The manifest at the start of a run. ``revision``: of the code, as whoever submitted the run knows it."""
    numbers = {k: v for k, v in asdict(plan).items() if k not in ("ring", "guarantee")}
    ring = {"bits": plan.ring.bits, "scale_log2": plan.ring.scale_log2, "qmax": plan.ring.qmax}
    frame_moves = config.federation.surface in ("full", "function") and config.task == "world_model"
    frame = "federated, aligned by participants" if config.gauge.align else "federated, not aligned (ablation)"
    return RunManifest(
        schema_version=SCHEMA_VERSION,
        federation_id=federation_id.hex(),
        status="running",
        created_utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        config=resolved(config),
        config_hash=config_hash(config).hex(),
        overrides=list(config.overrides),
        seed=config.seed,
        entropy=config.privacy.entropy,
        private=config.privacy.enabled and config.privacy.entropy == "csprng",
        claim_grade=claim_grade,
        claim_grade_why_not=why_not,
        claims=claims,
        plan={**numbers, "guarantee": plan.guarantee.name.lower(), "ring": ring},
        base_hash=base_hash.hex(),
        probe_hash=probe_hash.hex(),
        frame=frame if frame_moves else "fixed",
        secure_sum_is_only_input=True,
        runtime="simulation on one machine" if simulation else "deployment",
        dataset_roots=[],
        versions=versions(),
        python=platform.python_version(),
        platform=platform.platform(),
        # The app runs from a bundle's folder, which is in no checkout; the submitter's command knows better.
        git=revision if re.fullmatch(r"[0-9a-f]{40}\+?", revision) else git_revision(Path(__file__).parent),
        sites_dir=sites_dir,
        sum_checked_by=sum_checked_by(config),
    )
