"""What the machine itself can do, without any engine, measured between the rounds."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

PIECE = 8 << 20
RANDOM = 64 << 20
"""Bytes of random content, repeated: more than a processor caches, and no device takes it for nothing."""
THREADS = 4
Move = Callable[[int, memoryview, int], int]


def limits(directory: Path, nbytes: int) -> dict[str, float]:
    """Bytes per second: direct durable writes, direct reads of what is not cached, and cached reads.

    All from and into page-aligned memory of `nbytes` that was touched before, as an engine's tensors were.
    """
    nbytes = max(PIECE, nbytes // PIECE * PIECE)
    path = directory / "limit"
    fresh = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    memory = mmap.mmap(-1, nbytes)
    content = os.urandom(min(RANDOM, nbytes))
    for offset in range(0, nbytes, len(content)):
        memory[offset : offset + len(content)] = content[: nbytes - offset]
    try:
        write = _rate(path, fresh | os.O_DIRECT, os.pwrite, memory, THREADS)
        read = _rate(path, os.O_RDONLY | os.O_DIRECT, _read, memory, THREADS)
        _rate(path, os.O_RDONLY, _read, memory, 1)
        warm = _rate(path, os.O_RDONLY, _read, memory, os.cpu_count() or 1)
    finally:
        path.unlink(missing_ok=True)
    return {"write": write, "cold": read, "warm": warm}


def _read(descriptor: int, piece: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [piece], offset)


def _rate(path: Path, flags: int, move: Move, memory: mmap.mmap, threads: int) -> float:
    offsets = iter(range(0, len(memory), PIECE))
    lock = threading.Lock()
    start = time.perf_counter()
    descriptor = os.open(path, flags, 0o600)

    def work() -> None:
        with memoryview(memory) as view:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                with view[offset : offset + PIECE] as piece:
                    move(descriptor, piece, offset)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if flags & os.O_WRONLY:
        os.fsync(descriptor)
    os.close(descriptor)
    return len(memory) / (time.perf_counter() - start)
