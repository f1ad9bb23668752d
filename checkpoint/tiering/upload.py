"""Upload the files of one epoch from the local directory to the remote, byte for byte, each block verified.

1. Shards of all attempts that the epoch needs, if the remote lacks them.
2. The manifest of its own attempt, when all of its shards are durable.
3. Verification of the whole at the remote; then the remote log may commit it.

An interruption leaves only files that no record names. With per-host directories each place uploads its own
files, and the manifest comes first, so that the others know what to upload (`among`). They write reports, for
which rank 0 waits before it verifies an epoch, and which it then deletes. A file's size alone is not
evidence, because space is reserved before the bytes are written. Reports belong to one launch (`run`).

`Uploader`, also used for stored runs, is a thread that waits for work and does it step by step. A failed step
is retried after a growing pause. It ends when stopped or fenced.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from torchrelay.checkpoint.format.canonical_json import seal, sealed_bytes, sha256, unseal
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.names import DATA, attempt_directory, manifest_path, stats_path
from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, ShardHeader, read_header
from torchrelay.checkpoint.format.shard.reads import ReadOptions, ReadRequest
from torchrelay.checkpoint.load.verify import VerificationStatus, verify_epoch
from torchrelay.checkpoint.log.tiered_storage import TierStorage, forgotten, write_notes
from torchrelay.checkpoint.storage.base import Storage, WriteHandle
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.storage.work import share
from torchrelay.checkpoint.tiering.hosts import notes_of
from torchrelay.errors import DamagedError, FencedError, RelayError, StorageError
from torchrelay.records import dataclass

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.5, 60.0
STOP_SECS = 30.0
"""Seconds that the end of a run waits for a call in flight after uploads were stopped."""


class StoppedError(Exception):
    """The upload is not needed any more."""


class Uploader:
    """Upload thread; begins with `start`. Subclasses define a step and the handling of its errors."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._awake, self._stopping = True, False
        self._fenced: FencedError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with what an earlier launch left."""
        self._thread.start()

    def wake(self) -> None:
        """Signal new work; returns at once."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()

    def stop(self, secs: float = STOP_SECS) -> bool:
        """End the thread at its next piece; the rest is not uploaded. False if a call does not return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(secs)
        return not self._thread.is_alive()

    # In the thread

    def _run(self) -> None:
        pause = 0.0
        while self._is_wanted(pause):
            try:
                while not self._stopping and self._step():
                    self._notify()
                pause = 0.0
            except StoppedError:
                return
            except FencedError as error:
                self._fenced = error
                self._notify()
                return
            except Exception as error:  # training continues after any error of a client
                pause = min(max(2 * pause, FIRST_PAUSE_SECS), LONGEST_PAUSE_SECS)
                self._failed(error)

    def _is_wanted(self, pause: float) -> bool:
        """Return when there is work, or `pause` seconds after a failure; False at the end."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._stopping, pause)
            else:
                self._changed.wait_for(lambda: self._awake or self._stopping, self._look_secs())
            self._awake = False
            return not self._stopping

    def _look_secs(self) -> float | None:
        """Seconds after which there may be work without a signal; None: never."""
        return None

    def _step(self) -> bool:
        """Do one step; False if nothing is left to do."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        """Keep an error of a step for display."""
        raise NotImplementedError

    def _check_going_on(self) -> None:
        """Called between pieces; an error ends the upload."""
        if self._stopping:
            raise StoppedError

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


WINDOW = 8 << 20
"""Maximum bytes that an upload thread holds."""
_ALONE = ReadOptions(threads=1)
FIRST_LOOK_SECS, LONGEST_LOOK_SECS = 0.05, 2.0
"""Seconds between requests for reports of other hosts."""
T = TypeVar("T")
_NICE = 10
"""Nice value of upload threads, below training."""


class Moved:
    """Counts uploaded bytes. Repeated bytes count once: retries without end are not progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before, self._files = 0, dict[str, int]()

    @property
    def nbytes(self) -> int:
        """All bytes so far."""
        with self._lock:
            return self._before + sum(self._files.values())

    def count(self, path: str, nbytes: int) -> None:
        """Count bytes of a file."""
        with self._lock:
            self._files[path] = max(nbytes, self._files.get(path, 0))

    def settle(self) -> None:
        """Forget the files so far."""
        with self._lock:
            self._before, self._files = self._before + sum(self._files.values()), {}


