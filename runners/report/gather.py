"""Everything that a page says of a run, read from its directory. What fails is said, not raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.report.committed import (
    Committed,
    branches_of,
    committed_of,
    happened,
    rewinds_of,
    rows_of,
)
from torchrelay.runners.report.course import course_of, moment_of, steps_of
from torchrelay.runners.report.facts import Point, RunFacts, Save, SavedEpoch, Upstream
from torchrelay.runners.report.limits import Limits, Troubles, small_text
from torchrelay.runners.report.norms import norms_of
from torchrelay.runners.report.saves import saves_of_tries, saves_told
from torchrelay.runners.report.sizes import manifests_of, sizes_of
from torchrelay.runners.report.starts import attempts_of, events_of, points_of, told

Json = Any
_UPSTREAMS = 32
_UPSTREAM_BYTES = 16 << 10


def gather(run: RunDirectory, limits: Limits | None = None) -> RunFacts:
    """Read a run directory; damaged and missing parts are named in `trouble`."""
    limits, troubles = limits or Limits(), Troubles()
    storage = storage_of(run.checkpoints, "the checkpoints")
    identity = troubles.tried(run.identity, None) or {}
    status: dict[str, Any] = troubles.tried(run.status, {})
    committed = committed_of(storage, troubles)
    starts = points_of(run, troubles)
    course = course_of(starts, rewinds_of(committed.history))
    stands = standing(run.path)
    manifests = manifests_of(storage, committed.view.line(), limits, troubles)
    saves = saves_of_tries(storage, committed.entries, limits, troubles)
    by_start = {(point.generation, point.epoch): point for _, points in starts for point in points}
    events = events_of(run, troubles)
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
        exit_reason=_exit_reason(status),
        best=best_of(identity.get("best")),
        hosts=_hosts(status, manifests),
        identity=identity,
        config=small_text(run.path / "config" / "resolved.yaml"),
        course=course,
        steps=steps_of(troubles.tried(run.steps, [])),
        attempts=attempts_of(starts, events, saves_told(run, troubles), status, stands),
        events=told(events),
        epochs=rows_of(committed, saves, by_start, _current(course.points), limits),
        epochs_left_out=max(0, len(committed.entries) - limits.epoch_rows),
        start_now=committed.start.sentence if committed.start else "",
        branches=branches_of(committed),
        happened=happened(committed.history),
        save_times=_in_order(committed, saves),
        sizes=tuple(map(sizes_of, manifests)),
        norms=norms_of(storage, committed.view.line(), limits),
        upstream=_upstream(run.path / "lineage"),
        trouble=tuple(troubles.said),
    )


def _in_order(committed: Committed, saves: Mapping[str, Save]) -> tuple[SavedEpoch, ...]:
    known = ((entry, saves.get(entry.try_name)) for entry in committed.entries)
    return tuple(
        SavedEpoch(str(entry.position), entry.branch, save) for entry, save in known if save is not None
    )


def _current(points: Sequence[Point]) -> dict[int, Point]:
    return {one.epoch: one for one in points}


def _exit_reason(status: Mapping[str, Json]) -> str:
    for name in ("error", "reason"):
        if isinstance(status.get(name), str):
            return str(status[name])
    stop = status.get("stop")
    return ", ".join(map(str, stop)) if isinstance(stop, list) else ""


def best_of(said: Json) -> tuple[str, str] | None:
    """The metric and direction that `run.json` calls best; None for anything odd."""
    good = (
        isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and said[1] in ("min", "max")
    )
    return (said[0], said[1]) if good else None


def _hosts(status: Mapping[str, Json], manifests: Sequence[Manifest]) -> tuple[str, ...]:
    if manifests:
        return manifests[-1].world.hosts
    host = status.get("host")
    return (host,) if isinstance(host, str) else ()


def _upstream(directory: Path) -> tuple[Upstream, ...]:
    """The aliases below `lineage/`, each with the small text files directly in it."""
    if directory.is_symlink():
        return ()
    try:
        names = sorted(one.name for one in directory.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError:
        return ()
    return tuple(Upstream(name, _texts(directory / name)) for name in names[:_UPSTREAMS])


def _texts(directory: Path) -> str:
    try:
        files = sorted(one for one in directory.iterdir() if one.suffix in (".json", ".yaml", ".yml", ".txt"))
    except OSError as error:
        return f"could not be read: {error.strerror}"
    texts = ((path.name, small_text(path, _UPSTREAM_BYTES)) for path in files[:_UPSTREAMS])
    return "\n".join(f"{name}\n{text}" for name, text in texts if text is not None)


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Json) -> int | None:
    return value if type(value) is int else None
