"""Whose a folder is: what another user writes into it, its owner's programs cannot read any more."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from lensemble_flwr.errors import ConfigError


def check_owner(folder: Path) -> None:
    """Files of a folder are written by its owner, else the program that runs as that user cannot read them any more.

    Raises:
        ConfigError: the folder is another user's (root's, too).
    """
    if folder.is_dir() and (owner := folder.stat().st_uid) != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to the user {user_name(owner)}, and this is {user_name(os.geteuid())}.",
            f"Run this as its owner: sudo -u '{user_name(owner)}' lensemble ...",
        )


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is none; ``sudo -u`` takes that as ``#1000``."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"
