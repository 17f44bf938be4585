"""The coordinator's folder: certificate authority, server certificate, the sites that may connect, start script.

ca.key, ca.crt           certificate authority; ca.crt goes to every site
server.key, server.crt   of the SuperLink, for the names in coordinator.json
sites/NAME.pub           SuperNode public keys of the sites that may connect
roster.json              the sites' Ed25519 identities, by name
superlink.sh             starts the SuperLink (state.db beside it)
flwr/config.toml         Flower's connection entry, for `lensemble run --superlink NAME`
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lensemble_flwr.deploy.keys import check_public_key
from lensemble_flwr.deploy.scripts import own_user, superlink_script, systemd_unit
from lensemble_flwr.deploy.site_folder import CARD_VERSION, check_name
from lensemble_flwr.deploy.tls import alternative_name, fingerprint, issue_server, make_authority, read_authority, visit
from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import ConfigError, LaunchError
from lensemble_flwr.federation.roster import ROSTER_FILE, Roster, load_roster, parse_key, save_roster
from lensemble_flwr.launch import words_of


@dataclass(frozen=True)
class Coordinator:
    """An opened folder (:func:`open_coordinator`)."""

    folder: Path
    name: str
    hosts: tuple[str, ...]
    port: int

    @property
    def address(self) -> str:
        """``HOST:PORT`` that sites use."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def fingerprint(self) -> str:
        """Of the authority, for sites to compare."""
        return fingerprint(read_authority(self.folder / "ca.crt"))

    @property
    def connection(self) -> str:
        """The entry of Flower's config.toml."""
        entry = f"[superlink.{self.name}]\naddress = {json.dumps(self.address)}\n"
        return entry + f"root-certificates = {json.dumps(str(self.folder / 'ca.crt'))}\n"


def create_coordinator(folder: Path, name: str, hosts: list[str], port: int) -> Coordinator:
    """A new coordinator's folder.

    Args:
        name: of the connection, as in ``lensemble run --superlink NAME``.
        hosts: names and addresses of this machine, as sites use them; the first one stands in the connection entry.

    Raises:
        ConfigError: there is one already, or a bad name. ArtifactError: it cannot be written.
    """
    folder = folder.absolute()
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"{name!r} cannot name a connection.", "Use letters, digits, hyphens and underscores.")
    if re.search(r"[\x00-\x1f\x7f'\"\\]", str(folder)):
        raise ConfigError(f"{str(folder)!r} has characters that a systemd unit cannot run.", "Choose another folder.")
    if not 0 < port < 65536:
        raise ConfigError(f"{port} is no port.")
    if any((folder / name).exists() for name in ("ca.key", "coordinator.json")):  # the key may be kept elsewhere
        raise ConfigError(
            f"There is a coordinator in {folder} already; its sites trust its authority.",
            "For new names or an expiring server certificate: lensemble coordinator renew.",
        )
    for host in hosts:
        alternative_name(host)
    with file_errors(folder, "write"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for sub in ("sites", "flwr", "home"):
            (folder / sub).mkdir(mode=0o700, exist_ok=True)
    coordinator = Coordinator(folder, name, tuple(hosts), port)
    make_authority(folder / "ca.key", folder / "ca.crt", hosts[0])
    _write(coordinator)
    _write_roster(folder, {})
    return coordinator


def renew(coordinator: Coordinator, hosts: list[str]) -> Coordinator:
    """A new server key and certificate by the same authority; sites notice nothing."""
    renewed = Coordinator(coordinator.folder, coordinator.name, tuple(hosts or coordinator.hosts), coordinator.port)
    _write(renewed)
    return renewed


def _write(coordinator: Coordinator) -> None:
    folder = coordinator.folder
    names = [*coordinator.hosts, "localhost", "127.0.0.1"]
    issue_server((folder / "ca.key", folder / "ca.crt"), folder / "server.key", folder / "server.crt", names)
    script = folder / "superlink.sh"
    atomic_write(script, superlink_script(coordinator.port).encode(), mode=0o700)
    unit = systemd_unit(f"lensemble coordinator {coordinator.name}", script, own_user())
    atomic_write(folder / "lensemble-coordinator.service", unit.encode(), mode=0o644)
    config = f"[superlink]\ndefault = {json.dumps(coordinator.name)}\n\n{coordinator.connection}"
    atomic_write(folder / "flwr" / "config.toml", config.encode())
    about = {"version": 1, "name": coordinator.name, "hosts": list(coordinator.hosts), "port": coordinator.port}
    atomic_write(folder / "coordinator.json", (json.dumps(about, indent=1) + "\n").encode())


def open_coordinator(folder: Path) -> Coordinator:
    """Open a folder of :func:`create_coordinator`. Raises ConfigError when it is none."""
    folder = folder.absolute()
    try:
        about = json.loads((folder / "coordinator.json").read_text(encoding="utf-8"))
        return Coordinator(folder, str(about["name"]), tuple(map(str, about["hosts"])), int(about["port"]))
    except PermissionError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}.", "Run this as its owner.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is no coordinator's folder.", "Make it: lensemble coordinator init.") from error


