"""``lensemble data prove`` and ``lensemble data verify``: open one episode of a site's commitment, and check one.

A proof is made by a site's operator and handed over by hand; the protocol never sends one (docs/commitment.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lensemble_flwr.config import load_config
from lensemble_flwr.data import commitment
from lensemble_flwr.data.commitment import InclusionProof
from lensemble_flwr.data.episodes import episode_hash
from lensemble_flwr.data.formats import RecordingSpec, open_recordings
from lensemble_flwr.data.hashed import HashedSource
from lensemble_flwr.errors import EXIT_FAILURE, EXIT_OK, CommitmentMismatch, ConfigError, DataError
from lensemble_flwr.federation.recorded_root import note_recordings
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.site_dataset import check_dataset, load_dataset
from lensemble_flwr.federation.task import Task
from lensemble_flwr.federation.tasks import build_task

_VERSION = 1
MAX_PROOF = 1 << 20

ReadSpec = Callable[[Sequence[str]], RecordingSpec]


def prove(argv: Sequence[str]) -> int:
    """Print a proof that one episode is under the root that a site joined a federation with."""
    parser = argparse.ArgumentParser(
        prog="lensemble data prove",
        description="A proof, as JSON, that one episode is under the dataset root that this site joined with.",
        epilog="On a CPU, in seconds: lensemble data prove /srv/lensemble/north --episode 3 OVERRIDES > proof.json",
    )
    parser.add_argument("site", type=Path, metavar="SITE", help="the site's folder")
    parser.add_argument("--episode", type=int, required=True, metavar="N", help="which of its recordings, from 0")
    parser.add_argument("--federation", metavar="HEX", help="id of the federation; default: the last one it joined")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="that run's configuration")
    options = parser.parse_intermixed_args(argv)
    site, task, number = _site(options.site, options.overrides)
    hashes = task.episode_hashes(number)
    if not 0 <= options.episode < len(hashes):
        raise ConfigError(f"--episode {options.episode}: the site has {len(hashes)} recordings, counted from 0.")
    federation = _federation(site, options.federation)
    salt, kept = site.dataset_salt(federation), site.dataset_root(federation)
    if kept is None or commitment.root(hashes, salt) != kept:
        raise CommitmentMismatch(
            f"The recordings are not those that the site joined federation {federation.hex()[:16]} with.",
            "Give that run's overrides, and the recordings as they were then (lensemble data verify SITE).",
        )
    tree = {
        "version": _VERSION,
        "federation": federation.hex(),
        "root": kept.hex(),
        "episode": hashes[options.episode].hex(),
        "proof": commitment.prove(hashes, salt, options.episode).to_dict(),
    }
    print(json.dumps(tree, indent=1))
    return EXIT_OK


def verify(argv: Sequence[str], read_spec: ReadSpec) -> int:
    """Check a proof against a root, or a site's recordings against all that it joined with.

    Args:
        argv: arguments. read_spec: KEY=VALUE words -> how recordings are read.
    """
    parser = argparse.ArgumentParser(
        prog="lensemble data verify",
        description="Without --proof: read a site's recordings anew and compare them with the roots that it joined "
        "with. With --proof: whether an episode is under a root; with --data, whether it is this recording.",
        epilog="Exit status: 0 it holds, 1 it does not. On a CPU: lensemble data verify --proof proof.json --root HEX",
    )
    parser.add_argument("site", nargs="?", type=Path, metavar="SITE", help="the site's folder")
    parser.add_argument("--proof", type=Path, metavar="FILE", help="what lensemble data prove printed")
    parser.add_argument("--root", metavar="HEX", help="the root, from the run's manifest.json and not from the site")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a recording that was handed over")
    parser.add_argument("--episode", type=int, default=0, metavar="N", help="its number there (default: 0)")
    parser.add_argument(
        "options", nargs="*", metavar="KEY=VALUE", help="the run's configuration; with --data, how it is read"
    )
    options = parser.parse_intermixed_args(argv)
    words = list(options.options)
    if options.proof is not None:
        if options.site is not None and "=" in str(options.site):
            words.insert(0, str(options.site))
        elif options.site is not None:
            raise ConfigError("Give SITE or --proof, not both.")
        if options.root is None:
            raise ConfigError("--proof needs --root.", "It is in the run's manifest.json (dataset_roots).")
        return _verify_proof(options.proof, options.root, options.data, options.episode, read_spec(words))
    if options.site is None:
        raise ConfigError("Name a site's folder, or a proof and a root.")
    return _verify_site(options.site, words)


def _verify_proof(path: Path, root: str, data: Path | None, number: int, spec: RecordingSpec) -> int:
    wanted = _hex(root, "--root")
    try:
        if path.stat().st_size > MAX_PROOF:
            raise ValueError("it is too large")
        tree: Any = json.loads(path.read_bytes())
        episode, proof = _hex(str(tree["episode"]), "episode"), InclusionProof.from_dict(tree["proof"])
        if tree["version"] != _VERSION:
            raise ValueError(f"version {tree['version']!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, DataError) as error:
        raise ConfigError(f"{path} is no proof: {error}.", "Ask the site for it again.") from error
    holds = commitment.verify(wanted, episode, proof)
    print(f"Episode {episode.hex()}\n{'is' if holds else 'is NOT'} under the root {wanted.hex()}.")
    if data is not None:
        source = open_recordings(data, spec)
        if not 0 <= number < len(source):
            raise ConfigError(f"--episode {number}: {data} has {len(source)} recordings, counted from 0.")
        same = episode_hash(source.episode(number)) == episode
        print(f"Recording {number} of {data} {'is' if same else 'is NOT'} that episode, read as asked.")
        holds = holds and same
    return EXIT_OK if holds else EXIT_FAILURE


def _verify_site(folder: Path, overrides: Sequence[str]) -> int:
    site, task, number = _site(folder, overrides)
    source = task.recordings(number) if hasattr(task, "recordings") else None
    before = task.episode_hashes(number)
    hashes = before
    if isinstance(source, HashedSource):
        hashes = source.recomputed()
    print(f"{len(hashes)} recordings were read.")
    sound = hashes == before
    if not sound:
        print("They are NOT those that were hashed before, though no file looks changed (size, time, inode).")
    joined = list(_federations(site))
    for federation in joined:
        holds = commitment.root(hashes, site.dataset_salt(federation)) == site.dataset_root(federation)
        print(f"federation {federation.hex()}: {'the same' if holds else 'OTHER'} recordings as joined with")
        sound = sound and holds
    if not joined:
        print("The site has joined no federation yet.")
    elif note_recordings(site, hashes):
        print("The ledger's last entry named other recordings; it now has an event with these.")
    return EXIT_OK if sound else EXIT_FAILURE


def _site(folder: Path, overrides: Sequence[str]) -> tuple[Site, Task, int]:
    """The site, its task in a run with these overrides, and its number."""
    folder = folder.expanduser().absolute()
    site = Site(folder)
    if (folder / "home").is_dir():
        os.environ["LENSEMBLE_HOME"] = str(folder / "home")
    config, dataset, settings = load_config(list(overrides)), load_dataset(folder), site.settings
    check_dataset(config, dataset)
    data_dir = settings.data_folder(folder) if settings is not None else None
    task = build_task(config, data_dir, site.policy.allowed_tasks, dataset)
    return site, task, settings.participant if settings is not None else 0


def _federations(site: Site) -> Iterator[bytes]:
    """Ids of the federations that a site joined, the last one last."""
    for path in sorted((site.folder / "federations").glob("*.root"), key=lambda p: p.stat().st_mtime_ns):
        yield bytes.fromhex(path.stem)


def _federation(site: Site, wanted: str | None) -> bytes:
    joined = list(_federations(site))
    if wanted is not None:
        found = [f for f in joined if f.hex().startswith(wanted.lower())]
        if len(found) != 1:
            raise ConfigError(f"The site joined {len(found)} federations whose id begins with {wanted!r}.")
        return found[0]
    if not joined:
        raise ConfigError("The site has joined no federation yet, so there is no root.", "Join a run first.")
    if len(joined) > 1:
        print(f"The last of {len(joined)} federations: {joined[-1].hex()}", file=sys.stderr)
    return joined[-1]


def _hex(text: str, what: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ConfigError(f"{what} is not 64 hex digits.")
    return raw
