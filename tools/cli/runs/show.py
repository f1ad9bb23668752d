"""`torchrelay show` and `lineage`: who a run is, how it stands, what it was built on."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import StorageError
from torchrelay.metadata.lineage import KnownStage, find_stage, stages_of
from torchrelay.runners.monitoring.console import Output, human_number, time_text
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.resolve import locate_run
from torchrelay.tools.cli.arguments import Add, add_run, whole_number

_TIMES = ("created", "updated", "time")
_FIRST = ("time", "kind", "generation")
_INTERNAL = frozenset({"attempts", "boot_id", "pid_namespace", "pid_start"})
"""By which starts without progress are counted, and a process is known again; `--json` has them."""


def add_show(add: Add) -> None:
    """Define `show`."""
    parser = add("show", "say what a run is, how it stands, what happened last", show)
    add_run(parser)
    parser.add_argument(
        "--events", type=whole_number(0), default=10, metavar="N", help="so many events (default: 10)"
    )


def show(chosen: argparse.Namespace, output: Output) -> int:
    """Print `run.json`, `status.json` and the last events."""
    run = locate_run(chosen.path, whole=False)
    identity, status = run.known_identity(output.notice), run.known_status(output.notice)
    events = list(deque(run.events(), maxlen=chosen.events)) if chosen.events else []
    stands = standing(run.path)
    if output.json:
        output.value(
            {
                "run": identity, "stands": stands.word, "why": stands.why, "status": status,
                "events": events,
            }
        )  # fmt: skip
        return 0
    _show_fields(output, "run", identity)
    shown = {name: value for name, value in status.items() if name not in _INTERNAL}
    _show_fields(output, "status", {"stands": str(stands), **shown} if shown else {})
    output.line(f"events ({len(events)})")
    for event in events:
        output.line(f"  {_event(event)}")
    return 0


def _show_fields(output: Output, title: str, fields: Mapping[str, Any]) -> None:
    output.line(title if fields else f"{title} (not known)")
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        output.line(f"  {name.ljust(width)}  {_text(name, value)}")


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


def add_lineage(add: Add) -> None:
    """Define `lineage`."""
    parser = add(
        "lineage", "say which runs a run was built on, with their epochs and configurations", lineage
    )
    add_run(parser)
    parser.add_argument(
        "stage", metavar="STAGE", nargs="?", help="all that is known of one stage: expert, expert/encoder"
    )


def lineage(chosen: argparse.Namespace, output: Output) -> int:
    """Print the tree of stages, or one stage with its configuration."""
    run = locate_run(chosen.path)
    if chosen.stage is not None:
        stage = find_stage(run.path, chosen.stage)
        if output.json:
            output.value({**_json(stage), "config": dict(_texts(stage))})
        else:
            _show(stage, output)
        return 0
    stages = stages_of(run.path)
    identity = run.known_identity(output.notice)
    if output.json:
        output.value({"run": identity, "stages": [_json(stage) for stage in stages]})
        return 0
    output.line(f"{run.name}: job {identity.get('job')}, run {identity.get('uuid')}")
    for stage in stages:
        indent = "  " * len(stage.aliases)
        output.line(f"{indent}{stage.aliases[-1]}: {_told(stage.record)}")
        for text in stage.overrides:
            output.line(f"{indent}  override {text}")
    if not stages:
        output.line("  built on no other run")
    return 0


def _told(record: Mapping[str, Any]) -> str:
    branch = f", branch {record['branch']}" if record.get("branch") else ""
    metrics = "".join(f", {name}={_number(value)}" for name, value in sorted(_metrics(record).items()))
    return (
        f"job {record.get('job')}, run {record.get('run_id')}, epoch {record['epoch']}{branch}{metrics} "
        f"({record.get('asked')})"
    )


def _show(stage: KnownStage, output: Output) -> None:
    output.line(f"{stage.path}: {_told(stage.record)}")
    for start in _objects(stage.record.get("applied")):
        into = start.get("into") or "all objects of the same names"
        output.line(f"  weights: {start.get('prefix') or start.get('into') or 'all'} into {into}")
    for blob in stage.record.get("kept") or ():
        output.line(f"  kept: {blob}")
    for text in stage.overrides:
        output.line(f"  override {text}")
    for name in stage.files:
        output.line(f"  file {stage.folder / name}")
    for name, text in _texts(stage):
        output.line(f"--- {name}")
        for line in text.splitlines():
            output.line(line)


def _json(stage: KnownStage) -> dict[str, Any]:
    record = {key: value for key, value in stage.record.items() if key not in ("format", "alias", "blobs")}
    return {"stage": stage.path, **record, "files": list(stage.files), "overrides": list(stage.overrides)}


def _texts(stage: KnownStage) -> Iterator[tuple[str, str]]:
    """The configuration's files that are text, as they were read."""
    for name in stage.files:
        if name.startswith(_CONFIG):
            data = _read(stage.folder / name)
            try:
                yield name, data.decode()
            except UnicodeDecodeError:
                continue


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_SHOWN_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _metrics(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("metrics")
    return found if isinstance(found, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _number(value: Any) -> str:
    return human_number(value) if isinstance(value, (int, float)) else str(value)
