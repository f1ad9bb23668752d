"""Verified bytes of leaves, from whatever files and pieces they lie in.

Requests are sorted by file and offset; neighbouring small ones are read together and large ones go
straight into their destination, so at most 16 MiB of memory is used beyond the destinations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from torchrelay.checkpoint.disk import values
from torchrelay.checkpoint.disk.layouts import Piece
from torchrelay.checkpoint.disk.manifest import LeafRow, Manifest
from torchrelay.checkpoint.disk.shard_header import StoredEntry
from torchrelay.checkpoint.disk.shard_reader import ReadRequest, ShardHeader
from torchrelay.checkpoint.reading.lookup import find_row, holder_of
from torchrelay.checkpoint.reading.proof import seen_twice
from torchrelay.checkpoint.reading.shard_set import ShardSet, key_of
from torchrelay.checkpoint.storage import Storage
from torchrelay.errors import UsageError

Json = Any


@dataclass(frozen=True)
class LeafRead:
    """All bytes of a leaf, as `node` has it, into 1-D memory of exactly that size."""

    leaf: str
    destination: memoryview
    node: str | None = None


@dataclass(frozen=True)
class _Place:
    """Where a piece is stored."""

    leaf: LeafRow
    piece: Piece
    header: ShardHeader
    key: str

    @property
    def entry(self) -> StoredEntry:
        return self.header.entries[self.key]


class LeafReader:
    """Reads leaves of one epoch; `shards` are those that a proof has opened already."""

    def __init__(self, storage: Storage, manifest: Manifest, shards: ShardSet | None = None) -> None:
        self.manifest = manifest
        self.shards = shards or ShardSet(storage, manifest)

    def spec(self, leaf: str, node: str | None = None) -> LeafRow:
        """What is known of a leaf, aliases followed; raises UsageError for an unknown name."""
        return self.manifest.leaves[find_row(self.manifest, leaf, node)]

    def read_into(self, leaf: str, destination: memoryview, node: str | None = None) -> None:
        """Fill `destination` with a tensor's bytes; see `read_many`."""
        self.read_many([LeafRead(leaf, destination, node)])

    def read_many(self, reads: Iterable[LeafRead]) -> None:
        """Fill all destinations, verified, in the order of the files.

        A mismatch is read again before it is believed. On an error destinations are undefined. Raises
        UsageError for an unknown name, a value, or memory of another size; DamagedError and
        StorageError for what the storage has.
        """
        by_file: dict[str, tuple[ShardHeader, list[ReadRequest]]] = {}
        for read in reads:
            for place, destination in self._requests(read):
                _, requests = by_file.setdefault(place.header.path, (place.header, []))
                requests.append(ReadRequest(place.key, 0, len(destination), destination))
        for path in sorted(by_file):
            header, requests = by_file[path]
            seen_twice(lambda header=header, requests=requests: header.read_many(requests))  # type: ignore[misc]

    def read_range(
        self, leaf: str, start: int, stop: int, destination: memoryview, node: str | None = None
    ) -> None:
        """Fill `destination` with bytes [start, stop) of a tensor, from the blocks that hold them alone."""
        spec = self.spec(leaf, node)
        target = destination.cast("B")
        if spec.kind != "tensor" or not 0 <= start <= stop <= spec.nbytes or len(target) != stop - start:
            raise UsageError(f"{leaf!r} ({spec.nbytes} bytes, {spec.kind}) has no bytes {start} to {stop}")
        for place in self._places(leaf, node):
            begin = place.piece.first * spec.item_bytes
            first, last = max(start, begin), min(stop, place.piece.last * spec.item_bytes)
            if first < last:
                piece = ReadRequest(
                    place.key, first - begin, last - begin, target[first - start : last - start]
                )
                seen_twice(lambda place=place, piece=piece: place.header.read_many([piece]))  # type: ignore[misc]

    def value_json(self, leaf: str, node: str | None = None) -> Json:
        """A value in its typed form."""
        row = find_row(self.manifest, leaf, node)
        if row in self.manifest.values:
            return self.manifest.values[row]
        found = self.manifest.leaves[row]
        if found.kind != "value":
            raise UsageError(f"{leaf!r} is a tensor, not a value: load it with load_tensors")
        owner = holder_of(self.manifest, row, node)
        piece = self._pieces(row, owner)[0]
        return seen_twice(lambda: self.shards.open((found.source, piece.node, found.group))).values[
            found.name
        ]

    def value(self, leaf: str, node: str | None = None) -> Any:
        """A value as the user had it; raises DamagedError if it refers to tensors beside it."""
        return values.decode(self.value_json(leaf, node))

    def digest(self, leaf: str, node: str | None = None) -> str:
        """A digest (hex) of a tensor's bytes, from the headers alone.

        It depends on the bytes and not on how many nodes wrote them: xxh3-128 over the digests of the
        leaf's blocks, which cuts never divide. Values have none.
        """
        hashed = xxhash.xxh3_128()
        for place in self._places(leaf, node):
            hashed.update(place.entry.digests)
        return str(hashed.hexdigest())

    def _requests(self, read: LeafRead) -> list[tuple[_Place, memoryview]]:
        spec = self.spec(read.leaf, read.node)
        target = read.destination.cast("B")
        if spec.kind != "tensor" or len(target) != spec.nbytes:
            raise UsageError(
                f"{read.leaf!r} ({spec.nbytes} bytes, {spec.kind}) cannot fill {len(target)} bytes"
            )
        width = spec.item_bytes
        places = self._places(read.leaf, read.node)
        return [(one, target[one.piece.first * width : one.piece.last * width]) for one in places]

    def _places(self, leaf: str, node: str | None) -> list[_Place]:
        row = find_row(self.manifest, leaf, node)
        found = self.manifest.leaves[row]
        return [self._place(found, piece) for piece in self._pieces(row, holder_of(self.manifest, row, node))]

    def _pieces(self, row: int, owner: int | None) -> list[Piece]:
        leaf = self.manifest.leaves[row]
        pieces = self.manifest.layouts[leaf.layout].pieces(row, leaf.elements)
        return [piece for piece in pieces if owner is None or piece.node == owner]

    def _place(self, leaf: LeafRow, piece: Piece) -> _Place:
        files = seen_twice(lambda: self.shards.open((leaf.source, piece.node, leaf.group)))
        key = key_of(leaf, piece)
        return _Place(leaf, piece, files.with_key(key), key)
