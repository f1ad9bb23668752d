"""Epochs whose files are in the local directories of several hosts: who uploads what.

Rank 0's replicator sends manifests and commits at the far place; this one only sends files, and tells there
which ones (`parts`). It deletes nothing that the far log needs, which it reads anew before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.load.verify import seen_twice
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.tiered_storage import TierStorage
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.storage.work import headway
from torchrelay.checkpoint.tiering.upload import PlaceReport, TierUploader, part_path, read_part, write_part
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import dataclass


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


LONGEST_LOOK_SECS = 2.0


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
        return LONGEST_LOOK_SECS if self._told - self._over else None

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
        pause = 0.05
        while True:
            try:
                return codec.read(self.far, entry)
            except (FileNotFoundError, DamagedError):  # not there yet, or not all of it
                pass
            self._check_going_on()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause)
                if entry not in self._wanted:
                    return None
            pause = min(1.5 * pause, LONGEST_LOOK_SECS)

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
