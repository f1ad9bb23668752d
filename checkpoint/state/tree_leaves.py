"""List leaves of trees: results of `state_dict()`, containers, and other values.

The tree is one value leaf with references to tensors and, in a container, to objects that are blobs by
themselves. Tensors are separate leaves, named by their path. So are numpy arrays and lists of numbers above 1
MiB, as tensors of role `value`. Names are readable paths and are never parsed.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.value_decoding import ParameterName
from torchrelay.checkpoint.format.values import encode, is_scalar
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value, frozen_of
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.state.tensor_checks import admitted
from torchrelay.checkpoint.state.wrappers import (
    description,
    inner_tensors,
    is_wrapper,
    made_by_an_optimizer,
    told,
)
from torchrelay.errors import BlobError
from torchrelay.jobs.blobs import is_factory, is_stateful
from torchrelay.jobs.containers import found_inside
from torchrelay.records import Json

_INDEX = re.compile(r"\[(-?\w+)\]")


def state_of(blob: str, value: Any) -> Any:
    """The state of an object with `state_dict`; raises BlobError if that raises."""
    try:
        return value.state_dict()
    except Exception as error:
        remedy = "; build it with overlap_with_ddp=False, else its state cannot be saved"
        raise BlobError(
            f"state_dict() of blob {blob!r} ({type(value).__name__}) raised {type(error).__name__}: {error}"
            + (remedy if getattr(value, "_overlap_with_ddp", False) else "")
        ) from error


def stateful_leaves(
    blob: str, value: Any, state: Any, group: str, alias_of: Callable[[torch.Tensor, str], str | None]
) -> list[Leaf]:
    """The leaves of an object with this `state`; raises BlobError naming what cannot be stored.

    `alias_of` returns the leaf that a tensor already is under another name.
    """
    leaves = tree_leaves(state, blob, blob, group, role=Role.STATE, alias_of=alias_of)
    _check_wrappers(blob, value, {one.name: one.content for one in leaves if one.role is Role.SUBCLASS})
    return leaves


def _check_wrappers(blob: str, value: Any, found: Mapping[str, Any]) -> None:
    """Raise BlobError for wrapper subclasses that appeared in a state late and that no load could build.

    Those that the object had when it was first listed exist after a later launch too.
    """
    texts = {name: json.dumps(described.json, sort_keys=True) for name, described in found.items()}
    known, first = _first_wrappers.get(id(value), (None, set(texts.values())))
    if known is None or known() is not value:
        with suppress(TypeError):  # an object without weak references
            _first_wrappers[id(value)] = (weakref.ref(value, _forget(id(value))), set(texts.values()))
        return
    for name, text in texts.items():
        inner = any(name.startswith(f"{other}.") for other in texts)
        if text in first or inner or hasattr(value, "state_dict_to_load_into"):
            continue
        if made_by_an_optimizer(found[name].json) is None:
            raise BlobError(
                f"{name} is {told(found[name].json)}, which a load could not build before the first "
                f"step: give {blob!r} a method state_dict_to_load_into() that returns a state dict with "
                "it"
            )
        first.add(text)


_first_wrappers: dict[int, tuple[weakref.ref[Any], set[str]]] = {}


def _forget(number: int) -> Callable[[object], None]:
    """Callback that removes a freed object from the cache."""
    return lambda _: (_first_wrappers.pop(number, None), None)[1]


def subclass_leaves(
    name: str,
    blob: str,
    group: str,
    tensor: torch.Tensor,
    leaves: Callable[[str, torch.Tensor], Iterable[Leaf]],
) -> Iterator[Leaf]:
    """A value leaf that describes a wrapper, and what `leaves` makes of each inner tensor."""
    yield Leaf(name, blob, Role.SUBCLASS, group, Value(description(tensor, name)))
    for inner, part in inner_tensors(tensor, name).items():
        yield from leaves(f"{name}.{inner}", part)


def nested_leaves(
    name: str,
    blob: str,
    group: str,
    tensor: torch.Tensor,
    path: str,
    leaf_of: Callable[[str, torch.Tensor, str], Leaf],
) -> Iterable[Leaf]:
    """The leaf of a tensor by `leaf_of`; for a wrapper its description, and the same for each inner one."""
    if not is_wrapper(tensor):
        return [leaf_of(name, tensor, path)]
    return subclass_leaves(
        name,
        blob,
        group,
        tensor,
        lambda n, inner: nested_leaves(n, blob, group, inner, f"{path}: {n}", leaf_of),
    )


def tree_leaves(
    value: Any,
    name: str,
    blob: str,
    group: str = MAIN_GROUP,
    *,
    role: Role = Role.VALUE,
    tensor_role: Role = Role.TENSOR,
    alias_of: Callable[[torch.Tensor, str], str | None] = lambda tensor, name: None,
) -> list[Leaf]:
    """A value leaf called `name`, followed by a leaf for each tensor inside it; see `stateful_leaves`."""
    if is_scalar(value):
        return [Leaf(name, blob, role, group, Value(encode(value, name)))]
    tensors: dict[str, Leaf] = {}
    known: dict[int, str] = {}
    taken = {name}

    def leaf_of(leaf_name: str, tensor: torch.Tensor, path: str) -> Leaf:
        content, frozen = admitted(tensor, path), frozen_of(tensor_role, tensor)
        return Leaf(leaf_name, blob, tensor_role, group, content, alias_of(tensor, leaf_name), frozen)

    def listed(tensor: torch.Tensor, leaf_name: str, path: str) -> Iterable[Leaf]:
        if role is Role.STATE:
            return nested_leaves(leaf_name, blob, group, tensor, path, leaf_of)
        return [leaf_of(leaf_name, tensor, path)]

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in known:
            leaf_name = known[id(tensor)] = unused_name(tensor, path, taken, name)
            tensors.update((leaf.name, leaf) for leaf in listed(tensor, leaf_name, path))
        found = known[id(tensor)]
        return ParameterName(found) if isinstance(tensor, nn.Parameter) else found

    def keep(path: str, memory: torch.Tensor) -> str:
        leaf_name = unused_name(memory, path, taken, name)
        tensors[leaf_name] = Leaf(leaf_name, blob, Role.VALUE, group, admitted(memory, path))
        return leaf_name

    tree = Leaf(name, blob, role, group, Value(encode(value, name, tensor=refer, memory=keep)))
    return [tree, *tensors.values()]


def tree_tensors(value: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a tree under the names that `tree_leaves` gives them."""
    found: dict[str, torch.Tensor] = {}
    known: dict[int, str] = {}
    taken = {name}

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in known:
            known[id(tensor)] = unused_name(tensor, path, taken, name)
            found[known[id(tensor)]] = tensor
        return known[id(tensor)]

    encode(value, name, tensor=refer, memory=refer)
    return found


