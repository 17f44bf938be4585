"""Sweeps that are asked for often, ready-made: ``lensemble sweep --ready NAME``."""

from __future__ import annotations

from dataclasses import dataclass

from lensemble_flwr.errors import ConfigError

_SEEDS = "seed=0,1,2"


@dataclass(frozen=True)
class ReadySweep:
    """What is asked, and the overrides (with several values) that answer it."""

    question: str
    overrides: tuple[str, ...]


READY_SWEEPS = {
    "frontier": ReadySweep(
        "noise multiplier against utility and epsilon",
        # The target still ends a run, so it is raised out of the way.
        ("privacy.noise_multiplier=0.5,1,2,4", "privacy.target_epsilon=1000", "privacy.accept_noise=true", _SEEDS),
    ),
    "inner-steps": ReadySweep(
        "H against drift and bytes",
        ("experiment=silos", "diloco.inner_steps=5,10,20,40", _SEEDS),
    ),
    "clip": ReadySweep(
        "the clipping bound C, noise calibrated to the target",
        ("privacy.clip_norm=0.01,0.03,0.1,0.3", "privacy.accept_noise=true", _SEEDS),
    ),
    "outer": ReadySweep(
        "outer learning rate and momentum",
        ("experiment=silos", "diloco.outer_lr=0.5,0.7,1", "diloco.outer_momentum=0,0.5,0.9", _SEEDS),
    ),
    "participants": ReadySweep(
        "number of participants, each with 40 episodes",
        (
            "experiment=swipe_dot",
            "federation.participants=3,6,12",
            "data.silo_seeds=[11,22,33,44,55,66,78,89,100,111,122,133]",
            _SEEDS,
        ),
    ),
    "severity": ReadySweep(
        "how different the silos' data are: each sees less and less of the picture",
        ("experiment=swipe_dot", "data.confinement=0,0.5,1", _SEEDS),
    ),
    "layers": ReadySweep(
        "what the gauge's layers bring, all on and off",
        (
            "experiment=silos",
            "gauge.shared_sketch=true,false",
            "gauge.anchor=none,landmark,rotational",
            "objective.lambda_sig=0,0.05",
            _SEEDS,
        ),
    ),
}


def ready_overrides(name: str, own: list[str]) -> list[str]:
    """The overrides of a ready-made sweep, those of the caller last and in the place of those with the same key.

    Raises:
        ConfigError: there is no such sweep.
    """
    if name not in READY_SWEEPS:
        listed = "; ".join(f"{key}: {sweep.question}" for key, sweep in READY_SWEEPS.items())
        raise ConfigError(f"There is no ready-made sweep {name!r}.", f"Choose one of these. {listed}.")
    keys = {text.partition("=")[0] for text in own}
    return [text for text in READY_SWEEPS[name].overrides if text.partition("=")[0] not in keys] + own
