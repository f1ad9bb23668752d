"""Tensors in requests and answers: as batches, rows, JSON, or the bytes of a safetensors file.

The header is refused unless its entries lie one behind the other and fill the body: so no byte is read twice,
and no shape can promise more than was sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.dtypes import (
    ElementType,
    by_code,
    logical_dtype,
    safetensors_header,
    stored_bytes,
    torch_dtype,
)
from torchrelay.errors import BlobError, DamagedError, FormatError
from torchrelay.tools.serving.serve import FaultyAnswerError, wrong

Tree = Any
_TOO_LONG = 200


def _flat(tree: Tree) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and form; a mapping that torch does not know counts as a dict."""

    def known(leaf: Any) -> Any:
        return {name: known(one) for name, one in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_flatten(pytree.tree_map(known, tree))


def shape_of(tree: Tree) -> Hashable:
    """Equal for trees that can be stacked: structure, shapes and element types."""
    leaves, form = _flat(tree)
    kinds = ((tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else object() for one in leaves)
    return form, *kinds  # an object is like no other


def joined(trees: Sequence[Tree]) -> Tree:
    """Trees of equal structure as one, tensors joined along their first dimension; a single one as it is."""
    if len(trees) == 1:
        return trees[0]
    leaves, forms = zip(*map(_flat, trees), strict=True)
    return pytree.tree_unflatten([torch.cat(parts) for parts in zip(*leaves, strict=True)], forms[0])


def rows(tree: Tree, count: int) -> list[Tree]:
    """A tree per row, each a batch of one; raises ValueError where a tensor has not `count` rows."""
    if count == 1:
        return [tree]
    leaves, form = _flat(tree)
    for one in leaves:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"an output is {one!r:.60}: tensors with a row per sample can be batched")
        if one.ndim == 0 or one.shape[0] != count:
            raise ValueError(f"an output of shape {tuple(one.shape)} has no row for each of {count} samples")
    return [pytree.tree_unflatten([one[at : at + 1] for one in leaves], form) for at in range(count)]


def without_batch(tree: Tree) -> Tree:
    """A batch of one without its first dimension; raises ValueError where a tensor is none."""
    leaves, form = _flat(tree)
    for one in leaves:
        if isinstance(one, torch.Tensor) and (one.ndim == 0 or one.shape[0] != 1):
            raise ValueError(f"an output of shape {tuple(one.shape)} has no row for its one sample")
    return pytree.tree_unflatten([one[0] if isinstance(one, torch.Tensor) else one for one in leaves], form)


def elements(tree: Tree) -> int:
    """How many numbers there are, about."""
    return sum(one.numel() if isinstance(one, torch.Tensor) else 1 for one in _flat(tree)[0])


def plain(tree: Tree) -> Any:
    """As JSON holds it: tensors as lists; raises TypeError for what JSON has no word for."""
    if isinstance(tree, torch.Tensor):
        real = torch.view_as_real(tree) if tree.is_complex() else tree
        return real.tolist()
    if isinstance(tree, Mapping):
        return {str(name): plain(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(one) for one in tree]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if callable(item := getattr(tree, "tolist", None)):  # a numpy scalar or array
        return plain(item())
    raise TypeError(f"a result of type {type(tree).__name__} is no JSON: {str(tree)[:_TOO_LONG]}")


def json_bytes(value: Any) -> bytes:
    """JSON text; NaN and infinities, for which JSON has no word, are the texts nan, inf and -inf."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_worded(value), allow_nan=False, separators=(",", ":")).encode()


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _worded(one) for name, one in value.items()}
    return [_worded(one) for one in value] if isinstance(value, list) else value


MEDIA_TYPE = "application/vnd.safetensors"
_HEADER_BYTES = 64 << 10
_NAMES = 64
_DIMENSIONS = 16


def tensors_of(body: bytearray, most_elements: int) -> dict[str, torch.Tensor]:
    """The tensors of a body, which they share; raises RefusedError for anything that is not exactly right."""
    length = int.from_bytes(body[:8], "little")
    if not 2 <= length <= min(_HEADER_BYTES, len(body) - 8):
        raise wrong("the body is no safetensors file: its header does not fit it")
    try:
        header = canonical_json.loads(
            bytes(body[8 : 8 + length]), what="the header", limit_bytes=_HEADER_BYTES, depth=4
        )
    except DamagedError as error:
        raise wrong(f"the body is no safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise wrong("the body is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    if not 1 <= len(header) <= _NAMES:
        raise wrong(f"the body has {len(header)} tensors: send 1 to {_NAMES}")
    return _cut(body, 8 + length, header, most_elements)


def _cut(body: bytearray, data: int, header: Mapping[str, Any], most: int) -> dict[str, torch.Tensor]:
    found = {name: _entry(name, entry) for name, entry in header.items()}
    end, total = 0, 0
    tensors: dict[str, torch.Tensor] = {}
    for name, (element, shape, start, stop) in sorted(found.items(), key=lambda item: item[1][2:]):
        if start != end or stop - start != element.nbytes(shape):
            raise wrong(f"the bytes of {name[:60]!r} are not where its type, shape and neighbours put them")
        end, total = stop, total + math.prod(shape)
        if total > most:
            raise wrong(f"the body has more than {most} elements", 413)
        if data + stop > len(body):
            raise wrong(f"the bytes of {name[:60]!r} are not all there")
        tensors[name] = _tensor(body, data + start, element, shape)
    if data + end != len(body):
        raise wrong(f"the body has {len(body) - data - end} bytes behind its last tensor")
    return tensors


def _entry(name: str, entry: Any) -> tuple[ElementType, tuple[int, ...], int, int]:
    try:
        start, stop = entry["data_offsets"]
        shape, element = tuple(entry["shape"]), by_code(entry["dtype"])
        torch_dtype(element)
    except (KeyError, TypeError, ValueError, FormatError):
        raise wrong(f"the header says of {name[:60]!r} what cannot be") from None
    numbers = (start, stop, *shape)
    if len(shape) > _DIMENSIONS or not all(type(one) is int and 0 <= one < 2**40 for one in numbers):
        raise wrong(f"the header says of {name[:60]!r} what cannot be")
    return element, shape, start, stop


def _tensor(body: bytearray, at: int, element: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = element.nbytes(shape)
    if nbytes == 0:
        return torch.empty(shape, dtype=torch_dtype(element))
    raw = torch.frombuffer(body, dtype=torch.uint8, count=nbytes, offset=at)
    if element.name == "bool":
        return (raw != 0).reshape(shape)  # any other byte than 0 and 1 is no bool
    if at % element.itemsize:
        raw = raw.clone()
    return raw.view(torch_dtype(element)).reshape(shape)


def body_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file; raises FaultyAnswerError for element types that it cannot hold."""
    parts, entries = list[memoryview](), list[tuple[str, str, Sequence[int], int]]()
    for name, tensor in tensors.items():
        try:
            element = logical_dtype(tensor.dtype, name)
        except BlobError as error:
            raise FaultyAnswerError(str(error)) from None
        if element.raw:
            raise FaultyAnswerError(f"{name} is {element.name}, which safetensors cannot hold: ask for JSON")
        parts.append(stored_bytes(tensor, name))
        entries.append((name, element.code, tensor.shape, tensor.nbytes))
    return b"".join([safetensors_header(entries, metadata, 8), *parts])
