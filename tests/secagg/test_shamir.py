"""Secret sharing over 2^256 + 297."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.secagg import recovery, shamir
from lensemble_flwr.secagg.shamir import PRIME, SHARE_BYTES
from tests.secagg.driver import Drbg, refused

SECRETS = st.one_of(st.binary(min_size=32, max_size=32), st.sampled_from([bytes(32), b"\xff" * 32]))


def test_the_modulus_is_the_first_prime_above_2_to_256():
    def is_probable_prime(n: int) -> bool:
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            x = pow(base, odd, n)
            if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert [k for k in range(298) if is_probable_prime(2**256 + k)] == [297]
    assert PRIME == 2**256 + 297


@settings(max_examples=60, deadline=None)
@given(SECRETS, st.integers(1, 12), st.data())
def test_any_threshold_shares_give_the_secret_back(secret, n, data):
    threshold = data.draw(st.integers(1, n))
    points = data.draw(st.lists(st.integers(1, 1024), min_size=n, max_size=n, unique=True))
    shares = shamir.split(secret, threshold, points, Drbg(secret))
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    chosen = data.draw(st.permutations(points))[:threshold]
    assert shamir.combine({x: shares[x] for x in chosen}) == secret


def through(points: dict[int, int], at: int) -> int:
    """Lagrange interpolation, written apart from the module's."""
    total = 0
    for x, y in points.items():
        term = y
        for other in points:
            if other != x:
                term = term * (at - other) * pow(x - other, -1, PRIME) % PRIME
        total += term
    return total % PRIME


def test_fewer_shares_say_nothing():
    """Given t - 1 shares, any secret at all is explained by some last share."""
    shares = shamir.split(b"\x07" * 32, 3, [1, 2, 3], Drbg(0))
    for candidate in (bytes(32), b"\xff" * 32, Drbg(1)(32)):
        known = {0: int.from_bytes(candidate, "big")} | {x: shamir.parse(shares[x]) for x in (1, 2)}
        last = through(known, 3).to_bytes(SHARE_BYTES, "big")
        assert shamir.combine({1: shares[1], 2: shares[2], 3: last}) == candidate


def test_shares_against_independent_interpolation():
    secret = Drbg("s")(32)
    shares = shamir.split(secret, 5, [9, 4, 1, 77, 3, 12], Drbg("c"))
    numbers = {x: shamir.parse(share) for x, share in shares.items()}
    for subset in itertools.combinations(numbers, 5):
        assert through({x: numbers[x] for x in subset}, 0) == int.from_bytes(secret, "big")


@given(st.lists(st.integers(1, 1024), min_size=2, max_size=12, unique=True), st.data())
def test_sliding_weights_and_extrapolation_against_independent_interpolation(points, data):
    length = data.draw(st.integers(1, len(points) - 1))
    values = {x: int.from_bytes(Drbg(x)(32), "big") for x in points}
    shares = {x: value.to_bytes(SHARE_BYTES, "big") for x, value in values.items()}
    weights = shamir.weights(tuple(points[:length]))
    for start in range(len(points) - length + 1):
        chosen = points[start : start + length]
        if start:
            weights = shamir.slide(weights, chosen[-1])
        assert list(weights) == chosen
        at = through({x: values[x] for x in chosen}, 0)
        assert sum(values[x] * weight for x, weight in weights.items()) % PRIME == at
        others = [x for x in points if x not in chosen]
        expected = {x: through({y: values[y] for y in chosen}, x) for x in others}
        assert shamir.extrapolate(shares, weights, others) == expected


def test_coefficients_are_fresh():
    secret = bytes(32)
    assert shamir.split(secret, 2, [1, 2], Drbg(0)) != shamir.split(secret, 2, [1, 2], Drbg(1))


@pytest.mark.parametrize("points", [[1, 1, 2], [0, 1, 2], [-1, 1, 2], [1, 2, PRIME]])
def test_points_must_be_distinct_and_not_zero(points):
    with pytest.raises(ContractViolation):
        shamir.split(bytes(32), 2, points, Drbg(0))


@pytest.mark.parametrize("points", [[0, 1], [-1, 2], [1, PRIME]])
def test_combine_refuses_such_points_too(points):
    with pytest.raises(ContractViolation):
        shamir.combine(dict.fromkeys(points, bytes(33)))


@pytest.mark.parametrize(("size", "threshold"), [(31, 2), (33, 2), (32, 0), (32, 4)])
def test_split_refuses(size, threshold):
    with pytest.raises(ContractViolation):
        shamir.split(bytes(size), threshold, [1, 2, 3], Drbg(0))


@pytest.mark.parametrize("share", [b"", bytes(32), bytes(34), b"\xff" * 33, PRIME.to_bytes(33, "big")])
def test_a_share_is_a_field_element(share):
    with refused("malformed_message"):
        shamir.parse(share)
    with refused("malformed_message"):
        shamir.combine({1: bytes(33), 2: share})


def test_a_result_beyond_32_bytes_is_refused():
    with refused("mask_reconstruction_failed"):
        shamir.combine({5: (2**256).to_bytes(33, "big")})


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_recovery_names_one_liar_when_there_is_a_share_to_spare(threshold, spare, data):
    secret = Drbg(threshold)(32)
    points = list(range(1, threshold + spare + 1))
    shares = shamir.split(secret, threshold, points, Drbg("c"))
    liar = data.draw(st.sampled_from(points))
    wrong = data.draw(st.integers(0, PRIME - 1).filter(lambda v: v != shamir.parse(shares[liar])))
    culprits: set[int] = set()
    got = recovery.recover(
        shares | {liar: wrong.to_bytes(33, "big")}, threshold, lambda found: found == secret, culprits
    )
    assert got == secret
    assert culprits <= {liar}
    if liar <= threshold:  # it was used in the first try
        assert culprits == {liar}


def test_recovery_survives_neighbouring_liars_and_gives_up_without_spare_shares():
    secret = Drbg(0)(32)
    shares = shamir.split(secret, 3, range(1, 8), Drbg(1))
    bad = {x: bytes(33) for x in (1, 2, 3, 7)}
    culprits: set[int] = set()
    assert recovery.recover(shares | bad, 3, secret.__eq__, culprits) == secret
    assert culprits == {1, 2, 3, 7}
    few = {x: shares[x] for x in (1, 2)} | {3: bytes(33)}
    assert recovery.recover(few, 3, secret.__eq__, set()) is None


def test_a_lying_dealer_costs_linear_time_for_each_run_of_shares(monkeypatch):
    """Its shares fit no secret, which is known after all runs: each is a step from the one before."""
    products = []
    weight = shamir._weight
    monkeypatch.setattr(shamir, "_weight", lambda x, points: products.append(x) or weight(x, points))
    shares = shamir.split(bytes(32), 27, range(1, 41), Drbg(0))
    shamir.weights.cache_clear()
    assert recovery.recover(shares, 27, lambda found: False, set()) is None
    assert len(products) == 27 + 39  # the first run's points, and one new point for each further run
