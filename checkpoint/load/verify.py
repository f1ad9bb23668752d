"""Verification of an epoch and its shard files before loads, by one process or by all together.

Opening proves: size and SHA-256 of the header, whose file it is, and that it holds exactly the keys,
dtypes and shapes that the manifest's layouts put there (at least these, in a file of an earlier try).
What it holds need not be checked again where another process of the same proof has done so: the header has
the same SHA-256, and so the same bytes.
Whatever reads through a ShardSet reads proved headers and verified blocks.

    record    says which manifest: its size and SHA-256
    manifest  says which shards: their sizes and the SHA-256 of their headers; layouts cover every leaf
    header    says which keys, dtypes, shapes and blocks; it must hold what the layouts put there
    blocks    (level `full`) have the digests that the header states

Level `sizes` stops before the headers: files are there and as long as the manifest says.

A mismatch counts as damage only when it is seen twice. What could not be looked at is `unknown`: an I/O
error, a permission, a format of another version. It says nothing about the epoch.

A host may see less than there is (a stale cache, a mount that is gone). So where a job has several
hosts, damage counts once a second host has seen it too: the lowest rank of another host looks again.

A log that calls an epoch healthy only says that nobody has found it damaged yet. So whoever lets old
epochs go looks first, past what he remembers, at what is to remain.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torchrelay.checkpoint.format.layouts import alike, holding
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.names import all_plain, position_of
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.work import headway
from torchrelay.errors import DamagedError, FormatError, StorageError
from torchrelay.jobs.session import Peers
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.format.shard.reader import ShardHeader


Holder = tuple[int, int, str]
"""(try, node, group), numbers as in the manifest: whose files."""


@dataclass(frozen=True)
class HeldFiles:
    """All parts of one holder's file."""

    headers: tuple[ShardHeader, ...]

    def with_key(self, key: str) -> ShardHeader:
        """The part that holds a key; opening has made sure that one does: a file of one part is not asked."""
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
        """Open and prove the files of a holder; raises DamagedError, FormatError or StorageError."""
        if holder not in self.opened:
            vouched = holder in self._vouched
            found = HeldFiles(tuple(self._header(row, vouched) for row in self.manifest.files[holder]))
            if not vouched:
                self._check_content(holder, found)
            self.opened[holder] = found
        return self.opened[holder]

    def vouch(self, holders: Collection[Holder]) -> None:
        """Say that files of this manifest were opened by somebody: what their headers hold is right."""
        self._vouched = holders

    def forget(self) -> None:
        """Let go of what was opened, for many headers are large; asked for again it is opened again."""
        self.opened.clear()

    def check_sizes(self, holder: Holder) -> None:
        """Only look whether the files are there and as long as they were; raises DamagedError."""
        for row in self.manifest.files[holder]:
            path = shard_path(self.manifest, row)
            size = self.storage.stat(path)
            if size != row.nbytes:
                found = "is missing" if size is None else f"has {size} bytes instead of {row.nbytes}"
                raise DamagedError(f"{path} {found}")

    @property
    def header_bytes(self) -> int:
        """Bytes of all headers that were opened."""
        opened = (row for holder in self.opened for row in self.manifest.files[holder])
        return sum(row.header_bytes for row in opened)

    def _header(self, row: ShardRow, vouched: bool) -> ShardHeader:
        from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header

        path = shard_path(self.manifest, row)
        expected = ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
        header = read_header(self.storage, path, expected, vouched=vouched)
        try_name = self.manifest.tries[row.source]
        node, job = self.manifest.world.names[row.node], self.manifest.job_name
        identity = ShardIdentity(job, position_of(try_name), node, row.group, try_name)
        if (header.content.identity, header.content.part) != (identity, row.part):
            raise DamagedError(f"{path} is another shard: {header.content.identity}")
        return header

    def _agrees(self, holder: Holder, found: HeldFiles) -> bool:
        """Whether one file holds exactly what it should, asked by columns; False says nothing."""
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
        if self._agrees(holder, found):
            return
        tensors, values = self._expected(holder)
        stored = {key: entries for entries in [one.entries for one in found.headers] for key in entries}
        path = found.headers[0].path
        if len(stored) != sum(len(header.entries) for header in found.headers):
            raise DamagedError(f"{path} and its parts hold a key twice")
        for key, leaf in tensors.items():
            if key not in stored:
                raise DamagedError(f"{path} does not hold {key}, which the manifest puts there")
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
            raise DamagedError(f"{path} holds {odd[0]}, which the manifest does not know")

    def _expected(self, holder: Holder) -> tuple[dict[str, LeafRow], set[str]]:
        tensors: dict[str, LeafRow] = {}
        values: set[str] = set()
        for row, keys in self.manifest.stored_keys(*holder):
            leaf = self.manifest.leaves[row]
            if leaf.kind == "value":
                values.add(leaf.name)
            else:
                tensors.update(dict.fromkeys(keys, leaf))
        return tensors, values


