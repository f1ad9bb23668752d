"""Represent the content of an epoch: leaves, their layouts, their files.

A layout states which nodes hold which elements of a leaf, in memory and on disk, and under which keys. Nodes
are indexes into the manifest's node table, leaves are row numbers.

A manifest states for every leaf which nodes hold which elements, and for every shard file its length and the
digest of its header. It does not repeat the headers, so its size grows with blobs + nodes and not with their
product.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache, partial
from itertools import compress
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from torchrelay.checkpoint.format.dtypes import item_bytes_of
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Bounds, whole
from torchrelay.checkpoint.format.names import (
    Box,
    Flat,
    Key,
    ShardName,
    Whole,
    attempt_directory,
    encode_name,
    format_key,
    position_of,
    shard_file_name,
    suffix_of,
)
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.records import Json, dataclass


class Cut(NamedTuple):
    """A position in a byte string: before element `element` of its item number `item`."""

    item: int
    element: int


@dataclass(frozen=True)
class LeafSlice:
    """Elements `first` up to, not including, `last` of a leaf (in row-major order), held by `node`."""

    node: int
    first: int
    last: int


@dataclass(frozen=True)
class _WholeOnNodes:
    """Nodes that have a leaf whole; `writers` are those that store it."""

    nodes: tuple[int, ...]
    split = False
    """Whether different nodes store different parts of one leaf."""

    @property
    def writers(self) -> tuple[int, ...]:
        """The nodes that store something: all."""
        return self.nodes

    @cached_property
    def members(self) -> frozenset[int]:
        """The writers as a set."""
        return frozenset(self.writers)

    def pieces(self, leaf: int, size: int) -> tuple[LeafSlice, ...]:
        """The stored pieces, each whole."""
        return tuple(LeafSlice(node, 0, size) for node in self.writers)

    def stores(self, node: int) -> bool:
        """Whether `node` stores leaves, which it then does whole."""
        return node in self.members

    def held_by(self, node: int, leaf: int, size: int) -> LeafSlice | None:
        """What `node` stores of the leaf; None for nothing."""
        return LeafSlice(node, 0, size) if self.stores(node) else None


@dataclass(frozen=True)
class PerNode(_WholeOnNodes):
    """Each of `nodes` has and writes its own value."""


@dataclass(frozen=True)
class ReplicatedLayout(_WholeOnNodes):
    """Equal on all `nodes`; the first one writes it whole."""

    @property
    def writers(self) -> tuple[int, ...]:
        """The nodes that store something."""
        return self.nodes[:1]


@dataclass(frozen=True)
class Split:
    """Joined bytes of `items` (leaf rows in order); `nodes[i]` writes from `cuts[i]` to `cuts[i + 1]`.

    Cuts rise from (0, 0) to (number of items, 0). A cut at the end of an item is written as the beginning of
    the next, so every item, an empty one too, has exactly one owner of each element.
    """

    nodes: tuple[int, ...]
    items: tuple[int, ...]
    cuts: tuple[Cut, ...]
    split = True

    @cached_property
    def index(self) -> dict[int, int]:
        """Index of each leaf row in the string."""
        return {leaf: item for item, leaf in enumerate(self.items)}

    @cached_property
    def writer(self) -> dict[int, int]:
        """The number of each node's share."""
        return {node: share for share, node in enumerate(self.nodes)}

    @cached_property
    def whole(self) -> dict[int, int]:
        """The node that stores each leaf row that no cut divides."""
        found: dict[int, int] = {}
        for node, start, stop in zip(self.nodes, self.cuts, self.cuts[1:], strict=False):
            found.update(dict.fromkeys(self.items[start.item + (start.element > 0) : stop.item], node))
        return found

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """The nodes that store something: those whose cuts differ."""
        return tuple(node for node, a, b in zip(self.nodes, self.cuts, self.cuts[1:], strict=False) if a != b)

    def pieces(self, leaf: int, size: int) -> tuple[LeafSlice, ...]:
        """The stored pieces of a leaf of `size` elements, in order; they cover it exactly."""
        item = self.index[leaf]
        share = bisect_right(self.cuts, Cut(item, 0)) - 1
        end = bisect_left(self.cuts, Cut(item + 1, 0), share, len(self.nodes))
        pieces = (self._piece(number, item, size) for number in range(share, end))
        return tuple(piece for piece in pieces if piece is not None)

    def held_by(self, node: int, leaf: int, size: int) -> LeafSlice | None:
        """What `node` stores of the leaf; None for nothing."""
        share = self.writer.get(node)
        return None if share is None else self._piece(share, self.index[leaf], size)

    def items_of(self, node: int) -> Iterator[int]:
        """The leaf rows of which `node` may store something."""
        if (share := self.writer.get(node)) is not None:
            start, stop = self.cuts[share], self.cuts[share + 1]
            last = min(stop.item + (stop.element > 0), len(self.items))
            yield from self.items[start.item : last] if start < stop else ()

    def _piece(self, share: int, item: int, size: int) -> LeafSlice | None:
        start, stop = self.cuts[share], self.cuts[share + 1]
        if not (start < stop and start < Cut(item + 1, 0) and stop > Cut(item, 0)):
            return None
        first = start.element if start.item == item else 0
        last = stop.element if stop.item == item else size
        return LeafSlice(self.nodes[share], first, last)


