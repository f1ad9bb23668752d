"""The whole page: one file that asks nothing of any network."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torchrelay
from torchrelay.tools.report.html import Child, Markup, el, moment
from torchrelay.tools.report.run_data import RunFacts
from torchrelay.tools.report.sections.curves import curves
from torchrelay.tools.report.sections.epochs import epochs_table, sizes
from torchrelay.tools.report.sections.overview import configs, headline, overview
from torchrelay.tools.report.sections.story import story
from torchrelay.tools.report.sections.timeline import heat, timeline
from torchrelay.tools.report.sections.weights import norms

_ASSETS = Path(__file__).with_name("assets")
_LINKS = (
    ("metrics", "Metrics"),
    ("time", "Time"),
    ("saves", "Saves"),
    ("sizes", "Sizes"),
    ("weights", "Weights"),
    ("checkpoints", "Checkpoints"),
    ("story", "Events"),
    ("config", "Config"),
)


def report_page(runs: Sequence[RunFacts], *, live: str | None = None, back: str | None = None) -> str:
    """The page of some runs as HTML. A `live` one, which is its tag, asks its server again; others nobody.

    `back` is a path to return to, where there is one.
    """
    nav = [el("a", text, href=f"#{name}") for name, text in _LINKS]
    body = [
        overview(runs),
        curves(runs),
        timeline(runs),
        heat(runs),
        sizes(runs),
        norms(runs),
        epochs_table(runs),
        story(runs),
        configs(runs),
    ]
    home = el("a", "All runs", href=back) if back else None
    return whole_page(headline(runs), [home, *nav], body, live=live)


def whole_page(title: str, nav: Sequence[Child], body: Child, *, live: str | None = None) -> str:
    """A page in the house's form: head, navigation, content, the policy that forbids the network."""
    style, script = asset("report.css"), asset("report.js")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy(live=live is not None)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", f"{title} · torchrelay"),
        el("style", Markup(style)),
    )
    top = el(
        "header",
        el("div", el("p", "torchrelay", class_="brand"), el("h1", title), class_="titles"),
        el("button", "Dark", type="button", id="theme", hidden=True),
        el("nav", *nav, aria_label="sections"),
        class_="top",
    )
    said = f"torchrelay {torchrelay.__version__}, written {moment(time.time())}"
    page = el(
        "html",
        head,
        el(
            "body",
            el("a", "To the content", href="#main", class_="skip"),
            top,
            el("main", body, id="main"),
            el("footer", el("p", "live, asked again every few seconds" if live else said)),
            el("div", id="tip", hidden=True, role="status"),
            el("script", Markup(script)),
            data_live=live,
        ),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def policy(*, live: bool) -> str:
    """What a browser may load for the page: nothing from anywhere, and only our own script and style.

    They are named by their digests, so markup that slipped in could neither run nor fetch. A live page
    may ask its own server.
    """
    rules = {
        "default-src": "'none'",
        "script-src": _digest("report.js"),
        "style-src": _digest("report.css"),
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def asset(name: str) -> str:
    """A file of `assets/`, which must not be able to end the element it is put into."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    return f"'sha256-{b64encode(sha256(asset(name).encode()).digest()).decode()}'"
