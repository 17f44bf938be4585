"""scripts/check_noise on a few million draws: the sampler passes, and every kind of wrong noise is refused.

Draws come from fixed replay seeds, so nothing here can flake.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from scipy import special

from lensemble_flwr.privacy.noise import ReplayEntropy, RoundedGaussian
from scripts.loading import load

STD = 2.0**36.4
DRAWS = 2_000_000


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("check_noise")


def seeded(std: float = STD, change: Callable[[np.ndarray], None] = lambda values: None) -> Callable[..., None]:
    """The product's sampler under replayed keys, with a change to what it drew."""
    sampler, entropy = RoundedGaussian(std), ReplayEntropy(5)

    def draw(values: np.ndarray) -> None:
        with entropy.open() as stream:
            sampler.add_to(values, stream)
        change(values)

    return draw


def failed(script: ModuleType, sampler: Callable[..., None]) -> set[str]:
    found = script.rows(script.gather(DRAWS, STD, sampler, quiet=True))
    return {row.name for row in found if not row.p >= script.LEVEL / len(found)}


def test_the_sampler_passes(script: ModuleType) -> None:
    assert failed(script, seeded()) == set()


def cut(values: np.ndarray) -> None:
    """A 32-bit Box-Muller ends at 6.76 std; this one at 4."""
    values[np.abs(values) > 4 * STD] //= 2


def coarse(values: np.ndarray) -> None:
    values >>= 4
    values <<= 4


def float32(values: np.ndarray) -> None:
    values[:] = values.astype(np.float32).astype(np.int64)


def pairs(values: np.ndarray) -> None:
    values[1::2] = np.sign(values[1::2]) * np.abs(values[: values.size - values.size % 2 : 2])[: values[1::2].size]


def uniforms(values: np.ndarray) -> None:
    """The sum of twelve uniforms: right mean and variance, wrong shape."""
    rng = np.random.default_rng(0)
    values[:] = (rng.random((12, values.size)).sum(0) - 6.0) * STD


def sawtooth(values: np.ndarray) -> None:
    """Strata of S/64 with flat tops: an acceptance step that was left out."""
    width = 1 << RoundedGaussian(STD)._table.j
    values[:] = values // (4 * width) * (4 * width) + np.random.default_rng(0).integers(0, 4 * width, values.size)


@pytest.mark.parametrize(
    ("name", "sampler", "by"),
    [
        ("std 1 % too small", seeded(0.99 * STD), "variance"),
        ("shifted by a hundredth", seeded(change=lambda v: np.add(v, int(STD / 100), out=v)), "mean"),
        ("absolute values", seeded(change=lambda v: np.abs(v, out=v)), "Kolmogorov-Smirnov"),
        ("tail cut at 4", seeded(change=cut), "beyond 4 std"),
        ("low bits missing", seeded(change=coarse), "bits 0..7"),
        ("through float32", seeded(change=float32), "bits 0..7"),
        ("magnitudes in pairs", seeded(change=pairs), "neighbours squared"),
        ("twelve uniforms", seeded(change=uniforms), "fourth moment"),
        ("flat strata", seeded(change=sawtooth), "chi-square, 4096 cells"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_noise_is_refused(script: ModuleType, name: str, sampler: Callable[..., None], by: str) -> None:
    assert by in failed(script, sampler)


def test_the_law_of_the_fine_cells(script: ModuleType) -> None:
    counts = script.Counts(STD)
    law = script._fine_law(counts)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    assert law.min() > 0
    for cell in (0, 1, counts.half, counts.half + 1, counts.half + 12_345):
        if cell == 0:
            continue
        low = (cell - 1 - counts.half) * 2**counts.shift
        edges = (np.array([low, low + 2**counts.shift]) - 0.5) / STD / np.sqrt(2)
        assert law[cell] == pytest.approx(float(np.diff(special.erf(edges))[0]) / 2, rel=1e-6)


def test_counting_in_chunks_counts_everything(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "CHUNK", 1000)
    sizes: list[int] = []
    counts = script.gather(2500, STD, lambda values: sizes.append(values.size), quiet=True)
    assert sizes == [1000, 1000, 500]
    assert counts.fine.sum() == counts.draws == counts.sums[0] == 2500


def test_main(script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(os, "urandom", lambda n: next(calls).to_bytes(n - 1, "big") + b"1")
    assert script.main(["--draws", "3e5"]) == 0
    shown = capsys.readouterr()
    assert "Nothing found at level 0.001 over all 18 tests" in shown.out
    assert "100%" in shown.err
    monkeypatch.setattr(script, "RoundedGaussian", lambda std: RoundedGaussian(0.97 * std))
    assert script.main(["--draws", "3e5"]) == 1
    assert "REFUTED" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main(["--draws", "10"])
