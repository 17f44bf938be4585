"""A sweep's table, CSV and page, from folders as runs leave them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.reporting.sweep import (
    Spread,
    csv_text,
    group_cells,
    load_sweep,
    short_keys,
    table_text,
    write_sweep,
)
from lensemble_flwr.reporting.sweep_page import render
from lensemble_flwr.reporting.sweep_plots import numeric_keys, sweep_plots
from lensemble_flwr.sweep import Point, Sweep, expand, open_sweep
from tests.reporting.runs import make_run

LINEAR = ("experiment=linear", "diloco.rounds=1")


def make_sweep(folder: Path, *overrides: str) -> Sweep:
    sweep = expand([*LINEAR, *overrides])
    open_sweep(sweep, folder)
    return sweep


def finish(folder: Path, point: Point, before: float, after: float, status: int = 0, epsilon: float = 4.5) -> None:
    """A point with one round."""
    run = make_run(
        folder / point.id,
        point.overrides,
        [{"heldout_error": before}, {"heldout_error": after}],
        sigma=float(point.values.get("privacy.noise_multiplier") or 1.5),  # type: ignore[arg-type]
        dimension=16,
        headline="heldout_error",
        status="completed" if status == 0 else "BUDGET",
        facts={0: {"epsilon_central": epsilon, "epsilon_local": 1.5 * epsilon, "bytes_up": 4000, "bytes_down": 6000}},
    )
    (run / "report.html").touch()
    end(folder, point, status)


def end(folder: Path, point: Point, status: int, detail: str = "") -> None:
    (folder / f"{point.id}.json").write_text(json.dumps({"exit_status": status, "seconds": 31.25, "detail": detail}))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two sigmas by three seeds: one budget spent, one failed, one damaged, one not started."""
    sweep = make_sweep(tmp_path, "privacy.noise_multiplier=0.5,2", "seed=0,1,2")
    a, b, c, d, e, _ = sweep.points
    finish(tmp_path, a, 2.0, 1.0, epsilon=4.5)
    finish(tmp_path, b, 3.0, 1.25, epsilon=4.25)
    end(tmp_path, c, 1, "[ROUND] It broke, <b>twice</b>.")
    finish(tmp_path, d, 2.5, 2.0, status=3, epsilon=1.75)
    finish(tmp_path, e, 2.5, 2.0)
    (tmp_path / e.id / "rounds.jsonl").write_text('{"schema_version": 7}\n')
    return tmp_path


GOLDEN = """\
privacy.noise_multiplier,seed,sigma,epsilon_central,epsilon_local,delta,claim_grade,rounds_committed,rounds_burnt,\
rounds_planned,ended,exit_status,heldout_error_before,heldout_error_after,bytes_up,bytes_down,seconds,folder,error
0.5,0,0.5,4.5,6.75,1e-05,yes,1,0,1,completed,0,2.0,1.0,4000,6000,31.25,ID0,
0.5,1,0.5,4.25,6.375,1e-05,yes,1,0,1,completed,0,3.0,1.25,4000,6000,31.25,ID1,
0.5,2,,,,,,,,,failed,1,,,,,31.25,ID2,"[ROUND] It broke, <b>twice</b>."
2.0,0,2.0,1.75,2.625,1e-05,yes,1,0,1,budget spent,3,2.5,2.0,4000,6000,31.25,ID3,
2.0,1,,,,,,,,,failed,1,,,,,31.25,ID4,DAMAGED
2.0,2,,,,,,,,,not started,,,,,,,ID5,
"""


def test_csv(mixed: Path) -> None:
    data = load_sweep(mixed)
    text = re.sub(r"\[ARTIFACT\][^\n]*", "DAMAGED", csv_text(data))
    for number, row in enumerate(data.rows):
        text = text.replace(row.point.id, f"ID{number}")
    assert text == GOLDEN


def test_table(mixed: Path) -> None:
    text = table_text(load_sweep(mixed))
    assert text.isascii()
    head, _, first, second, *rest = text.splitlines()
    assert head.split()[:3] == ["noise_multiplier", "eps", "central"]
    # Epsilon is the largest of the seeds; what failed is in no mean.
    assert re.split(r" {2,}", first.strip()) == [
        *("0.5", "4.50", "6.75", "2.50 [2.00, 3.00]", "1.12 [1.00, 1.25]"),
        *("1", "10.0 kB", "31.2 s", "2 completed, 1 failed"),
    ]
    assert re.split(r" {2,}", second.strip()) == [
        *("2", "1.75", "2.63", "2.50", "2.00", "1", "10.0 kB", "31.2 s"),
        "1 failed, 1 budget spent, 1 not started",
    ]
    assert any("seed=2 failed: [ROUND] It broke" in line for line in rest)
    assert any("seed=1 failed: [ARTIFACT]" in line for line in rest)


def test_a_run_that_its_budget_cut_short_is_marked(tmp_path: Path) -> None:
    sweep = expand(["experiment=linear", "diloco.rounds=3", "privacy.noise_multiplier=0.5,2"])
    open_sweep(sweep, tmp_path)
    finish(tmp_path, sweep.points[0], 2.0, 1.5, status=3)
    finish(tmp_path, sweep.points[1], 2.0, 1.0)
    _, _, short, whole, note = table_text(load_sweep(tmp_path)).splitlines()
    assert "1 of 3" in re.split(r" {2,}", short)
    assert "1 of 3" not in whole
    assert "budget ended" in note


