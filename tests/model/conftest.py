from __future__ import annotations

import pytest
import torch

from lensemble_flwr.model import (
    LatentTrajectories,
    WarmStart,
    WarmStartSpec,
    encode_trajectories,
    preset,
    train_warm_start,
)
from tests.model.blobs import CONTINUOUS, DISCRETE, blobs


@pytest.fixture(scope="session")
def warm() -> WarmStart:
    """A tiny model, trained for a few seconds on blobs without gravity. Bodies: "push" and "choose"."""
    public = {"push": (CONTINUOUS, blobs(CONTINUOUS, 60, 1)), "choose": (DISCRETE, blobs(DISCRETE, 60, 2))}
    return train_warm_start(preset("tiny"), public, WarmStartSpec(steps=250), threads=1)


@pytest.fixture(scope="session")
def shifted(warm: WarmStart) -> dict[str, LatentTrajectories]:
    """Held-out episodes with gravity, as latents."""
    model = warm.build_model()
    data = {"push": blobs(CONTINUOUS, 20, 11, 0.02), "choose": blobs(DISCRETE, 20, 12, 0.02)}
    return {body: encode_trajectories(model, episodes) for body, episodes in data.items()}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
