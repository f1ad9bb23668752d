"""Keeps the far log as far as the near one: a thread of rank 0, from the start of a run to its end.

One step at a time, each of which leaves the far place valid: follow a rewind, or send and commit the oldest
epoch that it lacks. A step that fails is kept for people, and tried again; being fenced ends the thread.

Where hosts have near directories of their own, the leader of each other place only sends files, and tells at
the far place which ones. It deletes nothing that the far log needs, which it reads anew before it begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.position import CommittedPosition, Position, State
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.load.verify import VerificationStatus, prove, seen_twice
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import entry_json
from torchrelay.checkpoint.log.tiered_storage import TierStorage
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.storage.work import headway
from torchrelay.checkpoint.tiering import hosts, upload
from torchrelay.checkpoint.tiering.upload import (
    PlaceReport,
    TierUploader,
    delete_parts,
    part_path,
    read_part,
    write_part,
)
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import Json, dataclass

_LOOKS_IN_HASTE = 10
Retain = Callable[[LogWriter], str]
"""Lets old epochs go at the far place, at once; returns doubts, for people."""


class LostPartError(DamagedError):
    """An epoch cannot be completed: files of it are damaged where they lie, or nobody has them."""


@dataclass(frozen=True)
class Others:
    """The leaders of the other places; `run` names this start in the files by which they tell (`parts`)."""

    run: str
    leaders: tuple[int, ...]


def present(near: Storage, manifest: Manifest) -> list[ShardRow]:
    """The files of an epoch that lie in this near directory. Raises StorageError."""
    return [row for row in manifest.shards if near.stat(shard_path(manifest, row)) is not None]


def damage_of(near: Storage, entry: CommittedPosition) -> str | None:
    """What is wrong with the manifest and the files that this near directory has, every byte read twice."""
    try:
        manifest = seen_twice(lambda: codec.read(near, entry))
    except DamagedError as error:
        return str(error)
    return damage_in(near, manifest)


def damage_in(
    near: Storage, manifest: Manifest, *, share: tuple[int, int] = (0, 1), headers_only: bool = False
) -> str | None:
    """What is wrong with the files of an epoch that this near directory has; None where they are right.

    `share`: every so many'th file (second number), from this one on (first).
    """
    for row in present(near, manifest)[share[0] :: share[1]]:
        try:
            seen_twice(lambda row=row: _look_at(near, manifest, row, headers_only))  # type: ignore[misc]
        except DamagedError as error:
            return str(error)
    return None


def _look_at(near: Storage, manifest: Manifest, row: ShardRow, headers_only: bool) -> None:
    expected = ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
    header = read_header(near, shard_path(manifest, row), expected)
    if not headers_only:
        header.verify()


class Replicator(TierUploader):
    """The near files of `storage` are sent; both writers are ours. Begins to work with `start`.

    `others`: what lies in the near directories of other hosts is sent by these.
    """

    def __init__(
        self,
        tier: Tier,
        storage: TierStorage,
        writer: LogWriter,
        far: LogWriter,
        retain: Retain,
        others: Others | None = None,
    ) -> None:
        super().__init__(tier, storage, "torchrelay tier")
        self._writer, self._far, self._retain, self._others = writer, far, retain, others
        self._replicated: list[Position] = []
        self._note()

    # For the run

    @property
    def far(self) -> Storage:
        """The place of the far log."""
        return self._far.storage

    @property
    def pending(self) -> tuple[CommittedPosition, ...]:
        """What is `local` only, oldest first. Asks no storage."""
        return hosts.to_send(self._writer.view, self._far.view)

    @property
    def needed(self) -> frozenset[str]:
        """Tries that must stay near, whatever retention wants."""
        far = self._far.view
        return frozenset(entry.try_name for entry in self.pending) | hosts.anchor(far)

    def check(self) -> None:
        """Raise FencedError where another job has the far log. Asks no storage."""
        if self._fenced is not None:
            raise self._fenced
        self._far.check()

    def wait(self, most: int, patience_secs: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Return when at most so many positions are `local` only; False after `patience_secs`, or if hurried.

        Raises FencedError.
        """
        deadline = time.monotonic() + patience_secs
        with self._changed:
            while len(self.pending) > most or (not most and self._branches_differ):
                self.check()
                left = deadline - time.monotonic()
                if left <= 0 or hurried() or self._stopping:
                    return False
                self._changed.wait(min(left, 0.5))
        return True

    @property
    def _branches_differ(self) -> bool:
        return hosts.branches_differ(self._writer.view, self._far.view)

    def take_replicated(self) -> list[Position]:
        """What was replicated since the last time."""
        with self._changed:
            taken, self._replicated = self._replicated, []
        return taken

    # In the thread

    def _step(self) -> bool:
        """Do one thing; False where nothing is left to do."""
        near, far = self._writer.view, self._far.view
        if hosts.branches_differ(near, far):
            self._far.change("rewind", self._follow)
            return True
        entries = hosts.to_send(near, far)
        if not entries:
            return False
        self._replicate(entries[0])
        return True

    def _follow(self, state: State) -> tuple[State, Mapping[str, Json]]:
        near = self._writer.view
        return hosts.branched_like(state, near.state), hosts.branch_payload(near.current)

    def _replicate(self, entry: CommittedPosition) -> None:
        try:
            with headway(f"replicating epoch {entry.position}"):
                if not self._send(entry):
                    return
        except (OSError, DamagedError) as error:
            if self._writer.view.entry(entry.key) is None:
                return  # a whole epoch has taken the place of this position meanwhile
            # One that is damaged near, or lacks files, is never sent; all else is tried again.
            reason, what = None, "is damaged and is not replicated"
            if isinstance(error, LostPartError):
                reason, what = str(error), "is given up"
            elif isinstance(error, DamagedError) and self._others is not None:
                reason = damage_of(self._near, entry)  # the rest may be far, or with another host
            elif isinstance(error, DamagedError):
                proof = prove(self._storage, entry, level="full")
                reason = proof.reason if proof.outcome is VerificationStatus.DAMAGED else None
            if reason is None:
                raise
            self._writer.quarantine(entry.key, reason)
            self._fail(f"epoch {entry.position} {what}: {reason}")
            return
        self._commit(entry)

    def _send(self, entry: CommittedPosition) -> bool:
        """False where the epoch is not wanted any more."""
        kept = self._far.view.state.tries
        if self._others is not None:
            return self._send_among(entry, kept, self._others)
        self.send(entry, kept)
        return True

    def _send_among(self, entry: CommittedPosition, kept: frozenset[str], others: Others) -> bool:
        """Send this place's files of an epoch, wait until the others have sent theirs, prove the whole.

        Raises LostPartError for an epoch that nobody can complete, and what `send` raises.
        """
        manifest = codec.read(self._near, entry)
        self.make_directories(manifest)
        self.send_manifest(entry)
        mine = present(self._near, manifest)
        self.send_shards(manifest, mine, kept)
        self.send_stats(entry.try_name)
        self.sync_directories(manifest)
        parts = self._gathered(entry, others)
        if parts is None:
            return False
        for leader in sorted(parts):
            if (damage := parts[leader].damage) is not None:
                raise LostPartError(f"{damage} (near rank {leader})")
        sent = {shard_path(manifest, row) for row in mine}.union(*(part.paths for part in parts.values()))
        rest = [row for row in manifest.shards if shard_path(manifest, row) not in sent]
        if lost := [row for row in rest if not self.has_kept(manifest, row, kept)]:
            raise LostPartError(
                f"{len(lost)} of its files are in no near directory of this start, "
                f"{shard_path(manifest, lost[0])} for one: its host is not here, or its disk was lost"
            )
        try:
            self.prove(entry, manifest)
        except StorageError:
            self._delete_parts(entry)
            raise
        return True

    def _delete_parts(self, entry: CommittedPosition) -> None:
        """The leaders of the other places tell theirs anew, unless the far log names the epoch by now."""
        if self._others is not None:
            delete_parts(self.far, entry.try_name, self._others.run, self._others.leaders)

    def _gathered(self, entry: CommittedPosition, others: Others) -> Mapping[int, PlaceReport] | None:
        """What the leaders of the other places tell of an epoch; None where that is not wanted any more."""
        found, looks = dict[int, PlaceReport](), 0

        def look() -> Mapping[int, PlaceReport] | None:
            nonlocal looks
            looks += 1
            for leader in others.leaders:
                if leader not in found:
                    part = read_part(self.far, part_path(entry.try_name, others.run, leader))
                    if part is not None:
                        found[leader] = part
            if len(found) == len(others.leaders):
                return found
            if looks > _LOOKS_IN_HASTE:
                self.check_manifest(entry)  # without it the others wait, too
            return None

        return self._look_until(look, lambda: entry in self.pending)

    def _commit(self, entry: CommittedPosition) -> None:
        def change(state: State) -> tuple[State, Mapping[str, Json]] | None:
            after = hosts.mirrored(state, replace(entry, health="ok"))
            return None if after is None else (after, {"entry": entry_json(entry)})

        self._far.change("commit", change)
        with self._changed:
            self._replicated.append(entry.position)
            self._changed.notify_all()
        self._notes = replace(self._notes, sent={})
        self.moved.settle()
        self._delete_parts(entry)
        doubts = ""
        try:
            doubts = self._retain(self._far)
        except StorageError as error:
            doubts = str(error)
        self._note()
        if doubts:
            self._fail(f"old epochs could not be deleted in {self.far.url}: {doubts}")

    def _ask(self) -> None:
        self._far.ask()

    def _named(self, try_name: str) -> bool:
        return try_name in self._far.view.state.tries

    def _check_going_on(self) -> None:
        super()._check_going_on()
        self._far.check()

    def _note(self) -> None:
        far = self._far.view
        nonce = far.holder.get("nonce")
        self._notes = replace(
            self._notes,
            holder=nonce if isinstance(nonce, str) else None,
            replicated=frozenset(entry.try_name for entry in far.entries),
            generation=self._far.generation,
            part=False,
        )
        super()._note()

    def _failed(self, error: Exception) -> None:
        self._fail(f"what is saved near cannot be sent to {self.far.url} now: {error}")


