"""How many processes a launch has: nodes times processes per node."""

from __future__ import annotations

import re

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

_FORM = re.compile(r"(?:([1-9][0-9]{0,5})x)?([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Layout:
    """`nodes` hosts with `per_node` ranks each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """All of them: the world size."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


def layout_of(text: str) -> Layout:
    """`2x8` is two nodes of eight ranks, `8` one node of eight; raises UsageError for anything else."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(
            f"-j {text!r} is no layout: give NODESxRANKS_PER_NODE such as 2x8, or one number for one node"
        )
    return Layout(int(found[1] or 1), int(found[2]))
