"""`torchrelay runs ls|show|code|index`: list runs, show and extract their source, fill a database.

`index` reads `metadata.jsonl` of the run directory, and adds what it lacks from the log, the manifests and
`stats.json` of the existing epochs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.names import manifest_path, stats_path
from torchrelay.checkpoint.log.view import branch_of
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.metadata.code.archive import SHORT, SourceManifest, open_archive, unpack_source
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.metadata.fs import read_json
from torchrelay.metadata.handlers import (
    EPOCH,
    FILE_NAME,
    HandlerEvent,
    Holder,
    notes_of_file,
    report_notes,
    times_of,
)
from torchrelay.metadata.sql.handler import BoundedCalls, parse_url, rows_in
from torchrelay.runners.monitoring.console import Output, arg, flag, time_text, verb
from torchrelay.runners.monitoring.status import STATES
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.names import is_remote, parent
from torchrelay.runners.remote_runs.resolve import RunLocation, each_run, locate
from torchrelay.tools.cli.runs.compare import difference, difference_json, say_difference
from torchrelay.tools.cli.runs.ls import (
    LIBRARY,
    LibraryLine,
    find_run,
    library,
    library_line,
    runs_in,
    shown,
)

if TYPE_CHECKING:
    from torchrelay.metadata.sql.database import Database


_COLUMNS = ("run", "experiment", "state", "epoch", "metric", "code", "config", "comment")


@verb(
    "list the runs of all experiments in a directory",
    arg("path", "directory of the runs (default: TORCHRELAY_RUNS, else runs)", "RUNS", nargs="?"),
    arg("--state", "only runs in this state", choices=STATES),
)
def ls(chosen: argparse.Namespace, output: Output) -> int:
    """List the runs, by experiment and age; a damaged run is listed with its problem on stderr."""
    root = library(chosen.path)
    lines = sorted((library_line(one, root) for one in runs_in(root)), key=_by_age)
    lines = [one for one in lines if chosen.state in (None, one.state)]
    if output.json:
        output.value({"library": shown(root), "runs": [one.json() for one in lines]})
        return 0
    if not lines:
        output.line(f"no runs in {shown(root)}" + (f" are {chosen.state}" if chosen.state else ""))
        return 0
    output.table(_COLUMNS, [_cells(one) for one in lines], spare=("config", "code", "experiment"))
    for one in lines:
        if one.problem:
            output.notice(f"{shown(one.path)}: {one.problem}")
    return 0


@verb(
    "show the state of a run and how it differs from the previous run",
    arg("path", "run directory, run id, or a part of the id", "RUN"),
    LIBRARY,
    arg("--against", "compare with this run (default: the previous one)", "RUN"),
    flag("--stat", "print only file names and line counts"),
)
def show(chosen: argparse.Namespace, output: Output) -> int:
    """Print a run's metadata and state, then its differences from another run."""
    root, path = library(chosen.runs), find_run(chosen.path, chosen.runs).path
    line = library_line(path, root)
    asked = chosen.against
    before = _predecessor(line) if asked is None else str(find_run(asked, chosen.runs).where)
    found, why = None, "no earlier run of the same experiment" if before is None else ""
    with ExitStack() as stack:
        if before is not None:
            try:
                found = difference(before, shown(line.path), stack)
            except RelayError as error:
                why = str(error)
        if output.json:
            against = None if found is None else difference_json(found, stat=chosen.stat)
            output.value({"run": line.json(), "against": before, "difference": against, "why": why})
            return 0
        for name, text in _facts(line):
            output.line(f"{name.ljust(10)}  {text}")
        output.line(f"against     {before or why}")
        if found is not None:
            say_difference(output, found, stat=chosen.stat)
        elif before is not None:
            output.line(why)
    return 0


def _predecessor(line: LibraryLine) -> str | None:
    root, url = line.path.parent, shown(line.path)
    if is_remote(url) and (above := parent(url)) is not None:
        library(above)  # downloads the metadata of the runs beside it
    beside = sorted((library_line(one, root) for one in runs_in(root) if one.parent == root), key=_by_age)
    earlier = [one for one in beside if _by_age(one) < _by_age(line) and one.id != line.id]
    return shown(earlier[-1].path) if earlier else None


def _by_age(line: LibraryLine) -> tuple[str, float, str]:
    return str(line.path.parent), line.created or 0.0, line.id


def _cells(line: LibraryLine) -> Sequence[str]:
    return (
        line.id,
        line.experiment or "-",
        line.why if line.state == "silent" else line.state,
        "-" if line.epoch is None else str(line.epoch),
        line.key_metric,
        (line.code_id or "-")[:SHORT],
        (line.config_id or "-")[:SHORT],
        line.message,
    )


def _facts(line: LibraryLine) -> list[tuple[str, Any]]:
    amended = "".join(f", amended from {(one or '?')[:SHORT]}" for one in line.amended)
    return [
        ("run", line.id),
        ("in", shown(line.path).rpartition("/")[0]),
        ("state", f"{line.state} ({line.why or line.problem})" if line.why or line.problem else line.state),
        ("epoch", "none" if line.epoch is None else line.epoch),
        ("metric", line.key_metric),
        ("comment", line.message or "none"),
        ("created", "unknown" if line.created is None else time_text(line.created)),
        ("code", f"{(line.code_id or 'not archived')[:SHORT]}{amended}"),
        ("config", (line.config_id or "none")[:SHORT]),
    ]


