"""The section of how a run came to be: branches, upstream stages, and what happened on the way."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.tools.report.charts import Scale, whole_ticks
from torchrelay.tools.report.html import Markup, count, el, moment, of_run, scrolling, section, table
from torchrelay.tools.report.run_data import BranchNote, Event, RunFacts

WIDTH = 920
_LEFT, _RIGHT, _ROW = 110, 24, 44
_MOST_BRANCHES = 40
_MOST_DOTS = 200
_MOST_EVENTS = 200
_BAD = frozenset(
    {"failure", "save failed", "quarantine", "warning", "preempted", "short epoch", "rewind", "retire"}
)


def story(runs: Sequence[RunFacts]) -> Markup:
    """Branches, stages, events."""
    many = len(runs) > 1
    return section("story", _finding(runs), [of_run(run.name, many, *_parts(run)) for run in runs])


def notable(run: RunFacts) -> list[Event]:
    """What fell back, failed or was thrown away, from events and log records, in the order of time."""
    found = [one for one in (*run.events, *run.happened) if one.kind in _BAD]
    return sorted(found, key=lambda one: (one.time is None, one.time or 0.0))


def _finding(runs: Sequence[RunFacts]) -> str:
    failures = sum(one.kind in ("failure", "save failed") for run in runs for one in run.events)
    damage = sum(one.kind == "quarantine" for run in runs for one in run.happened)
    rewinds = sum(joint.kind == "rewind" for run in runs for joint in run.course.joints)
    falls = sum(joint.kind == "fallback" for run in runs for joint in run.course.joints)
    words = [
        count(amount, what)
        for amount, what in (
            (failures, "failure"),
            (damage, "damaged epoch"),
            (falls, "fallback"),
            (rewinds, "rewind"),
        )
        if amount
    ]
    return f"On the way: {', '.join(words)}" if words else "Nothing failed, nothing fell back"


def _parts(run: RunFacts) -> list[Markup | None]:
    return [
        _tree(run) if len(run.branches) > 1 else None,
        _upstream(run) if run.upstream else None,
        _events(f"What fell back, failed or was given up in {run.name}", notable(run), opened=True),
        _events(
            f"Everything that {run.name} noted",
            sorted((*run.events, *run.happened), key=lambda one: (one.time is None, one.time or 0.0)),
        ),
    ]


def _tree(run: RunFacts) -> Markup:
    """A row per branch over epochs, joined to its parent where it began."""
    branches = run.branches[-_MOST_BRANCHES:]
    rows = {one.id: index for index, one in enumerate(branches)}
    last = max([1, *(epoch for one in branches for epoch in one.epochs), *(_base(one) for one in branches)])
    x = Scale(0.0, float(last), _LEFT, WIDTH - _RIGHT)
    height = _ROW * len(branches) + 30
    drawn = [_branch(one, rows, x) for one in branches]
    names = [
        el("text", str(one), x=x(one), y=height - 8, class_="tick middle") for one in whole_ticks(0, last, 12)
    ]
    label = f"Branches of {run.name} over epochs"
    return el(
        "div",
        scrolling(
            label,
            el(
                "svg",
                names,
                drawn,
                viewBox=f"0 0 {WIDTH} {height}",
                class_="wide",
                role="img",
                aria_label=label,
            ),
        ),
        el(
            "p",
            "Filled: epochs that count. Hollow: abandoned, kept until the new branch has passed them.",
            class_="quiet",
        ),
        class_="card",
    )


def _base(branch: BranchNote) -> int:
    return int(branch.base.partition("+")[0]) if branch.base else 0


def _branch(branch: BranchNote, rows: dict[int, int], x: Scale) -> Markup:
    y = rows[branch.id] * _ROW + 22
    begin = x(_base(branch))
    ends = [x(epoch) for epoch in branch.epochs]
    counts = [epoch for epoch in branch.epochs if epoch not in branch.abandoned]
    last, far = max([begin, *map(x, counts)]), max([begin + 14, *ends])
    step = max(1, len(branch.epochs) // _MOST_DOTS)
    up = None
    if branch.parent in rows:
        above = rows[branch.parent] * _ROW + 22
        up = el(
            "path",
            d=f"M{begin:.1f} {above}C{begin:.1f} {y} {begin:.1f} {y} {begin + 14:.1f} {y}",
            class_="twig current",
        )
    return el(
        "g",
        el("title", f"branch {branch.id}: {branch.how}"),
        el("text", f"branch {branch.id}", x=8, y=y - 2, class_="rowtitle"),
        el("text", branch.how, x=8, y=y + 12, class_="tick"),
        up,
        el("path", d=f"M{last:.1f} {y}H{far:.1f}", class_="twig past") if far > last else None,
        el("path", d=f"M{min([begin + (14 if up else 0), *ends]):.1f} {y}H{last:.1f}", class_="twig current"),
        [_dot(x(epoch), y, epoch in branch.abandoned) for epoch in branch.epochs[::step]],
    )


def _dot(x: float, y: float, gone: bool) -> Markup:
    return el("circle", cx=x, cy=y, r=4, class_=f"twigdot {'past' if gone else 'current'}")


def _upstream(run: RunFacts) -> Markup:
    rows = [
        el("details", el("summary", one.name), el("pre", one.text or "no text in it")) for one in run.upstream
    ]
    return el("div", el("h4", f"Made from {count(len(rows), 'stage')}"), rows, class_="card")


def _events(title: str, events: Sequence[Event], *, opened: bool = False) -> Markup | None:
    if not events:
        return None
    shown = events[-_MOST_EVENTS:]
    rows = [
        (moment(one.time), el("span", one.kind, class_="kind"), el("span", one.text, class_="why"))
        for one in shown
    ]
    summary = title + (f" (the newest {len(shown)} of {len(events)})" if len(events) > len(shown) else "")
    return el(
        "details",
        el("summary", summary),
        scrolling(title, table(("when", "what", "in words"), rows)),
        open=opened,
        class_="card",
    )
