"""The frame anchor: zero in the reference frame, a pull back to it elsewhere, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lensemble_flwr.errors import ConfigError, ContractViolation, DegenerateProcrustes, ProbeError
from lensemble_flwr.gauge import FrameAnchor, frame_drift, procrustes_align
from tests.gauge.test_procrustes import random_orthogonal, rows


def test_landmark_loss_is_the_mean_squared_distance() -> None:
    targets = rows(64, 8).float()
    anchor = FrameAnchor(targets, targets)
    assert float(anchor(lambda x: x)) == 0
    assert float(anchor(lambda x: x + 0.5)) == pytest.approx(8 * 0.25, rel=1e-5)


def test_rotational_loss_is_the_distance_of_the_rotation_from_the_identity() -> None:
    targets, q = rows(64, 8), random_orthogonal(8, 2)
    anchor = FrameAnchor(targets, targets, "rotational")
    expected = float(torch.linalg.matrix_norm(q - torch.eye(8)).square())
    assert float(anchor(lambda x: x @ q)) == pytest.approx(expected, rel=1e-6)
    assert float(anchor(lambda x: 3 * x)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["landmark", "rotational"])
def test_training_on_the_anchor_brings_a_turned_frame_back(kind: str) -> None:
    torch.manual_seed(0)
    landmarks = rows(64, 6).float()
    layer = nn.Linear(6, 6, bias=False)
    turn = torch.triu(torch.full((6, 6), 0.3), 1)
    with torch.no_grad():  # well away from 180 degrees, where the gradient vanishes
        layer.weight.copy_(torch.linalg.matrix_exp(turn - turn.T))
    anchor = FrameAnchor(landmarks, landmarks, kind)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    before = frame_drift(procrustes_align(layer(landmarks), landmarks)[0]).max_deg
    for _ in range(150):
        optimizer.zero_grad()
        anchor(layer).backward()
        optimizer.step()
    after = frame_drift(procrustes_align(layer(landmarks), landmarks)[0]).max_deg
    assert before > 20
    assert after < 1


def test_targets_are_detached() -> None:
    targets = rows(32, 4).requires_grad_(True)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    FrameAnchor(rows(32, 4), targets)(lambda x: x * scale).backward()
    assert targets.grad is None
    assert scale.grad is not None


def test_refuses_landmarks_that_cannot_pin_a_frame() -> None:
    with pytest.raises(ProbeError) as caught:
        FrameAnchor(rows(31, 8), rows(31, 8))
    assert caught.value.num_landmarks == 31
    flat = rows(64, 8)
    flat[:, 3] = flat[:, 2]
    with pytest.raises(DegenerateProcrustes):
        FrameAnchor(flat, flat)
    with pytest.raises(ProbeError):
        FrameAnchor(rows(64, 8), torch.full((64, 8), float("inf")))
    with pytest.raises(ProbeError):
        FrameAnchor(rows(63, 8), rows(64, 8))
    with pytest.raises(ConfigError):
        FrameAnchor(rows(64, 8), rows(64, 8), "soft")


def test_refuses_latents_that_do_not_fit() -> None:
    anchor = FrameAnchor(rows(64, 8), rows(64, 8), "rotational")
    with pytest.raises(ContractViolation):
        anchor(lambda x: x[:, :4])
    with pytest.raises(DegenerateProcrustes):
        anchor(lambda x: x * 0)
