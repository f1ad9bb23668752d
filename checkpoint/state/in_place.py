"""Live tensors that stored leaves of their names are read straight into, found by columns among very many.

What costs time with tens of thousands of small tensors is each question that is asked of each of them in
Python. Here a question is put to all of them by one built-in function. A tensor of which any answer is not
the usual one is left to `restore`, which looks at it alone, says what is wrong, or copies.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from typing import Any, TypeVar

import torch

from torchrelay.checkpoint.format.shard.batched_reads import AT_ONCE, memories_at
from torchrelay.checkpoint.format.shard.entries import Form
from torchrelay.checkpoint.state.admission import all_torch_memory, unwritable
from torchrelay.checkpoint.state.plain_tensors import PlainTensors
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import RelayError
from torchrelay.records import dataclass

T = TypeVar("T")


@dataclass(frozen=True)
class InPlace:
    """Tensors by the names of the leaves that fit them; all lie in order in the memory of the CPU."""

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
        """Those objects that are not here."""
        settled = self.tensors
        if not settled:
            return objects
        if len(settled) == len(objects):
            return {}
        return {name: one for name, one in objects.items() if name not in settled}

    def beside(self) -> tuple[list[Memory], Memory]:
        """As much memory of its own for each, and what all of that is cut from."""
        sizes = self._sizes()
        ends = list(accumulate(sizes))
        whole = (ctypes.c_ubyte * (ends[-1] if ends else 0))()
        first = ctypes.addressof(whole)
        return memories_at([first + end - size for end, size in zip(ends, sizes, strict=True)], sizes), whole

    def put(self, memories: Iterable[Memory]) -> None:
        """Copy what was read beside into place."""
        places, sources = (map(ctypes.addressof, some) for some in (self.memories, memories))  # type: ignore[arg-type]
        deque(map(ctypes.memmove, places, sources, self._sizes()), maxlen=0)

    def _sizes(self) -> list[int]:
        return [form.nbytes for form in self.plain.forms]


NOTHING = InPlace()


def planned(plan: Callable[[InPlace], T], in_place: InPlace) -> tuple[T, InPlace]:
    """What `plan` makes of all that is not in place.

    Where it raises, it is asked again with nothing in place: then every leaf is looked at alone, and the
    error says all that there is to say.
    """
    try:
        return plan(in_place), in_place
    except RelayError:
        if not in_place.tensors:
            raise
    return plan(NOTHING), NOTHING


def fitting(objects: Mapping[str, Any], names: Sequence[str], forms: Sequence[Form]) -> InPlace:
    """Of these stored leaves, each the only one of a blob of its name, those that its object fits.

    Left out are tensors that begin at the same place in memory.
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
    if shared := _shared(found):
        alone = [(name, form) for name, form in zip(names, forms, strict=True) if name not in shared]
        return fitting(objects, [name for name, _ in alone], [form for _, form in alone])
    if not all_torch_memory(plain.storages) and unwritable(found.items()):
        return NOTHING
    return InPlace(found, plain)


def _shared(found: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of tensors that begin where another one does; empty ones begin nowhere."""
    places = list(map(torch.Tensor.data_ptr, found.values()))
    if len(set(places)) == len(places):
        return set()
    count = Counter(places)
    return {name for name, place in zip(found, places, strict=True) if place and count[place] > 1}
