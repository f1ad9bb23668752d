"""How a model's `forward` is called: examples of its arguments, and which of their sizes may differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.package.program import Argument
from torchrelay.checkpoint.package.trees import tree_of
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

BATCH = "batch"
Dynamic = Mapping[str, Mapping[int, str]]
"""Names of sizes that may differ, by input and dimension: {"tokens": {0: "batch", 1: "length"}}."""


@dataclass(frozen=True)
class Call:
    """How `forward` is called: example arguments, each under its name, and the tensors among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: tuple[Argument, ...]
    leaves: tuple[tuple[str, torch.Tensor], ...]


def call_of(model: nn.Module, inputs: Any) -> Call:
    """The call that `inputs` mean: a tensor, a tuple of positional arguments, or a dict by name.

    Raises UsageError where `forward` does not take them.
    """
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{type(model).__name__}.forward does not take these inputs: {error}") from None
    found: list[Argument] = []
    leaves: list[tuple[str, torch.Tensor]] = []
    for name, value, positional in _by_name(bound, len(args)):
        tree, own = tree_of(value, lambda one: isinstance(one, torch.Tensor), name)
        found.append(Argument(name, _shifted(tree, len(leaves)), positional))
        leaves.extend(own)
    return Call(args, kwargs, tuple(found), tuple(leaves))


def _by_name(bound: inspect.BoundArguments, positional: int) -> Iterator[tuple[str, Any, bool]]:
    at = 0
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for number, item in enumerate(value):
                yield f"{name}_{number}", item, True
                at += 1
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, item in value.items():
                yield key, item, False
        else:
            yield name, value, at < positional
            at += 1


def _shifted(tree: Any, by: int) -> Any:
    match tree:
        case {"leaf": at}:
            return {"leaf": at + by}
        case {"dict": pairs}:
            return {"dict": [[key, _shifted(item, by)] for key, item in pairs]}
        case {"list": items}:
            return {"list": [_shifted(item, by) for item in items]}
        case {"tuple": items}:
            return {"tuple": [_shifted(item, by) for item in items]}
    return tree


def dynamic_names(call: Call, dynamic: Dynamic | None) -> dict[str, dict[int, str]]:
    """The names of sizes that may differ, by tensor. By default the first, of all inputs that share it."""
    known = {name for name, _ in call.leaves}
    if dynamic is not None:
        if strange := sorted(set(dynamic) - known):
            raise UsageError(f"there is no input {strange[0]!r}; there are {', '.join(sorted(known))}")
        return {name: dict(sizes) for name, sizes in dynamic.items()}
    firsts = [(name, tensor.shape[0]) for name, tensor in call.leaves if tensor.dim()]
    return {name: {0: BATCH} for name, size in firsts if size == firsts[0][1]}


def mapped(value: Any, of_tensor: Any, *rest: Any) -> Any:
    """The same value with other tensors; `rest` may have what everything else becomes."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, of_tensor, *rest) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, of_tensor, *rest) for item in value)
    if isinstance(value, Mapping):
        return {key: mapped(item, of_tensor, *rest) for key, item in value.items()}
    return rest[0] if rest else value
