"""Numbers in docs/secure-aggregation.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.secagg import RingParams, Stage, default_threshold, message_size

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "secure-aggregation.md").read_text()


@pytest.mark.parametrize(("mark", "verify"), [("<!-- sizes", False), ("<!-- verified sizes", True)])
def test_the_tables_of_sizes(mark: str, verify: bool) -> None:
    head = "| n | t | " + " | ".join(stage.name for stage in Stage) + " |"
    table = PAGE[PAGE.index(mark) :].splitlines()[1:]
    assert table[0] == head
    for line, n in zip(table[2:6], (3, 10, 30, 100), strict=True):
        sizes = (message_size(stage, n, n, verify) for stage in Stage)
        assert line == "| " + " | ".join(map(str, (n, default_threshold(n, 1), *sizes))) + " |"


def test_the_overhead_of_the_vector() -> None:
    for bits in (16, 24, 32):
        ring = RingParams(bits, 10, 0, 10_000_000)
        assert ring.wire_bytes / (ring.dimension * bits / 8) - 1 < 1e-4


def test_every_message_is_described() -> None:
    described = set(re.findall(r"^\| ([A-Z]+)(?: \\?\*)? \|", PAGE, re.MULTILINE))
    assert {stage.name for stage in Stage} <= described


def test_the_defaults() -> None:
    secagg = load_config("experiment=linear").secagg
    rows = dict(re.findall(r"^\| `secagg\.(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert rows.pop("min_survivors") == "3"
    shown = {name: str(getattr(secagg, name)).lower().replace("none", "null") for name in rows}
    assert shown == rows
