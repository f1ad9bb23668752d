"""The whole page, one file that asks nothing of any network; its head, and who each run is."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torchrelay
from torchrelay.errors import RelayError
from torchrelay.jobs.config.yaml_reader import read_yaml
from torchrelay.tools.report.curves import curves, norms
from torchrelay.tools.report.epochs import epochs_table, sizes, story
from torchrelay.tools.report.html import (
    Child,
    Markup,
    count,
    el,
    moment,
    number,
    of_run,
    pairs,
    scrolling,
    seconds,
    section,
    table,
)
from torchrelay.tools.report.run_data import RunFacts
from torchrelay.tools.report.timeline import heat, timeline, wall_secs

_WORDS = {
    "FINISHED": ("finished", "good"),
    "RUNNING": ("running", "busy"),
    "STOPPED": ("stopped", "calm"),
    "PREEMPTED": ("preempted", "calm"),
    "FAILED": ("failed", "bad"),
}
_MOST_TROUBLE = 40


def headline(runs: Sequence[RunFacts]) -> str:
    """The page's title: what happened, in one line."""
    if len(runs) > 1:
        jobs = {run.job for run in runs if run.job}
        return f"{count(len(runs), 'run')} of {jobs.pop()}" if len(jobs) == 1 else count(len(runs), "run")
    run = runs[0]
    word, _ = state_of(run)
    at = f" at epoch {run.epoch}" if run.epoch is not None else ""
    return f"{run.name} {'is ' if word == 'running' else ''}{word}{at}"


def state_of(run: RunFacts) -> tuple[str, str]:
    """A word for people and the class of its colour. A run that cannot be alive is not called running."""
    if run.state == "RUNNING" and run.stands.word != "running":
        return run.stands.shown, "bad"
    if run.state is None:
        return ("has no status", "calm") if run.epochs or run.identity else ("is unreadable", "bad")
    return _WORDS.get(run.state, (run.state.lower(), "calm"))


def overview(runs: Sequence[RunFacts]) -> Markup:
    """Cards, then what could not be read."""
    return el(
        "section",
        el("div", [_card(run, at % 8 + 1) for at, run in enumerate(runs)], class_="runs"),
        [_trouble(run, len(runs) > 1) for run in runs if run.trouble],
        id="overview",
        aria_label="overview",
    )


def best_text(run: RunFacts) -> str:
    """`val/acc 0.9933 at epoch 6`; empty where the run names no best metric or has no value of it."""
    if run.best is None or run.best_point is None:
        return ""
    epoch, value = run.best_point
    return f"{run.best[0]} {number(value)} at epoch {epoch}"


def _card(run: RunFacts, colour: int) -> Markup:
    word, tone = state_of(run)
    return el(
        "article",
        el("h3", el("span", class_=f"chip s{colour}", aria_hidden="true"), run.name),
        el("p", el("span", word, class_=f"state {tone}"), _stand(run), class_="standing"),
        pairs([(name, value) for name, value in _facts(run) if value]),
        class_="card run",
    )


def _stand(run: RunFacts) -> Child:
    text = f" at epoch {run.epoch}" if run.epoch is not None else ""
    if run.state == "RUNNING" and run.updated is not None and run.stands.word == "running":
        text += f", last word {moment(run.updated)}"
    return text


def _facts(run: RunFacts) -> list[tuple[str, Child]]:
    reason = run.stands.why if run.state == "RUNNING" else run.exit_reason
    exit_code = "" if run.exit_code is None else f" (exit {run.exit_code})"
    return [
        ("best", best_text(run)),
        ("job", run.job),
        (
            "why it ended" if run.state != "RUNNING" or run.stands.word == "interrupted" else "",
            f"{reason}{exit_code}" if reason else "",
        ),
        ("went on for", _went_on(run)),
        ("attempts", str(len(run.attempts)) if run.attempts else ""),
        (
            "hosts",
            ", ".join(run.hosts[:8]) + (f" and {len(run.hosts) - 8} more" if len(run.hosts) > 8 else ""),
        ),
        ("began", moment(run.created) if run.created is not None else ""),
        ("a start now", run.start_now.removeprefix("a start now ")),
        ("directory", el("code", run.path)),
    ]


def _went_on(run: RunFacts) -> str:
    return seconds(wall_secs(run)) if run.attempts else ""


def _trouble(run: RunFacts, many: bool) -> Markup:
    shown = run.trouble[:_MOST_TROUBLE]
    more = len(run.trouble) - len(shown)
    of = f" of {run.name}" if many else ""
    return el(
        "div",
        el("h3", f"{count(len(run.trouble), 'thing')}{of} could not be read, or not be trusted"),
        el("ul", [el("li", one) for one in shown], el("li", f"and {more} more") if more > 0 else None),
        class_="card trouble",
        role="alert",
    )


_LEFT_OUT = frozenset({"format", "uuid", "created"})
_MOST_FIELDS = 400


def configs(runs: Sequence[RunFacts]) -> Markup:
    """What each run was, and differences first where there are several."""
    fields = [flat(run) for run in runs]
    if len(runs) == 1:
        run = runs[0]
        return section("config", _one(run), el("div", _table(runs, fields), class_="card"), _source(run))
    names = _names(fields)
    differ = [name for name in names if len({one.get(name) for one in fields}) > 1]
    title = (
        f"{count(len(differ), 'setting')} differ between the runs" if differ else "The runs were set up alike"
    )
    return section(
        "config",
        title,
        el("div", _table(runs, fields), class_="card"),
        [of_run(run.name, True, _source(run)) for run in runs if run.config],
    )


def flat(run: RunFacts) -> dict[str, str]:
    """`run.json` and the configuration as one level of names; what says who a run is, is left out."""
    found: dict[str, str] = {}
    said = {name: value for name, value in run.identity.items() if name not in _LEFT_OUT}
    command = said.pop("command", None)
    if isinstance(command, list):
        found["command"] = " ".join(map(str, command))
    _flatten("", said, found)
    _flatten("config", _parsed(run.config), found)
    return found


def _parsed(text: str | None) -> Any:
    if text is None:
        return {}
    try:
        return read_yaml(text.encode(), "config/resolved.yaml").value
    except RelayError:
        return {}  # the text itself is shown below


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and len(into) < _MOST_FIELDS:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    elif prefix and prefix != "config":
        into[prefix] = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _names(fields: Sequence[Mapping[str, str]]) -> list[str]:
    """All names, those that differ first."""
    every = list(dict.fromkeys(name for one in fields for name in one))
    return sorted(every, key=lambda name: len({one.get(name) for one in fields}) < 2)


def _table(runs: Sequence[RunFacts], fields: Sequence[Mapping[str, str]]) -> Markup:
    rows: list[list[Child]] = []
    classes: list[str] = []
    for name in _names(fields):
        values = [one.get(name) for one in fields]
        differs = len(set(values)) > 1
        rows.append([name, *(el("code", "\N{EN DASH}" if one is None else one) for one in values)])
        classes.append("differs" if differs else "")
    columns = ["setting", *(run.name for run in runs)]
    return scrolling("settings", table(columns, rows, row_classes=classes))


def _source(run: RunFacts) -> Markup | None:
    if run.config is None:
        return None
    return el(
        "details", el("summary", f"config/resolved.yaml of {run.name}"), el("pre", run.config), class_="card"
    )


def _one(run: RunFacts) -> str:
    world = run.identity.get("world_size")
    ranks = f" on {count(world, 'rank')}" if type(world) is int else ""
    return (
        f"Started{ranks} by this command"
        if run.identity.get("command")
        else "How it was started is not known"
    )


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
