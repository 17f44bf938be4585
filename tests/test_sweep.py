"""Sweeps: the grid, what is checked before anything starts, what is run, continued, or left alone, and how it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr import cli, sweep, sweep_cli
from lensemble_flwr.config import config_hash, load_config
from lensemble_flwr.errors import ArtifactError, ConfigError
from lensemble_flwr.sweep import MOST_POINTS, Outcome, Point, Sweep, expand, outcome_of, run_points

ROOT = Path(__file__).resolve().parents[1]
LINEAR = "experiment=linear"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LENSEMBLE_DEBUG", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


# ------------------------------------------------------------------------------------------------- the grid


def test_the_grid_is_hydras() -> None:
    found = expand([LINEAR, "privacy.noise_multiplier=0.5,1", "diloco.inner_steps=5,10", "seed=range(0,3)"])
    assert found.keys == ("privacy.noise_multiplier", "diloco.inner_steps", "seed")
    values = [tuple(point.values.values()) for point in found.points]
    assert values == list(itertools.product((0.5, 1.0), (5, 10), (0, 1, 2)))
    assert found.points[1].overrides == (
        LINEAR,
        "privacy.noise_multiplier=0.5",
        "diloco.inner_steps=5",
        "seed=1",
    )
    assert found.points[1].label == "privacy.noise_multiplier=0.5 diloco.inner_steps=5 seed=1"


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("seed=choice(4,2)", [4, 2]),
        ("seed=sort(3,1,2)", [1, 2, 3]),
        ("inner.lr=range(0.5,2,0.5)", [0.5, 1.0, 1.5]),
        ("privacy.noise_multiplier=null,1", [None, 1.0]),
        ("privacy.on_exhausted=stop,leave", ["stop", "leave"]),
        ("privacy.accept_noise=true,false", [True, False]),
        ("privacy=central,local", ["central", "local"]),
        ("privacy.claim=[model_reader],[model_reader,peers]", ["[model_reader]", "[model_reader,peers]"]),
    ],
)
def test_values_of_a_sweep(override: str, values: list[Any]) -> None:
    found = expand([LINEAR, override])
    assert [point.values[found.keys[0]] for point in found.points] == values


@settings(max_examples=8, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=3, unique=True),
    steps=st.lists(st.integers(1, 10**6), min_size=2, max_size=3, unique=True),
)
def test_every_point_is_the_configuration_that_its_values_say(seeds: list[int], steps: list[int]) -> None:
    found = expand([LINEAR, f"seed={','.join(map(str, seeds))}", f"diloco.inner_steps={','.join(map(str, steps))}"])
    assert len({point.id for point in found.points}) == len(found.points) == len(seeds) * len(steps)
    for point, (seed, step) in zip(found.points, itertools.product(seeds, steps), strict=True):
        config = load_config(point.overrides)
        assert (config.seed, config.diloco.inner_steps) == (seed, step)
        assert point.id == "p" + config_hash(config).hex()[:12]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["privacy.claim=[model_reader,peers]"], "No key is swept"),
        ([], "No key is swept"),
        (["seed=0,0"], "the same run"),
        (["inner.lr=1,1.0"], "the same run"),
        (["seed=1,2", "seed=3"], "given 2 times"),
        (["seed=range(0,3,0)"], "cannot be listed"),
        (["inner.lr=range(0.0,1.0,0.0)"], "cannot be listed"),
        (["inner.lr=range(0.0,nan,1)"], "cannot be listed"),
        (["inner.lr=range(1,inf,1)"], f"more than {MOST_POINTS} points"),
        (["seed=range(0,10000000000000)"], f"more than {MOST_POINTS} points"),
        (["seed=range(0,100)", "diloco.inner_steps=range(1,100)"], f"more than {MOST_POINTS} points"),
        (["seed=range(3,0)"], "no value"),
        (["inner.lr=interval(0.1,1)"], "no list of values"),
        (["model=glob(*)"], "no list of values"),
        (["seed=shuffle(1,2)"], "random order"),
        (["output_dir=a,b"], "output_dir cannot be given"),
        (["seed=0,1", "output_dir=a"], "output_dir cannot be given"),
        (["seed=0,1", "federation.sites_dir=/x"], "fresh sites"),
        (["seed=0,-1"], "Point 2 of 2 (seed=-1) is impossible: seed must be >= 0"),
        (["seed=0,1", "diloco.rouns=3,4"], "Point 1 of 4 (seed=0 diloco.rouns=3) is impossible: Unknown key"),
        (["hydra.run.dir=/x,/y"], "adds, removes or reconfigures"),
        (["+x=1,2"], "adds, removes or reconfigures"),
        (["seed=0,1", "~privacy"], "is impossible"),
        (["'hydra.run.dir'=/x,/y"], "cannot be read"),
        (["task='${oc.env:HOME}',linear"], "interpolation"),
        (["seed=0,1", "data.name='${oc.env:HOME}'"], "interpolation"),
        (["seed=1,"], "cannot be read"),
        (["seed=[1,2"], "cannot be read"),
        (["seed=\x00,1"], "cannot be read"),
        (["seed"], "cannot be read"),
        ([""], "cannot be read"),
        (["=1,2"], "Unknown key ''"),
        (["@seed=1,2"], "Unknown key '@seed'"),
    ],
)
def test_hostile_and_mistaken_grids(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand([LINEAR, *overrides])
    assert told in str(caught.value)


# ---------------------------------------------------------------------------------------- before anything starts


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been started."""
    calls: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: calls.append(a) or pytest.fail("started"))
    return calls


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["seed=0,1", "federation.min_participants=3,9"], "Point 2 of 4 (seed=0 federation.min_participants=9)"),
        # Well formed, and yet not to be met: 16 bits are too coarse for that little noise.
        (["privacy.noise_multiplier=1,1e-5", "secagg.ring_bits=16"], "Point 2 of 2 (privacy.noise_multiplier=1e-05)"),
        (["seed=0,1", "--jobs", "0"], "--jobs 0"),
        (["seed=0,1", "--name", "../x"], "no plain name"),
        (["seed=0,1", "--report", "x"], "--report takes no overrides"),
        (["--report", "absent"], "no sweep in"),
    ],
)
def test_a_bad_point_is_named_and_nothing_is_started(
    arguments: list[str], told: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "absent" in arguments else [LINEAR]
    assert cli.main(["sweep", *given, *arguments]) == 2
    assert told in capsys.readouterr().err
    assert started == []
    assert not Path("outputs").exists()


def test_a_folder_takes_more_points_of_its_sweep_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    small, large = expand([LINEAR, "seed=0,1"]), expand([LINEAR, "seed=0,1,2"])
    sweep.open_sweep(small, folder)
    sweep.open_sweep(large, folder)
    assert sweep.read_sweep(folder) == large
    with pytest.raises(ConfigError, match="another sweep"):
        sweep.open_sweep(small, folder)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        sweep.open_sweep(small, tmp_path / "t")
    assert small.default_name == expand(["seed=1,0", LINEAR]).default_name != large.default_name


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with (
        sweep.locked(tmp_path / "s"),
        pytest.raises(ConfigError, match="Another sweep is working"),
        sweep.locked(tmp_path / "s"),
    ):
        pass


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"points": [{"id": "../../x", "overrides": [], "values": {"seed": 0}}]},
        {"points": [{"id": "p" + "0" * 12, "overrides": [], "values": {}}]},
        {"points": [{"id": "p" + "0" * 12, "overrides": [], "values": {"seed": [1]}}]},
        {"points": 3},
        {"keys": None},
    ],
)
def test_a_damaged_sweep(change: dict[str, Any], three: tuple[Path, Sweep]) -> None:
    folder, _ = three
    tree = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(tree | change))
    with pytest.raises(ArtifactError, match="cannot be used"):
        sweep.read_sweep(folder)
    (folder / "sweep.json").write_text("[")
    with pytest.raises(ArtifactError, match="cannot be used"):
        sweep.read_sweep(folder)


