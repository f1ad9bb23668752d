"""Hook into the steps of torch's optimizers: what each leaves behind, and a gate that may hold it back.

What a step leaves behind decides which gradients are saved, see `restore/gradients.py`. It is noted after
each step of any optimizer of torch.optim, by weak references.

Writers of registered tensors wait at the gate until late copies are complete: every step of an optimizer of
torch.optim, `load_state_dict` of what is being copied, and writes by torchrelay. There is one gate per
process; without copies it costs one test of an empty list.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchrelay.checkpoint.state.leaf import Leaf, Value, is_sharded, memory_of_shard
from torchrelay.checkpoint.state.module_leaves import parts_of
from torchrelay.checkpoint.state.names import Kind, kind_of, local_part, memory_place
from torchrelay.checkpoint.state.tensor_memory import is_plain_memory


class LastStep:
    """Gradients that an optimizer's last step used; made again when its parameters change."""

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
        """Held here, so that a live gradient has the same reference at every look."""
        self.versions: list[int] = []
        """Version counters at the step."""
        self.begins_anew: bool | None = None
        """Whether no step so far used a gradient of the step before; None before the second."""

    def note(self, parameters: list[torch.Tensor]) -> None:
        """Record the gradients that a step used."""
        found = [grad for grad in map(attrgetter("grad"), parameters) if grad is not None]
        if not self.plain:
            found = list(map(written_memory, found))
        grads, before = list(map(weakref.ref, found)), self.grads
        if before and self.begins_anew is not False:
            if len(grads) == len(before) == self.count:
                self.begins_anew = not any(map(is_, grads, before))
            else:
                self.begins_anew = set(map(id, before)).isdisjoint(map(id, grads))
        self.grads, self.versions = grads, list(map(attrgetter("_version"), found))
        for other in self.beside:
            # A nested step finds the same gradients as the outer one; else two optimizers alternate,
            # and each continues with what the other has left.
            known = dict(zip(map(id, other.grads), other.versions, strict=True))
            now = zip(map(id, grads), self.versions, strict=True)
            if any(known.get(key, version) != version for key, version in now):
                self.begins_anew = other.begins_anew = False

    def living(self) -> Iterator[tuple[torch.Tensor, int]]:
        """The live gradients, with their version counters."""
        found = ((one(), version) for one, version in zip(self.grads, self.versions, strict=True))
        return ((grad, version) for grad, version in found if grad is not None)


_SAMPLE_ELEMENTS = 1024
STEPS: dict[int, LastStep] = {}
_installed: list[Any] = []


def watch_steps() -> None:
    """Record from now on what the steps of optimizers leave behind; for the life of the process.

    It runs in every step: about 1 microsecond, and 0.25 for each parameter.
    """
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_stepped))
        _installed.append(register_optimizer_step_pre_hook(_find_writers))


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
        if next(_looks, None) is not None:
            _sampled[id(optimizer)] = _samples(parameters)
    try:
        step.note(parameters)
    except Exception:  # gradients of a kind that cannot be followed are saved
        step.grads, step.versions, step.begins_anew = [], [], False


Sample = tuple["weakref.ref[torch.Tensor]", torch.Tensor]

_sampled: dict[int, list[Sample]] = {}
"""Some elements of each parameter after the first step of an optimizer, until its second step."""

_looks = iter(range(256))
"""One for each optimizer: a program that makes one for every batch needs no more."""

_written: dict[int, weakref.ref[torch.Tensor]] = {}


def written_between_steps() -> set[int]:
    """Parameters, by id, that the program was seen to write between two steps of their optimizer.

    Only the first two steps of an optimizer in this process are compared. Values are, because torch does not
    count writes through `.data`.
    """
    return {key for key, one in _written.items() if one() is not None}


