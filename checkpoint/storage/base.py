"""Define the storage interface, retry calls, and check that a storage keeps a second writer out.

Paths are relative to the storage's root, with `/` between parts that were validated before
(`format/names.py`). An implementation refuses paths that would leave the root or follow a link. Methods raise
StorageError naming path and reason, except where a docstring states otherwise. Committed files are never
opened for writing again: `open_exclusive` and `link_exclusive` create. The protection against a second job
depends on exclusive creation, so it is probed before anything is written.

Only calls that can be repeated are retried, or those whose outcome is checked first.
"""

from __future__ import annotations

import ctypes
import errno
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, Protocol, TypeVar, runtime_checkable

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass

T = TypeVar("T")

PRIVATE = ".tmp-"
"""Prefix of temporary files, for storages that name a file when it is complete."""
Memory = memoryview | ctypes.Array[ctypes.c_ubyte]
"""1-D bytes that are written to; arrays at an address are quicker to make in large numbers."""


class WriteHandle(Protocol):
    """A new file that is being written."""

    path: str
    alignment: int
    """Alignment of direct writes, after `preallocate`; 0: none.

    Aligned offset, address and length are worth a copy then, and several threads may write different places.
    """

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` (1-D bytes) at `offset`; short writes are continued."""

    def preallocate(self, nbytes: int) -> None:
        """Reserve space, so that a full disk is found early; may do nothing."""

    def sync_file(self) -> None:
        """Make the bytes durable. Never retried after a failure: the file then counts as not written."""

    def close(self) -> None:
        """Release the descriptor; raises errors that the system has delayed."""


class ReadHandle(Protocol):
    """A file that is read in many pieces, by any threads."""

    def read_into(self, offset: int, destination: memoryview, *, once: bool = False) -> int:
        """As `Storage.read_into`; `once` leaves bytes out of the cache that it did not have."""

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """Fill some hundreds of `destinations` in order, as `read_into` fills one."""

    def close(self) -> None:
        """Release the descriptor."""


@runtime_checkable
class Cached(ReadHandle, Protocol):
    """Optional interface of a handle: what is in a cache."""

    def is_at_hand(self, offset: int, nbytes: int) -> bool:
        """Whether bytes of the range can probably be read without waiting for the device."""


@runtime_checkable
class LongReads(Protocol):
    """Optional interface of a storage: files that stay open while they are read."""

    def open_read(self, path: str) -> ReadHandle:
        """Open a file; FileNotFoundError when there is no such file."""


@runtime_checkable
class Storage(Protocol):
    """A storage for checkpoints: a local directory tree, or an object store."""

    url: str

    def open_exclusive(self, path: str) -> WriteHandle:
        """Create a new file, mode 0644; FileExistsError when the name is taken."""

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Create `path` with exactly `data`, which no other creator writes, completely or not at all.

        Raises FileExistsError if the name exists. The name is durable only after `sync_dir` of its directory.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Write `data` to `path`, atomically but unsynced; for unverified files only (hints, counters)."""

    def mkdir(self, path: str) -> None:
        """Create a directory and its missing parents; an existing one is fine."""

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read up to `length` bytes, fewer only at the end of the file; FileNotFoundError without it."""

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Fill `destination` (1-D bytes) from `offset`; returns the bytes read, as `read_range`."""

    def stat(self, path: str) -> int | None:
        """The size of a file in bytes; None unless it is a regular file."""

    def delete(self, path: str) -> None:
        """Delete a file, or a directory without names (`list`); an absent one is fine."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted, for orphans and retention only; empty for an absent one."""


@runtime_checkable
class Leftovers(Protocol):
    """A storage that writes under temporary names first, which a crash leaves behind."""

    def leftovers(self, path: str) -> list[str]:
        """Temporary names in a directory, sorted; `list` does not show them. Empty for an absent one."""


@runtime_checkable
class Unfinished(Protocol):
    """A storage that keeps invisible parts of files which a crash left unfinished."""

    def unfinished(self, path: str) -> list[tuple[str, str]]:
        """Incomplete uploads below a directory; some hundreds at most."""

    def give_up(self, upload: tuple[str, str]) -> None:
        """Delete the parts of an upload; an absent one is fine."""


@runtime_checkable
class SupportsFreeSpace(Protocol):
    """A storage that knows its free space."""

    def room(self) -> tuple[int, int] | None:
        """Free bytes and free files for this user; None if the system does not report them."""


@runtime_checkable
class Placed(Protocol):
    """A storage whose directory can disappear while it is in use."""

    def check_place(self) -> None:
        """Raise LostDirectoryError if writes would go elsewhere than before."""


@runtime_checkable
class Distant(Protocol):
    """A storage with high per-request latency."""

    request_bytes: int
    """Gap in bytes below which two reads are merged into one request."""


def worth_of_a_request(storage: Storage) -> int:
    """Unwanted bytes that may be read to save a request; 0 if requests are cheap."""
    return storage.request_bytes if isinstance(storage, Distant) else 0


class SeparateReads:
    """A handle that opens the file for each read; making it accesses nothing."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path

    def read_into(self, offset: int, destination: memoryview, *, once: bool = False) -> int:
        """See `ReadHandle`."""
        return self._storage.read_into(self._path, offset, destination)

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """See `ReadHandle`."""
        return read_each(self.read_into, offset, destinations)

    def close(self) -> None:
        """Do nothing."""


def read_each(
    read_into: Callable[[int, memoryview], int], offset: int, destinations: Sequence[Memory]
) -> int:
    """Implement `read_scattered` by one read per destination, up to the end of the file."""
    done = 0
    for destination in destinations:
        view = memoryview(destination).cast("B")
        count = read_into(offset + done, view)
        done += count
        if count < len(view):
            break
    return done


@contextmanager
def open_for_reading(storage: Storage, path: str) -> Iterator[ReadHandle]:
    """Open a file for many reads in any storage; raises as `read_into` does."""
    handle = storage.open_read(path) if isinstance(storage, LongReads) else SeparateReads(storage, path)
    try:
        yield handle
    finally:
        handle.close()


SingleWriter = Literal["external"] | None
"""`external`: something else than the storage ensures that one job at a time writes."""
_REMEDY = (
    "two jobs could overwrite each other's epochs there. Choose another place, or, if something else "
    "ensures that only one job at a time writes there, give single_writer='external'"
)


@runtime_checkable
class Distrusted(Protocol):
    """Optional interface of a storage: that it needs no probe, or that a probe would be useless."""

    single_writer: SingleWriter

    @property
    def doubt(self) -> str | None:
        """Why a probe cannot verify exclusive creation here; None if it can."""


def check_single_writer(given: object) -> SingleWriter:
    """The option, checked; raises UsageError."""
    if given is None or given == "external":
        return given
    raise UsageError(
        f"invalid single_writer={given!r:.80}: expected 'external', if something else ensures that one "
        "job at a time writes, or None"
    )


def check_exclusion(storage: Storage) -> None:
    """Try to create one name twice; leaves nothing behind.

    Raises UsageError, with the remedy, if the second creation succeeds, if the store has no exclusive
    creation, or if it cannot be verified; StorageError if nothing can be written at all.
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
        if not may_pass(error):
            _delete(storage, path)
        raise  # a store that does not answer was retried for long enough
    _delete(storage, path)
    if fault:
        raise UsageError(f"{storage.url} {fault}: {_REMEDY}")


def _delete(storage: Storage, path: str) -> None:
    with suppress(StorageError):
        storage.delete(path)


def _fault(storage: Storage, path: str) -> str | None:
    """What is wrong with exclusive creation, if anything."""
    first, second = (f"{word} {secrets.token_hex(8)}\n".encode() for word in ("first", "second"))
    try:
        storage.link_exclusive(path, first)
    except StorageError as error:
        if may_pass(error):
            raise
        storage.replace(path, first)  # if this fails too, exclusion is not the problem
        return f"refuses to create a file exclusively ({error})"
    try:
        storage.link_exclusive(path, second)
    except FileExistsError:
        there = storage.read_range(path, 0, len(first) + 1)
        return None if there == first else "reports that a name exists, but replaces what lies there"
    except StorageError as error:
        return f"refuses to create a file exclusively ({error})"
    return "creates a file although its name is taken"


AT_LEAST = 3
"""Minimum of attempts, even if the first ones took longer than the deadline (large files do)."""
_PASSING = frozenset(
    {
        errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EPIPE,
        errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETDOWN, errno.ENETUNREACH,
        errno.EHOSTUNREACH,
    }
)  # fmt: skip
_PASSING_NAMES = frozenset(
    {
        "HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead",
        "ResponseParserError", "ServiceRequestError", "ServiceResponseError",
    }
)  # fmt: skip
"""Names of error classes of the clients below fsspec that are not OSError."""
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class RetryTimeouts:
    """Seconds until retries stop, and the longest pause between them."""

    deadline_secs: float = 120.0
    first_pause_secs: float = 0.1
    longest_pause_secs: float = 5.0


def persistently(work: Callable[[], T], patience: RetryTimeouts) -> T:
    """Do `work`, and repeat it while its error may be temporary; raises the last error."""
    until, longest, attempt = time.monotonic() + patience.deadline_secs, patience.first_pause_secs, 1
    while True:
        # From the system's randomness: the user's streams must not change.
        pause = longest * secrets.SystemRandom().uniform(0.5, 1.0)
        try:
            return work()
        except Exception as error:
            settled = isinstance(error, StorageError) or not may_pass(error)  # already retried
            if settled or (time.monotonic() + pause > until and attempt >= AT_LEAST):
                raise
        time.sleep(pause)
        longest, attempt = min(2 * longest, patience.longest_pause_secs), attempt + 1


def may_pass(error: BaseException) -> bool:
    """Whether an error may be temporary: overload, time-outs, lost connections."""
    step: BaseException | None = error
    for _ in range(8):
        if step is None:
            return False
        if _passes(step):
            return True
        step = step.__cause__
    return False


def refusal(place: str, verb: str, error: BaseException) -> StorageError:
    """The StorageError for an error of a store."""
    reason = str(error).strip() or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        hint = "; check the credentials and their permissions"
    elif isinstance(error, FileNotFoundError):
        hint = "; check that the bucket exists"
    elif may_pass(error):
        hint = "; try again when the store answers"
    else:
        hint = ""
    failure = StorageError(f"cannot {verb} {place}: {reason}{hint}")
    failure.errno = number
    return failure


def _passes(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if _status(error) in _PASSING_STATUS:
        return True
    return any(cls.__name__ in _PASSING_NAMES for cls in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = (
        response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    )
    for found in (status, getattr(error, "status", None), getattr(error, "status_code", None)):
        if type(found) is int:
            return found
    return None
