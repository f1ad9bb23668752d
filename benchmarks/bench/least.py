"""What no load and no save can do without: as many bytes, moved by the same processes, and nothing else."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from bench.caches import files_below
from bench.content import local_of

BLOCK, RUN, PIECE = 1 << 20, 2 << 20, 4 << 20
SMALL = 1 << 16
"""Tensors of fewer bytes are left out."""
WRITERS = 3
RANDOM = 64 << 20
"""Bytes of random content that is written again and again."""

Cut = tuple[int, int]
"""Bytes of a whole row, and of the part of it that this rank has."""
WHOLE: Cut = (1, 1)
"""Of what is not cut."""
Piece = tuple[int, int, memoryview, Cut]
"""A descriptor, at which byte of it, the memory, and how its rows are cut."""


_own = threading.local()


def least_load_secs(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    threads: Iterable[int],
    before: Callable[[], object] = lambda: None,
) -> float | None:
    """Seconds until this process, or all ranks, have filled their tensors, the quickest of some tries.

    All ranks ask together; each try has so many threads in each, and `before` is called on rank 0. Each
    reads one stretch after the other and hashes every block with xxh3-128. Where a rank wants some columns,
    their blocks hold those of others too: as many bytes are read and hashed, and its share of them copied
    row by row. Nothing is looked up, compared or put in order, so the tensors hold nonsense afterwards. None
    for files that are too small.
    """
    wanted = [
        (_memory(local_of(tensor)), _cut(tensor))
        for tensor in tensors.values()
        if local_of(tensor).nbytes >= SMALL
    ]
    rank, every = _of_ranks(sum(_stored(memory, cut) for memory, cut in wanted))
    files = [file for file in files_below(path) if file.stat().st_size >= 2 * RUN]
    if not files or not min(every):
        return None

    def one(count: int) -> float:
        if rank == 0:
            before()
        opened = [os.open(file, os.O_RDONLY) for file in files]
        try:
            pieces = _pieces(opened, wanted, sum(every[:rank]))
            return _timed(lambda: _shared(pieces, _read, count))
        finally:
            for descriptor in opened:
                os.close(descriptor)

    return min(one(count) for count in threads)


def least_save_secs(folder: Path, nbytes: int) -> float:
    """Seconds until so many random bytes are durable, each rank with its share in a file of its own.

    Direct writes from aligned memory, space reserved; nothing is copied, hashed or described.
    """
    rank, every = _of_ranks(0)
    share = max(PIECE, nbytes // len(every) // PIECE * PIECE)
    path = folder / f"least-{rank}"
    content = memoryview(mmap.mmap(-1, min(share, RANDOM)))
    content[:] = os.urandom(len(content))
    try:
        return _timed(lambda: _write(path, share, content))
    finally:
        path.unlink(missing_ok=True)


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _cut(tensor: torch.Tensor) -> Cut:
    """Of the last dimension that is cut, but for the first one, whose parts lie in blocks of their own.

    So do parts of rows that are longer than a run, nearly.
    """
    local, width = local_of(tensor), tensor.element_size()
    cut = [dim for dim in range(1, tensor.dim()) if local.shape[dim] != tensor.shape[dim]]
    row = math.prod(tensor.shape[cut[-1] :]) * width if cut else 1
    return (row, math.prod(local.shape[cut[-1] :]) * width) if 1 < row <= RUN else WHOLE


def _stored(memory: memoryview, cut: Cut) -> int:
    """Bytes of the file that hold those of the memory."""
    row, mine = cut
    return len(memory) // mine * row


def _pieces(opened: list[int], wanted: Iterable[tuple[memoryview, Cut]], begin: int) -> list[Piece]:
    """Parts of memory and which runs fill them, beginning at byte `begin` of all files in a row."""
    runs = [(descriptor, at) for descriptor in opened for at in _begins(descriptor)]
    parts = [(part, cut) for memory, cut in wanted for part in _parts(memory, cut)]
    return [(*runs[(begin // RUN + number) % len(runs)], *part) for number, part in enumerate(parts)]


def _parts(memory: memoryview, cut: Cut) -> list[memoryview]:
    """Memory in parts that a run fills, of whole rows where they are cut."""
    row, mine = cut
    step = RUN if cut == WHOLE else max(1, RUN // row) * mine
    return [memory[first : first + step] for first in range(0, len(memory), step)]


def _begins(descriptor: int) -> range:
    """Where whole runs of a file begin."""
    return range(0, os.fstat(descriptor).st_size - RUN + 1, RUN)


def _write(path: Path, nbytes: int, content: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        cut = ((at, at % len(content)) for at in range(0, nbytes, PIECE))
        _shared([(descriptor, at, content[part : part + PIECE], WHOLE) for at, part in cut], _put, WRITERS)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _timed(work: Callable[[], None]) -> float:
    """Seconds from when all ranks begin until all have ended."""
    _meet()
    begin = time.perf_counter()
    work()
    _meet()
    return time.perf_counter() - begin


def _shared(pieces: list[Piece], move: Callable[[int, int, memoryview, Cut], None], threads: int) -> None:
    """Move all pieces, begun in their order."""
    coming = iter(pieces)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(coming, None)
            if piece is None:
                return
            move(*piece)

    helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def _of_ranks(mine: int) -> tuple[int, list[int]]:
    """The rank of this process, and the numbers of all of them."""
    if not dist.is_initialized():
        return 0, [mine]
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return dist.get_rank(), every


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _read(descriptor: int, at: int, memory: memoryview, cut: Cut) -> None:
    row, mine = cut
    target = memory if cut == WHOLE else _room(_stored(memory, cut))
    if os.preadv(descriptor, [target], at) != len(target):
        raise RuntimeError(f"file {descriptor} ends before byte {at + len(target)}")
    for block in range(0, len(target), BLOCK):
        xxhash.xxh3_128_digest(target[block : block + BLOCK])
    if cut != WHOLE:
        rows = torch.frombuffer(target, dtype=torch.uint8).view(-1, row)
        torch.frombuffer(memory, dtype=torch.uint8).view(-1, mine).copy_(rows[:, :mine])


def _room(nbytes: int) -> memoryview:
    """Memory of this thread, used again and again."""
    if len(getattr(_own, "room", b"")) < nbytes:
        _own.room = memoryview(mmap.mmap(-1, max(RUN, nbytes)))
    room: memoryview = _own.room
    return room[:nbytes]


def _put(descriptor: int, at: int, memory: memoryview, _: Cut) -> None:
    if os.pwrite(descriptor, memory, at) != len(memory):
        raise RuntimeError(f"the disk took less than {len(memory)} bytes at {at}")
