"""``lensemble site``: what an operator does with a site's folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lensemble_flwr.errors import EXIT_OK, ConfigError
from lensemble_flwr.federation.roster import ROSTER_FILE, Roster, load_roster, parse_key, save_roster
from lensemble_flwr.federation.site import Site


def site_command(argv: Sequence[str]) -> int:
    """Run ``lensemble site ACTION ...``; returns the exit status. Raises LensembleError."""
    parser = argparse.ArgumentParser(prog="lensemble site", description="What an operator does with a site's folder.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    roster = actions.add_parser(
        "roster",
        help="show or change whom this site is willing to sum with",
        description="Show or change the pinned roster: the participants that this site is willing to sum with. Get "
        "their identities from them, not from the coordinator, and compare the roster's hash with theirs.",
        epilog="lensemble site roster /srv/site --add hospital-b=IDENTITY",
    )
    roster.add_argument("folder", metavar="FOLDER", help="the site's folder")
    roster.add_argument("--add", nargs="+", default=[], metavar="NAME=HEX", help="allow these identities")
    roster.add_argument("--remove", nargs="+", default=[], metavar="NAME", help="allow these no more")
    arguments = parser.parse_args(argv)
    return _roster(Path(arguments.folder), arguments.add, arguments.remove)


def _roster(folder: Path, add: Sequence[str], remove: Sequence[str]) -> int:
    site, path = Site(folder), folder / ROSTER_FILE
    roster = load_roster(path)
    if add or remove:
        roster = _changed(roster or Roster({}), add, remove)
        save_roster(path, roster)
    print(f"this site: {site.identity.hex()}")
    if roster is None:
        print("no roster is pinned: this site sums with whomever the coordinator names")
        return EXIT_OK
    for name, key in sorted(roster.members.items()):
        print(f"{name:<24} {key.hex()}" + ("  (this site)" if key == site.identity else ""))
    print(f"{len(roster.members)} members, hash {roster.digest}: compare it with the other operators'")
    if roster.strangers([site.identity]):
        print(f"This site is missing in its own roster and refuses every round: --add NAME={site.identity.hex()}")
    return EXIT_OK


def _changed(roster: Roster, add: Sequence[str], remove: Sequence[str]) -> Roster:
    members = dict(roster.members)
    for name in remove:
        if name not in members:
            raise ConfigError(f"The roster has no {name!r}.", f"It has: {', '.join(sorted(members)) or 'nobody'}.")
        del members[name]
    for entry in add:
        name, separator, text = entry.partition("=")
        if not separator:
            raise ConfigError(f"{entry!r} is not of the form NAME=HEX.")
        key = parse_key(text)
        if members.get(name, key) != key:
            raise ConfigError(f"The roster has another key for {name!r}.", f"First: --remove {name}")
        members[name] = key
    return Roster(members)
