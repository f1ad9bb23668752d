"""Classify blobs, name parameters and buffers canonically, and detect tensors that are one.

Names come from one walk over the tree of modules, without the children that torch's wrappers insert: `module`
of DistributedDataParallel and DataParallel, `_orig_mod` of torch.compile, `_checkpoint_wrapped_module` of
activation checkpointing and offloading, at any depth and in any order. FSDP2, `replicate` and
`module.compile()` insert none. Stored names from older versions with such children are mapped by
`current_names`.

Kinds are finer than `jobs.blobs.kind_of`, whose three names are those of a manifest: modules, optimizers and
other objects with state are all `stateful` there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.checkpoint.format.dtypes import all_dense, all_in_memory, is_storable
from torchrelay.checkpoint.state.leaf import is_sharded, local_of, memory_of_shard
from torchrelay.checkpoint.state.tensor_memory import is_wrapper
from torchrelay.errors import BlobError
from torchrelay.jobs.blobs import is_stateful
from torchrelay.jobs.containers import is_container


class Kind(Enum):
    """How a blob is converted to leaves; an object of no other kind is a value."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    TENSOR = "tensor"
    STATEFUL = "stateful object"
    CONTAINER = "container"
    VALUE = "value"


_TENSORS = (torch.Tensor, nn.Parameter)

RECREATABLE = (Kind.TENSOR, Kind.CONTAINER, Kind.VALUE)
"""Kinds that a load can create; all others need an object to load into."""


def kind_of(value: Any) -> Kind:
    """The kind of `value`; whether it can be stored shows when its leaves are listed."""
    if type(value) in _TENSORS:  # the usual case by far, tested for very many tensors
        return Kind.TENSOR
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, Optimizer):
        return Kind.OPTIMIZER if has_stock_state(value) else Kind.STATEFUL
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if is_stateful(value):
        return Kind.STATEFUL
    return Kind.CONTAINER if is_container(value) else Kind.VALUE


def has_stock_state(optimizer: Optimizer) -> bool:
    """Whether `.state` and `.param_groups` are the whole state of an optimizer.

    False if a class or a hook has its own state dict, which is then used. A ZeroRedundancyOptimizer has the
    state of its local part, which differs per rank.
    """
    base = Optimizer if (local := local_part(optimizer)) is optimizer else _zero_redundancy(optimizer)
    stock = type(optimizer).state_dict is base.state_dict
    stock_load = type(optimizer).load_state_dict is base.load_state_dict
    hooks = (
        f"_optimizer_{which}state_dict_{when}_hooks" for which in ("", "load_") for when in ("pre", "post")
    )
    hooked = any(getattr(optimizer, name, None) for name in hooks)
    return stock and stock_load and not hooked and (local is optimizer or has_stock_state(local))


