"""`torchrelay ckpt find-bad RUN`: find the first epoch with NaN or Inf, or the first jump of a metric.

Imports no torch; numpy is imported when it runs.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.inspect.anomalies import (
    FACTOR,
    BadElementSearch,
    BadLeaf,
    Jump,
    first_bad,
    first_jump,
)
from torchrelay.checkpoint.inspect.contents import check_chosen, open_epoch
from torchrelay.checkpoint.load.info import glance_or_notes
from torchrelay.errors import DamagedError, UsageError
from torchrelay.runners.monitoring.console import Output, arg, either, flag, human_number, verb
from torchrelay.runners.remote_runs.resolve import Selected, locate_run, parse_selector, select
from torchrelay.tools.cli.arguments import BLOBS, run_epoch

Resume = tuple[int, str] | None
"""The newest usable epoch before the bad one, and a line on how to resume from it."""
_NO_RESUME = "no earlier epoch can be resumed from; start over with resume='never' (--resume never)"


def resume_before(selected: Selected, earlier: Sequence[CommittedPosition]) -> Resume:
    """Find the newest of the earlier epochs that a launch may resume from."""
    usable = {one.key for one in selected.view.candidates()}
    able = [one for one in earlier if one.key in usable]
    run = selected.place.run
    words = (run.known_identity() if run else {}).get("command")
    known = isinstance(words, list) and words and all(isinstance(one, str) for one in words)
    command = shlex.join(words) if known and words else "the run's command with"
    if not able:
        return None
    number = able[-1].position.epoch
    return number, (
        f"to resume from epoch {number}: {command} --resume-from-epoch {number}, "
        f"or train(resume_from_epoch={number})"
    )


def _resume_json(resume: Resume) -> dict[str, Any] | None:
    if resume is None:
        return None
    return {"epoch": resume[0], "arguments": ["--resume-from-epoch", str(resume[0])]}


FOUND = 1
"""Exit code where something bad was found."""


def find_jump(chosen: argparse.Namespace, output: Output) -> int:
    """Search the run's metrics for a jump; returns `FOUND` if there is one, else 0."""
    for name, given in (("--blobs", chosen.blobs), ("--nan-only", chosen.nan_only)):
        if given:
            raise UsageError(f"{name} applies to blobs and cannot be combined with --metric")
    selector = parse_selector(chosen.path)
    run = locate_run(selector.path)
    selected = select(chosen.path)
    upto = selected.entry.position.epoch if selector.wish is not None else None
    lines = run.metrics()
    if selected.entry not in selected.view.line():  # the run's own file has the current branch only
        branch = [one for one in selected.view.line(selected.entry.branch) if one.position.boundary]
        facts = [(one.position.epoch, glance_or_notes(selected.place.storage, one).facts) for one in branch]
        lines = [{"epoch": epoch, "metrics": found.metrics} for epoch, found in facts]
    series = list(_series(lines, chosen.metric, upto))
    jump = first_jump([value for _, value in series], chosen.jump or FACTOR)
    if jump is None:
        output.result(
            {"found": False, "metric": chosen.metric, "epochs": len(series)},
            f"{chosen.metric} has no jump in {len(series)} epochs (--jump {chosen.jump or FACTOR:g})",
        )
        return 0
    earlier = [one for one in selected.view.line(selected.entry.branch) if one.position.boundary]
    earlier = [one for one in earlier if one.position.epoch < series[jump.at][0]]
    resume = resume_before(selected, earlier)
    epoch, value = series[jump.at]
    if output.json:
        output.value(
            {
                "found": True,
                "metric": chosen.metric,
                "epoch": epoch,
                "value": value if math.isfinite(value) else str(value),
                "before": series[jump.at - 1][1] if jump.at else None,
                "usual_change": jump.usual,
                "spread": jump.spread,
                "epochs": len(series),
                "resume": _resume_json(resume),
            }
        )
    else:
        output.line(_jump_line(chosen.metric, series, jump), "damaged")
        output.line(resume[1] if resume else _NO_RESUME)
    return FOUND


def _series(lines: Sequence[dict[str, Any]], name: str, upto: int | None) -> Iterator[tuple[int, float]]:
    """Yield epoch and value in order; raises UsageError if no epoch has the metric."""
    known = sorted({key for line in lines for key in _metrics(line)})
    if name not in known:
        raise UsageError(f"no epoch has a metric {name!r}; known are {', '.join(known) or 'none'}")
    for line in lines:
        if name in _metrics(line) and (upto is None or line["epoch"] <= upto):
            try:
                yield line["epoch"], float(_metrics(line)[name])
            except (TypeError, ValueError):
                raise DamagedError(
                    f"epoch {line['epoch']}: invalid value {_metrics(line)[name]!r} of {name}"
                ) from None


def _metrics(line: dict[str, Any]) -> dict[str, Any]:
    found = line.get("metrics")
    return found if isinstance(found, dict) else {}


