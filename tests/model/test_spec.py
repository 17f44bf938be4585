"""Sizes: presets, counts, and refusals."""

from __future__ import annotations

import pytest
import torch

from lensemble_flwr.errors import ConfigError
from lensemble_flwr.model import (
    PRESETS,
    ActionHead,
    HeadSpec,
    InnerSpec,
    ModelSpec,
    ObjectiveSpec,
    ParameterLayout,
    WarmStartSpec,
    WorldModel,
    from_plain,
    preset,
    to_plain,
)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_laid_out_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = WorldModel(preset(name))
    assert ParameterLayout.of(preset(name), "full").size == count(model.encoder) + count(model.predictor)
    assert ParameterLayout.of(preset(name), "adapter").size == preset(name).adapter_size


def test_default_sizes() -> None:
    spec = ModelSpec()
    with torch.device("meta"):
        model, head = WorldModel(spec), ActionHead(HeadSpec("discrete", 4), spec)
    assert count(model.predictor) == 41_360
    assert count(head) == 688
    assert spec.adapter_size == 128
    assert 150_000 < count(model.encoder) < 175_000


def test_vit_l_is_a_vit_l() -> None:
    spec = preset("vit_l")
    assert (spec.latent_dim, spec.width, spec.depth) == (1024, 1024, 24)
    size = ParameterLayout.of(spec, "full").size
    assert 0.4e9 < size < 0.5e9
    # fp32 weights, gradients and two AdamW moments: fits one 16 GB device before activations.
    assert 16 * size < 8e9


def test_specs_round_trip_as_plain_data() -> None:
    for spec in (ModelSpec(), ObjectiveSpec(), InnerSpec(), WarmStartSpec(), HeadSpec("discrete", 4)):
        assert from_plain(type(spec), to_plain(spec)) == spec


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ModelSpec, {"patch": 15}),
        (ModelSpec, {"heads": 5}),
        (ModelSpec, {"width": 0}),
        (ModelSpec, {"width": 64.0}),
        (ModelSpec, {"depth": True}),
        (ModelSpec, {"adapter_rank": 129}),
        (ModelSpec, {"adapter_rank": -1}),
        (ModelSpec, {"mlp_ratio": 0.0}),
        (ModelSpec, {"pixel_gain": 0.0}),
        (ModelSpec, {"velocity_gain": float("nan")}),
        (ModelSpec, {"colour": 3}),
        (ObjectiveSpec, {"lambda_sig": -1}),
        (ObjectiveSpec, {"lambda_sig": float("inf")}),
        (ObjectiveSpec, {"segment": 2}),
        (ObjectiveSpec, {"knots": 2}),
        (ObjectiveSpec, {"t_max": 0}),
        (ObjectiveSpec, {"teacher_weight": 0, "rollout_weight": 0}),
        (InnerSpec, {"optimizer": "lion"}),
        (InnerSpec, {"lr": 0}),
        (InnerSpec, {"lr": "fast"}),
        (InnerSpec, {"batch_size": -1}),
        (InnerSpec, {"device": "tpu"}),
        (WarmStartSpec, {"steps": -1}),
        (WarmStartSpec, {"seed": -1}),
        (WarmStartSpec, {"warmup": 1.0}),
        (HeadSpec, {"kind": "hybrid", "dim": 2}),
        (HeadSpec, {"kind": "discrete", "dim": 0}),
    ],
)
def test_refuses_impossible_values(kind: type, changes: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        from_plain(kind, changes)
    assert caught.value.remediation


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="vit_xxl"):
        preset("vit_xxl")
    assert preset("small", latent_dim=32).latent_dim == 32
