"""A site's rules: as an operator writes them, and what each of them refuses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.config import load_config
from lensemble_flwr.errors import ConfigError, PolicyViolation
from lensemble_flwr.federation.plan import make_plan, round_open
from lensemble_flwr.federation.policy import RULES, Policy, load_policy, save_policy, simulated_policy
from lensemble_flwr.federation.records import RoundOpen
from lensemble_flwr.federation.tasks import build_task
from lensemble_flwr.federation.yaml_text import format_yaml, parse_yaml
from tests.federation.harness import Federation

HASH = "ab" * 32
OPEN = Policy(max_epsilon_central=8.0)


def opened(overrides: str = "") -> RoundOpen:
    config = load_config(f"experiment=linear {overrides}")
    task, n = build_task(config), config.federation.participants
    roster = tuple(i.to_bytes(32, "big") for i in range(n))
    return round_open(config, task, make_plan(config, n, task.dimension), bytes(32), 0, bytes(32), roster)


@pytest.mark.parametrize(
    ("rule", "value", "overrides"),
    [
        ("allow_non_private", False, "privacy=disabled"),
        ("allow_replay", False, "privacy.entropy=replay"),
        ("min_roster", 5, ""),
        ("min_survivors", 4, ""),
        ("min_colluders", 2, ""),
        ("min_threshold", 0.8, ""),
        ("min_own_noise", 10.0, ""),
        ("min_noise_multiplier", 10.0, ""),
        ("max_clip_norm", 0.5, ""),
        ("max_inner_steps", 4, ""),
        ("guarantee", "local", ""),
        ("guarantee", "central", "privacy=local privacy.clip_norm=1"),
        ("ring_bits", (24, 16), ""),
        ("mechanisms", ("discrete_gaussian",), ""),
        ("mechanisms", ("gaussian",), "privacy.mechanism=discrete_gaussian secagg.ring_bits=16"),
        (
            "allow_two_party",
            False,
            "federation.participants=2 federation.min_participants=2 secagg.min_survivors=2 "
            "secagg.allow_two_party=true privacy=local privacy.clip_norm=1",
        ),
    ],
)
def test_each_rule_refuses_by_its_name_and_only_then(rule: str, value: Any, overrides: str) -> None:
    record = opened(overrides)
    with pytest.raises(PolicyViolation) as caught:
        dataclasses.replace(OPEN, **{rule: value}).check(record)
    assert caught.value.fields["rule"] == rule
    others = [v.fields["rule"] for v in dataclasses.replace(OPEN, **{rule: value}).violations(record)]
    assert others == [rule]


def test_rules_of_the_run_itself() -> None:
    config = load_config("experiment=linear")
    OPEN.check_run(config, ())
    dataclasses.replace(OPEN, dataset="lander", allowed_coordinators=(HASH,)).check_run(config, (HASH,))
    for rules, authorities, rule in (
        ({"dataset": "gripper"}, (), "dataset"),
        ({"allowed_coordinators": (HASH,)}, (), "allowed_coordinators"),
        ({"allowed_coordinators": (HASH,)}, (HASH, "cd" * 32), "allowed_coordinators"),
        ({"allowed_coordinators": ()}, (HASH,), "allowed_coordinators"),
    ):
        with pytest.raises(PolicyViolation) as caught:
            dataclasses.replace(OPEN, **rules).check_run(config, authorities)
        assert caught.value.fields["rule"] == rule


def test_a_changed_rule_counts_in_the_next_round_and_nobody_is_charged_for_it(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "diloco.rounds=2")
    site = next(iter(federation.transport.members.values())).site

    def tighten(name: str, fields: dict[str, Any]) -> None:
        if name == "round" and fields["round"] == 0:
            save_policy(site.folder / "policy.json", dataclasses.replace(site.policy, max_inner_steps=1))

    federation.on_event = tighten
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [4, 3]
    assert sorted(federation.ledger_rounds()) == [1, 2, 2, 2]


def test_a_rule_refuses_the_join_before_anything_is_told(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    site = next(iter(federation.transport.members.values())).site
    save_policy(site.folder / "policy.json", dataclasses.replace(site.policy, dataset="gripper"))
    federation.start()
    assert [r["participants"] for r in federation.rounds()] == [3, 3, 3]
    assert federation.folder is not None
    assert site.dataset_root(federation.folder.federation_id) is None


def test_every_rule_is_explained_and_written_and_read_back(tmp_path: Path) -> None:
    assert set(RULES) == {f.name for f in dataclasses.fields(Policy)}
    policy = Policy(
        max_epsilon_local=math.pi,
        delta=1e-7,
        guarantee="local",
        ring_bits=(32,),
        mechanisms=("discrete_gaussian",),
        dataset="yes",
        allowed_coordinators=(HASH,),
        allowed_fabs=(),
    )
    for name in ("policy.yaml", "policy.json"):
        save_policy(tmp_path / name, policy)
        assert load_policy(tmp_path / name) == policy
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    tree = yaml.safe_load((tmp_path / "policy.yaml").read_text())  # every YAML reader finds the same
    assert tree["delta"] == 1e-7
    assert tree["dataset"] == "yes"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("max_epsilon_local: 1\nmin_colluder: 1", "min_colluder"),
        ("max_epsilon_local: '1'", "max_epsilon_local"),
        ("max_epsilon_local: .nan", "max_epsilon_local"),
        ("max_epsilon_local: 1\nmin_roster: 3.0", "min_roster"),
        ("max_epsilon_local: 1\nmin_roster: true", "min_roster"),
        ("max_epsilon_local: 1\nring_bits: 32", "ring_bits"),
        ("max_epsilon_local: 1\nring_bits: [31]", "ring_bits"),
        ("max_epsilon_local: 1\nmechanisms: [laplace]", "mechanisms"),
        ("max_epsilon_local: 1\nmechanisms: gaussian", "mechanisms"),
        ("max_epsilon_local: 1\nallowed_fabs: [12]", "allowed_fabs"),
        ("max_epsilon_local: 1\nallowed_fabs: [abc]", "allowed_fabs"),
        ("max_epsilon_local: 1\nallowed_fabs: all", "allowed_fabs"),
        ("max_epsilon_local: 1\nguarantee: both", "guarantee"),
        ("max_epsilon_local: 1\nmin_threshold: 1.5", "min_threshold"),
        ("max_epsilon_local: 1\nversion: 2", "version"),
        ("max_epsilon_local: 1\nunlimited: true", "unlimited"),
        ("delta: 1e-5", "unlimited"),
    ],
)
def test_a_wrong_rule_is_named(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path / "policy.yaml")
    assert caught.value.fields["rule"] == rule


@pytest.mark.parametrize(
    "text",
    ["", "- 1", "a: [", "max_epsilon_local: 1\nmax_epsilon_local: 9", "1: 2", "!!python/object/apply:os.getcwd []"],
)
def test_what_is_no_policy_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_policy(tmp_path / "policy.yaml")


def test_a_number_as_people_write_it(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("max_epsilon_local: 1e1\ndelta: 1e-6\n")
    assert load_policy(tmp_path / "policy.yaml") == Policy(max_epsilon_local=10.0, delta=1e-6)


def test_two_policies_are_none(tmp_path: Path) -> None:
    site = next(iter(Federation(tmp_path).transport.members.values())).site
    save_policy(site.folder / "policy.yaml", OPEN)
    with pytest.raises(ConfigError, match="two policies"):
        _ = site.policy
    (site.folder / "policy.json").unlink()
    assert site.policy == OPEN


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,10}x", fullmatch=True), st.one_of(SCALARS, st.lists(SCALARS))))
def test_what_is_formatted_is_read_back(tree: dict[str, Any]) -> None:
    if tree:
        assert parse_yaml(format_yaml(tree, {})) == tree


def test_a_simulated_site_bounds_no_size_of_a_run() -> None:
    config = load_config("experiment=linear diloco.inner_steps=200000 diloco.rounds=20000")
    assert not list(simulated_policy(config).run_violations(config, []))


@pytest.mark.parametrize("value", ["010", "0x10", "0b11", "1:30", "0o17"])
def test_numbers_are_in_base_ten(tmp_path: Path, value: str) -> None:
    """YAML 1.1 reads 010 as eight and 1:30 as ninety."""
    path = tmp_path / "policy.yaml"
    path.write_text(f"max_epsilon_local: 1\nmin_survivors: {value}\n")
    with pytest.raises(ConfigError, match="wrong type"):
        load_policy(path)


def test_a_bomb_of_anchors_is_refused_in_few_words(tmp_path: Path) -> None:
    text = "max_epsilon_local: 1\nallowed_fabs:\n - &a [x,x,x,x,x,x,x,x,x,x]\n"
    for before, name in zip("abcdef", "bcdefg", strict=True):
        text += f" - &{name} [{','.join([f'*{before}'] * 10)}]\n"
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path / "policy.yaml")
    assert len(caught.value.message) < 10**6
