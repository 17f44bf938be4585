"""SecureDiLoCo: Flower's Strategy over :class:`~lensemble_flwr.federation.coordinator.Coordinator`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from lensemble_flwr.config import Config
from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.federation.coordinator import Coordinator
from lensemble_flwr.federation.roster import Roster
from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.federation.task import Task
from strategies.grid_transport import GridTransport


def _stop_asked(folder: RunFolder) -> bool:
    """`lensemble run` makes one of these on the first Ctrl-C: its own SuperLink's file, or that of the run's folder."""
    path = os.environ.get("LENSEMBLE_STOP_FILE")
    return (bool(path) and os.path.exists(str(path))) or folder.stop_file.exists()


class SecureDiLoCo(Strategy):
    """DiLoCo rounds whose only input is a verified secure sum.

    ``start`` is the whole strategy: a round needs four exchanges (keys, shares, masked updates, unmasking), which do
    not fit Flower's configure/aggregate pairs. Those methods therefore raise: an aggregate of individual replies does
    not exist here.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        folder: RunFolder,
        on_event: Callable[[str, dict[str, Any]], None] = lambda name, fields: None,
        roster: Roster | None = None,
    ) -> None:
        self.config, self.task, self.folder, self.on_event, self.roster = config, task, folder, on_event, roster

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run the federation to its end; the caller holds the folder's lock (errors: :meth:`Coordinator.run`)."""
        transport = GridTransport(grid, group=self.folder.federation_id.hex()[:16])
        theta = Coordinator(
            self.config,
            self.task,
            self.folder,
            transport,
            on_event=self.on_event,
            stop_asked=lambda: _stop_asked(self.folder),
            roster=self.roster,
        ).run()
        result = Result()
        result.arrays = ArrayRecord([theta])
        return result

    def summary(self) -> None:
        """Nothing: the server app logs what a person needs."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise ContractViolation("SecureDiLoCo runs its rounds in start().")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        raise ContractViolation("SecureDiLoCo never aggregates individual replies.")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise ContractViolation("SecureDiLoCo asks no participant for an evaluation.")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        raise ContractViolation("SecureDiLoCo asks no participant for an evaluation.")
