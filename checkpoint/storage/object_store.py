"""Implement the storage interface on an object store, through fsspec.

An object is absent or complete. A record is created by one small conditional PUT (`If-None-Match`), which
alone decides between writers. An ambiguous answer is resolved by reading back, because no two records are
equal. Shards have unique names. Nothing is inferred from listings, and none is cached.

Large files are sent in parts. Incomplete uploads are invisible but cost money until they are aborted: here
after a failed part, and at a takeover of the log those of a killed writer.

A store cannot overwrite a header at offset 0 of an object, so files are staged first. Staging needs local
space for the file (in the directory for temporary files) and a copy; nothing is visible before.
"""

from __future__ import annotations

import builtins
import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

from torchrelay.checkpoint.storage.base import (
    PRIVATE,
    Memory,
    ReadHandle,
    RetryTimeouts,
    SeparateReads,
    SingleWriter,
    persistently,
    refusal,
)
from torchrelay.checkpoint.storage.open import open_file_system, shown
from torchrelay.checkpoint.storage.work import share
from torchrelay.errors import StorageError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

PUT_IN_ONE_BYTES = 32 * 2**20
"""Up to this size a staged file is one PUT from memory; longer ones are sent in parts."""
CREATE_IN_ONE_BYTES = 4 * 2**20
"""Size that the clients of all stores here create in one request."""
_FLAT = frozenset({"s3", "s3a", "az", "abfs", "abfss", "gs", "gcs", "memory"})
"""Stores without directories."""
_CREATE_EXCLUSIVELY = _FLAT | {"sftp", "ssh"}
"""Protocols whose client creates small objects exclusively in one request, so that the server decides.

This is probed. Other clients check first and then write, which no probe can detect.
"""
_COLONS = _FLAT | {"sftp", "ssh", "adl"}
"""Stores that allow a colon in a name; for others it is percent-encoded."""
_IN_THIS_PROCESS = threading.Lock()
"""fsspec's memory file system checks before it creates; the lock keeps threads out in between."""


