"""Where secrets come from. In production always the operating system; tests inject a reproducible source."""

from __future__ import annotations

from collections.abc import Callable

from lensemble_flwr.errors import SecureAggregationError

Entropy = Callable[[int], bytes]


def draw(entropy: Entropy, count: int) -> bytes:
    """`count` random bytes, or a typed error: never fewer, never none."""
    try:
        data = entropy(count)
    except (OSError, NotImplementedError) as error:
        raise SecureAggregationError("The entropy source failed.", cause="key_agreement_failed") from error
    if not isinstance(data, bytes) or len(data) != count:
        raise SecureAggregationError("The entropy source gave too few bytes.", cause="key_agreement_failed")
    return data