@verb(
    "extract the archived source of a run, verifying it",
    arg("path", "run directory or run id", "RUN"),
    LIBRARY,
    arg("-o --output", "directory to create (default: list the files)", "DIR"),
    arg("--attempt", "number of the launch (default: the newest)", "N", type=int),
    flag("--force", "allow a directory that is not empty"),
)
def code(chosen: argparse.Namespace, output: Output) -> int:
    """Extract or list the source of a launch."""
    run = find_run(chosen.path, chosen.runs).path
    captured = capture_with_code(run, chosen.attempt)
    with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
        if chosen.output is not None:
            unpack_source(archive, Path(chosen.output), force=chosen.force)
        manifest = archive.manifest
    if output.json:
        output.value({"output": chosen.output, **_json(captured, manifest)})
        return 0
    which = f"code {archive.code_id[:SHORT]} of attempt {captured['number']}"
    count = len(manifest.files) + len(manifest.links)
    size = human_bytes(manifest.nbytes)
    if chosen.output is not None:
        output.line(f"{which}: {count} files ({size}) in {chosen.output}")
        return 0
    output.table(
        ("bytes", "file"),
        [
            *((str(file.nbytes), name) for name, file in manifest.files.items()),
            *(("link", f"{name} -> {target}") for name, target in manifest.links.items()),
        ],
    )
    output.notice(f"{which}: {count} files ({size}); use -o DIR to extract them")
    return 0


def _json(captured: Mapping[str, Any], manifest: SourceManifest) -> dict[str, Any]:
    code = captured["code"]
    return {
        "code_id": code["id"],
        "attempt": captured["number"],
        "script": code.get("script"),
        "git": code.get("git"),
        "files": {
            name: {"sha256": file.sha256, "bytes": file.nbytes} for name, file in manifest.files.items()
        },
        "links": dict(manifest.links),
        "left_out": code.get("left_out", []),
    }


def notes_of_place(place: RunLocation) -> list[HandlerEvent]:
    """Collect the events of a run; UsageError for a URL, StorageError if log or notes are unreadable."""
    if not isinstance(place.storage, LocalStorage):
        raise UsageError(f"{place.where} is a URL; index reads only local or mounted directories")
    view = place.log()
    if view.job_uuid is None:
        return []
    directory = place.storage.root.absolute()
    prefix = str(directory)  # of the job in the database
    job = Holder(view.job_uuid, str(view.job_name), view.generation)

    def holder(branch: int, generation: int) -> Holder:
        known = branch_of(view.state, branch)
        base = None if known is None or known.base is None else known.base.epoch
        return replace(job, generation=generation, branch=branch, base=base)

    noted = [] if place.run is None else notes_of_file(place.run.path / FILE_NAME, job, prefix)
    known = {(note.holder.branch, note.epoch) for note in noted if note.kind == EPOCH}
    found = list(noted)
    for branch in view.branches:  # also those without a saved epoch
        found.append(HandlerEvent(holder(branch.id, view.generation), prefix, "branch", 0))
    for entry in view.entries:
        if not entry.position.boundary or (entry.branch, entry.position.epoch) in known:
            continue
        with suppress(OSError):  # the manifest is unreadable
            manifest, epoch = codec.read(place.storage, entry), entry.position.epoch
            writer = holder(entry.branch, manifest.generation)
            time = (directory / manifest_path(entry.attempt_name)).stat().st_mtime
            found.append(HandlerEvent(writer, prefix, EPOCH, epoch, time, len(manifest.world.nodes)))
            with suppress(StorageError):  # `stats.json` is never synced
                stats = read_json(directory / stats_path(entry.attempt_name)) or {}
                found += report_notes(writer, prefix, "checkpoint_save", times_of(stats.get("nodes")), time)
    return found


VARIABLE = "TORCHRELAY_DATABASE"
_DEADLINE_SECS = 30.0
_ROWS_AT_ONCE = 20_000


@verb(
    "update a metadata database from run directories",
    arg(
        "path", "local or mounted run directories, or directories that contain runs", "RUN_OR_RUNS", nargs="+"
    ),
    arg(
        "--database",
        "sqlite:///runs.db or postgresql://user@host/database "
        f"(default: {VARIABLE}, hidden from process lists)",
        "URL",
    ),
)
def index(chosen: argparse.Namespace, output: Output) -> int:
    """Store the events of each run; returns 5 if one could not be read, after storing the others."""
    given = chosen.database or os.environ.get(VARIABLE)
    if not given:
        raise UsageError("no database given: use --database URL")
    url = parse_url(given)
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
        epochs = {note.key for note in notes if note.kind == EPOCH}
        reports = {note.key for note in notes if note.times}
        done.append({"path": text, "epochs": len(epochs), "reports": len(reports)})
        if not output.json:
            output.line("{path}: {epochs} saved epochs, {reports} saves and loads".format(**done[-1]))
    if output.json:
        output.value({"database": database.shown, "done": done, "failed": failed})
    return StorageError.exit_code if failed else 0


def _store(calls: BoundedCalls, database: Database, notes: Sequence[HandlerEvent]) -> None:
    """Store events in parts, each with a deadline, because a server may hang at any point."""
    parts, rows = [list[HandlerEvent]()], 0  # at least one, because storing creates the tables
    for note in notes:
        if parts[-1] and rows + rows_in(note) > _ROWS_AT_ONCE:
            parts.append([])
            rows = 0
        parts[-1].append(note)
        rows += rows_in(note)
    for part in parts:
        calls.make(
            lambda part=part: database.patiently(lambda: database.store(part), _DEADLINE_SECS),  # type: ignore[misc]
            2 * _DEADLINE_SECS + 1,
        )
