"""A site's own policy: what its operator allows. Judged before anything is computed; a run can only be stricter.

The policy is a JSON file in the site's folder. A real site must have one; a simulated site writes its own at
first use: lifetime = the run's target for the claimed guarantee, the other view unlimited.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lensemble_flwr.config import Config
from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError, PolicyViolation
from lensemble_flwr.federation.records import Guarantee, RoundOpen
from lensemble_flwr.federation.roster import Roster
from lensemble_flwr.privacy.ledger import Budget

POLICY_VERSION = 1


@dataclass(frozen=True)
class Policy:
    """What one site allows, for ever. At least one view has a budget, unless ``unlimited`` says that none is wanted.

    ``max_epsilon_*`` (null: this view is not limited) at ``delta`` hold over the site's whole life; ``min_own_noise``
    is the smallest own noise std over C; ``min_survivors``, ``min_colluders``, ``min_roster``, ``max_clip_norm`` and
    ``max_inner_steps`` bound what a RoundOpen may say; ``min_participants_per_person`` is how many participants, this
    site included, its operator believes may hold data of one person; ``allow_replay`` is written only by simulated
    sites; ``log_releases`` keeps a copy of every release (noised) at the site, for audits; ``require_roster`` refuses
    rounds while no roster is pinned here, ``require_consistency`` rounds in which the members do not compare what they
    see.

    ``allow_sampling`` lets rounds count with a secret coin (``sample_rate`` below 1). The site throws that coin itself,
    from its own operating system, so no other party has to be believed. It is off unless the operator turns it on all
    the same: such rounds carry less noise for the same epsilon and let the lifetime budget last longer, on the strength
    of a secret that the site must then keep (from whoever sees its memory, its disk beside its data, or how long it
    works). A site that never heard of the coin should not depend on it.
    """

    version: int = POLICY_VERSION
    max_epsilon_local: float | None = None
    max_epsilon_central: float | None = None
    delta: float = 1e-5
    unlimited: bool = False
    allow_non_private: bool = False
    allow_replay: bool = False
    allow_two_party: bool = False
    allow_sampling: bool = False
    min_own_noise: float = 0.0
    min_survivors: int = 3
    min_colluders: int = 1
    min_participants_per_person: int = 1
    max_clip_norm: float | None = None
    max_inner_steps: int | None = None
    min_roster: int = 3
    log_releases: bool = False
    require_roster: bool = False
    require_consistency: bool = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (int, float)) and not (0 <= value <= 1e300):
                raise ConfigError(f"Policy: {f.name}={value!r} must be finite and >= 0.")
        if self.version != POLICY_VERSION:
            raise ConfigError(f"Policy version {self.version!r} is unknown; this release reads {POLICY_VERSION}.")
        if not 0 < self.delta < 1:
            raise ConfigError(f"Policy: delta={self.delta!r} must lie between 0 and 1.")
        finite = self.max_epsilon_local is not None or self.max_epsilon_central is not None
        if not finite and not self.unlimited:
            raise ConfigError(
                "Policy: there is no lifetime budget.",
                "Set max_epsilon_local or max_epsilon_central, or unlimited to true if none is wanted.",
            )
        if self.unlimited and finite:
            raise ConfigError("Policy: unlimited contradicts a lifetime budget.", "Remove one of them.")
        if self.allow_non_private and finite:
            raise ConfigError(
                "Policy: allow_non_private contradicts a finite lifetime budget (an update without noise spends all).",
                "Remove the budgets or set allow_non_private to false.",
            )

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The lifetime budgets that the ledger is held against."""
        pairs = (("local", self.max_epsilon_local), ("central", self.max_epsilon_central))
        return tuple(Budget(view, epsilon, self.delta, "lifetime") for view, epsilon in pairs if epsilon is not None)

    def check(self, opened: RoundOpen, roster: Roster | None = None) -> None:
        """Judge the public values of a round.

        Args:
            opened: the round.
            roster: whom the site pinned; None if nobody.

        Raises:
            PolicyViolation: names the rule; leaves the site only as the code POLICY.
        """

        def rule(ok: bool, name: str, text: str) -> None:
            if not ok:
                raise PolicyViolation(f"The site's rule {name} forbids this round: {text}.", rule=name)

        rule(opened.private or self.allow_non_private, "allow_non_private", "privacy is off")
        rule(not opened.replay or self.allow_replay, "allow_replay", "its noise is seeded")
        coin = opened.sample_rate < 1.0
        rule(not coin or self.allow_sampling, "allow_sampling", f"its sample rate is {opened.sample_rate:g}")
        two = opened.two_party
        rule(not two or self.allow_two_party, "allow_two_party", "only two participants")
        rule(len(opened.roster) >= (2 if two else self.min_roster), "min_roster", f"{len(opened.roster)} joined")
        rule(
            opened.min_survivors >= (2 if two else self.min_survivors),
            "min_survivors",
            f"it may be summed over {opened.min_survivors}",
        )
        if roster is None:
            rule(not self.require_roster, "require_roster", "no roster is pinned here")
            rule(not opened.pinned, "roster", "it needs a pinned roster and there is none (lensemble site roster)")
        else:
            strangers = roster.strangers(opened.roster)
            names = ", ".join(identity.hex()[:16] for identity in strangers[:3])
            rule(not strangers, "roster", f"{len(strangers)} of its members are not pinned here ({names} ...)")
        rule(opened.consistency or not self.require_consistency, "require_consistency", "views are not compared")
        rule(opened.colluders >= self.min_colluders, "min_colluders", f"it assumes {opened.colluders}")
        rule(
            opened.per_person >= self.min_participants_per_person,
            "min_participants_per_person",
            f"it counts with one person's data at {opened.per_person} participants",
        )
        if opened.private:
            own = opened.noise_std / opened.clip_norm
            rule(own >= self.min_own_noise, "min_own_noise", f"own noise is {own:.6g} C")
        if self.max_clip_norm is not None:
            rule(opened.clip_norm <= self.max_clip_norm, "max_clip_norm", f"C is {opened.clip_norm:g}")
        if self.max_inner_steps is not None:
            rule(opened.inner_steps <= self.max_inner_steps, "max_inner_steps", f"H is {opened.inner_steps}")


