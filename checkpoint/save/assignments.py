"""Represent a save plan: every leaf with its layout, and the parts that each node writes. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrelay.checkpoint.format.canonical_json import dumps, dumps_read, sha256, words
from torchrelay.checkpoint.format.dtypes import item_bytes_of
from torchrelay.checkpoint.format.manifest.schema import (
    VALUE_LIMIT_BYTES,
    BlobRow,
    Cut,
    Layout,
    LeafRow,
    PerNode,
    Split,
    box_key,
    has_odd_gradient,
    table,
)
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Bounds, volume
from torchrelay.checkpoint.format.names import Flat, Key, Whole
from torchrelay.checkpoint.format.shard.entries import Entries, described
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.leaf import LeafSpec


def same(leaf: LeafSpec) -> tuple[object, ...]:
    """Key that is equal for leaves that are one on several nodes; their aliases may differ."""
    mesh = leaf.sharding
    described = (leaf.group, leaf.alias_of, leaf.kind, leaf.role, leaf.dtype, leaf.shape)
    size = leaf.nbytes if leaf.kind == "tensor" else 0
    return (leaf.name, leaf.blob, *described, size, "" if mesh is None else mesh.digest)


def leaves_digest(leaves: Sequence[LeafSpec]) -> str:
    """SHA-256 (hex) over all of a node's leaves that a plan depends on, in any order.

    It covers canonical JSON of the sorted names, the number of each leaf's form, and the forms in order of
    first use, with the digests of their meshes. The blob is null in a form where the leaf is its blob. Of a
    value's size it covers whether a manifest can hold it. Raises UsageError for values without canonical
    JSON.
    """
    ordered = sorted(leaves, key=attrgetter("name"))
    # Looked up by identity, because comparing is slow; the digest is used, because several objects may be
    # equal.
    distinct = {id(leaf.sharding): leaf.sharding for leaf in ordered}
    meshes = {key: "" if mesh is None else mesh.digest for key, mesh in distinct.items()}
    numbers: dict[tuple[Any, ...], int] = {}
    column: list[int] = []
    for leaf in ordered:
        form = (
            None if leaf.blob == leaf.name else leaf.blob,
            leaf.group,
            leaf.alias_of,
            leaf.kind,
            leaf.role._value_,
            leaf.dtype,
            leaf.shape,
            leaf.nbytes if leaf.kind == "tensor" else leaf.nbytes > VALUE_LIMIT_BYTES,
            meshes[id(leaf.sharding)],
            *(("odd gradient",) if has_odd_gradient(leaf.role._value_, leaf.frozen) else ()),
            *(() if leaf.order is None else (("order", *leaf.order),)),
            *(("order changed",) if leaf.order_changed else ()),
            *(() if leaf.device is None else (("device", leaf.device),)),
            *(() if leaf.same_as is None else (("same as", leaf.same_as),)),
        )
        column.append(numbers.setdefault(form, len(numbers)))
    names = ",".join(words([leaf.name for leaf in ordered]))
    return sha256(b"[[%b],%b,%b]" % (names.encode(), dumps_read(column), dumps(list(numbers))))


@dataclass(frozen=True)
class NodeClass:
    """Nodes (by rank) that have the same leaves."""

    nodes: tuple[int, ...]
    leaves: tuple[LeafSpec, ...]

    @cached_property
    def digest(self) -> str:
        """The `leaves_digest` of the leaves."""
        return leaves_digest(self.leaves)

    @classmethod
    def known(cls, nodes: tuple[int, ...], leaves: tuple[LeafSpec, ...], digest: str) -> NodeClass:
        """The class of leaves whose digest is computed already."""
        made = cls(nodes, leaves)
        made.__dict__["digest"] = digest  # where `cached_property` keeps it
        return made


@dataclass(frozen=True)
class Assignment:
    """Elements `first` up to, not including, `last` of a leaf that one node writes; a value has (0, 1)."""

    leaf: LeafSpec
    first: int
    last: int
    inline: bool = False
    """A small replicated value, stored in the manifest instead of a shard."""
    box: Bounds | None = None
    """The part of a sharded leaf; `first` and `last` then only count its elements."""

    @cached_property
    def whole(self) -> bool:
        """Whether the node writes all of the leaf."""
        return self.last - self.first == elements(self.leaf)

    @cached_property
    def key(self) -> Key:
        """The name under which a shard holds it."""
        if self.box is not None:
            return box_key(self.leaf.name, self.leaf.shape, self.box)
        return Whole(self.leaf.name) if self.whole else Flat(self.leaf.name, self.first, self.last)

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor's part; 0 for a value."""
        count = elements(self.leaf)
        return self.leaf.nbytes // count * (self.last - self.first) if count else 0


class PlannedLeaf(NamedTuple):
    """A leaf, its scope, and the number of its layout. A named tuple, because there are many."""

    leaf: LeafSpec
    scope: str
    layout: int

    @property
    def inline(self) -> bool:
        """Whether this is a replicated value that is small enough for the manifest."""
        leaf = self.leaf
        return leaf.kind == "value" and self.scope == "replicated" and leaf.nbytes <= VALUE_LIMIT_BYTES


