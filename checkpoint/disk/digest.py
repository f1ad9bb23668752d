"""Digests of stored bytes: xxh3-128 per block of 1 MiB, restarting at every tensor.

Not cryptographic: they find damage, not forgery. A tensor of no bytes has no block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import xxhash

from torchrelay.checkpoint.storage.base import Memory

NAME = "xxh3-128"
BLOCK = 1 << 20
SIZE = 16
"""Bytes per block and per digest."""


def block_count(nbytes: int) -> int:
    """How many blocks `nbytes` fill, the last one perhaps in part."""
    return -(-nbytes // BLOCK)


def first_blocks(sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of the first blocks of entries of these sizes, and of the one after the last."""
    if min(sizes, default=0) > 0 and max(sizes) <= BLOCK:
        return range(len(sizes) + 1)
    return list(accumulate(map(block_count, sizes), initial=0))


def block_digests(view: memoryview) -> bytes:
    """The digests of 1-D bytes that begin at a block's border, one after another."""
    return b"".join([xxhash.xxh3_128_digest(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)])


def digests_of(blocks: Iterable[bytes | Memory]) -> bytes:
    """The digests of entries of at most one block each, one after another; empty ones have none."""
    return b"".join(map(xxhash.xxh3_128_digest, filter(len, blocks)))


def first_damaged_block(view: memoryview, digests: bytes | memoryview) -> int | None:
    """Compare whole blocks (the last may be the tensor's short end) with their digests.

    Returns the index within `view` of the first block that differs, None if all are as stored.
    """
    found = block_digests(view)
    if found == digests:
        return None
    if len(found) != len(digests):
        raise ValueError(f"{len(digests)} bytes of digests do not belong to {len(view)} bytes")
    edges = range(0, len(found), SIZE)
    return next(n for n, at in enumerate(edges) if found[at : at + SIZE] != digests[at : at + SIZE])
