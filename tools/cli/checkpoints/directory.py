"""`torchrelay ckpt show|du|repair`: contents of an epoch, disk usage, repair of a directory."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.names import nearest, position_of
from torchrelay.checkpoint.format.position import Position, matches, matches_any
from torchrelay.checkpoint.inspect.repair import Finding, Inventory, TryUse, Usage, take_inventory, usage_of
from torchrelay.checkpoint.load.info import BlobLine, EpochTable, largest, read_table
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView
from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.jobs.runtime import undisturbed
from torchrelay.metadata.fs import finite
from torchrelay.metadata.run_directory import FORMAT, RunDirectory
from torchrelay.runners.monitoring.console import Output, flag, human_number, verb
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import RunLocation, Selected, locate, select
from torchrelay.tools.cli.arguments import BLOBS, PLACE, SINGLE_WRITER, run_epoch
from torchrelay.tools.cli.runs.ls import current_keys, entry_json, marks_of, metrics_text, states_of

_COLUMNS = ("name", "kind", "scope", "dtype", "shape", "leaves", "bytes", "written in")
_SHOWN = 1000


@verb(
    "list the blobs of an epoch with kind, type, shape, scope and size",
    run_epoch(),
    BLOBS,
    flag("--leaves", "list every tensor and value"),
    flag("--all", f"list all, even if there are more than {_SHOWN:,}"),
)
def show(chosen: argparse.Namespace, output: Output) -> int:
    """Print a summary of the epoch and its blobs, only the largest if there are very many."""
    selected = select(chosen.path)
    with undisturbed():
        table = read_table(selected.place.storage, selected.entry)
        sizes = table.leaf_sizes if chosen.leaves else table.sizes
        names = _asked(table.leaves if chosen.leaves else list(table.blobs), chosen.blobs)
        shown = set(names) if chosen.all else largest(sizes, names, _SHOWN)
        lines = list(table.leaf_lines(shown) if chosen.leaves else table.blob_lines(shown))
    output.notices(selected.view.notices)
    if output.json:
        output.value(_epoch_json(selected, table, lines, len(names)))
        return 0
    entry, facts = selected.entry, table.facts
    after = f"after {human_number(facts.elapsed_secs)} s  {metrics_text(facts.metrics)}"
    where = f"{len(table.nodes)} node{'s' * (len(table.nodes) > 1)} on {', '.join(table.hosts)}"
    states = ", ".join(_states(selected)) or "ok"
    output.line(f"epoch {entry.position}  branch {entry.branch}  {entry.attempt_name}  {states}")
    output.line(f"{where}  step {facts.total_steps}  {after}".rstrip())
    output.line(f"{len(table.blobs)} blobs, {human_bytes(sum(table.sizes.values()))} on one node")
    output.table(_COLUMNS, [_blob_cells(selected, line) for line in lines])
    if len(names) > len(lines):
        left = sum(sizes.get(name, 0) for name in names if name not in shown)
        more = f"{len(names) - len(lines):,} smaller ones ({human_bytes(left)})"
        output.line(f"... and {more}; --all shows them")
    return 0


def _asked(names: Sequence[str], patterns: Collection[str] | None) -> Sequence[str]:
    """Filter names by patterns; raises UsageError for a pattern that matches nothing."""
    if patterns is None:
        return names
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise UsageError(f"--blobs {pattern!r} matches no blob{nearest(pattern, names)}")
    return [name for name in names if matches_any(name, patterns)]


def _states(selected: Selected) -> list[str]:
    entry, view = selected.entry, selected.view
    return [*states_of(entry, current_keys(view)), *marks_of(view, entry)]


def _blob_cells(selected: Selected, line: BlobLine) -> tuple[str, ...]:
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
    """Return the positions whose attempts wrote the bytes; unchanged blobs are in earlier ones."""
    return [str(position_of(selected.entry.tries[source])) for source in line.sources]


def _epoch_json(
    selected: Selected, table: EpochTable, lines: Sequence[BlobLine], count: int
) -> dict[str, Any]:
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
            {name: value for name, value in line._asdict().items() if name != "sources"}
            | {"written_in": _written(selected, line)}
            for line in lines
        ],
        "left_out": count - len(lines),
        "notices": list(selected.view.notices),
    }


_BLOBS = 10


@verb("show disk usage by epoch, group and blob, with shared and orphaned bytes", PLACE)
def du(chosen: argparse.Namespace, output: Output) -> int:
    """Print the disk usage; lists all files, reads the log and one manifest."""
    place = locate(chosen.path)
    view = place.log()
    usage = usage_of(place.storage, view)
    newest, sizes = view.newest(boundary=True), dict[str, int]()
    with suppress(StorageError):  # of its manifest
        sizes = {} if newest is None else dict(read_table(place.storage, newest).sizes)
    some = [(name, sizes[name]) for name in largest(sizes, list(sizes), _BLOBS)]
    blobs = dict(sorted(some, key=lambda one: (-one[1], one[0])))
    output.notices(view.notices)
    if output.json:
        output.value(_json(view, usage, blobs))
        return 0
    if usage.tries:
        groups = sorted(usage.by_group)
        columns = ("epoch", "branch", "bytes", *groups, "used by", "frees", "directory")
        tries = sorted(usage.tries, key=_sort_key)
        output.table(columns, [_cells(one, groups) for one in tries], spare=("directory",))
    for name, nbytes in blobs.items():
        output.line(f"newest epoch, blob {name}: {human_bytes(nbytes)}")
    for line in _sums(view, usage):
        output.line(line)
    return 0


def _sort_key(one: TryUse) -> tuple[bool, Position, int, str]:
    """Sort key: epochs by number and branch, then everything else."""
    position, branch = (Position(0), 0) if one.entry is None else (one.entry.position, one.entry.branch)
    return (one.entry is None, position, branch, one.name)


def _cells(one: TryUse, groups: list[str]) -> tuple[str, ...]:
    entry = one.entry
    return (
        one.standing if entry is None else str(entry.position),
        "-" if entry is None else str(entry.branch),
        human_bytes(one.bytes),
        *(human_bytes(one.groups.get(group, 0)) for group in groups),
        str(one.needed_by) if one.needed_by else "-",
        human_bytes(one.frees),
        one.name,
    )


def _sums(view: LogView, usage: Usage) -> list[str]:
    groups = ", ".join(f"{group} {human_bytes(size)}" for group, size in sorted(usage.by_group.items()))
    live, shared, free = (human_bytes(n) for n in (usage.total("live"), usage.shared, usage.freed_by_last))
    lines = [
        f"live: {live} in {len(view.entries)} epochs{f' ({groups})' if groups else ''}",
        f"shared: {shared} of older epochs used by newer ones",
        f"retention: keeping only the newest epoch (keep_last=1) would free {free}",
    ]
    if retired := usage.total("retired"):
        lines.append(
            f"retired but not deleted yet: {human_bytes(retired)}; torchrelay ckpt repair deletes them"
        )
    if orphans := usage.total("orphan"):
        busy = "" if view.state.released else " (or a save in progress)"
        lines.append(
            f"orphans: {human_bytes(orphans)}{busy}; torchrelay ckpt repair --delete-orphans deletes them"
        )
    return lines


def _json(view: LogView, usage: Usage, blobs: Mapping[str, int]) -> dict[str, object]:
    return {
        "live_bytes": usage.total("live"),
        "retired_bytes": usage.total("retired"),
        "orphan_bytes": usage.total("orphan"),
        "shared_bytes": usage.shared,
        "keep_last_1_frees_bytes": usage.freed_by_last,
        "groups": dict(sorted(usage.by_group.items())),
        "largest_blobs": dict(blobs),
        "tries": [
            {
                "try": one.name,
                "standing": one.standing,
                "epoch": None if one.entry is None else one.entry.position.epoch,
                "step": None if one.entry is None else one.entry.position.step,
                "branch": None if one.entry is None else one.entry.branch,
                "bytes": one.bytes,
                "groups": dict(one.groups),
                "needed_by": one.needed_by,
                "frees_bytes": one.frees,
            }
            for one in usage.tries
        ],
        "notices": list(view.notices),
    }


REASON = "rebuilt by repair; how the run ended is unknown"


def lost_notes(place: RunLocation, view: LogView | None) -> tuple[Finding, ...]:
    """Return `run.json` and `status.json` as findings if they are missing or damaged but the log exists."""
    if place.run is None or place.run.url is not None or view is None or view.slot < 0:
        return ()
    found: list[Finding] = []
    for name, read in (("run.json", place.run.identity), ("status.json", place.run.status)):
        try:
            reason = "" if read() else "is missing"
        except DamagedError as error:
            reason = str(error)
        if reason:
            found.append(Finding("mend", "note", f"../{name}", f"{reason}; it can be rebuilt from the log"))
    return tuple(found)


def write_notes(place: RunLocation, view: LogView | None, notes: tuple[Finding, ...]) -> None:
    """Rebuild these files from the log. Times, the command and finalization progress are lost."""
    if place.run is None or view is None:
        return
    newest = view.newest(boundary=True)
    manifest: Manifest | None = None
    if newest is not None:
        with suppress(OSError):
            manifest = codec.read(place.storage, newest)
    paths = {one.path for one in notes}
    if "../run.json" in paths:
        place.run.write_identity(_identity(place.run, view, manifest))
    if "../status.json" in paths:
        epoch = None if newest is None else newest.position.epoch
        place.run.write_status("STOPPED", epoch=epoch, generation=view.generation, reason=REASON)


def _identity(run: RunDirectory, view: LogView, manifest: Manifest | None) -> dict[str, Any]:
    """Rebuild `run.json`: the run id comes from the newest manifest, `best` from the next launch."""
    known = manifest.facts.run_id if manifest is not None else None
    return {
        "format": FORMAT,
        "uuid": known or view.job_uuid,
        "job": view.job_name or run.name,
        "created": round((run.path / "checkpoints" / slot_path(0)).stat().st_mtime, 3),
        "best": None,
        "world_size": None if manifest is None else len(manifest.world.nodes),
        "command": [],
        "python": "",
    }


_WORDS = {"mend": "to repair", "delete": "orphan", "keep": "left alone"}


@verb(
    "rebuild lost files from the log, finish interrupted deletions and list orphans",
    PLACE,
    flag("--dry-run", "only print what would be done"),
    flag("--delete-orphans", "delete files that no record refers to; foreign files are kept"),
    SINGLE_WRITER,
)
def repair(chosen: argparse.Namespace, output: Output) -> int:
    """Repair the directory; returns 0, or 5 if files that epochs need are lost. Raises if it is in use."""
    place = locate(chosen.path, single_writer=chosen.single_writer)
    if chosen.dry_run:
        found = take_inventory(place.storage)
        notes = lost_notes(place, found.view)
        return _report(output, found, notes, (), delete=chosen.delete_orphans)
    from torchrelay.checkpoint.inspect.repair import repair as repair_storage

    repaired = repair_storage(place.storage, delete=chosen.delete_orphans)
    notes = lost_notes(place, repaired.after.view)
    write_notes(place, repaired.after.view, notes)
    return _report(output, repaired.after, (), (*repaired.done, *notes), delete=False)


def _report(
    output: Output, left: Inventory, notes: Sequence[Finding], done: Sequence[Finding], *, delete: bool
) -> int:
    findings = (*left.findings, *notes)
    words = ["deleted" if one.does == "delete" else "repaired" for one in done]
    words += ["would be deleted" if delete and one.does == "delete" else _WORDS[one.does] for one in findings]
    lines = [
        f"{word}  {one.kind}  {one.path}: {one.text}"
        for word, one in zip(words, (*done, *findings), strict=True)
    ]
    if not lines:
        lines = ["nothing to repair; `torchrelay ckpt verify` checks the contents of the epochs"]
    elif any(one.does == "delete" for one in findings) and not delete:
        lines.append("--delete-orphans deletes the orphans")
    output.result({"done": [one.json() for one in done], "left": [one.json() for one in findings]}, lines)
    lost = any(one.kind in ("lost base", "lost epoch") for one in findings)
    return StorageError.exit_code if lost else 0
