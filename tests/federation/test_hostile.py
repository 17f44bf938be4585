"""What a submitter asks for is judged before anything is built for it: a refusal costs a site little."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from lensemble_flwr.config import MOST_OVERRIDES, check_length, config_hash, load_config
from lensemble_flwr.errors import ConfigError, LensembleError, PolicyViolation
from lensemble_flwr.federation.dispatch import handle, most_vector_bytes
from lensemble_flwr.federation.participant import Runtime, SiteParticipant
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.records import JoinRequest
from lensemble_flwr.federation.site import Site
from lensemble_flwr.federation.task import Task
from lensemble_flwr.federation.wire import Refusal, Stage, refusal_for
from tests.effort import calls, peak_bytes


class Untouched:
    """A task that must not be built."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the task was built for its {name}")


HUGE = [
    ("max_rounds", "diloco.rounds=900000"),
    ("max_participants", "federation.participants=4000 federation.min_participants=60"),
    ("max_inner_steps", "diloco.inner_steps=1000000000"),
    ("max_weights", "model.width=65536 model.depth=1024"),
    ("max_weights", "model.image_size=65536 model.patch=1 model.width=1024"),
    ("max_weights", "model.predictor_width=65536 model.predictor_depth=1024"),
    ("max_weights", "model.latent_dim=65536"),
    ("max_weights", "federation.surface=function gauge.student_widths=[64,60000]"),
    ("max_weights", "federation.surface=function gauge.windows=100000000"),
    ("max_inner_steps", "federation.surface=function gauge.distill_steps=1000000000"),
    ("max_processes", "inner.parallel=64"),
    ("max_processes", "inner.parallel=5"),
    ("allow_sampling", "privacy.sample_rate=0.01 diloco.rounds=9000"),
]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    policy = Policy(max_epsilon_central=8.0, max_inner_steps=500, allowed_fabs="any")
    return Site.create(tmp_path / "site", policy, policy_file="policy.yaml")


@pytest.mark.parametrize(("rule", "overrides"), HUGE)
def test_a_huge_run_is_refused_before_anything_is_built(site: Site, rule: str, overrides: str) -> None:
    peak, config = peak_bytes(
        lambda: load_config(check_length(f"experiment=quickstart privacy.target_delta=1e-5 {overrides}"))
    )
    assert peak < 10_000_000
    participant = SiteParticipant(site, config, cast(Task, Untouched()), 0, {}, Runtime(simulation=False))
    body = JoinRequest(b"f" * 32, config_hash(config), bytes(32)).encode()
    found: list[PolicyViolation] = []

    def join() -> None:
        with pytest.raises(PolicyViolation) as error:
            handle(Stage.JOIN, {"body": body}, None, participant)
        found.append(error.value)

    assert calls(join) < 300_000
    assert found[0].fields["rule"] == rule
    with pytest.raises(PolicyViolation):  # nor by a message that comes without the others
        most_vector_bytes(Stage.CLOSE, participant)
    assert most_vector_bytes(Stage.TRAIN, participant) == 0
    assert site.dataset_root(b"f" * 32) is None


@pytest.mark.parametrize(
    "overrides",
    [
        "diloco.rounds=10000000",
        "federation.participants=5000",
        "model.depth=1000000",
        "model.width=1000000000",
        "model.image_size=1000000000",
        "data.frames=1000000000",
        "data.episodes_per_participant=1000000000",
        "objective.sketch_dim=1000000000",
        "inner.batch_size=1000000000",
        "diloco.rounds=" + "9" * 1900,
        "task_options.x=" + "[" * 900 + "]" * 900,
        "task_options.x=[" + ",".join(["1"] * 900) + "]",
        "x" * (MOST_OVERRIDES + 1),
    ],
)
def test_an_impossible_configuration_is_bad_input_at_once(overrides: str) -> None:
    load_config([])  # Hydra itself is loaded once in a process
    found: list[ConfigError] = []

    def load() -> None:
        with pytest.raises(ConfigError) as error:
            load_config(check_length(overrides))
        found.append(error.value)

    assert calls(load) < 10_000_000  # 2.8 million for the longest list, half a second
    assert refusal_for(found[0]) == Refusal.POLICY


@pytest.mark.parametrize("model", ["tiny", "small", "vit_s", "vit_b", "vit_l"])
def test_the_number_that_is_judged_is_close_to_the_models_own(model: str) -> None:
    from lensemble_flwr.federation.world_task import WorldTask

    config = load_config([f"model={model}", "federation.surface=full"])
    own = WorldTask(config).dimension
    assert own <= config.weights <= 1.4 * own
    assert not list(Policy(max_epsilon_local=1.0).run_violations(config, ()))


def test_a_vector_that_is_too_long_is_refused_whatever_the_task(site: Site) -> None:
    """The size of a task of one's own is known only once it is built: then the round's vector is judged."""
    import dataclasses

    from lensemble_flwr.federation.policy import simulated_policy
    from tests.federation.test_policy import opened

    policy = dataclasses.replace(simulated_policy(load_config(["experiment=linear"])), max_weights=16)
    with pytest.raises(LensembleError, match="max_weights"):
        policy.check(opened())
