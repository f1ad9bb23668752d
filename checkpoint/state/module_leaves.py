"""Leaves of a module: its state dict under canonical names, roles by identity.

Canonical names have no trace of wrappers: DistributedDataParallel's `module.` and the `_orig_mod.` of
torch.compile are left out, at any depth, so that a wrapped and a bare module share checkpoints.
Parameters and buffers that the state dict holds as they are can be loaded in place; what a hook or
`get_extra_state` computed goes back through `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.disk.immutable import immutable
from torchrelay.checkpoint.state.admission import admitted_in_place
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role
from torchrelay.checkpoint.state.stateful_leaves import entry_leaves, subclass_leaves
from torchrelay.checkpoint.state.subclasses import is_wrapper
from torchrelay.errors import BlobError


@immutable(eq=False)
class ModuleEntry:
    """One entry of a module's state dict: torch's `key` for it, and the leaf's `name`.

    `role` is PARAMETER or BUFFER for the module's own tensors, None for what was computed.
    """

    key: str
    name: str
    value: Any
    role: Role | None


def module_entries(blob: str, module: nn.Module, state: dict[str, Any]) -> list[ModuleEntry]:
    """The entries of `state`, which is `module.state_dict(keep_vars=True)`, in its order."""
    parts = parts_of(module)
    roles = {id(one): Role.PARAMETER for part in parts for one in part._parameters.values()}
    roles.update((id(one), Role.BUFFER) for part in parts for one in part._buffers.values())
    roles.pop(id(None), None)  # a parameter or buffer that is registered without one
    name_of = _naming(module, parts)
    return [
        ModuleEntry(key, f"{blob}.{name_of(key)}", value, roles.get(id(value)))
        for key, value in state.items()
    ]


def module_leaves(blob: str, module: nn.Module, first_names: dict[int, str]) -> Iterator[Leaf]:
    """The leaves of a module; `first_names` maps ids of tensors to leaves and learns new ones."""
    for entry in module_entries(blob, module, module.state_dict(keep_vars=True)):
        if entry.role is None:
            yield from entry_leaves(entry.value, entry.name, blob, MAIN_GROUP, Role.TENSOR)
        else:
            yield from own_leaves(entry.name, blob, entry.role, entry.value, first_names)


def own_leaves(
    name: str, blob: str, role: Role, tensor: torch.Tensor, first_names: dict[int, str]
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
    first = first_names.setdefault(id(tensor), name)
    yield Leaf(name, blob, role, MAIN_GROUP, content, None if first == name else first)


def named_parameters(blob: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module with their leaf names; tied ones under each name.

    FSDP2 modules show their shards from here on, not what a forward pass gathered. Raises BlobError
    for FSDP1.
    """
    parts = parts_of(module)
    _show_shards(blob, parts)
    name_of = _naming(module, parts)
    for key, parameter in module.named_parameters(remove_duplicate=False):
        yield f"{blob}.{name_of(key)}", parameter


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


def _show_shards(blob: str, parts: Sequence[nn.Module]) -> None:
    for part in parts:
        kind: Any = type(part)
        kinds = _class_names(kind)
        if "FullyShardedDataParallel" in kinds:
            raise BlobError(
                f"blob {blob!r} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters are no "
                "tensors of the module: register torchrelay.fsdp_state(module, optimizer) instead of both, "
                "or use fully_shard (FSDP2)"
            )
        if "FSDPModule" in kinds:
            part.reshard()  # type: ignore[operator]


@lru_cache(maxsize=256)
def _class_names(kind: type) -> frozenset[str]:
    return frozenset(one.__name__ for one in kind.__mro__)


def _naming(module: nn.Module, parts: Sequence[nn.Module]) -> Callable[[str], str]:
    """From a state dict key to the canonical name; without a wrapper inside they are the same."""
    wrapped = any(map(_wrapped_child, parts))
    return partial(canonical_name, module) if wrapped else str


def canonical_name(module: nn.Module, key: str) -> str:
    """The state dict key without the parts that wrappers add; keys that hooks made up stay as they are."""
    parts, kept = key.split("."), []
    current: nn.Module | None = module
    for part in parts:
        if current is None or part != _wrapped_child(current):
            kept.append(part)
        current = None if current is None else current._modules.get(part)
    return ".".join(kept)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The part of a module that a canonical name means, whatever wraps what; None where there is none."""
    current: nn.Module | None = module
    for part in path.split("."):
        while current is not None and (wrapped := _wrapped_child(current)) is not None:
            current = current._modules[wrapped]
        current = None if current is None else current._modules.get(part)
    return current


def _wrapped_child(module: nn.Module) -> str | None:
    """The name of the one child of a wrapper; None for other modules."""
    kind: Any = type(module)
    return _wrapped_child_of(kind)


@lru_cache(maxsize=256)
def _wrapped_child_of(kind: type) -> str | None:
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    # The class of compiled modules is private, and importing it loads the compiler.
    return "_orig_mod" if kind.__name__ == "OptimizedModule" else None
