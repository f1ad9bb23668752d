"""Running metrics for people who watch, without a wait for the device that has them.

Who looks asks; the next `log` of that metric sends its value to memory of the host behind the device's work,
and the next look finds it there. So what is seen is as old as the look before. Nothing asks the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from torchrelay.runners.reduction import Accumulator, Number


class Glimpses:
    """Of one node's metrics; `send` is called by the training, `look` by another thread."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._sent: dict[str, Tensor] = {}

    def send(self, name: str, accumulator: Accumulator) -> None:
        """Have the value come to the host where somebody asked for it; returns at once."""
        if not self._asked or name not in self._asked:
            return
        self._asked.discard(name)
        with suppress(RuntimeError):  # a device that is in no state for it must not fail the training
            self._send(name, accumulator.numbers)

    def _send(self, name: str, numbers: tuple[Number, Number]) -> None:
        import torch

        device = next(one.device for one in numbers if isinstance(one, torch.Tensor))
        pair = on_device(numbers, device, torch.float32)
        room = self._sent.get(name)
        if room is None:
            room = torch.full((2,), math.nan, dtype=torch.float32, pin_memory=device.type == "cuda")
            self._sent[name] = room
        room.copy_(pair, non_blocking=True)

    def look(self, running: Mapping[str, Accumulator]) -> dict[str, float]:
        """The running values that are here; the others are asked for."""
        found = {}
        for name, accumulator in running.items():
            value, weight = accumulator.numbers
            if _on_host(value) and _on_host(weight):
                found[name] = _result(accumulator.reduce, float(value), float(weight))
                continue
            self._asked.add(name)
            room = self._sent.get(name)
            if room is not None:
                found[name] = _result(accumulator.reduce, *room.tolist())
        return {name: number for name, number in found.items() if number is not None}


def on_device(numbers: tuple[Number, Number], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Both in one tensor there. Numbers of the host are filled in, for a copy would wait for the device."""
    import torch

    return torch.stack(
        [
            one.to(device, dtype)
            if isinstance(one, torch.Tensor)
            else torch.full((), one, dtype=dtype, device=device)
            for one in numbers
        ]
    )


def _on_host(number: Any) -> bool:
    return isinstance(number, float) or number.device.type == "cpu"


def _result(reduce: str, value: float, weight: float) -> float | None:
    """None where no value had a weight, or none has come yet."""
    if weight == 0 or math.isnan(weight):
        return None
    return value / weight if reduce == "mean" else value
