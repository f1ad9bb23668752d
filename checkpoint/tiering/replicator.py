"""Upload epochs and update the remote log: a thread of rank 0, from the start of a run to its end.

It does one step at a time, each of which leaves the remote valid: follow a rewind, or upload and commit the
oldest missing epoch. A failed step is reported and retried; fencing ends the thread.

With per-host directories, the leader of each other place only uploads files, and reports at the remote which
ones. It deletes nothing that the remote log needs, which it reads again first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.position import CommittedPosition, Position, State
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.load.verify import VerificationStatus, seen_twice, verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import entry_json
from torchrelay.checkpoint.log.tiered_storage import TierStorage
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.storage.work import progress
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
"""Applies retention at the remote, at once; returns warnings."""


class LostPartError(DamagedError):
    """An epoch cannot be completed: some files are damaged, or no host has them."""


@dataclass(frozen=True)
class Others:
    """The leaders of the other places; `run` identifies this launch in their reports (`upload.part_path`)."""

    run: str
    leaders: tuple[int, ...]


def present(local: Storage, manifest: Manifest) -> list[ShardRow]:
    """The files of an epoch in this local directory. Raises StorageError."""
    return [row for row in manifest.shards if local.stat(shard_path(manifest, row)) is not None]


def damage_of(local: Storage, entry: CommittedPosition) -> str | None:
    """Damage of the manifest and the files in this local directory, every byte read twice; None without."""
    try:
        manifest = seen_twice(lambda: codec.read(local, entry))
    except DamagedError as error:
        return str(error)
    return damage_in(local, manifest)


def damage_in(
    local: Storage, manifest: Manifest, *, share: tuple[int, int] = (0, 1), headers_only: bool = False
) -> str | None:
    """Damage of each step-th file of an epoch here (`share` is first and step); None without."""

    def look_at(row: ShardRow) -> None:
        expected = ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
        header = read_header(local, shard_path(manifest, row), expected)
        if not headers_only:
            header.verify()

    for row in present(local, manifest)[share[0] :: share[1]]:
        try:
            seen_twice(partial(look_at, row))
        except DamagedError as error:
            return str(error)
    return None


class Replicator(TierUploader):
    """Uploads local files; holds both writers. The leaders of `others` upload those of their hosts."""

    def __init__(
        self,
        tier: Tier,
        storage: TierStorage,
        writer: LogWriter,
        remote: LogWriter,
        retain: Retain,
        others: Others | None = None,
    ) -> None:
        super().__init__(tier, storage, "torchrelay tier")
        self._writer, self._remote, self._retain, self._others = writer, remote, retain, others
        self._replicated: list[Position] = []
        self._note()

    # Called by the run

    @property
    def remote(self) -> Storage:
        """The storage of the remote log."""
        return self._remote.storage

    @property
    def pending(self) -> tuple[CommittedPosition, ...]:
        """Positions that are only local, oldest first. Sends no request."""
        return hosts.to_send(self._writer.view, self._remote.view)

    @property
    def needed(self) -> frozenset[str]:
        """Attempts that must stay local under any retention rule."""
        remote = self._remote.view
        return frozenset(entry.attempt_name for entry in self.pending) | hosts.anchor(remote)

    def check(self) -> None:
        """Raise FencedError if another job has the remote log. Sends no request."""
        if self._fenced is not None:
            raise self._fenced
        self._remote.check()

    def wait(self, most: int, patience_secs: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Return when at most so many positions are only local; False if late or hurried."""
        deadline = time.monotonic() + patience_secs
        with self._changed:
            while len(self.pending) > most or (
                not most and self._writer.view.current != self._remote.view.current  # a rewind is pending
            ):
                self.check()
                left = deadline - time.monotonic()
                if left <= 0 or hurried() or self._stopping:
                    return False
                self._changed.wait(min(left, 0.5))
        return True

    def take_replicated(self) -> list[Position]:
        """Positions uploaded since the last call."""
        with self._changed:
            taken, self._replicated = self._replicated, []
        return taken

    # In the thread

    def _step(self) -> bool:
        local, remote = self._writer.view, self._remote.view
        if local.current != remote.current:  # it does not have the run's branch yet

            def follow(state: State) -> tuple[State, Mapping[str, Json]]:
                local = self._writer.view
                return hosts.branched_like(state, local.state), hosts.branch_payload(local.current)

            self._remote.change("rewind", follow)
            return True
        entries = hosts.to_send(local, remote)
        if not entries:
            return False
        self._replicate(entries[0])
        return True

    def _replicate(self, entry: CommittedPosition) -> None:
        try:
            with progress(f"replicating epoch {entry.position}"):
                kept = self._remote.view.state.tries
                if self._others is None:
                    self.send(entry, kept)
                elif not self._send_among(entry, kept, self._others):
                    return
        except (OSError, DamagedError) as error:
            if self._writer.view.entry(entry.key) is None:
                return  # a whole epoch has replaced this position meanwhile
            # A local epoch that is damaged or incomplete is never uploaded; all other errors are retried.
            reason, what = None, "is damaged and is not replicated"
            if isinstance(error, LostPartError):
                reason, what = str(error), "is abandoned"
            elif isinstance(error, DamagedError) and self._others is not None:
                reason = damage_of(self._local, entry)  # the rest may be remote, or on another host
            elif isinstance(error, DamagedError):
                result = verify_epoch(self._storage, entry, level="full")
                reason = result.reason if result.outcome is VerificationStatus.DAMAGED else None
            if reason is None:
                raise
            self._writer.quarantine(entry.key, reason)
            self._fail(f"epoch {entry.position} {what}: {reason}")
            return
        self._commit(entry)

    def _send_among(self, entry: CommittedPosition, kept: frozenset[str], others: Others) -> bool:
        """Upload this place's files of an epoch, wait for the others, verify the whole; False if not needed.

        Raises LostPartError for an epoch that cannot be completed, and as `send` does.
        """
        manifest = codec.read(self._local, entry)
        self.make_directories(manifest)
        self.send_manifest(entry)
        mine = present(self._local, manifest)
        self.send_shards(manifest, mine, kept)
        self.send_stats(entry.attempt_name)
        self.sync_directories(manifest)
        parts = self._gathered(entry, others)
        if parts is None:
            return False
        for leader in sorted(parts):
            if (damage := parts[leader].damage) is not None:
                raise LostPartError(f"{damage} (local, rank {leader})")
        sent = {shard_path(manifest, row) for row in mine}.union(*(part.paths for part in parts.values()))
        rest = [row for row in manifest.shards if shard_path(manifest, row) not in sent]
        if lost := [row for row in rest if not self.has_kept(manifest, row, kept)]:
            raise LostPartError(
                f"{len(lost)} of its files are in no local directory of this start, "
                f"{shard_path(manifest, lost[0])} for one: its host is not here, or its disk was lost"
            )
        try:
            self.verify_epoch(entry, manifest)
        except StorageError:
            self._delete_parts(entry)
            raise
        return True

    def _delete_parts(self, entry: CommittedPosition) -> None:
        """Delete reports, so that leaders report again, unless the remote log has the epoch by now."""
        if self._others is not None:
            delete_parts(self.remote, entry.attempt_name, self._others.run, self._others.leaders)

    def _gathered(self, entry: CommittedPosition, others: Others) -> Mapping[int, PlaceReport] | None:
        """Reports of the other leaders about an epoch; None if it is not needed any more."""
        found, looks = dict[int, PlaceReport](), 0

        def look() -> Mapping[int, PlaceReport] | None:
            nonlocal looks
            looks += 1
            for leader in others.leaders:
                if leader not in found:
                    part = read_part(self.remote, part_path(entry.attempt_name, others.run, leader))
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

        self._remote.change("commit", change)
        with self._changed:
            self._replicated.append(entry.position)
            self._changed.notify_all()
        self._notes = replace(self._notes, sent={})
        self.moved.settle()
        self._delete_parts(entry)
        doubts = ""
        try:
            doubts = self._retain(self._remote)
        except StorageError as error:
            doubts = str(error)
        self._note()
        if doubts:
            self._fail(f"old epochs could not be deleted in {self.remote.url}: {doubts}")

    def _ask(self) -> None:
        """Raise FencedError if another job has taken the remote log."""
        self._remote.ask()

    def _named(self, attempt_name: str) -> bool:
        """Whether the remote log needs an attempt."""
        return attempt_name in self._remote.view.state.tries

    def _check_going_on(self) -> None:
        """Raise if the upload must stop."""
        super()._check_going_on()
        self._remote.check()

    def _note(self) -> None:
        remote = self._remote.view
        nonce = remote.state.holder.get("nonce")
        self._notes = replace(
            self._notes,
            holder=nonce if isinstance(nonce, str) else None,
            replicated=frozenset(entry.attempt_name for entry in remote.entries),
            generation=self._remote.generation,
            part=False,
        )
        super()._note()

    def _failed(self, error: Exception) -> None:
        self._fail(f"local saves cannot be sent to {self.remote.url} now: {error}")


