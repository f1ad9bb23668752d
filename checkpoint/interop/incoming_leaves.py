"""From a foreign tree of tensors and values to leaves of blobs. Pure.

A mapping of names to tensors is what a module's `state_dict` looks like: its entries become leaves that
load into a module. Whatever is deeper (an optimizer's state dict, say) becomes one value with tensors
inside, which comes back as it was. Everything at the top that is no mapping is a blob by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.interop.content import Incoming
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import check_blob_names


def leaves_from(incoming: Incoming, blob: str | None) -> list[Leaf]:
    """The leaves. Flat tensors belong to `blob`, or, where it is None, to what their names begin with.

    Raises BlobError for what cannot be stored, UsageError for names that cannot be.
    """
    tree = incoming.tree
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        raise UsageError(f"there is a {type(tree).__name__} where a mapping of names is needed")
    found: list[Leaf] = []
    owners: dict[str, None] = {}
    flat = any(isinstance(value, torch.Tensor) for value in tree.values())
    for name, value in tree.items():
        if is_state_dict(value):
            found += _module(name, value)
            owners[name] = None
        elif flat and blob is not None:
            found += _entry(f"{blob}.{name}", blob, value)
            owners[blob] = None
        else:
            owner = name.partition(".")[0]
            owners[owner] = None
            found += _entry(name, owner, value)
    full = (lambda name: f"{blob}.{name}") if flat and blob is not None else (lambda name: name)
    by_name = {leaf.name: leaf for leaf in found}
    for name, kept in incoming.ties.items():
        one = by_name[full(kept)]
        found.append(Leaf(full(name), one.blob, one.role, one.group, one.content, one.alias_of or one.name))
    return _checked(_tied(found), owners)


def is_state_dict(value: Any) -> bool:
    """Whether this is a mapping of texts to tensors (and a few plain values)."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) and name for name in value)
        and any(isinstance(one, torch.Tensor) for one in value.values())
        and not any(isinstance(one, (Mapping, list, tuple)) for one in value.values())
    )


def _module(blob: str, state: Mapping[str, Any]) -> Iterator[Leaf]:
    for name, value in state.items():
        yield from _entry(f"{blob}.{name}", blob, value)


def _entry(name: str, blob: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        role = Role.TENSOR if name == blob else Role.PARAMETER
        yield Leaf(name, blob, role, MAIN_GROUP, value.detach())
    elif name == blob:
        yield from leaves_of({name: value})
    else:
        yield Leaf(name, blob, Role.VALUE, MAIN_GROUP, Value(values.encode(value, name)))


def _tied(leaves: list[Leaf]) -> list[Leaf]:
    """Of several names of the same memory the first is stored."""
    first: dict[tuple[Any, ...], str] = {}
    found = []
    for leaf in leaves:
        content = leaf.content
        if isinstance(content, torch.Tensor) and leaf.alias_of is None and _dense(content):
            place = (content.data_ptr(), content.dtype, content.shape, content.stride())
            kept = first.setdefault(place, leaf.name)
            if kept != leaf.name:
                leaf = Leaf(leaf.name, leaf.blob, leaf.role, leaf.group, content, kept)  # noqa: PLW2901
        found.append(leaf)
    return found


def _dense(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return plain and tensor.numel() > 0


def _checked(leaves: list[Leaf], owners: Mapping[str, None]) -> list[Leaf]:
    if not leaves:
        raise UsageError("there is nothing in it to import")
    check_blob_names(owners)
    seen: set[str] = set()
    for leaf in leaves:
        if not all(leaf.name.split(".")) and leaf.name != leaf.blob:
            raise UsageError(f"a tensor or value of {leaf.blob!r} would be called {leaf.name!r}: rename it")
        if leaf.name in seen:
            raise UsageError(f"two tensors or values would be called {leaf.name!r}: choose another blob name")
        seen.add(leaf.name)
    return leaves
