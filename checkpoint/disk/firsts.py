"""What very many rows have in common, each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
R = TypeVar("R")


def first_of_each(keys: Iterable[K], rows: Iterable[R]) -> dict[K, R]:
    """Every key of the rows with the first row that has it, in their order."""
    found: dict[K, R] = {}
    for key, row in zip(keys, rows, strict=True):
        if key not in found:
            found[key] = row
    return found
