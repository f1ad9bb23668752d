"""Operators on the bits of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.element_types import NARROW_BITS, dtype_of
from torchrelay.checkpoint.onnx_in.ops.unsigned import widened


def _shift(call: Call, x: Tensor, by: Tensor) -> Tensor:
    return x << by if call.need("direction") == "LEFT" else x >> by


def _shift_wide(call: Call, x: Tensor, by: Tensor) -> Tensor:
    wide = x.dtype == torch.uint64
    bits = x.view(torch.int64) if wide else x.to(torch.int64)
    turns = by.view(torch.int64) if wide else by.to(torch.int64)
    moved = _shift(call, bits, turns)
    if wide and call.need("direction") != "LEFT":
        moved = torch.where(turns > 0, moved & ~(torch.tensor(-1) << (64 - turns).clamp(max=63)), moved)
    return moved.view(torch.uint64) if wide else moved.to(x.dtype)


def _bit_cast(call: Call, x: Tensor) -> Tensor:
    number = call.need("to")
    if number in NARROW_BITS:
        raise call.fail("bits of numbers narrower than 8 bits are not packed here")
    dtype = dtype_of(number, str(call.node))
    if dtype.itemsize != x.dtype.itemsize:
        raise call.fail(f"{x.dtype} and {dtype} differ in size")
    return x.view(dtype)


OPERATORS: dict[str, Any] = {
    "BitShift": _shift_wide,
    "BitwiseAnd": widened(lambda call, one, other: one & other),
    "BitwiseOr": widened(lambda call, one, other: one | other),
    "BitwiseXor": widened(lambda call, one, other: one ^ other),
    "BitwiseNot": widened(lambda call, x: ~x),
    "BitCast": _bit_cast,
}
