"""How far a latent frame has turned, as an angle.

The eigenvalues of an orthogonal Q lie on the unit circle. Their phases are the angles by which Q turns its planes:
all planes turned by 10 degrees read 10, in any dimension, and a reflection reads 180. (The formula for one plane,
arccos((tr Q - d + 2) / 2), sums small turns up and saturates at 180.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lensemble_flwr.gauge.procrustes import require_orthogonal


@dataclass(frozen=True)
class FrameDrift:
    """Drift of a frame.

    Attributes:
        mean_deg, max_deg: mean and largest principal angle, degrees, 0..180.
        distance: ``||Q - I||_F``.
        reflects: det Q < 0.
    """

    mean_deg: float
    max_deg: float
    distance: float
    reflects: bool


def principal_angles(q: Tensor) -> Tensor:
    """Phases of the eigenvalues of Q in degrees, (d,) float64, ascending; each plane counts twice.

    Raises:
        ContractViolation: Q is not orthogonal.
    """
    square = require_orthogonal(q)
    # The symmetric part has the cosines as eigenvalues, and its decomposition is many times faster than that of Q.
    cosines = torch.linalg.eigvalsh((square + square.T) / 2).clamp(-1, 1)
    return torch.rad2deg(torch.arccos(cosines)).sort().values


def frame_drift(q: Tensor) -> FrameDrift:
    """Angles and distance of the frame change Q (d, d).

    Raises:
        ContractViolation: Q is not orthogonal.
    """
    angles = principal_angles(q)
    identity = torch.eye(len(q), dtype=torch.float64, device=q.device)
    return FrameDrift(
        mean_deg=float(angles.mean()),
        max_deg=float(angles.max()),
        distance=float(torch.linalg.matrix_norm(q.double() - identity)),
        reflects=bool(torch.linalg.slogdet(q.double()).sign < 0),
    )
