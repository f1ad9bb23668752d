"""`torchrelay index`: makes the rows of a metadata database again from the directories of runs.

`metadata.jsonl` has what the handler of a run directory heard. What it lacks is told by the log, and by the
manifests and `stats.json` of the epochs that are still there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.position import Entry
from torchrelay.checkpoint.format.names import manifest_path, stats_path
from torchrelay.checkpoint.log.view import LogView, branch_of
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.fs import read_json
from torchrelay.metadata.handlers import EPOCH, FILE_NAME, Holder, Note, notes_of_file, report_notes, times_of
from torchrelay.metadata.sql.handler import BoundedCalls, rows_in
from torchrelay.metadata.sql.url import parse_url
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import Place, each_run, locate
from torchrelay.tools.cli.arguments import Add, add_run

if TYPE_CHECKING:
    from torchrelay.metadata.sql.database import Database


def notes_of_place(place: Place) -> list[Note]:
    """All that can be told; UsageError for a URL, StorageError where log or notes cannot be read."""
    if not isinstance(place.storage, LocalStorage):
        raise UsageError(f"{place.where} is a URL; index reads local or mounted directories: give a path")
    view = place.log()
    if view.job_uuid is None:
        return []
    directory = place.storage.root.absolute()
    source = _Source(place.storage, view, directory)
    noted = []
    if place.run is not None:
        noted = notes_of_file(place.run.path / FILE_NAME, source.job, source.prefix)
    told = {(note.holder.branch, note.epoch) for note in noted if note.kind == EPOCH}
    found = [*noted, *_branches(source)]
    for entry in view.entries:
        if entry.position.boundary and (entry.branch, entry.position.epoch) not in told:
            found += _notes_of_entry(source, entry)
    return found


@dataclass(frozen=True)
class _Source:
    """A log and its directory, which is the prefix of its job in the database."""

    storage: Storage
    view: LogView
    directory: Path

    @property
    def prefix(self) -> str:
        return str(self.directory)

    @property
    def job(self) -> Holder:
        return Holder(str(self.view.job_uuid), str(self.view.job_name), self.view.generation)

    def holder(self, branch: int, generation: int) -> Holder:
        """Who wrote on a branch."""
        known = branch_of(self.view.state, branch)
        base = None if known is None or known.base is None else known.base.epoch
        return replace(self.job, generation=generation, branch=branch, base=base)


def _branches(source: _Source) -> Iterator[Note]:
    """That a branch was begun is known although nothing was saved on it yet."""
    for branch in source.view.branches:
        yield Note(source.holder(branch.id, source.view.generation), source.prefix, "branch", 0)


def _notes_of_entry(source: _Source, entry: Entry) -> Iterator[Note]:
    """What an epoch's own files tell; nothing where its manifest cannot be read: `verify` says so."""
    with suppress(OSError):
        manifest = codec.read(source.storage, entry)
        holder = source.holder(entry.branch, manifest.generation)
        time = (source.directory / manifest_path(entry.try_name)).stat().st_mtime
        yield Note(holder, source.prefix, EPOCH, entry.position.epoch, time, len(manifest.world.nodes))
        yield from _saving(source, holder, entry, time)


def _saving(source: _Source, holder: Holder, entry: Entry, time: float) -> list[Note]:
    """How long the save took; nothing where that was lost, it is never synced."""
    try:
        stats = read_json(source.directory / stats_path(entry.try_name)) or {}
    except StorageError:
        return []
    nodes = stats.get("nodes")
    times = times_of(nodes) if isinstance(nodes, list) else []
    return report_notes(holder, source.prefix, "checkpoint_save", times, time)


VARIABLE = "TORCHRELAY_DATABASE"
_DEADLINE_SECS = 30.0
_ROWS_AT_ONCE = 20_000


def add_index(add: Add) -> None:
    """Define `index`."""
    parser = add("index", "bring a metadata database up to date from the directories of runs", index)
    add_run(parser, many=True)
    parser.add_argument(
        "--database",
        metavar="URL",
        default=os.environ.get(VARIABLE),
        help=f"sqlite:///runs.db or postgresql://user@host/database (default: {VARIABLE}, which no list "
        "of processes shows)",
    )


def index(chosen: argparse.Namespace, output: Output) -> int:
    """Store what each place tells; 5 where one could not be read, after the others were done."""
    if not chosen.database:
        raise UsageError(f"which database? Give --database URL, or set {VARIABLE}")
    url = parse_url(chosen.database)
    places = [(text, locate(text)) for text in each_run(chosen.path)]
    from torchrelay.metadata.sql.database import Database

    database, done, failed = Database(url, _DEADLINE_SECS), [], 0
    calls = BoundedCalls(f"the database {database.shown}")
    for text, place in places:
        output.progress(f"reading {text}")
        try:
            notes = notes_of_place(place)
        except StorageError as error:
            output.notice(str(error))
            failed += 1
            continue
        _store(calls, database, notes)
        done.append({"path": text, **_counts(notes)})
        if not output.json:
            output.line("{path}: {epochs} saved epochs, {reports} saves and loads".format(**done[-1]))
    if output.json:
        output.value({"database": database.shown, "done": done, "failed": failed})
    return StorageError.exit_code if failed else 0


def _store(calls: BoundedCalls, database: Database, notes: Sequence[Note]) -> None:
    """Store notes in parts, each with a deadline: a server may be frozen in the middle of anything."""
    for part in _parts(notes):
        calls.make(
            lambda part=part: database.patiently(lambda: database.store(part), _DEADLINE_SECS),  # type: ignore[misc]
            2 * _DEADLINE_SECS + 1,
        )


def _parts(notes: Sequence[Note]) -> Iterator[Sequence[Note]]:
    """At least one, for that makes the tables."""
    part: list[Note] = []
    rows = 0
    for note in notes:
        if part and rows + rows_in(note) > _ROWS_AT_ONCE:
            yield part
            part, rows = [], 0
        part.append(note)
        rows += rows_in(note)
    yield part


def _counts(notes: list[Note]) -> dict[str, int]:
    epochs = {note.key for note in notes if note.kind == EPOCH}
    reports = {note.key for note in notes if note.times}
    return {"epochs": len(epochs), "reports": len(reports)}
