"""The ServerApp: what it leaves in the run's folder. The federation is whole, only Flower's grid is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import Context, RecordDict

from lensemble_flwr import server_app
from lensemble_flwr.config import config_hash
from lensemble_flwr.errors import ConfigError, DataError
from lensemble_flwr.federation.coordinator import Coordinator
from lensemble_flwr.federation.manifest import read_manifest
from lensemble_flwr.federation.run_folder import RunFolder
from tests.federation.harness import Federation, Killed

Serve = Callable[[], None]


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    federation = Federation(tmp_path, "federation.participants=4 federation.min_participants=3 diloco.rounds=2")
    config = federation.config
    federation.folder = RunFolder.create(tmp_path / "run", config_hash(config), config.overrides, simulation=False)
    return federation


@pytest.fixture
def serve(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run the ServerApp on the federation's folder, as `--resume` does."""

    class InMemory:
        def __init__(self, config: Any, task: Any, folder: RunFolder, on_event: Any, roster: Any) -> None:
            def event(name: str, fields: dict[str, Any]) -> None:
                federation.on_event(name, fields)
                on_event(name, fields)

            ticks = iter(range(10**9))
            self.coordinator = Coordinator(
                config,
                task,
                folder,
                federation.transport,
                on_event=event,
                sleep=lambda seconds: None,
                clock=lambda: float(next(ticks)),
            )

        def start(self, grid: Any) -> None:
            self.coordinator.run()

    class Grid:
        def __init__(self, grid: Any) -> None:
            self.simulation = False

    monkeypatch.setattr(server_app, "SecureDiLoCo", InMemory)
    monkeypatch.setattr(server_app, "GridTransport", Grid)
    run_config: Any = {"overrides": "", "resume": str(federation.tmp / "run")}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=run_config)
    return lambda: server_app._run(cast(Any, None), context)


def test_a_run_of_real_sites_is_not_simulated_on(federation: Federation, serve: Serve) -> None:
    path = federation.tmp / "run" / "federation.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "simulation": True}))
    before = {p: p.read_bytes() for p in path.parent.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="is one of simulated sites"):
        serve()
    assert {p: p.read_bytes() for p in path.parent.rglob("*") if p.is_file()} == before
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "simulation"}))
    serve()  # one from before that was recorded


def roots(federation: Federation) -> list[str]:
    assert federation.folder is not None
    fid, members = federation.folder.federation_id, federation.transport.members
    return sorted(federation.transport.participant(node).dataset_root(fid).hex() for node in members)


def logged(federation: Federation) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (federation.tmp / "run" / "coordinator.log").read_text().splitlines()]


def test_telling_the_end_of_a_complete_run_again_leaves_its_manifest(federation: Federation, serve: Serve) -> None:
    serve()
    path = federation.tmp / "run" / "manifest.json"
    before = path.read_bytes()
    assert read_manifest(path.parent).status == "completed"
    during: list[bytes] = []

    def die(name: str, fields: dict[str, Any]) -> None:
        during.append(path.read_bytes())
        raise Killed if name == "joined" else DataError("A fault.")

    for name in ("joined", "resumed"):
        federation.on_event = lambda at, fields, name=name: die(at, fields) if at == name else None  # type: ignore[misc]
        with pytest.raises((Killed, DataError)):
            serve()
    federation.on_event = lambda name, fields: None
    serve()
    assert [*during, path.read_bytes()] == [before] * 3


def test_all_rounds_were_done_but_the_process_died_before_it_said_so(federation: Federation, serve: Serve) -> None:
    federation.on_event = lambda name, fields: (_ for _ in ()).throw(Killed) if name == "closed" else None
    with pytest.raises(Killed):
        serve()
    first = read_manifest(federation.tmp / "run")
    assert first.status == "running"
    federation.on_event = lambda name, fields: None
    serve()
    again = read_manifest(federation.tmp / "run")
    assert (again.status, again.created_utc) == ("completed", first.created_utc)


def test_an_end_that_nobody_hears_is_told_as_such(federation: Federation, serve: Serve) -> None:
    serve()
    federation.transport.members.clear()
    serve()
    told = [(event["sites"], event["of"]) for event in logged(federation) if event["event"] == "closed"]
    assert told == [(4, 4), (0, 4)]


def test_roots_of_members_that_join_later_are_in_the_manifest(federation: Federation, serve: Serve) -> None:
    late = federation.transport.members.pop(103)
    federation.on_event = lambda name, fields: (
        federation.transport.members.update({103: late}) if name == "round" else None
    )
    serve()
    assert [r["participants"] for r in federation.rounds()] == [3, 4]
    assert len(roots(federation)) == len(set(roots(federation))) == 4
    assert read_manifest(federation.tmp / "run").dataset_roots == roots(federation)
    assert not [event for event in logged(federation) if "dataset_roots" in event]


def test_a_defect_is_logged_by_its_name_alone(federation: Federation, serve: Serve) -> None:
    federation.on_event = lambda name, fields: {}[b"a value"] if name == "joined" else None
    with pytest.raises(KeyError):
        serve()
    (event,) = [event for event in logged(federation) if event["event"] == "error"]
    assert (event["code"], event["text"]) == ("INTERNAL", "[INTERNAL] The coordinator failed (KeyError).")
    assert "value" not in (federation.tmp / "run" / "coordinator.log").read_text()
