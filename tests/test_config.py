"""Composing and validating configurations: every mistake is one clear line, nothing is half accepted."""

from __future__ import annotations

import pytest

from lensemble_flwr.config import config_hash, join_overrides, load_config, resolved, split_overrides
from lensemble_flwr.errors import ConfigError


@pytest.mark.parametrize("experiment", ["quickstart", "silos", "linear", "swipe_dot", "recordings", "classifier"])
def test_every_experiment_composes(experiment: str) -> None:
    assert load_config(f"experiment={experiment}").experiment == experiment


def test_default_is_quickstart() -> None:
    assert load_config() == load_config("experiment=quickstart")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("foo=1", "Unknown key 'foo'"),
        ("diloco.round=3", "Did you mean diloco.rounds?"),
        ("experiment=zz", "Choose one of: classifier, linear, quickstart, recordings, silos, swipe_dot"),
        ("diloco.rounds=x", "whole number"),
        ("diloco.rounds=1.5", "whole number"),
        ("diloco.rounds=true", "whole number"),
        ("diloco.rounds=0", "at least 1"),
        ("privacy.noise_multiplier=-1", "positive finite"),
        ("privacy.noise_multiplier=nan", "finite"),
        ("privacy.clip_norm=inf", "finite"),
        ("privacy.sample_rate=0", "at least 1e-06 and at most 1"),
        ("privacy.sample_rate=1.0000001", "at least 1e-06 and at most 1"),
        ("privacy.sample_rate=-1", "at least 1e-06 and at most 1"),
        ("privacy.sample_rate=nan", "finite"),
        ("privacy.sample_rate=x", "must be a number"),
        ("privacy.sample_rate=true", "must be a number"),
        ("privacy.sample_rate=null", "must be a number"),
        ("privacy=disabled privacy.sample_rate=0.5", "without privacy"),
        ("privacy.target_delta=0.1", "1/participants"),
        ("privacy.claim=[everyone]", "unknown"),
        ("privacy.claim=3", "must be a list"),
        ("secagg.enabled=false", "no path on which an individual update"),
        ("secagg.assumed_colluders=0", "at least 1"),
        ("experiment=linear secagg.threshold=2", "unsafe or impossible"),
        ("experiment=linear federation.participants=2 federation.min_participants=2", "cannot hide from each other"),
        ("experiment=linear secagg.min_survivors=4", "below secagg.min_survivors"),
        ("gauge.coordinator_alignment=true", "INV-ALIGN-BEFORE-RELEASE"),
        ("+diloco.extra=1", "adds, removes"),
        ("~diloco", "key=value|adds, removes"),
        ("seed=${oc.env:HOME}", "interpolation"),
        ("model.name=${oc.env:HOME}", "interpolation"),
        (r"model.name=$\{oc.env\:HOME\}", "interpolation|cannot be read"),
        (r"model.name='$\{oc.env\:HOME}'", "interpolation|cannot be read"),
        ("hydra.run.dir=x", "adds, removes"),
        ("privacy.accountant=moments", "not a valid bound"),
        ("privacy.accountant=legacy", "not a valid bound"),
        ("privacy.accountant=gdp", "prv"),
        ("privacy.max_participants_per_person=0", "at least 1"),
        ("experiment=linear privacy.max_participants_per_person=5", "more than federation.participants=4"),
        (
            "experiment=linear privacy.guarantee=central privacy.max_participants_per_person=3",
            "no more than updates seen one by one",
        ),
        ("seed=-1", ">= 0"),
        ("seed", "key=value"),
        ("diloco.rounds=[1", "cannot be read"),
        ("task=No", "Choose one of"),
    ],
)
def test_mistakes_are_one_clear_line(overrides: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["output_dir", "model.name"])
@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SITE_SECRET}",
        "'${oc.env:SITE_SECRET}'",
        r"$\{oc.env\:SITE_SECRET\}",
        r"$\{oc.env\:SITE_SECRET}",
        r"'$\{oc.env:SITE_SECRET}'",
        '"$""{oc.env:SITE_SECRET}"',
    ],
)
def test_no_spelling_reads_the_environment(monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    """Neither into a value nor into the error's text, which whoever submits the run may see."""
    monkeypatch.setenv("SITE_SECRET", "hunter2")
    try:
        seen = repr(load_config([f"{key}={value}"]))
    except ConfigError as error:
        seen = str(error)
    assert "hunter2" not in seen


@pytest.mark.parametrize(
    "override",
    [
        " hydra.searchpath=[file:///x]",
        "\thydra.run.dir=/x",
        "'hydra.run.dir'=/x",
        "@hydra.run.dir=/x",
        "hydra@other=default",
        "override hydra/launcher=basic",
        "data=../../../../x/evil",
        "data=/x/evil",
    ],
)
def test_no_spelling_reaches_hydra_or_other_files(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config([override])


def test_unbalanced_quotes() -> None:
    with pytest.raises(ConfigError, match="quotes"):
        load_config("seed='1")


def test_overrides_round_trip() -> None:
    parts = ["a=1", "b=x y", "c=[1,2]"]
    assert split_overrides(join_overrides(parts)) == parts


def test_hash_names_what_is_computed_not_where() -> None:
    base = load_config("experiment=linear")
    assert config_hash(base) == config_hash(load_config("experiment=linear output_dir=/x federation.sites_dir=/y"))
    assert config_hash(base) != config_hash(load_config("experiment=linear seed=1"))
    assert "overrides" not in resolved(base)


def test_two_parties_need_consent_and_the_local_guarantee() -> None:
    two = (
        "experiment=linear privacy=local federation.participants=2 federation.min_participants=2 "
        "secagg.min_survivors=2 secagg.allow_two_party=true"
    )
    assert load_config(two).secagg.allow_two_party
    with pytest.raises(ConfigError, match="more than two"):
        load_config(two + " privacy.guarantee=central")


@pytest.mark.parametrize("other", ["privacy.sample_rate=0.5", "privacy.mechanism=discrete_gaussian"])
def test_what_is_accounted_for_singly_is_refused_together(other: str) -> None:
    with pytest.raises(ConfigError, match="max_participants_per_person"):
        load_config(f"privacy.max_participants_per_person=2 {other}")
    with pytest.raises(ConfigError, match="not accounted for"):
        load_config("privacy.sample_rate=0.5 privacy.mechanism=discrete_gaussian")


@pytest.mark.parametrize(
    "override",
    [
        "experiment=../../../tmp/x",
        "experiment='../x'",
        "model=[tiny,../x]",
        "model=..",
        "/model=tiny",
        "data@model=x",
    ],
)
def test_a_group_is_chosen_by_name_and_never_by_path(override: str) -> None:
    """Else whoever submits a run could load any YAML file on a site's disk as configuration."""
    with pytest.raises(ConfigError):
        load_config([override])


def test_the_same_overrides_are_composed_once() -> None:
    """A participant asks for its configuration with every message; composing it takes longer than the message."""
    assert load_config("experiment=linear seed=77") is load_config("experiment=linear seed=77")


def test_an_experiments_options_are_for_its_own_task() -> None:
    """Another task in an experiment's place would inherit keys that it does not know."""
    own = load_config("experiment=classifier")
    assert dict(own.task_options) == {"pictures": 40, "digits": 3}
    changed = load_config("experiment=classifier task_options.digits=5")
    assert dict(changed.task_options) == {"pictures": 40, "digits": 5}
    same = load_config(["experiment=classifier", f"task={own.task}"])
    assert same.task_options == own.task_options
    for overrides in ("experiment=classifier task=my.module:Mine", "task=my.module:Mine experiment=classifier"):
        other = load_config(overrides)
        assert (other.task, dict(other.task_options)) == ("my.module:Mine", {})
        assert other.inner == own.inner  # its settings stay
        assert dict(load_config(f"{overrides} task_options.width=3").task_options) == {"width": 3}
    assert dict(load_config("experiment=classifier task=linear federation.surface=full").task_options) == {}


def test_a_checkpoint_needs_its_hash() -> None:
    with pytest.raises(ConfigError, match="sha256sum"):
        load_config("warmstart.path=vit.safetensors")
    with pytest.raises(ConfigError, match=r"warmstart\.sha256"):
        load_config("warmstart.path=vit.safetensors warmstart.sha256=abc")
    assert load_config(f"warmstart.path=vit.safetensors warmstart.sha256={'ab' * 32}").warmstart.path