def local_part(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: for a ZeroRedundancyOptimizer that of this rank, else itself."""
    inner = None if _zero_redundancy(optimizer) is Optimizer else getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _zero_redundancy(optimizer: Optimizer) -> type[Optimizer]:
    """The ZeroRedundancyOptimizer class; Optimizer for any other one. Imports nothing."""
    for base in type(optimizer).__mro__:
        if base.__name__ == "ZeroRedundancyOptimizer" and base.__module__.startswith("torch.distributed."):
            return base
    return Optimizer


def check_recreatable(objects: Mapping[str, Any], registered: Collection[str]) -> None:
    """Raise BlobError for unregistered objects that no load could recreate."""
    lost = [
        f"{name!r} ({type(value).__name__})"
        for name, value in objects.items()
        if name not in registered
        and (kind_of(value) not in RECREATABLE or (isinstance(value, torch.Tensor) and is_wrapper(value)))
    ]
    if lost:
        raise BlobError(
            f"{', '.join(lost)} was put into the workspace by a task and is not registered: a resumed "
            "run, which skips init, could not load it. Register it as a blob, job.blobs(name=object), "
            "or as a factory, job.blobs(name=lambda ctx: ...), which setup calls at every start"
        )


def optimizers_in(value: Any, depth: int = 4) -> Iterator[Optimizer]:
    """An optimizer, or those among the attributes of an object, in nested containers and objects too."""
    if isinstance(value, Optimizer):
        yield value
    elif depth and not isinstance(value, torch.Tensor | nn.Module | LRScheduler | str | type):
        inner = value if isinstance(value, list | tuple) else getattr(value, "__dict__", value)
        # A longer container is data, without optimizers.
        if isinstance(inner, Mapping | list | tuple) and len(inner) < 1000:
            for one in inner.values() if isinstance(inner, Mapping) else inner:
                yield from optimizers_in(one, depth - 1)


def all_plain_memory(values: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """`is_plain_memory` for many values at once."""
    return (
        all_dense(values)
        and all(map(torch.Tensor.is_contiguous, values))
        and all_in_memory(values)
        and all(map(is_storable, set(map(attrgetter("dtype"), values))))
    )


Part = tuple[str, str, nn.Module]
"""A module of a tree: prefixes of its names and its state dict keys (with a dot at the end), and itself."""

EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
"""Torch's key for the state that `get_extra_state` returns."""

_COMPILED, _ACTIVATIONS = "_orig_mod", "_checkpoint_wrapped_module"
"""Names of children that only torch uses."""


def module_parts(module: nn.Module) -> list[Part]:
    """A module and all modules below it, in the order of its state dict; a shared one under each path.

    Without a wrapper above a part, its two prefixes are one object.
    """
    found: list[Part] = []
    todo: list[Part] = [("", "", module)]
    while todo:
        part = todo.pop()
        found.append(part)
        path, key, one = part
        if not one._modules:
            continue
        inserted = _inserted(type(one))  # type: ignore[arg-type]
        for name, child in reversed(one._modules.items()):
            if child is None:
                continue
            if name == inserted:
                # The hooks of activation wrappers remove this child from state dict keys.
                todo.append((path, key if name == _ACTIVATIONS else f"{key}{name}.", child))
            else:
                below = f"{path}{name}."
                todo.append((below, below if key is path else f"{key}{name}.", child))
    return found


def key_names(parts: Sequence[Part]) -> Callable[[str, Any], str] | None:
    """Maps a state dict key and its value to the canonical name; None if names and keys are the same.

    Keys that hooks of a user's class changed are recognised by the tensor; keys that they added stay.
    """
    if all(path is key for path, key, _ in parts):
        return None
    known = {
        f"{key}{name}": f"{path}{name}"
        for path, key, part in parts
        for name in (*part._parameters, *part._buffers, EXTRA_STATE)
    }
    paths: dict[int, list[list[tuple[str, bool]]]] = {}

    def name_of(key: str, value: Any) -> str:
        if (name := known.get(key)) is not None:
            return name
        if not paths:
            paths.update(_tensor_paths(parts[0][2]))
        for path in paths.get(id(value), ()):
            if (name := _aligned(key.split("."), path)) is not None:
                return name
        return without_reserved(key)

    return name_of


def spellings(module: nn.Module) -> Mapping[int, set[str]]:
    """Every name that a tensor of a module has or had, by id: canonical ones, and with wrappers inside."""
    found: dict[int, set[str]] = {}
    for path, _, part in module_parts(module):
        for name, one in (*part._parameters.items(), *part._buffers.items()):
            found.setdefault(id(one), set()).add(f"{path}{name}")
    for number, paths in _tensor_paths(module).items():
        found[number].update(".".join(segment for segment, _ in path) for path in paths)
    return found


def current_names(stored: str) -> Iterator[str]:
    """Possible current names of a stored leaf whose name contains children of wrappers.

    `module` is an ordinary name too, so names without it come last. Empty for a name without such a child.
    """
    first = without_reserved(stored)
    if first != stored:
        yield first
    if ".module." in first:
        yield ".".join(one for one in first.split(".") if one != "module")


def without_reserved(name: str) -> str:
    """A name without the children that only torch uses."""
    if _COMPILED not in name and _ACTIVATIONS not in name:
        return name
    return ".".join(one for one in name.split(".") if one not in (_COMPILED, _ACTIVATIONS))


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The part of a module with a canonical name, below any wrappers; None without one."""
    current = innermost(module)
    for name in path.split("."):
        child = current._modules.get(name)
        if child is None:
            return None
        current = innermost(child)
    return current


def innermost(module: nn.Module) -> nn.Module:
    """The module inside of all wrappers; the module itself without wrappers."""
    while (inner := module._modules.get(_inserted(type(module)) or "")) is not None:  # type: ignore[arg-type]
        module = inner
    return module


@lru_cache(maxsize=256)
def _inserted(kind: type) -> str | None:
    """The name that a wrapper of this class gives its only child; None for other modules."""
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    # By name, because importing these loads the compiler; FSDP2 and `replicate` make subclasses of them.
    classes = {one.__name__ for one in kind.__mro__ if one.__module__.startswith("torch.")}
    if "OptimizedModule" in classes:
        return _COMPILED
    return _ACTIVATIONS if "ActivationWrapper" in classes else None


def _tensor_paths(module: nn.Module) -> dict[int, list[list[tuple[str, bool]]]]:
    """Paths of each tensor, by id: the names from the module down, and whether a wrapper inserted each."""
    found: dict[int, list[list[tuple[str, bool]]]] = {}
    todo: list[tuple[list[tuple[str, bool]], nn.Module]] = [([], module)]
    while todo:
        path, part = todo.pop()
        for name, one in (*part._parameters.items(), *part._buffers.items()):
            if isinstance(one, torch.Tensor):
                found.setdefault(id(one), []).append([*path, (name, False)])
        inserted = _inserted(type(part))  # type: ignore[arg-type]
        for name, child in reversed(part._modules.items()):
            if child is not None:
                todo.append(([*path, (name, name == inserted)], child))
    return found


def _aligned(key: Sequence[str], path: Sequence[tuple[str, bool]]) -> str | None:
    """The key without names that wrappers inserted, if it is the path with some names omitted; else None."""
    kept: list[str] = []
    left = list(key)
    for name, inserted in reversed(path):
        if left and left[-1] == name:
            left.pop()
            if not inserted:
                kept.append(name)
    return None if left else ".".join(reversed(kept))


Named = tuple[str, torch.Tensor]


class TensorNames:
    """The first name of each tensor. Two are one if they are the same view of the same memory.

    Storage, offset, shape, strides and element type must be equal, in any objects (`p.data`, a detached
    tensor, two parameters with the same data). Of a DTensor the local part and the placements are compared.
    Tensors in here stay alive, so that their memory is not reused. An inner tensor of a wrapper subclass has
    a name, the wrapper has none.
    """

    def __init__(self) -> None:
        self._first: dict[object, Named] = {}
        self._others: dict[object, list[Named]] = {}

    def earlier(self, tensor: torch.Tensor, name: str) -> str | None:
        """The existing name of this tensor; None if it is new, and called `name` from now on."""
        place, named = memory_place(tensor), (name, tensor)
        first = self._first.setdefault(place, named)
        if first is named:
            return None
        if (known := self._among(place, tensor)) is None:
            self._others.setdefault(place, []).append(named)
        return known

    def add_new(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Name many plain tensors at once, if all are new and have memory; else name none."""
        places = list(map(torch.Tensor.data_ptr, tensors))
        found: dict[object, Named] = dict(zip(places, zip(names, tensors, strict=True), strict=True))
        if len(found) < len(places) or 0 in found or not self._first.keys().isdisjoint(found):
            return False
        self._first.update(found)
        return True

    def shared_with(self, other: TensorNames) -> Iterator[tuple[str, str]]:
        """Both names of each tensor that has one here and in `other`."""
        for place in self._first.keys() & other._first.keys():
            for name, tensor in (self._first[place], *self._others.get(place, ())):
                if (known := other.of(tensor)) is not None:
                    yield name, known

    def of(self, tensor: torch.Tensor) -> str | None:
        """The name of this tensor; None without one."""
        return self._among(memory_place(tensor), tensor)

    def _among(self, place: object, tensor: torch.Tensor) -> str | None:
        first = self._first.get(place)
        if first is None:
            return None
        views = (first, *self._others.get(place, ()))
        return next((n for n, one in views if one is tensor or _view_of(one) == _view_of(tensor)), None)


def is_reordered(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory order differs from the order of its dimensions."""
    odd = tensor.layout is torch.strided and not tensor.is_contiguous()
    return odd and not (is_sharded(tensor) or is_wrapper(tensor))


def memory_place(tensor: torch.Tensor) -> object:
    """Address of the memory; for a tensor without any (empty, meta) the identity of its storage."""
    memory = memory_of_shard(tensor) if type(tensor) not in _TENSORS and is_sharded(tensor) else tensor
    try:
        return memory.data_ptr() or (memory.untyped_storage()._cdata, memory.storage_offset())
    except (RuntimeError, NotImplementedError):  # sparse, for example: only itself
        return f"tensor {id(tensor)}"


def _view_of(tensor: Any) -> tuple[Any, ...]:
    """What two tensors that begin at one address have in common if they are one."""
    if is_sharded(tensor):
        where = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return (*where, _view_of(memory_of_shard(tensor)))
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def extent_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage, and the range of its bytes that a tensor may use; zeros for none."""
    if is_wrapper(tensor):
        return 0, 0, 0
    memory = memory_of_shard(tensor) if is_sharded(tensor) else tensor
    if memory.layout is not torch.strided or memory.numel() == 0:
        return 0, 0, 0
    last = sum(int(size - 1) * int(step) for size, step in zip(memory.shape, memory.stride(), strict=True))
    begin = int(memory.storage_offset()) * memory.itemsize
    return memory.untyped_storage().data_ptr(), begin, begin + (last + 1) * memory.itemsize


class Extents:
    """The bytes that a growing list of tensors may use."""

    def __init__(self) -> None:
        self._found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._looked_at = 0

    def overlap(self, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor may share a byte with the others, which extend those of the last call."""
        for other in others[self._looked_at :]:
            storage, *extent = extent_of(other)
            self._found[storage].append((extent[0], extent[1]))
        self._looked_at = len(others)
        storage, begin, end = extent_of(tensor)
        return any(first < end and begin < last for first, last in self._found.get(storage, ()))


def overlaps_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """For each tensor that shares bytes with an earlier one in memory: its name, and the offset in bytes."""
    if all_plain_memory(plain := list(tensors.values())):
        addresses, sizes = map(torch.Tensor.data_ptr, plain), map(attrgetter("nbytes"), plain)
        places = sorted(zip(addresses, sizes, strict=True))
        if all(one + size <= other for (one, size), (other, _) in pairwise(places)):
            return {}
    extents = sorted((*extent_of(one), name) for name, one in tensors.items())
    found: dict[str, tuple[str, int]] = {}
    before: list[tuple[int, int, int, str]] = []
    """Those whose last byte is not before."""
    for storage, begin, end, name in extents:
        before = [other for other in before if other[0] == storage and begin < other[2]]
        for _, at, _, other in before if storage else ():
            if _share_bytes(tensors[name], tensors[other]):
                found[name] = other, begin - at
                break
        before.append((storage, begin, end, name))
    return found


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors with overlapping extents share bytes: two columns of a matrix do not."""
    one, other = map(local_of, (one, other))
    if one.itemsize != other.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return True
    first = min(one.storage_offset(), other.storage_offset())
    end = max(extent_of(it)[2] // it.itemsize for it in (one, other))
    taken = torch.zeros(end - first, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())
