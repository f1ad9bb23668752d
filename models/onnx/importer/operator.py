"""Operators in the tables of `ops`, their calls, and arithmetic on known integers.

Sizes from Shape and arithmetic on them are kept as integers, so that no shapes have to be read from tensors.
Under torch.export they are symbols, so that a dynamic batch size stays dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.models.onnx.importer.graph import Graph, GraphNode
from torchrelay.records import dataclass

MAX_KNOWN = 4096
"""Largest integer constant, in elements, that is also kept as integers."""


@dataclass(frozen=True, eq=False)
class Ints:
    """A vector of 64-bit integers, or with `scalar` a single one."""

    values: tuple[Any, ...]
    scalar: bool = False

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Convert to a tensor; symbols stay symbols."""
        if all(type(one) is int for one in self.values):
            found = torch.tensor(self.values, dtype=torch.int64, device=device)
        else:
            one_by_one = [torch.full((), one, dtype=torch.int64, device=device) for one in self.values]
            found = torch.stack(one_by_one)
        return found.reshape(()) if self.scalar else found


def known_ints(tensor: torch.Tensor) -> Ints | None:
    """Read a small tensor of at most one dimension as integers; None for others."""
    bytes_ = tensor.dtype in (torch.int8, torch.uint8, torch.bool)
    if bytes_ or tensor.dim() > 1 or tensor.numel() > MAX_KNOWN:
        return None
    return Ints(tuple(tensor.reshape(-1).tolist()), tensor.dim() == 0)


def as_numbers(value: Any) -> list[Any] | None:
    """Convert an input of factors to a flat list of floats."""
    if value is None:
        return None
    return list(value.values if isinstance(value, Ints) else value.reshape(-1).tolist())


def as_ints(value: Any) -> list[Any] | None:
    """Convert an input of sizes, axes or indices to a flat list of integers."""
    found = as_numbers(value)
    return found if found is None or isinstance(value, Ints) else [int(one) for one in found]


def _pairwise(compute: Callable[[Any, Any], Any]) -> Callable[..., Ints | None]:
    def run(attributes: dict[str, Any], one: Ints, other: Ints) -> Ints | None:
        size = max(len(one.values), len(other.values))
        if not {len(one.values), len(other.values)} <= {1, size}:
            return None
        ones, others = (side.values * (size if len(side.values) == 1 else 1) for side in (one, other))
        return Ints(tuple(map(compute, ones, others)), one.scalar and other.scalar)

    return run


def _divided(one: Any, other: Any) -> Any:
    if type(one) is int and type(other) is int:
        return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    return one // other


def _gather(attributes: dict[str, Any], data: Ints, places: Ints) -> Ints | None:
    known, size = data.values, len(data.values)
    inside = all(type(place) is int and -size <= place < size for place in places.values)
    return Ints(tuple(known[place] for place in places.values), places.scalar) if inside else None


def _slice(attributes: dict[str, Any], data: Ints, *where: Ints) -> Ints | None:
    if "starts" in attributes or any(type(one) is not int for part in where for one in part.values):
        return None
    if any(len(part.values) != 1 for part in where) or {*(one.values for one in where[2:3])} - {(0,), (-1,)}:
        return None
    step = where[3].values[0] if len(where) > 3 else 1
    begin, end = where[0].values[0], where[1].values[0]
    if step < 0 and end < -len(data.values):
        end = None
    return Ints(data.values[begin:end:step])


def _product(attributes: dict[str, Any], data: Ints, *_: Ints) -> Ints:
    return Ints((math.prod(data.values),), scalar=not attributes.get("keepdims", 1))


def _reshape(attributes: dict[str, Any], data: Ints, shape: Ints) -> Ints | None:
    if len(shape.values) == 1 and shape.values[0] in (-1, len(data.values)):
        return Ints(data.values)
    return Ints(data.values, scalar=True) if not shape.values and len(data.values) == 1 else None


_ON_INTS: dict[str, Callable[..., Ints | None]] = {
    "Add": _pairwise(lambda one, other: one + other),
    "Sub": _pairwise(lambda one, other: one - other),
    "Mul": _pairwise(lambda one, other: one * other),
    "Div": _pairwise(_divided),
    "Gather": _gather,
    "Concat": lambda said, *parts: Ints(tuple(one for part in parts for one in part.values)),
    "Slice": _slice,
    "Identity": lambda said, data: data,
    "Cast": lambda said, data: data if said.get("to") == 7 else None,
    "Unsqueeze": lambda said, data, *_: Ints(data.values) if data.scalar else None,
    "Squeeze": lambda said, data, *_: Ints(data.values, scalar=True) if len(data.values) == 1 else None,
    "ReduceProd": _product,
    "Reshape": _reshape,
}


def on_ints(operator: str, attributes: dict[str, Any], inputs: Sequence[Any]) -> Ints | None:
    """Compute an operator on known integers; None if it needs tensors."""
    compute = _ON_INTS.get(operator)
    if compute is None or not all(isinstance(one, Ints) for one in inputs):
        return None
    return compute(attributes, *inputs)


@dataclass(frozen=True)
class Operator:
    """An operator: `run(call, *inputs)` returns the output or a tuple; omitted inputs are None.

    Inputs at the positions `ints` (sizes, axes, indices) are passed as lists of integers, those at `numbers`
    as lists of floats. With `raw` all inputs are passed unchanged, including known integers.
    """

    run: Callable[..., Any]
    ints: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    raw: bool = False


@dataclass(frozen=True, eq=False)
class OpCall:
    """One run of an operator: its attributes, the mode of the module, and a function to run inner graphs.

    `own` are the positions of inputs that are initializers, `fixed` also those of constants.
    """

    node: GraphNode
    training: bool
    device: torch.device
    own: frozenset[int]
    fixed: frozenset[int]
    enter: Callable[[Graph, Mapping[str, Any]], tuple[Any, ...]]

    @property
    def version(self) -> int:
        """Version of the operator set."""
        return self.node.version

    @property
    def outputs(self) -> int:
        """Number of named outputs."""
        return max((at + 1 for at, name in enumerate(self.node.outputs) if name), default=0)

    def gives(self, at: int) -> bool:
        """Return True if the output at this position has a name."""
        return at < len(self.node.outputs) and bool(self.node.outputs[at])

    def has(self, name: str) -> bool:
        """Return True if the attribute is given."""
        return name in self.node.attributes

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or its default in the standard."""
        return self.node.attributes.get(name, default)

    def need(self, name: str) -> Any:
        """Return the attribute; raises UsageError if it is missing."""
        if name not in self.node.attributes:
            raise UsageError(f"{self.node} lacks the attribute {name!r}")
        return self.node.attributes[name]

    def graph(self, name: str) -> Graph:
        """Return the inner graph with this name."""
        found = self.need(name)
        if not isinstance(found, Graph):
            raise UsageError(f"{self.node} has no graph {name!r}")
        return found

    def tensor(self, value: Any) -> Any:
        """Convert a value that may be known integers to a tensor."""
        return value.tensor(self.device) if isinstance(value, Ints) else value

    def fail(self, why: str) -> UsageError:
        """Return the error for an unsupported use of this operator."""
        return UsageError(f"{self.node}: {why}")
