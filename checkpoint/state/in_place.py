"""Live tensors that stored leaves of their names are read straight into, found by columns among very many.

What costs time with tens of thousands of small tensors is each question that is asked of each of them in
Python. Here a question is put to all of them by one built-in function. A tensor of which any answer is not
the usual one is left to `restore`, which looks at it alone, says what is wrong, or copies.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any, TypeVar

import torch

from torchrelay.checkpoint.disk.many_tensors import (
    AT_ONCE,
    all_dense,
    all_in_order,
    memories_at,
    memories_of,
)
from torchrelay.checkpoint.state.restoring import dtype_name
from torchrelay.checkpoint.storage import Memory
from torchrelay.errors import RelayError

T = TypeVar("T")

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True)
class InPlace:
    """Tensors by the names of the leaves that fit them; all lie in order in the memory of the CPU."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(map(attrgetter("nbytes"), self.tensors.values()))

    def rest(self, objects: Mapping[str, T]) -> Mapping[str, T]:
        """Those objects that are not here."""
        settled = self.tensors
        if not settled:
            return objects
        if len(settled) == len(objects):
            return {}
        return {name: one for name, one in objects.items() if name not in settled}

    def memories(self) -> list[Memory]:
        """The bytes of each, to be written to as long as the tensors are there."""
        live, found = list(self.tensors.values()), []
        for at in range(0, len(live), AT_ONCE):
            found += memories_of(live[at : at + AT_ONCE])
        return found

    def beside(self) -> tuple[list[Memory], Memory]:
        """As much memory of its own for each, and what all of that is cut from."""
        sizes = self._sizes()
        ends = list(accumulate(sizes))
        whole = (ctypes.c_ubyte * (ends[-1] if ends else 0))()
        first = ctypes.addressof(whole)
        return memories_at([first + end - size for end, size in zip(ends, sizes, strict=True)], sizes), whole

    def put(self, memories: Iterable[Memory]) -> None:
        """Copy what was read beside into place."""
        sources = map(ctypes.addressof, memories)  # type: ignore[arg-type]
        deque(map(ctypes.memmove, self._addresses(), sources, self._sizes()), maxlen=0)

    def _addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self.tensors.values()))

    def _sizes(self) -> list[int]:
        return list(map(attrgetter("nbytes"), self.tensors.values()))


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


def fitting(
    objects: Mapping[str, Any], names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> InPlace:
    """Of these stored leaves, each the only one of a blob of its name, those that its object fits."""
    live = [objects[name] for name in names]
    twice = _twice(live)
    found: dict[str, torch.Tensor] = {}
    for at in range(0, len(live), AT_ONCE):
        part = slice(at, at + AT_ONCE)
        some = live[part], dtypes[part], shapes[part]
        if not twice and _all_usual(*some):
            found.update(zip(names[part], some[0], strict=True))
        else:
            rows = zip(*some, strict=True)
            usual = [
                id(one) not in twice and _all_usual([one], [dtype], [shape]) for one, dtype, shape in rows
            ]
            found.update(compress(zip(names[part], some[0], strict=True), usual))
    return InPlace(found)


def _twice(live: Sequence[Any]) -> set[int]:
    """The ids of what is there more than once."""
    if len(set(map(id, live))) == len(live):
        return set()
    return {one for one, count in Counter(map(id, live)).items() if count > 1}


def _all_usual(live: Sequence[Any], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether nothing is odd about any of these tensors."""
    return (
        all_dense(live)
        and _dtypes(live) == list(dtypes)
        and list(map(attrgetter("shape"), live)) == list(map(tuple, shapes))
        and all_in_order(live)
    )


def _dtypes(live: Sequence[torch.Tensor]) -> list[str]:
    found = list(map(attrgetter("dtype"), live))
    names = {dtype: dtype_name(dtype) for dtype in set(found)}
    return list(map(names.__getitem__, found))
