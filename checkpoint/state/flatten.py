"""List registered objects as leaves: their names, each memory once, with roles and groups of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.dtypes import AT_ONCE
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, OPTIM_GROUP, Leaf, Role, Value, frozen_of
from torchrelay.checkpoint.state.module_leaves import (
    ModuleEntry,
    module_entries,
    module_leaves,
    named_parameters,
    optimizer_leaves,
    orphans,
    own_leaves,
)
from torchrelay.checkpoint.state.names import (
    Kind,
    Part,
    TensorNames,
    all_plain_memory,
    kind_of,
    local_part,
    module_parts,
)
from torchrelay.checkpoint.state.tensor_checks import admitted, is_plain_memory
from torchrelay.checkpoint.state.tree_leaves import (
    container_leaves,
    container_tensors,
    state_of,
    stateful_leaves,
    tree_leaves,
)
from torchrelay.checkpoint.state.wrappers import is_wrapper
from torchrelay.errors import BlobError


class ModuleStates:
    """Caches state dicts and parts of modules while the leaves of all blobs are listed or planned.

    Each call would run the user's hooks and methods, which may count their calls.
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


def leaves_of(objects: Mapping[str, Any]) -> list[Leaf]:
    """List the leaves of all blobs of one node, in order.

    A blob is a module, an optimizer, a tensor, an object with `state_dict` and `load_state_dict`, or a
    JSON-like value. Raises BlobError with the path inside the blob for anything else.
    """
    return named_leaves(objects)[0]


def leaf_names(objects: Mapping[str, Any]) -> list[str]:
    """Names of the leaves of these objects, also of modules on the meta device, which cannot be saved."""
    found: list[str] = []
    rest: dict[str, Any] = {}
    for blob, value in objects.items():
        if isinstance(value, torch.nn.Module) and _has_meta(value):
            found += [one.name for one in module_entries(blob, value, value.state_dict(keep_vars=True))]
        else:
            rest[blob] = value
    return [*found, *(leaf.name for leaf in leaves_of(rest))]


def _has_meta(module: torch.nn.Module) -> bool:
    """Whether a module has tensors on the meta device."""
    return any(one.is_meta for own in (module.parameters(), module.buffers()) for one in own)


def named_leaves(
    objects: Mapping[str, Any], states: ModuleStates | None = None
) -> tuple[list[Leaf], dict[int, str]]:
    """Leaves as of `leaves_of`, and the result of `parameter_names`."""
    states = states or ModuleStates()
    names = parameter_names(objects, states)
    main, optim = TensorNames(), TensorNames()
    first_names = {MAIN_GROUP: main, OPTIM_GROUP: optim}
    found: dict[str, Leaf] = {}
    containers: list[str] = []
    asked: dict[str, Any] = {}
    blobs, values = list(objects), list(objects.values())
    for at in range(0, len(values), AT_ONCE):
        some, part = blobs[at : at + AT_ONCE], values[at : at + AT_ONCE]
        if all_plain_memory(part) and found.keys().isdisjoint(some):
            found.update(zip(some, _plain_leaves(some, part, main), strict=True))
            continue
        for blob, value in zip(some, part, strict=True):
            if is_plain_memory(value) and blob not in found:
                found[blob] = next(_plain_leaves([blob], [value], main))
                continue
            kind = kind_of(value)
            if kind is Kind.CONTAINER:
                containers.append(blob)
                continue
            if kind is Kind.STATEFUL:
                _check_unused(place := Leaf(blob, blob, Role.STATE, MAIN_GROUP, Value(None)), found)
                found[blob], asked[blob] = place, state_of(blob, value)
                continue
            for leaf in _leaves(blob, value, names, first_names, states):
                _check_unused(leaf, found)
                found[leaf.name] = leaf
    for blob in containers:  # after the others, whose tensors they may hold
        for leaf in container_leaves(blob, objects[blob], objects, main):
            _check_unused(leaf, found)
            found[leaf.name] = leaf
    inner: dict[str, list[Leaf]] = {}
    same_as = dict(optim.shared_with(main))
    held = {*names, *_buffers(objects.values())} if asked else set()
    of_optimizers = cache(lambda: frozenset(_of_optimizers(objects.values())))

    def alias_of(group: str, tensor: torch.Tensor, name: str) -> str | None:
        """The leaf that holds the same tensor; None for a view, which may change later."""
        is_held = id(tensor) in held or (optim.of(tensor) is not None and id(tensor) in of_optimizers())
        first = first_names[group].earlier(tensor, name)
        held.add(id(tensor))  # the states stay alive meanwhile
        if is_held and (other := main.of(tensor)) and (own := optim.of(tensor)):
            same_as.setdefault(own, other)
        return first if is_held else None

    for blob, state in asked.items():  # last: what is read into place has the name that stands for its bytes
        value = objects[blob]
        group = OPTIM_GROUP if isinstance(value, torch.optim.Optimizer) else MAIN_GROUP  # of any class
        found[blob], *inner[blob] = stateful_leaves(blob, value, state, group, partial(alias_of, group))
    leaves = _in_order(found, inner)
    if same_as:
        leaves = [
            replace(leaf, same_as=same_as[leaf.name]) if leaf.name in same_as else leaf for leaf in leaves
        ]
    return leaves, names


