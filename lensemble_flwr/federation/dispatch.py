"""From a request's fields to a participant's checked reply: what both Flower's ClientApp and the tests go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lensemble_flwr.federation.participant import SiteParticipant
from lensemble_flwr.federation.records import JoinRequest, RoundClose, RoundOpen
from lensemble_flwr.federation.summed import STATE_BYTES
from lensemble_flwr.federation.wire import (
    ATTEMPT,
    BODY,
    CLOSES,
    ENVELOPES,
    KEYS,
    MAX_BODY_BYTES,
    NEXT,
    OPENING,
    Expected,
    Outgoing,
    Refusal,
    Stage,
    expected_reply,
    one_body,
    refused,
)
from lensemble_flwr.json_log import bind, short_id

Handled = tuple[Outgoing, Expected]

_WITHIN = (Stage.SHARE, Stage.TRAIN, Stage.AGREE, Stage.UNMASK)
"""Stages whose round is the one that is open."""


def _say_which(record: JoinRequest | RoundOpen | RoundClose) -> None:
    """Lines that are logged from now on name the federation and the round."""
    bind(federation=short_id(record.federation_id), round=getattr(record, "round", None))


def most_vector_bytes(stage: str, participant: SiteParticipant) -> int:
    """Bytes of the longest vector that this stage may be sent; known before the vector is read.

    Raises:
        PolicyViolation: a rule of the site forbids the run; nothing was built for it.
    """
    if stage == Stage.TRAIN:  # the open round's, which was judged
        opened = participant.public_round()
        if opened is None:
            return 0
        return (STATE_BYTES if opened.verify_sum else 4) * opened.dimension
    if stage == Stage.CLOSE or (stage == Stage.OPEN and participant.config.secagg.verify_sum):
        participant.check_run()
        return 4 * participant.task.dimension
    return 0


def handle(
    stage: str,
    fields: Mapping[str, Any],
    vector: np.ndarray | None,
    participant: SiteParticipant,
    train: Callable[[np.ndarray | None, bytes], Outgoing] | None = None,
) -> Handled:
    """Run one stage; returns the reply and what public values say that it must look like.

    Args:
        stage: the Flower message type.
        fields, vector: the request.
        participant: whose stage it is.
        train: the training stage as the Flower client runs it; by default the participant's own.

    Raises:
        LensembleError: whatever the stage raises; it leaves the site as a refusal code only.
    """
    # Read first: unmask wipes the memory that holds them.
    opened, envelopes = participant.public_round(), participant.memory.get(ENVELOPES, b"")
    if opened is not None and stage in _WITHIN:
        _say_which(opened)
    if stage in (Stage.OPEN, Stage.OPEN_SHARE):
        attempt = fields.get(ATTEMPT)
        if type(attempt) is not int or not 0 < attempt < 2**32:
            raise refused("The attempt is not a number.", Refusal.PROTOCOL)
        body, closes = (one_body(fields, name, MAX_BODY_BYTES) for name in (BODY, CLOSES))
        _say_which(RoundOpen.decode(body))
        if stage == Stage.OPEN:
            opening = one_body(fields, OPENING, MAX_BODY_BYTES) if OPENING in fields else b""
            reply, keys = participant.open_round(body, attempt, closes, opening, vector), b""
        else:
            keys = one_body(fields, KEYS, MAX_BODY_BYTES)
            reply = participant.open_and_share(body, attempt, closes, keys)
        return reply, expected_reply(stage, keys, participant.public_round())
    if stage == Stage.TRAIN:
        reply = (train or participant.masked_update)(vector, one_body(fields, ENVELOPES, MAX_BODY_BYTES))
        return reply, expected_reply(stage, b"", opened)
    body = one_body(fields, BODY, MAX_BODY_BYTES)
    if stage == Stage.JOIN:
        _say_which(JoinRequest.decode(body))
        return participant.join(body), expected_reply(stage, b"", None)
    if stage == Stage.SHARE:
        return participant.share_keys(body), expected_reply(stage, body, opened)
    if stage == Stage.AGREE:
        return participant.agree(body), expected_reply(stage, b"", opened)
    if stage == Stage.UNMASK:
        ahead = fields.get(NEXT, 0)
        if type(ahead) is not int or ahead not in (0, 1):
            raise refused("Whether to make keys is neither 0 nor 1.", Refusal.PROTOCOL)
        return participant.unmask(body, bool(ahead)), expected_reply(stage, envelopes, opened, with_keys=bool(ahead))
    if stage == Stage.CLOSE:
        _say_which(RoundClose.decode(body))
        opening = one_body(fields, OPENING, MAX_BODY_BYTES) if OPENING in fields else b""
        return participant.close_round(body, vector, opening), expected_reply(stage, b"", None)
    raise refused(f"There is no message {stage!r}.", Refusal.PROTOCOL)
