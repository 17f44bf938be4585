"""The tasks there are: built in, installed as an entry point in the group ``lensemble.tasks``, or ``module:Class``.

A task is code. Whoever submits a run chooses its ``task``, so a real site imports only what its own policy lists
(rule ``allowed_tasks``). The check is here, before the import, and refuses when nobody says what is allowed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from lensemble_flwr.config import BUILT_IN_TASKS, DOTTED_TASK, Config
from lensemble_flwr.errors import ConfigError, LensembleError
from lensemble_flwr.federation.policy import forbidden_task
from lensemble_flwr.federation.site_dataset import SiteDataset
from lensemble_flwr.federation.task import Task

ENTRY_POINTS = "lensemble.tasks"
_METHODS = (
    "initial sketch_hash episode_hashes local_update public_update evaluate prepare public_files prepare_participant"
).split()


def build_task(
    config: Config,
    data_dir: Path | None = None,
    allowed: Collection[str] = (),
    dataset: SiteDataset | None = None,
) -> Task:
    """The task that a configuration names. Imports torch only for tasks that need it.

    Args:
        data_dir: a real site's own recordings; None where all participants' are generated below the home folder.
        allowed: tasks besides the built-in ones that may be imported, by the name that ``task=`` gives them: at a site
            its policy's ``allowed_tasks``; ``own_choice(config)`` where the configuration was typed by whoever runs
            this process.
        dataset: the site's own recordings, for ``data=recordings``.

    Raises:
        PolicyViolation: the task is not allowed; nothing was imported.
        ConfigError: unknown, cannot be imported, or no task.
    """
    violation = forbidden_task(config.task, allowed)
    if violation is not None:
        raise violation
    if config.task == "linear":
        from lensemble_flwr.federation.linear_task import LinearTask

        return LinearTask(config)
    if config.task == "world_model":
        if config.federation.surface == "function":
            from lensemble_flwr.federation.function_task import FunctionTask

            return FunctionTask(config, data_dir, dataset)
        from lensemble_flwr.federation.world_task import WorldTask

        return WorldTask(config, data_dir, dataset)
    return _own_task(config, data_dir)


def own_choice(config: Config) -> tuple[str, ...]:
    """``allowed`` for a process whose operator chose the configuration."""
    return (config.task,)


def _own_task(config: Config, data_dir: Path | None) -> Task:
    name = config.task
    cls = _load(name, name if DOTTED_TASK.fullmatch(name) else _entry_point(name))
    is_recipe = _is_recipe(cls)
    lacks = sorted(getattr(cls, "__abstractmethods__", ()))
    if not is_recipe:
        lacks += [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if lacks or inspect.isabstract(cls):
        raise ConfigError(
            f"task={name} is no task: it lacks {', '.join(lacks)}.",
            "Derive it from lensemble_flwr.federation.recipe.Recipe (docs/own-model.md).",
        )
    if config.inner.scheduled and not is_recipe and not _takes_place(cls):
        raise ConfigError(
            f"task={name} knows no schedule of step sizes: its local_update and public_update take no outer_step.",
            "Use inner.schedule=constant and inner.warmup_steps=0, or derive it from "
            "lensemble_flwr.federation.recipe.Recipe.",
        )
    try:
        own = cls(config, data_dir)
        if not is_recipe:
            return cast(Task, own)
        from lensemble_flwr.federation.torch_task import TorchTask

        return TorchTask(own)
    except LensembleError:
        raise
    except Exception as error:
        raise ConfigError(f"task={name} cannot be built: {type(error).__name__}: {error}.") from error


def _is_recipe(cls: type) -> bool:
    """Whether a class derives from Recipe, whose module it has then loaded, and torch with it: seconds of every stage
    that builds the task, which one without torch does not pay."""
    module = sys.modules.get("lensemble_flwr.federation.recipe")
    return module is not None and issubclass(cls, module.Recipe)


def _takes_place(cls: type) -> bool:
    """Whether a task's local steps can be told where in the run they are (:func:`.schedule.place`)."""
    for method in ("local_update", "public_update"):
        parameters = inspect.signature(getattr(cls, method)).parameters.values()
        if not any(p.name == "outer_step" or p.kind == p.VAR_KEYWORD for p in parameters):
            return False
    return True


def _load(name: str, path: str) -> type:
    """The class at ``module:Class``; nothing of it is called."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task={name} cannot be imported: {error}.",
            "Install its package into this environment, at every party.",
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"task={name} cannot be imported: {type(error).__name__}: {error}.") from error
    found: Any = vars(module).get(attribute)
    if not isinstance(found, type):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise ConfigError(f"task={name} is no class: {module_name} holds {what} of that name.", "Name the class.")
    return found


def _entry_point(name: str) -> str:
    """``module:Class`` of the one installed entry point of that name."""
    points = [point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name == name]
    values = {point.value.replace(" ", "") for point in points}
    if not values:
        installed = {point.name for point in metadata.entry_points(group=ENTRY_POINTS)}
        raise ConfigError(
            f"There is no task={name}.",
            f"Choose one of: {', '.join(sorted({*BUILT_IN_TASKS, *installed}))}; or package.module:Class.",
        )
    value = values.pop()
    if values:
        raise ConfigError(f"Two installed packages name a task {name}.", "Use package.module:Class, or remove one.")
    if not DOTTED_TASK.fullmatch(value):
        raise ConfigError(f"The entry point {name} names {value!r}, not package.module:Class.", "Correct its package.")
    return value
