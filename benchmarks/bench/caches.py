"""Durable files, cold files, warm files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

STILL_COLD = 0.01
"""The part of a tree's bytes that may stay in the page cache where a load is called cold."""
_libc = ctypes.CDLL(None, use_errno=True)


def files_below(path: Path) -> list[Path]:
    """All regular files of a tree."""
    return [file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink()]


def bytes_below(path: Path) -> int:
    """The bytes of all files of a tree."""
    return sum(file.stat().st_size for file in files_below(path))


def sync_tree(path: Path) -> None:
    """Make bytes and names of a tree durable, in the same way for all engines."""
    folders = [folder for folder in path.rglob("*") if folder.is_dir()]
    for entry in (*files_below(path), *folders, path, path.parent):
        with contextlib.suppress(FileNotFoundError):  # a temporary file of what a run does beside its epoch
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def make_cold(path: Path) -> float:
    """Take a tree out of the page cache; the part of its bytes that is there all the same.

    It is read once before: a virtual disk may have a cache of its own, and whether that has a file decides
    more than the engine does (of 1 GiB 0.9 s or 1.6 s were seen). So it is the same for all of them.

    Raises RuntimeError where that is more than STILL_COLD: a load would not be a cold one.
    """
    rest = 1.0
    _read_in(path)
    for _ in range(5):
        _take_out(path)
        rest = cached_part(path)
        if rest <= STILL_COLD:
            return rest
        time.sleep(0.1)
    raise RuntimeError(
        f"{rest:.0%} of {path.name} stays in the page cache: no cold load can be measured here"
    )


def make_warm(path: Path) -> None:
    """Read a whole tree into the page cache again, file after file from beginning to end.

    How it got there may matter (benchmarks/README.md), so it is the same for all engines.
    """
    _take_out(path)
    _read_in(path)


def _take_out(path: Path) -> None:
    for file in files_below(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_in(path: Path) -> None:
    for file in files_below(path):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def cached_part(path: Path) -> float:
    """The part of a tree's bytes that is in the page cache, by what the kernel says of every page."""
    seen = [found for file in files_below(path) if file.stat().st_size for found in _pages(file)]
    return sum(seen) / len(seen) if seen else 0.0


def _pages(file: Path) -> Iterator[int]:
    """One 0 or 1 per page."""
    size = file.stat().st_size
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        told = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        begin = (ctypes.c_char * size).from_buffer(mapped)
        try:
            if _libc.mincore(ctypes.byref(begin), ctypes.c_size_t(size), told):
                raise OSError(ctypes.get_errno(), "mincore", str(file))
        finally:
            del begin
    yield from (page & 1 for page in told)
