"""Check which tensors can be leaves and be loaded into, one by one or many at once.

Saves and loads use the same rules. A load also checks, before the first byte, that the memory of live tensors
may be written. Memory that torch allocated may. Foreign memory (numpy arrays, mapped files) is looked up in
the memory map of the process, because a wrong write would end the process. Shared writable mappings are
written, as the user intends.

With tens of thousands of small tensors every Python call per tensor counts, so each property is checked for
all of them by one built-in function. An unusual tensor is left to `restore`, which handles it alone.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay.checkpoint.format.dtypes import (
    AT_ONCE,
    all_in_order,
    all_strided,
    check_dense,
    has_memory,
    is_storable,
    logical_dtype,
    logical_name,
    memories_at,
)
from torchrelay.checkpoint.format.shard.entries import EntryForm, form_of
from torchrelay.checkpoint.state.leaf import is_sharded, local_of
from torchrelay.checkpoint.state.wrappers import is_typed_memory, is_wrapper, plain
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import BlobError, RelayError
from torchrelay.records import dataclass

_PLAIN = (torch.Tensor, nn.Parameter)


def admitted(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor detached, sharing its memory; raises BlobError if it cannot be stored.

    That is: sparse, quantised, nested, on the meta device or not initialised, subclasses other than Parameter
    and DTensor, and element types without a stored form.
    """
    if _is_plain(tensor):
        return tensor.detach()
    if type(tensor) not in _PLAIN:  # only plain memory and DTensors are stored
        _check_parts(tensor, name)
        if not is_sharded(tensor):
            raise BlobError(_refusal(tensor, name))
    if not is_sharded(tensor):
        check_dense(tensor, name)
        logical_dtype(tensor.dtype, name)
    return tensor.detach()


def is_plain_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that is stored as it is, and can be loaded into."""
    return type(value) in _PLAIN and _is_plain(value) and value.is_contiguous()  # type: ignore[attr-defined, arg-type]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is the usual case: dense, of no subclass, of a type that has a stored form."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or not is_storable(tensor.dtype):
        return False
    return has_memory(tensor)


def _check_parts(tensor: torch.Tensor, name: str) -> None:
    """Raise BlobError for parts of a DTensor or a wrapper that have no stored form."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise BlobError(not_initialised(name))
    if is_wrapper(tensor):
        raise BlobError(_refusal(tensor, name))
    check_dense(local_of(tensor), f"the local part of {name}" if is_sharded(tensor) else name)
    logical_dtype(tensor.dtype, name)


def not_initialised(name: str) -> str:
    """The error for a parameter or buffer of a lazy module."""
    return f"{name} is not initialised yet: run one forward pass of the lazy module in setup"


def _refusal(tensor: torch.Tensor, name: str) -> str:
    """The error for a tensor that cannot be stored."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if is_wrapper(tensor):
        return (
            f"{name} is a {kind}, which a load could not build without a live tensor of its kind: "
            "register an object that holds it and has state_dict and load_state_dict"
        )
    if own := sorted(getattr(tensor, "__dict__", None) or ()):
        return (
            f"{name} is a {kind} with additional attributes ({', '.join(own)}), which would be lost: "
            "give it __tensor_flatten__ and __tensor_unflatten__"
        )
    return (
        f"{name} is a {kind}: a tensor subclass would be loaded as a plain tensor; register "
        "x.as_subclass(torch.Tensor)"
    )


def admitted_in_place(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """As `admitted`, for a tensor that a load writes into: its elements must not share memory.

    Subclasses that only add a type to plain memory are admitted, because they stay.
    """
    if _is_plain(tensor) and tensor.is_contiguous():
        return tensor.detach()  # elements of a contiguous tensor do not overlap
    _check_parts(tensor, name)
    found = plain(tensor) if is_typed_memory(tensor) else admitted(tensor, name)
    if (local := local_of(found)).numel() and any(s == 0 and n > 1 for s, n in _steps(local)):
        raise BlobError(f"{name} is expanded, so it cannot be loaded in place: register a clone() of it")
    if _overlaps(local):
        raise BlobError(
            f"{name} has elements that share memory (a view by unfold or as_strided), so it cannot be loaded "
            "in place: register a clone() of it"
        )
    return found


def unwritable(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Errors for those of these admitted tensors whose memory cannot be written."""
    foreign: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        memory = tensor if type(tensor) in _PLAIN else plain(local_of(tensor))
        if not memory.untyped_storage().resizable() and memory.is_cpu:
            foreign.append((name, memory))
    maps = _memory_maps() if foreign else None
    found = {
        name: file for name, memory in foreign if maps and (file := _read_only(maps, memory)) is not None
    }
    return [
        f"{name} has read-only memory{f' (it maps {file})' if file else ''}, so nothing can be loaded "
        "into it: register a clone() of it"
        for name, file in found.items()
    ]


def all_torch_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether torch allocated all of them, so that `unwritable` finds nothing."""
    return all(map(torch.UntypedStorage.resizable, storages))


_Maps = tuple[list[int], list[tuple[int, bool, str]]]
"""Start addresses of this process's mappings; the end of each, whether it is writable, and its file."""


def _memory_maps() -> _Maps | None:
    """The memory of this process in ascending order; None if the system does not provide it."""
    starts, rest = [], []
    try:
        with open("/proc/self/maps", errors="replace") as lines:
            for line in lines:
                place, mode, *_, file = f"{line.rstrip()} ".split(" ", 5)
                start, _, end = place.partition("-")
                starts.append(int(start, 16))
                rest.append((int(end, 16), mode[1] == "w", file.strip()))
    except OSError:
        return None
    return starts, rest