def _jump_line(name: str, series: Sequence[tuple[int, float]], jump: Jump) -> str:
    epoch, value = series[jump.at]
    if jump.change is None or jump.usual is None or jump.spread is None:
        return f"epoch {epoch}: {name} is {value}"
    before = series[jump.at - 1][1]
    usual, spread = human_number(jump.usual), human_number(jump.spread)
    return (
        f"epoch {epoch}: {name} jumps from {human_number(before)} to {human_number(value)}; "
        f"the usual change is {usual} +/- {spread}"
    )


_SHOWN = 20


def _factor(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"invalid factor {text!r}: expected a number above 0")
    return found


@verb(
    "find the first epoch with NaN or Inf, or the first jump of a metric",
    run_epoch("@last; epochs up to this one are searched"),
    BLOBS,
    flag("--nan-only", "ignore Inf, which masks contain"),
    either(
        flag("--all", "read every epoch instead of bisecting"),
        arg("--metric", "search for a jump of this metric instead of NaN in blobs", "NAME"),
    ),
    arg(
        "--jump",
        f"with --metric: spreads from the usual change that make a jump (default: {FACTOR:g})",
        "FACTOR",
        type=_factor,
    ),
)
def find_bad(chosen: argparse.Namespace, output: Output) -> int:
    """Search and report; returns 1 if something bad was found, else 0."""
    if chosen.metric is not None:
        return find_jump(chosen, output)
    if chosen.jump is not None:
        raise UsageError("--jump needs --metric NAME")
    selected = select(chosen.path)
    seen_line = selected.view.line(selected.entry.branch)
    line = [one for one in seen_line if one.position.boundary and one.position <= selected.entry.position]
    output.notices(
        f"epoch {one.position} is skipped: it is quarantined as damaged" for one in line if not one.healthy
    )
    entries = [one for one in line if one.healthy] or [selected.entry]
    search = BadElementSearch(tuple(chosen.blobs or ()), nan_only=chosen.nan_only)
    check_chosen([open_epoch(selected.place.storage, entries[-1])], chosen.blobs or ())
    seen: dict[int, list[BadLeaf]] = {}

    def is_bad(number: int) -> bool:
        entry = entries[number]
        output.progress(f"reading epoch {entry.position}, {search.loads + 1} of {len(entries)}")
        try:
            seen[number] = search.bad_leaves(open_epoch(selected.place.storage, entry))
        except DamagedError as error:
            raise DamagedError(f"cannot read epoch {entry.position}: {error}") from error
        output.progress("")
        return bool(seen[number])

    if chosen.all:
        at = next((number for number in [n for n in range(len(entries)) if is_bad(n)]), None)
    else:
        at = first_bad(len(entries), is_bad)
    bad = [] if at is None else seen[at]
    resume = None if at is None else resume_before(selected, entries[:at])
    again = [] if at is None else [entries[n] for n in sorted(seen) if n > at and not seen[n]]
    if output.json:
        output.value(_nan_json(entries, at, bad, resume, sorted(seen)))
    else:
        _say_nan(output, chosen, entries, at, bad, resume, len(seen))
        for entry in again[:1]:
            output.line(f"the later epoch {entry.position} is good again")
    return 0 if at is None else FOUND


def _say_nan(
    output: Output,
    chosen: argparse.Namespace,
    entries: Sequence[CommittedPosition],
    at: int | None,
    bad: Sequence[BadLeaf],
    resume: Resume,
    loads: int,
) -> None:
    what = "NaN" if chosen.nan_only else "NaN or Inf"
    read = f"{loads} of {len(entries)} epochs read"
    presumed = "" if chosen.all else "; assumes that bad values stay, --all reads every epoch"
    if at is None:
        of = "any epoch" if chosen.all else f"epoch {entries[-1].position}, the last one"
        output.line(f"no {what} in {of} ({read}{presumed})")
        return
    before = f", epoch {entries[at - 1].position} was read and is good" if at else ""
    output.line(
        f"epoch {entries[at].position} is the first with {what} ({read}{before}{presumed})", "damaged"
    )
    rows = [
        (one.name, one.dtype, str(one.nan), str(one.inf), f"[{','.join(map(str, one.index))}]")
        for one in bad[:_SHOWN]
    ]
    output.table(("leaf", "type", "NaN", "Inf", "first at"), rows)
    if len(bad) > _SHOWN:
        output.line(f"... and {len(bad) - _SHOWN} more leaves; --json has all")
    if at == 0:
        output.line("it is the oldest epoch kept; exclude intended values with --nan-only or --only")
    else:
        output.line(resume[1] if resume else _NO_RESUME)


def _nan_json(
    entries: Sequence[CommittedPosition],
    at: int | None,
    bad: Sequence[BadLeaf],
    resume: Resume,
    seen: Sequence[int],
) -> dict[str, Any]:
    return {
        "found": at is not None,
        "epoch": None if at is None else entries[at].position.epoch,
        "last_good": entries[at - 1].position.epoch if at else None,
        "read": [entries[number].position.epoch for number in seen],
        "epochs": len(entries),
        "leaves": [
            {
                "leaf": one.name,
                "blob": one.blob,
                "dtype": one.dtype,
                "shape": list(one.shape),
                "nan": one.nan,
                "inf": one.inf,
                "first": list(one.index),
            }
            for one in bad
        ],
        "resume": _resume_json(resume),
    }
