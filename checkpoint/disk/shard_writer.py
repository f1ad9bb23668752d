"""Writing a shard: data first, hashed on the way, the header last, then synced."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from itertools import accumulate, pairwise

from torchrelay.checkpoint.disk.canonical import Json, sha256
from torchrelay.checkpoint.disk.digest import SIZE
from torchrelay.checkpoint.disk.extents import Digests
from torchrelay.checkpoint.disk.filling import fill
from torchrelay.checkpoint.disk.lazily import lazily
from torchrelay.checkpoint.disk.names import Key, shard_file_name
from torchrelay.checkpoint.disk.seconds import Seconds
from torchrelay.checkpoint.disk.shard import HeaderFrame, Part, ShardIdentity
from torchrelay.checkpoint.disk.shard_entries import Entries
from torchrelay.checkpoint.disk.shard_parts import DEFAULT_LIMITS, ShardLimits, cut
from torchrelay.checkpoint.storage.base import Storage, WriteHandle
from torchrelay.checkpoint.storage.threads import WRITERS
from torchrelay.errors import StorageError
from torchrelay.records import dataclass

BlockDigests = bytes
"""Of blocks, one after another; a name, because a report has a field `bytes`."""


@dataclass(frozen=True)
class ShardReport:
    """One written file: what a manifest needs to know, and where the time went.

    `header_bytes` counts all bytes before the data (the length field and the padding too), and
    `header_sha256` is of exactly these; `keys` are in stored order, `blocks` how many each has, `hashed`
    the digests of all, one after another; `probes` those of the first `PROBE` bytes of long ones.
    """

    path: str
    bytes: int
    header_bytes: int
    header_sha256: str
    keys: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    hashed: BlockDigests = field(default=b"", compare=False)
    probes: Mapping[str, BlockDigests] = field(default_factory=dict, compare=False)
    seconds: Seconds = field(default_factory=Seconds, compare=False)

    @lazily
    def digests(self) -> tuple[BlockDigests, ...]:
        """Those of each entry."""
        edges = accumulate([SIZE * count for count in self.blocks], initial=0)
        return tuple([self.hashed[start:end] for start, end in pairwise(edges)])


def write_shard(
    storage: Storage,
    directory: str,
    identity: ShardIdentity,
    entries: Entries,
    *,
    values: Mapping[str, Json] | None = None,
    aliases: Mapping[str, Key] | None = None,
    limits: ShardLimits = DEFAULT_LIMITS,
    escape: str = "",
    writers: int = WRITERS,
) -> list[ShardReport]:
    """Write the files of one node and group into a try directory, each synced; one report per file.

    `values` are encoded already (`values.encode`) and lie in part 1; `aliases` maps names of tied
    leaves to the key that holds their bytes. At most `writers` threads write a file. The directory's
    entry is not synced: do that once after all shards (`storage.sync_dir`). Raises BlobError for what
    cannot be stored and StorageError for what could not be written; files that were begun are then
    removed where possible.
    """
    parts = cut(identity, entries, values or {}, aliases or {}, limits)
    return [write_part(storage, _path_of(part, directory, escape), part, writers) for part in parts]


def _path_of(part: Part, directory: str, escape: str) -> str:
    name = shard_file_name(part.identity.file(part.number), escape=escape)
    return f"{directory}/{name}" if directory else name


def write_part(storage: Storage, path: str, part: Part, writers: int = WRITERS) -> ShardReport:
    """Write and sync one new file; raises as `write_shard` does, and leaves nothing behind then."""
    seconds = Seconds()
    try:
        handle = storage.open_exclusive(path)
    except FileExistsError:
        raise StorageError(f"{path} exists already: a try is written once; begin a new try") from None
    try:
        header, found = _fill(handle, part, seconds, writers)
        with seconds.spent("fsync"):
            handle.sync_file()
            handle.close()
    except BaseException:
        with suppress(StorageError):
            handle.close()
        with suppress(StorageError):
            storage.delete(path)
        raise
    return ShardReport(
        path,
        len(header) + part.data_bytes,
        len(header),
        sha256(header),
        tuple(part.entries.keys),
        tuple([form.blocks for form in part.entries.forms]),
        bytes(found.data),
        found.probes,
        seconds,
    )


def _fill(handle: WriteHandle, part: Part, seconds: Seconds, writers: int) -> tuple[bytes, Digests]:
    frame = HeaderFrame(part)
    with seconds.spent("write"):
        handle.preallocate(frame.nbytes + frame.data_bytes)
    found = fill(handle, part, frame, seconds, writers)
    header = frame.filled(bytes(found.data))
    with seconds.spent("write"):
        handle.write_at(0, memoryview(header))
    return header, found