def entry_leaves(
    value: Any, name: str, blob: str, group: str, tensor_role: Role, *, wrappers: bool = False
) -> list[Leaf]:
    """One entry of a mapping: a tensor becomes a leaf, anything else a tree.

    With `wrappers` a wrapper subclass is stored: the caller ensures that a load can make one like it.
    """
    if not isinstance(value, torch.Tensor):
        return tree_leaves(value, name, blob, group, tensor_role=tensor_role)
    if not (wrappers and is_wrapper(value)):
        return [Leaf(name, blob, tensor_role, group, admitted(value, name))]

    def inner_leaves(inner: str, part: torch.Tensor) -> list[Leaf]:
        return entry_leaves(part, inner, blob, group, tensor_role, wrappers=True)

    return list(subclass_leaves(name, blob, group, value, inner_leaves))


def dotted(path: str) -> str:
    """The name of a leaf at a path: `history[3].loss` is `history.3.loss`."""
    return _INDEX.sub(r".\1", path) if "[" in path else path


def unused_name(tensor: torch.Tensor, path: str, taken: set[str], root: str) -> str:
    """A name for a tensor and the inner tensors of a wrapper; all are added to `taken`.

    It is the path, with a number if two paths read alike ({"a.b": x, "a": {"b": y}}). It is always below the
    `root` of the tree, because loads of that tree look for it there.
    """
    name = dotted(path)
    if not name.startswith(f"{root}."):
        name = f"{root}.{name.removeprefix(root) or 'value'}"
    candidate = name
    number = 2
    while not taken.isdisjoint(names := _with_inner(tensor, candidate)):
        candidate, number = f"{name}~{number}", number + 1
    taken.update(names)
    return candidate


