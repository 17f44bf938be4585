"""The rules that a member holds a session to, and the transcript that binds them."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest

from lensemble_flwr.secagg import RingParams, SessionParams, default_threshold, transcript
from tests.secagg.driver import OPEN_HASH, make_params, refused, roster


@pytest.mark.parametrize(
    ("n", "k", "t"),
    [(2, 1, 2), (3, 1, 3), (4, 1, 3), (5, 1, 4), (10, 1, 7), (30, 1, 21), (100, 1, 67), (10, 6, 9), (5, 5, 5)],
)
def test_default_threshold(n, k, t):
    assert default_threshold(n, k) == t


@pytest.mark.parametrize("n", range(3, 40))
def test_the_default_is_always_allowed(n):
    for k in range(1, n - 1):
        params = make_params(n, k=k)
        assert 2 * params.threshold > n + k


@pytest.mark.parametrize(
    "bad",
    [
        {"threshold": 1},
        {"threshold": 3},  # 2t = n + k
        {"threshold": 6},
        {"threshold": 4.0},
        {"min_survivors": 1},
        {"min_survivors": 2},
        {"min_survivors": 2, "allow_two_party": True},
        {"min_survivors": 6},
        {"colluders": 0},
        {"colluders": -1},
        {"colluders": 2, "threshold": 4, "min_survivors": 3},  # m < k + 2
        {"colluders": 3},
        {"attempt": -1},
        {"attempt": 2**32},
        {"attempt": True},
        {"open_hash": bytes(31)},
        {"open_hash": "x" * 32},
        {"roster": roster(5)[::-1]},
        {"roster": (roster(5)[0],) * 5},
        {"roster": list(roster(5))},
        {"roster": roster(4)},
        {"roster": (*roster(4), bytes(33))},
        {"ring": RingParams(32, 4, 8, 20)},
        {"ring": None},
        {"allow_two_party": 1},
    ],
)
def test_a_session_is_refused(bad):
    with refused("policy_violation"):
        make_params(5, **bad)


def test_two_participants_need_consent():
    assert make_params(2).threshold == 2
    for bad in ({"allow_two_party": False}, {"min_survivors": 3}, {"min_survivors": 1}, {"threshold": 1}):
        with refused("policy_violation"):
            make_params(2, **bad)


def test_a_stranger_has_no_position():
    params = make_params(5)
    assert [params.position(identity) for identity in params.roster] == [1, 2, 3, 4, 5]
    with refused("inconsistent_roster"):
        params.position(bytes(32))


def test_require_enough():
    params = make_params(10, threshold=7, min_survivors=8)
    params.require_enough(8, "came")
    with refused("below_min_survivors"):
        params.require_enough(7, "came")
    with refused("below_threshold"):
        params.require_enough(6, "came")


def test_opening_hash_is_what_the_specification_says():
    params = make_params(3, 7, bits=24)
    ring = params.ring
    numbers = (24, 8, 7, ring.padded, 3, 3, 1, 0, 0)
    expected = hashlib.sha256(
        b"LSA1\x02" + OPEN_HASH + struct.pack(">I9qI", 0, *numbers, 3) + b"".join(roster(3))
    ).digest()
    assert params.hash == expected


def test_every_parameter_is_bound():
    base = make_params(10, k=2)
    others = [
        {"open_hash": bytes(32)},
        {"attempt": 1},
        {"threshold": 8},
        {"min_survivors": 5},
        {"colluders": 1},
        {"allow_two_party": True},
        {"consistency": True},
        {"verify": True},
        {"keys_binding": bytes(32)},
        {"ring": dataclasses.replace(base.ring, bits=16)},
        {"ring": dataclasses.replace(base.ring, scale_log2=9)},
        {"ring": dataclasses.replace(base.ring, dimension=21)},
        {"roster": tuple(sorted((*base.roster[:-1], bytes(32))))},
    ]
    hashes = {dataclasses.replace(base, **change).hash for change in others} | {base.hash}
    assert len(hashes) == len(others) + 1
    assert {field.name for field in dataclasses.fields(SessionParams)} == {name for o in others for name in o}


def test_keyed_transcript_binds_every_field():
    t0, entries = bytes(32), [(b"i" * 32, b"c" * 32, b"s" * 32), (b"j" * 32, b"d" * 32, b"t" * 32)]
    assert transcript.keyed(t0, entries) == hashlib.sha256(t0 + b"".join(map(b"".join, entries))).digest()
    swapped = [(entries[0][0], *entries[1][1:]), (entries[1][0], *entries[0][1:])]
    variants = [entries, entries[::-1], entries[:1], swapped]
    assert len({transcript.keyed(t0, v) for v in variants}) == 4
    assert transcript.commitment(t0, b"b" * 32) == hashlib.sha256(b"b-commit" + b"b" * 32 + t0).digest()
