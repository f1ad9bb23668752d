"""Verification of an epoch before anything is loaded from it, by one process or by all together.

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
from typing import Any, Literal, TypeVar

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.position import Entry, Facts, Position
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest
from torchrelay.checkpoint.load.reads.shard_set import Holder, ShardSet, holders_of
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.work import headway
from torchrelay.errors import DamagedError, FormatError, StorageError
from torchrelay.jobs.session import Peers
from torchrelay.records import dataclass

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


FULL_PROOF_SECS = 24 * 3600.0
"""How long ranks wait for those that still read all bytes of their share."""


@dataclass(frozen=True)
class JointProof:
    """What all processes agree on; `manifest` is there where the epoch is proved.

    `shards` are the files that this process has opened for its share: a load need not open them again.
    """

    outcome: Outcome
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Seen:
    """What one rank saw of a share."""

    rank: int
    outcome: Outcome
    reason: str
    host: str

    def __str__(self) -> str:
        return f"{self.reason} (seen by rank {self.rank} on {self.host})"


def prove_together(
    peers: Peers, storage: Storage, entry: Entry, *, level: Level = "headers", host: str | None = None
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
    seen = [_Seen(rank, Outcome(one[0]), one[1], one[2]) for rank, one in enumerate(told)]
    damaged = [one for one in seen if one.outcome is Outcome.DAMAGED]
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
    for outcome in (Outcome.DAMAGED, Outcome.UNKNOWN):
        for one in seen:
            if one.outcome is outcome:
                return JointProof(outcome, one.reason if peers.size == 1 else str(one))
    if proof.shards is not None:
        proof.shards.vouch(proof.holders)  # each was opened by one of us
    return JointProof(Outcome.PROVED, "", proof.manifest, proof.shards)


def _witness(seen: Sequence[_Seen], damaged: _Seen) -> int:
    """The lowest rank of another host."""
    return next(one.rank for one in seen if one.host != damaged.host)


def _look_again(
    storage: Storage, entry: Entry, level: Level, shares: Sequence[int], size: int
) -> list[list[Any]]:
    """Prove the shares of others, until one proves damaged: more would change nothing."""

    def looks() -> Iterator[list[Any]]:
        for rank in shares:
            proof = prove(storage, entry, level=level, share=Share(rank, size))
            yield [rank, proof.outcome.value, proof.reason]
            if proof.outcome is Outcome.DAMAGED:
                return

    return list(looks())


def _judged(seen: Sequence[_Seen], damaged: Sequence[_Seen], again: dict[int, Any]) -> JointProof:
    for one in damaged:
        outcome, _ = again.get(one.rank, (None, ""))
        if outcome == Outcome.DAMAGED.value:
            witness = seen[_witness(seen, one)]
            return JointProof(Outcome.DAMAGED, f"{one}, and by rank {witness.rank} on {witness.host} too")
    first = damaged[0]
    witness = seen[_witness(seen, first)]
    outcome, reason = again[first.rank]
    what = "sees no damage" if outcome == Outcome.PROVED.value else f"could not tell: {reason}"
    return JointProof(Outcome.UNKNOWN, f"{first}, but rank {witness.rank} on {witness.host} {what}")


LOOKED_AT = 64
"""Holders of files that one look opens at most: a header costs a read, and the training may wait for it."""


class Lasting:
    """Proves the newest epochs up to their headers, before each retirement.

    Where an epoch lies in the files of more than `LOOKED_AT` nodes a share of them is looked at, another
    one each time. The bytes themselves are not read: that is for whoever loads them, and for `verify`.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._nodes: int | None = None
        """How many nodes the last epoch had that was looked at."""

    def unproved(
        self, storage: Storage, view: LogView, unseen: frozenset[str] = frozenset()
    ) -> tuple[Proof, ...]:
        """Of the positions that a job may resume from the newest that are not proved, up to one that is.

        `unseen` are tries of which not all files are to be seen from here; nothing is said of them.
        Up to one that cannot be read, too, which is then the last: a storage that is away may keep each look
        waiting for minutes, and the other processes with it.
        """
        found: list[Proof] = []
        for entry in view.candidates(boundary=True):
            if entry.try_name in unseen:
                continue
            proof = self._look(storage, entry)
            if proof.proved:
                break
            found.append(proof)
            if proof.outcome is Outcome.UNKNOWN:
                break
        return tuple(found)

    def _look(self, storage: Storage, entry: Entry) -> Proof:
        if self._nodes is None:
            self._remember(prove(storage, entry, want=()))
        shares = max(1, -(-(self._nodes or 1) // LOOKED_AT))
        self._turn += 1
        proof = prove(storage, entry, share=Share(self._turn % shares, shares))
        self._remember(proof)
        return proof

    def _remember(self, proof: Proof) -> None:
        if proof.manifest is not None:
            self._nodes = len(proof.manifest.world.nodes)


@dataclass(frozen=True)
class Look:
    """What a log says before a run starts.

    `epoch`, `step` and `facts` are of the newest entry of the current branch, not proved yet, `whole` is its
    newest whole epoch; `request` is what that branch was begun by. `rest`: some of it is still to be sent to
    another place. `notices` are for people.
    """

    commits: bool = False
    branch: int = 0
    request: Mapping[str, Any] | None = None
    epoch: int | None = None
    step: int = 0
    whole: int | None = None
    facts: Facts | None = None
    rest: bool = False
    notices: tuple[str, ...] = ()

    @property
    def rewound(self) -> bool:
        """Whether the newest entry is where its user began the current branch, to train on from there."""
        asked = self.request or {}
        return bool(asked.get("by") == "user" and asked.get("epoch") == self.epoch and self.step == 0)

    @property
    def position(self) -> Position | None:
        """That of the newest entry."""
        return None if self.epoch is None else Position(self.epoch, self.step)


@dataclass(frozen=True)
class Target:
    """A proved position, ready to be loaded; until then `shards` has the files open that were proved here."""

    entry: Entry
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


@dataclass(frozen=True)
class Holding:
    """What every process knows of the log that rank 0 holds."""

    job: str
    uuid: str
    branch: int
    generation: int
