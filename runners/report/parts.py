"""Pieces that several sections share: sections, tables, legends, regions that scroll."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.report.markup import Child, Markup, el


def section(name: str, title: str, *children: Child) -> Markup:
    """A section of the page; `name` is its anchor and the key of what a reader opened in it."""
    return el(
        "section", el("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title"
    )


def of_run(name: str, many: bool, *children: Child) -> Markup:
    """A part that concerns one run, under its name where there are several."""
    return el("div", el("h3", name) if many else None, *children, class_="ofrun")


def scrolling(label: str, *children: Child) -> Markup:
    """A region that scrolls sideways by itself, so that the page need not; reachable by keyboard."""
    return el("div", *children, class_="scroll", role="region", aria_label=label, tabindex="0")


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Child]],
    *,
    numeric: bool = False,
    row_classes: Sequence[str] = (),
) -> Markup:
    """A table; `numeric` aligns all but the first column to the right."""
    classes = row_classes or [""] * len(rows)
    return el(
        "table",
        el("thead", el("tr", [el("th", one, scope="col") for one in columns])),
        el("tbody", [_row(row, name) for row, name in zip(rows, classes, strict=True)]),
        class_="numeric" if numeric else None,
    )


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Pairs of a kind (classes of what the charts draw) and a text."""
    return el("ul", [el("li", _swatch(kind), text) for kind, text in entries], class_="legend")


def pairs(entries: Sequence[tuple[str, Child]]) -> Markup:
    """Names and values."""
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in entries])


def _row(cells: Sequence[Child], name: str) -> Markup:
    first, *rest = cells
    return el("tr", el("th", first, scope="row"), [el("td", one) for one in rest], class_=name or None)


def _swatch(kind: str) -> Markup:
    word, _, more = kind.partition(" ")
    if word == "line":
        shape = el("path", d="M1 6h20", class_=f"line {more}")
    elif word == "sign":
        back = {"resume": "M8 2l7 4l-7 4z", "rewind": "M14 2l-7 4l7 4z"}.get(more, "M7 3l4 7l4 -7z")
        shape = el("path", d=back, class_="sign")
    elif word == "best":
        shape = el("circle", cx=11, cy=6, r=4.5, class_="best s1")
    else:
        shape = el("rect", x=5, y=0, width=12, height=12, rx=2, class_=kind)
    return el("svg", shape, viewBox="0 0 22 12", class_="swatch", aria_hidden="true")
