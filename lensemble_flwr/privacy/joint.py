"""Several Gaussian outputs that one observer sees together: the mu of the joint release.

If the outputs are N(m, Sigma) for one neighbour and N(0, Sigma) for the other, their log-likelihood ratio is a
one-dimensional Gaussian, so the pair is exactly mu-Gaussian-DP with mu^2 = m^T Sigma^-1 m. Accounting for each output
alone forgets the others; correlated noise can make it worse still. Where only a set of possible shifts m is known, the
worst one counts: :class:`Box`, :class:`Ball` or :class:`Shifts`. Releases that follow each other add up in mu^2
(``Accountant.step_mu``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from lensemble_flwr.errors import ConfigError

_EXACT = 24  # joint releases up to this size are decided in rational arithmetic
_CORNERS = 20  # a box of up to this many outputs is searched corner by corner
_CHUNK = 1 << 14


@dataclass(frozen=True)
class Box:
    """All shifts with |m_i| <= bounds_i, of whatever signs. ``bounds``: shape (n,), each >= 0."""

    bounds: ArrayLike


@dataclass(frozen=True)
class Ball:
    """All shifts of Euclidean length at most ``radius`` >= 0."""

    radius: float


@dataclass(frozen=True)
class Shifts:
    """Exactly these shifts, shape (k, n), k >= 1."""

    rows: ArrayLike


ShiftSet = Box | Ball | Shifts


def joint_gaussian_mu(cov: ArrayLike, shift: ArrayLike | ShiftSet) -> float:
    """mu of one release of a Gaussian vector whose mean moves by ``shift`` between neighbours: sqrt(m^T Sigma^-1 m).

    Args:
        cov: covariance, shape (n, n), symmetric positive semi-definite.
        shift: difference of the means, shape (n,); or a set of possible ones, of which the worst counts. For outputs
            that are vectors with noise N(0, Sigma_ij I), lengths may stand for the shifts only if Sigma is diagonal.

    Returns:
        mu, rounded up; inf when a shift leaves the range of a singular covariance (the neighbours are then told apart
        with certainty), when that cannot be excluded, or when an entry is not finite. Up to n = 24 a matrix that is
        positive semi-definite as given is decided in rational arithmetic; a larger one, or one that is so only up to
        rounding, by eigenvalues, with every doubtful one taken as zero. A box of more than 20 coupled outputs gets an
        upper bound (sum |(Sigma^-1)_ij| D_i D_j) instead of the worst corner.

    Raises:
        ConfigError: wrong shapes, not symmetric, a clearly negative eigenvalue, or bounds below zero.
    """
    if isinstance(shift, Ball):
        return _root_up(_ball(_covariance(cov), shift.radius))
    if isinstance(shift, Box):
        return _root_up(_box(_covariance(cov), _numbers(shift.bounds, "bounds")))
    if isinstance(shift, Shifts):
        rows = _numbers(shift.rows, "shifts")
        if rows.ndim != 2 or not rows.shape[0]:
            raise ConfigError(f"Shape {rows.shape} is no list of shifts.", "Use (k, n) with k >= 1.")
        return max(joint_gaussian_mu(cov, row) for row in rows)
    sigma, m = _covariance(cov), _numbers(shift, "shift")
    if m.ndim != 1 or m.size != len(sigma):
        raise ConfigError(f"Shapes {sigma.shape} and {m.shape} are no covariance and shift.", "Use (n, n) and (n,).")
    if not (np.isfinite(sigma).all() and np.isfinite(m).all()):
        return math.inf
    if not m.any():
        return 0.0
    squared = _exact_square(sigma, m) if m.size <= _EXACT else None
    return _root_up(_eigen_square(sigma, m) if squared is None else squared)


def _numbers(values: ArrayLike, what: str) -> np.ndarray:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"The {what} must be an array of numbers.") from error


def _covariance(cov: ArrayLike) -> np.ndarray:
    """Checked and exactly symmetric; entries that are not finite are left for the caller."""
    sigma = _numbers(cov, "covariance")
    if sigma.ndim != 2 or sigma.size == 0 or sigma.shape[0] != sigma.shape[1]:
        raise ConfigError(f"Shape {sigma.shape} is no covariance.", "Use (n, n).")
    if np.isfinite(sigma).all() and not np.array_equal(sigma, sigma.T):
        if not np.allclose(sigma, sigma.T, rtol=1e-12, atol=0.0):
            raise ConfigError("The covariance is not symmetric.")
        sigma = sigma / 2 + sigma.T / 2
    return sigma


def _root_up(squared: float) -> float:
    """sqrt, rounded up; inf for what is no number."""
    if not 0.0 <= squared < math.inf:
        return math.inf
    return math.nextafter(math.sqrt(squared) * (1.0 + 4e-16), math.inf) if squared else 0.0


def _float_up(value: Fraction) -> float:
    try:
        return math.nextafter(float(value), math.inf)
    except OverflowError:
        return math.inf


class _Outside(Exception):
    """A shift leaves the range of the covariance."""


def _eliminate(sigma: np.ndarray, columns: list[list[Fraction]]) -> list[tuple[Fraction, list[Fraction]]] | None:
    """Rational L D L^T: for each pivot d > 0 the pivot and the forward-solved entries c of ``columns``, so that
    x^T Sigma^+ y = sum c_x c_y / d. None if Sigma as given is not positive semi-definite.

    Raises:
        _Outside: a column is not in the range.
    """
    n = len(sigma)
    rows = [[Fraction(float(v)) for v in row] for row in sigma]
    rest = [list(column) for column in columns]
    found: list[tuple[Fraction, list[Fraction]]] = []
    outside = False
    for i in range(n):  # in order: a zero pivot of a semi-definite matrix has a zero row, so nothing is lost
        pivot = rows[i][i]
        if pivot < 0 or (pivot == 0 and any(rows[i][j] for j in range(i, n))):
            return None
        if pivot == 0:
            outside = outside or any(column[i] != 0 for column in rest)
            continue
        found.append((pivot, [column[i] for column in rest]))
        for j in range(i + 1, n):
            factor = rows[i][j] / pivot
            if factor:
                for column in rest:
                    if column[i]:
                        column[j] -= factor * column[i]
                for k in range(j, n):
                    rows[j][k] -= factor * rows[i][k]  # the upper triangle is enough
    if outside:
        raise _Outside
    return found


def _exact_square(sigma: np.ndarray, m: np.ndarray) -> float | None:
    """m^T Sigma^-1 m by rational elimination; inf outside the range; None if Sigma as given is not semi-definite."""
    try:
        found = _eliminate(sigma, [[Fraction(float(v)) for v in m]])
    except _Outside:
        return math.inf
    return None if found is None else _float_up(sum((c * c / pivot for pivot, (c,) in found), Fraction(0)))


def _spectrum(sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Eigenvalues, vectors, and the relative size below which a value counts as zero."""
    values, vectors = np.linalg.eigh(sigma)
    size = float(np.abs(values).max())
    tolerance = 8.0 * len(sigma) * 2.0**-52
    if values[0] < -tolerance * size:
        raise ConfigError(f"The covariance has a negative eigenvalue, {values[0]:.6g}.")
    return values, vectors, tolerance


