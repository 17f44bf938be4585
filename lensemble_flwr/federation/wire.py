"""Every message of the protocol: its Flower type, its fields, and what may leave a participant.

This is the whole list. :func:`check_egress` is called at one place, the outermost ClientApp mod
(:mod:`clients.egress`); what is not on the list, or has another type or size than public values say, does not leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from lensemble_flwr.errors import (
    CommitmentMismatch,
    ConfigError,
    LedgerError,
    LensembleError,
    PolicyViolation,
    PrivacyBudgetExceeded,
    ProbeError,
    ResidencyViolation,
    RoundError,
    SecureAggregationError,
)
from lensemble_flwr.federation.codec import HASH_BYTES, MAX_ROSTER
from lensemble_flwr.federation.records import PROTOCOL_VERSION, JoinReply, RoundOpen
from lensemble_flwr.secagg import RingParams
from lensemble_flwr.secagg import wire as secagg_wire

MAX_BODY_BYTES = 4096 + 256 * MAX_ROSTER
"""No body is longer, whoever sends it: envelopes, signed keys and signatures are at most 129 bytes a member."""


class Refusal(IntEnum):
    """All that a coordinator learns when a participant does not do what it was asked.

    A function of public values, the site's policy and its ledger only. ``UPDATE`` (the local update is unusable) is
    sent only in runs without privacy: with privacy on such a failure becomes a zero update like any other.
    """

    POLICY = 1
    HASH_MISMATCH = 2
    STALE = 3
    BUDGET = 4
    PROTOCOL = 5
    LEDGER = 6
    BUSY = 7
    UPDATE = 8


class Stage:
    """Flower message types (``<category>.<action>``), in the order of a round."""

    JOIN = "query.join"
    OPEN = "query.open_round"
    SHARE = "query.share_keys"
    OPEN_SHARE = "query.open_and_share"
    """OPEN and SHARE in one, where the keys came with the last reply of the round before."""
    TRAIN = "train.masked_update"
    AGREE = "query.agree"
    UNMASK = "query.unmask"
    CLOSE = "query.close_round"

    ALL = (JOIN, OPEN, SHARE, OPEN_SHARE, TRAIN, AGREE, UNMASK, CLOSE)


BODY = "body"
"""The field of a message that holds one canonical byte string."""
VECTOR = "vector"
"""The field that holds a flat vector: theta (float32) downwards, the masked ring vector (unsigned) upwards.

Where participants verify sums: downwards also the packed sum, or theta with its momentum, as bytes (unsigned).
"""
ENVELOPES, CLOSES, THETA_HASH, OPENING = "envelopes", "closes", "theta_hash", "opening"
ATTEMPT = "attempt"
KEYS = "keys"
"""The keys of all, in OPEN_SHARE."""
SALT = "salt"
"""16 random bytes in every question. Flower's message ids are hashes of the content, and who knows the id of a message
can answer it in its receiver's place: nobody else must be able to compute it."""
NEXT = "next"
"""In UNMASK, 1: the reply ends in a KEYS message for the next round."""
REFUSAL = "refusal"


@dataclass(frozen=True)
class Outgoing:
    """A reply before it becomes a Flower message: exactly one body, at most one vector."""

    body: bytes
    vector: np.ndarray | None = None


@dataclass(frozen=True)
class Expected:
    """What a reply to one request must look like, from public values alone."""

    body_bytes: int
    vector_length: int = 0
    vector_dtype: str = ""


def check_egress(stage: str, reply: Outgoing, expected: Expected) -> None:
    """Raises :class:`ResidencyViolation` unless the reply has exactly the types and sizes that public values say."""
    if stage not in Stage.ALL:
        raise ResidencyViolation(f"There is no message {stage!r}.")
    if type(reply) is not Outgoing or type(reply.body) is not bytes or len(reply.body) != expected.body_bytes:
        raise ResidencyViolation(f"A reply to {stage} must be {expected.body_bytes} bytes.")
    if expected.vector_length == 0:
        if reply.vector is not None:
            raise ResidencyViolation(f"A reply to {stage} carries no vector.")
        return
    vector = reply.vector
    if (
        type(vector) is not np.ndarray
        or vector.dtype.str != expected.vector_dtype
        or vector.shape != (expected.vector_length,)
    ):
        raise ResidencyViolation(
            f"A reply to {stage} must carry {expected.vector_length} values of {expected.vector_dtype}."
        )