# ------------------------------------------------------------------------------------------------------ running


def ended(folder: Path, point: Point, status: int) -> None:
    (folder / f"{point.id}.json").write_text(json.dumps({"exit_status": status, "seconds": 2.0, "detail": ""}))


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, Sweep]:
    folder, found = tmp_path / "s", expand([LINEAR, "seed=0,1,2"])
    sweep.open_sweep(found, folder)
    return folder, found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Replaces the runs by Python code, with the point's seed as ``seed``; returns the ids that were started."""

    def replace(code: str) -> list[str]:
        seen: list[str] = []

        def command(folder: Path, point: Point) -> list[str]:
            seen.append(point.id)
            return [sys.executable, "-c", f"seed = {point.values['seed']}\n{code}"]

        monkeypatch.setattr(sweep, "command_of", command)
        return seen

    return replace


def test_finished_points_are_left_alone(three: tuple[Path, Sweep], fake: Callable[[str], list[str]]) -> None:
    folder, found = three
    ended(folder, found.points[0], 0)
    ended(folder, found.points[1], 3)
    seen = fake("print('done')")
    assert run_points(folder, found.points)
    assert seen == [found.points[2].id]
    assert (folder / f"{seen[0]}.log").read_text() == "done\n"
    assert run_points(folder, found.points)
    assert len(seen) == 1


