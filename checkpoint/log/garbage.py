"""Files that nothing refers to any more, and their deletion in the background.

Order: `retire` is in the log, durably; only then files go. A deletion that was interrupted is found
in the log's list of retirements and finished. Orphans are judged by the log alone, never by age.

Unlinking takes longer the more a file holds. Who asks does not wait; who needs the space, and who lets go
of the log, does. A process that dies in between leaves files that the log lists as retired or does not
know, and the next writer's sweep finds them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection

from torchrelay.checkpoint.format.manifest.position import Retirement
from torchrelay.checkpoint.format.manifest.schema import DATA, try_directory
from torchrelay.checkpoint.format.names import TRY, parse_shard_file_name
from torchrelay.checkpoint.log.retention import RetentionPolicy, to_retire
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, StorageError
from torchrelay.jobs import runtime
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Swept:
    """What a sweep did."""

    retired: tuple[Retirement, ...] = ()
    deleted: tuple[Retirement, ...] = ()
    orphans: tuple[str, ...] = ()


def sweep(writer: LogWriter, policy: RetentionPolicy, in_flight: Collection[str] = ()) -> Swept:
    """Retire by policy, then delete what is retired and what older generations left unfinished.

    Raises FencedError, and StorageError when a deletion failed: the next sweep goes on with it.
    """
    retired = writer.retire(lambda view: to_retire(view, policy, in_flight))
    return Swept(retired, *delete_left(writer))


def delete_left(writer: LogWriter) -> tuple[tuple[Retirement, ...], tuple[str, ...]]:
    """Delete what nothing needs, by the log as it is: what is retired, and orphans. Raises StorageError."""
    return delete_retired(writer), delete_orphans(writer)


def is_left(writer: LogWriter) -> bool:
    """Whether there may be anything to delete. Asks no storage."""
    return bool(writer.undeleted or (writer.certain and writer.older_tries - writer.view.state.tries))


def delete_retired(writer: LogWriter) -> tuple[Retirement, ...]:
    """Finish the deletion of everything that the log lists as retired."""
    retiring = writer.undeleted
    for one in retiring:
        delete_try(writer.storage, one)
    if retiring:
        writer.storage.sync_dir(DATA)
        writer.forget(retiring)
    return retiring


def delete_orphans(writer: LogWriter) -> tuple[str, ...]:
    """Delete tries that lay there before our takeover and that the log does not know.

    Their generations are older than ours, so they can never be committed. Nothing is deleted while
    damage hides a part of the log: such a try may be a committed one.
    """
    if not writer.certain:
        return ()
    view = writer.view
    known = view.state.tries | {one.try_name for one in view.retiring}
    orphans = tuple(sorted(name for name in writer.older_tries - known if TRY.fullmatch(name)))
    failed: dict[str, StorageError] = {}
    for name in orphans:
        try:
            delete_try(writer.storage, Retirement(name))
        except StorageError as error:  # one that cannot go must not keep the others
            failed[name] = error
    if orphans:
        writer.storage.sync_dir(DATA)
    writer.older_tries = frozenset(failed)
    for failure in failed.values():
        raise failure
    return orphans


def _group_of(file_name: str) -> str | None:
    """The group of a shard file; None for a manifest, stats or anything else."""
    try:
        return parse_shard_file_name(file_name).group
    except DamagedError:
        return None


def files_of(storage: Storage, one: Retirement) -> tuple[str, ...]:
    """The files that a retirement deletes, as they lie there now."""
    directory = try_directory(one.try_name)
    names = storage.list(directory)
    return tuple(
        f"{directory}/{name}" for name in names if one.groups is None or _group_of(name) in one.groups
    )


def delete_try(storage: Storage, one: Retirement) -> None:
    """Delete the files of a retirement. Raises StorageError."""
    for path in files_of(storage, one):
        storage.delete(path)
    if one.groups is None:
        storage.delete(try_directory(one.try_name))


IDLE_SECS = 60.0
"""How long the thread waits for more to do before it ends."""
PATIENCE_SECS = 300.0
"""How long is waited for deletions at most: less than the other processes wait for this one."""


class Deletions:
    """Works off what was asked for, one after the other; keeps failures until somebody takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[tuple[str, Callable[[], object]]] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._failed: list[str] = []

    def ask(self, what: str, work: Callable[[], object]) -> None:
        """Run `work` in the thread; where it raises, `what` and the reason are kept as a failure."""
        with self._changed:
            self._asked.append((what, work))
            self._changed.notify_all()
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="torchrelay deletions", daemon=True)
            try:
                self._thread.start()
                return
            except RuntimeError:  # no more threads in this process
                self._thread = None
        self._work_off()

    def wait(self, patience_secs: float = PATIENCE_SECS) -> bool:
        """Return when all that was asked for is done; False if that takes longer."""
        with runtime.waiting(), self._changed:
            return self._changed.wait_for(lambda: not self._asked and not self._busy, patience_secs)

    def take_failures(self) -> list[str]:
        """What could not be done since the last time, for people."""
        with self._changed:
            taken, self._failed = self._failed, []
        return taken

    def _run(self) -> None:
        while True:
            runtime.behind()
            self._work_off()
            with self._changed:
                if not self._changed.wait_for(lambda: self._asked, IDLE_SECS):
                    self._thread = None
                    return

    def _work_off(self) -> None:
        while True:
            with self._changed:
                self._busy = bool(self._asked)
                if not self._asked:
                    self._changed.notify_all()
                    return
                what, work = self._asked.popleft()
            try:
                work()
            except Exception as error:
                with self._changed:
                    self._failed.append(f"{what}: {error}")
