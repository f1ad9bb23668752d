"""TensorProto to tensors: sizes are proved against the bytes that are there before anything is allocated."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.onnx_in.element_types import (
    DTYPES,
    FLOAT4,
    FLOAT4_VALUES,
    NARROW_BITS,
    NARROW_INTS,
    STRING,
    dtype_of,
)
from torchrelay.checkpoint.onnx_in.external_data import external_bytes
from torchrelay.checkpoint.onnx_in.limits import MAX_RANK, check_made
from torchrelay.errors import DamagedError, UsageError

_EXTERNAL = 1
_TYPED = {1: "float_data", 11: "double_data", 7: "int64_data", 12: "uint64_data", 13: "uint64_data",
          14: "float_data", 15: "double_data"}  # fmt: skip
"""The field of the elements that are not raw; everything else is in int32_data."""


def stored_tensor(proto: Any, folder: Path | None = None) -> torch.Tensor:
    """The tensor of a TensorProto, on the CPU, in memory of its own.

    Raises UsageError for what cannot be (texts, negative sizes), DamagedError where the shape that is
    declared and the data that is there do not fit.
    """
    what = f"tensor {proto.name!r}"
    dtype_of(proto.data_type, what)
    shape = _shape(proto.dims, what)
    if sys.byteorder != "little":
        raise UsageError("ONNX files have little-endian tensors, and this machine is none")
    count = math.prod(shape)
    if proto.data_location == _EXTERNAL:
        return _unpacked(
            external_bytes(proto, folder, _nbytes(proto, count)), proto.data_type, count
        ).reshape(shape)
    if proto.HasField("raw_data"):
        _check_size(what, shape, len(proto.raw_data), _nbytes(proto, count))
        raw = torch.frombuffer(bytearray(proto.raw_data), dtype=torch.uint8) if count else torch.empty(0)
        return _unpacked(raw, proto.data_type, count).reshape(shape)
    return _typed(proto, what, shape, count)


def stored_sparse(proto: Any) -> torch.Tensor:
    """A SparseTensorProto, made dense."""
    what = f"sparse tensor {proto.values.name!r}"
    shape = _shape(proto.dims, what)
    check_made(what, shape)
    values, places = stored_tensor(proto.values), stored_tensor(proto.indices).long()
    if places.dim() == 2:
        if places.shape[1] != len(shape):
            raise DamagedError(f"{what} has places of {places.shape[1]} numbers for {len(shape)} dimensions")
        strides = torch.tensor([math.prod(shape[at + 1 :]) for at in range(len(shape))])
        if bool((places >= torch.tensor(shape)).any()) or bool((places < 0).any()):
            raise DamagedError(f"{what} has places outside of its shape")
        places = (places * strides).sum(1)
    if places.numel() != values.numel() or bool(((places < 0) | (places >= math.prod(shape))).any()):
        raise DamagedError(f"{what} has places outside of its shape, or not one for each value")
    dense = torch.zeros(math.prod(shape), dtype=values.dtype)
    dense[places] = values
    return dense.reshape(shape)


def stored_texts(proto: Any) -> tuple[str, ...]:
    """The texts of a TensorProto of texts."""
    return tuple(one.decode("utf-8", "replace") for one in proto.string_data)


def is_texts(proto: Any) -> bool:
    """Whether it has texts."""
    return bool(proto.data_type == STRING)


def _shape(dims: Sequence[int], what: str) -> tuple[int, ...]:
    shape = tuple(int(one) for one in dims)
    if len(shape) > MAX_RANK or any(one < 0 for one in shape):
        raise UsageError(f"{what} declares the shape {shape[:8]}: no tensor has that")
    return shape


def _nbytes(proto: Any, count: int) -> int:
    number = proto.data_type
    if number in NARROW_BITS:
        return (count * NARROW_BITS[number] + 7) // 8
    return int(count * DTYPES[number].itemsize)


def _check_size(what: str, shape: Sequence[int], found: int, wanted: int) -> None:
    if found != wanted:
        raise DamagedError(f"{what} declares the shape {tuple(shape)}, {wanted} bytes, and has {found}")


def _unpacked(raw: torch.Tensor, number: int, count: int) -> torch.Tensor:
    if number not in NARROW_BITS:
        return raw.view(DTYPES[number]) if count else torch.empty(0, dtype=DTYPES[number])
    bits = NARROW_BITS[number]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts = ((raw.to(torch.uint8)[:, None] >> shifts) & (2**bits - 1)).reshape(-1)[:count]
    return narrow_values(parts, number)


def narrow_values(codes: torch.Tensor, number: int) -> torch.Tensor:
    """What the bits of numbers narrower than 8 bits mean."""
    if number == FLOAT4:
        table = torch.tensor([*FLOAT4_VALUES, *(-one for one in FLOAT4_VALUES)])
        return table[codes.long()]
    low, high = NARROW_INTS[number]
    if low == 0:
        return codes.to(torch.uint8)
    signed = codes.to(torch.int8)
    return torch.where(signed > high, signed - (high - low + 1), signed)


def _typed(proto: Any, what: str, shape: tuple[int, ...], count: int) -> torch.Tensor:
    number = proto.data_type
    field = getattr(proto, _TYPED.get(number, "int32_data"))
    dtype = dtype_of(number, what)
    if number in NARROW_BITS:
        per = 8 // NARROW_BITS[number]
        _check_size(what, shape, len(field), -(-count // per))
        return _unpacked(torch.tensor(field, dtype=torch.int32).to(torch.uint8), number, count).reshape(shape)
    wanted = count * 2 if dtype.is_complex else count
    if len(field) != wanted:
        raise DamagedError(f"{what} declares the shape {shape}, {count} elements, and has {len(field)}")
    if dtype.is_complex:
        halves = torch.float32 if number == 14 else torch.float64
        return torch.tensor(field, dtype=halves).view(dtype).reshape(shape)
    if dtype.is_floating_point and dtype not in (torch.float32, torch.float64):
        width = torch.int16 if dtype.itemsize == 2 else torch.uint8  # the bits stand in the integers
        return torch.tensor(field, dtype=torch.int32).to(width).view(dtype).reshape(shape)
    return torch.tensor(field, dtype=dtype).reshape(shape)
