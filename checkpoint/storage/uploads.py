"""Uploads of new objects: staged in a local file, large ones to S3 in parts.

What was begun and not completed is invisible, and is paid for until somebody gives it up: this module does
when a part fails, and whoever takes the log over does so with what a killed writer left.

A store cannot write the header of a shard last, at offset 0, into an object that exists. Staging costs
local space for the file (in the directory for temporary files) and a copy; nothing is visible before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any, TypeVar

from torchrelay.checkpoint.storage.retry import Patience, persistently, size_of
from torchrelay.checkpoint.storage.threads import share
from torchrelay.errors import StorageError

T = TypeVar("T")
PART_BYTES = 16 << 20
PARTS_AT_A_TIME = 4
"""Together 64 MiB of memory."""
_MOST_PARTS = 10_000


def takes_parts(system: Any) -> bool:
    """Whether a client speaks S3."""
    return hasattr(system, "call_s3")


def put_in_parts(system: Any, name: str, file: IO[bytes], nbytes: int, patience: Patience) -> None:
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
