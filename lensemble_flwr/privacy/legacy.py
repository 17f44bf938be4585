"""The moments accountant and aggregator of an earlier report, kept for comparison. No configuration can select them.

The report keeps one term of a moment bound, calls what it observed a sampling rate, divides noise by the number of
those who came, and clips vectors coordinate by coordinate. What of it is sound is here: its bookkeeping, whole-vector
clipping, noise over a fixed public denominator, and participation counts as a diagnostic. Its epsilon is not, and is
only to be had under its own name, :func:`legacy_moments_epsilon`; ``MomentsAccountant.get_epsilon`` is infinite
wherever that number is not a theorem, which is everywhere. docs/privacy.md, section 15, has the figures.

Use :mod:`lensemble_flwr.privacy.accountant` and the ledger for anything that is released.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike

from lensemble_flwr.errors import ContractViolation
from lensemble_flwr.privacy.accountant import PRVAccountant
from lensemble_flwr.privacy.mechanism import add_gaussian_noise

MAX_ORDER = 64
"""Orders lambda = 2 .. 64, as in the report."""


def legacy_log_moment(order: float, noise_multiplier: float, sample_rate: float) -> float:
    """The report's "log moment" of one round. **Not a bound**: see :func:`legacy_moments_epsilon`."""
    z, q = noise_multiplier, sample_rate
    if not (z > 0.0 and 0.0 <= q <= 1.0 and order > 1.0):
        raise ContractViolation(f"No moment for order={order!r}, noise_multiplier={z!r}, sample_rate={q!r}.")
    if q == 0.0:
        return 0.0
    if q == 1.0:
        return order / z / z / 2.0
    inverse = 1.0 / z * (1.0 / z)  # a product overflows to inf, a power would raise
    exponent = order * (order - 1.0) * inverse / 2.0
    first = 4.0 * math.expm1(inverse) if inverse < 700.0 else math.inf
    term = min(first, math.exp(exponent) if exponent < 700.0 else math.inf)
    return math.log1p(q * q * order * (order - 1.0) * 0.5 * term)


def legacy_moments_epsilon(rounds: Iterable[tuple[float, float, int]], delta: float) -> float:
    """The epsilon that the report's formula gives. **It is not a valid bound and must never be claimed.**

    Of the moment bound of Wang, Balle and Kasiviswanathan (2019, theorem 9; sampling without replacement) it keeps the
    term j = 2 and drops all others; without sampling it takes lambda/(2 z^2) for what is lambda (lambda - 1)/(2 z^2).
    It reports .69 where 4.38 is spent (z = 1, one round, delta 1e-5). Where it lands above the truth, that is luck.

    Args:
        rounds: (noise multiplier z, sampling rate q, number of rounds) each.
        delta: in (0, 1).

    Raises:
        ContractViolation: a value out of range.
    """
    if not 0.0 < delta < 1.0:
        raise ContractViolation(f"delta={delta!r} must lie between 0 and 1.")
    history = list(rounds)
    if not history:
        return 0.0
    best = math.inf
    for order in range(2, MAX_ORDER + 1):
        total = sum(count * legacy_log_moment(order, z, q) for z, q, count in history)
        best = min(best, (total - math.log(delta)) / (order - 1))
    return best


