"""The smallest model of one's own: sites that each hold three of the ten digits learn to read all of them.

Pictures are 5 x 4 pixels drawn from a formula: a digit of 5 x 3 strokes, at one of two places, paler or darker, noisy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lensemble_flwr.federation.recipe import Recipe
from lensemble_flwr.federation.task import MetricLabel

STROKES = ("75557", "26227", "71747", "71317", "55711", "74717", "74757", "71122", "75757", "75717")  # rows of 3 bits
GLYPHS = np.array([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in digit] for digit in STROKES], np.float32)
Pictures = tuple[Tensor, Tensor]


def draw(rng: np.random.Generator, labels: np.ndarray) -> Pictures:
    """Noisy pictures (n, 5, 4) float32 of these digits (n,) int64."""
    pictures = 0.2 * rng.standard_normal((len(labels), 5, 4), np.float32)
    for picture, label, place in zip(pictures, labels, rng.integers(0, 2, len(labels)), strict=True):
        picture[:, place : place + 3] += GLYPHS[label] * rng.uniform(0.7, 1.0)
    return torch.from_numpy(pictures), torch.from_numpy(labels)


class Classifier(Recipe):
    """Softmax regression. Options: ``pictures`` a participant, ``digits`` that it holds of the ten."""

    headline, rehearsal_metric = "accuracy", "error_rate"
    metrics = {  # noqa: RUF012 (never changed)
        "accuracy": MetricLabel("held-out accuracy", "share of pictures", lower_is_better=False),
        "loss": MetricLabel("held-out loss", "nats", lower_is_better=True),
        "error_rate": MetricLabel("held-out error rate", "share of pictures", lower_is_better=True),
    }

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(20, 10))

    def loss(self, model: nn.Module, batch: Pictures) -> Tensor:
        pictures, labels = batch
        return nn.functional.cross_entropy(model(pictures), labels)

    def local_data(self, partition: int) -> Pictures:
        if self.data_dir is not None and (own := Path(self.data_dir) / "pictures.npz").is_file():
            with np.load(own, allow_pickle=False) as file:
                return torch.from_numpy(file["pictures"]), torch.from_numpy(file["labels"])
        return self._made_up(1, partition)

    def public_data(self, share: int) -> Pictures:
        return self._made_up(2, share)

    def _made_up(self, kind: int, number: int) -> Pictures:
        rng = np.random.default_rng([self.config.seed, kind, number])
        held = (3 * number + np.arange(self.options.get("digits", 3))) % 10
        return draw(rng, rng.choice(held, self.options.get("pictures", 40)))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        pictures, labels = draw(np.random.default_rng([self.config.seed, 3]), np.arange(2000) % 10)
        scores = model(pictures)
        accuracy = float((scores.argmax(1) == labels).float().mean())
        loss = float(nn.functional.cross_entropy(scores, labels))
        return {"accuracy": accuracy, "error_rate": 1 - accuracy, "loss": loss}
