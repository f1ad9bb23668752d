"""What the tests of the log share: a storage in memory with faults by schedule, and short makers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from threading import RLock

from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.retention import Keeping, delete_left
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.errors import StorageError


def sweep(writer: LogWriter, keeping: Keeping):
    """Retire by these rules and delete: what was retired, what was deleted, and the orphans."""
    return writer.retire(keeping.chosen), *delete_left(writer)


class CrashError(BaseException):
    """The process ends here; nothing may catch it."""


@dataclass
class Fault:
    """At the `at`-th changing verb: crash `before` or `after` it, or lose its `answer`."""

    at: int
    how: str
    fired: bool = False


@dataclass
class MemoryStorage:
    """The seam on a dict. `files` is what processes see, `durable` what a power cut leaves."""

    url: str = "memory://runs/job"
    files: dict[str, bytes] = field(default_factory=dict)
    durable: dict[str, bytes] = field(default_factory=dict)
    fault: Fault | None = None
    changes: int = 0
    reads: list[str] = field(default_factory=list)
    stats: int = 0
    lock: RLock = field(default_factory=RLock)

    def _changing(self, work):
        with self.lock:
            index, fault = self.changes, self.fault
            self.changes += 1
            if fault is None or fault.fired or index != fault.at:
                return work()
            fault.fired = True
            if fault.how == "before":
                raise CrashError(index)
            work()
            raise CrashError(index) if fault.how == "after" else StorageError("the answer was lost")

    def open_exclusive(self, path):
        raise NotImplementedError

    def link_exclusive(self, path, data):
        def work():
            if path in self.files:
                raise FileExistsError(path)
            self.files[path] = bytes(data)

        self._changing(work)

    def replace(self, path, data):
        self._changing(lambda: self.files.__setitem__(path, bytes(data)))

    def mkdir(self, path):
        self._changing(lambda: None)

    def sync_dir(self, path):
        def work():
            inside = [name for name in {*self.files, *self.durable} if name.rpartition("/")[0] == path]
            for name in inside:
                if name in self.files:
                    self.durable[name] = self.files[name]
                else:
                    del self.durable[name]

        self._changing(work)

    def read_range(self, path, offset, length):
        with self.lock:
            self.reads.append(path)
            if path not in self.files:
                raise FileNotFoundError(path)
            return self.files[path][offset : offset + length]

    def read_into(self, path, offset, destination):
        data = self.read_range(path, offset, len(destination))
        destination[: len(data)] = data
        return len(data)

    def stat(self, path):
        with self.lock:
            self.stats += 1
            return len(self.files[path]) if path in self.files else None

    def delete(self, path):
        self._changing(lambda: self.files.pop(path, None))

    def list(self, path):
        with self.lock:
            below = [name[len(path) + 1 :] for name in self.files if name.startswith(f"{path}/")]
            return sorted({name.split("/")[0] for name in below})

    def copy(self, *, power_cut=False):
        """The storage as the next process finds it."""
        files = dict(self.durable if power_cut else self.files)
        return MemoryStorage(self.url, files, dict(files))


def entry(epoch, *, step=0, branch=0, nonce=None, needs=(), groups=("main", "optim")):
    position = Position(epoch, step)
    name = position.directory(nonce or f"{branch:02x}{step % 256:02x}{epoch % 256:02x}")
    return CommittedPosition(branch, position, name, 100 + epoch, f"{epoch:064x}", needs, groups)


def take(storage, **options):
    """A writer whose counter stands still, so that schedules stay exact."""
    return LogWriter.take(
        storage, "job", patience_secs=options.pop("patience_secs", 0.05), period_secs=3600.0, **options
    )


def run_of(epochs, storage=None):
    """A released log in memory with these epochs."""
    storage = storage or MemoryStorage()
    writer = take(storage)
    for epoch in epochs:
        writer.commit(entry(epoch))
    writer.release()
    return storage


def kinds_of(storage, slot):
    """What the records up to a slot do, read from any storage."""
    raw = (storage.read_range(slot_path(one), 0, 1 << 20) for one in range(slot + 1))
    return [json.loads(data)["record"]["kind"] for data in raw]
