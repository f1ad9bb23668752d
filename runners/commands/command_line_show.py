"""`torchrelay show`: who a run is, how it stands, what happened last."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Mapping
from typing import Any

from torchrelay.runners.commands.command_line_arguments import Add, add_run, whole_number
from torchrelay.runners.monitoring.console import Output, human_number, time_text
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.resolve import locate_run

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
