"""What goes into a shard: tensors and pieces of them, as columns.

What costs time with very many small tensors is each object made for one, and each question to it. So a
part has no object for an entry: it has its keys, their forms, of which there are few, and their data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from torchrelay.checkpoint.disk import digest, dtypes
from torchrelay.checkpoint.disk.boxes import Bounds
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.lazily import lazily
from torchrelay.checkpoint.disk.names import (
    Box,
    Flat,
    Key,
    Whole,
    all_plain,
    encode_name,
    format_key,
    format_keys,
)
from torchrelay.errors import BlobError
from torchrelay.records import dataclass

Data = Any
"""torch.Tensor, or Memory of 1-D bytes; to say so would import torch."""
T = TypeVar("T")


class Form(NamedTuple):
    """What entries of one element type and stored shape have in common.

    `dtype` and `shape` are the logical ones of the piece, `text` is what the header says before the
    offsets, `raw` whether elements are stored as plain bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: int
    itemsize: int
    text: str
    raw: bool


@lru_cache(maxsize=1 << 14)
def form_of(dtype: str, shape: tuple[int, ...]) -> Form:
    """The form of whole leaves, or pieces, of this type and logical shape."""
    kind = dtypes.by_name(dtype)
    stored = ",".join(map(str, kind.stored_shape(shape)))
    text = f'{{"dtype":"{kind.code}","shape":[{stored}],"data_offsets":['
    nbytes = kind.nbytes(shape)
    return Form(dtype, tuple(shape), nbytes, digest.block_count(nbytes), kind.itemsize, text, kind.raw)


_DIMENSIONS = 64
"""Of more no form that a file claims is remembered: there may be millions."""


def form_said(dtype: str, shape: tuple[int, ...]) -> Form:
    """The same, where the shape is what a file says that nobody has proved."""
    return (form_of if len(shape) <= _DIMENSIONS else form_of.__wrapped__)(dtype, shape)


@dataclass(frozen=True)
class Entries:
    """Entries of a file, column by column: what each is called in the header, its form, and its data.

    `pieces` has, by key, what the metadata say of those whose header alone does not tell what they are.
    `in_memory` tells that data are nothing but memory, of exactly the size of each.
    """

    keys: Sequence[str]
    forms: Sequence[Form]
    data: Sequence[Data]
    pieces: Mapping[str, Json]
    in_memory: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @lazily
    def sizes(self) -> list[int]:
        """Bytes in the file, known without touching the data."""
        return [form.nbytes for form in self.forms]

    def of(self, data: Sequence[Data]) -> Entries:
        """The same entries with these data, of which there are as many."""
        if len(data) != len(self):
            raise ValueError(f"{len(data)} tensors for {len(self)} entries")
        return replace(self, data=data)

    def among(self, numbers: Sequence[int]) -> Entries:
        """The entries of these numbers, in this order."""
        keys = picked(self.keys, numbers)
        pieces = {key: self.pieces[key] for key in keys if key in self.pieces} if self.pieces else {}
        data = picked(self.data, numbers)
        return Entries(keys, picked(self.forms, numbers), data, pieces, self.in_memory)

    def ordered(self) -> Entries:
        """In stored order: item size descending, so that every tensor is aligned, then key."""
        numbers = sorted(range(len(self)), key=self.keys.__getitem__)
        if len({form.itemsize for form in self.forms}) > 1:
            numbers.sort(key=lambda number: -self.forms[number].itemsize)
        return self.among(numbers)


def picked(items: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    """The items of these numbers."""
    return itemgetter(*numbers)(items) if len(numbers) > 1 else tuple(items[number] for number in numbers)


def described(keys: Sequence[Key], types: Iterable[str], shapes: Sequence[tuple[int, ...]]) -> Entries:
    """The columns of tensors and pieces of leaves of these types and shapes, without data yet.

    Raises BlobError for a name that cannot be a key, or a piece of nothing.
    """
    texts = format_keys(keys)
    forms = list(map(form_of, types, map(piece_shape, keys, shapes)))
    odd = [form.raw or type(key) is not Whole for form, key in zip(forms, keys, strict=True)]
    pieces = {
        text: _piece(form, shape)
        for text, form, shape in compress(zip(texts, forms, shapes, strict=True), odd)
    }
    return Entries(texts, forms, (), pieces)


def whole_entries(
    names: Sequence[str], forms: Sequence[Form], data: Sequence[Data], *, in_memory: bool = False
) -> Entries:
    """The columns of leaves that are stored whole; raises BlobError for a name that cannot be a key."""
    keys = names if all_plain(names) else list(map(encode_name, names))
    raw = compress(zip(keys, forms, strict=True), [form.raw for form in forms])
    return Entries(keys, forms, data, {key: _piece(form, form.shape) for key, form in raw}, in_memory)


def _piece(form: Form, shape: tuple[int, ...]) -> dict[str, Json]:
    return {**({"dtype": form.dtype} if form.raw else {}), "shape": list(shape)}


def piece_shape(key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the piece `key` of a leaf of `shape` has; raises BlobError if it is no piece of it."""
    if isinstance(key, Flat):
        if key.stop > _count(shape):
            raise BlobError(f"{format_key(key)} ends beyond the {_count(shape)} elements of its leaf")
        return (key.stop - key.start,)
    if isinstance(key, Box):
        extents = _extents(key.intervals, shape)
        if extents is None:
            raise BlobError(f"{format_key(key)} is no box of a leaf of shape {list(shape)}")
        return extents
    return shape


@lru_cache(maxsize=1 << 10)
def _extents(box: Bounds, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Those of a box; None where it does not lie in the shape."""
    if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        return None
    return tuple(stop - start for start, stop in box)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
