"""Read and write local files: page cache, direct I/O, hints to the kernel.

Written data are handed to the device while the next are hashed, so that little is left for the sync. A system
without these calls does the same, more slowly. Reads go through the page cache, which the processes of a host
share: direct ones are slower (benchmarks/README.md).

Direct writes are tried on the file itself. A file that cannot be opened so, or that refuses a write, is
written through the page cache, and so is the last partial page. No page is written both ways at once, so that
the kernel keeps the cache coherent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

from torchrelay.checkpoint.storage.base import Memory, read_each

STRIDE = 8 << 20
"""Bytes after which device writes begin; smaller files are left to the sync."""
SHORT_STRIDE = 1 << 20
"""The same for a file with much computation during the write, where small files gain too."""
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
LONG_READ = 1 << 20
"""Bytes from which a read is worth a hint to the kernel."""


class Pacer:
    """Starts device writes of a growing file."""

    def __init__(self, descriptor: int) -> None:
        self.stride = STRIDE
        self._descriptor = descriptor
        self._start = self._end = 0

    def wrote(self, offset: int, nbytes: int) -> None:
        """Count written bytes, and start the device write of each full stride."""
        if offset != self._end:
            self._begin()
            self._start = offset
        self._end = offset + nbytes
        if self._end - self._start >= self.stride:
            self._begin()

    def _begin(self) -> None:
        if _sync_file_range is not None and self._end - self._start >= self.stride:
            # Ignored: the sync that follows reports what could not be written.
            _sync_file_range(self._descriptor, self._start, self._end - self._start, _START_WRITING)
        self._start = self._end


def expect_long_read(descriptor: int, nbytes: int) -> None:
    """Let the kernel read far ahead, where that is worth a call."""
    if nbytes >= LONG_READ:
        _advise(descriptor, 0, 0, "SEQUENTIAL")


def _advise(descriptor: int, offset: int, nbytes: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, getattr(os, f"POSIX_FADV_{advice}"))


def c_function(name: str, *arguments: Any) -> Any:
    """A function of the C library with these types of arguments, or None; it sets `ctypes.get_errno`."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    found.argtypes = arguments
    return found


_sync_file_range = c_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
"""Errors of file systems that do not support direct writes, or not these."""


class LocalReadHandle:
    """A regular file, open for reads of any threads."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._announced = False
        self._was_cached: bool | None = None
        """Whether the page cache had the file before; None until a long read asks."""

    def read_into(self, offset: int, destination: memoryview, *, once: bool = False) -> int:
        """Fill `destination`; fewer bytes only at the end of the file. Raises OSError.

        Long reads with `once` leave nothing in the page cache, unless that had the file before.
        """
        view, done = destination.cast("B"), 0
        once = once and len(view) >= LONG_READ
        if once and self._was_cached is None:
            self._was_cached = self.is_at_hand(offset, len(view))
        if once and not self._was_cached:
            _advise(self._descriptor, offset, 4 * len(view), "WILLNEED")
        if not self._announced:
            self._announced = len(view) >= LONG_READ
            expect_long_read(self._descriptor, len(view))
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        if once and not self._was_cached:
            _advise(self._descriptor, offset, done, "DONTNEED")
        return done

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes into new memory; fewer only at the end of the file. Raises OSError."""
        expect_long_read(self._descriptor, length)
        found = os.pread(self._descriptor, length, offset)
        while len(found) < length and (
            more := os.pread(self._descriptor, length - len(found), offset + len(found))
        ):
            found += more
        return found

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """Fill `destinations`, at most 1,024, with one system call; fewer bytes only at the end."""
        if not self._announced:
            self._announced = True
            expect_long_read(self._descriptor, LONG_READ)
        done = os.preadv(self._descriptor, destinations, offset)
        if done == sum(map(len, destinations)):
            return done
        return read_each(self.read_into, offset, destinations)

    def close(self) -> None:
        """Close once; later calls do nothing."""
        # A descriptor whose close failed is closed anyway: its number may be reused.
        descriptor, self._descriptor = self._descriptor, -1
        _close(descriptor)

    def is_at_hand(self, offset: int, nbytes: int) -> bool:
        """Whether two bytes of the range are cached (a query may cause one hit); True if unknown."""
        nowait = getattr(os, "RWF_NOWAIT", None)
        if nowait is None:
            return True
        byte = bytearray(1)
        try:
            for at in (offset + nbytes // 3, offset + nbytes * 2 // 3):
                os.preadv(self._descriptor, [byte], at, nowait)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Alignment of offset, length and address of direct writes: no known disk needs more."""
WORTH_IT = 16 << 20
"""File size from which direct writes pay."""


class DirectFile:
    """A second descriptor of a file that is being written; several threads may use it at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.refused = False
        """Whether the file system has refused a write: do not try again."""

    def write(self, offset: int, view: memoryview) -> int:
        """Write as many of the first bytes of `view` as possible; returns their number.

        Writes nothing unless `offset` and the memory are aligned. Raises OSError other than a refusal.
        """
        whole, done = len(view) - len(view) % ALIGNMENT, 0
        if offset % ALIGNMENT or view.readonly or len(view) < ALIGNMENT or _address(view) % ALIGNMENT:
            return 0
        while done < whole and done % ALIGNMENT == 0 and not self.refused:
            try:
                written = os.pwrite(self._descriptor, view[done:whole], offset + done)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                written = 0
            self.refused = self.refused or written == 0
            done += written
        return done

    def close(self) -> None:
        """Close once; raises delayed errors."""
        descriptor, self._descriptor = self._descriptor, -1
        _close(descriptor)


def open_direct(path: str, descriptor: int) -> DirectFile | None:
    """The file of `descriptor` for direct writes; None if not possible."""
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
