"""An encoder's first weights from somebody's vision transformer: a safetensors file, named by path and SHA-256.

Three ways of naming tensors are known, with any prefix in front:

* timm's ViT (``blocks.0.attn.qkv.weight``, ``patch_embed.proj.weight``, ``cls_token``, ``pos_embed``);
* V-JEPA's own (the same names behind ``module.backbone.`` and the like, patches of several frames, no class token);
* transformers' V-JEPA 2 (``encoder.layer.0.attention.query.weight``, with query, key and value apart).

What fits is taken, and of each tensor that does not fit it is said why. A patch embedding over several frames is summed
over them: that is what it computes on a picture that stands still. Position embeddings are interpolated (bicubic).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor
from torch.nn import functional

from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ConfigError
from lensemble_flwr.model.encoder import Encoder
from lensemble_flwr.model.spec import ModelSpec

_CHUNK = 1 << 22
_BLOCK = re.compile(r"(?P<prefix>.*?)(blocks|layer)\.(?P<number>\d+)\.(?P<rest>.+)")
_IN_BLOCK = {
    "norm1": "norm_attention",
    "attn.qkv": "qkv",
    "attn.proj": "out",
    "attention.proj": "out",
    "norm2": "norm_mlp",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
_APART = ("attention.query", "attention.key", "attention.value")
_PATCHES = ("patch_embed.proj", "embeddings.patch_embeddings.proj")
_USUAL_SIDES = (224, 256, 384, 512)


@dataclass(frozen=True)
class Unfit:
    """A tensor that was not taken: of the file, or of the encoder, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}: {self.reason}"


@dataclass(frozen=True)
class Pretrained:
    """What an encoder can start from.

    Attributes:
        state: tensors by their names in :class:`.encoder.Encoder`, float32, CPU. sha256: of the file, hex.
        unfit: what was not taken. fresh: names of the encoder's tensors that keep their random start.
    """

    state: dict[str, Tensor]
    sha256: str
    unfit: tuple[Unfit, ...]
    fresh: tuple[str, ...]


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex. Raises ArtifactError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", "Correct warmstart.path.") from error
    return digest.hexdigest()


def load_pretrained(path: str | os.PathLike[str], sha256: str, spec: ModelSpec) -> Pretrained:
    """Map a checkpoint onto an encoder of this size.

    Args:
        path: a safetensors file (pickles run code when they are read, and are not). sha256: of the whole file, hex.

    Raises:
        ArtifactError: missing, or no safetensors file. CheckpointIntegrityError: another hash.
        ConfigError: no vision transformer in it, or nothing of its blocks fits; says what does not.
    """
    where = Path(path).expanduser()
    found = file_hash(where)
    if found != sha256:
        raise CheckpointIntegrityError(
            f"{where} has the SHA-256 {found}, expected {sha256}.", "Correct warmstart.sha256, or get the file again."
        )
    try:
        with safetensors.safe_open(os.fspath(where), framework="pt") as stored:
            return _Mapping(spec, list(stored.keys()), stored.get_tensor).mapped(found)
    except safetensors.SafetensorError as error:
        raise ArtifactError(
            f"{where} is no safetensors file: {error}.", "Convert the checkpoint: safetensors.torch.save_file(...)."
        ) from error


