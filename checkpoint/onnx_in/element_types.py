"""Element types of ONNX and those of torch.

Numbers of less than 8 bits have no arithmetic in torch: two- and four-bit integers live in 8 bits, four-bit
and six-bit floats in float32, both with only the values that the narrow type has. Texts have no tensor at
all.
"""

from __future__ import annotations

import torch

from torchrelay.errors import UsageError

STRING = 8
DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    24: torch.float8_e8m0fnu,
}
"""By the number that TensorProto.DataType has."""
NARROW_INTS = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}
"""uint4, int4, uint2, int2: least and greatest value."""
FLOAT4 = 23
NARROW_BITS = {21: 4, 22: 4, 25: 2, 26: 2, FLOAT4: 4}
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of float4e2m1 mean; the fourth is the sign."""


def dtype_of(number: int, what: str) -> torch.dtype:
    """The type that tensors of this element type have here; UsageError, naming `what`, without one."""
    if number in NARROW_INTS:
        return torch.int8 if NARROW_INTS[number][0] < 0 else torch.uint8
    if number == FLOAT4:
        return torch.float32
    if number not in DTYPES:
        kind = "texts, for which torch has no tensors" if number == STRING else f"elements of type {number}"
        raise UsageError(f"{what} has {kind}: such a model cannot be imported")
    return DTYPES[number]


def number_of(dtype: torch.dtype) -> int:
    """The number of the element type of a tensor's type."""
    return next(number for number, one in DTYPES.items() if one == dtype)