def test_how_each_point_ended_is_kept(three: tuple[Path, Sweep], fake: Callable[[str], list[str]]) -> None:
    folder, found = three
    fake(
        "import sys, os, signal\n"
        "if seed == 0: print('x\\nThe federation failed: [ROUND] It broke.\\nlog: y', file=sys.stderr); sys.exit(1)\n"
        "if seed == 1: print('[BUDGET] Spent.'); sys.exit(3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    told: list[tuple[str, Outcome]] = []
    assert run_points(folder, found.points, on_end=lambda point, outcome: told.append((point.id, outcome)))
    outcomes = [outcome_of(folder, point) for point in found.points]
    assert told == list(zip((p.id for p in found.points), outcomes, strict=True))
    assert [(o.exit_status, o.detail) for o in outcomes if o] == [
        (1, "[ROUND] It broke."),
        (3, "[BUDGET] Spent."),
        (1, "Its process was ended by signal 9."),
    ]
    assert sweep.sweep_status(outcomes) == 1
    first = outcomes[0]
    assert first is not None
    # A failed point is tried again, and its seconds add up.
    seen = fake("pass")
    assert run_points(folder, found.points)
    assert seen == [found.points[0].id, found.points[2].id]
    again = outcome_of(folder, found.points[0])
    assert again is not None
    assert again.seconds is not None
    assert first.seconds is not None
    assert again.seconds > first.seconds
    assert sweep.sweep_status([outcome_of(folder, point) for point in found.points]) == 0


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [([0, 0], 0), ([0, 3], 0), ([3, 3], 0), ([0, 1], 1), ([2, 0], 1), ([130, 0], 1), ([0, None], 1)],
)
def test_status_of_a_sweep(outcomes: list[int | None], status: int) -> None:
    assert sweep.sweep_status([None if o is None else Outcome(o, 1.0) for o in outcomes]) == status


@pytest.mark.parametrize(
    ("status", "expected"), [("completed", 0), ("BUDGET", 3), ("running", 130), ("STOPPED", 130), ("ROUND", 1)]
)
def test_a_killed_sweep_reads_the_runs_own_manifest(
    status: str, expected: int, three: tuple[Path, Sweep], fake: Callable[[str], list[str]]
) -> None:
    folder, found = three
    point = found.points[0]
    assert outcome_of(folder, point) is None
    (folder / point.id).mkdir()
    (folder / point.id / "manifest.json").write_text(json.dumps({"status": status, "detail": "why"}))
    outcome = outcome_of(folder, point)
    assert outcome is not None
    assert (outcome.exit_status, outcome.seconds) == (expected, None)
    assert sweep.is_finished(folder, point) == (expected in (0, 3))


