"""Who can make whom import what: names of tasks, entry points, and the site's rule."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from clients.egress import FIELDS, egress
from lensemble_flwr import client_app
from lensemble_flwr.config import BUILT_IN_TASKS, Config, config_hash, load_config
from lensemble_flwr.deploy.site_check import check_site
from lensemble_flwr.deploy.site_folder import create_site
from lensemble_flwr.errors import ConfigError, PolicyViolation
from lensemble_flwr.federation import tasks
from lensemble_flwr.federation.linear_task import LinearTask
from lensemble_flwr.federation.policy import Policy, load_policy, save_policy, simulated_policy
from lensemble_flwr.federation.records import JoinRequest
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_settings import SiteSettings
from lensemble_flwr.federation.tasks import build_task, own_choice
from lensemble_flwr.federation.torch_task import TorchTask
from lensemble_flwr.federation.wire import BODY, REFUSAL, Refusal, Stage

CLASSIFIER = "lensemble_flwr.examples.classifier:Classifier"
TRAP = """
from pathlib import Path
(Path(__file__).parent / "imported").touch()
from lensemble_flwr.federation.linear_task import LinearTask
class Trap(LinearTask):
    def __init__(self, config, data_dir=None):
        super().__init__(config)
        self.data_dir = data_dir
class Needs(Trap):
    def __init__(self, config, data_dir=None):
        raise KeyError("width")
