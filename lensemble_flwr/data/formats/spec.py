"""How a site's own recordings are to be read: one frozen description, and the function that opens them.

docs/own-data.md shows the same from a user's side.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lensemble_flwr.data.episodes import MAX_SIDE, MAX_STEPS, MIN_SIDE, check_name
from lensemble_flwr.errors import ConfigError

if TYPE_CHECKING:
    from lensemble_flwr.data.formats.reader import Reader
    from lensemble_flwr.data.formats.recordings import Recordings

FORMATS = ("auto", "lerobot", "robomimic", "folder", "minari", "zarr")
_CHOICES = {
    "format": FORMATS,
    "on_bad_episode": ("error", "skip"),
    "fit": ("crop", "pad", "stretch"),
    "colour": ("rgb", "bgr"),
    "action_bounds": ("metadata", "data"),
}


@dataclass(frozen=True)
class RecordingSpec:
    """Everything that decides what is read from a folder of recordings, and how.

    Attributes:
        format: one of :data:`FORMATS`; "auto" looks at the files.
        image_size: side of the square pictures, pixels.
        frameskip: every frameskip-th picture is used; the actions in between are concatenated, so that nothing that
            was done to the world is lost and the width of an action says how much time it covers.
        camera: name of the camera; None takes the only one (or the first colour camera by name).
        body: name of the embodiment; None takes it from the metadata, else the name of the format.
        on_bad_episode: "error" stops at the first bad episode; "skip" checks all once and leaves bad ones out.
        fit: how a picture becomes square: "crop" its middle, "pad" with black, "stretch".
        crop: (top, left, height, width) in pixels of the recording, cut out before ``fit``.
        colour: order of the channels in the files.
        white: value of white where pictures are not uint8 (255.0, 1.0, 65535.0).
        action_key: column of the actions; None takes the format's own name for it.
        action_low, action_high: bounds of each action entry (one number: of all); they win over the metadata.
        action_bounds: where bounds come from otherwise: "metadata", or "data" (the smallest and largest value found).
        relative: actions are differences to the present pose, not targets.
        state_keys: columns joined into the state of a time step; None leaves states out.
        max_steps: at most so many steps of each episode, after frameskip; None for all (:data:`MAX_STEPS`).
        cache: keep decoded pictures on the local disk. cache_gb: bound of all such caches in one folder.
        follow_links: follow symbolic links that leave the folder (a download cache is made of them).

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    format: str = "auto"
    image_size: int = 64
    frameskip: int = 1
    camera: str | None = None
    body: str | None = None
    on_bad_episode: str = "error"
    fit: str = "crop"
    crop: tuple[int, int, int, int] | None = None
    colour: str = "rgb"
    white: float = 255.0
    action_key: str | None = None
    action_low: tuple[float, ...] | None = None
    action_high: tuple[float, ...] | None = None
    action_bounds: str = "metadata"
    relative: bool = False
    state_keys: tuple[str, ...] | None = None
    max_steps: int | None = None
    cache: bool = True
    cache_gb: float = 10.0
    follow_links: bool = False

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            if not _is(getattr(self, name), kind):
                raise ConfigError(f"recordings: {name}={getattr(self, name)!r} is not {kind}.", "Correct its type.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                text = f"recordings: {name}={getattr(self, name)!r} is unknown."
                raise ConfigError(text, f"Use one of {', '.join(choices)}.")
        limits = {
            "image_size": (MIN_SIDE, MAX_SIDE),
            "frameskip": (1, 1000),
            "max_steps": (1, MAX_STEPS),
            "cache_gb": (0, math.inf),
            "white": (1e-9, 1e9),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"recordings: {name}={value!r} is not in {low}..{high}.", "Choose a value in range.")
        if self.crop is not None and (min(self.crop[:2]) < 0 or min(self.crop[2:]) < 1):
            raise ConfigError(f"recordings: crop={self.crop} is no rectangle.", "Give top, left, height, width.")
        for bound in (self.action_low, self.action_high):
            if bound is not None and not (bound and all(math.isfinite(v) for v in bound)):
                raise ConfigError("recordings: an action bound is not finite.", "Give numbers.")
        if (self.action_low is None) != (self.action_high is None):
            raise ConfigError("recordings: only one of action_low and action_high is given.", "Give both.")
        if self.body is not None:
            check_name(self.body, "body")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecordingSpec:
        """From plain values, as a YAML file has them: lists become tuples, one number a bound of every entry.

        Raises:
            ConfigError: an unknown key, or as above.
        """
        if not isinstance(values, Mapping):
            raise ConfigError("the description of the recordings is no mapping.", "Give KEY: VALUE lines.")
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"recordings: {key!r} is unknown.", f"Known are {', '.join(known)}.")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in values.items()}
        for key in ("action_low", "action_high"):
            bound = plain.get(key)
            if isinstance(bound, int | float) and not isinstance(bound, bool):
                plain[key] = (float(bound),)
            elif isinstance(bound, tuple) and all(_is(v, "float") for v in bound):
                plain[key] = tuple(float(v) for v in bound)
        for key in ("white", "cache_gb"):
            if _is(plain.get(key), "int"):
                plain[key] = float(plain[key])
        if isinstance(plain.get("state_keys"), str):
            plain["state_keys"] = (plain["state_keys"],)
        return cls(**plain)

    def to_dict(self) -> dict[str, Any]:
        """Inverse of :meth:`from_dict`."""
        return asdict(self)


def open_recordings(
    path: Path | str,
    spec: RecordingSpec | None = None,
    *,
    cache_dir: Path | str | None = None,
    log: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recordings:
    """Open a folder (or file) of recordings. Reads metadata; no picture is decoded before it is asked for.

    With ``on_bad_episode="skip"`` all episodes are checked once, pictures included; the result is kept beside the
    frame cache and holds as long as the files keep their stamps.

    Args:
        path: as the format wants it (docs/own-data.md).
        cache_dir: folder of the frame caches; None for ``frames`` in the project's home folder.
        log: gets one line per skipped episode; None warns, which a site writes to its own log. Never sent.
        progress: called as progress(episodes checked, episodes) during such a check.

    Raises:
        DataError: not there, damaged, no episodes, or no such camera or column. ConfigError: a package is missing.
    """
    from lensemble_flwr.data.formats.recordings import Recordings
    from lensemble_flwr.home import home

    spec = spec or RecordingSpec()
    reader = open_reader(Path(path), spec)
    folder = Path(cache_dir) if cache_dir is not None else home() / "frames"
    return Recordings(reader, spec, folder, log or (lambda text: warnings.warn(text, stacklevel=3)), progress)


def open_reader(path: Path, spec: RecordingSpec) -> Reader:
    """The format's reader for this path, before scaling, frameskip and resizing."""
    from lensemble_flwr.data.formats.detect import detect

    found = detect(path, spec)
    return found.open(spec)


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("| None")
    kind = kind.removesuffix(" | None")
    if kind in ("int", "float"):
        number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
        return number and not isinstance(value, bool) and math.isfinite(value)
    if kind.startswith("tuple["):
        entries = kind[6:-1].split(", ")
        if not isinstance(value, tuple) or ("..." not in entries and len(value) != len(entries)):
            return False
        return all(_is(v, entries[0]) for v in value)
    return isinstance(value, {"str": str, "bool": bool}[kind])


_TYPES = {f.name: str(f.type) for f in fields(RecordingSpec)}
