"""Drift angles: linear in the turn, in every dimension, and honest about reflections."""

from __future__ import annotations

import math

import pytest
import torch

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.gauge import frame_drift, principal_angles
from tests.gauge.test_procrustes import random_orthogonal


def turned_planes(d: int, degrees: float, planes: int | None = None) -> torch.Tensor:
    q = torch.eye(d, dtype=torch.float64)
    angle = math.radians(degrees)
    for i in range(planes if planes is not None else d // 2):
        block = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        q[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor(block, dtype=torch.float64)
    basis = random_orthogonal(d, 1)
    return basis @ q @ basis.T


@pytest.mark.parametrize("d", [2, 8, 64, 192])
@pytest.mark.parametrize("degrees", [0.0, 10.0, 90.0, 179.0])
def test_all_planes_turned_by_an_angle_read_that_angle(d: int, degrees: float) -> None:
    drift = frame_drift(turned_planes(d, degrees))
    assert drift.mean_deg == pytest.approx(degrees, abs=1e-4)
    assert drift.max_deg == pytest.approx(degrees, abs=1e-4)
    assert not drift.reflects


def test_one_plane_of_many() -> None:
    drift = frame_drift(turned_planes(16, 40.0, planes=1))
    assert drift.max_deg == pytest.approx(40.0)
    assert drift.mean_deg == pytest.approx(5.0)
    assert drift.distance == pytest.approx(math.sqrt(2) * 2 * math.sin(math.radians(20)))


def test_a_reflection_reads_180() -> None:
    q = torch.eye(5, dtype=torch.float64)
    q[2, 2] = -1
    drift = frame_drift(q)
    assert drift.max_deg == pytest.approx(180)
    assert drift.reflects
    assert principal_angles(q).tolist() == pytest.approx([0, 0, 0, 0, 180])


def test_refuses_what_is_not_orthogonal() -> None:
    for bad in (2 * torch.eye(3), torch.ones(2, 3), torch.full((2, 2), float("nan"))):
        with pytest.raises(ContractViolation):
            frame_drift(bad)
