"""An operator as the tables of `ops` have it, and what its function is given besides its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.models.onnx.importer.graph import Graph, Node
from torchrelay.models.onnx.importer.host_ints import Ints
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Operator:
    """`run(call, *inputs)` gives the output, or a tuple of them; an input that is left out is None.

    Inputs at the positions `ints` mean sizes, axes or places: they are given as lists of numbers, those at
    `numbers` as lists of floats. With `raw`
    all inputs come as they are, integers that are known without a tensor included.
    """

    run: Callable[..., Any]
    ints: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    raw: bool = False


@dataclass(frozen=True, eq=False)
class Call:
    """One run of one operator: its attributes, the mode of the module, a way to run graphs inside of it.

    `own` are the positions of inputs that are initializers, `fixed` those and of constants.
    """

    node: Node
    training: bool
    device: torch.device
    own: frozenset[int]
    fixed: frozenset[int]
    enter: Callable[[Graph, Mapping[str, Any]], tuple[Any, ...]]

    @property
    def version(self) -> int:
        """The version of the operator set."""
        return self.node.version

    @property
    def outputs(self) -> int:
        """How many outputs have names."""
        return max((at + 1 for at, name in enumerate(self.node.outputs) if name), default=0)

    def gives(self, at: int) -> bool:
        """Whether the output at this place has a name."""
        return at < len(self.node.outputs) and bool(self.node.outputs[at])

    def has(self, name: str) -> bool:
        """Whether the attribute is there."""
        return name in self.node.attributes

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or what the standard says that it is where it is left out."""
        return self.node.attributes.get(name, default)

    def need(self, name: str) -> Any:
        """The attribute; UsageError where it is missing."""
        if name not in self.node.attributes:
            raise UsageError(f"{self.node} lacks the attribute {name!r}")
        return self.node.attributes[name]

    def graph(self, name: str) -> Graph:
        """The inner graph of this name."""
        found = self.need(name)
        if not isinstance(found, Graph):
            raise UsageError(f"{self.node} has no graph {name!r}")
        return found

    def tensor(self, value: Any) -> Any:
        """A tensor of what may be integers known without one."""
        return value.tensor(self.device) if isinstance(value, Ints) else value

    def fail(self, why: str) -> UsageError:
        """The error for what this operator cannot do."""
        return UsageError(f"{self.node}: {why}")
