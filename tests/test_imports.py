"""Imports go one way, Flower is only at the rim, and a light command does not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module may import from its own layer's package and from lower layers.
LAYERS = [
    {"lensemble_flwr.errors"},
    {"lensemble_flwr.options"},
    {
        "lensemble_flwr.config",
        "lensemble_flwr.durable",
        "lensemble_flwr.json_log",
        "lensemble_flwr.owners",
        "lensemble_flwr.processes",
    },
    {"lensemble_flwr.home"},
    {"lensemble_flwr.compiled"},
    {
        "lensemble_flwr.model",
        "lensemble_flwr.data",
        "lensemble_flwr.gauge",
        "lensemble_flwr.privacy",
        "lensemble_flwr.secagg",
    },
    {"lensemble_flwr.federation"},
    {"lensemble_flwr.examples"},
    {"lensemble_flwr.sweep", "lensemble_flwr.ready_sweeps"},
    {"clients"},
    {"strategies"},
    {"lensemble_flwr.server_app", "lensemble_flwr.client_app", "lensemble_flwr.reporting"},
    {"lensemble_flwr.launch", "lensemble_flwr.preflight"},
    {"lensemble_flwr.sweep_cli"},
    {"lensemble_flwr.deploy"},
    {"lensemble_flwr.data_cli"},
    {"lensemble_flwr.cli"},
]
FLOWER_RIM = {
    "lensemble_flwr/server_app.py",
    "lensemble_flwr/client_app.py",
    "lensemble_flwr/launch.py",
    "lensemble_flwr/deploy/shim.py",
}


def modules() -> dict[str, Path]:
    found = {}
    for top in ("lensemble_flwr", "clients", "strategies"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return found


def imports_of(path: Path, name: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(name: str) -> tuple[int, str] | None:
    for index, packages in enumerate(LAYERS):
        for package in packages:
            if name == package or name.startswith(package + "."):
                return index, package
    return None


@pytest.mark.parametrize("name", [n for n in modules() if n != "lensemble_flwr"])
def test_imports_point_downwards(name: str) -> None:
    own = layer(name)
    assert own is not None, f"{name} has no layer: add it to LAYERS"
    for imported in imports_of(modules()[name], name):
        other = layer(imported)
        if other is None:
            continue
        assert other[0] < own[0] or other[1] == own[1], f"{name} imports {imported}"


@pytest.mark.parametrize("name", list(modules()))
def test_flower_is_only_at_the_rim(name: str) -> None:
    path = modules()[name].relative_to(ROOT).as_posix()
    if path.startswith(("clients/", "strategies/")) or path in FLOWER_RIM:
        return
    assert not any(i == "flwr" or i.startswith("flwr.") for i in imports_of(modules()[name], name))


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import lensemble_flwr.cli", "torch,flwr,numpy"),
        ("import lensemble_flwr.privacy.ledger", "torch,flwr"),
        ("import lensemble_flwr.secagg", "torch,flwr"),
        ("import lensemble_flwr.federation.coordinator", "torch,flwr"),
        ("import lensemble_flwr.federation.participant", "torch,flwr,scipy"),
        (
            "from lensemble_flwr.config import load_config\n"
            "from lensemble_flwr.federation.tasks import build_task, own_choice\n"
            "config = load_config('experiment=linear task=lensemble_flwr.examples.wide:Wide')\n"
            "build_task(config, allowed=own_choice(config)).initial()",
            "torch,flwr,scipy",
        ),
    ],
)
def test_stages_that_do_not_train_do_not_load_torch(statement: str, unwanted: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in '{unwanted}'.split(',') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def test_no_randomness_that_is_no_secret_near_privacy_and_masks() -> None:
    for package in ("privacy", "secagg"):
        for path in (ROOT / "lensemble_flwr" / package).rglob("*.py"):
            for call in ("np.random.", "random.Random", "torch.manual_seed", "torch.randn", "default_rng"):
                assert call not in path.read_text(), f"{path.name} uses {call}"
