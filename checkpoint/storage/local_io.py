"""Read and write local files: page cache, direct I/O, hints to the kernel.

Written data are handed to the device while the next are hashed, so that little is left for the sync. A system
without these calls does the same, more slowly. Direct reads leave the page cache to other data and save a
copy, but loads are quicker through the cache, which the processes of a host share (benchmarks/README.md).

Direct writes are tried on the file itself. A file that cannot be opened so, or that refuses a write, is
written through the page cache, and so is the last partial page. No page is written both ways at once, so that
the kernel keeps the cache coherent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.storage.base import Memory, read_each
from torchrelay.records import dataclass

STRIDE = 8 << 20
"""Bytes after which device writes begin; smaller files are left to the sync."""
SHORT_STRIDE = 1 << 20
"""The same for a file with much computation during the write, where small files gain too."""
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_LONG_READ = 1 << 20


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
    if nbytes >= _LONG_READ and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def c_function(name: str, *arguments: Any) -> Any:
    """A function of the C library with these types of arguments, or None; it sets `ctypes.get_errno`."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    found.argtypes = arguments
    return found


_sync_file_range = c_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


DIRECT_FROM = 1 << 20
"""Below this size reads do not bypass the cache."""
ALIGN = 4096
"""Alignment of direct reads, in the file and in memory."""
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
"""Errors of file systems that do not support direct reads or writes, or not these."""


class LocalReadHandle:
    """A regular file, open for reads of any threads."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._direct = -1
        self._refused = not hasattr(os, "O_DIRECT")
        self._lock = threading.Lock()
        self._announced = False
        self._scratch: list[mmap.mmap] = []

    def read_into(self, offset: int, destination: memoryview, *, direct: bool = False) -> int:
        """Fill `destination`; fewer bytes only at the end of the file. Raises OSError.

        A long `direct` read bypasses the page cache, unless that has the bytes already.
        """
        view, done = destination.cast("B"), 0
        if len(view) >= DIRECT_FROM and direct and not self.is_at_hand(offset, len(view)):
            done = self._read_direct(offset, view)
        if not done and not self._announced:
            self._announced = len(view) >= DIRECT_FROM
            expect_long_read(self._descriptor, len(view))
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
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
            expect_long_read(self._descriptor, DIRECT_FROM)
        done = os.preadv(self._descriptor, destinations, offset)
        if done == sum(map(len, destinations)):
            return done
        return read_each(self.read_into, offset, destinations)

    def close(self) -> None:
        """Close once; later calls do nothing."""
        descriptor, direct = self._descriptor, self._direct
        # A descriptor whose close failed is closed anyway: its number may be reused.
        self._descriptor, self._direct, self._refused = -1, -1, True
        try:
            _close(descriptor)
        finally:
            _close(direct)

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

    def _read_direct(self, offset: int, view: memoryview) -> int:
        """Fill `view` and return its size, or 0 if the file system or the end of the file prevents it."""
        plan = _aligned(offset, len(view), _address(view))
        if plan is None or not self._opened_direct():
            return 0
        scratch = self._scratch.pop() if self._scratch else mmap.mmap(-1, 3 * ALIGN)
        try:
            return len(view) if _read_aligned(self._direct, plan, view, memoryview(scratch)) else 0
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self._refused = True
            return 0
        finally:
            self._scratch.append(scratch)

    def _opened_direct(self) -> bool:
        """Open the same file again for direct reads; False if that fails."""
        with self._lock:
            if self._direct < 0 and not self._refused:
                with suppress(OSError):
                    self._direct = os.open(
                        self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT
                    )
                same = self._direct >= 0 and os.path.sameopenfile(self._direct, self._descriptor)
                self._refused = not same
            return not self._refused


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


@dataclass(frozen=True)
class _Aligned:
    """A direct read from offset `first`: `before` extra bytes, `count` to `landing`, `after` extra bytes.

    Requests to the device are aligned, but the destination may not be: the middle belongs at `place`, at most
    ALIGN bytes after `landing`. Both are relative to the destination.
    """

    first: int
    before: int
    count: int
    after: int
    landing: int
    place: int
    address: int


def _aligned(offset: int, nbytes: int, address: int) -> _Aligned | None:
    """The plan of a direct read; None if no aligned piece fits into the range."""
    first, end = offset // ALIGN * ALIGN, -(-(offset + nbytes) // ALIGN) * ALIGN
    start, stop = -(-offset // ALIGN) * ALIGN, (offset + nbytes) // ALIGN * ALIGN
    landing = (address + start - offset) // ALIGN * ALIGN - address
    if landing < 0:
        start, landing = start + ALIGN, landing + ALIGN
    if start >= stop:
        return None
    return _Aligned(first, start - first, stop - start, end - stop, landing, start - offset, address)


def _read_aligned(descriptor: int, plan: _Aligned, view: memoryview, scratch: memoryview) -> bool:
    """Read and move into place; False if the file ended early."""
    before, after = scratch[: plan.before], scratch[2 * ALIGN : 2 * ALIGN + plan.after]
    middle = view[plan.landing : plan.landing + plan.count]
    got = os.preadv(descriptor, [part for part in (before, middle, after) if len(part)], plan.first)
    stop = plan.place + plan.count
    if got < plan.before + plan.count + len(view) - stop:
        return False
    if plan.landing != plan.place:
        ctypes.memmove(plan.address + plan.place, plan.address + plan.landing, plan.count)
    view[: plan.place] = before[plan.before - plan.place :]
    view[stop:] = after[: len(view) - stop]
    return True


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
