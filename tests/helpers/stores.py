"""Object stores for tests: in memory, with faults by schedule, and such that lie about conditions."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from torchrelay.checkpoint.storage.base import RetryTimeouts
from torchrelay.checkpoint.storage.object_store import ObjectStorage

QUICK = RetryTimeouts(deadline_secs=30.0, first_pause_secs=0.0, longest_pause_secs=0.0)


class OverloadedError(Exception):
    """What a client below fsspec raises that is no OSError; as botocore's, it has the answer in it."""

    def __init__(self) -> None:
        super().__init__("503 Slow Down")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": 503}}


class Faulty(MemoryFileSystem):
    """A store of its own.

    `faults` says what happens at each call: "503" or "reset" before it is done, "lost" after it, "" nothing;
    `fired` counts them by kind.
    """

    cachable = False

    def __init__(self, faults: Iterator[str] | None = None) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.faults, self.fired, self.calls = (
            faults or iter(()),
            dict.fromkeys(("503", "reset", "lost"), 0),
            0,
        )

    def _call(self, work: Callable[[], Any]) -> Any:
        kind = next(self.faults, "")
        self.calls += 1
        if kind:
            self.fired[kind] += 1
        if kind == "503":
            raise OverloadedError
        if kind == "reset":
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        answer = work()
        if kind == "lost":
            raise TimeoutError("the answer was lost")
        return answer

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        return self._call(lambda: super(Faulty, self).pipe_file(path, value, mode=mode, **kwargs))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> Any:
        return self._call(lambda: super(Faulty, self).put_file(lpath, rpath, **kwargs))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        return self._call(lambda: super(Faulty, self).cat_file(path, start=start, end=end, **kwargs))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._call(lambda: super(Faulty, self).info(path, **kwargs))

    def rm_file(self, path: str) -> Any:
        return self._call(lambda: super(Faulty, self).rm_file(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self._call(lambda: super(Faulty, self).ls(path, detail, **kwargs))


class Refusing(Faulty):
    """Knows no conditions and says so, as Swift does."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        if mode == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        return super().pipe_file(path, value, **kwargs)


class Liar(Faulty):
    """Ignores conditions: a second creation replaces the first, and is answered with success."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        return super().pipe_file(path, value, **kwargs)


class DoubleLiar(Liar):
    """Replaces what is there, and then says that the name was taken."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        taken = mode == "create" and self.exists(path)
        super().pipe_file(path, value, **kwargs)
        if taken:
            raise FileExistsError(path)


class Terse(Faulty):
    """Keeps conditions, but refuses in other words than fsspec's, as Ceph does."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        try:
            return super().pipe_file(path, value, mode=mode, **kwargs)
        except FileExistsError:
            raise OSError(errno.EINVAL, "Unknown") from None


def store_of(system: Any, **options: Any) -> ObjectStorage:
    """The storage at a place of its own in a file system."""
    place = f"/bucket/{secrets.token_hex(4)}/job"
    return ObjectStorage(
        system, place, f"memory:/{place}", patience=options.pop("patience", QUICK), **options
    )
