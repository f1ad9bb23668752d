"""Check which tensors can be leaves and be loaded into, and read stored ones into live or new memory.

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
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import field
from functools import lru_cache
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
    as_copied,
    by_name,
    check_dense,
    has_memory,
    is_storable,
    logical_dtype,
    logical_name,
    memories_at,
    torch_dtype,
)
from torchrelay.checkpoint.format.mesh_geometry import LocalTarget
from torchrelay.checkpoint.format.shard.entries import EntryForm, form_of
from torchrelay.checkpoint.state.leaf import LeafSpec, is_sharded, local_of, order_of
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import BlobError, RelayError
from torchrelay.records import dataclass

_PLAIN = (torch.Tensor, nn.Parameter)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of named inner tensors; DTensors and nested tensors do not count."""
    if type(tensor) in _PLAIN or is_sharded(tensor) or tensor.is_nested:
        return False
    steps = "__tensor_flatten__", "__tensor_unflatten__"
    return all(callable(getattr(type(tensor), step, None)) for step in steps)


def is_typed_memory(tensor: torch.Tensor) -> bool:
    """Whether a subclass only adds a type to plain memory: no inner tensors, no attributes."""
    stock = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return stock and not is_sharded(tensor) and not getattr(tensor, "__dict__", None)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its type, detached, sharing its memory."""
    return (tensor if type(tensor) in _PLAIN else tensor.as_subclass(torch.Tensor)).detach()


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
    return [
        f"{name} has read-only memory{f' (it maps {file})' if file else ''}, so nothing can be loaded "
        "into it: register a clone() of it"
        for name, memory in foreign
        if maps and (file := _read_only(maps, memory)) is not None
    ]


def all_torch_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether torch allocated all of them, so that `unwritable` finds nothing."""
    return all(map(torch.UntypedStorage.resizable, storages))


_Maps = tuple[list[int], list[tuple[int, bool, str]]]
"""Start addresses of this process's mappings; the end of each, whether it is writable, and its file."""


def _memory_maps() -> _Maps | None:
    """The memory of this process in ascending order; None if the system does not provide it."""
    starts, rest = [], []
    with suppress(OSError), open("/proc/self/maps", errors="replace") as lines:
        for line in lines:
            place, mode, *_, file = f"{line.rstrip()} ".split(" ", 5)
            start, _, end = place.partition("-")
            starts.append(int(start, 16))
            rest.append((int(end, 16), mode[1] == "w", file.strip()))
        return starts, rest
    return None


def _read_only(maps: _Maps, memory: torch.Tensor) -> str | None:
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
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [form.nbytes for form in self.plain.forms]

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
        sizes = self.sizes
        ends = list(accumulate(sizes))
        whole = (ctypes.c_ubyte * (ends[-1] if ends else 0))()
        first = ctypes.addressof(whole)
        return memories_at([first + end - size for end, size in zip(ends, sizes, strict=True)], sizes), whole

    def put(self, memories: Iterable[Memory]) -> None:
        """Copy from separate memory into place."""
        places, sources = (map(ctypes.addressof, some) for some in (self.plain.memories, memories))  # type: ignore[arg-type]
        deque(map(ctypes.memmove, places, sources, self.sizes), maxlen=0)


NOTHING = InPlace()


def planned(plan: Callable[[InPlace], T], in_place: InPlace) -> tuple[T, InPlace]:
    """Plan all that is not in place; if that raises, plan all, so that the error lists everything."""
    try:
        return plan(in_place), in_place
    except RelayError:
        if not in_place.tensors:
            raise
    return plan(NOTHING), NOTHING


def fitting(objects: Mapping[str, Any], names: Sequence[str], forms: Sequence[EntryForm]) -> InPlace:
    """Those leaves, each alone in a blob of its name, that fit an object and begin where no other does."""
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
    if len(set(places)) == len(places):
        return set()
    count = Counter(places)
    return {name for name, place in zip(found, places, strict=True) if place and count[place] > 1}


