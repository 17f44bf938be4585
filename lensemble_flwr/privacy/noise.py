"""Rounded Gaussian noise on an integer grid, from a cryptographic key, with no floating-point gap.

Target: rint(N / g0) with N ~ N(0, s^2). With S = s/g0 its law is p(k) = P(k - 1/2 < S Z <= k + 1/2), Z standard normal.
:class:`RoundedGaussian` draws from p by rejection that decides in float64 where float64 is provably enough and in exact
arithmetic where it is not (about once in 2^36 draws):

1. The half line k >= 0 is cut into strata of J = 2^j integers, J about S/64. Stratum c is chosen with probability
   proportional to p(cJ), its largest value, by an alias table of exact integers.
2. Within it k = cJ + u, u uniform. A sign bit maps k to -1 - k; the law is even, so that is its mirror image up to one
   step, which step 3 accounts for.
3. Accept with probability p(k) / p(cJ) = exp(-t) (1 + tiny), t = (k^2 - (cJ)^2) / (2 S^2). Almost all draws are decided
   by exp(-t) >= 1 - t alone, nearly all the rest by a polynomial; in doubt (:data:`MARGIN`) the ratio is computed to
   150 digits and compared with as many random bits as it takes.

Only + and * of float64 are relied on, never the accuracy of a library function. For |k| <= R S the law is off by a
factor within 1 +- 2^-290, and it is cut there, R = :func:`reach` (docs/privacy.md, section 4, has the proof and
:mod:`.bounds` the price). How many proposals were rejected is independent of the accepted values, so the running time
tells nothing about the noise.

Randomness is an AES-256 counter keystream under a fresh 256-bit key of the operating system for each draw of a vector.
"""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from types import TracebackType
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from lensemble_flwr.compiled import use
from lensemble_flwr.errors import ConfigError, ContractViolation
from lensemble_flwr.privacy import noise_loops

BLOCK = 1 << 15
"""Coordinates drawn at a time. Part of the format of replayed noise."""

MARGIN = 2.0**-40
"""Doubt of one float64 comparison: more than 500 times its largest rounding error."""

MIN_STD = 64.0
"""Smallest S = s/g0."""

MAX_STD = 2.0**44
"""Largest S: every integer met is then exact in float64."""

_MAX_REACH = 64.0
RELATIVE_BITS = 300
EXACT = decimal.Context(prec=150, Emin=-(10**6), Emax=10**6)  # floating point: 150 digits relative, 498 bits
_NONCE_BYTES = 1 << 32  # keystream under one nonce; AES-GCM allows 2^36
_TAYLOR = [1.0 / math.factorial(i) for i in range(26)]
_TAYLOR_ARRAY = np.array(_TAYLOR)

_Words = NDArray[np.uint64]
_Ints = NDArray[np.int64]


# --- entropy ---


