"""Objects into leaves: everything that a save stores of one node's blobs.

Reads only; tensors are referred to, values are copied. All blobs are listed together, because optimizer
state is named by the parameters of the registered modules, and of several names the first one wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchrelay.checkpoint.disk.many_tensors import AT_ONCE
from torchrelay.checkpoint.state.admission import admitted, all_plain_memory, is_plain_memory
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, OPTIM_GROUP, Leaf, Role
from torchrelay.checkpoint.state.module_leaves import module_leaves, named_parameters, own_leaves
from torchrelay.checkpoint.state.optimizer_leaves import optimizer_leaves, orphans
from torchrelay.checkpoint.state.stateful_leaves import stateful_leaves, tree_leaves
from torchrelay.checkpoint.state.subclasses import is_wrapper
from torchrelay.errors import BlobError


def leaves_of(objects: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of all blobs of one node, in order.

    A blob is a module, an optimizer, a tensor, an object with `state_dict` and `load_state_dict`, or a
    JSON-like value. Raises BlobError with the path inside the blob for anything else.
    """
    return named_leaves(objects)[0]


def named_leaves(objects: Mapping[str, Any]) -> tuple[list[Leaf], dict[int, str]]:
    """The same, and what `parameter_names` says of these objects now."""
    names = parameter_names(objects)
    first_names: dict[int, str] = {}
    found: dict[str, Leaf] = {}
    for blob, value, content in _detached(objects):
        if content is not None and blob not in found:
            first = first_names.setdefault(id(value), blob)
            alias = None if first == blob else first
            found[blob] = Leaf(blob, blob, tensor_role(value), MAIN_GROUP, content, alias)
            continue
        for leaf in _leaves(blob, value, names, first_names):
            _check_unused(leaf, found)
            found[leaf.name] = leaf
    return list(found.values()), names


def _detached(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any, torch.Tensor | None]]:
    """All blobs; those that are plain memory, of which there may be very many, with a detached tensor."""
    blobs, values = list(objects), list(objects.values())
    for at in range(0, len(values), AT_ONCE):
        part = slice(at, at + AT_ONCE)
        yield from zip(blobs[part], values[part], _detached_some(values[part]), strict=True)


def _detached_some(values: Sequence[Any]) -> Iterable[torch.Tensor | None]:
    if all_plain_memory(values):
        return map(torch.Tensor.detach, values)
    return (value.detach() if is_plain_memory(value) else None for value in values)


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The leaf name of every parameter, by id: of a module, registered alone, or only an optimizer's."""
    found: dict[int, str] = {}
    optimizers: dict[str, Any] = {}
    for blob, value in objects.items():
        if type(value) is torch.Tensor:
            found.setdefault(id(value), blob)
            continue
        kind = kind_of(value)
        if kind is Kind.MODULE:
            for name, parameter in named_parameters(blob, value):
                found.setdefault(id(parameter), name)
        elif kind is Kind.TENSOR:
            found.setdefault(id(value), blob)
        elif kind is Kind.OPTIMIZER:
            optimizers[blob] = value
    for blob, value in optimizers.items():
        for name, orphan in orphans(blob, value):
            found.setdefault(id(orphan), name)
    return found


def group_of(value: Any) -> str:
    """The file group of a blob's state: `optim` for optimizers of any make, else `main`."""
    return OPTIM_GROUP if isinstance(value, torch.optim.Optimizer) else MAIN_GROUP


def _leaves(blob: str, value: Any, names: Mapping[int, str], first_names: dict[int, str]) -> Iterator[Leaf]:
    kind = kind_of(value)
    if kind is Kind.TENSOR:
        if not is_wrapper(value):
            admitted(value, blob)  # one that nobody registered is made anew, and would lose its type
        yield from own_leaves(blob, blob, tensor_role(value), value, first_names)
    elif kind is Kind.MODULE:
        yield from module_leaves(blob, value, first_names)
    elif kind is Kind.OPTIMIZER:
        yield from optimizer_leaves(blob, value, names, first_names)
    elif kind is Kind.STATEFUL:
        yield from stateful_leaves(blob, value, group_of(value))
    else:
        yield from tree_leaves(value, blob, blob)


def tensor_role(tensor: torch.Tensor) -> Role:
    """The role of a tensor that is a blob by itself."""
    if type(tensor) is torch.Tensor:  # quicker than to ask whether it is a parameter
        return Role.TENSOR
    return Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.TENSOR


def _check_unused(leaf: Leaf, found: Mapping[str, Leaf]) -> None:
    if leaf.name in found:
        raise BlobError(
            f"two leaves of blob {leaf.blob!r} would be called {leaf.name!r}: rename one of the two entries"
        )
