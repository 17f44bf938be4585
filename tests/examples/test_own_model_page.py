"""The class that docs/own-model.md shows works as it stands, with overrides alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lensemble_flwr.config import load_config
from lensemble_flwr.federation.tasks import build_task, own_choice

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-model.md"


def test_the_pages_class_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "own_page.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(
        "experiment=classifier task=own_page:MyTask 'task_options={width: 4}' inner.lr=0.1 inner.device=cpu"
    )
    task = build_task(config, allowed=own_choice(config))
    assert task.dimension == 4 * 4 + 5
    theta = task.initial()
    before = task.evaluate(theta)["mse"]
    after = task.local_update(theta, 0, None, steps=50, sketch_seed=0, round_index=0).theta
    assert task.evaluate(after)["mse"] < 0.5 * before


def test_its_links_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).is_file(), target
