"""What is served, with what answers for it; and the handler of a plain module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

import torch

from torchrelay.checkpoint.format.dtypes import by_name, torch_dtype
from torchrelay.errors import FormatError, UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.records import dataclass
from torchrelay.tools.serving.serve import FaultyAnswerError
from torchrelay.tools.serving.tensors import rows, shape_of, without_batch

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
