"""Names of inputs and outputs: what leads to a tensor in nested tuples, lists, dicts and objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree


def name_of_path(path: Sequence[Any], head: str = "") -> str:
    """Keys behind dots, positions behind underscores: `batch.x`, `output_1`; `head` where it is empty."""
    name = head
    for key in path:
        if isinstance(key, pytree.SequenceKey):
            name = f"{name or 'output'}_{key.idx}"
            continue
        part = str(key.key if isinstance(key, pytree.MappingKey) else getattr(key, "name", key))
        name = f"{name}.{part}" if name else part
    return name


def leaf_names(names: Sequence[str]) -> list[str]:
    """The same names; those that come again get a number."""
    taken: Counter[str] = Counter()
    found = []
    for name in names:
        wanted, number = name, taken[name]
        while wanted in found:
            number += 1
            wanted = f"{name}_{number}"
        taken[name] = number
        found.append(wanted)
    return found
