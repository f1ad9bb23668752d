"""Casts, also to types that torch lacks; quantization and quantized products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.models.onnx.importer.executor import OpCall
from torchrelay.models.onnx.importer.ops.spatial import convolved
from torchrelay.models.onnx.importer.tensors import (
    DTYPES,
    FLOAT4,
    FLOAT4_VALUES,
    NARROW_INTS,
    dtype_of,
    number_of,
)

_FLOAT8 = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}
"""Greatest finite value."""
_FINITE_ONLY = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Types without infinity: values out of range become NaN unless they saturate."""


def _cast(call: OpCall, x: Tensor, like: Tensor | None = None) -> Tensor:
    number = call.need("to") if like is None else call.node.narrow.get(1) or number_of(like.dtype)
    return cast(x, number, bool(call.get("saturate", 1)), call.get("round_mode", "up"), str(call.node))


def cast(
    x: Tensor, number: int, saturate: bool = True, round_mode: str = "up", what: str = "a cast"
) -> Tensor:
    """Cast `x` to the element type with this number; see `tensors` for narrow types."""
    if number in NARROW_INTS:
        low, high = NARROW_INTS[number]
        whole = x.to(torch.int32) if not x.is_floating_point() else x.to(torch.float32).to(torch.int32)
        return (((whole - low) & (high - low)) + low).to(dtype_of(number, what))
    if number == FLOAT4:
        return to_float4(x.float())
    dtype = dtype_of(number, what)
    if dtype == torch.float8_e8m0fnu:
        return _to_e8m0(x.float(), saturate, round_mode)
    if dtype in _FLOAT8:
        return _to_float8(x.float(), dtype, saturate)
    if x.dtype in (*_FLOAT8, torch.float8_e8m0fnu):
        x = x.float()
    if x.is_floating_point() and dtype in (torch.uint16, torch.uint32, torch.uint64):
        return x.to(torch.int64).to(dtype)
    if x.is_complex() and not dtype.is_complex:
        x = x.real
    return x.to(dtype)


def to_float4(x: Tensor) -> Tensor:
    """Round to the nearest of the 15 values of float4e2m1, ties to the even code, in float32."""
    table = torch.tensor(FLOAT4_VALUES, device=x.device)
    middles = (table[1:] + table[:-1]) / 2
    size = x.abs()
    up = torch.bucketize(size, middles, right=True)  # round ties up ...
    tie = (size.unsqueeze(-1) == middles).any(-1)
    code = torch.where(tie & (up % 2 == 1), up - 1, up)  # ... and down again if up is odd
    value = torch.where(torch.isnan(x), torch.zeros_like(x), table[code])  # it has no NaN
    return torch.copysign(value, x)


