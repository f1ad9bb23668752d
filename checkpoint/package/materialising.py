"""Modules on the meta device get memory and the values that their class begins with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchrelay.checkpoint.archive.tying import shared_parameters, tie_again
from torchrelay.errors import UsageError


def materialise(model: nn.Module, device: str = "cpu") -> None:
    """Give content to every tensor on the meta device; models without one are left alone.

    Raises UsageError, before anything changes, for parts that have such tensors and no
    `reset_parameters`: what their values should be only their author knows.
    """
    parts = [(name, part) for name, part in model.named_modules() if _has_meta(part)]
    if unable := [name or type(part).__name__ for name, part in parts if not _can_reset(part)]:
        raise UsageError(
            f"{', '.join(unable[:8])} lie on the meta device and have no reset_parameters, so nobody "
            "knows their first values: make the model on a real device, or load states into it"
        )
    ties = shared_parameters(model)
    for _, part in parts:
        part.to_empty(device=device, recurse=False)
    tie_again(model, ties)
    for _, part in parts:
        part.reset_parameters()


def _has_meta(part: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _own(part))


def _own(part: nn.Module) -> Iterator[nn.Parameter]:
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)  # type: ignore[misc]


def _can_reset(part: nn.Module) -> bool:
    return callable(getattr(part, "reset_parameters", None))
