"""What the built-in run holds: every byte follows from its epoch, so that a mixture shows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

SMALL = {"moved": 700, "frozen": 3000}
"""Tensors beside the model: how many float32 they hold. The frozen one is the same in every epoch."""


class Mixed(AssertionError):  # noqa: N818 - what a check found, no error of ours
    """Something else was loaded than was saved, and nobody noticed."""


class Lost(AssertionError):  # noqa: N818
    """What was acknowledged is not there any more, or nothing goes on from it."""


class Blobs:
    """The objects of the job, and what they must hold after an epoch."""

    def __init__(self, large: int) -> None:
        self.model = nn.Linear(16, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sizes = {**SMALL, **({"large": large} if large else {})}
        self.tensors = {name: torch.zeros(size) for name, size in sizes.items()}

    def fill(self, epoch: int) -> None:
        """Make everything what it is after `epoch`."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            for name, tensor in self._all().items():
                tensor.copy_(_content(name, tensor, epoch))

    def check(self, epoch: int) -> None:
        """Raise Mixed unless everything is what it is after `epoch`."""
        compare(self._all(), epoch)

    def _all(self) -> dict[str, torch.Tensor]:
        found = dict(self.tensors)
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.data
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.state.model.{name}.{key}"] = value
        return found


def _content(name: str, like: torch.Tensor, epoch: int) -> torch.Tensor:
    if name.endswith(".step"):
        return torch.full_like(like, float(epoch + 1))
    start = sum(name.encode()) * 7.0 + (0 if name == "frozen" else epoch * 1000.0)
    return torch.arange(like.numel(), dtype=torch.float32).reshape(like.shape).add_(start)


def compare(found: Mapping[str, torch.Tensor], epoch: int) -> None:
    """Raise Mixed where a tensor is not that of `epoch`, bit for bit."""
    for name, tensor in found.items():
        if not torch.equal(tensor, _content(name, tensor, epoch)):
            raise Mixed(f"{name} is not that of epoch {epoch}")
