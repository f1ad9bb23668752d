"""From notes to rows, purely: the same rows in whatever order notes are told, and however often.

So it is by how two rows of one key become one: `MERGES` says for each column which of two values stays. All
of them are the least or the greatest, the columns of a job alone go together with its newest generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from torchrelay.metadata.handlers import EPOCH, Note

Row = dict[str, Any]
Rows = dict[str, list[Row]]
MERGES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "relay_jobs": {"name": max, "prefix": max, "generation": max},
    "relay_branches": {"base": max},
    "relay_epochs": {"branch": max, "nodes": max, "saved_at": min},
    "relay_moved": {"bytes": max},
    "relay_durations": {"secs": max},
}
"""The columns that are no part of a key, and how two values become one."""


def rows_of(notes: Iterable[Note]) -> Rows:
    """The rows that notes make, by table; one per key."""
    found: dict[str, dict[tuple[Any, ...], Row]] = {table: {} for table in MERGES}
    for note in notes:
        for table, row in _rows_of(note):
            merges = MERGES[table]
            key = tuple(value for name, value in row.items() if name not in merges)
            known = found[table].setdefault(key, row)
            if known is not row:
                found[table][key] = merged(table, known, row)
    return {table: list(rows.values()) for table, rows in found.items()}


def merged(table: str, one: Row, other: Row) -> Row:
    """One row of two with the same key."""
    if table == "relay_jobs" and one["generation"] != other["generation"]:
        return max(one, other, key=lambda row: row["generation"])
    result = dict(one)
    for name, choose in MERGES[table].items():
        known = [row[name] for row in (one, other) if row[name] is not None]
        result[name] = choose(known) if known else None
    return result


def _rows_of(note: Note) -> Iterable[tuple[str, Row]]:
    holder = note.holder
    job, generation, epoch = holder.uuid, holder.generation, note.epoch
    yield "relay_jobs", {"job": job, "name": holder.name, "prefix": note.prefix, "generation": generation}
    yield "relay_branches", {"job": job, "branch": holder.branch, "base": holder.base}
    if note.kind == EPOCH:
        at = datetime.fromtimestamp(note.time, timezone.utc)
        row = {"job": job, "epoch": epoch, "generation": generation}
        yield "relay_epochs", {**row, "branch": holder.branch, "nodes": note.nodes, "saved_at": at}
        return
    for times in note.times:
        row = {"job": job, "epoch": epoch, "generation": generation, "action": note.kind, "node": times.node}
        yield "relay_moved", {**row, "bytes": times.bytes}
        for phase, secs in times.secs.items():
            yield "relay_durations", {**row, "phase": phase, "secs": secs}
