"""What of an epoch goes out, and under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.dtypes import by_name
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.interop.content import Content, Outgoing
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.checkpoint.load.handle import Cast, cast_of, check_types_used, checked_cast
from torchrelay.checkpoint.load.lookup import (
    Nodes,
    check_decided,
    check_prefix_used,
    choose,
    find_row,
    node_for,
    node_of,
    pattern_list,
    several_owners,
)
from torchrelay.checkpoint.state.names import without_reserved
from torchrelay.errors import UsageError


def content_of(
    checkpoint: Checkpoint,
    blobs: str | Sequence[str] | None,
    prefix: str,
    dtype: Cast,
    nodes: Nodes = None,
) -> Content:
    """Tensors and values by pattern; without one all but random states, and values that differ by node.

    `prefix` is taken off the names that begin with it. `nodes` says whose value is meant of what differs
    between nodes. Raises UsageError for a pattern that matches nothing, for names that become one, and for
    a tensor with several values of which nobody said which.
    """
    checked_cast(dtype)
    manifest = checkpoint.manifest
    tensors: dict[str, Outgoing] = {}
    ties: dict[str, str] = {}
    chosen = _chosen(checkpoint, blobs, nodes)
    new_names = _new_names([name for name, _, _ in chosen], prefix)
    check_types_used((*new_names.values(), *manifest.rows), dtype)
    places = {name: (find_row(manifest, name, node), node) for name, node, kind in chosen if kind == "tensor"}
    # Of several names the one that the program had first, as readers of other formats expect.
    first = {place: name for name, place in reversed(places.items())}
    first.update({place: name for name, place in places.items() if manifest.leaves[place[0]].name == name})
    for name, place in places.items():
        new = new_names[name]
        if first[place] == name:
            tensors[new] = _outgoing(checkpoint, name, place[1], cast_of(new, dtype))
        else:
            ties[new] = new_names[first[place]]
    values: dict[str, Any] = {
        new_names[name]: checkpoint.value(_address(name, node))
        for name, node, kind in chosen
        if kind == "value"
    }
    taken = {name for name, _, _ in chosen}
    left = [leaf.name for leaf in manifest.leaves if leaf.name not in taken] if blobs is None else []
    own = {new_names[name]: node for name, node, _ in chosen if node and several_owners(manifest, name)}
    return Content(tensors, values, ties, tuple(dict.fromkeys(left)), own)


def _chosen(
    checkpoint: Checkpoint, blobs: str | Sequence[str] | None, nodes: Nodes
) -> list[tuple[str, str | None, str]]:
    if blobs is None:
        return _all_leaves(checkpoint, nodes)
    manifest, patterns = checkpoint.manifest, pattern_list(blobs)
    found: list[tuple[str, str | None, str]] = []
    for pattern in patterns:
        hits = [
            (name, node, kind)
            for kind in ("tensor", "value")
            for name, node in choose(manifest, pattern, kind, strict=False, nodes=nodes)
        ]
        if not hits:
            choose(manifest, pattern, "tensor", strict=True)  # says what there is
        found += hits
    found = list(dict.fromkeys(found))
    if len({name for name, _, _ in found}) != len(found):
        raise UsageError(f"{patterns} mean leaves of several nodes under one name: export them one by one")
    return found


def _all_leaves(checkpoint: Checkpoint, nodes: Nodes) -> list[tuple[str, str | None, str]]:
    manifest = checkpoint.manifest
    removed = manifest.removed(checkpoint.entry.groups)
    left_out = {leaf.name for leaf in manifest.leaves if leaf.role in OF_POSITION or leaf.group in removed}
    kinds = {name: manifest.leaves[rows[0]].kind for name, rows in manifest.rows.items()}
    wanted = [name for name in kinds if name not in left_out]
    check_decided(manifest, [name for name in wanted if kinds[name] == "tensor"], nodes)
    decided = [
        name
        for name in wanted
        if node_of(manifest, name, nodes) is not None or not several_owners(manifest, name)
    ]
    found = [(name, node_for(manifest, name, nodes), kinds[name]) for name in decided]
    return sorted(found, key=lambda one: one[2])


def _new_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    """The names outside: without the prefix, and without what wrappers inserted into older epochs' names."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    check_prefix_used(names, prefix)
    for name in names:
        new = without_reserved(name).removeprefix(prefix)
        if not new or taken.setdefault(new, name) != name:
            raise UsageError(f"prefix={prefix!r} leaves {name!r} without a name of its own: choose another")
        found[name] = new
    return found


def _outgoing(checkpoint: Checkpoint, name: str, node: str | None, cast: Any) -> Outgoing:
    handle = checkpoint[_address(name, node)]
    floating = handle.dtype.is_floating_point
    element = by_name(str(handle.dtype).removeprefix("torch."))
    return Outgoing(element, tuple(handle.shape), handle.fill, cast if floating else None)


def _address(name: str, node: str | None) -> str:
    return name if node is None else f"{node}:{name}"


def mapping_of(content: Content, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """One flat mapping of tensors, the same objects for ties, and values."""
    return {
        **tensors,
        **{name: tensors[kept] for name, kept in content.ties.items()},
        **content.values,
    }
