"""Parts: under which keys, in whose files, the bytes of a leaf lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.layouts import Layout, Piece
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Bounds, whole
from torchrelay.checkpoint.format.names import Box, Flat, Key, Whole, encode_name, format_key, suffix_of
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.format.manifest.schema import LeafRow


def parts_of(layout: Layout, row: int, leaf: LeafRow) -> Iterator[tuple[int, Key]]:
    """All stored parts of a leaf, with their nodes; a value is one whole part."""
    if isinstance(layout, Mesh):
        for node, box in layout.stored(leaf.name, leaf.shape, leaf.item_bytes):
            yield node, box_key(leaf.name, leaf.shape, box)
    else:
        for piece in layout.pieces(row, leaf.elements):
            yield piece.node, piece_key(leaf, piece)


PartForm = tuple[bool, Bounds]
"""Of a stored part: whether it is a range of elements, and its intervals."""


@dataclass(frozen=True)
class Near:
    """Stored parts of a leaf, as columns: nodes, what keys have behind the encoded name, forms.

    Leaves that are alike have the same object.
    """

    nodes: tuple[int, ...]
    suffixes: tuple[str, ...]
    forms: tuple[PartForm, ...]

    def of(self, node: int) -> Near:
        """Those of one node."""
        places = [place for place, one in enumerate(self.nodes) if one == node]
        return Near(
            tuple(self.nodes[place] for place in places),
            tuple(self.suffixes[place] for place in places),
            tuple(self.forms[place] for place in places),
        )


def parts_near(layout: Layout, row: int, leaf: LeafRow, wanted: Sequence[Bounds]) -> Near:
    """Of `parts_of` at least all that share elements with one of the boxes `wanted`."""
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
    boxes = tuple(box for _, box in stored)
    return Near(
        tuple(node for node, _ in stored), _suffixes(shape, boxes), tuple((False, box) for box in boxes)
    )


def holding(layout: Layout, row: int, leaf: LeafRow) -> tuple[frozenset[int], ...]:
    """The nodes whose files hold parts of a leaf, as one or several sets; many leaves have the same sets."""
    if isinstance(layout, Mesh):
        return layout.writers(leaf.name, leaf.shape, leaf.item_bytes)
    return (frozenset(piece.node for piece in layout.pieces(row, leaf.elements)),)


def keys_held(layout: Layout, node: int, row: int, leaf: LeafRow) -> tuple[str, ...]:
    """The keys, as text, under which one node stores parts of a leaf; of a value its name."""
    if isinstance(layout, Mesh):
        held = layout.stored_by(node, leaf.name, leaf.shape, leaf.item_bytes)
        name = encode_name(leaf.name) if held else ""
        return tuple([name + suffix for suffix in _suffixes(tuple(leaf.shape), held)])
    piece = layout.held_by(node, row, leaf.elements)
    if piece is None:
        return ()
    return (leaf.name if leaf.kind == "value" else format_key(piece_key(leaf, piece)),)


@lru_cache(maxsize=1 << 8)
def _suffixes(shape: tuple[int, ...], boxes: tuple[Bounds, ...]) -> tuple[str, ...]:
    """What the keys of these boxes of a leaf have behind its name; many leaves are alike."""
    return tuple(suffix_of(box_key("", shape, box)) for box in boxes)


def alike(layout: Layout, leaf: LeafRow) -> tuple[object, ...] | None:
    """Equal for leaves of one layout that lie in the same files; None where every leaf differs."""
    if isinstance(layout, Mesh):
        return layout.alike(leaf.name, leaf.shape, leaf.item_bytes)
    return None if layout.split else ()


def box_key(name: str, shape: tuple[int, ...], box: Bounds) -> Key:
    """The key of a box: the name alone when it is all of the leaf."""
    return Whole(name) if box == _all_of(tuple(shape)) else Box(name, box)


_all_of = lru_cache(maxsize=1 << 10)(whole)


def piece_key(leaf: LeafRow, piece: Piece) -> Key:
    """The key of a range of elements: the name alone when it is all of the leaf."""
    if piece.last - piece.first == leaf.elements:
        return Whole(leaf.name)
    return Flat(leaf.name, piece.first, piece.last)
