"""`torchrelay show`, `runs lineage`, `ckpt stats`: a run's metadata, its ancestors, its save times."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.names import stats_path
from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError, StorageError, UnknownEpochError
from torchrelay.metadata.fs import read_lines, read_note
from torchrelay.metadata.handlers import (
    FILE_NAME,
    NodeTimes,
    StragglerSummary,
    StragglerVerdict,
    summary,
    times_of,
)
from torchrelay.metadata.lineage import KnownStage, find_stage, stages_of
from torchrelay.runners.monitoring.console import Output, arg, human_number, time_text, verb
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.resolve import find_entry, locate, locate_run, parse_selector
from torchrelay.tools.cli.arguments import RUN, run_epoch, whole_number

_TIMES = ("created", "updated", "time")
_FIRST = ("time", "kind", "generation")
_INTERNAL = frozenset({"attempts", "boot_id", "pid_namespace", "pid_start"})
"""Fields for the detection of crash loops and live processes; only `--json` has them."""


@verb(
    "show the metadata, state and last events of a run",
    RUN,
    arg("--events", "number of events (default: 10)", "N", type=whole_number(0), default=10),
)
def show(chosen: argparse.Namespace, output: Output) -> int:
    """Print `run.json`, `status.json` and the last events."""
    run = locate_run(chosen.path, whole=False)
    identity, status = run.known_identity(output.notice), run.known_status(output.notice)
    events = list(deque(run.events(), maxlen=chosen.events)) if chosen.events else []
    stands, params = standing(run.path), _params(run.path)
    shown = {name: value for name, value in status.items() if name not in _INTERNAL}
    if isinstance(tail := shown.pop("tail", None), dict) and tail:
        shown["finalization"] = f"{_text('done', tail.get('done'))} done after epoch {tail.get('epoch')}"
    lines = [
        *_field_lines("run", identity),
        *(_field_lines("params", params) if params else ()),
        *_field_lines("status", {"summary": str(stands), **shown} if shown else {}),
        f"events ({len(events)})",
        *(f"  {_event(event)}" for event in events),
    ]
    found = {"run": identity, "stands": stands.word, "why": stands.why, "status": status, "params": params}
    output.result({**found, "events": events}, lines)
    return 0


def _params(run: Path) -> dict[str, Any] | None:
    """Return the hyper-parameters that the newest launch recorded; None without any."""
    from torchrelay.metadata.code.capture import captures  # its imports take longer than this command

    try:
        found = [one.get("params") for one in captures(run)]
    except RelayError:  # the report says what is wrong
        return None
    return found[-1] if found and isinstance(found[-1], dict) else None


def _field_lines(title: str, fields: Mapping[str, Any]) -> list[str]:
    width = max(map(len, fields), default=0)
    found = [f"  {name.ljust(width)}  {_text(name, value)}" for name, value in fields.items()]
    return [title if fields else f"{title} (unknown)", *found]


def _event(event: Mapping[str, Any]) -> str:
    first = [_text(name, event[name]) for name in _FIRST[:2] if name in event]
    rest = [f"{name}={_text(name, value)}" for name, value in event.items() if name not in _FIRST]
    return "  ".join([*first, *rest])


def _text(name: str, value: Any) -> str:
    if name in _TIMES and isinstance(value, (int, float)):
        return time_text(value)
    if isinstance(value, float):
        return human_number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(key, item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


_SHOWN_BYTES = 1 << 20
_CONFIG = "config/"


@verb(
    "show the runs that a run was built on",
    RUN,
    arg("stage", "show one stage in detail, such as expert or expert/encoder", "STAGE", nargs="?"),
)
def lineage(chosen: argparse.Namespace, output: Output) -> int:
    """Print the tree of stages, or one stage with its configuration."""
    run = locate_run(chosen.path)
    if chosen.stage is not None:
        stage = find_stage(run.path, chosen.stage)
        output.result({**_json(stage), "config": dict(_texts(stage))}, _stage_lines(stage))
        return 0
    stages = stages_of(run.path)
    identity = run.known_identity(output.notice)
    lines = [f"{run.name}: job {identity.get('job')}, run {identity.get('uuid')}"]
    for stage in stages:
        indent = "  " * len(stage.aliases)
        lines.append(f"{indent}{stage.aliases[-1]}: {_description(stage.record)}")
        lines += [f"{indent}  override {text}" for text in stage.overrides]
    if not stages:
        lines.append("  not built on another run")
    output.result({"run": identity, "stages": [_json(stage) for stage in stages]}, lines)
    return 0


def _description(record: Mapping[str, Any]) -> str:
    branch = f", branch {record['branch']}" if record.get("branch") else ""
    known = record.get("metrics")
    metrics = "".join(
        f", {name}={human_number(value) if isinstance(value, (int, float)) else value}"
        for name, value in sorted(known.items() if isinstance(known, dict) else ())
    )
    return (
        f"job {record.get('job')}, run {record.get('run_id')}, epoch {record['epoch']}{branch}{metrics} "
        f"({record.get('asked')})"
    )


def _stage_lines(stage: KnownStage) -> Iterator[str]:
    yield f"{stage.path}: {_description(stage.record)}"
    applied = stage.record.get("applied")
    for start in applied if isinstance(applied, list) else ():
        if isinstance(start, dict):
            into = start.get("into") or "all objects with the same names"
            yield f"  weights: {start.get('prefix') or start.get('into') or 'all'} into {into}"
    yield from (f"  kept: {blob}" for blob in stage.record.get("kept") or ())
    yield from (f"  override {text}" for text in stage.overrides)
    yield from (f"  file {stage.folder / name}" for name in stage.files)
    for name, text in _texts(stage):
        yield f"--- {name}"
        yield from text.splitlines()


def _json(stage: KnownStage) -> dict[str, Any]:
    record = {key: value for key, value in stage.record.items() if key not in ("format", "alias", "blobs")}
    return {"stage": stage.path, **record, "files": list(stage.files), "overrides": list(stage.overrides)}


def _texts(stage: KnownStage) -> Iterator[tuple[str, str]]:
    for name in stage.files:
        if name.startswith(_CONFIG):
            path = stage.folder / name
            try:
                with path.open("rb") as file, suppress(UnicodeDecodeError):
                    yield name, file.read(_SHOWN_BYTES).decode()
            except OSError as error:
                raise StorageError(f"cannot read {path}: {error.strerror}") from error


_SHOWN = 20


@verb(
    "show the durations of saves and loads by node and phase",
    run_epoch("all saves of live epochs, and all loads"),
)
def stats(chosen: argparse.Namespace, output: Output) -> int:
    """Summarise the durations recorded by saves and loads."""
    selector = parse_selector(chosen.path)
    place = locate(selector.path)
    view = place.log()
    entries = view.entries if selector.wish is None else (find_entry(place, view, selector.wish),)
    saves = [times for entry in entries if (times := _noted(place.storage, entry))]
    noted = read_lines(place.run.path / FILE_NAME) if place.run is not None and selector.wish is None else ()
    of_loads = (times_of(one.get("nodes")) for one in noted if one.get("kind") == "checkpoint_load")
    loads = [times for times in of_loads if times]
    if not saves and not loads:
        if view.empty:
            raise UnknownEpochError(f"no committed epochs in {place.where}")
        some = f"epoch {entries[0].position}" if len(entries) == 1 else "the epochs"
        raise UnknownEpochError(f"{place.where} has no durations (stats.json) of {some}")
    found = {name: summary(actions) for name, actions in (("save", saves), ("load", loads)) if actions}
    if output.json:
        output.value({name: _stats_json(found[name]) if name in found else None for name in ("save", "load")})
        return 0
    for name, one in found.items():
        output.line(f"{one.actions} {name}{'s' * (one.actions > 1)}, seconds: median (longest)")
        output.table(("node", f"{name}s", "own work", *one.phases), list(_rows(one)))
        if len(one.nodes) > _SHOWN:
            output.line(f"... and {len(one.nodes) - _SHOWN} faster nodes; --json has all")
        output.line(_verdict(name, one.verdict))
    return 0


def _noted(storage: Storage, entry: CommittedPosition) -> list[NodeTimes]:
    """Read the durations of an epoch's save (unverified); empty if unreadable."""
    path = stats_path(entry.attempt_name)
    try:
        found = read_note(storage.read_range(path, 0, storage.stat(path) or 0))
    except (OSError, ValueError):
        return []
    return times_of(found.get("nodes")) if isinstance(found, dict) else []


