"""What no warm load can do without: as many bytes of the same files read into the same memory, and hashed."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from bench.caches import files_below
from bench.content import local_of

BLOCK, RUN = 1 << 20, 2 << 20
SMALL = 1 << 16
"""Tensors of fewer bytes are left out."""
TRIES = 3

Piece = tuple[int, int, memoryview]
"""A descriptor, from which byte on, and where to."""


def least_secs(path: Path, tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Seconds until this process, or all ranks, have filled their tensors, the quickest of some tries.

    All ranks ask together. Each reads one stretch after the other, with its share of the cores as threads,
    and hashes every block with xxh3-128. Nothing is looked up, compared or put in order, so the tensors hold
    nonsense afterwards. Pieces whose bytes lie in columns of a file cost a load more than this. None for
    files that are too small.
    """
    local = [local_of(tensor) for tensor in tensors.values()]
    memories = [_memory(tensor) for tensor in local if tensor.nbytes >= SMALL]
    rank, every = _of_ranks(sum(len(memory) for memory in memories))
    files = [file for file in files_below(path) if file.stat().st_size >= 2 * RUN]
    if not files or not min(every):
        return None
    opened = [os.open(file, os.O_RDONLY) for file in files]
    try:
        pieces = list(_pieces(opened, memories, sum(every[:rank])))
        return min(_together(pieces, len(every)) for _ in range(TRIES))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _pieces(opened: list[int], memories: Iterable[memoryview], begin: int) -> Iterable[Piece]:
    """Runs of memory and where their bytes come from, beginning at byte `begin` of all files in a row."""
    runs = [(descriptor, at) for descriptor in opened for at in _begins(descriptor)]
    number = begin // RUN
    for memory in memories:
        for first in range(0, len(memory), RUN):
            descriptor, at = runs[number % len(runs)]
            yield descriptor, at, memory[first : first + RUN]
            number += 1


def _begins(descriptor: int) -> range:
    """Where whole runs of a file begin."""
    return range(0, os.fstat(descriptor).st_size - RUN + 1, RUN)


def _together(pieces: list[Piece], ranks: int) -> float:
    coming = iter(pieces)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(coming, None)
            if piece is None:
                return
            _read(*piece)

    threads = max(1, (os.cpu_count() or 1) // ranks)
    helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
    _meet()
    begin = time.perf_counter()
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    _meet()
    return time.perf_counter() - begin


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


def _read(descriptor: int, at: int, memory: memoryview) -> None:
    if os.preadv(descriptor, [memory], at) != len(memory):
        raise RuntimeError(f"file {descriptor} ends before byte {at + len(memory)}")
    for block in range(0, len(memory), BLOCK):
        xxhash.xxh3_128_digest(memory[block : block + BLOCK])
