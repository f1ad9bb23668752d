"""What is known of a model: its states by name, names that mean one parameter, what `compile` learned.

Names are those of torch's state dict without what torch's wrappers add to them (DistributedDataParallel,
torch.compile, activation checkpointing), so a wrapped and a bare model share archives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from torchrelay.models.archive.manifest import BUFFER, OTHER, PARAMETER, TensorToStore
from torchrelay.records import Json, dataclass


def get_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by dotted name, tied ones once under their first name; the live ones, not copies."""
    first: dict[int, tuple[str, Any]] = {}
    for name, parameter in named_parameters("m", checked(module), ModuleStates()):
        first.setdefault(id(parameter), (name.removeprefix("m."), parameter))
    return dict(first.values())


def get_states(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers (statistics of batch norm, say) by dotted name.

    Tied tensors stand once, under their first name; the live tensors, not copies. States that are no
    tensors (`get_extra_state`) are not among them; `save_states` keeps these too.
    """
    first = TensorNames()
    entries = [entry for entry in entries_of(module) if isinstance(entry.value, torch.Tensor)]
    return {one.name: one.value for one in entries if first.earlier(one.value, one.name) is None}


def checked(module: Any) -> nn.Module:
    """The module; raises UsageError for what is none."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"give a torch.nn.Module, not {type(module).__name__}")
    return module


def entries_of(module: nn.Module) -> list[ModuleEntry]:
    """The entries of the state dict by canonical name, in its order."""
    state = checked(module).state_dict(keep_vars=True)
    entries = module_entries("m", module, state)
    return [ModuleEntry(one.key, one.name.removeprefix("m."), one.value, one.role) for one in entries]


@dataclass(frozen=True)
class States:
    """All states of a model, ready to be stored."""

    tensors: Mapping[str, TensorToStore]
    ties: Mapping[str, str]
    extra: Mapping[str, Json]
    order: tuple[str, ...]


def unready(module: nn.Module) -> list[str]:
    """States without content: of lazy modules that have seen no input, and on the meta device."""
    return [
        entry.name
        for entry in entries_of(module)
        if nn.parameter.is_lazy(entry.value)
        or (isinstance(entry.value, torch.Tensor) and entry.value.is_meta)
    ]


def states_of(module: nn.Module) -> States:
    """The states of a model.

    Raises UsageError where some have no content yet, BlobError for what cannot be stored: sharded tensors,
    extra state that is no plain value.
    """
    if names := unready(module):
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UsageError(
            f"{len(names)} states have no content yet: {', '.join(names[:8])}{more}; "
            "torchrelay.compile(model, inputs) gives it to lazy and meta modules"
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
            tensors[entry.name] = _outgoing(entry)
    return States(tensors, ties, extra, tuple(entry.name for entry in entries))


def _outgoing(entry: ModuleEntry) -> TensorToStore:
    if hasattr(entry.value, "full_tensor"):
        raise BlobError(
            f"{entry.name} is a sharded tensor (DTensor): give a model with whole tensors "
            "(ctx.full_state_dict(module) makes them)"
        )
    role = {Role.PARAMETER: PARAMETER, Role.BUFFER: BUFFER}.get(entry.role, OTHER)  # type: ignore[arg-type]
    return TensorToStore(admitted_in_place(entry.value, entry.name), role, entry.value.requires_grad)


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def tie_again(model: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """Make the parameters of these names the one of the first."""
    for names in shared:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, first)


@dataclass(frozen=True)
class Recorded:
    """A compiled model's example inputs, what of their sizes may differ, and its signature."""

    inputs: Any
    dynamic: Any
    signature: Signature


_known: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def record(model: nn.Module, found: Recorded) -> None:
    """Remember it for as long as the model lives."""
    _known[model] = found


def recorded_call(model: nn.Module) -> Recorded | None:
    """What `compile` learned of this model; None where it was not called."""
    return _known.get(model)
