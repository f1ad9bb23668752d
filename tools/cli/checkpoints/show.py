"""`torchrelay ckpt show`: what one epoch holds, blob by blob. Reads the log and one manifest."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.position import matches, matches_any
from torchrelay.checkpoint.format.names import nearest, position_of
from torchrelay.checkpoint.load.info import BlobLine, EpochTable, largest, read_table
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import undisturbed
from torchrelay.runners.monitoring.console import Output, finite, human_number
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import Selected, select
from torchrelay.tools.cli.arguments import Add, add_blobs, add_epoch
from torchrelay.tools.cli.epochs import current_keys, entry_json, marks_of, metrics_text, states_of

_COLUMNS = ("name", "kind", "scope", "dtype", "shape", "leaves", "bytes", "written in")
_SHOWN = 1000


def add_epoch_show(add: Add) -> None:
    """Define `ckpt show`."""
    parser = add("show", "say what an epoch holds: its blobs with kind, type, shape, scope and bytes", show)
    add_epoch(parser)
    add_blobs(parser)
    parser.add_argument("--leaves", action="store_true", help="every tensor and value by itself")
    parser.add_argument(
        "--all", action="store_true", help=f"all of them, also where there are more than {_SHOWN:,}"
    )


def show(chosen: argparse.Namespace, output: Output) -> int:
    """Print what the epoch is, then its blobs: of very many the largest."""
    selected = select(chosen.path)
    with undisturbed():
        table = read_table(selected.place.storage, selected.entry)
        sizes = table.leaf_sizes if chosen.leaves else table.sizes
        names = _asked(table.leaves if chosen.leaves else list(table.blobs), chosen.blobs)
        shown = set(names) if chosen.all else largest(sizes, names, _SHOWN)
        lines = list(table.leaf_lines(shown) if chosen.leaves else table.blob_lines(shown))
    for notice in selected.view.notices:
        output.notice(notice)
    if output.json:
        output.value(_json(selected, table, lines, len(names)))
        return 0
    for line in _head(selected, table):
        output.line(line)
    output.table(_COLUMNS, [_cells(selected, line) for line in lines])
    if len(names) > len(lines):
        left = sum(sizes.get(name, 0) for name in names if name not in shown)
        more = f"{len(names) - len(lines):,} smaller ones ({human_bytes(left)})"
        output.line(f"... and {more}: --all shows them, --blobs PATTERN some")
    return 0


def _asked(names: Sequence[str], patterns: Collection[str] | None) -> Sequence[str]:
    if patterns is None:
        return names
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise UsageError(f"--blobs {pattern!r} means nothing here{nearest(pattern, names)}")
    return [name for name in names if matches_any(name, patterns)]


def _head(selected: Selected, table: EpochTable) -> list[str]:
    entry, facts = selected.entry, table.facts
    states = _states(selected)
    after = f"after {human_number(facts.elapsed_secs)} s  {metrics_text(facts.metrics)}"
    where = f"{len(table.nodes)} node{'s' * (len(table.nodes) > 1)} on {', '.join(table.hosts)}"
    return [
        f"epoch {entry.position}  branch {entry.branch}  {entry.try_name}  {', '.join(states) or 'ok'}",
        f"{where}  step {facts.total_steps}  {after}".rstrip(),
        f"{len(table.blobs)} blobs, {human_bytes(sum(table.sizes.values()))} on one node",
    ]


def _states(selected: Selected) -> list[str]:
    entry, view = selected.entry, selected.view
    return [*states_of(entry, current_keys(view)), *marks_of(view, entry)]


def _cells(selected: Selected, line: BlobLine) -> tuple[str, ...]:
    return (
        line.name,
        line.kind,
        line.scope,
        ", ".join(line.dtypes) or "-",
        "-" if line.shape is None else "x".join(map(str, line.shape)) or "scalar",
        str(line.leaves),
        human_bytes(line.bytes),
        " ".join(f"e{one}" for one in _written(selected, line)),
    )


def _written(selected: Selected, line: BlobLine) -> list[str]:
    """The positions whose tries hold the bytes: others than the epoch's own where they are referenced."""
    return [str(position_of(selected.entry.tries[source])) for source in line.sources]


def _json(selected: Selected, table: EpochTable, lines: Sequence[BlobLine], count: int) -> dict[str, Any]:
    entry, facts = selected.entry, table.facts
    return {
        **entry_json(entry),
        "needs": list(entry.needs),
        "states": _states(selected),
        "nodes": list(table.nodes),
        "hosts": list(table.hosts),
        "metrics": {name: finite(value) for name, value in facts.metrics.items()},
        "total_steps": facts.total_steps,
        "elapsed_secs": facts.elapsed_secs,
        "seed": facts.seed,
        "bytes": sum(table.sizes.values()),
        "blobs": [
            {
                "name": line.name,
                "kind": line.kind,
                "scope": line.scope,
                "dtypes": list(line.dtypes),
                "shape": None if line.shape is None else list(line.shape),
                "leaves": line.leaves,
                "bytes": line.bytes,
                "written_in": _written(selected, line),
            }
            for line in lines
        ],
        "left_out": count - len(lines),
        "notices": list(selected.view.notices),
    }
