"""What the machine itself can do, without any engine, measured between the rounds."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

PIECE = 8 << 20
THREADS = 4
Move = Callable[[int, mmap.mmap, int], int]


def limits(directory: Path, nbytes: int) -> dict[str, float]:
    """Bytes per second: direct durable writes, direct reads of what is not cached, and cached reads."""
    nbytes = max(PIECE, nbytes // PIECE * PIECE)
    path = directory / "limit"
    fresh = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        write = _rate(path, fresh | os.O_DIRECT, _write, nbytes, THREADS)
        read = _rate(path, os.O_RDONLY | os.O_DIRECT, _read, nbytes, THREADS)
        _rate(path, os.O_RDONLY, _read, nbytes, 1)
        warm = _rate(path, os.O_RDONLY, _read, nbytes, os.cpu_count() or 1)
    finally:
        path.unlink(missing_ok=True)
    return {"write": write, "cold": read, "warm": warm}


def _write(descriptor: int, buffer: mmap.mmap, offset: int) -> int:
    return os.pwrite(descriptor, buffer, offset)


def _read(descriptor: int, buffer: mmap.mmap, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


def _rate(path: Path, flags: int, move: Move, nbytes: int, threads: int) -> float:
    content = os.urandom(1 << 20) * (PIECE >> 20)  # a device may treat zeros as nothing
    buffers = []
    for _ in range(threads):
        buffers.append(mmap.mmap(-1, PIECE))
        buffers[-1].write(content)
    offsets = iter(range(0, nbytes, PIECE))
    lock = threading.Lock()

    def work(buffer: mmap.mmap) -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            move(descriptor, buffer, offset)

    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    start = time.perf_counter()
    descriptor = os.open(path, flags, 0o600)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.fsync(descriptor)
    os.close(descriptor)
    return nbytes / (time.perf_counter() - start)
