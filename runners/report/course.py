"""The epochs of a run as its metrics files tell them, start after start. Pure but for `read_starts`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchrelay.runners.report.facts import Course, Joint, Point, StepPoint

Json = Any
_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How JSON, which has no such numbers, is told them (`journal.finite`)."""


def metric_value(value: Json) -> float | None:
    """A metric out of a file; None for what is no number."""
    if isinstance(value, str):
        return _NAMES.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def moment_of(line: Mapping[str, Json]) -> float | None:
    """The time of a line, where it is one."""
    found = line.get("time")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    return float(found) if abs(found) < 1e12 else None


def point_of(generation: int, line: Mapping[str, Json]) -> Point | None:
    """A line of a metrics file; None for one that tells no epoch."""
    epoch, metrics = line.get("epoch"), line.get("metrics")
    if type(epoch) is not int or not 0 <= epoch < 10**8:
        return None
    values = (
        {str(name): metric_value(value) for name, value in (metrics or {}).items()}
        if isinstance(metrics, Mapping)
        else {}
    )
    saved = line.get("saved")
    known = {name: value for name, value in values.items() if value is not None}
    return Point(epoch, generation, moment_of(line), saved if isinstance(saved, bool) else None, known)


def steps_of(lines: Iterable[Mapping[str, Json]]) -> tuple[StepPoint, ...]:
    """Lines of points within epochs, which have a step and metrics each."""
    found = []
    for line in lines:
        values = {str(name): metric_value(value) for name, value in line["metrics"].items()}
        known = {name: value for name, value in values.items() if value is not None}
        found.append(StepPoint(line["step"], known))
    return tuple(found)


def course_of(
    starts: Iterable[tuple[int, Sequence[Point]]], rewinds: Mapping[int, tuple[int, bool]]
) -> Course:
    """What counts and what was replaced: a later start makes older epochs from its first one on obsolete.

    `starts` are generations in order with their points; `rewinds` has, by generation, the epoch that the log
    says a start went back to, and whether damage forced it to.
    """
    line: list[Point] = []
    abandoned: list[tuple[Point, ...]] = []
    joints: list[Joint] = []
    for generation, points in starts:
        if not points:
            continue
        first = points[0].epoch
        kept = [one for one in line if one.epoch < first]
        gone = line[len(kept) :]
        if gone:
            abandoned.append((*kept[-1:], *gone))
        if line or generation in rewinds:
            joints.append(_joint(generation, first, bool(gone), rewinds))
        line = [*kept, *_in_order(points)]
    return Course(tuple(line), tuple(abandoned), tuple(joints))


def _joint(generation: int, first: int, replaced: bool, rewinds: Mapping[int, tuple[int, bool]]) -> Joint:
    if generation in rewinds:
        epoch, forced = rewinds[generation]
        return Joint("fallback" if forced else "rewind", epoch, generation)
    return Joint("rewind" if replaced else "resume", max(0, first - 1), generation)


def _in_order(points: Sequence[Point]) -> list[Point]:
    """Of an epoch that one start told twice the later line counts."""
    known = {one.epoch: one for one in points}
    return [known[epoch] for epoch in sorted(known)]
