"""Deleting what nothing needs: retired tries, and tries that never became real.

Order: `retire` is in the log, durably; only then files go. A deletion that was interrupted is found
in the log's list of retirements and finished. Orphans are judged by the log alone, never by age.
"""

from __future__ import annotations

from collections.abc import Collection

from torchrelay.checkpoint.format.log_state import Retirement
from torchrelay.checkpoint.format.manifest.schema import DATA, try_directory
from torchrelay.checkpoint.format.names import TRY, parse_shard_file_name
from torchrelay.checkpoint.log.log_writer import LogWriter
from torchrelay.checkpoint.log.retention import RetentionPolicy, to_retire
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, StorageError
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
