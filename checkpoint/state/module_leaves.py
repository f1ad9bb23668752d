"""Leaves of a module: its state dict under canonical names; FSDP1 modules through torch's own functions.

Canonical names have no trace of torch's wrappers (DistributedDataParallel, DataParallel, torch.compile,
activation checkpointing and offloading), at any depth and in any order, so that a wrapped and a bare
module share checkpoints. They come from `module_names`, for modules and for optimizer state.
Parameters and buffers that the state dict holds as they are can be loaded in place; what a hook or
`get_extra_state` computed goes back through `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.format.dtypes import AT_ONCE
from torchrelay.checkpoint.state.kinds import is_wrapper
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, frozen_of
from torchrelay.checkpoint.state.names import Part, TensorNames, key_names, module_parts
from torchrelay.checkpoint.state.tensor_checks import admitted_in_place, all_plain_memory
from torchrelay.checkpoint.state.tree_leaves import entry_leaves, subclass_leaves
from torchrelay.errors import BlobError, UsageError
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class ModuleEntry:
    """One entry of a module's state dict: torch's `key` for it, and the leaf's `name`.

    `role` is PARAMETER or BUFFER for the module's own tensors, None for what was computed.
    """

    key: str
    name: str
    value: Any
    role: Role | None


def module_entries(
    blob: str, module: nn.Module, state: dict[str, Any], parts: Sequence[Part] | None = None
) -> list[ModuleEntry]:
    """The entries of `state`, which is `module.state_dict(keep_vars=True)`, in its order.

    `parts` are those of `module_parts(module)`, where they are known.
    """
    parts = module_parts(module) if parts is None else parts
    roles = {id(one): Role.PARAMETER for _, _, part in parts for one in part._parameters.values()}
    roles.update((id(one), Role.BUFFER) for _, _, part in parts for one in part._buffers.values())
    roles.pop(id(None), None)  # a parameter or buffer that is registered without one
    role_of, name_of = roles.get, key_names(parts)
    if name_of is None:
        return [ModuleEntry(key, f"{blob}.{key}", one, role_of(id(one))) for key, one in state.items()]
    return [
        ModuleEntry(key, f"{blob}.{name_of(key, one)}", one, role_of(id(one))) for key, one in state.items()
    ]


class ModuleStates:
    """State dicts and parts of modules, asked for once while the leaves of all blobs are listed or planned.

    To ask runs hooks and methods of the user's, which may count their calls.
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}
        self._parts: dict[int, list[Part]] = {}

    def parts(self, module: nn.Module) -> list[Part]:
        """`module_parts(module)`."""
        if (found := self._parts.get(id(module))) is None:
            found = self._parts[id(module)] = module_parts(module)
        return found

    def of(self, module: nn.Module) -> dict[str, Any]:
        """`module.state_dict(keep_vars=True)`."""
        if (found := self._states.get(id(module))) is None:
            found = self._states[id(module)] = module.state_dict(keep_vars=True)
        return found

    def entries(self, blob: str, module: nn.Module) -> list[ModuleEntry]:
        """The entries of the state dict."""
        return module_entries(blob, module, self.of(module), self.parts(module))


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
    """The leaf of a tensor that outlives the listing: the first name owns it, others are aliases.

    A wrapper subclass has a leaf for what it is, and one for each inner tensor.
    """
    if is_wrapper(tensor):
        yield from subclass_leaves(
            name, blob, MAIN_GROUP, tensor, lambda n, inner: own_leaves(n, blob, role, inner, first_names)
        )
        return
    content = admitted_in_place(tensor, name)
    alias_of = first_names.earlier(tensor, name)
    yield Leaf(name, blob, role, MAIN_GROUP, content, alias_of, frozen_of(role, tensor))