Layout = ReplicatedLayout | PerNode | Split | Mesh


def keys_held(layout: Layout, node: int, row: int, leaf: LeafRow) -> tuple[str, ...]:
    """The keys, as text, under which one node stores parts of a leaf; for a value its name."""
    if isinstance(layout, Mesh):
        held = layout.stored_by(node, leaf.name, leaf.shape, leaf.item_bytes)
        return tuple([encode_name(leaf.name) + suffix for suffix in suffixes_of(tuple(leaf.shape), held)])
    if (piece := layout.held_by(node, row, leaf.elements)) is None:
        return ()
    return (leaf.name if leaf.kind == "value" else format_key(piece_key(leaf, piece)),)


@lru_cache(maxsize=1 << 8)
def suffixes_of(shape: tuple[int, ...], boxes: tuple[Bounds, ...]) -> tuple[str, ...]:
    """Suffixes of the keys of these boxes of a leaf; cached, because many leaves are alike."""
    return tuple(suffix_of(box_key("", shape, box)) for box in boxes)


def box_key(name: str, shape: tuple[int, ...], box: Bounds) -> Key:
    """The key of a box: the plain name for a whole leaf."""
    return Whole(name) if box == _all_of(tuple(shape)) else Box(name, box)


_all_of = lru_cache(maxsize=1 << 10)(whole)


def piece_key(leaf: LeafRow, piece: LeafSlice) -> Key:
    """The key of a range of elements: the plain name for a whole leaf."""
    if piece.last - piece.first == leaf.elements:
        return Whole(leaf.name)
    return Flat(leaf.name, piece.first, piece.last)


R = TypeVar("R", bound=tuple[Any, ...])
OF_POSITION = ("rng", "gradient")
"""Roles of leaves that only a resume loads: not exported or referenced."""
VALUE_LIMIT_BYTES = 64 << 10
"""Replicated values up to this size are in the manifest, larger ones in the first replica's shard."""


@dataclass(frozen=True)
class EpochNodes:
    """Nodes by rank, and their hosts; `others` are nodes of earlier attempts, whose numbers follow."""

    nodes: tuple[str, ...]
    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    others: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All node names by number."""
        return self.nodes + self.others

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Number of each node."""
        return {name: index for index, name in enumerate(self.names)}


class BlobRow(NamedTuple):
    """A named blob: `kind` is `tensor`, `value` or `stateful`; `scope` is the registered or inferred one."""

    name: str
    kind: str
    scope: str


class LeafRow(NamedTuple):
    """A leaf: `layout` is an index into the manifest's layouts, `source` one into its attempts."""

    name: str
    blob: str
    kind: str
    role: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    scope: str
    group: str
    layout: int
    alias_of: str | None = None
    source: int = 0
    frozen: bool | None = None
    """Whether a parameter or tensor had no gradient; None if unknown."""
    order: tuple[int, ...] | None = None
    """The dimensions of a tensor from the outermost in memory, unless in the default order."""
    order_changed: bool = False
    """Whether the program had built the tensor in another memory order than the saved one."""
    device: str | None = None
    """The GPU of a parameter or tensor, relative to the process's own: `cuda`, `cuda:1`. None: the CPU."""
    same_as: str | None = None
    """The leaf of another file that was the same tensor; both files hold it."""

    @property
    def elements(self) -> int:
        """The number of elements; a value counts as one."""
        return prod(self.shape) if self.kind == "tensor" else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a tensor."""
        return item_bytes_of(self.shape, self.nbytes) if self.kind == "tensor" else self.nbytes


def has_odd_gradient(role: str, frozen: bool | None) -> bool:
    """Whether a parameter has no gradient, or another tensor has one."""
    return frozen is (role == "parameter")


class ShardRow(NamedTuple):
    """A shard file: sizes in bytes, the SHA-256 (hex) of its header."""

    node: int
    group: str
    part: int
    nbytes: int
    header_bytes: int
    header_sha256: str
    source: int = 0

    @property
    def holder(self) -> tuple[int, int, str]:
        """(attempt, node, group): the holder whose file this is a part of."""
        return (self.source, self.node, self.group)


# Rows are named tuples, because there are many: quick to make, and to convert to columns.
def table(kind: type[R], rows: Iterable[tuple[Any, ...]]) -> tuple[R, ...]:
    """Named tuples of a kind from complete rows; twice as fast as one by one."""
    return tuple(map(partial(tuple.__new__, kind), rows))


def columns(kind: type[LeafRow | BlobRow | ShardRow], *fields: str) -> itemgetter[tuple[Any, ...]]:
    """Columns of a row by number, which is faster than by name."""
    return itemgetter(*map(kind._fields.index, fields))


in_order = columns(ShardRow, "source", "group", "part", "node")
"""Sort key of a manifest's shards: the order in which their columns pack best."""


