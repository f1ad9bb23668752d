"""Very many small tensors, asked and copied together: what costs time is each question to each of them.

One built-in function puts a question to all. Give at most `AT_ONCE` at a time: so many stay in the
processor's cache until the last question; a tensor that does not takes four times as long for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

from torchrelay.checkpoint.disk.dtypes import has_memory
from torchrelay.checkpoint.storage.base import Memory

if TYPE_CHECKING:
    import torch

AT_ONCE = 1024


def all_dense(found: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are tensors of no subclass, dense, with content, none of them quantised."""
    return (
        all_strided(found)
        and not any(map(attrgetter("is_quantized"), found))
        and not any(map(attrgetter("is_meta"), found))
    )


def all_strided(found: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are tensors of no subclass and of the usual layout, with content or without."""
    import torch

    return (
        set(map(type, found)) <= {torch.Tensor, torch.nn.Parameter}
        and not any(map(attrgetter("is_nested"), found))  # a nested one cannot be asked the rest
        and set(map(attrgetter("layout"), found)) <= {torch.strided}
    )


def all_in_order(dense: Sequence[torch.Tensor], some_complex: bool = True) -> bool:
    """Whether each lies in order in the memory of the CPU, as what its elements are."""
    import torch

    return (
        all(map(attrgetter("is_cpu"), dense))
        and all(map(torch.Tensor.is_contiguous, dense))
        and not (some_complex and any(map(torch.Tensor.is_conj, dense)))
        and not any(map(torch.Tensor.is_neg, dense))
    )


def all_in_memory(strided: Sequence[torch.Tensor]) -> bool:
    """Whether the elements of each, where it has any, lie somewhere."""
    import torch

    try:
        if all(map(torch.Tensor.data_ptr, strided)):
            return True
    except RuntimeError:
        return False
    return all(map(has_memory, strided))


def memories_of(in_order: Sequence[torch.Tensor]) -> list[Memory]:
    """The bytes of each, to be read and written as long as the tensors are there."""
    import torch

    sizes = list(map(attrgetter("nbytes"), in_order))
    return memories_at(list(map(torch.Tensor.data_ptr, in_order)), sizes)


def memories_at(addresses: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
    """Memory that somebody else keeps."""
    kinds = {size: ctypes.c_ubyte * size for size in set(sizes)}
    return [kinds[size].from_address(address) for address, size in zip(addresses, sizes, strict=True)]
