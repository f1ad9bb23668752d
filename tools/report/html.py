"""Pages that are safe to show: HTML and SVG without injections, numbers as written, who may look."""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from email.message import Message
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Union
from urllib.parse import parse_qs

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Headers = Mapping[str, str] | Message
COOKIE = "torchrelay"
SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Access:
    """Without a token only this machine is served, under a name of itself; with one, whoever knows it."""

    port: int
    token: str | None = None

    def host_fits(self, host: str | None) -> bool:
        """Whether the Host header names this machine.

        A page of another site whose name was made to lead here (DNS rebinding) sends that name. With a
        token it cannot know what it would have to send.
        """
        if self.token is not None:
            return True
        name, _, port = (
            (host or "").rpartition(":")
            if (host or "").rpartition(":")[2].isdecimal()
            else (host or "", "", "80")
        )
        return is_loopback(name.strip("[]").lower()) and port == str(self.port)

    def token_fits(self, query: str, headers: Headers) -> bool:
        """Whether a request carries the token: as a bearer, a cookie, or `?token=`."""
        if self.token is None:
            return True
        return any(
            _same(one, self.token) for one in (_bearer(headers), _cookie(headers), token_in(query)) if one
        )


def checked(host: str, port: int, token: str | None) -> Access:
    """The access of a server at an address; raises UsageError where others could look without a token."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise UsageError(
            f"the token is too short or has other signs than letters and digits: give at least "
            f"{SHORTEST_TOKEN} of these, for example those that openssl rand -hex 16 prints"
        )
    if token is None and not is_loopback(host.lower()):
        raise UsageError(
            f"--host {host} lets other machines look at every run: give a --token that they must know, or "
            "leave --host out and come through an ssh tunnel"
        )
    return Access(port, token)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine, for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_in(query: str) -> str:
    """What a query string gives as `token`; empty where it does not."""
    try:
        return parse_qs(query, max_num_fields=16).get("token", [""])[0]
    except ValueError:
        return ""


def _bearer(headers: Headers) -> str:
    kind, _, value = (headers.get("Authorization") or "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("Cookie") or "").get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(said: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(said.encode(errors="replace"), token.encode())


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


def number(value: float) -> str:
    """A measured value in at most four figures; nan and inf by name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else "\N{MINUS SIGN}\N{INFINITY}"
    text = f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def seconds(value: float) -> str:
    """`4.2 ms`, `3.1 s`, `12 min`, `5 h 20 min`."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    if value < 99.5:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def moment(value: float | None) -> str:
    """A time in UTC; what no clock can have said is written as it is."""
    if value is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return str(value)


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    percent = 100 * part / whole if whole > 0 else 0.0
    return f"{percent:.0f} %" if 9.95 <= percent < 9999.5 else f"{percent:.2g} %"


def count(number_of: int, one: str, many: str | None = None) -> str:
    """`1 epoch`, `7 epochs`."""
    return f"{number_of} {one if number_of == 1 else many or one + 's'}"


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
