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

    def memories(self) -> list[Memory]:
        """The bytes of each, to be written to as long as the tensors are there."""
        return _at(self._addresses(), self._sizes())

    def beside(self) -> tuple[list[Memory], Memory]:
        """As much memory of its own for each, and what all of that is cut from."""
        sizes = self._sizes()
        ends = list(accumulate(sizes))
        whole = (ctypes.c_ubyte * (ends[-1] if ends else 0))()
        first = ctypes.addressof(whole)
        return _at([first + end - size for end, size in zip(ends, sizes, strict=True)], sizes), whole

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
    if not set(map(type, live)) <= PLAIN:
        return _fitting_some(objects, [type(one) in PLAIN for one in live], names, dtypes, shapes)
    # Only dense tensors can be asked all of the questions.
    if any(map(attrgetter("is_nested"), live)) or not set(map(attrgetter("layout"), live)) <= {torch.strided}:
        dense = [not one.is_nested and one.layout is torch.strided for one in live]
        return _fitting_some(objects, dense, names, dtypes, shapes)
    good = (
        len(set(map(id, live))) == len(live)
        and _dtypes(live) == list(dtypes)
        and list(map(attrgetter("shape"), live)) == list(map(tuple, shapes))
        and all(map(attrgetter("is_cpu"), live))
        and all(map(torch.Tensor.is_contiguous, live))
        and not any(map(torch.Tensor.is_conj, live))
        and not any(map(torch.Tensor.is_neg, live))
    )
    if good:
        return InPlace(dict(zip(names, live, strict=True)))
    return _fitting_some(objects, _usual(live, dtypes, shapes), names, dtypes, shapes) if live else NOTHING


def _fitting_some(
    objects: Mapping[str, Any],
    chosen: Sequence[bool],
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> InPlace:
    columns = (list(compress(names, chosen)), list(compress(dtypes, chosen)), list(compress(shapes, chosen)))
    return fitting(objects, *columns)


def _usual(
    live: Sequence[torch.Tensor], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[bool]:
    """Of which tensors nothing is odd."""
    times = Counter(map(id, live))
    return [
        times[id(one)] == 1
        and dtype_name(one.dtype) == dtype
        and one.shape == tuple(shape)
        and one.is_cpu
        and one.is_contiguous()
        and not (one.is_conj() or one.is_neg())
        for one, dtype, shape in zip(live, dtypes, shapes, strict=True)
    ]


def _dtypes(live: Sequence[torch.Tensor]) -> list[str]:
    found = list(map(attrgetter("dtype"), live))
    names = {dtype: dtype_name(dtype) for dtype in set(found)}
    return list(map(names.__getitem__, found))


def _at(addresses: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
    kinds = {size: ctypes.c_ubyte * size for size in set(sizes)}
    return [kinds[size].from_address(address) for address, size in zip(addresses, sizes, strict=True)]
