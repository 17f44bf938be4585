"""How a real site is run: ``site.json`` in its folder, written by ``lensemble site init`` and ``site connect``."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError

SETTINGS = "site.json"
NODE_KEY = "supernode.key"
SIMULATOR = "simulator"


@dataclass(frozen=True)
class SiteSettings:
    """What the site's start script and its client app need to know.

    Args:
        name: of the site; public, on the card that its coordinator gets.
        data: ``simulator`` (recordings made by the built-in simulator, kept in ``data/`` of the site), or the absolute
            path of a folder that holds the site's recordings; such a folder is only read.
        participant: which participant of the data set this site is; the simulator makes another body and sky for each.
        superlink: ``HOST:PORT`` of the coordinator, "" while it is not known.
        runtime_port: port on 127.0.0.1 that Flower's SuperNode serves its own client app at.
        ledger_head: absolute path of the ledger's head, best on another disk; "": beside the log.
    """

    name: str
    data: str = SIMULATOR
    participant: int = 0
    superlink: str = ""
    runtime_port: int = 9094
    ledger_head: str = ""

    def data_folder(self, site: Path) -> Path:
        """Where the recordings lie."""
        return site / "data" if self.data == SIMULATOR else Path(self.data)


def load_settings(site: Path) -> SiteSettings | None:
    """The settings of a real site, None where there are none (a simulated site).

    Raises:
        ConfigError: damaged, or lost: a site with the key of a SuperNode is no simulated one.
    """
    path = site / SETTINGS
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not os.path.lexists(path) and not (site / NODE_KEY).exists():
            return None
        raise ConfigError(f"{path} is missing.", "Restore it from a backup.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    kinds = {"name": str, "data": str, "participant": int, "superlink": str, "runtime_port": int, "ledger_head": str}
    fits = isinstance(tree, dict) and "name" in tree
    if not fits or any(name not in kinds or type(value) is not kinds[name] for name, value in tree.items()):
        raise ConfigError(f"{path} is not what `lensemble site init` writes.", "Restore it from a backup.")
    return SiteSettings(**tree)


def save_settings(site: Path, settings: SiteSettings) -> None:
    """Write the settings atomically."""
    atomic_write(site / SETTINGS, (json.dumps(dataclasses.asdict(settings), indent=1) + "\n").encode())
