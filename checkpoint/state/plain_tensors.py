"""Tensors that are nothing but memory of the CPU, asked together: what small ones cost is each question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import islice
from operator import attrgetter
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import is_storable, logical_name
from torchrelay.checkpoint.format.shard.batched_reads import (
    AT_ONCE,
    all_in_memory,
    all_in_order,
    all_strided,
    memories_at,
)
from torchrelay.checkpoint.format.shard.entries import Form, form_of
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.records import dataclass


@dataclass
class PlainTensors:
    """What each tensor is: its form and its memory.

    The memory stays as long as this object does, even where a tensor is gone or got other memory; not
    where somebody resizes the storage that it lies in (`resize_`), as with any view of a tensor's memory.
    """

    forms: list[Form] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    def take(self, some: Sequence[Any], forms: Sequence[Form] | None = None) -> bool:
        """Add these, `AT_ONCE` at most, if all are such tensors, and of these forms; else add nothing."""
        if not all_strided(some):
            return False
        types = list(map(attrgetter("dtype"), some))
        if not all(map(is_storable, set(types))):
            return False
        found = list(map(form_of, map(logical_name, types), map(attrgetter("shape"), some)))
        if forms not in (None, found) or not all_in_order(some, any(kind.is_complex for kind in set(types))):
            return False
        if not all_in_memory(some):
            return False
        self.forms += found
        self.storages += map(torch.Tensor.untyped_storage, some)
        self.memories += memories_at(list(map(torch.Tensor.data_ptr, some)), [form.nbytes for form in found])
        return True


def plain_tensors(values: Iterable[Any]) -> PlainTensors | None:
    """What all of these are, if they are nothing but such tensors; None where each has to be looked at."""
    found, rest = PlainTensors(), iter(values)
    while some := list(islice(rest, AT_ONCE)):
        if not found.take(some):
            return None
    return found
