"""An encoder that begins with somebody's weights: names, shapes, what does not fit, and that it computes the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ConfigError
from lensemble_flwr.model.encoder import Encoder
from lensemble_flwr.model.pretrained import Pretrained, file_hash, load_pretrained
from lensemble_flwr.model.spec import ModelSpec, WarmStartSpec
from lensemble_flwr.model.warmstart import train_warm_start
from tests.model.blobs import CONTINUOUS, blobs

FIXTURES = Path(__file__).parents[1] / "fixtures"
SPEC = ModelSpec(image_size=48, patch=16, width=16, depth=2, heads=2, mlp_ratio=2, latent_dim=8, pixel_gain=1.0)


def timm_state(width: int = 16, depth: int = 2, side: int = 3, patch: int = 16) -> dict[str, Tensor]:
    """Tensors as timm's VisionTransformer names them."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.2

    state = {
        "cls_token": random(1, 1, width),
        "pos_embed": random(1, side * side + 1, width),
        "patch_embed.proj.weight": random(width, 3, patch, patch),
        "patch_embed.proj.bias": random(width),
        "norm.weight": random(width),
        "head.weight": random(3, width),
    }
    for number in range(depth):
        block = f"blocks.{number}."
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 2 * width, width),
            ("mlp.fc2", width, 2 * width),
        ):
            state |= {f"{block}{name}.weight": random(rows, columns), f"{block}{name}.bias": random(rows)}
        for norm in ("norm1", "norm2"):
            state |= {f"{block}{norm}.weight": 1 + random(width), f"{block}{norm}.bias": random(width)}
    return state


def load(tmp: Path, state: dict[str, Tensor], spec: ModelSpec = SPEC) -> Pretrained:
    path = tmp / "vit.safetensors"
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return load_pretrained(path, file_hash(path), spec)


def tokens(encoder: Encoder, frames: Tensor) -> Tensor:
    """The transformer's tokens before the norm, without the encoder's own centring."""
    found = encoder.patch_embed(encoder.patches(frames))
    found = torch.cat([encoder.cls.expand(len(found), -1, -1), found], dim=1) + encoder.position
    for block in encoder.blocks:
        found = block(found)
    return found


@torch.no_grad()
def test_the_encoder_computes_what_timm_computed() -> None:
    """Weights and tokens were written by timm (see the file's metadata)."""
    path = FIXTURES / "vit_timm.safetensors"
    found = load_pretrained(path, file_hash(path), SPEC)
    encoder = Encoder(SPEC)
    encoder.load_state_dict(found.state, strict=False)
    frames = torch.linspace(0, 1, 2 * 3 * 48 * 48).reshape(2, 3, 48, 48).sin()
    expected = torch.from_numpy(np.load(FIXTURES / "vit_timm_tokens.npy"))
    assert float((tokens(encoder, frames) - expected).abs().max()) < 1e-3  # LayerNorm's epsilon differs: 1e-5, 1e-6
    assert {u.name for u in found.unfit} == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_every_tensor_of_the_transformer_is_taken(tmp_path: Path) -> None:
    state = timm_state()
    found = load(tmp_path, state)
    assert torch.equal(found.state["blocks.1.qkv.weight"], state["blocks.1.attn.qkv.weight"])
    assert torch.equal(found.state["patch_embed.weight"], state["patch_embed.proj.weight"].flatten(1))
    assert torch.equal(found.state["position"], state["pos_embed"])
    assert not any(name.startswith(("blocks", "cls", "patch", "position")) for name in found.fresh)
    assert {u.name for u in found.unfit} == {"norm.weight", "head.weight"}
    assert "no such tensor" in str(found.unfit[0])


def test_positions_are_interpolated(tmp_path: Path) -> None:
    state = timm_state(side=6)
    ramp = torch.linspace(-1, 1, 6)
    state["pos_embed"] = torch.zeros(1, 37, 16)
    state["pos_embed"][0, 0] = 7.0
    state["pos_embed"][0, 1:, 0] = ramp.repeat(6)
    found = load(tmp_path, state).state["position"]
    assert found.shape == (1, 10, 16)
    assert torch.all(found[0, 0] == 7.0)
    rows = found[0, 1:, 0].view(3, 3)
    assert torch.allclose(rows[0], rows[2], atol=1e-5)
    assert torch.allclose(rows[0], torch.tensor([-0.8, 0.0, 0.8]), atol=0.08)


