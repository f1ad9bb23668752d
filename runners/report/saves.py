"""How long saves and loads took, by node and phase: of the tries' `stats.json`, and of the handler's file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.schema import stats_path
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.metadata.fs import read_lines
from torchrelay.metadata.handlers import FILE_NAME
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.report.course import moment_of
from torchrelay.runners.report.facts import Save
from torchrelay.runners.report.limits import Limits, Troubles, bounded, spread

Json = Any
_KINDS = {"checkpoint_save": "save", "checkpoint_load": "load", "checkpoint_partial_load": "load"}


def saves_told(run: RunDirectory, troubles: Troubles) -> list[Save]:
    """Saves and loads in the order of their times, from `metadata.jsonl`; empty where there is none."""

    def read() -> list[Save]:
        found = []
        for line in bounded(read_lines(run.path / FILE_NAME), FILE_NAME, troubles):
            kind, end = _KINDS.get(str(line.get("kind"))), moment_of(line)
            if kind is not None and end is not None and (save := save_of(kind, line, end)) is not None:
                found.append(save)
        return sorted(found, key=lambda one: one.end or 0.0)

    return troubles.tried(read, [])


def saves_of_tries(
    storage: Storage, entries: Iterable[Entry], limits: Limits, troubles: Troubles
) -> dict[str, Save]:
    """Try name to the save that made it; tries without `stats.json`, which proves nothing, are left out."""
    left, found = limits.stats_bytes, dict[str, Save]()
    for entry in spread(list(entries), limits.epoch_rows):
        if left <= 0:
            troubles.note(
                f"save times of {entry.position} and others: not read, {limits.stats_bytes} bytes were"
            )
            break
        data = troubles.tried(partial(_bytes, storage, entry.try_name, left), b"")
        left -= len(data)
        save = save_of("save", _object(data), None)
        if save is not None:
            found[entry.try_name] = save
    return found


def save_of(kind: str, said: Mapping[str, Json], end: float | None) -> Save | None:
    """What `NodeStats.to_json` wrote; None for anything else."""
    nodes: dict[str, dict[str, float]] = {}
    for one in said.get("nodes") if isinstance(said.get("nodes"), list) else ():  # type: ignore[union-attr]
        secs = one.get("secs") if isinstance(one, Mapping) else None
        if isinstance(secs, Mapping) and isinstance(one.get("node"), str):
            nodes[one["node"]] = {str(phase): value for phase, value in secs.items() if _secs(value)}
    nbytes = said.get("bytes")
    return Save(kind, end, nodes, nbytes if type(nbytes) is int else 0) if nodes else None


def _secs(value: Json) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value < 1e9


def _bytes(storage: Storage, try_name: str, limit: int) -> bytes:
    try:
        return storage.read_range(stats_path(try_name), 0, limit)
    except FileNotFoundError:
        return b""


def _object(data: bytes) -> Mapping[str, Json]:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