def named_parameters(
    blob: str, module: nn.Module, states: ModuleStates | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a module with their leaf names; tied ones under each name.

    A parameter that a user's hook or method gives out under another key has the name of that leaf.
    FSDP2 modules show their shards from here on, not what a forward pass gathered. Raises BlobError
    for FSDP1.
    """
    states = states or ModuleStates()
    parts = states.parts(module)
    kinds = show_shards(blob, parts)
    found: list[tuple[str, torch.Tensor]] = []
    if any(map(_overrides_state, kinds)) or any(_has_own_hooks(part) for _, _, part in parts):
        entries = states.entries(blob, module)
        found += [(one.name, one.value) for one in entries if one.role is Role.PARAMETER]
    found += [
        (f"{blob}.{path}{name}", parameter)
        for path, _, part in parts
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    return found


def _has_own_hooks(part: nn.Module) -> bool:
    """Whether hooks that are not torch's have a say in the keys of a part's state."""
    if not part._state_dict_hooks and not part._state_dict_pre_hooks:
        return False
    hooks = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
    return not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


@lru_cache(maxsize=256)
def _overrides_state(kind: type[nn.Module]) -> bool:
    methods = (kind.state_dict, kind._save_to_state_dict)
    return not all(str(method.__module__).startswith("torch.") for method in methods)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all modules below it, each once, as `module.modules()`, in an order that means nothing.

    Every boundary asks several times: without a generator for each level that takes a tenth of the time.
    """
    found = {id(module): module}
    todo = [module]
    while todo:
        for part in todo.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                todo.append(part)
    return list(found.values())


def show_shards(blob: str, parts: Sequence[Part]) -> set[Any]:
    """Let FSDP2 modules show their shards, not what a forward pass gathered; the classes of all parts.

    Raises BlobError for FSDP1.
    """
    kinds: set[Any] = {type(part) for _, _, part in parts}
    names = frozenset[str]().union(*map(_class_names, kinds))
    if "FullyShardedDataParallel" in names:
        raise BlobError(
            f"blob {blob!r} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters are no "
            "tensors of the module: register torchrelay.fsdp_state(module, optimizer) instead of both, "
            "or use fully_shard (FSDP2)"
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
            raise UsageError("fsdp_state is given a module and, if there is one, its optimizer")
        self.module = module
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The sharded state by parameter names; all ranks must ask together. Changes nothing.

        An optimizer before its first step has no state, and torch would make that step to get some: then
        only its options are given. Raises BlobError where FSDP was given no device mesh.
        """
        if self.optimizer is None or not self.optimizer.state:
            return {"model": self._model_state(), "optimizer": None, "options": self._options()}
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        found = get_optimizer_state_dict(self.module, self.optimizer)
        return {"model": self._model_state(), "optimizer": _checked(found), "options": None}

    def state_dict_to_load_into(self) -> dict[str, Any]:
        """As `state_dict`, of an optimizer after its first step: what a load has to place."""
        if self.optimizer is None or self.optimizer.state:
            return self.state_dict()
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        options = self._options()
        try:
            found = get_optimizer_state_dict(self.module, self.optimizer)
        finally:
            self.optimizer.state.clear()
            self._set_options(options)
        return {"model": self._model_state(), "optimizer": _checked(found), "options": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state of module and optimizer; all ranks must ask together."""
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

    def _options(self) -> list[dict[str, Any]]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        if self.optimizer is not None:
            for group, values in zip(self.optimizer.param_groups, options, strict=True):
                group.update(values)


def fsdp_state(module: nn.Module, optimizer: Optimizer | None = None) -> FsdpState:
    """An FSDP1 module (`FullyShardedDataParallel`) and its optimizer as one blob.

    blobs=dict(net=torchrelay.fsdp_state(model, optimizer))

    Every rank stores its shards, as for FSDP2, and an epoch loads onto any number of ranks, also into the
    `fsdp_state` of a plain module. FSDP1 shows its shards only through collectives: this blob's saves and
    loads gather one wrapped unit after another, on all ranks together, over the training's group. FSDP must
    have been given `device_mesh=`. FSDP2 (`fully_shard`) needs none of this: register the module itself.
    """
    return FsdpState(module, optimizer)


def _checked(state: Any) -> Any:
    """Refuse shards that say no mesh."""
    if "ShardedTensor" in _fsdp_names(state):
        raise BlobError(
            "FSDP1 without a device mesh gives ShardedTensors, which cannot be stored: wrap with "
            'FullyShardedDataParallel(..., device_mesh=init_device_mesh("cuda", (world_size,)))'
        )
    return state


def _unshared(state: Any) -> Any:
    """A copy in which no plain tensor stands twice.

    The parameters of one flat parameter share its `step`; where parameters are optimized one by one,
    each of them would count it up.
    """
    if isinstance(state, Mapping):
        return {key: _unshared(value) for key, value in state.items()}
    return state.clone() if type(state) is torch.Tensor else state


def _fsdp_names(state: Any) -> set[str]:
    if not isinstance(state, Mapping):
        return {type(state).__name__}
    return {name for value in state.values() for name in _fsdp_names(value)}
