"""A copy of a model on the CPU, in evaluation mode: what exporting does to it nobody sees.

The model itself is only read, so that its mode, its device, its gradients, its buffers and its weights
are afterwards what they were, whatever fails. The price is the memory of a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay.checkpoint.state.names import innermost
from torchrelay.errors import UsageError


def own_copy(model: nn.Module) -> nn.Module:
    """The bare module, without torch's wrappers, copied; raises UsageError for what cannot be."""
    bare = bare_module(model)
    _check_whole(bare)
    known = {id(tensor): _copied(tensor) for tensor in _tensors(bare)}
    try:
        copied = copy.deepcopy(bare, dict[int, Any](known))
    except Exception as error:
        raise UsageError(
            f"{type(bare).__name__} cannot be copied, and the export works on a copy ({error}): "
            "give a model that copy.deepcopy takes"
        ) from error
    return copied.eval()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put back what the model does to its buffers, changed or replaced."""
    before = [(module, name, buffer, buffer if buffer is None else buffer.clone())
              for module in model.modules() for name, buffer in module._buffers.items()]  # fmt: skip
    try:
        yield
    finally:
        for module, name, buffer, values in before:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)


def bare_module(model: Any) -> nn.Module:
    """What torch's wrappers wrap; raises UsageError for what is no module."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{model!r:.80} is no torch.nn.Module: give the model itself")
    return innermost(model)


def _check_whole(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if hasattr(tensor, "full_tensor"):
            raise UsageError(
                f"{name} is sharded over ranks (DTensor): export a plain model that has loaded "
                "ctx.full_state_dict(module), or give OnnxExport build=, which makes one"
            )
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) or tensor.is_meta:
            raise UsageError(f"{name} has no values yet (lazy or meta): call the model once, or load it")


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that modules hold otherwise, such as computed weights."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
