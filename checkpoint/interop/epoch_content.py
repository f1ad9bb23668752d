"""What of an epoch goes out, and under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.disk.dtypes import by_name
from torchrelay.checkpoint.interop.content import Content, Outgoing
from torchrelay.checkpoint.reader import Checkpoint
from torchrelay.checkpoint.reading.casting import Cast, cast_of, check_types_used, checked_cast
from torchrelay.checkpoint.reading.lookup import find_row
from torchrelay.checkpoint.reading.patterns import check_prefix_used, choose, pattern_list
from torchrelay.errors import UsageError


def content_of(
    checkpoint: Checkpoint, blobs: str | Sequence[str] | None, prefix: str, dtype: Cast
) -> Content:
    """Tensors and values by pattern; without one all that the nodes share, but no random states.

    `prefix` is taken off the names that begin with it. Raises UsageError for a pattern that matches
    nothing and for names that become one.
    """
    checked_cast(dtype)
    manifest = checkpoint.manifest
    tensors: dict[str, Outgoing] = {}
    ties: dict[str, str] = {}
    stored: dict[tuple[int, str | None], str] = {}
    chosen = _chosen(checkpoint, blobs)
    new_names = _new_names([name for name, _, _ in chosen], prefix)
    check_types_used((*new_names.values(), *manifest.rows), dtype)
    for name, node, kind in chosen:
        if kind != "tensor":
            continue
        place = (find_row(manifest, name, node), node)
        if place in stored:
            ties[new_names[name]] = stored[place]
            continue
        stored[place] = new_names[name]
        tensors[new_names[name]] = _outgoing(checkpoint, name, node, cast_of(new_names[name], dtype))
    values: dict[str, Any] = {
        new_names[name]: checkpoint.value(_address(name, node))
        for name, node, kind in chosen
        if kind == "value"
    }
    taken = {name for name, _, _ in chosen}
    left = [leaf.name for leaf in manifest.leaves if leaf.name not in taken] if blobs is None else []
    return Content(tensors, values, ties, tuple(dict.fromkeys(left)))


def _chosen(checkpoint: Checkpoint, blobs: str | Sequence[str] | None) -> list[tuple[str, str | None, str]]:
    manifest = checkpoint.manifest
    patterns = ["*"] if blobs is None else pattern_list(blobs)
    found: list[tuple[str, str | None, str]] = []
    for pattern in patterns:
        hits = [
            (name, node, kind)
            for kind in ("tensor", "value")
            for name, node in choose(manifest, pattern, kind, strict=False)
        ]
        if not hits:
            choose(manifest, pattern, "tensor", strict=True)  # says what there is
        found += hits
    if blobs is None:
        rng = {leaf.name for leaf in manifest.leaves if leaf.role == "rng"}
        removed = manifest.removed(checkpoint.entry.groups)
        gone = {leaf.name for leaf in manifest.leaves if leaf.group in removed}
        found = [one for one in found if one[0] not in rng | gone]
    found = list(dict.fromkeys(found))
    if len({name for name, _, _ in found}) != len(found):
        raise UsageError(f"{patterns} mean leaves of several nodes under one name: export them one by one")
    return found


def _new_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    check_prefix_used(names, prefix)
    for name in names:
        new = name.removeprefix(prefix)
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
