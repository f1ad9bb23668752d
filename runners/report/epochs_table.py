"""The section of checkpoints: every committed epoch, how it stands, and why it is used or not."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.report.facts import EpochRow, RunFacts
from torchrelay.runners.report.markup import Child, Markup, el
from torchrelay.runners.report.parts import of_run, scrolling, section, table
from torchrelay.runners.report.wording import count, number

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
