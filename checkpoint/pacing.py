"""How large files go to the device and come back: hints to the kernel, none of which changes a byte.

Written data are handed to the device while the next are still being hashed, so that the sync at the end
finds little left to do. A system without these calls writes and reads the same, only later.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

STRIDE = 8 << 20
"""Bytes after which the device is told to begin; smaller files are left to the sync."""
SHORT_STRIDE = 1 << 20
"""The same where much is computed while a file is written: then even a small one need not wait."""
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_LONG_READ = 1 << 20


class Pacer:
    """Tells the device of a growing file's bytes as they are written."""

    def __init__(self, descriptor: int) -> None:
        self.stride = STRIDE
        self._descriptor = descriptor
        self._start = self._end = 0

    def wrote(self, offset: int, nbytes: int) -> None:
        """Count bytes that were just written; those of a stride that is full are started."""
        if offset != self._end:
            self._begin()
            self._start = offset
        self._end = offset + nbytes
        if self._end - self._start >= self.stride:
            self._begin()

    def _begin(self) -> None:
        if _sync_file_range is not None and self._end - self._start >= self.stride:
            # A failure is no error: the sync that follows finds and reports what could not be written.
            _sync_file_range(self._descriptor, self._start, self._end - self._start, _START_WRITING)
        self._start = self._end


def expect_long_read(descriptor: int, nbytes: int) -> None:
    """Let the kernel read far ahead, where that is worth a call."""
    if nbytes >= _LONG_READ and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _found() -> Callable[..., int] | None:
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_sync_file_range = _found()
