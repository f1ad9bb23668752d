"""`data_parallel(module)`: DDP with bit-exact gradients after a restart.

With its default options DDP regroups its gradient buckets after the first step, in the order in which
gradients arrived (`Reducer::should_rebuild_buckets`: static graph or not `find_unused_parameters`). On three
or more ranks the position in a bucket determines the order in which the ranks' values are added. So the first
step after a resume would use other buckets than the uninterrupted run, and give other bits.

A reducer with `find_unused_parameters` never regroups. torch warns once per process if such a reducer finds
none; this module triggers and hides that warning.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.errors import UsageError

_ours: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def data_parallel(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap `module` in DDP with a fixed bucket order; in a single process return it unchanged.

    Costs one traversal of the autograd graph per step. Register `module` as a blob, not the wrapper.

    Args:
        module: The module.
        options: Options of DistributedDataParallel, except `find_unused_parameters=False` and
            `static_graph=True`, which regroup buckets.

    Returns:
        The wrapper, or `module` itself.

    Raises:
        UsageError: An option would regroup buckets.

    Example:
        model = data_parallel(net)
    """
    for name, refused in (("find_unused_parameters", False), ("static_graph", True)):
        if name in options and bool(options[name]) is refused:
            raise UsageError(
                f"data_parallel({name}={refused}) would regroup the buckets after the first step, and a "
                f"resumed run would end with other bits; leave {name} out"
            )
    if not (distributed.is_available() and distributed.is_initialized()):
        return module
    if distributed.get_world_size(options.get("process_group")) == 1:
        return module
    _spend_warning()
    wrapper = DistributedDataParallel(module, **{**options, "find_unused_parameters": True})
    _ours.add(wrapper)
    return wrapper


class _WarningContext(torch.autograd.Function):
    """Runs a call where torch converts C++ warnings to Python warnings."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        call()
        return tensor.clone()


@functools.cache
def _spend_warning() -> None:
    """Trigger and hide torch's one-time warning about a reducer that finds no unused parameters."""
    parameter = torch.zeros(1, requires_grad=True)
    group = distributed.distributed_c10d._get_default_group()
    with suppress(Exception), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        reducer = distributed.Reducer(  # type: ignore[attr-defined]
            [parameter], [[0]], [1 << 20], group, [False], 1 << 20, find_unused_parameters=True
        )
        used = [parameter * 1]
        _WarningContext.apply(torch.zeros(1), lambda: reducer.prepare_for_backward(used))


def broadcast_buffers() -> list[torch.Tensor]:
    """Return the buffers that trained DDP objects broadcast from rank 0 before each forward pass."""
    found = {id(one): one for one in (*_ours, *_all_instances())}
    return [
        buffer
        for one in found.values()
        if one.broadcast_buffers and one.require_forward_param_sync and _is_trained(one)
        for name, buffer in one.module.named_buffers()
        if name not in one.parameters_to_ignore
    ]


def _is_trained(wrapper: DistributedDataParallel) -> bool:
    """Return True if a backward pass has finished here: a copy has the flags, but not the reducer."""
    times = wrapper.reducer.get_backward_stats()
    return any(times) or wrapper._get_ddp_logging_data().get("iteration", 0) > 0


def bare_ddp_instances() -> list[DistributedDataParallel]:
    """Return the live DDP objects that regroup buckets: not created here, nor with the same option."""
    others = [one for one in _all_instances() if one not in _ours]
    return [one for one in others if one.static_graph or not one.find_unused_parameters]


def drop(*wrappers: nn.Module) -> None:
    """Forget these wrappers, or all of them without arguments."""
    for wrapper in wrappers or tuple(_ours):
        if isinstance(wrapper, DistributedDataParallel):
            _ours.discard(wrapper)


def _all_instances() -> list[DistributedDataParallel]:
    # type() instead of isinstance: some objects run code for __class__; a set instead of
    # issubclass: the heap of a training program has a million objects
    kinds = _with_subclasses(DistributedDataParallel)
    found = [thing for thing in gc.get_objects() if type(thing) in kinds]
    # no module: its constructor failed, or it is being collected
    return [thing for thing in found if "module" in getattr(thing, "_modules", {})]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
