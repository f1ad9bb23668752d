"""Whether memory has the bytes of an epoch: parts are hashed where they lie, block by block.

Nothing is referenced by an epoch whose bytes were not hashed in full: where a save allows it, a long part
that begins as it did is presumed unchanged, and what is left of it is hashed beside the write, before the
commit (`Findings.each_left`). What differs costs little: a part ends at
its first bytes or its first block that differ, and many small parts of which a sample changed to the last
one are taken to have changed, all of them, without a look. Parts of more than a block are shared between
a few threads: hashing lets the interpreter go, and one core reads memory slower than several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_count, block_digests
from torchrelay.checkpoint.format.mesh_geometry import Bounds
from torchrelay.checkpoint.format.shard.extents import PROBE
from torchrelay.checkpoint.known import KnownFile, Part
from torchrelay.checkpoint.storage.threads import share
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch

MANY_BLOCKS = 8
"""Hashed at a time once the first block is as it was."""
LOOKERS = 4
"""Threads that hash parts of more than a block, at most one for each core. Shorter ones take as long in
Python as in hashing, and threads would only wait for one another."""
SMALL_BYTES = 64 << 10
"""A part below this costs as much to look at as to write."""
MANY_SMALL = 512
"""So many small parts are looked at whatever a sample says."""
SAMPLE = 64

_Short = tuple[int, Part, bytes]
"""Rank, part of at most a block, and the digests that a file has of it."""
PartKey = tuple[int, str, int, int, Bounds | None]
"""Rank, leaf, first, last and box of a part."""
TensorOf = Callable[[int, Part], "torch.Tensor | None"]
"""What a hosted node has of a part's leaf: all of it, or the box; None where it has no such part."""


def lookers() -> int:
    """Threads that hash long parts of one process."""
    return min(LOOKERS, os.cpu_count() or 1)


@dataclass
class Findings:
    """The leaves of which a part is not as it was, or not where it was.

    `digests` are those of what is in memory, of the first blocks of a part or of all.
    """

    changed: set[str] = field(default_factory=set)
    digests: dict[PartKey, bytes] = field(default_factory=dict)
    probes: dict[tuple[int, Part], bytes] = field(default_factory=dict)
    """The digests of the first bytes of long parts that are as they were, and of which none was known."""
    presumed: list[_Long] = field(default_factory=list)
    """Long parts that begin as they did, of which no more was looked at."""

    def each_left(self, leaves: Collection[str]) -> Iterator[Callable[[], None]]:
        """What is left to hash of what was presumed of these leaves, a few blocks each; by any thread."""
        for one in self.presumed:
            if one.part.leaf in leaves:
                yield from (partial(one.hash, start, stop) for _, start, stop in one.steps)

    def not_as_presumed(self, leaves: Collection[str]) -> set[str]:
        """Those of the leaves of which a part is not as it was, or was not hashed to its end."""
        presumed = {one.part.leaf for one in self.presumed if not one.is_as_it_was}
        return presumed.intersection(leaves)

    def add(self, rank: int, part: Part, own: bytes, *, same: bool) -> bool:
        """Note what a look at a part has shown; returns whether it is as it was."""
        if own:
            self.digests[rank, part.leaf, part.first, part.last, part.box] = own
        if not same:
            self.changed.add(part.leaf)
        return same


def look(
    files: Iterable[KnownFile],
    tensor_of: TensorOf,
    turn: int,
    presume: Callable[[str], bool] | None = None,
) -> Findings:
    """Compare what files hold with memory. Another `turn` takes another sample.

    Where `presume` allows it of a leaf, a long part of it counts as unchanged if it begins as it did; what is
    left to hash of it the findings tell.
    """
    found = Findings()
    small: list[_Short] = []
    long: list[_Long] = []
    for file in files:
        for part, digests in zip(file.parts, file.digests, strict=True):
            if part is None:
                continue
            if part.nbytes < SMALL_BYTES:
                small.append((file.rank, part, digests))
            elif part.nbytes <= BLOCK:
                _look_at_short(found, tensor_of, file.rank, part, digests)
            elif one := _begun(found, tensor_of, file.rank, part, digests, file.probes.get(part)):
                # What a device sends is copied in the stream of the thread that asks.
                later = presume is not None and presume(part.leaf) and one.begins_alike and one.flat.is_cpu
                (found.presumed if later else long).append(one)
    _look_at_long(found, long)
    if len(small) > MANY_SMALL and not _any_unchanged(found, tensor_of, small, turn):
        found.changed.update([part.leaf for _, part, *_ in small])
    else:
        for short in small:
            _look_at_short(found, tensor_of, *short)
    return found


