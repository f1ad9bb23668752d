"""Digests of tensors where they lie, to see later whether somebody wrote there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch
import xxhash

from torchrelay.checkpoint.format.dtypes import memory_of

Verify = Literal["samples", "full"]
"""How much of a tensor that is copied late is hashed: four stretches of 16 KiB, or all of it."""

SAMPLE_BYTES = 64 << 10
"""Up to this size a copy is as cheap as a digest: such tensors are never copied late."""
STRETCHES = 4


def digest(tensor: torch.Tensor, verify: Verify) -> int:
    """The xxh3-128 of a contiguous tensor's memory, or of evenly spread stretches of it."""
    hashed = xxhash.xxh3_128()
    nbytes = tensor.nbytes
    if tensor.is_cpu:
        for memory in _memories(tensor.data_ptr(), nbytes, verify):
            hashed.update(memory)
    else:  # only what is hashed leaves the device
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for first, last in stretches(nbytes, verify):
            hashed.update(memory_of(flat[first:last].cpu()))
    return hashed.intdigest()


def stretches(nbytes: int, verify: Verify) -> Iterator[tuple[int, int]]:
    """Where the stretches lie: the first and the last bytes are always among them."""
    size = SAMPLE_BYTES // STRETCHES
    if verify == "full" or nbytes <= SAMPLE_BYTES:
        yield 0, nbytes
        return
    for index in range(STRETCHES):
        first = (nbytes - size) * index // (STRETCHES - 1)
        yield first, first + size


@lru_cache(maxsize=1 << 13)
def _memories(address: int, nbytes: int, verify: Verify) -> tuple[ctypes.Array[ctypes.c_ubyte], ...]:
    """The stretches of memory at an address, which are looked at only while a tensor lies there.

    Remembered, for the same tensors are asked about at every save.
    """
    return tuple(
        (ctypes.c_ubyte * (last - first)).from_address(address + first)
        for first, last in stretches(nbytes, verify)
    )
