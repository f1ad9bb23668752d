"""The calls of ObjectStorage into its fsspec file system, counted; one of them is struck.

That is below what ObjectStorage does about stores: repeating, looking what became of a lost answer.
An object is taken to be absent or whole, as stores promise: nothing is struck in the middle of a call.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.chaos.faults import Fault, fault_of
from torchrelay.checkpoint.storage.base import RetryTimeouts
from torchrelay.checkpoint.storage.object_store import ObjectStorage

_PATIENCE = RetryTimeouts(deadline_secs=0.3, first_pause_secs=0.01, longest_pause_secs=0.05)
"""A lasting error is believed after a moment: waiting longer would find nothing else."""
_STALL_SECS = 0.05


class StruckFileSystem:
    """Passes the verbs of an fsspec file system on, for the paths below `root`.

    Each call is a line in the file `log`, in the form that `calls` reads; the call that a fault happened to
    is written to `log` with `.struck` behind it, before it happens.
    """

    def __init__(self, system: Any, root: str, fault: Fault | None, log: Path) -> None:
        self.protocol = system.protocol
        self._system, self._root, self._fault = system, root, fault
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._told = Path(f"{log}.struck")
        self._lock = threading.Lock()
        self._count, self._sort = 0, ""

    def pipe_file(self, name: str, data: bytes, mode: str = "overwrite") -> Any:
        """Counted as `create` where another object of the name must not be there, else as `write`."""
        more = {"mode": mode} if mode != "overwrite" else {}
        kind = "create" if more else "write"
        return self._call(kind, name, lambda: self._system.pipe_file(name, data, **more))

    def put_file(self, local: str, name: str) -> Any:
        """Counted as `write`."""
        return self._call("write", name, lambda: self._system.put_file(local, name))

    def cat_file(self, name: str, start: int | None = None, end: int | None = None) -> Any:
        """Counted as `read`."""
        return self._call("read", name, lambda: self._system.cat_file(name, start=start, end=end))

    def info(self, name: str) -> Any:
        """Counted as `look`."""
        return self._call("look", name, lambda: self._system.info(name))

    def isdir(self, name: str) -> Any:
        """Counted as `look`."""
        return self._call("look", name, lambda: self._system.isdir(name))

    def ls(self, name: str, detail: bool = True) -> Any:
        """Counted as `list`."""
        return self._call("list", name, lambda: self._system.ls(name, detail=detail))

    def rm_file(self, name: str) -> Any:
        """Counted as `unlink`."""
        return self._call("unlink", name, lambda: self._system.rm_file(name))

    def rmdir(self, name: str) -> Any:
        """Counted as `rmdir`."""
        return self._call("rmdir", name, lambda: self._system.rmdir(name))

    def makedirs(self, name: str, exist_ok: bool = False) -> Any:
        """Counted as `mkdir`."""
        return self._call("mkdir", name, lambda: self._system.makedirs(name, exist_ok=exist_ok))

    def _call(self, kind: str, name: str, work: Callable[[], Any]) -> Any:
        fault = self._fault_of_this(kind, name)
        if fault is None:
            return work()
        if fault.what in ("short", "stale"):
            return _less(work())
        if fault.when == "after":
            with suppress(Exception):  # whatever the answer is, nobody gets it
                work()
        _happen(fault, name)
        return work()

    def _fault_of_this(self, kind: str, name: str) -> Fault | None:
        """Count a call; the fault, where it happens to this one."""
        path = name[len(self._root) :].lstrip("/")
        with self._lock:
            self._count += 1
            os.write(self._log, f"{self._count} {os.getpid()} 0 {kind} 0 0 {path}\n".encode())
            if self._fault is None:
                return None
            first = self._count == self._fault.at
            if first:
                self._sort = kind
                self._told.write_text(f"{kind} {path}")
            again = self._fault.lasting and self._sort == kind
            return self._fault if first or again else None


def _happen(fault: Fault, name: str) -> None:
    if fault.what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.what == "stall":
        time.sleep(_STALL_SECS)
    else:
        raise OSError(fault.errno, os.strerror(fault.errno), name)


def _less(answer: Any) -> Any:
    """Half of the bytes, or a listing without any name; other answers as they are."""
    if isinstance(answer, bytes):
        return answer[: len(answer) // 2]
    return [] if isinstance(answer, list) else answer


def strike_calls(storage: object, fault: str, log: str) -> None:
    """From now on count the calls of a storage; `fault` as `str` of one, or nothing."""
    if not isinstance(storage, ObjectStorage):
        raise TypeError(f"{storage!r} makes no calls to a store")
    storage.system = StruckFileSystem(
        storage.system, storage.root, fault_of(fault) if fault else None, Path(log)
    )
    storage.patience = _PATIENCE
