"""A process that simulates episodes on request: ``store`` starts one per core.

It is started as a plain program, not by multiprocessing: forking a process that holds threads (torch, ray) can
hang, and spawning runs the caller's main script again. Protocol, over pipes: first line in, the spec as JSON; then one
JSON line per task, [split, body, index, count, start, stop]. Each answer is one kind byte ("K" good, "E" error), the
length as u64, and the body: an uncompressed npz, or a JSON list [class of error, message, remediation].
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr import errors
from lensemble_flwr.data.lander import LanderSpec, Shard, simulate

HEADER = struct.Struct("<cQ")

ERRORS = {c.__name__: c for c in (errors.ArtifactError, errors.DataError, errors.ConfigError)}


def simulate_range(spec: LanderSpec, shard: Shard, start: int, stop: int) -> dict[str, NDArray]:
    """Episodes ``start`` to ``stop`` of a shard, stacked: the columns of a shard's file."""
    episodes = [simulate(spec, shard, i) for i in range(start, stop)]
    labels = [e.states for e in episodes if e.states is not None]
    physics = [[float(e.meta[k]) for k in ("gravity", "wind", "turbulence")] for e in episodes]
    return {
        "frames": np.stack([e.frames for e in episodes]),
        "actions": np.stack([e.actions for e in episodes]),
        "states": np.stack(labels),
        "physics": np.asarray(physics, np.float64),
        "attempts": np.asarray([e.meta["attempt"] for e in episodes], np.int32),
    }


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer tasks until the other side closes its end (which its death does too)."""
    spec = LanderSpec.from_dict(json.loads(source.readline()))
    for line in source:
        split, body, index, count, start, stop = json.loads(line)
        try:
            buffer = io.BytesIO()
            np.savez(buffer, **simulate_range(spec, Shard(split, body, index, count), start, stop))  # type: ignore[arg-type]
            kind, answer = b"K", buffer.getvalue()
        except errors.LensembleError as error:
            kind, answer = b"E", json.dumps([type(error).__name__, error.message, error.remediation]).encode()
        sink.write(HEADER.pack(kind, len(answer)))
        sink.write(answer)
        sink.flush()


def main() -> None:
    """Entry point. Whatever prints to standard output must not reach the protocol's pipe."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        import cv2

        cv2.setNumThreads(1)  # one worker per core already
    except ImportError:
        pass  # simulate() reports what is missing
    serve(sys.stdin.buffer, sink)
