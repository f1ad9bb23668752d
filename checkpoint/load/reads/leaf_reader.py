"""Plan and perform verified reads of leaves from the files and pieces that hold them.

The same plan can verify its blocks without keeping them. Requests are sorted by file and offset: small
neighbours are read together, large ones straight into their destination, and non-contiguous boxes of sharded
leaves through slabs. Reads use at most 64 MiB beyond the destinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from math import prod
from operator import attrgetter
from typing import Any

import xxhash

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.manifest.schema import (
    LeafRow,
    Manifest,
    ReplicatedLayout,
    Split,
    parts_near,
    parts_of,
)
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import LocalTarget, whole_target
from torchrelay.checkpoint.format.names import Flat, Key, encode_name, format_key
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.format.shard.reads import (
    PLAIN,
    Portion,
    ReadOptions,
    ReadRequest,
    ThreadMemory,
    read_portions,
)
from torchrelay.checkpoint.load.lookup import find_row, holder_of
from torchrelay.checkpoint.load.reads.boxes import BoxPlan, BoxRead
from torchrelay.checkpoint.load.verify import Holder, ShardSet, seen_twice
from torchrelay.checkpoint.storage.base import Memory, Storage, worth_of_a_request
from torchrelay.errors import UsageError
from torchrelay.records import Json, dataclass

NOWHERE = memoryview(b"")


@dataclass(frozen=True)
class LeafRead:
    """All bytes of a leaf, as `node` has it, into 1-D memory of exactly that size.

    With a `target` the memory is that of a tensor which holds only some boxes of the leaf. A read into
    NOWHERE can only be verified.
    """

    leaf: str
    destination: memoryview
    node: str | None = None
    target: LocalTarget | None = None


class ReadPlan:
    """Planned reads of some files: `straight` ones go to their destinations directly."""

    def __init__(self, straight: Iterable[tuple[ShardHeader, ReadRequest]], boxes: BoxPlan) -> None:
        self._boxes = boxes
        self._straight: dict[str, tuple[ShardHeader, list[ReadRequest]]] = {}
        for header, request in [*straight, *boxes.straight]:
            self._straight.setdefault(header.path, (header, []))[1].append(request)

    def read(self, options: ReadOptions) -> None:
        """Fill all destinations, verified, in the order of the files.

        A mismatch is read again before it is believed. After an error destinations are undefined. Raises
        DamagedError and StorageError.
        """
        slabs = self._boxes.portions(options)
        nbytes = sum(one.stop - one.start for _, requests in self._straight.values() for one in requests)
        nbytes += sum(one.nbytes for some in slabs.values() for one in some)

        def portions() -> Iterator[Portion]:
            """In file order; straight reads are made file by file."""
            for path in sorted(self._straight.keys() | slabs.keys()):
                found = [*slabs.get(path, ())]
                if path in self._straight:
                    header, requests = self._straight[path]
                    found += header.portions(requests, options)
                yield from sorted(found, key=attrgetter("begin"))

        read_portions(portions(), nbytes, options, seen_twice)

    def check(self, options: ReadOptions) -> int:
        """Verify all blocks that `read` reads; returns the number of bytes. Raises as `read` does."""
        wanted = {path: (header, list(requests)) for path, (header, requests) in self._straight.items()}
        for header, request in self._boxes.wanted():
            wanted.setdefault(header.path, (header, []))[1].append(request)
        memory = ThreadMemory()
        return check_portions(
            [one for header, requests in wanted.values() for one in header.checks(requests, memory)], options
        )


def check_portions(portions: Sequence[Portion], options: ReadOptions) -> int:
    """Verify all portions in file order; returns the number of bytes. Raises as they do."""
    nbytes = sum(one.nbytes for one in portions)
    read_portions(sorted(portions, key=attrgetter("path", "begin")), nbytes, options, seen_twice)
    return nbytes


Source = tuple[str, str | None]
"""A leaf, and the node whose value is chosen."""


class LeafReader:
    """Reads leaves of one epoch; `shards` are those that a verification has opened already."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        shards: ShardSet | None = None,
        options: ReadOptions = PLAIN,
    ) -> None:
        self.manifest = manifest
        self.options = options
        self.shards = shards or ShardSet(storage, manifest)

    def spec(self, leaf: str, node: str | None = None) -> LeafRow:
        """The row of a leaf, aliases followed; raises UsageError for an unknown name."""
        return self.manifest.leaves[find_row(self.manifest, leaf, node)]

    def read_into(self, leaf: str, destination: memoryview, node: str | None = None) -> None:
        """Fill `destination` with a tensor's bytes; see `read_many`."""
        self.read_many([LeafRead(leaf, destination, node)])

    def read_many(self, reads: Iterable[LeafRead]) -> None:
        """Fill all destinations as `ReadPlan.read` does; raises UsageError for memory of another size."""
        self.plan(reads).read(self.options)

    def plan(self, reads: Iterable[LeafRead]) -> ReadPlan:
        """Plan what `read_many` does; opens headers only, and raises as it does."""
        return ReadPlan(*self.planned(reads))

    @property
    def is_remote(self) -> bool:
        """Whether reads go over a network, request by request."""
        return worth_of_a_request(self.shards.storage) > 0

    def planned(self, reads: Iterable[LeafRead]) -> tuple[list[tuple[ShardHeader, ReadRequest]], BoxPlan]:
        """The reads of replicated leaves and of boxes; opens headers only."""
        boxes: list[BoxRead] = []
        found: list[tuple[ShardHeader, ReadRequest]] = []
        for read in reads:
            if read.target is None and not self._sharded(read):
                found += self._requests(read)
            else:
                boxes.append(self.boxes(read))
        return found, BoxPlan(boxes, self.header)

    def holder(self, row: int) -> Holder | None:
        """The holder of a leaf stored whole and alike on all nodes; None for any other leaf."""
        leaf = self.manifest.leaves[row]
        layout = self.manifest.layouts[leaf.layout]
        node = layout.whole.get(row) if isinstance(layout, Split) else None
        node = layout.nodes[0] if isinstance(layout, ReplicatedLayout) else node
        whole = node is not None and leaf.kind == "tensor" and leaf.alias_of is None
        return (leaf.source, node, leaf.group) if whole and node is not None else None

    def read_rows(self, rows: Sequence[int], memories: Sequence[Memory]) -> None:
        """Fill 1-D bytes with tensors that have a `holder`; raises as `read_many` does."""
        for header, keys, places in self._whole(rows):
            wanted = keys, [memories[place] for place in places]
            seen_twice(partial(header.read_whole, *wanted, self.options))

    def check_rows(self, rows: Sequence[int]) -> int:
        """Verify what `read_rows` reads; returns the number of bytes. Raises as it does."""
        if not self.options.verify:
            return 0
        memory = ThreadMemory()
        found = [one for header, keys, _ in self._whole(rows) for one in header.checks_whole(keys, memory)]
        return check_portions(found, self.options)

    def _whole(self, rows: Sequence[int]) -> Iterator[tuple[ShardHeader, list[str], list[int]]]:
        """The keys of tensors stored whole in each file, and their places among the rows."""
        leaves = self.manifest.leaves
        found: dict[Holder | None, list[int]] = {}
        for place, row in enumerate(rows):
            found.setdefault(self.holder(row), []).append(place)
        for holder, places in found.items():
            if holder is None:
                raise UsageError(f"leaf {rows[places[0]]} is not stored whole in one file")
            keys = [encode_name(leaves[rows[place]].name) for place in places]
            for header in seen_twice(partial(self.shards.open, holder)).headers:
                here = [key in header.entries for key in keys]
                yield header, list(compress(keys, here)), list(compress(places, here))

    def read_stored(self, header: ShardHeader, requests: list[ReadRequest]) -> None:
        """Read requests of one file, verified; a mismatch is read again before it is believed."""
        seen_twice(partial(header.read_many, requests, self.options))

    def read_range(
        self, leaf: str, start: int, stop: int, destination: memoryview, node: str | None = None
    ) -> None:
        """Fill `destination` with bytes [start, stop) of a tensor, from the blocks that hold them."""
        spec = self.spec(leaf, node)
        target = destination.cast("B")
        if spec.kind != "tensor" or not 0 <= start <= stop <= spec.nbytes or len(target) != stop - start:
            raise UsageError(f"{leaf!r} ({spec.nbytes} bytes, {spec.kind}) has no bytes {start} to {stop}")
        if self._sharded(LeafRead(leaf, destination, node)):
            whole = bytearray(spec.nbytes)  # its bytes are stored in boxes, in another order
            self.read_into(leaf, memoryview(whole), node)
            target[:] = memoryview(whole)[start:stop]
            return
        for key, text, header in self._places(leaf, node):
            begin, end = (key.start, key.stop) if isinstance(key, Flat) else (0, spec.elements)
            begin, end = begin * spec.item_bytes, end * spec.item_bytes
            first, last = max(start, begin), min(stop, end)
            if first < last:
                part = target[first - start : last - start]
                self.read_stored(header, [ReadRequest(text, first - begin, last - begin, part)])

    def value_json(self, leaf: str, node: str | None = None) -> Json:
        """A value in its typed form."""
        row = find_row(self.manifest, leaf, node)
        if row in self.manifest.values:
            return self.manifest.values[row]
        found = self.manifest.leaves[row]
        if found.kind != "value":
            raise UsageError(f"{leaf!r} is a tensor, not a value: load it with load_tensors")
        owner = holder_of(self.manifest, row, node)
        number, _ = self._parts(row, owner)[0]
        return seen_twice(lambda: self.shards.open((found.source, number, found.group))).values[found.name]

    def value(self, leaf: str, node: str | None = None) -> Any:
        """The value as the user saved it; raises DamagedError if it refers to tensors beside it."""
        return values.decode(self.value_json(leaf, node))

    def digest(self, leaf: str, node: str | None = None) -> str:
        """Digest (hex) of a tensor's bytes, from the headers only; values have none.

        It is xxh3-128 over the digests of the leaf's blocks, so it does not depend on how many nodes wrote
        them. The digest of a sharded tensor depends on its boxes too.
        """
        hashed = xxhash.xxh3_128()
        for _, text, header in self._places(leaf, node):
            hashed.update(header.entries[text].digests)
        return str(hashed.hexdigest())

    def same_content(self, one: Source, other: Source) -> bool:
        """Whether two tensors of one form have the same bytes: by headers, or read if cut differently."""
        if self.digest(*one) == self.digest(*other):
            return True
        rows = [find_row(self.manifest, *source) for source in (one, other)]
        layouts = [self.manifest.layouts[self.manifest.leaves[row].layout] for row in rows]
        if layouts[0] == layouts[1] or not any(isinstance(layout, Mesh) for layout in layouts):
            return False
        whole = [bytearray(self.manifest.leaves[row].nbytes) for row in rows]
        self.read_many(
            LeafRead(leaf, memoryview(w), node) for (leaf, node), w in zip((one, other), whole, strict=True)
        )
        return whole[0] == whole[1]

    def _requests(self, read: LeafRead) -> list[tuple[ShardHeader, ReadRequest]]:
        spec = self.spec(read.leaf, read.node)
        memory = _memory(spec, read, spec.elements)
        found = []
        for key, text, header in self._places(read.leaf, read.node):
            first, stop = (key.start, key.stop) if isinstance(key, Flat) else (0, spec.elements)
            part = memory[first * spec.item_bytes : stop * spec.item_bytes]
            found.append((header, ReadRequest(text, 0, (stop - first) * spec.item_bytes, part)))
        return found

    def _sharded(self, read: LeafRead) -> bool:
        return isinstance(self.manifest.layouts[self.spec(read.leaf, read.node).layout], Mesh)

    def boxes(self, read: LeafRead) -> BoxRead:
        """The stored parts that the boxes of a read come from; opens no file. Raises as `read_many` does."""
        row = find_row(self.manifest, read.leaf, read.node)
        spec = self.manifest.leaves[row]
        target = read.target or whole_target(spec.shape)
        memory = _memory(spec, read, prod(target.shape))
        owner = holder_of(self.manifest, row, read.node)
        parts = parts_near(self.manifest.layouts[spec.layout], row, spec, [w.box for w in target.windows])
        return BoxRead(spec, parts if owner is None else parts.of(owner), target, memory)

    def _places(self, leaf: str, node: str | None) -> Iterator[tuple[Key, str, ShardHeader]]:
        """The key of each piece of a leaf, its text, and the file's header."""
        row = find_row(self.manifest, leaf, node)
        found = self.manifest.leaves[row]
        parts = self._parts(row, holder_of(self.manifest, row, node))
        for number, key in parts:
            text = format_key(key)
            yield key, text, self.header(found, number, text)

    def _parts(self, row: int, owner: int | None) -> list[tuple[int, Key]]:
        """Node and key of each stored part, or only those of node `owner`."""
        leaf = self.manifest.leaves[row]
        parts = parts_of(self.manifest.layouts[leaf.layout], row, leaf)
        return [part for part in parts if owner is None or part[0] == owner]

    def header(self, leaf: LeafRow, node: int, key: str) -> ShardHeader:
        """The header of the file of a node that holds a key of a leaf; raises as `read_many` does."""
        holder = (leaf.source, node, leaf.group)
        found = self.shards.opened.get(holder) or seen_twice(lambda: self.shards.open(holder))
        return found.with_key(key)


def _memory(spec: LeafRow, read: LeafRead, elements: int) -> memoryview:
    size = elements * spec.item_bytes
    memory = read.destination.cast("B")
    if spec.kind != "tensor" or (len(memory) != size and read.destination is not NOWHERE):
        raise UsageError(f"{read.leaf!r} ({size} bytes, {spec.kind}) cannot fill {len(memory)} bytes")
    return memory
