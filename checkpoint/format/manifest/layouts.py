"""Define layouts: which nodes hold which elements of a leaf, in memory and on disk, and under which keys.

- Split: leaves joined to one byte string, equal on all its nodes, cut between them
- Replicated: equal on all its nodes, written whole by the first
- PerNode: a different value on each node
- Mesh: sharded over a grid of nodes (`mesh`)

On disk `Split` and `ReplicatedLayout` have kind `replicated` (with and without cut points), `PerNode` has
kind `node`, `Mesh` kind `mesh`. The kind `boxes` is reserved. Cut points are stored, so reading needs no
planning code. Nodes are indexes into the manifest's node table, leaves are row numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.manifest.schema import (
    Cut,
    Layout,
    LeafRow,
    PerNode,
    ReplicatedLayout,
    Split,
    box_key,
    piece_key,
    suffixes_of,
)
from torchrelay.checkpoint.format.mesh import Mesh, placements_json, placements_of
from torchrelay.checkpoint.format.mesh_geometry import KNOWN, Bounds, Interval, whole
from torchrelay.checkpoint.format.names import (
    Box,
    Flat,
    Key,
    pack_numbers,
    suffix_of,
    unpack_numbers,
)
from torchrelay.errors import FormatError
from torchrelay.records import Json, dataclass


def layout_json(layout: Layout, number: int) -> Json:
    """A layout as stored in a manifest; `number` is that of its node set."""
    if isinstance(layout, PerNode):
        return {"kind": "node", "class": number}
    if isinstance(layout, ReplicatedLayout):
        return {"kind": "replicated", "class": number}
    if isinstance(layout, Mesh):
        placements = placements_json(layout.placements)
        mesh, rule = list(layout.extents), layout.rule
        return {"kind": "mesh", "class": number, "mesh": mesh, "placements": placements, "rule": rule}
    return {
        "kind": "replicated",
        "class": number,
        "items": pack_numbers(layout.items),
        "cut_items": pack_numbers([cut.item for cut in layout.cuts]),
        "cut_elements": pack_numbers([cut.element for cut in layout.cuts]),
    }


def layout_of(fields: Fields, classes: Sequence[tuple[int, ...]]) -> Layout:
    """Read the JSON of `layout_json`.

    Raises FormatError for a kind or rule of another version, DamagedError for malformed ones.
    """
    kind = fields.text("kind")
    if kind not in ("node", "replicated", "mesh"):
        raise FormatError(
            f"{fields.what} has a layout of kind {kind!r}, which this version does not read: "
            "use the version of torchrelay that wrote it, or a newer one"
        )
    number = fields.integer("class")
    if number >= len(classes):
        raise fields.wrong("class")
    nodes = classes[number]
    if kind == "node":
        return PerNode(nodes)
    if kind == "mesh":
        return _mesh(fields, nodes)
    return _split(fields, nodes) if "items" in fields.values else ReplicatedLayout(nodes)


def _split(fields: Fields, nodes: tuple[int, ...]) -> Split:
    def numbers(key: str) -> tuple[int, ...]:
        return unpack_numbers(fields.items(key), f"{fields.what} ({key})")

    items, cut_items, cut_elements = numbers("items"), numbers("cut_items"), numbers("cut_elements")
    if len(cut_items) != len(cut_elements):
        raise fields.wrong("cut_elements")
    return Split(nodes, items, tuple(map(Cut, cut_items, cut_elements)))


def _mesh(fields: Fields, nodes: tuple[int, ...]) -> Mesh:
    if (rule := fields.integer("rule")) not in KNOWN:
        raise FormatError(
            f"{fields.what} has a mesh whose replicas share the writing by rule {rule}, which this version "
            "does not know: use the version of torchrelay that wrote it, or a newer one"
        )
    extents, placements = fields.items("mesh"), placements_of(fields.values.get("placements"))
    if not all(type(extent) is int and extent > 0 for extent in extents):
        raise fields.wrong("mesh")
    if placements is None or len(placements) != len(extents):
        raise fields.wrong("placements")
    return Mesh(nodes, tuple(extents), placements, rule)


@dataclass(frozen=True)
class Window:
    """The box `box` of a leaf belongs in the box `place`, of the same extents, of a destination."""

    box: Bounds
    place: Bounds


@dataclass(frozen=True)
class LocalTarget:
    """A destination of `shape`, and the parts of a leaf that belong in it; their places cover it exactly."""

    shape: tuple[int, ...]
    windows: tuple[Window, ...]


def whole_target(shape: Sequence[int]) -> LocalTarget:
    """A destination for a whole leaf."""
    everything = whole(shape)
    return LocalTarget(tuple(shape), (Window(everything, everything),))


def local_target(intervals: Sequence[Sequence[Interval]]) -> LocalTarget:
    """A local tensor that has these indices of each dimension, in this order."""
    placed = [_placed(one) for one in intervals]
    windows = tuple(
        Window(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        for pairs in itertools.product(*placed)
    )
    return LocalTarget(tuple(sum(b - a for a, b in one) for one in intervals), windows)


def place_of(intervals: Sequence[Sequence[Interval]], box: Bounds) -> Bounds:
    """The place of a box in a `local_target`; each side of it is within one of the intervals."""
    return tuple(
        next((a - low + at, b - low + at) for (low, high), (at, _) in _placed(one) if low <= a and b <= high)
        for one, (a, b) in zip(intervals, box, strict=True)
    )


def _placed(intervals: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    """Each interval with its place in the concatenation of all."""
    found, at = [], 0
    for start, stop in intervals:
        found.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return found


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


@dataclass(frozen=True)
class Near:
    """Stored parts of a leaf, as columns: nodes, key suffixes, forms.

    Leaves with equal parts share the object.
    """

    nodes: tuple[int, ...]
    suffixes: tuple[str, ...]
    forms: tuple[PartForm, ...]

    def of(self, node: int) -> Near:
        """The parts of one node."""
        places = [place for place, one in enumerate(self.nodes) if one == node]
        return Near(
            tuple(self.nodes[place] for place in places),
            tuple(self.suffixes[place] for place in places),
            tuple(self.forms[place] for place in places),
        )


def parts_near(layout: Layout, row: int, leaf: LeafRow, wanted: Sequence[Bounds]) -> Near:
    """Those of `parts_of`, at least, that share elements with one of the boxes `wanted`."""
    shape = tuple(leaf.shape)
    if isinstance(layout, Mesh):
        return _near_boxes(shape, layout.stored_near(leaf.name, shape, leaf.item_bytes, wanted))
    found = list(parts_of(layout, row, leaf))
    return Near(
        tuple(node for node, _ in found),
        tuple(suffix_of(key) for _, key in found),
        tuple(_form(key, shape) for _, key in found),
    )


def _form(key: Key, shape: tuple[int, ...]) -> PartForm:
    if isinstance(key, Flat):
        return True, ((key.start, key.stop),)
    return False, key.intervals if isinstance(key, Box) else whole(shape)


@lru_cache(maxsize=1 << 8)
def _near_boxes(shape: tuple[int, ...], stored: tuple[tuple[int, Bounds], ...]) -> Near:
    """The columns of stored boxes."""
    boxes = tuple(box for _, box in stored)
    return Near(
        tuple(node for node, _ in stored), suffixes_of(shape, boxes), tuple((False, box) for box in boxes)
    )


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
