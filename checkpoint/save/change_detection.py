"""Whether memory has the bytes of an epoch, or was written meanwhile, by digests of parts.

The files of an epoch are shared out between the processes as they were written, so together they know
all of it. After a load they are found in the headers of its files.

Nothing is referenced by an epoch whose bytes were not hashed in full: where a save allows it, a long part
that begins as it did is presumed unchanged, and what is left of it is hashed beside the write, before the
commit (`ChangeScan.each_left`). What differs costs little: a part ends at
its first bytes or its first block that differ, and many small parts of which a sample changed to the last
one are taken to have changed, all of them, without a look. Parts of more than a block are shared between
a few threads: hashing lets the interpreter go, and one core reads memory slower than several.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
import xxhash

from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_count, block_digests, memory_of
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, LeafRow, Manifest, box_key, piece_key
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Bounds, volume
from torchrelay.checkpoint.format.names import format_key, format_keys
from torchrelay.checkpoint.format.shard.writer import PROBE
from torchrelay.checkpoint.load.verify import Holder, ShardSet
from torchrelay.checkpoint.save.assignments import Assignment
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.work import share
from torchrelay.errors import RelayError
from torchrelay.records import dataclass


class LeafRange(NamedTuple):
    """Elements `first` up to, not including, `last` of a leaf; of a sharded leaf all of `box`."""

    leaf: str
    first: int
    last: int
    nbytes: int
    box: Bounds | None = None


@dataclass(frozen=True)
class KnownFile:
    """A file, and what it holds: parts with the digests of their blocks, one after another.

    `rank` is the node that compares them with its own. A part is None where nobody ever refers to it.
    """

    rank: int
    path: str
    nbytes: int
    parts: tuple[LeafRange | None, ...]
    digests: tuple[bytes, ...]
    probes: Mapping[LeafRange, bytes] = field(default_factory=dict)
    """The digests of the first `PROBE` bytes of long parts that this process wrote, or has seen unchanged."""

    def of(self, leaves: Collection[str], probes: Mapping[tuple[int, LeafRange], bytes]) -> KnownFile:
        """The same file, for these leaves only; `probes` are found out since, by rank and part."""
        both = zip(self.parts, self.digests, strict=True)
        kept = [(part, digests) for part, digests in both if part is not None and part.leaf in leaves]
        parts = tuple(part for part, _ in kept)
        more = {part: probes[self.rank, part] for part in parts if (self.rank, part) in probes}
        digests = tuple(one for _, one in kept)
        return replace(self, parts=parts, digests=digests, probes={**self.probes, **more})


@dataclass(frozen=True)
class OwnFiles:
    """The files that this process answers for; `lost` are leaves whose files cannot be read."""

    files: tuple[KnownFile, ...] = ()
    lost: frozenset[str] = frozenset()


def known_of(storage: Storage, manifest: Manifest, nodes: Sequence[str], hosted: Iterable[int]) -> OwnFiles:
    """What the headers of an epoch's files say of the parts that the hosted nodes answer for.

    `nodes` are the names of today's nodes. A node answers for what it wrote; what nodes that are gone
    wrote is shared out between all.
    """
    number_of = {name: rank for rank, name in enumerate(nodes)}
    mine, here = {}, set(hosted)
    for number, name in enumerate(manifest.world.names):
        rank = number_of.get(name, number % len(nodes))
        if rank in here:
            mine[number] = rank
    headers = _Headers(storage, manifest)
    files: dict[tuple[int, str, int], dict[LeafRange, bytes]] = {}
    lost = set()
    for number, leaf, part, key in _parts_of(manifest, mine):
        found = headers.find(leaf, number, key)
        if found is None:
            lost.add(leaf.name)
        else:
            digests, path, nbytes = found
            files.setdefault((mine[number], path, nbytes), {})[part] = digests
    known = (KnownFile(*file, tuple(parts), tuple(parts.values())) for file, parts in files.items())
    return OwnFiles(tuple(known), frozenset(lost))


def _parts_of(manifest: Manifest, nodes: Iterable[int]) -> Iterator[tuple[int, LeafRow, LeafRange, str]]:
    """What these nodes store of tensors: number of the node, leaf, part, and its key."""
    numbers = sorted(nodes)
    for row, leaf in enumerate(manifest.leaves):
        if leaf.kind == "tensor" and leaf.alias_of is None and leaf.role not in OF_POSITION:
            for number in numbers:
                for part, key in _held(manifest, row, leaf, number):
                    yield number, leaf, part, key


def _held(manifest: Manifest, row: int, leaf: LeafRow, number: int) -> Iterator[tuple[LeafRange, str]]:
    layout, width = manifest.layouts[leaf.layout], leaf.item_bytes
    if isinstance(layout, Mesh):
        for box in layout.stored_by(number, leaf.name, leaf.shape, width):
            count = volume(box)
            part = LeafRange(leaf.name, 0, count, count * width, box)
            yield part, format_key(box_key(leaf.name, leaf.shape, box))
        return
    piece = layout.held_by(number, row, leaf.elements)
    if piece is not None:
        part = LeafRange(leaf.name, piece.first, piece.last, (piece.last - piece.first) * width)
        yield part, format_key(piece_key(leaf, piece))


class _Headers:
    """The headers of an epoch's files; a file that cannot be opened is tried once."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._manifest = manifest
        self._shards = ShardSet(storage, manifest)
        self._broken: set[Holder] = set()

    def find(self, leaf: LeafRow, node: int, key: str) -> tuple[bytes, str, int] | None:
        """Digests, path and size of the file of a part; None when it cannot be read."""
        holder = (leaf.source, node, leaf.group)
        if holder in self._broken:
            return None
        try:
            files = self._shards.open(holder)
        except (RelayError, OSError):
            self._broken.add(holder)
            return None
        for header, row in zip(files.headers, self._manifest.files[holder], strict=True):
            if key in header.entries:
                return bytes(header.entries[key].digests), header.path, row.nbytes
        return None


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

