"""What a line about the steps says: how long they and their data take, and what they came to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from torchrelay.records import dataclass

_MILLI = 1000.0


@dataclass
class Meter:
    """Measures a loop over batches; `line` is due every `interval` steps. Seconds, of this process.

    `samples` are those of all ranks, as far as this one knows: its own times their number.
    """

    interval: int
    ranks: int = 1
    clock: Callable[[], float] = time.perf_counter
    steps: int = 0
    _since: float = 0.0
    _data_secs: float = 0.0
    _samples: int = 0
    _values: dict[str, Any] = field(default_factory=dict)

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; what they take to come counts as data time."""
        source = iter(batches)
        self._begin()
        while True:
            asked = self.clock()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._data_secs += self.clock() - asked
            yield batch

    def step(self, samples: int, values: Mapping[str, Any]) -> str | None:
        """Count a step; the line where one is due. `values` are looked at only then."""
        self.steps += 1
        self._samples += samples * self.ranks
        if self.steps % self.interval:
            return None
        text = self._text(values)
        self._begin()
        return text

    def _begin(self) -> None:
        self._since, self._data_secs, self._samples = self.clock(), 0.0, 0

    def _text(self, values: Mapping[str, Any]) -> str:
        shown = [f"{name} {float(value):.6g}" for name, value in values.items()]  # waits for the device
        secs = max(self.clock() - self._since, 1e-9)
        each = secs / self.interval
        timing = (
            f"{each * _MILLI:.2f} ms/step, data {self._data_secs / self.interval * _MILLI:.2f} ms, "
            f"{self._samples / secs:.0f} samples/s"
        )
        return ", ".join([*shown, timing])
