"""TensorBoard events, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.reporting.tensorboard import FILE, write_events

Own = Callable[[str], Path]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_events_hold_the_records(own: Own) -> None:
    folder = write_events(own("private"))
    found = scalars(folder)
    assert {"eval/r5", "eval/r1", "eval/effective_rank", "dp/epsilon_central", "dp/epsilon_local"} <= set(found)
    assert {"fed/participants", "fed/bytes", "fed/round_seconds"} <= set(found)
    assert [step for step, _ in found["eval/r5"]] == list(range(11))
    assert found["eval/r5"][0][1] == pytest.approx(0.593)
    assert found["dp/epsilon_central"][-1] == (10, pytest.approx(8.0, abs=2e-3))
    assert found["fed/participants"][7] == (8, 58.0)


def test_no_guarantee_is_infinite(own: Own) -> None:
    assert all(value == math.inf for _, value in scalars(write_events(own("replay")))["dp/epsilon_central"])


def test_replayed_rounds_have_no_measurements(own: Own) -> None:
    found = scalars(write_events(own("burnt")))
    assert [step for step, _ in found["fed/bytes"]] == [1, 2, 3, 5]
    assert [value for _, value in found["fed/committed"]] == [1, 1, 0, 1, 1]


def test_writing_again_changes_nothing(own: Own) -> None:
    run = own("private")
    first = (write_events(run) / FILE).read_bytes()
    folder = write_events(run)
    assert (folder / FILE).read_bytes() == first
    assert [p.name for p in folder.iterdir()] == [FILE]


def test_a_run_without_rounds(own: Own) -> None:
    assert set(scalars(write_events(own("empty")))) == {"eval/r5", "eval/r1"}


def test_an_unwritable_folder(own: Own) -> None:
    run = own("empty")
    (run / "tensorboard").write_text("in the way")
    with pytest.raises(ArtifactError, match="tensorboard"):
        write_events(run)


def test_reporting_needs_neither_flower_nor_torch(own: Own) -> None:
    """The command line makes reports of runs from elsewhere, and must start quickly."""
    code = (
        "import sys\n"
        "from lensemble_flwr.reporting import report, summary, tensorboard, plots\n"
        "loaded = {'flwr', 'torch', 'matplotlib', 'tensorboard'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        f"report.write_report({str(own('replay'))!r}); tensorboard.write_events({str(own('budget'))!r})\n"
        "loaded = {'flwr', 'torch', 'tensorflow'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
