"""Tensors out of shapes, ranges and random numbers.

Random numbers are torch's, whose state a checkpoint keeps, so that a resumed run goes on exactly. Seeds that
a file gives to single operators are not used: with them every step would draw the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.element_types import dtype_of
from torchrelay.checkpoint.onnx_in.host_ints import as_ints
from torchrelay.checkpoint.onnx_in.limits import check_made
from torchrelay.checkpoint.onnx_in.ops.operator import Operator


def _constant_of_shape(call: Call, shape: list[Any]) -> Tensor:
    check_made(str(call.node), shape)
    value = call.get("value", torch.zeros(1))
    return torch.full(shape, value.item(), dtype=value.dtype, device=call.device)


def _range(call: Call, start: Any, limit: Any, step: Any) -> Tensor:
    dtype = start.dtype if isinstance(start, Tensor) else torch.int64
    if dtype in (torch.int64, torch.int32, torch.int16):
        (first,), (end,), (by,) = (as_ints(one) or [0] for one in (start, limit, step))
        if by == 0:
            raise call.fail("a step of 0")
        if all(type(one) is int for one in (first, end, by)):
            check_made(str(call.node), [max(-(-(end - first) // by), 0)])
            if (end - first) * by <= 0:
                return torch.empty(0, dtype=dtype, device=call.device)
        return torch.arange(first, end, by, dtype=dtype, device=call.device)
    first, end, by = (float(one) for one in (start, limit, step))
    if by == 0 or not all(map(math.isfinite, (first, end, by))):
        raise call.fail("a step of 0, or bounds that are not finite")
    count = max(math.ceil((end - first) / by), 0)
    check_made(str(call.node), [count])
    return (first + by * torch.arange(count, device=call.device, dtype=torch.float64)).to(dtype)


def _eye_like(call: Call, x: Tensor) -> Tensor:
    dtype = dtype_of(call.get("dtype"), str(call.node)) if call.has("dtype") else x.dtype
    rows, columns = x.shape
    down = torch.arange(rows, device=x.device)[:, None]
    right = torch.arange(columns, device=x.device)[None]
    hit: Tensor = right - down == call.get("k", 0)
    return hit.to(dtype)


def _one_hot(call: Call, places: Tensor, depth: list[Any], values: Tensor) -> Tensor:
    axis, count = call.get("axis", -1), depth[0]
    check_made(str(call.node), [*places.shape, count])
    off, on = values[0], values[1]
    whole = torch.remainder(places.to(torch.int64), count)
    inside = (places >= -count) & (places < count)
    axis = axis + places.dim() + 1 if axis < 0 else axis
    shape = [1] * (places.dim() + 1)
    shape[axis] = count
    hit = (
        whole.unsqueeze(axis) == torch.arange(count, device=places.device).reshape(shape)
    ) & inside.unsqueeze(axis)
    return torch.where(hit, on, off)


def _dtype(call: Call, like: Tensor | None = None) -> torch.dtype:
    if call.has("dtype") or like is None:
        return dtype_of(call.get("dtype", 1), str(call.node))
    return like.dtype


def _random(kind: str, like: bool) -> Any:
    def run(call: Call, x: Tensor | None = None) -> Tensor:
        shape = tuple(x.shape) if like and x is not None else call.need("shape")
        check_made(str(call.node), shape)
        made = torch.empty(shape, dtype=_dtype(call, x), device=call.device)
        if kind == "normal":
            return made.normal_(call.get("mean", 0.0), call.get("scale", 1.0))
        return made.uniform_(call.get("low", 0.0), call.get("high", 1.0))

    return run


def _bernoulli(call: Call, x: Tensor) -> Tensor:
    return torch.bernoulli(x.float()).to(_dtype(call, x))


def _multinomial(call: Call, x: Tensor) -> Tensor:
    count = call.get("sample_size", 1)
    check_made(str(call.node), [x.shape[0], count])
    found = torch.multinomial(torch.softmax(x, -1), count, replacement=True)
    return found.to(dtype_of(call.get("dtype", 6), str(call.node)))


OPERATORS: dict[str, Any] = {
    "ConstantOfShape": Operator(_constant_of_shape, ints=(0,)),
    "Range": Operator(_range, raw=True),
    "EyeLike": _eye_like,
    "OneHot": Operator(_one_hot, ints=(1,)),
    "RandomNormal": _random("normal", like=False),
    "RandomNormalLike": _random("normal", like=True),
    "RandomUniform": _random("uniform", like=False),
    "RandomUniformLike": _random("uniform", like=True),
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
