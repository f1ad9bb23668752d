"""Casts, also to numbers that torch has no type for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.element_types import (
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
"""Types without an infinity: what is too large becomes NaN unless it saturates."""


def _cast(call: Call, x: Tensor) -> Tensor:
    return cast(
        x, call.need("to"), bool(call.get("saturate", 1)), call.get("round_mode", "up"), str(call.node)
    )


def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return cast(
        x,
        call.node.narrow.get(1) or number_of(like.dtype),
        bool(call.get("saturate", 1)),
        call.get("round_mode", "up"),
        str(call.node),
    )


def cast(
    x: Tensor, number: int, saturate: bool = True, round_mode: str = "up", what: str = "a cast"
) -> Tensor:
    """`x` as elements of the type with this number; narrow types as `element_types` says."""
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
    """Rounded to the nearest of the 15 values of float4e2m1, ties to the even code; kept in float32."""
    table = torch.tensor(FLOAT4_VALUES, device=x.device)
    middles = (table[1:] + table[:-1]) / 2
    size = x.abs()
    up = torch.bucketize(size, middles, right=True)  # a tie goes up here ...
    tie = (size.unsqueeze(-1) == middles).any(-1)
    code = torch.where(tie & (up % 2 == 1), up - 1, up)  # ... and down again where up is odd
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
    """A power of two: only the exponent is kept; zero becomes the least, the sign is lost."""
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


OPERATORS: dict[str, Any] = {"Cast": _cast, "CastLike": _cast_like}
