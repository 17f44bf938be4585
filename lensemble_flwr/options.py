"""Free options of a task: plain values only, frozen, hashable, and part of the configuration's hash."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from lensemble_flwr.errors import ConfigError

MOST_CHARACTERS, MOST_DEPTH = 65_536, 8
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


class Options(dict[str, Any]):
    """A mapping that never changes: text, numbers, true, false, null, and lists (kept as tuples) and mappings of these.

    Two are equal when their canonical JSON is: 1, 1.0 and true are three different values.
    """

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return json.dumps(self, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.text == other.text

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[type[Options], tuple[dict[str, Any]]]:  # pickle would set the items one by one
        return Options, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self

    def _frozen(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("options do not change")

    __setitem__ = __delitem__ = __ior__ = _frozen
    clear = pop = popitem = setdefault = update = _frozen


def options_from(value: Any, path: str) -> Options:
    """The options that a configuration holds under ``path``.

    Raises:
        ConfigError: no mapping, a key that is no plain name, a value that is not plain or not finite, too much of it.
    """
    found = _plain(value, path, 0)
    if not isinstance(found, Options):
        raise ConfigError(f"{path} must be a group of keys, not {value!r}.", f"Write {path}.KEY=VALUE.")
    if len(found.text) > MOST_CHARACTERS:
        raise ConfigError(f"{path} holds {len(found.text)} characters, more than {MOST_CHARACTERS}.", "Say it shorter.")
    return found


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise ConfigError(f"{path} is nested more than {MOST_DEPTH} deep.", "Use fewer levels.")
    if isinstance(value, Mapping):
        for key in value:
            if not (isinstance(key, str) and _KEY.fullmatch(key)):
                raise ConfigError(f"{path} has the key {key!r}.", "Keys are letters, digits, - and _, a letter first.")
        return Options((key, _plain(item, f"{path}.{key}", depth + 1)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, path, depth + 1) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} must be finite, not {value!r}.")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(f"{path} must be text, a number, true, false, null, a list or a group, not {value!r}.")
