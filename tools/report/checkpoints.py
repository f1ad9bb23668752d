"""What is read of checkpoints: committed epochs and why each is used, times, sizes, and norms of weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, PerNode
from torchrelay.checkpoint.format.names import stats_path
from torchrelay.checkpoint.format.position import CommittedPosition, Key, Position
from torchrelay.checkpoint.inspect.anomalies import ResumePreview, explain, start_now
from torchrelay.checkpoint.inspect.contents import (
    CAN_BE_BAD,
    CHUNK_BYTES,
    Comparison,
    Epoch,
    NodeLeaf,
    PartReader,
    open_epoch,
    parts,
)
from torchrelay.checkpoint.load.info import glance_or_notes
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import Record
from torchrelay.checkpoint.log.state import History, read_history
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError
from torchrelay.metadata.fs import read_lines
from torchrelay.metadata.handlers import FILE_NAME, times_of
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import Json, dataclass
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.run_data import (
    BlobBytes,
    BranchNote,
    EpochBytes,
    EpochRow,
    Event,
    LeafNorm,
    Norms,
    Point,
    ReadLimits,
    Save,
    Troubles,
    bounded,
    moment_of,
    spread,
)

if TYPE_CHECKING:
    from torchrelay.checkpoint.inspect.statistics import Moments


@dataclass(frozen=True)
class Committed:
    """The log as it was read, and its records."""

    view: LogView = field(default_factory=LogView)
    history: History = field(default_factory=History)
    start: ResumePreview | None = None

    @property
    def entries(self) -> tuple[CommittedPosition, ...]:
        """All live entries: abandoned ones first, then those of the current branch, oldest first."""
        return (*self.view.abandoned(), *self.view.line())


def committed_of(storage: Storage, troubles: Troubles) -> Committed:
    """Read the log and verify, up to the headers, the checkpoint that the next launch would choose."""
    view = troubles.tried(lambda: open_log(storage), LogView())
    for notice in view.notices:
        troubles.note(notice)
    if view.job_uuid is None or view.slot < 0:
        return Committed(view)
    uuid = view.job_uuid
    history = troubles.tried(lambda: read_history(storage, uuid, view.slot), History())
    start = troubles.tried(lambda: start_now(storage, view), None)
    return Committed(view, history, start)


def rewinds_of(history: History) -> dict[int, tuple[int, bool]]:
    """By generation: the epoch that a start rewound to (0: from the beginning), and if damage caused it."""
    found: dict[int, tuple[int, bool]] = {}
    for record in history.records:
        if record.kind == "rewind":
            epoch = _base(record).get("epoch")
            found[record.generation] = (
                epoch if type(epoch) is int else 0,
                _forced(record.payload.get("request")),
            )
    return found


def _forced(request: Json) -> bool:
    """Whether damage did it."""
    return isinstance(request, Mapping) and request.get("fallback") is True


def _base(record: Record) -> Mapping[str, Json]:
    base = record.payload.get("base")
    return base if isinstance(base, Mapping) else {}


def generations_of(history: History) -> dict[Key, int]:
    """Which start committed each position, as far back as records exist."""
    found: dict[Key, int] = {}
    for record in history.records:
        said = record.payload.get("entry") if record.kind == "commit" else None
        if isinstance(said, Mapping):
            branch, epoch, step = (said.get(name) for name in ("branch", "epoch", "step"))
            if type(branch) is int and type(epoch) is int and type(step) is int:
                found[Key(branch, Position(epoch, step))] = record.generation
    return found


def committed_points(
    storage: Storage, committed: Committed, limits: ReadLimits, troubles: Troubles
) -> list[tuple[int, list[Point]]]:
    """The metrics saved with whole epochs, by generation; for checkpoints without files of metrics."""
    found: dict[int, list[Point]] = {}
    generations = generations_of(committed.history)
    for entry in committed.entries[-limits.epoch_rows :]:
        if entry.position.boundary and entry.healthy:
            seen = troubles.tried(partial(glance_or_notes, storage, entry), None)
            metrics = {} if seen is None else seen.facts.metrics
            generation = generations.get(entry.key, 0)
            point = Point(entry.position.epoch, generation, None, True, metrics)
            found.setdefault(generation, []).append(point)
    return sorted(found.items())


def rows_of(
    committed: Committed,
    saves: Mapping[str, Save],
    points: Mapping[tuple[int, int], Point],
    current: Mapping[int, Point],
    limits: ReadLimits,
) -> tuple[EpochRow, ...]:
    """The newest rows of the table; metrics come from the metrics files, by (generation, epoch) or epoch."""
    generations = generations_of(committed.history)
    on_line = {entry.key for entry in committed.view.line()}
    start = committed.start or ResumePreview(None, "", 0)
    rows = []
    for entry in committed.entries[-limits.epoch_rows :]:
        epoch, save = entry.position.epoch, saves.get(entry.attempt_name)
        point = points.get((generations.get(entry.key, -1), epoch))
        if point is None and entry.key in on_line:
            point = current.get(epoch)
        account = explain(committed.view, committed.history, start, entry.position, entry.branch)
        marks = (mark for mark in committed.view.state.marks if mark.target == entry.key)
        row = EpochRow(
            str(entry.position),
            entry.branch,
            epoch,
            entry.position.step,
            account.standing if committed.start else "unknown",
            account.reason if committed.start else "what a start would choose is unknown",
            tuple(f"{mark.kind}: {mark.name}" for mark in marks),
            entry.attempt_name,
            point.metrics if point else {},
            sum(one.bytes for one in save.nodes) if save else None,
        )
        rows.append(row)
    return tuple(rows)


def branches_of(committed: Committed) -> tuple[BranchNote, ...]:
    """Every branch that the log still knows."""
    view = committed.view
    if view.slot < 0:
        return ()
    gone = view.abandoned()
    return tuple(
        BranchNote(
            one.id,
            one.parent,
            None if one.base is None else str(one.base),
            _how(one.request, first=one.parent is None and one.base is None),
            tuple(entry.position.epoch for entry in view.entries if entry.branch == one.id),
            frozenset(entry.position.epoch for entry in gone if entry.branch == one.id),
        )
        for one in view.branches
    )


def happened(history: History) -> tuple[Event, ...]:
    """Records that people ask about: rewinds, quarantines, what retention took, tags and pins."""
    found = []
    for record in history.records:
        if text := _said_of(record):
            secs = None
            with suppress(ValueError):
                secs = datetime.fromisoformat(record.written.replace("Z", "+00:00")).timestamp()
            found.append(Event(secs, record.kind, text, record.generation))
    return tuple(found)


def _how(request: Mapping[str, Json] | None, *, first: bool) -> str:
    if request is None:
        return "the first branch" if first else "a rewind"
    epoch = request.get("epoch")
    known = f"rewound to epoch {epoch}" if type(epoch) is int else "a requested rewind"
    return "fell back after damage" if _forced(request) else known


def _said_of(record: Record) -> str:
    payload = record.payload
    if record.kind == "quarantine":
        position = f"{payload.get('epoch')}, branch {payload.get('branch')}"
        return f"epoch {position} was found damaged: {payload.get('reason') or 'no reason was noted'}"
    if record.kind == "rewind":
        base, why = _base(record), "after damage" if _forced(payload.get("request")) else "as asked for"
        where = f"epoch {base.get('epoch')}" if base else "the start"
        return f"branch {payload.get('branch')} began at {where}, {why}"
    if record.kind == "takeover":
        return f"the log was taken over: {payload.get('reason')}"
    if record.kind in ("tag", "pin", "unpin"):
        return f"{record.kind} {payload.get('name')!r}"
    if record.kind == "retire":
        retired, rule = payload.get("retired"), payload.get("rule")
        amount = len(retired) if isinstance(retired, list) else 0
        return f"retired {amount} by {rule if isinstance(rule, str) else 'retention'}"
    return ""


_KINDS = {"checkpoint_save": "save", "checkpoint_load": "load", "checkpoint_partial_load": "load"}


def recorded_saves(run: RunDirectory, troubles: Troubles) -> list[Save]:
    """Saves and loads in the order of their times, from `metadata.jsonl`; empty where there is none."""

    def read() -> list[Save]:
        found = []
        for line in bounded(read_lines(run.path / FILE_NAME), FILE_NAME, troubles):
            kind, end = _KINDS.get(str(line.get("kind"))), moment_of(line)
            nodes = tuple(times_of(line.get("nodes")))
            if kind is not None and end is not None and nodes:
                found.append(Save(kind, end, nodes))
        return sorted(found, key=lambda one: one.end or 0.0)

    return troubles.tried(read, [])


def saves_of_attempts(
    storage: Storage, entries: Iterable[CommittedPosition], limits: ReadLimits, troubles: Troubles
) -> dict[str, Save]:
    """Name of an attempt to the save that made it; attempts without `stats.json` are left out."""
    left, found = limits.stats_bytes, dict[str, Save]()
    for entry in spread(list(entries), limits.epoch_rows):
        if left <= 0:
            troubles.note(
                f"save times of {entry.position} and others: not read, {limits.stats_bytes} bytes were"
            )
            break
        data = troubles.tried(partial(_bytes, storage, entry.attempt_name, left), b"")
        left -= len(data)
        try:
            said = json.loads(data or b"{}")
        except (ValueError, RecursionError):
            said = {}
        if nodes := tuple(times_of(said.get("nodes") if isinstance(said, dict) else None)):
            found[entry.attempt_name] = Save("save", None, nodes)
    return found


def _bytes(storage: Storage, attempt_name: str, limit: int) -> bytes:
    try:
        return storage.read_range(stats_path(attempt_name), 0, limit)
    except FileNotFoundError:
        return b""


def manifests_of(
    storage: Storage, line: Sequence[CommittedPosition], limits: ReadLimits, troubles: Troubles
) -> list[Manifest]:
    """Manifests of epochs spread over a line, the newest among them, within the limit of bytes."""
    whole = [entry for entry in line if entry.position.boundary and entry.healthy]
    size = max((entry.manifest_bytes for entry in whole), default=1)
    room = max(1, min(limits.sized_epochs, limits.manifest_bytes // max(1, size)))
    found = (troubles.tried(partial(codec.read, storage, entry), None) for entry in spread(whole, room))
    return [one for one in found if one is not None]


def sizes_of(manifest: Manifest) -> EpochBytes:
    """Bytes by blob, largest first. What each node has for itself counts once per node."""
    written: dict[str, int] = {}
    referenced: dict[str, int] = {}
    for leaf in manifest.leaves:
        if leaf.alias_of is not None:
            continue
        layout = manifest.layouts[leaf.layout]
        nbytes = leaf.nbytes * (len(layout.nodes) if isinstance(layout, PerNode) else 1)
        into = written if leaf.source == 0 else referenced
        into[leaf.blob] = into.get(leaf.blob, 0) + nbytes
    blobs = [
        BlobBytes(name, written.get(name, 0), referenced.get(name, 0)) for name in {**written, **referenced}
    ]
    return EpochBytes(manifest.position.epoch, tuple(sorted(blobs, key=lambda one: (-one.total, one.blob))))


NOT_ASKED = "weights were not read, as asked for"
_MOST_LEAVES = 128
_FEWEST_EPOCHS = 2


def norms_of(storage: Storage, line: Sequence[CommittedPosition], limits: ReadLimits) -> Norms:
    """Of the parameters in whole, healthy epochs of a line. Never raises for what lies there."""
    if limits.norm_bytes <= 0:
        return Norms(left_out=NOT_ASKED)
    whole = [entry for entry in line if entry.position.boundary and entry.healthy]
    if not whole:
        return Norms()
    try:
        return _read(storage, whole, limits)
    except (RelayError, OSError) as error:  # numpy is missing, or files are damaged or away
        return Norms(left_out=str(error))


def _read(storage: Storage, whole: Sequence[CommittedPosition], limits: ReadLimits) -> Norms:
    newest, budget = open_epoch(storage, whole[-1]), limits.norm_bytes
    every = {
        name: item.leaf.nbytes
        for name, item in newest.items.items()
        if item.tensor
        and item.leaf.role == "parameter"
        and item.leaf.dtype in CAN_BE_BAD
        and not newest.gone(item)
    }
    if not every:
        return Norms(left_out="the newest epoch has no parameters to look at")
    # The first epoch is read once for itself, then both of each pair.
    reads = 2 * min(_FEWEST_EPOCHS, len(whole)) - 1
    # Parameters spread over the model; where these are too many bytes, as many as fit, the small ones.
    names, seen, size, fitting = spread(list(every), _MOST_LEAVES), 0, 0, set[str]()
    for name in sorted(names, key=every.__getitem__):
        seen += every[name]
        if seen * reads <= budget:
            fitting.add(name)
            size = seen
    if not fitting:
        least, most = human_bytes(min(every.values()) * reads), human_bytes(budget)
        return Norms(left_out=f"no weight fits into the {most} that may be read: the smallest needs {least}")
    names = [name for name in names if name in fitting]
    epochs = min(limits.normed_epochs, len(whole), (budget // max(1, size) + 1) // 2)
    chosen = spread(whole, epochs) if epochs > 1 else [whole[-1]]
    rows, read = _rows(storage, chosen, names)
    some = f"{len(names)} of {len(every)} parameters were looked at" if len(names) < len(every) else None
    return Norms(tuple(rows), read, some)


def _rows(
    storage: Storage, chosen: Sequence[CommittedPosition], names: Sequence[str]
) -> tuple[list[LeafNorm], int]:
    """Leaves by epoch, each compared with the epoch before if both have it in the same form."""
    rows, read, known = list[LeafNorm](), 0, dict[str, LeafNorm]()
    before = None
    for entry in chosen:
        epoch, number = open_epoch(storage, entry), entry.position.epoch
        for name in names:
            item = epoch.items.get(name)
            if item is None or epoch.gone(item):
                continue
            one, last = None if before is None else before.items.get(name), known.get(name)
            if before is None or one is None or last is None or one.form != item.form or before.gone(one):
                found = _moments(epoch, item)
                row = LeafNorm(number, name, found.elements, found.norm, None, found.nan + found.inf)
                read += item.leaf.nbytes
            else:
                change = Comparison(PartReader(before), PartReader(epoch), one, item).change(whole=True)
                if change.compared:
                    bad, moved = change.nan_b + change.inf_b, change.norm_difference
                    row = LeafNorm(number, name, item.leaf.elements, change.norm_b, moved, bad)
                    read += 2 * item.leaf.nbytes
                else:  # digests say that nothing changed, so nothing was read
                    row = LeafNorm(number, name, last.elements, last.norm, 0.0, last.nonfinite)
            known[name] = row
            rows.append(row)
        before = epoch
    return rows, read


def _moments(epoch: Epoch, item: NodeLeaf) -> Moments:
    """By the item itself: to look hundreds of names up as patterns in a large model takes a minute."""
    from torchrelay.checkpoint.inspect.statistics import joined, moments_of, steps

    reader, width, dtype = PartReader(epoch), item.leaf.item_bytes, str(item.leaf.dtype)
    stretches = (
        reader.filled(part, start, min(start + CHUNK_BYTES, part.nbytes))
        for part in parts(epoch, item)
        for start in range(0, part.nbytes, CHUNK_BYTES)
    )
    return joined(moments_of(chunk) for data in stretches for chunk in steps(data, width, dtype))
