"""``lensemble coordinator COMMAND``: the machine that runs the SuperLink."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lensemble_flwr.deploy.bundle import bundle_hash
from lensemble_flwr.deploy.coordinator_folder import (
    Coordinator,
    admit,
    create_coordinator,
    dismiss,
    nodes,
    open_coordinator,
    read_roster,
    register,
    renew,
)
from lensemble_flwr.deploy.site_cli import parse
from lensemble_flwr.deploy.tls import days_left, visit
from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import EXIT_OK
from lensemble_flwr.owners import check_owner
from lensemble_flwr.reporting.wording import clean


def coordinator_command(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status."""
    options = parse(_parser(), argv)
    return int(options.run(options))


def _folder(options: argparse.Namespace) -> Coordinator:
    return open_coordinator(options.folder.expanduser())


def _own_folder(options: argparse.Namespace) -> Coordinator:
    """For commands that write there. Raises ConfigError for another user's."""
    check_owner(options.folder.expanduser())
    return _folder(options)


def _init(options: argparse.Namespace) -> int:
    hosts = [options.host, *options.san]
    coordinator = create_coordinator(options.folder.expanduser(), options.name, hosts, options.port)
    folder = coordinator.folder
    print(f"The coordinator {coordinator.name} is in {folder}.")
    print(f"Authority: {coordinator.fingerprint}")
    print(f"App:       {bundle_hash()}")
    print(f"1. Give to every site:     {folder / 'ca.crt'}, the address {coordinator.address}, and both lines above")
    print(f"2. Let each site in:       lensemble coordinator admit {shlex.quote(str(folder))} CARD.JSON")
    print(f"3. Start the SuperLink:    {folder / 'superlink.sh'} (or {folder / 'lensemble-coordinator.service'})")
    print(f"4. Hand over the keys:     lensemble coordinator register {shlex.quote(str(folder))}")
    home = shlex.quote(str(folder / "flwr"))
    print(f"5. Run:                    FLWR_HOME={home} lensemble run --superlink {coordinator.name} ...")
    print(f"   or add to ~/.flwr/config.toml:\n{coordinator.connection}", end="")
    return EXIT_OK


def _admit(options: argparse.Namespace) -> int:
    coordinator = _own_folder(options)
    for card in options.cards:
        name = admit(coordinator, card)
        print(f"{name}  {read_roster(coordinator)[name]}")
    print(f"{len(read_roster(coordinator))} sites are in {coordinator.folder / 'roster.json'}.")
    return EXIT_OK


def _dismiss(options: argparse.Namespace) -> int:
    dismiss(_own_folder(options), options.name)
    home = shlex.quote(str(options.folder.expanduser().absolute() / "flwr"))
    print(f"Its key stays in the SuperLink until: FLWR_HOME={home} flwr supernode unregister NODE_ID")
    print("(lensemble coordinator nodes tells the id).")
    return EXIT_OK


def _register(options: argparse.Namespace) -> int:
    for name, what in register(_folder(options)):
        print(f"{name}  {what}", flush=True)
    return EXIT_OK


def _ping(options: argparse.Namespace) -> int:
    coordinator = _folder(options)
    server = visit(coordinator.address, coordinator.folder / "ca.crt")
    assert server is not None
    print(f"{coordinator.address} answers; its certificate is valid for {days_left(server.certificate):.0f} days.")
    return EXIT_OK


def _nodes(options: argparse.Namespace) -> int:
    found = nodes(_folder(options))
    for name, status in found:
        print(clean(f"{name}  {status}"))
    if not found:
        print("The SuperLink knows no site yet: lensemble coordinator register.")
    return EXIT_OK


def _renew(options: argparse.Namespace) -> int:
    coordinator = renew(_own_folder(options), options.host or [])
    print(f"New server certificate for {', '.join(coordinator.hosts)}; restart the SuperLink.")
    return EXIT_OK


def _public(options: argparse.Namespace) -> int:
    from lensemble_flwr.config import load_config
    from lensemble_flwr.federation.tasks import build_task, own_choice

    config = load_config(options.overrides)
    task = build_task(config, allowed=own_choice(config))
    task.prepare(lambda what, done, total: print(f"{what}: {done}/{total}", file=sys.stderr) if done >= total else None)
    with file_errors(options.folder, "write"):
        options.folder.mkdir(parents=True, exist_ok=True)
        for path in task.public_files():
            atomic_write(options.folder / path.name, path.read_bytes(), mode=0o644)
    print(
        f"{len(task.public_files())} public files are in {options.folder}; their base hash is {task.base_hash.hex()}."
    )
    print("Each site: lensemble site prepare SITE --public DIR with the same overrides.")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lensemble coordinator",
        description="The machine that runs Flower's SuperLink: certificates, admitted sites, start script.",
        epilog="On a CPU, in seconds: lensemble coordinator init /srv/lensemble/coordinator --host lab.example.org",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        command.add_argument("folder", type=Path, metavar="DIR", help="the coordinator's folder")
        return command

    init = add("init", _init, "make certificates, start script and connection entry")
    init.add_argument("--host", required=True, metavar="NAME", help="host name or address that sites use")
    init.add_argument("--san", action="append", default=[], metavar="NAME", help="another one; may be repeated")
    init.add_argument("--name", default="consortium", help="of the connection (default: %(default)s)")
    init.add_argument("--port", type=int, default=8000, help="of the SuperLink (default: %(default)s)")
    admit_ = add("admit", _admit, "let sites in, by their cards")
    admit_.add_argument("cards", nargs="+", type=Path, metavar="CARD.JSON")
    add("dismiss", _dismiss, "forget a site").add_argument("name", metavar="SITE")
    add("register", _register, "hand the admitted sites' keys to the running SuperLink")
    add("ping", _ping, "visit the SuperLink as a site would; exit status 0 when it answers")
    add("nodes", _nodes, "list the sites' SuperNodes and whether they are connected")
    renew_ = add("renew", _renew, "issue a new server certificate by the same authority")
    renew_.add_argument("--host", action="append", metavar="NAME", help="all names anew; default: those it has")
    public = add("public", _public, "write the public files of a run, for sites to verify and use")
    public.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the run's configuration")
    return parser
