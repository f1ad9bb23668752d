"""What the last steps of optimizers left behind: the gradients that they found, and how often written.

It is noted after each step of any optimizer of torch.optim, by weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchrelay.checkpoint.state.dtensors import is_sharded, memory_of_shard
from torchrelay.checkpoint.state.kinds import Kind, kind_of, local_part
from torchrelay.checkpoint.state.leaf import Leaf, Value
from torchrelay.checkpoint.state.tensor_names import memory_place


class LastStep:
    """What an optimizer's last step found; made once, and again where its parameters are others."""

    def __init__(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.parameters = frozenset(map(id, parameters))
        self.count = len(parameters)
        self.plain = all(type(one) in (torch.Tensor, nn.Parameter) for one in parameters)
        self.beside: list[LastStep] = [one for one in STEPS.values() if one.parameters & self.parameters]
        """Those of other optimizers of the same parameters."""
        for one in self.beside:
            one.beside.append(self)
        self.grads: list[weakref.ref[torch.Tensor]] = []
        """Held here, so that a gradient that lives has one and the same reference at every look."""
        self.versions: list[int] = []
        """How often each had been written to."""
        self.begins_anew: bool | None = None
        """Whether no step so far found a gradient of the step before; None before the second."""

    def note(self, parameters: list[torch.Tensor]) -> None:
        """Keep what a step has found."""
        found = [grad for grad in map(_grad_of, parameters) if grad is not None]
        if not self.plain:
            found = list(map(written_memory, found))
        grads, before = list(map(weakref.ref, found)), self.grads
        if before and self.begins_anew is not False:
            if len(grads) == len(before) == self.count:
                self.begins_anew = not any(map(is_, grads, before))
            else:
                self.begins_anew = set(map(id, before)).isdisjoint(map(id, grads))
        self.grads, self.versions = grads, list(map(_version_of, found))
        for other in self.beside:
            # A step within a step finds what the other one found; else one of the two optimizers goes on with
            # what the other has left behind.
            known = dict(zip(map(id, other.grads), other.versions, strict=True))
            now = zip(map(id, grads), self.versions, strict=True)
            if any(known.get(key, version) != version for key, version in now):
                self.begins_anew = other.begins_anew = False

    def living(self) -> Iterator[tuple[torch.Tensor, int]]:
        """The gradients that are still there, with how often each had been written."""
        found = ((one(), version) for one, version in zip(self.grads, self.versions, strict=True))
        return ((grad, version) for grad, version in found if grad is not None)


_grad_of, _version_of = attrgetter("grad"), attrgetter("_version")
STEPS: dict[int, LastStep] = {}
_installed: list[Any] = []


def watch_steps() -> None:
    """Note from now on what the steps of optimizers leave behind; for the life of the process.

    In every step, so it has to cost little: a microsecond, and a quarter of one for each parameter.
    """
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    groups = optimizer.param_groups
    parameters = (
        groups[0]["params"] if len(groups) == 1 else [one for group in groups for one in group["params"]]
    )
    step = STEPS.get(id(optimizer))
    if step is None or step.count != len(parameters) or step.optimizer() is not optimizer:
        for number in [number for number, one in STEPS.items() if one.optimizer() in (None, optimizer)]:
            del STEPS[number]
        step = STEPS[id(optimizer)] = LastStep(optimizer, parameters)
    try:
        step.note(parameters)
    except Exception:  # gradients of a kind that cannot be followed: what is not known is saved
        step.grads, step.versions, step.begins_anew = [], [], False


def unsaved_optimizers(
    names: Mapping[int, str], held: Iterable[Any], leaves: Iterable[Leaf], known: Container[Optimizer]
) -> Iterator[tuple[Optimizer, str]]:
    """Optimizers but `known` ones that have stepped tensors of these names, and whose state nobody saves.

    Each with such a name. An object of `held` saves its own, and with a `state_dict` that of the optimizers
    among its attributes; modules and schedulers do not. Whatever else has tensors of an optimizer's state
    among its leaves saves it as well.
    """
    saved: set[int] = set()
    for one in held:
        saved.update((id(one), id(local_part(one)) if isinstance(one, Optimizer) else id(one)))
        if not isinstance(one, nn.Module | LRScheduler) and kind_of(one) is not Kind.OPTIMIZER:
            for value in getattr(one, "__dict__", {}).values():
                saved.update(map(id, value if isinstance(value, list | tuple) else [value]))
    for step in STEPS.values():
        optimizer = step.optimizer()
        name = next((names[one] for one in step.parameters if one in names), None)
        if optimizer is None or name is None or id(optimizer) in saved or optimizer in known:
            continue
        own = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        stored = (leaf.content for leaf in leaves if not isinstance(leaf.content, Value))
        if own and {*map(memory_place, own)}.isdisjoint(map(memory_place, stored)):
            yield optimizer, name


def left_behind() -> dict[int, int]:
    """What steps left behind, by id, with how often each had been written."""
    return {
        id(grad): version for step in STEPS.values() if step.begins_anew for grad, version in step.living()
    }


def is_left(grad: torch.Tensor, left: Mapping[int, int]) -> bool:
    """Whether a gradient is what a step left behind, not written since."""
    memory = written_memory(grad)
    known = left.get(id(memory))
    return known is not None and known == memory._version and not grad.requires_grad


def written_memory(grad: torch.Tensor) -> torch.Tensor:
    """What is written: FSDP2 adds to the local part of a DTensor, whose own version stays."""
    return memory_of_shard(grad) if is_sharded(grad) else grad
