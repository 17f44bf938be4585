"""Episodes: what a participant owns, what a source must offer, and the bytes that an episode's hash covers.

An :class:`Episode` is T actions between T + 1 frames. A :class:`EpisodeSource` is the seam for a user's own data:
implement its few members (or fill a :class:`MemorySource`) and the rest of the library can train on it. Nothing in
this module reads files or leaves the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import MAX_ACTION_DIM, ActionSpec
from lensemble_flwr.errors import ContractViolation, DataError

MAX_STEPS = 100_000
MAX_STATE_DIM = 1024
MIN_SIDE, MAX_SIDE = 8, 1024
_MAX_META = 32
_MAX_NAME = 64

_EPISODE_TAG = b"lensemble.episode\x00v1\x00"

MetaValue = str | int | float | bool


@dataclass(frozen=True, eq=False)
class Episode:
    """One recorded trajectory. Arrays are checked once, then read-only.

    Attributes:
        frames: uint8 [T + 1, H, W, 3], RGB.
        actions: float32 [T, a]; row t is what was done between frame t and frame t + 1.
        states: float32 [T + 1, s] or None. A label for evaluation; never an input of training, not in the hash.
        embodiment: name of the body, chooses the participant's action head.
        meta: small public or local facts about the recording (at most 32 scalars); not in the hash.

    Raises:
        DataError: wrong shape, dtype or length, non-finite numbers, or an empty recording.
    """

    frames: NDArray[np.uint8]
    actions: NDArray[np.float32]
    states: NDArray[np.float32] | None
    embodiment: str
    meta: Mapping[str, MetaValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.embodiment, "embodiment")
        _check_array(self.frames, "frames", np.uint8, 4)
        _check_array(self.actions, "actions", np.float32, 2)
        steps, (points, height, width, channels) = self.actions.shape[0], self.frames.shape
        if not 1 <= steps <= MAX_STEPS:
            raise DataError(f"an episode has {steps} actions, not 1..{MAX_STEPS}.", "Drop or split the recording.")
        if points != steps + 1:
            raise DataError(
                f"an episode has {points} frames and {steps} actions; frames must be one more.",
                "Give the frame before the first action, and one after each action.",
            )
        if channels != 3 or not (MIN_SIDE <= height <= MAX_SIDE and MIN_SIDE <= width <= MAX_SIDE):
            raise DataError(
                f"frames are {height}x{width}x{channels}; expected RGB of {MIN_SIDE}..{MAX_SIDE} pixels a side.",
                "Convert to RGB and resize in the source.",
            )
        if not 1 <= self.actions.shape[1] <= MAX_ACTION_DIM:
            raise DataError(
                f"an action has {self.actions.shape[1]} entries, not 1..{MAX_ACTION_DIM}.", "Check the data."
            )
        if not np.isfinite(self.actions).all():
            raise DataError("an action is not finite.", "Drop the recording, or repair it in the source.")
        if self.states is not None:
            _check_array(self.states, "states", np.float32, 2)
            if len(self.states) != points or not 1 <= self.states.shape[1] <= MAX_STATE_DIM:
                raise DataError(
                    f"states have shape {self.states.shape}, expected ({points}, 1..{MAX_STATE_DIM}).",
                    "Give one state label per frame, or None.",
                )
            if not np.isfinite(self.states).all():
                raise DataError("a state label is not finite.", "Drop the labels (states=None) or repair them.")
        if not isinstance(self.meta, Mapping) or len(self.meta) > _MAX_META:
            raise DataError(f"meta must be a mapping of at most {_MAX_META} entries.", "Keep meta small.")
        for key, value in self.meta.items():
            if not isinstance(key, str) or not isinstance(value, str | int | float | bool):
                raise DataError(f"meta entry {key!r} is not a plain scalar.", "Use str, int, float or bool.")
        # Views, so that freezing does not touch the caller's own arrays.
        for name in ("frames", "actions", "states"):
            array = getattr(self, name)
            if array is not None:
                view = array.view()
                view.flags.writeable = False
                object.__setattr__(self, name, view)
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy cannot be pickled; and check again on arrival
        return Episode, (self.frames, self.actions, self.states, self.embodiment, dict(self.meta))

    def __len__(self) -> int:
        """Number of actions T."""
        return int(self.actions.shape[0])


@runtime_checkable
class EpisodeSource(Protocol):
    """A participant's data, as the library sees it. Implement this to bring your own.

    All episodes of a source have one body (``action_spec``) and one frame size. ``fingerprint`` is a hex digest of
    the content in its order: it says whether the data changed, stays at the site, and is never sent.
    """

    @property
    def name(self) -> str: ...
    @property
    def action_spec(self) -> ActionSpec: ...
    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def episode(self, index: int) -> Episode: ...


class MemorySource:
    """A source over episodes that are already in memory.

    Raises:
        DataError: no episodes, bodies or frame sizes differ, or actions are not those of ``action_spec``.
    """

    def __init__(self, name: str, action_spec: ActionSpec, episodes: Sequence[Episode]) -> None:
        check_name(name, "source name")
        if not episodes:
            raise DataError(f"source {name!r} has no episodes.", "Record or select at least one episode.")
        first = episodes[0]
        for episode in episodes:
            action_spec.check(episode.actions)
            if episode.embodiment != first.embodiment or episode.frames.shape[1:] != first.frames.shape[1:]:
                raise DataError(
                    f"source {name!r} mixes bodies or frame sizes.", "Give each body and frame size its own source."
                )
        self._name, self._spec, self._episodes = name, action_spec, tuple(episodes)

    @property
    def name(self) -> str:
        return self._name

    @property
    def action_spec(self) -> ActionSpec:
        return self._spec

    @property
    def fingerprint(self) -> str:
        return fingerprint(episode_hash(e) for e in self._episodes)

    def __len__(self) -> int:
        return len(self._episodes)

    def episode(self, index: int) -> Episode:
        check_index(index, len(self._episodes), self._name)
        return self._episodes[index]


def iterate(source: EpisodeSource) -> Iterator[Episode]:
    """The episodes of ``source`` in order."""
    for index in range(len(source)):
        yield source.episode(index)


def canonical_chunks(episode: Episode) -> Iterator[bytes | memoryview]:
    """The canonical bytes of an episode, in pieces (frames are not copied).

    Layout: version tag; body name (u32 length, UTF-8); then frames and actions, each as dtype name (u32 length,
    ASCII), rank u32, dims u64, little-endian C-order bytes. Lengths are part of the dims, so no two episodes share
    an encoding. State labels and meta are left out: they are notes about a recording, not the recording, and one
    with and one without labels must have the same hash.
    """
    yield _EPISODE_TAG
    yield _framed(episode.embodiment.encode())
    for array, dtype in ((episode.frames, "|u1"), (episode.actions, "<f4")):
        yield _framed(dtype.encode())
        yield struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape)
        yield np.ascontiguousarray(array, dtype=dtype).data.cast("B")


def canonical_bytes(episode: Episode) -> bytes:
    """:func:`canonical_chunks` in one piece (tests, interchange)."""
    return b"".join(canonical_chunks(episode))


def episode_hash(episode: Episode) -> bytes:
    """SHA-256 (32 bytes) of the canonical bytes. Equal recordings are found by this; it is not blinded: local only."""
    digest = hashlib.sha256()
    for chunk in canonical_chunks(episode):
        digest.update(chunk)
    return digest.digest()


def episode_hashes(source: EpisodeSource) -> list[bytes]:
    """Hash of each episode of ``source``, in order: what the dataset root commits to."""
    return [episode_hash(episode) for episode in iterate(source)]


def fingerprint(hashes: Iterator[bytes] | Sequence[bytes]) -> str:
    """Hex digest of a sequence of episode hashes, order included."""
    digest = hashlib.sha256(b"lensemble.source\x00v1\x00")
    for item in hashes:
        digest.update(item)
    return digest.hexdigest()


def check_name(name: str, what: str) -> None:
    """Raise DataError unless ``name`` is a short printable ASCII name."""
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isascii() or not name.isprintable():
        raise DataError(f"{what} {name!r} is not a printable ASCII name of 1..{_MAX_NAME} characters.", "Rename it.")


def check_index(index: int, length: int, name: str) -> None:
    """Raise ContractViolation unless 0 <= index < length."""
    if not 0 <= index < length:
        raise ContractViolation(f"episode {index} of {name!r} does not exist (it has {length}).")


def _framed(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def _check_array(array: object, name: str, dtype: type, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise DataError(f"{name} are {got}, expected {np.dtype(dtype)} of rank {ndim}.", "Convert them in the source.")
