"""What sort of blob an object is, as saves and loads see it.

Finer than `jobs.blobs.kind_of`, whose three words are those of a manifest: there modules, optimizers and
other objects with state are all `stateful`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.checkpoint.state.subclasses import is_wrapper
from torchrelay.errors import BlobError
from torchrelay.jobs.blobs import is_stateful
from torchrelay.jobs.containers import is_container


class Kind(Enum):
    """How the leaves of a blob come about; anything without a better kind is a value."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    TENSOR = "tensor"
    STATEFUL = "stateful object"
    CONTAINER = "container"
    VALUE = "value"


_TENSORS = (torch.Tensor, nn.Parameter)
RECREATABLE = (Kind.TENSOR, Kind.CONTAINER, Kind.VALUE)
"""What a load can make anew; everything else needs an object to load into."""


def kind_of(value: Any) -> Kind:
    """Say what sort of blob `value` is; whether it can be stored shows when its leaves are listed."""
    if type(value) in _TENSORS:  # the usual case by far, and asked for each of very many tensors
        return Kind.TENSOR
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, Optimizer):
        return Kind.OPTIMIZER if has_stock_state(value) else Kind.STATEFUL
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if is_stateful(value):
        return Kind.STATEFUL
    return Kind.CONTAINER if is_container(value) else Kind.VALUE


def has_stock_state(optimizer: Optimizer) -> bool:
    """Whether `.state` and `.param_groups` are all there is to an optimizer.

    False where a class or a hook has its own idea of the state dict: that one is then asked. Of torch's
    ZeroRedundancyOptimizer the state is that of its local part, which a rank has of its own.
    """
    base = Optimizer if (local := local_part(optimizer)) is optimizer else _zero_redundancy(optimizer)
    stock = type(optimizer).state_dict is base.state_dict
    stock_load = type(optimizer).load_state_dict is base.load_state_dict
    hooked = any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)
    return stock and stock_load and not hooked and (local is optimizer or has_stock_state(local))


def local_part(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: of a ZeroRedundancyOptimizer that of this rank, else itself."""
    inner = None if _zero_redundancy(optimizer) is Optimizer else getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _zero_redundancy(optimizer: Optimizer) -> type[Optimizer]:
    """The class of torch's that this is one of; Optimizer where it is none. Imports nothing."""
    for base in type(optimizer).__mro__:
        if base.__name__ == "ZeroRedundancyOptimizer" and base.__module__.startswith("torch.distributed."):
            return base
    return Optimizer


def is_recreatable(value: Any) -> bool:
    """Whether a load can make this without an object to load into."""
    return kind_of(value) in RECREATABLE and not (isinstance(value, torch.Tensor) and is_wrapper(value))


def check_recreatable(objects: Mapping[str, Any], registered: Collection[str]) -> None:
    """Refuse, by BlobError, objects that nobody registered and that no load could make again."""
    lost = [
        f"{name!r} ({type(value).__name__})"
        for name, value in objects.items()
        if name not in registered and not is_recreatable(value)
    ]
    if lost:
        raise BlobError(
            f"{', '.join(lost)} was put into the workspace by a task and is registered nowhere: a resumed"
            " run, which skips init, would have nothing to load into. Register it as a blob,"
            " job.blobs(name=object), or as a factory, job.blobs(name=lambda ctx: ...), which setup calls at"
            " every start"
        )


_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def optimizers_in(value: Any, depth: int = 4) -> Iterator[Optimizer]:
    """An optimizer, or those among the attributes of an object, in containers and objects there too."""
    if isinstance(value, Optimizer):
        yield value
    elif depth and not isinstance(value, torch.Tensor | nn.Module | LRScheduler | str | type):
        inner = value if isinstance(value, list | tuple) else getattr(value, "__dict__", value)
        if isinstance(inner, Mapping | list | tuple) and len(inner) < _MANY:
            for one in inner.values() if isinstance(inner, Mapping) else inner:
                yield from optimizers_in(one, depth - 1)


_MANY = 1000
"""Entries of what is data, and holds no optimizers."""
