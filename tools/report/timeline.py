"""The sections of time: a row per start, and nodes by phases as a heat map of what saves took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from torchrelay.metadata.statistics import WAITING, NodeRow, StragglerSummary, summary
from torchrelay.records import dataclass
from torchrelay.tools.report.charts import (
    Cell,
    Chart,
    PageSection,
    Scale,
    Shape,
    Table,
    clock_ticks,
    count,
    line,
    moment,
    number,
    path,
    rect,
    seconds,
    shade,
    share,
    word,
)
from torchrelay.tools.report.run_data import RunAttempt, RunFacts, Save

WIDTH = 920
_LEFT, _RIGHT, _ROW, _BAR, _TOP, _BOTTOM = 12, 20, 62, 24, 6, 26
_MOST_BARS = 160
_MOST_ROWS = 40
_ENDINGS = {
    "FINISHED": "finished",
    "STOPPED": "stopped",
    "PREEMPTED": "preempted",
    "FAILED": "failed",
    "DIED": "died unexpectedly",
    "RUNNING": "running",
}


@dataclass(frozen=True)
class Bar:
    """A stretch of a row: `kind` is `train`, `save`, `wait`, `behind` or `load`; seconds from the start."""

    kind: str
    begin: float
    end: float
    text: str


def timeline(runs: Sequence[RunFacts]) -> PageSection | None:
    """When each start trained, saved and waited; None where none has left a time behind."""
    known = [run for run in runs if run.attempts]
    if not known:
        return None
    content = {
        "legend": [
            ("train", "training (shades alternate by epoch)"),
            ("save", "saving"),
            ("wait", "waiting for the slowest node"),
            ("behind", "saving behind the training"),
            ("load", "loading"),
        ],
        "runs": [(run, _chart(run), len(run.attempts) - _MOST_ROWS, _table(run)) for run in known],
    }
    return PageSection("time", "Time", _finding(known), content)


def bars_of(attempt: RunAttempt) -> list[Bar]:
    """The stretches of one start. Of very many epochs neighbours share a bar, their saves added up."""
    bars = [
        Bar(
            "load",
            one.end - one.slowest_secs - attempt.begin,
            one.end - attempt.begin,
            f"loading: {seconds(one.slowest_secs)}",
        )
        for one in attempt.saves
        if one.kind == "load" and one.end is not None
    ]
    timed = [one for one in attempt.points if one.time is not None]
    group = max(1, math.ceil(len(timed) / _MOST_BARS))
    before = max(
        [0.0, *(bar.end for bar in bars if not timed or bar.end <= (timed[0].time or 0) - attempt.begin)]
    )
    saves = [one for one in attempt.saves if one.kind == "save" and one.end is not None]
    for index in range(0, len(timed), group):
        some = timed[index : index + group]
        end = max(before, (some[-1].time or 0.0) - attempt.begin)
        within = [one for one in saves if before < (one.end or 0.0) - attempt.begin <= end + 1e-6]
        name = f"epoch {some[0].epoch}" if len(some) == 1 else f"epochs {some[0].epoch} to {some[-1].epoch}"
        behind = any(one.saved is None for one in some)
        bars += _epoch_bars(name, index // group, before, end, within, behind)
        before = end
    return bars


def _epoch_bars(
    name: str, number: int, begin: float, end: float, saves: Sequence[Save], behind: bool
) -> list[Bar]:
    spent = min(sum(one.slowest_secs for one in saves), end - begin)
    waited = min(sum(one.waiting_secs for one in saves), spent)
    train = "train odd" if number % 2 else "train"
    if behind:  # the save goes on while the next epoch trains: it takes nothing from the row
        return [
            Bar(train, begin, end, f"{name}: {seconds(end - begin)}"),
            Bar("behind", end - spent, end, f"{name}: saved behind the training, {seconds(spent)}"),
        ]
    split, quick = end - spent, end - waited
    bars = [Bar(train, begin, split, f"{name}: training, {seconds(split - begin)}")]
    if spent > 0:
        bars.append(Bar("save", split, quick, f"{name}: saving, {seconds(quick - split)}"))
    if waited > 0:
        bars.append(Bar("wait", quick, end, f"{name}: waiting for the slowest node, {seconds(waited)}"))
    return bars


def wall_secs(run: RunFacts) -> float:
    """Seconds in which the run was going on, pauses between starts left out."""
    return sum(one.end - one.begin for one in run.attempts)


def saving_secs(run: RunFacts) -> float:
    """Seconds of saves that held the training."""
    held = (bar for attempt in run.attempts for bar in bars_of(attempt) if bar.kind in ("save", "wait"))
    return sum(bar.end - bar.begin for bar in held)


def _chart(run: RunFacts) -> Chart:
    attempts = run.attempts[-_MOST_ROWS:]
    span = max([1e-3, *(one.end - one.begin for one in attempts)])
    x = Scale(0.0, span, _LEFT, WIDTH - _RIGHT)
    height = _TOP + _ROW * len(attempts) + _BOTTOM
    shapes = []
    for at in clock_ticks(x.high, 7):
        shapes.append(line("grid", (x(at), x(at)), (_TOP, height - _BOTTOM + 4)))
        shapes.append(word(seconds(at) if at else "0", x(at), height - 8))
    for index, attempt in enumerate(attempts):
        pause = attempt.begin - attempts[index - 1].end if index else None
        shapes.append(_row(attempt, _TOP + index * _ROW, x, pause))
    return Chart(f"Timeline of {run.name}, a row per start", WIDTH, height, shapes, "wide")


def _row(attempt: RunAttempt, top: float, x: Scale, pause: float | None) -> Shape:
    y, end = top + 26, x(attempt.end - attempt.begin)
    shapes = [
        word(_title(attempt, pause), _LEFT, top + 17, "rowtitle"),
        rect("idle", _LEFT, y, max(1.0, end - _LEFT), _BAR),
    ]
    for one in bars_of(attempt):
        left, right = round(x(one.begin), 2), x(one.end)
        at, height = (y + _BAR - 6, 6) if one.kind == "behind" else (y, _BAR)
        shapes.append(rect(one.kind, left, at, max(0.6, right - left), height, one.text))
    return Shape("g", "", inside=[*shapes, *_ending(attempt, end, y + _BAR / 2)])


def _ending(attempt: RunAttempt, x: float, middle: float) -> list[Shape]:
    shapes = {
        "FAILED": f"M{x + 4:.1f} {middle - 5}l10 10m0 -10l-10 10",
        "DIED": f"M{x + 4:.1f} {middle - 5}l10 10m0 -10l-10 10",
        "PREEMPTED": f"M{x + 9:.1f} {middle - 6}l6 6l-6 6l-6 -6z",
        "STOPPED": f"M{x + 4:.1f} {middle - 5}h9v10h-9z",
        "FINISHED": f"M{x + 3:.1f} {middle}l4 5l7 -9",
    }
    if attempt.outcome not in shapes:
        return []
    text = f"{_ENDINGS[attempt.outcome]}{': ' + attempt.reason if attempt.reason else ''}"
    return [path(f"ending {attempt.outcome.lower()}", shapes[attempt.outcome], text)]


def _title(attempt: RunAttempt, pause: float | None) -> str:
    number = f"Attempt {attempt.number}" if attempt.number is not None else f"Start {attempt.generation}"
    words = [_ENDINGS.get(attempt.outcome, attempt.outcome.lower()), seconds(attempt.end - attempt.begin)]
    if attempt.points:
        first, last = attempt.points[0].epoch, attempt.points[-1].epoch
        words.insert(0, f"epoch {first}" if first == last else f"epochs {first} to {last}")
    if attempt.world_size is not None:
        words.append(count(attempt.world_size, "rank"))
    if pause is not None and pause > 0:
        words.append(f"{seconds(pause)} after the one before")
    return f"{number}: {', '.join(words)}"


def _finding(runs: Sequence[RunFacts]) -> str:
    wall, saving = sum(map(wall_secs, runs)), sum(map(saving_secs, runs))
    starts = sum(len(run.attempts) for run in runs)
    bad = sum(one.outcome in ("FAILED", "DIED") for run in runs for one in run.attempts)
    text = f"Saving held the training for {share(saving, wall)} of {seconds(wall)}"
    return text + (f"; {bad} of {count(starts, 'start')} failed" if bad else "")


def _table(run: RunFacts) -> Table:
    rows = [
        (
            "" if one.number is None else str(one.number),
            moment(one.begin),
            seconds(one.end - one.begin),
            "" if one.world_size is None else str(one.world_size),
            str(len(one.points)),
            _ENDINGS.get(one.outcome, one.outcome),
            one.reason,
        )
        for one in run.attempts[-_MOST_ROWS:]
    ]
    columns = ("attempt", "began", "took", "ranks", "epochs", "ended", "reason")
    return Table("starts", columns, rows)


_PHASES = ("stage", "plan", "hash", "write", "fsync", "commit")
_MOST_NODES = 32


def summed_up(saves: Sequence[Save]) -> StragglerSummary:
    """Nodes, the slowest first, with the medians of their phases over all saves."""
    return summary([one.nodes for one in saves])


def saves(runs: Sequence[RunFacts]) -> PageSection | None:
    """How long saves took, and where; None where no times are noted."""
    found = [(run, summed_up(run.save_times)) for run in runs]
    known = [(run, times) for run, times in found if times.nodes]
    if not known:
        return None
    worst, slowest = max(known, key=lambda pair: pair[1].nodes[0].own_secs)
    title = finding_of(slowest, worst.name if len(runs) > 1 else "")
    return PageSection("saves", "Saves", title, {"runs": [(run, *_heat(times)) for run, times in known]})


def finding_of(times: StragglerSummary, run: str = "") -> str:
    """Which node the others wait for, or which phase takes the time where none dominates."""
    where, verdict = f" of {run}" if run else "", times.verdict
    if verdict is not None and verdict.dominates:
        ratio = "" if verdict.ratio is None else f", {verdict.ratio:.1f} times the others"
        own = f"{seconds(verdict.secs)} of its own work per save"
        return f"{verdict.node} dominates the saves{where}: {own}{ratio}"
    first = times.nodes[0]
    phase = max(first.phases, key=lambda one: first.phases[one][0], default="")
    longest = f"{share(first.phases[phase][0], _all_secs(first))} of it {phase}" if phase else "in no phase"
    alike = "" if verdict is None else ", no node dominates"
    return f"A save{where} takes {seconds(_all_secs(first))}, {longest}{alike}"


def _all_secs(row: NodeRow) -> float:
    return sum(middle for middle, _ in row.phases.values())


def _heat(times: StragglerSummary) -> tuple[Table, str, str]:
    """Nodes by phases, what they are, and what is not shown. A strong shade is long."""
    shown, rest = times.nodes[:_MOST_NODES], times.nodes[_MOST_NODES:]
    phases = [one for one in _PHASES if one in times.phases]
    phases += sorted(set(times.phases) - set(_PHASES))
    label = f"Median seconds of a save by node and phase, over {count(times.actions, 'save')}"
    top = max((middle for row in times.nodes for middle, _ in row.phases.values()), default=0.0)
    rows: list[list[str | Cell]] = [
        [
            row.node,
            *(_cell(row.phases[phase][0] if phase in row.phases else None, top) for phase in phases),
            Cell(seconds(row.own_secs), "own", f"{number(row.own_secs)} s"),
        ]
        for row in shown
    ]
    note = (
        f"{label}. Own work leaves out {' and '.join(sorted(WAITING))}, where nodes wait for each other. "
        f"The strongest shade is {seconds(top)}."
    )
    usual = median([row.own_secs for row in rest] or [0.0])
    more = f"{count(len(rest), 'quicker node')} not shown: {seconds(usual)} of own work per save"
    return Table(label, ("node", *phases, "own work"), rows), note, more if rest else ""


def _cell(value: float | None, top: float) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}", "cell h0", "this node has no such phase")
    return Cell(seconds(value), shade(value, top), f"{number(value)} s")
