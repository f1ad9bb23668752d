"""Writing a shard: data first, hashed on the way, the header last, then synced."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torchrelay.checkpoint.disk import dtypes
from torchrelay.checkpoint.disk.canonical import Json, sha256
from torchrelay.checkpoint.disk.digest import BLOCK, SIZE, block_digests
from torchrelay.checkpoint.disk.names import Key, format_key, shard_file_name
from torchrelay.checkpoint.disk.shard import Part, ShardEntry, ShardIdentity, header_bytes, no_digests
from torchrelay.checkpoint.disk.shard_parts import DEFAULT_LIMITS, ShardLimits, cut
from torchrelay.checkpoint.storage import Storage, WriteHandle
from torchrelay.errors import BlobError, StorageError

PIECE = 8 * BLOCK
"""Bytes that are hashed and then written while the cache still has them."""
GATHER = BLOCK
"""Entries below this size are copied together into writes of about this size."""

PROBE = 4096
"""The first bytes of an entry of more than a block that have a digest of their own, in memory only."""

Digests = bytes
"""Of the blocks of one entry, one after another."""


@dataclass
class Seconds:
    """Where the time of a write went."""

    hash: float = 0.0
    write: float = 0.0
    fsync: float = 0.0

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        """Add the time of a block to `hash`, `write` or `fsync`."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.monotonic() - start)


@dataclass(frozen=True)
class ShardReport:
    """One written file: what a manifest needs to know, and where the time went.

    `header_bytes` counts all bytes before the data (the length field and the padding too), and
    `header_sha256` is of exactly these; `keys` are in stored order, `digests` those of their blocks,
    `probes` those of the first `PROBE` bytes of long ones.
    """

    path: str
    bytes: int
    header_bytes: int
    header_sha256: str
    keys: tuple[str, ...] = ()
    digests: tuple[Digests, ...] = field(default=(), compare=False)
    probes: Mapping[str, Digests] = field(default_factory=dict, compare=False)
    seconds: Seconds = field(default_factory=Seconds, compare=False)


def write_shard(
    storage: Storage,
    directory: str,
    identity: ShardIdentity,
    entries: Sequence[ShardEntry],
    *,
    values: Mapping[str, Json] | None = None,
    aliases: Mapping[str, Key] | None = None,
    limits: ShardLimits = DEFAULT_LIMITS,
    escape: str = "",
) -> list[ShardReport]:
    """Write the files of one node and group into a try directory, each synced; one report per file.

    `values` are encoded already (`values.encode`) and lie in part 1; `aliases` maps names of tied
    leaves to the key that holds their bytes. No staging copy is made of contiguous CPU data. The
    directory's entry is not synced: do that once after all shards (`storage.sync_dir`). Raises
    BlobError for what cannot be stored and StorageError for what could not be written; files that
    were begun are then removed where possible.
    """
    parts = cut(identity, entries, values or {}, aliases or {}, limits)
    return [write_part(storage, _path_of(part, directory, escape), part) for part in parts]


def _path_of(part: Part, directory: str, escape: str) -> str:
    name = shard_file_name(part.identity.file(part.number), escape=escape)
    return f"{directory}/{name}" if directory else name


def write_part(storage: Storage, path: str, part: Part) -> ShardReport:
    """Write and sync one new file; raises as `write_shard` does, and leaves nothing behind then."""
    seconds = Seconds()
    try:
        handle = storage.open_exclusive(path)
    except FileExistsError:
        raise StorageError(f"{path} exists already: a try is written once; begin a new try") from None
    try:
        probes: dict[str, Digests] = {}
        header, digests = _fill(handle, part, seconds, probes)
        with seconds.spent("fsync"):
            handle.sync_file()
            handle.close()
    except BaseException:
        with suppress(StorageError):
            handle.close()
        with suppress(StorageError):
            storage.delete(path)
        raise
    keys = tuple(format_key(entry.key) for entry in part.entries)
    nbytes = len(header) + part.data_bytes
    return ShardReport(path, nbytes, len(header), sha256(header), keys, tuple(digests), probes, seconds)


def _fill(
    handle: WriteHandle, part: Part, seconds: Seconds, probes: dict[str, Digests]
) -> tuple[bytes, list[bytes]]:
    reserved = len(header_bytes(part, no_digests(part)))
    with seconds.spent("write"):
        handle.preallocate(reserved + part.data_bytes)
    sink = _Gatherer(handle, reserved, seconds)
    digests = [_write_entry(entry, sink, probes) for entry in part.entries]
    sink.flush()
    header = header_bytes(part, b"".join(digests))
    if len(header) != reserved:
        raise StorageError(f"{handle.path}: the header takes {len(header)} bytes, {reserved} were reserved")
    with seconds.spent("write"):
        handle.write_at(0, memoryview(header))
    return header, digests


def _write_entry(entry: ShardEntry, sink: _Gatherer, probes: dict[str, Digests]) -> bytes:
    view, found = _bytes_of(entry), bytearray(entry.digests or b"")
    if len(view) > BLOCK:
        probes[format_key(entry.key)] = block_digests(view[:PROBE])
    known = len(found) // SIZE * BLOCK
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        if known < start + len(piece):
            with sink.seconds.spent("hash"):
                found += block_digests(piece[max(0, known - start) :])
        sink.append(piece)
    return bytes(found)


def _bytes_of(entry: ShardEntry) -> memoryview:
    name = format_key(entry.key)
    if isinstance(entry.data, memoryview):
        view = entry.data.cast("B") if entry.data.format != "B" else entry.data
    else:
        view = dtypes.stored_bytes(entry.data, name)
    if len(view) != entry.nbytes:
        raise BlobError(
            f"{name}: {len(view)} bytes were given for {entry.dtype} of shape {list(entry.piece_shape)}"
        )
    return view


class _Gatherer:
    """Writes at a growing offset; small pieces are collected, large ones go straight through."""

    def __init__(self, handle: WriteHandle, offset: int, seconds: Seconds) -> None:
        self.seconds = seconds
        self._handle = handle
        self._offset = offset
        self._pending = bytearray()

    def append(self, piece: memoryview) -> None:
        if len(piece) < GATHER:
            self._pending += piece
            if len(self._pending) >= GATHER:
                self.flush()
        else:
            self.flush()
            self._write(piece)

    def flush(self) -> None:
        pending, self._pending = self._pending, bytearray()
        if pending:
            self._write(memoryview(pending))

    def _write(self, data: memoryview) -> None:
        with self.seconds.spent("write"):
            self._handle.write_at(self._offset, data)
        self._offset += len(data)
