"""The first jump of a metric over the epochs of a run, for `torchrelay find-bad --metric`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.summary import glance_or_notes
from torchrelay.checkpoint.inspect.anomalies import FACTOR, Jump, first_jump
from torchrelay.errors import DamagedError, UsageError
from torchrelay.runners.commands.command_line_going_on import Resume, resume_before
from torchrelay.runners.monitoring.console import Output, human_number
from torchrelay.runners.remote_runs.resolve import Selected, locate_run, parse_selector, select

FOUND = 1
"""Exit code where something bad was found."""


def find_jump(chosen: argparse.Namespace, output: Output) -> int:
    """Look at the metrics that the run noted and tell; `FOUND` if there is a jump, else 0."""
    for name, given in (("--blobs", chosen.blobs), ("--nan-only", chosen.nan_only)):
        if given:
            raise UsageError(f"{name} is about blobs, --metric about a metric: give one of them")
    selector = parse_selector(chosen.path)
    run = locate_run(selector.path)
    selected = select(chosen.path)
    upto = selected.entry.position.epoch if selector.wish is not None else None
    current = selected.entry in selected.view.line()
    lines = run.metrics() if current else list(_of_branch(selected))
    series = list(_series(lines, chosen.metric, upto))
    jump = first_jump([value for _, value in series], chosen.jump or FACTOR)
    if jump is None:
        return _no_jump(output, chosen, len(series))
    earlier = [one for one in selected.view.line(selected.entry.branch) if one.position.boundary]
    earlier = [one for one in earlier if one.position.epoch < series[jump.at][0]]
    resume = resume_before(selected, earlier)
    if output.json:
        output.value(_jump_json(chosen.metric, series, jump, resume))
    else:
        output.line(_jump_line(chosen.metric, series, jump), "damaged")
        output.line(resume.line())
    return FOUND


def _of_branch(selected: Selected) -> Iterator[dict[str, Any]]:
    """The metrics of a branch that was left, by its epochs: what the run notes is of the current one."""
    for entry in selected.view.line(selected.entry.branch):
        if entry.position.boundary:
            metrics = glance_or_notes(selected.place.storage, entry).metrics
            yield {"epoch": entry.position.epoch, "metrics": metrics}


def _series(lines: Sequence[dict[str, Any]], name: str, upto: int | None) -> Iterator[tuple[int, float]]:
    """Epoch and value, in order; raises UsageError where no epoch has the metric."""
    known = sorted({key for line in lines for key in _metrics(line)})
    if name not in known:
        raise UsageError(f"no epoch has a metric {name!r}; there is {', '.join(known) or 'none at all'}")
    for line in lines:
        if name in _metrics(line) and (upto is None or line["epoch"] <= upto):
            try:
                yield line["epoch"], float(_metrics(line)[name])
            except (TypeError, ValueError):
                raise DamagedError(
                    f"epoch {line['epoch']}: {_metrics(line)[name]!r} is no value of {name}"
                ) from None


def _metrics(line: dict[str, Any]) -> dict[str, Any]:
    found = line.get("metrics")
    return found if isinstance(found, dict) else {}


def _no_jump(output: Output, chosen: argparse.Namespace, count: int) -> int:
    if output.json:
        output.value({"found": False, "metric": chosen.metric, "epochs": count})
    else:
        output.line(f"{chosen.metric} has no jump in {count} epochs (--jump {chosen.jump or FACTOR:g})")
    return 0


def _jump_line(name: str, series: Sequence[tuple[int, float]], jump: Jump) -> str:
    epoch, value = series[jump.at]
    if jump.change is None or jump.usual is None or jump.spread is None:
        return f"epoch {epoch}: {name} is {value}"
    before = series[jump.at - 1][1]
    usual, spread = human_number(jump.usual), human_number(jump.spread)
    return (
        f"epoch {epoch}: {name} jumps from {human_number(before)} to {human_number(value)}; "
        f"a usual change is {usual}, give or take {spread}"
    )


def _jump_json(name: str, series: Sequence[tuple[int, float]], jump: Jump, resume: Resume) -> dict[str, Any]:
    epoch, value = series[jump.at]
    return {
        "found": True,
        "metric": name,
        "epoch": epoch,
        "value": value if math.isfinite(value) else str(value),
        "before": series[jump.at - 1][1] if jump.at else None,
        "usual_change": jump.usual,
        "spread": jump.spread,
        "epochs": len(series),
        "resume": resume.json(),
    }