class _Mapping:
    def __init__(self, spec: ModelSpec, names: list[str], get: Callable[[str], Tensor]) -> None:
        self._spec, self._get = spec, get
        with torch.device("meta"):
            encoder = Encoder(spec)
        self._wanted = {name: tuple(p.shape) for name, p in encoder.named_parameters()}
        self._prefix = self._choose(names)
        self._names = {name.removeprefix(self._prefix): name for name in names if name.startswith(self._prefix)}
        self._state: dict[str, Tensor] = {}
        self._unfit: list[Unfit] = []

    def _choose(self, names: Iterable[str]) -> str:
        """The prefix of the one encoder in the file; an averaged one ("target", "ema") before others."""
        prefixes = {m["prefix"] for name in names if (m := _BLOCK.fullmatch(name)) and "predictor" not in m["prefix"]}
        if not prefixes:
            raise ConfigError(
                "The checkpoint holds no vision transformer whose names are known.",
                "Known are timm's ViT and V-JEPA: blocks.0.attn.qkv.weight, encoder.layer.0.attention.query.weight.",
            )

        def rank(prefix: str) -> tuple[int, int, str]:
            averaged = any(word in prefix for word in ("target", "ema"))
            return (not averaged, len(prefix), prefix)

        return min(prefixes, key=rank)

    def mapped(self, sha256: str) -> Pretrained:
        for name in sorted(self._names):
            self._one(name)
        self._apart()
        blocks = [name for name in self._state if name.startswith("blocks.")]
        if not blocks:
            raise ConfigError(
                f"Nothing of the checkpoint's blocks fits the model: {'; '.join(map(str, self._unfit[:6]))}.",
                "Choose model.width, model.mlp_ratio and model.heads as the checkpoint has them.",
            )
        fresh = tuple(name for name in self._wanted if name not in self._state)
        return Pretrained(self._state, sha256, tuple(self._unfit), fresh)

    # ------------------------------------------------------------------ one tensor

    def _one(self, name: str) -> None:
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(r"(?:blocks|layer)\.(\d+)\.(.+)", stem)
        if block:
            if block[2] in _APART:
                return  # put together in _apart
            own = _IN_BLOCK.get(block[2])
            if int(block[1]) >= self._spec.depth:
                self._refuse(name, f"the model has {self._spec.depth} blocks")
            elif own is None or kind not in ("weight", "bias"):
                self._refuse(name, "the model has no such tensor")
            else:
                self._take(f"blocks.{block[1]}.{own}.{kind}", name, self._tensor(name))
        elif stem in _PATCHES:
            self._patches(name, kind)
        elif name in ("cls_token", "embeddings.cls_token"):
            self._take("cls", name, self._tensor(name).reshape(1, 1, -1))
        elif name in ("pos_embed", "embeddings.position_embeddings"):
            self._positions(name)
        else:
            self._refuse(name, "the model has no such tensor")

    def _apart(self) -> None:
        """Query, key and value, stored apart, as one tensor."""
        for number in range(self._spec.depth):
            for kind in ("weight", "bias"):
                names = [f"layer.{number}.{part}.{kind}" for part in _APART]
                if all(name in self._names for name in names):
                    joined = torch.cat([self._tensor(name) for name in names])
                    self._take(f"blocks.{number}.qkv.{kind}", names[0], joined)

    def _patches(self, name: str, kind: str) -> None:
        tensor = self._tensor(name)
        if kind == "weight" and tensor.ndim == 5:
            tensor = tensor.sum(dim=2)
        if kind == "weight":
            channels, patch = self._spec.channels, self._spec.patch
            if tensor.ndim != 4 or tuple(tensor.shape[1:]) != (channels, patch, patch):
                self._refuse(name, f"the model has patches of {channels} x {patch} x {patch} (model.patch)")
                return
            tensor = tensor.flatten(1)
        self._take(f"patch_embed.{kind}", name, tensor)

    def _positions(self, name: str) -> None:
        tensor, width, side = self._tensor(name), self._spec.width, self._spec.image_size // self._spec.patch
        if tensor.ndim != 3 or tensor.shape[0] != 1 or tensor.shape[2] != width:
            self._refuse(name, f"the model is {width} wide (model.width)")
            return
        rows = tensor[0]
        has_class = any(own in self._names for own in ("cls_token", "embeddings.cls_token"))
        first, rows = (rows[:1], rows[1:]) if has_class else (torch.zeros(1, width), rows)
        grid = self._grid(len(rows))
        if grid is None:
            self._refuse(name, f"{len(rows)} positions are no square of patches")
            return
        squares = rows.view(-1, grid, grid, width).mean(dim=0)  # over time, where there is any
        if grid != side:
            picture = squares.permute(2, 0, 1)[None]
            resized = functional.interpolate(picture, (side, side), mode="bicubic", align_corners=False, antialias=True)
            squares = resized[0].permute(1, 2, 0)
        self._take("position", name, torch.cat([first, squares.reshape(side * side, width)])[None])

    def _grid(self, count: int) -> int | None:
        """Patches a side, of one frame or of several in a row."""
        side = math.isqrt(count)
        if side * side == count and count:
            return side
        for pixels in _USUAL_SIDES:
            side = pixels // self._spec.patch
            if side and count % (side * side) == 0:
                return side
        return None

    def _tensor(self, name: str) -> Tensor:
        return self._get(self._names[name]).float()

    def _take(self, own: str, name: str, tensor: Tensor) -> None:
        wanted = self._wanted[own]
        if tuple(tensor.shape) != wanted:
            self._refuse(name, f"the model's {own} is {list(wanted)}", tuple(tensor.shape))
        elif not bool(torch.isfinite(tensor).all()):
            self._refuse(name, "it holds numbers that are not finite")
        else:
            self._state[own] = tensor.contiguous()

    def _refuse(self, name: str, reason: str, shape: tuple[int, ...] | None = None) -> None:
        full = self._names[name]
        self._unfit.append(Unfit(full, tuple(self._get(full).shape) if shape is None else shape, reason))
