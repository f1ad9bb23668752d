"""Aligned memory that bytes are copied into on their way to the device.

The buffers of a process are made when first needed and kept for the next save. There are never more than
`LIMIT`; whoever needs one more waits, holding none. A child after `fork` begins with none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchrelay.errors import StorageError

SIZE = 4 << 20
"""Bytes of a buffer, and of a write."""
LIMIT = 8
"""Buffers per process: 32 MiB."""
_SMALL = 64 << 10
_byte = ctypes.c_char


class Pool:
    """The buffers of one process."""

    def __init__(self, size: int = SIZE, limit: int = LIMIT) -> None:
        self._size = size
        self._free: list[mmap.mmap] = []
        self._limit, self._made = limit, 0
        self._left = threading.Semaphore(limit)

    def touch(self, count: int) -> None:
        """Have so many buffers made, so that the first save need not wait for fresh memory.

        Those in use count, too. Raises StorageError where there is no memory.
        """
        while self._made < min(count, self._limit):
            memory = self._new()
            # Costs no page faults later; without the interpreter's lock.
            ctypes.memset(ctypes.addressof(_byte.from_buffer(memory)), 0, len(memory))
            self._free.append(memory)

    def _new(self) -> mmap.mmap:
        memory = _mapped(self._size)
        self._made += 1
        return memory

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Page-aligned writable bytes with unknown content, for this thread alone."""
        with self._left:
            try:
                memory = self._free.pop()
            except IndexError:
                memory = self._new()
            try:
                yield memoryview(memory)
            finally:
                self._free.append(memory)


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StorageError(f"no memory for a buffer of {nbytes} bytes to write from: free some") from error
    with suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_of_process: dict[int, Pool] = {}


def pool() -> Pool:
    """The pool of this process."""
    return _of_process.setdefault(os.getpid(), Pool())


def copy(room: memoryview, at: int, data: memoryview) -> int:
    """Copy bytes to a place of a buffer, without the interpreter's lock where they are writable.

    Read-only bytes hold it, so give no more than a block at a time. Returns how many they were.
    """
    if data.readonly or len(data) < _SMALL:
        room[at : at + len(data)] = data
    else:
        source, target = _byte.from_buffer(data), _byte.from_buffer(room, at)
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), len(data))
    return len(data)
