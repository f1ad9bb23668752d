"""What is served, with what answers for it; and the handler of a plain module.

Tensors of requests and answers are batches, rows, JSON, or the bytes of a safetensors file. Its header is
refused unless its entries lie one behind the other and fill the body: so no byte is read twice, and no shape
can promise more than was sent.
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


Say = Callable[[str], None]


class ServingHandler(Protocol):
    """What stands around a model: from what clients send to samples, to results, to what they get.

    `--handler module:Class` names a class that is made with `(module, signature)`. `ValueError` and
    `TypeError` of `decode` and `predict` refuse the sample and are told to the client.
    """

    def decode(self, sent: Any) -> Any:
        """A sample of what a client sent: JSON, or a dict of tensors where the body was binary."""

    def alike(self, sample: Any) -> Hashable:
        """Samples of which this is equal may be predicted in one batch."""

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        """A result for each; called in the one thread that computes, in inference mode."""

    def encode(self, result: Any) -> Any:
        """What a client gets: tensors, numbers, texts, None, and lists and dicts of these."""


@dataclass(frozen=True)
class Served:
    """What answers requests now. `key` tells epochs apart; `signature` is None where none is known."""

    name: str
    handler: ServingHandler = field(repr=False)
    epoch: int | None = None
    branch: int | None = None
    code_id: str | None = None
    signature: Signature | None = None
    key: Hashable = None
    about: dict[str, Any] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """What `/metadata` says."""
        told = {"run": self.name, "epoch": self.epoch, "branch": self.branch, "code_id": self.code_id}
        signature = self.signature.to_json() if self.signature is not None else None
        return {**told, "signature": signature, **self.about}


class ModelSource(Protocol):
    """Where what is served comes from."""

    def first(self) -> Served:
        """Load it; raises the errors of opening and loading."""

    def newer(self, served: Served) -> Served | None:
        """What is to take its place, loaded; None where nothing is. Raises errors, also temporary ones."""


class ModelSlot:
    """What is served now. Read by many threads, replaced by one; a reference is taken or replaced whole."""

    def __init__(self, served: Served) -> None:
        self.current = served
        self.draining = False


Sample = dict[str, torch.Tensor]
_ONLY = ""
"""The name of the only input of a module of which no signature is known."""


class TensorHandler:
    """Every step can be overridden alone. With a signature samples are compared with it and converted to it.

    Without one numbers become tensors of torch's default types, and what does not fit shows in `predict`.
    The first dimension of the signature's inputs is that of the batch.
    """

    def __init__(self, module: torch.nn.Module, signature: Signature | None = None) -> None:
        self.module, self.signature = module.eval(), signature
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = first.device if first is not None else torch.device("cpu")

    def decode(self, sent: Any) -> Sample:
        """Tensors of one sample, by name; raises ValueError for what does not fit the signature."""
        if self.signature is None:
            named = sent if isinstance(sent, Mapping) else {_ONLY: sent}
            if len(named) == 1:  # of one input the name does not matter
                named = {_ONLY: next(iter(named.values()))}
            return {name: tensor_of(one) for name, one in named.items()}
        specs = self.signature.inputs
        named = sent if isinstance(sent, Mapping) else {specs[0].name: sent}
        if isinstance(sent, Mapping) and len(specs) == 1 and specs[0].name not in named and len(named) == 1:
            named = {specs[0].name: next(iter(named.values()))}  # of one input the name does not matter
        if named.keys() != {spec.name for spec in specs}:
            raise ValueError(f"the inputs are {', '.join(spec.name for spec in specs)}: send these, by name")
        return {spec.name: fitted(named[spec.name], spec) for spec in specs}

    def alike(self, sample: Sample) -> Hashable:
        """Names, shapes and types."""
        return shape_of(sample)

    def predict(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """One call of the module for all of them."""
        inputs = {name: torch.stack([one[name] for one in samples]).to(self.device) for name in samples[0]}
        output = self.forward(inputs)
        try:
            return [without_batch(one) for one in rows(output, len(samples))]
        except ValueError as error:
            raise FaultyAnswerError(str(error)) from None

    def forward(self, inputs: Sample) -> Any:
        """Call the module: in the order of its signature, else one input as it is, several by name."""
        if self.signature is not None or _ONLY in inputs:
            return self.module(*inputs.values())
        return self.module(**inputs)

    def encode(self, result: Any) -> Any:
        """Outputs by the signature's names, where there are several."""
        outputs = self.signature.outputs if self.signature is not None else ()
        if isinstance(result, (list, tuple)) and len(result) == len(outputs):
            return {spec.name: one for spec, one in zip(outputs, result, strict=True)}
        return result


def tensor_of(sent: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of nested lists of numbers, or the one that was sent; raises ValueError."""
    if isinstance(sent, torch.Tensor):
        return sent
    try:
        return torch.tensor(sent, dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"no tensor: {str(error)[:120]}") from None


def fitted(sent: Any, spec: TensorSpec) -> torch.Tensor:
    """A sample's tensor of the type and shape that its input wants; raises ValueError."""
    try:
        found = converted(sent, spec)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    wanted = spec.shape[1:]
    if found.ndim != len(wanted) or any(
        isinstance(size, int) and size != there for size, there in zip(wanted, found.shape, strict=True)
    ):
        told = ", ".join(map(str, wanted))
        raise ValueError(f"{spec.name}: a sample has the shape ({told}), this has {tuple(found.shape)}")
    return found


def converted(sent: Any, spec: TensorSpec) -> torch.Tensor:
    """As the wanted type, where no number changes but by rounding; raises ValueError."""
    wanted = dtype_of(spec)
    if not isinstance(sent, torch.Tensor) and wanted.is_floating_point:
        return tensor_of(sent, wanted)
    found = tensor_of(sent)
    if found.dtype == wanted or found.numel() == 0:
        return found.to(wanted)
    if not torch.can_cast(found.dtype, wanted):
        raise ValueError(f"{_name(found.dtype)} is no {spec.dtype}")
    cast = found.to(wanted)
    if not (wanted.is_floating_point or wanted.is_complex) and not torch.equal(cast.to(found.dtype), found):
        raise ValueError(f"a number is out of the range of {spec.dtype}")
    return cast


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The element type that a signature names; raises UsageError for one that torch does not know."""
    try:
        return torch_dtype(by_name(spec.dtype))
    except FormatError as error:
        raise UsageError(f"the signature's {spec.name}: {error}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
