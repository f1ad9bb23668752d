"""List leaves of trees (results of `state_dict()`, containers, other values) and of tensor subclasses.

A tree is one value leaf with references to tensors and, in a container, to objects that are blobs by
themselves. Tensors are separate leaves, named by their path. So are numpy arrays and lists of numbers above 1
MiB, as tensors of role `value`. Names are readable paths and are never parsed.

A wrapper subclass lists its inner tensors and a context by `__tensor_flatten__`, and is built again by
`__tensor_unflatten__`. Stored are a description, as a value under the tensor's name, and each inner tensor as
`<name>.<inner>`. The description is only compared: a load needs a live tensor of the same description, whose
class builds the new one. No class is looked up by name.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.format.value_decoding import ParameterName
from torchrelay.checkpoint.format.values import encode, is_scalar
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value, frozen_of
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.state.tensor_memory import admitted, is_wrapper
from torchrelay.errors import BlobError
from torchrelay.jobs.blobs import is_factory, is_stateful
from torchrelay.jobs.containers import found_inside
from torchrelay.records import Json

_TEXT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
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
    wrappers = {one.name: one.content for one in leaves if one.role is Role.SUBCLASS}
    _check_wrappers(blob, value, {name: one.json for name, one in wrappers.items() if isinstance(one, Value)})
    return leaves


def _check_wrappers(blob: str, value: Any, found: Mapping[str, Json]) -> None:
    """Raise BlobError for wrappers that came after the first listing and that no load could build."""
    texts = {name: json.dumps(described, sort_keys=True) for name, described in found.items()}
    known, first = _first_wrappers.get(id(value), (None, set(texts.values())))
    if known is None or known() is not value:
        with suppress(TypeError):  # an object without weak references
            number = id(value)  # the callback must not hold the object
            gone = weakref.ref(value, lambda _: (_first_wrappers.pop(number, None), None)[1])
            _first_wrappers[number] = (gone, set(texts.values()))
        return
    for name, text in texts.items():
        inner = any(name.startswith(f"{other}.") for other in texts)
        if text in first or inner or hasattr(value, "state_dict_to_load_into"):
            continue
        if made_by_an_optimizer(found[name]) is None:
            raise BlobError(
                f"{name} is {in_words(found[name])}, which a load could not build before the first "
                f"step: give {blob!r} a method state_dict_to_load_into() that returns a state dict with "
                "it"
            )
        first.add(text)


_first_wrappers: dict[int, tuple[weakref.ref[Any], set[str]]] = {}


def subclass_leaves(
    name: str, blob: str, group: str, tensor: torch.Tensor, leaf_of: Callable[[str, torch.Tensor], Leaf]
) -> Iterator[Leaf]:
    """A value leaf that describes a wrapper, and `leaf_of` each inner tensor; for inner wrappers the same."""
    yield Leaf(name, blob, Role.SUBCLASS, group, Value(description(tensor, name)))
    for inner, part in inner_tensors(tensor, name).items():
        if is_wrapper(part):
            yield from subclass_leaves(f"{name}.{inner}", blob, group, part, leaf_of)
        else:
            yield leaf_of(f"{name}.{inner}", part)


def tree_leaves(
    value: Any,
    name: str,
    blob: str,
    group: str = MAIN_GROUP,
    *,
    role: Role = Role.VALUE,
    tensor_role: Role = Role.TENSOR,
    alias_of: Callable[[torch.Tensor, str], str | None] = lambda tensor, name: None,
    blob_at: Callable[[str, Any], str | None] | None = None,
) -> list[Leaf]:
    """A value leaf called `name`, followed by a leaf for each tensor inside it.

    `alias_of`: see `stateful_leaves`. `blob_at`, for containers, names objects that are blobs by themselves;
    tensors then have the role of registered ones.
    """
    if is_scalar(value):
        return [Leaf(name, blob, role, group, Value(encode(value, name)))]
    tensors: dict[str, Leaf] = {}
    known: dict[int, str] = {}
    taken = {name}

    def leaf_of(leaf_name: str, tensor: torch.Tensor, path: str) -> Leaf:
        own = tensor_role if blob_at is None else registered_role(tensor)
        content, frozen = admitted(tensor, path), frozen_of(own, tensor)
        return Leaf(leaf_name, blob, own, group, content, alias_of(tensor, leaf_name), frozen)

    def listed(leaf_name: str, tensor: torch.Tensor, path: str) -> Iterable[Leaf]:
        # must not refer to itself: such a cycle would keep the model until a collection
        if not is_wrapper(tensor) or (role is not Role.STATE and blob_at is None):
            return [leaf_of(leaf_name, tensor, path)]
        return subclass_leaves(
            leaf_name, blob, group, tensor, lambda n, inner: leaf_of(n, inner, f"{path}: {n}")
        )

    def refer(path: str, tensor: torch.Tensor) -> str:
        if id(tensor) not in known:
            leaf_name = known[id(tensor)] = unused_name(tensor, path, taken, name)
            tensors.update((leaf.name, leaf) for leaf in listed(leaf_name, tensor, path))
        found = known[id(tensor)]
        return ParameterName(found) if blob_at is None and isinstance(tensor, nn.Parameter) else found

    def keep(path: str, memory: torch.Tensor) -> str:
        leaf_name = unused_name(memory, path, taken, name)
        tensors[leaf_name] = Leaf(leaf_name, blob, Role.VALUE, group, admitted(memory, path))
        return leaf_name

    json_tree = encode(value, name, tensor=refer, memory=keep, blob=blob_at)
    return [Leaf(name, blob, role, group, Value(json_tree)), *tensors.values()]


def registered_role(tensor: torch.Tensor) -> Role:
    """The role of a tensor that is a blob by itself, or in a container."""
    if type(tensor) is torch.Tensor:  # quicker than isinstance of Parameter
        return Role.TENSOR
    return Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.TENSOR


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
    """A tensor becomes a leaf, all else a tree; with `wrappers`, a load can make such subclasses."""
    if not isinstance(value, torch.Tensor):
        return tree_leaves(value, name, blob, group, tensor_role=tensor_role)

    def leaf_of(name: str, tensor: torch.Tensor) -> Leaf:
        return Leaf(name, blob, tensor_role, group, admitted(tensor, name))

    if not (wrappers and is_wrapper(value)):
        return [leaf_of(name, value)]
    return list(subclass_leaves(name, blob, group, value, leaf_of))


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
    inner = inner_tensors(tensor, name) if is_wrapper(tensor) else {}
    return [name, *(one for key, part in inner.items() for one in _with_inner(part, f"{name}.{key}"))]


def container_leaves(
    blob: str, value: Any, objects: Mapping[str, Any], first_names: TensorNames
) -> list[Leaf]:
    """The leaves of a container: its tree and its tensors; none if it holds only blobs.

    `objects` are the blobs of the node. Raises BlobError, with the path, for an object with state that is
    none of them, or replaced a registered one.
    """
    leaves = tree_leaves(value, blob, blob, alias_of=first_names.earlier, blob_at=partial(_blob_at, objects))
    tree = leaves[0].content
    return [] if len(leaves) == 1 and isinstance(tree, Value) and _only_blobs(tree.json) else leaves


def container_tensors(blob: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a container by the names of their leaves, if all names are distinct."""
    return (
        (dotted(path), tensor)
        for path, tensor in found_inside(value, blob, lambda _, found: isinstance(found, torch.Tensor))
    )


