"""The flat vector: order, round trip, digest, and what can never be in it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from lensemble_flwr.errors import ConfigError, ContractViolation, ResidencyViolation
from lensemble_flwr.model import SURFACES, ActionHead, HeadSpec, ParameterLayout, WorldModel, preset

SPEC = preset("tiny")


@pytest.fixture(scope="module")
def model() -> WorldModel:
    torch.manual_seed(0)
    return WorldModel(SPEC)


@pytest.mark.parametrize("surface", SURFACES)
def test_round_trip(model: WorldModel, surface: str) -> None:
    layout = ParameterLayout.of(model, surface)
    assert layout == ParameterLayout.of(SPEC, surface)
    theta = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
    other = WorldModel(SPEC)
    kept = {n: p.clone() for n, p in other.named_parameters()}
    layout.write(other, theta)
    assert np.array_equal(layout.flatten(other), theta)
    assert np.array_equal(layout.flatten(layout.unflatten(theta)), theta)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, kept[name]) == (name not in layout.names)


def test_surfaces_hold_what_they_say(model: WorldModel) -> None:
    groups = {s: {n.split(".")[0] for n in ParameterLayout.of(model, s).names} for s in SURFACES}
    assert groups == {"full": {"encoder", "predictor"}, "predictor": {"predictor"}, "adapter": {"adapter"}}
    names = ParameterLayout.of(model, "full").names
    assert names == tuple(sorted(n for n in names if n[0] == "e")) + tuple(sorted(n for n in names if n[0] == "p"))
    offsets = [e.offset for e in ParameterLayout.of(model, "full").entries]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_action_heads_cannot_be_laid_out() -> None:
    head = ActionHead(HeadSpec("continuous", 2), SPEC)
    for name, value in head.state_dict().items():
        for prefix in ("", "head.", "action_head.", "encoder_head."):
            for surface in SURFACES:
                with pytest.raises(ResidencyViolation):
                    ParameterLayout.from_shapes(surface, {prefix + name: tuple(value.shape)})
    with pytest.raises(ResidencyViolation):
        ParameterLayout.from_shapes("adapter", {"encoder.cls": (1,)})


def test_constants_do_not_travel(model: WorldModel) -> None:
    buffers = {n for n, _ in model.named_buffers()}
    for surface in SURFACES:
        assert not buffers & set(ParameterLayout.of(model, surface).names)


def test_digest_is_of_names_shapes_and_bytes() -> None:
    layout = ParameterLayout.from_shapes("adapter", {"adapter.B": (2, 3)})
    theta = np.arange(6, dtype=np.float32)
    expected = hashlib.sha256(
        b"lensemble/theta/1\0adapter\0" + b"adapter.B\0" + b"2,3\0" + theta.astype("<f4").tobytes()
    ).digest()
    assert layout.digest(theta) == expected
    assert layout.digest(torch.from_numpy(theta)) == expected
    assert layout.digest(theta + np.float32(1e-6)) != expected
    assert ParameterLayout.from_shapes("adapter", {"adapter.B": (3, 2)}).digest(theta) != expected
    assert ParameterLayout.from_shapes("adapter", {"adapter.C": (2, 3)}).digest(theta) != expected


def test_refusals(model: WorldModel) -> None:
    layout = ParameterLayout.of(model, "adapter")
    for bad in (np.zeros(layout.size), np.zeros(layout.size + 1, np.float32), np.zeros((1, layout.size), np.float32)):
        with pytest.raises(ContractViolation):
            layout.unflatten(bad)
    with pytest.raises(ContractViolation):
        layout.flatten({})
    with pytest.raises(ContractViolation):
        layout.write(WorldModel(preset("tiny", adapter_rank=0)), np.zeros(layout.size, np.float32))
    with pytest.raises(ConfigError):
        ParameterLayout.of(model, "everything")
    with pytest.raises(ConfigError):
        ParameterLayout.of(preset("tiny", adapter_rank=0), "adapter")
