"""List registered objects as leaves: their names, each memory once, with roles and groups of files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.dtypes import AT_ONCE
from torchrelay.checkpoint.format.values import has_known_factory
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
from torchrelay.checkpoint.state.tensor_memory import admitted, is_plain_memory, is_wrapper
from torchrelay.checkpoint.state.tree_leaves import (
    container_leaves,
    container_tensors,
    registered_role,
    state_of,
    stateful_leaves,
    tree_leaves,
)
from torchrelay.errors import BlobError


class ModuleStates:
    """State dicts and parts of modules, read once for a listing: hooks of users may count their calls."""

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
        tensors = (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else ()
        if any(one.is_meta for one in tensors):
            found += [one.name for one in module_entries(blob, value, value.state_dict(keep_vars=True))]
        else:
            rest[blob] = value
    return [*found, *(leaf.name for leaf in leaves_of(rest))]


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
                _add([Leaf(blob, blob, Role.STATE, MAIN_GROUP, Value(None))], found)
                asked[blob] = state_of(blob, value)
                continue
            _add(_leaves(blob, value, names, first_names, states), found)
    for blob in containers:  # after the others, whose tensors they may hold
        _add(container_leaves(blob, objects[blob], objects, main), found)
    inner: dict[str, list[Leaf]] = {}
    same_as = dict(optim.shared_with(main))
    modules = [one for one in values if isinstance(one, nn.Module)] if asked else []
    held = {*names, *(id(one) for module in modules for one in module.buffers())} if asked else set()
    of_optimizers = cache(lambda: frozenset(_of_optimizers(values)))

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
    leaves = found
    if any(inner.values()):
        leaves = {}
        _add((one for blob, root in found.items() for one in (root, *inner.get(blob, ()))), leaves)
    leaves.update((name, replace(leaves[name], same_as=same_as[name])) for name in leaves.keys() & same_as)
    return list(leaves.values()), names


def _of_optimizers(objects: Iterable[Any]) -> Iterator[int]:
    for value in objects:
        if kind_of(value) is Kind.OPTIMIZER:
            entries = [*value.param_groups, *local_part(value).state.values()]
            yield from (id(one) for _, one in container_tensors("", entries))


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
    if set(map(type, tensors)) != {torch.Tensor} or any(map(attrgetter("requires_grad"), tensors)):
        roles = list(map(registered_role, tensors))
        frozen = map(frozen_of, roles, tensors)
    return map(Leaf, blobs, blobs, roles, repeat(MAIN_GROUP), contents, aliases, frozen)


def parameter_names(objects: Mapping[str, Any], states: ModuleStates | None = None) -> dict[int, str]:
    """The leaf name of every parameter, by id: of a module, a registered one, or only an optimizer's."""
    states = states or ModuleStates()
    found: dict[int, str] = {}
    later: dict[Kind, list[tuple[str, Any]]] = {Kind.CONTAINER: [], Kind.OPTIMIZER: []}
    for blob, value in objects.items():
        if type(value) is torch.Tensor:  # there may be very many
            found.setdefault(id(value), blob)
            continue
        kind = kind_of(value)
        if kind is Kind.TENSOR:
            found.setdefault(id(value), blob)
        elif kind is Kind.MODULE:
            for name, parameter in named_parameters(blob, value, states):
                found.setdefault(id(parameter), name)
        elif kind in later:
            later[kind].append((blob, value))
    for kind, tensors_of in ((Kind.CONTAINER, container_tensors), (Kind.OPTIMIZER, orphans)):
        for blob, value in later[kind]:  # references to other objects may change at any time
            for name, tensor in tensors_of(blob, value):
                found.setdefault(id(tensor), name)
    return found


def _leaves(
    blob: str,
    value: Any,
    names: Mapping[int, str],
    first_names: Mapping[str, TensorNames],
    states: ModuleStates,
) -> Iterator[Leaf]:
    """The leaves of a blob; `first_names` are by file group: the file of an alias may not be deleted."""
    kind = kind_of(value)
    main = first_names[MAIN_GROUP]
    if kind is Kind.TENSOR:
        if not is_wrapper(value):
            admitted(value, blob)  # an unregistered one is recreated, and would lose its type
        yield from own_leaves(blob, blob, registered_role(value), value, main)
    elif kind is Kind.MODULE:
        yield from module_leaves(blob, value, main, states)
    elif kind is Kind.OPTIMIZER:
        yield from optimizer_leaves(blob, value, names, main, first_names[OPTIM_GROUP])
    else:
        yield from tree_leaves(value, blob, blob)


def _add(leaves: Iterable[Leaf], found: dict[str, Leaf]) -> None:
    for leaf in leaves:
        if leaf.name in found:
            raise BlobError(
                f"two leaves of blob {leaf.blob!r} would be called {leaf.name!r}: rename one of the two "
                "entries"
            )
        found[leaf.name] = leaf


def classes_of(objects: Mapping[str, Any]) -> dict[str, type]:
    """Blobs of classes that a load can only fill: dataclasses, and defaultdicts with a user's function."""
    kinds = {one for one in set(map(type, objects.values())) if is_dataclass(one) or one is defaultdict}
    return {
        blob: type(one)
        for blob, one in (objects.items() if kinds else ())
        if type(one) in kinds and not (type(one) is defaultdict and has_known_factory(one))
    }