def _eigen_square(sigma: np.ndarray, m: np.ndarray) -> float:
    values, vectors, tolerance = _spectrum(sigma)
    length = float(np.abs(m).max())
    parts = vectors.T @ (m / length)  # scaled: nothing here may overflow into a comparison
    null = values <= tolerance * float(np.abs(values).max())
    if not (np.abs(parts[null]) <= tolerance).all():
        return math.inf
    good = ~null
    with np.errstate(over="ignore"):
        return float(np.sum(length * parts[good] ** 2 / _lowered(values[good], values, tolerance) * length)) * (
            1.0 + tolerance
        )


def _lowered(good: np.ndarray, values: np.ndarray, tolerance: float) -> np.ndarray:
    """The decomposition is exact for Sigma + E with |E| below this: without it the result could be too small."""
    return good - 0.5 * tolerance * float(np.abs(values).max())


def _box(sigma: np.ndarray, bounds: np.ndarray) -> float:
    """max of m^T Sigma^-1 m over |m_i| <= D_i. The maximum of a convex function lies in a corner."""
    if bounds.ndim != 1 or bounds.size != len(sigma):
        raise ConfigError(f"Shapes {sigma.shape} and {bounds.shape} are no covariance and box.", "Use (n, n) and (n,).")
    if (bounds < 0).any():
        raise ConfigError("A bound of the box is negative.")
    if not (np.isfinite(sigma).all() and np.isfinite(bounds).all()):
        return math.inf
    moving = np.flatnonzero(bounds)
    if not moving.size:
        return 0.0
    try:
        form = _scaled_inverse(sigma, bounds, moving)
    except _Outside:
        return math.inf
    with np.errstate(over="ignore", invalid="ignore"):
        slack = (4.0 * len(form) + 8.0) ** 2 * 2.0**-52 * float(np.abs(form).sum())
        off = np.abs(form).sum(axis=1) > np.abs(np.diag(form))
        coupled = form[np.ix_(off, off)]  # the sign of an output that is coupled to none does not matter
        alone = float(np.diag(form)[~off].sum())
        worst = float(np.abs(coupled).sum())
        if 0 < len(coupled) <= _CORNERS:
            worst = _worst_corner(coupled)
        return alone + worst + slack


