"""From a path or URL to a storage, what users say of a local place before it, and counts of reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass as python_dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.storage.base import (
    Memory,
    ReadHandle,
    SingleWriter,
    Storage,
    WriteHandle,
    open_for_reading,
    worth_of_a_request,
)
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.urls import is_url, shown
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import local_directory

if TYPE_CHECKING:
    from torchrelay.checkpoint.storage.object_store import ObjectStorage


FILE = "file://"


def storage_of(
    where: str | os.PathLike[str], what: str, single_writer: SingleWriter = None
) -> LocalStorage | ObjectStorage:
    """The storage of a path or URL; touches nothing. Raises UsageError, naming it as `what`."""
    if is_remote(where):
        from torchrelay.checkpoint.storage.object_store import ObjectStorage

        return ObjectStorage.open(str(where), what, single_writer)
    path = where.removeprefix(FILE) if isinstance(where, str) else where
    return LocalStorage(local_directory(path, what), single_writer=single_writer)


def is_remote(where: object) -> bool:
    """Whether a place lies in a store."""
    return isinstance(where, str) and is_url(where) and not where.startswith(FILE)


def object_at(url: str, what: str) -> tuple[ObjectStorage, str]:
    """The storage of a URL's parent, and the name in it. Raises UsageError, naming the URL as `what`."""
    parent, _, name = url.rpartition("/")
    if not name or parent.endswith((":/", ":")):
        raise UsageError(f"{shown(url)!r} names no file: give one below a bucket or directory")
    from torchrelay.checkpoint.storage.object_store import ObjectStorage

    return ObjectStorage.open(parent, what), name


def joined(place: str, name: str) -> str:
    """A name below a place, of which the form is kept."""
    if is_url(place):
        return f"{place.rstrip('/')}/{name}"
    return os.path.join(place, name)  # noqa: PTH118 - as the user wrote it


class CountingStorage:
    """Passes every verb on to `storage`; `bytes_read` and `reads` say what reading has cost so far."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.url = storage.url
        self.bytes_read = 0
        self.reads = 0
        self._lock = threading.Lock()

    @property
    def request_bytes(self) -> int:
        """As of the storage itself."""
        return worth_of_a_request(self.storage)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read and count."""
        return self._counted(self.storage.read_range(path, offset, length))

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Read in place and count."""
        count = self.storage.read_into(path, offset, destination)
        self.count(count)
        return count

    def open_read(self, path: str) -> ReadHandle:
        """A handle whose reads are counted."""
        return _CountedReads(self, open_for_reading(self.storage, path))

    def _counted(self, data: bytes) -> bytes:
        self.count(len(data))
        return data

    def count(self, nbytes: int) -> None:
        """Note one read."""
        with self._lock:
            self.reads += 1
            self.bytes_read += nbytes

    def open_exclusive(self, path: str) -> WriteHandle:
        """Pass on."""
        return self.storage.open_exclusive(path)

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Pass on."""
        self.storage.link_exclusive(path, data)

    def replace(self, path: str, data: bytes) -> None:
        """Pass on."""
        self.storage.replace(path, data)

    def mkdir(self, path: str) -> None:
        """Pass on."""
        self.storage.mkdir(path)

    def sync_dir(self, path: str) -> None:
        """Pass on."""
        self.storage.sync_dir(path)

    def stat(self, path: str) -> int | None:
        """Pass on."""
        return self.storage.stat(path)

    def delete(self, path: str) -> None:
        """Pass on."""
        self.storage.delete(path)

    def list(self, path: str) -> list[str]:
        """Pass on."""
        return self.storage.list(path)


class _CountedReads:
    """An open file whose reads its storage counts."""

    def __init__(self, owner: CountingStorage, opening: AbstractContextManager[ReadHandle]) -> None:
        self._owner = owner
        self._opening = opening
        self._handle = opening.__enter__()

    def read_into(self, offset: int, destination: memoryview, *, direct: bool = False) -> int:
        """Read in place and count."""
        count = self._handle.read_into(offset, destination, direct=direct)
        self._owner.count(count)
        return count

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """Read in place and count."""
        count = self._handle.read_scattered(offset, destinations)
        self._owner.count(count)
        return count

    def close(self) -> None:
        """Pass on."""
        self._opening.__exit__(None, None, None)


NOTES = "tier.json"
"""The file of a near directory that says what it is near to."""


@python_dataclass(frozen=True)
class Tier:
    """A quick local directory before the place of the checkpoints (docs/tier.md).

    Saves are written to `near`, and acknowledged as `local`: they survive the death of the processes, not
    the loss of that disk. Behind the training they are sent to the place of the checkpoints, oldest first,
    and are `replicated` once its log has them. Hosts share the `near` directory, or have one each on disks of
    their own: then what is `local` needs all of these disks.

    `lag`: how many saved positions may be `local` only. A save beyond that waits at its boundary until one is
    replicated, and fails after `patience_secs` without; a save before a run leaves early does not wait.
    `drain_secs`: how long the end of a run waits until all is replicated; what is not goes up at the next
    start. `uploads`: files that are sent at once.

    Raises UsageError for anything but a path, whole numbers from 1, and seconds from 0.
    """

    near: str | os.PathLike[str]
    lag: int = 2
    patience_secs: float = 600.0
    drain_secs: float = 600.0
    uploads: int = 4
    directory: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("lag", "uploads"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise UsageError(f"Tier({name}={count!r:.80}): it is a whole number from 1")
        for name in ("patience_secs", "drain_secs"):
            secs = getattr(self, name)
            if isinstance(secs, bool) or not isinstance(secs, (int, float)) or not 0 <= secs < float("inf"):
                raise UsageError(f"Tier({name}={secs!r:.80}): it is a number of seconds from 0")
        object.__setattr__(self, "directory", Path(local_directory(self.near, "Tier(near=...)")))


def check_tier(given: object) -> Tier | None:
    """The option as users give it; UsageError for what it cannot be."""
    if given is None or isinstance(given, Tier):
        return given
    raise UsageError(f"tier is {given!r:.80}; give torchrelay.Tier(near='/local/directory')")