def set_header_bytes(roster: int) -> int:
    """Bytes of a secure-aggregation message up to the end of the set of members that it opens with."""
    return secagg_wire.HEADER_BYTES + -(-roster // 8)


def masked_body_bytes(roster: int, verify: bool = False) -> int:
    """Bytes beside a masked vector: the dataset root, and the message that signs both."""
    return HASH_BYTES + secagg_wire.message_size(secagg_wire.Stage.MASKED, roster, roster, verify)


def keys_bytes(roster: int, verify: bool = False) -> int:
    """Bytes of a KEYS message."""
    return secagg_wire.message_size(secagg_wire.Stage.KEYS, roster, roster, verify)


def expected_reply(stage: str, request: bytes, opened: RoundOpen | None, *, with_keys: bool = False) -> Expected:
    """What a reply must look like, from the request, the RoundOpen and nothing else.

    Args:
        stage: the Flower message type.
        request: SHARE and OPEN_SHARE: the keys of all; UNMASK: the envelopes that this participant got (they tell how
            many shares it holds); not used otherwise.
        opened: the round that is open here; None before the first.
        with_keys: UNMASK: whether keys for the next round were asked for.
    """
    if stage == Stage.JOIN:
        return Expected(len(JoinReply(PROTOCOL_VERSION, bytes(32), bytes(32), bytes(64)).encode()))
    if stage == Stage.CLOSE:
        return Expected(1)
    if opened is None:
        raise ResidencyViolation(f"A reply to {stage} needs an open round.")
    n, verify = len(opened.roster), opened.verify_sum
    if stage == Stage.OPEN:
        return Expected(keys_bytes(n, verify))
    if stage == Stage.TRAIN:
        ring = RingParams(opened.ring_bits, n, opened.scale_log2, opened.dimension)
        return Expected(masked_body_bytes(n, verify), ring.wire_bytes, "|u1")
    if stage == Stage.AGREE:
        return Expected(secagg_wire.message_size(secagg_wire.Stage.CONSISTENCY, n, n))
    bitmap = request[secagg_wire.HEADER_BYTES : set_header_bytes(n)]
    members = len(secagg_wire.parse_members(bitmap, n))
    if stage in (Stage.SHARE, Stage.OPEN_SHARE):
        return Expected(secagg_wire.message_size(secagg_wire.Stage.SHARES, n, members, verify))
    reveal = secagg_wire.message_size(secagg_wire.Stage.REVEAL, n, members, verify)
    return Expected(reveal + (keys_bytes(n, verify) if with_keys else 0))


_BY_ERROR: tuple[tuple[type[LensembleError], Refusal], ...] = (
    (PrivacyBudgetExceeded, Refusal.BUDGET),
    (LedgerError, Refusal.LEDGER),
    (PolicyViolation, Refusal.POLICY),
    (ConfigError, Refusal.POLICY),
    (ProbeError, Refusal.HASH_MISMATCH),
    (CommitmentMismatch, Refusal.HASH_MISMATCH),
    (SecureAggregationError, Refusal.PROTOCOL),
    (RoundError, Refusal.PROTOCOL),
)


def refusal_for(error: BaseException) -> Refusal:
    """The code for an error. An error may name its own code (``refusal`` field); unknown errors are PROTOCOL."""
    own = getattr(error, "refusal", None)
    if isinstance(own, Refusal):
        return own
    if isinstance(error, LedgerError) and error.fields.get("busy"):
        return Refusal.BUSY
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return Refusal.PROTOCOL


def refused(message: str, code: Refusal, remediation: str = "") -> RoundError:
    """A :class:`RoundError` that leaves the site as ``code``; the text stays in the site's own log."""
    return RoundError(message, remediation, refusal=code)


def one_body(fields: Mapping[str, Any], name: str, most: int) -> bytes:
    """The byte string ``name`` of a request, at most ``most`` bytes.

    Raises:
        RoundError: missing, of another type, or too long.
    """
    value = fields.get(name)
    if not isinstance(value, bytes) or len(value) > most:
        raise RoundError(f"The field {name!r} is missing, not bytes, or longer than {most}.")
    return value
