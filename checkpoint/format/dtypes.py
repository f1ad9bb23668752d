"""Define element types, digests of stored bytes, and access to tensors' memory.

The logical type is torch's name (`bfloat16`). Types without a safetensors code of the same shape (complex128,
complex32, the sub-byte types) are stored as U8 with the logical type beside it. Quantised types cannot be
stored: their scales are outside of the elements. Digests are not cryptographic: they detect damage, not
forgery. An empty tensor has no block.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

import xxhash

from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import BlobError, FormatError
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch


RAW = "U8"
"""The code of raw bytes."""


@dataclass(frozen=True)
class ElementType:
    """A torch dtype by `name`, its safetensors `code` and the bytes of one element."""

    name: str
    code: str
    itemsize: int

    @property
    def raw(self) -> bool:
        """Whether elements are stored as plain bytes, with the logical type in the metadata."""
        return self.code == RAW and self.name != "uint8"

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape as stored: raw elements of several bytes get a last dimension of these bytes."""
        return (*shape, self.itemsize) if self.raw and self.itemsize > 1 else shape

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this type and logical shape."""
        return math.prod(shape) * self.itemsize


_NATIVE = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
}
# safetensors counts two elements per byte in F4, torch counts bytes: raw keeps torch's shape.
_RAW_BYTES = (
    *("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"),
    *(f"uint{bits}" for bits in range(1, 8)),
    *(f"int{bits}" for bits in range(1, 8)),
)
_RAW = {"complex128": 16, "complex32": 4, "bits16": 2, **dict.fromkeys(_RAW_BYTES, 1)}

_BY_NAME = {
    **{name: ElementType(name, code, size) for name, (code, size) in _NATIVE.items()},
    **{name: ElementType(name, RAW, size) for name, size in _RAW.items()},
}
_BY_CODE = {kind.code: kind for kind in _BY_NAME.values() if not kind.raw}


def by_name(name: str) -> ElementType:
    """The element type with torch's name; raises FormatError for an unknown one."""
    if name not in _BY_NAME:
        raise FormatError(f"element type {name!r} is unknown to this torchrelay: use a newer one")
    return _BY_NAME[name]


def by_code(code: str) -> ElementType:
    """The element type of a safetensors code; raises FormatError for an unknown one."""
    if code not in _BY_CODE:
        raise FormatError(f"safetensors type {code!r} is unknown to this torchrelay: use a newer one")
    return _BY_CODE[code]


@lru_cache(maxsize=64)
def logical_name(dtype: torch.dtype) -> str:
    """The logical name of a torch dtype; raises BlobError if it cannot be stored."""
    text = str(dtype).removeprefix("torch.")
    text = "uint1" if text == "bit" else text
    if text not in _BY_NAME:
        raise BlobError(f"tensors of {dtype} cannot be stored; convert it first")
    return text


@lru_cache(maxsize=64)
def is_storable(dtype: torch.dtype) -> bool:
    """Whether tensors of this type have a stored form."""
    try:
        return bool(logical_name(dtype))
    except BlobError:
        return False


def logical_dtype(dtype: torch.dtype, name: str) -> ElementType:
    """The element type of a torch dtype; raises BlobError naming the leaf if it cannot be stored."""
    try:
        return _BY_NAME[logical_name(dtype)]
    except BlobError as error:
        raise BlobError(f"{name}: {error}") from None


