"""Metrics as a CSV file for spreadsheets and pandas: a row per epoch, a column per metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.metadata.sinks.lines_file import append_text, foreign, read_whole_lines, replace_lines
from torchrelay.metadata.sinks.sink import TrackedRun
from torchrelay.metadata.sinks.step_lines import StepLines
from torchrelay.records import dataclass

FILE = "metrics.csv"
_OWN = ("epoch", "step")
_OF_STEPS = ("step", "epoch", "metric", "value")


@dataclass
class _Table:
    """What the file holds: the metrics' names in the order of their columns, and a row per epoch."""

    names: list[str] = field(default_factory=list)
    rows: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)


class CsvSink:
    """Writes `trackers/metrics.csv` in the run directory, or the file that it was given.

    The first two columns are epoch and step; a metric that an epoch lacks is an empty cell, and a metric
    that comes later is a new column at the right. Numbers are written so that they are read back exactly.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._names: list[str] = []
        self._last: int | None = None
        self._steps: StepLines | None = None

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Find the file, and leave out what a crash tore off."""
        self.path = self.path or run.trackers / FILE
        self._steps = StepLines(self.path, ",".join(_OF_STEPS), _step_of)
        if foreign(self.path, ",".join(_OWN)):
            raise StorageError(
                f"{self.path} is no table of metrics by epoch and step: give a file of its own"
            )
        self._write(self._read())

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; a new metric, or an epoch that is there already, writes the file anew."""
        cells = {name: repr(float(value)) for name, value in metrics.items()}
        if set(cells) <= set(self._names) and (self._last is None or epoch > self._last):
            append_text(self._file, _text(_cells(epoch, step, cells, self._names)))
            self._last = epoch
            return
        table = self._read()
        table.names += [name for name in cells if name not in table.names]
        table.rows[epoch] = (step, cells)
        self._write(table)

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Append points within an epoch to `metrics.steps.csv`, a row per step and metric."""
        if self._steps is not None:
            cells = [(at, one, name, value) for one, at, values in rows for name, value in values.items()]
            lines = [
                _text([str(at), str(one), name, repr(float(value))])[:-1] for at, one, name, value in cells
            ]
            self._steps.append(lines, ",".join(_OF_STEPS))

    def rewind(self, epoch: int, step: int) -> None:
        """Drop the rows of later epochs, and the points of later steps; columns stay."""
        if self._steps is not None:
            self._steps.rewind(step)
        if self._last is not None and self._last > epoch:
            table = self._read()
            table.rows = {one: row for one, row in table.rows.items() if one <= epoch}
            self._write(table)

    def close(self) -> None:
        """Every row stands on the disk by itself."""

    def rows(self) -> dict[int, dict[str, float]]:
        """The metrics that the file holds, by epoch."""
        rows = self._read().rows.items()
        return {epoch: {name: float(cell) for name, cell in cells.items()} for epoch, (_, cells) in rows}

    def _read(self) -> _Table:
        lines = csv.reader(f"{line}\n" for line in read_whole_lines(self._file))
        header = next(lines, None)
        if header is None or tuple(header[:2]) != _OWN:
            return _Table()
        table = _Table(header[2:])
        for line in lines:
            if len(line) >= 2 and line[0].isdecimal() and line[1].isdecimal():
                cells = zip(table.names, line[2:], strict=False)
                table.rows[int(line[0])] = (int(line[1]), {name: cell for name, cell in cells if cell})
        return table

    def _write(self, table: _Table) -> None:
        rows = [_cells(epoch, *table.rows[epoch], table.names) for epoch in sorted(table.rows)]
        replace_lines(self._file, (_text(row)[:-1] for row in [[*_OWN, *table.names], *rows]))
        self._names, self._last = table.names, max(table.rows, default=None)

    @property
    def _file(self) -> Path:
        if self.path is None:
            raise ValueError("the sink was not opened")
        return self.path


def _step_of(line: str) -> int | None:
    step = line.partition(",")[0]
    return int(step) if step.isdecimal() else None


def _cells(epoch: int, step: int, cells: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [str(epoch), str(step), *(cells.get(name, "") for name in names)]


def _text(row: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(
        row
    )  # with its own end of lines, so that cells with either half of it are quoted
    return out.getvalue().removesuffix("\r\n") + "\n"
