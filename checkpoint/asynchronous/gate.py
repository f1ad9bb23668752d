"""The gate before everything that writes registered tensors: it opens when the late copies are complete.

It stands before every step of an optimizer of torch.optim, before `load_state_dict` of what is being
copied, and before the writes of torchrelay itself. There is one per process; without a copy under way
it costs a look at an empty list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Behind(Protocol):
    """What the gate waits for."""

    def pass_gate(self) -> None:
        """Return when the copies are complete and were compared with their sources."""


_copying: list[Behind] = []
_installed: list[Any] = []
if hasattr(os, "register_at_fork"):  # the memory of a child is its own, and nobody copies there
    os.register_at_fork(after_in_child=_copying.clear)


def gate(*_: Any) -> None:
    """Wait until nothing is copied any more. A plain function, so that copies of objects can share it."""
    for one in tuple(_copying):
        one.pass_gate()


def close(copying: Behind) -> None:
    """Let everybody wait for these copies from now on."""
    if not _installed:
        # For the life of the process: hooks cannot be taken away while they run.
        _installed.append(register_optimizer_step_pre_hook(gate))
    _copying.append(copying)


def open_for(copied: Behind) -> None:
    """These copies are complete: nobody waits for them any more."""
    if copied in _copying:
        _copying.remove(copied)


def guard(objects: Iterable[Any]) -> list[Any]:
    """Put the gate before `load_state_dict` of modules and optimizers; returns handles that remove it."""
    handles: list[Any] = []
    for one in objects:
        if isinstance(one, Optimizer):
            handles.append(one.register_load_state_dict_pre_hook(gate))
        elif isinstance(one, nn.Module):
            handles += [part.register_load_state_dict_pre_hook(gate) for part in one.modules()]
    return handles
