"""The whole state of a module under the names that its bare form has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Clone a module's state to the CPU; DTensors are gathered, which all ranks must do together.

    Names are those of the bare module: what torch's wrappers (DistributedDataParallel, torch.compile,
    activation checkpointing) put before or between them is taken off; a submodule that is itself called
    `module` keeps its name. Extra states that are no tensors are handed out as they are.
    """
    from torchrelay.checkpoint.archive.states import entries_of

    return {entry.name: _on_cpu(entry.value) for entry in entries_of(module)}


def _on_cpu(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True)
