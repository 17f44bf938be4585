"""Whether a SuperLink answers, before anything is prepared for it."""

from __future__ import annotations

from pathlib import Path

from lensemble_flwr.deploy.tls import visit
from lensemble_flwr.launch import find_connection


def check_superlink(name: str) -> None:
    """Visit the SuperLink that a connection of Flower's configuration leads to, as Flower itself would.

    Raises:
        ConfigError: no such connection, or a certificate that is not vouched for.
        LaunchError: it does not answer.
    """
    connection = find_connection(name)
    authority = connection.get("root-certificates")
    insecure = bool(connection.get("insecure", False))
    visit(str(connection["address"]), Path(str(authority)) if authority else None, insecure=insecure)