def _of_optimizers(objects: Iterable[Any]) -> Iterator[int]:
    """The identities of the tensors in groups and state of optimizers."""
    for value in objects:
        if kind_of(value) is Kind.OPTIMIZER:
            entries = [*value.param_groups, *local_part(value).state.values()]
            yield from (id(one) for _, one in container_tensors("", entries))


def _buffers(objects: Iterable[Any]) -> Iterator[int]:
    """The identities of the buffers of modules."""
    for value in objects:
        if isinstance(value, torch.nn.Module):
            yield from map(id, value.buffers())


def _in_order(found: Mapping[str, Leaf], inner: Mapping[str, Sequence[Leaf]]) -> list[Leaf]:
    """All leaves, the `inner` ones of some blobs after their blob."""
    if not any(inner.values()):
        return list(found.values())
    leaves: dict[str, Leaf] = {}
    for name, leaf in found.items():
        for one in (leaf, *inner.get(name, ())):
            _check_unused(one, leaves)
            leaves[one.name] = one
    return list(leaves.values())


def _plain_leaves(
    blobs: Sequence[str], tensors: Sequence[torch.Tensor], first_names: TensorNames
) -> Iterator[Leaf]:
    """Leaves of blobs that are plain memory; there may be very many."""
    contents = list(map(torch.Tensor.detach, tensors))
    aliases: Iterable[str | None] = repeat(None)
    frozen: Iterable[bool | None] = repeat(True)
    if not first_names.add_new(blobs, contents):
        aliases = map(first_names.earlier, contents, blobs)
    roles: Iterable[Role] = repeat(Role.TENSOR)
    if set(map(type, tensors)) != {torch.Tensor} or any(map(_learns, tensors)):
        roles = list(map(tensor_role, tensors))
        frozen = map(frozen_of, roles, tensors)
    return map(Leaf, blobs, blobs, roles, repeat(MAIN_GROUP), contents, aliases, frozen)


_learns = attrgetter("requires_grad")


def parameter_names(objects: Mapping[str, Any], states: ModuleStates | None = None) -> dict[int, str]:
    """The leaf name of every parameter, by id: of a module, a registered one, or only an optimizer's."""
    states = states or ModuleStates()
    found: dict[int, str] = {}
    optimizers: dict[str, Any] = {}
    containers: dict[str, Any] = {}
    for blob, value in objects.items():
        if type(value) is torch.Tensor:
            found.setdefault(id(value), blob)
            continue
        kind = kind_of(value)
        if kind is Kind.MODULE:
            for name, parameter in named_parameters(blob, value, states):
                found.setdefault(id(parameter), name)
        elif kind is Kind.TENSOR:
            found.setdefault(id(value), blob)
        elif kind is Kind.OPTIMIZER:
            optimizers[blob] = value
        elif kind is Kind.CONTAINER:
            containers[blob] = value
    for blob, value in containers.items():  # their references to other objects may change at any time
        for name, tensor in container_tensors(blob, value):
            found.setdefault(id(tensor), name)
    for blob, value in optimizers.items():
        for name, orphan in orphans(blob, value):
            found.setdefault(id(orphan), name)
    return found


def _leaves(
    blob: str,
    value: Any,
    names: Mapping[int, str],
    first_names: Mapping[str, TensorNames],
    states: ModuleStates,
) -> Iterator[Leaf]:
    """The leaves of a blob.

    `first_names` are by file group, so that no alias refers to a file that may be deleted.
    """
    kind = kind_of(value)
    main = first_names[MAIN_GROUP]
    if kind is Kind.TENSOR:
        if not is_wrapper(value):
            admitted(value, blob)  # an unregistered one is recreated, and would lose its type
        yield from own_leaves(blob, blob, tensor_role(value), value, main)
    elif kind is Kind.MODULE:
        yield from module_leaves(blob, value, main, states)
    elif kind is Kind.OPTIMIZER:
        yield from optimizer_leaves(blob, value, names, main, first_names[OPTIM_GROUP])
    else:
        yield from tree_leaves(value, blob, blob)


def tensor_role(tensor: torch.Tensor) -> Role:
    """The role of a tensor that is a blob by itself."""
    if type(tensor) is torch.Tensor:  # quicker than isinstance of Parameter
        return Role.TENSOR
    return Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.TENSOR


def _check_unused(leaf: Leaf, found: Mapping[str, Leaf]) -> None:
    """Raise BlobError for a name that is used twice."""
    if leaf.name in found:
        raise BlobError(
            f"two leaves of blob {leaf.blob!r} would be called {leaf.name!r}: rename one of the two entries"
        )