class NoTask: pass
def function(config, data_dir): raise AssertionError("called")
"""


def config_of(task: str, more: str = "") -> Config:
    return load_config(["experiment=linear", f"task={task}", *more.split()])


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module ``own_trap`` that leaves a mark when it is imported."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "own_trap.py").write_text(TRAP)
    monkeypatch.syspath_prepend(str(folder))
    yield folder / "imported"
    sys.modules.pop("own_trap", None)


def test_by_default_nothing_is_imported(trap: Path) -> None:
    with pytest.raises(PolicyViolation) as caught:
        build_task(config_of("own_trap:Trap"))
    assert caught.value.fields["rule"] == "allowed_tasks"
    for close in ("own_trap", "own_trap:", "own_trap:Tra", "own_trap:Trap ", "OWN_TRAP:Trap", "*", "own_trap:*"):
        with pytest.raises(PolicyViolation):
            build_task(config_of("own_trap:Trap"), allowed=(close,))
    assert not trap.exists()
    task = build_task(config_of("own_trap:Trap"), Path("/data"), ("own_trap:Trap",))
    assert trap.exists()
    assert isinstance(task, LinearTask)
    assert task.data_dir == Path("/data")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "task",
    [
        "__main__:X",
        "os.path:__builtins__",
        "a:b:c",
        "a:b.c",
        "a..b:C",
        ".a:B",
        "a.:B",
        ":A",
        "a:",
        "a b:C",
        "../a:B",
        "/etc/x:Y",
        "a/b:C",
        "\u0430:B",  # a Cyrillic letter
        "a:B\n",
        "a:B()",
        "'a:B;import os'",
        "a" * 300 + ":B",
        "''",
        "A",
        "1",
    ],
)
def test_hostile_names_are_no_names(task: str) -> None:
    with pytest.raises(ConfigError):
        load_config(["experiment=linear", f'task="{task}"' if "\n" in task else f"task={task}"])


@given(task=st.text(max_size=30))
def test_what_passes_as_a_name_is_plain(task: str) -> None:
    config = load_config("experiment=linear")
    try:
        named = dataclasses.replace(config, task=task)
    except ConfigError:
        return
    assert named.task.isascii()
    assert not set(named.task) & set(" /\\\n\t\0'\"$;()*")
    assert not any(part.startswith("_") for part in named.task.replace(":", ".").split("."))


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("own_trap:NoTask", "lacks .*local_update"),
        ("own_trap:function", "holds a function"),
        ("own_trap:Path", "lacks"),
        ("own_trap:Absent", "holds nothing"),
        ("own_trap:Needs", "cannot be built: KeyError: 'width'"),
        ("own_no_such_module:X", "Install its package"),
        ("subprocess:Popen", "lacks"),
        ("os:system", "no class"),
        ("lensemble_flwr.federation.recipe:Recipe", "lacks build_model"),
        ("nothing", "Choose one of: linear, world_model"),
    ],
)
def test_what_is_no_task_says_so_and_is_not_called(trap: Path, task: str, says: str) -> None:
    config = config_of(task)
    with pytest.raises(ConfigError, match=says):
        build_task(config, allowed=own_choice(config))


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "1/0", "import own_also_missing", "syntax error"])
def test_a_module_that_fails_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "own_broken.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of("own_broken:X")
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_task(config, allowed=own_choice(config))


def points(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[str, str]) -> None:
    def found(group: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint(name, value, group) for name, value in pairs if group == tasks.ENTRY_POINTS]

    monkeypatch.setattr(tasks.metadata, "entry_points", found)


def test_entry_points(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points(
        monkeypatch, ("trap", "own_trap:Trap"), ("linear", "own_trap:Trap"), ("odd", "own_trap"), ("dig", CLASSIFIER)
    )
    assert type(build_task(config_of("linear"))) is LinearTask  # nothing installed takes a built-in name
    config = config_of("trap")
    with pytest.raises(PolicyViolation):
        build_task(config, allowed=("own_trap:Trap",))  # listed by the name that is asked for, not by what it leads to
    assert not trap.exists()
    assert type(build_task(config, allowed=("trap",))).__name__ == "Trap"
    assert isinstance(build_task(config_of("dig"), allowed=("dig",)), TorchTask)
    with pytest.raises(ConfigError, match="names 'own_trap'"):
        build_task(config_of("odd"), allowed=("odd",))
    with pytest.raises(ConfigError, match=r"dig, linear, odd, trap, world_model"):
        build_task(config_of("other"), allowed=("other",))
    points(monkeypatch, ("trap", "own_trap:Trap"), ("trap", "else:Trap"))
    with pytest.raises(ConfigError, match="Two installed packages"):
        build_task(config, allowed=("trap",))


# ------------------------------------------------------------------ the site's rule


def test_the_rule_in_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    assert Policy(max_epsilon_central=8.0).allowed_tasks == ()
    save_policy(path, Policy(max_epsilon_central=8.0, allowed_tasks=(CLASSIFIER, "dig")))
    assert load_policy(path).allowed_tasks == (CLASSIFIER, "dig")
    for value in ("null", "'*'", "['*']", "['own.*:X']", "['a b']", "[1]", "true"):
        path.write_text(f"max_epsilon_central: 8\nallowed_tasks: {value}\n")
        with pytest.raises(ConfigError) as caught:
            load_policy(path)
        assert caught.value.fields["rule"] == "allowed_tasks"
    assert simulated_policy(config_of(CLASSIFIER)).allowed_tasks == (CLASSIFIER,)
    for name in BUILT_IN_TASKS:
        Policy(max_epsilon_central=8.0).check_run(dataclasses.replace(load_config("experiment=linear"), task=name), ())


def real_site(tmp_path: Path, *allowed: str) -> Site:
    policy = Policy(max_epsilon_central=8.0, allowed_tasks=allowed)
    return create_site(tmp_path / "north", SiteSettings("north"), policy)


@pytest.mark.usefixtures("flower_task")
def test_a_run_cannot_make_a_real_site_import_what_its_policy_does_not_list(trap: Path, tmp_path: Path) -> None:
    site = real_site(tmp_path)
    overrides = "experiment=linear task=own_trap:Trap"
    context = Context(
        run_id=1,
        node_id=2,
        node_config={"site": str(site.folder)},
        state=RecordDict(),
        run_config={"overrides": overrides, "resume": ""},
    )
    config = load_config(overrides)
    base_hash = build_task(load_config("experiment=linear")).base_hash  # the trap's, which inherits it
    body = JoinRequest(bytes(32), config_hash(config), base_hash).encode()

    def answer() -> dict[str, Any]:
        message = Message(RecordDict({FIELDS: ConfigRecord({BODY: body})}), dst_node_id=2, message_type=Stage.JOIN)
        handler = cast(Any, partial(client_app._handle, Stage.JOIN))
        return dict(egress(message, context, handler).content.config_records[FIELDS])

    assert answer() == {REFUSAL: int(Refusal.POLICY)}
    assert not trap.exists()
    assert "own_trap" not in sys.modules
    assert "allowed_tasks" in (site.folder / "site.log").read_text()

    policy = site.policy
    save_policy(site.folder / "policy.yaml", dataclasses.replace(policy, allowed_tasks=("own_trap:Trap",)))
    assert BODY in answer()
    assert trap.exists()
    save_policy(site.folder / "policy.yaml", policy)  # taken off the list: counts at once, whatever is cached
    assert answer() == {REFUSAL: int(Refusal.POLICY)}


def test_site_check_judges_a_task_without_importing_it(trap: Path, tmp_path: Path) -> None:
    site = real_site(tmp_path)
    config = config_of("own_trap:Trap")
    refused = [text for level, what, text in check_site(site.folder, config, online=False).lines if what == "run"]
    assert len(refused) == 1
    assert "allowed_tasks" in refused[0]
    assert not trap.exists()
    save_policy(site.folder / "policy.yaml", dataclasses.replace(site.policy, allowed_tasks=("own_trap:Trap",)))
    lines = check_site(site.folder, config, online=False).lines
    assert ("ok", "run", "nothing here refuses it") in lines
    assert ("ok", "policy", "tasks besides the built-in ones: own_trap:Trap") in lines
