"""Layouts on disk: what a manifest says of who holds which elements of its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrelay.checkpoint.disk.fields import Fields
from torchrelay.checkpoint.disk.layouts import Cut, Layout, PerNode, Replicated, Split
from torchrelay.checkpoint.disk.mesh import Mesh, placements_json, placements_of
from torchrelay.checkpoint.disk.mesh_rules import KNOWN
from torchrelay.checkpoint.disk.runs import pack_numbers, unpack_numbers
from torchrelay.errors import FormatError

Json = Any


def layout_json(layout: Layout, number: int) -> Json:
    """A layout as it lies in a manifest; `number` is that of its node set."""
    if isinstance(layout, PerNode):
        return {"kind": "node", "class": number}
    if isinstance(layout, Replicated):
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
    """Read what `layout_json` made.

    Raises FormatError for a kind or rule of another version, DamagedError for what no writer wrote.
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
    return _split(fields, nodes) if "items" in fields.values else Replicated(nodes)


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
