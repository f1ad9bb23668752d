"""Putting a checkpoint directory in order: what is derived is made again, what was to go goes.

Only the owner of the log deletes. What lay there before our takeover, and what no record refers to after
it, can never be committed by anybody any more; so nothing that is in flight is ever touched.
"""

from __future__ import annotations

from torchrelay.checkpoint.log.garbage import delete_orphans, delete_retired
from torchrelay.checkpoint.log.lease import PATIENCE_SECS
from torchrelay.checkpoint.log.reader import open_log
from torchrelay.checkpoint.log.record import LOG
from torchrelay.checkpoint.log.state import restore
from torchrelay.checkpoint.log.tiered_storage import refuse_part
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.repair.inventory import Finding, Inventory, take_inventory
from torchrelay.checkpoint.storage.base import Storage, check_exclusion
from torchrelay.records import dataclass

_OWN_FILES = ("temporary", "unused base")


@dataclass(frozen=True)
class Repaired:
    """What was found before, and what of it is left."""

    before: Inventory
    after: Inventory

    @property
    def done(self) -> tuple[Finding, ...]:
        """What is in order now."""
        left = {(one.kind, one.path) for one in self.after.findings}
        return tuple(one for one in self.before.findings if (one.kind, one.path) not in left)


def repair(storage: Storage, *, delete: bool = False, patience_secs: float = PATIENCE_SECS) -> Repaired:
    """Mend what can be mended; with `delete` also remove what no record refers to.

    Takes the log over, unless there is nothing to do for which that is needed: DirectoryInUseError
    where its writer lives, UsageError where two writers could not be told apart, and nothing was changed but
    base files, which come back byte for byte. Raises DamagedError for a log that cannot be trusted,
    StorageError for what cannot be read or written.
    """
    before = take_inventory(storage)
    for lost in before.lost:
        if lost.data is not None:
            restore(storage, lost)
    found = take_inventory(storage) if before.view is None else before
    acting = {"mend", "delete"} if delete else {"mend"}
    if any(one.does in acting and one.kind != "base" for one in found.findings):
        _as_owner(storage, found, delete=delete, patience_secs=patience_secs)
    after = take_inventory(storage)
    known = {(one.kind, one.path) for one in before.findings}
    new = tuple(one for one in found.findings if (one.kind, one.path) not in known)
    return Repaired(Inventory((*before.findings, *new), found.view, before.history), after)


def _as_owner(storage: Storage, found: Inventory, *, delete: bool, patience_secs: float) -> None:
    """The takeover and the release write the hint and the counter anew."""
    refuse_part(storage)
    check_exclusion(storage)
    writer = LogWriter.take(storage, open_log(storage).job_name, patience_secs=patience_secs)
    try:
        delete_retired(writer)
        if delete:
            delete_orphans(writer)
            _delete_own_files(storage, found)
    finally:
        writer.release()


def _delete_own_files(storage: Storage, found: Inventory) -> None:
    """Those that lay there before our takeover and that no record has come to refer to since."""
    now = take_inventory(storage)
    gone = [path for kind in _OWN_FILES for path in sorted(found.paths(kind) & now.paths(kind))]
    for path in gone:
        storage.delete(path)
    if gone:
        storage.sync_dir(LOG)
