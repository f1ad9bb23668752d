"""The OpenAPI document as a page for people: one file, no script, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from torchrelay.tools.report.html import Markup, el

_STYLE = Markup(
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}code,pre{font:13px/1.5 ui-monospace,monospace}"
    "pre{overflow:auto;padding:.8rem}td{padding:.2rem .8rem .2rem 0;vertical-align:top}"
)
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(document: dict[str, Any]) -> str:
    """The page of a document of `openapi.description`."""
    info = document["info"]
    operations = [
        _operation(path, method, told)
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]
    head = el("head", el("meta", charset="utf-8"), el("title", info["title"]), el("style", _STYLE))
    body = el(
        "body",
        el("h1", info["title"]),
        el("p", info["description"]),
        el("p", "The same for programs: ", el("a", "/openapi.json", href="/openapi.json")),
        operations,
    )
    return f"<!doctype html>{el('html', head, body, lang='en')}"


def _operation(path: str, method: str, told: dict[str, Any]) -> list[Markup]:
    found = [el("h2", el("code", f"{method.upper()} {path}")), el("p", told["summary"])]
    if "requestBody" in told:
        schema = told["requestBody"]["content"]["application/json"]["schema"]
        found += [el("h3", "Body"), el("pre", json.dumps(schema, indent=1))]
        cells = [
            el("tr", el("td", el("code", code)), el("td", one["description"]))
            for code, one in told["responses"].items()
        ]
        found += [el("h3", "Answers"), el("table", cells)]
    return found
