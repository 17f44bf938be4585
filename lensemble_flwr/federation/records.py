"""The two canonical records of a round: RoundOpen names everything that a round depends on, RoundClose how it ended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import ClassVar

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.federation.codec import F64, HASH, HASHES, I32, SIGNATURE, U8, U16, U32, U64, Record, wire
from lensemble_flwr.privacy.participation import SecretParticipation

PROTOCOL_VERSION = 2


class Guarantee(IntEnum):
    """Which view of the privacy claim the noise is sized for."""

    NONE = 0
    LOCAL = 1
    CENTRAL = 2


class Mechanism(IntEnum):
    """Whose law the noise follows: a continuous Gaussian rounded to the ring, or a discrete Gaussian on it."""

    GAUSSIAN = 0
    DISCRETE_GAUSSIAN = 1


class Outcome(IntEnum):
    """How a round ended."""

    COMMITTED = 1
    VOID = 2
    BURNT = 3


@dataclass(frozen=True)
class RoundOpen(Record):
    """Everything public that round ``round`` depends on; its SHA-256 enters every key of the round.

    ``noise_std`` (s) is the standard deviation of each participant's own noise per coordinate, in model units;
    ``clip_norm`` (C) the L2 bound of each update; ring coordinates are multiples of ``2**-scale_log2``.
    ``sample_rate`` (q) is the rate of each participant's secret coin; 1: no coin.
    ``per_person`` (p) is how many participants, of this roster or not, may hold data of one person: every site charges
    for it.
    ``roster`` are the identities that joined, sorted; thresholds are computed from its size, never from who answers.
    ``pinned``: a participant without a pinned roster refuses; ``consistency``: views are compared before unmasking.
    ``verify_sum``: participants verify the sum that led to this model; ``momentum_hash`` then names the outer momentum
    that goes with theta (zeros otherwise). ``steps`` counts the committed rounds before.
    """

    MAGIC: ClassVar[bytes] = b"LRO1"
    VERSION: ClassVar[int] = 3

    federation_id: bytes = wire(HASH)
    config_hash: bytes = wire(HASH)
    round: int = wire(U32)
    rounds: int = wire(U32)
    theta_hash: bytes = wire(HASH)
    base_hash: bytes = wire(HASH)
    probe_hash: bytes = wire(HASH)
    sketch_seed: int = wire(U64)
    sketch_hash: bytes = wire(HASH)
    inner_steps: int = wire(U32)
    dimension: int = wire(U64)
    ring_bits: int = wire(U8)
    scale_log2: int = wire(I32)
    clip_norm: float = wire(F64)
    noise_multiplier: float = wire(F64)
    noise_std: float = wire(F64)
    target_epsilon: float = wire(F64)
    target_delta: float = wire(F64)
    guarantee: int = wire(U8)
    mechanism: int = wire(U8)
    replay: bool = wire(U8)
    threshold: int = wire(U32)
    min_survivors: int = wire(U32)
    colluders: int = wire(U32)
    two_party: bool = wire(U8)
    sample_rate: float = wire(F64)
    pinned: bool = wire(U8)
    consistency: bool = wire(U8)
    per_person: int = wire(U32)
    verify_sum: bool = wire(U8)
    momentum_hash: bytes = wire(HASH)
    steps: int = wire(U32)
    roster: tuple[bytes, ...] = wire(HASHES)

    def __post_init__(self) -> None:
        if list(self.roster) != sorted(set(self.roster)) or not self.roster:
            raise ContractViolation("The roster must be sorted and without repetition.")
        if self.guarantee not in tuple(Guarantee):
            raise ContractViolation(f"Unknown guarantee {self.guarantee}.")
        if self.mechanism not in tuple(Mechanism):
            raise ContractViolation(f"Unknown mechanism {self.mechanism}.")
        if not 0.0 < self.sample_rate <= 1.0 or (self.sample_rate != 1.0 and not self.private):
            raise ContractViolation(f"A round cannot have the sample rate {self.sample_rate!r}.")
        if self.per_person < 1:
            raise ContractViolation(f"A person cannot be at {self.per_person} participants.")
        if not self.verify_sum and any(self.momentum_hash):
            raise ContractViolation("A round whose sums are not verified names no momentum.")
        if self.steps > self.round:
            raise ContractViolation(f"Round {self.round} cannot follow {self.steps} committed ones.")
        special = (self.sample_rate != 1.0, self.mechanism != Mechanism.GAUSSIAN, self.per_person != 1)
        if sum(special) > 1:
            raise ContractViolation(
                "A secret coin, a discrete Gaussian and persons at several participants are accounted for singly only."
            )

    @property
    def participation(self) -> SecretParticipation:
        """The coin that each participant throws for itself."""
        return SecretParticipation(self.sample_rate)

    @property
    def private(self) -> bool:
        """Whether updates are clipped and noised."""
        return self.guarantee != Guarantee.NONE

    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.encode()).digest()


@dataclass(frozen=True)
class RoundClose(Record):
    """How a round ended: hash of the model after it (unchanged if not committed), hash of the sum, who was in it."""

    MAGIC: ClassVar[bytes] = b"LRC1"

    federation_id: bytes = wire(HASH)
    round: int = wire(U32)
    outcome: int = wire(U8)
    open_hash: bytes = wire(HASH)
    theta_hash: bytes = wire(HASH)
    sum_hash: bytes = wire(HASH)
    survivors: tuple[bytes, ...] = wire(HASHES)

    def __post_init__(self) -> None:
        if self.outcome not in tuple(Outcome):
            raise ContractViolation(f"Unknown outcome {self.outcome}.")


@dataclass(frozen=True)
class SumOpening(RoundClose):
    """The close of a committed round with what its participants verify; the sum itself goes beside it.

    ``tag`` (T) is the sum of their tags, opened with the sum in ``attempt``.
    """

    MAGIC: ClassVar[bytes] = b"LSO1"

    attempt: int = wire(U32)
    tag: int = wire(U64)

    @classmethod
    def of(cls, close: RoundClose, attempt: int, tag: int) -> SumOpening:
        return cls(**{f.name: getattr(close, f.name) for f in fields(RoundClose)}, attempt=attempt, tag=tag)

    @property
    def close(self) -> RoundClose:
        """The record that it opens."""
        return RoundClose(**{f.name: getattr(self, f.name) for f in fields(RoundClose)})


@dataclass(frozen=True)
class PendingSum(Record):
    """What a participant keeps of a round that it masked in, at its own site, until it has verified the sum. Secret.

    ``key`` is the key of the attempt; ``survivors`` are those that it was shown, empty before it was shown any.
    """

    MAGIC: ClassVar[bytes] = b"LPS1"

    federation_id: bytes = wire(HASH)
    round: int = wire(U32)
    attempt: int = wire(U32)
    open_hash: bytes = wire(HASH)
    theta_hash: bytes = wire(HASH)
    momentum_hash: bytes = wire(HASH)
    key: bytes = wire(HASH)
    roster_size: int = wire(U32)
    ring_bits: int = wire(U8)
    scale_log2: int = wire(I32)
    sample_rate: float = wire(F64)
    survivors: tuple[bytes, ...] = wire(HASHES)


@dataclass(frozen=True)
class JoinRequest(Record):
    """Sent once to each participant before its first round."""

    MAGIC: ClassVar[bytes] = b"LJQ1"

    federation_id: bytes = wire(HASH)
    config_hash: bytes = wire(HASH)
    base_hash: bytes = wire(HASH)


@dataclass(frozen=True)
class JoinReply(Record):
    """A participant's identity, protocol version and salted dataset root, signed for this federation."""

    MAGIC: ClassVar[bytes] = b"LJR1"
    VERSION: ClassVar[int] = 2

    protocol: int = wire(U16)
    identity: bytes = wire(HASH)
    dataset_root: bytes = wire(HASH)
    signature: bytes = wire(SIGNATURE)

    @staticmethod
    def statement(federation_id: bytes, identity: bytes, dataset_root: bytes) -> bytes:
        """What the signature is over: nobody joins in another's name, or binds it to another dataset root."""
        head = b"lensemble join" + PROTOCOL_VERSION.to_bytes(2, "big")
        return head + federation_id + identity + dataset_root
