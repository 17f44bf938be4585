"""The federated surface: which weights travel, in which order, as one flat float32 vector.

Only parameters travel. Buffers (mean image, adapter basis) are public constants of the warm start, and action heads
belong to their participant; neither can be put into a layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lensemble_flwr.errors import ConfigError, ContractViolation, ResidencyViolation
from lensemble_flwr.model.spec import ModelSpec
from lensemble_flwr.model.world_model import WorldModel

SURFACES = ("full", "predictor", "adapter")
_GROUPS = {"full": ("encoder.", "predictor."), "predictor": ("predictor.",), "adapter": ("adapter.",)}
_FEDERATED_PREFIXES = ("encoder.", "predictor.", "adapter.")


@dataclass(frozen=True)
class Entry:
    """One tensor in the flat vector: name, shape, and where it starts."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True)
class ParameterLayout:
    """Ordered description of the federated weights. Encoder first, then predictor, each in sorted order of names."""

    surface: str
    entries: tuple[Entry, ...]

    @staticmethod
    def from_shapes(surface: str, shapes: Mapping[str, tuple[int, ...]]) -> ParameterLayout:
        """A layout of exactly these tensors.

        Raises:
            ConfigError: unknown surface.
            ResidencyViolation: a name outside the federated groups, such as an action head's.
        """
        if surface not in SURFACES:
            raise ConfigError(f"federation.surface is {surface!r}.", f"Use one of {', '.join(SURFACES)}.")
        for name in shapes:
            if not name.startswith(_GROUPS[surface]):
                local = not name.startswith(_FEDERATED_PREFIXES)
                raise ResidencyViolation(
                    f"{name!r} is not part of the federated surface {surface!r}"
                    + (" and stays at its participant." if local else "."),
                    "Federate encoder, predictor or adapter weights only.",
                )
        ordered = [name for prefix in _GROUPS[surface] for name in sorted(shapes) if name.startswith(prefix)]
        entries, offset = [], 0
        for name in ordered:
            entries.append(Entry(name, tuple(shapes[name]), offset))
            offset += entries[-1].size
        if not entries:
            raise ConfigError(
                f"The model has no weights in the surface {surface!r}.",
                "Choose another federation.surface, or a model with adapter_rank above zero.",
            )
        return ParameterLayout(surface, tuple(entries))

    @staticmethod
    def of(model: nn.Module | ModelSpec, surface: str) -> ParameterLayout:
        """Layout of a model's surface, from the module or from its spec (then nothing is allocated)."""
        if isinstance(model, ModelSpec):
            with torch.device("meta"):
                model = WorldModel(model)
        prefixes = _GROUPS.get(surface, ())
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if prefixes and n.startswith(prefixes)}
        return ParameterLayout.from_shapes(surface, shapes)

    @property
    def size(self) -> int:
        """d, the number of federated weights."""
        return self.entries[-1].offset + self.entries[-1].size

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(entry.name for entry in self.entries)

    def flatten(self, source: nn.Module | Mapping[str, Tensor]) -> NDArray[np.float32]:
        """The surface of a module or a state as one vector, (d,) float32, a copy.

        Raises:
            ContractViolation: a tensor is missing or has another shape.
        """
        state = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
        flat = np.empty(self.size, dtype=np.float32)
        for entry in self.entries:
            value = state.get(entry.name)
            if value is None or tuple(value.shape) != entry.shape:
                found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                raise ContractViolation(f"{entry.name} is {found}, expected {entry.shape}.")
            flat[entry.offset : entry.offset + entry.size] = value.detach().float().cpu().numpy().reshape(-1)
        return flat

    def _check(self, theta: NDArray[np.float32] | Tensor) -> NDArray[np.float32]:
        flat = theta.detach().cpu().numpy() if isinstance(theta, Tensor) else theta
        if flat.shape != (self.size,) or flat.dtype != np.float32:
            raise ContractViolation(f"theta is {flat.dtype} {flat.shape}, expected float32 ({self.size},).")
        return flat

    def unflatten(self, theta: NDArray[np.float32] | Tensor) -> dict[str, Tensor]:
        """The vector (d,) float32 as named tensors, copies.

        Raises:
            ContractViolation: wrong length or dtype.
        """
        flat = self._check(theta)
        return {
            entry.name: torch.from_numpy(flat[entry.offset : entry.offset + entry.size].copy()).view(entry.shape)
            for entry in self.entries
        }

    @torch.no_grad()
    def write(self, model: nn.Module, theta: NDArray[np.float32] | Tensor) -> None:
        """Put the vector into a module; its other weights stay.

        Raises:
            ContractViolation: wrong length or dtype, or the module lacks a tensor.
        """
        parameters = dict(model.named_parameters())
        for name, value in self.unflatten(theta).items():
            if name not in parameters or parameters[name].shape != value.shape:
                raise ContractViolation(f"The model has no weight {name} of shape {tuple(value.shape)}.")
            parameters[name].copy_(value)

    def digest(self, theta: NDArray[np.float32] | Tensor) -> bytes:
        """SHA-256 over surface, names, shapes and the little-endian bytes of the vector, 32 bytes."""
        flat = self._check(theta)
        digest = hashlib.sha256(b"lensemble/theta/1\0" + self.surface.encode() + b"\0")
        for entry in self.entries:
            digest.update(f"{entry.name}\0{','.join(map(str, entry.shape))}\0".encode())
        digest.update(np.ascontiguousarray(flat, dtype="<f4").data)
        return digest.digest()
