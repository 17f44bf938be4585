"""``data=recordings``: each site trains on its own recordings; public ones, pinned by their hash, are for the rest.

The public recordings (warm start, landmarks, rehearsals, held-out evaluation) lie with the coordinator. Sites get the
files that are made of them, whose names depend on the pinned fingerprint alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lensemble_flwr.config import Config
from lensemble_flwr.data.episodes import EpisodeSource
from lensemble_flwr.data.formats.spec import RecordingSpec, open_recordings
from lensemble_flwr.data.hashed import HashedSource, Selection
from lensemble_flwr.errors import ConfigError, DataError
from lensemble_flwr.federation.site_dataset import SiteDataset, of_run, recordings_at
from lensemble_flwr.federation.task import Progress
from lensemble_flwr.federation.world_data import HeldOut, StateTargets
from lensemble_flwr.federation.yaml_text import parse_yaml
from lensemble_flwr.home import home

_LEAST_HELD_OUT = 2
_PIN = "lensemble coordinator public DIR with the same overrides prints it."


class RecordingsWorld:
    """See the module and :class:`.world_data.WorldData`."""

    main_set = rehearsal_set = "heldout"
    unseen_metric = "unseen_r2"

    def __init__(self, config: Config, data_dir: Path | None = None, dataset: SiteDataset | None = None) -> None:
        data = config.data
        self._config = config
        self._dataset = None if dataset is None else of_run(dataset, config)
        if not 0 < data.heldout < 1:
            raise ConfigError(f"data.heldout={data.heldout!r} is no share between 0 and 1.", "Use 0.25.")
        if data.pseudo_episodes < 1:
            raise ConfigError(f"data.pseudo_episodes={data.pseudo_episodes} must be at least 1.")
        if any(not isinstance(c, int) or isinstance(c, bool) or c < 0 for c in data.state_columns):
            raise ConfigError(f"data.state_columns={list(data.state_columns)} are no column numbers.", "Count from 0.")
        pin, public = data.public_sha256, data.public
        if public is not None and not isinstance(public, str):
            raise ConfigError(f"data.public={public!r} is no path.")
        if pin is not None and not (isinstance(pin, str) and len(pin) == 64 and set(pin) <= set("0123456789abcdef")):
            raise ConfigError(f"data.public_sha256={pin!r} is no SHA-256 hash.", _PIN)
        if data.frameskip is not None and (type(data.frameskip) is not int or data.frameskip < 1):
            raise ConfigError(f"data.frameskip={data.frameskip!r} is no number of pictures.", "Use null, or 1 or more.")
        self.share = int(data.pseudo_episodes)
        self.state_targets: StateTargets | None = StateTargets(tuple(data.state_columns), ())
        self.labelled = bool(data.state_probe)

    # ------------------------------------------------------------------ names of what is public

    def key(self) -> Any:
        data = self._config.data
        if data.public_sha256 is None:
            raise ConfigError("data.public_sha256 is not set: which public recordings does this run start from?", _PIN)
        return ["recordings", data.public_sha256, data.heldout, self._config.seed]

    heldout_key = key

    # ------------------------------------------------------------------ the coordinator's public recordings

    @cached_property
    def _sets(self) -> dict[str, HashedSource]:
        """The public recordings of each body, by its name."""
        where = self._config.data.public
        if where is None:
            raise ConfigError("data.public is not set.", "Name the folder of the public recordings.")
        path = Path(where).expanduser()
        if path.is_dir():
            trees: Any = {p.name: {"path": p.name} for p in sorted(path.iterdir()) if p.is_dir() and p.name[0] != "."}
            folder = path
        else:
            try:
                trees, folder = parse_yaml(path.read_text(encoding="utf-8")), path.parent
            except (OSError, ValueError) as error:
                raise ConfigError(f"data.public={where} cannot be read: {error}.", "Correct the path.") from error
        if not isinstance(trees, dict) or not trees:
            raise ConfigError(
                f"data.public={where} names no recordings.",
                "Give a folder with one sub-folder a body, or a YAML file with lines BODY: {path: FOLDER}.",
            )
        found = {}
        for body in sorted(trees):
            source, spec = recordings_at(trees[body], folder, f"{path}, {body}")
            values = {**spec.to_dict(), "body": body, "image_size": self._config.model.image_size}
            kept = home() / "public"
            found[body] = opened(source, RecordingSpec.from_dict(values), kept)
        return found

    @cached_property
    def embodiments(self) -> tuple[str, ...]:
        return tuple(self._sets)

    def pin(self) -> str:
        """The fingerprint of the public recordings that are there: bodies, action spaces and episodes."""
        digest = hashlib.sha256(b"lensemble.public-recordings\x00v1\x00")
        for body, source in self._sets.items():
            line = json.dumps([body, source.action_spec.public(), source.fingerprint], sort_keys=True)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    @cached_property
    def _split(self) -> dict[str, tuple[Selection, Selection]]:
        """(public, held out) of each body; by hash, so that neither names nor order of files matter."""
        return {body: self._split_one(body, source) for body, source in self._sets.items()}

    def _split_one(self, body: str, source: HashedSource) -> tuple[Selection, Selection]:
        hashes = source.hashes()
        first = {digest: index for index, digest in reversed(list(enumerate(hashes)))}  # a copy of one counts once
        salt = f"lensemble held out {self._config.seed} ".encode()
        order = sorted(first, key=lambda digest: hashlib.sha256(salt + digest).digest())
        count = max(_LEAST_HELD_OUT, round(self._config.data.heldout * len(order)))
        if count >= len(order):
            raise DataError(
                f"{body}: {len(order)} different public episodes; {count} are held out and one at least must be left.",
                "Give more public recordings.",
            )
        parts = order[count:], order[:count]
        names = f"public {body}"[:64], f"held out {body}"[:64]
        made = [Selection(n, source, [first[h] for h in part], part) for n, part in zip(names, parts, strict=True)]
        return made[0], made[1]

    def public(self, body: str) -> EpisodeSource:
        return self._split[body][0]

    def heldout(self) -> Mapping[str, Mapping[str, HeldOut]]:
        return {self.main_set: {body: HeldOut(held) for body, (_, held) in self._split.items()}}

    def prepare(self, progress: Progress) -> None:
        pin = self._config.data.public_sha256
        for body, source in self._sets.items():
            self._check_actions(body, source)
            held = self._split[body][1]
            if self.labelled and any(held.episode(i).states is None for i in range(len(held))):
                raise ConfigError(
                    f"data.state_probe=true, and public recordings of {body} have no states.", "Set state_keys there."
                )
        found = self.pin()
        if pin is None:
            counts = ", ".join(f"{len(source)} of {body}" for body, source in self._sets.items())
            raise ConfigError(
                f"data.public_sha256 is not set. The recordings there ({counts}) have data.public_sha256={found}",
                "Add it to the overrides, here and at every site.",
            )
        if pin != found:
            raise ConfigError(
                f"data.public_sha256={pin}, but the recordings in {self._config.data.public} have {found}.",
                "Restore them, or have every party name the new ones.",
            )

    # ------------------------------------------------------------------ a site's own recordings

    @cached_property
    def _own(self) -> HashedSource:
        if self._dataset is None:
            raise DataError("There are no recordings of a participant here.", "They lie with the sites: dataset.yaml.")
        source = opened(self._dataset.path, self._dataset.spec, self._dataset.cache)
        self._check_actions("these recordings", source)
        return source

    def _check_actions(self, whose: str, source: EpisodeSource) -> None:
        spec, data = source.action_spec, self._config.data
        if spec.kind not in data.actions or spec.width > data.max_action_width:
            raise DataError(
                f"{whose} have {spec.describe()} actions ({spec.kind}, {spec.width} wide); the run takes "
                f"{', '.join(map(str, data.actions))} up to {data.max_action_width} wide.",
                "Agree on data.actions and data.max_action_width.",
            )

    def participant(self, index: int) -> EpisodeSource:
        return self._own

    def body(self, index: int) -> str:
        return self._own.embodiment

    def prepare_participant(self, index: int, progress: Progress) -> None:
        source = self._own
        for number, _ in enumerate(source.hashes()):
            progress("reading recordings", number + 1, len(source))


def opened(
    path: Path, spec: RecordingSpec, cache: Path, progress: Callable[[int, int], None] | None = None
) -> HashedSource:
    """Recordings with their hashes kept in ``cache``."""
    source = open_recordings(path, spec, cache_dir=cache / "frames")
    how = json.dumps([spec.to_dict(), source.embodiment, source.action_spec.to_dict()], sort_keys=True)
    stamps = hashlib.sha256(f"{source.stamps} {len(source)} {how}".encode()).hexdigest()
    name = hashlib.sha256(f"{path.absolute()} {spec.image_size}".encode()).hexdigest()[:20]
    return HashedSource(source, stamps, cache / f"{name}.hashes", progress)
