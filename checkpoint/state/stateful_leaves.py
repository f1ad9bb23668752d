"""Leaves of trees: what `state_dict()` returns, and other values with or without tensors in them.

The tree is one value leaf in which references stand for tensors; these are leaves of their own, named
by their path. A name is made from the path for people to read and never taken apart again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchrelay.checkpoint.disk.values import encode, is_scalar
from torchrelay.checkpoint.state.admission import admitted
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value
from torchrelay.checkpoint.state.subclasses import description, inner_tensors, is_wrapper
from torchrelay.errors import BlobError

_INDEX = re.compile(r"\[(-?\w+)\]")


def stateful_leaves(blob: str, value: Any, group: str = MAIN_GROUP) -> list[Leaf]:
    """The leaves of an object with `state_dict`; raises BlobError naming what cannot be stored."""
    try:
        state = value.state_dict()
    except Exception as error:
        raise BlobError(
            f"state_dict() of blob {blob!r} ({type(value).__name__}) raised {type(error).__name__}: {error}"
        ) from error
    return tree_leaves(state, blob, blob, group, role=Role.STATE)


def subclass_leaves(
    name: str,
    blob: str,
    group: str,
    tensor: torch.Tensor,
    leaves: Callable[[str, torch.Tensor], Iterable[Leaf]],
) -> Iterator[Leaf]:
    """A value leaf that says what a wrapper is, and what `leaves` makes of each inner tensor."""
    yield Leaf(name, blob, Role.SUBCLASS, group, Value(description(tensor, name)))
    for inner, part in inner_tensors(tensor, name).items():
        yield from leaves(f"{name}.{inner}", part)


def tree_leaves(
    value: Any,
    name: str,
    blob: str,
    group: str = MAIN_GROUP,
    *,
    role: Role = Role.VALUE,
    tensor_role: Role = Role.TENSOR,
) -> list[Leaf]:
    """A value leaf called `name`, followed by a leaf for each tensor inside it."""
    if is_scalar(value):
        return [Leaf(name, blob, role, group, Value(encode(value, name)))]
    tensors: dict[str, Leaf] = {}
    known: dict[int, str] = {}
    taken = {name}

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in known:
            leaf_name = known[id(tensor)] = _named(tensor, path, taken)
            tensors.update((leaf.name, leaf) for leaf in _tensor_leaves(tensor, leaf_name, path))
        return known[id(tensor)]

    def _tensor_leaves(tensor: torch.Tensor, leaf_name: str, path: str) -> Iterable[Leaf]:
        if role is Role.STATE and is_wrapper(tensor):
            return subclass_leaves(
                leaf_name, blob, group, tensor, lambda n, inner: _tensor_leaves(inner, n, f"{path}: {n}")
            )
        return [Leaf(leaf_name, blob, tensor_role, group, admitted(tensor, path))]

    tree = Leaf(name, blob, role, group, Value(encode(value, name, tensor=refer)))
    return [tree, *tensors.values()]


def tree_tensors(value: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a tree under the names that `tree_leaves` gives them."""
    found: dict[str, torch.Tensor] = {}
    known: dict[int, str] = {}
    taken = {name}

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in known:
            known[id(tensor)] = _named(tensor, path, taken)
            found[known[id(tensor)]] = tensor
        return known[id(tensor)]

    encode(value, name, tensor=refer)
    return found


def entry_leaves(
    value: Any, name: str, blob: str, group: str, tensor_role: Role, like: torch.Tensor | None = None
) -> list[Leaf]:
    """One entry of a mapping: a tensor is a leaf as it is, anything else a tree.

    A wrapper subclass is stored where `like`, which every later start has too, is of the same class.
    """
    if isinstance(value, torch.Tensor):
        if like is not None and is_wrapper(value) and type(value) is type(like):
            parts = inner_tensors(like, name)
            return list(
                subclass_leaves(
                    name,
                    blob,
                    group,
                    value,
                    lambda n, inner: entry_leaves(
                        inner, n, blob, group, tensor_role, parts.get(n.removeprefix(f"{name}."))
                    ),
                )
            )
        return [Leaf(name, blob, tensor_role, group, admitted(value, name))]
    return tree_leaves(value, name, blob, group, tensor_role=tensor_role)


def _named(tensor: torch.Tensor, path: str, taken: set[str]) -> str:
    """A name for a tensor and, below it, the inner ones of a wrapper; all of them are `taken` then.

    It is that of the path, or has a number where two paths read alike ({"a.b": x, "a": {"b": y}}).
    """
    name = candidate = _INDEX.sub(r".\1", path)
    number = 2
    while not taken.isdisjoint(names := _with_inner(tensor, candidate)):
        candidate, number = f"{name}~{number}", number + 1
    taken.update(names)
    return candidate


def _with_inner(tensor: torch.Tensor, name: str) -> list[str]:
    inner = inner_tensors(tensor, name) if is_wrapper(tensor) else {}
    return [name, *(one for key, part in inner.items() for one in _with_inner(part, f"{name}.{key}"))]
