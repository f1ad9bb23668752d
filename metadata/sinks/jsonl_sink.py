"""Metrics as JSON lines in one file that never holds what a rewind has undone.

The run's own `metrics.<generation>.jsonl` keep everything, abandoned epochs too; this file is for
programs that want the present truth and no rules.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.errors import StorageError
from torchrelay.metadata.note_text import read_note
from torchrelay.metadata.sinks.lines_file import append_text, foreign, read_whole_lines, replace_lines
from torchrelay.metadata.sinks.sink import TrackedRun
from torchrelay.metadata.sinks.step_lines import StepLines

FILE = "metrics.jsonl"
_BEGINS = '{"attempt": '
"""So does a line of ours, and what a crash left of the first one."""


class JsonlSink:
    """Writes `trackers/metrics.jsonl` in the run directory, or the file that it was given.

    A line has epoch, step, attempt, time (Unix seconds) and metrics; what JSON has no number for is text.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._attempt = 0
        self._last: int | None = None
        self._steps: StepLines | None = None

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Find the file, and leave out what a crash tore off."""
        self.path = self.path or run.trackers / FILE
        self._attempt = attempt
        self._steps = StepLines(self.path, _BEGINS, _step_of)
        rows = self.rows()
        if not rows and foreign(self.path, _BEGINS):
            raise StorageError(f"{self.path} holds no line of metrics by epoch: give a file of its own")
        replace_lines(self.path, map(_line, rows))
        self._last = max((row["epoch"] for row in rows), default=None)

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; where the epoch is there already its line is replaced."""
        row = self._row(epoch, step, metrics)
        if self._last is None or epoch > self._last:
            append_text(self._file, f"{_line(row)}\n")
            self._last = epoch
            return
        rows = [*(old for old in self.rows() if old["epoch"] != epoch), row]
        replace_lines(self._file, map(_line, sorted(rows, key=lambda one: one["epoch"])))

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Append points within an epoch to `metrics.steps.jsonl`, whose lines have the same form."""
        if self._steps is not None:
            self._steps.append(_line(self._row(*row)) for row in rows)

    def rewind(self, epoch: int, step: int) -> None:
        """Drop the lines of later epochs, and the points of later steps."""
        if self._steps is not None:
            self._steps.rewind(step)
        if self._last is not None and self._last > epoch:
            kept = [row for row in self.rows() if row["epoch"] <= epoch]
            replace_lines(self._file, map(_line, kept))
            self._last = max((row["epoch"] for row in kept), default=None)

    def close(self) -> None:
        """Every line stands on the disk by itself."""

    def rows(self) -> list[dict[str, Any]]:
        """What the file holds, in the order of epochs; lines that are none of ours are left out."""
        found = {}
        for line in read_whole_lines(self._file):
            try:
                row = read_note(line)
            except ValueError:
                continue
            if (
                isinstance(row, dict)
                and type(row.get("epoch")) is int
                and isinstance(row.get("metrics"), dict)
            ):
                found[row["epoch"]] = row
        return [found[epoch] for epoch in sorted(found)]

    def step_rows(self) -> list[dict[str, Any]]:
        """The points within epochs, in the order of steps."""
        lines = self._steps.lines() if self._steps is not None else []
        return [json.loads(line) for line in lines if _step_of(line) is not None]

    def _row(self, epoch: int, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "step": step,
            "attempt": self._attempt,
            "time": round(time.time(), 3),
            "metrics": {name: _number(value) for name, value in metrics.items()},
        }

    @property
    def _file(self) -> Path:
        if self.path is None:
            raise ValueError("the sink was not opened")
        return self.path


def _step_of(line: str) -> int | None:
    try:
        row = read_note(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) and isinstance(row.get("metrics"), dict) else None
    return step if type(step) is int else None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, allow_nan=False)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
