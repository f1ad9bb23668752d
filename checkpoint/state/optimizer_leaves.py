"""Leaves of an optimizer, read as it is: no step, no call of `state_dict`, nothing is created.

optimizer.state.<parameter>.<key>        a tensor, or a value such as a nested list
optimizer.param_groups.<group>.<key>     lr, betas, ...
optimizer.param_groups.<group>.params    the leaf names of its parameters, in order
optimizer.param.<group>.<index>          a parameter of no registered module, with its content
optimizer.shared                         state that belongs to no parameter, where there is any
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.optim import Optimizer

from torchrelay.checkpoint.format.shard.batched_reads import AT_ONCE
from torchrelay.checkpoint.state.admission import admitted, all_plain_memory
from torchrelay.checkpoint.state.kinds import local_part
from torchrelay.checkpoint.state.leaf import OPTIM_GROUP, Leaf, Role, Value
from torchrelay.checkpoint.state.module_leaves import own_leaves
from torchrelay.checkpoint.state.reads import with_strides_of
from torchrelay.checkpoint.state.stateful_leaves import entry_leaves, tree_leaves
from torchrelay.checkpoint.state.subclasses import check_made, is_wrapper
from torchrelay.checkpoint.state.tensor_names import TensorNames, is_reordered
from torchrelay.errors import BlobError

PARAMS = "params"


def optimizer_leaves(
    blob: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    parameter_names: TensorNames,
    state_names: TensorNames,
) -> Iterator[Leaf]:
    """The leaves of an optimizer; `names` are the leaf names of all parameters, by id.

    Entries that are one tensor (an `lr` of all groups, a step counter) are stored once: the others are
    aliases. `parameter_names` and `state_names` are the first names of tensors that were listed before.
    """
    for name, parameter in orphans(blob, optimizer):
        if names[id(parameter)] == name:
            yield from own_leaves(name, blob, Role.PARAMETER, parameter, parameter_names)
    for index, group in enumerate(optimizer.param_groups):
        prefix = group_prefix(blob, index)
        members = [names[id(parameter)] for parameter in group[PARAMS]]
        yield Leaf(f"{prefix}{PARAMS}", blob, Role.VALUE, OPTIM_GROUP, Value(members))
        options = {key: value for key, value in group.items() if key != PARAMS}
        yield from _entries(prefix, blob, options, state_names)
    prefix = state_prefix(blob)
    local = local_part(optimizer)
    states = [(one, state) for one in parameters(optimizer) if (state := local.state.get(one))]
    for at in range(0, len(states), AT_ONCE):
        part = states[at : at + AT_ONCE]
        prefixes = [f"{prefix}{names[id(parameter)]}." for parameter, _ in part]
        keys = [f"{first}{key}" for first, (_, state) in zip(prefixes, part, strict=True) for key in state]
        values = [value for _, state in part for value in state.values()]
        texts = all(type(key) is str for _, state in part for key in state)
        if texts and all_plain_memory(values) and state_names.add_new(keys, values):
            contents = map(torch.Tensor.detach, values)
            yield from map(Leaf, keys, repeat(blob), repeat(Role.OPTIMIZER), repeat(OPTIM_GROUP), contents)
            continue
        for first, (parameter, state) in zip(prefixes, part, strict=True):
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and is_wrapper(value)
                    and type(value) is not type(parameter)
                ):
                    check_made(local, parameter, key, value, f"{first}{key}")
            yield from _entries(first, blob, state, state_names, wrappers=True)
    yield from _shared_leaves(blob, optimizer, names, state_names)


def parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group[PARAMS]


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim")


def match_strides(optimizer: Optimizer, *, known: bool) -> None:
    """Give state the strides of its parameter, as the first step of torch's optimizers does.

    Where it is `known` in which order dimensions lay, contiguous state was so, and stays. Optimizers with a
    step of their own may need theirs contiguous, and are left alone.
    """
    if not steps_as_torch(optimizer):
        return
    instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    states = [
        (parameter, state) for parameter in parameters(optimizer) if (state := optimizer.state.get(parameter))
    ]
    for parameter, state in states:
        follows = not known and is_reordered(parameter)
        for one in state.values():
            if isinstance(one, torch.Tensor) and (follows or is_reordered(one)):
                instead.setdefault(id(one), (one, with_strides_of(parameter, one)))
    for _, state in states if instead else ():  # what was one tensor is one again
        state.update({key: instead[id(one)][1] for key, one in state.items() if id(one) in instead})


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


def _entries(
    prefix: str, blob: str, entries: Mapping[Any, Any], state_names: TensorNames, *, wrappers: bool = False
) -> Iterator[Leaf]:
    for key, value in entries.items():
        if not isinstance(key, str):
            raise BlobError(f"{prefix}{key!r} of blob {blob!r}: only text can be a key of optimizer state")
        name = f"{prefix}{key}"
        if type(value) is torch.Tensor:  # most entries
            content, earlier = admitted(value, name), state_names.earlier(value, name)
            yield Leaf(name, blob, Role.OPTIMIZER, OPTIM_GROUP, content, earlier)
        else:
            found = entry_leaves(value, name, blob, OPTIM_GROUP, Role.OPTIMIZER, wrappers=wrappers)
            yield from map(partial(_shared, state_names), found)


def _shared(state_names: TensorNames, leaf: Leaf) -> Leaf:
    """The leaf, an alias where its tensor was listed before."""
    content = leaf.content
    earlier = None if isinstance(content, Value) else state_names.earlier(content, leaf.name)
    return replace(leaf, alias_of=earlier) if earlier is not None else leaf


def _shared_leaves(
    blob: str, optimizer: Optimizer, names: Mapping[int, str], state_names: TensorNames
) -> Iterator[Leaf]:
    known = {id(parameter) for parameter in parameters(optimizer)}
    shared = {key: value for key, value in local_part(optimizer).state.items() if id(key) not in known}
    for key in shared:
        if isinstance(key, torch.Tensor):
            whose = names.get(id(key), f"a parameter of shape {list(key.shape)}")
            raise BlobError(
                f"blob {blob!r} has state of {whose}, which is in none of its groups: "
                "delete that state, or add the parameter back with add_param_group"
            )
    if shared:
        found = tree_leaves(shared, shared_name(blob), blob, OPTIM_GROUP, tensor_role=Role.OPTIMIZER)
        yield from map(partial(_shared, state_names), found)
