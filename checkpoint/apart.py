"""A save whose hosts write to directories of their own."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Apart:
    """`ranks` write where this process does; the lowest makes the directories there.

    `committed` is called in every process when a position is.
    """

    ranks: tuple[int, ...]
    committed: Callable[[Entry], None]
