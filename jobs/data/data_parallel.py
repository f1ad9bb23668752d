"""`data_parallel(module)`: DDP whose sums are the same after a restart.

DDP adds gradients up in buckets. With its default options it regroups the buckets after the first
step, in the order in which gradients arrived (`Reducer::should_rebuild_buckets`: static graph or not
`find_unused_parameters`). On three and more ranks the place of a number in a bucket decides the order
in which the ranks' values are added, so a process that resumes takes its first step with other
buckets than the uninterrupted one did at that step, and ends with other bits. A reducer that looks for
unused parameters never regroups. Torch warns of one that finds none, once in a process: that warning is
spent on a reducer of ours, where nobody sees it.
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
    """Wrap `module` in DDP with the bucket order fixed from the first step; alone, return it as it is.

    `options` go to DistributedDataParallel; `find_unused_parameters=False` and `static_graph=True` would
    regroup and are a UsageError. The price is one walk over the graph per step. Register `module` as a blob,
    not the wrapper.
    """
    _check(options)
    if not (distributed.is_available() and distributed.is_initialized()):
        return module
    if distributed.get_world_size(options.get("process_group")) == 1:
        return module
    _spend_warning()
    wrapper = DistributedDataParallel(module, **{**options, "find_unused_parameters": True})
    _ours.add(wrapper)
    return wrapper


class _Heard(torch.autograd.Function):
    """Makes a call where torch turns warnings of its C++ code into those of Python."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        call()
        return tensor.clone()


@functools.cache
def _spend_warning() -> None:
    """Have torch warn, unseen, of a reducer that looks for unused parameters and finds none; it does so once.

    A version of torch that makes reducers otherwise shows its warning at the first step, and nothing else.
    """
    parameter = torch.zeros(1, requires_grad=True)
    group = distributed.distributed_c10d._get_default_group()
    with suppress(Exception), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        reducer = distributed.Reducer(  # type: ignore[attr-defined]
            [parameter], [[0]], [1 << 20], group, [False], 1 << 20, find_unused_parameters=True
        )
        used = [parameter * 1]
        _Heard.apply(torch.zeros(1), lambda: reducer.prepare_for_backward(used))


def broadcast_buffers() -> list[torch.Tensor]:
    """Return the buffers that living DDP objects send from rank 0 to all ranks before each forward pass.

    Those of a DDP object that no training runs through, such as a copy that averages, are not sent around.
    """
    senders = {id(one): one for one in (*_ours, *_all_instances()) if _sends_buffers(one)}
    return [
        buffer
        for one in senders.values()
        for name, buffer in one.module.named_buffers()
        if name not in one.parameters_to_ignore
    ]


def _sends_buffers(wrapper: DistributedDataParallel) -> bool:
    """Whether it is trained and its next forward pass sends buffers, as none does after one in no_grad."""
    return wrapper.broadcast_buffers and wrapper.require_forward_param_sync and _is_trained(wrapper)


def _is_trained(wrapper: DistributedDataParallel) -> bool:
    """Whether a backward pass ended here. Its flags do not say so: a copy has those of its original.

    A reducer is never copied. It has times of the last backward pass, except for a static graph, and its
    logger the number of forward passes before the last one.
    """
    times = wrapper.reducer.get_backward_stats()
    return any(times) or wrapper._get_ddp_logging_data().get("iteration", 0) > 0


def bare_ddp_instances() -> list[DistributedDataParallel]:
    """Return the living DDP objects that regroup their buckets: not made here, nor with our option."""
    return [
        wrapper
        for wrapper in _all_instances()
        if wrapper not in _ours and (wrapper.static_graph or not wrapper.find_unused_parameters)
    ]


def drop(*wrappers: nn.Module) -> None:
    """Forget these wrappers (all of them without arguments), so that nothing here keeps knowing them."""
    for wrapper in wrappers or tuple(_ours):
        if isinstance(wrapper, DistributedDataParallel):
            _ours.discard(wrapper)


def _all_instances() -> list[DistributedDataParallel]:
    # type() and not isinstance: some objects run code when asked for their __class__; a set and not
    # issubclass: the heap of a training program has a million objects
    kinds = _with_subclasses(DistributedDataParallel)
    found = [thing for thing in gc.get_objects() if type(thing) in kinds]
    # one that failed in its constructor, or is being collected, has no module
    return [thing for thing in found if "module" in getattr(thing, "_modules", {})]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _check(options: dict[str, Any]) -> None:
    for name, refused in (("find_unused_parameters", False), ("static_graph", True)):
        if name in options and bool(options[name]) is refused:
            raise UsageError(
                f"data_parallel({name}={refused}) would regroup the buckets after the first step, and a "
                f"resumed run would end with other bits; leave {name} out, or use "
                "DistributedDataParallel itself"
            )
