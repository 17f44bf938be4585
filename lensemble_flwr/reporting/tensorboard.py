"""TensorBoard events of a run, from its records: the same folder gives the same bytes, so writing again is harmless.

Tags: ``eval/<metric>``, ``dp/epsilon_central``, ``dp/epsilon_local``, ``fed/participants``, ``fed/bytes_down``,
``fed/bytes_up``, ``fed/bytes``, ``fed/round_seconds``, ``fed/committed``. The step counts finished rounds: 0 is the
model before round 0, k + 1 what round k left. Where there is no guarantee epsilon is infinite.
"""

from __future__ import annotations

import calendar
import io
import math
import time
from pathlib import Path

from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.reporting.metrics import metrics_of
from lensemble_flwr.reporting.run_data import Round, RunData, load_run

FOLDER = "tensorboard"
FILE = "events.out.tfevents.lensemble"
"""TensorBoard recognises the middle part; its usual name would hold the host's name and the process id."""


def write_events(folder: Path | str) -> Path:
    """Write the run's events into ``tensorboard/`` in its folder, replacing those of an earlier call.

    Returns:
        The folder to give to ``tensorboard --logdir``.

    Raises:
        ArtifactError: the run cannot be read, the events cannot be written, or TensorBoard is not installed.
    """
    run = load_run(folder)
    content = _events(run)
    target = run.folder / FOLDER
    with file_errors(target, "create"):
        target.mkdir(exist_ok=True)
    atomic_write(target / FILE, content, mode=0o644)
    return target


def _events(run: RunData) -> bytes:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ArtifactError("TensorBoard is not installed.", "Install it: pip install tensorboard") from error
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    # Records hold no clock time: the run's start plus the seconds of its rounds is near it and always the same.
    now = _started(run)
    writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def add(step: int, values: dict[str, float]) -> None:
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.write(Event(wall_time=now, step=step, summary=Summary(value=scalars)).SerializeToString())

    names = [m.name for latent in (False, True) for m in metrics_of(run, latent)]
    if run.start:
        add(0, _evaluation(names, run.start))
    for record in run.rounds:
        now += record.seconds if record.seconds is not None and math.isfinite(record.seconds) else 0.0
        add(record.index + 1, _evaluation(names, record.metrics) | _facts(record))
    return buffer.getvalue()


def _evaluation(names: list[str], metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval/{name}": metrics[name] for name in names if name in metrics}


def _facts(record: Round) -> dict[str, float]:
    values = {
        "dp/epsilon_central": record.epsilon_central,
        "dp/epsilon_local": record.epsilon_local,
        "fed/participants": float(record.participants),
        "fed/committed": float(record.committed),
    }
    if record.bytes_down is not None and record.bytes_up is not None:
        values["fed/bytes_down"] = float(record.bytes_down)
        values["fed/bytes_up"] = float(record.bytes_up)
        values["fed/bytes"] = float(record.bytes_down + record.bytes_up)
    if record.seconds is not None:
        values["fed/round_seconds"] = record.seconds
    return values


def _started(run: RunData) -> float:
    try:
        return float(calendar.timegm(time.strptime(run.manifest.created_utc, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0
