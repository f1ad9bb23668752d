"""Find files that the log does not need or lacks, repair a directory, and report its disk usage.

Only the holder of the log deletes. Files that existed before our takeover, and that no record refers to after
it, can never be committed; so nothing in flight is deleted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Literal

from torchrelay.checkpoint.format.canonical_json import sealed_bytes
from torchrelay.checkpoint.format.names import (
    ATTEMPT_NAME,
    DATA,
    MANIFEST,
    STATS,
    attempt_directory,
    parse_shard_file_name,
)
from torchrelay.checkpoint.format.position import CommittedPosition, Retirement
from torchrelay.checkpoint.log import lease
from torchrelay.checkpoint.log import record as job_file
from torchrelay.checkpoint.log.chain import HINT, Tail, open_log, read_hint, read_tail
from torchrelay.checkpoint.log.lease import PATIENCE_SECS
from torchrelay.checkpoint.log.record import LOG, decode, slot_path
from torchrelay.checkpoint.log.retention import Keeping, delete_orphans, delete_retired
from torchrelay.checkpoint.log.state import History, LostBase, lost_bases, read_history, restore
from torchrelay.checkpoint.log.tiered_storage import refuse_part
from torchrelay.checkpoint.log.view import STRIDE, LogView, find_tail, floor
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Leftovers, Storage, check_exclusion
from torchrelay.checkpoint.storage.open import NOTES as TIER_NOTES
from torchrelay.errors import DamagedError, UnknownEpochError
from torchrelay.records import Json, dataclass

Does = Literal["mend", "delete", "keep"]
"""How repair treats a finding: always, only on request, never."""

_SLOT = re.compile(r"[0-9]{20}\.json", re.ASCII)
_BASE = re.compile(r"base-[0-9a-f]{6,64}\.json", re.ASCII)
_TOP = frozenset({job_file.JOB_PATH, lease.PATH, TIER_NOTES, LOG, DATA, "pins", "requests"})


@dataclass(frozen=True)
class Finding:
    """One problem; `path` is relative to the directory."""

    does: Does
    kind: str
    path: str
    text: str

    def json(self) -> dict[str, Json]:
        """An object of `repair --json`."""
        return dict(vars(self))


@dataclass(frozen=True)
class Inventory:
    """All findings. `view` is None while a lost base file prevents reading the log."""

    findings: tuple[Finding, ...]
    view: LogView | None
    history: History
    lost: tuple[LostBase, ...] = field(default=(), repr=False)


def take_inventory(storage: Storage) -> Inventory:
    """Find all problems.

    Raises UnknownEpochError without a job, DamagedError for a log that cannot be trusted, FormatError for a
    newer version's, StorageError for unreadable files.
    """
    job = job_file.read_job(storage)
    newest = find_tail(lambda slot: storage.stat(slot_path(slot)) is not None, read_hint(storage))
    if job is None or newest is None:
        raise UnknownEpochError(f"{storage.url} holds no job yet: there is nothing to look at")
    tail: Tail | DamagedError
    try:
        tail = read_tail(storage, job)
        job = tail.job
    except DamagedError as error:
        tail = error
    history = read_history(storage, job.uuid, newest)
    lost = lost_bases(storage, history)
    findings = [Finding("mend", "job file", job_file.JOB_PATH, one) for one in job.notices]
    for one in lost:
        if one.data is None:
            text = f"{one.reason}; its content is unknown: restore it from a copy"
            findings.append(Finding("keep", "lost base", one.ref.path, text))
        else:
            findings.append(Finding("mend", "base", one.ref.path, f"{one.reason}; it can be recreated"))
    findings += [
        Finding("keep", "damaged record", path, "damaged: left unchanged, because newer ones have the state")
        for path in history.damaged
    ]
    if isinstance(tail, DamagedError):
        if not lost:
            raise tail
        return Inventory(tuple(findings), None, history, lost)
    findings += _derived(storage, tail, newest)
    findings += _gone(storage, tail.view)
    findings += _undeleted(storage, tail.view)
    findings += _unneeded(storage, tail.view, history, job.uuid)
    findings += _foreign(storage, tail.view)
    return Inventory(tuple(findings), tail.view, history, lost)


def _derived(storage: Storage, tail: Tail, newest: int) -> Iterator[Finding]:
    hint = read_hint(storage)
    leads = hint is not None and hint <= newest and floor(hint) == floor(newest)
    if not leads or storage.stat(slot_path(hint or 0)) is None:
        said = "nothing" if hint is None else f"slot {hint}"
        yield Finding("mend", "hint", HINT, f"says {said}, the log ends at slot {newest}")
    found = None
    with suppress(FileNotFoundError, ValueError, RecursionError):
        found = json.loads(storage.read_range(lease.PATH, 0, lease.LIMIT_BYTES))
    if not isinstance(found, dict) or found.get("generation") != tail.view.generation:
        yield Finding("mend", "counter", lease.PATH, "is not a counter of the newest writer")


def _gone(storage: Storage, view: LogView) -> Iterator[Finding]:
    """Missing directories of live epochs that are not quarantined yet."""
    healthy = [one for one in view.entries if one.healthy]
    needed = {name for one in healthy for name in one.tries}
    for name in sorted(needed - set(storage.list(DATA))):
        if storage.stat(f"{attempt_directory(name)}/{MANIFEST}") is not None:
            continue  # listings of an object store may be outdated
        needing = [f"{one.position} (branch {one.branch})" for one in healthy if name in one.tries]
        text = f"gone, and needed by epoch {', '.join(needing[:8])}{' and others' * (len(needing) > 8)}"
        remedy = "restore it from a copy, or torchrelay ckpt verify --quarantine"
        yield Finding("keep", "lost epoch", attempt_directory(name), f"{text}: {remedy}")


def _undeleted(storage: Storage, view: LogView) -> Iterator[Finding]:
    there = set(storage.list(DATA))
    for one in view.state.retiring:
        files = list(files_of(storage, one))
        if files or (one.groups is None and one.attempt_name in there):
            what = "all of it" if one.groups is None else f"the files of {', '.join(one.groups)}"
            text = f"retired ({what}), but not deleted completely: {_size(storage, files)} left"
            yield Finding("mend", "deletion", attempt_directory(one.attempt_name), text)


def files_of(storage: Storage, one: Retirement) -> Iterator[str]:
    """The existing files of an attempt, or of some groups of it."""
    directory = attempt_directory(one.attempt_name)
    for name in storage.list(directory):
        if one.groups is None or _group_of(name) in one.groups:
            yield f"{directory}/{name}"


def _group_of(name: str) -> str | None:
    try:
        return parse_shard_file_name(name).group
    except DamagedError:
        return None


def _unneeded(storage: Storage, view: LogView, history: History, job: str) -> Iterator[Finding]:
    """Files that no record refers to; while damage hides a part of the log they may be committed."""
    busy = "" if view.state.released else "; or a save in flight, if its writer is alive"
    known = view.state.tries | {one.attempt_name for one in view.state.retiring}
    for name in storage.list(DATA):
        if ATTEMPT_NAME.fullmatch(name) and name not in known:
            files = list(files_of(storage, Retirement(name)))
            size = _size(storage, files)
            text = f"no record refers to it ({size}): a save that did not end{busy}"
            if not view.certain:
                text = f"no record that can be read refers to it ({size}); kept, because others are damaged"
            yield Finding("delete" if view.certain else "keep", "orphan", attempt_directory(name), text)
    if view.certain and (referred := _referred(storage, history, job)) is not None:
        for name in storage.list(LOG):
            if _BASE.fullmatch(name) and name not in referred:
                yield Finding("delete", "unused base", f"{LOG}/{name}", f"no record refers to it{busy}")
    for directory in ("", LOG, DATA, *map(attempt_directory, sorted(view.state.tries))):
        for name in storage.leftovers(directory) if isinstance(storage, Leftovers) else ():
            path = f"{directory}/{name}" if directory else name
            yield Finding("delete", "temporary", path, f"a write that a crash cut off{busy}")


def _referred(storage: Storage, history: History, job: str) -> frozenset[str] | None:
    """Base files that any record refers to, also old ones at multiples of 256; None if one is unclear."""
    if history.damaged:
        return None
    found = {record.base.name for record in history.records if record.base is not None}
    for slot in range(0, history.begins, STRIDE):
        try:
            record = decode(sealed_bytes(storage, slot_path(slot)), slot=slot, job=job)
        except (DamagedError, FileNotFoundError):
            return None
        if record.base is not None:
            found.add(record.base.name)
    return frozenset(found)


def _foreign(storage: Storage, view: LogView) -> Iterator[Finding]:
    paths = [name for name in storage.list("") if name not in _TOP]
    strange = (name for name in storage.list(LOG) if not (_SLOT.fullmatch(name) or _BASE.fullmatch(name)))
    paths += [path for name in strange if (path := f"{LOG}/{name}") != HINT]
    paths += [f"{DATA}/{name}" for name in storage.list(DATA) if not ATTEMPT_NAME.fullmatch(name)]
    for directory in map(attempt_directory, sorted(view.state.tries)):
        names = (name for name in storage.list(directory) if name not in (MANIFEST, STATS))
        paths += [f"{directory}/{name}" for name in names if _group_of(name) is None]
    for path in paths:
        yield Finding("keep", "foreign", path, "not ours, and never touched")


def _size(storage: Storage, files: Sequence[str]) -> str:
    return f"{len(files)} files, {sum(storage.stat(path) or 0 for path in files)} bytes"


@dataclass(frozen=True)
class Repaired:
    """Findings before and after a repair."""

    before: Inventory
    after: Inventory

    @property
    def done(self) -> tuple[Finding, ...]:
        """Findings that were repaired."""
        left = {(one.kind, one.path) for one in self.after.findings}
        return tuple(one for one in self.before.findings if (one.kind, one.path) not in left)


def repair(storage: Storage, *, delete: bool = False, patience_secs: float = PATIENCE_SECS) -> Repaired:
    """Repair what can be repaired; with `delete` also delete files that no record refers to.

    Takes the log over if necessary: DirectoryInUseError if its writer is alive, UsageError if the storage
    does not keep a second writer out; then only base files have been restored, byte for byte. Raises
    DamagedError for a log that cannot be trusted, StorageError for files that cannot be read or written.
    """
    before = take_inventory(storage)
    for lost in before.lost:
        if lost.data is not None:
            restore(storage, lost)
    found = take_inventory(storage) if before.view is None else before
    acting = {"mend", "delete"} if delete else {"mend"}
    if any(one.does in acting and one.kind != "base" for one in found.findings):
        # Repair as holder of the log; takeover and release write hint and counter again.
        refuse_part(storage)
        check_exclusion(storage)
        writer = LogWriter.take(storage, open_log(storage).job_name, patience_secs=patience_secs)
        try:
            delete_retired(writer)
            if delete:
                delete_orphans(writer)
                # Files from before our takeover that no record refers to since.
                now = {(one.kind, one.path) for one in take_inventory(storage).findings}
                own = [one for one in found.findings if one.kind in ("temporary", "unused base")]
                gone = [one.path for one in own if (one.kind, one.path) in now]
                for path in gone:
                    storage.delete(path)
                if gone:
                    storage.sync_dir(LOG)
        finally:
            writer.release()
    after = take_inventory(storage)
    known = {(one.kind, one.path) for one in before.findings}
    new = tuple(one for one in found.findings if (one.kind, one.path) not in known)
    return Repaired(Inventory((*before.findings, *new), found.view, before.history), after)


NOTES = "notes"
"""Group of files other than shards: manifests, statistics, unknown files."""
Standing = Literal["live", "retired", "orphan"]


@dataclass(frozen=True)
class TryUse:
    """Bytes of an attempt's files by group; `needed_by` are other epochs that reference it."""

    name: str
    standing: Standing
    entry: CommittedPosition | None
    groups: Mapping[str, int]
    needed_by: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(self.groups.values())

    @property
    def frees(self) -> int:
        """Bytes freed by deleting its epoch alone: 0 while others reference it."""
        return 0 if self.needed_by else self.bytes


