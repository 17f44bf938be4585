"""The command: what it prints, where it writes, and its exit status."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lensemble_flwr import cli, launch
from lensemble_flwr.config import load_config, split_overrides
from lensemble_flwr.errors import ConfigError, LaunchError, PrivacyBudgetExceeded
from lensemble_flwr.federation.manifest import git_revision
from lensemble_flwr.launch import RunResult

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LENSEMBLE_DEBUG", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def federation(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Replaces everything that `run` starts; returns the calls."""

    def replace(
        result: RunResult, lines: tuple[str, ...] = (), failure: Exception | None = None
    ) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_federation(app: Path, overrides: str, **options: Any) -> RunResult:
            calls.append({"app": app, "overrides": overrides, **options})
            for line in lines:
                options["on_line"](line)
            options["on_tick"]()
            if failure is not None:
                raise failure
            return result

        monkeypatch.setattr(launch, "run_federation", run_federation)
        monkeypatch.setattr(cli, "_print_preflight", lambda config, simulation: print("PREFLIGHT"))
        monkeypatch.setattr(cli, "_print_report", lambda folder: print(f"REPORT {folder}"))
        return calls

    return replace


DONE = RunResult("finished:completed", "", 0, 1)


# ------------------------------------------------------------------------------------------------- without work


def test_help_is_quick_and_names_only_what_is_there() -> None:
    code = "import sys, lensemble_flwr.cli as c\ntry:\n c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('HEAVY', [m for m in ('torch', 'numpy', 'flwr', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "HEAVY []" in done.stdout
    listed = [line.split()[0] for line in done.stdout.split("Commands:\n")[1].split("\n\n")[0].splitlines()]
    commands = ["run", "sweep", "preflight", "report", "data", "ledger", "status", "site", "coordinator"]
    assert listed == list(cli.COMMANDS) == commands


