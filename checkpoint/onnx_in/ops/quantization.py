"""Quantized numbers and products of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.element_types import DTYPES, NARROW_INTS, number_of
from torchrelay.checkpoint.onnx_in.ops.casting import cast
from torchrelay.checkpoint.onnx_in.ops.convolution import convolved

_WHOLE = (torch.uint8, torch.int8, torch.uint16, torch.int16)


def _spread(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    """Scales or zero points in a shape that fits `x`: one, one per row of an axis, or one per block."""
    if scale.dim() == 0 or (scale.dim() == 1 and scale.numel() == 1):
        return scale.reshape(())
    axis, block = call.get("axis", 1) % x.dim(), call.get("block_size", 0)
    if scale.dim() == 1 and not block:
        return scale.reshape([-1 if at == axis else 1 for at in range(x.dim())])
    size = block or -(-x.shape[axis] // scale.shape[axis])
    return scale.repeat_interleave(size, axis).narrow(axis, 0, x.shape[axis])


def _target(call: Call, zero: Tensor | None) -> int:
    if call.get("output_dtype", 0):
        return int(call.get("output_dtype"))
    if zero is None:
        return 2
    return call.node.narrow.get(2) or number_of(zero.dtype)


def _quantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    return quantized(call, x, scale, zero, _target(call, zero))


def quantized(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None, number: int) -> Tensor:
    """`x / scale + zero` as elements of the type with this number; too large is the greatest."""
    ratio = x.float() / _spread(call, x, scale).float()
    if number in NARROW_INTS or DTYPES.get(number) in _WHOLE:
        low, high = NARROW_INTS.get(number) or _bounds(DTYPES[number])
        shift = 0 if zero is None else _spread(call, x, zero).to(torch.int32)
        whole = (torch.round(ratio).clamp(-(2.0**30), 2.0**30).to(torch.int64) + shift).clamp(low, high)
        return cast(whole, number) if number in NARROW_INTS else whole.to(DTYPES[number])
    shifted = ratio if zero is None else ratio + _spread(call, x, zero.float())
    return cast(shifted, number, saturate=bool(call.get("saturate", 1)))


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    found = torch.iinfo(dtype)
    return int(found.min), int(found.max)


def _dequantize(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    wide = x.to(torch.int64).to(torch.float64) if not x.is_floating_point() else x.float()
    if zero is not None:
        wide = wide - _spread(call, x, zero.to(wide.dtype))
    number = call.get("output_dtype", 0)
    found = wide.to(torch.float32) * _spread(call, x, scale).float()
    return found.to(DTYPES[number] if number else scale.dtype)


def _dynamic(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round(-low / scale).clamp(0, 255)
    return torch.clamp(torch.round(x / scale) + zero, 0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


def _minus(x: Tensor, zero: Tensor | None, place: int) -> Tensor:
    """Integers without their zero point, as float64, in which sums of products of 8 bits are exact."""
    wide = x.to(torch.int64).to(torch.float64) if not x.is_floating_point() else x.to(torch.float64)
    if zero is None:
        return wide
    zero = zero.to(torch.float64)
    if zero.dim() == 1 and zero.numel() > 1 and place == 0:
        zero = zero[:, None]
    return wide - zero


def _matmul_integer(
    call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    return torch.matmul(_minus(a, a_zero, 0), _minus(b, b_zero, 1)).to(torch.int32)


def _conv_integer(
    call: Call, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    return convolved(call, _minus(x, x_zero, 1), _of_channels(w, w_zero)).to(torch.int32)


def _of_channels(w: Tensor, zero: Tensor | None) -> Tensor:
    wide = w.to(torch.float64)
    return wide if zero is None else wide - zero.to(torch.float64).reshape(-1, *(1,) * (w.dim() - 1))


def _requantized(call: Call, total: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if zero.dtype in _WHOLE:
        low, high = _bounds(zero.dtype)
        return (
            (torch.round(total / scale) + zero.to(torch.float64))
            .clamp(low, high)
            .to(torch.int64)
            .to(zero.dtype)
        )
    return cast((total / scale + zero.to(torch.float64)).float(), _target(call, zero))


def _q_matmul(
    call: Call, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor,
) -> Tensor:  # fmt: skip
    total = torch.matmul(_minus(a, a_zero, 0), _minus(b, b_zero, 1))
    rows = a_scale.double()[:, None] if a_scale.dim() == 1 and a_scale.numel() > 1 else a_scale.double()
    return _requantized(call, total * (rows * b_scale.double()), y_scale.double(), y_zero)


def _q_conv(
    call: Call, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = convolved(
        call, _minus(x, x_zero, 1), _of_channels(w, w_zero), None if bias is None else bias.double()
    )
    each = (
        w_scale.double().reshape(-1, *(1,) * (x.dim() - 2))
        if w_scale.numel() > 1
        else w_scale.double().reshape(())
    )
    return _requantized(call, total * (x_scale.double() * each), y_scale.double(), y_zero)


OPERATORS: dict[str, Any] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearMatMul": _q_matmul,
    "QLinearConv": _q_conv,
}
