"""The starts of a run: what each measured, how long it lasted, how it ended, by the run directory's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchrelay.metadata.fs import read_lines
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import Standing
from torchrelay.runners.report.course import moment_of, point_of
from torchrelay.runners.report.facts import Attempt, Event, Point, Save
from torchrelay.runners.report.limits import Troubles, bounded

Json = Any
_ENDS = {"failure": "FAILED", "preempted": "PREEMPTED"}
_QUIET = frozenset({"time", "kind", "generation"})


def points_of(run: RunDirectory, troubles: Troubles) -> list[tuple[int, list[Point]]]:
    """What each start measured, replaced epochs included, by generation."""

    def read(generation: int) -> list[Point]:
        path = run.path / f"metrics.{generation}.jsonl"
        found = (point_of(generation, line) for line in bounded(read_lines(path), path.name, troubles))
        return [one for one in found if one is not None]

    numbers = [number for number, _ in run.generations("metrics")]
    return [(number, troubles.tried(partial(read, number), [])) for number in numbers]


def events_of(run: RunDirectory, troubles: Troubles) -> list[dict[str, Json]]:
    """All events in the order of generations; files that cannot be read are left out."""
    return troubles.tried(lambda: list(bounded(run.events(), "events", troubles)), [])


def attempts_of(
    points: Sequence[tuple[int, Sequence[Point]]],
    events: Sequence[Mapping[str, Json]],
    saves: Sequence[Save],
    status: Mapping[str, Json],
    stands: Standing,
) -> tuple[Attempt, ...]:
    """Every start that left a time behind, in order, with the saves and loads that fall into it."""
    measured = dict(points)
    told: dict[int, list[Mapping[str, Json]]] = {}
    for event in events:
        told.setdefault(event["generation"], []).append(event)
    found = [
        one
        for generation in sorted({*measured, *told})
        if (one := _attempt(generation, measured.get(generation, ()), told.get(generation, ()))) is not None
    ]
    if found:
        found[-1] = _by_status(found[-1], status, stands)
    return tuple(_with_saves(found, saves))


def told(events: Sequence[Mapping[str, Json]]) -> tuple[Event, ...]:
    """Events as lines for people."""
    return tuple(
        Event(moment_of(one), str(one.get("kind", "?")), _details(one), one["generation"]) for one in events
    )


def _attempt(
    generation: int, points: Sequence[Point], events: Sequence[Mapping[str, Json]]
) -> Attempt | None:
    times = [time for time in (*map(moment_of, events), *(one.time for one in points)) if time is not None]
    if not times:
        return None
    start = next((one for one in events if one.get("kind") == "start"), {})
    outcome, reason = "DIED", ""
    for one in events:
        kind = one.get("kind")
        if kind == "end":
            outcome, reason = str(one.get("state", "FINISHED")), ""
        elif isinstance(kind, str) and kind in _ENDS:
            outcome, reason = _ENDS[kind], str(one.get("error") or one.get("reason") or "")
    return Attempt(
        generation,
        _whole(start.get("attempt")),
        min(times),
        max(times),
        outcome,
        reason,
        _whole(start.get("world_size")),
        tuple(points),
    )


def _by_status(last: Attempt, status: Mapping[str, Json], stands: Standing) -> Attempt:
    """The last start may be going on, or have ended in a way that only `status.json` tells."""
    if last.outcome != "DIED" or status.get("generation") != last.generation:
        return last
    updated = moment_of({"time": status.get("updated")})
    end = max(last.end, updated) if updated is not None else last.end
    state = str(status.get("state", "DIED"))
    if state == "RUNNING" and stands.word == "interrupted":
        return replace(last, end=end, reason=stands.why)
    return replace(last, end=end, outcome=state, reason=str(status.get("error", "")))


def _with_saves(attempts: Sequence[Attempt], saves: Sequence[Save]) -> list[Attempt]:
    by_start: dict[int, list[Save]] = {}
    order = sorted(range(len(attempts)), key=lambda index: attempts[index].begin)
    for save in saves:
        owners = [index for index in order if attempts[index].begin <= (save.end or 0.0) + 0.001]
        if owners:
            by_start.setdefault(owners[-1], []).append(save)
    return [
        replace(
            one, saves=tuple(by_start.get(index, ())), end=max([one.end, *_ends(by_start.get(index, ()))])
        )
        for index, one in enumerate(attempts)
    ]


def _ends(saves: Sequence[Save]) -> list[float]:
    return [one.end for one in saves if one.end is not None]


def _details(event: Mapping[str, Json]) -> str:
    text = event.get("text") or event.get("error")
    if isinstance(text, str):
        return text
    parts = (f"{name} {_short(value)}" for name, value in event.items() if name not in _QUIET)
    return ", ".join(parts)


def _short(value: Json) -> str:
    return "none" if value is None else str(value)


def _whole(value: Json) -> int | None:
    return value if type(value) is int else None
