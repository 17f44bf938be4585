"""How figures are written, the same in the terminal, the report and the plots. ASCII where a terminal prints it."""

from __future__ import annotations

import math
import unicodedata

NO_GUARANTEE = "infinite (no guarantee)"

OBSERVERS = {
    "model_reader": "a reader of the released models",
    "peers": "the other participants",
    "coordinator": "the coordinator",
    "anyone": "anyone who sees an update without its mask",
}


def clean(text: str) -> str:
    """``text`` without characters that act instead of being shown: controls, escapes, direction overrides."""
    shown = []
    for character in text:
        if character.isspace():
            shown.append(" ")
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            shown.append("\N{REPLACEMENT CHARACTER}")
        else:
            shown.append(character)
    return "".join(shown)


def observer(name: str) -> str:
    """An observer of the claims table in words."""
    return OBSERVERS.get(name, clean(name))


def figure(value: float | None) -> str:
    """Three significant digits; "-" for nothing, "not finite" for a figure that diverged."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 999.5:
        return f"{value:,.0f}"
    decimals = 3 if size < 0.9995 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"


def epsilon(value: float) -> str:
    """Epsilon rounded up, so that what is printed never promises more than what holds."""
    if not value < math.inf:
        return NO_GUARANTEE
    if value == 0:
        return "0"
    if value >= 1e6:
        return figure(value * 1.005)
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    # A calibrated target comes out as 8.0000000002: that is not 8.01.
    up = math.ceil(value * 10**decimals - 1e-6) / 10**decimals
    return f"{up:,.{decimals}f}"


def short_epsilon(value: float) -> str:
    """:func:`epsilon` for a narrow column."""
    return epsilon(value) if value < math.inf else "infinite"


def delta(value: float | None) -> str:
    """Delta as it is set: 1e-5."""
    if value is None:
        return "-"
    mantissa, mark, exponent = f"{value:g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def data_size(count: float | None) -> str:
    """Bytes in decimal units: "3.41 MB"."""
    if count is None:
        return "-"
    unit, divisor = size_unit(count)
    return f"{count / divisor:.0f} {unit}" if divisor == 1 else f"{figure(count / divisor)} {unit}"


def size_unit(count: float) -> tuple[str, int]:
    """The decimal unit in which ``count`` bytes is a handy number, and its size."""
    for unit, divisor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= divisor:
            return unit, divisor
    return "B", 1


def duration(seconds: float | None) -> str:
    """Wall time: "0.42 s", "95 s", "12 min", "3.2 h"."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def change(before: float, after: float) -> str:
    """Relative change in words: "53 % lower", "unchanged"; empty where it means nothing."""
    if not (math.isfinite(before) and math.isfinite(after)) or before <= 0:
        return ""
    share = after / before - 1
    if abs(share) < 0.0005:
        return "unchanged"
    size = abs(share) * 100
    text = f"{size:.0f}" if size >= 9.95 else f"{size:.1f}"
    return f"{text} % {'lower' if share < 0 else 'higher'}"


def listed(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
