"""Detect which tensors changed since an epoch, or during a copy, by comparing digests of blocks.

The files of an epoch are divided between the processes as they were written, so together they cover it. After
a load their digests come from the headers of its files.

Every referenced byte is hashed in full before the commit. If a save allows it, a long part whose first bytes
match is assumed unchanged, and the rest is hashed in parallel with the write (`ChangeScan.each_left`).
Changed tensors cost little: a part ends at its first difference, and if every one of a sample of small parts
changed, all small ones count as changed without hashing. Parts of more than a block are divided between a few
threads.
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
from torchrelay.checkpoint.format.names import format_key
from torchrelay.checkpoint.format.shard.writer import PROBE
from torchrelay.checkpoint.load.verify import Holder, ShardSet
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
    """A file and its parts, one after another, with the digests of their blocks.

    `rank` is the node that compares them with its own memory. A part that is never referenced is None.
    """

    rank: int
    path: str
    nbytes: int
    parts: tuple[LeafRange | None, ...]
    digests: tuple[bytes, ...]
    probes: Mapping[LeafRange, bytes] = field(default_factory=dict)
    """Digests of the first `PROBE` bytes of long parts that this process wrote or found unchanged."""

    def of(self, leaves: Collection[str], probes: Mapping[tuple[int, LeafRange], bytes]) -> KnownFile:
        """The same file, restricted to these leaves; `probes` were computed since, by rank and part."""
        both = zip(self.parts, self.digests, strict=True)
        kept = [(part, digests) for part, digests in both if part is not None and part.leaf in leaves]
        parts = tuple(part for part, _ in kept)
        more = {part: probes[self.rank, part] for part in parts if (self.rank, part) in probes}
        digests = tuple(one for _, one in kept)
        return replace(self, parts=parts, digests=digests, probes={**self.probes, **more})


@dataclass(frozen=True)
class OwnFiles:
    """The files that this process compares; `lost` are leaves whose files cannot be read."""

    files: tuple[KnownFile, ...] = ()
    lost: frozenset[str] = frozenset()


def known_of(storage: Storage, manifest: Manifest, nodes: Sequence[str], hosted: Iterable[int]) -> OwnFiles:
    """Digests, from file headers, of the parts of an epoch that the hosted nodes compare.

    `nodes` are the current nodes. A node compares what it wrote; the files of absent nodes are divided
    between all.
    """
    number_of = {name: rank for rank, name in enumerate(nodes)}
    mine, here = {}, set(hosted)
    for number, name in enumerate(manifest.world.names):
        rank = number_of.get(name, number % len(nodes))
        if rank in here:
            mine[number] = rank
    shards, broken = ShardSet(storage, manifest), set[Holder]()

    def find(leaf: LeafRow, node: int, key: str) -> tuple[bytes, str, int] | None:
        """Digests, path and size of the file of a part; None when it cannot be read, which is tried once."""
        holder = (leaf.source, node, leaf.group)
        if holder in broken:
            return None
        try:
            headers = shards.open(holder).headers
        except (RelayError, OSError):
            broken.add(holder)
            return None
        for header, row in zip(headers, manifest.files[holder], strict=True):
            if key in header.entries:
                return bytes(header.entries[key].digests), header.path, row.nbytes
        return None

    files: dict[tuple[int, str, int], dict[LeafRange, bytes]] = {}
    lost = set()
    for row, leaf in enumerate(manifest.leaves):
        if leaf.kind != "tensor" or leaf.alias_of is not None or leaf.role in OF_POSITION:
            continue
        for number in sorted(mine):
            for part, key in _held(manifest, row, leaf, number):
                if (found := find(leaf, number, key)) is None:
                    lost.add(leaf.name)
                else:
                    digests, path, nbytes = found
                    files.setdefault((mine[number], path, nbytes), {})[part] = digests
    known = (KnownFile(*file, tuple(parts), tuple(parts.values())) for file, parts in files.items())
    return OwnFiles(tuple(known), frozenset(lost))


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


MANY_BLOCKS = 8
"""Bytes hashed at a time once the first block is unchanged."""
LOOKERS = 4
"""Threads that hash parts of more than a block, at most one per core.

