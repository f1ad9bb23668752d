"""Transfers over a network: calls retried until a deadline, and uploads, large ones in parts.

Nothing here knows what a call does: whoever repeats one must be able to, or look first what became of it.

What was begun and not completed is invisible, and is paid for until somebody gives it up: this module does
when a part fails, and whoever takes the log over does so with what a killed writer left.

A store cannot write the header of a shard last, at offset 0, into an object that exists. Staging costs
local space for the file (in the directory for temporary files) and a copy; nothing is visible before.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any, TypeVar

from torchrelay.checkpoint.storage.work import share
from torchrelay.errors import StorageError
from torchrelay.records import dataclass

T = TypeVar("T")

AT_LEAST = 3
"""Attempts that are made even if the first ones took longer than the deadline (large files do)."""
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
"""Errors of the clients below fsspec that are no OSError, by the names of their classes."""
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class RetryTimeouts:
    """How long, in seconds, a call is repeated, and how long the pauses between are at most."""

    deadline_secs: float = 120.0
    first_pause_secs: float = 0.1
    longest_pause_secs: float = 5.0


def persistently(work: Callable[[], T], patience: RetryTimeouts) -> T:
    """Do `work`, again and again while what it raises may pass; raises its last error."""
    until = time.monotonic() + patience.deadline_secs
    for attempt, pause in enumerate(_pauses(patience), 1):
        try:
            return work()
        except Exception as error:
            settled = isinstance(error, StorageError) or not may_pass(error)  # ours was persistent already
            if settled or (time.monotonic() + pause > until and attempt >= AT_LEAST):
                raise
        time.sleep(pause)
    raise AssertionError("pauses never end")


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later: overload, time-outs, lost connections."""
    return any(_passes(one) for one in _chain(error))


def refusal(place: str, verb: str, error: BaseException) -> StorageError:
    """The error of ours for what a store answered."""
    reason = str(error).strip() or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        hint = "; check the credentials and what they allow"
    elif isinstance(error, FileNotFoundError):
        hint = "; check that the bucket exists"
    elif may_pass(error):
        hint = "; try again when the store answers"
    else:
        hint = ""
    failure = StorageError(f"cannot {verb} {place}: {reason}{hint}")
    failure.errno = number
    return failure


def _pauses(patience: RetryTimeouts) -> Iterator[float]:
    """Growing pauses with jitter, from the system's randomness: the user's streams must not be touched."""
    pause, random = patience.first_pause_secs, secrets.SystemRandom()
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, patience.longest_pause_secs)


def _passes(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if _status(error) in _PASSING_STATUS:
        return True
    return any(cls.__name__ in _PASSING_NAMES for cls in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error tells, in the forms of botocore, aiohttp and azure."""
    response = getattr(error, "response", None)
    told = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    for found in (told, getattr(error, "status", None), getattr(error, "status_code", None)):
        if type(found) is int:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    step: BaseException | None = error
    for _ in range(8):
        if step is None:
            return
        yield step
        step = step.__cause__


def size_of(system: Any, name: str) -> int | None:
    """The size of a file; None for a directory. Raises FileNotFoundError and what the client raises.

    s3fs, which looks for directories, too, lists what may lie below a name that nothing has; a store is
    asked for hundreds of these.
    """
    if hasattr(system, "call_s3"):
        bucket, key, _ = system.split_path(name)
        return int(system.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"])
    found = system.info(name)
    return int(found["size"]) if found.get("type") == "file" else None


PART_BYTES = 16 << 20
PARTS_AT_A_TIME = 4
"""Together 64 MiB of memory."""
_MOST_PARTS = 10_000


def takes_parts(system: Any) -> bool:
    """Whether a client speaks S3."""
    return hasattr(system, "call_s3")


def put_in_parts(system: Any, name: str, file: IO[bytes], nbytes: int, patience: RetryTimeouts) -> None:
    """Put a local file of so many bytes; every request is repeated by itself. Raises what the client raises.

    The name has to be nobody else's: an answer that was lost is looked up by the object's size.
    """
    bucket, key, _ = system.split_path(name)
    size = max(PART_BYTES, -(-nbytes // _MOST_PARTS))
    numbers = range(1, -(-nbytes // size) + 1)
    tags: dict[int, str] = {}

    def ask(verb: str, **what: Any) -> Any:
        return persistently(lambda: system.call_s3(verb, Bucket=bucket, Key=key, **what), patience)

    upload = ask("create_multipart_upload")["UploadId"]

    def put(number: int) -> None:
        data = _part(file, (number - 1) * size, min(size, nbytes - (number - 1) * size))
        tags[number] = ask("upload_part", UploadId=upload, PartNumber=number, Body=data)["ETag"]

    try:
        share(lambda mine: _each(put, mine), numbers, PARTS_AT_A_TIME, name="torchrelay-parts")
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in numbers]
        persistently(lambda: _complete(system, name, nbytes, upload, parts), patience)
    except BaseException:
        with suppress(Exception):
            system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        raise


def _each(work: Callable[[T], None], items: Iterator[T]) -> None:
    for item in items:
        work(item)


def _complete(system: Any, name: str, nbytes: int, upload: str, parts: list[dict[str, Any]]) -> None:
    """Have the parts become the object; one that did, unheard of, is refused when it is repeated."""
    bucket, key, _ = system.split_path(name)
    try:
        system.call_s3(
            "complete_multipart_upload",
            Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts},
        )  # fmt: skip
    except Exception as error:
        with suppress(Exception):
            if size_of(system, name) == nbytes:
                return
        raise error


def _part(file: IO[bytes], offset: int, nbytes: int) -> bytes:
    data = os.pread(file.fileno(), nbytes, offset)
    if len(data) != nbytes:
        raise StorageError(f"the staged file ends at byte {offset + len(data)}: try again")
    return data


def unfinished(system: Any, name: str) -> list[tuple[str, str]]:
    """Names below `name`, and ids, of uploads that were begun and not completed or given up; at most 1000."""
    bucket, key, _ = system.split_path(name)
    found = system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
    return [(f"{bucket}/{one['Key']}", one["UploadId"]) for one in found.get("Uploads", ())]


def give_up(system: Any, name: str, upload: str) -> None:
    """End an upload; one that is not there any more is fine."""
    bucket, key, _ = system.split_path(name)
    with suppress(FileNotFoundError):
        system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)


Put = Callable[[IO[bytes], int], None]
"""Puts a staged file of so many bytes, all of it or nothing; raises StorageError."""


class StagedFile:
    """The write handle of an object. `sync_file` puts it; closed without that, it never existed."""

    alignment = 0

    def __init__(self, path: str, put: Put) -> None:
        self.path = path
        self._put = put
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="torchrelay-")  # noqa: SIM115 - see `close`
        except OSError as error:
            raise self._no_room(error) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write into the staged file."""
        try:
            view = data.cast("B")
            while len(view):
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._no_room(error) from error

    def preallocate(self, nbytes: int) -> None:
        """Reserve local space where the file system can."""
        try:
            if nbytes:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise self._no_room(error) from error

    def sync_file(self) -> None:
        """Put the object; it is durable when the store has answered."""
        self._put(self._file, os.fstat(self._file.fileno()).st_size)

    def close(self) -> None:
        """Let go of the staged file; later calls do nothing."""
        self._file.close()

    def _no_room(self, error: OSError) -> StorageError:
        where = tempfile.gettempdir()
        return StorageError(
            f"{self.path} cannot be staged in {where}: {error.strerror or error}; a file lies there whole "
            "before it is sent: free some space, or set TMPDIR to a place with room for the largest shard"
        )
