"""Flower ClientApp: routes each message type to the participant. The only way out is :func:`clients.egress.egress`.

Handlers return an Outgoing and what public values say it must look like; the mod builds the message or a refusal.
"""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from clients.egress import FIELDS, egress
from clients.participant import ContextMemory, Participant
from lensemble_flwr.config import Config, check_length, load_config
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.dispatch import Handled, handle, most_vector_bytes
from lensemble_flwr.federation.participant import Runtime, SiteParticipant
from lensemble_flwr.federation.policy import simulated_policy
from lensemble_flwr.federation.run_folder import RunFolder
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_dataset import SiteDataset, check_dataset, load_dataset
from lensemble_flwr.federation.supernode import trusted_authorities
from lensemble_flwr.federation.task import Task
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.federation.wire import Refusal, Stage, refused
from lensemble_flwr.home import cache_lock, sites_folder
from strategies.grid_transport import read_vector

app = ClientApp(mods=[egress])


def in_simulation() -> bool:
    """Whether this process is an actor of Flower's simulation runtime. Detected from the process, never configured."""
    if "ray" not in sys.modules:
        return False
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None)


@lru_cache(maxsize=4)
def _task(
    overrides: tuple[str, ...], allowed: tuple[str, ...], data_dir: Path | None, dataset: SiteDataset | None
) -> Task:
    return build_task(load_config(overrides), data_dir, allowed, dataset)


class LateTask:
    """A task that is built when something is first asked of it.

    Every message is a new process, and most of them need no model: shares, the signature of the survivors and the
    unmasking are answered without torch and without reading a data set.
    """

    def __init__(
        self,
        overrides: tuple[str, ...],
        allowed: tuple[str, ...],
        data_dir: Path | None = None,
        dataset: SiteDataset | None = None,
    ) -> None:
        self._build = partial(_task, overrides, allowed, data_dir, dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build(), name)


def _config(context: Context) -> Config:
    resume = str(context.run_config["resume"])
    if resume and in_simulation():
        return load_config(RunFolder.open(Path(resume)).federation["overrides"])
    overrides = str(context.run_config["overrides"])
    return load_config(overrides if in_simulation() else check_length(overrides))


def _site(context: Context, config: Config, simulation: bool) -> Site:
    """This participant's site. A simulated one is made at first use; a real one must exist.

    Raises:
        ConfigError: a SuperNode without ``site`` in its node config.
    """
    configured = context.node_config.get("site")
    if configured:
        return Site(Path(str(configured)))
    if not simulation:
        raise ConfigError("This SuperNode has no site.", "Start it with --node-config 'site=\"/path/to/site\"'.")
    name = Path(str(context.run_config["resume"]) or config.output_dir or f"run-{context.run_id}").name
    folder = sites_folder(config, name) / f"site-{int(context.node_config['partition-id']):04d}"
    if not Site.exists(folder):
        with cache_lock(folder):
            if not Site.exists(folder):
                return Site.create(folder, simulated_policy(config))
    return Site(folder)


def _participant(context: Context) -> SiteParticipant:
    simulation = in_simulation()
    config = _config(context)
    site = _site(context, config, simulation)
    context.__dict__["lensemble_site_log"] = site.log  # for the egress mod: errors are logged at the site
    settings = None if simulation else site.settings
    allowed = site.policy.allowed_tasks  # as it is now: what a run may make this site import is the site's own rule
    dataset = load_dataset(site.folder)  # a simulated site may have recordings of its own, too
    check_dataset(config, dataset)
    if settings is not None:
        data_dir = settings.data_folder(site.folder)
        task, partition = LateTask(config.overrides, allowed, data_dir, dataset), settings.participant
    else:
        partition = int(context.node_config.get("partition-id", 0))
        task = LateTask(config.overrides, allowed, None, dataset)
    authorities = None if simulation else partial(trusted_authorities, site.folder / "ca.crt")
    runtime = Runtime(simulation, authorities)
    return SiteParticipant(site, config, cast(Task, task), partition, ContextMemory(context), runtime)


def _handle(stage: str, message: Message, context: Context) -> Handled:
    participant = _participant(context)
    record = message.content.config_records.get(FIELDS)
    if record is None:
        raise refused("The message has no fields.", Refusal.PROTOCOL)
    vector = read_vector(message.content, most_vector_bytes(stage, participant))
    return handle(stage, dict(record), vector, participant, train=Participant(participant).masked_update)


def _route() -> None:
    """Every message type of the protocol goes to :func:`_handle`; Flower refuses any other."""
    for stage in Stage.ALL:
        category, action = stage.split(".")
        register = app.train(action) if category == "train" else app.query(action)
        # The egress mod, outermost, turns what the handler returns into a Message.
        register(cast(ClientAppCallable, partial(_handle, stage)))


_route()