def load_policy(path: Path) -> Policy:
    """Read and validate a policy file.

    Raises:
        ConfigError: missing, unreadable, unknown or mistyped keys.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_distinct)
    except FileNotFoundError as error:
        raise ConfigError(
            f"The site has no policy file {path}.", "Write one; without it nothing is released."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"The policy file {path} cannot be read: {error}.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"The policy file {path} must hold one object.")
    hints = {f.name: f for f in dataclasses.fields(Policy)}
    for name, value in tree.items():
        if name not in hints:
            raise ConfigError(f"The policy file {path} has an unknown rule {name!r}.")
        default = hints[name].default
        nullable = default is None
        numeric = isinstance(default, float) or nullable
        ok = (
            (value is None and nullable)
            or (isinstance(default, bool) and isinstance(value, bool))
            or (numeric and isinstance(value, (int, float)) and not isinstance(value, bool))
            or (type(default) is int and type(value) is int)
        )
        if not ok:
            raise ConfigError(f"The policy file {path}: {name}={value!r} has the wrong type.")
        if numeric and value is not None and type(default) is not int:
            tree[name] = float(value) if abs(value) < 1e300 else math.inf
    return Policy(**tree)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all differ: of two equal ones the last would silently win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a rule stands there twice")
    return found


def simulated_policy(config: Config) -> Policy:
    """The policy of a simulated site at its first use."""
    privacy = config.privacy
    central = privacy.guarantee == "central"
    return Policy(
        max_epsilon_local=privacy.target_epsilon if privacy.enabled and not central else None,
        max_epsilon_central=privacy.target_epsilon if privacy.enabled and central else None,
        delta=privacy.target_delta,
        unlimited=not privacy.enabled,
        allow_non_private=not privacy.enabled,
        allow_replay=True,
        allow_two_party=config.secagg.allow_two_party,
        allow_sampling=True,
        min_roster=2 if config.secagg.allow_two_party else 3,
    )


def save_policy(path: Path, policy: Policy) -> None:
    """Write a policy file atomically, readable by its owner only."""
    atomic_write(path, (json.dumps(dataclasses.asdict(policy), indent=1) + "\n").encode(), mode=0o600)


def run_budget(opened: RoundOpen) -> tuple[Budget, ...]:
    """The budget of this federation: its target, in the view that its noise is sized for."""
    if not opened.private:
        return ()
    view = "central" if opened.guarantee == Guarantee.CENTRAL else "local"
    return (Budget(view, opened.target_epsilon, opened.target_delta, "federation"),)
