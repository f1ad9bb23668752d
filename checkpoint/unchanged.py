"""Whether memory has the bytes of an epoch: parts are hashed where they lie, block by block.

Nothing counts as unchanged whose bytes were not hashed in full. What differs costs little: a part ends at
its first bytes or its first block that differ, and many small parts of which a sample changed to the last
one are taken to have changed, all of them, without a look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrelay.checkpoint.disk import dtypes
from torchrelay.checkpoint.disk.boxes import Bounds
from torchrelay.checkpoint.disk.digest import BLOCK, SIZE, block_count, block_digests
from torchrelay.checkpoint.disk.extents import PROBE
from torchrelay.checkpoint.known import KnownFile, Part

if TYPE_CHECKING:
    import torch

MANY_BLOCKS = 8
"""Hashed at a time once the first block is as it was."""
SMALL_BYTES = 64 << 10
"""A part below this costs as much to look at as to write."""
MANY_SMALL = 512
"""So many small parts are looked at whatever a sample says."""
SAMPLE = 64

_Compared = tuple[int, Part, bytes, bytes | None]
"""Rank, part, the digests that a file has of it, and that of its first bytes, where it is known."""
PartKey = tuple[int, str, int, int, Bounds | None]
"""Rank, leaf, first, last and box of a part."""
TensorOf = Callable[[int, Part], "torch.Tensor | None"]
"""What a hosted node has of a part's leaf: all of it, or the box; None where it has no such part."""


@dataclass
class Findings:
    """The leaves of which a part is not as it was, or not where it was.

    `digests` are those of what is in memory, of the first blocks of a part or of all.
    """

    changed: set[str] = field(default_factory=set)
    digests: dict[PartKey, bytes] = field(default_factory=dict)


def look(files: Iterable[KnownFile], tensor_of: TensorOf, turn: int) -> Findings:
    """Compare what files hold with memory. Another `turn` takes another sample."""
    found = Findings()
    small: list[_Compared] = []
    for file in files:
        for part, digests in zip(file.parts, file.digests, strict=True):
            if part is None:
                continue
            if part.nbytes < SMALL_BYTES:
                small.append((file.rank, part, digests, None))
            else:
                _compare(found, tensor_of, file.rank, part, digests, file.probes.get(part))
    if len(small) > MANY_SMALL and not _any_unchanged(found, tensor_of, small, turn):
        found.changed.update([part.leaf for _, part, *_ in small])
    else:
        for one in small:
            _compare(found, tensor_of, *one)
    return found


def _any_unchanged(found: Findings, tensor_of: TensorOf, small: list[_Compared], turn: int) -> bool:
    step = len(small) // SAMPLE
    return any(_compare(found, tensor_of, *one) for one in small[turn % step :: step])


def _compare(
    found: Findings, tensor_of: TensorOf, rank: int, part: Part, digests: bytes, probe: bytes | None
) -> bool:
    tensor = tensor_of(rank, part)
    same, own = (False, b"") if tensor is None else compare(tensor, part, digests, probe)
    if own:
        found.digests[rank, part.leaf, part.first, part.last, part.box] = own
    if not same:
        found.changed.add(part.leaf)
    return same


def compare(
    tensor: torch.Tensor, part: Part, digests: bytes, probe: bytes | None = None
) -> tuple[bool, bytes]:
    """Whether a tensor has the bytes of a known part, and the digests of its own first blocks.

    `probe` is the digest of its first bytes. Ends at the first difference, so that what is trained costs
    these, or one block.
    """
    width, count = tensor.element_size(), part.last - part.first
    if part.last > tensor.numel() or len(digests) != block_count(count * width) * SIZE:
        return False, b""
    flat = tensor
    if count < tensor.numel() or count * width > BLOCK:
        flat = tensor.detach().reshape(-1)[part.first : part.last]
    if count * width <= BLOCK:
        own = block_digests(dtypes.stored_bytes(flat, part.leaf))
        return own == digests, own
    if probe is not None and block_digests(dtypes.stored_bytes(flat[: PROBE // width], part.leaf)) != probe:
        return False, b""
    return _compare_blocks(flat, part, digests, BLOCK // width)


def _compare_blocks(flat: torch.Tensor, part: Part, digests: bytes, block: int) -> tuple[bool, bytes]:
    own, start, stop = bytearray(), 0, block
    while start < len(flat):
        own += block_digests(dtypes.stored_bytes(flat[start:stop], part.leaf))
        if not digests.startswith(own):
            return False, bytes(own)
        start, stop = stop, stop + MANY_BLOCKS * block
    return True, bytes(own)
