"""Checkpoints: verified on load, chained, without action heads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ContractViolation, ResidencyViolation
from lensemble_flwr.federation.checkpoint import Checkpoint, load_checkpoint, save_checkpoint


@pytest.fixture
def checkpoint() -> Checkpoint:
    rng = np.random.default_rng(0)
    parameters = {"encoder.w": rng.standard_normal((3, 2)).astype(np.float32), "predictor.b": np.ones(2, np.float32)}
    return Checkpoint(b"f" * 32, 4, b"p" * 32, parameters, rng.standard_normal(8))


def test_round_trip(tmp_path: Path, checkpoint: Checkpoint) -> None:
    content = save_checkpoint(tmp_path / "c.safetensors", checkpoint)
    loaded = load_checkpoint(tmp_path / "c.safetensors")
    assert loaded.content_hash() == content == checkpoint.content_hash()
    assert (loaded.round, loaded.parent, loaded.federation_id) == (4, b"p" * 32, b"f" * 32)
    np.testing.assert_array_equal(loaded.parameters["encoder.w"], checkpoint.parameters["encoder.w"])
    assert loaded.momentum.dtype == np.float64


def test_every_byte_is_covered(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, checkpoint)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        path.write_bytes(bytes(damaged))
        try:  # a change of the layout alone (white space in the header) is no change of the content
            assert load_checkpoint(path).content_hash() == checkpoint.content_hash()
        except CheckpointIntegrityError:
            pass
    path.write_bytes(whole[:-3])
    with pytest.raises(CheckpointIntegrityError):
        load_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointIntegrityError):
        load_checkpoint(path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no checkpoint"):
        load_checkpoint(tmp_path / "none")


def test_action_heads_stay_at_their_site(tmp_path: Path, checkpoint: Checkpoint) -> None:
    bad = dataclasses.replace(checkpoint, parameters={"head.w": np.ones(2, np.float32)})
    with pytest.raises(ResidencyViolation):
        save_checkpoint(tmp_path / "c", bad)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("value", [np.array([np.nan], np.float32), np.ones(2)])
def test_only_finite_float32(tmp_path: Path, checkpoint: Checkpoint, value: np.ndarray) -> None:
    with pytest.raises(ContractViolation):
        save_checkpoint(tmp_path / "c", dataclasses.replace(checkpoint, parameters={"encoder.w": value}))


def test_hash_depends_on_place_and_names(checkpoint: Checkpoint) -> None:
    hashes = {
        checkpoint.content_hash(),
        dataclasses.replace(checkpoint, round=5).content_hash(),
        dataclasses.replace(checkpoint, parent=b"q" * 32).content_hash(),
        dataclasses.replace(checkpoint, momentum=checkpoint.momentum + 1).content_hash(),
        dataclasses.replace(checkpoint, parameters={"a": checkpoint.parameters["predictor.b"]}).content_hash(),
    }
    assert len(hashes) == 5
