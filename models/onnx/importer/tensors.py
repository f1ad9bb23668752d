"""Tensors of an ONNX file and its external data, and limits that are checked before anything is allocated.

- External data must be in a regular file within the folder of the model, after resolving links.
- torch has no arithmetic for less than 8 bits: 2- and 4-bit integers are stored in 8 bits, 4- and 6-bit
  floats in float32, with only the values of the narrow type. Tensors of texts are not supported.
- A small file can declare a tensor of a petabyte or an endless loop, so sizes, nesting and iterations are
  limited. A program may raise a limit by assigning the module's variable, such as `tensors.MAX_NODES`.
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import DamagedError, StorageError, UsageError

MAX_ELEMENTS = 2**30
"""Most elements of a tensor that an operator creates from a shape."""
MAX_TURNS = 2**20
"""Most iterations of a Loop."""
MAX_ENTERED = 2**22
"""Most runs of inner graphs in one call of a model."""
MAX_DEPTH = 16
"""Deepest nesting of graphs."""
MAX_NODES = 2**18
"""Most operators of a model with its functions expanded."""
MAX_RANK = 64


def check_made(what: str, shape: Sequence[Any]) -> None:
    """Raise UsageError for a shape with more than MAX_ELEMENTS elements; traced sizes are not checked."""
    known = [size for size in shape if type(size) is int]
    if any(size < 0 for size in known):
        raise UsageError(f"{what} requests a tensor of shape {tuple(shape)}, with a negative size")
    if math.prod(known) > MAX_ELEMENTS:
        raise UsageError(
            f"{what} requests a tensor of shape {tuple(shape)}, more than {MAX_ELEMENTS} elements: "
            "if the file is trustworthy, raise "
            "torchrelay.models.onnx.importer.tensors.MAX_ELEMENTS"
        )


def check_turns(what: str, turns: int) -> None:
    """Raise UsageError for more than MAX_TURNS iterations of a loop."""
    if turns > MAX_TURNS:
        raise UsageError(f"{what} exceeded the limit of {MAX_TURNS} iterations")


def _inside(folder: Path, location: str, what: str) -> Path:
    root = Path(os.path.realpath(folder))
    given = Path(location)
    if not location or "\0" in location or "\\" in location or given.is_absolute() or ".." in given.parts:
        raise UsageError(
            f"{what} has the invalid location {location!r}: expected a path inside the model's folder"
        )
    path = Path(os.path.realpath(root / given))
    if not path.is_relative_to(root):
        raise UsageError(f"{what} has the location {location!r}, which leads out of {root}")
    return path


def _number(said: dict[str, str], key: str, what: str, default: int) -> int:
    text = said.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(f"{what} has {key} {text[:40]!r} in its external data: expected a number of bytes")
    return int(text)


def _read(path: Path, offset: int, nbytes: int, what: str) -> torch.Tensor:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{what} is in {path}, which cannot be opened: {error.strerror}") from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise UsageError(f"{what} is in {path}, which is not a regular file")
    with open(file, "rb") as opened:
        if offset + nbytes > found.st_size:
            raise DamagedError(
                f"{what} needs bytes {offset} to {offset + nbytes} of {path}, which has {found.st_size}"
            )
        content = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(content.numpy())  # type: ignore[arg-type]
        opened.seek(offset)
        done = opened.readinto(view)
        if done < nbytes:
            raise DamagedError(f"{what}: {path} ended after {offset + done} bytes")
    return content


STRING = 8
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32,
    7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64,
    14: torch.complex64, 15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz, 19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip
"""Types by their number in TensorProto.DataType."""
NARROW_INTS = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}
"""Smallest and largest values of uint4, int4, uint2, int2."""
FLOAT4 = 23
NARROW_BITS = {21: 4, 22: 4, 25: 2, 26: 2, FLOAT4: 4}
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits of float4e2m1; the fourth is the sign."""


def dtype_of(number: int, what: str) -> torch.dtype:
    """Return the torch type for an element type; raises UsageError, which names `what`, if unsupported."""
    if number in NARROW_INTS:
        return torch.int8 if NARROW_INTS[number][0] < 0 else torch.uint8
    if number == FLOAT4:
        return torch.float32
    if number not in DTYPES:
        kind = (
            "texts, which torch tensors do not support" if number == STRING else f"elements of type {number}"
        )
        raise UsageError(f"{what} has {kind}, which is not supported")
    return DTYPES[number]


def number_of(dtype: torch.dtype) -> int:
    """Return the number of the element type for a torch type."""
    return next(number for number, one in DTYPES.items() if one == dtype)


