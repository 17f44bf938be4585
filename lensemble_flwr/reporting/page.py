"""HTML by functions: whatever is not markup already is escaped, so no caller can forget it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

from lensemble_flwr.reporting.drawing import Plot
from lensemble_flwr.reporting.style import STYLE
from lensemble_flwr.reporting.wording import clean


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"

_VOID = frozenset({"meta", "br", "hr"})


def text(value: str) -> Markup:
    """Any text as markup: controls made visible, everything special escaped."""
    return value if isinstance(value, Markup) else Markup(html.escape(clean(value), quote=True))


def el(tag: str, *children: Child, **attributes: str | None) -> Markup:
    """An element. Children may be nested lists; None is left out. ``class_`` is class, ``data_x`` is data-x."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(clean(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{''.join(_flat(children))}</{tag}>")


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if isinstance(child, str):
            yield text(child)
        elif child is not None:
            yield from _flat(child)


def document(title: str, *body: Child) -> str:
    """A whole page that loads nothing: no script, no font, no address of any other file."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light"),
        el("title", title),
        el("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + el("html", head, el("body", el("main", *body)), lang="en") + "\n"


def figure_of(plot: Plot) -> Markup:
    """A plot with its title and caption."""
    if plot.wide:
        drawing: Child = [
            el("div", Markup(plot.wide), class_="broad"),
            el("div", Markup(plot.svg), class_="narrow"),
        ]
    else:
        drawing = Markup(plot.svg)
    return el("figure", el("h3", plot.title), drawing, el("figcaption", unbroken(plot.caption)))


def scrollable(table: Markup, label: str) -> Markup:
    """A table that scrolls by itself where the screen is too narrow; ``label`` is read out."""
    return el("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def unbroken(words: str) -> list[Child]:
    """Keep 1e-5, 53 % and NON-PRIVATE on one line."""
    pieces = re.split(r"(\d[\d.]*(?:e-\d+| %)|NON-PRIVATE)", words)
    return [el("span", piece, class_="nb") if i % 2 else piece for i, piece in enumerate(pieces)]


def parted(key: str) -> list[Child]:
    """A name that may be broken behind an underscore, and nowhere else while there is room."""
    return [el("span", part, class_="part") for part in re.split(r"(?<=_)", key)]