@dataclass(frozen=True)
class Usage:
    """All attempts by name; bytes freed by keeping the newest epoch alone."""

    tries: tuple[TryUse, ...]
    freed_by_last: int

    def total(self, standing: Standing) -> int:
        """Bytes of all attempts with this standing."""
        return sum(one.bytes for one in self.tries if one.standing == standing)

    @property
    def shared(self) -> int:
        """Bytes in attempts that other epochs reference."""
        return sum(one.bytes for one in self.tries if one.needed_by)

    @property
    def by_group(self) -> Mapping[str, int]:
        """Bytes of live attempts by group of files."""
        found: Counter[str] = Counter()
        for one in self.tries:
            if one.standing == "live":
                found.update(one.groups)
        return dict(found)


def usage_of(storage: Storage, view: LogView) -> Usage:
    """List all attempts; raises StorageError if that fails."""
    entries = {entry.attempt_name: entry for entry in view.entries}
    needs = Counter(name for entry in view.entries for name in set(entry.needs))
    retired = {one.attempt_name for one in view.state.retiring}

    def standing(name: str) -> Standing:
        if name in entries or needs[name]:
            return "live"
        return "retired" if name in retired else "orphan"

    def groups(attempt_name: str) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for path in files_of(storage, Retirement(attempt_name)):
            found[_group_of(path.rpartition("/")[2]) or NOTES] += storage.stat(path) or 0
        return dict(found)

    attempts = tuple(
        TryUse(name, standing(name), entries.get(name), groups(name), needs[name])
        for name in storage.list(DATA)
        if ATTEMPT_NAME.fullmatch(name)
    )
    going = {one.attempt_name for one in Keeping(last=1).chosen(view)}
    return Usage(attempts, sum(one.bytes for one in attempts if one.name in going))
