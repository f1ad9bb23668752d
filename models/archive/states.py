"""States of a model by name, tied parameters, and what `compile` recorded about the model.

Names are those of torch's state dict without the prefixes of torch's wrappers (DistributedDataParallel,
torch.compile, activation checkpointing), so a wrapped and a bare model share archives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.state.flatten import ModuleStates
from torchrelay.checkpoint.state.leaf import Role
from torchrelay.checkpoint.state.module_leaves import ModuleEntry, module_entries, named_parameters
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.state.tensor_checks import admitted_in_place
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.models.archive.manifest import BUFFER, OTHER, PARAMETER, States, TensorToStore
from torchrelay.records import Json, dataclass


def get_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the live parameters by dotted name, tied ones once under their first name."""
    first: dict[int, tuple[str, Any]] = {}
    for name, parameter in named_parameters("m", checked(module), ModuleStates()):
        first.setdefault(id(parameter), (name.removeprefix("m."), parameter))
    return dict(first.values())


def get_states(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live parameters and persistent buffers by dotted name, tied ones under their first name.

    States other than tensors (`get_extra_state`) are not included; `save_states` stores these too.
    """
    first = TensorNames()
    entries = [entry for entry in entries_of(module) if isinstance(entry.value, torch.Tensor)]
    return {one.name: one.value for one in entries if first.earlier(one.value, one.name) is None}


def checked(module: Any) -> nn.Module:
    """Return the module; raises UsageError for anything else."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, not {type(module).__name__}")
    return module


def entries_of(module: nn.Module) -> list[ModuleEntry]:
    """Return the entries of the state dict by canonical name, in its order."""
    state = checked(module).state_dict(keep_vars=True)
    entries = module_entries("m", module, state)
    return [ModuleEntry(one.key, one.name.removeprefix("m."), one.value, one.role) for one in entries]


def unready(module: nn.Module) -> list[str]:
    """Return states without content: of uninitialised lazy modules, and on the meta device."""
    return [
        entry.name
        for entry in entries_of(module)
        if nn.parameter.is_lazy(entry.value)
        or (isinstance(entry.value, torch.Tensor) and entry.value.is_meta)
    ]


def states_of(module: nn.Module) -> States:
    """Return the states of a model; UsageError without content, BlobError if one cannot be stored."""
    if names := unready(module):
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UsageError(
            f"{len(names)} states have no content yet: {', '.join(names[:8])}{more}; "
            "torchrelay.compile(model, inputs) initialises lazy and meta modules"
        )
    tensors: dict[str, TensorToStore] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Json] = {}
    first = TensorNames()
    entries = entries_of(module)
    for entry in entries:
        value = entry.value
        if not isinstance(value, torch.Tensor):
            extra[entry.name] = values.encode(value, entry.name)
        elif (known := first.earlier(value, entry.name)) is not None:
            ties[entry.name] = known
        else:
            if hasattr(value, "full_tensor"):
                raise BlobError(
                    f"{entry.name} is a sharded tensor (DTensor): use a model with full tensors, "
                    "as from ctx.full_state_dict(module)"
                )
            role = {Role.PARAMETER: PARAMETER, Role.BUFFER: BUFFER}.get(entry.role, OTHER)  # type: ignore[arg-type]
            content = admitted_in_place(value, entry.name)
            tensors[entry.name] = TensorToStore(content, role, value.requires_grad)
    return States(tensors, ties, extra, tuple(entry.name for entry in entries))


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter with several names."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def tie_again(model: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """Tie the parameters with these names to the first one."""
    for names in shared:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, first)


@dataclass(frozen=True)
class Recorded:
    """Example inputs, dynamic sizes and signature of a compiled model."""

    inputs: Any
    dynamic: Any
    signature: Signature


_known: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def record(model: nn.Module, found: Recorded) -> None:
    """Store the record for as long as the model lives."""
    _known[model] = found


def recorded_call(model: nn.Module) -> Recorded | None:
    """Return the record of `compile` for this model; None if it was not called."""
    return _known.get(model)
