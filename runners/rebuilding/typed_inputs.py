"""Example inputs as texts: `tokens=int64[batch,time=16]`, `image=float32[batch,3,32,32]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

_TEXT = re.compile(r"(\w[\w.]*)=(\w+)\[([^\[\]]*)\]")
_NAMED_SIZE = 3
"""How large a named size of an example is, unless the text says it."""


@dataclass(frozen=True)
class TypedInputs:
    """Examples by name, and the names of their sizes, as `to_onnx` takes them."""

    tensors: dict[str, torch.Tensor]
    dynamic: dict[str, dict[int, str]]


def typed_inputs(texts: Sequence[str]) -> TypedInputs:
    """Tensors of these forms: numbers drawn from a normal distribution, zeros where they are whole.

    A size is a number, a name (3 in the example), or `name=size`. Raises UsageError.
    """
    tensors, dynamic = {}, {}
    draw = torch.Generator().manual_seed(0)
    for text in texts:
        found = _TEXT.fullmatch(text)
        dtype = getattr(torch, found[2], None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"--input {text!r}: give it as x=float32[batch,3,32,32], a size's name where it differs"
            )
        sizes = [_size(text, one.strip()) for one in found[3].split(",") if one.strip()]
        shape = [size for _, size in sizes]
        kind = dtype.is_floating_point or dtype.is_complex
        tensors[found[1]] = (
            torch.randn(shape, generator=draw).to(dtype) if kind else torch.zeros(shape, dtype=dtype)
        )
        dynamic[found[1]] = {dim: name for dim, (name, _) in enumerate(sizes) if name is not None}
    return TypedInputs(tensors, dynamic)


def _size(text: str, one: str) -> tuple[str | None, int]:
    name, equals, number = one.partition("=")
    if one.isascii() and one.isdecimal() and int(one[:9]) > 0:
        return None, int(one)
    if name.isidentifier() and (not equals or (number.isascii() and number.isdecimal() and int(number) > 0)):
        return name, int(number) if equals else _NAMED_SIZE
    raise UsageError(f"--input {text!r}: {one!r} is no size; give 32, batch, or time=16")
