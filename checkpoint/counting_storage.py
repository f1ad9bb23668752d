"""A storage that counts what is read from another one."""

from __future__ import annotations

import threading

from torchrelay.checkpoint.storage import Storage, WriteHandle


class CountingStorage:
    """Passes every verb on to `storage`; `bytes_read` and `reads` say what reading has cost so far."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.url = storage.url
        self.bytes_read = 0
        self.reads = 0
        self._lock = threading.Lock()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read and count."""
        return self._counted(self.storage.read_range(path, offset, length))

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Read in place and count."""
        count = self.storage.read_into(path, offset, destination)
        self._count(count)
        return count

    def _counted(self, data: bytes) -> bytes:
        self._count(len(data))
        return data

    def _count(self, nbytes: int) -> None:
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