@pytest.mark.parametrize("command", ["run", "sweep", "preflight", "report", "ledger"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nothing"], [], ["run", "--unknown"], ["report"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ConfigError("It is wrong.", "Change it."), 2, "[CONFIG] It is wrong.\nChange it.\n"),
        (PrivacyBudgetExceeded("Spent."), 3, "[BUDGET] Spent.\n"),
        (LaunchError("No.", "Do."), 1, "[LAUNCH] No.\nDo.\n"),
    ],
)
def test_known_errors(
    error: Exception, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "run", (fail, ""))
    assert cli.main(["run"]) == status
    assert capsys.readouterr().err == told
    monkeypatch.setenv("LENSEMBLE_DEBUG", "1")
    assert cli.main(["run"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_error_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise KeyError("inner")

    monkeypatch.setitem(cli.COMMANDS, "run", (fail, ""))
    assert cli.main(["run"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Traceback" not in told
    file = Path(told.rsplit(" ", 1)[1].strip())
    assert file.parent == tmp_path / "home" / "logs"
    assert "KeyError: 'inner'" in file.read_text()


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "run", (fail, ""))
    assert cli.main(["run"]) == 130


def test_ledger_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from lensemble_flwr.privacy import ledger_cli

    seen: list[list[str]] = []
    monkeypatch.setattr(ledger_cli, "ledger_command", lambda arguments: seen.append(arguments) or 7)
    assert cli.main(["ledger", "show", "there"]) == 7
    assert seen == [["show", "there"]]


# ---------------------------------------------------------------------------------------------------------- run


def test_run_composes_first_and_passes_an_absolute_folder(
    federation: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = federation(DONE, ("plain", 'INFO : LENSEMBLE|{"event": "end"}'))
    assert cli.main(["run", "experiment=linear", "--verbose", "output_dir=a b/c", "seed=3"]) == 0
    folder = Path("a b/c").absolute()
    (call,) = calls
    config = load_config(split_overrides(call["overrides"]))
    assert (config.experiment, config.seed, config.output_dir) == ("linear", 3, str(folder))
    assert call["num_supernodes"] == config.federation.participants
    assert (call["app"], call["resume"], call["superlink"]) == (ROOT, "", None)
    assert (folder / "flower.log").read_text() == 'plain\nINFO : LENSEMBLE|{"event": "end"}\n'
    out = capsys.readouterr().out
    assert out.index("PREFLIGHT") < out.index(f"Output: {folder}") < out.index("plain")


def test_default_folder_and_quiet_log(
    federation: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    federation(DONE, ("chatter",))
    assert cli.main(["run", "experiment=linear", "seed=5"]) == 0
    (folder,) = (Path.cwd() / "outputs").iterdir()
    assert folder.name.endswith("-linear-5")
    assert "chatter" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (RunResult("finished:failed", "[BUDGET] Round 3 was refused.", 3, 1), "[BUDGET] Round 3 was refused."),
        (RunResult("finished:failed", "[CONFIG] No.", 2, 1), "[CONFIG] No."),
        (RunResult("finished:failed", "boom", 1, 1), "boom"),
        (RunResult("interrupted", "Stopped by a signal.", 130, 1), "--resume"),
    ],
)
def test_exit_status_is_the_runs(
    result: RunResult,
    told: str,
    federation: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    federation(result)
    assert cli.main(["run", "experiment=linear"]) == result.exit_status
    assert told in capsys.readouterr().err


def test_report_is_written_when_a_round_was_finished(
    federation: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    federation(RunResult("finished:failed", "[BUDGET] x", 3, 1))
    Path("out").mkdir()
    assert cli.main(["run", "experiment=linear", "output_dir=out"]) == 3
    assert "REPORT" not in capsys.readouterr().out
    for file in ("federation.json", "rounds.jsonl"):
        Path("out", file).write_text(json.dumps({"overrides": ["experiment=linear"], "federation_id": "00" * 32}))
    assert cli.main(["run", "--resume", "out"]) == 3
    assert f"REPORT {Path('out').absolute()}" in capsys.readouterr().out


def test_nothing_is_started_or_made_for_bad_input(
    federation: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = federation(DONE)
    Path("full").mkdir()
    Path("full", "file").touch()
    Path("file").touch()
    for arguments, words in (
        (["experiment=linear", "dilocoo.rounds=3"], "diloco"),
        (["experiment=linear", "output_dir=full"], "not empty"),
        (["experiment=linear", "output_dir=file/below"], "file/below"),
        (["--resume", "full"], "no run"),
        (["--resume", "absent"], "no run"),
    ):
        assert cli.main(["run", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert calls == []
    assert not Path("outputs").exists()


def test_preflight_that_refuses_leaves_no_folder(
    federation: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: object, simulation: bool) -> None:
        raise ConfigError("The noise will drown the update.")

    calls = federation(DONE)
    monkeypatch.setattr(cli, "_print_preflight", refuse)
    assert cli.main(["run", "experiment=linear", "output_dir=out"]) == 2
    assert calls == []
    assert not Path("out").exists()


def test_a_superlink_that_does_not_answer_is_told_before_anything_is_made(
    federation: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = federation(DONE)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.lab]\naddress = "127.0.0.1:1"\ninsecure = true\n')
    assert cli.main(["run", "experiment=linear", "--superlink", "lab"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("[LAUNCH] The SuperLink at 127.0.0.1:1 does not answer: Connection refused.\n")
    assert cli.main(["run", "experiment=linear", "--superlink", "elsewhere"]) == 2
    assert "PREFLIGHT" not in shown.out
    assert calls == []
    assert not Path("outputs").exists()


def test_more_overrides_than_a_site_reads_are_refused_here(
    federation: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lensemble_flwr.deploy.superlink.check_superlink", lambda name: None)
    calls = federation(DONE)
    many = ["seed=1"] * 300
    assert cli.main(["run", "experiment=linear", "--superlink", "lab", *many]) == 2
    assert "a site reads at most" in capsys.readouterr().err
    assert calls == []
    assert cli.main(["run", "experiment=linear", *many]) == 0  # here nobody else reads them


def test_two_commands_do_not_work_in_one_folder(
    federation: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = federation(DONE)
    Path("out").mkdir()
    with open("out/flower.log", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert cli.main(["run", "experiment=linear", "output_dir=out"]) == 2
        assert "Another lensemble run is working in" in capsys.readouterr().err
        assert calls == []
    assert cli.main(["run", "experiment=linear", "output_dir=out"]) == 0
    assert calls[0]["revision"] == git_revision(ROOT).replace("unknown", "")


def test_resume_uses_the_runs_own_overrides(
    federation: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = federation(DONE)
    Path("out").mkdir()
    overrides = ["experiment=linear", "seed=9", "federation.participants=5"]
    record = {"overrides": overrides, "federation_id": "00" * 32, "simulation": False}
    Path("out", "federation.json").write_text(json.dumps(record))
    assert cli.main(["run", "seed=1", "--resume", "out"]) == 2
    assert "leave the overrides out" in capsys.readouterr().err
    monkeypatch.setattr("lensemble_flwr.deploy.superlink.check_superlink", lambda name: None)
    assert cli.main(["run", "--resume", "out", "--superlink", "lab"]) == 0
    (call,) = calls
    assert split_overrides(call["overrides"]) == overrides
    assert (call["num_supernodes"], call["resume"], call["superlink"]) == (5, str(Path("out").absolute()), "lab")
    Path("out", "federation.json").write_text("{")
    assert cli.main(["run", "--resume", "out"]) == 1


@pytest.mark.parametrize("simulation", [True, False])
def test_a_run_goes_on_with_the_kind_of_sites_that_it_began_with(
    federation: Callable[..., list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    simulation: bool,
) -> None:
    calls = federation(DONE)
    Path("out").mkdir()
    record = {"overrides": ["experiment=linear"], "federation_id": "00" * 32, "simulation": simulation}
    Path("out", "federation.json").write_text(json.dumps(record))
    monkeypatch.setattr("lensemble_flwr.deploy.superlink.check_superlink", lambda name: None)
    right, wrong = [], ["--superlink", "lab"]
    if not simulation:
        right, wrong = wrong, right
    assert cli.main(["run", "--resume", "out", *wrong]) == 2
    told = capsys.readouterr().err
    assert "is one of simulated sites" in told if simulation else "is one of real sites" in told
    assert f"lensemble run {'' if simulation else '--superlink NAME '}--resume {Path('out').absolute()}" in told
    assert cli.main(["run", "experiment=linear", "output_dir=out"]) == 2  # a second run over the first
    assert f"{'' if simulation else '--superlink NAME '}--resume {Path('out').absolute()}" in capsys.readouterr().err
    assert not calls
    assert cli.main(["run", "--resume", "out", *right]) == 0


def test_failure_to_launch(federation: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    federation(DONE, failure=LaunchError("Flower's SuperLink ended at its start: x", "Do y."))
    assert cli.main(["run", "experiment=linear"]) == 1
    assert capsys.readouterr().err.startswith("[LAUNCH] Flower's SuperLink")


@pytest.mark.parametrize(
    "name", ["plain", "two words", "it's", "a=b,c", "back\\slash", "end\\", "a\\'b", "{x}", "ü", "(p) [q]", "$d"]
)
def test_folder_names_survive_the_override_grammar(name: str) -> None:
    config = load_config([f"output_dir={cli._hydra('/x/' + name)}"])
    assert config.output_dir == "/x/" + name


# ------------------------------------------------------------------------------------------------------ display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROUND = {
    "event": "round",
    "round": 0,
    "outcome": "committed",
    "participants": 4,
    "roster": 5,
    "epsilon_central": 1.23456,
    "epsilon_local": None,
    "bytes_up": 1_500_000,
    "bytes_down": 500_000,
    "seconds": 2.34,
    "metrics": {"error_5": 0.123456},
}


def show(display: cli.Display, *events: dict[str, Any]) -> None:
    for event in events:
        display.line(f"INFO :      LENSEMBLE|{json.dumps(event)}")


def test_one_row_a_round() -> None:
    out, log = io.StringIO(), io.StringIO()
    display = cli.Display(out, log, verbose=False)
    show(
        display,
        {"event": "progress", "what": "generating data", "done": 1, "total": 9},
        {"event": "progress", "what": "generating data", "done": 2, "total": 9},
        {"event": "start", "metrics": {"error_5": 0.5}},
        ROUND,
        {**ROUND, "round": 1, "outcome": "burnt", "seconds": None, "bytes_up": None},
        {"event": "never heard of"},
    )
    display.close()
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["starting Flower ...", "generating data ..."]
    head, start, first, second = (line.split() for line in lines[2:])
    assert head[0] == "round"
    assert start == ["start", "0.5"]
    assert first == ["0", "committed", "4/5", "1.235", "-", "2.00", "2.3", "s", "0.1235"]
    assert second == ["1", "burnt", "4/5", "1.235", "-", "-", "-", "0.1235"]
    assert len({len(line) for line in lines[2:]}) == 1
    assert log.getvalue().count("\n") == 6


def test_who_is_waited_for_and_who_refused() -> None:
    out = io.StringIO()
    waiting = {"event": "waiting", "joined": 1, "participants": 3, "least": 2, "seconds_left": 540}
    refused = {"event": "refused", "stage": "query.join", "code": "POLICY", "node": "12", "site": "lab"}
    show(
        cli.Display(out, io.StringIO(), verbose=False),
        waiting,
        {**waiting, "least": 0},
        refused,
        refused,
        {"event": "refused", "stage": "query.join", "code": "STRANGER", "node": "13"},
        {"event": "refused", "stage": "query.open_round", "code": "BUDGET", "node": "12", "site": "lab"},
        {"event": "excluded", "round": 3, "cause": "bad_signature", "node": "12", "site": "lab"},
    )
    assert out.getvalue().splitlines()[1:] == [
        "1 of 3 participants joined; waiting for the others for at most 540 s (2 are needed).",
        "1 of 3 participants joined; waiting for the others for at most 540 s.",
        "site lab (node 12) does not take part: refused (POLICY); its own log says why.",
        "node 13 does not take part: the roster does not name it.",
        "site lab (node 12) refused query.open_round (BUDGET); its own log says why.",
        "What site lab (node 12) sent was left out of the round (bad_signature).",
    ]


def test_many_refusals_of_one_kind_are_cut_short() -> None:
    out = io.StringIO()
    display = cli.Display(out, io.StringIO(), verbose=False)
    refused = {"event": "refused", "stage": "query.join", "code": "FULL"}
    show(display, *({**refused, "node": str(node)} for node in range(100)))
    lines = out.getvalue().splitlines()[1:]
    assert len(lines) == 6
    assert lines[-1] == "More of the same (FULL): see coordinator.log."


def test_nothing_that_is_shown_acts_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, hostile = Terminal(), "\x1b]52;c;YQ==\x07\x1b[2J\u202e"
    display = cli.Display(out, io.StringIO(), verbose=True)
    show(
        display,
        {"event": "excluded", "round": 0, "cause": hostile, "node": hostile, "site": hostile},
        {"event": "refused", "stage": hostile, "code": hostile, "node": hostile},
        {"event": "void", "round": hostile, "attempt": 1, "cause": hostile},
        {"event": "progress", "what": hostile, "done": 1, "total": hostile},
        {"event": "waiting", "joined": hostile},
    )
    display.line(hostile)
    display.close()
    assert "]52;c;YQ==" in out.getvalue()  # it is there to be read
    shown = out.getvalue().replace("\r\x1b[K", "").replace("\n", "")
    assert shown.isprintable()


def test_how_many_sites_heard_of_the_end() -> None:
    out = io.StringIO()
    show(cli.Display(out, io.StringIO(), verbose=False), {"event": "closed", "sites": 0, "of": 4})
    assert out.getvalue().splitlines()[-1] == "0 of 4 sites were told how it ended."


def test_terminal_shows_one_moving_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    out = Terminal()
    display = cli.Display(out, io.StringIO(), verbose=False, clock=lambda: now[0])
    show(display, {"event": "progress", "what": "generating data", "done": 1, "total": 9})
    now[0] = 7.2
    display.tick()
    assert out.getvalue().endswith("\r\x1b[Kgenerating data, 1 of 9 ... 7 s")
    show(display, ROUND)
    display.close()
    assert out.getvalue().endswith("\n")
    assert "\r\x1b[Kround" in out.getvalue()


# --------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("visible", "device", "share"),
    [("", "auto", 0.0), ("-1", "auto", 0.0), ("0", "cpu", 0.0), ("0", "cuda", 0.25), ("0,1", "auto", 0.5)],
)
def test_gpus_are_dealt(visible: str, device: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    config = load_config(["experiment=linear", f"inner.device={device}", "federation.participants=8"])
    assert cli._gpu_share(config) == share


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_run() -> None:
    out = io.StringIO()
    with open("/dev/full", "w", encoding="utf-8") as log:
        display = cli.Display(out, log, verbose=True)
        display.line("one")
        display.line("two")
        display.close()
    said = out.getvalue()
    assert said.count("No space left on device") == 1
    assert "one\n" in said
    assert "two\n" in said


def test_preparations_say_each_quarter_however_many_are_done_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    say = cli.Preparing()
    for done in (1, 21, 41, 61, 81, 100):
        say("training", done, 100)
    assert capsys.readouterr().err.splitlines() == [f"training: {n}/100" for n in (1, 41, 61, 81, 100)]
    say("training", 1, 100)
    assert capsys.readouterr().err == "training: 1/100\n"


def test_a_run_that_is_refused_leaves_no_folder_of_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    refused = ["run", "experiment=swipe_dot", "data.confinement=2"]
    assert cli.main(refused) == 2
    assert list((tmp_path / "home" / "sites").iterdir()) == []
    used = tmp_path / "sites"
    (used / "site-0000").mkdir(parents=True)
    assert cli.main([*refused, f"federation.sites_dir={used}"]) == 2
    assert (used / "site-0000").is_dir()
