"""Making a real site's folder: keys, ledger, policy, the judge of apps, start script; and the card for its coordinator.

site.json, supernode.key, supernode.pub, card.json, ca.crt, roster.json, bin/flwr-clientapp, supernode.sh,
lensemble-site.service beside what :mod:`lensemble_flwr.federation.site` lists; flwr/ and home/ are Flower's and the
project's own folders of this site.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lensemble_flwr.deploy import shim
from lensemble_flwr.deploy.keys import read_node_key, write_node_key
from lensemble_flwr.deploy.scripts import JUDGE, REFUSES, TASK_PROGRAMS, own_user, supernode_script, systemd_unit
from lensemble_flwr.deploy.tls import fingerprint, read_authority, split_address
from lensemble_flwr.durable import atomic_write, file_errors, sync_folder
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.roster import ROSTER_FILE, parse_roster, save_roster
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_settings import NODE_KEY, SIMULATOR, SiteSettings, save_settings

CARD_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PLAIN = re.compile(r"[A-Za-z0-9._/+@=, -]+")
"""No colon: the folder's ``bin`` is an entry of a PATH."""
_LONGEST_FIRST_LINE = 240


def check_name(name: str) -> str:
    """A site's name, good for file names. Raises ConfigError for another."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a site's name.", "Use letters, digits, dots, hyphens; at most 63.")
    return name


def create_site(folder: Path, settings: SiteSettings, policy: Policy) -> Site:
    """A new site's folder, whole but for the coordinator's address and certificate (:func:`connect_site`).

    Raises:
        ConfigError: there is a site already, a bad name or path.
        ArtifactError: it cannot be written, or another process is making a site in it.
    """
    check_name(settings.name)
    folder = folder.absolute()
    if not _PLAIN.fullmatch(str(folder)):
        raise ConfigError(
            f"{str(folder)!r} has characters that Flower's --node-config or a PATH cannot hold.", "Move it."
        )
    if settings.data != SIMULATOR and not Path(settings.data).exists():
        raise ConfigError(f"--data {settings.data} is not there.", f"Name recordings, or {SIMULATOR!r}.")
    head = Path(settings.ledger_head) if settings.ledger_head else None
    if head is not None and not head.parent.is_dir():
        raise ConfigError(f"There is no folder {head.parent} for the ledger's head.", "Make it, on another disk.")
    Site.check_free(folder)
    with file_errors(folder, "write"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(folder):
        Site.check_free(folder)  # nobody has made one since
        with file_errors(folder, "write"):
            folder.chmod(0o700)
            for name in ("bin", "flwr", "home", "data"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
        # The identity comes last, so that whatever breaks off before is done again by another call.
        write_node_key(folder / NODE_KEY, folder / "supernode.pub")
        write_shim(folder)
        write_settings(folder, settings)
        site = Site.create(folder, policy, policy_file="policy.yaml", ledger_head=head)
        write_card(site, settings)
    return site


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two that make a site in one folder would mix their keys. Raises ArtifactError for the second."""
    with file_errors(folder, "lock"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with file_errors(folder, "lock"):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def write_shim(folder: Path) -> None:
    """``bin/flwr-clientapp``: this Python, isolated from its environment, and the judge's own text; and beside it what
    refuses all other kinds of apps."""
    for name, text in programs().items():
        atomic_write(folder / "bin" / name, text.encode(), mode=0o700)


def programs() -> dict[str, str]:
    """What the site's ``bin`` must hold, by name."""
    return {name: shim_text() if name == JUDGE else REFUSES for name in TASK_PROGRAMS}


def shim_text() -> str:
    """What ``bin/flwr-clientapp`` must hold here."""
    python = Path(sys.executable).parent / "python"  # the same for python3, as another program may have been started
    if len(str(python)) > _LONGEST_FIRST_LINE or re.search(r"\s", str(python)):
        raise ConfigError(
            f"{python} cannot stand in the first line of a program: it has blanks or is too long.",
            "Install the environment in another folder.",
        )
    return f"#!{python} -I\n" + Path(shim.__file__).read_text(encoding="utf-8")


def write_settings(folder: Path, settings: SiteSettings) -> None:
    """``site.json`` and the scripts that follow from it."""
    save_settings(folder, settings)
    write_scripts(folder, settings)


def start_script(settings: SiteSettings) -> str:
    """What ``supernode.sh`` must hold here."""
    return supernode_script(settings.superlink or "UNKNOWN", settings.runtime_port)


def write_scripts(folder: Path, settings: SiteSettings) -> None:
    """``supernode.sh`` and the unit that runs it."""
    script = folder / "supernode.sh"
    atomic_write(script, start_script(settings).encode(), mode=0o700)
    unit = systemd_unit(f"lensemble site {settings.name}", script, own_user())
    atomic_write(folder / "lensemble-site.service", unit.encode(), mode=0o644)


def write_card(site: Site, settings: SiteSettings) -> Path:
    """``card.json``: the site's public names, for the coordinator. Nothing in it is secret."""
    card = {
        "version": CARD_VERSION,
        "name": settings.name,
        "identity": site.identity.hex(),
        "supernode_key": read_node_key(site.folder / NODE_KEY),
    }
    path = site.folder / "card.json"
    atomic_write(path, (json.dumps(card, indent=1) + "\n").encode(), mode=0o644)
    return path


def connect_site(site: Site, superlink: str, authority: Path, roster: Path | None = None) -> str:
    """Tell a site its coordinator; returns the fingerprint of the authority that it trusts from now on.

    Raises:
        ConfigError: no real site, a bad address, no authority, or one that the policy does not allow.
    """
    settings = real_settings(site)
    split_address(superlink)
    name = fingerprint(read_authority(authority))
    allowed = site.policy.allowed_coordinators
    if allowed is not None and name not in allowed:
        raise ConfigError(
            f"{authority} has the fingerprint {name}, which the rule allowed_coordinators does not list.",
            "Compare it with the coordinator by another way than this file came; then change the policy.",
            rule="allowed_coordinators",
        )
    with file_errors(authority, "read"):
        atomic_write(site.folder / "ca.crt", authority.read_bytes(), mode=0o644)
        if roster is not None:
            save_roster(site.folder / ROSTER_FILE, parse_roster(roster.read_bytes()))
    write_settings(site.folder, dataclasses.replace(settings, superlink=superlink))
    write_card(site, settings)  # it is the last file of a new site, and may be missing
    return name


def rotate_node_key(site: Site) -> str:
    """A new SuperNode key and card; returns the old public key, "" if it was lost.

    Identity, ledger and policy stay as they are.
    The private key is replaced last but for the card: after a crash the old one works, or another call makes it right.

    Raises:
        ConfigError: no real site, or the old key cannot be read. ArtifactError: the new one cannot be written.
    """
    settings, private = real_settings(site), site.folder / NODE_KEY
    old = read_node_key(private) if private.is_file() else ""
    new = private.with_suffix(".new")
    write_node_key(new, site.folder / "supernode.pub")
    with file_errors(private, "replace"):
        new.replace(private)
        sync_folder(site.folder)
    write_card(site, settings)
    return old


def real_settings(site: Site) -> SiteSettings:
    """The settings of a real site. Raises ConfigError for a simulated one."""
    settings = site.settings
    if settings is None:
        raise ConfigError(f"{site.folder} is a simulated site.", "Make a real one with `lensemble site init`.")
    return settings
