"""Secure aggregation, version 1 ("LSA1"): the coordinator learns the exact sum of the survivors' vectors, nothing else.

Double masking after Bonawitz et al. (CCS 2017) on the complete graph. Both sides are state machines without a
transport: bytes in, bytes out. Every message is described in :mod:`.wire`, what the keys are bound to in
:mod:`.transcript`, the vector in :mod:`.ring`, the masks in :mod:`.keystream`.

===============  ==========================================  ====================================================
message          computed from                               what it tells whom
===============  ==========================================  ====================================================
KEYS             two fresh X25519 pairs c, s                 nothing beyond presence
ROSTER           U1 = who sent keys                          members: U1 and its keys
SHARES           a fresh seed b; Shamir shares of b and of   coordinator: a hiding commitment to b. Peer j: one
                 s; sealed for each peer of U1               share of each; fewer than t say nothing
ENVELOPES        U2 = who sent shares                        members: U2
masked vector    q + PRG(b) + masks of pairs in U2           coordinator: uniform noise, until U3 is fixed
SURVIVORS        U3 = whose vector arrived                   members: U3
REVEAL           for j in U3 the share of b_j, for j in      coordinator: with t of them, b of survivors and s of
                 U2 without U3 the share of s_j              dropouts, hence the sum over U3
===============  ==========================================  ====================================================

Why it holds, against a coordinator that is honest but curious and k members that pool their views with it:

* A survivor's vector keeps every pairwise mask with other survivors; those cancel in the sum over U3 only.
* A dropout's vector, should it arrive late, keeps its self mask, since only its s is revealed.
* Nobody's b and s are both revealed: a member answers once, and works out the dropouts itself. Should the coordinator
  show different members different sets, it needs t shares of both secrets from disjoint sets of honest members, and
  t > (n + k)/2 leaves too few.
* Keys are fresh in each attempt and salted with the whole transcript: what is revealed in one attempt opens no other,
  and members that were shown different models, parameters or rosters cannot open each other's envelopes. They find
  out before anything masked has left.

What it does not do. The public keys are not signed here, so a coordinator that is more than curious can play the
members itself and see through the masks; identities and a consistency stage must be added before "hidden from the
coordinator" is claimed of such a one. The vectors are not proven to be in range beyond what the sum shows. A sum over
few members says much about each: that is the business of differential privacy.

Failures are :class:`~lensemble_flwr.errors.SecureAggregationError` with a `cause`, and `member` (hex identity) where
one is to blame. There is never a partial sum.
"""

from __future__ import annotations

from lensemble_flwr.secagg.client import ClientSession
from lensemble_flwr.secagg.params import SessionParams, default_threshold
from lensemble_flwr.secagg.server import ServerSession

__all__ = ["ClientSession", "ServerSession", "SessionParams", "default_threshold"]