class Keystream:
    """AES-256 in counter mode as little-endian 64-bit words. Wipes its key when closed; use it in a ``with``.

    Encrypting zeros in GCM mode gives exactly the counter-mode stream from block ``nonce || 2`` on, twice as fast.
    """

    def __init__(self, key: bytearray) -> None:
        if len(key) != 32:
            raise ContractViolation("A keystream needs a 256-bit key.")
        self._key = key
        self._process = os.getpid()
        self._zeros = memoryview(bytes(16 * BLOCK))
        self._buffer = bytearray(len(self._zeros) + 16)
        self._words = np.frombuffer(self._buffer, "<u8")
        self._nonce = -1
        self._left = 0
        self._next()

    def _next(self) -> None:
        self._nonce += 1
        mode = modes.GCM(self._nonce.to_bytes(12, "big"))
        self._encryptor = Cipher(algorithms.AES256(self._key), mode).encryptor()
        self._left = _NONCE_BYTES

    def words(self, count: int) -> _Words:
        """The next ``count`` words, count <= 2 BLOCK. The array is overwritten by the next call.

        Raises:
            ContractViolation: in a child of the process that opened it, where parent and child would draw the same.
        """
        if os.getpid() != self._process:
            raise ContractViolation("A keystream was carried into another process.", "Open one there.")
        size = 8 * count
        if size > self._left:
            self._next()
        self._left -= size
        self._encryptor.update_into(self._zeros[:size], self._buffer)
        return self._words[:count]

    def integer(self, bits: int) -> int:
        """A uniform integer below 2^bits."""
        count = -(-bits // 64)
        return int.from_bytes(self.words(count).tobytes(), "little") >> (64 * count - bits)

    def __enter__(self) -> Keystream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._key[:] = bytes(32)
        self._words[:] = 0
        del self._encryptor  # OpenSSL clears its key schedule when it frees it


class OsEntropy:
    """A fresh 256-bit key from the operating system for every draw: the only entropy that a claim can rest on."""

    kind = "csprng"

    def open(self) -> Keystream:
        """A keystream that nobody else can have.

        Raises:
            ConfigError: the operating system's source failed. Nothing was drawn and there is no fallback.
        """
        try:
            key = bytearray(os.urandom(32))
        except (OSError, NotImplementedError) as error:
            raise ConfigError(
                "The operating system's random source failed.", "Repair it; nothing is released."
            ) from error
        if len(key) != 32 or not any(key):
            raise ConfigError("The operating system's random source is broken.", "Repair it; nothing is released.")
        return Keystream(key)

    def probe(self) -> None:
        """Draw a key and throw it away, to learn that the source works before anything depends on it.

        Raises:
            ConfigError: it does not.
        """
        with self.open():
            pass


class ReplayEntropy:
    """Reproducible keys from a seed, for tests and replayed simulations. Whoever knows the seed can subtract the noise:
    what is drawn from it is labelled and no claim is made for it.

    Args:
        seed: integer >= 0 or bytes.
    """

    kind = "replay"

    def __init__(self, seed: int | bytes) -> None:
        if type(seed) is int and seed >= 0:
            seed = seed.to_bytes(max(32, (seed.bit_length() + 7) // 8), "big")
        if not isinstance(seed, bytes):
            raise ContractViolation(f"A replay seed is an integer >= 0 or bytes, not {type(seed).__name__}.")
        self._seed = seed
        self._draws = 0

    def open(self) -> Keystream:
        """The keystream of the next draw."""
        self._draws += 1
        head = b"lensemble replayed noise 1\0" + self._draws.to_bytes(8, "big")
        return Keystream(bytearray(hashlib.sha256(head + self._seed).digest()))


Entropy = OsEntropy | ReplayEntropy


def entropy_kind(entropy: object) -> str:
    """``"csprng"`` or ``"replay"``. A subclass is neither: it could be anything.

    Raises:
        ContractViolation: no such source.
    """
    if type(entropy) not in (OsEntropy, ReplayEntropy):
        raise ContractViolation(f"{type(entropy).__name__} is no source of entropy.", "Use OsEntropy or ReplayEntropy.")
    return entropy.kind  # type: ignore[attr-defined]


# --- the sampler ---


def reach(bound_over_std: float) -> float:
    """R: the noise covers at least +-R std. Large enough that cutting it there is negligible (bounds), up to 64.

    Args:
        bound_over_std: C/s.
    """
    return min(_MAX_REACH, 14.0 + 1.5 * bound_over_std)


@dataclass(frozen=True)
class _Table:
    """An exact alias table over strata, and its float64 shadow."""

    std: Decimal
    j: int  # log2 of the stratum width
    column_bits: int
    thresholds: tuple[int, ...]  # stay in the column iff its low_bits + fraction bits are below
    low_bits: int
    high: _Ints  # thresholds >> low_bits
    starts: _Ints  # [2 * column + (1 if alias)] -> first |k| of the stratum
    margin: float
    half_inverse_square: float
    terms: int  # of the polynomial, enough for every t

    @cached_property
    def packed(self) -> _Words:
        """[column] -> ``high`` and, in the low ``column_bits``, the other stratum: all that one look-up needs."""
        others = self.starts[1::2] >> self.j
        return self.high.view(np.uint64) << np.uint64(self.column_bits) | others.view(np.uint64)


def _width_log2(std: float) -> int:
    return math.frexp(std)[1] - 6  # at least 1


def _column_bits(std: float, bound_over_std: float) -> int:
    strata = reach(bound_over_std) * std / (1 << _width_log2(std))
    return max(10, math.ceil(math.log2(strata + 1)))


@lru_cache(maxsize=16)
def _table(std: float, column_bits: int) -> _Table:
    """Strata 0 .. 2^column_bits - 1 of width 2^j."""
    j, columns = _width_log2(std), 1 << column_bits
    cut = columns * 2**j / std
    bits = math.ceil(cut * cut / 2 / math.log(2)) + RELATIVE_BITS + column_bits  # the smallest weight keeps 300 bits
    with decimal.localcontext(EXACT):
        exact = Decimal(std)
        base = (-(Decimal(2) ** (2 * j)) / (2 * exact * exact)).exp()  # exp(-(c J)^2 / 2 S^2) = base^(c^2)
        square, power, step = base * base, Decimal(1), base
        masses = []
        for c in range(columns):
            masses.append(power * _cell(c << j, exact))
            power *= step
            step *= square
        total = sum(masses)
        weights = [int(m * 2**bits / total) for m in masses]
    weights[0] += 2**bits - sum(weights)
    thresholds, aliases = alias_table(weights, 1 << (bits - column_bits))
    fraction_bits = 63 - column_bits
    low_bits = bits - column_bits - fraction_bits
    starts = np.array([v << j for pair in zip(range(columns), aliases, strict=True) for v in pair], np.int64)
    return _Table(
        std=exact,
        j=j,
        column_bits=column_bits,
        thresholds=tuple(thresholds),
        low_bits=low_bits,
        high=np.array([t >> low_bits for t in thresholds], np.int64),
        starts=starts,
        margin=MARGIN + (cut * cut / 8 + 1) / std**2,  # the second term bounds |log p(k)/p(cJ) + t|
        half_inverse_square=0.5 / std**2,
        terms=_terms((2 * columns - 1) * 2.0 ** (2 * j) / (2 * std**2)),
    )


def _cell(k: int, std: Decimal) -> Decimal:
    """p(k) / (density at k): the integral over u in [-1/2, 1/2] of cosh(k u / S^2) exp(-u^2 / (2 S^2)), by its power
    series, to the precision of the current context."""
    slope, curve = (k / (std * std)) ** 2, -1 / (2 * std * std)
    stop = Decimal(10) ** -decimal.getcontext().prec
    total, outer, i = Decimal(0), Decimal(1), 0
    while outer > stop or i == 0:
        inner, n = outer, 0
        while abs(inner) > stop or n == 0:
            total += inner / (2 * (i + n) + 1)
            n += 1
            inner = inner * curve / (4 * n)
        i += 1
        outer = outer * slope / (4 * (2 * i) * (2 * i - 1))
    return total


def alias_table(weights: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Walker's alias table in integers: sum(weights) = len(weights) * capacity."""
    left = list(weights)
    aliases = list(range(len(left)))
    small = [i for i, w in enumerate(left) if w < capacity]
    large = [i for i, w in enumerate(left) if w >= capacity]
    while small:
        s, big = small.pop(), large[-1]
        aliases[s] = big
        left[big] -= capacity - left[s]
        if left[big] < capacity:
            small.append(large.pop())
    for i in large:
        left[i] = capacity
    return left, aliases


@dataclass(frozen=True)
class Cells:
    """floor(v / 2^shift + 1/2), clamped to +-most: noised integers in coarser steps. By default just v."""

    shift: int = 0
    most: int = 2**63 - 1

    def __call__(self, v: _Ints) -> _Ints:
        """int64, |v| < 2^62 unless shift is 0; ``v`` is left alone."""
        if self.shift == 0:
            return v
        if self.shift > 62:
            return np.zeros_like(v)
        cells = v + self.half
        np.right_shift(cells, self.shift, out=cells)
        return np.clip(cells, -self.most, self.most, out=cells)

    @property
    def half(self) -> int:
        """Half a step."""
        return (1 << self.shift) >> 1


@dataclass(frozen=True)
class Scaled:
    """Coordinates that stand for the integers trunc(x * factor * inverse_step).

    Args:
        x: float32 or float64, shape (d,), contiguous.
        factor: clips.
        inverse_step: a power of two.
        squares: gets the sum of squares of each block's integers.
    """

    x: NDArray[Any]
    factor: float
    inverse_step: float
    squares: list[float]


@dataclass(frozen=True)
class _Pass:
    """What stays the same from block to block; see :meth:`RoundedGaussian.stream_to`."""

    load: Callable[[slice, _Ints], None]
    cells: Cells
    stream: Keystream
    scaled: Scaled | None = None


class RoundedGaussian:
    """Adds independent rint(S Z) to integers.

    Args:
        std: S = s/g0, between MIN_STD and MAX_STD.
        bound_over_std: C/s, see :func:`reach`.

    Raises:
        ContractViolation: ``std`` out of range.
    """

    def __init__(self, std: float, bound_over_std: float = 1.0) -> None:
        if not MIN_STD <= std <= MAX_STD or not bound_over_std >= 0.0:
            raise ContractViolation(f"A grid noise of {std!r} steps is outside {MIN_STD:g}..{MAX_STD:g}.")
        self._table = table = _table(float(std), _column_bits(std, bound_over_std))
        self._fraction_bits = 63 - table.column_bits
        self._v_shift = table.j
        self._v_unit = 2.0 ** (self._v_shift - 64)
        self._scratch = np.empty((10, BLOCK), np.int64)  # the last row holds a block of integers

    def add_to(self, values: _Ints, stream: Keystream) -> None:
        """values[i] += rint(S Z_i), in place, a block at a time.

        Args:
            values: int64, shape (d,), contiguous.
        """
        self.stream_to(_reading(values), Cells(), values, stream)

    def stream_to(
        self,
        load: Callable[[slice, _Ints], None],
        cells: Cells,
        out: NDArray[Any],
        stream: Keystream,
        scaled: Scaled | None = None,
    ) -> None:
        """out[i] = cells(integer + rint(S Z_i)), with neither the integers nor the noised ones in hand as a whole.

        About 1 coordinate in 100 needs a second proposal and is 0 in ``out`` until then: nothing goes there un-noised.

        Args:
            load: writes a block of the integers, int64.
            cells: what becomes of the noised integers.
            out: int32 or int64, shape (d,), contiguous. May be where ``load`` reads.
            stream: read in the order of the blocks, then for the left coordinates in the order of their indices.
            scaled: the same integers once more, for the compiled loops, which then do without ``load``.
        """
        fast = cells.shift <= 62 and use(out.size, noise_loops.draw, noise_loops.decide)
        draw = self._draw_fast if fast else self._draw
        job, left, kept = _Pass(load, cells, stream, scaled), [], []
        values = np.empty(0, np.int64)
        try:
            for block in blocks(out.size):
                words = stream.words(2 * (block.stop - block.start))
                rejected, integers = draw(job, block, words, out[block])
                left.append(rejected + block.start)
                kept.append(integers)
            index, values = _joined(left), _joined(kept)
            while index.size:  # redone together, which is cheaper than block by block
                job = _Pass(_reading(values), cells, stream)
                for block in blocks(index.size):
                    words = stream.words(2 * (block.stop - block.start))
                    redone = np.zeros(block.stop - block.start, out.dtype)
                    rejected, integers = draw(job, block, words, redone)
                    values[block] = 0
                    where = np.ones(redone.size, np.bool_)
                    where[rejected] = False
                    out[index[block][where]] = redone[where]
                    left.append(index[block][rejected])
                    kept.append(integers)
                index, values = _joined(left), _joined(kept)
        finally:
            for part in (*kept, values, self._scratch):
                part[:] = 0

    def _draw(self, job: _Pass, block: slice, words: _Words, out: NDArray[Any]) -> tuple[_Ints, _Ints]:
        """One block of :meth:`stream_to`: the positions where the proposal was rejected, and the integers there."""
        integers = self._scratch[-1, : out.size]
        job.load(block, integers)
        proposal, accepted = self._weigh(words, job.stream)
        rejected = np.flatnonzero(~accepted)
        kept = integers[rejected]
        integers += proposal
        noised = job.cells(integers)
        noised[rejected] = 0  # before it is written
        out[:] = noised
        return rejected, kept

    def _draw_fast(self, job: _Pass, block: slice, words: _Words, out: NDArray[Any]) -> tuple[_Ints, _Ints]:
        """The same by compiled loops."""
        table, scratch, cells, scaled = self._table, self._scratch, job.cells, job.scaled
        if scaled is None:
            given, factor, inverse_step = scratch[-1, : out.size], None, None
            job.load(block, given)
        else:
            given, factor, inverse_step = scaled.x[block], scaled.factor, scaled.inverse_step
        floats, rounding = scratch.view(np.float64), (cells.half, cells.shift, cells.most)
        found, squares = noise_loops.draw.compiled()(
            given,
            factor,
            inverse_step,
            words,
            table.packed,
            table.column_bits,
            table.j,
            table.half_inverse_square,
            self._v_unit,
            1.0 - table.margin - self._v_unit,
            *rounding,
            scratch,
            floats,
            out,
        )
        if found < 0:  # once in 2^35 blocks
            if scaled is None:  # the integers are there already, and may be overwritten where they came from
                job = dataclasses.replace(job, load=lambda block, part: None)
            return self._draw(job, block, words, out)
        if scaled is not None:
            scaled.squares.append(squares)
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        more, still = job.stream.words(found), np.empty(found, np.bool_)
        others, in_doubt = noise_loops.decide.compiled()(
            scratch, floats, more, _TAYLOR_ARRAY, table.terms, self._v_unit, table.margin, *rounding, out, still
        )
        if not in_doubt:
            return scratch[0, :others].copy(), scratch[1, :others].copy()
        more, accepted = more.copy(), np.zeros(others, np.bool_)
        for i in np.flatnonzero(still[:others]):
            at, integer, proposal, v, start, size = scratch[:6, i].tolist()
            bits = v << 64 | int(more[i])
            accepted[i] = self._decide_exactly(bits, 128 - self._v_shift, start, size, job.stream)
            if accepted[i]:
                out[at] = cells(np.array([integer + proposal]))[0]
        return scratch[0, :others][~accepted], scratch[1, :others][~accepted]

    def _weigh(self, words: _Words, stream: Keystream) -> tuple[_Ints, NDArray[np.bool_]]:
        """The proposals that these words make, one each, and whether they are accepted."""
        table, count = self._table, words.size // 2
        column, fraction, high, sign, offset, v, start = self._scratch[:7, :count]
        t, uniform = self._scratch[7:9, :count].view(np.float64)

        # A column and a fraction within it; a sign; a place in the stratum; a uniform to accept with.
        first, second = words[:count], words[count:]
        np.right_shift(first, np.uint64(self._fraction_bits + 1), out=column.view(np.uint64))
        np.bitwise_and(first, np.uint64((1 << self._fraction_bits) - 1), out=fraction.view(np.uint64))
        np.right_shift(first, np.uint64(self._fraction_bits), out=sign.view(np.uint64))
        np.bitwise_and(sign, 1, out=sign)
        np.bitwise_and(second, np.uint64((1 << table.j) - 1), out=offset.view(np.uint64))
        np.right_shift(second, np.uint64(self._v_shift), out=v.view(np.uint64))

        np.take(table.high, column, out=high, mode="clip")
        alias = fraction >= high
        if (fraction == high).any():  # once in 2^50: the leading bits of the threshold do not decide
            for i in np.flatnonzero(fraction == high):
                low = table.thresholds[int(column[i])] & ((1 << table.low_bits) - 1)
                alias[i] = stream.integer(table.low_bits) >= low
        np.left_shift(column, 1, out=column)
        np.add(column, alias, out=column)
        np.take(table.starts, column, out=start, mode="clip")

        size = np.add(offset, sign, out=column)  # |k| = start + size
        np.copyto(t, size)
        np.left_shift(start, 1, out=high)
        np.add(high, size, out=high)
        np.copyto(uniform, high)
        t *= uniform
        t *= table.half_inverse_square  # (k^2 - start^2) / (2 S^2)
        np.copyto(uniform, v)
        uniform *= self._v_unit
        accepted = np.add(t, uniform, out=high.view(np.float64)) < 1.0 - table.margin - self._v_unit
        doubtful = np.flatnonzero(~accepted)
        if doubtful.size:
            accepted[doubtful] = self._decide(t[doubtful], v[doubtful], start[doubtful], size[doubtful], stream)

        np.add(start, offset, out=offset)
        np.negative(sign, out=sign)
        return np.bitwise_xor(offset, sign, out=offset), accepted  # k or -1 - k

    def _decide(self, t: Any, v: _Ints, start: _Ints, size: _Ints, stream: Keystream) -> NDArray[np.bool_]:
        """Whether the uniform is below p(start + size) / p(start), with 64 more bits of it, or as many as it takes."""
        margin = self._table.margin
        more = stream.words(t.size).copy()
        uniform = (v + (more >> np.uint64(11)).astype(np.float64) * 2.0**-53) * self._v_unit
        terms = self._table.terms
        ratio = np.full_like(t, _TAYLOR[terms])
        for coefficient in reversed(_TAYLOR[:terms]):
            ratio *= t
            np.subtract(coefficient, ratio, out=ratio)
        yes: NDArray[np.bool_] = uniform < ratio - margin
        for i in np.flatnonzero(~yes & (uniform <= ratio + margin)):
            bits = int(v[i]) << 64 | int(more[i])
            yes[i] = self._decide_exactly(bits, 128 - self._v_shift, int(start[i]), int(size[i]), stream)
        return yes

    def _decide_exactly(self, uniform: int, bits: int, start: int, size: int, stream: Keystream) -> bool:
        table = self._table
        with decimal.localcontext(EXACT):
            exponent = -Decimal(size * (2 * start + size)) / (2 * table.std * table.std)
            ratio = exponent.exp() * _cell(start + size, table.std) / _cell(start, table.std)
            if uniform == int(ratio * 2**bits):
                uniform = uniform << RELATIVE_BITS | stream.integer(RELATIVE_BITS)
                bits += RELATIVE_BITS
            return uniform < int(ratio * 2**bits)


def _terms(largest: float) -> int:
    """Degree at which the Taylor polynomial of exp(-t) is close enough for t up to ``largest``; up to 2, 25 do."""
    terms = 2
    while largest**terms * _TAYLOR[terms] > 2.0**-48 and terms < len(_TAYLOR) - 1:
        terms += 1
    return terms


def _reading(values: _Ints) -> Callable[[slice, _Ints], None]:
    return lambda block, part: np.copyto(part, values[block])


def _joined(parts: list[_Ints]) -> _Ints:
    """One array; the parts are wiped and forgotten."""
    whole = np.concatenate(parts) if parts else np.empty(0, np.int64)
    for part in parts:
        part[:] = 0
    parts.clear()
    return whole


def blocks(size: int, block: int = BLOCK) -> Iterator[slice]:
    """Consecutive slices that cover ``range(size)``."""
    return (slice(start, min(start + block, size)) for start in range(0, size, block))