class Read:
    """One tensor to be read: the stored leaf `leaf`, into `memory()`.

    `live` is a tensor of an object, `destination` the same if it can be written in place; otherwise
    `memory()` is new, and the restoration copies it into `live`. With a `target` the memory takes only these
    boxes of the leaf. A new tensor made of it gets the type `becomes`.
    """

    def __init__(
        self,
        leaf: str,
        spec: LeafSpec,
        live: torch.Tensor | None = None,
        target: LocalTarget | None = None,
        *,
        becomes: torch.dtype | None = None,
    ) -> None:
        self.leaf = leaf
        self.spec = spec
        self.live = live
        as_stored = live is not None and spec.dtype == dtype_name(live.dtype)
        in_order = live is not None and live.is_cpu and live.is_contiguous()
        flipped = live is not None and (live.is_conj() or live.is_neg())
        self.destination = live if as_stored and in_order and not flipped else None
        self.target = target
        self.becomes = becomes
        self._placed: dict[str, torch.Tensor] | None = None

    def memory(self) -> torch.Tensor:
        """The contiguous CPU tensor to fill; fresh memory is allocated at the first call."""
        if self.destination is not None:
            return self.destination
        if not hasattr(self, "_fresh"):
            self._fresh = self.fresh()
        return self._fresh

    def fresh(self) -> torch.Tensor:
        """New memory of the size that is to be filled."""
        shape = self.spec.shape if self.target is None else self.target.shape
        with outside_inference_mode():
            return torch.empty(shape, dtype=self.dtype, device="cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The stored element type; a live tensor may have another one."""
        return torch_dtype(by_name(self.spec.dtype or ""))

    def settle(self) -> None:
        """Copy new memory into the live tensor."""
        if self.live is not None and hasattr(self, "_fresh"):
            put(self.live, self._fresh)

    def on(self, device: torch.device | None) -> torch.Tensor:
        """The memory, once read, on a device, None for that of `device_for`: one shared tensor per device."""
        where = str(device or device_for(self.spec) or "cpu")
        self._placed = {} if self._placed is None else self._placed
        if where not in self._placed:
            found = self.memory().to(where, self.becomes or self.dtype)
            self._placed[where] = found
            if self.live is None and self.spec.order is not None:
                put(new := empty(self.spec, where, found.dtype), found)
                self._placed[where] = new
        return self._placed[where]


def device_for(spec: LeafSpec) -> torch.device | None:
    """The GPU for a tensor that was saved on one, if this process computes on GPUs; None for the CPU."""
    if spec.device is None or not torch.cuda.is_initialized():
        return None
    distance = int(spec.device.partition(":")[2] or 0)
    return torch.device("cuda", (torch.cuda.current_device() + distance) % torch.cuda.device_count())


def empty(
    spec: LeafSpec, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """New memory for a whole tensor, in the memory order in which it was saved."""
    order = range(len(spec.shape)) if spec.order is None else spec.order
    dtype = dtype or torch_dtype(by_name(spec.dtype or ""))
    with outside_inference_mode():
        return torch.empty_permuted(spec.shape, list(order), dtype=dtype, device=device)


def outside_inference_mode() -> AbstractContextManager[object]:
    """Context without inference mode, because loaded tensors are trained afterwards."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def with_strides_of(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if a plain model of its shape has other strides: fused kernels need equal ones."""
    plain = type(tensor) is torch.Tensor and tensor.layout is model.layout is torch.strided
    if not plain or is_sharded(model) or is_wrapper(model) or tensor.shape != model.shape:
        return tensor
    if tensor.stride() == model.stride():
        return tensor
    with outside_inference_mode():
        put(new := torch.empty_like(model, dtype=tensor.dtype, device=tensor.device), tensor)
        return new


def lay_as_saved(live: torch.Tensor, spec: LeafSpec) -> None:
    """Give a tensor the memory order in which it was saved, in new memory."""
    if order_of(live) != spec.order:
        put(new := empty(spec, live.device, live.dtype), live)
        take_memory_of(new, live)


def take_memory_of(other: torch.Tensor, live: torch.Tensor) -> None:
    """Give a live tensor the memory of another one; hooks on its gradient, as those of DDP, stay."""
    if live.is_inference():
        with torch.inference_mode():
            live.set_(other)  # type: ignore[call-overload]
    else:
        live.data = other


def same_form(spec: LeafSpec, live: torch.Tensor) -> bool:
    """Whether a stored leaf is a tensor of this shape and element type."""
    return spec.kind == "tensor" and spec.dtype == dtype_name(live.dtype) and spec.shape == live.shape


def form(tensor: torch.Tensor) -> str:
    """Element type and shape as `LeafSpec` prints them: float32[2, 3]."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name, as in a `LeafSpec`."""
    return str(dtype).removeprefix("torch.")


def put(live: torch.Tensor, content: torch.Tensor) -> None:
    """Copy into a live tensor, also into an inference tensor."""
    with torch.inference_mode() if live.is_inference() else nullcontext():
        as_copied(live).copy_(as_copied(content))
