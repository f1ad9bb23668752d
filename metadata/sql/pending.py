"""What the database has not been told yet, within bounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from torchrelay.metadata.notes import Note

MOST_ROWS = 100_000
"""Some tens of megabytes; what is older is given up first."""


class Pending:
    """Notes in their order, added by one thread and taken off by another when they are stored."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.given_up = 0
        """Notes that were too many to be remembered."""
        self._most = most_rows
        self._rows = 0
        self._notes: deque[Note] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, notes: Sequence[Note]) -> None:
        """Remember notes; at least the newest one stays."""
        with self._lock:
            self._notes.extend(notes)
            self._rows += sum(map(rows_in, notes))
            while self._rows > self._most and len(self._notes) > 1:
                self._rows -= rows_in(self._notes.popleft())
                self.given_up += 1

    def all(self) -> tuple[Note, ...]:
        """All that is remembered, the oldest first."""
        with self._lock:
            return tuple(self._notes)

    def stored(self, notes: Sequence[Note]) -> None:
        """Forget what was stored."""
        done = set(map(id, notes))
        with self._lock:
            self._notes = deque(note for note in self._notes if id(note) not in done)
            self._rows = sum(map(rows_in, self._notes))


def rows_in(note: Note) -> int:
    """About how many rows a note makes."""
    return 1 + sum(1 + len(times.secs) for times in note.times)
