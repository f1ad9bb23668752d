"""What a model takes and gives: names, shapes and element types, as a page that JSON can hold.

Packages, ONNX files and the server describe a model by it. A size that is not fixed is a name, and the same
name means the same size: ("batch", 3, 32, 32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Size = int | str


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `shape` has a number, or the name of a size that may differ; `dtype` as "float32"."""

    name: str
    shape: tuple[Size, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, found: Any) -> TensorSpec:
        """Back; UsageError for anything else."""
        match found:
            case {"name": str(name), "shape": [*shape], "dtype": str(dtype)} if all(map(_is_size, shape)):
                return cls(name, tuple(shape), dtype)
        raise UsageError(f"no description of a tensor: {str(found)[:200]}")


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in the order in which `forward` takes and gives them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"inputs": _listed(self.inputs), "outputs": _listed(self.outputs)}

    @classmethod
    def from_json(cls, found: Any) -> Signature:
        """Back; UsageError for anything else."""
        if not isinstance(found, Mapping) or not all(
            isinstance(found.get(side), list) for side in ("inputs", "outputs")
        ):
            raise UsageError(f"no description of inputs and outputs: {str(found)[:200]}")
        inputs, outputs = (tuple(map(TensorSpec.from_json, found[side])) for side in ("inputs", "outputs"))
        return cls(inputs, outputs)


def _is_size(size: object) -> bool:
    return isinstance(size, str) or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)


def _listed(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [spec.to_json() for spec in specs]
