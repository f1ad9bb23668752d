"""A storage in memory that behaves like an object store and loses answers."""

from __future__ import annotations

from dataclasses import dataclass

from weak_disk import Content, WeakDisk, WeakHandle

from torchrelay.errors import StorageError


@dataclass
class ObjectStore(WeakDisk):
    """Objects appear whole or not at all and stay; directories are none; a create is conditional.

    The answer of the `lose`-th change (from 0) is lost: it happened, and the caller gets an error.
    """

    lose: frozenset[int] = frozenset()
    changes: int = 0

    def open_exclusive(self, path: str) -> WeakHandle:
        if path in self.seen:
            raise FileExistsError(path)
        return _Upload(self, path, self._file(b"", b""))

    def link_exclusive(self, path: str, data: bytes) -> None:
        with self.lock:
            if path in self.seen and "exclusive" not in self.missing:
                raise FileExistsError(path)
            self._put(path, data)
        self._did("create", path)

    def replace(self, path: str, data: bytes) -> None:
        self._put(path, data)
        self._did("put", path)

    def mkdir(self, path: str) -> None:
        """There are no directories."""

    def sync_dir(self, path: str) -> None:
        """What was answered is durable."""

    def delete(self, path: str) -> None:
        if self.seen.pop(path, None) is not None:
            self.safe.pop(path, None)
            self._did("delete", path)

    def list(self, path: str) -> list[str]:
        below = [name[len(path) + 1 :] for name in self.seen if name.startswith(f"{path}/")]
        return sorted({name.split("/")[0] for name in below})

    def _put(self, path: str, data: bytes) -> None:
        self.seen[path] = self.safe[path] = self._file(bytes(data), bytes(data))

    def _did(self, verb: str, path: str) -> None:
        super()._did(verb, path)
        self.changes += 1
        if self.changes - 1 in self.lose:
            raise StorageError(f"{verb} {path}: the answer was lost")


class _Upload(WeakHandle):
    """An object that appears when it is complete."""

    def write_at(self, offset: int, data: memoryview) -> None:
        one, new = self.disk.contents[self.file], bytes(data)
        seen = one.seen[:offset].ljust(offset, b"\0") + new + one.seen[offset + len(new) :]
        self.disk.contents[self.file] = Content(seen, seen)

    def sync_file(self) -> None:
        if self.path not in self.disk.seen:
            self.disk.seen[self.path] = self.disk.safe[self.path] = self.file
            self.disk._did("put", self.path)
