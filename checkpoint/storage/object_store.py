"""Implement the storage interface on an object store, through fsspec.

An object is absent or complete. A record is created by one small conditional PUT (`If-None-Match`), which
alone decides between writers. An ambiguous answer is resolved by reading back, because no two records are
equal. Shards have unique names. Nothing is inferred from listings, and none is cached.
"""

from __future__ import annotations

import builtins
import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

from torchrelay.checkpoint.storage.base import PRIVATE, Memory, ReadHandle, SingleWriter
from torchrelay.checkpoint.storage.open import open_file_system, shown
from torchrelay.checkpoint.storage.transfers import (
    RetryTimeouts,
    StagedFile,
    give_up,
    persistently,
    put_in_parts,
    refusal,
    size_of,
    takes_parts,
    unfinished,
)
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
        self._escaped = "" if self._protocols & _COLONS else ":"

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

    # Names

    def _name(self, path: str) -> str:
        """Name of an object in the file system."""
        parts = path.split("/") if path else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise StorageError(f"{path!r} is not a path below {self.url}")
        return "/".join([self.root, *map(self._encoded, parts)])

    def _encoded(self, part: str) -> str:
        """A part of a name as the store takes it."""
        return part.replace("%", "%25").replace(":", "%3A") if self._escaped else part

    def _decoded(self, part: str) -> str:
        return part.replace("%3A", ":").replace("%25", "%") if self._escaped else part

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

    # Creating

    def open_exclusive(self, path: str) -> StagedFile:
        """Stage a new object. Its name is only checked to be free, because it contains a nonce."""
        if self.stat(path) is not None:
            raise FileExistsError(errno.EEXIST, "the name is taken", f"{self.url}/{path}")
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
            raise FileExistsError(errno.EEXIST, "the name is taken", f"{self.url}/{path}")
        self._put_staged(path, file, nbytes)

    def _put_staged(self, path: str, file: IO[bytes], nbytes: int) -> None:
        name = self._name(path)

        def put() -> None:
            self._make_parent(name)
            if nbytes <= PUT_IN_ONE_BYTES:
                file.seek(0)
                self.system.pipe_file(name, file.read())
            else:
                self.system.put_file(f"/proc/self/fd/{file.fileno()}", name)

        if nbytes > PUT_IN_ONE_BYTES and takes_parts(self.system):
            self._try_once(
                "write", path, lambda: put_in_parts(self.system, name, file, nbytes, self.patience)
            )
        else:
            self._try("write", path, put)
        found = self.stat(path)
        if found != nbytes:
            raise StorageError(f"{self.url}/{path} has {found} bytes after {nbytes} were sent: try again")

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Create by a conditional PUT; reads the object back if the answer was lost.

        An object with these bytes counts as ours, so every creator must put a nonce into them.
        """
        if not data:
            raise StorageError(
                f"{self.url}/{path} would be empty: stores do not create empty files exclusively"
            )
        name = self._name(path)

        def create() -> None:
            try:
                with self._alone():
                    self._create(path, name, data)
            except Exception as error:
                self._resolve(path, data, error)

        self._try("create", path, create, FileExistsError)

    def _create(self, path: str, name: str, data: bytes) -> None:
        """Create an object: by one conditional PUT, or after a check with an external single writer."""
        self._make_parent(name)
        if self.single_writer is None:
            self.system.pipe_file(name, data, mode="create")
            return
        if self.stat(path) is not None:
            raise FileExistsError(errno.EEXIST, "the name is taken", f"{self.url}/{path}")
        self.system.pipe_file(name, data)

    def _resolve(self, path: str, data: bytes, error: Exception) -> None:
        """Return if a creation that seemed to fail was ours after all; stores have many error messages."""
        try:
            found = self.read_range(path, 0, len(data) + 1)
        except FileNotFoundError:
            raise error from None
        if found != data:
            raise FileExistsError(errno.EEXIST, "the name is taken", f"{self.url}/{path}") from error

    def _alone(self) -> AbstractContextManager[object]:
        """A lock for fsspec's memory file system, which is not atomic."""
        return _IN_THIS_PROCESS if "memory" in self._protocols else nullcontext()

    def replace(self, path: str, data: bytes) -> None:
        """Put over any existing object."""
        name = self._name(path)

        def put() -> None:
            self._make_parent(name)
            self.system.pipe_file(name, data)

        self._try("replace", path, put)

    def _make_parent(self, name: str) -> None:
        """Create the parent directory, if the store has directories."""
        if not self._flat:
            self.system.makedirs(name.rpartition("/")[0], exist_ok=True)

    def mkdir(self, path: str) -> None:
        """Do nothing: objects need no directory."""
        self._name(path)

    def sync_dir(self, path: str) -> None:
        """Do nothing: acknowledged objects are durable."""

    # Reading

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
            return self._nothing_at(path, offset, length)

        data = self._try("read", path, read, FileNotFoundError)
        if len(data) > max(0, length):
            raise StorageError(f"{self.url}/{path}: the store does not read ranges: choose another one")
        return data

    def _nothing_at(self, path: str, offset: int, length: int) -> bytes:
        """Return no bytes, if the file has none at `offset` or none are wanted."""
        size = self.stat(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", f"{self.url}/{path}")
        if length > 0 and offset < size:
            raise StorageError(f"{self.url}/{path}: the store refused a range that exists: try again")
        return b""

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
                    self._remove_empty(name)
                else:
                    self.system.rm_file(name)
            except FileNotFoundError:
                return

        self._try("delete", path, delete)

    def _remove_empty(self, name: str) -> None:
        found = [one.rstrip("/") for one in self.system.ls(name, detail=False)]
        if all(one.rpartition("/")[2].startswith(PRIVATE) for one in found):
            for one in found:
                self.system.rm_file(one)
        self.system.rmdir(name)

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
        if not takes_parts(self.system):
            return []
        return self._try("list uploads of", path, lambda: unfinished(self.system, self._name(path)))

    def give_up(self, upload: tuple[str, str]) -> None:
        """Abort a multipart upload."""
        self._try("abort an upload to", "", lambda: give_up(self.system, *upload))

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


class _Reads:
    """Reads of one object; adjacent ranges share a request."""

    def __init__(self, storage: ObjectStorage, path: str) -> None:
        self._storage, self._path = storage, path

    def read_into(self, offset: int, destination: memoryview, *, direct: bool = False) -> int:
        """One ranged GET."""
        return self._storage.read_into(self._path, offset, destination)

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """Fill all destinations with one ranged GET."""
        views = [memoryview(one).cast("B") for one in destinations]
        data = memoryview(self._storage.read_range(self._path, offset, sum(map(len, views))))
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return at

    def close(self) -> None:
        """Do nothing."""