def _with_inner(tensor: torch.Tensor, name: str) -> list[str]:
    """Names of a tensor and its inner ones."""
    inner = inner_tensors(tensor, name) if is_wrapper(tensor) else {}
    return [name, *(one for key, part in inner.items() for one in _with_inner(part, f"{name}.{key}"))]


def container_leaves(
    blob: str, value: Any, objects: Mapping[str, Any], first_names: TensorNames
) -> list[Leaf]:
    """The leaves of a container: its tree and its tensors; none if it holds only blobs.

    `objects` are the blobs of the node. Raises BlobError, with the path, for an object with state that is
    none of them, or replaced a registered one.
    """
    tensors: list[Leaf] = []
    names: dict[int, str] = {}
    taken = {blob}

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in names:
            name = names[id(tensor)] = unused_name(tensor, path, taken, blob)
            tensors.extend(nested_leaves(name, blob, MAIN_GROUP, tensor, path, leaf_of))
        return names[id(tensor)]

    def leaf_of(name: str, tensor: torch.Tensor, path: str) -> Leaf:
        role = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.TENSOR
        alias = first_names.earlier(tensor, name)
        return Leaf(name, blob, role, MAIN_GROUP, admitted(tensor, path), alias, frozen_of(role, tensor))

    def keep(path: str, memory: torch.Tensor) -> str:
        name = unused_name(memory, path, taken, blob)
        tensors.append(Leaf(name, blob, Role.VALUE, MAIN_GROUP, memory))
        return name

    def place(path: str, found: Any) -> str | None:
        return _blob_at(path, found, objects)

    tree = encode(value, blob, tensor=refer, memory=keep, blob=place)
    if not tensors and _only_blobs(tree):
        return []
    return [Leaf(blob, blob, Role.VALUE, MAIN_GROUP, Value(tree)), *tensors]


def container_tensors(blob: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a container by the names of their leaves, if all names are distinct."""
    return (
        (dotted(path), tensor)
        for path, tensor in found_inside(value, blob, lambda _, found: isinstance(found, torch.Tensor))
    )


def _blob_at(path: str, found: Any, objects: Mapping[str, Any]) -> str | None:
    """The name of the blob that an object inside a container is; None for objects without state."""
    name = dotted(path)
    if is_factory(found):
        return name if name in objects else None
    if not is_stateful(found):
        return None
    if name in objects and objects[name] is not found:
        raise BlobError(
            f"{name} is another {type(found).__name__} than the registered one, which a resumed run "
            "would not find: change that one in place, for instance with load_state_dict"
        )
    same = [other for other, known in objects.items() if known is found]
    if not same:
        raise BlobError(
            f"{name} is a {type(found).__name__} in a set, or was put into its container after the blobs "
            "were registered: put it into a list or dict before that"
        )
    return name if name in same else same[0]


def _only_blobs(tree: Json) -> bool:
    """Whether a tree has only references to blobs at its ends."""
    if isinstance(tree, dict):
        if "$" in tree and tree["$"] == "blob":
            return True
        if tree.get("$", "dict") != "dict":
            return False
        inner = [item for _, item in tree["v"]] if "$" in tree else list(tree.values())
        return bool(inner) and all(map(_only_blobs, inner))
    return isinstance(tree, list) and bool(tree) and all(map(_only_blobs, tree))
