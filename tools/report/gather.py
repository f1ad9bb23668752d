"""Everything that a page says of a run, read from its directory. What fails is said, not raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.open import best_in
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.metadata.code.capture import captures
from torchrelay.metadata.fs import read_lines
from torchrelay.metadata.run_directory import CheckpointsAlone, RunDirectory
from torchrelay.records import Json
from torchrelay.runners.monitoring.status import Standing, standing
from torchrelay.tools.report.checkpoints import (
    branches_of,
    committed_of,
    committed_points,
    happened,
    manifests_of,
    norms_of,
    recorded_saves,
    rewinds_of,
    rows_of,
    saves_of_attempts,
    sizes_of,
)
from torchrelay.tools.report.run_data import (
    Event,
    Launch,
    Point,
    ReadLimits,
    RunAttempt,
    RunFacts,
    Save,
    StepPoint,
    Troubles,
    bounded,
    course_of,
    metrics_in,
    moment_of,
    point_of,
    small_text,
)

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


def attempts_of(
    points: Sequence[tuple[int, Sequence[Point]]],
    events: Sequence[Mapping[str, Json]],
    saves: Sequence[Save],
    status: Mapping[str, Json],
    stands: Standing,
) -> tuple[RunAttempt, ...]:
    """Every start that left a time behind, in order, with the saves and loads that fall into it."""
    measured = dict(points)
    by_start: dict[int, list[Mapping[str, Json]]] = {}
    for event in events:
        by_start.setdefault(event["generation"], []).append(event)
    found = [
        one
        for generation in sorted({*measured, *by_start})
        if (one := _attempt(generation, measured.get(generation, ()), by_start.get(generation, ())))
        is not None
    ]
    if found and found[-1].outcome == "DIED" and status.get("generation") == found[-1].generation:
        # The last start may be running, or have ended in a way that only `status.json` records.
        last, updated = found[-1], moment_of({"time": status.get("updated")})
        end = max(last.end, updated) if updated is not None else last.end
        state = str(status.get("state", "DIED"))
        killed = state == "RUNNING" and stands.word == "interrupted"
        outcome, reason = ("DIED", stands.why) if killed else (state, str(status.get("error", "")))
        found[-1] = replace(last, end=end, outcome=outcome, reason=reason)
    within: dict[int, list[Save]] = {}
    order = sorted(range(len(found)), key=lambda index: found[index].begin)
    for save in saves:
        owners = [index for index in order if found[index].begin <= (save.end or 0.0) + 0.001]
        if owners:
            within.setdefault(owners[-1], []).append(save)
    for index, own in within.items():
        end = max([found[index].end, *(save.end for save in own if save.end is not None)])
        found[index] = replace(found[index], saves=tuple(own), end=end)
    return tuple(found)


def launches_of(captured: Sequence[Mapping[str, Any]]) -> tuple[Launch, ...]:
    """The starts by what they recorded in `captured.<attempt>.json`; values of other types are left out."""
    found = []
    for one in captured:
        argv, params, torch = one.get("argv"), one.get("params"), one.get("torch")
        facts = {name: one.get(name) for name in ("directory", "host", "python", "platform")}
        facts["torch"] = torch.get("version") if isinstance(torch, Mapping) else None
        known = {name: value for name, value in facts.items() if isinstance(value, str)}
        words = tuple(map(str, argv)) if isinstance(argv, list) else ()
        given = params if isinstance(params, Mapping) else None
        found.append(Launch(_whole(one.get("attempt")) or 0, words, given, known))
    return tuple(found)


def _event(line: Mapping[str, Json]) -> Event:
    """An event as a line for people."""
    text = line.get("text") or line.get("error")
    if not isinstance(text, str):
        parts = {name: "none" if value is None else value for name, value in line.items()}
        text = ", ".join(f"{name} {value}" for name, value in parts.items() if name not in _QUIET)
    return Event(moment_of(line), str(line.get("kind", "?")), text, line["generation"])


def _attempt(
    generation: int, points: Sequence[Point], events: Sequence[Mapping[str, Json]]
) -> RunAttempt | None:
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
    return RunAttempt(
        generation,
        _whole(start.get("attempt")),
        min(times),
        max(times),
        outcome,
        reason,
        _whole(start.get("world_size")),
        tuple(points),
    )


def _whole(value: Json) -> int | None:
    return value if type(value) is int else None


_UPSTREAMS = 32
_UPSTREAM_BYTES = 16 << 10


def gather(run: RunDirectory, limits: ReadLimits | None = None) -> RunFacts:
    """Read a run directory; damaged and missing parts are named in `trouble`."""
    limits, troubles = limits or ReadLimits(), Troubles()
    storage = storage_of(run.checkpoints, "the checkpoints")
    identity = troubles.tried(run.identity, None) or {}
    status: dict[str, Any] = troubles.tried(run.status, {})
    committed = committed_of(storage, troubles)
    if isinstance(run, CheckpointsAlone):
        starts = committed_points(storage, committed, limits, troubles)
        status = {"epoch": starts[-1][1][-1].epoch} if starts else {}
    else:
        starts = points_of(run, troubles)
    course = course_of(starts, rewinds_of(committed.history))
    stands = standing(run.path)
    manifests = manifests_of(storage, committed.view.line(), limits, troubles)
    saves = saves_of_attempts(storage, committed.entries, limits, troubles)
    by_start = {(point.generation, point.epoch): point for _, points in starts for point in points}
    none: list[dict[str, Any]] = []

    def recorded() -> list[dict[str, Any]]:  # nothing where a record is a link, which may lead elsewhere
        return [] if any(one.is_symlink() for one in run.path.glob("captured.*.json")) else captures(run.path)

    host, stop = _text(status.get("host")), status.get("stop")
    said = [status[name] for name in ("error", "reason") if isinstance(status.get(name), str)]
    reason = said[0] if said else ", ".join(map(str, stop)) if isinstance(stop, list) else ""
    events = troubles.tried(lambda: list(bounded(run.events(), "events", troubles)), none)
    steps = troubles.tried(run.steps, none)
    return RunFacts(
        name=run.name,
        path=str(run.where),
        job=_text(identity.get("job")) or committed.view.job_name,
        state=_text(status.get("state")),
        stands=stands,
        epoch=_whole(status.get("epoch")),
        created=moment_of({"time": identity.get("created")}),
        updated=moment_of({"time": status.get("updated")}),
        exit_code=_whole(status.get("exit_code")),
        exit_reason=reason,
        best=best_in(identity.get("best")),
        hosts=manifests[-1].world.hosts if manifests else (host,) if host is not None else (),
        identity=identity,
        launches=launches_of(troubles.tried(recorded, none)),
        config=small_text(run.path / "config" / "resolved.yaml"),
        course=course,
        steps=tuple(StepPoint(one["step"], metrics_in(one["metrics"])) for one in steps),
        attempts=attempts_of(starts, events, recorded_saves(run, troubles), status, stands),
        events=tuple(map(_event, events)),
        epochs=rows_of(committed, saves, by_start, {one.epoch: one for one in course.points}, limits),
        epochs_left_out=max(0, len(committed.entries) - limits.epoch_rows),
        start_now=committed.start.sentence if committed.start else "",
        branches=branches_of(committed),
        happened=happened(committed.history),
        save_times=tuple(
            saves[entry.attempt_name] for entry in committed.entries if entry.attempt_name in saves
        ),
        sizes=tuple(map(sizes_of, manifests)),
        norms=norms_of(storage, committed.view.line(), limits),
        upstream=_upstream(run.path / "lineage"),
        trouble=tuple(troubles.said),
    )


def _upstream(directory: Path) -> tuple[tuple[str, str], ...]:
    """The aliases below `lineage/`, each with the small text files directly in it."""
    if directory.is_symlink():
        return ()
    try:
        names = sorted(one.name for one in directory.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError:
        return ()
    return tuple((name, _texts(directory / name)) for name in names[:_UPSTREAMS])


def _texts(directory: Path) -> str:
    try:
        files = sorted(one for one in directory.iterdir() if one.suffix in (".json", ".yaml", ".yml", ".txt"))
    except OSError as error:
        return f"could not be read: {error.strerror}"
    texts = ((path.name, small_text(path, _UPSTREAM_BYTES)) for path in files[:_UPSTREAMS])
    return "\n".join(f"{name}\n{text}" for name, text in texts if text is not None)


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None