def _read_only(maps: _Maps, memory: torch.Tensor) -> str | None:
    """The read-only mapping that a part of a tensor's memory is in, if any."""
    if memory.numel() == 0:
        return None
    starts, rest = maps
    at = memory.data_ptr()
    end = at + memory.element_size() * (1 + sum(step * (size - 1) for step, size in _steps(memory)))
    while at < end:
        number = bisect_right(starts, at) - 1
        stop, writable, file = rest[number] if number >= 0 else (0, False, "")
        if stop <= at or not writable:
            return file if stop > at and file.startswith("/") else ""
        at = stop
    return None


def _steps(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Stride and size of each dimension."""
    return zip(tensor.stride(), tensor.shape, strict=True)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory; checked one by one if the strides do not decide it."""
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    reach = 0
    for step, size in sorted(one for one in _steps(tensor) if one[1] > 1):
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for step, size in _steps(tensor):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * step
    return bool(places.unique().numel() < tensor.numel())


@dataclass
class PlainTensors:
    """Form and memory of each tensor.

    The memory stays alive as long as this object does, even if a tensor is freed or gets other memory, unless
    its storage is resized (`resize_`).
    """

    forms: list[EntryForm] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    def take(self, some: Sequence[Any], forms: Sequence[EntryForm] | None = None) -> bool:
        """Add these, `AT_ONCE` at most, if all are such tensors, and of these forms; else add nothing."""
        if not all_strided(some):
            return False
        types = list(map(attrgetter("dtype"), some))
        if not all(map(is_storable, set(types))):
            return False
        kinds, shapes = list(map(logical_name, types)), map(attrgetter("shape"), some)
        if forms is None:
            forms = list(map(form_of, kinds, shapes))
        elif [form.dtype for form in forms] != kinds or [form.shape for form in forms] != list(shapes):
            return False
        if not all_in_order(some, any(kind.is_complex for kind in set(types))):
            return False
        try:
            addresses = list(map(torch.Tensor.data_ptr, some))
        except RuntimeError:
            return False
        if not all(addresses) and not all(map(has_memory, some)):
            return False
        self.forms += forms
        self.addresses += addresses
        self.storages += map(torch.Tensor.untyped_storage, some)
        self.memories += memories_at(addresses, [form.nbytes for form in forms])
        return True


def plain_tensors(values: Iterable[Any]) -> PlainTensors | None:
    """Describe all of these, if all are such tensors; else None."""
    found, rest = PlainTensors(), iter(values)
    while some := list(islice(rest, AT_ONCE)):
        if not found.take(some):
            return None
    return found


T = TypeVar("T")


@dataclass(frozen=True)
class InPlace:
    """Tensors by the names of the leaves that fit them; all are contiguous in CPU memory."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    plain: PlainTensors = field(default_factory=PlainTensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self._sizes())

    @property
    def memories(self) -> list[Memory]:
        """The bytes of each."""
        return self.plain.memories

    def rest(self, objects: Mapping[str, T]) -> Mapping[str, T]:
        """The objects that are not here."""
        settled = self.tensors
        if not settled:
            return objects
        if len(settled) == len(objects):
            return {}
        return {name: one for name, one in objects.items() if name not in settled}

    def beside(self) -> tuple[list[Memory], Memory]:
        """Separate memory for each, and the allocation that contains it."""
        sizes = self._sizes()
        ends = list(accumulate(sizes))
        whole = (ctypes.c_ubyte * (ends[-1] if ends else 0))()
        first = ctypes.addressof(whole)
        return memories_at([first + end - size for end, size in zip(ends, sizes, strict=True)], sizes), whole

    def put(self, memories: Iterable[Memory]) -> None:
        """Copy from separate memory into place."""
        places, sources = (map(ctypes.addressof, some) for some in (self.memories, memories))  # type: ignore[arg-type]
        deque(map(ctypes.memmove, places, sources, self._sizes()), maxlen=0)

    def _sizes(self) -> list[int]:
        return [form.nbytes for form in self.plain.forms]


NOTHING = InPlace()


def planned(plan: Callable[[InPlace], T], in_place: InPlace) -> tuple[T, InPlace]:
    """Plan all that is not in place.

    If that raises, all is planned without in-place tensors, so that the error lists everything.
    """
    try:
        return plan(in_place), in_place
    except RelayError:
        if not in_place.tensors:
            raise
    return plan(NOTHING), NOTHING


def fitting(objects: Mapping[str, Any], names: Sequence[str], forms: Sequence[EntryForm]) -> InPlace:
    """Those of these stored leaves, each the only one of a blob of its name, that fit their object.

    Tensors that begin at the same address are left out.
    """
    live = list(objects.values()) if list(objects) == names else [objects[name] for name in names]
    plain, found = PlainTensors(), dict[str, torch.Tensor]()
    for at in range(0, len(live), AT_ONCE):
        part = slice(at, at + AT_ONCE)
        if plain.take(live[part], forms[part]):
            found.update(zip(names[part], live[part], strict=True))
            continue
        for name, one, form in zip(names[part], live[part], forms[part], strict=True):
            if plain.take([one], [form]):
                found[name] = one
    if shared := _shared(found, plain.addresses):
        alone = [(name, form) for name, form in zip(names, forms, strict=True) if name not in shared]
        return fitting(objects, [name for name, _ in alone], [form for _, form in alone])
    if not all_torch_memory(plain.storages) and unwritable(found.items()):
        return NOTHING
    return InPlace(found, plain)


def _shared(found: Iterable[str], places: Sequence[int]) -> set[str]:
    """Names of tensors that begin at the same address as another; empty ones never do."""
    if len(set(places)) == len(places):
        return set()
    count = Counter(places)
    return {name for name, place in zip(found, places, strict=True) if place and count[place] > 1}
