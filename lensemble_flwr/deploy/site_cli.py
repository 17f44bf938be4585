"""``lensemble site init|connect|roster|prepare|refresh|rotate|check``: one real participant, in one folder."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lensemble_flwr.data.formats import RecordingSpec, open_recordings
from lensemble_flwr.deploy.bundle import bundle_hash
from lensemble_flwr.deploy.keys import read_node_key
from lensemble_flwr.deploy.site_check import check_site
from lensemble_flwr.deploy.site_folder import (
    connect_site,
    create_site,
    real_settings,
    rotate_node_key,
    write_settings,
    write_shim,
)
from lensemble_flwr.deploy.site_roster import show_or_change
from lensemble_flwr.errors import EXIT_FAILURE, EXIT_OK, ConfigError
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_dataset import DATASET, check_dataset, load_dataset, save_dataset
from lensemble_flwr.federation.site_settings import SIMULATOR, SiteSettings
from lensemble_flwr.owners import check_owner

if TYPE_CHECKING:
    from lensemble_flwr.data.formats.recordings import Recordings


def site_command(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status."""
    options = parse(_parser(), argv)
    if options.run is not _check:  # which says so itself
        check_owner(options.folder.expanduser())
    return int(options.run(options))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Arguments whose overrides may stand before, between and after the options."""
    options, rest = parser.parse_known_args(list(argv))
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _init(options: argparse.Namespace) -> int:
    folder: Path = options.folder.expanduser().absolute()
    if options.participant < 0:
        raise ConfigError(f"--participant {options.participant} must be at least 0.")
    budgets = (options.max_epsilon_local, options.max_epsilon_central)
    # A central budget counts on the others' noise, and a coordinator could invent the others.
    wary = options.max_epsilon_local is None and not options.trust_coordinator
    if options.non_private and budgets != (None, None):
        raise ConfigError("--non-private contradicts a budget.", "An update without noise spends all: leave one out.")
    wary = wary and not options.non_private
    default = None if options.non_private else 8.0
    policy = Policy(
        max_epsilon_local=options.max_epsilon_local,
        max_epsilon_central=default if budgets == (None, None) else options.max_epsilon_central,
        unlimited=options.non_private,
        allow_non_private=options.non_private,
        delta=options.delta,
        allow_two_party=options.allow_two_party,
        min_roster=2 if options.allow_two_party else 3,
        allowed_fabs=(bundle_hash(),),
        require_roster=wary,
        require_consistency=wary,
    )
    data = options.data if options.data == SIMULATOR else str(Path(options.data).expanduser().absolute())
    recordings = _recordings(options, data)
    head = "" if options.ledger_head is None else str(options.ledger_head.expanduser().absolute())
    settings = SiteSettings(folder.name, data, options.participant, "", options.runtime_port, head)
    site = create_site(folder, settings, policy)
    if recordings is not None:
        save_dataset(folder, Path(data), recordings.spec)
    quoted = shlex.quote(str(folder))
    print(f"The site {settings.name} is in {folder}.")
    if recordings is not None:
        print(f"Data:          {len(recordings)} recordings in {data}, body {recordings.embodiment},")
        print(f"               actions: {recordings.action_spec.describe()}; {folder / DATASET} says how they are read")
    else:
        print(f"Data:          participant {options.participant} of {data} (--participant; each site takes another)")
    print(f"Identity:      {site.identity.hex()}")
    print(f"SuperNode key: {read_node_key(folder / 'supernode.key')}")
    print(f"1. Read and change its rules:   {folder / 'policy.yaml'}")
    print(f"2. Give to the coordinator:     {folder / 'card.json'} (holds the two lines above, nothing secret)")
    print(f"3. With the coordinator's help: lensemble site connect {quoted} HOST:PORT CA.CRT")
    if wary:
        print(f"   and pin the other sites:     lensemble site roster {quoted} --add NAME=IDENTITY ...")
    print(f"4. Before each run:             lensemble site check {quoted} [KEY=VALUE ...]")
    print(f"5. Start:                       {folder / 'supernode.sh'} (or {folder / 'lensemble-site.service'})")
    return EXIT_OK


def _recordings(options: argparse.Namespace, data: str) -> Recordings | None:
    """The recordings that ``--data`` names, opened once; None for generated ones.

    Raises:
        ConfigError, DataError: they cannot be read as asked.
    """
    given = {"format": options.format, "camera": options.camera, "body": options.body, "frameskip": options.frameskip}
    asked = {key: value for key, value in given.items() if value is not None}
    if data == SIMULATOR or next(Path(data).glob("lander-*"), None) is not None:
        if asked:
            raise ConfigError(f"--{next(iter(asked))} describes recordings, and --data names none.")
        return None
    return open_recordings(Path(data), RecordingSpec.from_dict(asked))


def _connect(options: argparse.Namespace) -> int:
    site = Site(options.folder.expanduser().absolute())
    name = connect_site(site, options.superlink, options.authority, options.roster)
    print(f"The site's SuperNode will connect to {options.superlink} and trust the authority\n{name}")
    print("Compare this fingerprint with the coordinator by another way than the file came.")
    if site.policy.allowed_coordinators is None:
        print(f'To pin it, write into {site.folder / "policy.yaml"}:\nallowed_coordinators: ["{name}"]')
    return EXIT_OK


def _prepare(options: argparse.Namespace) -> int:
    from lensemble_flwr.config import load_config
    from lensemble_flwr.federation.tasks import build_task

    site = Site(options.folder.expanduser().absolute())
    settings = real_settings(site)
    os.environ["LENSEMBLE_HOME"] = str(site.folder / "home")
    allowed = site.policy.allowed_tasks  # overrides come from the coordinator as often as not
    config, dataset = load_config(options.overrides), load_dataset(site.folder)
    check_dataset(config, dataset)
    task = build_task(config, settings.data_folder(site.folder), allowed, dataset)

    def tell(what: str, done: int, total: int) -> None:
        if done >= total or done * 4 // total != (done - 1) * 4 // total:
            print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)

    task.prepare_participant(settings.participant, options.public, tell)
    print(f"The site {settings.name} has what this run needs.")
    return EXIT_OK


def _roster(options: argparse.Namespace) -> int:
    return show_or_change(options.folder.expanduser().absolute(), options.add, options.remove)


def _refresh(options: argparse.Namespace) -> int:
    site = Site(options.folder.expanduser().absolute())
    settings = real_settings(site)
    if options.runtime_port is not None:
        settings = dataclasses.replace(settings, runtime_port=options.runtime_port)
    write_shim(site.folder)
    write_settings(site.folder, settings)
    print(f"bin/flwr-clientapp and supernode.sh are this release's. Its own app has the SHA-256\n{bundle_hash()}")
    print(f"It runs here once allowed_fabs in {site.folder / 'policy.yaml'} lists it.")
    return EXIT_OK


def _rotate(options: argparse.Namespace) -> int:
    site = Site(options.folder.expanduser().absolute())
    old = rotate_node_key(site)
    print(f"Old SuperNode key: {old or 'lost'}")
    print(f"New SuperNode key: {read_node_key(site.folder / 'supernode.key')}")
    print("The identity, the ledger and the rosters of others are as they were. The old key is deleted.")
    print(f"1. Give to the coordinator: {site.folder / 'card.json'}")
    print("   It runs lensemble coordinator admit and register, and flwr supernode unregister for the old key, which")
    print("   counts until then: the id is that of lensemble coordinator nodes before it registers the new one.")
    print("2. Restart the SuperNode.")
    return EXIT_OK


def _check(options: argparse.Namespace) -> int:
    folder: Path = options.folder.expanduser().absolute()
    if not Site.exists(folder) and not (folder / "site.json").exists():
        raise ConfigError(f"There is no site in {folder}.", "Correct the path, or make one: lensemble site init.")
    config = None
    if options.overrides:
        from lensemble_flwr.config import load_config

        config = load_config(options.overrides)
    if (folder / "home").is_dir():
        os.environ["LENSEMBLE_HOME"] = str(folder / "home")  # where its SuperNode keeps public files
    found = check_site(folder, config, online=not options.offline)
    print(found.text())
    print("The site is sound." if found.sound else "Not as it stands: see the lines that say REFUSED.")
    return EXIT_OK if found.sound else EXIT_FAILURE


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (1 to 65535)")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lensemble site",
        description="One real participant in one folder: keys, policy, ledger, start script.",
        epilog="On a CPU, in seconds: lensemble site init /srv/lensemble/north",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        command.add_argument("folder", type=Path, metavar="PATH", help="the site's folder; its last part is its name")
        return command

    init = add("init", _init, "make a site: keys, ledger, policy, start script")
    init.add_argument(
        "--data",
        default=SIMULATOR,
        metavar="PATH",
        help="the site's recordings (docs/own-data.md); default: recordings by the built-in simulator",
    )
    init.add_argument("--format", metavar="NAME", help="of the recordings; default: found out")
    init.add_argument("--camera", metavar="NAME", help="which camera; default: the only one")
    init.add_argument("--body", metavar="NAME", help="name of the robot; default: what the recordings say")
    init.add_argument("--frameskip", type=int, metavar="K", help="use every K-th picture (default: 1)")
    init.add_argument("--participant", type=int, default=0, metavar="N", help="which participant of the data set")
    init.add_argument("--max-epsilon-local", type=float, metavar="E", help="lifetime budget against anyone")
    init.add_argument(
        "--max-epsilon-central",
        type=float,
        metavar="E",
        help="lifetime budget against readers of the models (default: 8, if none is given)",
    )
    init.add_argument("--delta", type=float, default=1e-5, metavar="D", help="of both (default: %(default)s)")
    init.add_argument(
        "--allow-two-party",
        action="store_true",
        help="accept a federation of two: the peer then sees this site's noised update in every sum",
    )
    init.add_argument(
        "--non-private",
        action="store_true",
        help="consent to updates without noise, without any budget: masks hide them from the coordinator, and the "
        "models can tell about the recordings",
    )
    init.add_argument(
        "--runtime-port",
        type=_port,
        default=9094,
        metavar="PORT",
        help="on 127.0.0.1, for Flower's own use (default: %(default)s)",
    )
    init.add_argument(
        "--trust-coordinator",
        action="store_true",
        help="accept rounds without a pinned roster though only the central budget is limited: a coordinator that "
        "invents participants then sees this site's update with little noise",
    )
    init.add_argument(
        "--ledger-head",
        type=Path,
        metavar="FILE",
        help="keep the ledger's head there, on another disk: then going back to an old copy of one disk is found out",
    )
    connect = add("connect", _connect, "tell a site its coordinator")
    connect.add_argument("superlink", metavar="HOST:PORT", help="of the coordinator's SuperLink")
    connect.add_argument("authority", type=Path, metavar="CA.CRT", help="the coordinator's ca.crt")
    connect.add_argument("--roster", type=Path, metavar="FILE", help="the coordinator's roster.json")
    roster = add("roster", _roster, "show or change whom this site is willing to sum with")
    roster.description = (
        "Show or change the pinned roster: the participants that this site is willing to sum with. Get their "
        "identities from them, not from the coordinator, and compare the roster's hash with theirs."
    )
    roster.add_argument("--add", nargs="+", default=[], metavar="NAME=HEX", help="allow these identities")
    roster.add_argument("--remove", nargs="+", default=[], metavar="NAME", help="allow these no more")
    prepare = add("prepare", _prepare, "make what a run needs here: simulated recordings, public files")
    prepare.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the run's configuration")
    prepare.add_argument(
        "--public",
        type=Path,
        metavar="DIR",
        help="public files from the coordinator (lensemble coordinator public); else made here",
    )
    refresh = add("refresh", _refresh, "write bin/flwr-clientapp and supernode.sh again after an upgrade")
    refresh.add_argument("--runtime-port", type=_port, metavar="PORT", help="another one than until now")
    add("rotate", _rotate, "make a new SuperNode key; nothing else changes")
    check = add(
        "check", _check, "say what the site allows, has spent, and would refuse; exit status 0 sound, 1 not, 2 no site"
    )
    check.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a run's configuration, to be judged too")
    check.add_argument("--offline", action="store_true", help="do not visit the SuperLink")
    return parser
