"""Bytes of a local file in place: from the page cache, or past it straight from the device.

A direct read leaves the cache to others and spares the kernel's copy; loads are quicker through the cache
all the same, and it lets the processes of a host share what they read. Both were measured
(docs/performance.md).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from torchrelay.checkpoint.pacing import expect_long_read
from torchrelay.checkpoint.storage import Memory, read_each
from torchrelay.records import dataclass

DIRECT_FROM = 1 << 20
"""Shorter reads are not worth going past the cache."""
ALIGN = 4096
"""Direct reads begin and end at multiples of this, in the file and in memory."""
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


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

        A long `direct` read goes past the page cache, unless that has the bytes already.
        """
        view, done = destination.cast("B"), 0
        if len(view) >= DIRECT_FROM and direct and not self._is_cached(offset, len(view)):
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
        """So many bytes in fresh memory; fewer only at the end of the file. Raises OSError."""
        expect_long_read(self._descriptor, length)
        found = os.pread(self._descriptor, length, offset)
        while len(found) < length and (
            more := os.pread(self._descriptor, length - len(found), offset + len(found))
        ):
            found += more
        return found

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        """Fill `destinations`, at most 1,024, with one call of the system; fewer bytes only at the end."""
        if not self._announced:
            self._announced = True
            expect_long_read(self._descriptor, DIRECT_FROM)
        done = os.preadv(self._descriptor, destinations, offset)
        if done == sum(map(len, destinations)):
            return done
        return read_each(self.read_into, offset, destinations)

    def is_at_hand(self, offset: int, nbytes: int) -> bool:
        """Whether bytes of the range lie in the page cache; yes where the system cannot say."""
        return self._is_cached(offset, nbytes)

    def fetch(self, offset: int, nbytes: int) -> bool:
        """Have the kernel read into the page cache; of one request it takes only a few MiB."""
        if not hasattr(os, "posix_fadvise"):
            return False
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
            return True
        return False

    def close(self) -> None:
        """Close once; later calls do nothing."""
        descriptors = (self._descriptor, self._direct)
        # A descriptor whose close failed is closed all the same: its number may be another's by now.
        self._descriptor, self._direct, self._refused = -1, -1, True
        try:
            _close(descriptors[0])
        finally:
            _close(descriptors[1])

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether two bytes of the range lie in the page cache; yes where the system cannot say.

        Asking brings in the page that was asked for: that is why one hit says nothing.
        """
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
        """All of `view`, or 0 where the file system or the end of the file does not allow it."""
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
        """Open the same file once more, for direct reads; False where that cannot be done."""
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
    """A direct read of the file from `first` on: `before` bytes beside, `count` to `landing`, `after` beside.

    The middle belongs to `place`, at most ALIGN bytes behind where it lands: memory is as it is, and what
    the device is asked for is aligned. `landing` and `place` count from the beginning of the destination.
    """

    first: int
    before: int
    count: int
    after: int
    landing: int
    place: int
    address: int


def _aligned(offset: int, nbytes: int, address: int) -> _Aligned | None:
    """None where no aligned piece fits into the range."""
    first, end = offset // ALIGN * ALIGN, -(-(offset + nbytes) // ALIGN) * ALIGN
    start, stop = -(-offset // ALIGN) * ALIGN, (offset + nbytes) // ALIGN * ALIGN
    landing = (address + start - offset) // ALIGN * ALIGN - address
    if landing < 0:
        start, landing = start + ALIGN, landing + ALIGN
    if start >= stop:
        return None
    return _Aligned(first, start - first, stop - start, end - stop, landing, start - offset, address)


def _read_aligned(descriptor: int, plan: _Aligned, view: memoryview, scratch: memoryview) -> bool:
    """Read and put into place; False if the file ended before its time."""
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
