"""Episodes, where they come from, and what is committed to and pinned of them.

``EpisodeSource`` is the seam for your own data; ``LanderSpec`` with ``ensure_dataset`` is the simulated fleet.
"""

from __future__ import annotations

from lensemble_flwr.data.actions import ActionSpec
from lensemble_flwr.data.episodes import (
    Episode,
    EpisodeSource,
    MemorySource,
    canonical_bytes,
    episode_hash,
    episode_hashes,
    iterate,
)
from lensemble_flwr.data.lander import LanderSpec
from lensemble_flwr.data.probe import Probe, build_probe, check_probe, load_probe, save_probe
from lensemble_flwr.data.store import Arrays, LanderData, ShardSource, ensure_dataset, open_dataset
from lensemble_flwr.data.windows import Batch, Packed, batches, gather, order, pack, window, without

__all__ = [
    "ActionSpec",
    "Arrays",
    "Batch",
    "Episode",
    "EpisodeSource",
    "LanderData",
    "LanderSpec",
    "MemorySource",
    "Packed",
    "Probe",
    "ShardSource",
    "batches",
    "build_probe",
    "canonical_bytes",
    "check_probe",
    "ensure_dataset",
    "episode_hash",
    "episode_hashes",
    "gather",
    "iterate",
    "load_probe",
    "open_dataset",
    "order",
    "pack",
    "save_probe",
    "window",
    "without",
]
