"""`torchrelay stats`: how long saves and loads took, by node and phase, and which node dominates."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.position import Entry
from torchrelay.checkpoint.format.names import stats_path
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import UnknownEpochError
from torchrelay.metadata.fs import read_lines, read_note
from torchrelay.metadata.handlers import FILE_NAME
from torchrelay.metadata.statistics import NodeTimes, Summary, Verdict, node_times, summary
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import Place, find_entry, locate, parse_selector
from torchrelay.tools.cli.arguments import Add, add_epoch

_SHOWN = 20
Actions = list[tuple[NodeTimes, ...]]


def add_stats(add: Add) -> None:
    """Define `stats`."""
    parser = add(
        "stats", "say how long saves and loads took by node and phase, and which node dominates", stats
    )
    add_epoch(parser, default="all saves of live epochs, and all loads")


def stats(chosen: argparse.Namespace, output: Output) -> int:
    """Sum up what the saves noted beside their epochs and the run beside itself."""
    selector = parse_selector(chosen.path)
    place = locate(selector.path)
    view = place.log()
    entries = view.entries if selector.wish is None else (find_entry(place, view, selector.wish),)
    saves = [times for entry in entries if (times := _noted(place.storage, entry))]
    loads = _loads(place) if selector.wish is None else []
    if not saves and not loads:
        raise UnknownEpochError(_none(place, view, entries))
    found = {name: summary(actions) for name, actions in (("save", saves), ("load", loads)) if actions}
    if output.json:
        output.value({name: _json(found[name]) if name in found else None for name in ("save", "load")})
        return 0
    for name, one in found.items():
        _say(output, name, one)
    return 0


def _noted(storage: Storage, entry: Entry) -> tuple[NodeTimes, ...]:
    """What the save of an epoch noted; nothing proves it, and what cannot be read says nothing."""
    path = stats_path(entry.try_name)
    try:
        return node_times(read_note(storage.read_range(path, 0, storage.stat(path) or 0)))
    except (OSError, ValueError):
        return ()


def _loads(place: Place) -> Actions:
    if place.run is None:
        return []
    lines = (line for line in read_lines(place.run.path / FILE_NAME) if line.get("kind") == "checkpoint_load")
    return [times for line in lines if (times := node_times(line))]


def _none(place: Place, view: LogView, entries: Sequence[Entry]) -> str:
    if view.empty:
        return f"nothing is committed in {place.where} yet"
    some = f"epoch {entries[0].position}" if len(entries) == 1 else "the epochs"
    return f"no save of {some} in {place.where} left notes of its times (stats.json)"


def _say(output: Output, name: str, found: Summary) -> None:
    output.line(f"{found.actions} {name}{'s' * (found.actions > 1)}, seconds: median (longest)")
    output.table(("node", f"{name}s", "own work", *found.phases), list(_rows(found)))
    if len(found.nodes) > _SHOWN:
        output.line(f"... and {len(found.nodes) - _SHOWN} quicker nodes; --json has all")
    output.line(_verdict(name, found.verdict))


def _rows(found: Summary) -> Iterator[tuple[str, ...]]:
    for row in found.nodes[:_SHOWN]:
        spent = (row.phases.get(phase) for phase in found.phases)
        cells = ("-" if one is None else f"{one[0]:.3f} ({one[1]:.3f})" for one in spent)
        yield (row.node, str(row.actions), f"{row.own_secs:.3f}", *cells)
    yield ("share", "", "", *(f"{100 * found.shares[phase]:.0f} %" for phase in found.phases))


def _verdict(name: str, found: Verdict | None) -> str:
    if found is None:
        return "one node: there is none to compare it with"
    times = "" if found.ratio is None else f" ({found.ratio:.1f} times as long)"
    beside = f"{found.secs:.3f} s of own work beside {found.median_secs:.3f} s of the median node{times}"
    slowest = f"slowest in {found.slowest_in} of {found.actions} {name}s"
    if found.dominates:
        return f"{found.node} dominates: {beside}, most of it in {found.phase}; {slowest}"
    return f"no node dominates: the slowest, {found.node}, takes {beside}; {slowest}"


def _json(found: Summary) -> dict[str, Any]:
    verdict = found.verdict
    return {
        "actions": found.actions,
        "nodes": [
            {
                "node": row.node,
                "actions": row.actions,
                "own_secs": row.own_secs,
                "phases": {
                    phase: {"median": middle, "max": longest}
                    for phase, (middle, longest) in row.phases.items()
                },
            }
            for row in found.nodes
        ],
        "shares": dict(found.shares),
        "dominates": verdict.node if verdict is not None and verdict.dominates else None,
        "slowest": None if verdict is None else {**vars(verdict), "ratio": verdict.ratio},
    }
