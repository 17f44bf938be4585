"""The public parameters of one session, and the rules that a participant holds them to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg import transcript
from lensemble_flwr.secagg.ring import MAX_ROSTER, RingParams

IDENTITY_BYTES = 32


def default_threshold(n: int, k: int) -> int:
    """Shares needed to reconstruct a secret: max(floor(2n/3), floor((n+k)/2)) + 1, at most n."""
    return min(max(2 * n // 3, (n + k) // 2) + 1, n)


def least_vouchers(n: int, k: int) -> int:
    """Others that must vouch for the model of a verified round of n before one that cannot check it goes on."""
    return min(k + 1, n - 1)


def _refuse(message: str, remediation: str = "") -> SecureAggregationError:
    return SecureAggregationError(message, remediation, cause="policy_violation")


@dataclass(frozen=True)
class SessionParams:
    """What everybody in one attempt at one round agrees on. Both sides validate it; every byte enters the transcript.

    Args:
        open_hash: SHA-256 of the canonical RoundOpen, 32 bytes: model, federation, round, policy.
        attempt: 0 for the first attempt at this round; keys and masks are fresh in each.
        roster: 32-byte identities (Ed25519 public keys), sorted, fixed for the round. A position counts from 1 and is a
            member's share point.
        threshold: t, the shares that reconstruct a secret. t > (n + k)/2, so that a lying coordinator and k colluders
            cannot collect t shares of both secrets of one member from disjoint sets of honest members, nor find t
            signers for two views.
        min_survivors: m, the fewest vectors a revealed sum may have. At least 3 and at least k + 2, since k colluders
            subtract their own; 2 only for two participants who agreed to it, and then nothing is hidden from the peer.
        ring: the arithmetic, of the same roster size.
        colluders: k >= 1, members that may pool their views with the coordinator.
        allow_two_party: explicit consent to a roster of two.
        consistency: whether members compare their views, by signatures of at least t of them, before they reveal;
            without it a coordinator that lies can open one member's vector.
        verify: whether members share a key with which they verify the sum that is published, see :mod:`.projection`.
        keys_binding: what KEYS are signed for, 32 bytes, where members made them before the RoundOpen was known; None:
            they are signed for T0. Everything after KEYS is bound to T0 and T1 either way.

    Raises:
        SecureAggregationError: policy_violation, naming the rule.
    """

    open_hash: bytes
    attempt: int
    roster: tuple[bytes, ...]
    threshold: int
    min_survivors: int
    ring: RingParams
    colluders: int = 1
    allow_two_party: bool = False
    consistency: bool = False
    verify: bool = False
    keys_binding: bytes | None = None

    def __post_init__(self) -> None:
        self._check_types()
        n, k, t, m = self.n, self.colluders, self.threshold, self.min_survivors
        if not 2 <= n <= MAX_ROSTER:
            raise _refuse(f"A roster of {n} is outside 2..{MAX_ROSTER}.")
        if list(self.roster) != sorted(set(self.roster)):
            raise _refuse("The roster must be sorted and name every identity once.")
        if self.ring.roster != n:
            raise _refuse(f"The ring is made for {self.ring.roster} participants but the roster has {n}.")
        if not 0 <= self.attempt < 1 << 32:
            raise _refuse(f"Attempt {self.attempt} is outside 0..2^32-1.")
        if k < 1:
            raise _refuse(f"assumed_colluders = {k}: every member knows its own share, so at least 1.")
        if t > n or 2 * t <= n + k:
            raise _refuse(
                f"A threshold of {t} among {n} with {k} assumed colluders is not over (n + k)/2 and at most n.",
                f"Use {default_threshold(n, k)}, or assume fewer colluders.",
            )
        if n == 2:
            if not self.allow_two_party:
                raise _refuse(
                    "With two participants the sum tells each the other's update.",
                    "Every participant must consent with allow_two_party; it hides from the coordinator only.",
                )
            least = 2
        else:
            least = max(3, k + 2)
        if not least <= m <= n:
            raise _refuse(f"min_survivors = {m} is outside {least}..{n} for {n} participants and {k} colluders.")

    def _check_types(self) -> None:
        def is_bytes32(value: object) -> bool:
            return type(value) is bytes and len(value) == IDENTITY_BYTES

        if not is_bytes32(self.open_hash):
            raise _refuse("open_hash must be 32 bytes.")
        if type(self.roster) is not tuple or not all(map(is_bytes32, self.roster)):
            raise _refuse("The roster must be a tuple of identities of 32 bytes.")
        flags = (self.allow_two_party, self.consistency, self.verify)
        if type(self.ring) is not RingParams or any(type(flag) is not bool for flag in flags):
            raise _refuse("ring must be RingParams, allow_two_party, consistency and verify a bool.")
        if self.keys_binding is not None and not is_bytes32(self.keys_binding):
            raise _refuse("keys_binding must be 32 bytes or None.")
        if self.keys_binding is not None and self.verify:
            raise _refuse("Keys that are made ahead cannot vouch for a model.")
        for name in ("attempt", "threshold", "min_survivors", "colluders"):
            if type(getattr(self, name)) is not int:
                raise _refuse(f"{name} must be an integer.")

    @property
    def n(self) -> int:
        return len(self.roster)

    @cached_property
    def hash(self) -> bytes:
        """T0, see :mod:`.transcript`."""
        return transcript.opening(
            open_hash=self.open_hash,
            attempt=self.attempt,
            roster=self.roster,
            numbers=(
                self.ring.bits,
                self.ring.scale_log2,
                self.ring.dimension,
                self.ring.padded,
                self.threshold,
                self.min_survivors,
                self.colluders,
                int(self.allow_two_party),
                int(self.consistency) + 2 * int(self.verify),
            ),
            keys_binding=self.keys_binding or b"",
        )

    @property
    def vouchers(self) -> int:
        """How many others must vouch for the model before one that cannot check it itself goes on: k may lie."""
        return least_vouchers(self.n, self.colluders)

    @property
    def keys_signed_for(self) -> bytes:
        """The binding of KEYS messages and of their signatures."""
        return self.keys_binding or self.hash

    def position(self, identity: bytes) -> int:
        """Roster position from 1. Raises SecureAggregationError: inconsistent_roster for a stranger."""
        try:
            return self.roster.index(identity) + 1
        except ValueError:
            raise SecureAggregationError(
                "This identity is not in the roster of the round.", cause="inconsistent_roster"
            ) from None

    def identity(self, position: int) -> bytes:
        return self.roster[position - 1]

    def require_enough(self, count: int, what: str) -> None:
        """Refuse to go on with fewer than max(t, m) members.

        Raises:
            SecureAggregationError: below_threshold or below_min_survivors.
        """
        for least, cause in ((self.threshold, "below_threshold"), (self.min_survivors, "below_min_survivors")):
            if count < least:
                raise SecureAggregationError(f"{count} members {what}; at least {least} are needed.", cause=cause)
