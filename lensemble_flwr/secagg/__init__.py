"""Secure aggregation: ring encoding, masks, secret sharing, and the two sides of the protocol (:mod:`.session`)."""

from __future__ import annotations

from lensemble_flwr.secagg.client import keys_ahead
from lensemble_flwr.secagg.params import least_vouchers
from lensemble_flwr.secagg.ring import MAX_ROSTER, RingParams, center, decode, encode, from_wire, quantize, to_wire
from lensemble_flwr.secagg.session import ClientSession, ServerSession, SessionParams, default_threshold
from lensemble_flwr.secagg.signing import signature_holds
from lensemble_flwr.secagg.signing import weak as weak_identity
from lensemble_flwr.secagg.wire import Stage, message_size

__all__ = [
    "MAX_ROSTER",
    "ClientSession",
    "RingParams",
    "ServerSession",
    "SessionParams",
    "Stage",
    "center",
    "decode",
    "default_threshold",
    "encode",
    "from_wire",
    "keys_ahead",
    "least_vouchers",
    "message_size",
    "quantize",
    "signature_holds",
    "to_wire",
    "weak_identity",
]
