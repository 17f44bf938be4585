"""What `site check` says of recordings that are public evaluation episodes: to the operator, by name."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lensemble_flwr.deploy.site_check import WARNING, Findings, _excluded


class Task:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def excluded(self, partition: int) -> list[str]:
        return self.names


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], []),
        (["a.npz"], ["1 of 12 are public probe or evaluation episodes and not trained on: a.npz"]),
        ([f"{i}.npz" for i in range(11)], ["11 of 12", "9.npz and 1 more"]),
        ([f"{i}.npz" for i in range(12)], ["12 of 12", "NOTHING is left to train on"]),
    ],
)
def test_left_out_recordings_are_named(names: list[str], says: list[str]) -> None:
    found = Findings()
    _excluded(found, cast(Any, Task(names)), 0, 12)
    assert [level for level, _, _ in found.lines] == [WARNING] * bool(names)
    assert found.sound  # a warning: the run goes on
    for text in says:
        assert text in found.text()
    assert ("NOTHING" in found.text()) == (len(names) == 12)


def test_a_task_without_public_evaluation_episodes_has_nothing_to_say() -> None:
    found = Findings()
    _excluded(found, cast(Any, object()), 0, 3)
    assert not found.lines
