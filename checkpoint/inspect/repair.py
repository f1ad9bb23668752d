"""What is derived is made again, what was to go goes; where the bytes of a directory are.

Only the owner of the log deletes. What lay there before our takeover, and what no record refers to after
it, can never be committed by anybody any more; so nothing that is in flight is ever touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from torchrelay.checkpoint.format.manifest.position import Entry
from torchrelay.checkpoint.format.manifest.schema import DATA, try_directory
from torchrelay.checkpoint.format.names import TRY, parse_shard_file_name
from torchrelay.checkpoint.inspect.inventory import Finding, Inventory, take_inventory
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import PATIENCE_SECS
from torchrelay.checkpoint.log.record import LOG
from torchrelay.checkpoint.log.retention import Keeping, delete_orphans, delete_retired
from torchrelay.checkpoint.log.state import restore
from torchrelay.checkpoint.log.tiered_storage import refuse_part
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage, check_exclusion
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

_OWN_FILES = ("temporary", "unused base")


@dataclass(frozen=True)
class Repaired:
    """What was found before, and what of it is left."""

    before: Inventory
    after: Inventory

    @property
    def done(self) -> tuple[Finding, ...]:
        """What is in order now."""
        left = {(one.kind, one.path) for one in self.after.findings}
        return tuple(one for one in self.before.findings if (one.kind, one.path) not in left)


def repair(storage: Storage, *, delete: bool = False, patience_secs: float = PATIENCE_SECS) -> Repaired:
    """Mend what can be mended; with `delete` also remove what no record refers to.

    Takes the log over, unless there is nothing to do for which that is needed: DirectoryInUseError
    where its writer lives, UsageError where two writers could not be told apart, and nothing was changed but
    base files, which come back byte for byte. Raises DamagedError for a log that cannot be trusted,
    StorageError for what cannot be read or written.
    """
    before = take_inventory(storage)
    for lost in before.lost:
        if lost.data is not None:
            restore(storage, lost)
    found = take_inventory(storage) if before.view is None else before
    acting = {"mend", "delete"} if delete else {"mend"}
    if any(one.does in acting and one.kind != "base" for one in found.findings):
        _as_owner(storage, found, delete=delete, patience_secs=patience_secs)
    after = take_inventory(storage)
    known = {(one.kind, one.path) for one in before.findings}
    new = tuple(one for one in found.findings if (one.kind, one.path) not in known)
    return Repaired(Inventory((*before.findings, *new), found.view, before.history), after)


def _as_owner(storage: Storage, found: Inventory, *, delete: bool, patience_secs: float) -> None:
    """The takeover and the release write the hint and the counter anew."""
    refuse_part(storage)
    check_exclusion(storage)
    writer = LogWriter.take(storage, open_log(storage).job_name, patience_secs=patience_secs)
    try:
        delete_retired(writer)
        if delete:
            delete_orphans(writer)
            _delete_own_files(storage, found)
    finally:
        writer.release()


def _delete_own_files(storage: Storage, found: Inventory) -> None:
    """Those that lay there before our takeover and that no record has come to refer to since."""
    now = take_inventory(storage)
    gone = [path for kind in _OWN_FILES for path in sorted(found.paths(kind) & now.paths(kind))]
    for path in gone:
        storage.delete(path)
    if gone:
        storage.sync_dir(LOG)


NOTES = "notes"
"""What is no shard: manifests, statistics, strangers' files."""
Standing = Literal["live", "retired", "orphan"]


@dataclass(frozen=True)
class TryUse:
    """A try's files in bytes by group; `needed_by` are other epochs that refer to bytes in it."""

    name: str
    standing: Standing
    entry: Entry | None
    groups: Mapping[str, int]
    needed_by: int = 0

    @property
    def bytes(self) -> int:
        """All its files."""
        return sum(self.groups.values())

    @property
    def frees(self) -> int:
        """What dropping its epoch alone would give back: nothing while others refer to it."""
        return 0 if self.needed_by else self.bytes


@dataclass(frozen=True)
class Usage:
    """All tries in the order of their names; what keeping the newest epoch alone would free."""

    tries: tuple[TryUse, ...]
    freed_by_last: int

    def total(self, standing: Standing) -> int:
        """Bytes of all tries that stand so."""
        return sum(one.bytes for one in self.tries if one.standing == standing)

    @property
    def shared(self) -> int:
        """Bytes in tries to which other epochs refer."""
        return sum(one.bytes for one in self.tries if one.needed_by)

    @property
    def by_group(self) -> Mapping[str, int]:
        """Bytes of live tries by group of files."""
        found: Counter[str] = Counter()
        for one in self.tries:
            if one.standing == "live":
                found.update(one.groups)
        return dict(found)


def usage_of(storage: Storage, view: LogView) -> Usage:
    """List all tries; raises StorageError where that cannot be done."""
    entries = {entry.try_name: entry for entry in view.entries}
    needs = Counter(name for entry in view.entries for name in set(entry.needs))
    retired = {one.try_name for one in view.retiring}
    tries = tuple(
        TryUse(
            name,
            _standing(name, entries, needs, retired),
            entries.get(name),
            _groups(storage, name),
            needs[name],
        )
        for name in storage.list(DATA)
        if TRY.fullmatch(name)
    )
    going = {one.try_name for one in Keeping(last=1).chosen(view)}
    return Usage(tries, sum(one.bytes for one in tries if one.name in going))


def _standing(
    name: str, entries: Mapping[str, Entry], needs: Mapping[str, int], retired: set[str]
) -> Standing:
    if name in entries or needs[name]:
        return "live"
    return "retired" if name in retired else "orphan"


def _groups(storage: Storage, try_name: str) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for group, nbytes in _files(storage, try_name):
        found[group] += nbytes
    return dict(found)


def _files(storage: Storage, try_name: str) -> Iterator[tuple[str, int]]:
    directory = try_directory(try_name)
    for name in storage.list(directory):
        try:
            group = parse_shard_file_name(name).group
        except DamagedError:
            group = NOTES
        yield group, storage.stat(f"{directory}/{name}") or 0
