"""Blobs that are nothing but tensors in the memory of the CPU, asked together: what small ones cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

import torch

from torchrelay.checkpoint.disk.dtypes import is_storable, logical_name
from torchrelay.checkpoint.disk.many_tensors import AT_ONCE, all_in_order, all_strided, memories_at
from torchrelay.checkpoint.disk.shard_entries import Form, form_of
from torchrelay.checkpoint.state.leaf import Role
from torchrelay.checkpoint.storage import Memory

_ROLES: Mapping[type, str] = {torch.Tensor: str(Role.TENSOR), torch.nn.Parameter: str(Role.PARAMETER)}


@dataclass
class PlainBlobs:
    """What each tensor is, in the order of the blobs: its role, its form and its memory.

    The memory stays as long as this object does, whatever becomes of the tensors.
    """

    roles: list[str]
    forms: list[Form]
    memories: list[Memory]
    storages: list[torch.UntypedStorage]


def plain_blobs(blobs: Mapping[str, Any]) -> PlainBlobs | None:
    """These blobs, if all are such tensors and none is there twice; None where each has to be looked at."""
    if len(set(map(id, blobs.values()))) < len(blobs):
        return None
    found = PlainBlobs([], [], [], [])
    values = iter(blobs.values())
    while some := list(islice(values, AT_ONCE)):
        if not _take(some, found):
            return None
    return found


def _take(some: Sequence[Any], found: PlainBlobs) -> bool:
    if not all_strided(some):
        return False
    types = list(map(attrgetter("dtype"), some))
    if not all(map(is_storable, set(types))) or not all_in_order(some):
        return False
    forms = list(map(form_of, map(logical_name, types), map(attrgetter("shape"), some)))
    sizes = [form.nbytes for form in forms]
    found.storages += map(torch.Tensor.untyped_storage, some)
    found.memories += memories_at(list(map(torch.Tensor.data_ptr, some)), sizes)
    found.forms += forms
    found.roles += map(_ROLES.__getitem__, map(type, some))
    return True
