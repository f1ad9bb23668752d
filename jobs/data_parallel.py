"""`data_parallel(module)`: DDP whose sums are the same after a restart.

DDP adds gradients up in buckets. With its default options it regroups the buckets after the first
step, in the order in which gradients arrived (`Reducer::should_rebuild_buckets`: static graph or not
`find_unused_parameters`). On three and more ranks the place of a number in a bucket decides the order
in which the ranks' values are added, so a process that resumes takes its first step with other
buckets than the uninterrupted one did at that step, and ends with other bits. A reducer that looks for
unused parameters never regroups.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.errors import UsageError

_ours: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def data_parallel(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap `module` in DDP with the bucket order fixed from the first step; alone, return it as it is.

    `options` go to DistributedDataParallel; `find_unused_parameters=False` and `static_graph=True` would
    regroup and are a UsageError. The price is one walk over the graph per step, and a warning of torch in
    the first one that says so. Register `module` as a blob, not the wrapper.
    """
    _check(options)
    if not (distributed.is_available() and distributed.is_initialized()):
        return module
    if distributed.get_world_size(options.get("process_group")) == 1:
        return module
    wrapper = DistributedDataParallel(module, **{**options, "find_unused_parameters": True})
    _ours.add(wrapper)
    return wrapper


def wraps(module: nn.Module) -> DistributedDataParallel | None:
    """Return the living DDP object around `module`, whoever made it; None when there is none."""
    for wrapper in [*_ours, *_all_instances()]:
        if wrapper.module is module:
            return wrapper
    return None


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
