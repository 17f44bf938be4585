"""A source whose episode hashes are computed once and kept beside the files' stamps, and a selection of a source.

Hashing decodes every picture, so it is done when the recordings change and not in every message. The cache tells a
change by stamps (size, modification time and inode of each file, and how they are read): who can set those back can
hide a change from it, which is why an operator can have everything computed again (:meth:`HashedSource.recomputed`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from lensemble_flwr.data.episodes import (
    ActionSpec,
    Episode,
    EpisodeSource,
    check_index,
    check_name,
    episode_hash,
    fingerprint,
)
from lensemble_flwr.durable import atomic_write, file_errors

_VERSION = 1
Progress = Callable[[int, int], None]


class HashedSource:
    """An :class:`~lensemble_flwr.data.episodes.EpisodeSource` with its hashes in a file.

    Args:
        source: the episodes; may be opened late.
        stamps: names the state of the files and the way they are read; another one means other hashes.
        path: where the hashes are kept, for the owner only: they are not blinded.
        progress: called as progress(episodes hashed, episodes).
    """

    def __init__(self, source: EpisodeSource, stamps: str, path: Path, progress: Progress | None = None) -> None:
        self.source, self.stamps, self.path, self._progress = source, stamps, path, progress
        self._hashes: list[bytes] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def action_spec(self) -> ActionSpec:
        return self.source.action_spec

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.hashes())

    def __len__(self) -> int:
        return len(self.source)

    @property
    def embodiment(self) -> str:
        """Name of the body."""
        return str(getattr(self.source, "embodiment", "") or self.source.episode(0).embodiment)

    def episode(self, index: int) -> Episode:
        return self.source.episode(index)

    def label(self, index: int) -> str:
        """The episode's name in the files, or its number."""
        named = getattr(self.source, "label", None)
        return str(named(index)) if callable(named) else f"episode {index}"

    def hashes(self) -> list[bytes]:
        """Hash (32 bytes) of each episode in order: the kept ones if the stamps are those of today.

        Raises:
            DataError: an episode cannot be read. ArtifactError: they cannot be kept.
        """
        if self._hashes is None:
            self._hashes = self._kept()
            if self._hashes is None:
                self._hashes = self.recomputed()
        return list(self._hashes)

    def recomputed(self) -> list[bytes]:
        """Read every episode anew, and keep the hashes."""
        found = []
        for index in range(len(self.source)):
            found.append(episode_hash(self.source.episode(index)))
            if self._progress:
                self._progress(index + 1, len(self.source))
        tree = {"version": _VERSION, "stamps": self.stamps, "hashes": [h.hex() for h in found]}
        with file_errors(self.path.parent, "create"):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(self.path, json.dumps({**tree, "check": _check(tree)}).encode())
        self._hashes = found
        return list(found)

    def _kept(self) -> list[bytes] | None:
        try:
            tree = json.loads(self.path.read_bytes())
            check = tree.pop("check")
            if tree["version"] != _VERSION or tree["stamps"] != self.stamps or check != _check(tree):
                return None
            found = [bytes.fromhex(h) for h in tree["hashes"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return found if len(found) == len(self.source) and all(len(h) == 32 for h in found) else None


def _check(tree: dict) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


class Selection:
    """Some episodes of a source, in the given order.

    Args:
        name: of the selection. indices: into ``source``. hashes: of the selected episodes, if they are known.
    """

    def __init__(
        self, name: str, source: EpisodeSource, indices: Sequence[int], hashes: Sequence[bytes] | None = None
    ) -> None:
        check_name(name, "source name")
        self._name, self._source, self._indices = name, source, tuple(indices)
        self._hashes = None if hashes is None else tuple(hashes)

    @property
    def name(self) -> str:
        return self._name

    @property
    def action_spec(self) -> ActionSpec:
        return self._source.action_spec

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.hashes())

    def __len__(self) -> int:
        return len(self._indices)

    def episode(self, index: int) -> Episode:
        check_index(index, len(self), self._name)
        return self._source.episode(self._indices[index])

    def hashes(self) -> list[bytes]:
        """Hash of each selected episode."""
        if self._hashes is None:
            self._hashes = tuple(episode_hash(self.episode(i)) for i in range(len(self)))
        return list(self._hashes)
