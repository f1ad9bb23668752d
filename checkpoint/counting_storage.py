"""A storage that counts what is read from another one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torchrelay.checkpoint.storage import (
    Memory,
    ReadHandle,
    Storage,
    WriteHandle,
    open_for_reading,
    worth_of_a_request,
)


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
