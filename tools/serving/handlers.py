"""Serving handlers, and conversion of tensors between batches, JSON and safetensors bodies.

A safetensors body is refused unless its tensors are contiguous and fill it, so that no byte is read twice and
no shape exceeds the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.dtypes import (
    ElementType,
    by_code,
    by_name,
    logical_dtype,
    safetensors_header,
    stored_bytes,
    torch_dtype,
)
from torchrelay.errors import BlobError, DamagedError, FormatError, UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.records import dataclass
from torchrelay.tools.serving.serve import FaultyAnswerError, wrong

Tree = Any
_TOO_LONG = 200


def _flat(tree: Tree) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a tree; unknown mappings count as dicts."""

    def known(leaf: Any) -> Any:
        return {name: known(one) for name, one in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_flatten(pytree.tree_map(known, tree))


def shape_of(tree: Tree) -> Hashable:
    """Return a key that is equal for trees that can be stacked: structure, shapes and element types."""
    leaves, form = _flat(tree)
    kinds = ((tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else object() for one in leaves)
    return form, *kinds  # other objects are unique


def joined(trees: Sequence[Tree]) -> Tree:
    """Concatenate trees of equal structure along the tensors' first dimension."""
    if len(trees) == 1:
        return trees[0]
    leaves, forms = zip(*map(_flat, trees), strict=True)
    return pytree.tree_unflatten([torch.cat(parts) for parts in zip(*leaves, strict=True)], forms[0])


def rows(tree: Tree, count: int) -> list[Tree]:
    """Split into a tree per row, each a batch of one; ValueError unless all tensors have `count` rows."""
    if count == 1:
        return [tree]
    leaves, form = _flat(tree)
    for one in leaves:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"an output is {one!r:.60}: expected tensors with a row per sample")
        if one.ndim == 0 or one.shape[0] != count:
            raise ValueError(
                f"an output of shape {tuple(one.shape)} does not have a row for each of {count} samples"
            )
    return [pytree.tree_unflatten([one[at : at + 1] for one in leaves], form) for at in range(count)]


def without_batch(tree: Tree) -> Tree:
    """Remove the first dimension of a batch of one; raises ValueError for other tensors."""
    leaves, form = _flat(tree)
    for one in leaves:
        if isinstance(one, torch.Tensor) and (one.ndim == 0 or one.shape[0] != 1):
            raise ValueError(f"an output of shape {tuple(one.shape)} does not have exactly one row")
    return pytree.tree_unflatten([one[0] if isinstance(one, torch.Tensor) else one for one in leaves], form)


def elements(tree: Tree) -> int:
    """Estimate the number of values."""
    return sum(one.numel() if isinstance(one, torch.Tensor) else 1 for one in _flat(tree)[0])


def plain(tree: Tree) -> Any:
    """Convert to JSON values, with tensors as lists; raises TypeError for unsupported types."""
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
    raise TypeError(f"a result of type {type(tree).__name__} is not JSON: {str(tree)[:_TOO_LONG]}")


def json_bytes(value: Any) -> bytes:
    """Encode as JSON; NaN and infinities become the strings nan, inf and -inf."""
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
    """Parse a safetensors body; tensors share its memory. Raises RefusedError for any inconsistency."""
    length = int.from_bytes(body[:8], "little")
    if not 2 <= length <= min(_HEADER_BYTES, len(body) - 8):
        raise wrong("the body is not a safetensors file: its header does not fit")
    try:
        header = canonical_json.loads(
            bytes(body[8 : 8 + length]), what="the header", limit_bytes=_HEADER_BYTES, depth=4
        )
    except DamagedError as error:
        raise wrong(f"the body is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise wrong("the body is not a safetensors file: its header is not an object")
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
            raise wrong(f"the bytes of {name[:60]!r} do not match its type, shape and neighbours")
        end, total = stop, total + math.prod(shape)
        if total > most:
            raise wrong(f"the body has more than {most} elements", 413)
        if data + stop > len(body):
            raise wrong(f"the bytes of {name[:60]!r} are incomplete")
        tensors[name] = _tensor(body, data + start, element, shape)
    if data + end != len(body):
        raise wrong(f"the body has {len(body) - data - end} extra bytes after its last tensor")
    return tensors


def _entry(name: str, entry: Any) -> tuple[ElementType, tuple[int, ...], int, int]:
    try:
        start, stop = entry["data_offsets"]
        shape, element = tuple(entry["shape"]), by_code(entry["dtype"])
        torch_dtype(element)
    except (KeyError, TypeError, ValueError, FormatError):
        raise wrong(f"the header has an invalid entry {name[:60]!r}") from None
    numbers = (start, stop, *shape)
    if len(shape) > _DIMENSIONS or not all(type(one) is int and 0 <= one < 2**40 for one in numbers):
        raise wrong(f"the header has an invalid entry {name[:60]!r}")
    return element, shape, start, stop


def _tensor(body: bytearray, at: int, element: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = element.nbytes(shape)
    if nbytes == 0:
        return torch.empty(shape, dtype=torch_dtype(element))
    raw = torch.frombuffer(body, dtype=torch.uint8, count=nbytes, offset=at)
    if element.name == "bool":
        return (raw != 0).reshape(shape)  # only the bytes 0 and 1 are bools
    return (raw.clone() if at % element.itemsize else raw).view(torch_dtype(element)).reshape(shape)


def body_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Encode as safetensors; raises FaultyAnswerError for unsupported element types."""
    parts, entries = list[memoryview](), list[tuple[str, str, Sequence[int], int]]()
    for name, tensor in tensors.items():
        try:
            element = logical_dtype(tensor.dtype, name)
        except BlobError as error:
            raise FaultyAnswerError(str(error)) from None
        if element.raw:
            raise FaultyAnswerError(
                f"{name} is {element.name}, which safetensors does not support: request JSON"
            )
        parts.append(stored_bytes(tensor, name))
        entries.append((name, element.code, tensor.shape, tensor.nbytes))
    return b"".join([safetensors_header(entries, metadata, 8), *parts])


Say = Callable[[str], None]


class ServingHandler(Protocol):
    """Protocol of handlers, which convert requests to samples and results to answers.

    `--handler module:Class` names a class that is created with `(module, signature)`. `ValueError` and
    `TypeError` of `decode` and `predict` reject the sample and are sent to the client.
    """

    def decode(self, sent: Any) -> Any:
        """Convert a client's value to a sample: JSON, or a dict of tensors of a binary body."""

    def alike(self, sample: Any) -> Hashable:
        """Return a key; samples with equal keys may share a batch."""

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Return a result per sample; called in the compute thread, in inference mode."""

    def encode(self, result: Any) -> Any:
        """Convert a result for the client: tensors, numbers, texts, None, and lists and dicts of these."""


@dataclass(frozen=True)
class Served:
    """The served model. `key` identifies the epoch; `signature` is None if unknown."""

    name: str
    handler: ServingHandler = field(repr=False)
    epoch: int | None = None
    branch: int | None = None
    code_id: str | None = None
    signature: Signature | None = None
    key: Hashable = None
    about: dict[str, Any] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `/metadata`."""
        known = {"run": self.name, "epoch": self.epoch, "branch": self.branch, "code_id": self.code_id}
        signature = self.signature.to_json() if self.signature is not None else None
        return {**known, "signature": signature, **self.about}


class ModelSource(Protocol):
    """Source of served models."""

    def first(self) -> Served:
        """Load the first model; raises the errors of opening and loading."""

    def newer(self, served: Served) -> Served | None:
        """Load a newer model; None if there is none. Raises errors, also temporary ones."""


class ModelSlot:
    """Holder of the served model: read by many threads, replaced atomically by one."""

    def __init__(self, served: Served) -> None:
        self.current = served
        self.draining = False


Sample = dict[str, torch.Tensor]
_ONLY = ""
"""Name of the single input of a module without a signature."""


class TensorHandler:
    """Handler of a module that takes and returns tensors; each step can be overridden.

    Args:
        module: The module; it is put into eval mode.
        signature: Names, types and shapes of the inputs, whose first dimension is the batch: samples are
            checked and converted. Without one, numbers become tensors of torch's default types.

    Example:
        handler = TensorHandler(model)
    """

    def __init__(self, module: torch.nn.Module, signature: Signature | None = None) -> None:
        self.module, self.signature = module.eval(), signature
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = first.device if first is not None else torch.device("cpu")

    def decode(self, sent: Any) -> Sample:
        """Convert to tensors by name; raises ValueError if they do not fit the signature."""
        if self.signature is None:
            named = sent if isinstance(sent, Mapping) else {_ONLY: sent}
            if len(named) == 1:  # the name of a single input does not matter
                named = {_ONLY: next(iter(named.values()))}
            return {name: tensor_of(one) for name, one in named.items()}
        specs = self.signature.inputs
        named = sent if isinstance(sent, Mapping) else {specs[0].name: sent}
        if isinstance(sent, Mapping) and len(specs) == 1 and specs[0].name not in named and len(named) == 1:
            named = {specs[0].name: next(iter(named.values()))}  # the name of a single input does not matter
        if named.keys() != {spec.name for spec in specs}:
            raise ValueError(f"the inputs are {', '.join(spec.name for spec in specs)}: send them by name")
        return {spec.name: fitted(named[spec.name], spec) for spec in specs}

    def alike(self, sample: Sample) -> Hashable:
        """Return names, shapes and types."""
        return shape_of(sample)

    def predict(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """Call the module once for all samples."""
        inputs = {name: torch.stack([one[name] for one in samples]).to(self.device) for name in samples[0]}
        output = self.forward(inputs)
        try:
            return [without_batch(one) for one in rows(output, len(samples))]
        except ValueError as error:
            raise FaultyAnswerError(str(error)) from None

    def forward(self, inputs: Sample) -> Any:
        """Call the module with inputs in signature order; without one, a single input or several by name."""
        if self.signature is not None or _ONLY in inputs:
            return self.module(*inputs.values())
        return self.module(**inputs)

    def encode(self, result: Any) -> Any:
        """Return the outputs, several by the signature's names."""
        outputs = self.signature.outputs if self.signature is not None else ()
        if isinstance(result, (list, tuple)) and len(result) == len(outputs):
            return {spec.name: one for spec, one in zip(outputs, result, strict=True)}
        return result


def tensor_of(sent: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert nested lists to a tensor; raises ValueError."""
    if isinstance(sent, torch.Tensor):
        return sent
    try:
        return torch.tensor(sent, dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not a tensor: {str(error)[:120]}") from None


def fitted(sent: Any, spec: TensorSpec) -> torch.Tensor:
    """Convert a sample's tensor to the type and shape of its input; raises ValueError."""
    try:
        found = converted(sent, spec)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    wanted = spec.shape[1:]
    if found.ndim != len(wanted) or any(
        isinstance(size, int) and size != there for size, there in zip(wanted, found.shape, strict=True)
    ):
        sizes = ", ".join(map(str, wanted))
        raise ValueError(f"{spec.name}: expected a sample of shape ({sizes}), not {tuple(found.shape)}")
    return found


def converted(sent: Any, spec: TensorSpec) -> torch.Tensor:
    """Convert to a type without changing values except by rounding; raises ValueError."""
    wanted = dtype_of(spec)
    if not isinstance(sent, torch.Tensor) and wanted.is_floating_point:
        return tensor_of(sent, wanted)
    found = tensor_of(sent)
    if found.dtype == wanted or found.numel() == 0:
        return found.to(wanted)
    if not torch.can_cast(found.dtype, wanted):
        raise ValueError(f"expected {spec.dtype}, not {_name(found.dtype)}")
    cast = found.to(wanted)
    if not (wanted.is_floating_point or wanted.is_complex) and not torch.equal(cast.to(found.dtype), found):
        raise ValueError(f"a number is out of the range of {spec.dtype}")
    return cast


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the torch type of a signature's element type; raises UsageError for unknown types."""
    try:
        return torch_dtype(by_name(spec.dtype))
    except FormatError as error:
        raise UsageError(f"the signature's {spec.name}: {error}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
