"""A model of your own in ordinary PyTorch: what only you can know about it. The rest is :class:`.torch_task.TorchTask`.

Implement ``build_model``, ``local_data``, ``public_data``, ``loss`` and ``evaluate``; the other methods have defaults.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lensemble_flwr.config import Config
from lensemble_flwr.federation.task import MetricLabel, Progress
from lensemble_flwr.options import Options


class Recipe(ABC):
    """One model on one kind of data. Every party builds it from the same configuration.

    Whatever is random must come from the generator that is handed over, or from torch's global one, which is seeded
    around every call; then a run repeats itself. ``self.options`` holds the run's ``task_options``. At a real site
    they come from whoever submits the run: treat them as numbers and names, never as paths, code or addresses.
    """

    headline: ClassVar[str] = "loss"
    """The metric of :meth:`evaluate` that says whether training helped."""
    rehearsal_metric: ClassVar[str] = "loss"
    """The metric that public rehearsals are judged by: above zero, lower is better."""
    metrics: ClassVar[Mapping[str, MetricLabel]] = {}
    """What the metrics are called in tables and reports."""

    def __init__(self, config: Config, data_dir: Path | None = None) -> None:
        """``data_dir``: a real site's own recordings; None in a simulation and at the coordinator."""
        self.config, self.data_dir = config, data_dir

    @property
    def options(self) -> Options:
        """The run's ``task_options``."""
        return self.config.task_options

    # ------------------------------------------------------------------ the model

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model that the run starts from; the same weights at every party."""

    def federated(self, model: nn.Module) -> Iterable[str]:
        """Names of the parameters that travel (float32). Default: all that require a gradient.

        Other parameters that require one are trained, too, where ``inner.head_lr`` is above 0, and stay at their
        site, as buffers do (use LayerNorm or GroupNorm rather than BatchNorm). The rest is frozen and public.
        """
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A scalar to be minimised."""

    def align(self, model: nn.Module) -> Iterable[str]:
        """Bring a locally trained model back into a latent frame that all share, in place, before it is released.

        Default: there is no such freedom. Returns the names of the weights whose optimizer moments are void now.
        """
        return ()

    # ------------------------------------------------------------------ data

    @abstractmethod
    def local_data(self, partition: int) -> Any:
        """A participant's own data: read from ``data_dir``, or made up by number where that is None."""

    @abstractmethod
    def public_data(self, share: int) -> Any:
        """As much data as a participant has, of the same form, that need not be secret; for rehearsals."""

    def batches(self, data: Any, rng: np.random.Generator) -> Iterator[Any]:
        """One epoch of batches; begun again when it ends. Default: ``data`` is a tuple of tensors whose rows belong
        together, shuffled, ``inner.batch_size`` rows a batch (0: all)."""
        rows = len(data[0])
        size = min(self.config.inner.batch_size or rows, rows)
        order = torch.from_numpy(rng.permutation(rows))
        for start in range(0, rows, max(size, 1)):
            yield tuple(column[order[start : start + size]] for column in data)

    def hashes(self, data: Any) -> list[bytes]:
        """SHA-256 of each recording, for the dataset root. Default: of each row of a tuple of tensors."""
        found = []
        for row in range(len(data[0])):
            digest = hashlib.sha256(b"lensemble row 1\0")
            for column in data:
                value = column[row].detach().cpu().contiguous().numpy()
                digest.update(f"{value.dtype.str}{value.shape}\0".encode() + value.tobytes())
            found.append(digest.digest())
        return found

    # ------------------------------------------------------------------ evaluation

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on public held-out data, :attr:`headline` and :attr:`rehearsal_metric` among them."""

    # ------------------------------------------------------------------ files

    def prepare(self, progress: Progress | None = None) -> None:  # noqa: B027 (a hook, most need none)
        """Make or fetch what is missing, once, before the run; must be idempotent. Default: nothing is."""
