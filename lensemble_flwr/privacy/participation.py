"""Secret participation: a coin that each participant throws for itself every round and that nobody ever sees.

With rate q < 1 a participant's update is in a round with probability q; otherwise the zero update goes the same way,
with the same noise, work, messages and charge. Who looks at releases cannot tell the two apart, and that doubt
amplifies the guarantee (docs/privacy.md, "Secret participation"). It does so only because the coin is thrown where
nobody looks and independently of everything else: how often somebody was seen, a roster or a dropout amplifies nothing.
So :class:`SecretParticipation` is the only thing that can make a charge below full price, and it is made from a rate
that was fixed in public beforehand, never from anything observed. What uses the coin is
:func:`lensemble_flwr.privacy.mechanism.take_part`; nothing returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lensemble_flwr.errors import ConfigError


@dataclass(frozen=True)
class SecretParticipation:
    """The public rate q of a secret coin.

    Args:
        rate: q, 0 < q <= 1. 1 means that there is no coin: every update is in.

    Raises:
        ConfigError: no number, or out of range.
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        rate = self.rate
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if not number or not 0.0 < rate <= 1.0:  # False for NaN
            raise ConfigError(
                f"sample_rate={rate!r} must be a number above 0 and at most 1.", "Use 1 for no secret coin."
            )
        object.__setattr__(self, "rate", float(rate))

    @property
    def always(self) -> bool:
        """Whether there is no coin (q = 1)."""
        return self.rate == 1.0

    @property
    def threshold(self) -> tuple[int, int]:
        """(k, b) with q = k / 2^b exactly: a uniform integer below 2^b is below k with probability q, not nearly q."""
        numerator, denominator = self.rate.as_integer_ratio()
        bits = denominator.bit_length() - 1
        more = max(0, 64 - bits)  # never a short draw: its length is public, but 64 bits cost nothing
        return numerator << more, bits + more


ALWAYS = SecretParticipation(1.0)
"""No coin: the update is in every round."""