def _blob_at(objects: Mapping[str, Any], path: str, found: Any) -> str | None:
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


def inner_tensors(tensor: Any, name: str) -> dict[str, torch.Tensor]:
    """The inner tensors of a wrapper by name, not copied; raises BlobError if the wrapper computes them."""
    found = {inner: getattr(tensor, inner) for inner in tensor.__tensor_flatten__()[0]}
    for inner, part in found.items():
        if not isinstance(part, torch.Tensor) or getattr(tensor, inner) is not part:
            raise BlobError(
                f"{name} is a {_class(tensor)} whose __tensor_flatten__ names {inner!r}, which is not a "
                "tensor that it keeps: name the tensors that it consists of"
            )
    return found


def description(tensor: Any, name: str) -> dict[str, Json]:
    """What a wrapper is beside its inner tensors; raises BlobError for a context without a text form."""
    inner, context = tensor.__tensor_flatten__()
    return {
        "class": _class(tensor),
        "context": _text(context, f"the context of {name} ({_class(tensor)})"),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "inner": list(inner),
        "shape": list(tensor.shape),
    }


def in_words(described: Json) -> str:
    """A description as text."""
    if not isinstance(described, dict):
        return "a value"
    context = "" if described.get("context") == "None" else f" with {described.get('context')}"
    return f"{described.get('class')} of {described.get('dtype')}{described.get('shape')}{context}"


