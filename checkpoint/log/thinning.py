"""Thinning a log: below its newest 256 slots only multiples of 256 are kept.

Called after the newer slots are durable. Oldest first, so that an interrupted thinning leaves one
stretch of slots that the next one finishes.
"""

from __future__ import annotations

from torchrelay.checkpoint.format.canonical_json import sealed_bytes
from torchrelay.checkpoint.log.job_file import JobFile
from torchrelay.checkpoint.log.record import decode, slot_path
from torchrelay.checkpoint.log.tail import STRIDE, floor
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import StorageError


def thin(storage: Storage, job: JobFile, newest: int) -> None:
    """Delete what a log whose newest slot is `newest` keeps no longer, base files included."""
    for slot in reversed(_beyond(storage, newest)):
        base = _base_of(storage, job, slot)
        if base is not None and not any(
            _may_need(storage, job, one, base) for one in (slot + 1, floor(slot))
        ):
            storage.delete(base)
        storage.delete(slot_path(slot))


def _beyond(storage: Storage, newest: int) -> list[int]:
    """Slots to delete, newest first: down from the 257th newest to the first one that is gone."""
    found: list[int] = []
    for slot in range(newest - STRIDE, 0, -1):
        if slot % STRIDE == 0:
            continue
        if storage.stat(slot_path(slot)) is None:
            break
        found.append(slot)
    return found


def _base_of(storage: Storage, job: JobFile, slot: int) -> str | None:
    """The base file that a slot's record refers to; None also for a record that cannot be read."""
    try:
        return _read_base_of(storage, job, slot)
    except (StorageError, FileNotFoundError):
        return None


def _may_need(storage: Storage, job: JobFile, slot: int, base: str) -> bool:
    """Whether a slot's record refers to a base file, or cannot be read, so that nobody knows."""
    try:
        return _read_base_of(storage, job, slot) == base
    except FileNotFoundError:
        return False
    except StorageError:
        return True


def _read_base_of(storage: Storage, job: JobFile, slot: int) -> str | None:
    record = decode(sealed_bytes(storage, slot_path(slot)), slot=slot, job=job.uuid)
    return record.base.path if record.base else None
