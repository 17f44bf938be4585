"""The hash that stands for a masked vector: what its member signs and everybody compares before it is opened.

root = SHA-256("vector" || SHA-256 of each SEGMENT lanes, as they go on the wire)
"""

from __future__ import annotations

import hashlib

import numpy as np

from lensemble_flwr.secagg import keystream
from lensemble_flwr.secagg.ring import Lanes, RingParams


def vector_root(vector: Lanes, ring: RingParams, threads: int = 1) -> bytes:
    """32 bytes.

    Args:
        vector: lanes, shape (padded,), checked by the caller.
        ring: the round's ring.
        threads: the result does not depend on it.
    """

    def one(segment: int) -> bytes:
        raw = vector[segment * keystream.SEGMENT : (segment + 1) * keystream.SEGMENT].view(np.uint8)
        if ring.bits == 24:
            raw = np.ascontiguousarray(raw.reshape(-1, 4)[:, :3])
        return hashlib.sha256(raw.data).digest()

    digests = keystream.for_each(one, -(-ring.padded // keystream.SEGMENT), threads)
    return hashlib.sha256(b"vector" + b"".join(digests)).digest()
