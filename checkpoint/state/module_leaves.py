"""List leaves of modules under the canonical names of their state dicts, and leaves of optimizers.

Canonical names contain no wrappers of torch (DistributedDataParallel, DataParallel, torch.compile, activation
checkpointing and offloading), so that a wrapped and a bare module share checkpoints. They come from
`state/names.py`, for modules and for optimizer state. Parameters and buffers can be loaded in place; what a
hook or `get_extra_state` computed is loaded through `load_state_dict`.

    optimizer.state.<parameter>.<key>         a tensor, or a value such as a nested list
    optimizer.param_groups.<group>.<key>      lr, betas, ...
    optimizer.param_groups.<group>.params     leaf names of its parameters, in order
    optimizer.param.<group>.<index>           a parameter of no registered module, with its content
    optimizer.shared                          state that belongs to no parameter, if any
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.format.dtypes import AT_ONCE
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, OPTIM_GROUP, Leaf, Role, Value, frozen_of
from torchrelay.checkpoint.state.names import (
    Part,
    TensorNames,
    all_plain_memory,
    is_reordered,
    key_names,
    local_part,
    module_parts,
)
from torchrelay.checkpoint.state.tensor_memory import admitted, admitted_in_place, is_wrapper, with_strides_of
from torchrelay.checkpoint.state.tree_leaves import check_made, entry_leaves, subclass_leaves, tree_leaves
from torchrelay.errors import BlobError, UsageError
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.flatten import ModuleStates


@dataclass(frozen=True, eq=False)
class ModuleEntry:
    """An entry of a state dict: torch's `key`, the leaf's `name`, and `role`, None for computed ones."""

    key: str
    name: str
    value: Any
    role: Role | None


def module_entries(
    blob: str, module: nn.Module, state: dict[str, Any], parts: Sequence[Part] | None = None
) -> list[ModuleEntry]:
    """The entries of `state`, which is `module.state_dict(keep_vars=True)`, in its order."""
    parts = module_parts(module) if parts is None else parts
    roles = {id(one): Role.PARAMETER for _, _, part in parts for one in part._parameters.values()}
    roles.update((id(one), Role.BUFFER) for _, _, part in parts for one in part._buffers.values())
    roles.pop(id(None), None)  # a parameter or buffer that is registered without one
    role_of, name_of = roles.get, key_names(parts) or (lambda key, one: key)
    return [
        ModuleEntry(key, f"{blob}.{name_of(key, one)}", one, role_of(id(one))) for key, one in state.items()
    ]


def module_leaves(
    blob: str, module: nn.Module, first_names: TensorNames, states: ModuleStates
) -> Iterator[Leaf]:
    """The leaves of a module; `first_names` are those of tensors that were listed before."""
    entries = states.entries(blob, module)
    for at in range(0, len(entries), AT_ONCE):
        part = entries[at : at + AT_ONCE]
        names, tensors = [one.name for one in part], [one.value for one in part]
        roles = [one.role for one in part]
        if None not in roles and all_plain_memory(tensors) and first_names.add_new(names, tensors):
            contents = map(torch.Tensor.detach, tensors)
            frozen = map(frozen_of, roles, tensors)
            yield from map(
                Leaf, names, repeat(blob), roles, repeat(MAIN_GROUP), contents, repeat(None), frozen
            )
            continue
        for name, tensor, role in zip(names, tensors, roles, strict=True):
            if role is None:
                yield from entry_leaves(tensor, name, blob, MAIN_GROUP, Role.TENSOR)
            else:
                yield from own_leaves(name, blob, role, tensor, first_names)


def own_leaves(
    name: str, blob: str, role: Role, tensor: torch.Tensor, first_names: TensorNames
) -> Iterator[Leaf]:
    """The leaf of a tensor that outlives the listing, an alias if it is known; all leaves of a wrapper."""

    def leaf_of(name: str, tensor: torch.Tensor) -> Leaf:
        content = admitted_in_place(tensor, name)
        alias_of = first_names.earlier(tensor, name)
        return Leaf(name, blob, role, MAIN_GROUP, content, alias_of, frozen_of(role, tensor))

    if is_wrapper(tensor):
        return subclass_leaves(name, blob, MAIN_GROUP, tensor, leaf_of)
    return iter([leaf_of(name, tensor)])


def named_parameters(blob: str, module: nn.Module, states: ModuleStates) -> list[tuple[str, torch.Tensor]]:
    """Parameters with all their leaf names, those of a user's hook first. Raises BlobError for FSDP1."""
    parts = states.parts(module)
    kinds = show_shards(blob, parts)
    found: list[tuple[str, torch.Tensor]] = []
    hooks = [
        hook
        for _, _, part in parts
        if part._state_dict_hooks or part._state_dict_pre_hooks
        for hook in (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
    ]
    if any(map(_overrides_state, kinds)) or not all(map(_is_of_torch, hooks)):  # keys may be others
        entries = states.entries(blob, module)
        found += [(one.name, one.value) for one in entries if one.role is Role.PARAMETER]
    found += [
        (f"{blob}.{path}{name}", parameter)
        for path, _, part in parts
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    return found


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")


@lru_cache(maxsize=256)
def _overrides_state(kind: type[nn.Module]) -> bool:
    return not all(map(_is_of_torch, (kind.state_dict, kind._save_to_state_dict)))


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all modules below it, each once, in no particular order; faster than `modules()`."""
    found = {id(module): module}
    todo = [module]
    while todo:
        for part in todo.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                todo.append(part)
    return list(found.values())


def show_shards(blob: str, parts: Sequence[Part]) -> set[Any]:
    """Make FSDP2 modules show their shards; the classes of all parts. Raises BlobError for FSDP1."""
    kinds: set[Any] = {type(part) for _, _, part in parts}
    names = frozenset[str]().union(*map(_class_names, kinds))
    if "FullyShardedDataParallel" in names:
        raise BlobError(
            f"blob {blob!r} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters are "
            "not tensors of the module: register torchrelay.fsdp_state(module, optimizer) instead of "
            "both"
        )
    for _, _, part in parts if "FSDPModule" in names else ():
        kind: Any = type(part)
        if "FSDPModule" in _class_names(kind):
            part.reshard()  # type: ignore[operator]
    return kinds


@lru_cache(maxsize=256)
def _class_names(kind: type) -> frozenset[str]:
    return frozenset(one.__name__ for one in kind.__mro__)


class FsdpState:
    """The state of a module wrapped by FullyShardedDataParallel, and of its optimizer; see `fsdp_state`."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        if not isinstance(module, nn.Module) or not isinstance(optimizer, Optimizer | None):
            raise UsageError(
                "invalid arguments of fsdp_state: expected a module and optionally its optimizer"
            )
        self.module = module
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The sharded state by parameter names; all ranks must call together. Changes nothing.

        An optimizer without state gives its options only, because torch would make a step to get state.
        Raises BlobError if FSDP has no device mesh.
        """
        if self.optimizer is None or not self.optimizer.state:
            return {"model": self._model_state(), "optimizer": None, "options": self._options()}
        return {"model": self._model_state(), "optimizer": self._optimizer_state(), "options": None}

    def state_dict_to_load_into(self) -> dict[str, Any]:
        """As `state_dict`, with the state of an optimizer after its first step, to be loaded into."""
        if self.optimizer is None or self.optimizer.state:
            return self.state_dict()
        options = self._options()
        try:
            found = self._optimizer_state()
        finally:
            self.optimizer.state.clear()
            self._set_options(options)
        return {"model": self._model_state(), "optimizer": found, "options": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state of module and optimizer; all ranks must call together."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        set_model_state_dict(self.module, dict(state["model"]))
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        if state["optimizer"] is not None:
            set_optimizer_state_dict(self.module, self.optimizer, _unshared(state["optimizer"]))
        else:
            self._set_options(state["options"])

    def _model_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(_checked(get_model_state_dict(self.module)))

    def _optimizer_state(self) -> Any:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return _checked(get_optimizer_state_dict(self.module, self.optimizer or ()))

    def _options(self) -> list[dict[str, Any]]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        if self.optimizer is not None:
            for group, values in zip(self.optimizer.param_groups, options, strict=True):
                group.update(values)


def fsdp_state(module: nn.Module, optimizer: Optimizer | None = None) -> FsdpState:
    """Wrap an FSDP1 module (`FullyShardedDataParallel`) and its optimizer as one blob.

    Each rank stores its shards, as for FSDP2. An epoch loads onto any number of ranks, also into the
    `fsdp_state` of a plain module. Saves and loads gather one wrapped unit after another by collectives on
    all ranks. FSDP needs `device_mesh=`. For FSDP2 (`fully_shard`) register the module itself instead.

    Args:
        module: the wrapped module, or a plain one to load into.
        optimizer: its optimizer, if any.

    Returns:
        An object with `state_dict` and `load_state_dict`, to be registered as a blob.

    Example:
        blobs=dict(net=torchrelay.fsdp_state(model, optimizer))
    """
    return FsdpState(module, optimizer)


def _checked(state: Any) -> Any:
    """The state; raises BlobError for shards without a mesh."""

    def type_names(state: Any) -> set[str]:
        if not isinstance(state, Mapping):
            return {type(state).__name__}
        return {name for value in state.values() for name in type_names(value)}

    if "ShardedTensor" in type_names(state):
        raise BlobError(
            "FSDP1 without a device mesh gives ShardedTensors, which cannot be stored: wrap with "
            'FullyShardedDataParallel(..., device_mesh=init_device_mesh("cuda", (world_size,)))'
        )
    return state


def _unshared(state: Any) -> Any:
    """A copy in which no plain tensor occurs twice: an optimizer would count a shared `step` for each."""
    if isinstance(state, Mapping):
        return {key: _unshared(value) for key, value in state.items()}
    return state.clone() if type(state) is torch.Tensor else state


PARAMS = "params"


def optimizer_leaves(
    blob: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    parameter_names: TensorNames,
    state_names: TensorNames,
) -> Iterator[Leaf]:
    """The leaves of an optimizer; `names` are the leaf names of all parameters, by id.

    Entries that are one tensor (an `lr` of all groups, a step counter) are stored once, the others are
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
    known = {id(parameter) for parameter in parameters(optimizer)}
    shared = {key: value for key, value in local.state.items() if id(key) not in known}
    for key in shared:
        if isinstance(key, torch.Tensor):
            whose = names.get(id(key), f"a parameter of shape {list(key.shape)}")
            raise BlobError(
                f"blob {blob!r} has state of {whose}, which is in none of its groups: delete that state"
            )
    if shared:
        found = tree_leaves(shared, shared_name(blob), blob, OPTIM_GROUP, tensor_role=Role.OPTIMIZER)
        yield from map(partial(_shared, state_names), found)


def parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group[PARAMS]


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Whether its `step` is one of torch's."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim")


def match_strides(optimizer: Optimizer, *, known: bool) -> None:
    """Give state the strides of its parameter, as the first step of torch's optimizers does.

    If the order is `known`, contiguous state was saved so, and stays. Optimizers with their own step are
    skipped.
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
    for _, state in states if instead else ():  # tied again, as it was
        state.update({key: instead[id(one)][1] for key, one in state.items() if id(one) in instead})


def orphans(blob: str, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter with its name in case no registered module has it."""
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group[PARAMS]):
            yield f"{blob}.param.{index}.{place}", parameter


def group_prefix(blob: str, index: int) -> str:
    """Prefix of the leaf names of a parameter group."""
    return f"{groups_prefix(blob)}{index}."


def groups_prefix(blob: str) -> str:
    """Prefix of the leaf names of all parameter groups."""
    return f"{blob}.param_groups."


def state_prefix(blob: str) -> str:
    """Prefix of the leaf names of state."""
    return f"{blob}.state."


def shared_name(blob: str) -> str:
    """The leaf of state that belongs to no parameter."""
    return f"{blob}.shared"


def _entries(
    prefix: str, blob: str, entries: Mapping[Any, Any], state_names: TensorNames, *, wrappers: bool = False
) -> Iterator[Leaf]:
    for key, value in entries.items():
        if not isinstance(key, str):
            raise BlobError(f"{prefix}{key!r} of blob {blob!r}: keys of optimizer state must be text")
        name = f"{prefix}{key}"
        if type(value) is torch.Tensor:  # most entries
            content, earlier = admitted(value, name), state_names.earlier(value, name)
            yield Leaf(name, blob, Role.OPTIMIZER, OPTIM_GROUP, content, earlier)
        else:
            found = entry_leaves(value, name, blob, OPTIM_GROUP, Role.OPTIMIZER, wrappers=wrappers)
            yield from map(partial(_shared, state_names), found)


def _shared(state_names: TensorNames, leaf: Leaf) -> Leaf:
    """The leaf; an alias if its tensor was listed before."""
    content = leaf.content
    earlier = None if isinstance(content, Value) else state_names.earlier(content, leaf.name)
    return replace(leaf, alias_of=earlier) if earlier is not None else leaf
