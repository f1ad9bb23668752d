"""Writes that go from memory to the device without the page cache, where the file system takes them.

There is no list of file systems and no probe on the side: the file that is being written is asked. One
that cannot be opened so, or that refuses a write, is written through the page cache, and so is the end
of a file that fills no page. No page is ever written both ways at once, so that the kernel keeps the
cache coherent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Offset, length and address of a direct write are multiples of it: no disk known today asks for more."""
WORTH_IT = 16 << 20
"""Bytes of a file from which on direct writes pay: below, the page cache is as quick."""
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
"""What file systems answer that take no direct writes, or not these."""


class DirectFile:
    """A second descriptor of a file that is being written; several threads may use it at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.refused = False
        """Whether the file system would not take a write: do not try again."""

    def write(self, offset: int, view: memoryview) -> int:
        """Write as much of the beginning of 1-D bytes as can be; returns how many bytes that was.

        Nothing unless `offset` and the memory are aligned. Raises OSError for what is not a refusal.
        """
        whole, done = len(view) - len(view) % ALIGNMENT, 0
        if offset % ALIGNMENT or not _is_aligned(view):
            return 0
        while done < whole and done % ALIGNMENT == 0 and not self.refused:
            try:
                written = os.pwrite(self._descriptor, view[done:whole], offset + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                written = 0
            self.refused = self.refused or written == 0
            done += written
        return done

    def close(self) -> None:
        """Close once; raises OSError for what the system kept until now."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_direct(path: str, descriptor: int) -> DirectFile | None:
    """The file behind `descriptor` for direct writes; None where that cannot be."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        second = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if not os.path.samestat(os.fstat(descriptor), os.fstat(second)):
        os.close(second)
        return None
    return DirectFile(second)


def _is_aligned(view: memoryview) -> bool:
    if view.readonly or len(view) < ALIGNMENT:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0
