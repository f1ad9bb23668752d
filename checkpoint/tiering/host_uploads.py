"""Epochs whose files are in the local directories of several hosts: who uploads what.

Rank 0's replicator sends manifests and commits at the far place; this one only sends files, and tells there
which ones (`parts`). It deletes nothing that the far log needs, which it reads anew before it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.load.verify import seen_twice
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.tiered_storage import Notes, TierStorage, forgotten, read_notes, write_notes
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.storage.work import headway
from torchrelay.checkpoint.tiering.upload import (
    STOP_SECS,
    Awaiting,
    Moved,
    PlaceReport,
    Sending,
    StoppedError,
    longer,
    part_path,
    read_part,
    write_part,
    yield_to_training,
)
from torchrelay.errors import DamagedError, FencedError, StorageError
from torchrelay.records import dataclass


class LostPartError(DamagedError):
    """An epoch cannot be completed: files of it are damaged where they lie, or nobody has them."""


@dataclass(frozen=True)
class Others:
    """The leaders of the other places; `run` names this start in the files by which they tell (`parts`)."""

    run: str
    leaders: tuple[int, ...]


def send_among(
    sending: Sending,
    entry: CommittedPosition,
    kept: frozenset[str],
    gather: Callable[[], Mapping[int, PlaceReport] | None],
    ask_again: Callable[[], None],
) -> bool:
    """Send this place's files of an epoch, and wait until the others have sent theirs; the whole is proved.

    `gather` waits for what the others tell, by leader; with None the epoch is not wanted any more: False.
    `ask_again` has them look whether what they sent is there, where the whole is not proved.
    Raises LostPartError for an epoch that nobody can complete, and what `Sending.send` raises.
    """
    manifest = codec.read(sending.near, entry)
    sending.make_directories(manifest)
    sending.send_manifest(entry)
    mine = present(sending.near, manifest)
    sending.send_shards(manifest, mine, kept)
    sending.send_stats(entry.try_name)
    sending.sync_directories(manifest)
    parts = gather()
    if parts is None:
        return False
    for leader in sorted(parts):
        if (damage := parts[leader].damage) is not None:
            raise LostPartError(f"{damage} (near rank {leader})")
    sent = {shard_path(manifest, row) for row in mine}.union(*(part.paths for part in parts.values()))
    rest = [row for row in manifest.shards if shard_path(manifest, row) not in sent]
    if lost := [row for row in rest if not sending.has_kept(manifest, row, kept)]:
        raise LostPartError(
            f"{len(lost)} of its files are in no near directory of this start, "
            f"{shard_path(manifest, lost[0])} for one: its host is not here, or its disk was lost"
        )
    try:
        sending.prove(entry, manifest)
    except StorageError:
        ask_again()
        raise
    return True


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


LONGEST_LOOK_SECS = 2.0


class PartSender(Awaiting):
    """`run` is the nonce of whoever holds the far log, `leader` this rank. Begins with `start`."""

    def __init__(self, tier: Tier, storage: TierStorage, job_name: str | None, run: str, leader: int) -> None:
        self._tier, self._storage, self._job_name = tier, storage, job_name
        self._run_nonce, self._leader = run, leader
        noted = read_notes(storage.near)
        mine = noted is not None and noted.far == storage.far.url
        self._notes = noted if noted is not None and mine else Notes(storage.far.url)
        self.moved = Moved()
        super().__init__()
        self._wanted: tuple[CommittedPosition, ...] = ()
        self._told: set[str] = set()
        """Tries of which the far place was told."""
        self._doubted: set[str] = set()
        """Tries of which it is to be told again: what was sent may be damaged there."""
        self._over: set[str] = set()
        """Tries that the far log names."""
        self._awake = False  # until `tell`
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="torchrelay tier part", daemon=True)

    def start(self) -> None:
        """Begin; what is to be sent comes by `tell` and `add`."""
        self._thread.start()

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

    def take_failures(self) -> list[str]:
        """What failed since the last time, for people."""
        with self._changed:
            taken, self._failures = self._failures, []
        return taken

    def stop(self) -> None:
        """End the thread at its next piece; what is not sent stays near."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECS)

    # In the thread

    def _run(self) -> None:
        yield_to_training()
        pause = 0.0
        while self._is_wanted(pause, LONGEST_LOOK_SECS if self._told - self._over else None):
            try:
                self._send_all()
                pause = 0.0
            except StoppedError:
                return
            except Exception as error:
                pause = longer(pause)
                self._fail(str(error))

    def _send_all(self) -> None:
        self._forget()
        for name in [entry.try_name for entry in self._wanted]:
            if name in self._told - self._over and read_part(self._storage.far, self._part(name)) is None:
                self._told.discard(name)  # lost in a power cut, or deleted by rank 0, which asks again
                self._doubted.add(name)
        while entry := next((one for one in self._wanted if one.try_name not in self._told), None):
            with headway(f"replicating epoch {entry.position}"):
                self._send(entry)

    def _send(self, entry: CommittedPosition) -> None:
        manifest = self._manifest(entry)
        if manifest is None:
            return
        needed, name = self._far_log().state.tries, entry.try_name
        if name in needed:
            self._over.add(name)
        else:
            write_part(
                self._storage.far, self._part(name), self._sent(manifest, needed, anew=name in self._doubted)
            )
        self._told.add(name)
        self._doubted.discard(name)
        self.moved.settle()

    def _sent(self, manifest: Manifest, needed: frozenset[str], *, anew: bool) -> PlaceReport:
        """Send what lies here, `anew` also what was sent and is damaged there.

        Damage here is looked at again before it is believed.
        """
        sending, rows = self._sending(), present(self._storage.near, manifest)
        if anew:
            sending.doubt(manifest, rows)
        try:
            sending.make_directories(manifest)
            sending.send_shards(manifest, rows, needed)
            sending.sync_directories(manifest)
        except DamagedError:
            damage = damage_in(self._storage.near, manifest)
            if damage is None:
                raise
            return PlaceReport(damage=damage)
        return PlaceReport(tuple(shard_path(manifest, row) for row in rows))

    def _manifest(self, entry: CommittedPosition) -> Manifest | None:
        """That of the far place, where it is sent first; None where the epoch is not wanted any more."""
        pause = 0.05
        while True:
            try:
                return codec.read(self._storage.far, entry)
            except (FileNotFoundError, DamagedError):  # not there yet, or not all of it
                pass
            self._check()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause)
                if entry not in self._wanted:
                    return None
            pause = min(1.5 * pause, LONGEST_LOOK_SECS)

    def _far_log(self) -> LogView:
        """The far log as it is now; FencedError where it is not this start's any more."""
        view = open_log(self._storage.far, self._job_name)
        if view.holder.get("nonce") != self._run_nonce:
            raise FencedError(f"{self._storage.far.url} was taken over by another job")
        return view

    def _part(self, try_name: str) -> str:
        return part_path(try_name, self._run_nonce, self._leader)

    def _sending(self) -> Sending:
        return Sending(
            self._storage.near,
            self._storage.far,
            self._tier.uploads,
            self._check,
            lambda: None,  # `named` asks the storage
            lambda path, nbytes, digest: self._notes.sent.get(path) == (nbytes, digest),
            self._note_sent,
            self.moved.count,
            lambda try_name: try_name in self._far_log().state.tries,
            self._forget_sent,
        )

    def _check(self) -> None:
        if self._stopping:
            raise StoppedError

    def _note_sent(self, path: str, nbytes: int, digest: str) -> None:
        with self._changed:
            self._notes = replace(self._notes, sent={**self._notes.sent, path: (nbytes, digest)})
            self._note()

    def _forget_sent(self, path: str) -> None:
        with self._changed:
            self._notes = forgotten(self._storage.near, self._notes, path)

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

    def _note(self) -> None:
        """A note that cannot be written costs a second sending."""
        with suppress(StorageError):
            write_notes(self._storage.near, self._notes)

    def _fail(self, reason: str) -> None:
        text = f"what rank {self._leader} has near cannot be sent to {self._storage.far.url} now: {reason}"
        with self._changed:
            if text not in self._failures:
                self._failures.append(text)
