"""The storage interface: the verbs through which every byte of a checkpoint goes.

A path is relative to the storage's root, with `/` between parts that were validated before
(`names.py`); an implementation refuses anything that would leave the root or follow a link.
Verbs raise StorageError naming path and reason, except where a docstring says otherwise.
Nothing valid is ever opened for writing again: `open_exclusive` and `link_exclusive` create.

Everything that protects a directory from a second job stands on that, so it is tried before anything is
written.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, Protocol, runtime_checkable

from torchrelay.errors import StorageError, UsageError

PRIVATE = ".tmp-"
"""How the names of files begin that have not got their own yet, where a storage gives it last."""
Memory = memoryview | ctypes.Array[ctypes.c_ubyte]
"""1-D bytes that are written to; of very many, arrays at an address are quicker made."""


class WriteHandle(Protocol):
    """A file that is being written for the first and only time."""

    path: str
    alignment: int
    """After `preallocate`: writes whose offset, address and length are multiples of it are worth a copy,
    and several threads may then write different places at once; 0: neither."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` (1-D bytes) at `offset`; short writes are continued."""

    def preallocate(self, nbytes: int) -> None:
        """Reserve space, so that a full disk shows before the bytes are spent; may do nothing."""

    def sync_file(self) -> None:
        """Make the bytes durable. Never retried after a failure: the file is then not written."""

    def close(self) -> None:
        """Release the descriptor; reports errors that the system kept until now."""


class ReadHandle(Protocol):
    """A file that is read in many pieces, by any threads."""

    def read_into(self, offset: int, destination: memoryview, *, direct: bool = False) -> int:
        """As `Storage.read_into`; `direct` reads past the cache what it does not have."""

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """Fill some hundreds of `destinations`, one behind the other, as `read_into` fills one."""

    def close(self) -> None:
        """Release the descriptor."""


@runtime_checkable
class Cached(ReadHandle, Protocol):
    """What a handle may offer besides: to tell what a cache has."""

    def is_at_hand(self, offset: int, nbytes: int) -> bool:
        """Whether bytes of the range can be read without waiting for the device, as far as one can say."""


@runtime_checkable
class LongReads(Protocol):
    """What a storage may offer besides: files that stay open while they are read."""

    def open_read(self, path: str) -> ReadHandle:
        """Open a file; FileNotFoundError when there is no such file."""


@runtime_checkable
class Storage(Protocol):
    """A place for checkpoints: a local directory tree, or an object store."""

    url: str

    def open_exclusive(self, path: str) -> WriteHandle:
        """Create a new file, mode 0644; FileExistsError when the name is taken."""

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Create `path` holding exactly `data`, which no other creator has, whole and synced or not at all.

        FileExistsError when the name is taken, by whoever was first. The name itself is durable
        only after `sync_dir` of its directory.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Put `data` at `path`, atomically but unsynced; for unproved files only (hints, counters)."""

    def mkdir(self, path: str) -> None:
        """Create a directory and its missing parents; an existing one is fine."""

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read up to `length` bytes at `offset`; fewer only at the end of the file.

        FileNotFoundError when there is no such file.
        """

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Fill `destination` (1-D bytes) from `offset`; returns the bytes read, as `read_range`."""

    def stat(self, path: str) -> int | None:
        """The size of a file in bytes; None when there is none (or it is no regular file)."""

    def delete(self, path: str) -> None:
        """Remove a file, or a directory without names (`list`); an absent one is fine."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted, for orphans and retention only; empty when there is none."""


@runtime_checkable
class Leftovers(Protocol):
    """A storage that writes under private names first, which a crash leaves behind."""

    def leftovers(self, path: str) -> list[str]:
        """Private names in a directory, sorted; `list` does not show them. Empty when there is none."""


@runtime_checkable
class Unfinished(Protocol):
    """A storage that keeps parts of files which a crash left unfinished, where no name shows them."""

    def unfinished(self, path: str) -> list[tuple[str, str]]:
        """What was begun below a directory and is not there yet; some hundreds at most."""

    def give_up(self, upload: tuple[str, str]) -> None:
        """Forget the parts of one; one that is not there any more is fine."""


@runtime_checkable
class SupportsFreeSpace(Protocol):
    """A storage that can say how much room is left."""

    def room(self) -> tuple[int, int] | None:
        """Free bytes and free files for this user; None where the system does not say."""


