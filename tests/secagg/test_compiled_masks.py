"""The compiled loops give the bytes of the numpy path: masked vectors, sums, refusals, for every ring and layout."""

from __future__ import annotations

import numpy as np
import pytest

from lensemble_flwr.secagg import RingParams, masking
from lensemble_flwr.secagg.keystream import SEGMENT
from lensemble_flwr.secagg.mask_loops import fold, tally
from tests.secagg.driver import Drbg, refused

T1 = bytes(range(32))
KEYS = [Drbg(i)(32) for i in range(4)]
PATHS = ("numpy", "numba")


@pytest.fixture(autouse=True, scope="module")
def _compiled(tmp_path_factory):
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENSEMBLE_HOME", str(tmp_path_factory.mktemp("home")))
        assert fold.compiled()
        assert tally.compiled()


def masked(q: np.ndarray, ring: RingParams, threads: int = 1) -> np.ndarray:
    out = np.empty(ring.padded, ring.lane)
    masking.mask(out, q, ring, T1, KEYS[:2], KEYS[2:], threads)
    return out


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("d", [1, 4095, 4096, 4097, 100_001, SEGMENT, SEGMENT + 5])
def test_masked_vectors_and_sums_are_the_same(bits, d, monkeypatch):
    ring = RingParams(bits, 3, 8, d)
    q = np.random.default_rng(d).integers(-ring.qmax, ring.qmax + 1, d)
    q[0], q[-1] = -ring.qmax, ring.qmax
    frozen = q.astype(np.int32)
    frozen.flags.writeable = False
    found = {}
    for path in PATHS:
        monkeypatch.setenv("LENSEMBLE_KERNELS", path)
        found[path] = masked(q, ring)
        assert np.array_equal(masked(frozen, ring, threads=3), found[path])
        total = found[path].copy()
        masking.accumulate(total, found[path], ring)
        opened = masking.unmask(total, ring, T1, [*KEYS[2:]] * 2, [*KEYS[:2]] * 2, 2)
        assert np.array_equal(opened, 2 * q)
    assert np.array_equal(found["numpy"], found["numba"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_values_over_the_range_are_refused(path, bits, dtype, monkeypatch):
    monkeypatch.setenv("LENSEMBLE_KERNELS", path)
    ring = RingParams(bits, 3, 8, 10_000)
    for place in (0, 5000, 9999):
        for value in (ring.qmax + 1, -ring.qmax - 1, np.iinfo(dtype).max, np.iinfo(dtype).min):
            q = np.zeros(ring.dimension, dtype)
            q[place] = value
            out = np.full(ring.padded, 7, ring.lane)
            with refused("malformed_update"):
                masking.mask(out, q, ring, T1, KEYS[:1], [])
            assert not out.any()


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_sum_is_caught(path, monkeypatch):
    monkeypatch.setenv("LENSEMBLE_KERNELS", path)
    ring = RingParams(32, 3, 8, 10_000)
    good = masked(np.arange(10_000), ring)
    for place in (0, 1, 777, ring.body - 1, ring.padded - 1):
        for error in (1, 1 << 31):
            wrong = good.copy()
            wrong[place : place + 1] += np.uint32(error)  # modulo 2^32
            with refused("sum_check_failed"):
                masking.unmask(wrong, ring, T1, KEYS[2:], KEYS[:2], 1)
    assert np.array_equal(masking.unmask(good, ring, T1, KEYS[2:], KEYS[:2], 1), np.arange(10_000))
