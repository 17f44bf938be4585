from __future__ import annotations

import hashlib
import hmac
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.data.commitment import InclusionProof, derive_salt, prove, root, verify
from lensemble_flwr.errors import ContractViolation, DataError

HASH = st.binary(min_size=32, max_size=32)
HASHES = st.lists(HASH, min_size=1, max_size=40, unique=True)
SALT = bytes(range(32))


def h(tag: bytes, *parts: bytes) -> bytes:
    return hashlib.sha256(b"lensemble.merkle\x00v1\x00" + tag + b"\x00" + b"".join(parts)).digest()


def slow_root(hashes: list[bytes], salt: bytes) -> bytes:
    """The docstring's formulas, written the long way."""
    leaves = []
    for e in hashes:
        key = hmac.new(salt, b"lensemble.merkle\x00v1\x00leaf key\x00" + e, hashlib.sha256).digest()
        leaves.append(h(b"leaf", key, e))

    def top(level: list[bytes]) -> bytes:
        if len(level) == 1:
            return level[0]
        half = 1  # a complete left subtree, the rest on the right: what promoting the odd node builds
        while half * 2 < len(level):
            half *= 2
        return h(b"node", top(level[:half]), top(level[half:]))

    return h(b"root", top(sorted(leaves)))


@given(HASHES, HASH)
@settings(max_examples=150, deadline=None)
def test_root_is_the_documented_tree(hashes: list[bytes], salt: bytes) -> None:
    assert root(hashes, salt) == slow_root(hashes, salt)


@given(HASHES, HASH, st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_root_ignores_the_order_of_files(hashes: list[bytes], salt: bytes, random) -> None:
    shuffled = list(hashes)
    random.shuffle(shuffled)
    assert root(shuffled, salt) == root(hashes, salt)


@given(HASHES, HASH, st.data())
@settings(max_examples=150, deadline=None)
def test_every_episode_can_be_proved_and_nothing_else(hashes: list[bytes], salt: bytes, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(hashes) - 1))
    top, proof = root(hashes, salt), prove(hashes, salt, index)
    assert verify(top, hashes[index], proof)
    assert InclusionProof.from_dict(json.loads(json.dumps(proof.to_dict()))) == proof
    other = data.draw(HASH)
    if other != hashes[index]:
        assert not verify(top, other, proof)
    if other != top:
        assert not verify(other, hashes[index], proof)
    # Any change of a proof's bytes, sides or length breaks it.
    bad = bytes([proof.leaf_key[0] ^ 1]) + proof.leaf_key[1:]
    assert not verify(top, hashes[index], InclusionProof(bad, proof.path))
    for i, (left, sibling) in enumerate(proof.path):
        for step in ((not left, sibling), (left, bytes([sibling[0] ^ 128]) + sibling[1:])):
            path = (*proof.path[:i], step, *proof.path[i + 1 :])
            assert not verify(top, hashes[index], InclusionProof(proof.leaf_key, path))
        assert not verify(top, hashes[index], InclusionProof(proof.leaf_key, proof.path[:i] + proof.path[i + 1 :]))


@given(HASHES, HASH, HASH)
@settings(max_examples=80, deadline=None)
def test_another_set_or_salt_has_another_root(hashes: list[bytes], salt: bytes, other: bytes) -> None:
    if other not in hashes:
        assert root([*hashes, other], salt) != root(hashes, salt)
    if other != salt:
        assert root(hashes, other) != root(hashes, salt)
    if len(hashes) > 1:
        assert root(hashes[1:], salt) != root(hashes, salt)
    assert root([*hashes, hashes[0]], salt) != root(hashes, salt)


def test_equal_episodes_can_be_proved() -> None:
    hashes = [bytes(32), bytes(32), b"a" * 32]
    for index in range(3):
        assert verify(root(hashes, SALT), hashes[index], prove(hashes, SALT, index))


def test_a_proof_does_not_help_to_test_a_guess_about_another_episode() -> None:
    """The verifier of one episode cannot confirm a second one, though its leaf is the sibling in the proof."""
    hashes = [b"a" * 32, b"b" * 32]
    proof = prove(hashes, SALT, 0)
    (_, sibling), *_ = proof.path
    assert h(b"leaf", proof.leaf_key, hashes[1]) != sibling
    assert prove(hashes, SALT, 1).leaf_key != proof.leaf_key


def test_no_count_is_in_the_root() -> None:
    assert {len(root([bytes([i]) * 32 for i in range(n)], SALT)) for n in (1, 2, 3, 200)} == {32}


def test_root_is_pinned() -> None:
    hashes = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
    assert root(hashes, SALT).hex() == "a22168d9200ce5dd23abac7f8b93d8bbe008d5dc4349d576d6cecaee2e7e4698"


def test_salt_is_rfc_5869() -> None:
    secret, federation = b"s" * 32, b"f" * 32
    prk = hmac.new(federation, secret, hashlib.sha256).digest()
    expected = hmac.new(prk, b"lensemble.dataset-salt\x00v1\x00" + b"\x01", hashlib.sha256).digest()
    assert derive_salt(secret, federation) == expected
    assert derive_salt(secret, b"g" * 32) != expected
    assert derive_salt(b"t" * 32, federation) != expected


def test_bad_input() -> None:
    with pytest.raises(DataError):
        root([], SALT)
    with pytest.raises(DataError):
        prove([], SALT, 0)
    for call in (
        lambda: root([b"short"], SALT),
        lambda: root([bytes(32)], b"short"),
        lambda: prove([bytes(32)], SALT, 1),
        lambda: prove([bytes(32)], SALT, -1),
        lambda: derive_salt(b"short", bytes(32)),
        lambda: derive_salt(bytes(32), b"short"),
    ):
        with pytest.raises(ContractViolation):
            call()
    proof = prove([bytes(32)], SALT, 0)
    assert not verify(b"short", bytes(32), proof)
    assert not verify(root([bytes(32)], SALT), b"short", proof)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"version": 2, "leaf_key": "00" * 32, "path": []},
        {"version": 1, "leaf_key": "00" * 31, "path": []},
        {"version": 1, "leaf_key": "zz" * 32, "path": []},
        {"version": 1, "leaf_key": 3, "path": []},
        {"version": 1, "leaf_key": "00" * 32, "path": [{"left": 1, "hash": "00" * 32}]},
        {"version": 1, "leaf_key": "00" * 32, "path": [{"left": True}]},
        {"version": 1, "leaf_key": "00" * 32, "path": [{"left": True, "hash": "00" * 32}] * 65},
        {"version": 1, "leaf_key": "00" * 32},
    ],
)
def test_a_malformed_proof_is_refused(values: object) -> None:
    with pytest.raises(DataError):
        InclusionProof.from_dict(values)
