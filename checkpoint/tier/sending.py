"""The files of one epoch, from near to far, byte for byte; every block is verified while it is read.

    shards     of all tries that the epoch needs, as far as the far place lacks them
    manifest   of its own try, when all of its shards are durable
    proof      of the whole, at the far place: only then may the far log name it

Whatever interrupts this leaves files there that no record names. Where hosts have near directories of their
own each sends what lies in its one, and the manifest goes first, to tell the others what to send (`among`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import (
    DATA,
    Manifest,
    ShardRow,
    manifest_path,
    shard_path,
    stats_path,
    try_directory,
)
from torchrelay.checkpoint.format.shard.read_plan import ReadOptions, ReadRequest
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, ShardHeader, read_header
from torchrelay.checkpoint.load.verify import Outcome, prove
from torchrelay.checkpoint.storage.base import Storage, WriteHandle
from torchrelay.checkpoint.storage.threads import share
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import dataclass

WINDOW = 8 << 20
"""Bytes that a sending thread holds at most."""
_ALONE = ReadOptions(threads=1)


class StoppedError(Exception):
    """Whoever waits for the sending does so no longer."""


class Moved:
    """How many bytes have gone. What is sent again counts once: trying the same for ever is no headway."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before, self._files = 0, dict[str, int]()

    @property
    def nbytes(self) -> int:
        """All bytes by now."""
        with self._lock:
            return self._before + sum(self._files.values())

    def count(self, path: str, nbytes: int) -> None:
        """So many bytes of a file have gone."""
        with self._lock:
            self._files[path] = max(nbytes, self._files.get(path, 0))

    def settle(self) -> None:
        """The files until now are over, and need not be remembered."""
        with self._lock:
            self._before, self._files = self._before + sum(self._files.values()), {}