@lru_cache
def torch_dtype(kind: ElementType) -> torch.dtype:
    """The torch dtype of an element type; raises FormatError if this torch lacks it."""
    import torch

    found = getattr(torch, kind.name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no element type {kind.name}: use a newer one")
    return found


def stored_bytes(tensor: torch.Tensor, name: str) -> memoryview:
    """The bytes of a tensor in stored form: 1-D, row-major, on the CPU.

    A contiguous CPU tensor is not copied: the view shares its memory and keeps it alive. Raises BlobError,
    naming the leaf, for tensors that are not one dense block of elements.
    """
    check_dense(tensor, name)
    logical_dtype(tensor.dtype, name)
    plain = as_copied(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous()
    return memory_of(plain)


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can copy, which it cannot for sub-byte integers."""
    import torch

    return tensor.view(torch.uint8) if str(tensor.dtype).removeprefix("torch.") in _RAW_BYTES else tensor


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable 1-D bytes; the view keeps it alive."""
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError("only a contiguous, resolved CPU tensor has its bytes in one piece of memory")
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]  # the view holds `memory`, which holds the tensor
    return memoryview(memory).cast("B")


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Raise BlobError for tensors whose bytes are not one dense block of elements in memory."""
    import torch

    if tensor.is_meta:
        raise BlobError(f"{name} is a meta tensor without content: materialise it (to_empty) first")
    if tensor.is_quantized:
        raise BlobError(f"{name} is quantised; save dequantize() of it, or int_repr() and its scales")
    if tensor.is_nested:
        raise BlobError(f"{name} is a nested tensor; save its values() and offsets()")
    if tensor.layout is not torch.strided:
        remedy = "to_dense() of it" if str(tensor.layout) == "torch._mkldnn" else "its indices() and values()"
        raise BlobError(f"{name} has layout {tensor.layout}; save {remedy}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        remedy = "make it outside of FakeTensorMode" if kind == "FakeTensor" else "save its inner tensors"
        raise BlobError(f"{name} is a {kind}, not a plain tensor; {remedy}")
    if not has_memory(tensor):
        raise BlobError(
            f"{name} has no memory: its storage was freed, or it belongs to a transformation of "
            "torch.func; pass a tensor with content"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor, if any, have memory."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


NAME = "xxh3-128"
BLOCK = 1 << 20
SIZE = 16
"""Bytes per block and per digest."""


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str], alignment: int
) -> bytes:
    """Length and header of a file of tensors (name, code, shape, bytes), whose data are aligned."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, code, shape, nbytes in tensors:
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def block_count(nbytes: int) -> int:
    """The number of blocks of `nbytes` bytes; the last one may be shorter."""
    return -(-nbytes // BLOCK)


def first_blocks(sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of the first blocks of entries of these sizes, and the total number."""
    if min(sizes, default=0) > 0 and max(sizes) <= BLOCK:
        return range(len(sizes) + 1)
    return list(accumulate(map(block_count, sizes), initial=0))


def block_digests(view: memoryview) -> bytes:
    """The digests of 1-D bytes that begin at a block border, concatenated."""
    return b"".join([xxhash.xxh3_128_digest(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)])


def digests_of(blocks: Iterable[bytes | Memory]) -> bytes:
    """The digests of entries of at most one block each, concatenated; empty ones have none."""
    return b"".join(map(xxhash.xxh3_128_digest, filter(len, blocks)))


def first_damaged_block(view: memoryview, digests: bytes | memoryview) -> int | None:
    """The first of the whole blocks of `view` that differs from its digest; None if all are equal."""
    found = block_digests(view)
    if found == digests:
        return None
    if len(found) != len(digests):
        raise ValueError(f"{len(digests)} bytes of digests do not belong to {len(view)} bytes")
    edges = range(0, len(found), SIZE)
    return next(n for n, at in enumerate(edges) if found[at : at + SIZE] != digests[at : at + SIZE])


AT_ONCE = 1024


def all_dense(found: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are dense tensors with content, of no subclass and not quantised."""
    return (
        all_strided(found)
        and not any(map(attrgetter("is_quantized"), found))
        and not any(map(attrgetter("is_meta"), found))
    )


def all_strided(found: Sequence[object]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are strided tensors of no subclass, with or without content."""
    import torch

    return (
        set(map(type, found)) <= {torch.Tensor, torch.nn.Parameter}
        and not any(map(attrgetter("is_nested"), found))  # a nested one does not support the other checks
        and set(map(attrgetter("layout"), found)) <= {torch.strided}
    )


def all_in_order(dense: Sequence[torch.Tensor], some_complex: bool = True) -> bool:
    """Whether each is contiguous in CPU memory, without lazy conjugation or negation."""
    import torch

    return (
        all(map(attrgetter("is_cpu"), dense))
        and all(map(torch.Tensor.is_contiguous, dense))
        and not (some_complex and any(map(torch.Tensor.is_conj, dense)))
        and not any(map(torch.Tensor.is_neg, dense))
    )


def all_in_memory(strided: Sequence[torch.Tensor]) -> bool:
    """Whether the elements of each, if any, have memory."""
    import torch

    try:
        if all(map(torch.Tensor.data_ptr, strided)):
            return True
    except RuntimeError:
        return False
    return all(map(has_memory, strided))


def memories_at(addresses: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
    """Memory that the caller keeps alive."""
    kinds = {size: ctypes.c_ubyte * size for size in set(sizes)}
    return [kinds[size].from_address(address) for address, size in zip(addresses, sizes, strict=True)]


def item_bytes_of(shape: Sequence[int], nbytes: int) -> int:
    """Bytes of one element of a tensor."""
    count = math.prod(shape)
    return nbytes // count if count else 1
