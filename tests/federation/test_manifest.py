"""The manifest says which code ran, as far as somebody knows."""

from __future__ import annotations

from typing import Any

import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.federation import manifest
from lensemble_flwr.federation.plan import make_plan


def git(revision: str) -> str:
    config = load_config(["experiment=linear"])
    options: dict[str, Any] = {
        "federation_id": bytes(32),
        "config": config,
        "plan": make_plan(config, 4, 17),
        "claims": [],
        "claim_grade": False,
        "why_not": [],
        "base_hash": bytes(32),
        "probe_hash": bytes(32),
        "simulation": True,
        "sites_dir": "",
    }
    return manifest.new_manifest(**options, revision=revision).git


@pytest.mark.parametrize("revision", ["a" * 40, "0123456789" * 4 + "+"])
def test_the_submitters_commit_is_kept(revision: str) -> None:
    assert git(revision) == revision


@pytest.mark.parametrize("revision", ["", "main", "a" * 39, "a" * 41, "A" * 40, "<script>", "a" * 40 + "\n"])
def test_anything_else_is_looked_up(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "git_revision", lambda folder: "looked up")
    assert git(revision) == "looked up"
