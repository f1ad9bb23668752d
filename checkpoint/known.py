"""What this process knows of the bytes on disk: the block digests of the parts that files hold.

The files of an epoch are shared out between the processes as they were written, so together they know
all of it. After a load they are found in the headers of its files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from torchrelay.checkpoint.format.manifest.keys import box_key, piece_key
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, LeafRow, Manifest
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Bounds, volume
from torchrelay.checkpoint.format.names import format_key
from torchrelay.checkpoint.load.reads.shard_set import Holder, ShardSet
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError
from torchrelay.records import dataclass


class Part(NamedTuple):
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
    parts: tuple[Part | None, ...]
    digests: tuple[bytes, ...]
    probes: Mapping[Part, bytes] = field(default_factory=dict)
    """The digests of the first `PROBE` bytes of long parts that this process wrote, or has seen unchanged."""

    def of(self, leaves: Collection[str], probes: Mapping[tuple[int, Part], bytes]) -> KnownFile:
        """The same file, for these leaves only; `probes` are found out since, by rank and part."""
        both = zip(self.parts, self.digests, strict=True)
        kept = [(part, digests) for part, digests in both if part is not None and part.leaf in leaves]
        parts = tuple(part for part, _ in kept)
        more = {part: probes[self.rank, part] for part in parts if (self.rank, part) in probes}
        digests = tuple(one for _, one in kept)
        return replace(self, parts=parts, digests=digests, probes={**self.probes, **more})


@dataclass(frozen=True)
class Known:
    """The files that this process answers for; `lost` are leaves whose files cannot be read."""

    files: tuple[KnownFile, ...] = ()
    lost: frozenset[str] = frozenset()


def known_of(storage: Storage, manifest: Manifest, nodes: Sequence[str], hosted: Iterable[int]) -> Known:
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
    files: dict[tuple[int, str, int], dict[Part, bytes]] = {}
    lost = set()
    for number, leaf, part, key in _parts_of(manifest, mine):
        found = headers.find(leaf, number, key)
        if found is None:
            lost.add(leaf.name)
        else:
            digests, path, nbytes = found
            files.setdefault((mine[number], path, nbytes), {})[part] = digests
    known = (KnownFile(*file, tuple(parts), tuple(parts.values())) for file, parts in files.items())
    return Known(tuple(known), frozenset(lost))


def _parts_of(manifest: Manifest, nodes: Iterable[int]) -> Iterator[tuple[int, LeafRow, Part, str]]:
    """What these nodes store of tensors: number of the node, leaf, part, and its key."""
    numbers = sorted(nodes)
    for row, leaf in enumerate(manifest.leaves):
        if leaf.kind == "tensor" and leaf.alias_of is None and leaf.role not in OF_POSITION:
            for number in numbers:
                for part, key in _held(manifest, row, leaf, number):
                    yield number, leaf, part, key


def _held(manifest: Manifest, row: int, leaf: LeafRow, number: int) -> Iterator[tuple[Part, str]]:
    layout, width = manifest.layouts[leaf.layout], leaf.item_bytes
    if isinstance(layout, Mesh):
        for box in layout.stored_by(number, leaf.name, leaf.shape, width):
            count = volume(box)
            part = Part(leaf.name, 0, count, count * width, box)
            yield part, format_key(box_key(leaf.name, leaf.shape, box))
        return
    piece = layout.held_by(number, row, leaf.elements)
    if piece is not None:
        part = Part(leaf.name, piece.first, piece.last, (piece.last - piece.first) * width)
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