class TierUploader(Uploader):
    """Uploads local files, which subclasses choose; complete ones are noted with size and digest."""

    def __init__(self, tier: Tier, storage: TierStorage, name: str) -> None:
        super().__init__(name)
        self.moved = Moved()
        self._tier, self._storage, self._local = tier, storage, storage.local
        self._notes = notes_of(storage)
        self._failures: list[str] = []

    @property
    def remote(self) -> Storage:
        """The remote storage."""
        return self._storage.remote

    def take_failures(self) -> list[str]:
        """Failures since the last call, for display; the last of many similar ones."""
        with self._changed:
            taken, self._failures = self._failures, []
        return taken

    def send(self, entry: CommittedPosition, kept: frozenset[str]) -> None:
        """Upload what the remote lacks of an epoch; no files of `kept` attempts, which its log needs.

        Raises DamagedError if the local files are damaged, StorageError if a storage fails, or if the remote
        does not have the files afterwards.
        """
        manifest = codec.read(self._local, entry)
        self.make_directories(manifest)
        self.send_shards(manifest, manifest.shards, kept)
        self.send_manifest(entry)
        self.send_stats(entry.attempt_name)
        self.sync_directories(manifest)
        self.verify_epoch(entry, manifest)

    def make_directories(self, manifest: Manifest) -> None:
        """Create the directories of all attempts that an epoch needs."""
        for name in _attempts(manifest):
            self.remote.mkdir(attempt_directory(name))

    def sync_directories(self, manifest: Manifest) -> None:
        """Make the names of uploaded files durable."""
        for name in _attempts(manifest):
            self.remote.sync_dir(attempt_directory(name))
        self.remote.sync_dir(DATA)

    def verify_epoch(self, entry: CommittedPosition, manifest: Manifest) -> None:
        """Raise StorageError unless the remote alone verifies the epoch; damaged files are uploaded again."""
        self._check_going_on()
        result = verify_epoch(self.remote, entry)
        if result.verified:
            return
        if result.outcome is VerificationStatus.DAMAGED:
            self._forget_sent(manifest_path(entry.attempt_name))
            self.doubt(manifest, manifest.shards)
        raise StorageError(f"{self.remote.url} does not have what was sent: {result.summary}")

    def doubt(self, manifest: Manifest, rows: Sequence[ShardRow]) -> None:
        """Find those of these files that are not correct at the remote: they are uploaded again."""
        for row in rows:
            path = shard_path(manifest, row)
            try:
                read_header(
                    self.remote, path, ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
                )
            except DamagedError:
                self._forget_sent(path)

    def check_manifest(self, entry: CommittedPosition) -> None:
        """Raise StorageError if the uploaded manifest is missing; it is then uploaded again."""
        try:
            codec.read(self.remote, entry)
        except (FileNotFoundError, DamagedError) as error:
            self._forget_sent(manifest_path(entry.attempt_name))
            raise StorageError(f"{self.remote.url} does not have what was sent: {error}") from None

    def send_shards(self, manifest: Manifest, rows: Sequence[ShardRow], kept: frozenset[str]) -> None:
        """Upload these files of an epoch, except those that `kept` attempts have there."""

        def some(rows: Iterator[ShardRow]) -> None:
            for row in rows:
                if not self.has_kept(manifest, row, kept):
                    self._send_shard(shard_path(manifest, row), row)

        threads = min(self._tier.uploads, max(1, len(rows)))
        share(some, rows, threads, name="torchrelay upload")

    def has_kept(self, manifest: Manifest, row: ShardRow, kept: frozenset[str]) -> bool:
        """Whether a file belongs to a `kept` attempt, and exists."""
        needed = manifest.tries[row.source] in kept
        return needed and self.remote.stat(shard_path(manifest, row)) is not None

    def send_manifest(self, entry: CommittedPosition) -> None:
        """Upload the manifest, which is not used before a record names it."""
        path = manifest_path(entry.attempt_name)
        data = self._local.read_range(path, 0, entry.manifest_bytes)
        if not self._was_sent(path, len(data), sha256(data)):
            self._create(path, lambda handle: handle.write_at(0, memoryview(data)))
            self._note_sent(path, len(data), sha256(data))

    def _send_shard(self, path: str, row: ShardRow) -> None:
        if self._was_sent(path, row.nbytes, row.header_sha256):
            return
        header = read_header(
            self._local, path, ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
        )
        start = self._local.read_range(path, 0, row.header_bytes)

        def write(handle: WriteHandle) -> None:
            handle.preallocate(row.nbytes)
            handle.write_at(0, memoryview(start))
            done = len(start)
            for offset, window in _windows(header):
                self._check_going_on()
                handle.write_at(offset, window)
                done += len(window)
                self.moved.count(path, done)
            if done != row.nbytes or sha256(start) != row.header_sha256:
                raise StorageError(f"{self._local.url}/{path} changed while it was read: it is sent again")

        self._create(path, write)
        self._note_sent(path, row.nbytes, row.header_sha256)

    def send_stats(self, attempt_name: str) -> None:
        """Upload timings, which are not part of the epoch."""
        with suppress(OSError):
            path = stats_path(attempt_name)
            self.remote.replace(path, self._local.read_range(path, 0, self._local.stat(path) or 0))

    def _was_sent(self, path: str, nbytes: int, digest: str) -> bool:
        """Whether the file was uploaded before; an incomplete one is deleted."""
        self._check_going_on()
        found = self.remote.stat(path)
        if found == nbytes and self._notes.sent.get(path) == (nbytes, digest):
            return True
        if found is not None:
            self._ask()
            if self._named(path.split("/")[1]):
                return True
        self._forget_sent(path)
        if found is not None:
            self.remote.delete(path)
        return False

    def _create(self, path: str, write: Callable[[WriteHandle], None]) -> None:
        handle = self.remote.open_exclusive(path)
        try:
            write(handle)
            handle.sync_file()
        finally:
            handle.close()

    def _ask(self) -> None:
        """Called before a deletion; raises FencedError if another job has the remote log.

        A process that was suspended for long could otherwise delete what that job has uploaded and committed
        meanwhile.
        """

    def _named(self, attempt_name: str) -> bool:
        """Called before a deletion: whether the remote log needs that attempt meanwhile."""
        raise NotImplementedError

    def _note_sent(self, path: str, nbytes: int, digest: str) -> None:
        with self._changed:
            self._notes = replace(self._notes, sent={**self._notes.sent, path: (nbytes, digest)})
            self._note()

    def _forget_sent(self, path: str) -> None:
        """Remove a note durably before a new upload, whose truncated file may have that size already."""
        with self._changed:
            self._notes = forgotten(self._local, self._notes, path)

    def _note(self) -> None:
        """Write the notes; a failure only costs another upload."""
        with suppress(StorageError):
            write_notes(self._local, self._notes)

    def _fail(self, text: str) -> None:
        with self._changed:
            if text not in self._failures:
                self._failures.append(text)
            self._changed.notify_all()

    def _look_until(self, look: Callable[[], T | None], wanted: Callable[[], bool]) -> T | None:
        """The result of `look`, retried with growing pauses; None if not needed any more."""
        pause = FIRST_LOOK_SECS
        while (found := look()) is None:
            self._check_going_on()
            if not wanted():
                return None
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause)
            pause = min(1.5 * pause, LONGEST_LOOK_SECS)
        return found

    def _run(self) -> None:
        if sys.platform == "linux":  # possible only from inside a thread, for it and those that it starts
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        super()._run()


