"""One real deployment for all tests of this folder that want it: four sites, three of which are enough."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.deployment import OVERRIDES, script, staged, through_relays


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Coordinator and sites as their operators set them up. As root: namespaces, and a small disk for site3."""
    folder = tmp_path_factory.mktemp("deployment")
    app = staged(folder / "app")
    made = script().Deployment(folder / "machines", 4, namespaces=os.geteuid() == 0, app=app)
    small = made.sites[3].folder
    mounted = False
    try:
        if os.geteuid() == 0:
            small.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=700", "tmpfs", str(small)], check=True)
            mounted = True
        made.set_up(OVERRIDES, budget=1000)
        made.captures = folder / "captures"
        through_relays(made, made.captures)
        made.start_superlink()
        made.register()
        for site in made.sites:
            made.start_site(site)
        made.wait_for_sites()
        yield made
    finally:
        made.close()
        if mounted:
            subprocess.run(["umount", str(small)], check=False)