_EXTERNAL = 1
_TYPED = {1: "float_data", 11: "double_data", 7: "int64_data", 12: "uint64_data", 13: "uint64_data",
          14: "float_data", 15: "double_data"}  # fmt: skip
"""Field of typed elements; all other types use int32_data."""


def stored_tensor(proto: Any, folder: Path | None = None) -> torch.Tensor:
    """Read a TensorProto to a new CPU tensor; UsageError if unsupported, DamagedError for other sizes."""
    what = f"tensor {proto.name!r}"
    dtype_of(proto.data_type, what)
    shape = _shape(proto.dims, what)
    if sys.byteorder != "little":
        raise UsageError("ONNX files have little-endian tensors, but this machine is big-endian")
    count = math.prod(shape)
    if proto.data_location == _EXTERNAL:
        nbytes = _nbytes(proto, count)
        said = {entry.key: entry.value for entry in proto.external_data}
        if folder is None:
            raise UsageError(f"{what} is in an external file, {said.get('location')!r}: give folder=")
        path = _inside(folder, said.get("location", ""), what)
        offset, length = _number(said, "offset", what, 0), _number(said, "length", what, nbytes)
        if length != nbytes:
            raise DamagedError(f"{what} needs {nbytes} bytes, but the model declares {length} in {path}")
        raw = _read(path, offset, nbytes, what)
    elif proto.HasField("raw_data"):
        _check_size(what, shape, len(proto.raw_data), _nbytes(proto, count))
        raw = torch.frombuffer(bytearray(proto.raw_data), dtype=torch.uint8) if count else torch.empty(0)
    else:
        raw = _typed(proto, what, shape, count)
    return _unpacked(raw, proto.data_type, count).reshape(shape)


def stored_sparse(proto: Any) -> torch.Tensor:
    """Convert a SparseTensorProto to a dense tensor."""
    what = f"sparse tensor {proto.values.name!r}"
    shape = _shape(proto.dims, what)
    check_made(what, shape)
    values, places = stored_tensor(proto.values), stored_tensor(proto.indices).long()
    if places.dim() == 2:
        if places.shape[1] != len(shape):
            raise DamagedError(f"{what} has indices of {places.shape[1]} numbers for {len(shape)} dimensions")
        strides = torch.tensor([math.prod(shape[at + 1 :]) for at in range(len(shape))])
        if bool((places >= torch.tensor(shape)).any()) or bool((places < 0).any()):
            raise DamagedError(f"{what} has indices outside of its shape")
        places = (places * strides).sum(1)
    if places.numel() != values.numel() or bool(((places < 0) | (places >= math.prod(shape))).any()):
        raise DamagedError(f"{what} has indices outside of its shape, or not one per value")
    dense = torch.zeros(math.prod(shape), dtype=values.dtype)
    dense[places] = values
    return dense.reshape(shape)


def _shape(dims: Sequence[int], what: str) -> tuple[int, ...]:
    shape = tuple(int(one) for one in dims)
    if len(shape) > MAX_RANK or any(one < 0 for one in shape):
        raise UsageError(f"{what} declares the invalid shape {shape[:8]}")
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
    codes: torch.Tensor = ((raw.to(torch.uint8)[:, None] >> shifts) & (2**bits - 1)).reshape(-1)[:count]
    if number == FLOAT4:
        values = torch.tensor([*FLOAT4_VALUES, *(-one for one in FLOAT4_VALUES)])
        return values[codes.long()]
    low, high = NARROW_INTS[number]
    if low == 0:
        return codes.to(torch.uint8)
    signed: torch.Tensor = codes.to(torch.int8)
    return signed.where(signed <= high, signed - (high - low + 1))


def _typed(proto: Any, what: str, shape: tuple[int, ...], count: int) -> torch.Tensor:
    """Return the bytes of a tensor whose elements are numbers of a field."""
    number = proto.data_type
    field = getattr(proto, _TYPED.get(number, "int32_data"))
    dtype = DTYPES.get(number, torch.uint8)
    if number in NARROW_BITS:
        _check_size(what, shape, len(field), _nbytes(proto, count))
    elif len(field) != (count * 2 if dtype.is_complex else count):
        raise DamagedError(f"{what} declares the shape {shape}, {count} elements, and has {len(field)}")
    if number in NARROW_BITS or (dtype.is_floating_point and dtype.itemsize < 4):
        width = torch.int16 if dtype.itemsize == 2 else torch.uint8  # the integers contain the bits
        return torch.tensor(field, dtype=torch.int32).to(width).view(torch.uint8)
    halves = torch.float32 if number == 14 else torch.float64
    return torch.tensor(field, dtype=halves if dtype.is_complex else dtype).view(torch.uint8)
