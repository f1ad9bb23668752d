"""Products of matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.ops.unsigned import widened


def _matmul(call: Call, one: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(one, other)


def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if call.get("transA", 0) else a
    b = b.t() if call.get("transB", 0) else b
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if c is not None and c.dim() == 1 and alpha == beta == 1 and a.is_floating_point():
        return torch.nn.functional.linear(a, b.t(), c) if c.shape[0] == b.shape[1] else a @ b + c
    product = a @ b
    product = product if alpha == 1 else (product * alpha).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else (c * beta).to(a.dtype))


def _einsum(call: Call, *parts: Tensor) -> Tensor:
    return torch.einsum(call.need("equation"), *parts)


OPERATORS: dict[str, Any] = {
    "MatMul": widened(_matmul),
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Det": lambda call, x: torch.linalg.det(x),
}
