"""HTML that is safe by construction: text becomes markup only through `element`, which escapes it.

Everything that a run recorded is text. Characters that control a terminal or reorder a line are made visible, a text
has a longest length, and a page has no script, no link and no picture from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from turnwise.runs.transcript import visible

VOID = {"meta", "br", "line", "circle", "rect", "path", "polygon", "polyline"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing but the style that is in it."""


class Html(str):
    """Markup. Only `element`, `text` and `joined` make it."""

    __slots__ = ()


Child = str | Html


def text(content: str, longest: int | None = None) -> Html:
    """A text as markup: escaped, controls made visible, cut at `longest` characters."""
    cut = content if longest is None else content[:longest]
    left = len(content) - len(cut)
    more = f"… ({left:,} characters more)" if left else ""
    return Html(html.escape(visible(cut)) + more)


def joined(children: Iterable[Child]) -> Html:
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children))


def element(name: str, *children: Child, **attributes: str | float | None) -> Html:
    """An element with escaped attributes and children; `class_` is written class, `_` is written `-`.

    Example:
        element("p", "a < b", class_="note") == '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not children:
        return Html(f"<{name}{written}/>" if name != "meta" else f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], kind: str = "") -> Html:
    """A table that scrolls by itself where it is wider than the page."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head)) if any(head) else Html()
    lines = [
        element("tr", *(element("th" if place == 0 else "td", cell) for place, cell in enumerate(row))) for row in rows
    ]
    body = element("table", element("thead", top), element("tbody", *lines), class_=kind or None)
    return element("div", body, class_="scroll")


def section(title: str, *children: Child) -> Html:
    anchor = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    return element("section", element("h2", title), *children, id=anchor)


def note(*children: Child) -> Html:
    return element("p", *children, class_="note")


def folded(summary: str, *children: Child) -> Html:
    """What a reader opens with a click, and print leaves closed."""
    return element("details", element("summary", summary), *children)


def document(title: str, *children: Child) -> bytes:
    """A whole page, in UTF-8."""
    from turnwise.inspect.report.style import STYLE

    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    whole = f'<!DOCTYPE html>\n<html lang="en">{head}{element("body", element("main", *children))}</html>\n'
    return whole.encode("utf-8", "backslashreplace")
