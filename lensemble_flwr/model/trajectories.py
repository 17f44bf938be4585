"""Recorded episodes as tensors, and the latents of them.

The model does not know the data package. A caller hands frames, actions and, where they exist, true states over as
arrays; episodes may differ in length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from lensemble_flwr.errors import ArtifactError, ContractViolation, DataError


def _window_starts(lengths: tuple[int, ...], window: int) -> Tensor:
    """Row numbers at which ``window`` consecutive frames of one episode start."""
    starts: list[Tensor] = []
    offset = 0
    for length in lengths:
        if length >= window:
            starts.append(torch.arange(offset, offset + length - window + 1))
        offset += length
    return torch.cat(starts) if starts else torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class LatentTrajectories:
    """Episodes as latents: what is needed when the encoder is frozen.

    Attributes:
        latents: (N, z) float32, the frames of all episodes one after another.
        actions: (N, a) float32; row i holds the action taken at frame i, the last row of an episode is zero.
        lengths: frames of each episode; sums to N.
        states: (N, s) float32 true states, or None.
    """

    latents: Tensor
    actions: Tensor
    lengths: tuple[int, ...]
    states: Tensor | None = None

    def starts(self, window: int) -> Tensor:
        """Rows at which a window of ``window`` frames starts, (W,) int64."""
        return _window_starts(self.lengths, window)

    def to(self, device: torch.device | str) -> LatentTrajectories:
        """The same on another device."""
        states = None if self.states is None else self.states.to(device)
        return replace(self, latents=self.latents.to(device), actions=self.actions.to(device), states=states)

    def to_bytes(self, key: str = "") -> bytes:
        """As safetensors, for a site's cache. ``key`` names what it was made from (weights, data)."""
        tensors = {"latents": self.latents.cpu().contiguous(), "actions": self.actions.cpu().contiguous()}
        tensors["lengths"] = torch.tensor(self.lengths, dtype=torch.int64)
        if self.states is not None:
            tensors["states"] = self.states.cpu().contiguous()
        return safetensors.torch.save(tensors, metadata={"key": key})

    @staticmethod
    def from_bytes(data: bytes, key: str = "") -> LatentTrajectories | None:
        """Read :meth:`to_bytes`; None if it was made under another ``key``.

        Raises:
            ArtifactError: not such a file.
        """
        try:
            tensors = safetensors.torch.load(data)
            if file_metadata(data).get("key", "") != key:
                return None
            lengths = tuple(int(value) for value in tensors["lengths"])
            return LatentTrajectories(tensors["latents"], tensors["actions"], lengths, tensors.get("states"))
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            raise ArtifactError("The cache of encoded episodes is damaged.", "Delete it; it is made again.") from error


def file_metadata(data: bytes) -> dict[str, str]:
    """The text fields in the header of a safetensors file (the library reads them from paths only)."""
    size = int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8 : 8 + size]).get("__metadata__") or {})