def _attempts(manifest: Manifest) -> list[str]:
    return sorted({manifest.tries[0], *(manifest.tries[row.source] for row in manifest.shards)})


def _windows(header: ShardHeader) -> Iterator[tuple[int, memoryview]]:
    """The data of a shard in file order, verified, each piece with its offset."""
    buffer = memoryview(bytearray(min(WINDOW, max(1, header.content.file_bytes))))
    begin, requests, filled = 0, list[ReadRequest](), 0
    entries = sorted(header.entries.items(), key=lambda item: (item[1].start, item[1].stop))
    for key, entry in entries:
        done = 0
        while done < entry.nbytes:
            if not requests:
                begin, filled = entry.start + done, 0
            count = min(entry.nbytes - done, len(buffer) - filled)
            requests.append(ReadRequest(key, done, done + count, buffer[filled : filled + count]))
            done, filled = done + count, filled + count
            if filled == len(buffer):
                header.read_many(requests, _ALONE)
                yield begin, buffer[:filled]
                requests = []
    if requests:
        header.read_many(requests, _ALONE)
        yield begin, buffer[:filled]


@dataclass(frozen=True)
class PlaceReport:
    """Report of a place about an epoch: the uploaded paths, or the damage that prevents it."""

    paths: tuple[str, ...] = ()
    damage: str | None = None


def part_path(attempt_name: str, run: str, leader: int) -> str:
    """Path of a leader's report."""
    return f"{attempt_directory(attempt_name)}/sent.{run}-{leader}.json"


def write_part(remote: Storage, path: str, part: PlaceReport) -> None:
    """Write a report, when all files are durable. Raises StorageError."""
    remote.replace(path, seal("sent", {"paths": list(part.paths), "damage": part.damage}))


def read_part(remote: Storage, path: str) -> PlaceReport | None:
    """Read a report; None without one. Raises StorageError."""
    try:
        data = sealed_bytes(remote, path)
        stored: Mapping[str, object] = unseal("sent", data, path)
    except (FileNotFoundError, DamagedError):  # incomplete, if a store does not replace atomically
        return None
    paths, damage = stored.get("paths"), stored.get("damage")
    names = tuple(str(one) for one in paths) if isinstance(paths, list) else ()
    return PlaceReport(names, None if damage is None else str(damage))


def delete_parts(remote: Storage, attempt_name: str, run: str, leaders: tuple[int, ...]) -> None:
    """Delete reports; those that cannot be deleted go with the attempt."""
    for leader in leaders:
        with suppress(RelayError):
            remote.delete(part_path(attempt_name, run, leader))
