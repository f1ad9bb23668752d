"""The section of weights: how large each layer's are over epochs, and by how much they move."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import Series, line_chart
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
from torchrelay.tools.report.run_data import LeafNorm, Norms, RunFacts

_MOST_LINES = 8
_MOST_ROWS = 40
_SHADES = 7


def norms(runs: Sequence[RunFacts]) -> Markup:
    """Weights and their changes."""
    known = [run for run in runs if run.norms.rows]
    if not known:
        reasons = [run.norms.left_out for run in runs if run.norms.left_out]
        return section(
            "weights", "Weights were not looked at", el("p", reasons[0] if reasons else None, class_="quiet")
        )
    many = len(runs) > 1
    parts = [of_run(run.name, many, _run(run.norms, run.name)) for run in known]
    return section("weights", finding_of(known), parts)


def finding_of(runs: Sequence[RunFacts]) -> str:
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


def _run(said: Norms, name: str) -> list[Markup | None]:
    leaves = list(dict.fromkeys(row.leaf for row in said.rows))
    sizes = {row.leaf: row.elements for row in said.rows}
    lines = sorted(sorted(leaves, key=lambda leaf: -sizes[leaf])[:_MOST_LINES], key=leaves.index)
    series = [
        Series(leaf, at % 8 + 1, tuple((row.epoch, _norm(row)) for row in said.rows if row.leaf == leaf))
        for at, leaf in enumerate(lines)
    ]
    label = f"Norms of the largest parameters of {name} over epochs"
    epochs = len({row.epoch for row in said.rows})
    read = f"{count(epochs, 'epoch')} looked at, {human_bytes(said.read_bytes)} of weights read."
    note = f"{read} {said.left_out or ''}"
    return [
        el(
            "div",
            chart_card(
                "norm of the weights",
                _largest(said.rows),
                line_chart(label, series),
                legend([(f"line s{one.colour}", one.name) for one in series]),
            ),
            chart_card(
                "update by norm",
                "How far each layer moved, by epoch",
                _heat(said.rows, leaves, name),
            ),
            class_="charts two",
        ),
        el("p", note, class_="quiet"),
    ]


def _norm(row: LeafNorm) -> float:
    """What cannot be summed up is shown as missing."""
    return float("nan") if row.nonfinite else row.norm


def _largest(rows: Sequence[LeafNorm]) -> str:
    last = max(row.epoch for row in rows)
    top = max((row for row in rows if row.epoch == last), key=lambda row: row.norm)
    return f"{top.leaf} is the largest at epoch {last}: {number(top.norm)}"


def _heat(rows: Sequence[LeafNorm], leaves: Sequence[str], name: str) -> Markup:
    """Layers by epochs; also the table behind the lines, because it has all numbers in it."""
    epochs = sorted({row.epoch for row in rows if row.update is not None or row.nonfinite})
    by_place = {(row.leaf, row.epoch): row for row in rows}
    ratios = [ratio for row in rows if (ratio := ratio_of(row))]
    shown = leaves[:_MOST_ROWS]
    body = [
        [leaf, *(_cell(by_place.get((leaf, epoch)), max(ratios, default=0.0)) for epoch in epochs)]
        for leaf in shown
    ]
    label = f"Update by norm of {name}, layers by epochs"
    more = len(leaves) - len(shown)
    return el(
        "div",
        scrolling(label, el("div", table(["layer", *map(str, epochs)], body), class_="heat small")),
        el("p", f"{count(more, 'parameter')} more not shown", class_="quiet") if more else None,
    )


def _cell(row: LeafNorm | None, top: float) -> Child:
    if row is None:
        return ""
    if row.nonfinite:
        text = f"{count(row.nonfinite, 'element')} of {row.elements} NaN or Inf at epoch {row.epoch}"
        return el("span", "NaN", class_="cell nan", title=text)
    ratio = ratio_of(row)
    if ratio is None:
        return el(
            "span",
            number(row.norm) if row.update is None else "0",
            class_="cell h0",
            title=f"norm {number(row.norm)}, nothing to compare with",
        )
    level = min(_SHADES, int((ratio / top) ** 0.5 * _SHADES) + 1) if top > 0 and ratio > 0 else 0
    said = f"norm {number(row.norm)}, change {number(row.update or 0.0)}"
    return el("span", share(row.update or 0.0, row.norm), class_=f"cell h{level}", title=said)
