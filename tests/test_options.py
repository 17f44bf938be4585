"""Free options of a task: plain, frozen, and told apart in the configuration's hash."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.config import Config, config_hash, load_config, resolved
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.options import MOST_CHARACTERS, Options, options_from

OWN = "experiment=linear task=my.module:Task "
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
keys = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,9}", fullmatch=True)
trees = st.dictionaries(
    keys, st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3), max_leaves=8)
)


@given(tree=trees)
def test_options_are_equal_to_their_copies_and_read_themselves_back(tree: dict) -> None:
    options = options_from(tree, "task_options")
    for same in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options), options_from(options, "task_options")):  # noqa: S301
        assert same == options
        assert hash(same) == hash(options)


def test_options_do_not_change_and_tell_types_apart() -> None:
    options = options_from({"a": 1, "b": {"c": [1, 2]}}, "task_options")
    for change in (
        lambda: options.update(a=2),
        lambda: options["b"].clear(),
        lambda: options.pop("a"),
        lambda: options.setdefault("z", 1),
    ):
        with pytest.raises(TypeError):
            change()
    with pytest.raises(TypeError):
        options["a"] = 2
    with pytest.raises(TypeError):
        options |= {"a": 2}
    assert options["b"]["c"] == (1, 2)
    assert len({options_from({"a": v}, "") for v in (1, 1.0, True, "1", None, [1])}) == 6


def hashed(overrides: str) -> tuple[Config, bytes]:
    config = load_config(OWN + overrides)
    return config, config_hash(config)


def test_overrides_set_options_and_count_in_the_hash() -> None:
    config, digest = hashed("task_options.width=64 task_options.deep.er=[1,2] task_options.name=x")
    assert config.task_options == options_from({"width": 64, "deep": {"er": [1, 2]}, "name": "x"}, "")
    assert digest == hashed("task_options.name=x 'task_options.deep={er: [1, 2]}' task_options.width=64")[1]
    assert digest == hashed("'task_options={deep: {er: [1, 2]}, width: 64, name: x}'")[1]
    assert digest != hashed("task_options.width=64.0 task_options.deep.er=[1,2] task_options.name=x")[1]
    assert resolved(config)["task_options"]["width"] == 64
    assert hash(config) == hash(dataclasses.replace(config))
    assert isinstance(config.task_options, Options)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("task_options=3", "group of keys"),
        ("task_options=null", "group of keys"),
        ("task_options.x=nan", "finite"),
        ("task_options._x=1", "_x"),
        ("'task_options.x=${oc.env:HOME}'", "interpolation"),
        ("'task_options.x={a: {b: {c: {d: {e: {f: {g: {h: 1}}}}}}}}'", "deep"),
        (f"task_options.x={'a' * (MOST_CHARACTERS + 1)}", "characters"),
        ("+task_options.x=1", "adds"),
        ("~task_options", "adds|form"),
        ("task_optoins.x=1", "Unknown key"),
    ],
)
def test_bad_options_are_refused(overrides: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(OWN + overrides)


def test_built_in_tasks_have_none() -> None:
    with pytest.raises(ConfigError, match="no task_options"):
        load_config("experiment=linear task_options.x=1")
