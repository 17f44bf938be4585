"""How plots are drawn: matplotlib figures turned into SVG that can stand inside an HTML page.

Matplotlib's object interface is used, so no state is shared with a caller that plots too.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, the lines darkened to 3:1 and the labels to 4.5:1 against white.
INK, FAINT, GRID = "#1c2430", "#5b6675", "#dfe3e8"
BLUE, RED, GREEN, PURPLE, ORANGE = "#0b5fa5", "#b83a00", "#00735a", "#8a4a78", "#8a5a00"

PANEL = (460.0, 280.0)
WIDE = (960.0, 350.0)


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        name: unique in the report; prefix of all ids inside the SVG.
        title: above it, plain text.
        caption: below it, plain text; tells what the plot shows to those who cannot see it.
        svg: markup that is safe to embed.
        wide: as wide as the page, for large screens and paper; empty if there is no such form.
    """

    name: str
    title: str
    caption: str
    svg: str
    wide: str = ""


@dataclass(frozen=True)
class Line:
    """A labelled horizontal line, or the end of a curve, to be named at the right edge."""

    y: float
    text: str
    colour: str
    bold: bool = False


def value_limits(axes: Axes, values: Sequence[float]) -> None:
    """From zero where zero is near anyway, so that a small change does not look like a large one."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        axes.set_ylim(0, 1)
        return
    low, high = min(finite), max(finite)
    if 0 <= low < 0.6 * high:
        axes.set_ylim(0, high * 1.1)
    else:
        margin = 0.12 * (high - low) or max(abs(high) * 0.1, 1e-6)
        axes.set_ylim(low - margin, high + margin)
    few_ticks(axes, 6)


def few_ticks(axes: Axes, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(count))


def whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def name_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each line's name beside its end, moved apart where they would overlap."""
    if not lines:
        return
    low, high = axes.get_ylim()
    gap = 14.5 / axes.bbox.height  # the canvas of an SVG has 72 dots an inch, so a dot is a CSS pixel here
    order = sorted(lines, key=lambda line: line.y)
    wanted = [(line.y - low) / (high - low) for line in order]
    for line, place, at in zip(order, spread(wanted, gap), wanted, strict=True):
        axes.annotate(
            line.text,
            xy=(1, at),
            xytext=(1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=11.5,
            color=line.colour,
            fontweight="bold" if line.bold else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0},
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions in [0, 1], in the given ascending order and at least ``gap`` apart, near the wanted ones."""

    def settled(mean: float, count: float) -> float:
        """Centre of a group that is kept inside."""
        half = gap * (count - 1) / 2
        return min(max(mean, half), max(1 - half, half))

    groups: list[tuple[float, int]] = []  # mean of the wanted positions, number of labels
    for place in wanted:
        groups.append((place, 1))
        while len(groups) > 1:
            (below, m), (above, n) = groups[-2:]
            if settled(above, n) - settled(below, m) >= gap * (m + n) / 2:
                break
            groups[-2:] = [((below * m + above * n) / (m + n), m + n)]
    placed = []
    for mean, count in groups:
        lowest = settled(mean, count) - gap * (count - 1) / 2
        placed += [lowest + gap * i for i in range(count)]
    return placed


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def slug(name: str) -> str:
    """A part of an id: letters and digits, different for different names."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return plain if plain == name.lower() else f"{plain}-{sum((i + 1) * ord(c) for i, c in enumerate(name)):x}"


# ------------------------------------------------------------------------------------------------ SVG


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "lensemble",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 12,
        # A name with a dollar sign is a name.
        "text.parse_math": False,
        "axes.edgecolor": "#9aa3ae",
        "axes.labelcolor": INK,
        "axes.labelsize": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.9,
        "hatch.color": "#cfd5dc",
        "hatch.linewidth": 0.8,
        "xtick.color": "#9aa3ae",
        "ytick.color": "#9aa3ae",
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 11.5,
        "ytick.labelsize": 11.5,
        "text.color": INK,
    }
    fonts = logging.getLogger("matplotlib.font_manager")
    before = fonts.level
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name in a script that the measuring font lacks
        fonts.setLevel(logging.ERROR)
        try:
            yield
        finally:
            fonts.setLevel(before)


def svg(
    name: str,
    title: str,
    caption: str,
    size: tuple[float, float],
    draw: Callable[[Figure], None],
    names: float = 118,
) -> str:
    """Draw into a fresh figure of ``size`` and return markup; ``names``: room at the right for names (CSS pixels)."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    width, height = size
    with _style():
        fig = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(fig)
        right = names + (24 if width > PANEL[0] else 0)
        edges = {"left": 58 / width, "right": 1 - right / width, "top": 1 - 22 / height, "bottom": 44 / height}
        fig.subplots_adjust(**edges, hspace=0.36)
        draw(fig)
        buffer = io.StringIO()
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    return embeddable(buffer.getvalue(), name, title, caption)


_XLINK = "{http://www.w3.org/1999/xlink}href"


def embeddable(document: str, name: str, title: str, caption: str) -> str:
    """An SVG document as markup inside HTML: no prolog, metadata, name spaces, sizes or style sheet; ids prefixed."""
    root = ElementTree.fromstring(document)  # noqa: S314 - made by matplotlib a moment ago
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style", "title"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        if _XLINK in element.attrib:
            element.set("href", element.attrib.pop(_XLINK))
        for key, value in list(element.attrib.items()):
            if key == "id":
                value = f"{name}-{value}"
            elif key == "href":
                value = f"#{name}-{value[1:]}"
            elif key == "style" and element.tag == "text":
                value = _inherit_font(value)
            element.set(key, re.sub(r"url\(#", f"url(#{name}-", value))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for position, (tag, text) in enumerate((("title", title), ("desc", caption))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(position, element)
    return ElementTree.tostring(root, encoding="unicode")


def _inherit_font(style: str) -> str:
    """The style of a text without its font family, which is the page's; matplotlib writes one of two forms."""
    kept = []
    for part in style.split(";"):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        if key == "font":  # shorthand: [weight] size family
            match = re.match(r"(?:(bold|\d00) )?([\d.]+px)", value)
            if match is not None:
                kept += [f"font-weight: {match[1]}"] if match[1] else []
                kept.append(f"font-size: {match[2]}")
        elif key and key != "font-family":
            kept.append(f"{key}: {value}")
    return "; ".join(kept)


def _local(tag: Any) -> str:
    return str(tag).rpartition("}")[2]