class MomentsAccountant:
    """Keeps the rounds of the report's accountant and answers with what is proven about them.

    A round without a record makes everything after it unknown, hence infinite: the report called it epsilon 0.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all rounds. For experiments; a participant's ledger has no such thing."""
        self._accountant = PRVAccountant()
        self._rounds: list[tuple[float, float, int]] = []
        self._unknown = False

    def accumulate(self, noise_multiplier: float, sample_rate: float = 1.0, count: int = 1) -> None:
        """Add rounds. ``sample_rate`` is kept for :meth:`legacy_epsilon` only: observed frequencies amplify nothing."""
        legacy_log_moment(2, noise_multiplier, sample_rate)
        self._accountant.step(noise_multiplier=noise_multiplier, count=count)
        if count:
            self._rounds.append((noise_multiplier, sample_rate, count))

    def forget_round(self) -> None:
        """Something was released that is on no record: nothing can be said any more."""
        self._unknown = True

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of all rounds at full participation, exact; infinite after a round that was not recorded."""
        return math.inf if self._unknown else self._accountant.spent(target_delta=delta)

    def legacy_epsilon(self, delta: float) -> float:
        """What the report would have said (:func:`legacy_moments_epsilon`): **not a valid bound.**"""
        return legacy_moments_epsilon(self._rounds, delta)


class DPFederatedAggregator:
    """Clip, average over a fixed public denominator, add noise from the operating system, count who came.

    The mean is ``(sum of clipped + N(0, (z C)^2)) / denominator`` with the *public* ``denominator`` (the planned number
    of clients). With the actual number m instead, as in the report, m itself changes with one client, and the mean of m
    and that of m - 1 differ by up to about 2 C / m: the noise would be half of what the claim needs.

    Args:
        clip_norm: C > 0, on the whole vector of a client.
        noise_multiplier: z > 0: noise std over C.
        denominator: planned number of clients, >= 1.

    Raises:
        ContractViolation: a value out of range.
    """

    def __init__(self, clip_norm: float, noise_multiplier: float, denominator: int) -> None:
        for name, value in (("clip_norm", clip_norm), ("noise_multiplier", noise_multiplier)):
            if not 0.0 < value < math.inf:
                raise ContractViolation(f"{name}={value!r} must be positive and finite.")
        if type(denominator) is not int or denominator < 1:
            raise ContractViolation(f"denominator={denominator!r} must be an integer of at least 1.")
        self.clip_norm, self.noise_multiplier, self.denominator = clip_norm, noise_multiplier, denominator
        self.accountant = MomentsAccountant()
        self.rounds = 0
        self._seen: Counter[str] = Counter()

    def clip_gradients(self, gradients: ArrayLike) -> np.ndarray:
        """One client's gradient clipped to Euclidean norm C **as a whole**, whatever its shape; float64, same shape.

        A scalar, a vector (d,) or a matrix (a, b) is one client's gradient. The report took a vector for d clients with
        one coordinate each, so that its norm could reach C sqrt(d).

        Raises:
            ContractViolation: more than two dimensions, or an entry that is not finite.
        """
        values = np.array(gradients, dtype=np.float64)
        if values.ndim > 2:
            raise ContractViolation(f"A gradient of shape {values.shape} has more than two dimensions.")
        if not np.isfinite(values).all():
            raise ContractViolation("A gradient has entries that are not finite.")
        largest = float(np.abs(values).max()) if values.size else 0.0
        if largest == 0.0:
            return values
        norm = largest * float(np.linalg.norm(values / largest))
        # The factor is taken a little below C / norm, so that rounding cannot bring the norm above C.
        return values if norm <= self.clip_norm else values * (self.clip_norm / norm * (1.0 - 2.0**-40))

    def aggregate_round(self, gradients: Mapping[str, ArrayLike], record_privacy: bool = True) -> np.ndarray:
        """The noisy mean of one round: shape of a gradient, float64. Nobody there: an empty array, and no charge.

        Args:
            gradients: client id -> gradient; all of one shape.
            record_privacy: False leaves the round off the books, which makes epsilon infinite from then on.

        Raises:
            ContractViolation: the shapes differ, or a gradient is none. Nothing is charged then.
        """
        if not gradients:
            return np.empty(0)
        clipped = {name: self.clip_gradients(value) for name, value in gradients.items()}
        shapes = {value.shape for value in clipped.values()}
        if len(shapes) != 1:
            raise ContractViolation(f"The gradients of a round have different shapes: {sorted(map(str, shapes))}.")
        if len(clipped) > self.denominator:
            raise ContractViolation(f"{len(clipped)} clients are more than the {self.denominator} that were planned.")
        total = torch.from_numpy(np.asarray(sum(clipped.values(), np.zeros(shapes.pop()))))
        if record_privacy:
            self.accountant.accumulate(self.noise_multiplier)
        else:
            self.accountant.forget_round()
        self.rounds += 1
        self._seen.update(list(clipped))
        noised = add_gaussian_noise(total, self.clip_norm, self.noise_multiplier)
        return np.asarray(noised.numpy() / self.denominator)

    def frequencies(self) -> dict[str, float]:
        """Share of the rounds that each client took part in. A diagnostic: it is no sampling rate and enters no
        epsilon, because the coordinator saw who came, and nobody drew it from a secret coin beforehand."""
        return {name: count / self.rounds for name, count in self._seen.items()}

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of a client that was there in every recorded round; see :meth:`MomentsAccountant.get_epsilon`."""
        return self.accountant.get_epsilon(delta)
