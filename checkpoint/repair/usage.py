"""Where the bytes of a directory of checkpoints lie, by try and group, and who needs them. Only reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.schema import DATA, try_directory
from torchrelay.checkpoint.format.names import TRY, parse_shard_file_name
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

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
