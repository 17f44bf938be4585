"""The closing sentence and the rows of the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.reporting import wording
from lensemble_flwr.reporting.metrics import describe, metrics_of, ordered, primary
from lensemble_flwr.reporting.report import write_report
from lensemble_flwr.reporting.run_data import load_run
from lensemble_flwr.reporting.summary import baseline_kind, closing_sentence, comparison, rounds_rows
from tests.reporting.runs import make_run
from tests.reporting.test_run_data import edit

Own = Callable[[str], Path]


def sentence(folder: Path) -> str:
    text = closing_sentence(load_run(folder))
    assert text.isascii()
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_private_run(made: dict[str, Path]) -> None:
    assert sentence(made["private"]) == (
        "After all 10 rounds, the 5-step prediction error fell from 0.593 at the warm start to 0.281 (53 % lower; "
        "training alone 0.423; pooled data 0.217); but the 5-step prediction error (nominal) rose from 0.167 to 0.182; "
        "claimed is epsilon 8.00 at delta 1e-5, protecting all rounds of one participant, against a reader of the "
        "released models; nothing against the other participants, the coordinator or anyone who sees an update without "
        "its mask."
    )


def test_forgetting_is_said_and_small_changes_are_not(own: Own) -> None:
    folder = own("private")
    edit_start = {"r5": 0.593, "r5_nominal": 0.18}
    edit(folder / "evaluation.json", lambda tree: tree["start"].update(edit_start))
    assert "nominal" not in sentence(folder)  # 0.180 to 0.182


def test_runs_that_claim_nothing(made: dict[str, Path]) -> None:
    for kind, why in (("replay", "the noise is seeded"), ("silos", "differential privacy is off")):
        text = sentence(made[kind])
        assert f"NON-PRIVATE: {why}" in text
        assert "nothing is claimed" in text
        assert "epsilon" not in text


def test_budget_stop(made: dict[str, Path]) -> None:
    text = sentence(made["budget"])
    assert text.startswith("The privacy budget ended the run after 2 of 5 rounds; the held-out error fell")
    assert "claimed for all 5 planned rounds is epsilon 11.5" in text


def test_two_participants_are_warned_of_in_the_sentence_and_the_report(own: Own) -> None:
    folder = own("private")
    assert "WARNING" not in sentence(folder)
    edit(folder / "manifest.json", lambda tree: tree["plan"].update(two_party=True))
    assert "WARNING: with two participants" in sentence(folder)
    assert "WARNING: with two participants" in write_report(folder).read_text()


def test_a_worse_model_is_called_worse(made: dict[str, Path]) -> None:
    text = sentence(made["burnt"])
    assert "After all 5 rounds (1 burnt), the held-out error rose from 1.02 at the start to 1.55, WORSE" in text


def test_higher_is_better_for_r2(made: dict[str, Path]) -> None:
    text = sentence(made["silos"])
    assert "state-probe R2 rose from 0.550 at the warm start to 0.830 (0.280 higher; training alone 0.710" in text
    assert "WORSE" not in text


def test_no_round_yet(made: dict[str, Path]) -> None:
    text = sentence(made["empty"])
    assert text.startswith(
        "No round is finished (the run is under way or was interrupted); the model is the warm start"
    )


def test_failed_and_interrupted(own: Own) -> None:
    folder = own("burnt")
    edit(folder / "manifest.json", lambda m: m.update(status="SECURE_AGGREGATION"))
    assert sentence(folder).startswith("The run failed with [SECURE_AGGREGATION] after 5 of 5 rounds (1 burnt); the")
    edit(folder / "manifest.json", lambda m: m.update(status="running"))
    (folder / "rounds.jsonl").write_text((folder / "rounds.jsonl").read_text().splitlines(keepends=True)[0])
    assert sentence(folder).startswith("After 1 of 5 rounds (the run is under way or was interrupted), the held-out")


def test_without_start_or_metrics(own: Own) -> None:
    folder = own("replay")
    (folder / "evaluation.json").unlink()
    assert "the held-out error is 0.210 (that of the start is not stored)" in sentence(folder)
    edit(folder / "rounds.jsonl", lambda rs: [r.update(metrics={}) for r in rs])
    assert sentence(folder).startswith("After all 3 rounds; NON-PRIVATE")
    assert comparison(load_run(folder))[0] == []


def test_a_diverged_model_is_said_so(own: Own) -> None:
    folder = own("replay")
    edit(folder / "rounds.jsonl", lambda rs: rs[-1]["metrics"].update(heldout_error=None))
    assert "no longer finite (the model diverged)" in sentence(folder)


def test_an_unknown_metric_is_told_without_judgement(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ["experiment=linear"], [{"zeal": 1.0}, {"zeal": 2.0}], headline="zeal")
    text = sentence(folder)
    assert "the zeal rose from 1.00 at the start to 2.00 (100 % higher)" in text
    assert "WORSE" not in text


def test_the_headline_comes_first(made: dict[str, Path], own: Own) -> None:
    run = load_run(made["silos"])
    assert [m.name for m in metrics_of(run)] == ["state_probe_r2", "r5"]
    folder = own("silos")
    edit(folder / "evaluation.json", lambda e: e.pop("headline"))
    chief = primary(load_run(folder))
    assert chief is not None
    assert chief.name == "r5"


def test_rounds_rows(made: dict[str, Path]) -> None:
    head, rows = rounds_rows(load_run(made["private"]))
    assert head[0] == "round"
    assert len(rows) == 11
    assert [cell for cell in rows[0] if cell] == ["start", "0.593", "0.152"]
    assert rows[-1][:6] == ["9", "committed", "64/64", "0.281", "0.118", "8.00"]
    assert rows[-3][-1] == "attempt 2"
    burnt = "\n".join(" ".join(row) for row in rounds_rows(load_run(made["burnt"]))[1])
    assert "burnt" in burnt
    assert "Only 4 of 6 needed shares arrived." in burnt
    assert "replayed at resume" in burnt
    assert "infinite infinite" in " ".join(rounds_rows(load_run(made["replay"]))[1][-1])
    assert not load_run(made["empty"]).rounds


def test_comparison(made: dict[str, Path]) -> None:
    rows = comparison(load_run(made["private"]))[1]
    assert [row.name for row in rows] == [
        "warm start",
        "this run",
        "local only",
        "pooled",
        "noise only",
        "public data only",
    ]
    assert "29 % lower" in rows[2].against_start
    assert "5.1 % higher" in rows[4].against_start


def test_a_stored_warm_start_row_is_not_shown_twice(own: Own) -> None:
    folder = own("private")
    rows = [{"name": "Warm start", "metrics": {"r5": 0.6, "other": 3.0}, "note": None}]
    (folder / "baselines.json").write_text(json.dumps({"rows": rows}))
    starts = [row for row in comparison(load_run(folder))[1] if row.name.lower() == "warm start"]
    assert len(starts) == 1
    assert f"{starts[0].metrics['r5']:.3f}" == "0.593"  # the run's own figure wins


def test_terminal_text_is_harmless(own: Own) -> None:
    folder = own("burnt")
    edit(folder / "rounds.jsonl", lambda rs: rs[2].update(cause="\x1b[2J\u202eevil\r\nround 9 committed"))
    remark = rounds_rows(load_run(folder))[1][3][-1]
    assert "evil" in remark
    assert not {"\x1b", "\u202e", "\r", "\n"} & set(remark)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Local only", "local"),
        ("local-only, best", "local"),
        ("training alone", "local"),
        ("pooled", "pooled"),
        ("pooled at equal steps", "pooled"),
        ("Warm start", "start"),
        ("eps 4", "other"),
        ("random init", "other"),
    ],
)
def test_kinds_of_baselines(name: str, kind: str) -> None:
    assert baseline_kind(name) == kind


def test_metrics_of_other_environments() -> None:
    assert describe("r5_nominal").label == describe("nominal/r5").label == "5-step prediction error (nominal)"
    assert describe("r5_nominal").lower_is_better is True
    assert describe("a_r2").lower_is_better is False
    assert describe("what\x00ever").lower_is_better is None
    assert [m.name for m in ordered(["zeal", "r5_nominal", "r1", "r5"])] == ["r5", "r1", "zeal", "r5_nominal"]


# ------------------------------------------------------------------------------------------------ wording


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_printed_epsilon_never_promises_more(value: float) -> None:
    shown = float(wording.epsilon(value).replace(",", ""))
    assert shown >= value * (1 - 1e-6) - 1e-6
    assert shown <= value * 1.02 + 0.01


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (8.0, "8.00"),
        (8.0 + 1e-10, "8.00"),
        (8.001, "8.01"),
        (11.41, "11.5"),
        (120.2, "121"),
        (math.inf, "infinite (no guarantee)"),
        (math.nan, "infinite (no guarantee)"),
    ],
)
def test_epsilon(value: float, shown: str) -> None:
    assert wording.epsilon(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.2814, "0.281"), (9.996, "10.0"), (0.99999, "1.00"), (1234.5, "1,234"), (2e-5, "2.00e-5"), (0, "0.000")],
)
def test_figures(value: float, shown: str) -> None:
    assert wording.figure(value) == shown


def test_missing_figures() -> None:
    assert wording.figure(None) == "-"
    assert wording.figure(math.nan) == wording.figure(math.inf) == "not finite"


def test_units() -> None:
    assert wording.data_size(999) == "999 B"
    assert wording.data_size(3_412_000) == "3.41 MB"
    assert wording.duration(0.421) == "0.42 s"
    assert wording.duration(4000) == "67 min"
    assert wording.delta(1e-5) == "1e-5"
    assert wording.delta(0.05) == "0.05"
    assert wording.change(0.5, 0.5) == "unchanged"
    assert wording.change(0.0, 1.0) == ""


@given(st.text())
def test_clean_text_has_one_line_and_no_controls(text: str) -> None:
    shown = wording.clean(text)
    assert len(shown) == len(text)
    assert shown.isprintable()


def test_a_task_names_its_own_metrics(own: Own) -> None:
    folder = own("private")
    path = folder / "evaluation.json"
    tree = json.loads(path.read_text())
    tree["labels"] = {
        "r1": {"label": "the first\u202e\x1b[2J", "unit": "", "lower_is_better": False},
        "r5": {"label": "the fifth", "unit": "m", "lower_is_better": True},
    }
    path.write_text(json.dumps(tree))
    run = load_run(folder)
    chief = primary(run)
    assert chief is not None
    assert (chief.name, chief.label, chief.unit) == ("r5", "the fifth", "m")
    first, second = ordered(["r5", "r1", "state_probe_r2"], run.labels)[:2]
    assert (first.name, second.name) == ("r1", "r5")  # as the task lists them
    assert "\x1b" not in first.label
    assert "\u202e" not in first.label
    assert first.change(0.05, 0.7) == "0.650 higher"
