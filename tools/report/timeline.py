"""The sections about time: attempts, a heat map of what saves took (nodes by phases), checkpoints, events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from torchrelay.metadata.handlers import WAITING, NodeRow, StragglerSummary, summary
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
    filled,
    line,
    moment,
    number,
    seconds,
    shade,
    share,
    whole_ticks,
    word,
)
from torchrelay.tools.report.run_data import (
    BranchNote,
    EpochRow,
    RunAttempt,
    RunFacts,
)

_BAR = 22
_MOST_BARS = 160
_MOST_ROWS = 40
_ENDINGS = {
    "FINISHED": ("finished", "good"),
    "STOPPED": ("stopped", "calm"),
    "PREEMPTED": ("preempted", "calm"),
    "FAILED": ("failed", "bad"),
    "DIED": ("died unexpectedly", "bad"),
    "RUNNING": ("running", "busy"),
}


class AttemptRow(NamedTuple):
    """One attempt as the page shows it: `word` and `tone` say how it ended, `text` is the rest in words."""

    name: str
    word: str
    tone: str
    text: str
    reason: str
    chart: Chart


@dataclass(frozen=True)
class Bar:
    """A part of a row: `kind` is `train`, `save`, `wait`, `behind` or `load`; times are since the begin."""

    kind: str
    begin: float
    end: float
    text: str


_LEGEND = {
    "train": "training (shades alternate by epoch)",
    "save": "saving",
    "wait": "waiting for the slowest node",
    "behind": "saving in the background",
    "load": "loading",
    "idle": "start-up and shutdown",
}


def timeline(runs: Sequence[RunFacts]) -> PageSection | None:
    """When each attempt trained, saved and waited; None where none recorded a time."""
    known = [run for run in runs if run.attempts]
    if not known:
        return None
    kinds = {bar.kind.partition(" ")[0] for run in known for one in run.attempts for bar in bars_of(one)}
    content = {
        "legend": [(kind, text) for kind, text in _LEGEND.items() if kind in kinds or kind == "idle"],
        "runs": [(run, _rows(run), _axis(run), len(run.attempts) - _MOST_ROWS, _table(run)) for run in known],
    }
    return PageSection("time", "Time", _finding(known), content)


def bars_of(attempt: RunAttempt) -> list[Bar]:
    """The parts of one attempt. With very many epochs, neighbours share a bar, with their saves added."""
    bars = []
    for one in attempt.saves:
        if one.kind == "load" and one.end is not None:
            end, took = one.end - attempt.begin, one.slowest_secs
            bars.append(Bar("load", end - took, end, f"loading: {seconds(took)}"))
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
        spent = min(sum(one.slowest_secs for one in within), end - before)
        waited = min(sum(one.waiting_secs for one in within), spent)
        split, quick, train = end - spent, end - waited, "train odd" if index // group % 2 else "train"
        if any(one.saved is None for one in some):
            # The save runs while the next epoch trains, so it takes no time from the row.
            bars.append(Bar(train, before, end, f"{name}: {seconds(end - before)}"))
            bars.append(Bar("behind", split, end, f"{name}: saved in the background, {seconds(spent)}"))
        else:
            bars.append(Bar(train, before, split, f"{name}: training, {seconds(split - before)}"))
            if spent > 0:
                bars.append(Bar("save", split, quick, f"{name}: saving, {seconds(quick - split)}"))
            if waited > 0:
                text = f"{name}: waiting for the slowest node, {seconds(waited)}"
                bars.append(Bar("wait", quick, end, text))
        before = end
    return bars


def wall_secs(run: RunFacts) -> float:
    """Seconds in which the run was running, without the pauses between attempts."""
    return sum(one.end - one.begin for one in run.attempts)


def saving_secs(run: RunFacts) -> float:
    """Seconds of saves during which the training waited."""
    held = (bar for attempt in run.attempts for bar in bars_of(attempt) if bar.kind in ("save", "wait"))
    return sum(bar.end - bar.begin for bar in held)


def _rows(run: RunFacts) -> list[AttemptRow]:
    """The newest attempts, drawn over the same span; places are shares of the width, so a phone shows all."""
    attempts = run.attempts[-_MOST_ROWS:]
    pauses = [after.begin - before.end for before, after in pairwise(attempts)]
    span = _span(run)
    return [
        AttemptRow(
            f"Attempt {one.number}" if one.number is not None else f"Start {one.generation}",
            *_ENDINGS.get(one.outcome, (one.outcome.lower(), "calm")),
            _text(one, pause),
            one.reason if one.outcome in ("FAILED", "DIED", "PREEMPTED") else "",
            Chart(
                f"Attempt {one.number} of {run.name}: {seconds(one.end - one.begin)}",
                0,
                _BAR,
                [
                    _bar("idle", 0.0, one.end - one.begin, span),
                    *(_bar(bar.kind, bar.begin, bar.end, span, bar.text) for bar in bars_of(one)),
                ],
                "bars",
            ),
        )
        for one, pause in zip(attempts, [0.0, *pauses], strict=True)
    ]


def _span(run: RunFacts) -> float:
    return max([1e-3, *(one.end - one.begin for one in run.attempts[-_MOST_ROWS:])])


def _bar(kind: str, begin: float, end: float, span: float, title: str = "") -> Shape:
    left, right = (min(100.0, max(0.0, 100 * one / span)) for one in (begin, end))
    top, height = (_BAR - 6, 6) if kind == "behind" else (0, _BAR)
    size: dict[str, float | str] = {"width": f"{max(0.08, right - left):.3f}%", "height": height}
    return Shape("rect", kind, {"x": f"{left:.3f}%", "y": top, **size}, title=title)


def _axis(run: RunFacts) -> Chart:
    span = _span(run)
    shapes = []
    for at in clock_ticks(span):
        share_of = 100 * at / span
        style = "tick" if share_of < 4 else "tick end" if share_of > 96 else "tick middle"
        shapes.append(word(seconds(at) if at else "0", f"{share_of:.2f}%", 14, style))
    return Chart(f"0 to {seconds(span)}", 0, 18, shapes, "bars")


def _text(attempt: RunAttempt, pause: float) -> str:
    words = [seconds(attempt.end - attempt.begin)]
    if attempt.points:
        first, last = attempt.points[0].epoch, attempt.points[-1].epoch
        words.insert(0, f"epoch {first}" if first == last else f"epochs {first} to {last}")
    if attempt.world_size is not None:
        words.append(count(attempt.world_size, "rank"))
    if pause > 0:
        words.append(f"{seconds(pause)} after the previous attempt")
    return ", ".join(words)


def _finding(runs: Sequence[RunFacts]) -> str:
    wall, saving = sum(map(wall_secs, runs)), sum(map(saving_secs, runs))
    attempts = sum(len(run.attempts) for run in runs)
    bad = sum(one.outcome in ("FAILED", "DIED") for run in runs for one in run.attempts)
    text = f"Training waited for saves during {share(saving, wall)} of {seconds(wall)}"
    return text + (f"; {bad} of {count(attempts, 'attempt')} failed" if bad else "")


def _table(run: RunFacts) -> Table:
    rows = [
        (
            "" if one.number is None else str(one.number),
            moment(one.begin),
            seconds(one.end - one.begin),
            "" if one.world_size is None else str(one.world_size),
            str(len(one.points)),
            _ENDINGS.get(one.outcome, (one.outcome, ""))[0],
            one.reason,
        )
        for one in run.attempts[-_MOST_ROWS:]
    ]
    columns = ("attempt", "began", "took", "ranks", "epochs", "ended", "reason")
    return filled(Table(f"Attempts of {run.name}", columns, rows))


_PHASES = ("stage", "plan", "hash", "write", "fsync", "commit")
_MOST_NODES = 32


def saves(runs: Sequence[RunFacts]) -> PageSection | None:
    """How long saves took, and where; None where no times are noted."""
    found = [(run, summary([one.nodes for one in run.save_times])) for run in runs]
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
            Cell(seconds(_all_secs(row)), "own", f"{number(_all_secs(row))} s"),
        ]
        for row in shown
    ]
    note = (
        f"{label}. Own work leaves out {' and '.join(sorted(WAITING))}, where nodes wait for each other. "
        f"The strongest shade is {seconds(top)}."
    )
    usual = median([row.own_secs for row in rest] or [0.0])
    more = f"{count(len(rest), 'quicker node')} not shown: {seconds(usual)} of own work per save"
    return Table(label, ("node", *phases, "own work", "total"), rows), note, more if rest else ""


def _cell(value: float | None, top: float) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}", "cell h0", "this node has no such phase")
    return Cell(seconds(value), shade(value, top), f"{number(value)} s")


_TONES = {"chosen": "good", "older": "calm", "not reached": "calm", "abandoned": "faded"}


def checkpoints(runs: Sequence[RunFacts]) -> PageSection | None:
    """A table per run, newest epoch first; None where no epoch is committed."""
    known = [run for run in runs if run.epochs]
    if not known:
        return None
    rows = []
    for run in known:
        best = run.best_point[0] if run.best_point else None
        at_best = [one for one in run.epochs if (one.epoch, one.step) == (best, 0)]
        counted = [one for one in at_best if one.standing != "abandoned"]
        rows.append((run, run.best[0] if run.best else "", counted))
    standings = Counter(row.standing for run in known for row in run.epochs)
    bad = sum(amount for standing, amount in standings.items() if standing not in _TONES)
    every = count(standings.total() + sum(run.epochs_left_out for run in known), "checkpoint")
    abandoned = f", {standings['abandoned']} of them abandoned" if standings["abandoned"] else ""
    title = f"{bad} of {every} cannot be used" if bad else f"{every}{abandoned}, none known to be damaged"
    return PageSection("checkpoints", "Checkpoints", title, {"runs": rows})


def tone_of(row: EpochRow) -> str:
    """The class of the colour of its standing."""
    return _TONES.get(row.standing, "bad")


_STORY_ROW = 44
_MOST_BRANCHES = 40
_MOST_DOTS = 200
_BAD = frozenset({"failure", "save failed", "quarantine", "warning", "preempted", "short epoch", "rewind"})

_USUAL = frozenset({"start", "end", "saved", "retire"})
"""What every run has: the sections about time and checkpoints show it."""


def story(runs: Sequence[RunFacts]) -> PageSection | None:
    """Branches, stages, events; None where there are none but begins, ends and saves."""
    parts = []
    for run in runs:
        events = sorted((*run.events, *run.happened), key=lambda one: (one.time is None, one.time or 0.0))
        if len(run.branches) > 1 or run.upstream or any(one.kind not in _USUAL for one in events):
            tree = _tree(run) if len(run.branches) > 1 else None
            # What fell back, failed or was thrown away comes first.
            parts.append((run, tree, [one for one in events if one.kind in _BAD], events))
    if not parts:
        return None
    failures = sum(one.kind in ("failure", "save failed") for run in runs for one in run.events)
    damage = sum(one.kind == "quarantine" for run in runs for one in run.happened)
    joints = Counter(joint.kind for run in runs for joint in run.course.joints)
    amounts = {"failure": failures, "damaged epoch": damage}
    amounts |= {"fallback": joints["fallback"], "rewind": joints["rewind"]}
    words = [count(amount, what) for what, amount in amounts.items() if amount]
    title = f"Events: {', '.join(words)}" if words else "No failures and no fallbacks"
    return PageSection("story", "Events", title, {"runs": parts})


def _tree(run: RunFacts) -> Chart:
    """A row per branch over epochs, joined to its parent where it began. Places are shares of the width."""
    branches = run.branches[-_MOST_BRANCHES:]
    rows = {one.id: index * _STORY_ROW + 30 for index, one in enumerate(branches)}
    last = max([1, *(epoch for one in branches for epoch in one.epochs), *(_base(one) for one in branches)])
    x = Scale(0.0, float(last), 2.0, 98.0)
    height = _STORY_ROW * len(branches) + 26
    drawn = [_branch(one, rows, x) for one in branches]
    names = [word(str(one), f"{x(one):.2f}%", height - 6) for one in whole_ticks(0, last, 8)]
    return Chart(f"Branches of {run.name} over epochs", 0, height, [*drawn, *names], "bars")


def _base(branch: BranchNote) -> int:
    return int(branch.base.partition("+")[0]) if branch.base else 0


def _branch(branch: BranchNote, rows: dict[int, int], x: Scale) -> Shape:
    y, begin = rows[branch.id], _base(branch)
    counted = [epoch for epoch in branch.epochs if epoch not in branch.abandoned]
    last, end = max([begin, *counted]), max([begin, *branch.epochs])
    title = f"branch {branch.id}: {branch.how}"
    at = {epoch: f"{x(epoch):.2f}%" for epoch in (begin, last, end)}
    shapes: list[Shape] = []
    if branch.parent is not None and branch.parent in rows:
        shapes.append(line("twig current", (at[begin], at[begin]), (rows[branch.parent], y)))
    if end > last:
        shapes.append(line("twig past", (at[last], at[end]), (y, y)))
    shapes.append(line("twig current", (at[begin], at[last]), (y, y)))
    for epoch in branch.epochs[:: max(1, len(branch.epochs) // _MOST_DOTS)]:
        style = f"twigdot {'past' if epoch in branch.abandoned else 'current'}"
        place: dict[str, float | str] = {"cx": f"{x(epoch):.2f}%", "cy": y, "r": 4}
        shapes.append(Shape("circle", style, place))
    late = begin > end / 2  # then there is more room to the left
    place_of, style = ("100%", "tick end") if late else (f"{x(begin) - 1:.2f}%", "tick")
    shapes.append(word(title, place_of, y - 12, style))
    return Shape("g", "", title=title, inside=shapes)
