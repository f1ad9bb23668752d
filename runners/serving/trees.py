"""Tensors in lists, tuples and dicts: as one batch, by rows, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

Tree = Any
_TOO_LONG = 200


def shape_of(tree: Tree) -> Hashable:
    """Equal for trees that can be stacked: structure, shapes and element types."""
    if isinstance(tree, torch.Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, Mapping):
        return (dict, *((name, shape_of(one)) for name, one in tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree), *map(shape_of, tree))
    return (object(),)  # like no other


def joined(trees: Sequence[Tree]) -> Tree:
    """Trees of equal structure as one, tensors joined along their first dimension; a single one as it is."""
    first = trees[0]
    if len(trees) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(trees))
    if isinstance(first, Mapping):
        return {name: joined([tree[name] for tree in trees]) for name in first}
    return _like(first, [joined(list(parts)) for parts in zip(*trees, strict=True)])


def rows(tree: Tree, count: int) -> list[Tree]:
    """A tree per row, each a batch of one; raises ValueError where a tensor has not `count` rows."""
    if count == 1:
        return [tree]
    if isinstance(tree, torch.Tensor):
        if tree.ndim == 0 or tree.shape[0] != count:
            raise ValueError(f"an output of shape {tuple(tree.shape)} has no row for each of {count} samples")
        return [tree[at : at + 1] for at in range(count)]
    if isinstance(tree, Mapping):
        parts = {name: rows(one, count) for name, one in tree.items()}
        return [{name: part[at] for name, part in parts.items()} for at in range(count)]
    if isinstance(tree, (list, tuple)):
        columns = [rows(one, count) for one in tree]
        return [_like(tree, [column[at] for column in columns]) for at in range(count)]
    raise ValueError(f"an output is {tree!r:.60}: tensors with a row per sample can be batched")


def without_batch(tree: Tree) -> Tree:
    """A batch of one without its first dimension; raises ValueError where a tensor is none."""
    if isinstance(tree, torch.Tensor):
        if tree.ndim == 0 or tree.shape[0] != 1:
            raise ValueError(f"an output of shape {tuple(tree.shape)} has no row for its one sample")
        return tree[0]
    if isinstance(tree, Mapping):
        return {name: without_batch(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return _like(tree, [without_batch(one) for one in tree])
    return tree


def _like(tree: Any, parts: list[Any]) -> Any:
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def elements(tree: Tree) -> int:
    """How many numbers there are, about."""
    if isinstance(tree, torch.Tensor):
        return tree.numel()
    if isinstance(tree, Mapping):
        return sum(map(elements, tree.values())) + 1
    if isinstance(tree, (list, tuple)):
        return sum(map(elements, tree)) + 1
    return 1


def plain(tree: Tree) -> Any:
    """As JSON holds it: tensors as lists; raises TypeError for what JSON has no word for."""
    if isinstance(tree, torch.Tensor):
        real = torch.view_as_real(tree) if tree.is_complex() else tree
        return real.tolist()
    if isinstance(tree, Mapping):
        return {str(name): plain(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(one) for one in tree]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if callable(item := getattr(tree, "tolist", None)):  # a numpy scalar or array
        return plain(item())
    raise TypeError(f"a result of type {type(tree).__name__} is no JSON: {str(tree)[:_TOO_LONG]}")


def json_bytes(value: Any) -> bytes:
    """JSON text; NaN and infinities, for which JSON has no word, are the texts nan, inf and -inf."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_worded(value), allow_nan=False, separators=(",", ":")).encode()


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _worded(one) for name, one in value.items()}
    return [_worded(one) for one in value] if isinstance(value, list) else value