class PartSender(TierUploader):
    """`run` is the nonce of whoever holds the far log, `leader` this rank.

    Begins with `start`; what is to be sent comes by `tell` and `add`.
    """

    def __init__(self, tier: Tier, storage: TierStorage, job_name: str | None, run: str, leader: int) -> None:
        super().__init__(tier, storage, "torchrelay tier part")
        self._job_name, self._run_nonce, self._leader = job_name, run, leader
        self._wanted: tuple[CommittedPosition, ...] = ()
        self._told: set[str] = set()
        """Tries of which the far place was told."""
        self._doubted: set[str] = set()
        """Tries of which it is to be told again: what was sent may be damaged there."""
        self._over: set[str] = set()
        """Tries that the far log names."""
        self._awake = False  # until `tell`

    def tell(self, wanted: Sequence[CommittedPosition]) -> None:
        """These epochs are near only, oldest first; others are not to be sent any more."""
        with self._changed:
            self._wanted, self._awake = tuple(wanted), True
            self._changed.notify_all()

    def add(self, entry: CommittedPosition) -> None:
        """One more was committed."""
        with self._changed:
            self._wanted, self._awake = (*self._wanted, entry), True
            self._changed.notify_all()

    def give_way(self) -> None:
        """Another place has the near log of the run from now on: that of this one tells nothing any more."""
        with self._changed:
            self._notes = replace(self._notes, holder=None, part=True)
            self._note()

    # In the thread

    def _look_secs(self) -> float | None:
        return upload.LONGEST_LOOK_SECS if self._told - self._over else None

    def _step(self) -> bool:
        self._forget()
        for name in [entry.try_name for entry in self._wanted]:
            if name in self._told - self._over and read_part(self.far, self._part(name)) is None:
                self._told.discard(name)  # lost in a power cut, or deleted by rank 0, which asks again
                self._doubted.add(name)
        while entry := next((one for one in self._wanted if one.try_name not in self._told), None):
            with headway(f"replicating epoch {entry.position}"):
                self._send(entry)
        return False

    def _send(self, entry: CommittedPosition) -> None:
        manifest = self._manifest(entry)
        if manifest is None:
            return
        needed, name = self._far_log().state.tries, entry.try_name
        if name in needed:
            self._over.add(name)
        else:
            write_part(self.far, self._part(name), self._sent(manifest, needed, anew=name in self._doubted))
        self._told.add(name)
        self._doubted.discard(name)
        self.moved.settle()

    def _sent(self, manifest: Manifest, needed: frozenset[str], *, anew: bool) -> PlaceReport:
        """Send what lies here, `anew` also what was sent and is damaged there.

        Damage here is looked at again before it is believed.
        """
        rows = present(self._near, manifest)
        if anew:
            self.doubt(manifest, rows)
        try:
            self.make_directories(manifest)
            self.send_shards(manifest, rows, needed)
            self.sync_directories(manifest)
        except DamagedError:
            damage = damage_in(self._near, manifest)
            if damage is None:
                raise
            return PlaceReport(damage=damage)
        return PlaceReport(tuple(shard_path(manifest, row) for row in rows))

    def _manifest(self, entry: CommittedPosition) -> Manifest | None:
        """That of the far place, where it is sent first; None where the epoch is not wanted any more."""

        def look() -> Manifest | None:
            try:
                return codec.read(self.far, entry)
            except (FileNotFoundError, DamagedError):  # not there yet, or not all of it
                return None

        return self._look_until(look, lambda: entry in self._wanted)

    def _far_log(self) -> LogView:
        """The far log as it is now; StorageError, to be looked at again, where it is not this start's."""
        view = open_log(self.far, self._job_name)
        if view.holder.get("nonce") != self._run_nonce:
            raise StorageError(f"{self.far.url} was taken over by another job")
        return view

    def _part(self, try_name: str) -> str:
        return part_path(try_name, self._run_nonce, self._leader)

    def _named(self, try_name: str) -> bool:
        return try_name in self._far_log().state.tries  # asks the storage

    def _forget(self) -> None:
        """Only what is under way need be remembered."""
        with self._changed:
            under_way = {name for entry in self._wanted for name in entry.tries}
            sent = {path: one for path, one in self._notes.sent.items() if path.split("/")[1] in under_way}
            self._told &= under_way
            self._doubted &= under_way
            self._over &= under_way
            if sent != self._notes.sent:
                self._notes = replace(self._notes, sent=sent)
                self._note()

    def _failed(self, error: Exception) -> None:
        self._fail(f"what rank {self._leader} has near cannot be sent to {self.far.url} now: {error}")
