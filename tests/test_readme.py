"""The README's commands: every override in it composes, every script and link is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.sweep import expand

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.split("#")[0].strip()
]


def flwr_command() -> list[str]:
    """The README's `flwr run` line, as arguments."""
    (command,) = [c for c in COMMANDS if c.startswith("flwr run")]
    return shlex.split(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("lensemble")])
def test_lensemble_commands(command: str) -> None:
    from lensemble_flwr.cli import COMMANDS as KNOWN

    words = shlex.split(command)
    assert words[1] in KNOWN
    overrides = [word for word in words[2:] if "=" in word]
    if words[1] in ("site", "coordinator"):
        from lensemble_flwr.deploy import coordinator_cli, site_cli

        of_command = (site_cli if words[1] == "site" else coordinator_cli)._parser()
        overrides = getattr(site_cli.parse(of_command, words[2:]), "overrides", [])
    if words[1] == "sweep" and overrides:
        assert expand(overrides).points
    else:
        load_config(overrides)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("scripts/")])
def test_scripts_are_there_and_executable(command: str) -> None:
    path = ROOT / command.split()[0]
    assert path.is_file()
    assert path.stat().st_mode & 0o111


def test_the_flwr_line_composes() -> None:
    words = flwr_command()
    overrides = words[words.index("--run-config") + 1]
    assert overrides.startswith('overrides="')
    config = load_config(overrides.removeprefix('overrides="').removesuffix('"'))
    assert f"num-supernodes={config.federation.participants}" in words


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_claims_table_is_the_one_that_the_code_makes() -> None:
    from lensemble_flwr.federation.claim_inputs import claims_of
    from lensemble_flwr.federation.plan import make_plan
    from lensemble_flwr.privacy.claims import claims_table

    config = load_config()
    adapter = (config.model.adapter_rank + 1) * config.model.latent_dim
    table = claims_table(claims_of(config, make_plan(config, config.federation.participants, adapter), True))
    assert table.split("\n\n")[0] in TEXT
