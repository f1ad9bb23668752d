"""`torchrelay index`: makes the rows of a metadata database again from the directories of runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.handlers import EPOCH, Note
from torchrelay.metadata.sql.handler import BoundedCalls, rows_in
from torchrelay.metadata.sql.url import parse_url
from torchrelay.runners.commands.command_line_arguments import Add, add_run
from torchrelay.runners.commands.command_line_index_notes import notes_of_place
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import each_run, locate

if TYPE_CHECKING:
    from torchrelay.metadata.sql.database import Database

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
