"""Make writers of registered tensors wait at a gate until late copies are complete.

It applies to every step of an optimizer of torch.optim, to `load_state_dict` of what is being copied, and to
writes by torchrelay. There is one gate per process; without copies it costs one test of an empty list.
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
    """Copies that the gate waits for."""

    def pass_gate(self) -> None:
        """Return when the copies are complete and compared with their sources."""


_copying: list[PendingCopies] = []
_installed: list[Any] = []
if hasattr(os, "register_at_fork"):  # a child process has its own memory, which is not copied
    os.register_at_fork(after_in_child=_copying.clear)


def gate(*_: Any) -> None:
    """Wait until no copy is in flight. A plain function, so that copies of objects can share it."""
    for one in tuple(_copying):
        one.pass_gate()


def takes_gate(part: nn.Module) -> bool:
    """Whether a module's `load_state_dict` can wait at the gate; scripted ones take no hook."""
    return not isinstance(part, torch.jit.ScriptModule)


def close(copying: PendingCopies) -> None:
    """Make writers wait for these copies from now on."""
    if not _installed:
        # For the life of the process: hooks cannot be removed while they run.
        _installed.append(register_optimizer_step_pre_hook(gate))
    _copying.append(copying)


def open_for(copied: PendingCopies) -> None:
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
            self._guard(found)
        for one in objects:
            if isinstance(one, Optimizer):
                self._of_optimizers.append(one.register_load_state_dict_pre_hook(gate))

    def _guard(self, parts: list[nn.Module]) -> None:
        """Guard all parts that can be, or none."""
        self.remove()
        try:
            for part in filter(takes_gate, parts):
                self._of_parts.append(part.register_load_state_dict_pre_hook(gate))
        except BaseException:
            self.remove()
            raise
        self._parts = parts  # last: an interrupted call is repeated

    def remove_from_optimizers(self) -> None:
        """Remove the hooks of optimizers; not from within one of their hooks."""
        _remove(self._of_optimizers)

    def remove(self) -> None:
        """Remove all hooks; not from within one of them."""
        self._parts = []
        _remove(self._of_parts)
        _remove(self._of_optimizers)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