def test_command_starts_anew_or_continues(three: tuple[Path, Sweep]) -> None:
    folder, found = three
    point = found.points[1]
    for name in ("checkpoints", "state"):  # left by a run that was killed before it had a name
        (folder / point.id / name).mkdir(parents=True)
    command = sweep.command_of(folder, point)
    assert command[command.index("run") :] == ["run", LINEAR, "seed=1", f"output_dir={point.id}"]
    assert load_config(command[command.index("run") + 1 :]).output_dir == point.id
    assert list((folder / point.id).iterdir()) == []
    (folder / point.id / "federation.json").touch()
    command = sweep.command_of(folder, point)
    assert command[command.index("run") :] == ["run", "--resume", point.id]


def test_the_command_is_this_packages_own(three: tuple[Path, Sweep]) -> None:
    command = sweep.command_of(*((three[0], three[1].points[0])))
    help_text = subprocess.run([*command[:-3], "--help"], capture_output=True, text=True, cwd="/", check=True).stdout
    assert help_text.startswith("usage: lensemble run")


def test_jobs_run_at_the_same_time(three: tuple[Path, Sweep], fake: Callable[[str], list[str]]) -> None:
    folder, found = three
    # Each of the first two waits for the other's file.
    fake(
        "import pathlib, sys, time\n"
        "pathlib.Path(f'flag-{seed}').touch()\n"
        "end = time.monotonic() + 20\n"
        "other = pathlib.Path(f'flag-{1 - seed}')\n"
        "while seed < 2 and not other.exists() and time.monotonic() < end: time.sleep(0.02)\n"
        "sys.exit(time.monotonic() >= end)\n"
    )
    running, most = 0, 0

    def start(point: Point) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)

    def end(point: Point, outcome: Outcome) -> None:
        nonlocal running
        running -= 1

    assert run_points(folder, found.points, jobs=2, on_start=start, on_end=end)
    assert most == 2
    assert sweep.sweep_status([outcome_of(folder, point) for point in found.points]) == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Started in the background of a script, a process ignores SIGINT, and so, rightly, would the sweep."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_in_order(three: tuple[Path, Sweep], fake: Callable[[str], list[str]]) -> None:
    folder, found = three
    seen = fake(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *a: sys.exit(130))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    sent = []

    def tick() -> None:
        if (folder / "ready").exists() and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    before = signal.getsignal(signal.SIGINT)
    assert not run_points(folder, found.points, on_tick=tick)
    assert time.monotonic() - began < 55  # the point would sleep for 60
    assert signal.getsignal(signal.SIGINT) is before
    assert seen == [found.points[0].id]
    outcome = outcome_of(folder, found.points[0])
    assert outcome is not None
    assert (outcome.exit_status, outcome.detail) == (130, "")
    assert not sweep.is_finished(folder, found.points[0])