def _any_unchanged(found: Findings, tensor_of: TensorOf, small: list[_Short], turn: int) -> bool:
    step = len(small) // SAMPLE
    return any(_look_at_short(found, tensor_of, *short) for short in small[turn % step :: step])


def _look_at_short(found: Findings, tensor_of: TensorOf, rank: int, part: Part, digests: bytes) -> bool:
    flat = _elements(tensor_of(rank, part), part, digests)
    own = b"" if flat is None else block_digests(dtypes.stored_bytes(flat, part.leaf))
    return found.add(rank, part, own, same=flat is not None and own == digests)


def _elements(tensor: torch.Tensor | None, part: Part, digests: bytes) -> torch.Tensor | None:
    """The elements of a part, in a row where they are some of a tensor; None where there are not as many."""
    count = part.last - part.first
    if tensor is None or part.last > tensor.numel():
        return None
    if len(digests) != block_count(count * tensor.element_size()) * SIZE:
        return None
    return tensor if count == tensor.numel() else tensor.detach().reshape(-1)[part.first : part.last]


@dataclass
class _Long:
    """A part that is hashed in steps, by any thread."""

    rank: int
    part: Part
    flat: torch.Tensor
    digests: bytes
    begins_alike: bool = False
    """Its first bytes were known, and are as they were."""
    own: dict[int, bytes] = field(default_factory=dict)
    """By first block, the digests of what is in memory."""
    differs: bool = False

    @property
    def steps(self) -> Iterator[tuple[_Long, int, int]]:
        """First one block, then several at a time: what has changed shows mostly in the first."""
        count = len(self.digests) // SIZE
        yield self, 0, 1
        for start in range(1, count, MANY_BLOCKS):
            yield self, start, min(start + MANY_BLOCKS, count)

    def hash(self, start: int, stop: int) -> None:
        """Look at some blocks, unless another one is known to differ."""
        if self.differs:
            return
        width = BLOCK // self.flat.element_size()
        elements = self.flat[start * width : stop * width]
        own = self.own[start] = block_digests(dtypes.stored_bytes(elements, self.part.leaf))
        if own != self.digests[start * SIZE : stop * SIZE]:
            self.differs = True

    @property
    def probe(self) -> bytes:
        """The digest of its first bytes in memory."""
        first = self.flat[: PROBE // self.flat.element_size()]
        return block_digests(dtypes.stored_bytes(first, self.part.leaf))

    @property
    def is_as_it_was(self) -> bool:
        """Whether all of it was hashed, and none differs."""
        return not self.differs and self.first_digests == self.digests

    @property
    def first_digests(self) -> bytes:
        """The digests of the blocks from the first one on, without gaps."""
        found = bytearray()
        while own := self.own.get(len(found) // SIZE):
            found += own
        return bytes(found)


def _begun(
    found: Findings, tensor_of: TensorOf, rank: int, part: Part, digests: bytes, probe: bytes | None
) -> _Long | None:
    """A long part that is to be hashed; None where all is said already.

    `probe` is the digest of its first bytes, and tells what differs.
    """
    whole = tensor_of(rank, part)
    tensor = _elements(whole, part, digests)
    if whole is None or tensor is None:
        found.add(rank, part, b"", same=False)
        return None
    one = _Long(rank, part, tensor.detach().reshape(-1), digests)
    if probe is not None and one.probe != probe:
        found.add(rank, part, b"", same=False)
        return None
    one.begins_alike = probe is not None
    if whole.is_contiguous():
        return one
    _look_at_long(found, [one])  # at once: it is a copy, and many of them would not find room
    return None


def _look_at_long(found: Findings, long: list[_Long]) -> None:
    """Hash all of them, and note what it shows."""

    def work(steps: Iterator[tuple[_Long, int, int]]) -> None:
        for one, start, stop in steps:
            one.hash(start, stop)

    threads = lookers() if all(one.flat.is_cpu for one in long) else 1
    share(work, (step for one in long for step in one.steps), threads if long else 1, name="torchrelay-look")
    for one in long:
        found.add(one.rank, one.part, one.first_digests, same=not one.differs)
        if not one.differs and not one.begins_alike:
            found.probes[one.rank, one.part] = one.probe
