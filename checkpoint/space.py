"""Whether there is room for a save, before its first byte; and errors that say that there was none."""

from __future__ import annotations

import errno
from collections.abc import Collection

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.planning.assignments import Plan
from torchrelay.checkpoint.storage.base import Room, Storage
from torchrelay.errors import SaveFailedError

FILE_BYTES = 8 << 10
"""What a file takes beside its data: its header's padding, its place in the directory."""
OWN_FILES = 4
"""The directory of the try, its manifest, its timings, the record."""


def check_room(
    storage: Storage, plan: Plan, position: Position, nodes: Collection[int] | None = None
) -> None:
    """Refuse a save that cannot fit: SaveFailedError with the bytes that are needed and those that are free.

    `nodes`: those that write to this storage (None: all). Says nothing where the storage does not know, and
    promises nothing: others may write there meanwhile.
    """
    room = storage.room() if isinstance(storage, Room) else None
    if room is None:
        return
    free_bytes, free_files = room
    files = sum(1 for node, _ in plan.writers if nodes is None or node in nodes) + OWN_FILES
    total = plan.total_bytes if nodes is None else _bytes_of(plan, nodes)
    nbytes = total + files * FILE_BYTES
    if nbytes > free_bytes:
        raise _full(
            f"No space left for epoch {position} in {storage.url}: it needs {nbytes} bytes, {free_bytes} are "
            "free; free some space, or keep fewer epochs (keep_last)"
        )
    if files > free_files:
        raise _full(
            f"No space left for epoch {position} in {storage.url}: it needs {files} files, {free_files} can "
            "be made (inodes); delete files there, or keep fewer epochs (keep_last)"
        )


def _bytes_of(plan: Plan, nodes: Collection[int]) -> int:
    return sum(one.nbytes for node in nodes for one in plan.assignments(node) if not one.inline)


def is_full(error: OSError) -> bool:
    """Whether a failure means that there was no room, and so that nothing was created."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _full(text: str) -> SaveFailedError:
    error = SaveFailedError(text)
    error.errno = errno.ENOSPC
    return error
