"""``lensemble site roster``: whom a site is willing to sum with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lensemble_flwr.errors import EXIT_FAILURE, EXIT_OK, ConfigError
from lensemble_flwr.federation.roster import ROSTER_FILE, Roster, load_roster, parse_key, save_roster
from lensemble_flwr.federation.site import Site


def show_or_change(folder: Path, add: Sequence[str], remove: Sequence[str]) -> int:
    """Change the roster as asked, then print it; exit status 1 if it refuses every round. Raises ConfigError.

    Whoever adds others and is not in it itself is added, too.
    """
    site, path = Site(folder), folder / ROSTER_FILE
    roster = load_roster(path)
    if add or remove:
        own = [name for name, key in (roster or Roster({})).members.items() if key == site.identity]
        if any(entry.endswith(f"={site.identity.hex()}") for entry in add):  # its own name may change
            remove = [*remove, *(name for name in own if name not in remove)]
        roster = _changed(roster or Roster({}), add, remove)
        if add and roster.strangers([site.identity]):  # a roster without oneself would refuse every round
            settings = site.settings
            name = settings.name if settings is not None else folder.name
            roster = _changed(roster, [f"{name}={site.identity.hex()}"], [])
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
        return EXIT_FAILURE
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