Shorter parts take as long in Python as in hashing, and threads would wait for each other.
"""
SMALL_BYTES = 64 << 10
"""A part below this costs as much to compare as to write."""
MANY_SMALL = 512
"""So many small parts are compared regardless of the sample."""
SAMPLE = 64

_Short = tuple[int, LeafRange, bytes]
"""Rank, part of at most a block, and the digests that a file has of it."""
PartKey = tuple[int, str, int, int, Bounds | None]
"""Rank, leaf, first, last and box of a part."""
TensorOf = Callable[[int, LeafRange], "torch.Tensor | None"]
"""A hosted node's tensor of a part's leaf: all of it, or the box; None without such a part."""


def hash_threads() -> int:
    """Number of threads that hash long parts in one process."""
    return min(LOOKERS, os.cpu_count() or 1)


@dataclass
class ChangeScan:
    """Leaves of which a part has changed or is stored elsewhere; `digests` are those of the memory."""

    changed: set[str] = field(default_factory=set)
    digests: dict[PartKey, bytes] = field(default_factory=dict)
    probes: dict[tuple[int, LeafRange], bytes] = field(default_factory=dict)
    """Digests of the first bytes of unchanged long parts that had none."""
    assumed: list[_Long] = field(default_factory=list)
    """Long parts whose first bytes match and whose rest is not hashed yet."""

    def each_left(self, leaves: Collection[str]) -> Iterator[Callable[[], None]]:
        """The pending hashes of these leaves, a few blocks each; any thread may call them."""
        for one in self.assumed:
            if one.part.leaf in leaves:
                yield from (partial(one.hash, start, stop) for _, start, stop in one.steps)

    def not_as_assumed(self, leaves: Collection[str]) -> set[str]:
        """Those of the leaves of which a part changed, or was not hashed to its end."""
        assumed = {one.part.leaf for one in self.assumed if one.differs or one.first_digests != one.digests}
        return assumed.intersection(leaves)

    def add(self, rank: int, part: LeafRange, own: bytes, *, same: bool) -> bool:
        """Note the result for a part; returns whether it is unchanged."""
        if own:
            self.digests[rank, part.leaf, part.first, part.last, part.box] = own
        if not same:
            self.changed.add(part.leaf)
        return same


def look(
    files: Iterable[KnownFile],
    tensor_of: TensorOf,
    turn: int,
    assume_unchanged: Callable[[str], bool] | None = None,
) -> ChangeScan:
    """Compare files with memory. Another `turn` takes another sample.

    Where `assume_unchanged` allows it for a leaf, a long part with matching first bytes counts as unchanged.
    The result lists what remains to be hashed.
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
                # A transfer from a device runs in the stream of the calling thread.
                later = (
                    assume_unchanged is not None
                    and assume_unchanged(part.leaf)
                    and one.begins_alike
                    and one.flat.is_cpu
                )
                (found.assumed if later else long).append(one)
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
    """The elements of a part, contiguous if they are some of a tensor; None if the count differs."""
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
    """Its first bytes had a digest, and match."""
    own: dict[int, bytes] = field(default_factory=dict)
    """Digests of the memory, by first block."""
    differs: bool = False

    @property
    def steps(self) -> Iterator[tuple[_Long, int, int]]:
        """First one block, then several at a time: most changes show in the first."""
        count = len(self.digests) // SIZE
        yield self, 0, 1
        for start in range(1, count, MANY_BLOCKS):
            yield self, start, min(start + MANY_BLOCKS, count)

    def hash(self, start: int, stop: int) -> None:
        """Hash some blocks, unless another one is known to differ."""
        if self.differs:
            return
        width = BLOCK // self.flat.element_size()
        elements = self.flat[start * width : stop * width]
        own = self.own[start] = block_digests(dtypes.stored_bytes(elements, self.part.leaf))
        if own != self.digests[start * SIZE : stop * SIZE]:
            self.differs = True

    @property
    def probe(self) -> bytes:
        first = self.flat[: PROBE // self.flat.element_size()]
        return block_digests(dtypes.stored_bytes(first, self.part.leaf))

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
    """A long part to be hashed; None if the result is known. `probe` is the digest of its first bytes."""
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
    _look_at_long(found, [one])  # copied now: there is no room for many copies
    return None


def _look_at_long(found: ChangeScan, long: list[_Long]) -> None:
    def work(steps: Iterator[tuple[_Long, int, int]]) -> None:
        for one, start, stop in steps:
            one.hash(start, stop)

    threads = hash_threads() if all(one.flat.is_cpu for one in long) else 1
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
    else:  # only the hashed bytes leave the device
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for first, last in stretches(nbytes, verify):
            hashed.update(memory_of(flat[first:last].cpu()))
    return hashed.intdigest()


def stretches(nbytes: int, verify: Verify) -> Iterator[tuple[int, int]]:
    """Ranges to hash: the first and the last bytes are always included."""
    size = SAMPLE_BYTES // STRETCHES
    if verify == "full" or nbytes <= SAMPLE_BYTES:
        yield 0, nbytes
        return
    for index in range(STRETCHES):
        first = (nbytes - size) * index // (STRETCHES - 1)
        yield first, first + size


@lru_cache(maxsize=1 << 13)
def _memories(address: int, nbytes: int, verify: Verify) -> tuple[ctypes.Array[ctypes.c_ubyte], ...]:
    """Stretches of memory, valid while a tensor is there; cached, as each save asks for the same."""
    return tuple(
        (ctypes.c_ubyte * (last - first)).from_address(address + first)
        for first, last in stretches(nbytes, verify)
    )