def _rows(found: StragglerSummary) -> Iterator[tuple[str, ...]]:
    for row in found.nodes[:_SHOWN]:
        spent = (row.phases.get(phase) for phase in found.phases)
        cells = ("-" if one is None else f"{one[0]:.3f} ({one[1]:.3f})" for one in spent)
        yield (row.node, str(row.actions), f"{row.own_secs:.3f}", *cells)
    yield ("share", "", "", *(f"{100 * found.shares[phase]:.0f} %" for phase in found.phases))


def _verdict(name: str, found: StragglerVerdict | None) -> str:
    if found is None:
        return "only one node, nothing to compare"
    times = "" if found.ratio is None else f" ({found.ratio:.1f} times as long)"
    beside = f"{found.secs:.3f} s of own work, median node {found.median_secs:.3f} s{times}"
    slowest = f"slowest in {found.slowest_in} of {found.actions} {name}s"
    if found.dominates:
        return f"{found.node} dominates: {beside}, most of it in {found.phase}; {slowest}"
    return f"no node dominates: the slowest is {found.node} with {beside}; {slowest}"


def _stats_json(found: StragglerSummary) -> dict[str, Any]:
    verdict = found.verdict
    return {
        "actions": found.actions,
        "nodes": [
            {**vars(row), "phases": {name: {"median": a, "max": b} for name, (a, b) in row.phases.items()}}
            for row in found.nodes
        ],
        "shares": dict(found.shares),
        "dominates": verdict.node if verdict is not None and verdict.dominates else None,
        "slowest": None if verdict is None else {**vars(verdict), "ratio": verdict.ratio},
    }