def _scaled_inverse(sigma: np.ndarray, bounds: np.ndarray, moving: np.ndarray) -> np.ndarray:
    """D Sigma^+ D restricted to the outputs that move.

    Raises:
        _Outside: one of them leaves the range.
    """
    n = len(sigma)
    if n <= _EXACT:
        units = [[Fraction(float(bounds[i])) if i == j else Fraction(0) for i in range(n)] for j in moving]
        found = _eliminate(sigma, units)
        if found is not None:
            exact = [[sum((c[i] * c[j] / d for d, c in found), Fraction(0)) for j in range(len(units))]
                     for i in range(len(units))]  # fmt: skip
            try:
                return np.array([[float(v) for v in row] for row in exact])
            except OverflowError as error:
                raise _Outside from error
    values, vectors, tolerance = _spectrum(sigma)
    null = values <= tolerance * float(np.abs(values).max())
    if not (np.abs(vectors[np.ix_(moving, null)]) <= tolerance).all():
        raise _Outside
    with np.errstate(over="ignore", invalid="ignore"):
        parts = vectors[np.ix_(moving, ~null)] * bounds[moving, None]
        return (parts / _lowered(values[~null], values, tolerance)) @ parts.T


def _worst_corner(form: np.ndarray) -> float:
    """max of s^T F s over all signs s; the sign of s_0 is free."""
    n = len(form)
    best = 0.0
    for start in range(0, 1 << (n - 1), _CHUNK):
        index = np.arange(start, min(start + _CHUNK, 1 << (n - 1)), dtype=np.int64)
        signs = np.ones((index.size, n))
        signs[:, 1:] -= 2.0 * ((index[:, None] >> np.arange(n - 1)) & 1)
        best = max(best, float(((signs @ form) * signs).sum(axis=1).max()))
    return best


def _ball(sigma: np.ndarray, radius: float) -> float:
    """radius^2 / the smallest eigenvalue."""
    if isinstance(radius, (bool, str)) or not isinstance(radius, (int, float)) or radius < 0:
        raise ConfigError(f"radius={radius!r} must be a number >= 0.")
    if radius == 0:
        return 0.0
    if not (np.isfinite(sigma).all() and math.isfinite(radius)):
        return math.inf
    diagonal = np.diag(sigma)
    if not np.any(sigma - np.diag(diagonal)):
        if (diagonal < 0).any():
            raise ConfigError(f"The covariance has a negative eigenvalue, {diagonal.min():.6g}.")
        least = float(diagonal.min())
    else:
        values, _, tolerance = _spectrum(sigma)
        least = float(values[0]) - tolerance * float(np.abs(values).max())
    return radius / least * radius * (1.0 + 2.0**-50) if least > 0.0 else math.inf
