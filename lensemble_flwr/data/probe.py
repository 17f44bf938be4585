"""The public probe: landmark pictures that every site and the coordinator can look at together.

The frame of the latent space is measured on these pictures (the gauge keeps what the reference model said about them;
this module keeps the pictures). They come from public episodes only. The probe is pinned by its content hash, which
every site compares before it uses one.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.episodes import MAX_SIDE, MIN_SIDE, EpisodeSource, episode_hash
from lensemble_flwr.durable import atomic_write, file_errors
from lensemble_flwr.errors import ArtifactError, ProbeError

LANDMARKS_PER_DIMENSION = 4
"""Fewer pictures than this per latent dimension do not determine a rotation well."""

MAX_LANDMARKS = 65_536

_HASH_TAG = b"lensemble.public-probe\x00v1\x00"
_FORMAT = "lensemble.public-probe.v1"


@dataclass(frozen=True, eq=False)
class Probe:
    """Landmark pictures and where they come from. Read-only.

    Attributes:
        frames: uint8 [k, H, W, 3].
        episodes: uint8 [k, 32]: hash of the public episode that each picture was taken from.

    Raises:
        ProbeError: wrong shapes or dtypes, or no landmarks.
    """

    frames: NDArray[np.uint8]
    episodes: NDArray[np.uint8]

    def __post_init__(self) -> None:
        frames, episodes = self.frames, self.episodes
        ok = frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[3] == 3
        ok = ok and all(MIN_SIDE <= side <= MAX_SIDE for side in frames.shape[1:3])
        ok = ok and 1 <= len(frames) <= MAX_LANDMARKS
        if not ok or episodes.dtype != np.uint8 or episodes.shape != (len(frames), 32):
            raise ProbeError(
                f"a probe has frames {frames.dtype}{list(frames.shape)} and episodes "
                f"{episodes.dtype}{list(episodes.shape)}.",
                "Frames are uint8 [k, H, W, 3], episodes uint8 [k, 32].",
            )
        for name in ("frames", "episodes"):
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def hash(self) -> bytes:
        """Content hash (32 bytes): of the arrays, not of a file, so it does not depend on how they are stored."""
        digest = hashlib.sha256(_HASH_TAG)
        for array in (self.frames, self.episodes):
            digest.update(struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape))
            digest.update(np.ascontiguousarray(array).data.cast("B"))
        return digest.digest()

    @property
    def episode_hashes(self) -> frozenset[bytes]:
        """Public episodes that the probe was taken from; a participant that holds one leaves it out of training."""
        return frozenset(row.tobytes() for row in self.episodes)


def build_probe(sources: Sequence[EpisodeSource], latent_dim: int, seed: int, landmarks: int | None = None) -> Probe:
    """Choose landmark pictures: equally many of each source, spread over its episodes, one per episode if they last.

    Pictures of one trajectory look alike and leave directions of the latent space undetermined; whether the chosen
    ones determine the frame of a model is tested by the gauge, which has the model.

    Args:
        sources: public sources with one frame size (one per body).
        latent_dim: dimension of the latent space.
        seed: chooses episodes and pictures; the same seed gives the same probe.
        landmarks: how many; None for 4 per latent dimension, which is also the least.

    Raises:
        ProbeError: too few landmarks asked for, more than the sources have pictures, or frame sizes differ.
    """
    least = LANDMARKS_PER_DIMENSION * latent_dim
    count = least if landmarks is None else landmarks
    if latent_dim < 1 or not least <= count <= MAX_LANDMARKS:
        raise ProbeError(
            f"{count} landmarks for {latent_dim} latent dimensions; needs {least}..{MAX_LANDMARKS}.",
            f"Ask for at least {LANDMARKS_PER_DIMENSION} landmarks per latent dimension.",
        )
    if not sources:
        raise ProbeError("there is no public source to take landmarks from.", "Name public data.")
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x70726F6265]))
    frames: list[NDArray[np.uint8]] = []
    origins: list[NDArray[np.uint8]] = []
    for number, source in enumerate(sources):
        share = count // len(sources) + (number < count % len(sources))
        lengths = np.array([len(source.episode(i)) + 1 for i in range(len(source))])
        if share > lengths.sum():
            raise ProbeError(
                f"{source.name!r} has {lengths.sum()} pictures, {share} landmarks are asked of it.",
                "Use more public data, or a smaller latent space.",
            )
        # Rounds over the episodes in a random order, each picture used once at most.
        waiting = [rng.permutation(n).tolist() for n in lengths]
        chosen: list[tuple[int, int]] = []
        while len(chosen) < share:
            turn = [i for i in rng.permutation(len(waiting)).tolist() if waiting[i]]
            chosen += [(i, waiting[i].pop()) for i in turn[: share - len(chosen)]]
        for i, t in sorted(chosen):
            episode = source.episode(i)
            if frames and episode.frames.shape[1:] != frames[0].shape:
                raise ProbeError("public sources have different frame sizes.", "Resize them to one size.")
            frames.append(episode.frames[t])
            origins.append(np.frombuffer(episode_hash(episode), np.uint8))
    return Probe(np.stack(frames), np.stack(origins))


def save_probe(probe: Probe, path: str | os.PathLike[str]) -> None:
    """Write a probe as safetensors, atomically (ArtifactError if it cannot be written)."""
    from safetensors.numpy import save

    target = Path(path)
    arrays = {"frames": np.ascontiguousarray(probe.frames), "episodes": np.ascontiguousarray(probe.episodes)}
    raw = save(arrays, metadata={"format": _FORMAT})
    with file_errors(target.parent, "create"):
        target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, raw, mode=0o644)  # made of public frames


def load_probe(path: str | os.PathLike[str], expected_hash: bytes | None = None) -> Probe:
    """Read a probe and compare its content hash.

    Args:
        expected_hash: the pinned hash (32 bytes); None only where the reader pins what it reads.

    Raises:
        ProbeError: the file is damaged or no probe, or its hash is another one. ArtifactError: it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read the probe {path}: {error.strerror}.", "Generate the probe again.") from error
    try:
        arrays = load(raw)
        if set(arrays) != {"frames", "episodes"}:
            raise ValueError(f"it holds {sorted(arrays)}")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ProbeError(f"{path} is not a probe file: {error}", "Generate the probe again.") from error
    probe = Probe(arrays["frames"], arrays["episodes"])
    check_probe(probe, expected_hash)
    return probe


def check_probe(probe: Probe, expected_hash: bytes | None) -> None:
    """Raise ProbeError unless the probe is the pinned one (None: nothing is pinned)."""
    if expected_hash is not None and probe.hash != expected_hash:
        raise ProbeError(
            f"the public probe has hash {probe.hash.hex()}, pinned is {expected_hash.hex()}.",
            "Get the federation's probe; everybody must look at the same landmarks.",
            expected_hash=expected_hash.hex(),
            got_hash=probe.hash.hex(),
        )
