"""A counter that can be a blob."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torchrelay.errors import UsageError


class Counter:
    """A thread-safe integer that counts down to "done"; saved and loaded like any stateful blob.

    Raises UsageError for a `start` that is no integer or negative.
    """

    def __init__(self, start: int = 0, name: str | None = None) -> None:
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UsageError(f"a counter starts at an integer from 0 on, not at {start!r}")
        self.name = name
        self._start = start
        self._value = start
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Counter({self.name or ''}={self._value})"

    @property
    def value(self) -> int:
        """The value now; negative after more count-downs than the start allowed."""
        return self._value

    def count_down(self) -> bool:
        """Decrement, always; return True if the value was not above 0 before."""
        with self._lock:
            self._value -= 1
            return self._value < 0

    def count_up(self) -> int:
        """Increment; return the value from before."""
        with self._lock:
            self._value += 1
            return self._value - 1

    def reset(self, value: int | None = None) -> int:
        """Set to `value`, or to the start; return the value from before."""
        with self._lock:
            before, self._value = self._value, self._start if value is None else value
            return before

    def state_dict(self) -> dict[str, int]:
        """Return the value as a blob's state."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the value from a state; raises KeyError when it has none."""
        with self._lock:
            self._value = int(state["value"])
