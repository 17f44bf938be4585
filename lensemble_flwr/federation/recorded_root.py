"""Whether a site's recordings are those of before: a root that only the site can compute, in its ledger."""

from __future__ import annotations

from collections.abc import Sequence

from lensemble_flwr.data import commitment
from lensemble_flwr.federation.site import Site

DATASET_ROOT = "dataset_root"
"""Kind of the ledger's events: ``federation`` and ``root`` of a join (empty: no join), ``recordings``."""

_OWN = bytes(32)  # no federation: salts the root that a site compares with itself


def own_root(site: Site, hashes: Sequence[bytes]) -> bytes:
    """Root of the recordings with these hashes under a salt that belongs to no federation."""
    return commitment.root(hashes, site.dataset_salt(_OWN))


def note_recordings(site: Site, hashes: Sequence[bytes]) -> bool:
    """Enter the recordings in the site's ledger if its last entry names others, and say whether it did.

    Raises:
        LedgerError: the ledger is in use or cannot be written.
    """
    found = own_root(site, hashes).hex()
    with site.ledger() as ledger:
        known = ledger.events(DATASET_ROOT)
        if known and known[-1].data.get("recordings") == found:
            return False
        ledger.event(DATASET_ROOT, {"federation": "", "root": "", "recordings": found})
    return True
