"""Which tensors are one: identity is memory, not the object that shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.state.admission import all_plain_memory
from torchrelay.checkpoint.state.dtensors import is_sharded, memory_of_shard
from torchrelay.checkpoint.state.subclasses import is_wrapper

Named = tuple[str, torch.Tensor]


class TensorNames:
    """The first name of each tensor. Two are one tensor where they are the same view of the same memory.

    That is: storage, offset, shape, strides and element type are equal, whatever objects show them (`p.data`,
    a detached tensor, two parameters that were given the same data). Of a DTensor its local part counts, and
    its placements. Tensors in here stay alive, so that no other can get their memory meanwhile. An inner
    tensor of a wrapper subclass has a name, the wrapper has none.
    """

    def __init__(self) -> None:
        self._first: dict[object, Named] = {}
        self._others: dict[object, list[Named]] = {}

    def earlier(self, tensor: torch.Tensor, name: str) -> str | None:
        """The name that this tensor has already; None where it is new, and called `name` from now on."""
        place, named = memory_place(tensor), (name, tensor)
        first = self._first.setdefault(place, named)
        if first is named:
            return None
        if (known := self._among(place, tensor)) is None:
            self._others.setdefault(place, []).append(named)
        return known

    def add_new(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Name many plain tensors at once, if all of them are new and have memory; else name none."""
        places = list(map(torch.Tensor.data_ptr, tensors))
        found: dict[object, Named] = dict(zip(places, zip(names, tensors, strict=True), strict=True))
        if len(found) < len(places) or 0 in found or not self._first.keys().isdisjoint(found):
            return False
        self._first.update(found)
        return True

    def shared_with(self, other: TensorNames) -> Iterator[tuple[str, str]]:
        """What has a name here and another one there, by both names."""
        for place in self._first.keys() & other._first.keys():
            for name, tensor in (self._first[place], *self._others.get(place, ())):
                if (known := other.of(tensor)) is not None:
                    yield name, known

    def of(self, tensor: torch.Tensor) -> str | None:
        """The name that this tensor has; None where it has none."""
        return self._among(memory_place(tensor), tensor)

    def _among(self, place: object, tensor: torch.Tensor) -> str | None:
        """Views of other shapes may begin at the same place."""
        first = self._first.get(place)
        if first is None:
            return None
        return next((n for n, one in (first, *self._others.get(place, ())) if _is_same(one, tensor)), None)


def is_reordered(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor lies in memory otherwise than in the order of its dimensions."""
    odd = tensor.layout is torch.strided and not tensor.is_contiguous()
    return odd and not (is_sharded(tensor) or is_wrapper(tensor))


def memory_place(tensor: torch.Tensor) -> object:
    """Where the memory begins; of what has none (empty, meta) which storage it is."""
    kind = type(tensor)
    plain = kind is torch.Tensor or kind is nn.Parameter or not is_sharded(tensor)
    memory = tensor if plain else memory_of_shard(tensor)
    try:
        return memory.data_ptr() or (memory.untyped_storage()._cdata, memory.storage_offset())
    except (RuntimeError, NotImplementedError):  # sparse, say: nothing but itself
        return f"tensor {id(tensor)}"


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if is_sharded(one) or is_sharded(other):
        both = is_sharded(one) and is_sharded(other)
        return both and _shard_of(one) == _shard_of(other)
    return _view_of(one) == _view_of(other)


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    flipped = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), flipped)


def _shard_of(tensor: Any) -> tuple[Any, ...]:
    where = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    return (*where, _view_of(memory_of_shard(tensor)))


def extent_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage, the first byte there that a tensor may have, and the one behind its last; zeros for none."""
    if is_wrapper(tensor):
        return 0, 0, 0
    memory = memory_of_shard(tensor) if is_sharded(tensor) else tensor
    if memory.layout is not torch.strided or memory.numel() == 0:
        return 0, 0, 0
    last = sum(int(size - 1) * int(step) for size, step in zip(memory.shape, memory.stride(), strict=True))
    begin = int(memory.storage_offset()) * memory.itemsize
    return memory.untyped_storage().data_ptr(), begin, begin + (last + 1) * memory.itemsize


class Extents:
    """Which bytes a growing list of tensors may have."""

    def __init__(self) -> None:
        self._found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._looked_at = 0

    def overlap(self, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor may share a byte with the others, which are those of the last call and more."""
        for other in others[self._looked_at :]:
            storage, first, behind = extent_of(other)
            self._found[storage].append((first, behind))
        self._looked_at = len(others)
        storage, begin, end = extent_of(tensor)
        return any(first < end and begin < behind for first, behind in self._found.get(storage, ()))


def overlaps_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """Of each tensor that shares bytes with an earlier one in memory: its name, and how many bytes in."""
    if _lie_apart(list(tensors.values())):
        return {}
    extents = sorted((*extent_of(one), name) for name, one in tensors.items())
    found: dict[str, tuple[str, int]] = {}
    before: list[tuple[int, int, int, str]] = []
    """Those whose last byte is not behind."""
    for storage, begin, end, name in extents:
        before = [other for other in before if other[0] == storage and begin < other[2]]
        for _, at, _, other in before if storage else ():
            if _share_bytes(tensors[name], tensors[other]):
                found[name] = other, begin - at
                break
        before.append((storage, begin, end, name))
    return found


def _lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are plain and contiguous, and none begins before the one that lies before it ends."""
    if not all_plain_memory(tensors):
        return False
    addresses, sizes = map(torch.Tensor.data_ptr, tensors), map(attrgetter("nbytes"), tensors)
    places = sorted(zip(addresses, sizes, strict=True))
    return all(one + size <= other for (one, size), (other, _) in pairwise(places))


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors whose extents overlap do: two columns of a matrix lie between one another."""
    one, other = (memory_of_shard(it) if is_sharded(it) else it for it in (one, other))
    if one.itemsize != other.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return True
    first = min(one.storage_offset(), other.storage_offset())
    begins = [it.storage_offset() - first for it in (one, other)]
    ends = [
        begin + (extent_of(it)[2] - extent_of(it)[1]) // it.itemsize
        for it, begin in zip((one, other), begins, strict=True)
    ]
    taken = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), begins[0]).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), begins[1]).any())
