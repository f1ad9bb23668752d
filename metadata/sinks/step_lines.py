"""The points within epochs beside a sink's own file: `metrics.steps.jsonl` beside `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.metadata.sinks.lines_file import append_text, foreign, read_whole_lines, replace_lines


class StepLines:
    """A line per point, in the order of steps; the file is made by the first one.

    `begins` is what such a file begins with, `step_of` reads the step of a line (None: a line to keep).
    """

    def __init__(self, own: Path, begins: str, step_of: Callable[[str], int | None]) -> None:
        self.path = own.with_name(f"{own.stem}.steps{own.suffix}")
        self._begins, self._step_of = begins, step_of

    def append(self, lines: Iterable[str], header: str = "") -> None:
        """Add points behind those that are there; raises StorageError."""
        new = not self.path.exists()
        self._check()
        told = [header, *lines] if header and new else lines
        append_text(self.path, "".join(f"{line}\n" for line in told))

    def rewind(self, step: int) -> None:
        """Drop the points of later steps, and what a crash tore off; raises StorageError."""
        if self.path.exists():
            self._check()
            replace_lines(self.path, [line for line in self.lines() if (self._step_of(line) or 0) <= step])

    def lines(self) -> list[str]:
        """Whole lines that the file holds."""
        return read_whole_lines(self.path)

    def _check(self) -> None:
        if foreign(self.path, self._begins):
            raise StorageError(f"{self.path} holds no points by step: move it away")