@pytest.mark.parametrize("prefix", ["module.backbone.", "target_encoder.module.backbone.", ""])
def test_v_jepas_naming(tmp_path: Path, prefix: str) -> None:
    """Patches of two frames, no class token, positions of a clip; beside an encoder that is not averaged."""
    state = {name: value for name, value in timm_state().items() if name not in ("cls_token", "head.weight")}
    clip = torch.stack([state["patch_embed.proj.weight"] * 0.25, state["patch_embed.proj.weight"] * 0.75], dim=2)
    state["patch_embed.proj.weight"] = clip
    state["pos_embed"] = state["pos_embed"][:, 1:].repeat(1, 1, 1)
    named = {prefix + name: value for name, value in state.items()}
    named |= {"predictor.blocks.0.attn.qkv.weight": torch.zeros(3, 1)}
    if prefix.startswith("target"):
        named |= {"encoder." + name: torch.zeros_like(value) for name, value in state.items()}
    found = load(tmp_path, named)
    assert torch.allclose(found.state["patch_embed.weight"], timm_state()["patch_embed.proj.weight"].flatten(1))
    assert torch.equal(found.state["blocks.0.mlp_in.bias"], state["blocks.0.mlp.fc1.bias"])
    assert "cls" in found.fresh
    assert torch.all(found.state["position"][0, 0] == 0)


def test_transformers_naming_has_query_key_and_value_apart(tmp_path: Path) -> None:
    state = timm_state()
    named = {
        "encoder.embeddings.patch_embeddings.proj." + k: state["patch_embed.proj." + k] for k in ("weight", "bias")
    }
    for number in range(2):
        block, own = f"encoder.layer.{number}.", f"blocks.{number}."
        for kind in ("weight", "bias"):
            for part, piece in zip(("query", "key", "value"), state[f"{own}attn.qkv.{kind}"].chunk(3), strict=True):
                named[f"{block}attention.{part}.{kind}"] = piece.clone()
            named[f"{block}attention.proj.{kind}"] = state[f"{own}attn.proj.{kind}"]
            for same in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                named[f"{block}{same}.{kind}"] = state[f"{own}{same}.{kind}"]
    found, plain = load(tmp_path, named), load(tmp_path, state)
    for name in plain.state:
        if name.startswith(("blocks", "patch")):
            assert torch.equal(found.state[name], plain.state[name]), name
    assert "position" in found.fresh


def test_each_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    state = timm_state(depth=3, patch=8)
    state["blocks.0.mlp.fc1.weight"] = torch.zeros(64, 16)
    state["blocks.1.attn.proj.bias"] = torch.full((16,), torch.nan)
    state["blocks.0.ls1.gamma"] = torch.ones(16)
    reasons = {unfit.name: unfit.reason for unfit in load(tmp_path, state).unfit}
    assert "model.patch" in reasons["patch_embed.proj.weight"]
    assert "[32, 16]" in reasons["blocks.0.mlp.fc1.weight"]
    assert "finite" in reasons["blocks.1.attn.proj.bias"]
    assert "no such" in reasons["blocks.0.ls1.gamma"]
    assert "2 blocks" in reasons["blocks.2.norm1.weight"]
    odd = timm_state()
    odd["pos_embed"] = torch.zeros(1, 8, 16)
    assert any("no square" in u.reason for u in load(tmp_path, odd).unfit)


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.width"):
        load(tmp_path, timm_state(width=24))
    with pytest.raises(ConfigError, match="no vision transformer"):
        load(tmp_path, {"conv1.weight": torch.zeros(3)})
    path = tmp_path / "vit.safetensors"
    with pytest.raises(CheckpointIntegrityError, match="SHA-256"):
        load_pretrained(path, "0" * 64, SPEC)
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_pretrained(tmp_path / "none", "0" * 64, SPEC)
    torch.save({"a": torch.zeros(2)}, tmp_path / "pickle.pt")
    with pytest.raises(ArtifactError, match="no safetensors"):
        load_pretrained(tmp_path / "pickle.pt", hashlib.sha256((tmp_path / "pickle.pt").read_bytes()).hexdigest(), SPEC)


def test_a_warm_start_begins_with_it_and_says_so(tmp_path: Path) -> None:
    spec = ModelSpec(image_size=64, width=16, depth=2, heads=2, mlp_ratio=2, latent_dim=8, predictor_width=16)
    world = {"push": (CONTINUOUS, blobs(CONTINUOUS, 4, 1))}
    training = WarmStartSpec(steps=1, segments=4)
    found = load(tmp_path, timm_state(), spec)
    plain = train_warm_start(spec, world, training)
    begun = train_warm_start(spec, world, training, pretrained=found)
    assert begun.settings["encoder"] == found.sha256
    assert "encoder" not in plain.settings
    assert any("norm.weight" in line for line in begun.notes["unfit"])
    weight = begun.state["encoder.blocks.1.qkv.weight"]
    assert float((weight - found.state["blocks.1.qkv.weight"]).abs().max()) < 0.01  # one step away
    assert begun.content_hash != plain.content_hash
