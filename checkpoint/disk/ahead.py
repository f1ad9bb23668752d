"""Bytes that will be read soon are fetched while somebody still looks at where they belong.

Very many small tensors take a tenth of a second to look at, in which the device would be idle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torchrelay.checkpoint.disk.stored_entries import Stored
from torchrelay.checkpoint.storage.base import Fetches, Storage, open_for_reading

WORTH_IT = 4096
"""So many entries take some milliseconds to look at."""
STEP = 1 << 20
"""Bytes of one request: of a larger one the kernel takes only the beginning."""
AT_MOST = 256 << 20
"""Of more bytes the rest is left to the reads: what was fetched must still be there when they come."""


@contextmanager
def fetched_ahead(storage: Storage, path: str, part: range) -> Iterator[None]:
    """Have the storage fetch these bytes of a file while the block runs; it is only a hint.

    Nothing is fetched where the storage does not offer it, or has the bytes at hand. No thread is at
    work any more when the block has ended.
    """
    stopped = threading.Event()
    args = (storage, path, part, stopped)
    thread = threading.Thread(target=_fetch, args=args, name="torchrelay-fetch", daemon=True)
    if part:
        with suppress(RuntimeError):  # no more threads in this process
            thread.start()
    try:
        yield
    finally:
        stopped.set()
        if thread.ident is not None:
            thread.join()


def worth_fetching(stored: Stored, numbers: Sequence[int]) -> range:
    """The bytes of a file that hold these entries, from the first on; none where it would gain nothing.

    That is where they are few, or where more than half of what lies between them is not wanted.
    """
    if len(numbers) < WORTH_IT:
        return range(0)
    starts, stops = stored.columns.bounds(numbers)
    first, end = min(starts), max(stops)
    if 2 * (sum(stops) - sum(starts)) < end - first:
        return range(0)
    return range(stored.data_start + first, stored.data_start + min(end, first + AT_MOST))


def _fetch(storage: Storage, path: str, part: range, stopped: threading.Event) -> None:
    """What goes wrong here goes wrong again where the bytes are read, and is told there."""
    with suppress(OSError), open_for_reading(storage, path) as handle:
        if not isinstance(handle, Fetches) or handle.is_at_hand(part.start, len(part)):
            return
        for at in part[::STEP]:
            if stopped.is_set() or not handle.fetch(at, min(STEP, part.stop - at)):
                return
