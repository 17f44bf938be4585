"""A federation in one process: the real coordinator, participants, ledgers and masks; only Flower is left out.

Every message goes through the same dispatch and egress check as in Flower's ClientApp. Faults are injected with
``before`` and ``after`` hooks on the transport.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lensemble_flwr.config import Config, config_hash, load_config
from lensemble_flwr.federation.coordinator import Coordinator, Reply
from lensemble_flwr.federation.dispatch import handle
from lensemble_flwr.federation.participant import Runtime, SiteParticipant
from lensemble_flwr.federation.policy import simulated_policy
from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import Task
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.federation.wire import check_egress, refusal_for

Hook = Callable[[str, int, Mapping[str, Any]], Any]


class Killed(SystemExit):
    """Stands for kill -9: nothing may catch it."""


@dataclasses.dataclass
class Node:
    """One participant's site and the memory that Flower would keep for it."""

    site: Site
    partition: int
    memory: dict[str, bytes] = dataclasses.field(default_factory=dict)
    task: Task | None = None


class InProcess:
    """A transport with hooks: ``before`` may drop a message (return False) or replace its fields (return a dict);
    ``after`` may drop or replace a reply."""

    simulation = True

    def __init__(self, config: Config, task: Task, nodes: dict[int, Node]) -> None:
        self.config, self.task, self.members = config, task, nodes
        self.before: Hook = lambda stage, node, fields: None
        self.after: Callable[[str, int, Reply], Reply | None] = lambda stage, node, reply: reply
        self.log: list[tuple[str, int, Mapping[str, Any], Reply | None]] = []
        self.errors: list[tuple[str, int, Exception]] = []

    def nodes(self) -> list[int]:
        return sorted(self.members)

    def participant(self, node: int) -> SiteParticipant:
        member = self.members[node]
        task = member.task or self.task
        return SiteParticipant(member.site, self.config, task, member.partition, member.memory, Runtime(True))

    def exchange(
        self, stage: str, requests: Mapping[int, Mapping[str, Any]], timeout: float, max_bytes: int = 0
    ) -> Iterator[tuple[int, Reply]]:
        for node, fields in requests.items():
            verdict = self.before(stage, node, fields)
            if verdict is False:
                self.log.append((stage, node, fields, None))
                continue
            reply = self.deliver(stage, node, verdict if isinstance(verdict, dict) else fields)
            kept = self.after(stage, node, reply)
            self.log.append((stage, node, fields, kept))
            if kept is not None:
                yield node, kept

    def deliver(self, stage: str, node: int, fields: Mapping[str, Any]) -> Reply:
        """What the egress mod does with one message."""
        fields = dict(fields)
        vector = fields.pop("vector", None)
        try:
            outgoing, expected = handle(stage, fields, vector, self.participant(node))
            check_egress(stage, outgoing, expected)
            return Reply(outgoing.body, outgoing.vector)
        except Exception as error:
            self.errors.append((stage, node, error))
            return Reply(refusal=refusal_for(error))


class Federation:
    """Folder, sites and coordinator of one small federation."""

    def __init__(self, tmp: Path, overrides: str = "", sites: Path | None = None) -> None:
        self.config = load_config("experiment=linear " + overrides)
        self.task = build_task(self.config)
        self.tmp = tmp
        self.sites = sites or tmp / "sites"
        nodes = {}
        for i in range(self.config.federation.participants):
            path = self.sites / f"site-{i:04d}"
            site = Site(path) if Site.exists(path) else Site.create(path, simulated_policy(self.config))
            nodes[100 + i] = Node(site, i)
        self.transport = InProcess(self.config, self.task, nodes)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda name, fields: None
        self.folder: RunFolder | None = None

    @property
    def refusals(self) -> set[tuple[str, str]]:
        """(stage, code) of what was refused."""
        return {(fields["stage"], fields["code"]) for name, fields in self.events if name == "refused"}

    def excluded(self, index: int) -> set[str]:
        """Why answers were left out of a round."""
        events = (fields for name, fields in self.events if name == "excluded")
        return {fields["cause"] for fields in events if fields["round"] == index}

    def start(self, **kwargs: Any) -> np.ndarray:
        self.folder = RunFolder.create(self.tmp / "run", config_hash(self.config), self.config.overrides)
        return self._run(**kwargs)

    def resume(self, **kwargs: Any) -> np.ndarray:
        self.folder = RunFolder.open(self.tmp / "run", config_hash(self.config))
        for node in self.transport.members.values():
            node.memory.clear()  # a new Flower run: Context.state is empty
        return self._run(**kwargs)

    def _run(self, **kwargs: Any) -> np.ndarray:
        assert self.folder is not None

        def event(name: str, fields: dict[str, Any]) -> None:
            self.events.append((name, fields))
            self.on_event(name, fields)

        ticks = iter(range(10**9))
        coordinator = Coordinator(
            self.config,
            self.task,
            self.folder,
            self.transport,
            on_event=event,
            sleep=lambda seconds: None,
            clock=lambda: float(next(ticks)),
            **kwargs,
        )
        with self.folder.lock():
            return coordinator.run()

    def rounds(self) -> list[dict[str, Any]]:
        assert self.folder is not None
        return self.folder.rounds()

    def ledger_rounds(self) -> list[int]:
        """Rounds in each site's ledger."""
        assert self.folder is not None
        counts = []
        for node in self.transport.members.values():
            with node.site.ledger() as ledger:
                counts.append(len(ledger.rounds(self.folder.federation_id)))
        return counts