@dataclass(frozen=True)
class Manifest:
    """One epoch. `tries` are the directories of its attempts, its own first."""

    job_uuid: str
    job_name: str
    position: Position
    branch: int
    generation: int
    tries: tuple[str, ...]
    world: EpochNodes
    blobs: tuple[BlobRow, ...]
    leaves: tuple[LeafRow, ...]
    layouts: tuple[Layout, ...]
    shards: tuple[ShardRow, ...]
    plan_hash: str
    values: Mapping[int, Json] = field(default_factory=dict)
    """The tagged form of values, by leaf row."""
    facts: Facts = field(default_factory=Facts)
    extra: Mapping[str, Json] = field(default_factory=dict)
    """Unknown fields of a newer minor version; kept when written again."""
    _owners: dict[tuple[int, bool], frozenset[int]] = field(default_factory=dict, init=False, compare=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """Earlier attempts whose files this epoch references."""
        return self.tries[1:]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of files of this epoch."""
        return tuple(sorted({shard.group for shard in self.shards}))

    def removed(self, left: Collection[str]) -> frozenset[str]:
        """The groups whose files are not `left` (empty: all are); one that never had files does not count."""
        return frozenset(self.groups).difference(left) if left else frozenset()

    @cached_property
    def rows(self) -> Mapping[str, tuple[int, ...]]:
        """Rows by leaf name: one, or several if node classes have different leaves of a name."""
        names = [leaf.name for leaf in self.leaves]
        once = dict(zip(names, zip(range(len(names)), strict=True), strict=True))
        if len(once) == len(names):
            return once
        found: dict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(names):
            found[name].append(row)
        return {name: tuple(rows) for name, rows in found.items()}

    @cached_property
    def files(self) -> Mapping[tuple[int, int, str], tuple[ShardRow, ...]]:
        """The parts of each file in order, by (attempt, node, group)."""
        found: dict[tuple[int, int, str], list[ShardRow]] = defaultdict(list)
        for shard in self.shards:
            found[shard.holder].append(shard)
        return {holder: tuple(sorted(parts, key=itemgetter(2))) for holder, parts in found.items()}

    def nodes_of(self, leaf: LeafRow) -> tuple[int, ...]:
        """The numbers of the nodes that have this leaf."""
        return self.layouts[leaf.layout].nodes

    def owners_of(self, leaf: LeafRow) -> frozenset[int]:
        """The nodes of this epoch that own a leaf; of scope `host` all nodes of the hosts that have it."""
        asked = (leaf.layout, leaf.scope == "host")
        if asked not in self._owners:
            nodes = self.layouts[leaf.layout].nodes
            if leaf.scope == "host":
                hosts = {self.world.host_of[node] for node in nodes if node < len(self.world.host_of)}
                nodes = tuple(node for node, host in enumerate(self.world.host_of) if host in hosts)
            self._owners[asked] = frozenset(node for node in nodes if node < len(self.world.nodes))
        return self._owners[asked]

    def is_shared(self, leaf: LeafRow) -> bool:
        """Whether all nodes of this epoch own a leaf with equal content, so that any node can load it."""
        one = leaf.scope != "rank" and (leaf.scope != "host" or len(self.nodes_of(leaf)) == 1)
        return one and len(self.owners_of(leaf)) == len(self.world.nodes)

    def stored_keys(self, source: int, node: int, group: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Leaf rows and keys in a node's file, as `keys_held` returns them."""
        for number, rows in self._rows_by_layout.get((source, group), {}).items():
            layout = self.layouts[number]
            near = rows & set(layout.items_of(node)) if isinstance(layout, Split) else rows
            for row in sorted(near):
                if keys := keys_held(layout, node, row, self.leaves[row]):
                    yield row, keys

    def whole_rows(self, source: int, node: int, group: str) -> list[int] | None:
        """The leaf rows in a node's file, if all of them are whole; None if not, or unknown."""
        found: list[int] = []
        for number, rows in self._rows_by_layout.get((source, group), {}).items():
            layout = self.layouts[number]
            if isinstance(layout, Mesh):
                return None
            if isinstance(layout, Split):
                held = rows.intersection(layout.items_of(node))
                if any(layout.whole.get(row) != node for row in held):
                    return None
                found += held
            elif layout.stores(node):
                found += rows
        return found

    @cached_property
    def _rows_by_layout(self) -> Mapping[tuple[int, str], Mapping[int, set[int]]]:
        rows: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        for row, leaf in enumerate(self.leaves):
            if leaf.alias_of is None and row not in self.values:
                rows[leaf.source, leaf.group, leaf.layout].append(row)
        found: dict[tuple[int, str], dict[int, set[int]]] = {}
        for (source, group, layout), some in rows.items():
            found.setdefault((source, group), {})[layout] = set(some)
        return found


def shard_path(manifest: Manifest, shard: ShardRow) -> str:
    """The path of a shard's file."""
    attempt_name = manifest.tries[shard.source]
    name = ShardName(manifest.world.names[shard.node], position_of(attempt_name), shard.group, shard.part)
    return f"{attempt_directory(attempt_name)}/{shard_file_name(name)}"


def parts_of(layout: Layout, row: int, leaf: LeafRow) -> Iterator[tuple[int, Key]]:
    """All stored parts of a leaf, with their nodes; a value is one whole part."""
    if isinstance(layout, Mesh):
        for node, box in layout.stored(leaf.name, leaf.shape, leaf.item_bytes):
            yield node, box_key(leaf.name, leaf.shape, box)
    else:
        for piece in layout.pieces(row, leaf.elements):
            yield piece.node, piece_key(leaf, piece)


PartForm = tuple[bool, Bounds]
"""Form of a stored part: whether it is a range of elements, and its intervals."""


class Near(NamedTuple):
    """Stored parts of a leaf, as columns: nodes, key suffixes, forms; shared by leaves with equal parts."""

    nodes: tuple[int, ...]
    suffixes: tuple[str, ...]
    forms: tuple[PartForm, ...]

    def of(self, node: int) -> Near:
        """The parts of one node."""
        here = [one == node for one in self.nodes]
        nodes, suffixes = compress(self.nodes, here), compress(self.suffixes, here)
        return Near(tuple(nodes), tuple(suffixes), tuple(compress(self.forms, here)))


def parts_near(layout: Layout, row: int, leaf: LeafRow, wanted: Sequence[Bounds]) -> Near:
    """Those of `parts_of`, at least, that share elements with one of the boxes `wanted`."""
    shape = tuple(leaf.shape)
    if isinstance(layout, Mesh):
        return _near_boxes(shape, layout.stored_near(leaf.name, shape, leaf.item_bytes, wanted))
    found = list(parts_of(layout, row, leaf))
    forms = (
        (True, ((key.start, key.stop),)) if isinstance(key, Flat) else (False, whole(shape))
        for _, key in found
    )
    return Near(tuple(node for node, _ in found), tuple(suffix_of(key) for _, key in found), tuple(forms))


@lru_cache(maxsize=1 << 8)
def _near_boxes(shape: tuple[int, ...], stored: tuple[tuple[int, Bounds], ...]) -> Near:
    nodes, boxes = (tuple(column) for column in zip(*stored, strict=True)) if stored else ((), ())
    return Near(nodes, suffixes_of(shape, boxes), tuple((False, box) for box in boxes))


def holding(layout: Layout, row: int, leaf: LeafRow) -> tuple[frozenset[int], ...]:
    """The nodes whose files hold parts of a leaf, as one or several sets that many leaves share."""
    if isinstance(layout, Mesh):
        return layout.writers(leaf.name, leaf.shape, leaf.item_bytes)
    return (frozenset(piece.node for piece in layout.pieces(row, leaf.elements)),)


def alike(layout: Layout, leaf: LeafRow) -> tuple[object, ...] | None:
    """Key that is equal for leaves of one layout in the same files; None if every leaf differs."""
    if isinstance(layout, Mesh):
        return layout.alike(leaf.name, leaf.shape, leaf.item_bytes)
    return None if layout.split else ()
