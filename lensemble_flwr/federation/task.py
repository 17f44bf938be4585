"""What is trained: the seam between the round and a model. Plain arrays in, plain arrays out.

The round knows a task as a flat float32 vector theta with a name for each slice, a local update, and public hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lensemble_flwr.federation.readings import Readings

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while something long is prepared."""


@dataclass(frozen=True)
class Slice:
    """One named parameter inside theta."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class LocalResult:
    """What a participant's local steps gave: theta after alignment, and the state that stays at the site."""

    theta: np.ndarray
    state: bytes


@dataclass(frozen=True)
class MetricLabel:
    """What a metric is called in tables and reports.

    Attributes:
        label: in words, for a sentence and a column ("held-out accuracy").
        unit: empty if it has none.
        lower_is_better: None if neither is.
    """

    label: str
    unit: str = ""
    lower_is_better: bool | None = None


class Task(Protocol):
    """One kind of model on one kind of data, built from a Config (:mod:`.tasks`); the same at every party."""

    layout: tuple[Slice, ...]
    headline: str
    """The metric that says whether training helped."""
    rehearsal_metric: str
    """The metric that public rehearsals are judged by, on public data like theirs; lower is better."""
    metrics: Mapping[str, MetricLabel]
    """Labels of metrics that reports do not know by themselves."""

    @property
    def base_hash(self) -> bytes:
        """SHA-256 of everything public that theta does not hold: frozen weights, bases, normalisers."""
        ...

    @property
    def probe_hash(self) -> bytes:
        """SHA-256 of the public probe (zeros when the task has none)."""
        ...

    @property
    def dimension(self) -> int: ...

    def initial(self) -> np.ndarray:
        """theta_0, float32, shape (d,)."""
        ...

    def sketch_hash(self, sketch_seed: int) -> bytes:
        """SHA-256 of the sketch directions that a round's seed gives (INV-SKETCH-CONSISTENCY)."""
        ...

    def episode_hashes(self, partition: int) -> list[bytes]:
        """Hashes of the local episodes, for the dataset root."""
        ...

    def local_update(
        self,
        theta: np.ndarray,
        partition: int,
        state: bytes | None,
        *,
        steps: int,
        sketch_seed: int,
        round_index: int,
        outer_step: int | None = None,
    ) -> LocalResult:
        """H local steps from theta on local data, then alignment to the public frame where the frame is federated.

        ``outer_step``: the committed rounds before this one, where step sizes change during the run
        (:mod:`.schedule`); None: ``round_index`` of them. A task that knows no such schedule need not take it.

        Raises:
            LensembleError: the data or the training failed; the caller decides what may be said about it.
        """
        ...

    def public_update(
        self, theta: np.ndarray, share: int, *, steps: int, sketch_seed: int, outer_step: int = 0
    ) -> np.ndarray:
        """The same local steps on the public data of pseudo-participant ``share`` (0, 1, ...)."""
        ...

    def evaluate(self, theta: np.ndarray) -> dict[str, float]:
        """Metrics on public held-out data; run by the coordinator."""
        ...

    def prepare(self, progress: Progress | None = None) -> None:
        """Make and cache what is missing: generated data, the public warm start. Idempotent."""
        ...

    def public_files(self) -> tuple[Path, ...]:
        """The cached files that every party must hold and that no party needs to keep secret (none: nothing)."""
        ...

    def prepare_participant(self, partition: int, public: Path | None = None, progress: Progress | None = None) -> None:
        """Make what one real participant needs: its own generated recordings, and the public files.

        Args:
            partition: which participant.
            public: a folder with :meth:`public_files` to copy instead of making them here.

        Raises:
            ArtifactError: a file is missing there or damaged.
        """
        ...


@runtime_checkable
class Shows(Protocol):
    """A task that can show its models at work; one that cannot leaves the method out."""

    def readings(self, thetas: Mapping[str, np.ndarray]) -> Readings | None:
        """What is read from models along one public held-out episode, never a participant's; run by the coordinator
        once, when a run ends.

        Args:
            thetas: name -> (d,) float32.

        Returns:
            None: there is nothing to read.
        """
        ...


def theta_hash(layout: tuple[Slice, ...], theta: np.ndarray) -> bytes:
    """SHA-256 that names a model: every slice's name and shape, then the little-endian float32 values."""
    digest = hashlib.sha256(b"lensemble theta 1\0")
    for part in layout:
        name = part.name.encode()
        digest.update(len(name).to_bytes(4, "big") + name + len(part.shape).to_bytes(4, "big"))
        for extent in part.shape:
            digest.update(int(extent).to_bytes(8, "big"))
    digest.update(np.ascontiguousarray(theta, dtype="<f4").data)
    return digest.digest()


def sketch_seed(federation_id: bytes, round_index: int) -> int:
    """s_t: the round's public seed of sketch directions."""
    digest = hashlib.sha256(b"lensemble sketch\0" + federation_id + round_index.to_bytes(4, "big")).digest()
    return int.from_bytes(digest[:8], "big")
