"""Proof of an epoch before anything is loaded from it: record, manifest, shards, in this order.

    record    says which manifest: its size and SHA-256
    manifest  says which shards: their sizes and the SHA-256 of their headers; layouts cover every leaf
    header    says which keys, dtypes, shapes and blocks; it must hold what the layouts put there
    blocks    (level `full`) have the digests that the header states

Level `sizes` stops before the headers: files are there and as long as the manifest says.

A mismatch counts as damage only when it is seen twice. What could not be looked at is `unknown`: an I/O
error, a permission, a format of another version. It says nothing about the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Literal

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest
from torchrelay.checkpoint.reading.seen_twice import seen_twice
from torchrelay.checkpoint.reading.shard_set import Holder, ShardSet, holders_of
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.inflight import headway
from torchrelay.errors import DamagedError, FormatError, StorageError
from torchrelay.records import dataclass

Level = Literal["sizes", "headers", "full"]


class Outcome(Enum):
    """What a proof came to."""

    PROVED = "proved"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Share:
    """Which part of the work this process does: part `number` of `of`, of nodes side by side.

    On a mesh of other extents a rank mostly loads from these very files, which are open by then.
    """

    number: int = 0
    of: int = 1

    def taken(self, holders: Iterable[Holder]) -> list[Holder]:
        """The holders of this part, in the order of their nodes."""
        found = sorted(holders, key=lambda holder: (holder[1], holder[0], holder[2]))
        return found[len(found) * self.number // self.of : len(found) * (self.number + 1) // self.of]


ALL = Share()


@dataclass(frozen=True)
class Proof:
    """The outcome for one entry, the reason where it is not `proved`, and what was opened on the way.

    `holders` are those whose headers are opened by all shares of the proof together.
    """

    entry: Entry
    outcome: Outcome
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = None
    holders: frozenset[Holder] = frozenset()

    @property
    def proved(self) -> bool:
        """Whether the epoch may be loaded."""
        return self.outcome is Outcome.PROVED

    @property
    def told(self) -> str:
        """The outcome and its reason, for people."""
        return f"epoch {self.entry.position} is {self.outcome.value} ({self.reason})"

    def check(self) -> tuple[Manifest, ShardSet]:
        """The manifest and the opened shards; raises DamagedError or StorageError unless proved."""
        if self.manifest is not None and self.shards is not None and self.proved:
            return self.manifest, self.shards
        kind = DamagedError if self.outcome is Outcome.DAMAGED else StorageError
        raise kind(f"epoch {self.entry.position} cannot be loaded: {self.reason}")


def prove(
    storage: Storage,
    entry: Entry,
    *,
    want: Collection[str] | None = None,
    level: Level = "headers",
    share: Share = ALL,
) -> Proof:
    """Prove a log entry's epoch, or the part of it that holds the leaves `want`.

    Nothing is raised for what is wrong with the epoch: see `Proof.outcome`. Names in `want` that the
    epoch does not have are ignored here, as are groups of files that retention has removed; whoever
    asks for them says so.
    """
    try:
        manifest = seen_twice(lambda: codec.read(storage, entry))
        shards = ShardSet(storage, manifest)
        rows = [row for row in _wanted_rows(manifest, want) if _is_kept(manifest.leaves[row], entry)]
        size = sum(leaf.nbytes for leaf in manifest.leaves) if level == "full" else None
        with headway(f"verifying epoch {entry.position}", size):
            holders = frozenset(holders_of(manifest, rows))
            for holder in share.taken(holders):
                _look_at(shards, holder, level)
    except FormatError as error:
        return Proof(entry, Outcome.UNKNOWN, str(error))
    except DamagedError as error:
        return Proof(entry, Outcome.DAMAGED, str(error))
    except OSError as error:
        return Proof(entry, Outcome.UNKNOWN, str(error))
    return Proof(entry, Outcome.PROVED, "", manifest, shards, frozenset() if level == "sizes" else holders)


def _look_at(shards: ShardSet, holder: Holder, level: Level) -> None:
    if level == "sizes":
        seen_twice(lambda: shards.check_sizes(holder))
        return
    files = seen_twice(lambda: shards.open(holder))
    for header in files.headers if level == "full" else ():
        seen_twice(header.verify)


def _is_kept(leaf: LeafRow, entry: Entry) -> bool:
    return not entry.groups or leaf.group in entry.groups


def _wanted_rows(manifest: Manifest, want: Collection[str] | None) -> list[int]:
    if want is None:
        return list(range(len(manifest.leaves)))
    names = set(want)
    targets = {leaf.alias_of for leaf in manifest.leaves if leaf.name in names and leaf.alias_of is not None}
    return [row for name in sorted(names | targets) for row in manifest.rows.get(name, ())]
