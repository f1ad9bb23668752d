"""Metrics within an epoch, a point every so many steps: what one node logged between two of them, reduced.

Points are those of rank 0 alone: within an epoch ranks are not asked, and no device is waited for. A value on
a device is sent to memory of the host behind the device's work, and is a point once it is there. A window
ends at a multiple of its steps, and where the epoch ends or is saved inside: so no point hangs on what a
resume does not have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.session.metrics import Accumulator, Summary, on_device

if TYPE_CHECKING:
    from torchrelay.runners.session.metrics import Number

EVERY_SECS = 10.0
"""The time between two looks at what has come, while an epoch runs."""
Row = tuple[int, int, Mapping[str, float]]
"""Epoch, steps of all epochs, and the values there."""


@dataclass
class _Window:
    """What one metric has logged since its last point."""

    every: int
    index: int
    running: Accumulator

    @property
    def end(self) -> int:
        return (self.index + 1) * self.every


class _Sent:
    """A value and its weight on their way to the host."""

    def __init__(self, name: str, running: Accumulator) -> None:
        self.name, self._reduce = name, running.reduce
        self._numbers, self._arrived = running.numbers, None
        devices = [one.device for one in self._numbers if not isinstance(one, float)]
        if any(device.type == "cuda" for device in devices):
            self._numbers, self._arrived = _to_host(self._numbers)

    def here(self) -> bool:
        """Whether it can be read without a wait."""
        if self._arrived is not None:
            return bool(self._arrived.query())
        return all(isinstance(one, float) or one.device.type == "cpu" for one in self._numbers)

    def result(self) -> float | None:
        """The reduced value, None where nothing had a weight; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return Summary(self._reduce, *(float(one) for one in self._numbers)).result


def _to_host(numbers: tuple[Number, Number]) -> tuple[tuple[Any, Any], Any]:
    """Copies in memory of the host, and the event behind which they are whole."""
    import torch

    device = next(one.device for one in numbers if isinstance(one, torch.Tensor))
    pair = on_device(numbers, device, torch.float64)
    room = torch.empty(2, dtype=torch.float64, pin_memory=True)
    room.copy_(pair, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    return (room[0], room[1]), arrived


class StepPoints:
    """Those of a run, in one process. `deliver` takes rows by ascending steps, in the training's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.deliver: Callable[[Sequence[Row]], None] | None = None
        self._clock, self._looked = clock, clock()
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._seen = 0
        self._sent: deque[tuple[int, int, list[_Sent]]] = deque()

    def add(
        self, epoch: int, step: int, name: str, reduce: str, every: int, value: Number, weight: Number
    ) -> None:
        """Take a value that was logged in a step; hands over what has come, if that was not done for long."""
        with self._lock:
            self._end_before(epoch, step)
            window = self._windows.setdefault(name, _Window(every, (step - 1) // every, Accumulator(reduce)))
            if window.every != every:
                raise UsageError(
                    f"metric {name!r} is logged with every={window.every} and with every={every}: give one "
                    "name one interval"
                )
            window.running.add(value, weight)
        late = self._clock() - self._looked >= EVERY_SECS
        if late and threading.current_thread() is threading.main_thread():
            self.hand_over()

    def hand_over(self) -> None:
        """Deliver the points that have come; waits for no device."""
        self._looked = self._clock()
        rows: list[Row] = []
        with self._lock:
            while self._sent and all(one.here() for one in self._sent[0][2]):
                rows.append(_row(*self._sent.popleft()))
        self._deliver(rows)

    def end(self, epoch: int, step: int) -> None:
        """The epoch ends at this step, or is to be saved there: deliver everything."""
        with self._lock:
            self._end([(name, min(one.end, step)) for name, one in self._windows.items()], epoch)
            rows = [_row(*sent) for sent in self._sent]
            self._sent.clear()
        self._deliver(rows)

    def _deliver(self, rows: Sequence[Row]) -> None:
        told = [row for row in rows if row[2]]
        if told and self.deliver is not None:
            self.deliver(told)

    def _end_before(self, epoch: int, step: int) -> None:
        """End the windows that end before this step."""
        if step > self._seen:
            self._seen = step
            self._end([(name, one.end) for name, one in self._windows.items() if one.end < step], epoch)

    def _end(self, ending: Sequence[tuple[str, int]], epoch: int) -> None:
        for at in sorted({end for _, end in ending}):
            names = [name for name, end in ending if end == at]
            self._sent.append((epoch, at, [_Sent(name, self._windows.pop(name).running) for name in names]))


def _row(epoch: int, step: int, sent: Sequence[_Sent]) -> Row:
    found = {one.name: one.result() for one in sent}
    return epoch, step, {name: value for name, value in found.items() if value is not None}


def check_interval(every: Any, step: int) -> None:
    """Raise UsageError for what is no number of steps, and where no steps are counted."""
    if type(every) is not int or every < 1:
        raise UsageError(f"every is {every!r:.80}; it is a number of steps, from 1")
    if step < 1:
        raise UsageError(
            "every= counts the steps of ctx.steps(loader), and none was counted yet: loop over it, or log "
            "without every="
        )