@runtime_checkable
class Placed(Protocol):
    """A storage whose place can be lost while it is in use."""

    def check_place(self) -> None:
        """Raise LostDirectoryError where writing would go elsewhere than before."""


@runtime_checkable
class Distant(Protocol):
    """A storage of which each request takes its time, however few bytes it is for."""

    request_bytes: int
    """So many bytes more come sooner with a request than by one of their own."""


def worth_of_a_request(storage: Storage) -> int:
    """How many bytes beside the wanted ones may be read to save a request; 0 where requests cost nothing."""
    return storage.request_bytes if isinstance(storage, Distant) else 0


class _EachAlone:
    """Reads of a storage that opens a file anew for each."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path

    def read_into(self, offset: int, destination: memoryview, *, direct: bool = False) -> int:
        """See `ReadHandle`."""
        return self._storage.read_into(self._path, offset, destination)

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """See `ReadHandle`."""
        return read_each(self.read_into, offset, destinations)

    def close(self) -> None:
        """Nothing is open."""


def read_each(
    read_into: Callable[[int, memoryview], int], offset: int, destinations: Sequence[Memory]
) -> int:
    """What `read_scattered` does, one destination at a time; up to the end of the file."""
    done = 0
    for destination in destinations:
        view = memoryview(destination).cast("B")
        count = read_into(offset + done, view)
        done += count
        if count < len(view):
            break
    return done


def reads_of(storage: Storage, path: str) -> ReadHandle:
    """A handle on a file of a storage that keeps none open; nothing is looked at."""
    return _EachAlone(storage, path)


@contextmanager
def open_for_reading(storage: Storage, path: str) -> Iterator[ReadHandle]:
    """A file for many reads, however the storage does them; raises as `read_into` does."""
    handle = storage.open_read(path) if isinstance(storage, LongReads) else reads_of(storage, path)
    try:
        yield handle
    finally:
        handle.close()


SingleWriter = Literal["external"] | None
"""`external`: not the storage but somebody else makes sure that one job at a time writes."""
_REMEDY = (
    "two jobs could overwrite each other's epochs there. Choose another place, or, if something else makes "
    "sure that never more than one job writes there, say single_writer='external'"
)


@runtime_checkable
class Distrusted(Protocol):
    """What a storage may say besides: that it needs no probe, or that none would help."""

    single_writer: SingleWriter

    @property
    def doubt(self) -> str | None:
        """Why nothing that a probe finds would prove anything; None if it would."""


def check_single_writer(given: object) -> SingleWriter:
    """The option as users give it; UsageError for what it cannot be."""
    if given is None or given == "external":
        return given
    raise UsageError(
        f"single_writer is {given!r:.80}; it is 'external', where something else makes sure that one job at "
        "a time writes, or None"
    )


def check_exclusion(storage: Storage) -> None:
    """Create one name twice; leaves nothing behind.

    Raises UsageError, with the remedy, where the second creation succeeds, where the store knows no such
    creation, or where nothing could prove it; StorageError where nothing can be written at all.
    """
    if isinstance(storage, Distrusted):
        if storage.single_writer is not None:
            return
        if storage.doubt:
            raise UsageError(f"{storage.url}: {storage.doubt}: {_REMEDY}")
    path = f".probe-{secrets.token_hex(8)}"
    try:
        fault = _fault(storage, path)
    except Exception as error:
        from torchrelay.checkpoint.storage.transfers import may_pass

        if not may_pass(error):
            _delete(storage, path)
        raise  # a store that does not answer was asked for long enough
    _delete(storage, path)
    if fault:
        raise UsageError(f"{storage.url} {fault}: {_REMEDY}")


def _delete(storage: Storage, path: str) -> None:
    with suppress(StorageError):
        storage.delete(path)


def _fault(storage: Storage, path: str) -> str | None:
    first, second = (f"{word} {secrets.token_hex(8)}\n".encode() for word in ("first", "second"))
    try:
        storage.link_exclusive(path, first)
    except StorageError as error:
        from torchrelay.checkpoint.storage.transfers import may_pass

        if may_pass(error):
            raise
        storage.replace(path, first)  # where this fails, too, it is no matter of exclusion
        return f"refuses to create a file exclusively ({error})"
    try:
        storage.link_exclusive(path, second)
    except FileExistsError:
        there = storage.read_range(path, 0, len(first) + 1)
        return None if there == first else "says that a name is taken, and replaces what lies there"
    except StorageError as error:
        return f"refuses to create a file exclusively ({error})"
    return "creates a file although its name is taken"
