"""The sections with numbers in charts: metrics, norms of weights and updates, sizes of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Cell,
    Chart,
    EpochMarker,
    Figure,
    PageSection,
    Scale,
    Series,
    Shape,
    Steps,
    Table,
    brief,
    count,
    hue,
    line_chart,
    number,
    rect,
    shade,
    share,
    value_axis,
    word,
)
from torchrelay.tools.report.run_data import (
    BlobBytes,
    EpochBytes,
    LeafNorm,
    Norms,
    Point,
    RunFacts,
)

_MOST_CHARTS = 60
_TABLE_ROWS = 400
_JOINED = {"resume": "resumed from", "rewind": "rewound to", "fallback": "fell back, after damage, to"}


def metrics(runs: Sequence[RunFacts]) -> PageSection | None:
    """All metrics of all runs; None where none was logged.

    A metric that was also logged within epochs has its chart by step beside the one by epoch.
    """
    names = metric_names(runs)
    by_step = {name for run in runs for one in run.steps for name in one.metrics}
    if not names and not by_step:
        return None
    shown = [*names, *sorted(by_step.difference(names))][:_MOST_CHARTS]
    measured = [one.epoch for run in runs for one in _all_points(run)]
    span = (min(measured), max(measured)) if measured else None
    counts = step_counts(runs)
    figures = []
    for index, name in enumerate(shown):
        if name in names:
            lines = [one for at, run in enumerate(runs) for one in _series(name, run, at + 1)]
            marks = [one for at, run in enumerate(runs) for one in _marks(name, run, at + 1)]
            ends = [(run, _pairs(name, run.course.points)) for run in runs]
            title = finding_of(name, runs[0]) if len(runs) == 1 else _compared(name, ends, "epoch")
            charts = _charts(f"{name} over epochs. {title}", lines, marks, span=span, counts=counts)
            figures.append(Figure("by epoch", title, *charts, f"log-{index}"))
        if name in by_step:
            points = [
                tuple((one.step, one.metrics[name]) for one in run.steps if name in one.metrics)
                for run in runs
            ]
            ends = list(zip(runs, points, strict=True))
            lines = [Series(run.name, at + 1, own) for at, (run, own) in enumerate(ends) if own]
            title = _trend(name, points[0], "step") if len(runs) == 1 else _compared(name, ends, "step")
            charts = _charts(f"{name} over steps. {title}", lines, unit="step", counts=counts)
            figures.append(Figure("by step", title, *charts, f"log-step-{index}"))
    more = len(names) - _MOST_CHARTS
    content = {
        "legend": _legend(runs),
        "figures": figures,
        "note": f"{count(more, 'metric')} more: in the table below" if more > 0 else "",
        "tables": [_table(run, names) for run in runs if run.course.points],
    }
    return PageSection("metrics", "Metrics", _finding(runs), content)


def step_counts(runs: Sequence[RunFacts]) -> Steps:
    """The step at the end of each epoch; empty where no steps were counted, or the runs disagree."""
    found: dict[int, int] = {}
    for run in runs:
        for one in run.course.points:
            if one.step is not None and found.setdefault(one.epoch, one.step) != one.step:
                return ()
    pairs = sorted(found.items())
    rising = all(before[1] < after[1] for before, after in pairwise(pairs))
    return pairs if rising and any(epoch != step for epoch, step in pairs) else ()


def metric_names(runs: Sequence[RunFacts]) -> list[str]:
    """All metrics: those that define the best epoch first, then by the part before the slash and by name."""
    names = {name for run in runs for point in _all_points(run) for name in point.metrics}
    best = {run.best[0] for run in runs if run.best}
    return sorted(names, key=lambda name: (name not in best, name.rpartition("/")[0], name))


Measured = Sequence[tuple[int, float]]
"""Values by epoch or by step."""


def finding_of(name: str, run: RunFacts) -> str:
    """The title of the chart of one metric of one run: it names only values that the chart draws."""
    points = _pairs(name, run.course.points)
    if not points:
        return f"{name} was only measured on abandoned epochs"
    best = run.best_point if run.best and run.best[0] == name else None
    if best is None or not all(math.isfinite(value) for _, value in points):
        return _trend(name, points, "epoch")
    shown, last = number(best[1]), number(points[-1][1])
    rest = "" if shown == last else f", {last} at the end"
    return f"{name} is best at epoch {best[0]}: {shown}{rest}"


def _trend(name: str, points: Measured, unit: str) -> str:
    odd = next(((at, value) for at, value in points if not math.isfinite(value)), None)
    if odd is not None:
        return f"{name} is {number(odd[1])} at {unit} {odd[0]}"
    (first, began), (last, ended) = points[0], points[-1]
    if first == last:
        return f"{name} is {number(ended)} at {unit} {last}"
    if number(began) == number(ended):
        return f"{name} begins and ends at {number(ended)}"
    return f"{name} went from {number(began)} to {number(ended)}"


def _compared(name: str, measured: Sequence[tuple[RunFacts, Measured]], unit: str) -> str:
    """The title of a chart of several runs, by the values at their ends."""
    known = [(points[-1][1], run.name) for run, points in measured if points]
    if not known:
        return f"{name} was only measured on abandoned epochs"
    if len(known) == 1:
        name_of, points = next((run.name, points) for run, points in measured if points)
        return f"{_trend(name, points, unit)} in {name_of}"
    odd = [run for value, run in known if not math.isfinite(value)]
    if odd:
        return f"{name} is not finite at the end of {', '.join(odd)}"
    low, high = min(known), max(known)
    if number(low[0]) == number(high[0]):
        return f"{name} ends at {number(low[0])} in all runs"
    return f"{name} ends at {number(high[0])} in {high[1]}, {number(low[0])} in {low[1]}"


def _charts(
    label: str, series: Sequence[Series], marks: Sequence[EpochMarker] = (), **options: Any
) -> tuple[Chart | None, Chart | None]:
    """The chart, and one with a logarithmic scale if that shows all finite values, and there are some."""
    values = [value for one in series for _, value in one.points if math.isfinite(value)]
    positive = bool(values) and min(values) > 0
    log = line_chart(f"{label}, logarithmic", series, marks, log=True, **options) if positive else None
    return line_chart(label, series, marks, **options), log


def _series(name: str, run: RunFacts, colour: int) -> list[Series]:
    old = [
        Series(f"{run.name}, abandoned", colour, pairs, stale=True)
        for stretch in run.course.abandoned
        if len(pairs := _pairs(name, stretch)) > 0
    ]
    pairs = _pairs(name, run.course.points)
    return [*old, Series(run.name, colour, pairs)] if pairs else old


def _pairs(name: str, points: Sequence[Point]) -> tuple[tuple[int, float], ...]:
    return tuple((one.epoch, one.metrics[name]) for one in points if name in one.metrics)


def _marks(name: str, run: RunFacts, colour: int) -> list[EpochMarker]:
    numbers = {one.generation: one.number for one in run.attempts if one.number is not None}
    found = []
    for one in run.course.joints:
        known = one.generation in numbers
        who = f"attempt {numbers[one.generation]}" if known else "a later start"
        text = f"{run.name}: {who} {_JOINED[one.kind]} epoch {one.epoch}"
        found.append(EpochMarker(one.kind, one.epoch, text, colour))
    if run.best and run.best[0] == name and run.best_point:
        epoch, value = run.best_point
        found.append(
            EpochMarker("best", epoch, f"{run.name}: best, {number(value)} at epoch {epoch}", colour, value)
        )
    return found


def _finding(runs: Sequence[RunFacts]) -> str:
    if len(runs) == 1 and runs[0].best and runs[0].best_point:
        epoch, value = runs[0].best_point
        return f"Epoch {epoch} is the best: {runs[0].best[0]} {number(value)}{_not_finite(runs[0])}"
    ranked = [(run.best_point[1], run) for run in runs if run.best and run.best_point]
    same = {run.best for _, run in ranked}
    if len(ranked) > 1 and len(same) == 1:
        name, mode = next(iter(same)) or ("", "")
        value, run = (max if mode == "max" else min)(ranked, key=lambda one: one[0])
        return f"{run.name} has the best {name}: {number(value)}"
    longest = max((len(run.course.points) for run in runs), default=0)
    return f"{count(len(metric_names(runs)), 'metric')} over {count(longest, 'epoch')}"


def _not_finite(run: RunFacts) -> str:
    bad = {
        name: one.epoch
        for one in reversed(run.course.points)
        for name, value in one.metrics.items()
        if not math.isfinite(value)
    }
    if not bad:
        return ""
    first = min(bad.values())
    subject = f"{next(iter(bad))} is" if len(bad) == 1 else f"{len(bad)} metrics are"
    return f"; {subject} not finite from epoch {first}"


def _legend(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    kinds = {joint.kind for run in runs for joint in run.course.joints}
    entries = [(f"line {hue(at + 1)}", run.name) for at, run in enumerate(runs)]
    if any(run.course.abandoned for run in runs):
        entries.append(("line stale", "abandoned by a rewind"))
    signs = {"resume": "resumed here", "rewind": "rewound to here", "fallback": "fell back to here"}
    entries += [(f"sign {kind}", text) for kind, text in signs.items() if kind in kinds]
    if any(run.best_point for run in runs):
        entries.append(("best", "best epoch"))
    return entries


def _table(run: RunFacts, names: Sequence[str]) -> Table:
    points = run.course.points[-_TABLE_ROWS:]
    used = [name for name in names if any(name in one.metrics for one in points)]
    rows = [
        [str(one.epoch), *(number(one.metrics[name]) if name in one.metrics else "" for name in used)]
        for one in points
    ]
    every = len(run.course.points)
    newest = f" (the newest {len(points)} of {every} epochs)" if every > len(points) else ""
    return Table(f"Values of {run.name}{newest}", ["epoch", *used], rows, numeric=True)


def _all_points(run: RunFacts) -> list[Point]:
    return [*run.course.points, *(point for stretch in run.course.abandoned for point in stretch)]


_MOST_LINES = 8
_MOST_ROWS = 40


def weights(runs: Sequence[RunFacts]) -> PageSection | None:
    """Weights and their changes; None where none were read."""
    known = [run for run in runs if run.norms.rows]
    if not known:
        return None
    parts = []
    for run in known:
        figures = [_norms(run.norms, run.name)]
        if most_moved(run.norms.rows):
            figures.append(_updates(run.norms.rows, run.name))
        looked_at = count(len({row.epoch for row in run.norms.rows}), "epoch")
        read = f"{looked_at} looked at, {human_bytes(run.norms.read_bytes)} of weights read."
        parts.append((run, figures, f"{read} {run.norms.left_out or ''}"))
    return PageSection("weights", "Weights", norm_finding(known), {"runs": parts})


def norm_finding(runs: Sequence[RunFacts]) -> str:
    """Where weights are not finite, else which moved most in the newest epoch."""
    for run in runs:
        bad = [row for row in run.norms.rows if row.nonfinite]
        if bad:
            first = min(row.epoch for row in bad)
            leaves = sum(row.epoch == first for row in bad)
            here = f" of {run.name}" if len(runs) > 1 else ""
            return f"NaN or Inf in the weights{here} since epoch {first}, in {count(leaves, 'parameter')}"
    run = runs[0]
    moved = most_moved(run.norms.rows)
    if moved is None:
        return f"{count(len({row.leaf for row in run.norms.rows}), 'parameter')}, all finite"
    here = f" in {run.name}" if len(runs) > 1 else ""
    return (
        f"All weights are finite; {moved[1]} moved most at the end{here}: {share(moved[0], 1.0)} of its norm"
    )


def most_moved(rows: Sequence[LeafNorm]) -> tuple[float, str] | None:
    """The largest update by norm in the newest epoch, and whose it is; None where there is none."""
    last = max(row.epoch for row in rows)
    newest = [(ratio_of(row), row.leaf) for row in rows if row.epoch == last]
    return max(((ratio, leaf) for ratio, leaf in newest if ratio is not None), default=None)


def ratio_of(row: LeafNorm) -> float | None:
    """The norm of a change by that of the weights it led to; None where there is none."""
    return None if row.update is None or row.norm == 0 else row.update / row.norm


def _norms(said: Norms, name: str) -> Figure:
    """The largest parameters at the end, the one that the title names among them."""
    last = max(row.epoch for row in said.rows)
    newest = sorted(
        (row for row in said.rows if row.epoch == last),
        key=lambda row: (row.nonfinite > 0, -row.norm if math.isfinite(row.norm) else 0.0),
    )
    leaves = list(dict.fromkeys(row.leaf for row in said.rows))
    sizes = {row.leaf: row.elements for row in said.rows}
    chosen = sorted(leaves, key=lambda leaf: (leaf != newest[0].leaf, -sizes[leaf]))[:_MOST_LINES]
    lines = {leaf: list[tuple[int, float]]() for leaf in leaves if leaf in chosen}
    for row in said.rows:
        if row.leaf in lines:
            lines[row.leaf].append((row.epoch, math.nan if row.nonfinite else row.norm))
    series = [Series(leaf, at + 1, tuple(line)) for at, (leaf, line) in enumerate(lines.items())]
    largest = newest[0]
    title = f"{largest.leaf} is the largest at epoch {last}: {number(largest.norm)}"
    return Figure(
        "norm of the weights",
        title if not largest.nonfinite else f"No parameter is finite at epoch {last}",
        line_chart(f"Norms of the largest parameters of {name} over epochs", series),
        legend=[(f"line {hue(one.colour)}", one.name) for one in series],
    )


def _updates(rows: Sequence[LeafNorm], name: str) -> Figure:
    """Layers by epochs, with all numbers of the chart beside it; a layer that a title names has its row."""
    leaves = list(dict.fromkeys(row.leaf for row in rows))
    epochs = sorted({row.epoch for row in rows if row.update is not None or row.nonfinite})
    by_place = {(row.leaf, row.epoch): row for row in rows}
    top = max((ratio for row in rows if (ratio := ratio_of(row))), default=0.0)
    named = {row.leaf for row in rows if row.nonfinite}
    if (moved := most_moved(rows)) is not None:
        named.add(moved[1])
    kept = set(sorted(leaves, key=lambda leaf: leaf not in named)[:_MOST_ROWS])
    shown = [leaf for leaf in leaves if leaf in kept]
    cells = [[leaf, *(_cell(by_place.get((leaf, epoch)), top) for epoch in epochs)] for leaf in shown]
    table = Table(f"Update by norm of {name}, layers by epochs", ["layer", *map(str, epochs)], cells)
    more = len(leaves) - _MOST_ROWS
    note = f"{count(more, 'parameter')} more not shown" if more > 0 else ""
    return Figure("update by norm", "How far each layer moved, by epoch", heat=table, note=note)


def _cell(row: LeafNorm | None, top: float) -> Cell | str:
    if row is None:
        return ""
    if row.nonfinite:
        text = f"{count(row.nonfinite, 'element')} of {row.elements} NaN or Inf at epoch {row.epoch}"
        return Cell("NaN", "cell nan", text)
    ratio = ratio_of(row)
    if ratio is None:
        text = number(row.norm) if row.update is None else "0"
        return Cell(text, "cell h0", f"norm {number(row.norm)}, nothing to compare with")
    said = f"norm {number(row.norm)}, change {number(row.update or 0.0)}"
    return Cell(share(row.update or 0.0, row.norm), shade(ratio, top), said)


_MOST_BLOBS = 12
_BAR_LEFT, _BAR_ROW = 58, 34


def sizes(runs: Sequence[RunFacts]) -> PageSection | None:
    """How large epochs are, and why; None where no epoch is committed."""
    known = [run for run in runs if run.sizes]
    if not known:
        return None
    newest, total = known[0].sizes[-1], _total(known[0].sizes[-1])
    if len(known) > 1:
        each = (f"{run.name} {human_bytes(_total(run.sizes[-1]))}" for run in known)
        title = f"The newest epochs: {', '.join(each)}"
    elif not newest.blobs or not total:
        title = "The newest epoch holds no bytes"
    else:
        first, saved = newest.blobs[0], sum(one.referenced for one in newest.blobs)
        rest = f"; {share(saved, total)} was not written again" if saved else ""
        title = f"{first.blob} is {share(first.total, total)} of an epoch of {human_bytes(total)}{rest}"
    content = {
        "legend": [("written", "written by the epoch"), ("referenced", "referenced in an earlier epoch")],
        "runs": [(run, _size_figures(run.sizes), _size_table(run)) for run in known],
    }
    return PageSection("sizes", "Sizes", title, content)


def _total(epoch: EpochBytes) -> int:
    return sum(one.total for one in epoch.blobs)


def _shown(blobs: Sequence[BlobBytes]) -> list[BlobBytes]:
    if len(blobs) <= _MOST_BLOBS:
        return list(blobs)
    shown, rest = blobs[: _MOST_BLOBS - 1], blobs[_MOST_BLOBS - 1 :]
    written, referenced = sum(one.written for one in rest), sum(one.referenced for one in rest)
    return [*shown, BlobBytes(count(len(rest), "other blob"), written, referenced)]


def _size_figures(epochs: Sequence[EpochBytes]) -> list[Figure]:
    """The blobs of the newest epoch, and all epochs."""
    newest = epochs[-1]
    label = f"Bytes by blob at epoch {newest.epoch}"
    bars = []
    for one in epochs:
        written = sum(blob.written for blob in one.blobs)
        bars.append(BlobBytes(str(one.epoch), written, _total(one) - written))
    fresh, whole = sum(one.written for one in bars), sum(one.total for one in bars)
    return [
        Figure(f"epoch {newest.epoch}", label, row_chart(label, _shown(newest.blobs))),
        Figure(
            f"{count(len(bars), 'epoch')} looked at",
            f"Of {human_bytes(whole)}, {human_bytes(fresh)} were written",
            column_chart("Bytes by epoch, written and referenced", bars, "epoch"),
        ),
    ]


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
