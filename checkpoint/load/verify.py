"""Verify an epoch and its shard files before a load, in one process or in all together.

    record     names the manifest, with its size and SHA-256.
    manifest   names the shards, with sizes and the SHA-256 of headers. Layouts cover every leaf.
    header     states keys, dtypes, shapes and blocks. It must hold what the layouts assign to the file.
    blocks     match the digests in the header (level `full`).

Opening a file verifies the size and SHA-256 of its header, its identity and its content: exactly the keys
that the manifest assigns to it (at least these, in a file of an earlier attempt). The content need not be
checked again if another process of the same verification did. All reads through a ShardSet have verified
headers and blocks. Level `sizes` stops before the headers: files exist and have the expected length.

A mismatch is damage only when it is seen twice. An I/O error, a permission or an unknown format version is
`unknown` and does not make the epoch damaged.

One host may see less than exists (a stale cache, a lost mount). In a job with several hosts damage counts
only if the lowest rank of a second host confirms it.

The log calls an epoch healthy as long as no damage was found. Before old epochs are deleted, those that
remain must therefore be verified again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import (
    LeafRow,
    Manifest,
    ShardRow,
    alike,
    holding,
    shard_path,
)
from torchrelay.checkpoint.format.names import all_plain, position_of
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.work import progress
from torchrelay.errors import DamagedError, FormatError, StorageError
from torchrelay.jobs.session import Peers
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.format.shard.reader import ShardHeader


Holder = tuple[int, int, str]
"""(attempt, node, group), numbers as in the manifest: identifies the owner of files."""


@dataclass(frozen=True)
class HeldFiles:
    """All parts of one holder's file."""

    headers: tuple[ShardHeader, ...]

    def with_key(self, key: str) -> ShardHeader:
        """The part that holds a key; opening has verified that one does."""
        if len(self.headers) == 1:
            return self.headers[0]
        return next(header for header in self.headers if key in header.entries)

    @property
    def values(self) -> Mapping[str, Json]:
        """Typed values by leaf name."""
        return self.headers[0].values


