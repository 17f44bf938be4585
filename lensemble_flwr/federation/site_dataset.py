"""``dataset.yaml`` in a site's folder: where its recordings are and how they are read. The site's own file.

Nothing of it comes from a run and nothing of it is sent. A run can only name the public shape that it needs
(``conf/data/recordings.yaml``); what does not fit is refused as by a rule of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lensemble_flwr.config import Config
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError, PolicyViolation
from lensemble_flwr.federation.yaml_text import format_yaml, parse_yaml

DATASET = "dataset.yaml"

_COMMENTS = {
    "path": "The folder or file of the recordings; it is only read.",
    "format": "auto, lerobot, robomimic, folder, minari or zarr.",
    "frameskip": "Every how many-th picture is used. A run may ask for a certain number.",
    "camera": "Name of the camera; null: the only one.",
    "body": "Name of the robot. With a public body's name and action space, a site starts from its head.",
    "on_bad_episode": "error: stop at a bad recording; skip: leave it out.",
    "action_low": "Bounds of each action entry, in the recording's units; null: from its metadata.",
    "action_bounds": "Where bounds come from otherwise: metadata, or data (the smallest and largest value found).",
    "state_keys": "Columns of the proprioceptive state (model.proprio=local); null: none.",
    "cache": "Keep decoded pictures on this disk, in at most cache_gb gigabytes.",
}


@dataclass(frozen=True)
class SiteDataset:
    """One site's recordings.

    Attributes:
        path: absolute. spec: how they are read; its image size is the run's.
        cache: folder of the site for decoded pictures and hashes.
    """

    path: Path
    spec: RecordingSpec
    cache: Path


def load_dataset(site: Path) -> SiteDataset | None:
    """What the site's ``dataset.yaml`` says now; None where there is none.

    Raises:
        ConfigError: not YAML, an unknown key, or a value that cannot be.
    """
    path = site / DATASET
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        raise ConfigError(f"{path} cannot be read: {error}.", "Correct it, or restore it from a backup.") from error
    where, spec = recordings_at(tree, site, str(path))
    return SiteDataset(where, spec, site / "cache")


def recordings_at(tree: Any, folder: Path, name: str) -> tuple[Path, RecordingSpec]:
    """(path, spec) of a mapping with a ``path`` (relative to ``folder``) and keys of :class:`RecordingSpec`.

    Raises:
        ConfigError: no such mapping; says that it stands in ``name``.
    """
    if not isinstance(tree, dict) or not isinstance(tree.get("path"), str) or not tree["path"]:
        raise ConfigError(f"{name} names no path.", "Write path: FOLDER-OF-RECORDINGS.")
    if "image_size" in tree:
        raise ConfigError(f"{name} sets image_size.", "Leave it out: pictures get the size that a run's model reads.")
    try:
        spec = RecordingSpec.from_dict({key: value for key, value in tree.items() if key != "path"})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", error.remediation) from error
    return folder / Path(tree["path"]).expanduser(), spec


def save_dataset(site: Path, path: Path, spec: RecordingSpec) -> None:
    """Write ``dataset.yaml``, commented, with the keys that an operator is likely to change or has set."""
    plain, usual = spec.to_dict(), RecordingSpec().to_dict()
    kept = {key: value for key, value in plain.items() if key in _COMMENTS or value != usual[key]}
    kept.pop("image_size", None)
    tree = {"path": str(path), **kept}
    atomic_write(site / DATASET, format_yaml(tree, _COMMENTS).encode(), mode=0o600)


def check_dataset(config: Config, dataset: SiteDataset | None) -> None:
    """Whether a site can take part in a run on recordings, as far as its files need not be opened to tell.

    Raises:
        PolicyViolation: it has no ``dataset.yaml``, or reads its recordings in another rhythm than the run asks for.
    """
    if config.data.name != "recordings":
        return
    if dataset is None:
        raise PolicyViolation(
            "The run trains on each site's own recordings, and this site names none.",
            f"Write {DATASET} into its folder (lensemble site init --data PATH).",
            rule=DATASET,
        )
    wanted = config.data.frameskip
    if wanted is not None and dataset.spec.frameskip != wanted:
        raise PolicyViolation(
            f"The run asks for frameskip {wanted}, {DATASET} says {dataset.spec.frameskip}.",
            f"Change {DATASET}, or agree on another data.frameskip.",
            rule=DATASET,
        )


def check_simulated(config: Config, sites: Path) -> None:
    """Whether the sites of a simulated run on recordings all say where theirs are.

    Raises:
        ConfigError: some do not; names them.
    """
    if config.data.name != "recordings":
        return
    names = [f"site-{number:04d}" for number in range(config.federation.participants)]
    missing = [name for name in names if not (sites / name / DATASET).is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(names)} sites in {sites} name no recordings: {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}.",
            f"Make each: lensemble site init {sites / missing[0]} --data PATH; they are numbered from site-0000, one "
            "for each of federation.participants. With federation.sites_dir a run takes sites that are there.",
        )


def of_run(dataset: SiteDataset, config: Config) -> SiteDataset:
    """The same with the run's picture size."""
    return replace(dataset, spec=replace(dataset.spec, image_size=config.model.image_size))