def test_kill_9_of_the_sweep_ends_its_runs(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lensemble_flwr import sweep\n"
        "child = 'import os, time, pathlib; pathlib.Path(\"pid\").write_text(str(os.getpid())); time.sleep(120)'\n"
        "sweep.command_of = lambda folder, point: [sys.executable, '-c', child]\n"
        "sweep.run_points(Path('.'), [sweep.Point('p0', (), {})])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the run outlived its sweep")


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_runs_reports_and_goes_on(
    fake: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[int] = []
    monkeypatch.setattr(sweep_cli, "estimated_seconds", lambda config, progress: timed.append(config.seed) or 30.0)
    seen = fake("import sys\nif seed == 1: print('[LAUNCH] No.'); sys.exit(1)")
    arguments = ["sweep", LINEAR, "seed=0,1", "--name", "mine"]
    assert cli.main(arguments) == 1
    folder = Path("outputs/sweeps/mine").absolute()
    said = capsys.readouterr()
    assert timed == [0]  # seeds cost alike
    assert "2 points; about 60.0 s left" in said.out
    assert "[2/2] seed=1 failed" in said.out
    assert "seed=1 failed: [LAUNCH] No." in said.out
    assert "2 points over seed: 1 completed, 1 failed." in said.out
    assert "To try those again: lensemble sweep experiment=linear seed=0,1 --name mine" in said.err
    assert (folder / "sweep.csv").read_text().count("\n") == 3
    assert "[LAUNCH] No." in (folder / "sweep.html").read_text()

    fake("pass")
    assert cli.main(arguments) == 0
    assert "1 are finished already" in capsys.readouterr().out
    assert len(seen) == 2
    (folder / "sweep.csv").unlink()
    assert cli.main(["sweep", "--report", str(folder)]) == 0
    assert (folder / "sweep.csv").exists()


def test_points_whose_budget_ends_early_are_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_cli, "estimated_seconds", lambda config, progress: 30.0)
    monkeypatch.setattr(sweep_cli, "run_points", lambda *a, **k: False)
    cli.main(["sweep", LINEAR, "diloco.rounds=12", "privacy.noise_multiplier=0.1,1,9"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert "noise_multiplier=0.1: the budget allows 0 of 12 rounds; its run will train nothing." in warnings[0]
    assert "noise_multiplier=1: the budget allows 2 of 12 rounds; its run will stop there." in warnings[1]
    assert len(warnings) == 2


def test_errors_of_runs_do_not_act_on_the_terminal(
    fake: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_cli, "estimated_seconds", lambda config, progress: 30.0)
    fake("import sys; print('[LAUNCH] \\x1b[2Jno'); sys.exit(1)")
    assert cli.main(["sweep", LINEAR, "seed=0,1"]) == 1
    said = capsys.readouterr().out
    assert "[LAUNCH]" in said
    assert "\x1b" not in said


def test_a_stopped_sweep_says_how_to_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep_cli, "estimated_seconds", lambda config, progress: 30.0)
    monkeypatch.setattr(sweep_cli, "run_points", lambda *a, **k: False)
    assert cli.main(["sweep", LINEAR, "seed=0,1"]) == 130
    said = capsys.readouterr()
    assert "2 not started" in said.out
    assert "To go on: lensemble sweep experiment=linear seed=0,1" in said.err


def test_the_clock_learns_from_whole_runs() -> None:
    points = [Point(f"p{i}", (), {}) for i in range(4)]
    clock = sweep_cli.Clock({p.id: 100.0 for p in points}, jobs=2)
    assert clock.left() == "about 3 min left"
    clock.ended(points[0], Outcome(1, 1.0), 1.0)
    assert clock.left() == "about 2 min left"
    clock.ended(points[1], Outcome(0, 10.0), 10.0)
    assert clock.left() == "about 10.0 s left"
    for point in points[2:]:
        clock.ended(point, Outcome(3, 10.0), 10.0)
    assert clock.left() == "nothing left to run"


def test_estimate_of_a_real_run() -> None:
    from lensemble_flwr.preflight import estimated_seconds

    short, long = (estimated_seconds(load_config([LINEAR, f"diloco.rounds={n}"])) for n in (1, 100))
    assert 10 < short < long < 600


# -------------------------------------------------------------------------------------------------- the real thing


@pytest.mark.runtime
def test_two_federations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import csv

    arguments = ["sweep", LINEAR, "diloco.rounds=1", "privacy.noise_multiplier=1,3", "--name", "real"]
    assert cli.main(arguments) == 0
    folder = Path("outputs/sweeps/real").absolute()
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [row["exit_status"] for row in rows] == ["0", "0"]
    assert [float(row["sigma"]) for row in rows] == [1.0, 3.0]
    assert float(rows[0]["epsilon_central"]) > float(rows[1]["epsilon_central"]) > 0
    assert all(float(row["heldout_error_after"]) > 0 and int(row["bytes_up"]) > 0 for row in rows)
    assert all((folder / row["folder"] / "report.html").is_file() for row in rows)
    # Each point has sites of its own, below the home folder.
    manifests = [json.loads((folder / row["folder"] / "manifest.json").read_text()) for row in rows]
    sites = {manifest["sites_dir"] for manifest in manifests}
    assert len(sites) == 2
    assert all(Path(site).is_relative_to(tmp_path / "home" / "sites") for site in sites)
    assert "sweep-frontier" in (folder / "sweep.html").read_text()
    capsys.readouterr()
    assert cli.main(arguments) == 0
    assert "2 are finished already; nothing left to run" in capsys.readouterr().out
