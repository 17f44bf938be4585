"""YAML as an operator writes it, read strictly: no key twice, and numbers in base ten.

YAML 1.1 reads ``1e-5`` as text, ``010`` as eight and ``1:30`` as ninety, and lets the last of two equal keys win; in a
policy all would be silent mistakes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Plain scalars, lists and mappings only."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not text")
            if keys.count(key) > 1:
                raise ValueError(f"{key} stands there twice")
        return super().construct_mapping(node, deep)


_INT = "tag:yaml.org,2002:int"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != _INT]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """The tree that ``text`` holds (JSON is YAML, too).

    Raises:
        ValueError: not YAML, a key twice, a key that is not text, or nested too deeply.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def format_yaml(tree: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """One key a line, each under its comment; every YAML reader gives the same tree back."""
    lines = []
    for key, value in tree.items():
        if comments.get(key):
            lines += ["", *(f"# {line}" for line in comments[key].splitlines())]
        lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_scalar(v) for v in value)}]"
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', width=10**6).strip()
    text = json.dumps(value, allow_nan=False)
    # 1e-05 is text for YAML 1.1, 1.0e-05 is a number.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text
