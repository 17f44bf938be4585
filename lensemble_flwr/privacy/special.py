"""scipy's special functions, loaded when one is first called.

Every message to a site is a new process, loading scipy takes longer than most of what such a process does, and the
stages that neither open a round nor train need none of it.
"""

from __future__ import annotations

from typing import Any


def erfcx(x: Any) -> Any:
    """exp(x^2) erfc(x)."""
    from scipy import special

    return special.erfcx(x)


def log_ndtr(x: Any) -> Any:
    """Logarithm of the standard normal distribution function."""
    from scipy import special

    return special.log_ndtr(x)


def ndtri_exp(y: Any) -> Any:
    """Inverse of :func:`log_ndtr`."""
    from scipy import special

    return special.ndtri_exp(y)


def gammaln(x: Any) -> Any:
    """Logarithm of the absolute value of the gamma function."""
    from scipy import special

    return special.gammaln(x)


def logsumexp(a: Any, *args: Any, **kwargs: Any) -> Any:
    """log(sum(exp(a)))."""
    from scipy import special

    return special.logsumexp(a, *args, **kwargs)


def brentq(f: Any, a: float, b: float, *args: Any, **kwargs: Any) -> Any:
    """A root of f in [a, b]."""
    from scipy import optimize

    return optimize.brentq(f, a, b, *args, **kwargs)