def holders_of(manifest: Manifest, rows: Sequence[int]) -> Iterator[Holder]:
    """Whose files hold the bytes of leaf rows, each once; rows of values in the manifest need none."""
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
    """Look again before damage or an I/O error is believed: the bytes may have changed on their way."""
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

    entry: CommittedPosition
    outcome: VerificationStatus
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = None
    holders: frozenset[Holder] = frozenset()

    @property
    def proved(self) -> bool:
        """Whether the epoch may be loaded."""
        return self.outcome is VerificationStatus.PROVED

    @property
    def told(self) -> str:
        """The outcome and its reason, for people."""
        return f"epoch {self.entry.position} is {self.outcome.value} ({self.reason})"

    def check(self) -> tuple[Manifest, ShardSet]:
        """The manifest and the opened shards; raises DamagedError or StorageError unless proved."""
        if self.manifest is not None and self.shards is not None and self.proved:
            return self.manifest, self.shards
        kind = DamagedError if self.outcome is VerificationStatus.DAMAGED else StorageError
        raise kind(f"epoch {self.entry.position} cannot be loaded: {self.reason}")


def prove(
    storage: Storage,
    entry: CommittedPosition,
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
        rows = _wanted_rows(manifest, want)
        if entry.groups:
            rows = [row for row in rows if manifest.leaves[row].group in entry.groups]
        size = sum(leaf.nbytes for leaf in manifest.leaves) if level == "full" else None
        with headway(f"verifying epoch {entry.position}", size):
            holders = frozenset(holders_of(manifest, rows))
            for holder in share.taken(holders):
                _look_at(shards, holder, level)
    except FormatError as error:
        return Proof(entry, VerificationStatus.UNKNOWN, str(error))
    except DamagedError as error:
        return Proof(entry, VerificationStatus.DAMAGED, str(error))
    except OSError as error:
        return Proof(entry, VerificationStatus.UNKNOWN, str(error))
    return Proof(
        entry, VerificationStatus.PROVED, "", manifest, shards, frozenset() if level == "sizes" else holders
    )


def _look_at(shards: ShardSet, holder: Holder, level: Level) -> None:
    if level == "sizes":
        seen_twice(lambda: shards.check_sizes(holder))
        return
    files = seen_twice(lambda: shards.open(holder))
    for header in files.headers if level == "full" else ():
        seen_twice(header.verify)


def _wanted_rows(manifest: Manifest, want: Collection[str] | None) -> list[int]:
    if want is None:
        return list(range(len(manifest.leaves)))
    names = set(want)
    targets = {leaf.alias_of for leaf in manifest.leaves if leaf.name in names and leaf.alias_of is not None}
    return [row for name in sorted(names | targets) for row in manifest.rows.get(name, ())]


FULL_PROOF_SECS = 24 * 3600.0
"""How long ranks wait for those that still read all bytes of their share."""


@dataclass(frozen=True)
class JointProof:
    """What all processes agree on; `manifest` is there where the epoch is proved.

    `shards` are the files that this process has opened for its share: a load need not open them again.
    """

    outcome: VerificationStatus
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Seen:
    """What one rank saw of a share."""

    rank: int
    outcome: VerificationStatus
    reason: str
    host: str

    def __str__(self) -> str:
        return f"{self.reason} (seen by rank {self.rank} on {self.host})"


def prove_together(
    peers: Peers,
    storage: Storage,
    entry: CommittedPosition,
    *,
    level: Level = "headers",
    host: str | None = None,
) -> JointProof:
    """Prove an entry's manifest and shards to a level; all processes get the worst outcome and its reason.

    Damage counts for all, so that all fall back together; what a rank could not read, or what only one
    of several hosts misses, is unknown for all, unless another saw damage. `host` is this machine's name.
    """
    deadline_secs = FULL_PROOF_SECS if level == "full" else None
    proof = prove(storage, entry, level=level, share=Share(peers.rank, peers.size))
    told = peers.exchange(
        f"prove epoch {entry.position}",
        [proof.outcome.value, proof.reason, host or socket.gethostname()],
        deadline_secs=deadline_secs,
    )
    seen = [_Seen(rank, VerificationStatus(one[0]), one[1], one[2]) for rank, one in enumerate(told)]
    damaged = [one for one in seen if one.outcome is VerificationStatus.DAMAGED]
    if damaged and len({one.host for one in seen}) > 1:
        mine = [one.rank for one in damaged if _witness(seen, one) == peers.rank]
        answers = peers.exchange(
            f"prove epoch {entry.position} again",
            _look_again(storage, entry, level, mine, peers.size),
            deadline_secs=deadline_secs,
        )
        return _judged(seen, damaged, {rank: answer for part in answers for rank, *answer in part})
    return _worst(peers, seen, proof)


def _worst(peers: Peers, seen: Sequence[_Seen], proof: Proof) -> JointProof:
    for outcome in (VerificationStatus.DAMAGED, VerificationStatus.UNKNOWN):
        for one in seen:
            if one.outcome is outcome:
                return JointProof(outcome, one.reason if peers.size == 1 else str(one))
    if proof.shards is not None:
        proof.shards.vouch(proof.holders)  # each was opened by one of us
    return JointProof(VerificationStatus.PROVED, "", proof.manifest, proof.shards)


def _witness(seen: Sequence[_Seen], damaged: _Seen) -> int:
    """The lowest rank of another host."""
    return next(one.rank for one in seen if one.host != damaged.host)


def _look_again(
    storage: Storage, entry: CommittedPosition, level: Level, shares: Sequence[int], size: int
) -> list[list[Any]]:
    """Prove the shares of others, until one proves damaged: more would change nothing."""
    found: list[list[Any]] = []
    for rank in shares:
        proof = prove(storage, entry, level=level, share=Share(rank, size))
        found.append([rank, proof.outcome.value, proof.reason])
        if proof.outcome is VerificationStatus.DAMAGED:
            break
    return found


def _judged(seen: Sequence[_Seen], damaged: Sequence[_Seen], again: dict[int, Any]) -> JointProof:
    for one in damaged:
        outcome, _ = again.get(one.rank, (None, ""))
        if outcome == VerificationStatus.DAMAGED.value:
            witness = seen[_witness(seen, one)]
            return JointProof(
                VerificationStatus.DAMAGED, f"{one}, and by rank {witness.rank} on {witness.host} too"
            )
    first = damaged[0]
    witness = seen[_witness(seen, first)]
    outcome, reason = again[first.rank]
    what = "sees no damage" if outcome == VerificationStatus.PROVED.value else f"could not tell: {reason}"
    return JointProof(
        VerificationStatus.UNKNOWN, f"{first}, but rank {witness.rank} on {witness.host} {what}"
    )


@dataclass(frozen=True)
class Target:
    """A proved position, ready to be loaded; until then `shards` has the files open that were proved here."""

    entry: CommittedPosition
    manifest: Manifest
    shards: ShardSet | None = field(default=None, compare=False, repr=False)

    @property
    def position(self) -> Position:
        """Where in the run it was taken."""
        return self.entry.position

    @property
    def lost_blobs(self) -> frozenset[str]:
        """The blobs of which retention has removed files."""
        if self.entry.resumable:
            return frozenset()
        left = self.entry.groups
        return frozenset(leaf.blob for leaf in self.manifest.leaves if leaf.group not in left)

    @property
    def facts(self) -> Facts:
        """What the manifest remembers of the run."""
        return self.manifest.facts
