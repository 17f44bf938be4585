"""Folders as runs leave them, made in milliseconds: the records and the manifest are real, the training is not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lensemble_flwr.config import load_config
from lensemble_flwr.federation.manifest import new_manifest
from lensemble_flwr.federation.plan import Plan
from lensemble_flwr.federation.records import Guarantee
from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.privacy import gaussian
from lensemble_flwr.privacy.claims import ClaimInputs, claim_grade, claims
from lensemble_flwr.secagg import RingParams


def decay(first: float, last: float, rounds: int, rate: float = 0.4) -> list[float]:
    """A curve that falls (or rises) from ``first`` towards ``last``; rounds + 1 values."""
    tail = math.exp(-rate * rounds)
    return [last + (first - last) * (math.exp(-rate * t) - tail) / (1 - tail) for t in range(rounds + 1)]


def make_run(
    folder: Path,
    overrides: Sequence[str],
    metrics: Sequence[dict[str, float | None]],
    *,
    dimension: int = 128,
    sigma: float = 1.8983,
    survivors: Sequence[int] | None = None,
    burnt: dict[int, str] | None = None,
    facts: dict[int, dict[str, Any]] | None = None,
    status: str = "completed",
    detail: str = "",
    simulation: bool = True,
    headline: str = "",
    baselines: list[dict[str, Any]] | None = None,
) -> Path:
    """Write a run's folder.

    Args:
        metrics: of the start and after each finished round.
        survivors: participants in each round's sum (default: all).
        burnt: index -> cause.
        facts: index -> fields that replace those of the record.
    """
    config = load_config(list(overrides))
    n, m, k = config.federation.participants, config.secagg.min_survivors, config.secagg.assumed_colluders
    privacy = config.privacy
    guarantee = Guarantee[privacy.guarantee.upper()] if privacy.enabled else Guarantee.NONE
    std = 0.0
    if privacy.enabled:
        std = sigma * privacy.clip_norm / (math.sqrt(m - k) if guarantee == Guarantee.CENTRAL else 1.0)
    ring = RingParams.for_range(32, n, privacy.clip_norm + 10 * std if privacy.enabled else 1.0, dimension)
    plan = Plan(
        n=n,
        dimension=dimension,
        guarantee=guarantee,
        noise_multiplier=sigma if privacy.enabled else 0.0,
        noise_std=std,
        clip_norm=privacy.clip_norm,
        threshold=max(2 * n // 3, (n + k) // 2) + 1,
        min_survivors=m,
        colluders=k,
        two_party=False,
        ring=ring,
        delta_extra=0.0,
    )
    rows = claims(
        ClaimInputs(
            guarantee=privacy.guarantee,
            noise_multiplier=sigma,
            clip_norm=privacy.clip_norm,
            rounds=config.diloco.rounds,
            delta=privacy.target_delta,
            n=n,
            min_survivors=m,
            colluders=k,
            dimension=dimension,
            ring_bits=ring.bits,
            scale_log2=ring.scale_log2,
            qmax=ring.qmax,
            secagg_enabled=True,
            identities_pinned=False,
            consistency_stage=False,
            entropy=privacy.entropy,
            simulation=simulation,
            privacy_enabled=privacy.enabled,
            accountant=privacy.accountant,
        )
    )
    grade, why_not = claim_grade(rows, list(privacy.claim))
    plain = [
        {key: None if isinstance(v, float) and not v < math.inf else v for key, v in dataclasses.asdict(row).items()}
        for row in rows
    ]
    folder.mkdir(parents=True)
    manifest = new_manifest(
        federation_id=_hash("federation"),
        config=config,
        plan=plan,
        claims=plain,
        claim_grade=grade,
        why_not=why_not,
        base_hash=_hash("base"),
        probe_hash=_hash("probe"),
        simulation=simulation,
        sites_dir="/a/path/that/no/report/shows",
    )
    roots = sorted(_hash(f"root {i}").hex() for i in range(n))
    dataclasses.replace(
        manifest, status=status, detail=detail, dataset_roots=roots, created_utc="2026-11-29T21:04:00Z"
    ).write(folder)
    (folder / "evaluation.json").write_text(
        json.dumps({"schema_version": 1, "headline": headline, "start": metrics[0]})
    )
    if baselines is not None:
        (folder / "baselines.json").write_text(json.dumps({"rows": baselines}))
    own_mu = privacy.clip_norm / std if std else math.inf
    runs = RunFolder(folder)
    for index in range(len(metrics) - 1):
        is_burnt = index in (burnt or {})
        count = survivors[index] if survivors else n
        mu = {"central": own_mu / math.sqrt(max(1, m - k)), "local": own_mu}
        epsilons = {
            f"epsilon_{view}": gaussian.epsilon(mu[view] * math.sqrt(index + 1), privacy.target_delta)
            if privacy.enabled
            else None
            for view in mu
        }
        record = {
            "schema_version": 1,
            "round": index,
            "outcome": "burnt" if is_burnt else "committed",
            "participants": 0 if is_burnt else count,
            "roster": n,
            "theta_hash": _hash(f"theta {index}").hex(),
            "sum_hash": (bytes(32) if is_burnt else _hash(f"sum {index}")).hex(),
            "checkpoint": _hash(f"checkpoint {index}").hex(),
            "bytes_down": n * (1500 + 4 * dimension + 180 * n) + 7 * index,
            "bytes_up": count * (500 + 4 * dimension + 180 * n),
            "private": privacy.enabled and privacy.entropy == "csprng",
            **epsilons,
            "metrics": metrics[index + 1],
            "close": "00",
        }
        if is_burnt:
            record["cause"] = (burnt or {})[index]
        else:
            record |= {"seconds": 9.4 + 0.8 * math.sin(index * 1.7), "attempt": 1}
        runs.append_round(record | (facts or {}).get(index, {}))
    return folder


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def private_run(folder: Path, **more: Any) -> Path:
    """The quickstart: 64 participants, epsilon 8, better than training alone."""
    rounds = 10
    columns: dict[str, list[float]] = {
        "r5": decay(0.593, 0.281, rounds),
        "r1": decay(0.152, 0.118, rounds),
        "altitude_rmse": decay(0.85, 0.51, rounds),
        "r5_nominal": decay(0.167, 0.182, rounds, 0.2),
        "state_probe_r2": [0.914] * (rounds + 1),
        "action_sensitivity": decay(1.9, 2.6, rounds),
        "effective_rank": [11.4] * (rounds + 1),
        "latent_std_min": [0.61] * (rounds + 1),
        "latent_std_mean": [0.98] * (rounds + 1),
    }
    baselines = [
        {"name": "local only", "metrics": {"r5": 0.423, "r1": 0.141, "r5_nominal": 0.31}, "note": "best of 64 sites"},
        {"name": "pooled", "metrics": {"r5": 0.217, "r1": 0.104, "r5_nominal": 0.175}, "note": "all data in one place"},
        {"name": "noise only", "metrics": {"r5": 0.623}, "note": "control: same noise, no data"},
        {"name": "public data only", "metrics": {"r5": 0.597}, "note": "control: the adapter on public data"},
    ]
    defaults: dict[str, Any] = {
        "overrides": ["experiment=quickstart", "seed=0"],
        "metrics": [{name: c[i] for name, c in columns.items()} for i in range(rounds + 1)],
        "survivors": [64, 64, 63, 64, 61, 64, 64, 58, 64, 64],
        "facts": {7: {"attempt": 2}},
        "baselines": baselines,
        "headline": "r5",
    }
    return make_run(folder, **(defaults | more))


def replay_run(folder: Path) -> Path:
    """Seeded noise: the records hold epsilons as if, and no report may show them."""
    errors = decay(1.02, 0.21, 3, 0.9)
    return make_run(
        folder,
        ["experiment=linear", "privacy.entropy=replay"],
        [{"heldout_error": e} for e in errors],
        dimension=17,
        sigma=3.0,
    )


def silos_run(folder: Path) -> Path:
    """Privacy off, the whole model federated."""
    rounds = 10
    columns = {
        "r5": decay(0.41, 0.29, rounds),
        "state_probe_r2": decay(0.55, 0.83, rounds),
        "effective_rank": decay(10.2, 12.9, rounds),
        "latent_std_min": decay(0.42, 0.66, rounds),
        "latent_std_mean": decay(0.9, 1.01, rounds),
    }
    return make_run(
        folder,
        ["experiment=silos"],
        [{name: c[i] for name, c in columns.items()} for i in range(rounds + 1)],
        dimension=198_288,
        headline="state_probe_r2",
        baselines=[
            {"name": "local only", "metrics": {"state_probe_r2": 0.71, "r5": 0.34}, "note": "mean of 4 silos"},
            {"name": "pooled", "metrics": {"state_probe_r2": 0.86, "r5": 0.27}, "note": ""},
        ],
    )


def burnt_run(folder: Path) -> Path:
    """Local guarantee; round 2 was burnt, round 3 replayed at resume; the noise ruins the model."""
    errors = [1.02, 0.74, 1.31, 1.31, 1.62, 1.55]
    return make_run(
        folder,
        ["experiment=linear", "privacy=local", "federation.participants=8", "diloco.rounds=5"],
        [{"heldout_error": e} for e in errors],
        dimension=17,
        sigma=2.0,
        survivors=[8, 7, 8, 8, 6],
        burnt={2: "Only 4 of 6 needed shares arrived."},
        facts={3: {"replayed": True, "seconds": None, "bytes_down": 0, "bytes_up": 0}},
        simulation=False,
    )


def budget_run(folder: Path) -> Path:
    """Two rounds fit into epsilon 8 at sigma 1; five were planned."""
    return make_run(
        folder,
        ["experiment=linear", "privacy.noise_multiplier=1.0", "diloco.rounds=5"],
        [{"heldout_error": e} for e in (1.02, 0.61, 0.38)],
        dimension=17,
        sigma=1.0,
        status="BUDGET",
        detail=(
            "[BUDGET] Round 2 was refused: a participant's privacy budget does not allow it. By the public record 2 "
            "rounds cost epsilon 6.573 at delta 1e-05, round 2 would make it 8.385; the run's target is 8. Committed "
            "rounds stay committed and the checkpoint is written. Raise the budget, plan fewer rounds, or stop here."
        ),
    )


def empty_run(folder: Path, status: str = "running") -> Path:
    """Nothing finished yet."""
    return make_run(folder, ["experiment=quickstart"], [{"r5": 0.593, "r1": 0.152}], status=status)
