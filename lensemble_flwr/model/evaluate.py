"""How good a world model is, measured on held-out episodes.

Prediction errors are divided by the error of "nothing moves" (copy-last) in the model's own latent space, so they do
not depend on its scale: below 1 the model knows something, above 1 it is worse than standing still. A linear probe
alone cannot see damage to the latent frame (any invertible mixing leaves it unchanged) and relative errors alone
cannot see a latent that ignores the world, so both are reported, with the spread and rank of the latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lensemble_flwr.errors import ContractViolation, DataError
from lensemble_flwr.model.heads import ActionHead
from lensemble_flwr.model.sigreg import sigreg
from lensemble_flwr.model.trajectories import LatentTrajectories
from lensemble_flwr.model.world_model import WorldModel


@dataclass(frozen=True)
class Scores:
    """Held-out figures of one body, or means over bodies. All are plain floats.

    Attributes:
        r1, r5: squared error of the 1-step and 5-step open-loop prediction over that of copy-last.
        effective_rank: exp of the entropy of the latent covariance's normalised eigenvalues; 1..z.
        std_min, std_mean: smallest and mean standard deviation of a latent coordinate.
        action_sensitivity: 1-step error with actions of other moments over that with the true ones; above 1 the
            model uses the actions.
        sigreg: SIGReg of the latents in batches of :data:`SIGREG_BATCH` frames; about 1 for standard Gaussian ones.
    """

    r1: float
    r5: float
    effective_rank: float
    std_min: float
    std_mean: float
    action_sensitivity: float
    sigreg: float


SIGREG_BATCH, _SIGREG_SEED = 256, b"held out"
"""The statistic grows with the number of frames where latents are not Gaussian, so the number is fixed."""


def _windows(latents: LatentTrajectories, length: int) -> tuple[Tensor, Tensor]:
    starts = latents.starts(length)
    if not len(starts):
        raise DataError(f"No episode has {length} frames.", "Record longer episodes.")
    index = starts[:, None] + torch.arange(length)
    return latents.latents[index], latents.actions[index[:, :-1]]


@torch.no_grad()
def open_loop(model: WorldModel, head: ActionHead, latents: LatentTrajectories, steps: int) -> tuple[Tensor, Tensor]:
    """Predicted and true latents ``steps`` steps ahead, from every start of every episode.

    Args:
        model, head: predict; on the CPU.
        latents: episodes encoded by this model.
        steps: k.

    Returns:
        (W, z) prediction of z_{t+k} from z_{t-1}, z_t and the true actions, and the true z_{t+k}.

    Raises:
        DataError: every episode is shorter than k + 2 frames.
    """
    window, actions = _windows(latents, steps + 2)
    predicted = model.rollout(window[:, 0], window[:, 1], head(actions[:, 1:]))
    return predicted[:, -1], window[:, -1]


@torch.no_grad()
def relative_error(model: WorldModel, head: ActionHead, latents: LatentTrajectories, steps: int) -> float:
    """k-step open-loop squared error over the squared error of copy-last (``z_{t+k} = z_t``)."""
    predicted, truth = open_loop(model, head, latents, steps)
    window, _ = _windows(latents, steps + 2)
    error = (predicted - truth).double().square().sum()
    still = (window[:, 1] - truth).double().square().sum()
    return float(error / still.clamp(min=1e-30))


@torch.no_grad()
def action_sensitivity(model: WorldModel, head: ActionHead, latents: LatentTrajectories, seed: int = 0) -> float:
    """1-step error with shuffled actions over the error with the true ones."""
    window, actions = _windows(latents, 3)
    order = torch.randperm(len(actions), generator=torch.Generator().manual_seed(seed))
    truth = window[:, 2]
    right = model.predict(window[:, 0], window[:, 1], head(actions[:, 1])) - truth
    wrong = model.predict(window[:, 0], window[:, 1], head(actions[order, 1])) - truth
    return float(wrong.double().square().sum() / right.double().square().sum().clamp(min=1e-30))


@torch.no_grad()
def effective_rank(latents: Tensor) -> float:
    """exp(entropy) of the normalised covariance eigenvalues of (N, z) latents. Blind to scale: read it with the std."""
    rows = latents.double()
    centred = rows - rows.mean(dim=0)
    values = torch.linalg.eigvalsh(centred.T @ centred / len(rows)).clamp(min=0)
    share = values / values.sum().clamp(min=1e-300)
    share = share[share > 0]
    return float(torch.exp(-(share * share.log()).sum()))


@torch.no_grad()
def held_out_sigreg(latents: Tensor, directions: int = 64, seed: int = 0) -> float:
    """Mean SIGReg statistic of (N, z) latents over shuffled batches of :data:`SIGREG_BATCH` rows (all, if fewer)."""
    order = torch.randperm(len(latents), generator=torch.Generator().manual_seed(seed))
    size = min(SIGREG_BATCH, len(latents))
    parts = [latents[order[i : i + size]] for i in range(0, len(latents) - size + 1, size)]
    return sum(float(sigreg(part, _SIGREG_SEED, i, directions)) for i, part in enumerate(parts)) / len(parts)


def score(model: WorldModel, head: ActionHead, latents: LatentTrajectories) -> Scores:
    """All figures of one body on held-out episodes encoded by this model (CPU)."""
    std = latents.latents.double().std(dim=0)
    return Scores(
        r1=relative_error(model, head, latents, 1),
        r5=relative_error(model, head, latents, 5),
        effective_rank=effective_rank(latents.latents),
        std_min=float(std.min()),
        std_mean=float(std.mean()),
        action_sensitivity=action_sensitivity(model, head, latents),
        sigreg=held_out_sigreg(latents.latents),
    )


def mean_scores(per_body: Mapping[str, Scores]) -> Scores:
    """Unweighted mean over bodies.

    Raises:
        ContractViolation: no body.
    """
    if not per_body:
        raise ContractViolation("There is no body to average over.")
    values = {f.name: [getattr(scores, f.name) for scores in per_body.values()] for f in fields(Scores)}
    return Scores(**{name: sum(column) / len(column) for name, column in values.items()})


def evaluate(model: WorldModel, heads: Mapping[str, ActionHead], held_out: Mapping[str, LatentTrajectories]) -> Scores:
    """Mean over bodies of :func:`score`.

    Args:
        model: on the CPU.
        heads: action head of each body.
        held_out: held-out episodes of each body, encoded by this model.

    Raises:
        ContractViolation: a body without a head.
    """
    missing = sorted(set(held_out) - set(heads))
    if missing:
        raise ContractViolation(f"No action head for {', '.join(missing)}.")
    return mean_scores({body: score(model, heads[body], latents) for body, latents in held_out.items()})


@dataclass(frozen=True)
class Probe:
    """A ridge regression from standardised latents to some columns of the true state."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, latents: Tensor) -> Tensor:
        """(N, z) -> (N, columns) float64."""
        return ((latents.double() - self.mean) / self.scale) @ self.weight + self.bias

    def r2(self, latents: Tensor, targets: Tensor) -> Tensor:
        """Coefficient of determination of each column on other episodes, (columns,) float64."""
        truth = targets.double()
        error = (self(latents) - truth).square().sum(dim=0)
        return 1 - error / (truth - truth.mean(dim=0)).square().sum(dim=0).clamp(min=1e-30)