class ObjectStorage:
    """Everything below `root` of an fsspec file system. `url` is for messages and names.

    With `single_writer="external"` a name is only checked before it is created, because there is no other
    writer.
    """

    request_bytes = 1 << 20

    def __init__(
        self,
        system: Any,
        root: str,
        url: str,
        *,
        single_writer: SingleWriter = None,
        patience: RetryTimeouts | None = None,
    ) -> None:
        self.system, self.root, self.url = system, root.rstrip("/"), url.rstrip("/")
        self.single_writer: SingleWriter = single_writer
        self.patience = patience or RetryTimeouts()
        protocol = system.protocol
        self._protocols = frozenset((protocol,) if isinstance(protocol, str) else protocol)
        self._flat = bool(self._protocols & _FLAT)
        self._escapes = not self._protocols & _COLONS

    @classmethod
    def open(cls, url: str, what: str, single_writer: SingleWriter = None) -> Self:
        """The storage at a URL; sends no request. Raises UsageError, naming the URL as `what`."""
        return cls(*open_file_system(url, what), shown(url), single_writer=single_writer)

    @property
    def doubt(self) -> str | None:
        """Why a probe cannot verify exclusive creation here; None if it can."""
        if self._protocols & _CREATE_EXCLUSIVELY:
            return None
        return f"nothing is known of how {'/'.join(sorted(self._protocols))} creates a file exclusively"

    def _name(self, path: str) -> str:
        parts = path.split("/") if path else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise StorageError(f"{path!r} is not a path below {self.url}")
        if self._escapes:
            parts = [part.replace("%", "%25").replace(":", "%3A") for part in parts]
        return "/".join([self.root, *parts])

    def _decoded(self, part: str) -> str:
        return part.replace("%3A", ":").replace("%25", "%") if self._escapes else part

    def _try(self, verb: str, path: str, work: Callable[[], T], passing: type[Exception] = StorageError) -> T:
        """Do work with retries; the last error becomes a StorageError, except `passing`."""
        return self._try_once(verb, path, lambda: persistently(work, self.patience), passing)

    def _try_once(
        self, verb: str, path: str, work: Callable[[], T], passing: type[Exception] = StorageError
    ) -> T:
        try:
            return work()
        except (passing, StorageError):
            raise
        except Exception as error:
            raise refusal(f"{self.url}/{path}".rstrip("/"), verb, error) from error

    def open_exclusive(self, path: str) -> StagedFile:
        """Stage a new object. Its name is only checked to be free, because it contains a nonce."""
        if self.stat(path) is not None:
            raise self._taken(path)
        return StagedFile(f"{self.url}/{path}", partial(self._put_staged, path))

    def open_replacing(self, path: str) -> StagedFile:
        """Stage an object that replaces one of that name, if any, when it is complete."""
        return StagedFile(f"{self.url}/{path}", partial(self._put_staged, path))

    def put_file(self, path: str, file: IO[bytes], nbytes: int, *, create: bool = False) -> None:
        """Upload an open local file over an existing object, or, with `create`, only where none exists.

        Raises FileExistsError if one exists. For small files the store decides, if its client can request
        that (`doubt`). For larger ones the name is checked before, because some stores ignore conditions on
        large uploads. An object with exactly these bytes counts as ours.
        """
        if create and 0 < nbytes <= CREATE_IN_ONE_BYTES and not self.doubt and self.single_writer is None:
            file.seek(0)
            self.link_exclusive(path, file.read())
            return
        if create and self.stat(path) is not None:
            raise self._taken(path)
        self._put_staged(path, file, nbytes)

    def _taken(self, path: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, "the name is taken", f"{self.url}/{path}")

    def _put_staged(self, path: str, file: IO[bytes], nbytes: int) -> None:
        name = self._name(path)

        def put() -> None:
            self._make_parent(name)
            if nbytes <= PUT_IN_ONE_BYTES:
                file.seek(0)
                self.system.pipe_file(name, file.read())
            else:
                self.system.put_file(f"/proc/self/fd/{file.fileno()}", name)

        if nbytes > PUT_IN_ONE_BYTES and hasattr(self.system, "call_s3"):
            self._try_once(
                "write", path, lambda: put_in_parts(self.system, name, file, nbytes, self.patience)
            )
        else:
            self._try("write", path, put)
        found = self.stat(path)
        if found != nbytes:
            raise StorageError(f"{self.url}/{path} has {found} bytes after {nbytes} were sent: try again")

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Create by a conditional PUT, or find these bytes there: every creator puts a nonce into them."""
        if not data:
            raise StorageError(
                f"{self.url}/{path} would be empty: stores do not create empty files exclusively"
            )
        name = self._name(path)

        def create() -> None:
            try:
                with _IN_THIS_PROCESS if "memory" in self._protocols else nullcontext():
                    self._create(path, name, data)
            except Exception as error:
                # A creation that seemed to fail may be ours after all; stores have many error messages.
                try:
                    found = self.read_range(path, 0, len(data) + 1)
                except FileNotFoundError:
                    raise error from None
                if found != data:
                    raise self._taken(path) from error

        self._try("create", path, create, FileExistsError)

    def _create(self, path: str, name: str, data: bytes) -> None:
        """Create an object: by one conditional PUT, or after a check with an external single writer."""
        self._make_parent(name)
        if self.single_writer is None:
            self.system.pipe_file(name, data, mode="create")
            return
        if self.stat(path) is not None:
            raise self._taken(path)
        self.system.pipe_file(name, data)

    def replace(self, path: str, data: bytes) -> None:
        """Put over any existing object."""
        name = self._name(path)

        def put() -> None:
            self._make_parent(name)
            self.system.pipe_file(name, data)

        self._try("replace", path, put)

    def _make_parent(self, name: str) -> None:
        if not self._flat:
            self.system.makedirs(name.rpartition("/")[0], exist_ok=True)

    def mkdir(self, path: str) -> None:
        """Do nothing: objects need no directory."""
        self._name(path)

    def sync_dir(self, path: str) -> None:
        """Do nothing: acknowledged objects are durable."""

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """One ranged GET."""
        name = self._name(path)

        def read() -> bytes:
            if length > 0:
                try:
                    return bytes(self.system.cat_file(name, start=offset, end=offset + length))
                except OSError as error:
                    if error.errno != errno.EINVAL:  # no such range
                        raise
            size = self.stat(path)
            if size is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", f"{self.url}/{path}")
            if length > 0 and offset < size:
                raise StorageError(f"{self.url}/{path}: the store refused a range that exists: try again")
            return b""

        data = self._try("read", path, read, FileNotFoundError)
        if len(data) > max(0, length):
            raise StorageError(f"{self.url}/{path}: the store does not read ranges: choose another one")
        return data

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Read and copy."""
        data = self.read_range(path, offset, len(destination))
        destination[: len(data)] = data
        return len(data)

    def open_read(self, path: str) -> ReadHandle:
        """A handle that fills many destinations with one GET; opens nothing."""
        return _Reads(self, path)

    def stat(self, path: str) -> int | None:
        """The size that the store reports; None for a prefix of other names."""
        name = self._name(path)

        def look() -> int | None:
            try:
                return size_of(self.system, name)
            except FileNotFoundError:
                return None

        return self._try("look at", path, look)

    def delete(self, path: str) -> None:
        """Delete one object, or an empty directory if the store has directories."""
        name = self._name(path)

        def delete() -> None:
            try:
                if not self._flat and self.system.isdir(name):
                    found = [one.rstrip("/") for one in self.system.ls(name, detail=False)]
                    if all(one.rpartition("/")[2].startswith(PRIVATE) for one in found):
                        for one in found:
                            self.system.rm_file(one)
                    self.system.rmdir(name)
                else:
                    self.system.rm_file(name)
            except FileNotFoundError:
                return

        self._try("delete", path, delete)

    def list(self, path: str) -> list[str]:
        """Names, sorted."""
        return [name for name in self._list(path) if not name.startswith(PRIVATE)]

    def leftovers(self, path: str) -> builtins.list[str]:
        """Temporary files of SFTP clients, killed or still writing."""
        if self._flat:
            return []
        return [name for name in self._list(path) if name.startswith(PRIVATE)]

    def unfinished(self, path: str) -> builtins.list[tuple[str, str]]:
        """Multipart uploads below a path that are incomplete; see `Unfinished`."""
        if not hasattr(self.system, "call_s3"):
            return []
        bucket, key, _ = self.system.split_path(self._name(path))

        def look() -> builtins.list[tuple[str, str]]:  # at most 1000
            found = self.system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
            return [(f"{bucket}/{one['Key']}", one["UploadId"]) for one in found.get("Uploads", ())]

        return self._try("list uploads of", path, look)

    def give_up(self, upload: tuple[str, str]) -> None:
        """Abort a multipart upload."""
        bucket, key, _ = self.system.split_path(upload[0])

        def abort() -> None:
            with suppress(FileNotFoundError):
                self.system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload[1])

        self._try("abort an upload to", "", abort)

    def _list(self, path: str) -> builtins.list[str]:
        name = self._name(path)

        def look() -> builtins.list[str]:
            try:
                found = self.system.ls(name, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            # A store may list the directory itself, and memory:// a file.
            below = [one.rstrip("/") for one in found if one.rstrip("/").startswith(f"{name}/")]
            return sorted(self._decoded(one.rpartition("/")[2]) for one in below)

        return self._try("list", path, look)


class _Reads(SeparateReads):
    """Reads of one object; adjacent ranges share a request."""

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        views = [memoryview(one).cast("B") for one in destinations]
        data = memoryview(self._storage.read_range(self._path, offset, sum(map(len, views))))
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return at


def size_of(system: Any, name: str) -> int | None:
    """The size of a file; None for a directory. s3fs lists names below a missing one, too slowly."""
    if hasattr(system, "call_s3"):
        bucket, key, _ = system.split_path(name)
        return int(system.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"])
    found = system.info(name)
    return int(found["size"]) if found.get("type") == "file" else None


PART_BYTES = 16 << 20
PARTS_AT_A_TIME = 4
"""Together 64 MiB of memory."""
_MOST_PARTS = 10_000


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

    def send(mine: Iterator[int]) -> None:
        for number in mine:
            begin = (number - 1) * size
            length = min(size, nbytes - begin)
            data = os.pread(file.fileno(), length, begin)
            if len(data) != length:
                raise StorageError(f"the staged file ends at byte {begin + len(data)}: try again")
            tags[number] = ask("upload_part", UploadId=upload, PartNumber=number, Body=data)["ETag"]

    def complete() -> None:  # a repeated request fails if the first one succeeded
        parts = {"Parts": [{"PartNumber": number, "ETag": tags[number]} for number in numbers]}
        try:
            system.call_s3(
                "complete_multipart_upload", Bucket=bucket, Key=key, UploadId=upload, MultipartUpload=parts
            )
        except Exception as error:
            with suppress(Exception):
                if size_of(system, name) == nbytes:
                    return
            raise error

    try:
        share(send, numbers, PARTS_AT_A_TIME, name="torchrelay-parts")
        persistently(complete, patience)
    except BaseException:
        with suppress(Exception):
            system.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        raise


class StagedFile:
    """The write handle of an object. `sync_file` uploads it; closed before that, it never existed."""

    alignment = 0

    def __init__(self, path: str, put: Callable[[IO[bytes], int], None]) -> None:
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
        where = tempfile.gettempdir()
        return StorageError(
            f"{self.path} cannot be staged in {where}: {error.strerror or error}; the whole file is "
            "stored there before it is sent: set TMPDIR to a place with room for the largest shard"
        )