def test_page_tells_what_failed_and_loads_nothing(mixed: Path) -> None:
    data, (_, page) = write_sweep(mixed)
    text = page.read_text()
    assert text == render(data) == render(load_sweep(mixed))
    assert "3 of 6 points have no result" in text
    assert "It broke, &lt;b&gt;twice&lt;/b&gt;." in text
    assert "1 not started" in text
    assert not re.search(r"<(script|link|img|iframe|object)|src=|@import", text)
    links = re.findall(r'href="([^#"]*)"', text)
    assert links
    assert all((mixed / link).is_file() for link in links)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_non_private_points_are_said_to_be(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "privacy=central,disabled")
    for point in sweep.points:
        finish(tmp_path, point, 2.0, 1.0)
    data = load_sweep(tmp_path)
    assert "NON-PRIVATE RUNS" in render(data)
    assert [row.epsilon("central") for row in data.rows] == [4.5, math.inf]
    assert csv_text(data).splitlines()[2].startswith("disabled,0.0,inf,inf,")


# -------------------------------------------------------------------------------------------------------- plots


def drawn(tmp_path: Path, *overrides: str) -> list[str]:
    sweep = make_sweep(tmp_path, *overrides)
    for number, point in enumerate(sweep.points):
        sigma = float(point.values.get("privacy.noise_multiplier") or 1.0)  # type: ignore[arg-type]
        finish(tmp_path, point, 2.0, 1.0 + 0.01 * number, epsilon=8.0 / sigma)
    return [plot.name for plot in sweep_plots(load_sweep(tmp_path))]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["privacy.noise_multiplier=0.5,2", "seed=0,1"], ["sweep-frontier", "sweep-privacy-noise-multiplier"]),
        (["privacy.target_epsilon=2,8"], ["sweep-frontier", "sweep-privacy-target-epsilon"]),
        (["diloco.inner_steps=5,10,200", "inner.lr=0.1,0.2"], ["sweep-diloco-inner-steps", "sweep-inner-lr"]),
        (["diloco.inner_steps=1,2", "privacy.accept_noise=true,false"], ["sweep-diloco-inner-steps"]),
        (["seed=0,1"], []),
        (["privacy.on_exhausted=stop,leave"], []),
        (["privacy.noise_multiplier=null,1"], ["sweep-frontier"]),
    ],
)
def test_one_plot_for_each_swept_number(overrides: list[str], names: list[str], tmp_path: Path) -> None:
    found = [re.sub(r"-[0-9a-f]{3,}$", "", name) for name in drawn(tmp_path, *overrides)]
    assert found == names


def test_marks_are_the_means_and_ranges_of_the_finished_points(mixed: Path) -> None:
    from lensemble_flwr.reporting.sweep_plots import _series

    data = load_sweep(mixed)
    key = "privacy.noise_multiplier"
    (series,) = _series(data, [key], lambda group: float(str(group.values[key])), data.metrics[0])
    assert series.name == ""
    assert [(m.x, m.y) for m in series.marks] == [
        (0.5, Spread(1.125, 1.0, 1.25, 2)),
        (2.0, Spread(2.0, 2.0, 2.0, 1)),
    ]


def test_many_combinations_are_said_to_be_left_out(tmp_path: Path) -> None:
    drawn(tmp_path, "diloco.inner_steps=1,2", "inner.lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7")
    data = load_sweep(tmp_path)
    captions = {plot.title: plot.caption for plot in sweep_plots(data)}
    assert "The first 6 of 7 combinations" in captions["Held-out error by inner steps"]
    assert "first" not in captions["Held-out error by lr"]
    assert numeric_keys(data) == ["diloco.inner_steps", "inner.lr"]
    assert len(group_cells(data)[1]) == 14


def test_points_without_a_result_are_marked_where_they_belong(mixed: Path) -> None:
    for number, plot in enumerate(sweep_plots(load_sweep(mixed))):
        told = "Red crosses on the axis: 3 points without a result (1 at 0.5 and 2 at 2)." in plot.caption
        assert told == (number == 1), plot.title


def test_points_that_failed_alike_are_told_together(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, "diloco.inner_steps=1,2,3")
    for point in sweep.points[1:]:
        end(tmp_path, point, 1, "[ROUND] It broke.")
    finish(tmp_path, sweep.points[0], 2.0, 1.0)
    text = render(load_sweep(tmp_path))
    assert text.count("It broke.") == 1
    assert "diloco.inner_steps=2; diloco.inner_steps=3" in text


# -------------------------------------------------------------------------------------------------------- parts


def test_spread() -> None:
    assert Spread.of([1.0, math.nan, 3.0, math.inf]) == Spread(2.0, 1.0, 3.0, 2)
    assert Spread.of([1.0, 3.0]).text() == "2.00 [1.00, 3.00]"
    assert Spread.of([2.0, 2.0001]).text() == "2.00"
    assert Spread.of([]).text() == "-"


def test_short_keys_stay_different() -> None:
    assert short_keys(["inner.lr", "seed", "a.b.c"]) == ["lr", "seed", "c"]
    assert short_keys(["inner.lr", "outer.lr"]) == ["inner.lr", "outer.lr"]


def test_no_sweep_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sweep in"):
        write_sweep(tmp_path)
