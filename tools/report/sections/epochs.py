"""The sections of checkpoints and sizes: every committed epoch, its state, and what it wrote of each blob."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import Scale, ticks
from torchrelay.tools.report.html import (
    Child,
    Markup,
    chart_card,
    count,
    el,
    legend,
    number,
    of_run,
    scrolling,
    section,
    share,
    table,
)
from torchrelay.tools.report.run_data import BlobBytes, EpochBytes, EpochRow, RunFacts

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
