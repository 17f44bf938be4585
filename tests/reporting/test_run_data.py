"""Reading a run: complete, interrupted, damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.reporting.run_data import load_run

Own = Callable[[str], Path]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file, or each line of a .jsonl file."""
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        change(records)
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    else:
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))


def test_a_complete_run(made: dict[str, Path]) -> None:
    run = load_run(made["private"])
    assert len(run.rounds) == run.planned_rounds == run.committed == 10
    assert (run.experiment, run.headline, run.guarantee) == ("quickstart", "r5", "central")
    assert run.start["r5"] == pytest.approx(0.593)
    assert run.final["r5"] == pytest.approx(0.281)
    assert run.epsilon("central") == pytest.approx(8.0, abs=2e-3)
    assert run.epsilon("local", 0) < run.epsilon("local")
    assert [c.observer for c in run.claims if c.holds] == ["model_reader"]
    assert [b.name for b in run.baselines][:2] == ["local only", "pooled"]


def test_a_run_without_finished_rounds(made: dict[str, Path]) -> None:
    run = load_run(made["empty"])
    assert run.rounds == ()
    assert run.final == run.start
    assert run.epsilon("central") == 0.0


def test_replayed_noise_has_no_finite_epsilon(made: dict[str, Path]) -> None:
    stored = [json.loads(line) for line in (made["replay"] / "rounds.jsonl").read_text().splitlines()]
    assert all(r["epsilon_central"] < math.inf for r in stored)  # the record counts as if
    run = load_run(made["replay"])
    assert all(r.epsilon_central == r.epsilon_local == math.inf for r in run.rounds)
    assert run.epsilon("central") == math.inf


def test_a_private_record_in_a_non_private_run_is_not_believed(own: Own) -> None:
    folder = own("private")
    edit(folder / "manifest.json", lambda m: m.update(private=False))
    run = load_run(folder)
    assert all(r.epsilon_central == math.inf for r in run.rounds)


def test_burnt_and_replayed_rounds(made: dict[str, Path]) -> None:
    run = load_run(made["burnt"])
    assert (run.committed, run.burnt) == (4, 1)
    assert run.rounds[2].cause.startswith("Only 4 of 6")
    assert run.rounds[3].replayed
    assert run.rounds[3].bytes_down is None


def test_a_torn_last_line_never_took_effect(own: Own) -> None:
    folder = own("private")
    path = folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert len(load_run(folder).rounds) == 9


def test_missing_optional_files(own: Own) -> None:
    folder = own("private")
    (folder / "evaluation.json").unlink()
    (folder / "baselines.json").unlink()
    run = load_run(folder)
    assert (run.start, run.headline, run.baselines) == ({}, "", ())


def test_no_finite_metric_is_nan(own: Own) -> None:
    folder = own("private")
    edit(folder / "rounds.jsonl", lambda rs: (rs[3]["metrics"].update(r5=None), rs[4]["metrics"].update(r5=math.nan)))
    assert "NaN" in (folder / "rounds.jsonl").read_text()
    run = load_run(folder)
    assert all(math.isnan(run.rounds[i].metrics["r5"]) for i in (3, 4))


def _set(**values: Any) -> Callable[[Any], None]:
    return lambda records: records[1].update(values)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("rounds.jsonl", _set(round=7), "line 2 is round 7"),
        ("rounds.jsonl", _set(schema_version=2), "schema 2"),
        ("rounds.jsonl", _set(outcome="fine"), "unknown outcome 'fine'"),
        ("rounds.jsonl", _set(participants=65), "65 participants of a roster of 64"),
        ("rounds.jsonl", _set(participants=-1), "participants"),
        ("rounds.jsonl", _set(participants=True), "participants"),
        ("rounds.jsonl", _set(epsilon_central="8"), "epsilon_central"),
        ("rounds.jsonl", _set(epsilon_central=-1.0), "epsilon_central is negative"),
        ("rounds.jsonl", _set(metrics=None), "metrics"),
        ("rounds.jsonl", _set(metrics={"r5": "low"}), "r5"),
        ("rounds.jsonl", _set(metrics={"r5": 10**400}), "out of range"),
        ("rounds.jsonl", _set(bytes_up=None), "bytes_up"),
        ("rounds.jsonl", lambda records: records.insert(0, 5), "line 1 is not an object"),
        ("manifest.json", lambda m: m.update(private="yes"), "private"),
        ("manifest.json", lambda m: m.update(schema_version=9), "schema 9"),
        ("manifest.json", lambda m: m.pop("claims"), "claims"),
        ("manifest.json", lambda m: m["config"].pop("diloco"), "diloco.rounds"),
        ("manifest.json", lambda m: m["config"]["privacy"].update(target_epsilon=None), "privacy.target_epsilon"),
        ("manifest.json", lambda m: m["claims"][0].pop("observer"), "observer"),
        ("manifest.json", lambda m: m["claims"][0].update(holds=1), "holds"),
        ("manifest.json", lambda m: m["claims"][0].update(epsilon="8"), "epsilon"),
        ("evaluation.json", lambda e: e.update(start=[1]), "metrics"),
        ("evaluation.json", lambda e: e.update(headline=3), "headline"),
        ("evaluation.json", lambda e: e.update(labels=[1]), "labels"),
        ("evaluation.json", lambda e: e.update(labels={"r5": 1}), "labels"),
        ("evaluation.json", lambda e: e.update(labels={"r5": {"label": 1}}), "labels"),
        ("evaluation.json", lambda e: e.update(labels={"r5": {"label": "a", "lower_is_better": 1}}), "labels"),
        ("evaluation.json", lambda e: e.update(labels={"r5": {"label": "a", "html": "b"}}), "labels"),
        ("baselines.json", lambda b: b.pop("rows"), "rows"),
        ("baselines.json", lambda b: b["rows"][0].pop("name"), "name"),
    ],
)
def test_damage_is_named(own: Own, name: str, change: Callable[[Any], None], says: str) -> None:
    folder = own("private")
    edit(folder / name, change)
    with pytest.raises(ArtifactError) as caught:
        load_run(folder)
    assert name in str(caught.value)
    assert says in str(caught.value)


def test_a_claim_without_an_epsilon_guarantees_nothing(own: Own) -> None:
    folder = own("private")
    edit(folder / "manifest.json", lambda m: m["claims"][0].pop("epsilon"))
    claim = load_run(folder).claims[0]
    assert claim.epsilon == math.inf


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_run(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_damaged_optional_file_is_not_skipped(own: Own, content: str) -> None:
    folder = own("private")
    (folder / "evaluation.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"evaluation\.json"):
        load_run(folder)
