"""The sections of checkpoints, sizes and history: committed epochs, what they wrote, how a run came to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Figure,
    PageSection,
    Scale,
    Shape,
    Table,
    brief,
    count,
    rect,
    share,
    value_axis,
    whole_ticks,
    word,
)
from torchrelay.tools.report.run_data import BlobBytes, BranchNote, EpochBytes, EpochRow, Event, RunFacts

_TONES = {"chosen": "good", "older": "calm", "not reached": "calm", "abandoned": "faded"}


def checkpoints(runs: Sequence[RunFacts]) -> PageSection | None:
    """A table per run, newest epoch first; None where no epoch is committed."""
    known = [run for run in runs if run.epochs]
    if not known:
        return None
    rows = [(run, run.best[0] if run.best else "", _best(run)) for run in known]
    return PageSection("checkpoints", "Checkpoints", _finding(known), {"runs": rows})


def tone_of(row: EpochRow) -> str:
    """The class of the colour of its standing."""
    return _TONES.get(row.standing, "bad")


def _best(run: RunFacts) -> list[EpochRow]:
    """The rows of the best epoch."""
    best = run.best_point[0] if run.best_point else None
    return [one for one in run.epochs if one.epoch == best and not one.step and one.standing != "abandoned"]


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


_MOST_BLOBS = 12
_BAR_LEFT, _BAR_ROW = 58, 34


def sizes(runs: Sequence[RunFacts]) -> PageSection | None:
    """How large epochs are, and why; None where no epoch is committed."""
    known = [run for run in runs if run.sizes]
    if not known:
        return None
    content = {
        "legend": [("written", "written by the epoch"), ("referenced", "referenced in an earlier epoch")],
        "runs": [(run, [_blobs(run.sizes[-1]), _epochs(run.sizes)], _size_table(run)) for run in known],
    }
    return PageSection("sizes", "Sizes", _size_finding(known), content)


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


def _blobs(epoch: EpochBytes) -> Figure:
    label = f"Bytes by blob at epoch {epoch.epoch}"
    return Figure(f"epoch {epoch.epoch}", label, row_chart(label, _shown(epoch.blobs)))


def _epochs(epochs: Sequence[EpochBytes]) -> Figure:
    bars = []
    for one in epochs:
        written = sum(blob.written for blob in one.blobs)
        bars.append(BlobBytes(str(one.epoch), written, _total(one) - written))
    fresh, whole = sum(one.written for one in bars), sum(one.total for one in bars)
    return Figure(
        f"{count(len(bars), 'epoch')} looked at",
        f"Of {human_bytes(whole)}, {human_bytes(fresh)} were written",
        column_chart("Bytes by epoch, written and referenced", bars, "epoch"),
    )


def _size_table(run: RunFacts) -> Table:
    newest = run.sizes[-1]
    rows = [
        (one.blob, human_bytes(one.total), human_bytes(one.written), human_bytes(one.referenced))
        for one in newest.blobs[:400]
    ]
    summary = f"Blobs of epoch {newest.epoch} of {run.name}"
    return Table(summary, ("blob", "bytes", "written", "referenced"), rows, numeric=True)


def column_chart(label: str, bars: Sequence[BlobBytes], what: str) -> Chart:
    """Bytes side by side, with the names of at most eight below; `what` is what the names are."""
    y = Scale(0.0, (max(one.total for one in bars) or 1) * 1.05, HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - _BAR_LEFT - RIGHT) / len(bars)
    every, width = -(-len(bars) // 8), max(0.8, slot * 0.72)
    shapes = value_axis(y, _BAR_LEFT, lambda value: human_bytes(int(value)), 4)
    for index, one in enumerate(bars):
        left, middle, end = _BAR_LEFT + (index + 0.14) * slot, y(one.written), y(one.total)
        parts = (
            rect("written", left, middle, width, y.start - middle),
            rect("referenced", left, end, width, middle - end),
        )
        shapes.append(_stack(one, parts, f"{what} "))
        if index % every == 0:
            shapes.append(word(one.blob, _BAR_LEFT + (index + 0.5) * slot, HEIGHT - 9))
    shapes.append(word(what, 4, HEIGHT - 9, "tick axisname"))
    return Chart(label, WIDTH, HEIGHT, shapes)


def row_chart(label: str, bars: Sequence[BlobBytes]) -> Chart:
    """Bytes as rows, with name and value above each bar."""
    x = Scale(0.0, max((one.total for one in bars), default=0) or 1, 8, WIDTH - 12)
    shapes = []
    for index, one in enumerate(bars):
        y, middle = index * _BAR_ROW + 4, x(one.written)
        name = brief(one.blob, 40)
        parts = (
            word(name, 8, y + 10, "tick"),
            word(human_bytes(one.total), WIDTH - 12, y + 10, "tick end"),
            rect("written", 8, y + 14, middle - 8, 9),
            rect("referenced", middle, y + 14, x(one.total) - middle, 9),
        )
        shapes.append(_stack(one, parts))
    return Chart(label, WIDTH, _BAR_ROW * len(bars) + 8, shapes)


def _stack(one: BlobBytes, parts: Sequence[Shape], what: str = "") -> Shape:
    said = f"{human_bytes(one.written)} written, {human_bytes(one.referenced)} referenced"
    return Shape("g", "", title=f"{what}{one.blob}: {said}", inside=parts)


_STORY_ROW = 44
_MOST_BRANCHES = 40
_MOST_DOTS = 200
_BAD = frozenset({"failure", "save failed", "quarantine", "warning", "preempted", "short epoch", "rewind"})

_USUAL = frozenset({"start", "end", "saved", "retire"})
"""What every run has: the sections about time and checkpoints show it."""


def story(runs: Sequence[RunFacts]) -> PageSection | None:
    """Branches, stages, events; None where there are none but begins, ends and saves."""
    known = [
        run
        for run in runs
        if len(run.branches) > 1
        or run.upstream
        or any(one.kind not in _USUAL for one in (*run.events, *run.happened))
    ]
    if not known:
        return None
    parts = [
        (
            run,
            _tree(run) if len(run.branches) > 1 else None,
            notable(run),
            _in_time((*run.events, *run.happened)),
        )
        for run in known
    ]
    return PageSection("story", "Events", _story_finding(runs), {"runs": parts})


def notable(run: RunFacts) -> list[Event]:
    """What fell back, failed or was thrown away, from events and log records, in the order of time."""
    return _in_time(one for one in (*run.events, *run.happened) if one.kind in _BAD)


def _in_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda one: (one.time is None, one.time or 0.0))


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
    return f"Events: {', '.join(words)}" if words else "No failures and no fallbacks"


def _tree(run: RunFacts) -> Chart:
    """A row per branch over epochs, joined to its parent where it began. Places are shares of the width."""
    branches = run.branches[-_MOST_BRANCHES:]
    rows = {one.id: index * _STORY_ROW + 30 for index, one in enumerate(branches)}
    last = max([1, *(epoch for one in branches for epoch in one.epochs), *(_base(one) for one in branches)])
    x = Scale(0.0, float(last), 2.0, 98.0)
    height = _STORY_ROW * len(branches) + 26
    drawn = [_branch(one, rows, x) for one in branches]
    names = [_text(str(one), f"{x(one):.2f}%", height - 6) for one in whole_ticks(0, last, 8)]
    return Chart(f"Branches of {run.name} over epochs", 0, height, [*drawn, *names], "bars")


def _base(branch: BranchNote) -> int:
    return int(branch.base.partition("+")[0]) if branch.base else 0


def _branch(branch: BranchNote, rows: dict[int, int], x: Scale) -> Shape:
    y, begin = rows[branch.id], _base(branch)
    counted = [epoch for epoch in branch.epochs if epoch not in branch.abandoned]
    last, end = max([begin, *counted]), max([begin, *branch.epochs])
    title = f"branch {branch.id}: {branch.how}"
    shapes: list[Shape] = []
    if branch.parent is not None and branch.parent in rows:
        shapes.append(_twig("current", (begin, begin), (rows[branch.parent], y), x))
    if end > last:
        shapes.append(_twig("past", (last, end), (y, y), x))
    shapes.append(_twig("current", (begin, last), (y, y), x))
    for epoch in branch.epochs[:: max(1, len(branch.epochs) // _MOST_DOTS)]:
        style = f"twigdot {'past' if epoch in branch.abandoned else 'current'}"
        place: dict[str, float | str] = {"cx": f"{x(epoch):.2f}%", "cy": y, "r": 4}
        shapes.append(Shape("circle", style, place))
    late = begin > end / 2  # then there is more room to the left
    place_of, style = ("100%", "tick end") if late else (f"{x(begin) - 1:.2f}%", "tick")
    shapes.append(_text(title, place_of, y - 12, style))
    return Shape("g", "", title=title, inside=shapes)


def _twig(style: str, epochs: tuple[int, int], rows: tuple[int, int], x: Scale) -> Shape:
    left, right = (f"{x(one):.2f}%" for one in epochs)
    return Shape("line", f"twig {style}", {"x1": left, "x2": right, "y1": rows[0], "y2": rows[1]})


def _text(text: str, x: str, y: float, style: str = "tick middle") -> Shape:
    return Shape("text", style, {"x": x, "y": y}, text)