@dataclass(frozen=True)
class Sending:
    """How files are sent. `check` is called between pieces; what it raises ends the sending.

    `ask` is called before something is deleted, and raises FencedError where the far log is another's: who
    was frozen for long would else delete what that one has sent and named meanwhile.

    `is_sent` tells whether a file of this size and digest was sent completely before, `note_sent` that it is;
    `forget` that it is made anew, durably: one that is cut off then may have that size already.
    """

    near: Storage
    far: Storage
    uploads: int
    check: Callable[[], None]
    ask: Callable[[], None]
    is_sent: Callable[[str, int, str], bool]
    note_sent: Callable[[str, int, str], None]
    moved: Callable[[str, int], object] = lambda path, nbytes: None
    """Called with how many bytes of a file have gone, after each piece."""
    named: Callable[[str], bool] = lambda try_name: False
    """Asked before a file is deleted: whether the far log needs that try meanwhile."""
    forget: Callable[[str], object] = lambda path: None

    def send(self, entry: Entry, kept: frozenset[str]) -> None:
        """Send what the far place lacks of an epoch; of `kept` tries, which its log needs, no file goes.

        Raises DamagedError where the near files are not what was saved, StorageError where a place fails,
        or the far one does not have afterwards what it was sent.
        """
        manifest = codec.read(self.near, entry)
        own = entry.try_name
        self.make_directories(manifest)
        self.send_shards(manifest, manifest.shards, kept)
        self.send_manifest(entry)
        self.send_stats(own)
        self.sync_directories(manifest)
        self.prove(entry, manifest)

    def make_directories(self, manifest: Manifest) -> None:
        """Those of all tries that an epoch needs."""
        for name in _tries(manifest):
            self.far.mkdir(try_directory(name))

    def sync_directories(self, manifest: Manifest) -> None:
        """Make the names of what was sent durable."""
        for name in _tries(manifest):
            self.far.sync_dir(try_directory(name))
        self.far.sync_dir(DATA)

    def prove(self, entry: Entry, manifest: Manifest) -> None:
        """Raise StorageError unless the far place alone proves the epoch; what it damaged is sent again."""
        self.check()
        proof = prove(self.far, entry)
        if proof.proved:
            return
        if proof.outcome is Outcome.DAMAGED:
            self.forget(manifest_path(entry.try_name))
            self.doubt(manifest, manifest.shards)
        raise StorageError(f"{self.far.url} has not got what it was sent: {proof.told}")

    def doubt(self, manifest: Manifest, rows: Sequence[ShardRow]) -> None:
        """Look which of these files the far place has not got as they were sent: they are sent again."""
        for row in rows:
            path = shard_path(manifest, row)
            try:
                read_header(self.far, path, _expected(row))
            except DamagedError:
                self.forget(path)

    def check_manifest(self, entry: Entry) -> None:
        """Raise StorageError where the manifest that was sent is not there; it is sent again then."""
        try:
            codec.read(self.far, entry)
        except (FileNotFoundError, DamagedError) as error:
            self.forget(manifest_path(entry.try_name))
            raise StorageError(f"{self.far.url} has not got what it was sent: {error}") from None

    def send_shards(self, manifest: Manifest, rows: Sequence[ShardRow], kept: frozenset[str]) -> None:
        """Send these files of an epoch, but for those that `kept` tries have there."""

        def some(rows: Iterator[ShardRow]) -> None:
            for row in rows:
                if not self.has_kept(manifest, row, kept):
                    self._send_shard(shard_path(manifest, row), row)

        threads = min(self.uploads, max(1, len(rows)))
        share(some, rows, threads, name="torchrelay upload")

    def has_kept(self, manifest: Manifest, row: ShardRow, kept: frozenset[str]) -> bool:
        """Whether a file is one of a `kept` try, and there."""
        needed = manifest.tries[row.source] in kept
        return needed and self.far.stat(shard_path(manifest, row)) is not None

    def send_manifest(self, entry: Entry) -> None:
        """Send the manifest, which nobody trusts before a record names it."""
        path = manifest_path(entry.try_name)
        self._send_small(path, self.near.read_range(path, 0, entry.manifest_bytes))

    def _send_shard(self, path: str, row: ShardRow) -> None:
        if self._lies_there(path, row.nbytes, row.header_sha256):
            return
        header = read_header(self.near, path, _expected(row))
        start = self.near.read_range(path, 0, row.header_bytes)

        def write(handle: WriteHandle) -> None:
            handle.preallocate(row.nbytes)
            handle.write_at(0, memoryview(start))
            done = len(start)
            for offset, window in _windows(header):
                self.check()
                handle.write_at(offset, window)
                done += len(window)
                self.moved(path, done)
            if done != row.nbytes or sha256(start) != row.header_sha256:
                raise StorageError(f"{self.near.url}/{path} changed while it was read: it is sent again")

        self._create(path, write)
        self.note_sent(path, row.nbytes, row.header_sha256)

    def _send_small(self, path: str, data: bytes) -> None:
        if not self._lies_there(path, len(data), sha256(data)):
            self._create(path, lambda handle: handle.write_at(0, memoryview(data)))
            self.note_sent(path, len(data), sha256(data))

    def send_stats(self, try_name: str) -> None:
        """Times are no part of the epoch."""
        with suppress(OSError):
            path = stats_path(try_name)
            self.far.replace(path, self.near.read_range(path, 0, self.near.stat(path) or 0))

    def _lies_there(self, path: str, nbytes: int, digest: str) -> bool:
        """Whether the file was sent before; what else lies there was cut off, and goes."""
        self.check()
        found = self.far.stat(path)
        if found == nbytes and self.is_sent(path, nbytes, digest):
            return True
        if found is not None:
            self.ask()
            if self.named(path.split("/")[1]):
                return True
        self.forget(path)
        if found is not None:
            self.far.delete(path)
        return False

    def _create(self, path: str, write: Callable[[WriteHandle], None]) -> None:
        handle = self.far.open_exclusive(path)
        try:
            write(handle)
            handle.sync_file()
        finally:
            handle.close()


def _expected(row: ShardRow) -> ShardExpectation:
    return ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)


def _tries(manifest: Manifest) -> list[str]:
    return sorted({manifest.tries[0], *(manifest.tries[row.source] for row in manifest.shards)})


def _windows(header: ShardHeader) -> Iterator[tuple[int, memoryview]]:
    """The data of a shard in the order of the file, verified, each piece with its place there."""
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
                yield begin, _read(header, requests, buffer[:filled])
                requests = []
    if requests:
        yield begin, _read(header, requests, buffer[:filled])


def _read(header: ShardHeader, requests: list[ReadRequest], window: memoryview) -> memoryview:
    header.read_many(requests, _ALONE)
    return window
