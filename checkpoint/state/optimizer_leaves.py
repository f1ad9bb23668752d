"""Leaves of an optimizer, read as it is, and what its last steps left behind.

optimizer.state.<parameter>.<key>        a tensor, or a value such as a nested list
optimizer.param_groups.<group>.<key>     lr, betas, ...
optimizer.param_groups.<group>.params    the leaf names of its parameters, in order
optimizer.param.<group>.<index>          a parameter of no registered module, with its content
optimizer.shared                         state that belongs to no parameter, where there is any

It is noted after each step of any optimizer of torch.optim, by weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchrelay.checkpoint.format.dtypes import AT_ONCE
from torchrelay.checkpoint.state.kinds import Kind, check_made, is_wrapper, kind_of, local_part
from torchrelay.checkpoint.state.leaf import OPTIM_GROUP, Leaf, Role, Value, is_sharded, memory_of_shard
from torchrelay.checkpoint.state.module_leaves import own_leaves
from torchrelay.checkpoint.state.names import TensorNames, is_reordered, memory_place
from torchrelay.checkpoint.state.reads import with_strides_of
from torchrelay.checkpoint.state.tensor_checks import admitted, all_plain_memory
from torchrelay.checkpoint.state.tree_leaves import entry_leaves, tree_leaves
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


class LastStep:
    """What an optimizer's last step found; made once, and again where its parameters are others."""

    def __init__(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.parameters = frozenset(map(id, parameters))
        self.count = len(parameters)
        self.plain = all(type(one) in (torch.Tensor, nn.Parameter) for one in parameters)
        self.beside: list[LastStep] = [one for one in STEPS.values() if one.parameters & self.parameters]
        """Those of other optimizers of the same parameters."""
        for one in self.beside:
            one.beside.append(self)
        self.grads: list[weakref.ref[torch.Tensor]] = []
        """Held here, so that a gradient that lives has one and the same reference at every look."""
        self.versions: list[int] = []
        """How often each had been written to."""
        self.begins_anew: bool | None = None
        """Whether no step so far found a gradient of the step before; None before the second."""

    def note(self, parameters: list[torch.Tensor]) -> None:
        """Keep what a step has found."""
        found = [grad for grad in map(_grad_of, parameters) if grad is not None]
        if not self.plain:
            found = list(map(written_memory, found))
        grads, before = list(map(weakref.ref, found)), self.grads
        if before and self.begins_anew is not False:
            if len(grads) == len(before) == self.count:
                self.begins_anew = not any(map(is_, grads, before))
            else:
                self.begins_anew = set(map(id, before)).isdisjoint(map(id, grads))
        self.grads, self.versions = grads, list(map(_version_of, found))
        for other in self.beside:
            # A step within a step finds what the other one found; else one of the two optimizers goes on with
            # what the other has left behind.
            known = dict(zip(map(id, other.grads), other.versions, strict=True))
            now = zip(map(id, grads), self.versions, strict=True)
            if any(known.get(key, version) != version for key, version in now):
                self.begins_anew = other.begins_anew = False

    def living(self) -> Iterator[tuple[torch.Tensor, int]]:
        """The gradients that are still there, with how often each had been written."""
        found = ((one(), version) for one, version in zip(self.grads, self.versions, strict=True))
        return ((grad, version) for grad, version in found if grad is not None)


_grad_of, _version_of = attrgetter("grad"), attrgetter("_version")
STEPS: dict[int, LastStep] = {}
_installed: list[Any] = []


def watch_steps() -> None:
    """Note from now on what the steps of optimizers leave behind; for the life of the process.

    In every step, so it has to cost little: a microsecond, and a quarter of one for each parameter.
    """
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    groups = optimizer.param_groups
    parameters = (
        groups[0]["params"] if len(groups) == 1 else [one for group in groups for one in group["params"]]
    )
    step = STEPS.get(id(optimizer))
    if step is None or step.count != len(parameters) or step.optimizer() is not optimizer:
        for number in [number for number, one in STEPS.items() if one.optimizer() in (None, optimizer)]:
            del STEPS[number]
        step = STEPS[id(optimizer)] = LastStep(optimizer, parameters)
    try:
        step.note(parameters)
    except Exception:  # gradients of a kind that cannot be followed: what is not known is saved
        step.grads, step.versions, step.begins_anew = [], [], False


def unsaved_optimizers(
    names: Mapping[int, str], held: Iterable[Any], leaves: Iterable[Leaf], known: Container[Optimizer]
) -> Iterator[tuple[Optimizer, str]]:
    """Optimizers but `known` ones that have stepped tensors of these names, and whose state nobody saves.

    Each with such a name. An object of `held` saves its own, and with a `state_dict` that of the optimizers
    among its attributes; modules and schedulers do not. Whatever else has tensors of an optimizer's state
    among its leaves saves it as well.
    """
    saved: set[int] = set()
    for one in held:
        saved.update((id(one), id(local_part(one)) if isinstance(one, Optimizer) else id(one)))
        if not isinstance(one, nn.Module | LRScheduler) and kind_of(one) is not Kind.OPTIMIZER:
            for value in getattr(one, "__dict__", {}).values():
                saved.update(map(id, value if isinstance(value, list | tuple) else [value]))
    for step in STEPS.values():
        optimizer = step.optimizer()
        name = next((names[one] for one in step.parameters if one in names), None)
        if optimizer is None or name is None or id(optimizer) in saved or optimizer in known:
            continue
        own = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        stored = (leaf.content for leaf in leaves if not isinstance(leaf.content, Value))
        if own and {*map(memory_place, own)}.isdisjoint(map(memory_place, stored)):
            yield optimizer, name


def left_behind() -> dict[int, int]:
    """What steps left behind, by id, with how often each had been written."""
    return {
        id(grad): version for step in STEPS.values() if step.begins_anew for grad, version in step.living()
    }


def is_left(grad: torch.Tensor, left: Mapping[int, int]) -> bool:
    """Whether a gradient is what a step left behind, not written since."""
    memory = written_memory(grad)
    known = left.get(id(memory))
    return known is not None and known == memory._version and not grad.requires_grad


def written_memory(grad: torch.Tensor) -> torch.Tensor:
    """What is written: FSDP2 adds to the local part of a DTensor, whose own version stays."""
    return memory_of_shard(grad) if is_sharded(grad) else grad
