"""Which element types have numbers that can be computed with, and which of these can be NaN or Inf.

Apart from what computes, because it is asked before numpy is imported.
"""

from __future__ import annotations

_FLOATS = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_WHOLE = ("int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool")
CAN_BE_BAD = frozenset((*_FLOATS, *_FLOAT8))
"""Types with a NaN; of these all but most of the float8 types have an Inf, too."""
HAVE_NUMBERS = CAN_BE_BAD | frozenset(_WHOLE)
"""All others (less than a byte, `bits*`, `float4_e2m1fn_x2`) are compared by their bytes alone."""