def _to_float8(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    most = _FLOAT8[dtype]
    if saturate:
        return torch.where(torch.isnan(x), x, x.clamp(-most, most)).to(dtype)
    found = x.to(dtype)
    if dtype in _FINITE_ONLY:
        rounded = torch.where(x.abs() > most * (1 + 1 / 32), torch.nan, found.float())
        return torch.where(torch.isinf(x), torch.nan, rounded).to(dtype)
    return found


def _to_e8m0(x: Tensor, saturate: bool, round_mode: str) -> Tensor:
    """Round to a power of two without sign; zero becomes the smallest value."""
    bits = x.abs().view(torch.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    if round_mode == "up":
        more = (fraction > 0) & ((exponent > 0) | (fraction > 0x400000))
    elif round_mode == "nearest":
        more = (fraction & 0x400000 > 0) & ((fraction & 0x3FFFFF > 0) | (exponent & 1 > 0) | (exponent > 0))
    else:
        more = torch.zeros_like(fraction, dtype=torch.bool)
    code = exponent + more.to(torch.int32)
    code = torch.where(code > 254, 254 if saturate else 255, code)
    code = torch.where(torch.isnan(x), 255, code)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


_WHOLE = (torch.uint8, torch.int8, torch.uint16, torch.int16)


def _spread(call: OpCall, x: Tensor, scale: Tensor) -> Tensor:
    """Broadcast scales or zero points to `x`: one, one per row of an axis, or one per block."""
    if scale.dim() == 0 or (scale.dim() == 1 and scale.numel() == 1):
        return scale.reshape(())
    axis, block = call.get("axis", 1) % x.dim(), call.get("block_size", 0)
    if scale.dim() == 1 and not block:
        return scale.reshape([-1 if at == axis else 1 for at in range(x.dim())])
    size = block or -(-x.shape[axis] // scale.shape[axis])
    return scale.repeat_interleave(size, axis).narrow(axis, 0, x.shape[axis])


def _target(call: OpCall, zero: Tensor | None) -> int:
    if call.get("output_dtype", 0):
        return int(call.get("output_dtype"))
    if zero is None:
        return 2
    return call.node.narrow.get(2) or number_of(zero.dtype)


def _quantize(call: OpCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Compute `x / scale + zero` in the requested type, saturating."""
    number = _target(call, zero)
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


def _dequantize(call: OpCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    wide = x.to(torch.int64).to(torch.float64) if not x.is_floating_point() else x.float()
    if zero is not None:
        wide = wide - _spread(call, x, zero.to(wide.dtype))
    number = call.get("output_dtype", 0)
    found = wide.to(torch.float32) * _spread(call, x, scale).float()
    return found.to(DTYPES[number] if number else scale.dtype)


def _dynamic(call: OpCall, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round(-low / scale).clamp(0, 255)
    return torch.clamp(torch.round(x / scale) + zero, 0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


def _minus(x: Tensor, zero: Tensor | None, place: int) -> Tensor:
    """Subtract the zero point, in float64, in which sums of 8-bit products are exact."""
    wide = x.to(torch.int64).to(torch.float64) if not x.is_floating_point() else x.to(torch.float64)
    return wide if zero is None else wide - _rows(zero.to(torch.float64), place)


def _rows(each: Tensor, place: int) -> Tensor:
    """Reshape the left factor's values, which are one per row."""
    return each[:, None] if each.dim() == 1 and each.numel() > 1 and place == 0 else each


def _product(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    return torch.matmul(_minus(a, a_zero, 0), _minus(b, b_zero, 1))


def _conv_integer(
    call: OpCall, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    return convolved(call, _minus(x, x_zero, 1), _of_channels(w, w_zero)).to(torch.int32)


def _of_channels(w: Tensor, zero: Tensor | None) -> Tensor:
    wide = w.to(torch.float64)
    return wide if zero is None else wide - zero.to(torch.float64).reshape(-1, *(1,) * (w.dim() - 1))


def _requantized(call: OpCall, total: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if zero.dtype in _WHOLE:
        whole = torch.round(total / scale) + zero.to(torch.float64)
        return whole.clamp(*_bounds(zero.dtype)).to(torch.int64).to(zero.dtype)
    return cast((total / scale + zero.to(torch.float64)).float(), _target(call, zero))


def _q_matmul(
    call: OpCall, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor,
) -> Tensor:  # fmt: skip
    total = _product(a, b, a_zero, b_zero) * (_rows(a_scale.double(), 0) * b_scale.double())
    return _requantized(call, total, y_scale.double(), y_zero)


def _q_conv(
    call: OpCall, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wide = None if bias is None else bias.double()
    total = convolved(call, _minus(x, x_zero, 1), _of_channels(w, w_zero), wide)
    each = w_scale.double().reshape((-1, *(1,) * (x.dim() - 2)) if w_scale.numel() > 1 else ())
    return _requantized(call, total * (x_scale.double() * each), y_scale.double(), y_zero)


OPERATORS: dict[str, Any] = {
    "Cast": _cast,
    "CastLike": _cast,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": lambda call, *inputs: _product(*inputs).to(torch.int32),
    "ConvInteger": _conv_integer,
    "QLinearMatMul": _q_matmul,
    "QLinearConv": _q_conv,
}
