"""HTML and SVG that cannot be injected into: every text that is not `Markup` is escaped on its way in."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Union


class Markup(str):
    """Text that is markup already. Only `el`, `join` and the page's own assets make it."""

    __slots__ = ()


Child = Union[str, "Markup", None, Iterable["Child"]]
Value = str | int | float | bool | None
_VOID = frozenset({"meta", "input", "br", "hr", "link"})


def el(tag: str, *children: Child, **attributes: Value) -> Markup:
    """An element. `class_` is `class`, `_` in a name is `-`; None and False leave an attribute out.

    Attribute values and texts are escaped, so names out of files may hold anything.
    """
    opened = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    if tag in _VOID:
        return Markup(opened)
    return Markup(f"{opened}{join(children)}</{tag}>")


def chart_card(eyebrow: str, finding: str, *content: Child) -> Markup:
    """A figure in a frame, under a line that says what it is of and one that says what it shows."""
    spans = el("span", eyebrow, class_="eyebrow"), el("span", finding, class_="finding")
    return el("figure", el("figcaption", *spans), *content, class_="card chartcard")


def join(children: Child) -> Markup:
    """Children one behind the other; None is nothing."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(visible(children)))
    return Markup("".join(map(join, children)))


def visible(text: str) -> str:
    """Text with what a page cannot hold (control characters, lone surrogates) replaced by a sign."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t " else "\N{REPLACEMENT CHARACTER}" for c in text)


def _attribute(name: str, value: Value) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    text = f"{value:.6g}" if isinstance(value, float) else visible(str(value))
    return f' {key}="{escape(text)}"'
