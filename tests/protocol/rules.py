"""The rules of the protocol, each of which can be taken out: one function, or one promise of the storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import PropertyMock, patch

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.position import CommittedPosition, Key, State
from torchrelay.checkpoint.log import chain, lease, retention
from torchrelay.checkpoint.log import state as changes
from torchrelay.checkpoint.log.chain import Base, Tail
from torchrelay.checkpoint.log.record import BaseRef, Record, encode_base
from torchrelay.checkpoint.log.retention import Keeping, delete_attempt
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save import commit, pipeline
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import StorageError

Without = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class CrashRule:
    """A rule without which some crash of a story breaks a promise."""

    story: str
    missing: str = ""
    without: Without | None = None


@dataclass(frozen=True)
class OrderRule:
    """A rule without which some order of operations breaks a promise."""

    meeting: str
    without: Without | None = None
    exclusive: bool = True


def _deleted_first(
    self: Keeping, writer: LogWriter, suspects: Collection[Key] = (), needed: Collection[str] = ()
) -> None:
    retirements = tuple(self.chosen(writer.view, suspects, needed))
    for one in retirements:
        delete_attempt(writer.storage, one)
    writer.retire(retirements)


class _Later:
    """A storage that creates files only when it is told to."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._late: list[Callable[[], object]] = []

    def open_exclusive(self, path: str) -> Any:
        later = self

        class Handle:
            def write_at(self, offset: int, data: memoryview) -> None:
                later._late.append(lambda: later._write(path, bytes(data)))

            def sync_file(self) -> None: ...

            def close(self) -> None: ...

        return Handle()

    def sync_dir(self, path: str) -> None:
        self._late.append(lambda: self._storage.sync_dir(path))

    def _write(self, path: str, data: bytes) -> None:
        handle = self._storage.open_exclusive(path)
        handle.write_at(0, memoryview(data))
        handle.sync_file()
        handle.close()

    def now(self) -> None:
        for work in self._late:
            work()


def _record_first(job: pipeline.SaveJob, plan: Any, attempt_name: str, rows: Any) -> None:
    later = _Later(job.storage)
    entry = commit._write_manifest(replace(job, storage=later), plan, attempt_name, rows)
    job.commit(entry)
    later.now()


def _base_unsynced(storage: Storage, entries: tuple[CommittedPosition, ...]) -> Base:
    data = encode_base(entries)
    ref = BaseRef(f"base-{chain.secrets.token_hex(8)}.json", len(data), canonical_json.sha256(data))
    storage.link_exclusive(ref.path, data)
    return Base(ref, {entry.key: entry for entry in entries})


_advance = chain.advance
"""What the two below stand for while they are in its place."""


def _seen_by_none(storage: Storage, tail: Tail) -> tuple[Tail, Record | None]:
    return _advance(storage, tail)[0], None


def _unsynced(storage: Any, tail: Tail) -> tuple[Tail, Record | None]:
    found = _advance(storage, tail)
    storage.deaf = True
    return found


def _always_ours(storage: Storage, slot: int, data: bytes) -> bool:
    try:
        storage.link_exclusive(chain.slot_path(slot), data)
    except (FileExistsError, StorageError):
        return True
    return True


@contextmanager
def _unprotected() -> Iterator[None]:
    """One function, where it is imported."""

    def marked_alone(state: State) -> frozenset[Key]:
        return state.marked

    with ExitStack() as stack:
        for module in (changes, retention):
            stack.enter_context(patch.object(module, "protected", marked_alone))
        yield


def _own_tries() -> AbstractContextManager[object]:
    own = property(lambda self: frozenset(entry.attempt_name for entry in self.entries))
    return patch.object(State, "tries", own)


def _no_marks() -> AbstractContextManager[object]:
    return patch.object(State, "marked", PropertyMock(return_value=frozenset()))


CRASH_RULES = {
    "a record is synced before it gets its name": CrashRule("plain", "link sync"),
    "a shard is synced before it is reported": CrashRule("plain", "file sync .safetensors"),
    "the manifest is synced before the record": CrashRule("plain", "file sync manifest.json"),
    "the directory of a try is synced before the record": CrashRule("plain", "dir sync try"),
    "the name of a try is synced before the record": CrashRule("plain", "dir sync data"),
    "the log is synced before the acknowledgement": CrashRule("plain", "dir sync log"),
    "job.json is synced before the log": CrashRule("plain", "dir sync root"),
    "the manifest is written before the record": CrashRule(
        "plain", without=lambda: patch.object(pipeline, "commit", _record_first)
    ),
    "retire is said before files are deleted": CrashRule(
        "plain", without=lambda: patch.object(Keeping, "retire", _deleted_first)
    ),
    "a base file is synced before the record that refers to it": CrashRule(
        "long", without=lambda: patch.object(chain, "_write_base", _base_unsynced)
    ),
    "a taker syncs the log before it stands on it": CrashRule(
        "restarted", without=lambda: patch.object(lease, "LOG", lease.DATA)
    ),
    "a try stays as long as an entry refers to it": CrashRule("in_mid_epoch", without=_own_tries),
    "the newest epoch is never retired": CrashRule("greedy", without=_unprotected),
    "a tagged or pinned epoch is never retired": CrashRule("marked", without=_no_marks),
}

ORDER_RULES = {
    "a slot is created exclusively": OrderRule("two writers, all orders", exclusive=False),
    "whoever meets a higher generation stops": OrderRule(
        "two writers, all orders", lambda: patch.object(chain, "advance", _seen_by_none)
    ),
    "what lies in a taken slot is read before it is called ours": OrderRule(
        "two writers, all orders", lambda: patch.object(chain, "_create", _always_ours)
    ),
    "a slot that was thinned away meanwhile is void": OrderRule(
        "a paused writer, a thinned log",
        lambda: patch.object(chain, "_is_void", lambda *_: False),
    ),
    "what is met on the way is synced before it is stood on": OrderRule(
        "a writer, two guests", lambda: patch.object(chain, "advance", _unsynced)
    ),
}
