"""What `compile` learned of models in this process, for `save`: nothing is written into the models."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from torchrelay.jobs.runtime import Signature
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Recorded:
    """A compiled model's example inputs, what of their sizes may differ, and its signature."""

    inputs: Any
    dynamic: Any
    signature: Signature


_known: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def record(model: nn.Module, found: Recorded) -> None:
    """Remember it for as long as the model lives."""
    _known[model] = found


def recorded_call(model: nn.Module) -> Recorded | None:
    """What `compile` learned of this model; None where it was not called."""
    return _known.get(model)