def admit(coordinator: Coordinator, card_file: Path) -> str:
    """Let a site in, by its card; returns its name. Its SuperNode can connect after :func:`register`.

    Raises:
        ConfigError: no card, or its name or identity is taken by another site.
    """
    card = _read_card(card_file)
    name, roster = check_name(card["name"]), read_roster(coordinator)
    if name in roster and roster[name] != card["identity"]:
        raise ConfigError(
            f"The site {name} was admitted with another identity.",
            "If its keys were replaced, remove it first: lensemble coordinator dismiss.",
        )
    other = next((n for n, identity in roster.items() if identity == card["identity"] and n != name), None)
    if other is not None:
        raise ConfigError(f"The identity of {card_file} is that of the site {other}.", "Each site has its own keys.")
    key = check_public_key(card["supernode_key"])
    parse_key(card["identity"])  # before anything is written
    atomic_write(coordinator.folder / "sites" / f"{name}.pub", (key + "\n").encode(), mode=0o644)
    _write_roster(coordinator.folder, {**roster, name: card["identity"]})
    return name


def _read_card(path: Path) -> dict[str, str]:
    try:
        card: Any = json.loads(path.read_text(encoding="utf-8"))
        fits = card["version"] == CARD_VERSION and len(bytes.fromhex(card["identity"])) == 32
        if not fits or not isinstance(card["name"], str) or not isinstance(card["supernode_key"], str):
            raise ValueError("another version")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no site's card.", "It is card.json in the site's folder.") from error
    return dict(card)


def dismiss(coordinator: Coordinator, name: str) -> None:
    """Forget a site's key and identity. Raises ConfigError when it is not there."""
    roster = read_roster(coordinator)
    if roster.pop(name, None) is None:
        raise ConfigError(f"There is no site {name!r}.", f"There are: {', '.join(sorted(roster)) or 'none'}.")
    (coordinator.folder / "sites" / f"{name}.pub").unlink(missing_ok=True)
    _write_roster(coordinator.folder, roster)


def read_roster(coordinator: Coordinator) -> dict[str, str]:
    """Ed25519 identities (hex) of the admitted sites, by name."""
    path = coordinator.folder / ROSTER_FILE
    roster = load_roster(path)
    if roster is None:
        raise ConfigError(f"There is no {path}.", "Restore it from a backup.")
    return {name: key.hex() for name, key in sorted(roster.members.items())}


def _write_roster(folder: Path, members: dict[str, str]) -> None:
    save_roster(folder / ROSTER_FILE, Roster({name: parse_key(text) for name, text in members.items()}))


def flwr(coordinator: Coordinator, *arguments: str, timeout_s: float = 60.0) -> str:
    """What one of Flower's commands says over this coordinator's own connection entry.

    Raises:
        LaunchError: the SuperLink does not answer; or the command failed, with its words.
    """
    visit(coordinator.address, coordinator.folder / "ca.crt")  # Flower takes a minute to say that nobody answers
    own = {"FLWR_HOME": str(coordinator.folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "NO_COLOR": "1"}
    environment = {**os.environ, **own, "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = [str(Path(sys.executable).parent / "flwr"), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"Flower's command {arguments[0]} failed: {error}.") from error
    text = done.stdout + done.stderr
    if done.returncode:
        raise LaunchError(f"flwr {' '.join(arguments[:2])} failed: {words_of(text)[-300:]}")
    return text


def register(coordinator: Coordinator) -> Iterable[tuple[str, str]]:
    """Hand the keys of all admitted sites to the running SuperLink, which keeps them in its database.

    Yields:
        (site, "registered" or "was registered").
    """
    for name in sorted(read_roster(coordinator)):
        key = coordinator.folder / "sites" / f"{name}.pub"
        try:
            words = ("register", str(key), coordinator.name, "--name", name, "--format", "json")
            node = _answer(flwr(coordinator, "supernode", *words), "node-id")
            atomic_write(key.with_suffix(".node"), f"{node}\n".encode(), mode=0o644)
            yield name, "registered"
        except LaunchError as error:
            if "already" not in error.message:
                raise
            yield name, "was registered"


def nodes(coordinator: Coordinator) -> list[tuple[str, str]]:
    """(which, status) of every SuperNode that the SuperLink knows; status as Flower says it (online, offline ...).

    Which is Flower's node id, with the site's name where this folder registered the site's present key as that node.

    Raises:
        LaunchError: the SuperLink does not answer.
    """
    names = {path.read_text().strip(): path.stem for path in (coordinator.folder / "sites").glob("*.node")}
    found = _answer(flwr(coordinator, "supernode", "list", coordinator.name, "--format", "json"), "nodes")
    try:
        known = [(str(node["node-id"]), str(node["status"]).lower()) for node in found]
    except (KeyError, TypeError) as error:
        raise LaunchError(f"flwr supernode list answered in an unknown way: {str(found)[:200]}") from error
    return sorted((f"{names[node]} (node {node})" if node in names else f"node {node}", how) for node, how in known)


def _answer(text: str, name: str) -> Any:
    """A value of the JSON that a command of Flower's printed, after lines of its own."""
    try:
        return json.JSONDecoder().raw_decode(text, text.index("{"))[0][name]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(f"Flower answered in an unknown way: {words_of(text)[-300:]}") from error
