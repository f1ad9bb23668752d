"""Leaves of containers: what they hold at a boundary.

A container is one value leaf, its tree, in which references stand for tensors and for objects that are blobs
by themselves; tensors in it are leaves of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.values import encode
from torchrelay.checkpoint.state.admission import admitted
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value, frozen_of
from torchrelay.checkpoint.state.stateful_leaves import dotted, nested_leaves, unused_name
from torchrelay.checkpoint.state.tensor_names import TensorNames
from torchrelay.errors import BlobError
from torchrelay.jobs.blobs import is_factory, is_stateful
from torchrelay.jobs.containers import found_inside


def container_leaves(
    blob: str, value: Any, objects: Mapping[str, Any], first_names: TensorNames
) -> list[Leaf]:
    """The leaves of a container: its tree and its tensors; none where all it holds are blobs.

    `objects` are the blobs of the node. Raises BlobError, with the path, for an object with state that is
    none of them, or stands where another one was registered.
    """
    tensors: list[Leaf] = []
    names: dict[int, str] = {}
    taken = {blob}

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in names:
            name = names[id(tensor)] = unused_name(tensor, path, taken, blob)
            tensors.extend(nested_leaves(name, blob, MAIN_GROUP, tensor, path, leaf_of))
        return names[id(tensor)]

    def leaf_of(name: str, tensor: torch.Tensor, path: str) -> Leaf:
        role = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.TENSOR
        alias = first_names.earlier(tensor, name)
        return Leaf(name, blob, role, MAIN_GROUP, admitted(tensor, path), alias, frozen_of(role, tensor))

    def keep(path: str, memory: torch.Tensor) -> str:
        name = unused_name(memory, path, taken, blob)
        tensors.append(Leaf(name, blob, Role.VALUE, MAIN_GROUP, memory))
        return name

    def place(path: str, found: Any) -> str | None:
        return _blob_at(path, found, objects)

    tree = encode(value, blob, tensor=refer, memory=keep, blob=place)
    if not tensors and _only_blobs(tree):
        return []
    return [Leaf(blob, blob, Role.VALUE, MAIN_GROUP, Value(tree)), *tensors]


def container_tensors(blob: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a container by the names of their leaves, where no two read alike."""
    return (
        (dotted(path), tensor)
        for path, tensor in found_inside(value, blob, lambda _, found: isinstance(found, torch.Tensor))
    )


def _blob_at(path: str, found: Any, objects: Mapping[str, Any]) -> str | None:
    """The name of the blob that an object inside a container is; None for what cannot be one."""
    name = dotted(path)
    if is_factory(found):
        return name if name in objects else None
    if not is_stateful(found):
        return None
    if name in objects and objects[name] is not found:
        raise BlobError(
            f"{name} is another {type(found).__name__} than the one that was registered, which a resumed run "
            f"would not find: change that one in place, for instance with load_state_dict"
        )
    same = [other for other, known in objects.items() if known is found]
    if not same:
        raise BlobError(
            f"{name} is a {type(found).__name__} that lies in a set, or came into its container after the "
            "blobs were registered: put it into a list or dict before, or register it as a blob of its own"
        )
    return name if name in same else same[0]


def _only_blobs(tree: Json) -> bool:
    """Whether a tree has nothing but references to blobs at its ends."""
    if isinstance(tree, dict):
        if "$" in tree and tree["$"] == "blob":
            return True
        if tree.get("$", "dict") != "dict":
            return False
        inner = [item for _, item in tree["v"]] if "$" in tree else list(tree.values())
        return bool(inner) and all(map(_only_blobs, inner))
    return isinstance(tree, list) and bool(tree) and all(map(_only_blobs, tree))