class ShardSet:
    """Opens the files of one manifest, each once."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.storage = storage
        self.manifest = manifest
        self.opened: dict[Holder, HeldFiles] = {}
        self._vouched: Collection[Holder] = ()

    def open(self, holder: Holder) -> HeldFiles:
        """Open and verify the files of a holder; raises DamagedError, FormatError or StorageError."""
        if holder not in self.opened:
            vouched = holder in self._vouched
            found = HeldFiles(tuple(self._header(row, vouched) for row in self.manifest.files[holder]))
            if not vouched:
                self._check_content(holder, found)
            self.opened[holder] = found
        return self.opened[holder]

    def vouch(self, holders: Collection[Holder]) -> None:
        """Mark files as verified by another process: their headers have the right content."""
        self._vouched = holders

    def forget(self) -> None:
        """Release opened headers, which may be large; they are opened again on demand."""
        self.opened.clear()

    def check_sizes(self, holder: Holder) -> None:
        """Check only that the files exist and have the expected length; raises DamagedError."""
        for row in self.manifest.files[holder]:
            path = shard_path(self.manifest, row)
            size = self.storage.stat(path)
            if size != row.nbytes:
                found = "is missing" if size is None else f"has {size} bytes instead of {row.nbytes}"
                raise DamagedError(f"{path} {found}")

    @property
    def header_bytes(self) -> int:
        """Bytes of all opened headers."""
        opened = (row for holder in self.opened for row in self.manifest.files[holder])
        return sum(row.header_bytes for row in opened)

    def _header(self, row: ShardRow, vouched: bool) -> ShardHeader:
        from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header

        path = shard_path(self.manifest, row)
        expected = ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
        header = read_header(self.storage, path, expected, vouched=vouched)
        attempt_name = self.manifest.tries[row.source]
        node, job = self.manifest.world.names[row.node], self.manifest.job_name
        identity = ShardIdentity(job, position_of(attempt_name), node, row.group, attempt_name)
        if (header.content.identity, header.content.part) != (identity, row.part):
            raise DamagedError(f"{path} is another shard: {header.content.identity}")
        return header

    def _agrees(self, holder: Holder, found: HeldFiles) -> bool:
        """Whether one file holds exactly what it should, compared by columns; False is not conclusive."""
        rows = self.manifest.whole_rows(*holder)
        if rows is None or len(found.headers) > 1:
            return False
        leaves = list(map(self.manifest.leaves.__getitem__, rows))
        tensors = [leaf for leaf in leaves if leaf.kind == "tensor"]
        entries, keys = found.headers[0].entries, [leaf.name for leaf in tensors]
        if not all_plain(keys) or not len(set(keys)) == len(keys) == len(entries):
            return False
        if not all(map(entries.__contains__, keys)):
            return False
        forms = entries.forms(keys)
        return (
            [form.dtype for form in forms] == [leaf.dtype for leaf in tensors]
            and [form.shape for form in forms] == [leaf.shape for leaf in tensors]
            and found.values.keys() == {leaf.name for leaf in leaves if leaf.kind == "value"}
        )

    def _check_content(self, holder: Holder, found: HeldFiles) -> None:
        """Raise DamagedError unless the files of a holder have the content that the manifest states."""
        if self._agrees(holder, found):
            return
        tensors: dict[str, LeafRow] = {}
        values: set[str] = set()
        for number, keys in self.manifest.stored_keys(*holder):
            row = self.manifest.leaves[number]
            if row.kind == "value":
                values.add(row.name)
            else:
                tensors.update(dict.fromkeys(keys, row))
        stored = {key: entries for entries in [one.entries for one in found.headers] for key in entries}
        path = found.headers[0].path
        if len(stored) != sum(len(header.entries) for header in found.headers):
            raise DamagedError(f"{path} and its parts hold a key twice")
        for key, leaf in tensors.items():
            if key not in stored:
                raise DamagedError(f"{path} does not hold {key}, which the manifest assigns to it")
            form = stored[key].form(key)
            if form.dtype != leaf.dtype or form.shape != leaf.shape:
                raise DamagedError(
                    f"{path}: {key} is {form.dtype}{list(form.shape)}, "
                    f"the manifest has {leaf.dtype}{list(leaf.shape)}"
                )
        if missing := sorted(values - found.values.keys()):
            raise DamagedError(f"{path} does not hold the value {missing[0]}")
        odd = sorted((stored.keys() - tensors.keys()) | (found.values.keys() - values))
        if odd and holder[0] == 0:
            raise DamagedError(f"{path} holds {odd[0]}, which the manifest does not list")


def holders_of(manifest: Manifest, rows: Iterable[int]) -> Iterator[Holder]:
    """The holders of the bytes of leaf rows, each once; values in the manifest need none."""
    seen: set[Holder] = set()
    looked_at: set[tuple[object, ...]] = set()
    for row in rows:
        leaf = manifest.leaves[row]
        layout = manifest.layouts[leaf.layout]
        form = alike(layout, leaf)
        place = (leaf.layout, leaf.source, leaf.group, row if form is None else form)
        if leaf.alias_of is not None or row in manifest.values or place in looked_at:
            continue
        looked_at.add(place)
        for nodes in holding(layout, row, leaf):
            if (leaf.source, leaf.group, nodes) in looked_at:  # one set of thousands, of very many leaves
                continue
            looked_at.add((leaf.source, leaf.group, nodes))
            for node in sorted(nodes):
                holder = (leaf.source, node, leaf.group)
                if holder not in seen:
                    seen.add(holder)
                    yield holder


T = TypeVar("T")


def seen_twice(look: Callable[[], T]) -> T:
    """Look again before damage or an I/O error is believed: bytes may have changed during the transfer."""
    try:
        return look()
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename or error} is missing") from error
    except OSError:
        pass
    try:
        return look()
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename or error} is missing") from error


Level = Literal["sizes", "headers", "full"]


class VerificationStatus(Enum):
    """Result of a verification."""

    VERIFIED = "proved"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Share:
    """Part `number` of `of`, of consecutive nodes: on another mesh ranks then load what they opened."""

    number: int = 0
    of: int = 1

    def taken(self, holders: Iterable[Holder]) -> list[Holder]:
        """The holders of this part, in the order of their nodes."""
        found = sorted(holders, key=lambda holder: (holder[1], holder[0], holder[2]))
        return found[len(found) * self.number // self.of : len(found) * (self.number + 1) // self.of]


ALL = Share()


@dataclass(frozen=True)
class Verification:
    """Result of verifying one entry, the reason unless `verified`, and the files opened on the way.

    `holders` are those whose headers are opened by all shares of the verification together.
    """

    entry: CommittedPosition
    outcome: VerificationStatus
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = None
    holders: frozenset[Holder] = frozenset()

    @property
    def verified(self) -> bool:
        """Whether the epoch may be loaded."""
        return self.outcome is VerificationStatus.VERIFIED

    @property
    def summary(self) -> str:
        """Result and reason, for messages."""
        return f"epoch {self.entry.position} is {self.outcome.value} ({self.reason})"

    def check(self) -> tuple[Manifest, ShardSet]:
        """The manifest and the opened shards; raises DamagedError or StorageError unless verified."""
        if self.manifest is not None and self.shards is not None and self.verified:
            return self.manifest, self.shards
        kind = DamagedError if self.outcome is VerificationStatus.DAMAGED else StorageError
        raise kind(f"epoch {self.entry.position} cannot be loaded: {self.reason}")


def verify_epoch(
    storage: Storage,
    entry: CommittedPosition,
    *,
    want: Collection[str] | None = None,
    level: Level = "headers",
    share: Share = ALL,
) -> Verification:
    """Verify a log entry's epoch, or the part of it that holds the leaves `want`.

    Damage does not raise: see `Verification.outcome`. Names in `want` that the epoch lacks, and groups of
    files that retention has deleted, are ignored here; the caller reports them.
    """
    try:
        manifest = seen_twice(lambda: codec.read(storage, entry))
        shards = ShardSet(storage, manifest)
        rows: Iterable[int] = range(len(manifest.leaves))
        if want is not None:
            names = set(want)
            aliased = [one for one in manifest.leaves if one.name in names and one.alias_of is not None]
            names.update(str(one.alias_of) for one in aliased)
            rows = [row for name in sorted(names) for row in manifest.rows.get(name, ())]
        if entry.groups:
            rows = [row for row in rows if manifest.leaves[row].group in entry.groups]
        size = sum(leaf.nbytes for leaf in manifest.leaves) if level == "full" else None
        with progress(f"verifying epoch {entry.position}", size):
            holders = frozenset(holders_of(manifest, rows))
            for holder in share.taken(holders):
                if level == "sizes":
                    seen_twice(partial(shards.check_sizes, holder))
                    continue
                files = seen_twice(partial(shards.open, holder))
                for header in files.headers if level == "full" else ():
                    seen_twice(header.verify)
    except OSError as error:
        damaged = isinstance(error, DamagedError)
        outcome = VerificationStatus.DAMAGED if damaged else VerificationStatus.UNKNOWN
        return Verification(entry, outcome, str(error))
    return Verification(
        entry, VerificationStatus.VERIFIED, "", manifest, shards, frozenset() if level == "sizes" else holders
    )


FULL_VERIFICATION_SECS = 24 * 3600.0
"""Seconds that ranks wait for others that still read all bytes of their share."""


@dataclass(frozen=True)
class JointResult:
    """Result that all processes agree on, with the files that this process opened; a load can use them."""

    outcome: VerificationStatus
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Seen:
    rank: int
    outcome: VerificationStatus
    reason: str
    host: str

    def __str__(self) -> str:
        return f"{self.reason} (seen by rank {self.rank} on {self.host})"


def verify_together(
    peers: Peers,
    storage: Storage,
    entry: CommittedPosition,
    *,
    level: Level = "headers",
    host: str | None = None,
) -> JointResult:
    """Verify an entry's manifest and shards to a level; all processes get the worst result and its reason.

    Damage counts for all, so that all fall back together. What a rank could not read, or what only one of
    several hosts misses, is unknown for all, unless another saw damage. `host` is this machine's name.
    """
    deadline_secs = FULL_VERIFICATION_SECS if level == "full" else None
    result = verify_epoch(storage, entry, level=level, share=Share(peers.rank, peers.size))
    answers = peers.exchange(
        f"verify epoch {entry.position}",
        [result.outcome.value, result.reason, host or socket.gethostname()],
        deadline_secs=deadline_secs,
    )
    seen = [_Seen(rank, VerificationStatus(one[0]), one[1], one[2]) for rank, one in enumerate(answers)]
    damaged = [one for one in seen if one.outcome is VerificationStatus.DAMAGED]
    if damaged and len({one.host for one in seen}) > 1:
        found: list[list[Any]] = []
        for rank in [one.rank for one in damaged if _witness(seen, one) == peers.rank]:
            again = verify_epoch(storage, entry, level=level, share=Share(rank, peers.size))
            found.append([rank, again.outcome.value, again.reason])
            if again.outcome is VerificationStatus.DAMAGED:  # one is enough
                break
        answers = peers.exchange(f"verify epoch {entry.position} again", found, deadline_secs=deadline_secs)
        answered = {rank: answer for part in answers for rank, *answer in part}
        for one in damaged:
            if answered.get(one.rank, ("", ""))[0] == VerificationStatus.DAMAGED.value:
                witness = seen[_witness(seen, one)]
                return JointResult(
                    VerificationStatus.DAMAGED, f"{one}, and by rank {witness.rank} on {witness.host} too"
                )
        first = damaged[0]
        witness = seen[_witness(seen, first)]
        outcome, reason = answered[first.rank]
        what = f"could not verify it: {reason}"
        if outcome == VerificationStatus.VERIFIED.value:
            what = "sees no damage"
        return JointResult(
            VerificationStatus.UNKNOWN, f"{first}, but rank {witness.rank} on {witness.host} {what}"
        )
    for outcome in (VerificationStatus.DAMAGED, VerificationStatus.UNKNOWN):
        for one in seen:
            if one.outcome is outcome:
                return JointResult(outcome, one.reason if peers.size == 1 else str(one))
    if result.shards is not None:
        result.shards.vouch(result.holders)  # each share was opened by one of the ranks
    return JointResult(VerificationStatus.VERIFIED, "", result.manifest, result.shards)


def _witness(seen: Sequence[_Seen], damaged: _Seen) -> int:
    return next(one.rank for one in seen if one.host != damaged.host)


@dataclass(frozen=True)
class Target:
    """A verified position, ready to be loaded; `shards` has the opened files until then."""

    entry: CommittedPosition
    manifest: Manifest
    shards: ShardSet | None = field(default=None, compare=False, repr=False)

    @property
    def position(self) -> Position:
        """Position of the save."""
        return self.entry.position

    @property
    def lost_blobs(self) -> frozenset[str]:
        """Blobs of which retention has deleted files."""
        if self.entry.resumable:
            return frozenset()
        left = self.entry.groups
        return frozenset(leaf.blob for leaf in self.manifest.leaves if leaf.group not in left)

    @property
    def facts(self) -> Facts:
        """Facts of the run in the manifest."""
        return self.manifest.facts
