"""A model as it is run: operators in order, the values between them, nothing of protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import torch

from torchrelay.jobs.runtime import Signature
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class Node:
    """One operator; an input or output that is left out has an empty name.

    `attributes` are numbers, texts, tuples of these, CPU tensors and graphs. `version` is the operator set's.
    """

    operator: str
    domain: str
    version: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    narrow: Mapping[int, int] = field(default_factory=dict)
    """Input position -> element type, where the file declares one that torch has not."""

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.operator}" if self.domain else self.operator
        first = next((one for one in self.outputs if one), "")
        return f"{kind} {self.name!r}" if self.name else f"{kind} (which makes {first!r})"

    @property
    def kind(self) -> tuple[str, str]:
        """Domain and operator."""
        return self.domain, self.operator


@dataclass(frozen=True, eq=False)
class Graph:
    """Operators so ordered that each comes after those whose values it takes.

    `stored` maps the names of values that the file holds to where they lie in the module: initializers under
    their state dict key, constants under a number. `captured` are names of the graphs around this one.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    initializers: Mapping[str, str]
    constants: Mapping[str, int]
    captured: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self  # nothing of it changes, so copies of a module share it


@dataclass(frozen=True, eq=False)
class Content:
    """What a file says: the main graph, the tensors that it stores, what it takes and gives."""

    graph: Graph
    initializers: Mapping[str, torch.Tensor]
    constants: tuple[torch.Tensor, ...]
    signature: Signature
    uses: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict)
    """State dict key -> (operator, input position) of all who take that initializer."""
