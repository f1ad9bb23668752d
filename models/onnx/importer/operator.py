"""An operator as the tables of `ops` have it, and what it is given: inputs, integers that are known.

Shape gives such integers, and arithmetic on them stays here, so that neither running nor exporting again has
to read shapes out of tensors: under torch.export they are symbols, and a batch that may vary stays one that
may.
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
"""Elements up to which an integer constant is also kept outside of its tensor."""


@dataclass(frozen=True, eq=False)
class Ints:
    """A vector of 64-bit integers, or one number where `scalar`."""

    values: tuple[Any, ...]
    scalar: bool = False

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The same as a tensor; symbols stay symbols."""
        if all(type(one) is int for one in self.values):
            found = torch.tensor(self.values, dtype=torch.int64, device=device)
        else:
            one_by_one = [torch.full((), one, dtype=torch.int64, device=device) for one in self.values]
            found = torch.stack(one_by_one)
        return found.reshape(()) if self.scalar else found


def known_ints(tensor: torch.Tensor) -> Ints | None:
    """The content of a small tensor of at most one dimension, read from the device; else None."""
    bytes_ = tensor.dtype in (torch.int8, torch.uint8, torch.bool)
    if bytes_ or tensor.dim() > 1 or tensor.numel() > MAX_KNOWN:
        return None
    return Ints(tuple(tensor.reshape(-1).tolist()), tensor.dim() == 0)


def as_numbers(value: Any) -> list[Any] | None:
    """What an input that means factors or shares says, as a flat list."""
    if value is None:
        return None
    return list(value.values if isinstance(value, Ints) else value.reshape(-1).tolist())


def as_ints(value: Any) -> list[Any] | None:
    """What an input that means sizes, axes or places says, as a flat list."""
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
    """The result of an operator whose inputs are known; None where it has to be computed on tensors."""
    compute = _ON_INTS.get(operator)
    if compute is None or not all(isinstance(one, Ints) for one in inputs):
        return None
    return compute(attributes, *inputs)


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
class OpCall:
    """One run of one operator: its attributes, the mode of the module, a way to run graphs inside of it.

    `own` are the positions of inputs that are initializers, `fixed` those and of constants.
    """

    node: GraphNode
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
