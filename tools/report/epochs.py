"""The sections of checkpoints, sizes and history: committed epochs, what they wrote, how a run came to be."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import Scale, ticks, whole_ticks
from torchrelay.tools.report.html import (
    Child,
    Markup,
    chart_card,
    count,
    el,
    legend,
    moment,
    number,
    of_run,
    scrolling,
    section,
    share,
    table,
)
from torchrelay.tools.report.run_data import BlobBytes, BranchNote, EpochBytes, EpochRow, Event, RunFacts

_TONES = {"chosen": "good", "older": "calm", "not reached": "calm", "abandoned": "faded"}


def epochs_table(runs: Sequence[RunFacts]) -> Markup:
    """A table per run, newest epoch first."""
    known = [run for run in runs if run.epochs]
    if not known:
        return section("checkpoints", "No epoch is committed")
    many = len(runs) > 1
    return section("checkpoints", _finding(known), [of_run(run.name, many, _table(run)) for run in known])


def unused(rows: Sequence[EpochRow]) -> list[EpochRow]:
    """Those that cannot serve: damaged, not resumable, unproved."""
    return [one for one in rows if one.standing not in ("chosen", "older", "abandoned", "not reached")]


def _finding(runs: Sequence[RunFacts]) -> str:
    rows = [row for run in runs for row in run.epochs]
    bad = unused(rows)
    gone = sum(row.standing == "abandoned" for row in rows)
    total = len(rows) + sum(run.epochs_left_out for run in runs)
    if bad:
        return f"{len(bad)} of {count(total, 'checkpoint')} cannot be used"
    tail = f", {gone} of them abandoned" if gone else ""
    return f"{count(total, 'checkpoint')}{tail}, none known to be damaged"


def _table(run: RunFacts) -> Markup:
    best = run.best_point[0] if run.best_point else None
    metric = run.best[0] if run.best else None
    rows, classes = [], []
    for row in reversed(run.epochs):
        rows.append(_cells(row, metric, row.epoch == best and not row.step and row.standing != "abandoned"))
        classes.append("dim" if row.standing == "abandoned" else "")
    columns = ("epoch", "branch", "stands", metric or "", "written", "tags", "why", "try")
    label = f"Checkpoints of {run.name}"
    left = f"{count(run.epochs_left_out, 'older epoch')} not shown" if run.epochs_left_out else None
    return el(
        "div",
        scrolling(label, table(columns, rows, row_classes=classes)),
        el("p", left, class_="quiet") if left else None,
        class_="card epochs",
    )


def _cells(row: EpochRow, metric: str | None, best: bool) -> list[Child]:
    value = row.metrics.get(metric) if metric else None
    marks = [el("span", one, class_="tag") for one in row.marks]
    return [
        row.name,
        str(row.branch),
        el("span", row.standing, class_=f"state {_TONES.get(row.standing, 'bad')}"),
        [number(value) if value is not None else "", el("span", "best", class_="tag") if best else None],
        human_bytes(row.nbytes) if row.nbytes is not None else "",
        marks,
        el("span", row.reason, class_="why"),
        el("code", row.try_name),
    ]


WIDTH, HEIGHT = 360, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 28
_MOST_BLOBS = 12
_ROW = 30


def sizes(runs: Sequence[RunFacts]) -> Markup:
    """How large epochs are, and why."""
    known = [run for run in runs if run.sizes]
    if not known:
        return section("sizes", "No epoch is committed yet")
    parts = [
        of_run(
            run.name,
            len(runs) > 1,
            el("div", _blobs(run.sizes[-1]), _epochs(run.sizes), class_="charts"),
            _size_table(run),
        )
        for run in known
    ]
    return section(
        "sizes",
        _size_finding(known),
        legend([("written", "written by the epoch"), ("referenced", "referenced in an earlier epoch")]),
        parts,
    )


def _size_finding(runs: Sequence[RunFacts]) -> str:
    if len(runs) > 1:
        each = (f"{run.name} {human_bytes(_total(run.sizes[-1]))}" for run in runs)
        return f"The newest epochs: {', '.join(each)}"
    newest = runs[0].sizes[-1]
    total = _total(newest)
    if not newest.blobs or not total:
        return "The newest epoch holds no bytes"
    first = newest.blobs[0]
    saved = sum(one.referenced for one in newest.blobs)
    tail = f"; {share(saved, total)} was not written again" if saved else ""
    return f"{first.blob} is {share(first.total, total)} of an epoch of {human_bytes(total)}{tail}"


def _total(epoch: EpochBytes) -> int:
    return sum(one.total for one in epoch.blobs)


def _shown(blobs: Sequence[BlobBytes]) -> list[BlobBytes]:
    if len(blobs) <= _MOST_BLOBS:
        return list(blobs)
    rest = blobs[_MOST_BLOBS - 1 :]
    name = f"{count(len(rest), 'other blob')}"
    other = BlobBytes(name, sum(one.written for one in rest), sum(one.referenced for one in rest))
    return [*blobs[: _MOST_BLOBS - 1], other]


def _blobs(epoch: EpochBytes) -> Markup:
    blobs = _shown(epoch.blobs)
    x = Scale(0.0, max((one.total for one in blobs), default=0) or 1, 8, WIDTH - 12)
    height = _ROW * len(blobs) + 8
    rows = [_blob(one, index * _ROW + 4, x) for index, one in enumerate(blobs)]
    label = f"Bytes by blob at epoch {epoch.epoch}"
    return chart_card(
        f"epoch {epoch.epoch}",
        label,
        el("svg", rows, viewBox=f"0 0 {WIDTH} {height}", class_="chart", role="img", aria_label=label),
    )


def _blob(blob: BlobBytes, y: float, x: Scale) -> Markup:
    middle, end = x(blob.written), x(blob.total)
    text = f"{blob.blob}: {human_bytes(blob.written)} written, {human_bytes(blob.referenced)} referenced"
    return el(
        "g",
        el("title", text),
        el("text", _short(blob.blob), x=8, y=y + 10, class_="tick"),
        el("text", human_bytes(blob.total), x=WIDTH - 12, y=y + 10, class_="tick end"),
        el("rect", x=8, y=y + 14, width=max(0.0, middle - 8), height=9, class_="written"),
        el("rect", x=middle, y=y + 14, width=max(0.0, end - middle), height=9, class_="referenced"),
    )


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _epochs(epochs: Sequence[EpochBytes]) -> Markup:
    totals = [(one.epoch, sum(b.written for b in one.blobs), _total(one)) for one in epochs]
    top = max(total for _, _, total in totals) or 1
    y = Scale(0.0, top * 1.05, HEIGHT - _BOTTOM, _TOP)
    slot = (WIDTH - _LEFT - _RIGHT) / len(totals)
    bars = [_column(one, _LEFT + index * slot, slot, y) for index, one in enumerate(totals)]
    every = max(1, -(-len(totals) // 8))
    names = [
        el("text", str(epoch), x=_LEFT + (index + 0.5) * slot, y=HEIGHT - 9, class_="tick middle")
        for index, (epoch, _, _) in enumerate(totals)
        if index % every == 0
    ]
    label = "Bytes by epoch, written and referenced"
    written, whole = sum(one[1] for one in totals), sum(one[2] for one in totals)
    return chart_card(
        f"{count(len(totals), 'epoch')} looked at",
        f"Of {human_bytes(whole)}, {human_bytes(written)} were written",
        el(
            "svg",
            _grid(y),
            bars,
            names,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            class_="chart",
            role="img",
            aria_label=label,
        ),
    )


def _grid(y: Scale) -> list[Markup]:
    found = []
    for value in ticks(y, 4):
        found.append(el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y(value), y2=y(value), class_="grid"))
        found.append(el("text", human_bytes(int(value)), x=_LEFT - 6, y=y(value) + 3.5, class_="tick end"))
    return found


def _column(one: tuple[int, int, int], left: float, slot: float, y: Scale) -> Markup:
    epoch, written, total = one
    text = f"epoch {epoch}: {human_bytes(written)} written, {human_bytes(total - written)} referenced"
    width, x = max(0.8, slot * 0.72), left + slot * 0.14
    return el(
        "g",
        el("title", text),
        el("rect", x=x, y=y(written), width=width, height=max(0.0, y.start - y(written)), class_="written"),
        el("rect", x=x, y=y(total), width=width, height=max(0.0, y(written) - y(total)), class_="referenced"),
    )


def _size_table(run: RunFacts) -> Markup:
    newest = run.sizes[-1]
    rows = [
        (one.blob, human_bytes(one.total), human_bytes(one.written), human_bytes(one.referenced))
        for one in newest.blobs[:400]
    ]
    summary = f"Blobs of epoch {newest.epoch} of {run.name}"
    columns = ("blob", "bytes", "written", "referenced")
    return el("details", el("summary", summary), scrolling(summary, table(columns, rows, numeric=True)))


STORY_WIDTH = 920
_STORY_LEFT, _STORY_RIGHT, _STORY_ROW = 110, 24, 44
_MOST_BRANCHES = 40
_MOST_DOTS = 200
_MOST_EVENTS = 200
_BAD = frozenset(
    {"failure", "save failed", "quarantine", "warning", "preempted", "short epoch", "rewind", "retire"}
)


def story(runs: Sequence[RunFacts]) -> Markup:
    """Branches, stages, events."""
    many = len(runs) > 1
    return section("story", _story_finding(runs), [of_run(run.name, many, *_parts(run)) for run in runs])


def notable(run: RunFacts) -> list[Event]:
    """What fell back, failed or was thrown away, from events and log records, in the order of time."""
    found = [one for one in (*run.events, *run.happened) if one.kind in _BAD]
    return sorted(found, key=lambda one: (one.time is None, one.time or 0.0))


def _story_finding(runs: Sequence[RunFacts]) -> str:
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
    x = Scale(0.0, float(last), _STORY_LEFT, STORY_WIDTH - _STORY_RIGHT)
    height = _STORY_ROW * len(branches) + 30
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
                viewBox=f"0 0 {STORY_WIDTH} {height}",
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
    y = rows[branch.id] * _STORY_ROW + 22
    begin = x(_base(branch))
    ends = [x(epoch) for epoch in branch.epochs]
    counts = [epoch for epoch in branch.epochs if epoch not in branch.abandoned]
    last, far = max([begin, *map(x, counts)]), max([begin + 14, *ends])
    step = max(1, len(branch.epochs) // _MOST_DOTS)
    up = None
    if branch.parent in rows:
        above = rows[branch.parent] * _STORY_ROW + 22
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