def _samples(parameters: Iterable[torch.Tensor]) -> list[Sample]:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []
    whole = ((one, written_memory(one)) for one in parameters)
    flat = ((one, memory.detach().view(-1)) for one, memory in whole if is_plain_memory(memory))
    return [
        (weakref.ref(one), memory[:: len(memory) // _SAMPLE_ELEMENTS + 1].clone()) for one, memory in flat
    ]


def _find_writers(optimizer: Optimizer, *_: Any) -> None:
    """Hook before each optimizer step."""
    before = _sampled.pop(id(optimizer), None) if _sampled else None
    if not before or torch.compiler.is_compiling():
        return
    alive = [(parameter, sample) for one, sample in before if (parameter := one()) is not None]
    now = {id(one()): sample for one, sample in _samples([parameter for parameter, _ in alive])}
    for parameter, sample in alive:
        later = now.get(id(parameter), sample)
        moved = later.device != sample.device
        if moved or not torch.equal(sample.view(torch.uint8), later.view(torch.uint8)):
            _written[id(parameter)] = weakref.ref(parameter)


def unsaved_optimizers(
    steps: Iterable[LastStep],
    names: Mapping[int, str],
    held: Iterable[Any],
    leaves: Iterable[Leaf],
    known: Container[Optimizer],
) -> Iterator[tuple[Optimizer, str]]:
    """Optimizers of `steps` that train tensors of these names, are not `known`, and whose state is not saved.

    Yields each with one such name; the memory of a leaf has one, too, as in a `state_dict()` that is a blob.
    An object of `held` saves its own state; with a `state_dict` also that of optimizers among its attributes,
    except modules and schedulers. So does any object with tensors of an optimizer's state among its leaves.
    """
    saved: set[int] = set()
    for one in held:
        saved.update((id(one), id(local_part(one)) if isinstance(one, Optimizer) else id(one)))
        if not isinstance(one, nn.Module | LRScheduler) and kind_of(one) is not Kind.OPTIMIZER:
            for value in getattr(one, "__dict__", {}).values():
                saved.update(map(id, value if isinstance(value, list | tuple) else [value]))
    for step in steps:
        optimizer = step.optimizer()
        if optimizer is None or id(optimizer) in saved or optimizer in known:
            continue
        own = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        contents = ((leaf.content, leaf.name) for leaf in leaves if own)
        stored = {memory_place(one): name for one, name in contents if not isinstance(one, Value)}
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        found = (names.get(id(one), stored.get(memory_place(one))) for one in trained)
        name = next((one for one in found if one is not None), None)
        if name is not None and own and stored.keys().isdisjoint(map(memory_place, own)):
            yield optimizer, name


def replaced_optimizer(
    steps: Iterable[LastStep], objects: Mapping[str, Any], names: Container[int]
) -> str | None:
    """Return the name of a registered optimizer that never stepped while one of `steps`, built alike, did.

    Then the program has built model and optimizer again. The other one is of the same class, and its tensors
    have the same shapes, but none of these `names`. None if any registered optimizer has stepped.
    """
    own = {name: one for name, one in objects.items() if isinstance(one, Optimizer)}
    if not own or any(id(part) in STEPS for one in own.values() for part in (one, local_part(one))):
        return None
    others = [one for step in steps if (one := step.optimizer()) is not None]
    strangers = [one for one in others if not any(key in names for key in _shapes(one))]
    for name, one in own.items():
        if any(
            type(one) is type(other) and [*_shapes(one).values()] == [*_shapes(other).values()]
            for other in strangers
        ):
            return name
    return None


def _shapes(optimizer: Optimizer) -> dict[int, torch.Size]:
    return {id(one): one.shape for group in optimizer.param_groups for one in group["params"]}


def is_left(grad: torch.Tensor, left: Mapping[int, int]) -> bool:
    """Whether a gradient is what a step left behind, not written since."""
    memory = written_memory(grad)
    known = left.get(id(memory))
    return known is not None and known == memory._version and not grad.requires_grad


def written_memory(grad: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counts writes: FSDP2 adds to the local part of a DTensor."""
    return memory_of_shard(grad) if is_sharded(grad) else grad


class PendingCopies(Protocol):
    """Copies that the gate waits for."""

    def pass_gate(self) -> None:
        """Return when the copies are complete and compared with their sources."""


_copying: list[PendingCopies] = []
_gated: list[Any] = []
if hasattr(os, "register_at_fork"):  # a child process has its own memory, which is not copied
    os.register_at_fork(after_in_child=_copying.clear)


def gate(*_: Any) -> None:
    """Wait until no copy is in flight. A plain function, so that copies of objects can share it."""
    for one in tuple(_copying):
        one.pass_gate()


def takes_gate(part: nn.Module) -> bool:
    """Whether a module's `load_state_dict` can wait at the gate; scripted ones take no hook."""
    return not isinstance(part, torch.jit.ScriptModule)


def close_gate(copying: PendingCopies) -> None:
    """Make writers wait for these copies from now on."""
    if not _gated:
        # For the life of the process: hooks cannot be removed while they run.
        _gated.append(register_optimizer_step_pre_hook(gate))
    _copying.append(copying)


def open_gate(copied: PendingCopies) -> None:
    """Release the writers that wait for these copies."""
    if copied in _copying:
        _copying.remove(copied)


class Guards:
    """Adds the gate to `load_state_dict` of optimizers and modules, and keeps it between saves.

    Most parts are the same at the next save. Hooks of an optimizer affect how its state is listed
    (`names.has_stock_state`), so those are removed when a save begins.
    """

    def __init__(self) -> None:
        self._parts: list[nn.Module] = []
        self._of_parts: list[Any] = []
        self._of_optimizers: list[Any] = []

    def put(self, objects: Iterable[object]) -> None:
        """Guard exactly these objects; not from within one of their hooks."""
        self.remove_from_optimizers()
        objects = list(objects)
        found = [part for one in objects if isinstance(one, nn.Module) for part in parts_of(one)]
        if len(found) != len(self._parts) or not all(map(is_, found, self._parts)):
            self.remove()
            try:
                for part in filter(takes_gate, found):
                    self._of_parts.append(part.register_load_state_dict_pre_hook(gate))
            except BaseException:  # all parts or none
                self.remove()
                raise
            self._parts = found  # last: an interrupted call is repeated
        for one in objects:
            if isinstance(one, Optimizer):
                self._of_optimizers.append(one.register_load_state_dict_pre_hook(gate))

    def remove_from_optimizers(self) -> None:
        """Remove the hooks of optimizers; not from within one of their hooks."""
        while self._of_optimizers:
            self._of_optimizers.pop().remove()

    def remove(self) -> None:
        """Remove all hooks; not from within one of them."""
        self._parts = []
        while self._of_parts:
            self._of_parts.pop().remove()
        self.remove_from_optimizers()