@dataclass(frozen=True)
class SavePlan:
    """Every leaf of the job with its layout; rows are in the order of the manifest."""

    rows: tuple[PlannedLeaf, ...]
    layouts: tuple[Layout, ...]
    hash: str
    _assigned: dict[int, tuple[Assignment, ...]] = field(default_factory=dict, repr=False, compare=False)
    _files: dict[int, dict[str, tuple[Assignment, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _described: dict[tuple[int, str], Entries] = field(default_factory=dict, repr=False, compare=False)

    def assignments(self, node: int) -> tuple[Assignment, ...]:
        """What a node writes, by row: aliases under their first name; the same objects each time."""
        if node not in self._assigned:
            self._assigned[node] = tuple(self._assign(node))
        return self._assigned[node]

    def _assign(self, node: int) -> list[Assignment]:
        found = []
        split = [row for lay in self.layouts if isinstance(lay, Split) for row in lay.items_of(node)]
        for row in sorted({*self._unsplit, *split}):
            planned = self.rows[row]
            layout = self.layouts[planned.layout]
            if planned.leaf.alias_of is not None:
                continue
            if isinstance(layout, Mesh):
                boxes = layout.stored_by(
                    node, planned.leaf.name, planned.leaf.shape, item_bytes(planned.leaf)
                )
                found += [Assignment(planned.leaf, 0, volume(box), box=box) for box in boxes]
            elif (piece := layout.held_by(node, row, elements(planned.leaf))) is not None:
                found.append(Assignment(planned.leaf, piece.first, piece.last, planned.inline))
        return found

    def files(self, node: int) -> dict[str, tuple[Assignment, ...]]:
        """What a node writes into its files, per group, without inline values; the same objects each time."""
        if node not in self._files:
            groups: dict[str, list[Assignment]] = {}
            for one in self.assignments(node):
                if not one.inline:
                    groups.setdefault(one.leaf.group, []).append(one)
            self._files[node] = {group: tuple(found) for group, found in sorted(groups.items())}
        return self._files[node]

    def tensors(self, node: int, group: str) -> Entries:
        """Header entries of the tensors of a node's file, in the order of `files`; without data."""
        if (node, group) not in self._described:
            found = [one for one in self.files(node)[group] if one.leaf.kind == "tensor"]
            self._described[node, group] = described(
                [one.key for one in found],
                [str(one.leaf.dtype) for one in found],
                [one.leaf.shape for one in found],
            )
        return self._described[node, group]

    @cached_property
    def writers(self) -> frozenset[tuple[int, str]]:
        """Node and group of every file that is written, of all nodes."""
        return frozenset(
            (node, group)
            for (layout, group), leaves in self._stored.items()
            for nodes in _writing(self.layouts[layout], leaves)
            for node in nodes
        )

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that all nodes together write, without headers; split or replicated bytes count once."""
        found = 0
        for (number, _), leaves in self._stored.items():
            layout = self.layouts[number]
            copies = len(layout.nodes) if isinstance(layout, PerNode) else 1
            found += copies * sum([leaf.nbytes for leaf in leaves])
        return found

    @cached_property
    def largest_share(self) -> int:
        """Upper bound of the bytes that any one node writes; loose only for small replicated shards."""
        found: Counter[int] = Counter()
        for layout in self.layouts:
            if isinstance(layout, Split):
                leaves = [self.rows[row].leaf for row in layout.items]
                starts = (0, *accumulate([leaf.nbytes for leaf in leaves]))
                widths = [*map(item_bytes, leaves), 0]
                places = [starts[item] + element * widths[item] for item, element in layout.cuts]
                found.update(dict(zip(layout.nodes, map(sub, places[1:], places), strict=True)))
        for (number, _), leaves in self._stored.items():
            layout = self.layouts[number]
            if isinstance(layout, Mesh):
                forms = Counter(map(_FORM, leaves)).items()
                shares = [
                    layout.largest_share(shape, item_bytes_of(shape, nbytes)) * count
                    for (shape, nbytes), count in forms
                ]
                found.update(dict.fromkeys(layout.nodes, sum(shares)))
            elif not isinstance(layout, Split):
                nodes = layout.nodes if isinstance(layout, PerNode) else layout.nodes[:1]
                share = sum([leaf.nbytes for leaf in leaves if leaf.kind == "tensor"])
                found.update(dict.fromkeys(nodes, share))
        return max(found.values(), default=0)

    @cached_property
    def _stored(self) -> dict[tuple[int, str], list[LeafSpec]]:
        found: dict[tuple[int, str], list[LeafSpec]] = defaultdict(list)
        inline = self.inline_rows
        for row, (leaf, _, layout) in enumerate(self.rows):
            if leaf.alias_of is None and row not in inline:
                found[layout, leaf.group].append(leaf)
        return found

    @cached_property
    def leaf_rows(self) -> tuple[LeafRow, ...]:
        """The rows of the manifest."""
        rows = [
            (
                leaf.name, leaf.blob, leaf.kind, leaf.role._value_, leaf.dtype, leaf.shape, leaf.nbytes,
                scope, leaf.group, layout, leaf.alias_of, 0, leaf.frozen, leaf.order,
                leaf.order_changed, leaf.device, leaf.same_as,
            )
            for leaf, scope, layout in self.rows
        ]  # fmt: skip
        return table(LeafRow, rows)

    @cached_property
    def value_rows(self) -> tuple[int, ...]:
        """Row numbers of values."""
        return tuple(row for row, (leaf, _, _) in enumerate(self.rows) if leaf.kind == "value")

    def rows_with(self, sizes: Mapping[int, int]) -> tuple[LeafRow, ...]:
        """`leaf_rows` with the current sizes of the values in these rows."""
        other = {row: size for row, size in sizes.items() if self.leaf_rows[row].nbytes != size}
        if not other:
            return self.leaf_rows
        rows = enumerate(self.leaf_rows)
        return tuple(one._replace(nbytes=other[row]) if row in other else one for row, one in rows)

    @cached_property
    def blob_rows(self) -> tuple[BlobRow, ...]:
        """The blobs, inferred from their leaves."""
        members: dict[str, list[PlannedLeaf]] = {}
        for planned in self.rows:
            members.setdefault(planned[0].blob, []).append(planned)
        return table(BlobRow, [_blob_row(name, leaves) for name, leaves in sorted(members.items())])

    @cached_property
    def inline_rows(self) -> dict[int, str]:
        """The names of values stored in the manifest, by row."""
        values = ((row, self.rows[row]) for row in self.value_rows)
        return {row: one.leaf.name for row, one in values if one.inline and one.leaf.alias_of is None}

    @cached_property
    def _unsplit(self) -> tuple[int, ...]:
        return tuple(r for r, p in enumerate(self.rows) if not isinstance(self.layouts[p.layout], Split))


def _writing(layout: Layout, leaves: Sequence[LeafSpec]) -> Iterable[Iterable[int]]:
    """Sets of nodes that store something of leaves."""
    if isinstance(layout, Mesh):
        return layout.writing([leaf.name for leaf in leaves], map(_FORM, leaves))
    return (layout.writers,)


_FORM = attrgetter("shape", "nbytes")


def _blob_row(name: str, leaves: Sequence[PlannedLeaf]) -> tuple[str, str, str]:
    """The row of a blob: a tensor or value if it is a single leaf that needs no object, else stateful."""
    first, scope, _ = leaves[0]
    if len(leaves) == 1 and first.name == name and first.kind == "tensor":
        return (name, "tensor", scope)
    scopes = {planned.scope for planned in leaves}
    own = next((planned.leaf for planned in leaves if planned.leaf.name == name), None)
    kind = "stateful" if own is None or own.role.value in ("state", "subclass") else own.kind
    return (name, kind, scopes.pop() if len(scopes) == 1 else "replicated")


def item_bytes(leaf: LeafSpec) -> int:
    """Bytes of one element of a tensor."""
    return item_bytes_of(leaf.shape, leaf.nbytes) if leaf.kind == "tensor" else leaf.nbytes


def elements(leaf: LeafSpec) -> int:
    """The number of elements of a tensor; a value counts as one."""
    return prod(leaf.shape) if leaf.kind == "tensor" else 1


CUT_BYTES = 1 << 20
"""Leaves are cut at multiples of this many bytes.

Digest blocks then begin at the same bytes however many nodes write, so a leaf's digest does not depend on it.
"""


def cuts_between(sizes: Sequence[int], item_bytes: Sequence[int], shares: int, cut: int) -> tuple[Cut, ...]:
    """Cut leaves of `sizes` bytes into `shares` runs; `shares` + 1 cuts from the start to the end.

    Each cut is the candidate nearest to its ideal (total * i / shares). Candidates are multiples of `cut`
    bytes in leaves of at least `cut` bytes, and the ends of leaves. Each share therefore differs from the
    ideal by at most the larger of `cut` and the largest leaf that is not cut.
    """
    ends = (0, *accumulate(sizes))
    total, number, found = ends[-1], 1, [(0, 0)]
    while total and number < shares:
        item = bisect_right(ends, total * number // shares) - 1
        before, size, width = ends[item], sizes[item], item_bytes[item]
        following = -(-ends[item + 1] * shares // total)  # the first ideal cut that is not in this item
        ideals = range(number * total - before * shares, following * total - before * shares, total)
        step = cut if size >= cut and cut % width == 0 else size
        # A byte has one cut: before the empty items that precede the item that it is in.
        edges = {0: (bisect_left(ends, before), 0), size: (item + 1, 0)}
        # The multiples of `step` bytes, or the end of an item, nearest to ideals; the lower one of a tie.
        twice, last = 2 * step * shares, size // step * step
        middle = (last + size) * shares  # twice the ideal that is as near to the end as to the last multiple
        nearest = [
            step * ((2 * ideal + twice // 2 - 1) // twice)
            if ideal < last * shares
            else (last if 2 * ideal <= middle else size)
            for ideal in ideals
        ]
        found += [edges[at] if at in edges else (item, at // width) for at in nearest]
        number = following
    inner = found if total else found * shares
    return table(Cut, [*inner, (len(sizes), 0)])