def fit_probe(latents: Tensor, targets: Tensor, ridge: float = 1e-3) -> Probe:
    """Fit a :class:`Probe` in closed form.

    Args:
        latents: (N, z) latents of probe-training frames.
        targets: (N, c) columns of the true state, such as x and y.
        ridge: penalty on the standardised weights, per sample.

    Raises:
        ContractViolation: the rows do not match.
    """
    if latents.ndim != 2 or targets.ndim != 2 or len(latents) != len(targets):
        raise ContractViolation(f"Latents {tuple(latents.shape)} and targets {tuple(targets.shape)} do not match.")
    rows, truth = latents.double(), targets.double()
    mean, scale = rows.mean(dim=0), rows.std(dim=0).clamp(min=1e-9)
    standard = (rows - mean) / scale
    bias = truth.mean(dim=0)
    gram = standard.T @ standard / len(rows) + ridge * torch.eye(rows.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, standard.T @ (truth - bias) / len(rows))
    return Probe(mean, scale, weight, bias)


def probe_rmse(
    model: WorldModel, head: ActionHead, latents: LatentTrajectories, probe: Probe, column: int, steps: int = 5
) -> float:
    """How far a k-step prediction is off in a physical quantity, such as altitude.

    The probe reads the *predicted* and the *true* latent, and their difference counts: on frames unlike those it was
    fitted on, a probe's absolute error is large and says nothing about the dynamics.

    Returns:
        Root mean squared difference in the probe's units.
    """
    predicted, truth = open_loop(model, head, latents, steps)
    return float((probe(predicted) - probe(truth))[:, column].square().mean().sqrt())


def forgetting(before: Scores, after: Scores) -> float:
    """Growth of the nominal 5-step error, ``after.r5 - before.r5``; above zero the model forgot something."""
    return after.r5 - before.r5


Progress = Callable[[int, int, dict[str, float]], None]
"""Called with (step, steps, figures) now and then during long work."""
