"""Checkpoints: one safetensors file per committed round, named by a hash of its content, chained to its parent.

The content hash is SHA-256 over a domain tag, each tensor in name order (name, dtype, shape, little-endian bytes) and
the structural header (schema, federation, round, parent hash); it does not depend on how the file is laid out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ArtifactError, CheckpointIntegrityError, ContractViolation, ResidencyViolation

SCHEMA_VERSION = 1
_MOMENTUM = "outer_momentum"


@dataclass(frozen=True)
class Checkpoint:
    """A committed state: theta split by parameter name (float32), the outer momentum b (flat float64), its place."""

    federation_id: bytes
    round: int
    """Index of the next round: 0 is the start, t + 1 after round t was committed or burnt."""
    parent: bytes
    """Content hash of the checkpoint before, zeros for the first."""
    parameters: dict[str, np.ndarray]
    momentum: np.ndarray

    def content_hash(self) -> bytes:
        digest = hashlib.sha256(b"lensemble checkpoint\0")
        for name, value in sorted(self._tensors().items()):
            raw = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
            for text in (name.encode(), raw.dtype.str.encode()):
                digest.update(len(text).to_bytes(4, "big") + text)
            digest.update(len(raw.shape).to_bytes(4, "big") + b"".join(n.to_bytes(8, "big") for n in raw.shape))
            digest.update(raw.data)
        digest.update(json.dumps(self._header(), sort_keys=True, separators=(",", ":")).encode())
        return digest.digest()

    def _tensors(self) -> dict[str, np.ndarray]:
        return {**self.parameters, _MOMENTUM: self.momentum}

    def _header(self) -> dict[str, str]:
        return {
            "schema_version": str(SCHEMA_VERSION),
            "federation_id": self.federation_id.hex(),
            "round": str(self.round),
            "parent": self.parent.hex(),
        }


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> bytes:
    """Write atomically; returns the content hash.

    Raises:
        ResidencyViolation: a parameter belongs to an action head, which stays at its site.
        ContractViolation: a parameter is not float32 or not finite.
        ArtifactError: the file cannot be written (nothing is left behind).
    """
    for name, value in checkpoint.parameters.items():
        if name.split(".")[0] == "head":
            raise ResidencyViolation(f"The action head {name} must not be stored by the coordinator.")
        if value.dtype != np.float32 or not np.isfinite(value).all() or name == _MOMENTUM:
            raise ContractViolation(f"Parameter {name} must be finite float32.")
    content = checkpoint.content_hash()
    header = {**checkpoint._header(), "content_hash": content.hex()}
    atomic_write(path, _file(checkpoint._tensors(), header), mode=0o644)
    return content


_NAMES = {"<f4": "F32", "<f8": "F64"}


def _file(tensors: dict[str, np.ndarray], header: dict[str, str]) -> Iterator[memoryview]:
    """The pieces of a safetensors file, without a copy of what is in it.

    Its header has sorted keys, so that equal checkpoints are equal files; the tensors stand as the library would put
    them, those of wide elements first, then by name.
    """
    values = {name: np.ascontiguousarray(v, v.dtype.newbyteorder("<")) for name, v in tensors.items()}
    order = sorted(values, key=lambda name: (-values[name].itemsize, name))
    entries: dict[str, object] = {"__metadata__": header}
    end = 0
    for name in order:
        start, end = end, end + values[name].nbytes
        kind = _NAMES[values[name].dtype.str]
        entries[name] = {"dtype": kind, "shape": list(values[name].shape), "data_offsets": [start, end]}
    text = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        yield values[name].reshape(-1).view(np.uint8).data


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify.

    Raises:
        ArtifactError: no such file.
        CheckpointIntegrityError: not a checkpoint, another schema, or the content is not what its hash says.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ArtifactError(f"There is no checkpoint {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if header.get("schema_version") != str(SCHEMA_VERSION):
            raise CheckpointIntegrityError(
                f"The checkpoint {path.name} has schema {header.get('schema_version')!r}, not {SCHEMA_VERSION}."
            )
        momentum = tensors.pop(_MOMENTUM)
        checkpoint = Checkpoint(
            bytes.fromhex(header["federation_id"]),
            int(header["round"]),
            bytes.fromhex(header["parent"]),
            tensors,
            momentum,
        )
        expected = bytes.fromhex(header["content_hash"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CheckpointIntegrityError(
            f"The checkpoint {path.name} is damaged: {error}.", "Resume from an earlier checkpoint or a backup."
        ) from error
    if checkpoint.content_hash() != expected:
        raise CheckpointIntegrityError(
            f"The content of {path.name} does not match its hash.", "Resume from an earlier checkpoint or a backup."
        )
    return checkpoint
