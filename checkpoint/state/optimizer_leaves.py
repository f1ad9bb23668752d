"""Leaves of an optimizer, read as it is: no step, no call of `state_dict`, nothing is created.

optimizer.state.<parameter>.<key>        a tensor, or a value such as a nested list
optimizer.param_groups.<group>.<key>     lr, betas, ...
optimizer.param_groups.<group>.params    the leaf names of its parameters, in order
optimizer.param.<group>.<index>          a parameter of no registered module, with its content
optimizer.shared                         state that belongs to no parameter, where there is any
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from torchrelay.checkpoint.state.leaf import OPTIM_GROUP, Leaf, Role, Value
from torchrelay.checkpoint.state.module_leaves import own_leaves
from torchrelay.checkpoint.state.stateful_leaves import entry_leaves, tree_leaves
from torchrelay.errors import BlobError

PARAMS = "params"


def optimizer_leaves(
    blob: str, optimizer: Optimizer, names: Mapping[int, str], first_names: dict[int, str]
) -> Iterator[Leaf]:
    """The leaves of an optimizer; `names` are the leaf names of all parameters, by id."""
    for name, parameter in orphans(blob, optimizer):
        if names[id(parameter)] == name:
            yield from own_leaves(name, blob, Role.PARAMETER, parameter, first_names)
    for index, group in enumerate(optimizer.param_groups):
        yield from _group_leaves(group_prefix(blob, index), blob, group, names)
    for parameter in parameters(optimizer):
        state = optimizer.state.get(parameter, {})
        prefix = f"{state_prefix(blob)}{names[id(parameter)]}."
        yield from _entries(prefix, blob, state, parameter)
    yield from _shared_leaves(blob, optimizer)


def parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group[PARAMS]


def orphans(blob: str, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter with the name it has if no registered module knows it."""
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group[PARAMS]):
            yield f"{blob}.param.{index}.{place}", parameter


def group_prefix(blob: str, index: int) -> str:
    """What the leaf names of a parameter group begin with."""
    return f"{groups_prefix(blob)}{index}."


def groups_prefix(blob: str) -> str:
    """What the leaf names of all parameter groups begin with."""
    return f"{blob}.param_groups."


def state_prefix(blob: str) -> str:
    """What the leaf names of state begin with."""
    return f"{blob}.state."


def shared_name(blob: str) -> str:
    """The leaf of state that belongs to no parameter."""
    return f"{blob}.shared"


def _group_leaves(prefix: str, blob: str, group: dict[str, Any], names: Mapping[int, str]) -> Iterator[Leaf]:
    members = [names[id(parameter)] for parameter in group[PARAMS]]
    yield Leaf(f"{prefix}{PARAMS}", blob, Role.VALUE, OPTIM_GROUP, Value(members))
    yield from _entries(prefix, blob, {key: value for key, value in group.items() if key != PARAMS})


def _entries(
    prefix: str, blob: str, entries: Mapping[Any, Any], owner: torch.Tensor | None = None
) -> Iterator[Leaf]:
    for key, value in entries.items():
        if not isinstance(key, str):
            raise BlobError(f"{prefix}{key!r} of blob {blob!r}: only text can be a key of optimizer state")
        yield from entry_leaves(value, f"{prefix}{key}", blob, OPTIM_GROUP, Role.OPTIMIZER, owner)


def _shared_leaves(blob: str, optimizer: Optimizer) -> list[Leaf]:
    known = {id(parameter) for parameter in parameters(optimizer)}
    shared = {key: value for key, value in optimizer.state.items() if id(key) not in known}
    for key in shared:
        if isinstance(key, torch.Tensor):
            raise BlobError(
                f"blob {blob!r} has state of a parameter ({list(key.shape)}) that is in none of its groups:"
                " delete that state, or add the parameter back with add_param_group"
            )
    if not shared:
        return []
    return tree_leaves(shared, shared_name(blob), blob, OPTIM_GROUP, tensor_role=Role.OPTIMIZER)
