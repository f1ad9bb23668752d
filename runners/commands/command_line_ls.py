"""`torchrelay ls`: the committed epochs of a run, or the runs in a directory."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry, Key
from torchrelay.checkpoint.format.manifest.summary import Glance, glance_or_notes
from torchrelay.checkpoint.log.tiered_storage import Notes, read_notes
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.jobs.runtime import undisturbed
from torchrelay.records import dataclass
from torchrelay.runners.commands.command_line_arguments import Add, add_place
from torchrelay.runners.commands.command_line_entries import (
    current_keys,
    entry_json,
    marks_of,
    metrics_text,
    states_of,
)
from torchrelay.runners.commands.command_line_runs import list_runs
from torchrelay.runners.monitoring.console import Output, finite
from torchrelay.runners.monitoring.status import Standing, standing
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import locate, runs_below

_COLUMNS = ("epoch", "branch", "world", "bytes", "state", "metrics", "try")


@dataclass(frozen=True)
class EpochLine:
    """One committed epoch as `ls` shows it; what only a readable manifest tells is None without one."""

    entry: Entry
    states: tuple[str, ...]
    tags: tuple[str, ...]
    world_size: int | None
    nbytes: int | None
    metrics: Mapping[str, float]

    def json(self) -> dict[str, Any]:
        """As an object of `ls --json`; a metric that JSON has no number for is text."""
        return {
            **entry_json(self.entry),
            "world_size": self.world_size,
            "bytes": self.nbytes,
            "states": list(self.states),
            "tags": list(self.tags),
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
        }

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        return (
            str(self.entry.position),
            str(self.entry.branch),
            "?" if self.world_size is None else str(self.world_size),
            human_bytes(self.nbytes),
            ", ".join((*self.states, *self.tags)) or "ok",
            metrics_text(self.metrics),
            self.entry.try_name,
        )


def add_ls(add: Add) -> None:
    """Define `ls`."""
    add_place(add("ls", "list the runs in a directory, or the committed epochs of a run", ls), runs=True)


def ls(chosen: argparse.Namespace, output: Output) -> int:
    """List runs, or epochs; reads the log and the manifests, no shard."""
    if runs := runs_below(chosen.path):
        return list_runs(runs, output)
    place = locate(chosen.path)
    with undisturbed():
        view = place.log()
        lines = _lines(place.storage, view)
    for notice in view.notices:
        output.notice(notice)
    stands = None if place.run is None else standing(place.run.path)
    if output.json:
        output.value(_json(view, lines, stands))
    elif lines:
        output.table(_COLUMNS, [line.cells() for line in lines], spare=("try", "world"))
    else:
        output.line(f"no epoch is committed in {chosen.path}")
    if stands is not None and not stands.over and stands.word != "created" and not output.json:
        output.notice(f"{chosen.path} stands: {stands}")
    return 0


def _lines(storage: Storage, view: LogView) -> list[EpochLine]:
    """What is abandoned first, then the current line: the newest is the last."""
    current = current_keys(view)
    notes = read_notes(storage)
    return [_line(storage, view, entry, current, notes) for entry in (*view.abandoned(), *view.line())]


def _line(
    storage: Storage, view: LogView, entry: Entry, current: Collection[Key], notes: Notes | None
) -> EpochLine:
    seen = _seen(storage, entry)
    states = states_of(entry, current)
    if notes is not None:
        states.append("replicated" if entry.try_name in notes.replicated else "local")
    if seen is None and entry.healthy:
        states.append("manifest unreadable")
    return EpochLine(
        entry,
        tuple(states),
        tuple(marks_of(view, entry)),
        None if seen is None else seen.nodes,
        None if seen is None else seen.own_bytes,
        {} if seen is None else seen.metrics,
    )


def _seen(storage: Storage, entry: Entry) -> Glance | None:
    try:
        return glance_or_notes(storage, entry)
    except OSError:  # `verify` says what is wrong with it
        return None


def _json(view: LogView, lines: list[EpochLine], stands: Standing | None) -> dict[str, Any]:
    return {
        "stands": None if stands is None else stands.word,
        "why": "" if stands is None else stands.why,
        "job": view.job_name,
        "uuid": view.job_uuid,
        "branch": view.current.id,
        "epochs": [line.json() for line in lines],
        "notices": list(view.notices),
    }
