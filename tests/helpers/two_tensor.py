"""A wrapper subclass of two inner tensors and a context, and other kinds of subclasses."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class TwoTensor(torch.Tensor):
    """Computes with both inner tensors; `group` is context that a load must find alike."""

    a: torch.Tensor
    b: torch.Tensor
    group: int

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor, group: int = 4) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype)

    def __init__(self, a: torch.Tensor, b: torch.Tensor, group: int = 4) -> None:
        self.a, self.b, self.group = a, b, group

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], {"group": self.group, "kind": torch.float32}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> TwoTensor:
        return TwoTensor(inner["a"], inner["b"], context["group"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def part(name: str) -> Any:
            return lambda one: getattr(one, name) if isinstance(one, TwoTensor) else one

        groups = [one.group for one in args if isinstance(one, TwoTensor)] or [4]
        a = func(*tree_map(part("a"), args), **tree_map(part("a"), kwargs or {}))
        b = func(*tree_map(part("b"), args), **tree_map(part("b"), kwargs or {}))
        if func.overloadpacket.__name__.endswith("_") and isinstance(args[0], TwoTensor):
            return args[0]
        if isinstance(a, torch.Tensor):
            return TwoTensor(a, b, groups[0])
        if isinstance(a, (list, tuple)):
            return type(a)(TwoTensor(x, y, groups[0]) for x, y in zip(a, b, strict=True))
        return a


class Tagged(torch.Tensor):
    """Adds a type to plain memory."""


class TaggedParameter(torch.nn.Parameter):
    """Adds a type to a parameter."""


def two(seed: int, shape: tuple[int, ...] = (3, 4), group: int = 4) -> TwoTensor:
    """A TwoTensor of seeded content."""
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), group)
