"""Secure aggregation, version 2 ("LSA1"): the coordinator learns the exact sum of the survivors' vectors, nothing else.

Double masking after Bonawitz et al. (CCS 2017, with their consistency check) on the complete graph. Both sides are
state machines without a transport: bytes in, bytes out. Every message is described in :mod:`.wire`, what the keys are
bound to in :mod:`.transcript`, the signatures in :mod:`.signing`, the vector in :mod:`.ring`, the masks in
:mod:`.keystream`.

===============  ==========================================  ====================================================
message          computed from                               what it tells whom
===============  ==========================================  ====================================================
KEYS             two fresh X25519 pairs c, s; signed         nothing beyond presence
ROSTER           U1 = who sent keys                          members: U1 and its signed keys
SHARES           a fresh seed b; Shamir shares of b and of   coordinator: a hiding commitment to b. Peer j: one
                 s; sealed for each peer of U1; signed       share of each; fewer than t say nothing
ENVELOPES        U2 = who sent shares                        members: U2
MASKED + vector  q + PRG(b) + masks of pairs in U2; the      coordinator: uniform noise, until U3 is fixed
                 vector's root signed with U2
SURVIVORS        U3 = whose vector arrived, and the roots    members: U3
CONSISTENCY *    a signature over (U2, U3, roots)            nothing new
CONFIRMED *      the signatures of at least t members        members: that t saw the same
REVEAL           for j in U3 the share of b_j, for j in      coordinator: with t of them, b of survivors and s of
                 U2 without U3 the share of s_j; signed      dropouts, hence the sum over U3
===============  ==========================================  ====================================================

The messages with * are sent in rounds with the consistency stage only (``SessionParams.consistency``).

Why it holds, against a coordinator and k members that pool their views with it:

* A survivor's vector keeps every pairwise mask with other survivors; those cancel in the sum over U3 only.
* A dropout's vector, should it arrive late, keeps its self mask, since only its s is revealed.
* Nobody's b and s are both revealed: a member answers once, and works out the dropouts itself. Should the coordinator
  show different members different sets, it needs t shares of both secrets from disjoint sets of honest members, and
  t > (n + k)/2 leaves too few.
* With the consistency stage at most one view of U2 and U3 is answered: of two at most one finds t signers, by the same
  count. What opens then is the sum over all honest members of its U3. Without the stage a coordinator that lies can
  show one member a small U2 and the others different U3, and learn its seed and the mask keys of all its peers, which
  open its vector (docs/secure-aggregation.md, section 1): claim nothing against such a coordinator there.
* Keys are fresh in each attempt and salted with the whole transcript: what is revealed in one attempt opens no other,
  and members that were shown different models, parameters or rosters cannot open each other's envelopes. They find
  out before anything masked has left.
* The fresh keys are signed by the identities in the roster. A coordinator cannot play a member whose identity is a key
  that it does not hold. It could still *invent* members: so "hidden from a coordinator that lies" may be said only
  where every participant pins the identities of the others (``federation/roster.py``) and refuses any else.

What it does not do. The vectors are not proven to be in range beyond what the sum shows, and a member that signs and
then stays silent can make a round fail. A sum over few members says much about each: that is the business of
differential privacy.

Failures are :class:`~lensemble_flwr.errors.SecureAggregationError` with a `cause`, and `member` (hex identity) where
one is to blame. There is never a partial sum.
"""

from __future__ import annotations

from lensemble_flwr.secagg.client import ClientSession
from lensemble_flwr.secagg.params import SessionParams, default_threshold
from lensemble_flwr.secagg.server import ServerSession

__all__ = ["ClientSession", "ServerSession", "SessionParams", "default_threshold"]
