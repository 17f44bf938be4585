"""Canonical records: equal values give equal bytes, and only the encoding of some value is accepted."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import ContractViolation, LensembleError, RoundError
from lensemble_flwr.federation.records import (
    JoinReply,
    JoinRequest,
    Outcome,
    PendingSum,
    RoundClose,
    RoundOpen,
    SumOpening,
)

GOLDEN = Path(__file__).parent / "golden"

OPEN = RoundOpen(
    federation_id=bytes(range(32)),
    config_hash=b"c" * 32,
    round=3,
    rounds=10,
    theta_hash=b"t" * 32,
    base_hash=b"b" * 32,
    probe_hash=b"p" * 32,
    sketch_seed=2**63 + 5,
    sketch_hash=b"s" * 32,
    inner_steps=10,
    dimension=128,
    ring_bits=32,
    scale_log2=-3,
    clip_norm=0.07,
    noise_multiplier=1.9,
    noise_std=0.0186,
    target_epsilon=8.0,
    target_delta=1e-5,
    guarantee=2,
    mechanism=0,
    replay=False,
    threshold=3,
    min_survivors=3,
    colluders=1,
    two_party=False,
    sample_rate=0.25,
    pinned=True,
    consistency=True,
    per_person=1,
    verify_sum=True,
    momentum_hash=b"m" * 32,
    steps=2,
    roster=(b"\x01" * 32, b"\x02" * 32, b"\x03" * 32),
)
CLOSE = RoundClose(b"f" * 32, 3, Outcome.COMMITTED, b"o" * 32, b"t" * 32, b"s" * 32, (b"\x01" * 32,))
PENDING = PendingSum(
    b"f" * 32, 3, 2, b"o" * 32, b"t" * 32, b"m" * 32, b"k" * 32, 3, 24, -3, 0.25, (b"\x01" * 32, b"\x02" * 32)
)
EXAMPLES = [
    OPEN,
    CLOSE,
    SumOpening.of(CLOSE, 2, 2**61 - 2),
    PENDING,
    JoinRequest(b"f" * 32, b"c" * 32, b"b" * 32),
    JoinReply(2, b"i" * 32, b"r" * 32, b"s" * 64),
]


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_round_trip(record) -> None:
    assert type(record).decode(record.encode()) == record


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_golden_bytes(record) -> None:
    """Releases must interoperate: these bytes never change within a version (WRITE_GOLDEN=1 writes them anew)."""
    path = GOLDEN / f"{type(record).__name__}.hex"
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(record.encode().hex() + "\n")
    assert record.encode().hex() == path.read_text().strip()


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_every_truncation_and_any_addition_is_refused(record) -> None:
    body = record.encode()
    for end in range(len(body)):
        with pytest.raises(RoundError):
            type(record).decode(body[:end])
    with pytest.raises(RoundError):
        type(record).decode(body + b"\0")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=700))
def test_random_bytes_only_raise_typed_errors(body: bytes) -> None:
    for head in (b"", OPEN.encode()[:6], CLOSE.encode()[:6]):
        for kind in (RoundOpen, RoundClose, JoinRequest, JoinReply):
            try:
                record = kind.decode(head + body)
            except LensembleError:
                continue
            assert record.encode() == head + body


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(OPEN.encode()) * 8 - 1))
def test_a_flipped_bit_is_another_value_or_refused(bit: int) -> None:
    body = bytearray(OPEN.encode())
    body[bit // 8] ^= 1 << bit % 8
    try:
        assert RoundOpen.decode(bytes(body)) != OPEN
    except RoundError:
        pass


def test_a_huge_roster_is_refused_before_it_is_read() -> None:
    body = OPEN.encode()
    count_at = len(body) - 3 * 32 - 4
    with pytest.raises(RoundError, match="at most"):
        RoundOpen.decode(body[:count_at] + (2**32 - 1).to_bytes(4, "big") + body[count_at + 4 :])


def test_unsorted_or_repeated_roster() -> None:
    for roster in ((b"\x02" * 32, b"\x01" * 32), (b"\x01" * 32, b"\x01" * 32), ()):
        with pytest.raises(ContractViolation, match="roster"):
            dataclasses.replace(OPEN, roster=roster)


def test_values_that_do_not_fit() -> None:
    for change in ({"round": -1}, {"dimension": 2**64}, {"clip_norm": float("nan")}, {"theta_hash": b"short"}):
        with pytest.raises(ContractViolation):
            dataclasses.replace(OPEN, **change).encode()


@pytest.mark.parametrize("name", ["guarantee", "mechanism"])
def test_an_unknown_kind_of_privacy_is_refused(name: str) -> None:
    with pytest.raises(ContractViolation, match=f"Unknown {name}"):
        dataclasses.replace(OPEN, **{name: 9})


def test_digest_covers_every_field() -> None:
    # A coin and a discrete Gaussian exclude each other; no momentum is named where sums are not verified.
    opened = dataclasses.replace(OPEN, sample_rate=1.0)
    plain = dataclasses.replace(opened, verify_sum=False, momentum_hash=bytes(32), steps=0)
    seen = {opened.digest()}
    for field in dataclasses.fields(OPEN):
        if field.name == "verify_sum":
            seen.add(plain.digest())
            continue
        value = getattr(opened, field.name)
        other: object
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, bytes):
            other = b"x" * 32
        elif isinstance(value, tuple):
            other = value[:2]
        elif field.name == "guarantee":
            other = 1
        elif field.name == "sample_rate":
            other = 0.5
        else:
            other = value + 1
        seen.add(dataclasses.replace(opened, **{field.name: other}).digest())
    assert len(seen) == 1 + len(dataclasses.fields(OPEN))
    with pytest.raises(ContractViolation, match="momentum"):
        dataclasses.replace(OPEN, verify_sum=False)
    with pytest.raises(ContractViolation, match="secret coin"):
        dataclasses.replace(OPEN, mechanism=1)