_Short = tuple[int, LeafRange, bytes]
"""Rank, part of at most a block, and the digests that a file has of it."""
PartKey = tuple[int, str, int, int, Bounds | None]
"""Rank, leaf, first, last and box of a part."""
TensorOf = Callable[[int, LeafRange], "torch.Tensor | None"]
"""What a hosted node has of a part's leaf: all of it, or the box; None where it has no such part."""


def lookers() -> int:
    """Threads that hash long parts of one process."""
    return min(LOOKERS, os.cpu_count() or 1)


@dataclass
class ChangeScan:
    """The leaves of which a part is not as it was, or not where it was.

    `digests` are those of what is in memory, of the first blocks of a part or of all.
    """

    changed: set[str] = field(default_factory=set)
    digests: dict[PartKey, bytes] = field(default_factory=dict)
    probes: dict[tuple[int, LeafRange], bytes] = field(default_factory=dict)
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

    def add(self, rank: int, part: LeafRange, own: bytes, *, same: bool) -> bool:
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
) -> ChangeScan:
    """Compare what files hold with memory. Another `turn` takes another sample.

    Where `presume` allows it of a leaf, a long part of it counts as unchanged if it begins as it did; what is
    left to hash of it the findings tell.
    """
    found = ChangeScan()
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
    step = len(small) // SAMPLE
    if len(small) > MANY_SMALL and not any(
        _look_at_short(found, tensor_of, *short) for short in small[turn % step :: step]
    ):
        found.changed.update([part.leaf for _, part, *_ in small])
    else:
        for short in small:
            _look_at_short(found, tensor_of, *short)
    return found


def _look_at_short(
    found: ChangeScan, tensor_of: TensorOf, rank: int, part: LeafRange, digests: bytes
) -> bool:
    flat = _elements(tensor_of(rank, part), part, digests)
    own = b"" if flat is None else block_digests(dtypes.stored_bytes(flat, part.leaf))
    return found.add(rank, part, own, same=flat is not None and own == digests)


def _elements(tensor: torch.Tensor | None, part: LeafRange, digests: bytes) -> torch.Tensor | None:
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
    part: LeafRange
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
    found: ChangeScan, tensor_of: TensorOf, rank: int, part: LeafRange, digests: bytes, probe: bytes | None
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


def _look_at_long(found: ChangeScan, long: list[_Long]) -> None:
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


def parts_by_key(assignments: Sequence[Assignment]) -> dict[str, LeafRange]:
    """Random states, gradients and values are left out: nobody refers to them."""
    found = [one for one in assignments if one.leaf.kind == "tensor" and one.leaf.role not in OF_POSITION]
    parts = [LeafRange(one.leaf.name, one.first, one.last, one.nbytes, one.box) for one in found]
    return dict(zip(format_keys([one.key for one in found]), parts, strict=True))
