"""The head of the page: what the runs came to, a card per run, and what could not be read."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.report.facts import RunFacts
from torchrelay.runners.report.markup import Child, Markup, el
from torchrelay.runners.report.parts import pairs
from torchrelay.runners.report.timeline import wall_secs
from torchrelay.runners.report.wording import count, moment, number, seconds

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
