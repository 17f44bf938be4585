"""Readers of a lab's own recordings: LeRobot, robomimic and Minari HDF5, diffusion-policy zarr, and plain folders."""

from __future__ import annotations

from lensemble_flwr.data.formats.spec import RecordingSpec, open_recordings

__all__ = ["RecordingSpec", "open_recordings"]
