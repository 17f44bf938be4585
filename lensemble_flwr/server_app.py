"""Flower ServerApp: compose the configuration, build the strategy, run, leave the artifacts.

Every failure ends in an error whose text starts with its code, because that is all of it that Flower keeps
(``sys.exit`` would count as success in a simulation).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.logger import log

from lensemble_flwr.config import Config, config_hash, load_config, split_overrides
from lensemble_flwr.errors import STOPS, ArtifactError, ConfigError, LensembleError
from lensemble_flwr.federation.claim_inputs import claim_rows
from lensemble_flwr.federation.manifest import COMPLETED, RunManifest, new_manifest, read_manifest
from lensemble_flwr.federation.plan import make_plan
from lensemble_flwr.federation.roster import Roster, load_roster
from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.federation.task import Task
from lensemble_flwr.federation.tasks import build_task, own_choice
from lensemble_flwr.home import output_folder, sites_folder
from lensemble_flwr.json_log import bind, log_context
from strategies import SecureDiLoCo
from strategies.grid_transport import GridTransport

app = ServerApp()

EVENT_PREFIX = "LENSEMBLE|"
"""Log lines that `lensemble run` turns into its table start with this and go on in JSON."""


def emit(name: str, fields: dict[str, Any]) -> None:
    """One event line in Flower's log (public values only)."""
    log(INFO, "%s%s", EVENT_PREFIX, json.dumps({"event": name, **fields}))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation."""
    try:
        _run(grid, context)
    except LensembleError as error:
        emit("error", {"code": error.code, "text": str(error)})
        raise
    except OSError as error:
        failure = ArtifactError(f"A file operation failed: {error}.", "Check free space and permissions, then resume.")
        emit("error", {"code": failure.code, "text": str(failure)})
        raise failure from error


def _run(grid: Grid, context: Context) -> None:
    overrides, resume = str(context.run_config["overrides"]), str(context.run_config["resume"])
    simulation = GridTransport(grid).simulation
    if resume:
        folder = RunFolder.open(Path(resume))
        folder.check_runtime(simulation)
        config = load_config(folder.federation["overrides"])
        folder = RunFolder.open(Path(resume), config_hash(config))
    else:
        config = load_config(split_overrides(overrides))
        _check_runtime(config, simulation)
        path = output_folder(config, context.run_id)
        folder = RunFolder.create(path, config_hash(config), config.overrides, simulation=simulation)
    _check_runtime(config, simulation)
    with folder.lock(), log_context():  # before anything in it is touched
        folder.stop_file.unlink(missing_ok=True)  # it was for the process that ended
        try:
            _run_in(folder, config, grid, simulation, str(context.run_config.get("revision", "")))
        except (LensembleError, OSError) as error:
            folder.log("error", {"code": getattr(error, "code", ArtifactError.code), "text": str(error)})
            raise
        except STOPS:
            raise
        except BaseException as error:  # a defect: its text may hold anything
            code = LensembleError.code
            folder.log("error", {"code": code, "text": f"[{code}] The coordinator failed ({type(error).__name__})."})
            raise


def _run_in(folder: RunFolder, config: Config, grid: Grid, simulation: bool, revision: str) -> None:
    sites = str(sites_folder(config, folder.path.name)) if simulation else ""
    run = {"experiment": config.experiment, "rounds": config.diloco.rounds}
    emit("run", {"output_dir": str(folder.path), **run})
    folder.log("run", run)

    task = build_task(config, allowed=own_choice(config))
    task.prepare(lambda what, done, total: emit("progress", {"what": what, "done": done, "total": total}))
    before = _manifest_before(folder)
    done = len(folder.rounds()) >= config.diloco.rounds  # who resumes such a run only tells its end
    if done and before is not None:
        manifest = before
    else:
        manifest = _new_manifest(folder, config, task, simulation, sites, revision)
        manifest = dataclasses.replace(manifest, dataset_roots=before.dataset_roots if before else [])
        manifest.write(folder.path)

    def on_event(name: str, fields: dict[str, Any]) -> None:
        nonlocal manifest
        roots = fields.get("dataset_roots", [])
        fields = {key: value for key, value in fields.items() if key != "dataset_roots"}
        if name in ("joined", "round_open") and not done:
            known = sorted({*manifest.dataset_roots, *roots})  # those of members that have left are in the model, too
            if known != manifest.dataset_roots:
                manifest = dataclasses.replace(manifest, dataset_roots=known)
                manifest.write(folder.path)
        if name == "round_open":
            bind(round=fields["round"])  # for the events that do not name it
        if name != "progress":
            folder.log(name, fields)
        if name != "stage":  # for the log; nobody at a terminal waits for these
            emit(name, fields)

    try:
        SecureDiLoCo(config, task, folder, on_event, _roster(config)).start(grid)
    except LensembleError as error:
        _finish(manifest, folder, error.code, str(error))
        raise
    _finish(manifest, folder, COMPLETED, "")
    folder.log("end", {})
    emit("end", {"output_dir": str(folder.path)})


def _new_manifest(
    folder: RunFolder, config: Config, task: Task, simulation: bool, sites: str, revision: str
) -> RunManifest:
    plan = make_plan(config, config.federation.participants, task.dimension)
    rows, grade, why_not = claim_rows(config, plan, simulation)
    return new_manifest(
        federation_id=folder.federation_id,
        config=config,
        plan=plan,
        claims=rows,
        claim_grade=grade,
        why_not=why_not,
        base_hash=task.base_hash,
        probe_hash=task.probe_hash,
        simulation=simulation,
        sites_dir=sites,
        revision=revision,
    )


def _roster(config: Config) -> Roster | None:
    """Whom a pinned run lets in: the roster of the coordinator's folder, which its start script names."""
    path = os.environ.get("LENSEMBLE_ROSTER", "")
    return load_roster(Path(path)) if config.secagg.pinned and path else None


def _manifest_before(folder: RunFolder) -> RunManifest | None:
    """The manifest that the run had when it was resumed."""
    with contextlib.suppress(ArtifactError):  # a first start, or a damaged file that is written anew
        return read_manifest(folder.path)
    return None


def _finish(manifest: RunManifest, folder: RunFolder, status: str, detail: str) -> None:
    if manifest.status != COMPLETED:  # a run that is complete stays that, whatever becomes of telling its end again
        dataclasses.replace(manifest, status=status, detail=detail).write(folder.path)


def _check_runtime(config: Config, simulation: bool) -> None:
    if config.privacy.entropy == "replay" and not simulation:
        raise ConfigError(
            "privacy.entropy=replay (seeded noise) exists only in a simulation.", "Use privacy.entropy=csprng."
        )
