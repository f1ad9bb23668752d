"""The gate before everything that writes registered tensors: it opens when the late copies are complete.

It stands before every step of an optimizer of torch.optim, before `load_state_dict` of what is being
copied, and before the writes of torchrelay itself. There is one per process; without a copy under way
it costs a look at an empty list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchrelay.checkpoint.state.module_leaves import parts_of


class PendingCopies(Protocol):
    """What the gate waits for."""

    def pass_gate(self) -> None:
        """Return when the copies are complete and were compared with their sources."""


_copying: list[PendingCopies] = []
_installed: list[Any] = []
if hasattr(os, "register_at_fork"):  # the memory of a child is its own, and nobody copies there
    os.register_at_fork(after_in_child=_copying.clear)


def gate(*_: Any) -> None:
    """Wait until nothing is copied any more. A plain function, so that copies of objects can share it."""
    for one in tuple(_copying):
        one.pass_gate()


def takes_gate(part: nn.Module) -> bool:
    """Whether the gate can stand before a module's `load_state_dict`; scripted ones take no hook."""
    return not isinstance(part, torch.jit.ScriptModule)


def close(copying: PendingCopies) -> None:
    """Let everybody wait for these copies from now on."""
    if not _installed:
        # For the life of the process: hooks cannot be taken away while they run.
        _installed.append(register_optimizer_step_pre_hook(gate))
    _copying.append(copying)


def open_for(copied: PendingCopies) -> None:
    """These copies are complete: nobody waits for them any more."""
    if copied in _copying:
        _copying.remove(copied)


class Guards:
    """The gate before `load_state_dict` of optimizers and modules; these keep it from save to save.

    A module has many parts, and mostly the same ones at the next save. Hooks of an optimizer say how its
    state is to be listed (`kinds`), so those are gone when a save begins.
    """

    def __init__(self) -> None:
        self._parts: list[nn.Module] = []
        self._of_parts: list[Any] = []
        self._of_optimizers: list[Any] = []

    def put(self, objects: Iterable[object]) -> None:
        """Guard these objects and no others; not from within one of their hooks."""
        self.remove_from_optimizers()
        objects = list(objects)
        found = [part for one in objects if isinstance(one, nn.Module) for part in parts_of(one)]
        if len(found) != len(self._parts) or not all(map(is_, found, self._parts)):
            self._guard(found)
        for one in objects:
            if isinstance(one, Optimizer):
                self._of_optimizers.append(one.register_load_state_dict_pre_hook(gate))

    def _guard(self, parts: list[nn.Module]) -> None:
        """Guard all of them that can be, or leave them all as they were."""
        self.remove()
        try:
            for part in filter(takes_gate, parts):
                self._of_parts.append(part.register_load_state_dict_pre_hook(gate))
        except BaseException:
            self.remove()
            raise
        self._parts = parts  # last: what was interrupted is done anew

    def remove_from_optimizers(self) -> None:
        """Leave optimizers as they were; not from within one of their hooks."""
        _remove(self._of_optimizers)

    def remove(self) -> None:
        """Leave all objects as they were; not from within one of their hooks."""
        self._parts = []
        _remove(self._of_parts)
        _remove(self._of_optimizers)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