class PartSender(TierUploader):
    """Uploads the local files of another place than rank 0's, and reports them.

    `run` is the nonce of the holder of the remote log, `leader` this rank. Begins with `start`; entries are
    passed by `set_wanted` and `add`.
    """

    def __init__(self, tier: Tier, storage: TierStorage, job_name: str | None, run: str, leader: int) -> None:
        super().__init__(tier, storage, "torchrelay tier part")
        self._job_name, self._run_nonce, self._leader = job_name, run, leader
        self._wanted: tuple[CommittedPosition, ...] = ()
        self._reported: set[str] = set()
        self._doubted: set[str] = set()
        """Attempts to report again: their uploaded files may be damaged."""
        self._over: set[str] = set()
        """Attempts that the remote log has."""
        self._awake = False  # until `set_wanted`

    def set_wanted(self, wanted: Sequence[CommittedPosition]) -> None:
        """Set the epochs that are only local, oldest first; others are not uploaded any more."""
        with self._changed:
            self._wanted, self._awake = tuple(wanted), True
            self._changed.notify_all()

    def add(self, entry: CommittedPosition) -> None:
        """Add a committed epoch."""
        with self._changed:
            self._wanted, self._awake = (*self._wanted, entry), True
            self._changed.notify_all()

    def give_way(self) -> None:
        """Note that another place has the local log of the run from now on: this one is ignored."""
        with self._changed:
            self._notes = replace(self._notes, holder=None, part=True)
            self._note()

    # In the thread

    def _look_secs(self) -> float | None:
        return upload.LONGEST_LOOK_SECS if self._reported - self._over else None

    def _step(self) -> bool:
        self._forget()
        for name in [entry.attempt_name for entry in self._wanted]:
            if name in self._reported - self._over and read_part(self.remote, self._part(name)) is None:
                self._reported.discard(name)  # lost in a power cut, or deleted by rank 0, which asks again
                self._doubted.add(name)
        while entry := next((one for one in self._wanted if one.attempt_name not in self._reported), None):
            with progress(f"replicating epoch {entry.position}"):
                self._send(entry)
        return False

    def _send(self, entry: CommittedPosition) -> None:
        manifest = self._manifest(entry)
        if manifest is None:
            return
        needed, name = self._remote_log().state.tries, entry.attempt_name
        if name in needed:
            self._over.add(name)
        else:
            write_part(
                self.remote, self._part(name), self._sent(manifest, needed, anew=name in self._doubted)
            )
        self._reported.add(name)
        self._doubted.discard(name)
        self.moved.settle()

    def _sent(self, manifest: Manifest, needed: frozenset[str], *, anew: bool) -> PlaceReport:
        """Upload the local files, with `anew` also those damaged there; local damage is verified twice."""
        rows = present(self._local, manifest)
        if anew:
            self.doubt(manifest, rows)
        try:
            self.make_directories(manifest)
            self.send_shards(manifest, rows, needed)
            self.sync_directories(manifest)
        except DamagedError:
            damage = damage_in(self._local, manifest)
            if damage is None:
                raise
            return PlaceReport(damage=damage)
        return PlaceReport(tuple(shard_path(manifest, row) for row in rows))

    def _manifest(self, entry: CommittedPosition) -> Manifest | None:
        """The manifest, which is uploaded first; None if the epoch is not needed any more."""

        def look() -> Manifest | None:
            try:
                return codec.read(self.remote, entry)
            except (FileNotFoundError, DamagedError):  # missing or incomplete yet
                return None

        return self._look_until(look, lambda: entry in self._wanted)

    def _remote_log(self) -> LogView:
        """The current remote log; StorageError, to be retried, if another launch has it."""
        view = open_log(self.remote, self._job_name)
        if view.state.holder.get("nonce") != self._run_nonce:
            raise StorageError(f"{self.remote.url} was taken over by another job")
        return view

    def _part(self, attempt_name: str) -> str:
        return part_path(attempt_name, self._run_nonce, self._leader)

    def _named(self, attempt_name: str) -> bool:
        """Whether the remote log needs an attempt."""
        return attempt_name in self._remote_log().state.tries  # sends a request

    def _forget(self) -> None:
        with self._changed:
            under_way = {name for entry in self._wanted for name in entry.tries}
            sent = {path: one for path, one in self._notes.sent.items() if path.split("/")[1] in under_way}
            self._reported &= under_way
            self._doubted &= under_way
            self._over &= under_way
            if sent != self._notes.sent:
                self._notes = replace(self._notes, sent=sent)
                self._note()

    def _failed(self, error: Exception) -> None:
        self._fail(f"local saves of rank {self._leader} cannot be sent to {self.remote.url} now: {error}")
