"""Stored bytes as numbers, by numpy. Element types that numpy lacks are decoded by rule.

bfloat16 is the upper half of a float32; the float8 types are looked up in tables of 256 values. Types of
less than a byte, `bits*` and `float4_e2m1fn_x2` have no numbers here: they are compared by their bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torchrelay.checkpoint.inspection.numerics import np

Array = np.ndarray[Any, np.dtype[Any]]

_PLAIN = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "uint64": "<u8", "int32": "<i4",
    "uint32": "<u4", "int16": "<i2", "uint16": "<u2", "int8": "i1", "uint8": "u1", "bool": "u1",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
_EXPONENTS = {
    # bits of the exponent, bits of the fraction, bias
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}


def numbers(data: memoryview, dtype: str) -> Array:
    """Little-endian bytes as an array of the nearest type that numpy has; a copy only where it lacks it.

    `bool` comes as 0 and 1. Raises ValueError for a type that has no numbers.
    """
    if dtype in _PLAIN:
        return np.frombuffer(data, _PLAIN[dtype])
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "complex32":
        return np.frombuffer(data, "<f2").astype(np.float32).view(np.complex64)
    if dtype == "float8_e8m0fnu" or dtype in _EXPONENTS:
        return table(dtype)[np.frombuffer(data, np.uint8)]
    raise ValueError(f"{dtype} has no numbers")


@cache
def table(dtype: str) -> Array:
    """What each of the 256 codes of a float8 type stands for."""
    if dtype == "float8_e8m0fnu":
        found = [2.0 ** (code - 127) for code in range(255)] + [np.nan]
    else:
        found = [_decoded(code, dtype) for code in range(256)]
    return np.array(found, np.float32)


def _decoded(code: int, dtype: str) -> float:
    exponent_bits, fraction_bits, bias = _EXPONENTS[dtype]
    exponent = code >> fraction_bits & (1 << exponent_bits) - 1
    fraction = code & (1 << fraction_bits) - 1
    sign = -1.0 if code & 0x80 else 1.0
    if dtype.endswith("fnuz"):
        if code == 0x80:  # the place of a negative zero
            return np.nan
    elif dtype.endswith("fn"):
        if code & 0x7F == 0x7F:
            return np.nan
    elif exponent == (1 << exponent_bits) - 1:
        return np.nan if fraction else sign * np.inf
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias - fraction_bits))
    return float(sign * (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))
