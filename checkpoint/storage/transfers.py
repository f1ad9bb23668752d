"""Retry network calls until a deadline, and upload files, large ones in parts.

Callers must ensure that a call can be repeated, or check its outcome first. Incomplete uploads are invisible
but cost money until they are aborted: here after a failed part, and at a takeover of the log those of a
killed writer.

A store cannot overwrite a header at offset 0 of an object, so files are staged first. Staging needs local
space for the file (in the directory for temporary files) and a copy; nothing is visible before.
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
    until = time.monotonic() + patience.deadline_secs
    for attempt, pause in enumerate(_pauses(patience), 1):
        try:
            return work()
        except Exception as error:
            settled = isinstance(error, StorageError) or not may_pass(error)  # already retried
            if settled or (time.monotonic() + pause > until and attempt >= AT_LEAST):
                raise
        time.sleep(pause)
    raise AssertionError("pauses never end")


def may_pass(error: BaseException) -> bool:
    """Whether an error may be temporary: overload, time-outs, lost connections."""
    return any(_passes(one) for one in _chain(error))


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


def _pauses(patience: RetryTimeouts) -> Iterator[float]:
    """Growing pauses with jitter, from the system's randomness: the user's streams must not change."""
    pause, random = patience.first_pause_secs, secrets.SystemRandom()
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, patience.longest_pause_secs)


def _passes(error: BaseException) -> bool:
    """Whether a single error may be temporary."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if _status(error) in _PASSING_STATUS:
        return True
    return any(cls.__name__ in _PASSING_NAMES for cls in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of botocore, aiohttp or azure."""
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
    """The size of a file; None for a directory. Raises FileNotFoundError and the client's errors.

    s3fs also lists names below a missing one, which is too slow for hundreds of files.
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
    """Upload a local file in parts; every request is retried by itself. Raises the client's errors.

    The name must be unique: after a lost answer the object is recognised by its size.
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
    """Do work for each item, in order."""
    for item in items:
        work(item)


def _complete(system: Any, name: str, nbytes: int, upload: str, parts: list[dict[str, Any]]) -> None:
    """Complete an upload; a repeated request fails if the first one succeeded."""
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
    """Names below `name`, and ids, of incomplete uploads; at most 1000."""
    bucket, key, _ = system.split_path(name)
    found = system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
    return [(f"{bucket}/{one['Key']}", one["UploadId"]) for one in found.get("Uploads", ())]


def give_up(system: Any, name: str, upload: str) -> None:
    """Abort an upload; an absent one is fine."""
    bucket, key, _ = system.split_path(name)
    with suppress(FileNotFoundError):
        system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)


Put = Callable[[IO[bytes], int], None]
"""Uploads a staged file completely or not at all; raises StorageError."""


class StagedFile:
    """The write handle of an object. `sync_file` uploads it; closed before that, it never existed."""

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
        """Reserve local space if the file system can."""
        try:
            if nbytes:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise self._no_room(error) from error

    def sync_file(self) -> None:
        """Upload the object; it is durable when the store has answered."""
        self._put(self._file, os.fstat(self._file.fileno()).st_size)

    def close(self) -> None:
        """Delete the staged file; later calls do nothing."""
        self._file.close()

    def _no_room(self, error: OSError) -> StorageError:
        """The error for a full local disk."""
        where = tempfile.gettempdir()
        return StorageError(
            f"{self.path} cannot be staged in {where}: {error.strerror or error}; the whole file is "
            "stored there before it is sent: set TMPDIR to a place with room for the largest shard"
        )