class Pictures(Protocol):
    """Frames that stay on a disk, one after another."""

    def __len__(self) -> int: ...

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The frames at ``rows`` (n,), (n, H, W, C)."""
        ...


@dataclass(frozen=True)
class Trajectories:
    """Episodes as frames.

    Attributes:
        frames: (N, C, H, W) uint8, the frames of all episodes one after another; or where they are read from, and then
            memory does not grow with N. Use :meth:`at`.
        actions: (N, a) float32; row i holds the action taken at frame i, the last row of an episode is zero.
        lengths: frames of each episode; sums to N.
        states: (N, s) float32 true states, or None.
    """

    frames: Tensor | Pictures
    actions: Tensor
    lengths: tuple[int, ...]
    states: Tensor | None = None

    @staticmethod
    def from_episodes(
        frames: Sequence[NDArray[np.uint8]],
        actions: Sequence[NDArray[np.float32]],
        states: Sequence[NDArray[np.float32]] | None = None,
    ) -> Trajectories:
        """Join episodes.

        Args:
            frames: per episode (T + 1, H, W, C) uint8.
            actions: per episode (T, a) floats; one-hot for a discrete body.
            states: per episode (T + 1, s) floats, or None.

        Raises:
            DataError: no episode, or lengths that do not belong together, or actions that are not finite.
        """
        if not frames or len(frames) != len(actions) or (states is not None and len(states) != len(frames)):
            raise DataError("Frames, actions and states do not hold the same, positive number of episodes.")
        for number, (pictures, moves) in enumerate(zip(frames, actions, strict=True)):
            if pictures.ndim != 4 or pictures.dtype != np.uint8:
                raise DataError(f"Episode {number}: frames are {pictures.dtype} {pictures.shape}, not uint8 THWC.")
            _check_actions(number, moves, len(pictures))
            if states is not None and len(states[number]) != len(pictures):
                raise DataError(f"Episode {number}: {len(pictures)} frames need as many states.")
        stacked = torch.from_numpy(np.ascontiguousarray(np.concatenate(list(frames)).transpose(0, 3, 1, 2)))
        truth = None if states is None else torch.from_numpy(np.concatenate(list(states)).astype(np.float32))
        lengths = tuple(len(pictures) for pictures in frames)
        return Trajectories(stacked, _padded(actions), lengths, truth)

    @staticmethod
    def stored(frames: Pictures, lengths: Sequence[int], actions: Sequence[NDArray[np.float32]]) -> Trajectories:
        """Episodes whose frames stay where they are; otherwise as :meth:`from_episodes`.

        Args:
            frames: of all episodes. lengths: frames of each. actions: per episode (T, a) floats.

        Raises:
            DataError: no episode, or lengths that do not belong together, or actions that are not finite.
        """
        if not actions or len(actions) != len(lengths) or sum(lengths) != len(frames):
            raise DataError("Frames and actions do not hold the same, positive number of episodes.")
        for number, (moves, length) in enumerate(zip(actions, lengths, strict=True)):
            _check_actions(number, moves, length)
        return Trajectories(frames, _padded(actions), tuple(map(int, lengths)))

    def at(self, rows: Tensor) -> Tensor:
        """The frames at ``rows`` (...) int64 on the CPU, (..., C, H, W) uint8."""
        if isinstance(self.frames, Tensor):
            return self.frames[rows]
        found = self.frames.read(rows.reshape(-1).numpy())
        stacked = torch.from_numpy(np.ascontiguousarray(found.transpose(0, 3, 1, 2)))
        return stacked.view(*rows.shape, *stacked.shape[1:])

    def __len__(self) -> int:
        """Frames in all."""
        return len(self.frames)

    def starts(self, window: int) -> Tensor:
        """Rows at which a window of ``window`` frames starts, (W,) int64."""
        return _window_starts(self.lengths, window)

    def to(self, device: torch.device | str) -> Trajectories:
        """The same on another device; frames on a disk stay there."""
        states = None if self.states is None else self.states.to(device)
        frames = self.frames.to(device) if isinstance(self.frames, Tensor) else self.frames
        return replace(self, frames=frames, actions=self.actions.to(device), states=states)


def _check_actions(number: int, moves: NDArray[np.float32], frames: int) -> None:
    if moves.ndim != 2 or len(moves) != frames - 1:
        raise DataError(f"Episode {number}: {frames} frames need {frames - 1} actions.")
    if not np.isfinite(moves).all():
        raise DataError(f"Episode {number}: an action is not finite.", "Repair or drop the episode.")


def _padded(actions: Sequence[NDArray[np.float32]]) -> Tensor:
    """Actions of all episodes, each followed by a row of zeros."""
    rows = [np.concatenate([np.asarray(m, np.float32), np.zeros((1, m.shape[1]), np.float32)]) for m in actions]
    return torch.from_numpy(np.concatenate(rows))


def join(parts: Sequence[LatentTrajectories]) -> LatentTrajectories:
    """Several sets of episodes of one body as one.

    Raises:
        ContractViolation: nothing to join, or different action widths.
    """
    if not parts or len({part.actions.shape[1] for part in parts}) != 1:
        raise ContractViolation("Only episodes of one body can be joined.")
    states = [part.states for part in parts]
    known = [state for state in states if state is not None]
    return LatentTrajectories(
        torch.cat([part.latents for part in parts]),
        torch.cat([part.actions for part in parts]),
        tuple(length for part in parts for length in part.lengths),
        torch.cat(known) if len(known) == len(states) else None,
    )
