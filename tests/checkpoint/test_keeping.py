"""Rules of what is kept: what each wants, what they want together, and what none of them can take away."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_helpers import entry, run_of, take

from torchrelay.checkpoint.format.position import DAMAGED, CommittedPosition, Key, Position, State, TagOrPin
from torchrelay.checkpoint.log.retention import (
    KEEP_ALL,
    Best,
    Keeping,
    Scores,
)
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import pin_draft
from torchrelay.errors import UsageError

COUNTS = st.one_of(st.none(), st.integers(1, 5))
SCORES = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0]), st.floats())


@st.composite
def views(draw: st.DrawFn) -> LogView:
    """A line of up to ten epochs: damaged, stripped, marked or referred to."""
    entries: list[CommittedPosition] = []
    for epoch in range(draw(st.integers(1, 10))):
        needs = draw(st.lists(st.sampled_from(entries), max_size=2, unique=True)) if entries else []
        health, stripped = draw(st.sampled_from(["ok", "ok", "ok", DAMAGED])), draw(st.integers(0, 4)) == 0
        made = replace(entry(epoch, needs=tuple(one.attempt_name for one in needs)), health=health)
        entries.append(replace(made, resumable=False, groups=("main",)) if stripped else made)
    marked = draw(st.lists(st.sampled_from(entries), max_size=2, unique=True))
    marks = tuple(TagOrPin("pin", f"p{number}", one.key) for number, one in enumerate(marked))
    return LogView(State(entries=tuple(entries), marks=marks))


@st.composite
def scored(draw: st.DrawFn) -> tuple[LogView, Scores]:
    """A line and the metric of some of its epochs; of some it could not be read."""
    view = draw(views())
    values = {one.attempt_name: draw(SCORES) for one in view.entries if draw(st.integers(0, 3))}
    missing = [one.attempt_name for one in view.entries if one.attempt_name not in values]
    unread = draw(st.lists(st.sampled_from(missing), unique=True)) if missing else []
    return view, Scores(values, frozenset(unread))


@st.composite
def rules(draw: st.DrawFn) -> tuple[LogView, Keeping]:
    """A line, and any rules for it, which know its metrics."""
    view, scores = draw(scored())
    best = draw(st.one_of(st.none(), st.builds(Best, st.just("m"), st.sampled_from(["max", "min"]), COUNTS)))
    best = best if best is None or best.count else replace(best, count=1)
    return view, Keeping(draw(COUNTS), draw(COUNTS), draw(COUNTS), best, scores)


def best_by(scores: Scores, mode: str, count: int = 1) -> Keeping:
    """The rule of the best epochs, which knows their metrics."""
    return Keeping(best=Best("m", mode, count), scores=scores)


def best_of(values: list[float | None], mode: str, count: int = 1) -> list[int]:
    """The epochs that are kept of a healthy line with these scores."""
    line = tuple(map(entry, range(len(values))))
    known = {line[epoch].attempt_name: value for epoch, value in enumerate(values) if value is not None}
    return sorted(key.position.epoch for key in best_by(Scores(known), mode, count).kept(line))


@pytest.mark.parametrize(
    ("values", "mode", "count", "kept"),
    [
        ([None, 0.0, -1.0], "max", 1, [1]),
        ([None, 0.0, 0.1], "min", 1, [1]),
        ([0.0, 0.5, -0.0, 0.0], "min", 2, [0, 2]),
        ([0.3, math.nan, 0.2], "max", 1, [0]),
        ([0.3, math.inf, 0.2], "max", 1, [0]),
        ([0.3, -math.inf, 0.2], "min", 1, [2]),
        ([0.1, 0.7, 0.7, 0.7], "max", 2, [1, 2]),
        ([0.1, None, 0.2], "max", 9, [0, 2]),
        ([None, math.nan, None], "max", 1, [0, 1, 2]),
    ],
)
def test_the_best_are_those_with_the_best_finite_scores(
    values: list[float | None], mode: str, count: int, kept: list[int]
) -> None:
    """Zero is a score, nan, infinity and none are not, the earlier of equal ones wins; without scores all."""
    assert best_of(values, mode, count) == kept


def test_an_epoch_whose_metrics_cannot_be_read_stays() -> None:
    """It may be the best; a damaged one is not, whatever its score was."""
    line = (entry(0), entry(1), replace(entry(2), health=DAMAGED), entry(3))
    scores = Scores({line[0].attempt_name: 0.1, line[2].attempt_name: 0.9}, frozenset({line[1].attempt_name}))
    assert {key.position.epoch for key in best_by(scores, "max").kept(line)} == {0, 1}


@settings(deadline=None, max_examples=50)
@given(scored(), st.sampled_from(["max", "min"]), st.integers(1, 5))
def test_keeping_more_never_loses_an_epoch(story: tuple[LogView, Scores], mode: str, count: int) -> None:
    """What N newest or best keep, N + 1 keep, too; a union keeps what either does, and nothing else."""
    view, scores = story
    line = view.line()
    best, last = best_by(scores, mode, count), Keeping(count)
    assert best.kept(line) <= best_by(scores, mode, count + 1).kept(line)
    assert last.kept(line) <= Keeping(count + 1).kept(line)
    assert replace(best, last=count, every=3).kept(line) == (
        best.kept(line) | last.kept(line) | Keeping(every=3).kept(line)
    )


@settings(deadline=None, max_examples=50)
@given(rules())
def test_whatever_the_rules_a_run_can_go_on(story: tuple[LogView, Keeping]) -> None:
    """The newest epoch to resume from stays whole, marked ones too, and all that anything left refers to."""
    view, keeping = story
    after = keeping.after(view)
    assert after.entries
    newest = view.newest()
    assert newest is None or newest in after.entries
    assert {view.entry(mark.target) for mark in view.state.marks} <= set(after.entries)
    assert after.tries <= view.state.tries
    assert not after.tries & {one.attempt_name for one in after.retiring if one.groups is None}
    stripped = {one.attempt_name for one in after.retiring if one.groups is not None}
    assert stripped <= {one.attempt_name for one in after.entries if not one.resumable}


@settings(deadline=None, max_examples=50)
@given(rules())
def test_an_epoch_that_any_rule_keeps_is_kept(story: tuple[LogView, Keeping]) -> None:
    """Each rule alone keeps a part of what all together keep."""
    view, keeping = story
    left = {one.key for one in keeping.after(view).entries}
    parts = [replace(KEEP_ALL, last=keeping.last), replace(KEEP_ALL, every=keeping.every)]
    parts.append(replace(KEEP_ALL, best=keeping.best, scores=keeping.scores))
    for part in parts:
        if part != KEEP_ALL:
            assert part.kept(view.line()) <= left


@settings(deadline=None, max_examples=25)
@given(rules(), st.lists(st.integers(0, 9), max_size=2))
def test_what_is_foretold_is_what_happens(story: tuple[LogView, Keeping], suspected: list[int]) -> None:
    """`after` says of a log what `retire` then makes of it, also with suspects."""
    view, keeping = story
    suspects = {Key(0, Position(epoch)) for epoch in suspected}
    writer = take(run_of([]))
    for one in view.entries:
        writer.commit(replace(one, health="ok"))
        if not one.healthy:
            writer.quarantine(one.key, "a test said so")
    for mark in view.state.marks:
        writer.append_draft(pin_draft(mark.name, mark.target))
    foretold = keeping.after(writer.view, suspects)
    keeping.retire(writer, suspects)
    assert writer.view.state == foretold
    writer.close()


@pytest.mark.parametrize(
    "given",
    ["val/acc", ("val/acc",), ("val/acc", "most"), ("", "max"), (3, "max"), ["val/acc", "max"]]
    + [("val/acc", "max", count) for count in (0, -1, True, 1.5, "3")],
)
def test_a_best_that_means_nothing_is_refused(given: object) -> None:
    """A metric, a direction, a count from 1: anything else is named with an example."""
    with pytest.raises(UsageError, match=r"invalid keep_best=.*for example \('val/acc', 'max'\)"):
        Best.of(given)
