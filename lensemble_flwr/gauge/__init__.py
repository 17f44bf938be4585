"""The latent frame: how far participants' frames have drifted apart, and how to bring them back.

Pure functions on tensors; imports nothing of this project but its errors.
"""

from lensemble_flwr.gauge.align import Alignment, FrameSurface, align, conjugate
from lensemble_flwr.gauge.anchor import FrameAnchor, check_landmarks
from lensemble_flwr.gauge.drift import FrameDrift, frame_drift, principal_angles
from lensemble_flwr.gauge.procrustes import conditioning, polar_factor, procrustes_align

__all__ = [
    "Alignment",
    "FrameAnchor",
    "FrameDrift",
    "FrameSurface",
    "align",
    "check_landmarks",
    "conditioning",
    "conjugate",
    "frame_drift",
    "polar_factor",
    "principal_angles",
    "procrustes_align",
]