def rebuilder(model: Any) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Builds a wrapper like `model` around other inner tensors; does not keep `model` alive."""
    kind: Any = type(model)
    context, size, stride = model.__tensor_flatten__()[1], model.shape, model.stride()
    return lambda inner: kind.__tensor_unflatten__(dict(inner), context, size, stride)


def _class(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _text(value: Any, what: str, levels: int = 8) -> str:
    """A text that is the same for equal contexts in every process; reads no attributes of unknown classes."""
    if levels == 0:
        raise BlobError(f"{what} is nested deeper than 8 levels: give a flatter one")

    def inner(one: Any) -> str:
        return _text(one, what, levels - 1)

    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if type(value) in _TEXT:
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)):
        parts = list(map(inner, value))
    elif type(value) in (set, frozenset):
        parts = sorted(map(inner, value))
    elif type(value) is dict:
        parts = sorted(f"{inner(key)}: {inner(one)}" for key, one in value.items())
    elif dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        parts = [f"{field.name}={inner(getattr(value, field.name))}" for field in fields]
    else:
        raise BlobError(
            f"{what} holds a {kind}, which has no text form: let __tensor_flatten__ return numbers, "
            "text, types, enums or containers of these"
        )
    return f"{kind.removeprefix('builtins.')}({', '.join(parts)})"


def made_state(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """The state that a step of copies makes for a parameter; raises BlobError if it fails."""
    group = next(one for one in optimizer.param_groups if any(p is parameter for p in one["params"]))
    kind: Any = type(optimizer)
    try:
        like = torch.zeros_like(parameter.detach()).requires_grad_()
        like.grad = torch.zeros_like(parameter.detach())
        trial: Any = object.__new__(kind)
        trial.__dict__.update({key: one for key, one in vars(optimizer).items() if key != "step"})
        trial.__dict__.update((key, OrderedDict()) for key in vars(optimizer) if key.endswith("_hooks"))
        trial.param_groups, trial.state = [{**group, "params": [like]}], defaultdict(dict)
        step = kind.step
        while getattr(step, "hooked", False):  # hooks, ours too, would count it as a step of the training
            step = step.__wrapped__
        devices = [] if like.is_cpu else [like.device.index or 0]
        with torch.random.fork_rng(devices, device_type="cuda" if like.is_cpu else like.device.type):
            step(trial)
    except Exception as error:
        raise BlobError(
            f"a step of a copy of {kind.__name__} raised {type(error).__name__}: {error}"
        ) from error
    return dict(trial.state.get(like, {}))


def check_made(
    optimizer: Optimizer, parameter: torch.Tensor, key: str, found: torch.Tensor, name: str
) -> None:
    """Raise BlobError for a wrapper in the state of a parameter that a resumed run could not recreate."""
    known = _checked.setdefault(optimizer, {})
    wanted = description(found, name)
    if known.get((id(parameter), key)) == wanted:
        return
    try:
        made = made_state(optimizer, parameter).get(key)
        why = "a step of a copy of the optimizer makes none"
    except BlobError as error:
        made, why = None, str(error)
    if not (isinstance(made, torch.Tensor) and is_wrapper(made) and description(made, name) == wanted):
        raise BlobError(
            f"{name} is a {_class(found)}, which a load could not build before the first step: {why}; "
            f"{_ADVICE}"
        )
    known[id(parameter), key] = wanted


_checked: weakref.WeakKeyDictionary[Optimizer, dict[tuple[int, str], dict[str, Json]]] = (
    weakref.WeakKeyDictionary()
)
_ADVICE = (
    "instead of the optimizer, register an object with its state_dict and load_state_dict, and with a "
    "method state_dict_to_load_into() that returns a state dict with such tensors before the first step"
)


def made_by_an_optimizer(described: Json) -> torch.Tensor | None:
    """A wrapper of this description that the first step of a live optimizer makes; else None."""
    if not isinstance(described, dict):
        return None
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
        seen: set[Any] = set()
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            form = (parameter.shape, parameter.dtype, parameter.device)
            if list(parameter.shape) != described.get("shape") or form in seen:
                continue
            seen.add(form)
            try:
                made = made_state(optimizer, parameter).values()
                found = [one for one in made if isinstance(one, torch.Tensor) and is_wrapper(one)]
                alike = [one for one in found if description(one, "state") == described]
            except BlobError:
                continue
            if alike:
                return alike[0]
    return None
