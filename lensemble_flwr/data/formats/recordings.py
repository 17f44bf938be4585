"""A site's recordings as the library trains on them: an :class:`~lensemble_flwr.data.episodes.EpisodeSource`.

A reader gives raw episodes; here pictures become square and small, actions are scaled to [-1, 1] by public bounds or
the data's own metadata, and every frameskip-th picture is used. With frameskip k the action of a step is the k
recorded actions one after another (the oldest first): absolute targets and differences alike, since their sum would
lose targets and their order matters to the world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import ActionSpec
from lensemble_flwr.data.episodes import (
    MAX_STEPS,
    Episode,
    check_index,
    episode_hash,
    fingerprint,
    iterate,
)
from lensemble_flwr.data.formats.actions import ActionScale, action_scale, clean_name
from lensemble_flwr.data.formats.cache import FrameCache, cache_key, read_notes, write_notes
from lensemble_flwr.data.formats.files import stamps
from lensemble_flwr.data.formats.pictures import square
from lensemble_flwr.data.formats.reader import Raw, Reader, check_length
from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.data.windows import Batch, Packed
from lensemble_flwr.errors import ArtifactError, ContractViolation, DataError

_RECENT = 64 << 20
"""Bytes of actions that are kept in memory for windows."""

_VERSION = 1
"""Raise it when the same file gives other pictures."""


@dataclass(frozen=True)
class BadEpisode:
    """An episode that cannot be used: its name in the files, what is wrong, and a remedy."""

    label: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.label}: {self.problem}"


class Recordings:
    """See the module. Made by :func:`lensemble_flwr.data.formats.spec.open_recordings`. Thread-safe.

    Attributes:
        spec: as given. stamps: hex digest of the files' names, sizes and times. bad: what was skipped.
    """

    def __init__(
        self,
        reader: Reader,
        spec: RecordingSpec,
        folder: Path,
        log: Callable[[str], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not len(reader):
            raise DataError(f"{reader.path} has no episodes.", "Record at least one episode.")
        self._reader, self.spec, self._folder = reader, spec, folder
        self._lock = threading.RLock()
        self._scale: ActionScale = action_scale(reader, spec)
        self._body = clean_name(spec.body or reader.body, reader.format)
        self.stamps = stamps(reader.files(), reader.path)
        self._cache: FrameCache | None = None
        self._opened_cache = False
        self._recent: dict[int, NDArray[np.float32]] = {}
        self._recent_bytes = 0
        self._fingerprint: str | None = None
        self._lengths: NDArray[np.int64] | None = None
        self._kept = np.arange(len(reader))
        self.bad: tuple[BadEpisode, ...] = ()
        if spec.on_bad_episode == "skip":
            self._skip(log, progress)

    # ------------------------------------------------------------------ an episode source

    @property
    def name(self) -> str:
        return clean_name(f"{self._reader.format} {self._reader.path.name}", self._reader.format)

    @property
    def embodiment(self) -> str:
        """Name of the body, the same for all episodes."""
        return self._body

    @property
    def action_spec(self) -> ActionSpec:
        return self._scale.spec

    @property
    def recorded_action(self) -> ActionSpec:
        """One action as it was recorded, before frameskip."""
        return self._scale.recorded

    @property
    def fingerprint(self) -> str:
        """Digest of the content; decodes everything once. ``stamps`` is the cheap one."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(episode_hash(e) for e in iterate(self))
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._kept)

    def label(self, index: int) -> str:
        """The episode's name in the files."""
        check_index(index, len(self), self.name)
        return self._reader.label(int(self._kept[index]))

    def episode(self, index: int) -> Episode:
        """Read one episode; only this one is in memory (its pictures on the disk, if they are cached).

        Raises:
            DataError: it cannot be used; says which, and what to do.
        """
        check_index(index, len(self), self.name)
        with self._lock, self._naming(int(self._kept[index])):
            number = int(self._kept[index])
            raw = self._reader.load(number)
            actions = self._actions(raw)
            return self._episode(number, raw, self._pictures(number, index, len(actions)), actions)

    # ------------------------------------------------------------------ windows

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [E]: pictures of each episode after frameskip, from the metadata alone."""
        if self._lengths is None:
            with self._lock:
                self._lengths = np.array([self._length(int(n)) for n in self._kept], np.int64)
        return self._lengths

    def window(self, index: int, start: int, length: int) -> Batch:
        """Pictures ``start`` .. ``start + length`` of an episode and the actions between them.

        Decodes these pictures only (in a video: from the keyframe before them). With the cache on, the episode is
        decoded once and then read from the disk.

        Returns:
            frames uint8 [1, length, S, S, 3], actions float32 [1, length - 1, a].

        Raises:
            DataError: the episode cannot be used. ContractViolation: the window leaves the episode.
        """
        check_index(index, len(self), self.name)
        with self._lock, self._naming(int(self._kept[index])):
            number = int(self._kept[index])
            actions = self._recent_actions(number)
            if start < 0 or length < 2 or start + length > len(actions) + 1:
                raise ContractViolation("a window lies outside its episode.")
            frames = np.empty((length, *self.picture_shape()), np.uint8)
            self._fill(number, index, len(actions), start, frames)
            return Batch(frames[None], actions[start : start + length - 1][None])

    def picture_shape(self) -> tuple[int, int, int]:
        """(S, S, 3)."""
        return self.spec.image_size, self.spec.image_size, 3

    def labels(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Actions float32 [T, a] and states [T + 1, s] (or None) of an episode; its pictures are not read.

        Raises:
            DataError: they cannot be used, or the metadata states another length.
        """
        check_index(index, len(self), self.name)
        with self._lock, self._naming(int(self._kept[index])):
            raw = self._reader.load(int(self._kept[index]))
            actions = self._actions(raw)
            if len(actions) + 1 != self.lengths[index]:
                raise DataError("the metadata states another length.", "Correct it, or use on_bad_episode: skip.")
            return actions, self._states(raw, len(actions) + 1)

    def read(self, index: int, start: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` uint8 [n, S, S, 3] with pictures ``start`` .. ``start + n`` of an episode.

        From the frame cache where it keeps the episode (after the first time), else decoding these pictures only.

        Raises:
            DataError: the episode cannot be used. ContractViolation: there are no such pictures.
        """
        check_index(index, len(self), self.name)
        with self._lock, self._naming(int(self._kept[index])):
            steps = int(self.lengths[index]) - 1
            if start < 0 or not len(out) or start + len(out) > steps + 1:
                raise ContractViolation("a window lies outside its episode.")
            self._fill(int(self._kept[index]), index, steps, start, out)

    def _fill(self, number: int, index: int, steps: int, start: int, out: NDArray[np.uint8]) -> None:
        cache = self._frame_cache()
        if cache is not None and index < cache.episodes:
            out[:] = self._pictures(number, index, steps)[start : start + len(out)]
        else:
            for at, picture in enumerate(self._squares(number, np.arange(start, start + len(out)))):
                out[at] = picture

    def packed(self, progress: Callable[[int, int], None] | None = None) -> Packed:
        """All episodes end to end, the pictures as a memory map of the frame cache: any size fits into memory.

        The first call decodes what is not cached yet. Actions are in memory (4 bytes x their width a picture).

        Raises:
            DataError: a bad episode. ArtifactError: the cache is off, or too small for all pictures.
        """
        cache = self._frame_cache()
        if cache is None:
            raise ArtifactError("all pictures at once need the frame cache.", "Set cache: true.")
        if cache.episodes < len(self):
            size = int(self.lengths.sum()) * self.spec.image_size**2 * 3 / 1e9
            raise ArtifactError(
                f"the decoded pictures take {size:.1f} GB, more than cache_gb={self.spec.cache_gb:g} or the disk has.",
                "Raise cache_gb, free space, or use a larger frameskip or a smaller image_size.",
            )
        lengths, actions = self.lengths, np.zeros((int(self.lengths.sum()), self.action_spec.dim), np.float32)
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        for index, offset in enumerate(offsets):
            part = self.episode(index).actions
            actions[offset : offset + len(part)] = part
            if progress:
                progress(index + 1, len(self))
        frames = cache.whole()
        if frames is None:
            raise ArtifactError(f"{cache.path} does not keep what was written.", "Free space on its disk.")
        return Packed(frames, actions, offsets, lengths)

    # ------------------------------------------------------------------ bad episodes

    def examine(self, number: int) -> Episode | BadEpisode:
        """Read one episode of the files (numbered as they are there, skipped ones included), without the cache."""
        try:
            with self._lock:
                raw = self._reader.load(number)
                actions = self._actions(raw)
                frames = self._decode(number, np.arange(len(actions) + 1))
                return self._episode(number, raw, frames, actions)
        except DataError as error:
            return BadEpisode(self._label(number), error.message, error.remediation)

    def raw_actions(self, number: int) -> NDArray | None:
        """The recorded actions [N, a] of an episode of the files, or None if they cannot be read."""
        try:
            with self._lock:
                return self._reader.load(number).actions
        except DataError:
            return None

    def check_length(self, number: int) -> BadEpisode | None:
        """What is wrong with the length that the metadata states, or None. Reads nothing else."""
        try:
            self._length(number)
        except DataError as error:
            return BadEpisode(
                self._label(number), error.message.removeprefix(f"{self._label(number)}: "), error.remediation
            )
        return None

    def _skip(self, log: Callable[[str], None], progress: Callable[[int, int], None] | None) -> None:
        key = cache_key({"bad": self.stamps, **self._options()})
        notes = read_notes(self._folder, key)
        if not _are_notes(notes, len(self._reader)):
            notes = []
            for number in range(len(self._reader)):
                bad = self.examine(number)
                if isinstance(bad, BadEpisode):
                    notes.append([number, bad.label, bad.problem, bad.remedy])
                if progress:
                    progress(number + 1, len(self._reader))
            write_notes(self._folder, key, notes)
        self.bad = tuple(BadEpisode(*note[1:]) for note in notes)
        gone = {note[0] for note in notes}
        self._kept = np.array([n for n in range(len(self._reader)) if n not in gone], np.int64)
        for skipped in self.bad:
            log(f"skipped {skipped}")
        if not len(self._kept):
            raise DataError(
                f"none of {len(self._reader)} episodes in {self._reader.path} can be used; the first: {self.bad[0]}",
                self.bad[0].remedy,
            )

    # ------------------------------------------------------------------ inside

    def _length(self, number: int) -> int:
        with self._naming(number):
            actions, pictures = self._reader.size(number)
            check_length(actions, pictures)
            return self._steps(min(actions, pictures - 1)) + 1

    def _steps(self, recorded: int) -> int:
        """Steps after frameskip of an episode with so many recorded transitions."""
        steps = recorded // self.spec.frameskip
        if steps < 1:
            raise DataError(
                f"{recorded} steps are fewer than frameskip={self.spec.frameskip}.", "Use a smaller frameskip."
            )
        if self.spec.max_steps is None and steps > MAX_STEPS:
            raise DataError(f"{steps} steps are more than {MAX_STEPS}.", "Set max_steps, or a larger frameskip.")
        return min(steps, self.spec.max_steps or steps)

    def _actions(self, raw: Raw) -> NDArray[np.float32]:
        """float32 [T, k a] of the steps after frameskip."""
        check_length(len(raw.actions), raw.pictures)
        k = self.spec.frameskip
        steps = self._steps(min(len(raw.actions), raw.pictures - 1))
        return self._scale.encode(raw.actions[: steps * k])

    def _recent_actions(self, number: int) -> NDArray[np.float32]:
        """Encoded actions of an episode, the last used ones from memory."""
        found = self._recent.pop(number, None)
        if found is None:
            found = self._actions(self._reader.load(number))
            self._recent_bytes += found.nbytes
        self._recent[number] = found
        while self._recent_bytes > _RECENT and len(self._recent) > 1:
            self._recent_bytes -= self._recent.pop(next(iter(self._recent))).nbytes
        return found

    def _pictures(self, number: int, index: int, steps: int) -> NDArray[np.uint8]:
        cache = self._frame_cache()
        rows = np.arange(steps + 1)
        if cache is not None:
            if len(rows) != self.lengths[index]:
                raise DataError("the metadata states another length.", "Correct it, or use on_bad_episode: skip.")
            frames = cache.get(index)
            if frames is None:
                frames = cache.put(index, self._squares(number, rows))
            if frames is not None:
                return frames
        return self._decode(number, rows)

    def _decode(self, number: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        side = self.spec.image_size
        frames = np.empty((len(rows), side, side, 3), np.uint8)
        for at, picture in enumerate(self._squares(number, rows)):
            frames[at] = picture
        return frames

    def _squares(self, number: int, rows: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        count = 0
        for picture in self._reader.frames(number, rows * self.spec.frameskip):
            yield square(picture, self.spec)
            count += 1
        if count != len(rows):
            raise DataError(f"{count} pictures where {len(rows)} are needed.", "The recording is cut.")

    def _episode(self, number: int, raw: Raw, frames: NDArray[np.uint8], actions: NDArray[np.float32]) -> Episode:
        states = self._states(raw, len(frames))
        return Episode(frames, actions, states, self._body, {"recording": self._label(number)[:200]})

    def _states(self, raw: Raw, pictures: int) -> NDArray[np.float32] | None:
        k = self.spec.frameskip
        return None if raw.states is None else raw.states[: pictures * k : k]

    def __reduce__(self) -> tuple[Callable[..., Recordings], tuple[Path, RecordingSpec, Path, str]]:
        """Another process of the same participant opens the files itself (``inner.parallel``)."""
        return _reopened, (self._reader.path, self.spec, self._folder, self.stamps)

    def _options(self) -> dict[str, object]:
        kept = self.spec.to_dict()
        for name in ("cache", "cache_gb", "on_bad_episode", "follow_links"):
            del kept[name]
        return {"version": _VERSION, "camera": self._reader.camera, **kept}

    def _frame_cache(self) -> FrameCache | None:
        if not self._opened_cache:
            self._opened_cache = True
            if self.spec.cache and self.spec.cache_gb > 0:
                looks = ("version", "camera", "image_size", "frameskip", "fit", "crop", "colour", "white", "max_steps")
                options = {k: v for k, v in self._options().items() if k in looks}
                key = cache_key({"stamps": self.stamps, "episodes": self._kept.tolist(), **options})
                limit = int(self.spec.cache_gb * 1e9)
                self._cache = FrameCache(self._folder, key, self.lengths.tolist(), self.spec.image_size, limit)
        return self._cache

    def _label(self, number: int) -> str:
        return self._reader.label(number)

    def _named(self, number: int, error: DataError) -> DataError:
        return DataError(f"{self._label(number)}: {error.message}", error.remediation, episode=self._label(number))

    def _naming(self, number: int) -> _Naming:
        return _Naming(self, number)


class _Naming:
    """Puts the episode's name in front of a DataError."""

    def __init__(self, source: Recordings, number: int) -> None:
        self._source, self._number = source, number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataError) and not hasattr(error, "episode"):
            raise self._source._named(self._number, error) from error


def _reopened(path: Path, spec: RecordingSpec, folder: Path, stamps: str) -> Recordings:
    from lensemble_flwr.data.formats.spec import open_recordings

    found = open_recordings(path, spec, cache_dir=folder, log=lambda text: None)
    if found.stamps != stamps:
        raise DataError(f"{path} changed while it was read.", "Leave recordings alone while a round is running.")
    return found


def _are_notes(notes: object, episodes: int) -> bool:
    return isinstance(notes, list) and all(
        isinstance(n, list)
        and len(n) == 4
        and isinstance(n[0], int)
        and 0 <= n[0] < episodes
        and all(isinstance(t, str) for t in n[1:])
        for n in notes
    )
