"""Taking a file out of the page cache, and asking the kernel whether it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop_from_cache(path: Path) -> None:
    """The page cache holds nothing of a file afterwards, where the system allows that.

    Asked once, the kernel leaves pages that another core has not yet put into its lists.
    """
    pause = threading.Event()
    for _ in range(50):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if not any(pages_in_cache(path)):
            return
        pause.wait(0.02)


def until_cold(path: Path, done: Callable[[], bool]) -> bool:
    """Whether `done` was true once, in 20 tries that each begin with nothing of the file in the cache.

    One try proves nothing: being asked whether it has bytes, the kernel may begin to fetch them.
    """
    for _ in range(20):
        drop_from_cache(path)
        if done():
            return True
    return False


def pages_in_cache(path: Path) -> list[bool]:
    """Of each page of a file whether the page cache has it."""
    size = path.stat().st_size
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        told = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        begin = (ctypes.c_char * size).from_buffer(mapped)
        try:
            if _libc.mincore(ctypes.byref(begin), ctypes.c_size_t(size), told):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            del begin
    return [bool(page & 1) for page in told]
