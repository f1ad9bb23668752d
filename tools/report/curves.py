"""The sections of curves: metrics of all runs over epochs, the size of weights and how they move."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import (
    Cell,
    EpochMarker,
    Figure,
    PageSection,
    Series,
    Table,
    count,
    line_chart,
    number,
    shade,
    share,
)
from torchrelay.tools.report.run_data import LeafNorm, Norms, Point, RunFacts

_MOST_CHARTS = 60
_TABLE_ROWS = 400
_GONE_ON = {"resume": "went on from", "rewind": "went back to", "fallback": "fell back, after damage, to"}


def metrics(runs: Sequence[RunFacts]) -> PageSection | None:
    """All metrics of all runs; None where none was logged."""
    names = metric_names(runs)
    by_step = sorted({name for run in runs for one in run.steps for name in one.metrics})
    if not names and not by_step:
        return None
    figures = [_figure(index, name, runs) for index, name in enumerate(names[:_MOST_CHARTS])]
    figures += [_step_figure(name, runs) for name in by_step[:_MOST_CHARTS]]
    more = len(names) - _MOST_CHARTS
    content = {
        "legend": _legend(runs),
        "figures": figures,
        "note": f"{count(more, 'metric')} more: in the table below" if more > 0 else "",
        "tables": [_table(run, names) for run in runs],
    }
    return PageSection("metrics", "Metrics", _finding(runs), content)


def metric_names(runs: Sequence[RunFacts]) -> list[str]:
    """All metrics: what the runs call best first, then by the part before the slash and by name."""
    names = {name for run in runs for point in _all_points(run) for name in point.metrics}
    best = {run.best[0] for run in runs if run.best}
    return sorted(names, key=lambda name: (name not in best, name.rpartition("/")[0], name))


def finding_of(name: str, run: RunFacts) -> str:
    """What a metric of one run came to, as a title."""
    points = [(one.epoch, one.metrics[name]) for one in run.course.points if name in one.metrics]
    if not points:
        return f"{name} was only measured on abandoned epochs"
    odd = next(((epoch, value) for epoch, value in points if not math.isfinite(value)), None)
    if odd is not None:
        return f"{name} is {number(odd[1])} at epoch {odd[0]}"
    (first, began), (last, ended) = points[0], points[-1]
    if run.best and run.best[0] == name and run.best_point:
        epoch, value = run.best_point
        tail = "" if epoch == last else f", {number(ended)} at the end"
        return f"{name} is best at epoch {epoch}: {number(value)}{tail}"
    if first == last:
        return f"{name} is {number(ended)} at epoch {last}"
    return (
        f"{name} went from {number(began)} to {number(ended)}"
        if began != ended
        else f"{name} stayed at {number(ended)}"
    )


def _compared(name: str, runs: Sequence[RunFacts]) -> str:
    ends = []
    for run in runs:
        values = [one.metrics[name] for one in run.course.points if name in one.metrics]
        if values:
            ends.append((values[-1], run.name))
    if len(ends) < 2:
        return next(
            (finding_of(name, run) for run in runs if any(name in one.metrics for one in _all_points(run))),
            name,
        )
    odd = [run for value, run in ends if not math.isfinite(value)]
    if odd:
        return f"{name} is not finite at the end of {', '.join(odd)}"
    low, high = min(ends), max(ends)
    if low[0] == high[0]:
        return f"{name} ends at {number(low[0])} in all runs"
    return f"{name} ends at {number(high[0])} in {high[1]}, {number(low[0])} in {low[1]}"


def _figure(index: int, name: str, runs: Sequence[RunFacts]) -> Figure:
    series = [one for at, run in enumerate(runs) for one in _series(name, run, at % 8 + 1)]
    marks = [one for at, run in enumerate(runs) for one in _marks(name, run, at % 8 + 1)]
    title = finding_of(name, runs[0]) if len(runs) == 1 else _compared(name, runs)
    label = f"{name} over epochs. {title}"
    values = [value for one in series for _, value in one.points if math.isfinite(value)]
    linear = line_chart(label, series, marks)
    positive = bool(values) and min(values) > 0
    log = line_chart(label + ", logarithmic", series, marks, log=True) if positive else None
    return Figure(name.rpartition("/")[0] or "metric", title, linear, log, f"log-{index}")


def _step_figure(name: str, runs: Sequence[RunFacts]) -> Figure:
    """A metric within epochs, over the steps of the runs."""
    series = [
        Series(run.name, at % 8 + 1, pairs)
        for at, run in enumerate(runs)
        if (pairs := tuple((one.step, one.metrics[name]) for one in run.steps if name in one.metrics))
    ]
    drawn = line_chart(f"{name} over steps", series, unit="step")
    return Figure(f"{name.rpartition('/')[0] or 'metric'}, by step", f"{name} by step", drawn)


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
        text = f"{run.name}: {who} {_GONE_ON[one.kind]} epoch {one.epoch}"
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
        return f"Epoch {epoch} is the best: {runs[0].best[0]} {number(value)}"
    ranked = [(run.best_point[1], run) for run in runs if run.best and run.best_point]
    same = {run.best for _, run in ranked}
    if len(ranked) > 1 and len(same) == 1:
        name, mode = next(iter(same)) or ("", "")
        value, run = (max if mode == "max" else min)(ranked, key=lambda one: one[0])
        return f"{run.name} has the best {name}: {number(value)}"
    longest = max((len(run.course.points) for run in runs), default=0)
    return f"{count(len(metric_names(runs)), 'metric')} over {count(longest, 'epoch')}"


def _legend(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    kinds = {joint.kind for run in runs for joint in run.course.joints}
    entries = [(f"line s{at % 8 + 1}", run.name) for at, run in enumerate(runs)]
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
    """Weights and their changes; None where nothing was read, and no reason is known."""
    known = [run for run in runs if run.norms.rows]
    reason = next((run.norms.left_out for run in runs if run.norms.left_out), "")
    if not known and not reason:
        return None
    title = norm_finding(known) if known else "Weights were not looked at"
    content = {
        "reason": "" if known else reason,
        "runs": [
            (run, [_norms(run.norms, run.name), _updates(run.norms.rows, run.name)], _read(run.norms))
            for run in known
        ],
    }
    return PageSection("weights", "Weights", title, content)


def norm_finding(runs: Sequence[RunFacts]) -> str:
    """Where weights are not finite, else what moved most in the newest step."""
    for run in runs:
        bad = [row for row in run.norms.rows if row.nonfinite]
        if bad:
            first = min(row.epoch for row in bad)
            leaves = sum(row.epoch == first for row in bad)
            here = f" of {run.name}" if len(runs) > 1 else ""
            return f"NaN or Inf in the weights{here} from epoch {first} on, in {count(leaves, 'parameter')}"
    run = runs[0]
    last = max(row.epoch for row in run.norms.rows)
    moved = [
        (ratio, row.leaf)
        for row in run.norms.rows
        if row.epoch == last and (ratio := ratio_of(row)) is not None
    ]
    if not moved:
        return f"{count(len({row.leaf for row in run.norms.rows}), 'parameter')}, all finite"
    ratio, leaf = max(moved)
    here = f" in {run.name}" if len(runs) > 1 else ""
    return f"All weights are finite; {leaf} moved most at the end{here}: {share(ratio, 1.0)} of its norm"


def ratio_of(row: LeafNorm) -> float | None:
    """The norm of a change by that of the weights it led to; None where there is none."""
    return None if row.update is None or row.norm == 0 else row.update / row.norm


def _norms(said: Norms, name: str) -> Figure:
    """The largest parameters at the end, the one that the title names among them."""
    last = max(row.epoch for row in said.rows)
    newest = sorted((row for row in said.rows if row.epoch == last), key=lambda row: -row.norm)
    leaves = list(dict.fromkeys(row.leaf for row in said.rows))
    sizes = {row.leaf: row.elements for row in said.rows}
    chosen = sorted(leaves, key=lambda leaf: (leaf != newest[0].leaf, -sizes[leaf]))[:_MOST_LINES]
    series = [
        Series(
            leaf,
            at % 8 + 1,
            tuple(
                (row.epoch, math.nan if row.nonfinite else row.norm) for row in said.rows if row.leaf == leaf
            ),
        )
        for at, leaf in enumerate(sorted(chosen, key=leaves.index))
    ]
    return Figure(
        "norm of the weights",
        f"{newest[0].leaf} is the largest at epoch {last}: {number(newest[0].norm)}",
        line_chart(f"Norms of the largest parameters of {name} over epochs", series),
        legend=[(f"line s{one.colour}", one.name) for one in series],
    )


def _read(said: Norms) -> str:
    epochs = len({row.epoch for row in said.rows})
    read = f"{count(epochs, 'epoch')} looked at, {human_bytes(said.read_bytes)} of weights read."
    return f"{read} {said.left_out or ''}"


def _updates(rows: Sequence[LeafNorm], name: str) -> Figure:
    """Layers by epochs; also the table behind the lines, because it has all numbers in it."""
    leaves = list(dict.fromkeys(row.leaf for row in rows))
    epochs = sorted({row.epoch for row in rows if row.update is not None or row.nonfinite})
    by_place = {(row.leaf, row.epoch): row for row in rows}
    top = max((ratio for row in rows if (ratio := ratio_of(row))), default=0.0)
    cells = [
        [leaf, *(_cell(by_place.get((leaf, epoch)), top) for epoch in epochs)] for leaf in leaves[:_MOST_ROWS]
    ]
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
